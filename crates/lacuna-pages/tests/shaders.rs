//! What is committed of the kernels, SPIR-V and Metal's language, is what their sources compile to. After
//! changing a kernel, or naga, run `LACUNA_WRITE_SHADERS=1 cargo test -p lacuna-pages --test shaders`.

use std::path::{Path, PathBuf};

use naga::back::{msl, spv};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{Module, ResourceBinding, ShaderStage};

const KERNELS: [&str; 2] = ["write_rows", "checksum"];

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(name)
}

fn parse(name: &str) -> (Module, ModuleInfo) {
    let path = folder("gpu/kernels").join(name).with_extension("wgsl");
    let source = std::fs::read_to_string(path).expect("a kernel");
    let module = naga::front::wgsl::parse_str(&source).expect("the kernel parses");
    let info = Validator::new(ValidationFlags::all(), Capabilities::IMMEDIATES)
        .validate(&module)
        .expect("the kernel is valid");
    (module, info)
}

fn spirv(name: &str) -> Vec<u8> {
    let (module, info) = parse(name);
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions {
        shader_stage: ShaderStage::Compute,
        entry_point: name.to_owned(),
    };
    let words = spv::write_vec(&module, &info, &options, Some(&entry)).expect("SPIR-V can say it");
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Buffers 0 and 1 are those of the source, 2 has its constants and 3 the bytes of 0 and 1, which is how
/// `metal/frames.rs` binds them.
fn metal(name: &str) -> Vec<u8> {
    let (module, info) = parse(name);
    let buffer = |slot| {
        let binding = ResourceBinding {
            group: 0,
            binding: slot,
        };
        let target = msl::BindTarget {
            buffer: Some(slot as u8),
            mutable: true,
            ..msl::BindTarget::default()
        };
        (binding, target)
    };
    let resources = msl::EntryPointResources {
        resources: [buffer(0), buffer(1)].into_iter().collect(),
        immediates_buffer: Some(2),
        sizes_buffer: Some(3),
    };
    let options = msl::Options {
        // What every system with Metal 4 compiles.
        lang_version: (3, 0),
        per_entry_point_map: [(name.to_owned(), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        // Loops end with numbers that the host gives, divisors are never zero, and everything in shared memory is
        // written before it is read.
        force_loop_bounding: false,
        emit_int_div_checks: false,
        zero_initialize_workgroup_memory: false,
        ..msl::Options::default()
    };
    let entry = msl::PipelineOptions {
        entry_point: Some((ShaderStage::Compute, name.to_owned())),
        ..msl::PipelineOptions::default()
    };
    let (text, written) =
        msl::write_string(&module, &info, &options, &entry).expect("Metal's language can say it");
    // What cannot be bound is left out without an error of the whole, and must keep its name.
    let names: Vec<_> = written.entry_point_names.into_iter().collect();
    assert_eq!(names, [Ok(name.to_owned())]);
    text.into_bytes()
}

fn compare(path: &Path, compiled: &[u8]) {
    if std::env::var_os("LACUNA_WRITE_SHADERS").is_some() {
        std::fs::write(path, compiled).expect("the folder can be written to");
    }
    let same = std::fs::read(path).is_ok_and(|committed| committed == compiled);
    let name = path.display();
    assert!(
        same,
        "{name} is not what its source compiles to; see the top of this test"
    );
}

#[test]
fn the_committed_spirv_is_what_its_source_compiles_to() {
    for name in KERNELS {
        let path = folder("vulkan/kernels").join(name).with_extension("spv");
        compare(&path, &spirv(name));
    }
}

#[test]
fn the_committed_metal_is_what_its_source_compiles_to() {
    for name in KERNELS {
        let path = folder("metal/kernels").join(name).with_extension("metal");
        compare(&path, &metal(name));
    }
}
