//! What computing a token takes: multiplications and bytes, from the model's shapes.

use lacuna_models::Model;

use super::Batch;

pub(super) struct Work {
    /// Bytes of all tensors.
    pub(super) weight_bytes: u64,
    /// Weight bytes read to compute one token, or a few at once that have the same experts; others read
    /// more.
    pass_bytes: u64,
    /// Multiplications with the weights of all layers, per token.
    layer_macs: u64,
    /// Multiplications for one row of logits.
    logit_macs: u64,
    /// Multiplications of one query with one cached row, in all layers.
    row_macs: u64,
    /// Multiplications that states take of a token, in all layers.
    state_macs: u64,
    /// Bytes of a sequence's states, which every token reads and writes.
    state_bytes: u64,
}

impl Work {
    pub(super) fn of(model: &Model) -> Self {
        let spec = model.spec();
        let (layer_macs, logit_macs) = model.program().products();
        let attention = spec
            .layers
            .iter()
            .filter_map(|layer| layer.attention.as_ref());
        let row_macs = attention.map(|attention| {
            // One of K, one of V.
            attention.query_width() + attention.attended_width()
        });
        Self {
            weight_bytes: model.weight_bytes(),
            pass_bytes: model.active_weight_bytes(),
            layer_macs,
            logit_macs,
            row_macs: row_macs.sum::<usize>() as u64,
            state_macs: spec.state_macs() as u64,
            state_bytes: (spec.states().sum::<usize>() * size_of::<f32>()) as u64,
        }
    }

    /// Multiplications for a prompt of `tokens` in an empty context, with one row of logits.
    pub(super) fn prompt_macs(&self, tokens: usize) -> u64 {
        let tokens = tokens as u64;
        let rows_seen = tokens * (tokens + 1) / 2;
        tokens * (self.layer_macs + self.state_macs) + self.logit_macs + rows_seen * self.row_macs
    }

    /// Bytes read for one more token of each sequence of `batch`, of which a row has `row_bytes` over all layers, and
    /// bytes of states written. Rows in the same memory are read once.
    pub(super) fn step_bytes(&self, batch: Batch, row_bytes: usize) -> u64 {
        let read = if batch.shared { 1 } else { batch.sequences };
        let rows = ((read * batch.depth + batch.sequences) * row_bytes) as u64;
        self.pass_bytes + rows + 2 * batch.sequences as u64 * self.state_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_model_reads_all_its_weights_for_a_token() {
        let model = Model::load(lacuna_models::demo()).expect("the demo model loads");
        let work = Work::of(&model);
        let bytes = |sequences, depth, shared| {
            let batch = Batch {
                depth,
                sequences,
                shared,
            };
            work.step_bytes(batch, 100) - model.weight_bytes()
        };
        assert_eq!(bytes(0, 0, false), 0);
        assert_eq!(bytes(2, 9, false), 2 * 10 * 100);
        assert_eq!(bytes(2, 9, true), 11 * 100);
        let [one, two, three] = [1, 2, 3].map(|tokens| work.prompt_macs(tokens));
        let second = two - one;
        assert_eq!(
            three - two,
            second + work.row_macs,
            "each token sees one row more"
        );
    }
}
