//! Who gives way to whom: arithmetic over bytes, with nothing behind it.
//!
//! Every loaded model has a share of the room that the budget leaves for models. Three rules:
//!
//! * A model that is at work keeps its share, whatever comes: its requests were taken on the strength of it.
//! * One that is not gives way: first what it has beyond its working share, then all but the least, then everything.
//!   What was used longest ago goes first.
//! * A model is unloaded only where the one that is wanted would lack its working share otherwise, since a model whose
//!   weights are read for each token is slower than one that is loaded now and then.

use std::time::{Duration, Instant};

use lacuna_engine::Needs;

/// A model, by its place among those that are served.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct ModelId(pub(crate) usize);

/// A model that holds a share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Resident {
    pub(crate) id: ModelId,
    pub(crate) needs: Needs,
    pub(crate) share: u64,
    pub(crate) standing: Standing,
    /// When it was last asked for.
    pub(crate) used: Instant,
    /// How long it stays when it is not used; `None` for ever.
    pub(crate) keep: Option<Duration>,
}

/// What a model is doing, as far as that decides whether it gives way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nobody uses it.
    Idle,
    /// Requests use it.
    Busy,
    /// It is unloaded, and its memory is not free yet.
    Leaving,
}

/// What a model gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Give {
    pub(crate) id: ModelId,
    /// The share that it keeps; none if it is unloaded.
    pub(crate) keeps: Option<u64>,
}

/// Where room for a model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    /// A share, once others have given way.
    Share { bytes: u64, gives: Vec<Give> },
    /// Nowhere, until these are idle; they take no more requests until then.
    Later { on: Vec<ModelId> },
    /// Nowhere: the model needs more than there is for all of them.
    Never,
}

/// Shares that grow are given this much more at least, so that few steps lead to a large one.
const GROWTH: u64 = 16 << 20;

impl Resident {
    /// What it keeps when it has given up what it can spare without becoming slow.
    fn comfortable(&self) -> u64 {
        self.share.min(self.needs.working)
    }

    /// What it keeps at least.
    fn least(&self) -> u64 {
        self.share.min(self.needs.least)
    }

    /// Whether nobody has used it for as long as it is to stay.
    fn is_expired(&self, now: Instant) -> bool {
        let over = |keep| now.saturating_duration_since(self.used) >= keep;
        self.standing == Standing::Idle && self.keep.is_some_and(over)
    }
}

/// Room for a model that is to be loaded, of `room` bytes that all models may have together. What is leaving counts as
/// gone: whoever takes the share waits until it is.
pub(crate) fn find(room: u64, residents: &[Resident], wanted: &Needs) -> Found {
    if wanted.least > room {
        return Found::Never;
    }
    let residents = staying(residents);
    let found = share(room, &residents, wanted);
    found.unwrap_or_else(|| Found::Later {
        on: in_the_way(room, residents, wanted),
    })
}

/// The same if there is some now.
fn share(room: u64, residents: &[Resident], wanted: &Needs) -> Option<Found> {
    let idle = idle(residents);
    let fixed = taken(residents) - sum(&idle, |it| it.share);
    let left = room.checked_sub(fixed)?;
    let working = wanted.working.min(room).max(wanted.least);
    for unloaded in 0..=idle.len() {
        let (gone, kept) = idle.split_at(unloaded);
        if sum(kept, Resident::least).saturating_add(working) <= left {
            let mut gives: Vec<Give> = gone.iter().map(unload).collect();
            gives.extend(shrink(kept, left - working));
            let bytes = working;
            return Some(Found::Share { bytes, gives });
        }
    }
    // What works are in the way of its working share. It has what they leave.
    let gives = idle.iter().map(unload).collect();
    (wanted.least <= left).then_some(Found::Share { bytes: left, gives })
}

/// The fewest busy models whose end gives `wanted` room, from the one that was used longest ago.
fn in_the_way(room: u64, mut residents: Vec<Resident>, wanted: &Needs) -> Vec<ModelId> {
    let mut on = Vec::new();
    while share(room, &residents, wanted).is_none() {
        let busy = residents.iter_mut();
        let busy = busy.filter(|it| it.standing == Standing::Busy);
        let Some(first) = busy.min_by_key(|it| (it.used, it.id)) else {
            break;
        };
        first.standing = Standing::Idle;
        on.push(first.id);
    }
    on
}

/// Shares of models that are at work and short of memory: what is free, and what idle ones have beyond their working
/// share; and up to its own working share a model has what idle ones have beyond their least. Who gives comes first.
pub(crate) fn grow(room: u64, residents: &[Resident], short: &[ModelId]) -> Vec<Give> {
    let mut residents = residents.to_vec();
    let mut changes: Vec<Give> = Vec::new();
    for &id in short {
        // It may have come to its end since it was short.
        let busy = with(&residents, Standing::Busy);
        let Some(one) = busy.into_iter().find(|it| it.id == id) else {
            continue;
        };
        let step = one.share.saturating_add(GROWTH.max(one.share / 4));
        let most = one.needs.most.max(one.needs.working);
        let wanted = step.max(one.needs.working).min(most).max(one.share);
        let idle = idle(&residents);
        let free = room.saturating_sub(taken(&residents));
        let comfortable = free + sum(&idle, |it| it.share - it.comfortable());
        let all = free + sum(&idle, |it| it.share - it.least());
        let urgent = one.needs.working.saturating_sub(one.share).min(all);
        let more = (wanted - one.share).min(comfortable.max(urgent));
        if more == 0 {
            continue;
        }
        let gives = shrink(&idle, sum(&idle, |it| it.share) + free - more);
        let grown = Give {
            id,
            keeps: Some(one.share + more),
        };
        for give in gives.into_iter().chain([grown]) {
            apply(&mut residents, give);
            changes.push(give);
        }
    }
    changes
}

/// What gives way when all models have more than `room` together, as a budget that is lowered makes it. Those at work
/// give way last, and to their least.
pub(crate) fn relieve(room: u64, residents: &[Resident]) -> Vec<Give> {
    let residents = &staying(residents);
    let (all, idle) = (taken(residents), idle(residents));
    if all <= room {
        return Vec::new();
    }
    let fixed = all - sum(&idle, |it| it.share);
    for unloaded in 0..=idle.len() {
        let (gone, kept) = idle.split_at(unloaded);
        if fixed + sum(kept, Resident::least) <= room {
            let mut gives: Vec<Give> = gone.iter().map(unload).collect();
            gives.extend(shrink(kept, room - fixed));
            return gives;
        }
    }
    let mut gives: Vec<Give> = idle.iter().map(unload).collect();
    let mut excess = fixed - room;
    let mut busy: Vec<_> = with(residents, Standing::Busy);
    busy.sort_by_key(|it| (it.used, it.id));
    for one in busy {
        let less = excess.min(one.share - one.least());
        if less > 0 {
            gives.push(Give {
                id: one.id,
                keeps: Some(one.share - less),
            });
        }
        excess -= less;
    }
    gives
}

/// Models that have not been used for as long as they are to stay.
pub(crate) fn expired(residents: &[Resident], now: Instant) -> Vec<ModelId> {
    let expired = residents.iter().filter(|it| it.is_expired(now));
    expired.map(|it| it.id).collect()
}

/// When the next one will be.
pub(crate) fn next_expiry(residents: &[Resident]) -> Option<Instant> {
    let idle = with(residents, Standing::Idle);
    let ends = idle.iter().filter_map(|it| it.used.checked_add(it.keep?));
    ends.min()
}

/// What all of them hold.
pub(crate) fn taken(residents: &[Resident]) -> u64 {
    sum(residents, |it| it.share)
}

/// Idle models, from the one that was used longest ago.
fn idle(residents: &[Resident]) -> Vec<Resident> {
    let mut idle = with(residents, Standing::Idle);
    idle.sort_by_key(|it| (it.used, it.id));
    idle
}

/// Those whose memory does not come free by itself.
fn staying(residents: &[Resident]) -> Vec<Resident> {
    let staying = residents
        .iter()
        .filter(|it| it.standing != Standing::Leaving);
    staying.copied().collect()
}

fn with(residents: &[Resident], standing: Standing) -> Vec<Resident> {
    let found = residents.iter().filter(|it| it.standing == standing);
    found.copied().collect()
}

/// What `kept` give until they have `room` together: in their order what is beyond their working share, then all but
/// the least.
fn shrink(kept: &[Resident], room: u64) -> Vec<Give> {
    let mut excess = taken(kept).saturating_sub(room);
    let mut shares: Vec<u64> = kept.iter().map(|it| it.share).collect();
    for floor in [Resident::comfortable, Resident::least] {
        for (one, share) in kept.iter().zip(&mut shares) {
            let less = excess.min(share.saturating_sub(floor(one)));
            *share -= less;
            excess -= less;
        }
    }
    let changed = kept.iter().zip(shares);
    let changed = changed.filter(|(one, share)| *share < one.share);
    let give = |(one, share): (&Resident, u64)| Give {
        id: one.id,
        keeps: Some(share),
    };
    changed.map(give).collect()
}

fn unload(one: &Resident) -> Give {
    Give {
        id: one.id,
        keeps: None,
    }
}

fn apply(residents: &mut [Resident], give: Give) {
    let found = residents.iter_mut().find(|it| it.id == give.id);
    if let Some(found) = found {
        found.share = give.keeps.unwrap_or(0);
    }
}

fn sum(residents: &[Resident], bytes: impl Fn(&Resident) -> u64) -> u64 {
    residents.iter().map(bytes).sum()
}

#[cfg(test)]
mod tests;
