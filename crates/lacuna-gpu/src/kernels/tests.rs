//! The committed SPIR-V is what its source compiles to. After changing a kernel, or naga, run
//! `LACUNA_WRITE_SHADERS=1 cargo test -p lacuna-gpu --lib kernels`.

use std::path::Path;

use naga::back::{msl, spv};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

use super::*;

fn parse(module: &Module) -> (naga::Module, ModuleInfo) {
    let source = module.sources.concat();
    let parsed = naga::front::wgsl::parse_str(&source);
    let parsed =
        parsed.unwrap_or_else(|error| panic!("{}: {}", module.name, error.emit_to_string(&source)));
    let info = Validator::new(
        ValidationFlags::all(),
        Capabilities::IMMEDIATES | Capabilities::SHADER_FLOAT16_IN_FLOAT32,
    )
    .validate(&parsed)
    .unwrap_or_else(|error| panic!("{}: {}", module.name, error.emit_to_string(&source)));
    (parsed, info)
}

fn entry(module: &Module) -> String {
    module.entry.to_str().expect("ASCII").to_owned()
}

/// SPIR-V that every device of Vulkan 1.2 takes: no capability beyond shaders, and those given.
fn compile(module: &Module, more: &[spv::Capability]) -> Vec<u8> {
    let (parsed, info) = parse(module);
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::empty(),
        capabilities: Some(
            [&[spv::Capability::Shader], more]
                .concat()
                .into_iter()
                .collect(),
        ),
        // The device sees to what is beyond a window, and divisors are never zero.
        bounds_check_policies: BoundsCheckPolicies::default(),
        emit_int_div_checks: false,
        // Loops end with numbers that the host gives, and everything in shared memory is written before it is read.
        force_loop_bounding: false,
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        ..spv::Options::default()
    };
    let entry = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: entry(module),
    };
    let words = spv::write_vec(&parsed, &info, &options, Some(&entry)).expect("SPIR-V can say it");
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// The kernel in Metal's language, with the slots that buffers have in the source, then one for constants and
/// one for the lengths of buffers.
fn metal(module: &Module) -> String {
    let (parsed, info) = parse(module);
    let bindings = parsed.global_variables.iter();
    let bindings: Vec<_> = bindings.filter_map(|(_, it)| it.binding).collect();
    let slots = bindings.len() as u8;
    let target = |binding: naga::ResourceBinding| {
        let target = msl::BindTarget {
            buffer: Some(binding.binding as u8),
            mutable: true,
            ..msl::BindTarget::default()
        };
        (binding, target)
    };
    let resources = msl::EntryPointResources {
        resources: bindings.into_iter().map(target).collect(),
        immediates_buffer: Some(slots),
        sizes_buffer: Some(slots + 1),
    };
    let options = msl::Options {
        lang_version: (3, 0),
        per_entry_point_map: [(entry(module), resources)].into_iter().collect(),
        fake_missing_bindings: false,
        bounds_check_policies: BoundsCheckPolicies::default(),
        emit_int_div_checks: false,
        force_loop_bounding: false,
        zero_initialize_workgroup_memory: false,
        ..msl::Options::default()
    };
    let pipeline = msl::PipelineOptions {
        entry_point: Some((naga::ShaderStage::Compute, entry(module))),
        ..msl::PipelineOptions::default()
    };
    let (text, written) = msl::write_string(&parsed, &info, &options, &pipeline)
        .unwrap_or_else(|error| panic!("{}: {error}", module.name));
    // What cannot be bound is left out without an error of the whole, and must keep its name.
    let names: Vec<_> = written.entry_point_names.into_iter().collect();
    assert_eq!(names, [Ok(entry(module))], "{}", module.name);
    text
}

fn modules() -> impl Iterator<Item = &'static Module> {
    let products = PRODUCTS.iter();
    let products = products.flat_map(|(_, modules)| {
        [
            &modules.few,
            &modules.many,
            &modules.few_of_experts,
            &modules.many_of_experts,
        ]
    });
    let others = [
        &NORM,
        &PREPARE,
        &HEADS,
        &QUANTIZE,
        &ROTATE,
        &STORE,
        &ATTEND,
        &MERGE,
        &ELEMENTWISE,
        &COLUMNS,
        &MAGNITUDE,
        &LIKELIEST,
        &ROUTE,
        &BANDS,
        &EVERY,
        &COMBINE,
        &ATTEND_MANY,
        &ATTEND_WORDS,
        &STORE_BLOCKS,
        &HADAMARD,
        &CONVOLVE,
        &SCAN,
    ];
    others.into_iter().chain(products)
}

#[test]
fn the_committed_spirv_is_what_its_source_compiles_to() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels/spirv");
    for module in modules() {
        compare(&folder, module, module.code, &[]);
        if let Some(dotted) = module.dotted {
            let more = [
                spv::Capability::DotProduct,
                spv::Capability::DotProductInput4x8BitPacked,
            ];
            compare(&folder.join("dotted"), module, dotted, &more);
        }
    }
}

/// Nothing of it is committed, since nothing runs it: it is what an executor on Metal would be made from.
#[test]
fn every_kernel_can_be_said_in_metals_language() {
    for module in modules() {
        let text = metal(module);
        let kernel = format!("kernel void {}(", entry(module));
        assert!(text.contains(&kernel), "{}: {text}", module.name);
    }
}

fn compare(folder: &Path, module: &Module, code: &[u8], more: &[spv::Capability]) {
    let compiled = compile(module, more);
    if std::env::var_os("LACUNA_WRITE_SHADERS").is_some() {
        let path = folder.join(module.name).with_extension("spv");
        std::fs::write(path, &compiled).expect("the folder can be written to");
        return;
    }
    assert!(
        code == compiled,
        "{}.spv is not what its sources compile to; see the top of this test",
        module.name
    );
}
