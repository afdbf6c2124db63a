//! What can go wrong between a model file and its logits.

use lacuna_kernels::ShapeError;

use crate::scratch::BatchLimits;
use crate::spec::Grid;

/// A model description with numbers that cannot be right.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A projector of another model.
    #[error(
        "the projector makes rows of {width} elements and the model takes {hidden}; use the one that was made for it"
    )]
    Projector {
        /// Elements of the projector's rows.
        width: usize,
        /// Elements of the model's residual stream.
        hidden: usize,
    },
    /// A head that was made for another model.
    #[error(
        "the head reads rows of {width} elements and the model has {hidden}; use the one that was made for it"
    )]
    HeadOfAnother {
        /// Elements of the rows that the head reads.
        width: usize,
        /// Elements of the model's residual stream.
        hidden: usize,
    },
    /// A head that guesses what is no token of the model.
    #[error(
        "the head guesses token {found}, and the model has {vocabulary}; use the head that was made for it"
    )]
    HeadToken {
        /// What the head's file says of the token.
        found: i64,
        /// Tokens of the model.
        vocabulary: usize,
    },
    /// A head where a model was asked for.
    #[error(
        "this is a head that guesses tokens for a model, and no model itself; name the model, and this as its draft model"
    )]
    LoneHead,
    /// A size is zero or beyond anything that can be run.
    #[error(
        "model config: {field} is {value}, expected 1 to {limit}; the file is damaged or not a model"
    )]
    OutOfRange {
        /// Name of the number.
        field: &'static str,
        /// What the file says.
        value: usize,
        /// Largest value accepted.
        limit: usize,
    },
    /// Query heads cannot be shared out evenly over K/V heads.
    #[error(
        "model config: {query_heads} query heads cannot share {kv_heads} key/value heads evenly, at most {} to each",
        lacuna_kernels::AttentionShape::MAX_GROUP
    )]
    HeadGrouping {
        /// Query heads per layer.
        query_heads: usize,
        /// Key/value heads per layer.
        kv_heads: usize,
    },
    /// Heads of a state that do not divide.
    #[error(
        "model config: {value_heads} value heads of a state cannot share {key_heads} key heads evenly"
    )]
    StateHeads {
        /// Heads of keys.
        key_heads: usize,
        /// Heads of values.
        value_heads: usize,
    },
    /// A state whose width is not that of its heads.
    #[error(
        "model config: a state of {inner} elements does not have {heads} heads of the same size"
    )]
    StateWidth {
        /// Elements of all heads.
        inner: usize,
        /// How many there are.
        heads: usize,
    },
    /// Time steps that no state can be computed with.
    #[error(
        "model config: time steps from {least} to {most} are none; time_step_limit needs a finite number from 0 on, and one above 0 and not below that"
    )]
    TimeSteps {
        /// The least.
        least: f32,
        /// The largest.
        most: f32,
    },
    /// Latent attention over rows that are not of its kind.
    #[error(
        "model config: latent rows are one head of {rank} elements and {turned} that positions turn, not {kv_heads} of {head_dim}; both parts must be there"
    )]
    LatentRows {
        /// Key/value heads.
        kv_heads: usize,
        /// Elements per head.
        head_dim: usize,
        /// Elements of a row that positions do not turn.
        rank: usize,
        /// Elements that they do.
        turned: usize,
    },
    /// Rotary embedding turns pairs of elements.
    #[error("model config: head_dim is {head_dim}, but rotary embedding needs an even number")]
    OddHeadDim {
        /// Elements per head.
        head_dim: usize,
    },
    /// A constant is zero, negative, infinite or not a number.
    #[error("model config: {field} is {value}, expected a positive finite number")]
    NotPositive {
        /// Name of the constant.
        field: &'static str,
        /// What the file says.
        value: f64,
    },
    /// A constant is infinite or not a number.
    #[error("model config: {field} is {value}, expected a finite number")]
    NotFinite {
        /// Name of the constant.
        field: &'static str,
        /// What the file says.
        value: f64,
    },
    /// One thing is said without another that it builds on.
    #[error("model config: {field} needs {needs}, which the file does not have")]
    Needs {
        /// What is there.
        field: &'static str,
        /// What is not.
        needs: &'static str,
    },
    /// The model needs something this program does not do.
    #[error("model config: {feature} is not supported; {supported}")]
    Unsupported {
        /// What the file asks for.
        feature: String,
        /// What would work.
        supported: &'static str,
    },
    /// A family of models that no file of this program describes.
    #[error("model config: architecture `{name}` is not supported; {} are", known.join(", "))]
    UnknownFamily {
        /// What the file says.
        name: String,
        /// Those that are, as GGUF spells them.
        known: Vec<&'static str>,
    },
    /// A list with one entry for each layer has another length.
    #[error("model config: {field} has {found} entries for {layers} layers")]
    LayerList {
        /// Name of the list.
        field: &'static str,
        /// Its entries.
        found: usize,
        /// Layers of the model.
        layers: usize,
    },
    /// A table of divisors of rotation frequencies has not one for each pair.
    #[error("model config: a table of rope factors has {found} entries, expected {expected}")]
    RopeTable {
        /// Its entries.
        found: usize,
        /// Pairs that turn.
        expected: usize,
    },
    /// Keys and values that a layer is to share are not such as it would have itself.
    #[error(
        "its keys and values are to be those of layer {source_layer}, which is no earlier layer of the same shape with rows of its own"
    )]
    SharedRows {
        /// The layer they should come from.
        source_layer: usize,
    },
    /// Groups of experts are not all of one size.
    #[error("model config: {experts} experts cannot be divided into {groups} groups evenly")]
    ExpertGroups {
        /// Experts of a layer.
        experts: usize,
        /// Groups they should be in.
        groups: usize,
    },
    /// Something about one layer.
    #[error("layer {layer}: {source}")]
    Layer {
        /// The layer.
        layer: usize,
        /// What.
        source: Box<ConfigError>,
    },
    /// An entry of GGUF metadata is missing or of the wrong type.
    #[error(transparent)]
    Gguf(#[from] lacuna_files::gguf::Error),
    /// An entry of `config.json` is missing or cannot be used.
    #[error(transparent)]
    HuggingFace(#[from] lacuna_files::huggingface::Error),
}

/// A model that could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The file could not be opened, mapped or parsed.
    #[error(transparent)]
    Files(#[from] lacuna_files::Error),
    /// A file was lost while it was read.
    #[error(transparent)]
    Lost(#[from] lacuna_files::LostFile),
    /// The description does not hold together.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor is missing, misshapen or of a type that cannot be used.
    #[error(transparent)]
    FileTensor(#[from] lacuna_files::TensorError),
    /// A tensor's bytes do not fit its shape.
    #[error("tensor `{name}`: {source}")]
    Tensor {
        /// Name in the file's own spelling.
        name: String,
        /// What does not fit.
        source: ShapeError,
    },
    /// A tensor that the model's family has no place for. What it is for is not computed, so results
    /// would be wrong without a word.
    #[error("tensor `{name}` has no place in a model of the family {family}")]
    SurplusTensor {
        /// Name in the file's own spelling.
        name: String,
        /// The family, as GGUF spells it.
        family: &'static str,
    },
    /// Files that are of no head.
    #[error("these files are of no head that guesses tokens for a model")]
    NoHead,
    /// A head whose files have two tensors for one part.
    #[error(
        "the head has tensor `{name}` twice; its files are damaged, or it is none for this model"
    )]
    HeadTwice {
        /// Its name beside the model's.
        name: String,
    },
    /// A number that states depend on is none that they can be computed with.
    #[error(
        "tensor `{name}` has {value}; time steps and rates of states must be finite, and rates not above 0"
    )]
    StateParameter {
        /// Name in the file's own spelling.
        name: String,
        /// What it has; of rates, what the state would grow by.
        value: f32,
    },
    /// The vocabulary could not be read.
    #[error(transparent)]
    Tokenizer(#[from] lacuna_text::tokenizer::TokenizerError),
    /// A part of the weights cannot be read into memory.
    #[error(transparent)]
    Weights(#[from] UnreadableWeights),
    /// Nothing can be read into memory.
    #[error(
        "the weights cannot be read into memory ({0}); have them where the file is mapped instead"
    )]
    Reading(std::io::Error),
}

/// A file of columns that cannot be made, or would be of no use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ColumnsError {
    /// What the files hold is no model.
    #[error(transparent)]
    Model(Box<LoadError>),
    /// No feed-forward block has activations that are exactly zero.
    #[error(
        "the model has no feed-forward block whose activations are exactly zero: ReLU, squared ReLU and Gemma 3n's \
         sparse layers are, SwiGLU and GeGLU are not; do not ask for single neurons"
    )]
    NoZeros,
    /// Neurons are read into memory, and nothing else is to be.
    #[error(
        "neurons are read into memory one by one, and all weights are to be used where the file is mapped; ask for one of the two"
    )]
    Mapped,
    /// All such blocks have types of which columns cannot be taken.
    #[error(
        "tensor `{name}` is {type_name}; columns are taken of f32, f16, bf16, q8_0 and q4_0, of a multiple of 32 rows: \
         quantize the model to one of these, or do not ask for single neurons"
    )]
    Type {
        /// The first of them.
        name: String,
        /// What it is stored as.
        type_name: String,
    },
    /// A matrix whose zeros are not zero.
    #[error(
        "tensor `{name}`: {source}, so that leaving it out would change results; do not ask for single neurons"
    )]
    NotFinite {
        /// The tensor.
        name: String,
        /// Where.
        source: lacuna_kernels::NotFinite,
    },
    /// A tensor's bytes do not fit its shape.
    #[error("tensor `{name}`: {source}")]
    Shape {
        /// The tensor.
        name: String,
        /// What does not fit.
        source: ShapeError,
    },
    /// A tensor cannot be used.
    #[error(transparent)]
    Tensor(#[from] lacuna_files::TensorError),
    /// A file was lost while it was read.
    #[error(transparent)]
    Lost(#[from] lacuna_files::LostFile),
    /// The file of predictors beside it cannot be used.
    #[error(transparent)]
    Predictors(#[from] crate::predictors::PredictorsError),
    /// The model's files cannot be read.
    #[error("the model's files cannot be read: {0}")]
    Read(std::io::Error),
    /// The file cannot be written.
    #[error("{}: {source}; name a folder with room for as many bytes as the matrices have", path.display())]
    Write {
        /// The file or its folder.
        path: std::path::PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// The file cannot be written as it is to be.
    #[error(transparent)]
    Format(#[from] lacuna_files::gguf::WriteError),
}

/// Weights that could not be read from their file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor `{name}`: {source}")]
pub struct UnreadableWeights {
    /// The tensor, in the file's own spelling.
    pub name: String,
    /// Where, and why.
    pub source: lacuna_files::reader::ReadError,
}

/// A conversation that could not be turned into tokens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PromptError {
    /// Images for a model that takes none.
    #[error("the model does not see: it takes no images")]
    NoImages,
    /// A template that left images out, or a conversation that wrote marks of its own.
    #[error("the chat template has places for {written} images and {given} are given")]
    ImageCount {
        /// Places in the prompt.
        written: usize,
        /// Images.
        given: usize,
    },
    /// The chat template does not compile, fails, or refuses the messages.
    #[error(transparent)]
    Template(#[from] lacuna_text::template::TemplateError),
    /// The rendered text has no tokens.
    #[error(transparent)]
    Tokenizer(#[from] lacuna_text::tokenizer::TokenizerError),
}

/// Where in a forward pass values were looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// After the embedding.
    Embedding,
    /// After this decoder block.
    Layer(usize),
    /// The logits.
    Logits,
    /// The rows that texts are pooled to.
    Pooled,
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Embedding => f.write_str("the embedding"),
            Self::Layer(layer) => write!(f, "layer {layer}"),
            Self::Logits => f.write_str("the output matrix"),
            Self::Pooled => f.write_str("pooling"),
        }
    }
}

/// A forward pass that was not run, or whose result is of no use. Nothing is accepted in either case.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// Rows of images for a model that takes none.
    #[error("the model does not see: it takes no images")]
    NoImages,
    /// Rows of an image that do not fit the tokens that stand for it, or a pass that ends within them.
    #[error(
        "{elements} elements of an image cannot stand at the positions {positions:?} in a pass that ends with {end}"
    )]
    MisplacedImage {
        /// Where they are to stand.
        positions: std::ops::Range<usize>,
        /// Elements of rows for them.
        elements: usize,
        /// Behind the last position of the pass.
        end: usize,
    },
    /// Pixels that are not those of an image that the encoder takes.
    #[error(
        "{bytes} bytes of pixels as {} x {} patches: bring the image to a size that the encoder takes, 3 bytes a pixel",
        grid.columns,
        grid.rows
    )]
    ImageSize {
        /// Bytes that were given.
        bytes: usize,
        /// Patches that they were said to be.
        grid: Grid,
    },
    /// A token id past the vocabulary.
    #[error("token id {token} is out of range: the vocabulary has {vocabulary} tokens")]
    TokenOutOfRange {
        /// The id.
        token: u32,
        /// Rows of the embedding table.
        vocabulary: usize,
    },
    /// More tokens or rows of logits than the arena was made for, or none at all.
    #[error("a batch of {tokens} tokens with {logit_rows} rows of logits, but the arena holds 1 to {} tokens and {} rows; split the batch", limits.tokens, limits.logit_rows)]
    BatchTooLarge {
        /// Tokens in the batch.
        tokens: usize,
        /// Rows of logits asked for.
        logit_rows: usize,
        /// What the arena was made for.
        limits: BatchLimits,
    },
    /// A value that is infinite or no number, found by [`crate::FiniteCheck::EachLayer`].
    #[error(
        "a value that is not finite after {place}, in row {row} of the batch; the weights or the prompt's KV rows are damaged"
    )]
    NotFinite {
        /// After what.
        place: Place,
        /// The first token of the batch that has one, or row of logits.
        row: usize,
    },
    /// Logits asked of a model that makes embeddings.
    #[error(
        "the model makes embeddings of texts and cannot write; use `lacuna embed` or /v1/embeddings, or another model"
    )]
    NoLogits,
    /// Embeddings asked of a model that writes.
    #[error(
        "the model makes no embeddings of texts; use an embedding model, such as all-MiniLM-L6-v2"
    )]
    NoEmbeddings,
    /// Guesses asked of a model that was loaded without a head, or has none.
    #[error(
        "the model has no head that guesses tokens; load files that have one with it, or guess from the text itself"
    )]
    NoHead,
    /// Weights that the head shares with the model are not in memory: what a guess reads would take longer than a token.
    #[error(
        "weights that the head shares with the model are read for each pass; guess when they are in memory, which a larger budget allows"
    )]
    HeadWeights,
    /// Not one token behind rows of the model, for a head that reads those and keeps none.
    #[error(
        "a head over the model's rows reads one token behind them; it was given {tokens} behind {rows} rows and {prepared} prepared ones"
    )]
    BorrowedRows {
        /// Tokens that it was to read.
        tokens: usize,
        /// Rows of the sequence.
        rows: usize,
        /// Rows that are prepared and not accepted.
        prepared: usize,
    },
    /// Features that are not those of the tokens.
    #[error("{elements} elements of features for {tokens} tokens; give a row for each")]
    FeatureCount {
        /// Elements that were given.
        elements: usize,
        /// Tokens of the batch.
        tokens: usize,
    },
    /// The model makes no scores of pairs of texts.
    #[error(
        "the model does not score how well one text answers another; use a reranker, such as bge-reranker-v2-m3"
    )]
    NoScores,
    /// A text without a single token.
    #[error("text {index} of the batch is empty; leave it out")]
    EmptyText {
        /// Which one, from 0 on.
        index: usize,
    },
    /// A text with more tokens than the model takes.
    #[error(
        "text {index} of the batch has {tokens} tokens, more than the {limit} that the model takes; shorten it"
    )]
    TextTooLong {
        /// Which one, from 0 on.
        index: usize,
        /// Its tokens.
        tokens: usize,
        /// Tokens at most.
        limit: usize,
    },
    /// A file of the weights was lost before the pass was done.
    #[error(transparent)]
    Lost(#[from] lacuna_files::LostFile),
    /// Weights that are read while they are needed could not be.
    #[error(transparent)]
    Weights(#[from] UnreadableWeights),
    /// The device that computes refuses, or is gone.
    #[error(transparent)]
    Device(#[from] lacuna_pages::DeviceError),
    /// The sequence was not prepared for exactly these tokens.
    #[error("{prepared} rows are prepared in the KV cache for {tokens} tokens; call prepare first")]
    NotPrepared {
        /// Rows the sequence has ready.
        prepared: usize,
        /// Tokens in the segment.
        tokens: usize,
    },
}

impl ForwardError {
    /// The same of a text that comes after `texts` others, which were in batches before its own.
    #[must_use]
    pub fn after_texts(mut self, texts: usize) -> Self {
        if let Self::EmptyText { index } | Self::TextTooLong { index, .. } = &mut self {
            *index += texts;
        }
        self
    }
}
