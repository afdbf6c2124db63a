//! What a store has of a prompt: asked for by name, a bounded number of them, and never listed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::Shared;
use super::super::chain::Chain;
use super::super::index::{Segment, file_name};
use super::super::segment::{Header, Kind};
use super::Tier;
use super::link::{Link, LinkBytes};

/// A segment that is to be brought.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) name: String,
    pub(super) kind: Kind,
    /// Groups before it.
    pub(super) first_group: usize,
    /// Groups of it that the prompt has, from its first on; none of a resume point.
    pub(super) common: usize,
    /// What the file has to be long.
    pub(super) bytes: u64,
}

/// A prompt, and what there is of it already.
#[derive(Debug)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    /// What everything up to the end of each of its groups hashes to, but for the last token.
    pub(super) chains: Vec<Chain>,
    /// Before its first group.
    pub(super) root: Chain,
    /// Groups of it in memory.
    pub(super) known: usize,
    /// After so many of them a sequence could start.
    pub(super) resumable: usize,
    /// Nobody waits for it any more.
    pub(super) cancelled: AtomicBool,
}

impl Prompt {
    pub(super) fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    fn at(&self, group: usize) -> &[Chain] {
        self.chains.get(group..).unwrap_or_default()
    }

    /// What everything before a group hashes to.
    pub(super) fn before(&self, group: usize) -> Chain {
        match group.checked_sub(1) {
            None => self.root,
            Some(last) => self.chains.get(last).copied().unwrap_or(self.root),
        }
    }
}

/// Segments of the usual length that are asked for at once, one behind the other: a long prompt then takes a few
/// questions, and one of which there is nothing no more than these.
const AHEAD: usize = 16;
/// Resume points that are asked for: those nearest to the end of what there is.
const MOST_POINTS: usize = 128;
/// A segment is brought of which a prompt has an eighth or more. Of less, more bytes come for each token than from a
/// segment that is wanted whole by as much as computing is slower than reading.
const LEAST_COMMON: usize = 8;

impl Shared {
    /// What `tier` has of `prompt` beyond what is in memory and in the folder, in order, a resume point last.
    pub(super) fn look_up(&self, tier: &Tier, prompt: &Prompt) -> io::Result<Vec<Wanted>> {
        let (end, covering) = {
            let index = self.index();
            let end = index.reach(&prompt.chains, prompt.known);
            let last = prompt.before(end);
            (end, index.find(Kind::Rows, last).map(Arc::clone))
        };
        let mut found = self.follow(tier, prompt, end)?;
        // What the folder has may be the beginning of something longer.
        if let (true, Some(segment)) = (found.is_empty() && end > 0, covering) {
            found = self.follow(tier, prompt, segment.first_group)?;
        }
        let reached = |wanted: &Wanted| wanted.first_group + wanted.common;
        let reach = found.last().map_or(end, reached).max(end);
        found.retain(|wanted| reached(wanted) > end);
        if !self.shape.has_resume_points() {
            return Ok(found);
        }
        let Some(point) = self.find_point(tier, prompt, end, reach)? else {
            // A sequence cannot start from rows alone.
            return Ok(Vec::new());
        };
        found.retain(|wanted| wanted.first_group < point.first_group);
        found.push(point);
        Ok(found)
    }

    /// The segments of rows that follow each other from group `at` on, as far as `prompt` has what they have.
    fn follow(&self, tier: &Tier, prompt: &Prompt, mut at: usize) -> io::Result<Vec<Wanted>> {
        let mut found: Vec<Wanted> = Vec::new();
        while at < prompt.chains.len() && !prompt.is_cancelled() {
            let next = self.next(tier, prompt, at)?;
            let held: u64 = found.iter().chain(&next).map(|wanted| wanted.bytes).sum();
            // The first would have to leave again for the last.
            if next.is_empty() || held > self.config.limit.get() {
                break;
            }
            at += next.iter().map(|wanted| wanted.common).sum::<usize>();
            found.extend(next);
        }
        Ok(found)
    }

    /// What follows at group `at`: segments of the usual length, or else a shorter one, or else one that the prompt
    /// leaves before its end.
    fn next(&self, tier: &Tier, prompt: &Prompt, at: usize) -> io::Result<Vec<Wanted>> {
        let (chains, usual) = (prompt.at(at), self.shape.segment_groups());
        let usual_ones = chains.chunks_exact(usual).take(AHEAD).enumerate();
        let usual_ones = usual_ones.map(|(index, chains)| self.rows(at + index * usual, chains));
        let there = self.there(tier, usual_ones.collect())?;
        let whole: Vec<Wanted> = there.into_iter().map_while(|found| found).collect();
        if !whole.is_empty() {
            return Ok(whole);
        }
        let Some(link) = self.link(tier, at, chains)? else {
            return Ok(Vec::new());
        };
        let common = link.common(chains);
        let mut linked = self.rows_of(at, link.groups(), link.target.clone());
        linked.common = common;
        if common < link.groups() {
            // There may be one that ends where the prompt goes on.
            let shorter = (common..=chains.len().min(usual - 1)).rev();
            let shorter = shorter.map(|groups| self.rows(at, &chains[..groups]));
            let there = self.there(tier, shorter.collect())?;
            if let Some(found) = there.into_iter().flatten().next() {
                return Ok(vec![found]);
            }
        }
        if common * LEAST_COMMON < link.groups() {
            return Ok(Vec::new());
        }
        let there = self.there(tier, vec![linked])?;
        Ok(there.into_iter().flatten().collect())
    }

    /// The last resume point behind what there is, up to `reach` groups.
    fn find_point(
        &self,
        tier: &Tier,
        prompt: &Prompt,
        end: usize,
        reach: usize,
    ) -> io::Result<Option<Wanted>> {
        let known = {
            let index = self.index();
            let is_there = |&groups: &usize| {
                let point = index.find(Kind::ResumePoint, prompt.before(groups));
                point.is_some()
            };
            let mut ends = (prompt.resumable + 1..=end).rev();
            ends.find(is_there).unwrap_or(prompt.resumable)
        };
        let points = (known + 1..=reach).rev().take(MOST_POINTS);
        let points = points.map(|groups| {
            let last = prompt.before(groups).short();
            let name = file_name(Kind::ResumePoint, groups, 0, &last);
            Wanted {
                bytes: self.file_bytes(Kind::ResumePoint, groups, 0),
                name,
                kind: Kind::ResumePoint,
                first_group: groups,
                common: 0,
            }
        });
        let there = self.there(tier, points.collect())?;
        Ok(there.into_iter().flatten().next())
    }

    /// Those of `wanted` that are there, each in its place.
    fn there(&self, tier: &Tier, wanted: Vec<Wanted>) -> io::Result<Vec<Option<Wanted>>> {
        let names: Vec<String> = wanted.iter().map(|wanted| wanted.name.clone()).collect();
        let lengths = tier.lengths(&names)?;
        let each = wanted.into_iter().zip(lengths).map(|(wanted, length)| {
            let length = length?;
            // It would be found out later, at a higher price.
            if length != wanted.bytes {
                tier.note_damaged(&wanted.name);
                return None;
            }
            Some(wanted)
        });
        Ok(each.collect())
    }

    /// The link of what begins at group `at` with the first of `chains`.
    fn link(&self, tier: &Tier, at: usize, chains: &[Chain]) -> io::Result<Option<Link>> {
        let Some(&first) = chains.first() else {
            return Ok(None);
        };
        let name = Link::name(at, first);
        let mut bytes = LinkBytes::default();
        match tier.store.get(&tier.object(&name), &mut bytes) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == io::ErrorKind::InvalidData => bytes.0.clear(),
            Err(error) => return Err(error),
        }
        let link = Link::decode(&bytes.0, at);
        let link = link.filter(|link| link.common(chains) > 0);
        if link.is_none() {
            tier.note_damaged(&name);
        }
        Ok(link)
    }

    /// The segment of rows after `first_group` groups that has just the groups of `chains`.
    fn rows(&self, first_group: usize, chains: &[Chain]) -> Wanted {
        let last = chains.last().map_or_else(String::new, |last| last.short());
        let name = file_name(Kind::Rows, first_group, chains.len(), &last);
        self.rows_of(first_group, chains.len(), name)
    }

    fn rows_of(&self, first_group: usize, groups: usize, name: String) -> Wanted {
        Wanted {
            name,
            kind: Kind::Rows,
            first_group,
            common: groups,
            bytes: self.file_bytes(Kind::Rows, first_group, groups),
        }
    }

    /// What a file of a segment is long.
    fn file_bytes(&self, kind: Kind, first_group: usize, groups: usize) -> u64 {
        let payload = match kind {
            Kind::Rows => self.shape.rows_bytes(&(first_group..first_group + groups)),
            Kind::ResumePoint => self.shape.point_bytes(first_group),
        };
        Header::length(
            groups * self.shape.group_tokens(),
            payload,
            self.key().is_some(),
        ) + payload
    }

    /// Whether `segment` is what was asked for, of a prompt that has these tokens.
    pub(super) fn is_wanted(&self, wanted: &Wanted, header: &Header, prompt: &Prompt) -> bool {
        let group = self.shape.group_tokens();
        let tokens = wanted.first_group * group..(wanted.first_group + wanted.common) * group;
        self.check(header).is_ok()
            && header.before == prompt.before(wanted.first_group)
            && header.kind == wanted.kind
            && Segment::of(header).name == wanted.name
            && header.tokens.starts_with(&prompt.tokens[tokens])
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::trial;
    use super::*;
    use crate::prefix::Namespace;

    /// A store may have anything under a name.
    #[test]
    fn a_segment_is_what_was_asked_for_in_every_respect() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = trial::open(root.path(), 1 << 20);
        let shared = &folder.shared;
        let group = shared.shape.group_tokens();
        let (tokens, first) = (trial::tokens(&folder, 1, 3), folder.root(Namespace::COMMON));
        let header = |before, first_group: usize, tokens: &[u32]| Header {
            fingerprint: shared.fingerprint.digest(),
            kind: Kind::Rows,
            before,
            first_group: first_group as u32,
            group_tokens: group as u32,
            tokens: tokens.to_vec(),
            payload_bytes: (shared.shape)
                .rows_bytes(&(first_group..first_group + tokens.len() / group)),
            checksums: Vec::new(),
            cipher: None,
        };
        let prompt = Prompt {
            chains: header(first, 0, &tokens).chains(),
            tokens: tokens.clone(),
            root: first,
            known: 0,
            resumable: 0,
            cancelled: AtomicBool::new(false),
        };
        let good = header(prompt.before(1), 1, &tokens[group..]);
        let wanted = |header: &Header, common| Wanted {
            name: Segment::of(header).name,
            kind: Kind::Rows,
            first_group: 1,
            common,
            bytes: 0,
        };
        let is_wanted =
            |wanted: &Wanted, header: &Header| shared.is_wanted(wanted, header, &prompt);
        assert!(is_wanted(&wanted(&good, 2), &good));
        // Of a longer prompt, what both have is enough.
        let mut longer = tokens[group..].to_vec();
        longer[2 * group - 1] += 1;
        let longer = header(prompt.before(1), 1, &longer);
        assert!(is_wanted(&wanted(&longer, 1), &longer));
        assert!(!is_wanted(&wanted(&longer, 2), &longer), "other tokens");
        assert!(!is_wanted(&wanted(&longer, 2), &good), "another name");
        let elsewhere = header(first, 1, &tokens[group..]);
        assert!(!is_wanted(&wanted(&elsewhere, 2), &elsewhere), "elsewhere");
        let point = Wanted {
            kind: Kind::ResumePoint,
            ..wanted(&good, 2)
        };
        assert!(!is_wanted(&point, &good), "of another kind");
        let mut other = header(prompt.before(1), 1, &tokens[group..]);
        other.fingerprint[0] ^= 1;
        assert!(!is_wanted(&wanted(&other, 2), &other), "of another model");
    }
}
