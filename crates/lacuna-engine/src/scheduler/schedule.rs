//! Which tokens of which session go into a step: a pure function.

/// What a session would like to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Tokens it has pending; zero when it cannot go on now.
    pub(crate) pending: usize,
}

/// Tokens and rows of logits of one step, and tokens of prompts beside generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    pub(crate) mixed: usize,
}

/// Tokens to compute for each of `demands`, oldest first. Sessions with a single pending token
/// come first, so that generation goes on while prompts are computed; what is left of the token
/// budget goes to prompts in order, but no more than `mixed` beside generation, which waits for them.
/// `first` rotates which session is served first when there are more than fit.
pub(crate) fn schedule(demands: &[Demand], limits: StepLimits, first: usize) -> Vec<usize> {
    let mut counts = vec![0; demands.len()];
    let StepLimits {
        mut tokens,
        mut rows,
        mixed,
    } = limits;
    let order = |index: usize| (index + first) % demands.len().max(1);
    for index in (0..demands.len()).map(order) {
        if demands[index].pending == 1 && tokens > 0 && rows > 0 {
            counts[index] = 1;
            tokens -= 1;
            rows -= 1;
        }
    }
    if rows < limits.rows {
        tokens = tokens.min(mixed);
    }
    for (count, demand) in counts.iter_mut().zip(demands) {
        if demand.pending <= 1 || tokens == 0 {
            continue;
        }
        let mut taken = demand.pending.min(tokens);
        if taken == demand.pending {
            // Without a row for the logits the last token waits for the next step.
            taken -= usize::from(rows == 0);
            rows = rows.saturating_sub(1);
        }
        *count = taken;
        tokens -= taken;
    }
    counts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn planned(pending: &[usize], tokens: usize, rows: usize, first: usize) -> Vec<usize> {
        let demands: Vec<Demand> = pending.iter().map(|&pending| Demand { pending }).collect();
        let mixed = tokens;
        schedule(
            &demands,
            StepLimits {
                tokens,
                rows,
                mixed,
            },
            first,
        )
    }

    #[test]
    fn prompts_are_computed_in_smaller_pieces_while_others_generate() {
        let limits = StepLimits {
            tokens: 64,
            rows: 8,
            mixed: 16,
        };
        let planned = |pending: &[usize]| {
            let demands: Vec<Demand> = pending.iter().map(|&pending| Demand { pending }).collect();
            schedule(&demands, limits, 0)
        };
        assert_eq!(planned(&[100, 50]), [64, 0], "nobody waits for them");
        assert_eq!(planned(&[1, 100, 50]), [1, 16, 0]);
        assert_eq!(planned(&[10, 1, 50]), [10, 1, 6]);
    }

    #[test]
    fn generation_goes_before_prompts_and_prompts_fill_the_rest() {
        assert_eq!(planned(&[100, 1, 50, 1], 64, 8, 0), [62, 1, 0, 1]);
        assert_eq!(planned(&[10, 1, 50, 1], 64, 8, 0), [10, 1, 50, 1]);
    }

    #[test]
    fn too_many_sessions_take_turns() {
        assert_eq!(planned(&[1, 1, 1], 2, 8, 0), [1, 1, 0]);
        assert_eq!(planned(&[1, 1, 1], 2, 8, 2), [1, 0, 1]);
    }

    #[test]
    fn without_a_row_of_logits_the_last_token_waits() {
        assert_eq!(planned(&[1, 5], 64, 1, 0), [1, 4]);
        assert_eq!(planned(&[0, 5], 64, 1, 0), [0, 5]);
    }

    proptest! {
        #[test]
        fn limits_hold_and_something_is_done(
            pending in prop::collection::vec(0usize..40, 0..12),
            tokens in 1usize..50,
            rows in 1usize..8,
            mixed in 1usize..50,
            first in 0usize..20,
        ) {
            let demands: Vec<Demand> = pending.iter().map(|&pending| Demand { pending }).collect();
            let counts = schedule(&demands, StepLimits { tokens, rows, mixed }, first);
            let generated = counts.iter().zip(&pending).any(|(&count, &pending)| count == 1 && pending == 1);
            let prompts = counts.iter().zip(&pending).filter(|(_, pending)| **pending > 1);
            prop_assert!(!generated || prompts.map(|(count, _)| count).sum::<usize>() <= mixed);
            prop_assert!(counts.iter().sum::<usize>() <= tokens);
            let finished = counts.iter().zip(&pending).filter(|(count, pending)| **count > 0 && count == pending);
            prop_assert!(finished.count() <= rows);
            prop_assert!(counts.iter().zip(&pending).all(|(count, pending)| count <= pending));
            prop_assert_eq!(counts.iter().any(|&count| count > 0), pending.iter().any(|&pending| pending > 0));
        }
    }
}
