//! The committed SPIR-V is what its source compiles to. After changing a kernel, or naga, run
//! `LACUNA_WRITE_SHADERS=1 cargo test -p lacuna-pages --test vulkan_shaders`.

use std::path::Path;

use naga::back::spv;
use naga::valid::{Capabilities, ValidationFlags, Validator};

fn compile(source: &str, name: &str) -> Vec<u8> {
    let module = naga::front::wgsl::parse_str(source).expect("the kernel parses");
    let info = Validator::new(ValidationFlags::all(), Capabilities::IMMEDIATES)
        .validate(&module)
        .expect("the kernel is valid");
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: name.to_owned(),
    };
    let words = spv::write_vec(&module, &info, &options, Some(&entry)).expect("SPIR-V can say it");
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

#[test]
fn the_committed_spirv_is_what_its_source_compiles_to() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/vulkan/kernels");
    for name in ["write_rows", "checksum"] {
        let source = std::fs::read_to_string(folder.join(name).with_extension("wgsl")).unwrap();
        let compiled = compile(&source, name);
        let committed = folder.join(name).with_extension("spv");
        if std::env::var_os("LACUNA_WRITE_SHADERS").is_some() {
            std::fs::write(&committed, &compiled).unwrap();
        }
        let same = std::fs::read(&committed).unwrap() == compiled;
        assert!(
            same,
            "{name}.spv is not what {name}.wgsl compiles to; see the top of this test"
        );
    }
}
