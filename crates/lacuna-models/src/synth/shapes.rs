//! The tensors of synthetic models, from the forward pass that is to compute with them.

use std::f64::consts::PI;

use super::Error;
use super::types::Types;
use crate::families::{Description, Shape, encoder_shapes, shapes};
use crate::layers::{PATCHES, PROJECTION};
use crate::program::{
    Bias, ExpertsSpec, MatrixSpec, Program, TensorName, TensorSpec, VectorForm, VectorSpec,
};
use crate::spec::{Activation, FeedForward, ModelSpec, Recurrence};
use lacuna_files::DType;

/// The names of shapes, for messages.
fn names<'a>(shapes: impl Iterator<Item = &'a Shape>) -> String {
    let names: Vec<&str> = shapes.map(|shape| shape.name).collect();
    names.join(", ")
}

/// The part of the columns of an embedding that all tokens have in common, in models with experts: routers
/// then prefer some experts for all tokens, as real ones do. Rounded down to whole blocks.
const ALIKE: (usize, usize) = (5, 8);

/// The standard deviation of such an embedding. What layers add is more alike the more tokens attention
/// takes the mean of, so that smaller embeddings would let tokens choose ever the same experts. With both,
/// a token has about 45 % of a layer's experts in common with the token before.
const ALIKE_DEVIATION: f32 = 1.75;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorPlan {
    pub(super) name: String,
    pub(super) dtype: DType,
    /// Outermost first.
    pub(super) shape: Vec<usize>,
    pub(super) contents: Contents,
}

/// What a tensor holds.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Contents {
    /// Random values of mean 0 and this standard deviation.
    Random { deviation: f32 },
    /// The same, but for the first elements of each row, so many, which are the same in all rows.
    Alike { deviation: f32, columns: usize },
    /// These values, of which there are few.
    Given(Vec<f32>),
}

impl Shape {
    /// The shape of a model of this name.
    ///
    /// # Errors
    /// [`Error::UnknownShape`], which lists those there are.
    pub fn find(name: &str) -> Result<&'static Self, Error> {
        Self::among(shapes, name)
    }

    /// The shape of a model or of an encoder of images of this name.
    ///
    /// # Errors
    /// [`Error::UnknownShape`], which lists those there are.
    pub fn find_any(name: &str) -> Result<&'static Self, Error> {
        Self::among(|| shapes().chain(encoder_shapes()), name)
    }

    fn among<I: Iterator<Item = &'static Self>>(
        shapes: impl Fn() -> I,
        name: &str,
    ) -> Result<&'static Self, Error> {
        let mut found = shapes().filter(|shape| shape.name.eq_ignore_ascii_case(name));
        found.next().ok_or_else(|| Error::UnknownShape {
            name: name.to_owned(),
            known: names(shapes()),
        })
    }

    /// All tensors of a model described so and made after this shape, in the order of the file.
    pub(super) fn tensors(&self, description: &Description, types: Types) -> Vec<TensorPlan> {
        let mut tensors = Vec::new();
        if let Some(factor) = self.rope_factor {
            let factors = self.rope_factors(factor);
            tensors.push(vector("rope_freqs.weight".into(), factors));
        }
        let layers = description.spec.layers.len();
        let program = Program::new(&description.spec);
        let has_experts = program
            .tensors()
            .iter()
            .any(|tensor| matches!(tensor, TensorSpec::Experts(_)));
        for tensor in program.tensors() {
            let apart = tensor.name();
            let whole = description.fused_in_gguf(apart.part);
            let name = TensorName {
                part: whole.unwrap_or(apart.part),
                ..apart
            };
            let called = |suffix: &str| description.tensor_name(name, suffix);
            match *tensor {
                TensorSpec::Vector(VectorSpec {
                    suffix,
                    width,
                    form,
                    ..
                }) => {
                    let of_mamba2 = is_mamba2(&description.spec, name);
                    let name = called(suffix);
                    let made = match (form, suffix) {
                        (VectorForm::Taps(taps), _) => matrix(name, DType::F32, width / taps, taps),
                        (VectorForm::Rates, _) => rates(name, width),
                        (_, "bias") => bias(name, width),
                        _ => ones(name, width),
                    };
                    tensors.push(match form {
                        VectorForm::Rows(columns) => in_rows(made, columns),
                        // Numbers of its heads, but not of a delta net's, are columns to other engines.
                        VectorForm::Rates | VectorForm::Finite
                            if of_mamba2 && suffix.is_empty() =>
                        {
                            in_rows(made, 1)
                        }
                        _ => made,
                    });
                }
                TensorSpec::Experts(ExpertsSpec {
                    experts,
                    rows,
                    columns,
                    bias: needed,
                    ..
                }) => {
                    let dtype = types.of(name, columns, layers, self.tied);
                    let mut stack = matrix(called("weight"), dtype, rows, columns);
                    stack.shape.insert(0, experts);
                    tensors.push(stack);
                    if needed == Bias::Required {
                        let mut stack = bias(called("bias"), rows);
                        stack.shape.insert(0, experts);
                        tensors.push(stack);
                    }
                }
                TensorSpec::Matrix(MatrixSpec {
                    rows,
                    columns,
                    bias: needed,
                    ..
                }) => {
                    let full = called("weight");
                    let begun = tensors.iter_mut().rev().find(|made| made.name == full);
                    if let (Some(_), Some(begun)) = (whole, begun) {
                        begun.shape[0] += rows;
                        continue;
                    }
                    let dtype = types.of(name, columns, layers, self.tied);
                    if let Some(patches) = description.spec.patches {
                        tensors.push(of_encoder(
                            matrix(called("weight"), dtype, rows, columns),
                            (name, patches.pixels),
                        ));
                        if needed == Bias::Required {
                            tensors.push(bias(called("bias"), rows));
                        }
                        continue;
                    }
                    let mut made = matrix(called("weight"), dtype, rows, columns);
                    if has_experts && name.layer.is_none() && name.part == "token_embd" {
                        made.contents = alike(dtype, columns);
                    }
                    tensors.push(made);
                    if needed == Bias::Required {
                        tensors.push(bias(called("bias"), rows));
                    } else if is_squared_relu(&description.spec, name) {
                        tensors.push(thresholds(called("bias"), rows));
                    }
                }
            }
        }
        tensors
    }

    /// What rotation frequencies are divided by, as llama.cpp's converter computes it for Llama 3.1
    /// and later: 1 for short wavelengths, `factor` for long ones, blended between.
    fn rope_factors(&self, factor: f64) -> Vec<f32> {
        const ORIGINAL_CONTEXT: f64 = 8192.0;
        const LOW: f64 = 1.0;
        const HIGH: f64 = 4.0;
        let one = |pair: usize| {
            let exponent = 2.0 * pair as f64 / self.head_size as f64;
            let wavelength = 2.0 * PI * f64::from(self.rope_theta).powf(exponent);
            if wavelength < ORIGINAL_CONTEXT / HIGH {
                return 1.0;
            }
            if wavelength > ORIGINAL_CONTEXT / LOW {
                return factor;
            }
            let smooth = (ORIGINAL_CONTEXT / wavelength - LOW) / (HIGH - LOW);
            1.0 / ((1.0 - smooth) / factor + smooth)
        };
        (0..self.head_size / 2)
            .map(|pair| one(pair) as f32)
            .collect()
    }
}

/// Whether a tensor is of a layer with Mamba-2.
fn is_mamba2(spec: &ModelSpec, name: TensorName) -> bool {
    let layer = name.layer.and_then(|layer| spec.layers.get(layer));
    let recurrence = layer.and_then(|layer| layer.recurrence);
    matches!(recurrence, Some(Recurrence::Mamba2(_)))
}

/// Whether a tensor makes activations of which zero is left where they are not positive.
fn is_squared_relu(spec: &ModelSpec, name: TensorName) -> bool {
    let layer = name.layer.and_then(|layer| spec.layers.get(layer));
    let block = layer.map(|layer| &layer.feed_forward);
    let squared = matches!(block, Some(FeedForward::Plain(plain)) if plain.activation == Activation::ReluSquared);
    squared && name.part == "ffn_up"
}

/// What the activations of neurons must exceed, in standard deviations: of eight neurons side by side the first is active for
/// 35 of 100 tokens, the others for 12, 4, 2, 1, 0.5, 0.3 and 0.2. So a token has 6.9 % of all, and most of those are
/// among a few that others have too, as in models that were trained with such activations (LLM in a flash: 3 to 10 %).
const THRESHOLDS: [f32; 8] = [0.385, 1.175, 1.751, 2.054, 2.326, 2.576, 2.748, 2.878];

fn thresholds(name: String, len: usize) -> TensorPlan {
    let values = THRESHOLDS.iter().cycle().take(len);
    vector(name, values.map(|threshold| -threshold).collect())
}

/// The same elements as rows of so many, where that makes more than one.
fn in_rows(tensor: TensorPlan, columns: usize) -> TensorPlan {
    let elements = tensor.shape.iter().product::<usize>();
    match elements > columns {
        true => TensorPlan {
            shape: vec![elements / columns, columns],
            ..tensor
        },
        false => tensor,
    }
}

/// A matrix of an encoder of images, as its files have it: one of pixels has them in rows, the projection lies the other
/// way round, and rows that are no whole blocks stay F16.
fn of_encoder(made: TensorPlan, (name, pixels): (TensorName, usize)) -> TensorPlan {
    let (rows, columns) = (made.shape[0], made.shape[1]);
    let whole = columns.is_multiple_of(made.dtype.block_len());
    let shape = match name.part {
        PATCHES => vec![rows, columns / (pixels * pixels), pixels, pixels],
        PROJECTION => vec![columns, rows],
        _ => made.shape,
    };
    TensorPlan {
        dtype: if whole { made.dtype } else { DType::F16 },
        shape,
        ..made
    }
}

/// A matrix that turns unit variance into unit variance.
fn matrix(name: String, dtype: DType, rows: usize, columns: usize) -> TensorPlan {
    let deviation = 1.0 / (columns as f32).sqrt();
    TensorPlan {
        name,
        dtype,
        shape: vec![rows, columns],
        contents: Contents::Random { deviation },
    }
}

/// Embeddings whose tokens choose experts that are partly the same.
fn alike(dtype: DType, columns: usize) -> Contents {
    let (part, of) = ALIKE;
    let columns = columns * part / of;
    Contents::Alike {
        deviation: ALIKE_DEVIATION,
        columns: columns - columns % dtype.block_len(),
    }
}

fn ones(name: String, len: usize) -> TensorPlan {
    vector(name, vec![1.0; len])
}

/// Rates at which states of heads decay, from slow to fast as in trained models: of the first half is left
/// after some ten tokens, of the last after one.
fn rates(name: String, heads: usize) -> TensorPlan {
    let rate = |head: usize| -(16f32.powf(head as f32 / heads as f32) / 16.0);
    vector(name, (0..heads).map(rate).collect())
}

fn bias(name: String, len: usize) -> TensorPlan {
    let contents = Contents::Random { deviation: 0.02 };
    TensorPlan {
        name,
        dtype: DType::F32,
        shape: vec![len],
        contents,
    }
}

fn vector(name: String, values: Vec<f32>) -> TensorPlan {
    TensorPlan {
        name,
        dtype: DType::F32,
        shape: vec![values.len()],
        contents: Contents::Given(values),
    }
}
