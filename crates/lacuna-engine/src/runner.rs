//! What the scheduler needs of a model: the seam at which a simulation puts one without arithmetic.

use lacuna_kv::KvCache;
use lacuna_models::{BatchLimits, Likeliest, RowReads, Segment, TokenLogit};
use lacuna_pages::ByteLength;
use lacuna_text::tokenizer::Tokenizer;

use crate::engine::Engine;
use crate::error::{EngineError, NotFinite};
use crate::status::{DeviceStatus, ExpertStatus, NeuronStatus, WeightMemory};

/// What a pass gives.
pub(crate) struct Pass<'a> {
    /// The rows that were asked for, one after the other.
    pub(crate) rows: Rows<'a>,
    /// What a head that guesses takes of each token, where one does; of a head's own pass, of those with logits.
    pub(crate) features: &'a [f32],
    /// What turns the tokens chosen from them into text.
    pub(crate) tokenizer: &'a Tokenizer,
}

/// What is needed of the rows of a pass. What comes later does for what comes before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Wanted {
    /// Their likeliest tokens.
    Likeliest,
    /// So many of their likeliest tokens, with logits.
    TopK(usize),
    /// Their logits.
    Logits,
}

impl Wanted {
    /// The same, or logits where these are `needed`.
    pub(crate) fn or_logits(self, needed: bool) -> Self {
        match needed {
            true => Self::Logits,
            false => self,
        }
    }
}

/// Rows of a pass.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Rows<'a> {
    /// Their logits, so many each.
    Logits(&'a [f32], usize),
    /// Their likeliest tokens.
    Likeliest(&'a [Likeliest]),
    /// So many of their likeliest tokens, the likeliest first.
    TopK(&'a [TokenLogit], usize),
}

/// One of them.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Row<'a> {
    /// Its logits.
    Logits(&'a [f32]),
    /// Its likeliest token.
    Likeliest(Likeliest),
    /// Some of its likeliest tokens, the likeliest first.
    TopK(&'a [TokenLogit]),
}

impl<'a> Rows<'a> {
    /// The first `count`, and the others.
    ///
    /// # Panics
    /// When there are fewer.
    pub(crate) fn split_at(self, count: usize) -> (Self, Self) {
        match self {
            Self::Logits(logits, width) => {
                let (first, rest) = logits.split_at(count * width);
                (Self::Logits(first, width), Self::Logits(rest, width))
            }
            Self::Likeliest(tokens) => {
                let (first, rest) = tokens.split_at(count);
                (Self::Likeliest(first), Self::Likeliest(rest))
            }
            Self::TopK(tokens, width) => {
                let (first, rest) = tokens.split_at(count * width);
                (Self::TopK(first, width), Self::TopK(rest, width))
            }
        }
    }

    /// How many there are.
    pub(crate) fn len(self) -> usize {
        match self {
            Self::Logits(logits, width) => logits.len() / width,
            Self::Likeliest(tokens) => tokens.len(),
            Self::TopK(tokens, width) => tokens.len() / width,
        }
    }

    /// Each of them.
    pub(crate) fn iter(self) -> impl Iterator<Item = Row<'a>> {
        (0..self.len()).map(move |row| match self {
            Self::Logits(logits, width) => Row::Logits(&logits[row * width..][..width]),
            Self::Likeliest(tokens) => Row::Likeliest(tokens[row]),
            Self::TopK(tokens, width) => Row::TopK(&tokens[row * width..][..width]),
        })
    }

    /// The logits of each of them, if these are there.
    pub(crate) fn logits(self) -> impl Iterator<Item = &'a [f32]> {
        self.iter().filter_map(|row| match row {
            Row::Logits(logits) => Some(logits),
            Row::Likeliest(_) | Row::TopK(_) => None,
        })
    }
}

/// The likeliest token of a row.
///
/// # Errors
/// [`NotFinite`] for a row that none is to be chosen from.
pub(crate) fn token_of(likeliest: Likeliest) -> Result<u32, NotFinite> {
    match likeliest {
        Likeliest::Token(token) => Ok(token),
        Likeliest::NotFinite(token) => Err(NotFinite {
            token: token as usize,
        }),
    }
}

/// A model that computes batches over sequences of one KV cache.
pub(crate) trait ModelRunner: Send {
    /// Runs `segments`, all prepared, and returns the rows of logits they ask for.
    ///
    /// # Errors
    /// [`EngineError`] before anything is computed.
    fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<Pass<'_>, EngineError>;

    /// The same, where what is `wanted` of each row is all that is needed of it: rows may be that.
    ///
    /// # Errors
    /// As [`ModelRunner::forward`].
    fn forward_for(
        &mut self,
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<Pass<'_>, EngineError> {
        let _ = wanted;
        self.forward(segments)
    }

    /// The same of a head that guesses, which is given features with each token: those of the token before it.
    ///
    /// # Errors
    /// As [`ModelRunner::forward`].
    fn forward_with(
        &mut self,
        segments: &mut [Segment<'_>],
        features: &[f32],
    ) -> Result<Pass<'_>, EngineError> {
        let _ = features;
        self.forward(segments)
    }

    /// Elements of the features that it is given with each token, where it is a head.
    fn features_width(&self) -> Option<usize> {
        None
    }

    /// Whether it is a head that keeps no rows: it reads those of the sequences that it guesses for.
    fn borrows_rows(&self) -> bool {
        false
    }

    /// The token that a logit is of, by its place in a row.
    fn token_at(&self, place: u32) -> u32 {
        place
    }

    /// Takes states back to the first tokens of the last pass, those of each of `segments`
    /// ([`Model::rewind`](lacuna_models::Model::rewind)), which are still to be accepted.
    ///
    /// # Errors
    /// [`EngineError`] for what no pass could compute; those sequences are spent once tokens are accepted.
    fn rewind(&mut self, segments: &mut [Segment<'_>]) -> Result<(), EngineError>;

    /// The largest batch one pass takes.
    fn batch_limits(&self) -> BatchLimits;

    /// Where sequences come from.
    fn kv_cache(&self) -> &KvCache;

    /// Tokens a sequence may hold.
    fn context_tokens(&self) -> usize;

    /// Logits of one row.
    fn vocabulary(&self) -> usize;

    /// What turns tokens into text.
    fn tokenizer(&self) -> &Tokenizer;

    /// Elements of a row of an image, where it takes some.
    fn image_width(&self) -> Option<usize> {
        None
    }

    /// Whether all tokens of an image have to be computed in one pass.
    fn keeps_images_whole(&self) -> bool {
        false
    }

    /// The engine, which sessions are stepped by, where it is one and not a model without arithmetic.
    fn engine(&mut self) -> Option<&mut Engine> {
        None
    }

    /// Whether the device that computes is gone, and with it every sequence.
    fn has_lost_device(&self) -> bool {
        false
    }

    /// That device, where it is not the processor.
    fn device(&self) -> Option<DeviceStatus> {
        None
    }

    /// Says which tokens come after those of the next pass, as far as that is known.
    fn expect(&mut self, tokens: &[u32]) {
        let _ = tokens;
    }

    /// Bytes of weights in memory that KV pages could have.
    fn weights_to_spare(&self) -> u64 {
        0
    }

    /// Lets go of weights that take `bytes` or more. Returns how much that is, or nothing.
    fn spare_weights(&mut self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// Slots for the experts of a mixture, and what they have been asked for.
    fn experts(&self) -> Option<ExpertStatus> {
        None
    }

    /// Neurons that are read one by one.
    fn neurons(&self) -> Option<NeuronStatus> {
        None
    }

    /// Whether all weights are in memory that can be.
    fn has_all_weights(&self) -> bool {
        true
    }

    /// Whether activations of earlier passes are still in memory.
    fn holds_activations(&self) -> bool {
        false
    }

    /// Gives the memory of activations back to the system, until the next pass.
    fn give_back_activations(&mut self) {}

    /// Brings weights back to memory that take up to `bytes`. Returns the memory that weights take then.
    fn restore_weights(&mut self, bytes: u64) -> u64 {
        let _ = bytes;
        0
    }

    /// Memory of weights that are read.
    fn weight_memory(&self) -> WeightMemory {
        WeightMemory::default()
    }

    /// How rows of tables that are in files have been had.
    fn row_reads(&self) -> RowReads {
        RowReads::default()
    }

    /// What KV pages have of a budget of `budget` bytes before weights do.
    fn kv_to_begin_with(&self, budget: u64) -> u64 {
        budget
    }
}

impl ModelRunner for Engine {
    fn forward(&mut self, segments: &mut [Segment<'_>]) -> Result<Pass<'_>, EngineError> {
        Self::forward(self, segments, Wanted::Logits)
    }

    fn forward_for(
        &mut self,
        segments: &mut [Segment<'_>],
        wanted: Wanted,
    ) -> Result<Pass<'_>, EngineError> {
        Self::forward(self, segments, wanted)
    }

    fn rewind(&mut self, segments: &mut [Segment<'_>]) -> Result<(), EngineError> {
        Self::rewind(self, segments)
    }

    fn batch_limits(&self) -> BatchLimits {
        Self::batch_limits(self)
    }

    fn kv_cache(&self) -> &KvCache {
        Self::kv_cache(self)
    }

    fn context_tokens(&self) -> usize {
        Self::context_tokens(self)
    }

    fn vocabulary(&self) -> usize {
        self.model().spec().vocabulary
    }

    fn image_width(&self) -> Option<usize> {
        self.model()
            .images()
            .map(|encoder| encoder.shape().rows.row_width())
    }

    fn keeps_images_whole(&self) -> bool {
        self.model().spec().keeps_images_whole()
    }

    fn tokenizer(&self) -> &Tokenizer {
        self.model().tokenizer()
    }

    fn engine(&mut self) -> Option<&mut Engine> {
        Some(self)
    }

    fn has_lost_device(&self) -> bool {
        Self::has_lost_device(self)
    }

    fn device(&self) -> Option<DeviceStatus> {
        Self::device(self)
    }

    fn expect(&mut self, tokens: &[u32]) {
        self.model().expect(tokens);
    }

    fn row_reads(&self) -> RowReads {
        self.model().row_reads()
    }

    fn weights_to_spare(&self) -> u64 {
        Self::weights_to_spare(self)
    }

    fn spare_weights(&mut self, bytes: u64) -> u64 {
        Self::spare_weights(self, bytes)
    }

    fn experts(&self) -> Option<ExpertStatus> {
        Self::experts(self)
    }

    fn neurons(&self) -> Option<NeuronStatus> {
        Self::neurons(self)
    }

    fn has_all_weights(&self) -> bool {
        Self::has_all_weights(self)
    }

    fn holds_activations(&self) -> bool {
        Self::holds_activations(self)
    }

    fn give_back_activations(&mut self) {
        Self::give_back_activations(self);
    }

    fn restore_weights(&mut self, bytes: u64) -> u64 {
        Self::restore_weights(self, bytes)
    }

    fn weight_memory(&self) -> WeightMemory {
        let held = &self.plan().residency;
        WeightMemory {
            pinned: ByteLength::new(held.pinned_bytes),
            ring: ByteLength::new(held.ring_bytes),
            rows: ByteLength::new(held.row_bytes),
            experts: ByteLength::new(held.experts.map_or(0, |it| it.bytes)),
            neurons: ByteLength::new(held.neurons.map_or(0, |it| it.bytes + it.fixed_bytes)),
            streamed: ByteLength::new(held.streamed_bytes),
        }
    }

    fn kv_to_begin_with(&self, budget: u64) -> u64 {
        self.plan().kv_to_begin_with(budget)
    }
}
