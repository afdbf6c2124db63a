//! A plan that is wrong in any way that matters is refused.

use lacuna_kernels::RopeStyle;
use proptest::prelude::*;

use super::*;
use crate::config::{Rope, RopeScaling};
use crate::plan::pass::{Element, Lifetime, Shape};
use crate::scratch::BatchLimits;

fn config() -> Config {
    Config {
        architecture: "qwen3",
        layers: 3,
        hidden: 96,
        query_heads: 6,
        kv_heads: 2,
        head_dim: 32,
        feed_forward: 160,
        vocabulary: 500,
        context_tokens: 256,
        norm_epsilon: 1e-6,
        rope: Rope {
            style: RopeStyle::HalfSplit,
            theta: 1e4,
            scaling: RopeScaling::None,
        },
    }
}

const LIMITS: BatchLimits = BatchLimits {
    tokens: 7,
    logit_rows: 3,
    context_tokens: 256,
};

fn plan() -> ArenaPlan {
    ArenaPlan::new(&config(), LIMITS).expect("a small plan")
}

/// What a forward pass does to the bytes, played through: whether each buffer fits, is where a
/// vector load may be, is handed out at every step that uses it, and still holds at each use what
/// was last put there. Written from the table of steps alone, a block played twice.
fn plays(plan: &ArenaPlan) -> bool {
    let block = |step: &Step| Step::BLOCK.contains(*step);
    let (inside, outside): (Vec<_>, Vec<_>) =
        Step::ALL.into_iter().partition(|(step, _)| block(step));
    let (before, after): (Vec<_>, Vec<_>) = outside
        .into_iter()
        .partition(|(step, _)| *step < Step::BLOCK.first);
    let pass = [&before[..], &inside, &inside, &after].concat();

    let mut owner = vec![None; plan.bytes];
    for (at, &(step, used)) in pass.iter().enumerate() {
        for &buffer in used {
            let mut places = plan
                .placements
                .iter()
                .filter(|place| place.buffer == buffer);
            let (Some(place), None) = (places.next(), places.next()) else {
                return false;
            };
            let fits = place
                .offset
                .checked_add(place.bytes)
                .is_some_and(|end| end <= plan.bytes);
            if !fits || !place.offset.is_multiple_of(64) || !place.lifetime.contains(step) {
                return false;
            }
            let whole = buffer.shape(&config(), plan.limits).and_then(Shape::bytes);
            if whole != Some(place.bytes) {
                return false;
            }
            let used_before = carried(&pass, at, buffer);
            let bytes = &mut owner[place.range()];
            if used_before && bytes.iter().any(|&held| held != Some(buffer)) {
                return false;
            }
            bytes.fill(Some(buffer));
        }
        // Buffers of one step are in use together.
        for &buffer in used {
            let place = plan.placements.iter().find(|place| place.buffer == buffer);
            let place = place.expect("found above");
            if owner[place.range()]
                .iter()
                .any(|&held| held != Some(buffer))
            {
                return false;
            }
        }
    }
    true
}

/// Whether `buffer` still holds something of an earlier step when step `at` of the pass begins:
/// everything does but what a block makes anew for itself.
fn carried(pass: &[(Step, &[Buffer])], at: usize, buffer: Buffer) -> bool {
    let inner = pass
        .iter()
        .all(|(step, used)| !used.contains(&buffer) || Step::BLOCK.contains(*step));
    let earlier = pass[..at]
        .iter()
        .rev()
        .find(|(_, used)| used.contains(&buffer));
    earlier.is_some_and(|(step, _)| !inner || *step < pass[at].0)
}

#[test]
fn a_fresh_plan_holds() {
    assert_eq!(plan().verify(&config()), Ok(()));
    assert!(plays(&plan()));
}

#[test]
fn a_plan_for_another_model_or_batch_is_refused() {
    let other = Config {
        feed_forward: 161,
        ..config()
    };
    assert!(matches!(
        plan().verify(&other),
        Err(PlanFault::Shape { .. })
    ));
    let mut grown = plan();
    grown.limits.tokens += 1;
    assert!(matches!(
        grown.verify(&config()),
        Err(PlanFault::Shape { .. })
    ));
}

#[test]
fn every_field_of_every_buffer_matters() {
    let faults = |corrupt: &dyn Fn(&mut Placement)| {
        for index in 0..Buffer::ALL.len() {
            let mut broken = plan();
            corrupt(&mut broken.placements[index]);
            let buffer = broken.placements[index].buffer;
            assert!(broken.verify(&config()).is_err(), "{broken:?} {buffer:?}");
        }
    };
    faults(&|place| place.offset += 4);
    faults(&|place| place.offset += 1 << 40);
    faults(&|place| place.offset = usize::MAX - 63);
    faults(&|place| place.bytes += 64);
    faults(&|place| place.bytes -= place.bytes.min(4));
    faults(&|place| place.bytes = 0);
    faults(&|place| place.shape.rows += 1);
    faults(&|place| place.shape.width *= 2);
    faults(&|place| place.shape.element = swapped(place.shape.element));
    faults(&|place| {
        let next = (place.buffer as usize + 1) % Buffer::ALL.len();
        place.buffer = Buffer::ALL[next];
    });
}

fn swapped(element: Element) -> Element {
    match element {
        Element::F32 => Element::U32,
        Element::U32 | Element::U8 => Element::F32,
    }
}

#[test]
fn a_lifetime_cut_short_at_either_end_is_refused() {
    for index in 0..Buffer::ALL.len() {
        let lifetime = plan().placements[index].lifetime;
        for (step, _) in Step::ALL {
            for cut in [
                Lifetime {
                    first: step,
                    ..lifetime
                },
                Lifetime {
                    last: step,
                    ..lifetime
                },
            ] {
                let mut broken = plan();
                broken.placements[index].lifetime = cut;
                let shorter = cut.first > lifetime.first || cut.last < lifetime.last;
                if shorter {
                    let found = broken.verify(&config());
                    assert!(matches!(found, Err(PlanFault::Lifetime { .. })), "{cut:?}");
                }
            }
        }
    }
}

#[test]
fn buffers_that_live_together_may_not_share_a_byte() {
    let whole = plan();
    for a in &whole.placements {
        for b in &whole.placements {
            if a.buffer == b.buffer || !a.lifetime.overlaps(b.lifetime) {
                continue;
            }
            let mut broken = whole.clone();
            broken.placements[a.buffer as usize].offset = b.offset;
            assert!(broken.verify(&config()).is_err(), "{a:?} onto {b:?}");
        }
    }
}

#[test]
fn missing_doubled_and_swapped_buffers_are_refused() {
    for index in 0..Buffer::ALL.len() {
        let mut missing = plan();
        missing.placements.remove(index);
        assert!(matches!(
            missing.verify(&config()),
            Err(PlanFault::Buffers { .. })
        ));
        let mut doubled = plan();
        doubled.placements.insert(index, doubled.placements[index]);
        assert!(matches!(
            doubled.verify(&config()),
            Err(PlanFault::Buffers { .. })
        ));
        let mut swapped = plan();
        swapped
            .placements
            .swap(index, (index + 1) % Buffer::ALL.len());
        assert!(matches!(
            swapped.verify(&config()),
            Err(PlanFault::Buffers { .. })
        ));
    }
}

#[test]
fn an_arena_cut_short_is_refused() {
    for cut in [1, 63, 64, 4096] {
        let mut broken = plan();
        broken.bytes -= cut;
        assert!(broken.verify(&config()).is_err(), "{cut}");
    }
}

proptest! {
    /// Whatever is done to offsets, lifetimes and the arena: what passes can be played through.
    #[test]
    fn what_is_accepted_can_be_executed(
        changes in prop::collection::vec((0..Buffer::ALL.len(), 0usize..160, 0..12usize, 0..12usize, any::<bool>()), 1..4),
        arena in 0usize..3,
    ) {
        let mut broken = plan();
        broken.bytes -= 64 * arena;
        for (index, line, first, last, moved) in changes {
            let place = &mut broken.placements[index];
            if moved {
                place.offset = 64 * line;
            } else {
                let (first, last) = (Step::ALL[first].0, Step::ALL[last].0);
                place.lifetime = Lifetime { first, last };
            }
        }
        if broken.verify(&config()).is_ok() {
            prop_assert!(plays(&broken), "{broken:?}");
        }
    }

    /// Plans of any shape hold, and waste little of what the fullest step needs.
    #[test]
    fn every_plan_holds_and_is_tight(
        (heads, group, dim) in (1usize..9, 1usize..9, 1usize..65),
        (hidden, inner, vocabulary) in (1usize..600, 1usize..2000, 1usize..3000),
        (tokens, rows, context_tokens) in (1usize..100, 1usize..100, 1usize..10_000),
    ) {
        let config = Config {
            hidden,
            query_heads: heads * group,
            kv_heads: heads,
            head_dim: 2 * dim,
            feed_forward: inner,
            vocabulary,
            ..config()
        };
        let limits = BatchLimits { tokens, logit_rows: rows.min(tokens), context_tokens };
        let plan = ArenaPlan::new(&config, limits).expect("small");
        prop_assert_eq!(plan.verify(&config), Ok(()));
        prop_assert!(plan.bytes() >= plan.live_bytes());
        prop_assert!(plan.bytes() <= plan.live_bytes() * 5 / 4, "{} of {}", plan.bytes(), plan.live_bytes());
        prop_assert_eq!(ArenaPlan::new(&config, limits).expect("again"), plan);
    }
}
