//! A session: the tokens of one conversation, how far they are in the KV cache, and its sampler.

use lacuna_kv::{KvCache, KvError, KvReport, Sequence};
use lacuna_models::{LogitRows, Segment, Shown};

use crate::sampler::Sampler;
use crate::speculation::{Draft, Drafts, Speculator, Wish, has_twice, rewound};

/// Tokens a session makes room for at once, 4 MiB of address space; longer ones grow as they fill.
const TOKENS_AT_ONCE: usize = 1 << 20;

/// One conversation's tokens and KV cache.
///
/// ```text
/// tokens    [ t0 t1 t2 ... | p0 p1 ... ]
///             in the cache   pending
/// ```
#[derive(Debug)]
pub struct Session {
    pub(crate) sequence: Sequence,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sampler: Sampler,
    /// Whether [`Session::keep_turns`] was asked for.
    keeps_turns: bool,
    /// Tokens that end a message.
    message_ends: Vec<u32>,
    /// After so many tokens the sequence is kept as it is then, because [`Sequence::truncate`] cannot go back
    /// there: windows pass rows, and a state is that after all tokens.
    keep_at: Vec<usize>,
    /// The sequence as it was then, which shares its pages, the shortest first.
    kept: Vec<Sequence>,
    /// What guesses its tokens, if anything does.
    speculator: Option<Speculator>,
    /// What a draft model has of them.
    draft: Draft,
    /// Images in the places of tokens.
    pub(crate) images: Vec<Shown>,
    /// Whether all tokens of an image have to be computed in one pass.
    images_whole: bool,
}

impl Session {
    pub(crate) fn new(sequence: Sequence, sampler: Sampler, message_ends: Vec<u32>) -> Self {
        // One more than the cache holds: the last sampled token stays pending.
        let tokens = Vec::with_capacity(sequence.capacity().min(TOKENS_AT_ONCE - 1) + 1);
        Self {
            sequence,
            tokens,
            sampler,
            keeps_turns: false,
            message_ends,
            keep_at: Vec::new(),
            kept: Vec::new(),
            speculator: None,
            draft: Draft::default(),
            images: Vec::new(),
            images_whole: false,
        }
    }

    /// The same for a model of which this says whether all tokens of an image have to be computed in one pass.
    pub(crate) fn keeping_images_whole(self, images_whole: bool) -> Self {
        Self {
            images_whole,
            ..self
        }
    }

    /// The same, some of whose tokens are guessed, from those there were or by others alone.
    pub(crate) fn speculating(mut self, from_history: bool, width: Option<usize>) -> Self {
        let guesses = self.sequence.geometry().can_rewind();
        let tokens = from_history.then(|| self.sequence.capacity());
        self.speculator = guesses.then(|| Speculator::new(tokens, width, None));
        self
    }

    /// From now on the end of the last prompt stays a place that [`Session::rewrite`] can go back to,
    /// as a conversation does whose last answer is asked for again, and so does the end of its last message, if
    /// layers keep states: what follows it may be written differently the next time. Where layers have windows
    /// or keep states that takes as much memory as they hold, of states twice.
    pub fn keep_turns(&mut self) {
        self.keeps_turns = true;
    }

    /// Every token so far, in the cache or pending.
    #[must_use]
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Tokens the session was made for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.sequence.capacity()
    }

    /// Tokens not in the cache yet.
    #[must_use]
    pub fn pending(&self) -> usize {
        self.tokens.len() - self.sequence.len()
    }

    /// What draws its tokens.
    #[must_use]
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// What draws its tokens, to be set to where another one was.
    pub fn sampler_mut(&mut self) -> &mut Sampler {
        &mut self.sampler
    }

    /// Appends tokens to be computed by the next steps.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Makes `images` those that the tokens of the next [`Session::rewrite`] show, and no others.
    pub fn show(&mut self, images: Vec<Shown>) {
        self.images = images;
    }

    /// Makes `tokens` the whole conversation, keeping what the cache already holds of it. At least
    /// the last token stays pending, so that a step can give logits. Where layers have windows that have
    /// passed what is needed, or keep states, it goes on from where [`Session::keep_turns`] has kept it, or
    /// starts again. Returns how many tokens were kept.
    ///
    /// # Errors
    /// [`KvError`] when pages cannot be given back; the session is unchanged then.
    pub fn rewrite(&mut self, tokens: &[u32]) -> Result<usize, KvError> {
        let cached = &self.tokens[..self.sequence.len()];
        let common = cached
            .iter()
            .zip(tokens)
            .take_while(|(a, b)| a == b)
            .count();
        let kept = self.go_back(common.min(tokens.len().saturating_sub(1)))?;
        if self.keeps_turns {
            self.keep_at = self.turn_ends(tokens);
        }
        if let Some(speculator) = &mut self.speculator {
            speculator.forget();
        }
        let unchanged = self.tokens.iter().zip(tokens);
        self.draft
            .rewrite(unchanged.take_while(|(a, b)| a == b).count());
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.keep();
        Ok(kept)
    }

    /// Keeps the first `len` tokens, as [`Session::rewrite`] does. Returns how many of them need not be computed again.
    ///
    /// # Errors
    /// As [`Session::rewrite`].
    pub fn truncate(&mut self, len: usize) -> Result<usize, KvError> {
        let kept = self.tokens[..len.min(self.tokens.len())].to_vec();
        let done = self.rewrite(&kept)?;
        // What comes in the places of others is no part of them.
        self.images.retain(|image| image.positions.end <= len);
        Ok(done)
    }

    /// A session of the same tokens, whose pages are shared until one of the two writes to them. It draws its own
    /// tokens, with `sampler`.
    ///
    /// # Errors
    /// [`KvError`] when memory or address space cannot be had; this session is unchanged then.
    pub fn fork(&mut self, sampler: Sampler) -> Result<Self, KvError> {
        self.recover()?;
        let mut fork = Self::new(self.sequence.fork()?, sampler, self.message_ends.clone());
        fork.tokens.extend_from_slice(&self.tokens);
        fork.images.clone_from(&self.images);
        fork.images_whole = self.images_whole;
        fork.keeps_turns = self.keeps_turns;
        Ok(match &self.speculator {
            Some(speculator) => {
                fork.speculating(speculator.has_history(), speculator.features_width())
            }
            None => fork,
        })
    }

    /// Where a prompt of `tokens` may be gone back to.
    fn turn_ends(&self, tokens: &[u32]) -> Vec<usize> {
        let geometry = self.sequence.geometry();
        if geometry.has_states() {
            let before_last = &tokens[..tokens.len().saturating_sub(1)];
            let ends = |token: &u32| self.message_ends.contains(token);
            let message = before_last.iter().rposition(ends).map(|at| at + 1);
            message.into_iter().chain([before_last.len()]).collect()
        } else if geometry.has_windows() {
            vec![tokens.len()]
        } else {
            Vec::new()
        }
    }

    /// Keeps the sequence as it is, if that was asked for. Without memory for it an answer that is asked for
    /// again is computed from further back.
    fn keep(&mut self) {
        let len = self.sequence.len();
        if len > 0
            && self.keep_at.contains(&len)
            && let Ok(sequence) = self.sequence.fork()
        {
            let of_this_turn =
                |kept: &Sequence| kept.len() < len && self.keep_at.contains(&kept.len());
            self.kept.retain(of_this_turn);
            self.kept.push(sequence);
        }
    }

    /// Gives up a step that was not accepted, if there is one, and goes on from what is kept if it had changed
    /// states.
    ///
    /// # Errors
    /// [`KvError`] when pages cannot be given back.
    pub(crate) fn recover(&mut self) -> Result<(), KvError> {
        self.sequence.accept(0);
        match self.sequence.is_spent() {
            true => self.go_back(self.sequence.len()).map(drop),
            false => Ok(()),
        }
    }

    /// Keeps the first `kept` tokens of the sequence, or as many as can be gone on from. Returns how
    /// many.
    fn go_back(&mut self, wanted: usize) -> Result<usize, KvError> {
        if !self.sequence.is_spent() {
            match self.sequence.truncate(wanted) {
                Err(KvError::Released { .. } | KvError::StatePassed { .. }) => {}
                done => {
                    done?;
                    self.kept.retain(|kept| kept.len() <= wanted);
                    return Ok(wanted);
                }
            }
        }
        while let Some(mut earlier) = self.kept.pop() {
            let wanted = wanted.min(earlier.len());
            if wanted > 0 && earlier.truncate(wanted).is_ok() {
                self.sequence = earlier;
                return Ok(wanted);
            }
        }
        self.sequence.truncate(0).map(|()| 0)
    }

    /// Makes the first `rows` computed tokens the sequence's.
    pub(crate) fn accept(&mut self, rows: usize) {
        self.sequence.accept(rows);
        // Before windows give rows back: the last token is computed again for its logits.
        self.keep();
        // What a device does not take back now, the next step offers again.
        self.sequence.release_passed().ok();
    }

    /// Guesses up to `most` tokens after the pending one, and says how likely each is right together with those before it.
    pub(crate) fn guess(&mut self, most: usize) -> Vec<f64> {
        let room = self.room_for_guesses();
        match &mut self.speculator {
            Some(speculator) if room > 0 => speculator.guess(&self.tokens, most.min(room)),
            _ => Vec::new(),
        }
    }

    /// How it asks a draft model for up to `most` guesses, if it has room for some and shows no images, which a draft does
    /// not see.
    pub(crate) fn wish(&mut self, most: usize) -> Option<Wish<'_>> {
        let most = most.min(self.room_for_guesses());
        let speculator = self.speculator.as_mut()?;
        (most > 0 && self.images.is_empty()).then_some(Wish {
            tokens: &self.tokens,
            draft: &self.draft,
            speculator,
            sequence: &mut self.sequence,
            most,
        })
    }

    /// Guesses that the next pass can compute after the pending token: none where more is pending, or the sequence is to be
    /// kept as it is on the way.
    fn room_for_guesses(&self) -> usize {
        let len = self.sequence.len();
        let stops = self.keep_at.iter().any(|&at| at > len);
        match self.tokens.len() == len + 1 && !stops {
            true => self.sequence.capacity().saturating_sub(len + 1),
            false => 0,
        }
    }

    /// Keeps the first `count` guesses.
    pub(crate) fn keep_guesses(&mut self, count: usize) -> usize {
        let speculator = self.speculator.as_mut();
        speculator.map_or(0, |speculator| {
            speculator.keep(count);
            speculator.guesses().len()
        })
    }

    /// Prepares the pending token and `count` guesses, if there is memory for that in the pool of `cache`, and as much again
    /// where states are to be able to go back.
    pub(crate) fn prepare_guesses(&mut self, count: usize, cache: &KvCache) -> bool {
        let bytes = self.sequence.rewind_bytes_to_take(1 + count);
        has_twice(cache, bytes) && self.sequence.prepare_to_rewind(1 + count).is_ok()
    }

    /// Takes up what the model has made of the step's tokens, `[tokens, width]`, for its head.
    pub(crate) fn hear(&mut self, features: &[f32]) {
        let start = self.sequence.len();
        // A head does not see images.
        if let Some(speculator) = self.speculator.as_mut().filter(|_| self.images.is_empty()) {
            speculator.hear(start, features);
        }
    }

    /// The first `rows` tokens of the step, if states have to go back to them.
    pub(crate) fn rewound(&mut self, rows: usize) -> Option<Segment<'_>> {
        let speculator = self.speculator.as_ref()?;
        rewound(&mut self.sequence, speculator, rows)
    }

    /// The pending token and the guesses, with a row of logits each.
    pub(crate) fn drafted(&mut self) -> Segment<'_> {
        let speculator = self.speculator.as_ref();
        Segment {
            tokens: speculator.map_or(&[], Speculator::run),
            sequence: &mut self.sequence,
            logits: LogitRows::All,
            images: &self.images,
        }
    }

    /// The guess of that number.
    pub(crate) fn guessed(&self, number: usize) -> Option<u32> {
        self.speculator.as_ref()?.guesses().get(number).copied()
    }

    /// Makes the rows of the pending token and of the guesses that were right the sequence's, of which `sampled` tokens
    /// came, the last of them pending now.
    pub(crate) fn judge(&mut self, sampled: usize, drafts: &mut Drafts) {
        if let Some(speculator) = &mut self.speculator {
            let last = self.tokens.last().copied();
            speculator.judge(sampled, last, drafts);
        }
        self.accept(sampled);
    }

    /// Where the session's KV bytes are.
    #[must_use]
    pub fn kv(&self) -> KvReport {
        self.sequence.report()
    }

    /// The next chunk of pending tokens, of at most `limit`, and which logits it should give.
    pub(crate) fn schedule(&self, limit: usize) -> (std::ops::Range<usize>, LogitRows) {
        let start = self.sequence.len();
        let ahead = self.keep_at.iter().filter(|&&at| at > start);
        let end = self.tokens.len().min(start + limit);
        let end = ahead.copied().min().map_or(end, |stop| end.min(stop));
        let end = match Shown::uncut(&self.images, start, end - start) {
            _ if !self.images_whole => end,
            // Where a pass is to end within the first image, it ends behind it: checked to be no more than `limit`.
            0 => start + Shown::rest_of_image(&self.images, start).unwrap_or(end - start),
            count => start + count,
        };
        let rows = if end == self.tokens.len() {
            LogitRows::Last
        } else {
            LogitRows::None
        };
        (start..end, rows)
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use lacuna_kernels::{Cpu, CpuConfig, ElementType};
    use lacuna_kv::{
        Geometry, Keep, KvCache, KvElements, KvPolicy, Layer, LayerCache, RowSpec, Side, ValueRows,
    };

    use super::*;
    use crate::sampler::Sampling;

    const WINDOW: usize = 40;

    /// The token that ends a message.
    const END: u32 = 99_999;

    /// A session over one full layer and one with a window, of 16 rows a page, and its processor; and a
    /// state, if it is to have one.
    fn session(state: Option<usize>) -> (Cpu, Session) {
        let window = NonZeroUsize::new(WINDOW).expect("not zero");
        let layers = [Keep::All, Keep::Window(window)].map(|keep| {
            LayerCache::Rows(RowSpec {
                kv_heads: 1,
                key_dim: 64,
                value_dim: 64,
                values: ValueRows::Apart,
                keep,
            })
        });
        let elements = KvElements::both(ElementType::F32);
        let geometry = Geometry::new(layers.to_vec(), elements).expect("a model");
        let geometry = match state {
            Some(elements) => geometry.with_states(vec![0, elements]).expect("a model"),
            None => geometry,
        };
        let cache = KvCache::new(geometry, KvPolicy::default()).expect("the system has pages");
        let sequence = cache.sequence(1000).expect("address space");
        let sampler = Sampler::new(Sampling::default()).expect("valid settings");
        let cpu = Cpu::new(CpuConfig {
            threads: NonZeroUsize::MIN,
            ..CpuConfig::default()
        });
        let mut session = Session::new(sequence, sampler, vec![END]);
        session.keep_turns();
        (cpu.expect("a processor"), session)
    }

    /// Computes what is pending, `chunk` tokens at a time: a row names its token.
    fn compute(cpu: &Cpu, session: &mut Session, chunk: usize) {
        while session.pending() > 0 {
            let (chunk, _) = session.schedule(chunk);
            session.sequence.prepare(chunk.len()).expect("memory");
            let row = |&token: &u32| [token as f32; 64];
            let rows: Vec<f32> = session.tokens[chunk.clone()].iter().flat_map(row).collect();
            for layer in [0, 1].map(Layer) {
                let sequence = &mut session.sequence;
                sequence.write(layer, |_, run| cpu.store_run(run, &rows));
            }
            advance(session, chunk.end);
            session.accept(chunk.len());
        }
    }

    /// Lets the state list all tokens up to `end`.
    fn advance(session: &mut Session, end: usize) {
        let start = session.sequence.len();
        let state = session.sequence.state(Layer(1)).after;
        if let Some((count, listed)) = state.split_first_mut() {
            let tokens = &session.tokens[..end];
            assert_eq!(*count, start as f32, "the state after other tokens");
            let before = listed.iter().zip(&tokens[..start]);
            assert!(
                before
                    .clone()
                    .all(|(&listed, &token)| listed == token as f32)
            );
            *count = end as f32;
            for (place, &token) in listed.iter_mut().zip(tokens) {
                *place = token as f32;
            }
        }
    }

    fn assert_rows(session: &Session) {
        for layer in [0, 1].map(Layer) {
            let view = session.sequence.view(layer, Side::Key);
            for row in view.rows() {
                let expected = (session.tokens[row] as f32).to_ne_bytes();
                assert_eq!(view.head(row, 0)[..4], expected, "{layer:?} row {row}");
            }
        }
        let last = session.sequence.view(Layer(1), Side::Key).rows();
        assert_eq!(last.len(), session.sequence.len().min(WINDOW - 1));
    }

    #[test]
    fn an_answer_that_is_asked_for_again_goes_on_from_the_end_of_its_prompt() {
        let (cpu, mut session) = session(None);
        let prompt: Vec<u32> = (0..300).collect();
        assert_eq!(session.rewrite(&prompt).expect("nothing to give back"), 0);
        compute(&cpu, &mut session, 64);
        for answer in [1000, 2000, 3000] {
            session.extend(&(answer..answer + 200).collect::<Vec<u32>>());
            compute(&cpu, &mut session, 1);
            assert_rows(&session);
            let kept = session.rewrite(&prompt).expect("pages go back");
            assert_eq!(kept, 299, "only the last token is computed again");
            compute(&cpu, &mut session, 64);
            assert_rows(&session);
        }
        // The next turn leaves the last answer out.
        session.extend(&(4000..4200).collect::<Vec<u32>>());
        compute(&cpu, &mut session, 1);
        let next: Vec<u32> = (0..300).chain(5000..5100).collect();
        assert_eq!(session.rewrite(&next).expect("pages go back"), 300);
        compute(&cpu, &mut session, 64);
        assert_rows(&session);
    }

    #[test]
    fn a_conversation_that_is_changed_before_what_windows_keep_starts_again() {
        let (cpu, mut session) = session(None);
        let prompt: Vec<u32> = (0..300).collect();
        session.rewrite(&prompt).expect("nothing to give back");
        compute(&cpu, &mut session, 64);
        session.extend(&(1000..1200).collect::<Vec<u32>>());
        compute(&cpu, &mut session, 1);
        let other: Vec<u32> = (0..100).chain(7000..7300).collect();
        assert_eq!(session.rewrite(&other).expect("pages go back"), 0);
        compute(&cpu, &mut session, 64);
        assert_rows(&session);
        let longer = [&other[..], &[1, 2, 3]].concat();
        assert_eq!(session.rewrite(&longer).expect("nothing to give back"), 400);
        compute(&cpu, &mut session, 64);
        assert_rows(&session);
    }

    /// Every turn's answer thinks first, and the next prompt leaves that out, from where the answer began.
    #[test]
    fn with_states_a_conversation_goes_on_from_the_end_of_its_last_message() {
        let (cpu, mut session) = session(Some(1001));
        let mut history: Vec<u32> = Vec::new();
        for turn in 0..4 {
            let words = turn * 1000..turn * 1000 + 90;
            history.extend(words.chain([END]));
            let prompt = [&history[..], &[7, 8]].concat();
            let before = history.len() - 91;
            let kept = session.rewrite(&prompt).expect("pages go back");
            // But for the first turn all but the last answer and the new message is there.
            assert_eq!(kept, before.saturating_sub(20), "turn {turn}");
            compute(&cpu, &mut session, 64);
            session.extend(&(50_000..50_060).collect::<Vec<u32>>());
            compute(&cpu, &mut session, 1);
            // The same prompt again, twice.
            for _ in 0..2 {
                let kept = session.rewrite(&prompt).expect("pages go back");
                assert_eq!(kept, prompt.len() - 1);
                compute(&cpu, &mut session, 64);
                session.extend(&(60_000..60_030).collect::<Vec<u32>>());
                compute(&cpu, &mut session, 1);
            }
            assert!(session.kept.len() <= 2);
            history.extend((70_000..70_019).chain([END]));
        }
    }

    #[test]
    fn a_step_that_fails_after_it_has_changed_states_is_computed_again() {
        let (cpu, mut session) = session(Some(1001));
        let prompt: Vec<u32> = (0..300).collect();
        session.rewrite(&prompt).expect("nothing to give back");
        compute(&cpu, &mut session, 64);
        session.extend(&[1, 2, 3]);
        for back in [299, 0] {
            session.sequence.prepare(3).expect("memory");
            session.sequence.state(Layer(1)).after[0] = f32::NAN;
            session.recover().expect("pages go back");
            assert_eq!(session.sequence.len(), back);
            session.keep_at.clear();
            compute(&cpu, &mut session, 64);
            assert_eq!(session.pending(), 0);
            session.extend(&[4, 5, 6]);
        }
    }
}
