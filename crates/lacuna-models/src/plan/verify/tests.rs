//! A plan that is wrong in any way that matters is refused.

use proptest::prelude::*;

use super::*;
use crate::program::{Element, Program};
use crate::scratch::BatchLimits;
use crate::spec::ModelSpec;
use crate::spec::examples::small;

const LIMITS: BatchLimits = BatchLimits {
    tokens: 7,
    logit_rows: 3,
    context_tokens: 256,
};

fn program() -> Program {
    Program::new(&small())
}

fn plan() -> ArenaPlan {
    ArenaPlan::new(&program(), LIMITS).expect("a small plan")
}

/// What a forward pass does to the bytes, played through: whether each slot fits, is where a vector
/// load may be, and still holds whatever a step reads of it.
fn plays(plan: &ArenaPlan, program: &Program) -> bool {
    let mut owner = vec![None; plan.bytes];
    for step in program.steps() {
        let uses = program.uses(step);
        for &(slot, access) in &uses {
            let place = plan.placement(slot);
            let whole = program.slots()[slot.0].shape(plan.limits);
            let end = place.offset.checked_add(place.bytes);
            if end.is_none_or(|end| end > plan.bytes)
                || !place.offset.is_multiple_of(64)
                || whole.and_then(crate::program::Shape::bytes) != Some(place.bytes)
            {
                return false;
            }
            let bytes = &mut owner[place.range()];
            if access == Access::Read && bytes.iter().any(|&held| held != Some(slot)) {
                return false;
            }
            bytes.fill(Some(slot));
        }
        // Slots of one step are in use together.
        for (slot, _) in uses {
            let mut bytes = owner[plan.placement(slot).range()].iter();
            if bytes.any(|&held| held != Some(slot)) {
                return false;
            }
        }
    }
    true
}

#[test]
fn a_fresh_plan_holds() {
    assert_eq!(plan().verify(&program()), Ok(()));
    assert!(plays(&plan(), &program()));
}

#[test]
fn a_plan_for_another_model_or_batch_is_refused() {
    let other = small().each_layer(|layer| layer.gated().inner = 161);
    assert!(matches!(
        plan().verify(&Program::new(&other)),
        Err(PlanFault::Shape { .. })
    ));
    let mut grown = plan();
    grown.limits.tokens += 1;
    assert!(matches!(
        grown.verify(&program()),
        Err(PlanFault::Shape { .. })
    ));
}

#[test]
fn every_field_of_every_placement_matters() {
    let count = plan().placements.len();
    let faults = |corrupt: &dyn Fn(&mut Placement)| {
        for index in 0..count {
            let mut broken = plan();
            corrupt(&mut broken.placements[index]);
            let slot = broken.placements[index].name;
            assert!(broken.verify(&program()).is_err(), "{broken:?} {slot}");
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
    faults(&|place| place.slot = Slot((place.slot.0 + 1) % count));
}

fn swapped(element: Element) -> Element {
    match element {
        Element::F32 => Element::U32,
        Element::U32 | Element::U8 => Element::F32,
    }
}

#[test]
fn slots_that_live_together_may_not_share_a_byte() {
    let whole = plan();
    for a in &whole.placements {
        for b in &whole.placements {
            if a.slot == b.slot || !a.lifetime.overlaps(&b.lifetime) {
                continue;
            }
            let mut broken = whole.clone();
            broken.placements[a.slot.0].offset = b.offset;
            assert!(broken.verify(&program()).is_err(), "{a:?} onto {b:?}");
        }
    }
}

#[test]
fn missing_doubled_and_swapped_slots_are_refused() {
    let count = plan().placements.len();
    let refused = |broken: ArenaPlan| {
        let found = broken.verify(&program());
        assert!(matches!(found, Err(PlanFault::Slots { .. })), "{found:?}");
    };
    for index in 0..count {
        let mut missing = plan();
        missing.placements.remove(index);
        refused(missing);
        let mut doubled = plan();
        let again = doubled.placements[index].clone();
        doubled.placements.insert(index, again);
        refused(doubled);
        let mut swapped = plan();
        swapped.placements.swap(index, (index + 1) % count);
        refused(swapped);
    }
}

#[test]
fn an_arena_cut_short_is_refused() {
    for cut in [1, 63, 64, 4096] {
        let mut broken = plan();
        broken.bytes -= cut;
        assert!(broken.verify(&program()).is_err(), "{cut}");
    }
}

/// Slots of [`small`]'s program.
const SLOTS: usize = 21;

proptest! {
    /// Whatever is done to offsets and the arena: what passes can be played through.
    #[test]
    fn what_is_accepted_can_be_executed(
        changes in prop::collection::vec((0..SLOTS, 0usize..160), 1..4),
        arena in 0usize..3,
    ) {
        let mut broken = plan();
        prop_assert_eq!(broken.placements.len(), SLOTS);
        broken.bytes -= 64 * arena;
        for (index, line) in changes {
            broken.placements[index].offset = 64 * line;
        }
        if broken.verify(&program()).is_ok() {
            prop_assert!(plays(&broken, &program()), "{broken:?}");
        }
    }

    /// Plans of any shape hold, and waste little of what the fullest step needs.
    #[test]
    fn every_plan_holds_and_is_tight(
        (heads, group, dim) in (1usize..9, 1usize..9, 1usize..65),
        (hidden, inner, vocabulary) in (1usize..600, 1usize..2000, 1usize..3000),
        (tokens, rows, context_tokens) in (1usize..100, 1usize..100, 1usize..10_000),
    ) {
        let mut spec = ModelSpec { hidden, vocabulary, ..small() };
        spec.ropes[0].dimensions = 2 * dim;
        let spec = spec.each_layer(|layer| {
            layer.attention_mut().query_heads = heads * group;
            layer.attention_mut().kv_heads = heads;
            layer.attention_mut().head_dim = 2 * dim;
            layer.gated().inner = inner;
        });
        let program = Program::new(&spec);
        let limits = BatchLimits { tokens, logit_rows: rows.min(tokens), context_tokens };
        let plan = ArenaPlan::new(&program, limits).expect("small");
        prop_assert_eq!(plan.verify(&program), Ok(()));
        prop_assert!(plays(&plan, &program));
        prop_assert!(plan.bytes() >= plan.live_bytes());
        prop_assert!(plan.bytes() <= plan.live_bytes() * 5 / 4, "{} of {}", plan.bytes(), plan.live_bytes());
        prop_assert_eq!(ArenaPlan::new(&program, limits).expect("again"), plan);
    }
}
