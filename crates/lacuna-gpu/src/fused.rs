//! What is recorded of a program, made once for all passes: operations that follow one another as one kernel, where there
//! is one that does all of them.
//!
//! What such kernels quantize goes to room beside the slots, because slots share bytes as the program's steps allow, and a
//! kernel may do what belongs to two steps. Rows that nothing reads but products of quantized matrices are not written.

use lacuna_kernels::{AttentionShape, ExpertInput, RopeStyle, Routing};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::{Access, Op, Rows, Slot, VectorId};
use lacuna_models::spec::{Gating, Norm, NormKind};
use lacuna_models::{BatchLimits, Model};

use crate::arranged::BLOCK;
use crate::part::Part;

/// One thing that a pass records.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Action {
    /// An operation by itself.
    Op(Op),
    /// Products of rows that the action before it quantized, with matrices or with those of experts.
    Products(Op),
    /// Rows are added to others, which are normed and quantized.
    Prepare(Prepare),
    /// The products of a gate are quantized.
    Gate {
        gating: Gating,
        gate: Slot,
        up: Slot,
        width: usize,
    },
    /// New queries, keys and values are made ready and kept.
    Heads(Heads),
    /// Attention whose results are quantized.
    Attend(Op),
}

/// A norm, and its weights.
pub(crate) type Weighed = (Norm, Option<VectorId>);

/// What comes between two products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Prepare {
    pub(crate) source: Slot,
    pub(crate) added: Option<Added>,
    pub(crate) norm: Weighed,
    /// Where normed rows go, if anything reads them.
    pub(crate) to: Option<Slot>,
    pub(crate) quantized: bool,
    pub(crate) rows: Rows,
    pub(crate) width: usize,
}

/// Rows that are added to others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Added {
    pub(crate) from: Slot,
    pub(crate) factor: Option<f32>,
    /// Their own norm, before that.
    pub(crate) norm: Option<(Norm, VectorId)>,
}

/// New queries, keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Heads {
    pub(crate) layer: usize,
    pub(crate) shape: AttentionShape,
    pub(crate) queries: Slot,
    pub(crate) keys: Slot,
    pub(crate) values: Slot,
    /// The norms of queries and of keys.
    pub(crate) norms: Option<[Weighed; 2]>,
    pub(crate) turn: Option<Turn>,
}

/// How heads are turned by position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Turn {
    pub(crate) table: Slot,
    pub(crate) dimensions: usize,
    pub(crate) style: RopeStyle,
}

/// What is done to heads before attention.
struct Turned {
    slot: Slot,
    norm: Option<Weighed>,
    turn: Option<Turn>,
}

/// What products make of rows that were computed just before.
struct Reading {
    /// Something reads the rows themselves.
    rows: bool,
    /// Matrices are quantized.
    blocks: bool,
}

/// All that is recorded of `part`.
///
/// With `in_blocks`, KV rows are blocks of bytes, and queries, keys, values and results are transformed by themselves.
pub(crate) fn actions(part: &Part, plan: &ArenaPlan, in_blocks: bool) -> Vec<Action> {
    // Nothing is to be done for these.
    let nothing = |op: &&Op| {
        matches!(
            op,
            Op::Positions { .. }
                | Op::CheckFinite { .. }
                | Op::AddImages { .. }
                | Op::StateInputs { .. }
        )
    };
    let fusing = Fusing {
        ops: part.ops().filter(|op| !nothing(op)).collect(),
        model: &part.model,
        plan,
        in_blocks,
    };
    fusing.all()
}

/// The most bytes that actions quantize at once.
pub(crate) fn quantized_bytes(actions: &[Action], limits: BatchLimits) -> usize {
    let bytes = actions.iter().map(|action| match action {
        // A byte for each element, and eight for each block.
        Action::Products(Op::Product { rows, columns, .. }) => {
            rows.at_most(limits) * (columns / BLOCK) * (BLOCK + 8)
        }
        Action::Products(Op::ExpertProduct {
            routing,
            from,
            columns,
            ..
        }) => {
            let rows = limits.tokens * rows_of_token(routing, *from);
            rows * (columns / BLOCK) * (BLOCK + 8)
        }
        _ => 0,
    });
    bytes.max().unwrap_or(0)
}

/// Rows that experts' products read of each token.
pub(crate) fn rows_of_token(routing: &Routing, from: ExpertInput) -> usize {
    match from {
        ExpertInput::Tokens => 1,
        ExpertInput::Choices => routing.used,
    }
}

struct Fusing<'a> {
    ops: Vec<&'a Op>,
    model: &'a Model,
    plan: &'a ArenaPlan,
    in_blocks: bool,
}

impl Fusing<'_> {
    fn all(&self) -> Vec<Action> {
        let mut actions = Vec::new();
        let (mut at, mut quantized) = (0, false);
        while let Some(&op) = self.ops.get(at) {
            let (action, count) = match quantized {
                true => (Action::Products(op.clone()), 1),
                false => self.next(at),
            };
            quantized = match &action {
                Action::Prepare(prepare) => prepare.quantized,
                Action::Gate { .. } | Action::Attend(_) => true,
                _ => false,
            };
            actions.push(action);
            at += count;
        }
        actions
    }

    /// What is recorded from the operation `at` on, and of how many operations it is.
    fn next(&self, at: usize) -> (Action, usize) {
        let fused = self.heads(at).or_else(|| self.prepare(at));
        let fused = fused.or_else(|| Some((self.gate(at)?, 1)));
        let fused = fused.or_else(|| Some((self.attend(at)?, 1)));
        fused.unwrap_or_else(|| (Action::Op(self.ops[at].clone()), 1))
    }

    /// Whether what is in `slot` is read by the operation `at` or by one behind it.
    fn is_read(&self, slot: Slot, at: usize) -> bool {
        let uses = self.ops[at..].iter().flat_map(|op| op.uses());
        let mut uses = uses.filter(|(used, _)| *used == slot);
        uses.next()
            .is_some_and(|(_, access)| access == Access::Read)
    }

    /// What is made of `slot` by the operation `at` and those behind it.
    fn reading(&self, slot: Slot, at: usize) -> Reading {
        match self.ops.get(at) {
            Some(Op::Product { input, outputs, .. }) if *input == slot => {
                let quantized = |id| self.model.matrix(id).matrix.dtype().is_quantized();
                let blocks = outputs.iter().filter(|(id, _)| quantized(*id)).count();
                Reading {
                    rows: blocks < outputs.len() || self.is_read(slot, at + 1),
                    blocks: blocks > 0,
                }
            }
            Some(Op::ExpertProduct { input, outputs, .. }) if *input == slot => {
                let blocks = outputs.iter().filter(|(id, _)| {
                    let mut experts = self.model.experts(*id);
                    experts.any(|expert| expert.matrix.dtype().is_quantized())
                });
                let blocks = blocks.count();
                Reading {
                    rows: blocks < outputs.len() || self.is_read(slot, at + 1),
                    blocks: blocks > 0,
                }
            }
            _ => Reading {
                rows: true,
                blocks: false,
            },
        }
    }

    /// Whether nothing reads `slot` from the operation `at` on but products of quantized matrices there.
    fn is_only_quantized(&self, slot: Slot, at: usize) -> bool {
        let reading = self.reading(slot, at);
        reading.blocks && !reading.rows
    }

    fn prepare(&self, at: usize) -> Option<(Action, usize)> {
        let fused = self.added(at).and_then(|(added, count)| {
            let prepare = self.norm(at + count, Some(added))?;
            Some((prepare, count + 1))
        });
        let (prepare, count) = match fused {
            Some(fused) => fused,
            None => (self.norm(at, None)?, 1),
        };
        Some((Action::Prepare(prepare), count))
    }

    /// Rows that are added to the next norm's input, perhaps normed themselves, and of how many operations that is.
    fn added(&self, at: usize) -> Option<(Added, usize)> {
        let (norm, start) = match *self.ops.get(at)? {
            Op::Norm {
                norm,
                weight: Some(weight),
                input,
                output,
                groups: 1,
                ..
            } if input == output => (Some((*norm, *weight, *input)), at + 1),
            _ => (None, at),
        };
        let Op::Add { from, factor, .. } = **self.ops.get(start)? else {
            return None;
        };
        let own = norm.is_none_or(|(_, _, slot)| slot == from && !self.is_read(slot, start + 1));
        let norm = norm.map(|(norm, weight, _)| (norm, weight));
        let added = Added { from, factor, norm };
        own.then_some((added, start + 1 - at))
    }

    /// The norm `at`, of rows that `added` was added to just before.
    fn norm(&self, at: usize, added: Option<Added>) -> Option<Prepare> {
        let Op::Norm {
            norm,
            weight,
            input,
            output,
            rows,
            groups: 1,
            width,
        } = **self.ops.get(at)?
        else {
            return None;
        };
        let reading = self.reading(output, at + 1);
        let to = reading.rows.then_some(output);
        let fits = match (added, self.ops[at - usize::from(added.is_some())]) {
            (None, _) => true,
            (
                Some(added),
                Op::Add {
                    to: sum,
                    rows: r,
                    width: w,
                    ..
                },
            ) => {
                let same = (*sum, *r, *w) == (input, rows, width);
                same && to.is_none_or(|to| self.are_apart(added.from, to))
            }
            _ => false,
        };
        let prepare = Prepare {
            source: input,
            added,
            norm: (norm, weight),
            to,
            quantized: reading.blocks,
            rows,
            width,
        };
        (fits && width.is_multiple_of(4)).then_some(prepare)
    }

    /// Whether rows of one slot can be read while as wide ones of the other are written: where they begin at the same
    /// byte, each element is written by the thread that has read what was there.
    fn are_apart(&self, one: Slot, other: Slot) -> bool {
        let [one, other] = [one, other].map(|slot| self.plan.placement(slot).range());
        one.start == other.start || one.end <= other.start || other.end <= one.start
    }

    fn gate(&self, at: usize) -> Option<Action> {
        let Op::Activate {
            gating,
            gate,
            up,
            width,
        } = *self.ops[at]
        else {
            return None;
        };
        self.is_only_quantized(gate, at + 1)
            .then_some(Action::Gate {
                gating,
                gate,
                up,
                width,
            })
    }

    fn attend(&self, at: usize) -> Option<Action> {
        let op = self.ops[at];
        let Op::Attend { shape, output, .. } = op else {
            return None;
        };
        let quantized = self.is_only_quantized(*output, at + 1);
        let whole = shape.value_dim.is_multiple_of(BLOCK);
        (quantized && whole && !self.in_blocks).then(|| Action::Attend(op.clone()))
    }

    /// What is done to the heads of one slot, and of how many operations that is.
    fn turned(&self, at: usize, heads: [usize; 2]) -> Option<(Turned, usize)> {
        let norm = match **self.ops.get(at)? {
            Op::Norm {
                norm,
                weight,
                input,
                output,
                rows: Rows::Tokens,
                groups,
                width,
            } if (norm.kind, input, [groups, width]) == (NormKind::Rms, output, heads) => {
                Some((input, (norm, weight)))
            }
            _ => None,
        };
        let behind = at + usize::from(norm.is_some());
        let turn = match **self.ops.get(behind)? {
            Op::Rotate {
                heads_of,
                table,
                heads: count,
                head_dim,
                dimensions,
                style,
            } if [count, head_dim] == heads => {
                let turn = Turn {
                    table,
                    dimensions,
                    style,
                };
                Some((heads_of, turn)).filter(|_| norm.is_none_or(|(slot, _)| slot == heads_of))
            }
            _ => None,
        };
        let slot = norm.map(|norm| norm.0).or(turn.map(|turn| turn.0))?;
        let turned = Turned {
            slot,
            norm: norm.map(|norm| norm.1),
            turn: turn.map(|turn| turn.1),
        };
        Some((turned, behind + usize::from(turn.is_some())))
    }

    /// Norms and rotations of queries and keys, and the rows that are stored then.
    fn heads(&self, at: usize) -> Option<(Action, usize)> {
        // What attention it is for says what heads there are.
        let near = &self.ops[at..self.ops.len().min(at + 6)];
        let shape = near.iter().find_map(|op| match op {
            Op::Attend { shape, .. } => Some(*shape),
            _ => None,
        })?;
        let (query, behind) = self.turned(at, [shape.query_heads, shape.head_dim])?;
        let (key, behind) = self.turned(behind, [shape.kv_heads, shape.head_dim])?;
        let Op::Store {
            layer,
            keys,
            values: Some(values),
            width,
        } = **self.ops.get(behind)?
        else {
            return None;
        };
        let Op::Attend { queries, .. } = **self.ops.get(behind + 1)? else {
            return None;
        };
        if self.in_blocks {
            return None;
        }
        let norms = match (query.norm, key.norm) {
            (Some(query), Some(key)) if query.0 == key.0 => Some([query, key]),
            (None, None) => None,
            _ => return None,
        };
        let fits = (queries, keys, query.turn) == (query.slot, key.slot, key.turn)
            && shape.value_dim == shape.head_dim
            && width == shape.kv_heads * shape.head_dim
            && ![keys, values]
                .iter()
                .any(|slot| self.is_read(*slot, behind + 1));
        let heads = Heads {
            layer,
            shape,
            queries,
            keys,
            values,
            norms,
            turn: query.turn,
        };
        fits.then_some((Action::Heads(heads), behind + 1 - at))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Arc;

    use lacuna_files::ModelFiles;

    use super::*;

    /// What is recorded of a model: a letter for each action.
    fn recorded(files: ModelFiles) -> String {
        let model = Arc::new(Model::load(files).expect("the fixture loads"));
        let limits = BatchLimits {
            tokens: 16,
            logit_rows: 1,
            context_tokens: 64,
        };
        let plan = ArenaPlan::new(model.program(), limits).expect("small");
        let letter = |action: &Action| match action {
            Action::Op(_) => 'o',
            Action::Products(_) => 'p',
            Action::Prepare(_) => 'n',
            Action::Gate { .. } => 'g',
            Action::Heads(_) => 'h',
            Action::Attend(_) => 'a',
        };
        let part = Part::behind(model, 0).expect("all of it");
        actions(&part, &plan, false).iter().map(letter).collect()
    }

    fn fixture(path: &str) -> ModelFiles {
        let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
        ModelFiles::open(&reference.join(path)).expect("the fixture opens")
    }

    #[test]
    fn a_layer_of_quantized_matrices_is_nine_actions() {
        let recorded = recorded(lacuna_models::demo());
        assert!(recorded.contains("nphapnpgpnphapnpgp"), "{recorded}");
    }

    #[test]
    fn heads_that_are_no_whole_blocks_are_quantized_by_themselves() {
        assert_eq!(
            recorded(fixture("qwen3-types/Q8_0.gguf")),
            "oonphoonpgpoonpo"
        );
    }

    #[test]
    fn a_layer_of_floats_is_nine_too_also_with_norms_behind_its_parts() {
        for path in ["qwen3/hf", "families/gemma2/hf"] {
            let recorded = recorded(fixture(path));
            assert!(
                recorded.contains("nohoonooonohoonooo"),
                "{path}: {recorded}"
            );
        }
    }
}
