//! Which tokens of which session go into a step: a pure function.
//!
//! ```text
//! one token each              sessions that generate, in turns when there are too many
//! a share of what is left     the first prompt, so that it goes on whatever else comes
//! the rest, shortest first    prompts, each as far as somebody waits for it
//! what is left then           prompts in order
//! ```
//!
//! The shortest goes first because that is what waits least in all: a short prompt delays a long one
//! by little, and a long one a short one by much. The share keeps that from being for ever.

use lacuna_models::Shown;

/// What a session would like to compute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Tokens it has pending; zero when it cannot go on now.
    pub(crate) pending: usize,
    /// Whether each of them needs a row of logits, and not only the last.
    pub(crate) scored: bool,
    /// After how many of them a request that waits for their pages can start, if one does.
    pub(crate) awaited: Option<usize>,
    /// After how many of them a step must end, so that what there is then can be kept.
    pub(crate) stop: Option<usize>,
    /// Lower values go first.
    pub(crate) priority: i32,
}

impl Demand {
    /// Tokens until somebody gets something from them.
    fn goal(&self) -> usize {
        self.awaited.unwrap_or(self.pending).min(self.pending)
    }

    /// Tokens that one step may compute.
    fn within_step(&self) -> usize {
        self.stop.unwrap_or(self.pending).min(self.pending)
    }
}

/// Tokens and rows of logits of one step, and tokens of prompts beside generation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StepLimits {
    pub(crate) tokens: usize,
    pub(crate) rows: usize,
    pub(crate) mixed: usize,
}

/// Cuts the demands of sessions that need a row of logits for each token to the rows that are left
/// when every session has one. Returns the rows there are for demands of the usual kind, of which each
/// takes one at its end.
pub(crate) fn ration_rows(demands: &mut [Demand], rows: usize) -> usize {
    let asking = demands.iter().filter(|demand| demand.pending > 0).count();
    let mut spare = rows.saturating_sub(asking);
    let mut taken = 0;
    let scored = demands
        .iter_mut()
        .filter(|demand| demand.scored && demand.pending > 0);
    for demand in scored {
        let more = spare.min(demand.pending - 1);
        demand.pending = 1 + more;
        (spare, taken) = (spare - more, taken + more);
    }
    rows - taken
}

/// The first prompt gets at least one in this many of the tokens that a step has for prompts: however
/// many shorter ones come, it takes four times as many steps at most, and they have three quarters
/// of each.
const FIRST_SHARE: usize = 4;

/// Tokens to compute for each of `demands`, which are in the order of their requests. Sessions with a
/// single pending token come first, so that generation goes on while prompts are computed; what is
/// left of the tokens goes to prompts, but no more than `mixed` beside generation, which waits for
/// them. `turn` rotates which session generates first when there are more than fit.
pub(crate) fn schedule(demands: &[Demand], limits: StepLimits, turn: usize) -> Vec<usize> {
    let mut step = Step {
        counts: vec![0; demands.len()],
        tokens: limits.tokens,
        rows: limits.rows,
    };
    let rotated = |index: usize| (index + turn) % demands.len().max(1);
    for index in (0..demands.len()).map(rotated) {
        if demands[index].pending == 1 {
            step.give(index, demands[index], 1);
        }
    }
    if step.rows < limits.rows {
        step.tokens = step.tokens.min(limits.mixed);
    }
    let is_prompt = |&index: &usize| demands[index].pending > 1;
    let mut prompts: Vec<usize> = (0..demands.len()).filter(is_prompt).collect();
    if let Some(&first) = prompts.first() {
        let share = step.tokens.div_ceil(FIRST_SHARE);
        step.give(first, demands[first], share);
    }
    prompts.sort_by_key(|&index| (demands[index].priority, demands[index].goal()));
    for &index in &prompts {
        let goal = demands[index].goal();
        step.give(
            index,
            demands[index],
            goal.saturating_sub(step.counts[index]),
        );
    }
    prompts.sort_unstable();
    for &index in &prompts {
        step.give(index, demands[index], usize::MAX);
    }
    step.counts
}

/// What a session shows from its next token on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ahead<'a> {
    /// All images of its prompt.
    pub(crate) images: &'a [Shown],
    /// Its next token.
    pub(crate) start: usize,
}

/// Changes `counts`, the tokens of a step, so that it ends within no image: before it, or, where it is the next that a
/// session has to compute, behind it. The first session in order has room for that whatever others wanted, of which the
/// last wait for the next step; an image is no more than `most` tokens, which a step has at most.
pub(crate) fn keep_images_whole(counts: &mut [usize], ahead: &[Ahead<'_>], most: usize) {
    let mut first = true;
    for index in 0..counts.len() {
        let Ahead { images, start } = ahead[index];
        if counts[index] == 0 || images.is_empty() {
            continue;
        }
        let uncut = Shown::uncut(images, start, counts[index]);
        let Some(rest) = Shown::rest_of_image(images, start).filter(|_| uncut == 0) else {
            counts[index] = uncut;
            continue;
        };
        counts[index] = rest;
        let mut all: usize = counts.iter().sum();
        for other in (0..counts.len()).rev().filter(|other| *other != index) {
            if all > most && first {
                all -= std::mem::take(&mut counts[other]);
            }
        }
        if all > most {
            counts[index] = 0;
        }
        first = false;
    }
}

/// A step while it is filled.
struct Step {
    counts: Vec<usize>,
    tokens: usize,
    rows: usize,
}

impl Step {
    /// Takes up to `most` more tokens of a session.
    fn give(&mut self, index: usize, demand: Demand, most: usize) {
        let left = demand.within_step().saturating_sub(self.counts[index]);
        let mut taken = left.min(self.tokens).min(most);
        if taken > 0 && self.counts[index] + taken == demand.pending {
            // Without a row for the logits the last token waits for the next step.
            taken -= usize::from(self.rows == 0);
            self.rows = self.rows.saturating_sub(1);
        }
        self.counts[index] += taken;
        self.tokens -= taken;
    }
}

#[cfg(test)]
mod tests {
    use lacuna_models::spec::Grid;
    use proptest::prelude::*;

    use super::*;

    fn demands(pending: &[usize]) -> Vec<Demand> {
        let demand = |&pending: &usize| Demand {
            pending,
            ..Demand::default()
        };
        pending.iter().map(demand).collect()
    }

    fn planned(pending: &[usize], tokens: usize, rows: usize, turn: usize) -> Vec<usize> {
        let limits = StepLimits {
            tokens,
            rows,
            mixed: tokens,
        };
        schedule(&demands(pending), limits, turn)
    }

    #[test]
    fn prompts_are_computed_in_smaller_pieces_while_others_generate() {
        let limits = StepLimits {
            tokens: 64,
            rows: 8,
            mixed: 16,
        };
        let planned = |pending: &[usize]| schedule(&demands(pending), limits, 0);
        assert_eq!(planned(&[100]), [64], "nobody waits for it");
        assert_eq!(planned(&[1, 100]), [1, 16]);
        assert_eq!(planned(&[10, 1, 50]), [10, 1, 6]);
    }

    fn images(positions: &[std::ops::Range<usize>]) -> Vec<Shown> {
        let shown = |positions: &std::ops::Range<usize>| Shown {
            grid: Grid::row(positions.len()),
            positions: positions.clone(),
            rows: Vec::new().into(),
        };
        positions.iter().map(shown).collect()
    }

    #[test]
    fn a_step_ends_before_an_image_or_behind_it() {
        let (none, shown) = (images(&[]), images(std::slice::from_ref(&(20..52))));
        let whole = |counts: &[usize], starts: &[usize], images: &[Shown]| {
            let mut counts = counts.to_vec();
            let ahead = starts.iter().enumerate();
            let ahead: Vec<Ahead<'_>> = ahead
                .map(|(index, &start)| Ahead {
                    images: if index == 0 { images } else { &none },
                    start,
                })
                .collect();
            keep_images_whole(&mut counts, &ahead, 64);
            counts
        };
        assert_eq!(whole(&[40, 8], &[0, 0], &none), [40, 8]);
        assert_eq!(whole(&[40, 8], &[0, 0], &shown), [20, 8]);
        assert_eq!(whole(&[60], &[0], &shown), [60]);
        assert_eq!(whole(&[16, 8], &[20, 0], &shown), [32, 8], "there is room");
        assert_eq!(whole(&[16, 48], &[20, 0], &shown), [32, 0], "another waits");
        assert_eq!(whole(&[4, 8], &[30, 0], &shown), [22, 8], "the rest of one");
        assert_eq!(whole(&[1, 1], &[60, 9], &shown), [1, 1]);
        assert_eq!(whole(&[0, 8], &[20, 0], &shown), [0, 8], "it gets nothing");
        assert_eq!(
            whole(&[16, 32], &[20, 0], &shown),
            [32, 32],
            "no room is left"
        );
    }

    #[test]
    fn a_second_image_comes_along_if_there_is_room_for_all_of_it() {
        let shown = images(std::slice::from_ref(&(20..52)));
        let ahead = [20, 20].map(|start| Ahead {
            images: &shown,
            start,
        });
        for (most, expected) in [(63, [32, 0]), (64, [32, 32]), (65, [32, 32])] {
            let mut counts = [16, 16];
            keep_images_whole(&mut counts, &ahead, most);
            assert_eq!(counts, expected, "{most}");
        }
    }

    proptest! {
        /// Every session comes to its end, whatever it shows and whatever a step has for it.
        #[test]
        fn prompts_with_images_are_computed_to_their_ends(
            prompts in prop::collection::vec(prop::collection::vec((1usize..9, 1usize..16), 0..4), 1..5),
            mixed in 1usize..16,
        ) {
            let limits = StepLimits { tokens: 16, rows: 4, mixed };
            let mut sessions: Vec<(Vec<Shown>, usize, usize)> = Vec::new();
            for parts in &prompts {
                let (mut positions, mut end) = (Vec::new(), 0);
                for (text, image) in parts {
                    positions.push(end + text..end + text + image);
                    end += text + image;
                }
                sessions.push((images(&positions), 0, end + 1));
            }
            for turn in 0..400 {
                let pending = |(_, start, end): &(Vec<Shown>, usize, usize)| end - start;
                let wanted = demands(&sessions.iter().map(pending).collect::<Vec<_>>());
                let mut counts = schedule(&wanted, limits, turn);
                let ahead = sessions.iter().map(|(images, start, _)| Ahead { images, start: *start });
                keep_images_whole(&mut counts, &ahead.collect::<Vec<_>>(), limits.tokens);
                prop_assert!(counts.iter().sum::<usize>() <= limits.tokens);
                for ((shown, start, end), count) in sessions.iter_mut().zip(counts) {
                    let behind = *start + count;
                    prop_assert!(behind <= *end);
                    let cut = |it: &Shown| it.positions.start < behind && behind < it.positions.end;
                    prop_assert!(count == 0 || !shown.iter().any(cut));
                    *start = behind;
                }
            }
            prop_assert!(sessions.iter().all(|(_, start, end)| start == end));
        }
    }

    #[test]
    fn generation_goes_before_prompts_and_prompts_fill_the_rest() {
        assert_eq!(planned(&[100, 1, 1], 64, 8, 0), [62, 1, 1]);
        assert_eq!(planned(&[10, 1, 50, 1], 64, 8, 0), [10, 1, 50, 1]);
    }

    #[test]
    fn the_shortest_prompts_go_first_and_the_first_in_order_gets_its_share() {
        assert_eq!(planned(&[1000, 7, 300, 5], 64, 8, 0), [16, 7, 36, 5]);
        assert_eq!(
            planned(&[1000, 7, 5], 64, 8, 0),
            [52, 7, 5],
            "the share is no limit"
        );
        assert_eq!(
            planned(&[8, 1000, 20], 64, 8, 0),
            [8, 36, 20],
            "the first is the shortest"
        );
    }

    #[test]
    fn prompts_of_one_length_are_finished_one_after_the_other() {
        assert_eq!(planned(&[40, 40, 40], 64, 8, 0), [40, 24, 0]);
    }

    #[test]
    fn a_long_prompt_is_read_as_far_as_a_short_request_waits_for_it() {
        let limits = StepLimits {
            tokens: 64,
            rows: 8,
            mixed: 64,
        };
        let mut demands = demands(&[1000, 900, 50]);
        assert_eq!(schedule(&demands, limits, 0), [16, 0, 48]);
        demands[1].awaited = Some(20);
        assert_eq!(schedule(&demands, limits, 0), [16, 20, 28]);
        demands[1].awaited = Some(5000);
        assert_eq!(schedule(&demands, limits, 0), [16, 0, 48]);
    }

    #[test]
    fn a_lower_priority_value_goes_before_a_shorter_prompt() {
        let limits = StepLimits {
            tokens: 64,
            rows: 8,
            mixed: 64,
        };
        let mut demands = demands(&[1000, 900, 50]);
        demands[2].priority = 1;
        assert_eq!(schedule(&demands, limits, 0), [16, 48, 0]);
    }

    #[test]
    fn scored_prompts_share_the_rows_that_others_leave() {
        let rationed = |pending: &[usize], scored: &[bool], rows| {
            let mut demands = demands(pending);
            for (demand, &scored) in demands.iter_mut().zip(scored) {
                demand.scored = scored;
            }
            let left = ration_rows(&mut demands, rows);
            let pending: Vec<usize> = demands.iter().map(|demand| demand.pending).collect();
            (pending, left)
        };
        assert_eq!(rationed(&[100], &[true], 8), (vec![8], 1));
        let others = rationed(&[100, 1, 50, 0], &[true, false, false, false], 8);
        assert_eq!(others, (vec![6, 1, 50, 0], 3));
        let two = rationed(&[4, 100, 100], &[true, true, true], 8);
        assert_eq!(two, (vec![4, 3, 1], 3), "the first takes what it can");
        assert_eq!(rationed(&[9, 1], &[true, false], 2), (vec![1, 1], 2));
        assert_eq!(rationed(&[9], &[false], 2), (vec![9], 2));
        let waits = rationed(&[0, 9], &[true, true], 4);
        assert_eq!(waits, (vec![0, 4], 1), "one that cannot go on takes none");
    }

    #[test]
    fn too_many_sessions_take_turns() {
        assert_eq!(planned(&[1, 1, 1], 2, 8, 0), [1, 1, 0]);
        assert_eq!(planned(&[1, 1, 1], 2, 8, 2), [1, 0, 1]);
        assert_eq!(planned(&[1, 1, 1], 8, 2, 1), [0, 1, 1]);
    }

    #[test]
    fn without_a_row_of_logits_the_last_token_waits() {
        assert_eq!(planned(&[1, 5], 64, 1, 0), [1, 4]);
        assert_eq!(planned(&[0, 5], 64, 1, 0), [0, 5]);
        assert_eq!(planned(&[9, 5], 64, 1, 0), [9, 4]);
    }

    #[test]
    fn a_step_ends_where_there_is_something_to_keep() {
        let limits = StepLimits {
            tokens: 64,
            rows: 1,
            mixed: 64,
        };
        let mut demands = demands(&[40, 30]);
        demands[0].stop = Some(7);
        assert_eq!(schedule(&demands, limits, 0), [7, 30], "the other goes on");
        demands[1].stop = Some(500);
        assert_eq!(schedule(&demands, limits, 0), [7, 30]);
        demands[0].stop = Some(40);
        demands[1].stop = Some(29);
        assert_eq!(
            schedule(&demands, limits, 0),
            [35, 29],
            "no row of logits for what is not the end"
        );
    }

    proptest! {
        #[test]
        fn limits_hold_and_something_is_done(
            pending in prop::collection::vec(
                (0usize..40, prop::option::of(1usize..50), prop::option::of(1usize..50), -1i32..2),
                0..12,
            ),
            tokens in 1usize..50,
            rows in 1usize..8,
            mixed in 1usize..50,
            turn in 0usize..20,
        ) {
            let demand = |&(pending, awaited, stop, priority)| Demand {
                pending,
                awaited,
                stop,
                priority,
                scored: false,
            };
            let demands: Vec<Demand> = pending.iter().map(demand).collect();
            let counts = schedule(&demands, StepLimits { tokens, rows, mixed }, turn);
            let both = || counts.iter().zip(demands.iter().map(|demand| demand.pending));
            let generated = both().filter(|&(&count, pending)| count == 1 && pending == 1).count();
            let prompts = || both().filter(|&(_, pending)| pending > 1);
            let read: usize = prompts().map(|(count, _)| count).sum();
            prop_assert!(generated == 0 || read <= mixed);
            prop_assert!(generated + read <= tokens);
            let finished = both().filter(|&(&count, pending)| count > 0 && count == pending).count();
            prop_assert!(finished <= rows);
            prop_assert!(both().all(|(&count, pending)| count <= pending));
            let mut stops = counts.iter().zip(&demands);
            prop_assert!(stops.all(|(&count, demand)| demand.stop.is_none_or(|stop| count <= stop)));
            let something = both().any(|(_, pending)| pending > 0);
            prop_assert_eq!(generated + read > 0, something);
            let left = (tokens - generated).min(if generated > 0 { mixed } else { tokens });
            // Nothing is left lying that could be computed, but for last tokens without a row.
            let wanted = demands.iter().filter(|demand| demand.pending > 1);
            let wanted: usize = wanted.map(Demand::within_step).sum();
            prop_assert!(read + prompts().count() >= left.min(wanted) || read == left.min(wanted));
            let mut prompts = counts.iter().zip(&demands);
            if let Some((&count, demand)) = prompts.find(|(_, demand)| demand.pending > 1) {
                let share = left.div_ceil(FIRST_SHARE).min(demand.within_step());
                prop_assert!(count + 1 >= share, "{} of a share of {}", count, share);
            }
        }
    }
}
