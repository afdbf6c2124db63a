//! Attention over rows of keys and values:
//! `hidden += W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x)` with `x = norm(hidden)`.

use super::Stream;
use crate::program::{Bias, Builder, Op, Rows, Slot, VectorId};
use crate::spec::{Attention, LayerSpec, QkNorm};

impl Stream<'_> {
    pub(super) fn attention(&self, index: usize, layer: &LayerSpec, program: &mut Builder) {
        let attention = &layer.attention;
        let heads = self.project(layer, program);
        self.rotate(attention, &heads, program);
        program.step("attend");
        let (queries, keys) = (attention.query_width(), attention.kv_width());
        program.push(Op::Store {
            layer: index,
            keys: heads.key,
            values: heads.value,
            width: keys,
        });
        let attended = program.values("attended", Rows::Tokens, queries);
        let shape = attention.shape();
        let states = program.attention_states(shape);
        program.push(Op::Attend {
            layer: index,
            shape,
            queries: heads.query,
            output: attended,
            states,
        });
        self.attention_output(layer, attended, program);
    }

    fn project(&self, layer: &LayerSpec, program: &mut Builder) -> Heads {
        let attention = &layer.attention;
        let hidden = self.spec.hidden;
        let (queries, keys) = (attention.query_width(), attention.kv_width());
        program.step("project");
        let input = program.values("attention-input", Rows::Tokens, hidden);
        let norm = program.vector("attn_norm", hidden);
        let bias = match attention.biases.projections {
            true => Bias::Required,
            false => Bias::IfPresent,
        };
        let query = program.matrix("attn_q", queries, hidden, bias);
        let key = program.matrix("attn_k", keys, hidden, bias);
        let value = program.matrix("attn_v", keys, hidden, bias);
        self.norm(norm, self.hidden, input, Rows::Tokens, program);
        let slots = Heads {
            query: program.values("query", Rows::Tokens, queries),
            key: program.values("key", Rows::Tokens, keys),
            value: program.values("value", Rows::Tokens, keys),
        };
        let outputs = vec![(query, slots.query), (key, slots.key), (value, slots.value)];
        let blocks = "attention-input-blocks";
        program.product(input, blocks, Rows::Tokens, hidden, outputs);
        slots
    }

    /// Norms and positions of queries and keys.
    fn rotate(&self, attention: &Attention, slots: &Heads, program: &mut Builder) {
        program.step("rotate");
        let parts = [
            (slots.query, "attn_q_norm", attention.query_heads),
            (slots.key, "attn_k_norm", attention.kv_heads),
        ];
        for (slot, part, heads) in parts {
            if let Some(kind) = attention.qk_norm {
                self.head_norm(kind, slot, part, heads, attention.head_dim, program);
            }
            if let Some(rope) = attention.rope {
                program.push(Op::Rotate {
                    heads_of: slot,
                    table: self.rotations[rope],
                    heads,
                    head_dim: attention.head_dim,
                    dimensions: self.spec.ropes[rope].dimensions,
                    style: self.spec.ropes[rope].style,
                });
            }
        }
    }

    fn head_norm(
        &self,
        kind: QkNorm,
        slot: Slot,
        part: &'static str,
        heads: usize,
        head_dim: usize,
        program: &mut Builder,
    ) {
        let (groups, width) = match kind {
            QkNorm::PerHead => (heads, head_dim),
            QkNorm::Whole => (1, heads * head_dim),
        };
        let weight: VectorId = program.vector(part, width);
        program.push(Op::Norm {
            norm: self.spec.norm,
            weight,
            input: slot,
            output: slot,
            rows: Rows::Tokens,
            groups,
            width,
        });
    }

    fn attention_output(&self, layer: &LayerSpec, attended: Slot, program: &mut Builder) {
        let hidden = self.spec.hidden;
        let queries = layer.attention.query_width();
        program.step("attention-output");
        let output = program.values("attention-output", Rows::Tokens, hidden);
        let bias = match layer.attention.biases.output {
            true => Bias::Required,
            false => Bias::IfPresent,
        };
        let matrix = program.matrix("attn_output", hidden, queries, bias);
        let outputs = vec![(matrix, output)];
        program.product(attended, "attended-blocks", Rows::Tokens, queries, outputs);
        program.push(Op::Add {
            to: self.hidden,
            from: output,
            width: hidden,
        });
    }
}

/// Queries, keys and values of the tokens.
struct Heads {
    query: Slot,
    key: Slot,
    value: Slot,
}
