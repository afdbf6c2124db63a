//! Speculative decoding: tokens are guessed, computed in one pass with the pending one, and kept as far as they are
//! what is sampled anyway.
//!
//! ```text
//! tokens     [ ... | pending ]  guessed: d1 d2 d3
//! one pass         [ pending    d1    d2    d3 ]     a row of logits each
//! sampled            d1         d2    x              d1 and d2 are what was guessed, x is not
//! kept       [ ...   pending    d1    d2 ] x pending; the row of d3 is overwritten by the next step
//! ```
//!
//! A pass gives the same bits whatever else is in it, and each row is sampled after the tokens before it have been
//! taken up, with the sampler, the constraint and the limits as they are then. So a text is the same, token for token,
//! as without guesses, at any temperature. What is guessed only decides how long it takes:
//!
//! * [`History`] finds what followed the last time that the sequence's last tokens came up;
//! * [`Drafter`] asks a smaller model, or a head that the model's files carry, where history has nothing that is worth its
//!   rows;
//! * [`Acceptance`] knows how often such guesses were right;
//! * [`Pace`] knows what passes take by their rows, and decides how many guesses are worth theirs.

mod acceptance;
mod draft_model;
mod drafter;
mod features;
pub(crate) mod head;
mod history;
mod pace;
mod runner;

use std::num::NonZeroUsize;
use std::ops::Range;
use std::str::FromStr;

use acceptance::{Acceptance, Evidence};
pub use draft_model::{DraftError, DraftModel};
#[cfg(test)]
pub(crate) use drafter::Look;
pub(crate) use drafter::{Draft, Drafter, Wish};
pub(crate) use features::Features;
use history::History;
use lacuna_kv::{KvCache, Sequence};
use lacuna_models::{LogitRows, Segment};
pub(crate) use pace::Pace;

use crate::request_memory::HeldMemory;

/// What tokens are guessed from, so that a pass can check several. Texts are the same with it and without.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Speculation {
    /// Nothing is guessed: a pass computes one token of a reply.
    #[default]
    Off,
    /// From the sequence's own tokens: what followed the last time that its last tokens came up. Takes up to
    /// 293 KiB for a reply, and activation memory for a row of logits for each guess where fewer replies may run. With
    /// [`Speculation::NGRAM`] there are only as many rows as that memory holds anyway.
    Ngram {
        /// Tokens guessed for one pass at most.
        most: NonZeroUsize,
    },
    /// The same, and by the head that the model's files carry (multi-token prediction), or that of
    /// [`EngineConfig::head`](crate::EngineConfig::head), where the sequence's own tokens have no guess that is worth it. Takes the head's weights, activation memory for its passes, KV pages for the rows that it
    /// keeps, and for each reply what the head reads of its last tokens.
    /// [`EngineConfig::guessing`](crate::EngineConfig::guessing) has the head loaded, and refuses files without one.
    Mtp {
        /// Tokens guessed for one pass at most.
        most: NonZeroUsize,
    },
    /// [`Speculation::MTP`] for a model that was loaded with its head, as
    /// [`EngineConfig::guessing`](crate::EngineConfig::guessing) has one loaded that files carry and memory holds;
    /// [`Speculation::NGRAM`] for others.
    Auto,
}

/// Guesses for a pass from a sequence's own tokens, if not said otherwise: with the pending token they are sixteen, two whole
/// tiles of the kernels' products. They cost nothing until they are computed, and a copy is right for longer than that.
const MOST_OWN: NonZeroUsize = NonZeroUsize::new(15).unwrap();

/// The same where a model makes them, one after the other: a whole tile.
const MOST_DRAFTS: NonZeroUsize = NonZeroUsize::new(7).unwrap();

/// More than this are not asked for: a pass of so many rows is a prompt's, and costs what a prompt's does.
const MOST_DRAFTS_ASKED: usize = 63;

impl Speculation {
    /// By n-grams, as many at once as suit the kernels.
    pub const NGRAM: Self = Self::Ngram { most: MOST_OWN };

    /// By n-grams and the model's own head.
    pub const MTP: Self = Self::Mtp { most: MOST_DRAFTS };

    /// What it comes to for a model with a head or without.
    pub(crate) fn of_model(self, has_head: bool) -> Self {
        match self {
            Self::Auto if has_head => Self::MTP,
            Self::Auto => Self::NGRAM,
            decided => decided,
        }
    }

    /// Tokens guessed from a sequence's own for one pass at most.
    #[must_use]
    pub(crate) fn most(self) -> usize {
        match self {
            Self::Off | Self::Auto => 0,
            Self::Ngram { most } | Self::Mtp { most } => most.get(),
        }
    }
}

impl std::fmt::Display for Speculation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Auto => f.write_str("auto"),
            Self::Ngram { most } if *most == MOST_OWN => f.write_str("ngram"),
            Self::Ngram { most } => write!(f, "ngram:{most}"),
            Self::Mtp { most } if *most == MOST_DRAFTS => f.write_str("mtp"),
            Self::Mtp { most } => write!(f, "mtp:{most}"),
        }
    }
}

/// A way to guess that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown way to guess tokens `{0}`; use off, auto, ngram, mtp, or ngram:N and mtp:N for 1 to {MOST_DRAFTS_ASKED} at once"
)]
pub struct UnknownSpeculation(String);

impl FromStr for Speculation {
    type Err = UnknownSpeculation;

    fn from_str(name: &str) -> Result<Self, UnknownSpeculation> {
        let unknown = || UnknownSpeculation(name.to_owned());
        match name.split_once(':') {
            None if name == "off" => Ok(Self::Off),
            None if name == "auto" => Ok(Self::Auto),
            None if name == "ngram" => Ok(Self::NGRAM),
            None if name == "mtp" => Ok(Self::MTP),
            Some((how @ ("ngram" | "mtp"), most)) => {
                let most: NonZeroUsize = most.parse().map_err(|_| unknown())?;
                match how {
                    _ if most.get() > MOST_DRAFTS_ASKED => Err(unknown()),
                    "ngram" => Ok(Self::Ngram { most }),
                    _ => Ok(Self::Mtp { most }),
                }
            }
            _ => Err(unknown()),
        }
    }
}

/// What has come of guesses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DraftCounts {
    /// Times that tokens of a sequence were guessed for a pass.
    pub drafts: u64,
    /// Tokens that were guessed and computed.
    pub draft_tokens: u64,
    /// Those that were what was sampled.
    pub accepted_tokens: u64,
}

impl DraftCounts {
    /// Counts guesses for one pass, of which `accepted` were right.
    pub(crate) fn note(&mut self, guessed: usize, accepted: usize) {
        self.drafts += u64::from(guessed > 0);
        self.draft_tokens += guessed as u64;
        self.accepted_tokens += accepted as u64;
    }
}

/// The same by who guessed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Drafts {
    /// From sequences' own tokens.
    pub history: DraftCounts,
    /// By a draft model, or the model's own head.
    pub model: DraftCounts,
}

impl Drafts {
    /// Whoever guessed.
    #[must_use]
    pub fn all(&self) -> DraftCounts {
        let Self { history, model } = self;
        DraftCounts {
            drafts: history.drafts + model.drafts,
            draft_tokens: history.draft_tokens + model.draft_tokens,
            accepted_tokens: history.accepted_tokens + model.accepted_tokens,
        }
    }
}

/// What guesses the tokens of one sequence.
#[derive(Debug)]
pub(crate) struct Speculator {
    /// Its own tokens, unless nothing is guessed from these.
    history: Option<History>,
    /// Of guesses from history.
    acceptance: Acceptance,
    /// What each lead of history guessed to follow so many tokens, whether it was computed or not.
    guessed: [Vec<(u32, Evidence)>; 2],
    guessed_after: usize,
    /// What spoke for each of the guesses under way.
    evidence: Vec<Evidence>,
    /// The pending token and those guessed to follow it.
    run: Vec<u32>,
    /// What a draft model's guesses came to, for it to learn from.
    judged: Vec<(Evidence, bool)>,
    /// What the model has made of its last tokens, where a head guesses.
    features: Option<Features>,
    _memory: Option<HeldMemory>,
}

impl Speculator {
    /// For a sequence that will have `tokens` tokens, from which something is guessed or not, and whose head, if one guesses,
    /// takes features of `width` elements; with the memory that [`Speculator::bytes`] says.
    pub(crate) fn new(
        tokens: Option<usize>,
        width: Option<usize>,
        memory: Option<HeldMemory>,
    ) -> Self {
        Self {
            features: width.map(Features::new),
            history: tokens.map(History::new),
            acceptance: Acceptance::of_matches(),
            guessed: Default::default(),
            guessed_after: 0,
            evidence: Vec::new(),
            run: Vec::new(),
            judged: Vec::new(),
            _memory: memory,
        }
    }

    /// Whether it guesses from the sequence's own tokens.
    pub(crate) fn has_history(&self) -> bool {
        self.history.is_some()
    }

    /// Elements of the features that its head takes, if one guesses.
    pub(crate) fn features_width(&self) -> Option<usize> {
        self.features.as_ref().map(Features::width)
    }

    /// Takes up what the model has made of the tokens from `start` on, for its head.
    pub(crate) fn hear(&mut self, start: usize, rows: &[f32]) {
        if let Some(features) = &mut self.features {
            features.hear(start, rows);
        }
    }

    /// The tokens that its head can read.
    fn readable(&self) -> Range<usize> {
        self.features.as_ref().map_or(0..0, Features::readable)
    }

    /// What its head is given with `tokens`, which it can read.
    fn features_before(&self, tokens: Range<usize>) -> &[f32] {
        let features = self.features.as_ref();
        features.map_or(&[], |features| features.before(tokens))
    }

    /// Bytes that the speculator of a sequence of `tokens` tokens takes, whose head takes features of `width` elements.
    pub(crate) fn bytes(tokens: Option<usize>, width: Option<usize>) -> usize {
        let features = width.map_or(0, Features::bytes);
        let history = tokens.map_or(0, |tokens| {
            let guessed = 2 * MOST_DRAFTS_ASKED * size_of::<(u32, Evidence)>();
            History::bytes(tokens) + Acceptance::bytes_of_matches() + guessed
        });
        size_of::<Self>() + history + features
    }

    /// Guesses up to `most` of what comes after `tokens` from these, and how likely each is to be right together with those
    /// before it.
    pub(crate) fn guess(&mut self, tokens: &[u32], most: usize) -> Vec<f64> {
        self.forget_guesses();
        self.learn(tokens);
        let (Some(history), Some(&pending)) = (&mut self.history, tokens.last()) else {
            return Vec::new();
        };
        self.guessed_after = tokens.len();
        let (mut best, mut most_likely) = (None, 0.0);
        for (lead, guessed) in history.leads(tokens).zip(&mut self.guessed) {
            guessed.extend(history.guesses(lead, tokens, most));
            let Some(&(_, evidence)) = guessed.first() else {
                continue;
            };
            let likely = self.acceptance.probability(evidence);
            if likely >= most_likely {
                (best, most_likely) = (Some((lead, guessed)), likely);
            }
        }
        if let Some((lead, guessed)) = best {
            history.follow(lead, tokens);
            self.run.push(pending);
            self.run.extend(guessed.iter().map(|&(guess, _)| guess));
            self.evidence
                .extend(guessed.iter().map(|&(_, evidence)| evidence));
        }
        likely_together(&self.acceptance, &self.evidence)
    }

    /// Learns from what has followed since the last guesses. Those that were not computed teach as much, and cost nothing.
    fn learn(&mut self, tokens: &[u32]) {
        let after = tokens.get(self.guessed_after..).unwrap_or_default();
        for guessed in &mut self.guessed {
            for ((guess, evidence), token) in guessed.drain(..).zip(after) {
                self.acceptance.note(evidence, guess == *token);
                if guess != *token {
                    break;
                }
            }
        }
    }

    /// Takes `guesses` of a draft model, and how sure it is of each, for what comes after `pending`.
    fn take(&mut self, pending: u32, guesses: impl Iterator<Item = (u32, f64)>) {
        self.forget_guesses();
        self.run.push(pending);
        for (token, confidence) in guesses {
            self.run.push(token);
            self.evidence.push(Evidence::Confidence(confidence));
        }
    }

    /// Keeps the first `count` guesses.
    pub(crate) fn keep(&mut self, count: usize) {
        match count {
            0 => self.forget_guesses(),
            _ => {
                self.run.truncate(1 + count);
                self.evidence.truncate(count);
            }
        }
    }

    /// Guesses there are for the pass under way.
    pub(crate) fn guesses(&self) -> &[u32] {
        self.run.get(1..).unwrap_or_default()
    }

    /// The pending token and the guesses; empty without any.
    pub(crate) fn run(&self) -> &[u32] {
        &self.run
    }

    /// Learns from the `sampled` tokens that came of the guesses, which are right but for the `last` one, and maybe that,
    /// too. There are no guesses any more.
    pub(crate) fn judge(&mut self, sampled: usize, last: Option<u32>, drafts: &mut Drafts) {
        let guesses = self.run.get(1..).unwrap_or_default();
        if let Some(before) = sampled.checked_sub(1).filter(|_| !guesses.is_empty()) {
            let then = guesses.get(before).map(|&guess| Some(guess) == last);
            let rights = std::iter::repeat_n(true, before).chain(then);
            let judged = self.evidence.iter().copied().zip(rights);
            let accepted = before + usize::from(then == Some(true));
            match self.evidence[0] {
                // What they came to is learned with the next ones.
                Evidence::Match { .. } | Evidence::Exchange(_) => {
                    drafts.history.note(guesses.len(), accepted);
                }
                Evidence::Confidence(_) => {
                    self.judged.extend(judged);
                    drafts.model.note(guesses.len(), accepted);
                }
            }
        }
        self.forget_guesses();
    }

    fn forget_guesses(&mut self) {
        self.run.clear();
        self.evidence.clear();
    }

    /// Forgets the tokens there were: others come in their place.
    pub(crate) fn forget(&mut self) {
        self.guessed.iter_mut().for_each(Vec::clear);
        if let Some(history) = &mut self.history {
            history.forget();
        }
        if let Some(features) = &mut self.features {
            features.keep(0);
        }
        self.forget_guesses();
    }
}

/// The first `rows` of the pending token and the guesses that a pass has computed for `sequence`, if its states have to go
/// back to them.
pub(crate) fn rewound<'a>(
    sequence: &'a mut Sequence,
    speculator: &'a Speculator,
    rows: usize,
) -> Option<Segment<'a>> {
    let goes_back = (1..sequence.prepared()).contains(&rows) && sequence.is_to_be_rewound();
    let tokens = speculator.run().get(..rows).filter(|_| goes_back)?;
    Some(Segment {
        tokens,
        sequence,
        logits: LogitRows::None,
        // Guesses come after all of them.
        images: &[],
    })
}

/// Whether the pool of `cache` has twice `bytes`: what guesses take is taken where there is plenty, since it goes as soon as
/// others need it, and taking it anew costs more than a guess gives.
pub(crate) fn has_twice(cache: &KvCache, bytes: usize) -> bool {
    if bytes == 0 {
        return true;
    }
    let ledger = cache.ledger();
    let held = ledger.committed.saturating_sub(ledger.idle).get();
    let needed = held.saturating_add(2 * bytes as u64);
    ledger.limit.is_none_or(|limit| needed <= limit.get())
}

/// How likely each guess is right together with those before it, by what speaks for it.
fn likely_together(acceptance: &Acceptance, evidence: &[Evidence]) -> Vec<f64> {
    let mut together = 1.0;
    let likely = evidence.iter().map(|&evidence| {
        together *= acceptance.probability(evidence);
        together
    });
    likely.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ways_to_guess_are_written_as_they_are_read() {
        for name in [
            "off", "auto", "ngram", "ngram:1", "ngram:63", "mtp", "mtp:2",
        ] {
            let way: Speculation = name.parse().expect("a way");
            assert_eq!(way.to_string(), name);
        }
        assert_eq!("ngram:15".parse(), Ok(Speculation::NGRAM));
        for name in [
            "", "on", "ngram:", "ngram:0", "ngram:64", "mtp:0", "mtp:64", "draft:4", "off:1",
        ] {
            let error = name.parse::<Speculation>().expect_err("no way");
            assert!(error.to_string().contains(&format!("`{name}`")));
        }
    }

    #[test]
    fn what_was_copied_before_is_guessed_with_growing_confidence() {
        let text: Vec<u32> = (100..140).chain(100..110).collect();
        let mut speculator = Speculator::new(Some(1000), None, None);
        let first = speculator.guess(&text, 4);
        assert_eq!(speculator.guesses(), [110, 111, 112, 113]);
        assert_eq!(speculator.run(), [109, 110, 111, 112, 113]);
        assert!(
            first.is_sorted_by(|a, b| a > b),
            "each with those before it"
        );
        let mut counts = Drafts::default();
        speculator.judge(5, Some(114), &mut counts);
        let text: Vec<u32> = (100..140).chain(100..115).collect();
        let second = speculator.guess(&text, 4);
        assert!(second[3] > first[3], "{second:?} after {first:?}");
        speculator.keep(2);
        assert_eq!(speculator.guesses(), [115, 116]);
        speculator.judge(1, Some(7), &mut counts);
        assert!(speculator.guesses().is_empty() && speculator.run().is_empty());
        let text: Vec<u32> = text.into_iter().chain([7]).chain(100..115).collect();
        let third = speculator.guess(&text, 4);
        assert!(third[0] < second[0], "{third:?} after {second:?}");
        assert_eq!(
            speculator.guesses()[..2],
            [7, 100],
            "what came the last time"
        );
        // The text ends with a right guess.
        speculator.judge(2, Some(100), &mut counts);
        let all = DraftCounts {
            drafts: 3,
            draft_tokens: 10,
            accepted_tokens: 6,
        };
        assert_eq!(counts.history, all);
        assert_eq!(counts.all(), all);
    }

    #[test]
    fn a_reply_takes_as_much_as_is_said_at_most() {
        let most = Speculator::bytes(Some(usize::MAX), None);
        assert_eq!(most.div_ceil(1 << 10), 293, "{most} bytes");
    }

    #[test]
    fn nothing_is_guessed_where_a_picture_followed() {
        let mut speculator = Speculator::new(Some(1000), None, None);
        let text = [1, 2, 3, lacuna_images::FIRST_TOKEN, 4, 1, 2, 3];
        assert_eq!(speculator.guess(&text, 4), [0.0; 0]);
        assert!(speculator.run().is_empty(), "nor is there a pass for it");
    }

    #[test]
    fn other_tokens_are_guessed_from_themselves() {
        let mut speculator = Speculator::new(Some(1000), None, None);
        let before: Vec<u32> = (100..140).chain(100..110).collect();
        speculator.guess(&before, 4);
        speculator.forget();
        let after: Vec<u32> = (200..240).chain(107..110).collect();
        assert_eq!(speculator.guess(&after, 4), [0.0; 0]);
        let after: Vec<u32> = (200..240).chain(210..213).collect();
        speculator.guess(&after, 2);
        assert_eq!(speculator.guesses(), [213, 214]);
    }

    #[test]
    fn guesses_that_were_not_computed_teach_as_well() {
        let text: Vec<u32> = (100..140).chain(100..110).collect();
        let mut speculator = Speculator::new(Some(1000), None, None);
        let first = speculator.guess(&text, 4);
        speculator.keep(0);
        let mut counts = Drafts::default();
        speculator.judge(1, Some(110), &mut counts);
        assert_eq!(counts, Drafts::default());
        assert_eq!(speculator.guess(&text, 4), first, "nothing has followed");
        let grown: Vec<u32> = text.iter().copied().chain([110]).collect();
        assert!(speculator.guess(&grown, 4)[0] > first[0]);
        // What is rewritten has not followed.
        speculator.forget();
        let rewritten: Vec<u32> = (100..140).chain(100..112).collect();
        assert!(speculator.guess(&rewritten, 4)[0] > first[0]);
    }

    #[test]
    fn an_edit_is_followed_behind_what_it_exchanges_once_that_is_the_likelier_lead() {
        // A name is exchanged for 7 in every line, and followed by something else each time.
        let lines = |name: u32| {
            let line = move |line: u32| [100 + line, 200 + line, name, 300 + line, 400 + line];
            (0..40u32).flat_map(line)
        };
        let source: Vec<u32> = lines(9).collect();
        let edited: Vec<u32> = lines(7).collect();
        let mut speculator = Speculator::new(Some(1000), None, None);
        let mut right = 0;
        for end in 1..edited.len() {
            let text: Vec<u32> = source.iter().chain(&edited[..end]).copied().collect();
            speculator.guess(&text, 4);
            let guess = speculator.guesses().first();
            right += usize::from(edited[end - 1] == 7 && guess == Some(&edited[end]));
        }
        assert!(right > 30, "{right} of 40");
    }
}
