//! What the device can do. Pure: a model is gone through before a byte of it is brought anywhere.

use lacuna_kernels::{DType, ElementType};
use lacuna_kv::{Geometry, KvPolicy, Side, ValueRows};
use lacuna_models::program::{Lookup, Op, Step};
use lacuna_models::spec::{Activation, Gating, Mask};
use lacuna_models::{ExecutorError, Model};

use crate::kernels::{MOST_EXPERTS, MOST_STATE_ROWS, products};

/// What the kernels call an element type of KV rows.
pub(crate) fn element_code(element: ElementType) -> Option<u32> {
    match element {
        ElementType::F32 => Some(0),
        ElementType::F16 => Some(1),
        ElementType::Bf16 => Some(2),
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
    let sparse = matches!(policy, KvPolicy::Sparse(layout) if layout.tile_tokens() == 1);
    if !sparse {
        return refused(format!("by the policy `{policy}`"));
    }
    for (layer, rows) in geometry.own_rows() {
        if rows.values == ValueRows::InKeys {
            return refused(format!("with values in the keys of layer {}", layer.0));
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
        }
    }
    Ok(())
}

/// Whether the device can run all of a model's program.
pub(crate) fn check(device: &str, model: &Model) -> Result<(), ExecutorError> {
    if !model.is_mapped() {
        return Err(ExecutorError::Setting {
            device: device.to_owned(),
            what: "weights that are read for each pass",
        });
    }
    if model.images().is_some() {
        return Err(ExecutorError::Setting {
            device: device.to_owned(),
            what: "images",
        });
    }
    let program = model.program();
    for step in program.steps() {
        for op in program.ops(step) {
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
        | Op::Rotate { .. }
        | Op::Norm { .. }
        | Op::BiasedNorm { .. }
        | Op::Add { .. }
        | Op::AddScaledRows { .. }
        | Op::Multiply { .. }
        | Op::Scale { .. }
        | Op::ScalePart { .. }
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
        // Without an encoder there are no images, and nothing is to be done.
        | Op::PlaceImages { .. }
        | Op::AddImages { .. }
        | Op::Return { .. } => None,
        Op::Product { function, .. } => function.and_then(unknown),
        Op::Apply { function, .. } => unknown(*function),
        Op::Store { values, .. } => match values {
            Some(_) => None,
            None => Some("rows of keys that are values too".to_owned()),
        },
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
