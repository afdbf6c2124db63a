//! Slots for neurons of feed-forward blocks whose activations are mostly zero: how many each has, and which neuron is in
//! which.
//!
//! A neuron is a column of `down`, and of blocks with gates a row of `up` beside it. Which ones a token needs is known when their activations are, and they are in part those of
//! tokens shortly before it. Where a pass needs more than there are slots, those that are there stay, and the others
//! pass by: so a long prompt leaves what it found.

use serde::Serialize;

use lacuna_kernels::{ColumnLayout, DType};

use super::residency::held;
use crate::program::VectorId;

/// A matrix that a pass multiplies with activations most of which are zero, and whose columns are in a file of their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeuronUse {
    /// The tensor it is.
    pub name: String,
    /// Its number among the program's tensors.
    pub(crate) matrix: usize,
    /// How they lie.
    pub(crate) layout: NeuronLayout,
    /// What is multiplied with the block's gates, if rows of it lie beside the columns.
    pub(crate) up: Option<UpUse>,
    /// What says beforehand which of them are needed, if anything does.
    pub(crate) predictor: Option<PredictorUse>,
}

/// A matrix whose rows are read with the columns of another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UpUse {
    /// The tensor it is.
    pub(crate) name: String,
    /// Its number among the program's tensors.
    pub(crate) matrix: usize,
}

/// How what is read of a neuron lies in its file: a column of `down`, and where there are gates a row of `up` after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NeuronLayout {
    /// How columns lie.
    pub(crate) columns: ColumnLayout,
    /// Of what rows are, if they are there: a type, and how many elements.
    pub(crate) rows: Option<(DType, usize)>,
}

impl NeuronLayout {
    /// Whole words: what a tensor of a file of them is declared as.
    pub(crate) const WORD_BYTES: usize = 4;

    /// Bytes of a row.
    pub(crate) fn row_bytes(&self) -> usize {
        let bytes = |(dtype, elements): (DType, usize)| dtype.row_bytes(elements);
        self.rows.and_then(bytes).unwrap_or(0)
    }

    /// Bytes of a neuron.
    pub(crate) fn bytes(&self) -> usize {
        let bytes = self.columns.column_bytes() + self.row_bytes();
        bytes.next_multiple_of(Self::WORD_BYTES)
    }

    /// How many neurons there are.
    pub(crate) fn neurons(&self) -> usize {
        self.columns.cols()
    }

    /// Neurons whose rows are multiplied with at once: a piece of a matrix that threads share, in a second-level cache.
    pub(crate) const ROWS_AT_ONCE: usize = 128;
}

/// A predictor of a block's neurons.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PredictorUse {
    /// The norm whose output it is given.
    pub(crate) norm: VectorId,
    /// Elements of that.
    pub(crate) width: usize,
    /// Rows of its first matrix.
    pub(crate) rank: usize,
}

impl NeuronUse {
    /// How many there are.
    #[must_use]
    pub fn neurons(&self) -> usize {
        self.layout.neurons()
    }

    /// Whether a matrix of the program is had by neuron here.
    pub(crate) fn has(&self, matrix: usize) -> bool {
        let up = self.up.as_ref().map(|up| up.matrix);
        self.matrix == matrix || up == Some(matrix)
    }

    /// Whether a tensor of a file is.
    pub(crate) fn has_tensor(&self, name: &str) -> bool {
        let up = self.up.as_ref().map(|up| &*up.name);
        self.name == name || up == Some(name)
    }

    /// Bytes of one.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.layout.bytes() as u64
    }

    /// Memory of a slot.
    fn slot_bytes(&self) -> u64 {
        self.bytes() + SLOT_BOOKS
    }

    /// Memory that it takes without a slot: its scales, and where each neuron is.
    fn fixed_bytes(&self) -> u64 {
        let books = self.neurons() as u64 * NEURON_BOOKS;
        self.layout.columns.scale_bytes() as u64 + books + self.predictor_bytes()
    }

    /// Memory of its predictor: matrices of 2 bytes an element, and a bias of 4.
    fn predictor_bytes(&self) -> u64 {
        let weights = |of: PredictorUse| {
            let neurons = self.neurons() as u64;
            2 * of.rank as u64 * (of.width as u64 + neurons) + 4 * neurons
        };
        self.predictor.map_or(0, weights)
    }

    /// Memory that its predictor computes in: rows between the matrices and of scores, and books of each neuron.
    fn predicting_bytes(&self) -> u64 {
        let computing = |of: PredictorUse| {
            let neurons = self.neurons() as u64;
            PREDICTED_ROWS as u64 * 4 * (of.rank as u64 + neurons) + neurons * NEURON_BOOKS
        };
        self.predictor.map_or(0, computing)
    }

    /// The most memory of the neurons that are read together.
    fn section_bytes(&self) -> u64 {
        held(self.bytes()) * self.neurons().min(ColumnLayout::SECTION) as u64
    }
}

/// Books of a slot, and its part of the page in which slots end.
const SLOT_BOOKS: u64 = 96;

/// Books of a neuron: its slot, and whether a pass needs it.
const NEURON_BOOKS: u64 = 16;

/// Rows of a pass whose neurons are foretold, at most. Of more, all that one of them needs is most of what there is, and
/// reading it takes less time than computing them.
pub(crate) const PREDICTED_ROWS: usize = 8;

/// Neurons that are read ahead of time at once, at most: twice what a disk has under way. A block needs some hundreds, and
/// most of these have slots.
pub(crate) const AHEAD_NEURONS: usize = 128;

/// The most bytes of neurons that lie side by side which are read as one.
pub(crate) const RUN_BYTES: u64 = 256 << 10;

/// Memory for neurons.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct NeuronSlots {
    /// Neurons that a block holds at once.
    pub slots: usize,
    /// Neurons that it has.
    pub neurons: usize,
    /// Blocks that have slots.
    pub layers: usize,
    /// Memory of all slots.
    pub bytes: u64,
    /// Memory beside slots: what is read goes through a ring, what is foretold through another, and scales and
    /// predictors stay.
    pub fixed_bytes: u64,
    /// Bytes of all neurons.
    pub neuron_bytes: u64,
}

impl NeuronSlots {
    /// So many for each block, of which none has more than it has neurons. `None` without such blocks.
    #[must_use]
    pub fn of(uses: &[NeuronUse], slots: usize) -> Option<Self> {
        let neurons = uses.iter().map(NeuronUse::neurons).max()?;
        let bytes = |of: &NeuronUse| slots.min(of.neurons()) as u64 * of.slot_bytes();
        let all = |of: &NeuronUse| of.neurons() as u64 * of.bytes();
        Some(Self {
            slots: slots.min(neurons),
            neurons,
            layers: uses.len(),
            bytes: uses.iter().map(bytes).sum(),
            fixed_bytes: uses.iter().map(NeuronUse::fixed_bytes).sum::<u64>()
                + Self::ring_bytes(uses)
                + Self::ahead_bytes(uses)
                + Self::gathered_bytes(uses)
                + uses
                    .iter()
                    .map(NeuronUse::predicting_bytes)
                    .max()
                    .unwrap_or(0),
            neuron_bytes: uses.iter().map(all).sum(),
        })
    }

    /// The ring that neurons are read through: those that are multiplied with together, as many that are read
    /// meanwhile, and what of the ring's end is of no use.
    pub(crate) fn ring_bytes(uses: &[NeuronUse]) -> u64 {
        let sections = uses.iter().map(NeuronUse::section_bytes);
        2 * sections.max().unwrap_or(0) + held(RUN_BYTES)
    }

    /// Memory that rows are brought together in, to be multiplied with.
    pub(crate) fn gathered_bytes(uses: &[NeuronUse]) -> u64 {
        let rows = uses.iter().map(|of| of.layout.row_bytes());
        (rows.max().unwrap_or(0) * NeuronLayout::ROWS_AT_ONCE) as u64
    }

    /// The ring that foretold neurons are read through, 0 without predictors.
    pub(crate) fn ahead_bytes(uses: &[NeuronUse]) -> u64 {
        let foretold = uses.iter().filter(|of| of.predictor.is_some());
        let most = foretold.map(|of| held(of.bytes()) * of.neurons().min(AHEAD_NEURONS) as u64);
        most.max().map_or(0, |most| most + held(RUN_BYTES))
    }

    /// As many as `room` bytes hold.
    #[must_use]
    pub fn within(uses: &[NeuronUse], room: u64) -> Option<Self> {
        let (mut fit, mut more) = (0, Self::of(uses, usize::MAX)?.slots + 1);
        let bytes = |slots| Self::of(uses, slots).map_or(0, |it| it.bytes);
        while fit + 1 < more {
            let middle = fit.midpoint(more);
            match bytes(middle) <= room {
                true => fit = middle,
                false => more = middle,
            }
        }
        Self::of(uses, fit)
    }

    /// The part of neurons that can be in memory.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.slots as f64 / self.neurons.max(1) as f64
    }
}

/// Which neurons a block's slots hold; of those that the pass under way has not used, the one that was used least
/// recently leaves first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NeuronLru {
    /// By neuron.
    slots: Vec<Option<u32>>,
    books: Vec<Books>,
    /// The slots that were used least and most recently.
    ends: Option<[u32; 2]>,
    /// The pass under way, counted from 1.
    pass: u64,
}

/// What is known of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Books {
    neuron: Option<u32>,
    /// The pass that used it last.
    pass: u64,
    /// The slots that were used next before it and next after it.
    beside: [Option<u32>; 2],
}

/// Which end of the order, or side of a slot in it.
const OLDER: usize = 0;
const NEWER: usize = 1;

impl NeuronLru {
    /// Empty slots for some of `neurons` neurons.
    pub(crate) fn new(slots: usize, neurons: usize) -> Self {
        let mut lru = Self {
            slots: vec![None; neurons],
            books: Vec::new(),
            ends: None,
            pass: 0,
        };
        lru.resize(slots);
        lru
    }

    pub(crate) fn len(&self) -> usize {
        self.books.len()
    }

    /// Begins a pass.
    pub(crate) fn begin(&mut self) {
        self.pass += 1;
    }

    /// Whether a neuron has a slot; nothing is used by asking.
    pub(crate) fn holds(&self, neuron: u32) -> bool {
        self.slots[neuron as usize].is_some()
    }

    /// The slot of a neuron that the pass uses.
    pub(crate) fn find(&mut self, neuron: u32) -> Option<u32> {
        let slot = self.slots[neuron as usize]?;
        self.touch(slot);
        Some(slot)
    }

    /// Gives a neuron that the pass has used a slot, if one holds nothing that the pass uses. Whoever asks fills it.
    pub(crate) fn admit(&mut self, neuron: u32) -> Option<u32> {
        if self.slots[neuron as usize].is_some() {
            return None;
        }
        let [slot, _] = self.ends?;
        let books = &mut self.books[slot as usize];
        if books.pass == self.pass {
            return None;
        }
        if let Some(before) = books.neuron.replace(neuron) {
            self.slots[before as usize] = None;
        }
        self.slots[neuron as usize] = Some(slot);
        self.touch(slot);
        Some(slot)
    }

    /// Changes how many slots there are. Of fewer, the last ones go, with what they hold.
    pub(crate) fn resize(&mut self, slots: usize) {
        for slot in slots..self.books.len() {
            self.take_out(slot as u32);
            if let Some(neuron) = self.books[slot].neuron {
                self.slots[neuron as usize] = None;
            }
        }
        self.books.truncate(slots);
        for slot in self.books.len()..slots {
            self.books.push(Books {
                neuron: None,
                pass: 0,
                beside: [None; 2],
            });
            self.put(slot as u32, OLDER);
        }
    }

    /// Makes a slot the one that was used last.
    fn touch(&mut self, slot: u32) {
        self.books[slot as usize].pass = self.pass;
        self.take_out(slot);
        self.put(slot, NEWER);
    }

    fn take_out(&mut self, slot: u32) {
        let beside = std::mem::take(&mut self.books[slot as usize].beside);
        for side in [OLDER, NEWER] {
            if let Some(next) = beside[side] {
                self.books[next as usize].beside[1 - side] = beside[1 - side];
            }
        }
        let [older, newer] = beside;
        self.ends = match self.ends {
            Some([oldest, newest]) => {
                let oldest = if oldest == slot { newer } else { Some(oldest) };
                let newest = if newest == slot { older } else { Some(newest) };
                oldest.zip(newest).map(|(oldest, newest)| [oldest, newest])
            }
            None => None,
        };
    }

    /// Puts a slot that is in no order at one end of it.
    fn put(&mut self, slot: u32, end: usize) {
        match &mut self.ends {
            None => self.ends = Some([slot; 2]),
            Some(ends) => {
                let before = std::mem::replace(&mut ends[end], slot);
                self.books[slot as usize].beside[1 - end] = Some(before);
                self.books[before as usize].beside[end] = Some(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn slots_are_as_many_as_there_is_room_for() {
        let of = |neurons| NeuronUse {
            name: String::new(),
            matrix: 0,
            layout: NeuronLayout {
                columns: ColumnLayout::new(DType::F16, 64, neurons).expect("whole groups"),
                rows: None,
            },
            up: None,
            predictor: None,
        };
        let uses = [of(100), of(40)];
        let slots = |room| NeuronSlots::within(&uses, room).expect("there are neurons");
        let each = 128 + SLOT_BOOKS;
        assert_eq!((slots(0).slots, slots(0).bytes), (0, 0));
        assert_eq!(slots(2 * each - 1).slots, 0);
        assert_eq!(slots(80 * each).slots, 40);
        assert_eq!(slots(81 * each).slots, 41, "one block has no more");
        assert_eq!(slots(u64::MAX).slots, 100);
        assert_eq!(slots(u64::MAX).bytes, 140 * each);
        assert_eq!(slots(0).fixed_bytes, slots(u64::MAX).fixed_bytes);
        assert_eq!(slots(0).neuron_bytes, 140 * 128);
        assert_eq!(NeuronSlots::within(&[], 1 << 30), None);
        let mut foretold = uses.clone();
        foretold[0].predictor = Some(PredictorUse {
            norm: VectorId(7),
            width: 48,
            rank: 16,
        });
        let with = NeuronSlots::of(&foretold, 0).expect("there are neurons");
        let weights = 2 * 16 * (48 + 100) + 4 * 100;
        let computing = 8 * 4 * (16 + 100) + 16 * 100;
        let more = with.fixed_bytes - slots(0).fixed_bytes;
        let ring = 100 * held(128) + held(RUN_BYTES);
        assert_eq!(more, weights + computing + ring);
        // A row of 32 numbers in Q8_0 beside each column, of 34 bytes and two that make whole words.
        let mut gated = uses.clone();
        for of in &mut gated {
            of.layout.rows = Some((DType::Q8_0, 32));
        }
        let with = NeuronSlots::of(&gated, 10).expect("there are neurons");
        assert_eq!(gated[0].bytes(), 128 + 36);
        assert_eq!(with.bytes, 20 * (128 + 36 + SLOT_BOOKS));
        assert_eq!(with.fixed_bytes, slots(0).fixed_bytes + 128 * 34);
    }

    /// The same said plainly: neurons with the pass that used each last, that which was used last at the end.
    #[derive(Default)]
    struct Plainly(Vec<(u32, u64)>);

    impl Plainly {
        fn find(&mut self, neuron: u32, pass: u64) -> bool {
            let found = self.0.iter().position(|held| held.0 == neuron);
            found.is_some_and(|at| {
                self.0.remove(at);
                self.0.push((neuron, pass));
                true
            })
        }

        fn admit(&mut self, neuron: u32, pass: u64, slots: usize) {
            if self.0.len() >= slots {
                if self.0.first().is_none_or(|oldest| oldest.1 == pass) {
                    return;
                }
                self.0.remove(0);
            }
            self.0.push((neuron, pass));
        }
    }

    proptest! {
        #[test]
        fn the_least_recently_used_leaves_and_what_a_pass_uses_stays(
            slots in 0usize..8,
            passes in prop::collection::vec(prop::collection::btree_set(0u32..12, 0..12), 1..40),
        ) {
            let (mut lru, mut plain) = (NeuronLru::new(slots, 12), Plainly::default());
            for (pass, neurons) in (1..).zip(&passes) {
                lru.begin();
                let mut missing = Vec::new();
                for &neuron in neurons {
                    let found = lru.find(neuron);
                    prop_assert_eq!(found.is_some(), plain.find(neuron, pass));
                    if found.is_none() {
                        missing.push(neuron);
                    }
                }
                for neuron in missing {
                    lru.admit(neuron);
                    plain.admit(neuron, pass, slots);
                }
                for neuron in 0..12 {
                    let held = plain.0.iter().any(|held| held.0 == neuron);
                    prop_assert_eq!(lru.slots[neuron as usize].is_some(), held);
                }
            }
        }

        #[test]
        fn slots_come_and_go_and_the_others_keep_what_they_hold(
            steps in prop::collection::vec((0usize..8, 0u32..12), 1..60),
        ) {
            let mut lru = NeuronLru::new(3, 12);
            for (slots, neuron) in steps {
                let before = lru.clone();
                lru.resize(slots);
                prop_assert_eq!(lru.len(), slots);
                for of in 0..12 {
                    let stays = before.slots[of].filter(|slot| (*slot as usize) < slots);
                    prop_assert_eq!(lru.slots[of], stays);
                }
                lru.begin();
                if lru.find(neuron).is_none() {
                    prop_assert_eq!(lru.admit(neuron).is_some(), slots > 0);
                }
                // The order has every slot once, in both directions.
                let mut order = Vec::new();
                let mut next = lru.ends.map(|ends| ends[OLDER]);
                while let Some(slot) = next {
                    order.push(slot);
                    prop_assert!(order.len() <= slots);
                    next = lru.books[slot as usize].beside[NEWER];
                }
                prop_assert_eq!(order.len(), slots);
                prop_assert_eq!(order.last().copied(), lru.ends.map(|ends| ends[NEWER]));
            }
        }
    }
}
