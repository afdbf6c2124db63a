//! The operations of a forward pass, and what each reads and writes.

use std::ops::Range;

use lacuna_kernels::{AttentionShape, ExpertInput, HeadRows, RopeStyle, Routing, ScanShape};

use super::slot::{Rows, Slot};
use super::tensors::{ExpertsId, MatrixId, VectorId};
use crate::error::Place;
use crate::spec::{Activation, Gating, Norm, Patches, Pooling, QueryTemperature, TimeStepLimits};

/// What becomes of the rows of a square of patches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Merging {
    /// Their mean.
    Mean,
    /// One behind another.
    Joined,
    /// Their first elements, then their second, and so on.
    Unfolded,
}

/// Which rows of a table are added to a patch's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Places {
    /// Those of the four places around it in a square of so many of a side, weighed by how near they are.
    Near {
        /// Places of its side.
        per_side: usize,
    },
    /// That of its column, and that of its row, which are behind so many of columns.
    Axes {
        /// Rows for columns.
        each: usize,
    },
}

/// One operation. Rows are of the width it says, one after another, from the start of a slot.
#[derive(Debug, Clone, PartialEq)]
pub enum Op {
    /// A row of a table for each token of the batch.
    Embed {
        /// The table.
        table: MatrixId,
        /// Which row it is.
        of: Lookup,
        /// `[tokens, columns of the table]`
        output: Slot,
    },
    /// The pixels of the image, normed, patch by patch.
    Patches {
        /// How they lie in it.
        patches: Patches,
        /// `[patches, elements of a patch]`
        output: Slot,
    },
    /// Rows of images take the places of those of the tokens that stand for them.
    PlaceImages {
        /// `[tokens, width]`
        hidden: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// A further part of rows of images is added to what layers have made of the tokens that stand for them.
    AddImages {
        /// `[tokens, width]`
        hidden: Slot,
        /// Elements of a row, and of a part of an image's.
        width: usize,
        /// Which part it is; the first took the place of the token's own row.
        part: usize,
    },
    /// What is learned of the places of patches is added to their rows, where they have not simply one each.
    AddPlaces {
        /// The table.
        table: MatrixId,
        /// Which of its rows.
        places: Places,
        /// `[patches, width]`, for rows of the table.
        rows: Slot,
        /// `[patches, width]`
        hidden: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// Rows of squares of patches become parts of the rows of the image, in the order of its rows and columns.
    OrderSquares {
        /// `[rows, width]`
        from: Slot,
        /// `[rows, parts x width]`
        to: Slot,
        /// Which part they are.
        part: usize,
        /// Of how many.
        parts: usize,
        /// Whether others are there already.
        beside: bool,
        /// Elements of a part.
        width: usize,
    },
    /// One row of each square of patches.
    MergePatches {
        /// `[patches, width]`
        from: Slot,
        /// `[rows, width]`, or `[rows, merged * merged * width]` but of means.
        to: Slot,
        /// Patches of a square's side.
        merged: usize,
        /// What it is made of.
        merging: Merging,
        /// Elements of a row.
        width: usize,
    },
    /// Features that a model has made of the tokens before those of the batch, as the caller gives them.
    TakeFeatures {
        /// `[tokens, width]`
        output: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// Positions of the batch's tokens in their sequences.
    Positions {
        /// So many numbers each.
        output: Slot,
        /// How many.
        axes: usize,
        /// The number of the first.
        first: usize,
    },
    /// Cosines and sines of the positions.
    Rotations {
        /// Which of the model's rotary embeddings.
        rope: usize,
        /// Of which tokens.
        positions: Slot,
        /// Numbers of each of them.
        axes: usize,
        /// `[tokens, width]`
        output: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// Each group of `width` elements normed by itself.
    Norm {
        /// How.
        norm: Norm,
        /// What the normed elements are multiplied by.
        weight: Option<VectorId>,
        /// `[rows, groups x width]`
        input: Slot,
        /// The same; may be `input`.
        output: Slot,
        /// How many rows.
        rows: Rows,
        /// Groups in a row.
        groups: usize,
        /// Elements that are normed together.
        width: usize,
    },
    /// Rows less their mean, over their standard deviation, times weights and plus biases.
    BiasedNorm {
        /// Added to the variance.
        epsilon: f32,
        /// What the normed elements are multiplied by.
        weight: VectorId,
        /// What is added then.
        bias: VectorId,
        /// `[rows, width]`
        input: Slot,
        /// The same; may be `input`.
        output: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
    },
    /// Products of several matrices with the same rows, and their biases.
    Product {
        /// `[rows, columns]`
        input: Slot,
        /// Where the input is quantized to.
        blocks: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of an input row.
        columns: usize,
        /// Each matrix and where its products go, `[rows, rows of the matrix]`.
        outputs: Vec<(MatrixId, Slot)>,
        /// What is taken of every element of them.
        function: Option<Activation>,
    },
    /// Heads turned by position.
    Rotate {
        /// `[tokens, heads x head_dim]`
        heads_of: Slot,
        /// What [`Op::Rotations`] left.
        table: Slot,
        /// Heads of a token.
        heads: usize,
        /// Elements of a head.
        head_dim: usize,
        /// Elements of a head that turn.
        dimensions: usize,
        /// Which of them turn together.
        style: RopeStyle,
    },
    /// New rows of keys and values enter each sequence's cache.
    Store {
        /// Of which decoder layer.
        layer: usize,
        /// `[tokens, width]`
        keys: Slot,
        /// `[tokens, width]`; none where values are part of keys.
        values: Option<Slot>,
        /// Elements of a row.
        width: usize,
    },
    /// Attention of each segment's queries over the rows of its sequence.
    Attend {
        /// The decoder layer whose rows they are.
        layer: usize,
        /// Heads, scale and mask.
        shape: AttentionShape,
        /// `[tokens, query_heads x head_dim]`
        queries: Slot,
        /// `[tokens, query_heads x value_dim]`
        output: Slot,
        /// Partial results.
        states: Slot,
        /// A logit for each query head that takes its share of the softmax.
        sinks: Option<VectorId>,
    },
    /// Attention of each text's queries over its own rows, which are kept no longer than their slots.
    AttendWithin {
        /// Heads, scale and mask.
        shape: AttentionShape,
        /// `[tokens, query_heads x head_dim]`
        queries: Slot,
        /// `[tokens, kv_heads x head_dim]`
        keys: Slot,
        /// `[tokens, kv_heads x value_dim]`
        values: Slot,
        /// `[tokens, query_heads x value_dim]`
        output: Slot,
        /// Partial results.
        states: Slot,
        /// A logit for each query head that takes its share of the softmax.
        sinks: Option<VectorId>,
        /// Whether the tokens of an image see those of their window alone.
        windowed: bool,
    },
    /// What tokens change a layer's state by. A pass keeps the rows of sequences that may have to go back
    /// ([`Sequence::state_inputs`](lacuna_kv::Sequence::state_inputs)); states that are computed again have them from there.
    StateInputs {
        /// Of which decoder layer the state is.
        layer: usize,
        /// Rows of so many elements, which lie one after the other for each token.
        values: Vec<(Slot, usize)>,
    },
    /// A causal convolution of each channel by itself, which goes on from each sequence's state.
    Convolve {
        /// Of which decoder layer the state is.
        layer: usize,
        /// Its first element in that.
        at: usize,
        /// `[tokens, channels]`
        values: Slot,
        /// `[taps, channels]`
        weights: VectorId,
        /// One for each channel.
        bias: Option<VectorId>,
        /// How many channels there are.
        channels: usize,
        /// How many tokens are seen.
        taps: usize,
        /// What sums go through.
        activation: Option<Activation>,
    },
    /// `values = ln(1 + e^(values + bias))`, held between limits
    TimeSteps {
        /// `[tokens, heads]`
        values: Slot,
        /// One for each head.
        bias: VectorId,
        /// What they are held between.
        limits: Option<TimeStepLimits>,
        /// Elements of a row.
        heads: usize,
    },
    /// What time steps leave of states: `output = e^(steps * rates)`.
    Decay {
        /// `[tokens, heads]`
        steps: Slot,
        /// One for each head, none above 0.
        rates: VectorId,
        /// `[tokens, heads]`
        output: Slot,
        /// Elements of a row.
        heads: usize,
    },
    /// Each token changes its sequence's state and reads it.
    Scan {
        /// Of which decoder layer the state is.
        layer: usize,
        /// Its first element in that.
        at: usize,
        /// Heads, and what is computed.
        shape: ScanShape,
        /// `[tokens, key_heads x key_dim]`
        queries: Slot,
        /// `[tokens, key_heads x key_dim]`
        keys: Slot,
        /// `[tokens, value_heads x value_dim]`, which become results.
        values: Slot,
        /// `[tokens, value_heads]`
        decay: Slot,
        /// `[tokens, value_heads]`
        strength: Slot,
        /// For each head of values, how much of the value itself joins the result.
        skip: Option<VectorId>,
    },
    /// Each token's experts are chosen and weighed.
    Route {
        /// How.
        routing: Routing,
        /// `[tokens, experts]`, which is used up.
        logits: Slot,
        /// Added to scores where they are compared.
        bias: Option<VectorId>,
        /// What each expert's weights are multiplied by.
        scales: Option<VectorId>,
        /// `[tokens, used]`
        weights: Slot,
        /// Which experts they are.
        routes: Slot,
    },
    /// Each token has all experts, in order: heads that have matrices of their own.
    RouteToAll {
        /// How many there are.
        routing: Routing,
        /// Which experts tokens have.
        routes: Slot,
    },
    /// Products of the chosen experts' matrices with their tokens' rows, and their biases.
    ExpertProduct {
        /// How experts were chosen.
        routing: Routing,
        /// Which they are.
        routes: Slot,
        /// `[tokens, columns]`, or `[tokens, used x columns]` with rows sorted by expert.
        input: Slot,
        /// Which of the two.
        from: ExpertInput,
        /// Where the input is quantized to.
        blocks: Slot,
        /// Elements of an expert's input.
        columns: usize,
        /// The matrices, all of the same shape, and where their products go: `[tokens, used x rows of
        /// the matrix]`, sorted by expert.
        outputs: Vec<(ExpertsId, Slot)>,
    },
    /// The weighed sum of what each token's experts have made of it.
    CombineExperts {
        /// How experts were chosen.
        routing: Routing,
        /// Which they are.
        routes: Slot,
        /// What they weigh, `[tokens, used]`.
        weights: Slot,
        /// `[tokens, used x width]`, sorted by expert.
        from: Slot,
        /// `[tokens, width]`
        to: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// `gate = f(gate) * up`
    Activate {
        /// What is made of the two.
        gating: Gating,
        /// `[tokens, width]`
        gate: Slot,
        /// `[tokens, width]`
        up: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// Rows held between learned bounds: `to = min(max(from, least), most)`
    Clamp {
        /// `[tokens, width]`
        from: Slot,
        /// The same; may be `from`.
        to: Slot,
        /// The only element of each: the least and the most.
        bounds: [VectorId; 2],
        /// Elements of a row.
        width: usize,
    },
    /// `values = (values - shift) * factor`, with a shift and a factor for each column.
    Standardize {
        /// `[rows, width]`
        values: Slot,
        /// What is subtracted.
        shifts: VectorId,
        /// What they are multiplied by then.
        factors: VectorId,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
    },
    /// Some columns of rows, `values *= factor`
    ScalePart {
        /// `[tokens, width]`
        values: Slot,
        /// Elements of a row.
        width: usize,
        /// Which of them.
        columns: Range<usize>,
        /// What they are multiplied by.
        factor: f32,
    },
    /// `values = f(values)`
    Apply {
        /// `f`.
        function: Activation,
        /// `[rows, width]`
        values: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
    },
    /// Of each row, what exceeds its mean by so many standard deviations is left, less as much; the rest
    /// is nothing.
    KeepOutliers {
        /// `[tokens, width]`
        values: Slot,
        /// Standard deviations above the mean.
        deviations: f32,
        /// Elements of a row.
        width: usize,
    },
    /// `to += factor * from`
    Add {
        /// What is added to, `[rows, width]`.
        to: Slot,
        /// What is added, the same shape.
        from: Slot,
        /// What that is multiplied by.
        factor: Option<f32>,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
    },
    /// `to *= by`
    Multiply {
        /// `[tokens, width]`
        to: Slot,
        /// `[tokens, width]`
        by: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// `to += factor * from` with a factor for each row.
    AddScaledRows {
        /// What is added to, `[tokens, width]`.
        to: Slot,
        /// What is added, the same shape.
        from: Slot,
        /// `[tokens, columns]`
        factors: Slot,
        /// Elements of a row of factors.
        columns: usize,
        /// Which of them it is.
        column: usize,
        /// Elements of a row.
        width: usize,
    },
    /// Each row multiplied by what gives it the root mean square of another.
    MatchMagnitude {
        /// `[rows, width]`
        values: Slot,
        /// The other rows, the same shape.
        like: Slot,
        /// Below which the mean square of a row counts as this.
        least: f32,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
    },
    /// `values *= factor`
    Scale {
        /// `[rows, width]`
        values: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
        /// What they are multiplied by.
        factor: Factor,
    },
    /// Each head multiplied by a number of its own.
    ScaleHeads {
        /// `[tokens, heads, head_dim]`
        values: Slot,
        /// `[tokens, heads]`
        factors: Slot,
        /// How many a token has.
        heads: usize,
        /// Elements of each.
        head_dim: usize,
    },
    /// Queries multiplied by what their positions say.
    Temperature {
        /// `[tokens, width]`
        queries: Slot,
        /// Of which tokens.
        positions: Slot,
        /// Numbers of each of them, of which the first counts.
        axes: usize,
        /// Where each token's factor is put.
        factors: Slot,
        /// How they grow.
        temperature: QueryTemperature,
        /// Elements of a row.
        width: usize,
    },
    /// `values = cap * tanh(values / cap)`
    SoftCap {
        /// `[rows, width]`
        values: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
        /// The bound.
        cap: f32,
    },
    /// Some columns of each head of each token are copied.
    Columns {
        /// Where from.
        from: (Slot, HeadRows),
        /// Where to.
        to: (Slot, HeadRows),
        /// Whether the other columns of `to` hold something that is needed.
        beside: bool,
        /// Heads of a token.
        heads: usize,
        /// Columns.
        columns: usize,
    },
    /// The rows that become logits are picked.
    Choose {
        /// `[tokens, width]`
        from: Slot,
        /// `[logit rows, width]`
        to: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// The rows of each text become one.
    Pool {
        /// Which count.
        pooling: Pooling,
        /// `[tokens, width]`
        from: Slot,
        /// `[texts, width]`
        to: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// The row of each text is brought to a length of 1.
    Normalize {
        /// `[texts, width]`
        values: Slot,
        /// Elements of a row.
        width: usize,
    },
    /// The caller reads what the pass has made.
    Return {
        /// `[logit rows, vocabulary]`, or a row for each text.
        output: Slot,
    },
    /// Fails on values that are infinite or no numbers, if that is asked for.
    CheckFinite {
        /// `[rows, width]`
        values: Slot,
        /// How many rows.
        rows: Rows,
        /// Elements of a row.
        width: usize,
        /// How errors call it.
        place: Place,
    },
}

/// Which row of a table a token has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lookup {
    /// Its own; tokens beyond the table have the first.
    Tokens,
    /// Its position's, which [`Op::Positions`] left there.
    Positions(Slot),
    /// That of the text it belongs to: the first, or of a text that another is compared with the second, if
    /// there is one.
    TokenType,
}

/// A number that values are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Factor {
    /// This.
    Fixed(f32),
    /// The only element of a vector.
    Learned(VectorId),
    /// For each column its own: the elements of a vector.
    Columns(VectorId),
}

/// What an operation does to a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Needs what it holds.
    Read,
    /// Fills it, whatever it held.
    Write,
}

impl Op {
    /// The slots it uses. What is read comes before what is written, so a slot that is changed in
    /// place is read.
    #[must_use]
    pub fn uses(&self) -> Vec<(Slot, Access)> {
        use Access::{Read, Write};
        match self {
            Self::Embed { of, output, .. } => match of {
                Lookup::Positions(positions) => vec![(*positions, Read), (*output, Write)],
                Lookup::Tokens | Lookup::TokenType => vec![(*output, Write)],
            },
            Self::Positions { output, .. }
            | Self::Patches { output, .. }
            | Self::TakeFeatures { output, .. } => vec![(*output, Write)],
            Self::PlaceImages { hidden, .. } | Self::AddImages { hidden, .. } => {
                vec![(*hidden, Read)]
            }
            Self::AddPlaces { rows, hidden, .. } => vec![(*hidden, Read), (*rows, Write)],
            Self::OrderSquares {
                from, to, beside, ..
            } => vec![(*from, Read), (*to, if *beside { Read } else { Write })],
            Self::Rotations {
                positions, output, ..
            } => vec![(*positions, Read), (*output, Write)],
            Self::Norm { input, output, .. } | Self::BiasedNorm { input, output, .. } => {
                vec![(*input, Read), (*output, Write)]
            }
            Self::Product {
                input,
                blocks,
                outputs,
                ..
            } => {
                let outputs = outputs.iter().map(|(_, slot)| (*slot, Write));
                [(*input, Read), (*blocks, Write)]
                    .into_iter()
                    .chain(outputs)
                    .collect()
            }
            Self::Rotate {
                heads_of, table, ..
            } => vec![(*heads_of, Read), (*table, Read)],
            Self::Store { keys, values, .. } => {
                let slots = [Some(*keys), *values].into_iter().flatten();
                slots.map(|slot| (slot, Read)).collect()
            }
            Self::Attend {
                queries,
                output,
                states,
                ..
            } => vec![(*queries, Read), (*output, Write), (*states, Write)],
            Self::AttendWithin {
                queries,
                keys,
                values,
                output,
                states,
                ..
            } => vec![
                (*queries, Read),
                (*keys, Read),
                (*values, Read),
                (*output, Write),
                (*states, Write),
            ],
            Self::Activate { gate, up, .. } => vec![(*gate, Read), (*up, Read)],
            Self::Route {
                logits,
                weights,
                routes,
                ..
            } => vec![(*logits, Read), (*weights, Write), (*routes, Write)],
            Self::RouteToAll { routes, .. } => vec![(*routes, Write)],
            Self::ExpertProduct {
                routes,
                input,
                blocks,
                outputs,
                ..
            } => {
                let outputs = outputs.iter().map(|(_, slot)| (*slot, Write));
                [(*routes, Read), (*input, Read), (*blocks, Write)]
                    .into_iter()
                    .chain(outputs)
                    .collect()
            }
            Self::CombineExperts {
                routes,
                weights,
                from,
                to,
                ..
            } => vec![
                (*routes, Read),
                (*weights, Read),
                (*from, Read),
                (*to, Write),
            ],
            Self::StateInputs { values, .. } => {
                values.iter().map(|(slot, _)| (*slot, Read)).collect()
            }
            Self::Convolve { values, .. } | Self::TimeSteps { values, .. } => vec![(*values, Read)],
            Self::Decay { steps, output, .. } => vec![(*steps, Read), (*output, Write)],
            Self::Scan {
                queries,
                keys,
                values,
                decay,
                strength,
                ..
            } => [queries, keys, values, decay, strength]
                .map(|slot| (*slot, Read))
                .into(),
            Self::Add { to, from, .. } | Self::Multiply { to, by: from, .. } => {
                vec![(*to, Read), (*from, Read)]
            }
            Self::AddScaledRows {
                to, from, factors, ..
            } => vec![(*to, Read), (*from, Read), (*factors, Read)],
            Self::MatchMagnitude { values, like, .. }
            | Self::ScaleHeads {
                values,
                factors: like,
                ..
            } => vec![(*values, Read), (*like, Read)],
            Self::Clamp { from, to, .. } => vec![(*from, Read), (*to, Write)],
            Self::Apply { values, .. }
            | Self::Standardize { values, .. }
            | Self::Normalize { values, .. }
            | Self::KeepOutliers { values, .. }
            | Self::Scale { values, .. }
            | Self::ScalePart { values, .. }
            | Self::SoftCap { values, .. } => vec![(*values, Read)],
            Self::Temperature {
                queries,
                positions,
                factors,
                ..
            } => vec![(*queries, Read), (*positions, Read), (*factors, Write)],
            Self::Columns {
                from: (from, _),
                to: (to, _),
                beside,
                ..
            } => vec![(*from, Read), (*to, if *beside { Read } else { Write })],
            Self::Choose { from, to, .. }
            | Self::Pool { from, to, .. }
            | Self::MergePatches { from, to, .. } => {
                vec![(*from, Read), (*to, Write)]
            }
            Self::Return { output } => vec![(*output, Read)],
            Self::CheckFinite { values, .. } => vec![(*values, Read)],
        }
    }
}
