//! When each slot holds something, read off a program.

use super::op::Access;
use super::{Program, Slot};

/// Steps of a program from one to another, both included, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The step that fills the slot.
    pub first: usize,
    /// The last step that needs what it was filled with.
    pub last: usize,
}

/// The spans of steps during which a slot holds something, in order: one for each time it is filled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lifetime {
    spans: Vec<Span>,
}

impl Lifetime {
    /// From `spans`, which are in order and do not overlap.
    #[must_use]
    pub fn new(spans: Vec<Span>) -> Self {
        Self { spans }
    }

    /// The spans, in order.
    #[must_use]
    pub fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Whether the slot holds something during `step`.
    #[must_use]
    pub fn contains(&self, step: usize) -> bool {
        let next = self.spans.partition_point(|span| span.last < step);
        self.spans.get(next).is_some_and(|span| span.first <= step)
    }

    /// Whether there is a step both contain.
    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let (mut mine, mut others) = (self.spans.iter(), other.spans.iter());
        let (mut a, mut b) = (mine.next(), others.next());
        while let (Some(one), Some(two)) = (a, b) {
            if one.first <= two.last && two.first <= one.last {
                return true;
            }
            if one.last < two.last {
                a = mine.next();
            } else {
                b = others.next();
            }
        }
        false
    }

    /// Steps of the longest span.
    pub(crate) fn longest(&self) -> usize {
        let steps = self.spans.iter().map(|span| 1 + span.last - span.first);
        steps.max().unwrap_or(0)
    }
}

impl Program {
    /// When each slot holds something, in the order of the slots. A slot that is read before anything
    /// fills it, which no correct program does, counts as filled by that step.
    #[must_use]
    pub fn lifetimes(&self) -> Vec<Lifetime> {
        let mut spans: Vec<Vec<Span>> = vec![Vec::new(); self.slots().len()];
        for (number, step) in self.steps().iter().enumerate() {
            for (Slot(slot), access) in self.uses(step) {
                match (access, spans[slot].last_mut()) {
                    (Access::Read, Some(span)) => span.last = number,
                    (Access::Write, _) | (Access::Read, None) => spans[slot].push(Span {
                        first: number,
                        last: number,
                    }),
                }
            }
        }
        spans.into_iter().map(Lifetime::new).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn lifetime(spans: &[(usize, usize)]) -> Lifetime {
        let span = |&(first, last)| Span { first, last };
        Lifetime::new(spans.iter().map(span).collect())
    }

    fn any_lifetime() -> impl Strategy<Value = Lifetime> {
        proptest::collection::vec((1usize..4, 0usize..4), 0..6).prop_map(|pairs| {
            let mut end = 0;
            let spans = pairs.into_iter().map(|(gap, length)| {
                let first = end + gap;
                end = first + length;
                Span { first, last: end }
            });
            Lifetime::new(spans.collect())
        })
    }

    proptest! {
        #[test]
        fn two_overlap_where_some_step_is_in_both(a in any_lifetime(), b in any_lifetime()) {
            let shared = (0..64).any(|step| a.contains(step) && b.contains(step));
            prop_assert_eq!(a.overlaps(&b), shared);
            prop_assert_eq!(b.overlaps(&a), shared);
        }
    }

    #[test]
    fn a_lifetime_holds_its_spans_and_nothing_between() {
        let held = lifetime(&[(1, 2), (5, 5)]);
        let steps = (0..8).filter(|&step| held.contains(step));
        assert_eq!(steps.collect::<Vec<_>>(), [1, 2, 5]);
        assert_eq!(held.longest(), 2);
    }
}
