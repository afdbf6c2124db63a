//! Heads that guess tokens: one more layer, over what the model has made of a token and over the next one.

use std::num::NonZeroUsize;

use super::validate::{in_range, limit, positive};
use super::{Attention, LayerSpec, ModelSpec, Norm, OutputSpec, Rope};
use crate::error::ConfigError;

/// A head that guesses tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadSpec {
    /// Its layer.
    pub layer: LayerSpec,
    /// What is around it.
    pub kind: HeadKind,
}

/// What kinds of heads there are.
#[derive(Debug, Clone, PartialEq)]
pub enum HeadKind {
    /// Multi-token prediction, in the model's own files: it reads what the last layer has left, and has the model's norms,
    /// rotations, embedding table and output matrix.
    Mtp,
    /// EAGLE-3, in files of its own: it reads what several layers begin with.
    Eagle3(Eagle3),
}

/// An EAGLE-3 head, made for one model by others than its makers.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3 {
    /// The layers whose inputs it reads, `layers.len()` for what the last one leaves.
    pub taps: Vec<usize>,
    /// How these are normed before they are brought to the model's width.
    pub tap_norm: TapNorm,
    /// Its norms.
    pub norm: Norm,
    /// The rotations of its layer.
    pub ropes: Vec<Rope>,
    /// What its layer adds to.
    pub residual: HeadResidual,
    /// Whether it goes on from its last norm's output, and not from what comes before.
    pub normed_features: bool,
    /// Whether it has an embedding table of its own.
    pub own_embedding: bool,
    /// Rows of an output matrix of its own, which are those of the tokens that it can guess; it has the model's otherwise.
    pub own_outputs: Option<NonZeroUsize>,
}

/// How the taps of an [`Eagle3`] head are normed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TapNorm {
    /// They are not.
    None,
    /// All in one row.
    Whole,
    /// Each by itself.
    Each,
}

/// What the layer of an [`Eagle3`] head adds to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadResidual {
    /// Features as they are given.
    Features,
    /// The same normed, as attention reads them.
    Normed,
}

impl Eagle3 {
    /// The most taps there may be. Published heads have three.
    pub const MOST_TAPS: usize = 8;
}

impl HeadSpec {
    /// An EAGLE-3 head.
    pub(crate) const fn eagle3(&self) -> Option<&Eagle3> {
        match &self.kind {
            HeadKind::Mtp => None,
            HeadKind::Eagle3(eagle) => Some(eagle),
        }
    }
}

impl ModelSpec {
    /// The head that guesses tokens as a decoder of one layer, which keeps rows of its own: its spec has the model's
    /// vocabulary.
    #[must_use]
    pub fn of_head(&self) -> Option<Self> {
        let HeadSpec { layer, kind } = self.head.clone()?;
        let (norm, ropes) = match kind {
            HeadKind::Mtp => (self.norm, self.ropes.clone()),
            HeadKind::Eagle3(eagle) => (eagle.norm, eagle.ropes),
        };
        Some(Self {
            layers: vec![layer],
            layers_ahead: 0,
            head: None,
            // Guesses come after all of them.
            images: None,
            norm,
            ropes,
            ..self.clone()
        })
    }

    /// The first of its rotations that is the head's own, which are counted on behind the model's.
    pub(crate) fn head_rope(&self) -> usize {
        match self.head.as_ref().and_then(HeadSpec::eagle3) {
            Some(_) => self.ropes.len(),
            None => 0,
        }
    }

    /// Rows of logits that its head makes; the model's own without one.
    #[must_use]
    pub fn head_outputs(&self) -> usize {
        let eagle = self.head.as_ref().and_then(HeadSpec::eagle3);
        let own = eagle.and_then(|eagle| eagle.own_outputs);
        own.map_or(self.vocabulary, NonZeroUsize::get)
    }

    /// Whether a head can be this model's.
    pub(super) fn validate_head(&self, head: &HeadSpec) -> Result<(), ConfigError> {
        let attends = |it: &Attention| it.shares.is_none() && it.latent.is_none();
        let own = head
            .layer
            .attention
            .as_ref()
            .is_some_and(|it| match head.kind {
                HeadKind::Mtp => it.shares.is_none(),
                HeadKind::Eagle3(_) => attends(it),
            });
        let alone = self.altup.is_none() && self.per_layer_inputs.is_none();
        let writes = matches!(self.output, OutputSpec::Logits(_));
        if !own || head.layer.recurrence.is_some() || !alone || !writes {
            return Err(ConfigError::Needs {
                field: "a head that guesses tokens",
                needs: "attention over rows of its own, one residual stream, and logits",
            });
        }
        let HeadKind::Eagle3(eagle) = &head.kind else {
            return head.layer.validate(self);
        };
        in_range(
            "layers that a head reads",
            eagle.taps.len(),
            Eagle3::MOST_TAPS,
        )?;
        if let Some(&tap) = eagle.taps.iter().find(|&&tap| tap > self.layers.len()) {
            return Err(ConfigError::OutOfRange {
                field: "layer that a head reads",
                value: tap,
                limit: self.layers.len(),
            });
        }
        positive("norm_epsilon of a head", f64::from(eagle.norm.epsilon))?;
        if let Some(outputs) = eagle.own_outputs {
            in_range("tokens that a head guesses", outputs.get(), self.vocabulary)?;
        }
        in_range(
            "rotary embeddings of a head",
            eagle.ropes.len(),
            limit::ROPES,
        )?;
        eagle.ropes.iter().try_for_each(Rope::validate)?;
        let alone = Self {
            ropes: eagle.ropes.clone(),
            ..self.clone()
        };
        head.layer.validate(&alone)
    }
}
