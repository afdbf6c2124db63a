//! A gated delta net, which each token corrects ([`DeltaNet`] says what is computed).
//!
//! ```text
//! project   q | k | v of all heads, z; what gates are made of
//! convolve  silu of convolutions of q | k | v
//! gates     b, and what is left of states
//! scan      each token corrects its sequence's states and reads them
//! gate      norm, head by head, and silu(z)
//! ```

use lacuna_kernels::HeadRows;

use super::Stream;
use crate::program::{Bias, Builder, Factor, Op, Rows, Slot};
use crate::spec::{Activation, DeltaNet, GatesIn, Gating, InputsIn, Norm, NormKind};

/// What is added to the square of a key's or a query's length before it is brought to 1, as
/// `modeling_qwen3_next.py` of Hugging Face transformers does it (`l2norm`).
const LENGTH_EPSILON: f32 = 1e-6;

/// What the layer's input becomes.
struct Inputs {
    /// Queries, keys and values of all heads, one after another.
    mixed: Slot,
    /// What decides how much of each result goes on.
    z: Slot,
    /// What `b` and time steps are made of.
    gates: [Slot; 2],
}

impl Stream<'_> {
    /// `[tokens, hidden]` of `input`, the same. Goes on with the step begun last.
    pub(super) fn delta_net(
        &self,
        index: usize,
        net: &DeltaNet,
        input: Slot,
        program: &mut Builder,
    ) -> Slot {
        let (keys, values, heads) = (net.key_width(), net.value_width(), net.value_heads);
        let Inputs { mixed, z, gates } = self.delta_inputs(net, input, program);
        let [strength, steps] = gates;

        let parts = [
            ("state-query", keys),
            ("state-key", keys),
            ("state-value", values),
        ];
        let state = (index, net.taps);
        let gates = gates.map(|gate| (gate, heads));
        let [query, key, value] = self.convolve(state, mixed, &gates, parts, false, program);
        for slot in [query, key] {
            bring_to_length_1(slot, net, program);
        }

        program.step("gates");
        program.push(Op::Apply {
            function: Activation::Sigmoid,
            values: strength,
            rows: Rows::Tokens,
            width: heads,
        });
        let decay = self.decay(heads, (steps, None), program);

        let slots = [query, key, value, decay, strength];
        self.scan((index, net.taps), net.scan(), slots, None, program);
        program.step("gate");
        let weight = program.vector("ssm_norm", net.value_dim);
        program.push(Op::Norm {
            norm: self.spec.norm,
            weight: Some(weight),
            input: value,
            output: value,
            rows: Rows::Tokens,
            groups: heads,
            width: net.value_dim,
        });
        program.push(Op::Activate {
            gating: Gating::Product(Activation::Silu),
            gate: z,
            up: value,
            width: values,
        });
        self.recurrence_output("ssm_out", z, values, program)
    }

    fn delta_inputs(&self, net: &DeltaNet, input: Slot, program: &mut Builder) -> Inputs {
        let hidden = self.spec.hidden;
        let (keys, values, heads) = (net.key_width(), net.value_width(), net.value_heads);
        let channels = 2 * keys + values;
        let mixed = program.values("query-key-value", Rows::Tokens, channels);
        let z = program.values("state-gate", Rows::Tokens, values);
        let gates =
            ["state-strength", "state-steps"].map(|name| program.values(name, Rows::Tokens, heads));
        let all = match net.inputs {
            InputsIn::Apart => vec![("attn_qkv", channels, mixed), ("attn_gate", values, z)],
            InputsIn::ByKeyHead => {
                let width = channels + values;
                let slot = program.values("inputs-by-head", Rows::Tokens, width);
                vec![("ssm_in", width, slot)]
            }
        };
        let small = match net.gates {
            GatesIn::Apart => vec![
                ("ssm_beta", heads, gates[0]),
                ("ssm_alpha", heads, gates[1]),
            ],
            GatesIn::ByKeyHead => {
                let slot = program.values("gates-by-head", Rows::Tokens, 2 * heads);
                vec![("ssm_ba", 2 * heads, slot)]
            }
        };
        // Apart, because files have the small ones in another type, and products of one type are cut
        // between threads better.
        for products in [&all, &small] {
            let outputs = products.iter().map(|&(part, rows, slot)| {
                (program.matrix(part, rows, hidden, Bias::IfPresent), slot)
            });
            let outputs = outputs.collect();
            let blocks = "attention-input-blocks";
            program.product(input, blocks, Rows::Tokens, hidden, outputs);
        }
        if net.inputs == InputsIn::ByKeyHead {
            join_by_key_head(net, all[0].2, [mixed, z], program);
        }
        if net.gates == GatesIn::ByKeyHead {
            let each = heads / net.key_heads;
            for (gate, start) in gates.into_iter().zip([0, each]) {
                let from = (small[0].2, HeadRows::by_token(2 * each, start));
                let to = (gate, HeadRows::by_token(each, 0));
                program.columns(from, to, net.key_heads, each);
            }
        }
        Inputs { mixed, z, gates }
    }
}

/// Brings the parts of each head of keys together: `by_head` has its queries, keys, values and `z`.
fn join_by_key_head(net: &DeltaNet, by_head: Slot, [mixed, z]: [Slot; 2], program: &mut Builder) {
    let (keys, values) = (net.key_width(), net.value_width());
    let each = values / net.key_heads;
    let width = 2 * (net.key_dim + each);
    let query = program.values("state-query", Rows::Tokens, keys);
    let key = program.values("state-key", Rows::Tokens, keys);
    let value = program.values("state-value", Rows::Tokens, values);
    let parts = [
        (query, net.key_dim),
        (key, net.key_dim),
        (value, each),
        (z, each),
    ];
    let mut start = 0;
    for (part, columns) in parts {
        let from = (by_head, HeadRows::by_token(width, start));
        let to = (part, HeadRows::by_token(columns, 0));
        program.columns(from, to, net.key_heads, columns);
        start += columns;
    }
    let channels = 2 * keys + values;
    let mut start = 0;
    for (part, columns) in [(query, keys), (key, keys), (value, values)] {
        let from = (part, HeadRows::by_token(columns, 0));
        let to = (mixed, HeadRows::by_token(channels, start));
        match start {
            0 => program.columns(from, to, 1, columns),
            _ => program.columns_beside(from, to, 1, columns),
        }
        start += columns;
    }
}

/// A row over its length is its norm by the root of the mean square, over the root of its elements.
fn bring_to_length_1(slot: Slot, net: &DeltaNet, program: &mut Builder) {
    let dim = net.key_dim as f32;
    program.push(Op::Norm {
        norm: Norm {
            kind: NormKind::Rms,
            epsilon: LENGTH_EPSILON / dim,
        },
        weight: None,
        input: slot,
        output: slot,
        rows: Rows::Tokens,
        groups: net.key_heads,
        width: net.key_dim,
    });
    program.push(Op::Scale {
        values: slot,
        rows: Rows::Tokens,
        width: net.key_width(),
        factor: Factor::Fixed(1.0 / dim.sqrt()),
    });
}
