//! Attention over rows of keys and values:
//! `hidden += W_o attention(rope(norm(W_q x)), rope(norm(W_k x)), W_v x)` with `x = norm(hidden)`.

use lacuna_kernels::HeadRows;

use super::Stream;
use crate::program::{Bias, Builder, MatrixId, Op, Rows, Slot};
use crate::spec::{Activation, Attention, Gate, Gating, LayerSpec, OutputSpec, QkNorm, Values};

/// What products of the layer's input are; a layer that shares rows has no keys and values.
struct Heads {
    query: Slot,
    rows: Option<KeyValue>,
    /// What decides how much of each element that is attended goes on, where something does.
    gate: Option<Slot>,
}

struct KeyValue {
    key: Slot,
    value: Slot,
}

impl Stream<'_> {
    /// Returns what the layer's input was normed to, if it was.
    pub(super) fn attention(
        &self,
        index: usize,
        layer: &LayerSpec,
        attention: &Attention,
        program: &mut Builder,
    ) -> Option<Slot> {
        if let Some(latent) = attention.latent {
            return self.latent_attention(index, layer, attention, latent, program);
        }
        let (heads, input) = self.project(layer, attention, program);
        self.attend_with(index, layer, (attention, &heads), program);
        input
    }

    /// The same of rows that are no norm of the residual stream: `input`, `[tokens, width]`.
    pub(super) fn attention_of(
        &self,
        (index, layer): (usize, &LayerSpec),
        attention: &Attention,
        input: (Slot, usize),
        program: &mut Builder,
    ) {
        program.step("project");
        let (heads, outputs) = self.heads(attention, input.1, program);
        self.fill_heads(attention, &heads, input, outputs, program);
        self.attend_with(index, layer, (attention, &heads), program);
    }

    /// From queries, keys and values to the residual stream.
    fn attend_with(
        &self,
        index: usize,
        layer: &LayerSpec,
        (attention, heads): (&Attention, &Heads),
        program: &mut Builder,
    ) {
        self.rotate(attention, heads, program);
        let attended = self.attend(index, attention, heads, program);
        let attended = self.gated_heads(attention, heads, attended, program);
        let width = attention.query_width();
        self.attention_output(layer, attention, (attended, width), program);
    }

    /// What goes on of `attended`, `[tokens, query_heads, head_dim]`, in its slot or that of gates.
    fn gated_heads(
        &self,
        attention: &Attention,
        heads: &Heads,
        attended: Slot,
        program: &mut Builder,
    ) -> Slot {
        let (Some(gate), Some(function)) = (heads.gate, gate_function(attention.gate)) else {
            return attended;
        };
        if let Gate::PerHead(_) = attention.gate {
            program.push(Op::Apply {
                function,
                values: gate,
                rows: Rows::Tokens,
                width: attention.query_heads,
            });
            program.push(Op::ScaleHeads {
                values: attended,
                factors: gate,
                heads: attention.query_heads,
                head_dim: attention.head_dim,
            });
            return attended;
        }
        program.push(Op::Activate {
            gating: Gating::Product(function),
            gate,
            up: attended,
            width: attention.query_width(),
        });
        gate
    }

    /// Attention over rows that are kept, or over those of the pass itself where none are.
    fn attend(
        &self,
        layer: usize,
        attention: &Attention,
        heads: &Heads,
        program: &mut Builder,
    ) -> Slot {
        program.step("attend");
        let keeps = matches!(self.spec.output, OutputSpec::Logits(_));
        if let (Some(KeyValue { key, value }), true) = (&heads.rows, keeps) {
            program.push(Op::Store {
                layer,
                keys: *key,
                values: Some(*value),
                width: attention.kv_width(),
            });
        }
        let attended = program.values("attended", Rows::Tokens, attention.query_width());
        let shape = attention.shape();
        let states = program.attention_states(shape);
        let sinks = attention.sinks;
        let sinks = sinks.then(|| program.vector("attn_sinks", attention.query_heads));
        let (queries, output) = (heads.query, attended);
        program.push(match &heads.rows {
            Some(KeyValue { key, value }) if !keeps => Op::AttendWithin {
                shape,
                queries,
                keys: *key,
                values: *value,
                output,
                states,
                sinks,
                windowed: self.spec.patches.is_some_and(|it| it.is_windowed(layer)),
            },
            _ => Op::Attend {
                layer,
                shape,
                queries,
                output,
                states,
                sinks,
            },
        });
        attended
    }

    fn project(
        &self,
        layer: &LayerSpec,
        attention: &Attention,
        program: &mut Builder,
    ) -> (Heads, Option<Slot>) {
        let hidden = self.spec.hidden;
        program.step("project");
        let normed = layer.norms.before_attention().then(|| {
            let input = program.values("attention-input", Rows::Tokens, hidden);
            let weight = program.vector("attn_norm", hidden);
            (weight, input)
        });
        let (heads, outputs) = self.heads(attention, hidden, program);
        if let Some((weight, input)) = normed {
            self.norm(weight, self.hidden, input, Rows::Tokens, program);
        }
        let input = normed.map(|(_, input)| input);
        let read = (input.unwrap_or(self.hidden), hidden);
        self.fill_heads(attention, &heads, read, outputs, program);
        (heads, input)
    }

    /// The products with `input`, rows of `width` elements, that make queries, keys and values.
    fn fill_heads(
        &self,
        attention: &Attention,
        heads: &Heads,
        (input, width): (Slot, usize),
        outputs: Vec<(MatrixId, Slot)>,
        program: &mut Builder,
    ) {
        let blocks = "attention-input-blocks";
        let made = outputs[0].1;
        self.layer_product(input, blocks, width, outputs, program);
        if let (Gate::InQueries, Some(gate)) = (attention.gate, heads.gate) {
            // Of each head first its queries, then its gate.
            let (count, dim) = (attention.query_heads, attention.head_dim);
            for (part, start) in [(heads.query, 0), (gate, dim)] {
                let from = (made, HeadRows::by_token(2 * dim, start));
                program.columns(from, (part, HeadRows::by_token(dim, 0)), count, dim);
            }
        }
    }

    /// The slots of queries, keys and values, and the products with rows of `width` elements that fill them.
    fn heads(
        &self,
        attention: &Attention,
        width: usize,
        program: &mut Builder,
    ) -> (Heads, Vec<(MatrixId, Slot)>) {
        let (queries, keys) = (attention.query_width(), attention.kv_width());
        let bias = required_if(attention.biases.projections);
        let query = program.values("query", Rows::Tokens, queries);
        let gates = match attention.gate {
            Gate::PerHead(_) => attention.query_heads,
            Gate::None | Gate::Apart(_) | Gate::InQueries => queries,
        };
        let gate = (attention.gate != Gate::None)
            .then(|| program.values("attention-gate", Rows::Tokens, gates));
        let (rows, made) = match attention.gate {
            Gate::InQueries => {
                let both = program.values("query-gate", Rows::Tokens, 2 * queries);
                (2 * queries, both)
            }
            Gate::None | Gate::Apart(_) | Gate::PerHead(_) => (queries, query),
        };
        let mut outputs = vec![(program.matrix("attn_q", rows, width, bias), made)];
        let rows = attention.shares.is_none().then(|| {
            let key = program.values("key", Rows::Tokens, keys);
            let value = program.values("value", Rows::Tokens, keys);
            outputs.push((program.matrix("attn_k", keys, width, bias), key));
            if attention.values == Values::Projected {
                outputs.push((program.matrix("attn_v", keys, width, bias), value));
            }
            KeyValue { key, value }
        });
        if let (Gate::Apart(_) | Gate::PerHead(_), Some(gate)) = (attention.gate, gate) {
            let matrix = program.matrix("attn_gate", gates, width, Bias::IfPresent);
            outputs.push((matrix, gate));
        }
        (Heads { query, rows, gate }, outputs)
    }

    /// Norms and positions of queries and keys.
    fn rotate(&self, attention: &Attention, heads: &Heads, program: &mut Builder) {
        program.step("rotate");
        if let Some(rows) = &heads.rows {
            self.make_values(attention, rows, program);
        }
        let keys = heads.rows.as_ref().map(|rows| rows.key);
        let parts = [
            (Some(heads.query), "attn_q_norm", attention.query_heads),
            (keys, "attn_k_norm", attention.kv_heads),
        ];
        for (slot, part, heads) in parts {
            let Some(slot) = slot else { continue };
            let norm = attention.qk_norm.map(|kind| {
                let (groups, width) = match kind {
                    QkNorm::PerHead | QkNorm::Turned | QkNorm::Unweighted => {
                        (heads, attention.head_dim)
                    }
                    QkNorm::Whole => (1, heads * attention.head_dim),
                };
                let weight = (kind != QkNorm::Unweighted).then(|| program.vector(part, width));
                Op::Norm {
                    norm: self.spec.norm,
                    weight,
                    input: slot,
                    output: slot,
                    rows: Rows::Tokens,
                    groups,
                    width,
                }
            });
            let rotation = attention.rope.map(|rope| Op::Rotate {
                heads_of: slot,
                table: self.rotations[rope],
                heads,
                head_dim: attention.head_dim,
                dimensions: self.spec.ropes[rope].dimensions,
                style: self.spec.ropes[rope].style,
            });
            let steps = match attention.qk_norm {
                Some(QkNorm::Turned) => [rotation, norm],
                _ => [norm, rotation],
            };
            steps
                .into_iter()
                .flatten()
                .for_each(|step| program.push(step));
        }
        if let Some(temperature) = attention.temperature {
            let factors = program.values("query-factors", Rows::Tokens, 1);
            let axes = self.spec.position_axes();
            let positions = program.positions(axes);
            program.push(Op::Temperature {
                queries: heads.query,
                positions,
                axes,
                factors,
                temperature,
                width: attention.query_width(),
            });
        }
    }

    /// Values that are made of keys, before those are normed and turned, and values that are normed.
    fn make_values(&self, attention: &Attention, rows: &KeyValue, program: &mut Builder) {
        let (heads, head_dim) = (attention.kv_heads, attention.head_dim);
        let norm_of = |input| Op::Norm {
            norm: self.spec.norm,
            weight: None,
            input,
            output: rows.value,
            rows: Rows::Tokens,
            groups: heads,
            width: head_dim,
        };
        match (attention.values, attention.value_norm) {
            (Values::Projected, false) => {}
            (Values::Projected, true) => program.push(norm_of(rows.value)),
            (Values::Keys, true) => program.push(norm_of(rows.key)),
            (Values::Keys, false) => {
                let width = heads * head_dim;
                let all = HeadRows::by_token(width, 0);
                program.columns((rows.key, all), (rows.value, all), 1, width);
            }
        }
    }

    /// Adds a product with `attended`, `[tokens, width]`, to the residual stream.
    pub(super) fn attention_output(
        &self,
        layer: &LayerSpec,
        attention: &Attention,
        (attended, width): (Slot, usize),
        program: &mut Builder,
    ) {
        let hidden = self.spec.hidden;
        program.step("attention-output");
        let output = program.values("attention-output", Rows::Tokens, hidden);
        let bias = required_if(attention.biases.output);
        let matrix = program.matrix("attn_output", hidden, width, bias);
        let outputs = vec![(matrix, output)];
        self.layer_product(attended, "attended-blocks", width, outputs, program);
        if layer.norms.after() {
            let weight = program.vector("post_attention_norm", hidden);
            self.norm(weight, output, output, Rows::Tokens, program);
        }
        self.add(layer.residual_scale.attention, output, program);
        self.norm_sum(layer, "attn_output_norm", program);
    }
}

/// What gates are made of products by, where there are some.
fn gate_function(gate: Gate) -> Option<Activation> {
    match gate {
        Gate::None => None,
        Gate::Apart(function) | Gate::PerHead(function) => Some(function),
        Gate::InQueries => Some(Activation::Sigmoid),
    }
}

pub(super) fn required_if(required: bool) -> Bias {
    match required {
        true => Bias::Required,
        false => Bias::IfPresent,
    }
}
