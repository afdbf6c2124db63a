//! The committed SPIR-V is what its source compiles to. After changing a kernel, or naga, run
//! `LACUNA_WRITE_SHADERS=1 cargo test -p lacuna-gpu --lib kernels`.

use std::path::Path;

use naga::back::{msl, spv};
use naga::proc::BoundsCheckPolicies;
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};

use super::*;

/// What a kernel that looks pages up may do: choose among an array of heaps as long as the device says, each thread its own.
const LOOKUP: [spv::Capability; 4] = [
    spv::Capability::StorageBufferArrayDynamicIndexing,
    spv::Capability::ShaderNonUniform,
    spv::Capability::RuntimeDescriptorArray,
    spv::Capability::StorageBufferArrayNonUniformIndexing,
];

fn parse(module: &Module) -> (naga::Module, ModuleInfo) {
    let source = module.sources.concat();
    let parsed = naga::front::wgsl::parse_str(&source);
    let parsed =
        parsed.unwrap_or_else(|error| panic!("{}: {}", module.name, error.emit_to_string(&source)));
    let info = Validator::new(
        ValidationFlags::all(),
        Capabilities::IMMEDIATES
            | Capabilities::SHADER_FLOAT16_IN_FLOAT32
            | Capabilities::STORAGE_BUFFER_BINDING_ARRAY
            | Capabilities::STORAGE_BUFFER_BINDING_ARRAY_NON_UNIFORM_INDEXING,
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
    let mut words =
        spv::write_vec(&parsed, &info, &options, Some(&entry)).expect("SPIR-V can say it");
    declare(&mut words, more);
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Adds those of `capabilities` that the SPIR-V does not declare: naga leaves out what an array of buffers takes.
fn declare(words: &mut Vec<u32>, capabilities: &[spv::Capability]) {
    const HEADER_WORDS: usize = 5;
    // Two words, and the number of the instruction.
    const DECLARE: u32 = 2 << 16 | 17;
    let declared = words[HEADER_WORDS..].chunks_exact(2);
    let declared = declared.take_while(|instruction| instruction[0] == DECLARE);
    let declared: Vec<u32> = declared.map(|instruction| instruction[1]).collect();
    let end = HEADER_WORDS + 2 * declared.len();
    let missing = capabilities.iter().map(|&capability| capability as u32);
    let missing = missing.filter(|capability| !declared.contains(capability));
    let missing: Vec<u32> = missing
        .flat_map(|capability| [DECLARE, capability])
        .collect();
    words.splice(end..end, missing);
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
        &QUANTIZE,
        &ROTATE,
        &MERGE,
        &ELEMENTWISE,
        &COLUMNS,
        &MAGNITUDE,
        &LIKELIEST,
        &TOP_K,
        &ROUTE,
        &BANDS,
        &EVERY,
        &COMBINE,
        &HADAMARD,
    ];
    let flat = of_rows().into_iter().map(|modules| &modules.flat);
    others.into_iter().chain(flat).chain(products)
}

fn of_rows() -> [&'static RowModules; 8] {
    [
        &HEADS,
        &STORE,
        &ATTEND,
        &ATTEND_MANY,
        &ATTEND_WORDS,
        &STORE_BLOCKS,
        &CONVOLVE,
        &SCAN,
    ]
}

#[test]
fn the_committed_spirv_is_what_its_source_compiles_to() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/kernels/spirv");
    for module in modules() {
        compare_both(&folder, module, &[]);
    }
    for modules in of_rows() {
        compare_both(&folder, &modules.lookup, &LOOKUP);
    }
}

/// Without products of packed bytes by one instruction, and with them if there are such.
fn compare_both(folder: &Path, module: &Module, more: &[spv::Capability]) {
    compare(folder, module, module.code, more);
    if let Some(dotted) = module.dotted {
        let dots = [
            spv::Capability::DotProduct,
            spv::Capability::DotProductInput4x8BitPacked,
        ];
        let more = [&dots, more].concat();
        compare(&folder.join("dotted"), module, dotted, &more);
    }
}

/// Nothing of it is committed, since nothing runs it: it is what an executor on Metal would be made from. Pages are mapped
/// there, so kernels that look them up are left out.
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
