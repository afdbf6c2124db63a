//! The shapes of published models, as data: what a synthetic model of random weights is made after.

/// A published model's dimensions, from its `config.json`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Shape {
    /// The name it is asked for by.
    pub name: &'static str,
    /// GGUF's name of its family, which is also the prefix of its metadata keys.
    pub family: &'static str,
    /// Number of layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width inside the feed-forward block, where a layer has one.
    pub feed_forward: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads, where a layer has attention.
    pub kv_heads: usize,
    /// Elements per head.
    pub head_size: usize,
    /// Rows of the embedding.
    pub vocabulary: usize,
    /// Whose special tokens it has; encoders of images have no vocabulary.
    pub special_tokens: Option<SpecialTokens>,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// The longest context.
    pub context: usize,
    /// Rotary base.
    pub rope_theta: f32,
    /// Divisor of low rotation frequencies in the manner of Llama 3.1, over a context of 8,192.
    pub rope_factor: Option<f64>,
    /// Added to the mean square in normalization.
    pub norm_epsilon: f32,
    /// Metadata of its family besides, under names without the prefix. What is here takes the place of what
    /// the other fields would say.
    pub more: &'static [(&'static str, Given)],
}

/// Whose special tokens a synthetic vocabulary has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SpecialTokens {
    /// ChatML's, among others.
    Qwen,
    /// Llama 3's.
    Llama3,
    /// DeepSeek V2's.
    DeepSeek,
    /// ChatML's alone, as the last tokens.
    ChatMl,
}

/// A value of metadata.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Given {
    /// A whole number.
    Size(usize),
    /// Any number.
    Number(f32),
    /// A name.
    Text(&'static str),
    /// Whole numbers, one for each part of something.
    Sizes(&'static [i32]),
    /// Numbers, one for each part of something.
    Numbers(&'static [f32]),
    /// True or false.
    Flag(bool),
    /// A whole number for each layer. A synthetic model of fewer layers has the first ones, one of more
    /// repeats them.
    PerLayer(&'static [usize]),
}
