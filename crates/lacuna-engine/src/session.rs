//! A session: the tokens of one conversation, how far they are in the KV cache, and its sampler.

use lacuna_kv::{KvError, KvReport, Sequence};
use lacuna_models::LogitRows;

use crate::sampler::Sampler;

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
    resume: Resume,
}

/// Where a conversation can be gone back to when windows have passed what [`Sequence::truncate`] takes:
/// to the end of the last prompt, where answers are asked for again and the next turn may leave.
#[derive(Debug)]
enum Resume {
    /// Nowhere: the sequence can be cut anywhere, or nobody asked for it.
    None,
    /// As soon as the sequence has so many tokens.
    At(usize),
    /// The sequence as it was then, which shares its pages.
    From(Box<Sequence>),
}

impl Session {
    pub(crate) fn new(sequence: Sequence, sampler: Sampler) -> Self {
        // One more than the cache holds: the last sampled token stays pending.
        let tokens = Vec::with_capacity(sequence.capacity().min(TOKENS_AT_ONCE - 1) + 1);
        Self {
            sequence,
            tokens,
            sampler,
            keeps_turns: false,
            resume: Resume::None,
        }
    }

    /// From now on the end of the last prompt stays a place that [`Session::rewrite`] can go back to,
    /// as a conversation does whose last answer is asked for again. Where layers have windows that
    /// takes as much memory as they hold.
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

    /// Appends tokens to be computed by the next steps.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
    }

    /// Makes `tokens` the whole conversation, keeping what the cache already holds of it. At least
    /// the last token stays pending, so that a step can give logits. Where layers have windows that have
    /// passed what is needed, it goes on from the end of the last such prompt, or starts again. Returns
    /// how many tokens were kept.
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
        if self.keeps_turns && self.sequence.geometry().has_windows() {
            self.resume = Resume::At(tokens.len());
        }
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        Ok(kept)
    }

    /// Keeps the first `kept` tokens of the sequence, or as many as can be gone on from. Returns how
    /// many.
    fn go_back(&mut self, kept: usize) -> Result<usize, KvError> {
        if !self.sequence.is_spent() {
            match self.sequence.truncate(kept) {
                Err(KvError::Released { .. } | KvError::StatePassed { .. }) => {}
                done => return done.map(|()| kept),
            }
        }
        if let Resume::From(earlier) = &mut self.resume {
            let kept = kept.min(earlier.len());
            if kept > 0 && earlier.truncate(kept).is_ok() {
                std::mem::swap(&mut self.sequence, earlier);
                return Ok(kept);
            }
        }
        self.sequence.truncate(0).map(|()| 0)
    }

    /// Makes the first `rows` computed tokens the sequence's.
    pub(crate) fn accept(&mut self, rows: usize) {
        self.sequence.accept(rows);
        if matches!(self.resume, Resume::At(tokens) if tokens == self.sequence.len()) {
            // Before windows give rows back: the last token is computed again for its logits. Without
            // memory for it an answer that is asked for again is computed from the start.
            self.resume = match self.sequence.fork() {
                Ok(sequence) => Resume::From(Box::new(sequence)),
                Err(_) => Resume::None,
            };
        }
        // What a device does not take back now, the next step offers again.
        self.sequence.release_passed().ok();
    }

    /// Where the session's KV bytes are.
    #[must_use]
    pub fn kv(&self) -> KvReport {
        self.sequence.report()
    }

    /// The next chunk of pending tokens, of at most `limit`, and which logits it should give.
    pub(crate) fn schedule(&self, limit: usize) -> (std::ops::Range<usize>, LogitRows) {
        let start = self.sequence.len();
        let end = self.tokens.len().min(start + limit);
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

    /// A session over one full layer and one with a window, of 16 rows a page, and its processor.
    fn session() -> (Cpu, Session) {
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
        let cache = KvCache::new(geometry, KvPolicy::default()).expect("the system has pages");
        let sequence = cache.sequence(1000).expect("address space");
        let sampler = Sampler::new(Sampling::default()).expect("valid settings");
        let cpu = Cpu::new(CpuConfig {
            threads: NonZeroUsize::MIN,
            level: None,
        });
        let mut session = Session::new(sequence, sampler);
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
            session.accept(chunk.len());
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
        let (cpu, mut session) = session();
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
        let (cpu, mut session) = session();
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
}
