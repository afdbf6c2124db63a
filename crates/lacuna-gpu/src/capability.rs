//! What the device can do. Pure: a model is gone through before a byte of it is brought anywhere.

use std::num::NonZeroUsize;

use lacuna_kernels::{DType, ElementType, RopeStyle};
use lacuna_kv::{Geometry, KvPolicy, Layout, Side, ValueRows};
use lacuna_models::program::{Lookup, Op, Step};
use lacuna_models::spec::{Activation, Gating, Mask};
use lacuna_models::{ExecutorError, Model};
use lacuna_pages::ByteLength;
use lacuna_pages::device::Location;
use lacuna_pages::vulkan::PageTable;

use crate::kernels::{HADAMARD_ELEMENTS, MOST_EXPERTS, MOST_STATE_ROWS, PARTITION, products};
use crate::part::Part;

/// What the kernels call an element type of KV rows.
pub(crate) fn element_code(element: ElementType) -> Option<u32> {
    match element {
        ElementType::F32 => Some(0),
        ElementType::F16 => Some(1),
        ElementType::Bf16 => Some(2),
        ElementType::Q8_0 => Some(3),
        _ => None,
    }
}

/// What the kernels call an activation.
pub(crate) fn activation_code(activation: Activation) -> Option<u32> {
    match activation {
        Activation::Silu => Some(0),
        Activation::GeluTanh => Some(1),
        Activation::Relu => Some(2),
        Activation::ReluSquared => Some(3),
        Activation::Sigmoid => Some(4),
        Activation::GeluErf => Some(5),
        Activation::Tanh => Some(6),
        Activation::Softplus => Some(7),
        _ => None,
    }
}

/// What the kernels call a mask, and how far it reaches.
pub(crate) fn mask_code(mask: Mask) -> Option<(u32, u32)> {
    let reach = |rows: usize| u32::try_from(rows).unwrap_or(u32::MAX);
    match mask {
        Mask::Causal => Some((0, 0)),
        Mask::Window(rows) => Some((1, reach(rows.get()))),
        Mask::Chunk(rows) => Some((2, reach(rows.get()))),
        Mask::Full | Mask::Around(_) => None,
    }
}

/// The bytes of a buffer that kernels can be shown at once on every device: Vulkan asks for as many.
const LEAST_WINDOW: u64 = 128 << 20;

/// A policy as the device has it. Without pages all memory is there from the start. With them, sparse without a layout
/// has layers whose rows are alike side by side, as many as kernels can be shown a partition of: a call that changes page
/// tables costs as much as a dozen kernels, and more the more buffers change; with layers in one, a step changes two. Beside
/// layers of the processor's, so many are together as both have whole groups of: a page of one layer's rows has many times the
/// tokens of a page that many layers share, and prompts are shared in whole pages of all buffers.
pub(crate) fn as_held(
    policy: KvPolicy,
    geometry: &Geometry,
    window: Option<ByteLength>,
    pages: PageTable,
) -> KvPolicy {
    match policy {
        KvPolicy::Sparse(layout) if pages == PageTable::Unused => return KvPolicy::Dense(layout),
        KvPolicy::Sparse(Layout::TokenMajor) => {}
        policy => return policy,
    }
    let window = window.map_or(LEAST_WINDOW, |window| window.get().min(LEAST_WINDOW));
    let rows = geometry.own_rows().flat_map(|(_, rows)| {
        let bytes = |side| geometry.row_bytes(&rows, side) as u64;
        Side::BOTH.map(bytes)
    });
    let partition = rows.max().unwrap_or(1).max(1) * PARTITION as u64;
    // With one more, for what is shown before a window because of alignment.
    let most = (window / partition).saturating_sub(1);
    let on = |location| {
        let layers = geometry.own_rows().map(|(layer, _)| layer);
        layers
            .filter(|&layer| geometry.location(layer) == location)
            .count()
    };
    let together = match geometry.host_layers() {
        0 => geometry.layers().len(),
        _ => common_divisor(on(Location::Own), on(Location::Host)),
    };
    let layers = together.min(most as usize);
    let layers = NonZeroUsize::new(layers).unwrap_or(NonZeroUsize::MIN);
    KvPolicy::Sparse(Layout::Interleaved(layers))
}

/// The greatest number that divides both; the other where one is zero.
fn common_divisor(one: usize, other: usize) -> usize {
    match other {
        0 => one,
        _ => common_divisor(other, one % other),
    }
}

/// Whether KV rows can be computed over that are held so.
pub(crate) fn check_kv(
    device: &str,
    geometry: &Geometry,
    policy: KvPolicy,
) -> Result<(), ExecutorError> {
    let refused = |what: String| {
        Err(ExecutorError::Kv {
            device: device.to_owned(),
            what,
        })
    };
    let flat = match policy {
        KvPolicy::Sparse(layout) | KvPolicy::Dense(layout) => layout.tile_tokens() == 1,
        _ => false,
    };
    if !flat {
        return refused(format!("by the policy `{policy}`"));
    }
    for (layer, rows) in geometry.own_rows() {
        if rows.values == ValueRows::InKeys && rows.kv_heads > 1 {
            return refused(format!("with values in several keys of layer {}", layer.0));
        }
        for side in Side::BOTH {
            let (element, head) = (geometry.element(side), rows.head_dim(side));
            if element_code(element).is_none() {
                return refused(format!("with elements of type {element}"));
            }
            // Rows and heads are read and written in whole words.
            if !element.bytes(head).is_multiple_of(4) {
                return refused(format!("with heads of {head} elements of type {element}"));
            }
            let block = geometry.rotation(layer, side).map_or(0, NonZeroUsize::get);
            if block > HADAMARD_ELEMENTS as usize {
                return refused(format!(
                    "with heads that are transformed in {block} elements"
                ));
            }
        }
    }
    Ok(())
}

/// Whether the device can run all of a part of a model.
pub(crate) fn check(device: &str, part: &Part) -> Result<(), ExecutorError> {
    let model = &part.model;
    if !model.is_mapped() {
        return Err(ExecutorError::Setting {
            device: device.to_owned(),
            what: "weights that are read for each pass",
        });
    }
    if model.images().is_some() && has_parts_of_images(model) {
        return Err(ExecutorError::Setting {
            device: device.to_owned(),
            what: "images of which several layers are given parts",
        });
    }
    for step in part.steps() {
        for op in model.program().ops(step) {
            if let Some(what) = lacking(op) {
                return Err(ExecutorError::Operation {
                    device: device.to_owned(),
                    what,
                    place: place(step),
                });
            }
            check_types(device, model, op)?;
        }
    }
    Ok(())
}

/// Whether rows of images have parts for other layers than the first.
pub(crate) fn has_parts_of_images(model: &Model) -> bool {
    let program = model.program();
    let mut ops = program.steps().iter().flat_map(|step| program.ops(step));
    ops.any(|op| matches!(op, Op::AddImages { .. }))
}

/// Whether there are products with the matrices of an operation.
fn check_types(device: &str, model: &Model, op: &Op) -> Result<(), ExecutorError> {
    match op {
        Op::Product { outputs, .. } => {
            for (id, _) in outputs {
                let weights = model.matrix(*id);
                check_type(device, weights.name, weights.matrix.dtype())?;
            }
        }
        Op::ExpertProduct { outputs, .. } => {
            for (id, _) in outputs {
                let mut first = None;
                for weights in model.experts(*id) {
                    let dtype = weights.matrix.dtype();
                    check_type(device, weights.name, dtype)?;
                    // They lie one after the other, as rows of one matrix.
                    if *first.get_or_insert(dtype) != dtype {
                        return Err(ExecutorError::Setting {
                            device: device.to_owned(),
                            what: "experts of one layer whose weights are of different types",
                        });
                    }
                }
            }
        }
        _ => {}
    }
    Ok(())
}

fn check_type(device: &str, tensor: &str, dtype: DType) -> Result<(), ExecutorError> {
    if products().any(|known| known == dtype) {
        return Ok(());
    }
    let known: Vec<&str> = products().map(DType::name).collect();
    Err(ExecutorError::WeightType {
        device: device.to_owned(),
        tensor: tensor.to_owned(),
        dtype,
        known: known.join(", "),
    })
}

/// The step, and the layer it is of.
fn place(step: &Step) -> String {
    match step.layer {
        None => format!("its step `{}`", step.name),
        Some(layer) => format!("the step `{}` of layer {layer}", step.name),
    }
}

/// What of an operation the device cannot do, if there is something.
fn lacking(op: &Op) -> Option<String> {
    let unknown = |activation: Activation| {
        let known = activation_code(activation).is_some();
        (!known).then(|| format!("the activation {activation:?}"))
    };
    match op {
        Op::Embed {
            of: Lookup::Tokens, ..
        }
        | Op::Positions { .. }
        | Op::Rotations { .. }
        | Op::PlaceImages { .. }
        | Op::Store { .. }
        | Op::RouteToAll { .. }
        | Op::Norm { .. }
        | Op::BiasedNorm { .. }
        | Op::Add { .. }
        | Op::AddScaledRows { .. }
        | Op::Multiply { .. }
        | Op::Scale { .. }
        | Op::ScalePart { .. }
        | Op::ScaleHeads { .. }
        | Op::SoftCap { .. }
        | Op::MatchMagnitude { .. }
        | Op::KeepOutliers { .. }
        | Op::Temperature { .. }
        | Op::Columns { .. }
        | Op::TimeSteps { .. }
        | Op::Decay { .. }
        | Op::ExpertProduct { .. }
        | Op::CombineExperts { .. }
        | Op::Choose { .. }
        | Op::CheckFinite { .. }
        // Without an encoder there are no parts of images, and nothing is to be done.
        | Op::AddImages { .. }
        // Nothing goes back to earlier states here.
        | Op::StateInputs { .. }
        | Op::Return { .. } => None,
        Op::Rotate { style, .. } => match style {
            RopeStyle::HalfSplit | RopeStyle::Interleaved => None,
            RopeStyle::HalvesSplit => Some(format!("rotations in the order {style:?}")),
        },
        Op::Product { function, .. } => function.and_then(unknown),
        Op::Apply { function, .. } => unknown(*function),
        Op::Attend { shape, .. } => match mask_code(shape.mask) {
            Some(_) => None,
            None => Some(format!("attention with the mask {:?}", shape.mask)),
        },
        Op::Activate { gating, .. } => match gating {
            Gating::Product(activation) => unknown(*activation),
            Gating::Clamped { .. } => None,
        },
        Op::Convolve { activation, .. } => activation.and_then(unknown),
        Op::Scan { shape, .. } => {
            let many = shape.key_dim > MOST_STATE_ROWS;
            many.then(|| format!("states of {} rows", shape.key_dim))
        }
        Op::Route { routing, .. } => {
            let many = routing.experts > MOST_EXPERTS;
            many.then(|| format!("a choice from {} experts", routing.experts))
        }
        other => Some(format!("the operation `{}`", name_of(other))),
    }
}

/// What an operation is called: as in the program's own debug output, which no list of names can fall behind.
fn name_of(op: &Op) -> String {
    let text = format!("{op:?}");
    let end = text.find([' ', '(', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use lacuna_files::ModelFiles;

    use super::*;

    fn checked(path: &str) -> Result<(), ExecutorError> {
        let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
        let files = ModelFiles::open(&reference.join(path)).expect("the fixture opens");
        let model = Arc::new(Model::load(files).expect("the fixture loads"));
        check("card", &Part::behind(model, 0)?)
    }

    #[test]
    fn operations_that_it_cannot_do_are_named() {
        let refused = checked("encoders/bert/hf").expect_err("encoders are left to the processor");
        let ExecutorError::Operation { place, .. } = &refused else {
            panic!("{refused}")
        };
        assert!(place.contains("step"), "{place}");
        let told = refused.to_string();
        assert!(
            told.contains("`card`") && told.contains("`Embed`"),
            "{told}"
        );
    }

    #[test]
    fn experts_states_and_latent_rows_are_taken() {
        for family in ["gpt-oss", "qwen3-next", "deepseek-v3", "gemma3n"] {
            let taken = checked(&format!("families/{family}/hf"));
            assert!(taken.is_ok(), "{family}: {taken:?}");
        }
    }

    #[test]
    fn as_many_layers_are_together_as_both_sides_of_a_split_have_whole_groups_of() {
        let together = |host_layers, layers| {
            let elements = lacuna_kv::KvElements::both(ElementType::F16);
            let geometry = Geometry::uniform(layers, 2, 64, elements);
            let geometry = geometry.with_host_layers(host_layers);
            let geometry = geometry.expect("rows of their own");
            let held = as_held(KvPolicy::default(), &geometry, None, PageTable::Device);
            let KvPolicy::Sparse(Layout::Interleaved(together)) = held else {
                panic!("{held}")
            };
            together.get()
        };
        assert_eq!(together(0, 12), 12);
        for (host_layers, expected) in [(6, 6), (8, 4), (9, 3), (11, 1), (7, 1)] {
            assert_eq!(together(host_layers, 12), expected, "{host_layers}");
        }
    }
}
