//! Weights by name: looking tensors up in a file, checking their shape, and using them in place.
//!
//! A [`Linear`] keeps a handle on the mapped file and computes from its bytes; only vectors (norms,
//! biases), a few kilobytes a layer, are copied out as `f32`.

use lacuna_kernels::{Activations, Cpu, Matrix};

use crate::architecture::{Architecture, Description, Output};
use crate::config::Config;
use crate::error::LoadError;
use crate::files::{Tensor, TensorError, Tensors};

/// A matrix in the file, with an optional bias.
#[derive(Debug)]
pub(crate) struct Linear {
    tensor: Tensor,
    rows: usize,
    columns: usize,
    bias: Option<Vec<f32>>,
}

impl Linear {
    fn new(
        tensor: Tensor,
        rows: usize,
        columns: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, LoadError> {
        Matrix::new(tensor.dtype(), rows, columns, tensor.bytes()).map_err(|source| {
            LoadError::Tensor {
                name: tensor.name().to_owned(),
                source,
            }
        })?;
        Ok(Self {
            tensor,
            rows,
            columns,
            bias,
        })
    }

    /// The matrix as the kernels take it: `[rows, columns]` in the file's own bytes.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        Matrix::new(
            self.tensor.dtype(),
            self.rows,
            self.columns,
            self.tensor.bytes(),
        )
        .expect("the same arguments were accepted when the tensor was loaded")
    }

    /// `out[t] = W x[t] + bias` for every token.
    pub(crate) fn apply(&self, cpu: &Cpu, out: &mut [f32], input: &Activations<'_>) {
        Self::apply_each([self], cpu, [out], input);
    }

    /// The same for several matrices of one input, in one operation.
    pub(crate) fn apply_each<const N: usize>(
        linears: [&Self; N],
        cpu: &Cpu,
        mut outs: [&mut [f32]; N],
        input: &Activations<'_>,
    ) {
        let matrices = linears.map(Self::matrix);
        cpu.matmul_each(
            outs.each_mut().map(|out| &mut **out),
            input,
            matrices.each_ref(),
        );
        for (linear, out) in linears.into_iter().zip(outs) {
            if let Some(bias) = &linear.bias {
                cpu.add_bias(out, bias);
            }
        }
    }
}

/// Where weights are looked up: a file, its spelling of names, and the block they are in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    tensors: &'a Tensors,
    architecture: &'a Architecture,
    names: Names,
    output: Output,
    block: Option<usize>,
}

/// How a file spells tensor names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Names {
    /// `blk.0.attn_q.weight`
    Gguf,
    /// `model.layers.0.self_attn.q_proj.weight`
    HuggingFace,
}

/// GGUF and Hugging Face names of the same tensor, without block and suffix.
const NAMES: [(&str, &str); 14] = [
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("attn_norm", "input_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];

impl Names {
    fn full(self, block: Option<usize>, part: &str, suffix: &str) -> String {
        let stem = match self {
            Self::Gguf => part,
            Self::HuggingFace => NAMES
                .iter()
                .find(|(gguf, _)| *gguf == part)
                .map_or(part, |(_, name)| name),
        };
        match (self, block) {
            (_, None) => format!("{stem}.{suffix}"),
            (Self::Gguf, Some(block)) => format!("blk.{block}.{stem}.{suffix}"),
            (Self::HuggingFace, Some(block)) => format!("model.layers.{block}.{stem}.{suffix}"),
        }
    }
}

impl<'a> Source<'a> {
    pub(crate) fn new(tensors: &'a Tensors, names: Names, description: &Description) -> Self {
        let Description {
            architecture,
            output,
            ..
        } = *description;
        Self {
            tensors,
            architecture,
            names,
            output,
            block: None,
        }
    }

    /// The same source inside decoder block `index`.
    pub(crate) fn block(&self, index: usize) -> Self {
        Self {
            block: Some(index),
            ..*self
        }
    }

    /// A matrix of `[rows, columns]` that has to be there, with its bias where the architecture or
    /// the file has one.
    pub(crate) fn linear(
        &self,
        part: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Linear, LoadError> {
        let tensor = self.required(part, "weight", &[rows, columns])?;
        let has_bias = self.architecture.biases.contains(&part) || self.contains(part, "bias");
        let bias = has_bias
            .then(|| self.floats(part, "bias", rows))
            .transpose()?;
        Linear::new(tensor, rows, columns, bias)
    }

    /// The output matrix, unless the embedding table doubles as it.
    pub(crate) fn optional_linear(
        &self,
        part: &str,
        rows: usize,
        columns: usize,
    ) -> Result<Option<Linear>, LoadError> {
        match self.output {
            Output::Tied => Ok(None),
            Output::Untied => self.linear(part, rows, columns).map(Some),
            Output::TiedUnlessPresent if !self.contains(part, "weight") => Ok(None),
            Output::TiedUnlessPresent => self.linear(part, rows, columns).map(Some),
        }
    }

    /// A vector of `width` elements, as `f32`.
    pub(crate) fn vector(&self, part: &str, width: usize) -> Result<Vec<f32>, LoadError> {
        self.floats(part, "weight", width)
    }

    /// The weight of a norm over each query or key head, for architectures that have one.
    pub(crate) fn head_norm(
        &self,
        part: &str,
        width: usize,
    ) -> Result<Option<Vec<f32>>, LoadError> {
        self.architecture
            .head_norms
            .then(|| self.vector(part, width))
            .transpose()
    }

    /// Rotary frequencies of the config, divided by the file's own factors where it has some.
    pub(crate) fn inverse_frequencies(&self, config: &Config) -> Result<Vec<f32>, LoadError> {
        let mut frequencies = config.rope.inverse_frequencies(config.head_dim);
        if self.names == Names::Gguf && self.contains("rope_freqs", "weight") {
            let factors = self.floats("rope_freqs", "weight", frequencies.len())?;
            frequencies
                .iter_mut()
                .zip(factors)
                .for_each(|(frequency, factor)| *frequency /= factor);
        }
        Ok(frequencies)
    }

    fn contains(&self, part: &str, suffix: &str) -> bool {
        self.tensors
            .contains(&self.names.full(self.block, part, suffix))
    }

    fn required(&self, part: &str, suffix: &str, shape: &[usize]) -> Result<Tensor, TensorError> {
        self.tensors
            .require_shape(&self.names.full(self.block, part, suffix), shape)
    }

    fn floats(&self, part: &str, suffix: &str, width: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.required(part, suffix, &[width])?;
        let row = Matrix::new(tensor.dtype(), 1, width, tensor.bytes()).map_err(|source| {
            LoadError::Tensor {
                name: tensor.name().to_owned(),
                source,
            }
        })?;
        let mut values = vec![0.0; width];
        row.dequantize_row(0, &mut values);
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_checkpoint() {
        assert_eq!(
            Names::Gguf.full(Some(3), "attn_q", "bias"),
            "blk.3.attn_q.bias"
        );
        let name = Names::HuggingFace.full(Some(3), "ffn_down", "weight");
        assert_eq!(name, "model.layers.3.mlp.down_proj.weight");
        assert_eq!(
            Names::HuggingFace.full(None, "output", "weight"),
            "lm_head.weight"
        );
    }
}
