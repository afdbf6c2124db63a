//! `lacuna bench experts`: what slots would find of experts that a model's tokens chose, by which of them leave.
//!
//! A record says which experts tokens had; no model is needed. What a pass uses of a layer is taken together, as the
//! engine does: experts that are there are found, then the others come, one after another.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufReader, Write};

use anyhow::{Context, Result};
use lacuna_cli::output;
use lacuna_models::plan::ExpertSlots;
use lacuna_models::trace::{LayerUse, Replay, Trace};
use serde::Serialize;

use crate::arguments::BenchExpertsArgs;

#[derive(Serialize)]
struct Report {
    trace: String,
    experts: usize,
    layers: usize,
    /// Uses of a layer by a pass.
    uses: usize,
    tokens: usize,
    rows: Vec<Row>,
    /// Whether it helps to keep what was used last, in words.
    finding: &'static str,
}

/// What so many slots in each layer find: the part of experts.
#[derive(Serialize)]
struct Row {
    slots: usize,
    /// The part of experts that they hold, which is what they find when experts come by chance.
    share: f64,
    /// That which was used least recently leaves: what the engine does.
    lru: f64,
    /// That which was used least often leaves.
    lfu: f64,
    /// The same as the first, but what was used once leaves before what was used again.
    slru: f64,
    /// That which is used again last leaves: no policy finds more, and none can know.
    belady: f64,
    /// Experts that a token lacks, over all layers, with the first of these policies.
    lru_misses_per_token: f64,
}

pub(crate) fn run(args: &BenchExpertsArgs) -> Result<()> {
    let path = &args.trace;
    let file = File::open(path).with_context(|| format!("cannot open `{}`", path.display()))?;
    let trace = Trace::read(BufReader::new(file))
        .with_context(|| format!("`{}` is no record of experts", path.display()))?;
    let slots: Vec<usize> = match &args.slots[..] {
        [] => {
            let percents = args.resident.iter();
            let slots = percents.map(|percent| trace.experts * *percent as usize / 100);
            slots.collect()
        }
        slots => slots.iter().map(|slots| slots.get()).collect(),
    };
    let report = report(path.display().to_string(), &trace, &slots);
    if args.json {
        return output::json(&report);
    }
    output::print(|out| print(out, &report))
}

fn report(name: String, trace: &Trace, slots: &[usize]) -> Report {
    let first = trace.uses.iter().filter(|of| of.layer == 0);
    let tokens = first.map(|of| of.tokens).sum();
    let later = Later::of(trace);
    let mut rows: Vec<Row> = Vec::new();
    for slots in slots {
        let slots = (*slots).clamp(1, trace.experts);
        if rows.last().is_some_and(|row| row.slots == slots) {
            continue;
        }
        let lru = trace.replay(slots);
        let rate = |policy| replay(trace, &later, slots, policy).hit_rate();
        rows.push(Row {
            slots,
            share: slots as f64 / trace.experts as f64,
            lru: lru.hit_rate(),
            lfu: rate(Policy::Frequency),
            slru: rate(Policy::Segmented),
            belady: rate(Policy::Future),
            lru_misses_per_token: lru.misses as f64 / (tokens as f64).max(1.0),
        });
    }
    // Where slots find most beyond chance.
    let gains = rows.iter().filter(|row| row.slots < trace.experts);
    let best = gains.max_by(|a, b| (a.lru - a.share).total_cmp(&(b.lru - b.share)));
    let finding = best.map_or("every expert has a slot", |row| {
        let slots = ExpertSlots {
            slots: row.slots,
            experts: trace.experts,
            used: 1,
            layers: trace.layers,
            bytes: 0,
            expert_bytes: 0,
        };
        slots.finding(row.lru)
    });
    Report {
        trace: name,
        experts: trace.experts,
        layers: trace.layers,
        uses: trace.uses.len(),
        tokens,
        rows,
        finding,
    }
}

fn print(out: &mut dyn Write, report: &Report) -> std::io::Result<()> {
    writeln!(
        out,
        "{}: {} tokens, {} experts in each of {} layers",
        report.trace, report.tokens, report.experts, report.layers
    )?;
    writeln!(
        out,
        "\n{:>8}{:>9}{:>9}{:>9}{:>9}{:>9}{:>18}",
        "slots", "share", "LRU", "LFU", "SLRU", "Belady", "LRU misses/token"
    )?;
    for row in &report.rows {
        write!(out, "{:>8}", row.slots)?;
        for rate in [row.share, row.lru, row.lfu, row.slru, row.belady] {
            write!(out, "{:>8.1}%", 100.0 * rate)?;
        }
        writeln!(out, "{:>18.1}", row.lru_misses_per_token)?;
    }
    writeln!(out, "\n{}", report.finding)
}

/// Which expert leaves, beside [`Trace::replay`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Policy {
    Frequency,
    Segmented,
    Future,
}

/// Of slots, those for experts that were used more than once while they were there, in percent.
const PROTECTED_PERCENT: usize = 80;

/// When each expert of each use is used next: the number of that use, or the largest.
struct Later(Vec<Vec<usize>>);

impl Later {
    fn of(trace: &Trace) -> Self {
        let mut next: HashMap<(usize, u32), usize> = HashMap::new();
        let uses = trace.uses.iter().enumerate().rev();
        let mut later: Vec<Vec<usize>> = uses
            .map(|(number, of)| {
                let experts = of.experts.iter();
                let each = experts.map(|expert| next.insert((of.layer, *expert), number));
                each.map(|next| next.unwrap_or(usize::MAX)).collect()
            })
            .collect();
        later.reverse();
        Self(later)
    }
}

fn replay(trace: &Trace, later: &Later, slots: usize, policy: Policy) -> Replay {
    let mut layers = vec![Layer::default(); trace.layers];
    let mut found = Replay::default();
    for (number, (of, next)) in trace.uses.iter().zip(&later.0).enumerate() {
        let hits = layers[of.layer].serve(of, (number, next), slots, policy);
        found.add(of, hits);
    }
    found
}

/// The experts that a layer holds.
#[derive(Debug, Clone, Default)]
struct Layer {
    held: HashMap<u32, Held>,
    /// How often each was ever used.
    counts: HashMap<u32, u64>,
    clock: u64,
}

#[derive(Debug, Clone, Copy)]
struct Held {
    last: u64,
    next: usize,
    is_protected: bool,
}

impl Layer {
    /// A use of experts, each of which is used next when `next` says; how many were there.
    fn serve(
        &mut self,
        of: &LayerUse,
        (number, next): (usize, &[usize]),
        slots: usize,
        policy: Policy,
    ) -> usize {
        let uses = || of.experts.iter().copied().zip(next.iter().copied());
        let there = |(expert, _): &(u32, usize)| self.held.contains_key(expert);
        let (hits, missing): (Vec<_>, Vec<_>) = uses().partition(there);
        for &(expert, next) in &hits {
            self.enter(expert, next, true);
        }
        self.demote(slots);
        for (expert, next) in missing {
            if self.held.len() == slots {
                let key = |(expert, held): (&u32, &Held)| {
                    // What this very use still needs is not yet what leaves, as long as there is other.
                    let is_used = of.experts.binary_search(expert).is_ok();
                    match policy {
                        Policy::Frequency => (is_used, self.counts[expert], held.last),
                        Policy::Segmented => (is_used, u64::from(held.is_protected), held.last),
                        Policy::Future => (false, (usize::MAX - held.next) as u64, held.last),
                    }
                };
                let leaves = self
                    .held
                    .iter()
                    .min_by_key(|(expert, held)| key((expert, held)));
                let leaves = leaves.map(|(expert, _)| *expert);
                if let Some(expert) = leaves {
                    self.held.remove(&expert);
                }
            }
            self.enter(expert, next, false);
        }
        debug_assert!(next.iter().all(|next| *next > number), "later");
        hits.len()
    }

    fn enter(&mut self, expert: u32, next: usize, is_protected: bool) {
        self.clock += 1;
        *self.counts.entry(expert).or_default() += 1;
        let held = Held {
            last: self.clock,
            next,
            is_protected,
        };
        self.held.insert(expert, held);
    }

    /// Lets as many experts be used once again as are too many to be protected, those used least recently.
    fn demote(&mut self, slots: usize) {
        let most = (slots * PROTECTED_PERCENT / 100).max(1);
        let mut protected: Vec<_> = self
            .held
            .values_mut()
            .filter(|it| it.is_protected)
            .collect();
        let over = protected.len().saturating_sub(most);
        protected.sort_by_key(|it| it.last);
        protected[..over]
            .iter_mut()
            .for_each(|it| it.is_protected = false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(experts: usize, uses: impl IntoIterator<Item = Vec<u32>>) -> Trace {
        let of = |mut experts: Vec<u32>| {
            experts.sort_unstable();
            LayerUse {
                layer: 0,
                tokens: 1,
                experts,
            }
        };
        Trace {
            experts,
            layers: 1,
            uses: uses.into_iter().map(of).collect(),
        }
    }

    fn row(trace: &Trace, percent: u32) -> Row {
        let slots = trace.experts * percent as usize / 100;
        let mut report = report(String::new(), trace, &[slots]);
        report.rows.remove(0)
    }

    #[test]
    fn of_a_cycle_the_last_used_are_the_worst_to_keep() {
        let cycle = trace(4, (0..400).map(|at| vec![at % 4]));
        let row = row(&cycle, 50);
        assert_eq!((row.slots, row.lru, row.share), (2, 0.0, 0.5));
        // Of a cycle of N with C slots no policy finds more than (C - 1) / (N - 1).
        assert!((row.belady - 1.0 / 3.0).abs() < 0.01, "{}", row.belady);
        assert_eq!(row.lru_misses_per_token, 1.0);
    }

    #[test]
    fn experts_that_come_often_are_worth_keeping_by_how_often() {
        // Two that always come again between others that never do.
        let uses =
            (0..300).flat_map(|at| [vec![0], vec![1], vec![2 + at % 30], vec![2 + (at + 7) % 30]]);
        let row = row(&trace(32, uses), 10);
        assert_eq!(row.slots, 3);
        assert_eq!(row.lru, 0.0);
        assert!(row.lfu > 0.49 && row.slru <= row.belady && row.belady > 0.49);
    }

    #[test]
    fn nothing_finds_more_than_what_knows_what_comes() {
        let mut state = 1u64;
        let mut random = move || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 33) as u32
        };
        let uses = (0..800).map(|_| {
            // The least of three draws: some come often.
            let mut draw = || (0..3).map(|_| random() % 16).min().unwrap_or(0);
            let mut experts = vec![draw(), draw()];
            experts.dedup();
            experts
        });
        let trace = trace(16, uses.collect::<Vec<_>>());
        for percent in [10, 25, 50, 75, 100] {
            let row = row(&trace, percent);
            for other in [row.lru, row.lfu, row.slru] {
                assert!(other <= row.belady + 1e-9, "{percent} %");
            }
            assert!(row.lru >= row.share - 0.05, "{percent} %");
        }
        let whole = row(&trace, 100);
        assert_eq!(whole.lru, whole.belady);
    }

    #[test]
    fn a_record_of_chance_is_said_to_be_one() {
        let mut state = 7u64;
        let uses = (0..3_000).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            vec![(state >> 33) as u32 % 32]
        });
        let chance = report(String::new(), &trace(32, uses), &[8, 16]);
        assert!(chance.finding.contains("chance"), "{}", chance.finding);
        let again = (0..3_000u32).map(|at| vec![at / 9 % 32]);
        let again = report(String::new(), &trace(32, again), &[8, 16]);
        assert!(!again.finding.contains("chance"), "{}", again.finding);
    }
}
