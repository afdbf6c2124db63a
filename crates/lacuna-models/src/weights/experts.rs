//! Experts that come to memory as tokens choose them.
//!
//! Each operation that multiplies with experts has a cache of slots, and a layer's two (gate and up, down) hold the same
//! experts, because they are asked for the same ones: a slot of the layer is one of each. When the router
//! has chosen, what is missing is asked for all at once, of the layer's next operation too; experts that are there are
//! computed first, the others as they come, and where a pass has more experts than there are slots, in the places
//! of those that are computed. Sums are made later, in the router's order, so results do not depend on it.
//!
//! What a read is still filling belongs to the reader. One that fails is an error of the pass, and its slot is empty
//! again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lacuna_files::reader::{Buffer, FileReader, Finished, Loaded};

use super::fetch::Files;
use super::{Linear, Weight, Weights};
use crate::error::{ForwardError, UnreadableWeights};
use crate::plan::{ExpertLru, ExpertTurn, ExpertUse, held};
use crate::program::ExpertsId;

/// What slots have been asked for since a model was loaded. A layer's expert counts once for a pass, however many of the
/// pass's tokens have it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ExpertCounts {
    /// Experts that were there.
    pub hits: u64,
    /// Experts that were not.
    pub misses: u64,
    /// Bytes of the file that were read for them.
    pub read_bytes: u64,
}

impl ExpertCounts {
    /// The part of experts that was there; `None` before the first is asked for.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }

    /// What came after `before`.
    #[must_use]
    pub fn since(&self, before: Self) -> Self {
        Self {
            hits: self.hits - before.hits,
            misses: self.misses - before.misses,
            read_bytes: self.read_bytes - before.read_bytes,
        }
    }
}

/// The same while passes go on.
#[derive(Debug, Default)]
pub(super) struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    read_bytes: AtomicU64,
}

impl Counters {
    pub(super) fn now(&self) -> ExpertCounts {
        ExpertCounts {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
        }
    }
}

/// Experts that are computed with at once while others wait for their slots, as in a long prompt: the disk gets
/// the slots of those back soon, and threads have enough to do.
const LENT_AT_ONCE: usize = 4;

/// The experts of all layers. One pass has them at a time.
#[derive(Debug)]
pub(crate) struct Experts {
    files: Files,
    reader: FileReader,
    caches: Vec<Cache>,
    /// The cache of a tensor of the program.
    cache_of: HashMap<usize, usize>,
    /// Where what is being read belongs.
    under_way: HashMap<u64, Target>,
    reads: u64,
    counters: Arc<Counters>,
}

#[derive(Debug)]
struct Target {
    /// The tensor, for errors.
    name: String,
    cache: usize,
    /// Of the turn's uses.
    of: usize,
    /// Of the operation's matrices.
    part: usize,
}

/// The experts of one operation.
#[derive(Debug)]
pub(crate) struct Cache {
    layer: usize,
    parts: Vec<Part>,
    lru: ExpertLru,
    slots: Vec<Slot>,
    /// The use under way.
    turn: Option<Turn>,
}

/// A matrix of each expert.
#[derive(Debug)]
struct Part {
    /// Its number among the program's tensors.
    tensor: usize,
    /// Memory of the largest.
    room: usize,
}

/// Memory of an expert: a buffer for each part. It has none before it is used, and after a read has failed.
#[derive(Debug, Default)]
struct Slot(Vec<Place>);

#[derive(Debug)]
enum Place {
    Free(Buffer),
    /// With the reader.
    Lent,
    Held(Loaded),
}

/// A pass's use of experts, and how far it is.
#[derive(Debug)]
struct Turn {
    plan: ExpertTurn,
    states: Vec<State>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum State {
    /// Not asked for.
    Waiting,
    /// So many parts are not there, and whether one has failed.
    Reading(usize, Option<Box<UnreadableWeights>>),
    Failed(Box<UnreadableWeights>),
    Ready,
    /// Computed with.
    Lent,
    Over,
}

impl Experts {
    /// Those of `uses`, none of them in memory.
    pub(super) fn new(
        files: &Files,
        reader: FileReader,
        weights: &[Weight],
        uses: &[ExpertUse],
        counters: Arc<Counters>,
    ) -> Self {
        let caches = uses.iter().filter_map(|of| {
            let part = |&tensor: &usize| {
                let Weight::Experts(linears) = &weights[tensor] else {
                    return None;
                };
                let rooms = linears.iter().map(|linear| {
                    files.extent(&linear.tensor, linear.bytes())?;
                    Some(held(linear.bytes().len() as u64) as usize)
                });
                let room = rooms.collect::<Option<Vec<_>>>()?.into_iter().max()?;
                Some(Part { tensor, room })
            };
            Some(Cache {
                layer: of.layer,
                parts: of.tensors.iter().map(part).collect::<Option<_>>()?,
                lru: ExpertLru::new(1, of.experts),
                slots: Vec::from([Slot::default()]),
                turn: None,
            })
        });
        let caches: Vec<Cache> = caches.collect();
        let numbered = caches.iter().enumerate();
        let cache_of = numbered
            .flat_map(|(cache, of)| of.parts.iter().map(move |part| (part.tensor, cache)))
            .collect();
        Self {
            files: files.clone(),
            reader,
            caches,
            cache_of,
            under_way: HashMap::new(),
            reads: 0,
            counters,
        }
    }

    /// Changes how many slots each layer has. Memory of those that go is given back at once.
    pub(super) fn resize(&mut self, slots: usize) {
        self.settle();
        for cache in &mut self.caches {
            let slots = slots.clamp(1, cache.lru.experts());
            let kept = cache.lru.resize(slots);
            let mut before: Vec<Slot> = cache.slots.drain(..).collect();
            let kept = kept
                .into_iter()
                .map(|slot| std::mem::take(&mut before[slot]));
            cache.slots.extend(kept);
            cache.slots.resize_with(slots, Slot::default);
        }
    }

    /// Ends what a pass has left in the middle: reads that have begun are waited for, and kept.
    pub(super) fn settle(&mut self) {
        while let Some(finished) = self.reader.wait() {
            self.take(finished);
        }
        for cache in &mut self.caches {
            cache.turn = None;
        }
    }

    /// The cache of an operation's experts, if they are not where the file is mapped.
    pub(crate) fn cache_of(&self, ExpertsId(tensor): ExpertsId) -> Option<usize> {
        self.cache_of.get(&tensor).copied()
    }

    pub(crate) fn cache(&self, cache: usize) -> &Cache {
        &self.caches[cache]
    }

    /// Begins an operation that uses `experts`, each once and in ascending order: asks for those that are missing,
    /// and for those that the layer's next operation will miss.
    pub(crate) fn begin(&mut self, cache: usize, weights: &Weights, experts: &[u32]) {
        let layer = self.caches[cache].layer;
        let of_layer = |(_, it): &(usize, &Cache)| it.layer == layer;
        let (counters, later) = (Arc::clone(&self.counters), self.caches.iter().enumerate());
        let later: Vec<usize> = later
            .skip(cache)
            .filter(of_layer)
            .map(|(index, _)| index)
            .collect();
        let leads = cache == 0 || self.caches[cache - 1].layer != layer;
        for index in later {
            let of = &mut self.caches[index];
            if of.turn.is_none() {
                of.turn = Some(Turn::new(of.lru.plan(experts)));
            }
            self.read(index, weights);
        }
        if let Some(turn) = self.caches[cache].turn.as_ref().filter(|_| leads) {
            let (hits, all) = (turn.plan.hits, turn.plan.uses.len());
            counters.hits.fetch_add(hits as u64, Ordering::Relaxed);
            let misses = (all - hits) as u64;
            counters.misses.fetch_add(misses, Ordering::Relaxed);
        }
    }

    /// Which of the experts that the operation uses can be computed with now, by their places in the list it was begun
    /// with; those of the call before are over. `None` when all are.
    ///
    /// # Errors
    /// When one cannot be read.
    pub(crate) fn next(
        &mut self,
        cache: usize,
        weights: &Weights,
    ) -> Result<Option<Vec<u32>>, ForwardError> {
        self.caches[cache].end_lent();
        self.read(cache, weights);
        while let Some(finished) = self.reader.poll() {
            self.take(finished);
        }
        loop {
            let of = &mut self.caches[cache];
            let Some(turn) = &mut of.turn else {
                return Ok(None);
            };
            if let Some(error) = turn.failed() {
                return Err(error.into());
            }
            let ready = turn.lend();
            if !ready.is_empty() {
                return Ok(Some(ready));
            }
            if turn.states.iter().all(|state| *state == State::Over) {
                of.lru.touch(&turn.plan);
                of.turn = None;
                return Ok(None);
            }
            let finished = self.reader.wait();
            self.take(finished.expect("what a use waits for is being read"));
        }
    }

    /// Asks for what a cache's turn lacks and has a slot for.
    fn read(&mut self, cache: usize, weights: &Weights) {
        let of = &mut self.caches[cache];
        let Some(turn) = &mut of.turn else {
            return;
        };
        for (index, it) in turn.plan.uses.iter().enumerate() {
            let free = it
                .after
                .is_none_or(|after| turn.states[after] == State::Over);
            if turn.states[index] != State::Waiting || !free {
                continue;
            }
            of.lru.empty(it.slot);
            let linears = of.parts.iter().map(|part| {
                let linears = weights.experts(ExpertsId(part.tensor));
                &linears[it.expert as usize]
            });
            let buffers = of.slots[it.slot].lend(&of.parts);
            let mut begin = |(part, linear): (usize, &Linear), buffer: Buffer| {
                let extent = self.files.extent(&linear.tensor, linear.bytes());
                let extent = extent.expect("it was there when the model was loaded");
                self.reader.begin(self.reads, extent, buffer);
                let target = Target {
                    name: linear.tensor.name().to_owned(),
                    cache,
                    of: index,
                    part,
                };
                self.under_way.insert(self.reads, target);
                self.reads += 1;
            };
            turn.states[index] = match buffers {
                Ok(buffers) => {
                    let parts = linears.enumerate().zip(buffers);
                    parts.for_each(|(linear, buffer)| begin(linear, buffer));
                    State::Reading(of.parts.len(), None)
                }
                Err(error) => {
                    let refused = linears.into_iter().find_map(|linear| {
                        let extent = self.files.extent(&linear.tensor, linear.bytes())?;
                        Some(unreadable(linear, extent.refused(&error)))
                    });
                    State::Failed(refused.expect("an expert has a matrix"))
                }
            };
        }
    }

    /// Enters what has been read.
    fn take(&mut self, Finished { number, result }: Finished) {
        let Some(target) = self.under_way.remove(&number) else {
            return;
        };
        let Target {
            name,
            cache,
            of,
            part,
        } = target;
        let cache = &mut self.caches[cache];
        let Some(turn) = &mut cache.turn else {
            return;
        };
        let use_of = turn.plan.uses[of];
        let State::Reading(left, failed) = &mut turn.states[of] else {
            return;
        };
        *left -= 1;
        match result {
            Ok(loaded) => {
                let bytes = loaded.len() as u64;
                self.counters.read_bytes.fetch_add(bytes, Ordering::Relaxed);
                cache.slots[use_of.slot].0[part] = Place::Held(loaded);
            }
            Err(source) => {
                *failed = Some(Box::new(UnreadableWeights { name, source }));
            }
        }
        if *left > 0 {
            return;
        }
        turn.states[of] = match failed.take() {
            None => {
                cache.lru.hold(use_of.slot, use_of.expert);
                State::Ready
            }
            Some(error) => {
                cache.slots[use_of.slot] = Slot::default();
                State::Failed(error)
            }
        };
    }
}

fn unreadable(linear: &Linear, source: lacuna_files::reader::ReadError) -> Box<UnreadableWeights> {
    Box::new(UnreadableWeights {
        name: linear.tensor.name().to_owned(),
        source,
    })
}

impl Cache {
    /// The bytes of a matrix, the operation's `part`, of an expert that has been found ready.
    ///
    /// # Panics
    /// For one that has not.
    pub(crate) fn bytes(&self, part: usize, expert: u32) -> &[u8] {
        let slot = self.lru.slot(expert);
        match slot.and_then(|slot| self.slots[slot].0.get(part)) {
            Some(Place::Held(bytes)) => bytes,
            _ => unreachable!("an expert that was not lent"),
        }
    }

    fn end_lent(&mut self) {
        let states = self.turn.iter_mut().flat_map(|turn| &mut turn.states);
        for state in states.filter(|state| **state == State::Lent) {
            *state = State::Over;
        }
    }
}

impl Slot {
    /// Its buffers, to be read into.
    fn lend(&mut self, parts: &[Part]) -> std::io::Result<Vec<Buffer>> {
        if self.0.is_empty() {
            self.0 = Self::fresh(parts)?;
        }
        let places = self.0.iter_mut();
        let buffers = places.map(|place| match std::mem::replace(place, Place::Lent) {
            Place::Free(buffer) => buffer,
            Place::Held(loaded) => loaded.into_buffer(),
            Place::Lent => unreachable!("a slot that is read into is not given away"),
        });
        Ok(buffers.collect())
    }

    /// One piece of memory, cut up: a mapping for each part would be three times as many.
    fn fresh(parts: &[Part]) -> std::io::Result<Vec<Place>> {
        let mut rest = Buffer::new(parts.iter().map(|part| part.room).sum())?;
        let mut cut = |part: &Part| {
            let next = rest.split_off(part.room);
            Place::Free(std::mem::replace(&mut rest, next))
        };
        Ok(parts.iter().map(&mut cut).collect())
    }
}

impl Turn {
    fn new(plan: ExpertTurn) -> Self {
        let there = |index| match index < plan.hits {
            true => State::Ready,
            false => State::Waiting,
        };
        Self {
            states: (0..plan.uses.len()).map(there).collect(),
            plan,
        }
    }

    fn failed(&self) -> Option<UnreadableWeights> {
        let failed = self.states.iter().find_map(|state| match state {
            State::Failed(error) => Some(error),
            _ => None,
        });
        failed.map(|error| (**error).clone())
    }

    /// The places of those that are ready, in ascending order; they are lent.
    fn lend(&mut self) -> Vec<u32> {
        let most = match self.states.contains(&State::Waiting) {
            true => LENT_AT_ONCE,
            false => usize::MAX,
        };
        let states = self.states.iter_mut().zip(&self.plan.uses);
        let ready = states.filter(|(state, _)| **state == State::Ready);
        let lent = ready.take(most).map(|(state, of)| {
            *state = State::Lent;
            of.band
        });
        let mut lent: Vec<u32> = lent.collect();
        lent.sort_unstable();
        lent
    }
}
