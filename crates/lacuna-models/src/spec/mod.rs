//! What a model is, as data: its layers one by one, and what is around them.
//!
//! A [`ModelSpec`] is made by a family (`families/`) from a file's own description and checked once
//! in [`ModelSpec::validate`]; everything after that trusts it. From it come the forward pass
//! ([`crate::program::Program`]), the tensors a file must have, the rows that sequences keep, and the
//! memory plan.

#[cfg(test)]
pub(crate) mod examples;
mod experts;
mod head;
mod image;
mod latent;
mod recurrence;
mod rope;
#[cfg(test)]
mod tests;
mod tiles;
mod usual;
mod validate;

use lacuna_kernels::AttentionShape;
/// What is between the products of a feed-forward block, and which tokens a token sees.
pub use lacuna_kernels::{Activation, Mask};
pub use lacuna_kernels::{GroupScore, Groups, Routing, Scores};
use lacuna_kv::{Geometry, Keep, KvElements, KvError, Layer, LayerCache, RowSpec, ValueRows};

use crate::error::ConfigError;

pub use experts::{ExpertBlock, Experts, Gating, Router, SharedExpert};
pub use head::{Assistant, Eagle3, HeadKind, HeadResidual, HeadSpec, TapNorm};
pub use image::{
    Channels, Frames, Grid, ImageAttention, ImageInput, ImagePlace, ImagePrompt, ImageRows,
    ImageSize, ImageTokenBounds, ImageTooLong, LearnedPlaces, Merge, PatchOrder, Patches,
    Resampling, Tap, TileMarks, Windows,
};
pub use latent::Latent;
pub use recurrence::{
    DeltaNet, GatesIn, InputsIn, KeyHeads, Mamba2, Recurrence, ShortConvolution, StateNorm,
    TimeStepLimits,
};
pub use rope::{LongRope, LongRopeFactors, Rope, RopeAxes, RopeScaling, Yarn};
pub use tiles::{TiledSizes, Tiling};
pub(crate) use validate::rope_table;

/// Shape and constants of one model: a decoder, an encoder whose output is pooled, or one of images.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelSpec {
    /// The family's name as GGUF spells it, e.g. `qwen3`.
    pub family: &'static str,
    /// Width of the residual stream, in elements.
    pub hidden: usize,
    /// Rows of the embedding table and of the logits.
    pub vocabulary: usize,
    /// Tokens the model was made for.
    pub context_tokens: usize,
    /// Every norm of the residual stream.
    pub norm: Norm,
    /// What the rows of the embedding table are multiplied by.
    pub embedding_scale: Option<f32>,
    /// What the first layer reads instead of such rows: patches of an image.
    pub patches: Option<Patches>,
    /// How rows of images stand in the places of tokens' own, where they may; of an encoder of images, how they do in the
    /// decoder that it is made for.
    pub images: Option<ImageInput>,
    /// What is added to them.
    pub learned_input: Option<LearnedInput>,
    /// What each layer is told of a token besides the residual stream.
    pub per_layer_inputs: Option<PerLayerInputs>,
    /// Residual streams beside the one that layers compute.
    pub altup: Option<AltUp>,
    /// Whether what goes into the products of layers and comes out of them is held between bounds, of each product its own.
    pub bounded: bool,
    /// The rotations that layers turn queries and keys by.
    pub ropes: Vec<Rope>,
    /// Decoder layers, first to last.
    pub layers: Vec<LayerSpec>,
    /// Layers that files hold after the last and that are no part of the forward pass: they foretell more
    /// than one token at a time.
    pub layers_ahead: usize,
    /// The head that guesses tokens, where it is computed.
    pub head: Option<HeadSpec>,
    /// What is made of the residual stream in the end.
    pub output: OutputSpec,
}

/// Rows of learned tables that are added to a token's own before the first layer; the sum is normed
/// (BERT).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LearnedInput {
    /// The table of positions, if there is one.
    pub positions: Option<LearnedPositions>,
    /// Rows of the table of token types, if there is one: the first is of tokens of a text, the second of
    /// those of a text that another is compared with.
    pub token_types: Option<usize>,
}

/// A table of positions: no text may have more tokens than it has rows from `first` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LearnedPositions {
    /// Its rows.
    pub rows: usize,
    /// The row of a text's first token. RoBERTa counts from behind the number of its padding token.
    pub first: usize,
}

/// A second embedding of tokens, of which each layer has a part to itself (Gemma 3n and 4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PerLayerInputs {
    /// Elements of a layer's part.
    pub width: usize,
    /// Rows of the table; tokens beyond them have the first.
    pub rows: usize,
    /// What their gates go through.
    pub activation: Activation,
}

/// Alternating updates (AltUp, Gemma 3n): several residual streams, of which a layer computes the first;
/// it predicts all of them before that, and corrects them by what was wrong about the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AltUp {
    /// Streams, with the first.
    pub streams: usize,
}

impl AltUp {
    /// The most streams there may be; published models have as many.
    pub const MOST_STREAMS: usize = 4;
}

/// How rows are normed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// By what.
    pub kind: NormKind,
    /// Added to the mean square, or to the variance.
    pub epsilon: f32,
}

/// What a norm divides by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// The root of the mean square.
    Rms,
    /// The standard deviation, after the mean is subtracted.
    Layer,
    /// The same, and a learned bias is added in the end.
    BiasedLayer,
}

/// One decoder layer: what mixes tokens and a feed-forward block, each added to the residual stream. Most
/// have attention or a recurrence before the feed-forward block; with both, they read the same input and
/// their results are added together.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// What tokens learn of one another.
    pub attention: Option<Attention>,
    /// What they learn of a state that all tokens before have left.
    pub recurrence: Option<Recurrence>,
    /// What each token makes of it.
    pub feed_forward: FeedForward,
    /// Where norms are.
    pub norms: Norms,
    /// A learned residual beside attention.
    pub laurel: Option<Laurel>,
    /// What results are multiplied by before they are added to the residual stream.
    pub residual_scale: ResidualScale,
    /// Whether the residual stream is multiplied by a learned number at the layer's end.
    pub output_scale: bool,
}

impl LayerSpec {
    /// Its attention, in a family all of whose layers have some, or before those without are told apart.
    ///
    /// # Panics
    /// For a layer that has none.
    pub(crate) fn attention_mut(&mut self) -> &mut Attention {
        self.attention.as_mut().expect("a layer with attention")
    }

    /// Which tokens a token sees, if it has attention.
    #[must_use]
    pub fn mask(&self) -> Option<Mask> {
        self.attention.as_ref().map(|attention| attention.mask)
    }
}

/// What the results of a layer's parts are multiplied by before the residual stream takes them up.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ResidualScale {
    /// Attention's.
    pub attention: Option<f32>,
    /// The recurrence's.
    pub recurrence: Option<f32>,
    /// The feed-forward block's.
    pub feed_forward: Option<f32>,
}

impl ResidualScale {
    /// All by the same.
    #[must_use]
    pub const fn all(factor: Option<f32>) -> Self {
        Self {
            attention: factor,
            recurrence: factor,
            feed_forward: factor,
        }
    }
}

/// A learned augmented residual (LAuReL, Gemma 3n): the normed input of attention and what two narrow
/// matrices make of it join the residual stream along with attention's result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Laurel {
    /// Elements between the two matrices.
    pub rank: usize,
}

/// Where the norms of a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// Before attention and before the feed-forward block.
    Before,
    /// Before the feed-forward block alone: what attention reads is normed already (ModernBERT's first
    /// layer).
    BeforeFeedForward,
    /// After each of them, before the residual stream takes them up.
    After,
    /// After the residual stream has taken up either of them, of the stream itself (BERT).
    AfterSum,
    /// Before and after each.
    Both,
    /// One, before both, which read the same input and are added together.
    Parallel,
}

impl Norms {
    /// Whether attention reads what is normed for it.
    #[must_use]
    pub const fn before_attention(self) -> bool {
        !matches!(self, Self::After | Self::AfterSum | Self::BeforeFeedForward)
    }

    /// Whether their results are normed.
    #[must_use]
    pub const fn after(self) -> bool {
        matches!(self, Self::After | Self::Both)
    }

    /// Whether the residual stream is, once it has taken them up.
    #[must_use]
    pub const fn after_sum(self) -> bool {
        matches!(self, Self::AfterSum)
    }
}

/// Attention with rows of keys and values kept for every token, or for those of a window.
#[derive(Debug, Clone, PartialEq)]
pub struct Attention {
    /// Heads of queries.
    pub query_heads: usize,
    /// Heads of keys and values; divides `query_heads`.
    pub kv_heads: usize,
    /// Elements per head of K, as attention reads it; independent of `hidden / query_heads`.
    pub head_dim: usize,
    /// Which tokens a token sees.
    pub mask: Mask,
    /// Which of [`ModelSpec::ropes`] turns queries and keys; `None`: positions are not encoded.
    pub rope: Option<usize>,
    /// Norms of queries and keys.
    pub qk_norm: Option<QkNorm>,
    /// Whether each head of values is normed, without weights.
    pub value_norm: bool,
    /// What values are made of.
    pub values: Values,
    /// What products of queries and keys are multiplied by.
    pub scale: f32,
    /// A bound that these products approach and never reach.
    pub soft_cap: Option<f32>,
    /// How queries grow with their position.
    pub temperature: Option<QueryTemperature>,
    /// The earlier layer whose rows of keys and values it reads instead of having its own.
    pub shares: Option<usize>,
    /// Products must come with biases.
    pub biases: Biases,
    /// Whether each query head has a learned logit that takes its share of the softmax, without a value.
    pub sinks: bool,
    /// What decides how much of each element that is attended goes on.
    pub gate: Gate,
    /// What keys and values are made of, where that is kept instead of them.
    pub latent: Option<Latent>,
}

/// What attended elements are multiplied by before they go on: a function of a product with the layer's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// Nothing.
    None,
    /// Each by its own, by a matrix of its own.
    Apart(Activation),
    /// Each by its own, a sigmoid, by the matrix of queries: of each head first the queries, then the gate.
    InQueries,
    /// All of a head by one, by a matrix of its own.
    PerHead(Activation),
}

/// What values are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Values {
    /// A product of their own.
    Projected,
    /// The product that keys are made of, before norm and rotation.
    Keys,
}

/// Queries are multiplied by `1 + beta * ln(1 + floor((position + first) / original_context))`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct QueryTemperature {
    /// How fast they grow.
    pub beta: f32,
    /// Positions between one size and the next.
    pub original_context: usize,
    /// The number of the first position.
    pub first: usize,
}

impl QueryTemperature {
    /// What queries of a position are multiplied by.
    #[must_use]
    pub fn factor(&self, position: usize) -> f32 {
        let contexts = (position + self.first) / self.original_context;
        1.0 + self.beta * (contexts as f32).ln_1p()
    }
}

/// How queries and keys are normed, before positions turn them where nothing else is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head by itself, all with the same weights.
    PerHead,
    /// The same once positions have turned them, which weights are not indifferent to.
    Turned,
    /// All heads of a token together.
    Whole,
    /// Each head by itself, without weights.
    Unweighted,
}

/// Which products of attention must come with a bias. Any other may.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Biases {
    /// Queries, keys and values.
    pub projections: bool,
    /// The product back into the residual stream.
    pub output: bool,
}

/// What each token makes of what attention told it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum FeedForward {
    /// One block for all tokens.
    Gated(Gated),
    /// One block for all tokens, without gates.
    Plain(Plain),
    /// A choice of blocks for each token.
    Experts(Experts),
    /// Nothing.
    None,
}

impl FeedForward {
    /// The dense block, if it has one.
    pub fn gated_mut(&mut self) -> Option<&mut Gated> {
        match self {
            Self::Gated(gated) => Some(gated),
            Self::Plain(_) | Self::None => None,
            Self::Experts(experts) => experts.dense.as_mut(),
        }
    }

    /// The experts, if it has some.
    #[must_use]
    pub const fn experts(&self) -> Option<&Experts> {
        match self {
            Self::Gated(_) | Self::Plain(_) | Self::None => None,
            Self::Experts(experts) => Some(experts),
        }
    }
}

/// A dense feed-forward block: `W_down (f(s W_gate x) * W_up x)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gated {
    /// Inner width, in elements.
    pub inner: usize,
    /// `f`.
    pub activation: Activation,
    /// `s`, where it is not 1.
    pub gate_scale: Option<f32>,
    /// Gates that are sparse: before `f`, each loses the token's mean gate and so many standard
    /// deviations, and is nothing if that leaves less than nothing.
    pub gate_cutoff: Option<f32>,
}

/// A feed-forward block without gates: `W_down f(W_up x)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Plain {
    /// Inner width, in elements.
    pub inner: usize,
    /// `f`.
    pub activation: Activation,
    /// Whether both products must come with biases. They may anyway.
    pub biases: bool,
}

/// What is made of the residual stream in the end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OutputSpec {
    /// What may come next, for each token that is asked for.
    Logits(LogitsSpec),
    /// One vector for each text. Nothing is kept for later tokens, as there are none: all tokens of a
    /// text come in one pass.
    Pooled(Pooled),
    /// Rows for a decoder, of all patches of an image. Nothing is kept here either.
    Image(ImageRows),
}

/// What becomes of the rows of a text: they are normed, become one, and that goes through products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pooled {
    /// Whether there is a norm behind the last layer.
    pub final_norm: bool,
    /// Which rows count.
    pub pooling: Pooling,
    /// Products of what they become, one after another.
    pub dense: [Option<Dense>; 2],
    /// Tokens whose rows of the output matrix the last product is made of, where it is of those.
    pub answers: Option<[usize; 2]>,
    /// What it is.
    pub result: PooledResult,
}

/// A product of a pooled row: `norm(f(W x + b))`, where there is a bias, `f` and a norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dense {
    /// Elements of the result.
    pub width: usize,
    /// `f`.
    pub activation: Option<Activation>,
    /// Whether the result is normed.
    pub norm: bool,
}

impl Dense {
    /// The product alone.
    #[must_use]
    pub const fn plain(width: usize) -> Self {
        Self {
            width,
            activation: None,
            norm: false,
        }
    }
}

/// What a text's vector is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PooledResult {
    /// Its embedding.
    Embedding {
        /// Whether it is brought to a length of 1.
        normalized: bool,
    },
    /// How well a text answers another, both of which the model was given.
    Score(Judgement),
}

/// How texts are put to a model that scores how well one answers another. It makes one number of them, the
/// log-odds, or two, the logits of yes and of no.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judgement {
    /// As one sequence, in the way in which the vocabulary joins pairs.
    Pair,
    /// In a conversation that asks for yes or no.
    Question,
}

/// Which rows of a text become its vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pooling {
    /// The mean of all.
    Mean,
    /// The first token's, which is `[CLS]` in BERT.
    First,
    /// The last token's.
    Last,
}

/// From the residual stream to logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitsSpec {
    /// Where the output matrix is.
    pub matrix: OutputMatrix,
    /// What logits are multiplied by.
    pub scale: Option<f32>,
    /// A bound that logits approach and never reach.
    pub soft_cap: Option<f32>,
}

/// Where the output matrix is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputMatrix {
    /// The embedding table.
    Tied,
    /// A tensor of its own.
    Untied,
}

impl ModelSpec {
    /// The same encoder for images of so many tokens.
    ///
    /// # Errors
    /// [`ConfigError`] for one whose images have one size or are cut into tiles, and for more than there may be.
    pub fn with_image_tokens(mut self, bounds: ImageTokenBounds) -> Result<Self, ConfigError> {
        let (Some(patches), OutputSpec::Image(rows)) = (self.patches, &self.output) else {
            return Err(ImageTokenBounds::useless());
        };
        let patches = patches.within(bounds, rows.merged)?;
        self.context_tokens = patches.most();
        self.patches = Some(patches);
        self.validate()?;
        Ok(self)
    }

    /// Shape of a KV cache of this model.
    ///
    /// # Errors
    /// [`KvError`] for elements that heads are no whole blocks of, values stored otherwise than keys where
    /// they are part of those, rows beyond the address space, or a model that keeps none, since its output
    /// is pooled.
    pub fn kv_geometry(&self, elements: KvElements) -> Result<Geometry, KvError> {
        let layers = self.layers.iter().map(|layer| match self.output {
            OutputSpec::Logits(_) => {
                let attention = layer.attention.as_ref();
                attention.map_or(LayerCache::None, Attention::cache)
            }
            OutputSpec::Pooled(_) | OutputSpec::Image(_) => LayerCache::None,
        });
        let geometry = Geometry::new(layers.collect(), elements)?;
        let geometry = geometry.with_states(self.states().collect())?;
        let geometry = geometry.with_state_inputs(self.state_inputs().collect())?;
        let in_keys = |rows: RowSpec| rows.values == ValueRows::InKeys;
        let latent = geometry.has_rows() && geometry.own_rows().all(|(_, rows)| in_keys(rows));
        match elements {
            KvElements { key, value } if latent && key != value => {
                Err(KvError::OneElement { key, value })
            }
            _ => Ok(geometry),
        }
    }

    /// The f32 elements of the state that each layer keeps.
    pub fn states(&self) -> impl Iterator<Item = usize> {
        let recurrences = self.layers.iter().map(|layer| layer.recurrence);
        recurrences.map(|recurrence| recurrence.map_or(0, |it| it.state_len(self.hidden)))
    }

    /// The f32 elements of a token that the state of each layer changes by.
    pub fn state_inputs(&self) -> impl Iterator<Item = usize> {
        let recurrences = self.layers.iter().map(|layer| layer.recurrence);
        recurrences.map(|recurrence| recurrence.map_or(0, |it| it.state_inputs(self.hidden)))
    }

    /// Multiplications that states take of a token, in all layers.
    #[must_use]
    pub fn state_macs(&self) -> usize {
        let recurrences = self.layers.iter().filter_map(|layer| layer.recurrence);
        recurrences
            .map(|recurrence| recurrence.state_macs(self.hidden))
            .sum()
    }

    /// The layer that files have under this number: that of the head comes after all others.
    pub(crate) fn layer(&self, number: usize) -> Option<&LayerSpec> {
        let head = self.head.iter().flat_map(|head| &head.layers);
        self.layers.iter().chain(head).nth(number)
    }

    /// How a text's rows are pooled, if they are: the model makes a vector of a text, and no logits.
    #[must_use]
    pub const fn pooled(&self) -> Option<Pooled> {
        match self.output {
            OutputSpec::Logits(_) | OutputSpec::Image(_) => None,
            OutputSpec::Pooled(pooled) => Some(pooled),
        }
    }

    /// Elements of a text's embedding, or none for a model that makes no embeddings.
    #[must_use]
    pub fn embedding_width(&self) -> Option<usize> {
        let pooled = self.pooled()?;
        match pooled.result {
            PooledResult::Embedding { .. } => Some(pooled.width(self.hidden)),
            PooledResult::Score(_) => None,
        }
    }

    /// How texts are judged, for a model that scores pairs of them.
    #[must_use]
    pub fn judgement(&self) -> Option<Judgement> {
        match self.pooled()?.result {
            PooledResult::Embedding { .. } => None,
            PooledResult::Score(judgement) => Some(judgement),
        }
    }

    /// Elements of a row of an image, for a decoder that takes some.
    #[must_use]
    pub fn image_row_width(&self) -> Option<usize> {
        let images = self.images?;
        Some(self.hidden * (1 + images.deepstack))
    }

    /// Numbers of a token's position.
    #[must_use]
    pub fn position_axes(&self) -> usize {
        let axes = self.ropes.iter().map(|rope| rope.axes.count());
        axes.max().unwrap_or(1)
    }

    /// How the tokens of an image see one another.
    #[must_use]
    pub fn image_attention(&self) -> ImageAttention {
        (self.images).map_or(ImageAttention::Causal, |images| images.attention)
    }

    /// Whether the tokens of an image have to be computed in one pass.
    #[must_use]
    pub fn keeps_images_whole(&self) -> bool {
        self.image_attention() != ImageAttention::Causal
    }

    /// How logits are made, if they are.
    pub const fn logits_mut(&mut self) -> Option<&mut LogitsSpec> {
        match &mut self.output {
            OutputSpec::Logits(logits) => Some(logits),
            OutputSpec::Pooled(_) | OutputSpec::Image(_) => None,
        }
    }
}

impl Pooled {
    /// Elements of a text's vector, made of rows of `hidden` elements.
    #[must_use]
    pub fn width(&self, hidden: usize) -> usize {
        let last = self.dense.iter().flatten().next_back();
        last.map_or(hidden, |dense| dense.width)
    }
}

impl Attention {
    /// Elements of one row of K: `kv_heads x head_dim`.
    #[must_use]
    pub fn kv_width(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Elements of one token's queries: `query_heads x head_dim`.
    #[must_use]
    pub fn query_width(&self) -> usize {
        self.query_heads * self.head_dim
    }

    /// Elements of what attention makes of one token: `query_heads x value_dim`.
    #[must_use]
    pub fn attended_width(&self) -> usize {
        self.query_heads * self.value_dim()
    }

    /// What it keeps for later tokens.
    #[must_use]
    pub fn cache(&self) -> LayerCache {
        if let Some(layer) = self.shares {
            return LayerCache::Of(Layer(layer));
        }
        LayerCache::Rows(RowSpec {
            kv_heads: self.kv_heads,
            key_dim: self.head_dim,
            value_dim: self.value_dim(),
            values: match self.latent {
                Some(_) => ValueRows::InKeys,
                None => ValueRows::Apart,
            },
            keep: match self.mask {
                // A query sees the rows of its chunk that have come, which are never more than a window of
                // the chunk's size has.
                Mask::Window(tokens) | Mask::Chunk(tokens) => Keep::Window(tokens),
                Mask::Causal | Mask::Full | Mask::Around(_) => Keep::All,
            },
        })
    }

    /// What the kernels need to know of it.
    #[must_use]
    pub fn shape(&self) -> AttentionShape {
        AttentionShape {
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: self.scale,
            value_dim: self.value_dim(),
            mask: self.mask,
            soft_cap: self.soft_cap,
        }
    }
}
