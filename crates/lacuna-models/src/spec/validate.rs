//! Checks a spec once, so that whoever computes with its numbers need not.

use lacuna_kernels::AttentionShape;

use super::{
    AltUp, Attention, Channels, FeedForward, Frames, Gated, ImageRows, ImageSize, Laurel,
    LayerSpec, LearnedInput, LearnedPlaces, LearnedPositions, Mask, Merge, ModelSpec, OutputSpec,
    PatchOrder, Patches, PerLayerInputs, Plain, Pooled, PooledResult, ResidualScale, Rope,
    RopeAxes, RopeScaling, Tiling,
};
use crate::error::ConfigError;

/// Bounds that hold for any model this program can run. They keep arithmetic on sizes far from
/// overflow, whatever a file says.
pub(super) mod limit {
    pub(in crate::spec) const LAYERS: usize = 4096;
    pub(in crate::spec) const HIDDEN: usize = 1 << 20;
    pub(in crate::spec) const HEADS: usize = 4096;
    pub(in crate::spec) const FEED_FORWARD: usize = 1 << 22;
    pub(in crate::spec) const EXPERTS: usize = 4096;
    pub(in crate::spec) const VOCABULARY: usize = 1 << 24;
    /// Elements of a layer's own input.
    pub(in crate::spec) const PER_LAYER: usize = 1 << 16;
    /// Tables of rotations: each is held for a whole pass.
    pub(in crate::spec) const ROPES: usize = 8;
    /// Rows of the tables of positions and of token types.
    pub(in crate::spec) const POSITIONS: usize = 1 << 24;
}

impl ModelSpec {
    /// Checks every number against its range and against the others.
    ///
    /// # Errors
    /// The first [`ConfigError`] found, naming the field, and the layer where there is one.
    pub fn validate(&self) -> Result<(), ConfigError> {
        in_range("layers", self.layers.len(), limit::LAYERS)?;
        if self.layers_ahead > limit::LAYERS {
            return Err(ConfigError::OutOfRange {
                field: "layers that foretell",
                value: self.layers_ahead,
                limit: limit::LAYERS,
            });
        }
        in_range("hidden", self.hidden, limit::HIDDEN)?;
        if let Some(head) = &self.head {
            self.validate_head(head)?;
        }
        in_range("vocabulary", self.vocabulary, limit::VOCABULARY)?;
        in_range("context_tokens", self.context_tokens, usize::MAX)?;
        positive("norm_epsilon", f64::from(self.norm.epsilon))?;
        let [scale, soft_cap] = match &self.output {
            OutputSpec::Logits(logits) => [logits.scale, logits.soft_cap],
            OutputSpec::Pooled(pooled) => {
                self.validate_pooled(pooled)?;
                [None, None]
            }
            OutputSpec::Image(rows) => {
                self.validate_image(rows)?;
                [None, None]
            }
        };
        let scales = [
            ("embedding scale", self.embedding_scale),
            ("logit scale", scale),
            ("soft cap of logits", soft_cap),
        ];
        for (field, scale) in scales {
            positive(field, scale.map_or(1.0, f64::from))?;
        }
        if let Some(learned) = self.learned_input {
            self.validate_learned(learned)?;
        }
        if let Some(PerLayerInputs { width, rows, .. }) = self.per_layer_inputs {
            in_range("width of per-layer inputs", width, limit::PER_LAYER)?;
            in_range("rows of per-layer inputs", rows, limit::VOCABULARY)?;
        }
        if let Some(AltUp { streams }) = self.altup {
            in_range("residual streams", streams, AltUp::MOST_STREAMS)?;
        }
        validate_ropes(&self.ropes)?;
        let is_gated = |layer: &LayerSpec| matches!(layer.feed_forward, FeedForward::Gated(_));
        if self.bounded && !self.layers.iter().all(is_gated) {
            return Err(ConfigError::Needs {
                field: "products between bounds",
                needs: "feed-forward blocks with gates, without experts",
            });
        }
        for (index, layer) in self.layers.iter().enumerate() {
            let validated = layer.validate(self);
            let validated = validated.and_then(|()| self.validate_shared(index, layer));
            validated.map_err(|source| match source {
                // Of models whose layers are all alike, which layer it is says nothing.
                source if self.layers.iter().all(|other| other == layer) => source,
                source => ConfigError::Layer {
                    layer: index,
                    source: Box::new(source),
                },
            })?;
        }
        Ok(())
    }

    fn validate_learned(&self, learned: LearnedInput) -> Result<(), ConfigError> {
        if let Some(rows) = learned.token_types {
            in_range("token types", rows, limit::POSITIONS)?;
        }
        let Some(LearnedPositions { rows, first }) = learned.positions else {
            return Ok(());
        };
        in_range("learned positions", rows, limit::POSITIONS)?;
        let most = rows.saturating_sub(first);
        in_range("context_tokens", self.context_tokens, most)
    }

    /// Whether an image becomes rows, and these whole squares of others.
    fn validate_image(&self, rows: &ImageRows) -> Result<(), ConfigError> {
        let Some(patches) = self.patches else {
            return Err(ConfigError::Needs {
                field: "rows of an image",
                needs: "patches of one",
            });
        };
        in_range("pixels of a patch", patches.pixels, Patches::MOST_PIXELS)?;
        let per_side = match patches.size {
            ImageSize::Square { per_side } => per_side,
            // All images are whole squares then.
            ImageSize::Own { square, .. } | ImageSize::Filled { square, .. } => square,
            ImageSize::Tiles(tiling) => self::tiling(&tiling, patches.pixels)?,
        };
        in_range("patches of a side", per_side, Patches::MOST_PER_SIDE)?;
        let own = match patches.size {
            ImageSize::Own {
                square,
                least_pixels,
                most_pixels,
                longest_edge,
            } => Some((square, least_pixels, most_pixels, longest_edge)),
            ImageSize::Filled {
                square,
                most_pixels,
            } => Some((square, 1, most_pixels, None)),
            ImageSize::Square { .. } | ImageSize::Tiles(_) => None,
        };
        if let Some((square, least_pixels, most_pixels, longest_edge)) = own {
            let square_pixels = square * patches.pixels;
            let patch_pixels = patches.pixels * patches.pixels;
            let most = Patches::MOST * patch_pixels;
            in_range("pixels of an image", most_pixels, most)?;
            in_range("fewest pixels of an image", least_pixels, most_pixels)?;
            if let Some(longest) = longest_edge {
                let most = Patches::MOST_PER_SIDE * patches.pixels;
                in_range("pixels of an image's longer side", longest, most)?;
            }
            in_range(
                "pixels of a square of patches",
                square_pixels * square_pixels,
                most_pixels,
            )?;
        }
        for deviation in patches.deviation {
            positive("deviation of pixels", f64::from(deviation))?;
        }
        for mean in patches.mean {
            finite("mean of pixels", f64::from(mean))?;
        }
        in_range("merged patches", rows.merged, per_side)?;
        if !per_side.is_multiple_of(rows.merged) {
            return Err(ConfigError::Unsupported {
                feature: format!("{per_side} patches of a side in squares of {}", rows.merged),
                supported: "whole squares are",
            });
        }
        in_range("width of an image's rows", rows.width, limit::HIDDEN)?;
        for tap in rows.deepstack.iter().flatten() {
            if tap.layer >= self.layers.len() {
                return Err(ConfigError::OutOfRange {
                    field: "layer that becomes a part of an image's rows",
                    value: tap.layer,
                    limit: self.layers.len().saturating_sub(1),
                });
            }
            let taps = rows.deepstack.iter().flatten();
            if taps.filter(|other| other.layer == tap.layer).count() > 1 {
                return Err(ConfigError::Unsupported {
                    feature: format!("layer {} as two parts of an image's rows", tap.layer),
                    supported: "each layer once is",
                });
            }
        }
        match patches.places {
            LearnedPlaces::Between { per_side } => {
                in_range("learned places of a side", per_side, Patches::MOST_PER_SIDE)?;
            }
            LearnedPlaces::Axes { each } => {
                in_range("learned places of an axis", each, limit::POSITIONS)?;
                in_range("patches of an image's longer side", patches.longest(), each)?;
            }
            LearnedPlaces::None | LearnedPlaces::Each => {}
        }
        if patches.channels == Channels::Together && patches.frames == Frames::TwoTogether {
            return Err(ConfigError::Needs {
                field: "pixels with their channels together",
                needs: "a matrix of one frame",
            });
        }
        if let PatchOrder::Squares { side, windows } = patches.order {
            if side != rows.merged {
                return Err(ConfigError::Unsupported {
                    feature: format!(
                        "patches in squares of {side} that become rows by {}",
                        rows.merged
                    ),
                    supported: "rows of the same squares are",
                });
            }
            if let Some(windows) = windows {
                in_range(
                    "squares of a window's side",
                    windows.side,
                    Patches::MOST_PER_SIDE,
                )?;
                in_range(
                    "layers from one without windows to the next",
                    windows.full_every,
                    limit::LAYERS,
                )?;
            }
        }
        let joined = || {
            let joined = self.hidden.saturating_mul(rows.merged * rows.merged);
            in_range("elements of merged patches", joined, limit::FEED_FORWARD)
        };
        match rows.merge {
            Merge::Mean { norm_epsilon } | Merge::Pooled { norm_epsilon, .. } => {
                positive("norm_epsilon of an image's rows", f64::from(norm_epsilon))
            }
            Merge::SideBySide => Ok(()),
            Merge::Apart { reduced: None } if rows.merged > 1 => Err(ConfigError::Needs {
                field: "squares of patches",
                needs: "a matrix that makes one row of each",
            }),
            Merge::Apart { reduced: None } => Ok(()),
            Merge::Apart {
                reduced: Some(norm_epsilon),
            } => {
                positive("norm_epsilon of an image's rows", f64::from(norm_epsilon))?;
                joined()
            }
            Merge::Joined => joined(),
        }
    }

    fn validate_pooled(&self, pooled: &Pooled) -> Result<(), ConfigError> {
        for dense in pooled.dense.iter().flatten() {
            in_range("width of a dense module", dense.width, limit::HIDDEN)?;
        }
        for token in pooled.answers.into_iter().flatten() {
            in_range("token of an answer", token, self.vocabulary - 1)?;
        }
        match pooled.result {
            PooledResult::Embedding { .. } => Ok(()),
            PooledResult::Score(_) => in_range("scores of a text", pooled.width(self.hidden), 2),
        }
    }

    /// Whether rows that `layer` reads of an earlier one are such as it would have itself.
    pub(super) fn validate_shared(
        &self,
        index: usize,
        layer: &LayerSpec,
    ) -> Result<(), ConfigError> {
        let sharing = layer
            .attention
            .as_ref()
            .and_then(|attention| Some((attention, attention.shares?)));
        let Some((mine, source)) = sharing else {
            return Ok(());
        };
        let other = self.layers[..index].get(source);
        let other = other.and_then(|other| other.attention.as_ref());
        let fits = other.is_some_and(|theirs| {
            theirs.shares.is_none()
                && (mine.kv_heads, mine.head_dim) == (theirs.kv_heads, theirs.head_dim)
                && theirs.latent.is_none()
                && mine.mask == theirs.mask
        });
        match fits {
            true => Ok(()),
            false => Err(ConfigError::SharedRows {
                source_layer: source,
            }),
        }
    }
}

/// The rotations of a model, or of its head.
pub(super) fn validate_ropes(ropes: &[Rope]) -> Result<(), ConfigError> {
    if ropes.len() > limit::ROPES {
        return Err(ConfigError::OutOfRange {
            field: "rotary embeddings",
            value: ropes.len(),
            limit: limit::ROPES,
        });
    }
    ropes.iter().try_for_each(Rope::validate)
}

impl LayerSpec {
    pub(super) fn validate(&self, model: &ModelSpec) -> Result<(), ConfigError> {
        if let Some(attention) = &self.attention {
            attention.validate(&model.ropes)?;
            attention.validate_for(&model.output)?;
        }
        if let Some(recurrence) = &self.recurrence {
            recurrence.validate()?;
            if !matches!(model.output, OutputSpec::Logits(_)) || !self.norms.before_attention() {
                return Err(ConfigError::Needs {
                    field: "a recurrence",
                    needs: "logits, and a norm before it",
                });
            }
        }
        match &self.feed_forward {
            FeedForward::Gated(gated) => gated.validate()?,
            FeedForward::Plain(Plain { inner, .. }) => {
                in_range("feed_forward", *inner, limit::FEED_FORWARD)?;
            }
            FeedForward::Experts(experts) => experts.validate()?,
            FeedForward::None => {}
        }
        if let Some(Laurel { rank }) = self.laurel {
            in_range("rank of the learned residual", rank, model.hidden)?;
            if !self.norms.before_attention() {
                return Err(ConfigError::Needs {
                    field: "a learned residual",
                    needs: "a norm before attention",
                });
            }
        }
        let ResidualScale {
            attention,
            recurrence,
            feed_forward,
        } = self.residual_scale;
        [attention, recurrence, feed_forward]
            .into_iter()
            .flatten()
            .try_for_each(|scale| positive("residual scale", f64::from(scale)))
    }
}

impl Gated {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        in_range("feed_forward", self.inner, limit::FEED_FORWARD)?;
        positive("scale of gates", self.gate_scale.map_or(1.0, f64::from))?;
        match self.gate_cutoff {
            Some(cutoff) => finite("cutoff of sparse gates", f64::from(cutoff)),
            None => Ok(()),
        }
    }
}

impl Attention {
    /// Whether what tokens see is there when they are computed: later tokens only where all of a text
    /// are computed at once, and rows of an earlier layer only where those are kept.
    fn validate_for(&self, output: &OutputSpec) -> Result<(), ConfigError> {
        let sees_later = matches!(self.mask, Mask::Full | Mask::Around(_));
        match output {
            OutputSpec::Logits(_) if sees_later => Err(ConfigError::Needs {
                field: "attention to later tokens",
                needs: "pooled output",
            }),
            OutputSpec::Pooled(_) | OutputSpec::Image(_)
                if self.shares.is_some() || self.latent.is_some() =>
            {
                Err(ConfigError::Unsupported {
                    feature: "pooled output of layers that share rows or have latent ones"
                        .to_owned(),
                    supported: "of layers with keys and values of their own it is",
                })
            }
            _ => Ok(()),
        }
    }

    fn validate(&self, ropes: &[Rope]) -> Result<(), ConfigError> {
        in_range("query_heads", self.query_heads, limit::HEADS)?;
        in_range("kv_heads", self.kv_heads, limit::HEADS)?;
        in_range("head_dim", self.head_dim, AttentionShape::MAX_HEAD_DIM)?;
        let group = self.query_heads / self.kv_heads;
        if !self.query_heads.is_multiple_of(self.kv_heads) || group > AttentionShape::MAX_GROUP {
            return Err(ConfigError::HeadGrouping {
                query_heads: self.query_heads,
                kv_heads: self.kv_heads,
            });
        }
        positive("attention scale", f64::from(self.scale))?;
        positive(
            "soft cap of attention",
            self.soft_cap.map_or(1.0, f64::from),
        )?;
        if let Some(temperature) = self.temperature {
            positive("query temperature", f64::from(temperature.beta))?;
            let tokens = temperature.original_context;
            in_range(
                "context of the query temperature",
                tokens,
                u32::MAX as usize,
            )?;
        }
        if let Mask::Window(tokens) = self.mask {
            in_range("sliding window", tokens.get(), u32::MAX as usize)?;
        }
        if let Some(latent) = &self.latent {
            latent.validate(self, ropes)?;
        }
        let Some(rope) = self.rope else {
            return Ok(());
        };
        match ropes.get(rope) {
            Some(rope) if rope.dimensions <= self.head_dim => Ok(()),
            Some(rope) => Err(ConfigError::OutOfRange {
                field: "rotated elements of a head",
                value: rope.dimensions,
                limit: self.head_dim,
            }),
            None => Err(ConfigError::OutOfRange {
                field: "number of the rotary embedding",
                value: rope,
                limit: ropes.len(),
            }),
        }
    }
}

impl Rope {
    pub(super) fn validate(&self) -> Result<(), ConfigError> {
        in_range(
            "rotated elements of a head",
            self.dimensions,
            AttentionShape::MAX_HEAD_DIM,
        )?;
        // Each half of a patch's has pairs of its own.
        let least = match self.axes {
            RopeAxes::Patch | RopeAxes::PatchInTurn | RopeAxes::PatchByColumn => 4,
            RopeAxes::One | RopeAxes::Sections(_) | RopeAxes::Interleaved(_) => 2,
        };
        if !self.dimensions.is_multiple_of(least) {
            return Err(ConfigError::OddHeadDim {
                head_dim: self.dimensions,
            });
        }
        positive("rope theta", self.theta)?;
        if let RopeAxes::Sections(sections) | RopeAxes::Interleaved(sections) = self.axes {
            for pairs in sections {
                if pairs > self.dimensions / 2 {
                    return Err(ConfigError::OutOfRange {
                        field: "pairs of a section of positions",
                        value: pairs,
                        limit: self.dimensions / 2,
                    });
                }
            }
        }
        self.validate_scaling()
    }

    fn validate_scaling(&self) -> Result<(), ConfigError> {
        match &self.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope factor", *factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            } => all_positive([
                ("rope factor", *factor),
                ("rope low_freq_factor", *low_freq_factor),
                ("rope high_freq_factor", *high_freq_factor),
                ("rope frequency band", high_freq_factor - low_freq_factor),
                ("rope original context", *original_context as f64),
            ]),
            RopeScaling::Yarn(yarn) => all_positive([
                ("rope factor", yarn.factor),
                ("rope original context", yarn.original_context as f64),
                ("rope beta_fast", yarn.beta_fast),
                ("rope beta_slow", yarn.beta_slow),
                ("rope attention factor", yarn.attention_factor),
                // A base of 1 or less has no pair that turns faster than another.
                ("rope theta above 1", self.theta - 1.0),
            ]),
            RopeScaling::LongRope(long) => {
                all_positive([
                    ("rope original context", long.original_context as f64),
                    ("rope attention factor", long.attention_factor),
                ])?;
                let pairs = self.dimensions / 2;
                let tables = long.factors.iter();
                let mut tables = tables.flat_map(|factors| [&factors.short, &factors.long]);
                tables.try_for_each(|table| rope_table(table, pairs))
            }
            RopeScaling::Proportional { fraction } => match *fraction {
                fraction if fraction > 0.0 && fraction <= 1.0 => Ok(()),
                value => Err(ConfigError::NotPositive {
                    field: "rotated part of a head, at most 1",
                    value,
                }),
            },
        }
    }
}

/// One positive divisor for each pair.
pub(crate) fn rope_table(table: &[f32], pairs: usize) -> Result<(), ConfigError> {
    if table.len() != pairs {
        return Err(ConfigError::RopeTable {
            found: table.len(),
            expected: pairs,
        });
    }
    let mut factors = table.iter().map(|&factor| f64::from(factor));
    factors.try_for_each(|factor| positive("rope frequency factor", factor))
}

pub(super) fn in_range(field: &'static str, value: usize, limit: usize) -> Result<(), ConfigError> {
    match (1..=limit).contains(&value) {
        true => Ok(()),
        false => Err(ConfigError::OutOfRange {
            field,
            value,
            limit,
        }),
    }
}

fn all_positive<const N: usize>(values: [(&'static str, f64); N]) -> Result<(), ConfigError> {
    values
        .into_iter()
        .try_for_each(|(field, value)| positive(field, value))
}

fn finite(field: &'static str, value: f64) -> Result<(), ConfigError> {
    match value.is_finite() {
        true => Ok(()),
        false => Err(ConfigError::NotFinite { field, value }),
    }
}

/// Patches of the side of a tile, of so many pixels each.
fn tiling(tiling: &Tiling, patch_pixels: usize) -> Result<usize, ConfigError> {
    let most = Patches::MOST_PER_SIDE * Patches::MOST_PIXELS;
    in_range("pixels of a tile", tiling.side, most)?;
    in_range(
        "pixels of an image's longer side",
        tiling.longest_edge,
        most,
    )?;
    let tiles = tiling.most().rows;
    match tiles <= Tiling::MOST_PER_SIDE {
        true => Ok(tiling.side / patch_pixels),
        false => Err(ConfigError::OutOfRange {
            field: "tiles of a side",
            value: tiles,
            limit: Tiling::MOST_PER_SIDE,
        }),
    }
}

pub(super) fn positive(field: &'static str, value: f64) -> Result<(), ConfigError> {
    match value.is_finite() && value > 0.0 {
        true => Ok(()),
        false => Err(ConfigError::NotPositive { field, value }),
    }
}
