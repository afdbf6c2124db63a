//! Heads that guess tokens: a layer or a few, over what the model has made of a token and over the next one.

use std::num::NonZeroUsize;

use lacuna_kv::{Geometry, KvElements, KvError};

use super::validate::{in_range, limit, positive, validate_ropes};
use super::{LayerSpec, ModelSpec, Norm, OutputSpec, Rope};
use crate::error::ConfigError;

/// A head that guesses tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadSpec {
    /// Its layers: one, but for assistants.
    pub layers: Vec<LayerSpec>,
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
    /// An assistant (Gemma 4), in files of its own: its layers read rows that layers of the model keep
    /// ([`shares`](super::Attention::shares)), and it keeps none.
    Assistant(Assistant),
}

/// What is around the layers of an assistant: matrices that bring what it reads to its own width, and its features back to the
/// model's, and an embedding table that is its output matrix.
#[derive(Debug, Clone, PartialEq)]
pub struct Assistant {
    /// Its width, in elements.
    pub hidden: usize,
    /// Its norms.
    pub norm: Norm,
    /// The rotations of its layers.
    pub ropes: Vec<Rope>,
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
            HeadKind::Eagle3(eagle) => Some(eagle),
            HeadKind::Mtp | HeadKind::Assistant(_) => None,
        }
    }

    /// Whether it is in files of its own.
    pub(crate) const fn is_beside(&self) -> bool {
        !matches!(self.kind, HeadKind::Mtp)
    }

    /// The rotations that it does not have from the model.
    pub(crate) fn ropes(&self) -> &[Rope] {
        match &self.kind {
            HeadKind::Mtp => &[],
            HeadKind::Eagle3(eagle) => &eagle.ropes,
            HeadKind::Assistant(assistant) => &assistant.ropes,
        }
    }

    /// Whether it reads the model's rows and keeps none: then it guesses over the model's own sequences, nothing of which is
    /// prepared.
    #[must_use]
    pub const fn borrows_rows(&self) -> bool {
        matches!(self.kind, HeadKind::Assistant(_))
    }
}

impl ModelSpec {
    /// The head that guesses tokens as a decoder of its layers: its spec has the model's vocabulary.
    #[must_use]
    pub fn of_head(&self) -> Option<Self> {
        let HeadSpec { layers, kind } = self.head.clone()?;
        let (hidden, norm, ropes) = match kind {
            HeadKind::Mtp => (self.hidden, self.norm, self.ropes.clone()),
            HeadKind::Eagle3(eagle) => (self.hidden, eagle.norm, eagle.ropes),
            HeadKind::Assistant(own) => (own.hidden, own.norm, own.ropes),
        };
        Some(Self {
            hidden,
            layers,
            layers_ahead: 0,
            head: None,
            // Guesses come after all of them.
            images: None,
            per_layer_inputs: None,
            norm,
            ropes,
            ..self.clone()
        })
    }

    /// Shape of a KV cache of its head's own rows; `None` for one that keeps none, and without a head.
    ///
    /// # Errors
    /// As [`ModelSpec::kv_geometry`].
    pub fn head_kv_geometry(&self, elements: KvElements) -> Result<Option<Geometry>, KvError> {
        let keeps = self.head.as_ref().is_some_and(|head| !head.borrows_rows());
        let head = self.of_head().filter(|_| keeps);
        head.map(|head| head.kv_geometry(elements)).transpose()
    }

    /// The first of its rotations that is the head's own, which are counted on behind the model's.
    pub(crate) fn head_rope(&self) -> usize {
        match self.head.as_ref().is_some_and(HeadSpec::is_beside) {
            true => self.ropes.len(),
            false => 0,
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
        in_range("layers of a head", head.layers.len(), limit::LAYERS)?;
        let fits = |layer: &LayerSpec| {
            let attends = layer.attention.as_ref().is_some_and(|it| match head.kind {
                HeadKind::Mtp => it.shares.is_none(),
                HeadKind::Eagle3(_) => it.shares.is_none() && it.latent.is_none(),
                HeadKind::Assistant(_) => it.shares.is_some() && it.latent.is_none(),
            });
            attends && layer.recurrence.is_none()
        };
        // An assistant stands beside the model's layers, whatever those are told besides.
        let alone = head.borrows_rows() || self.per_layer_inputs.is_none();
        let writes = matches!(self.output, OutputSpec::Logits(_));
        if !head.layers.iter().all(fits) || !alone || self.altup.is_some() || !writes {
            return Err(ConfigError::Needs {
                field: "a head that guesses tokens",
                needs: "attention over rows, its own or the model's, one residual stream, and logits",
            });
        }
        validate_ropes(head.ropes())?;
        let own = Self {
            ropes: match head.is_beside() {
                true => head.ropes().to_vec(),
                false => self.ropes.clone(),
            },
            ..self.clone()
        };
        for layer in &head.layers {
            layer.validate(&own)?;
            self.validate_shared(self.layers.len(), layer)?;
        }
        match &head.kind {
            HeadKind::Mtp => Ok(()),
            HeadKind::Eagle3(eagle) => self.validate_eagle3(eagle),
            HeadKind::Assistant(own) => {
                in_range("hidden of a head", own.hidden, limit::HIDDEN)?;
                positive("norm_epsilon of a head", f64::from(own.norm.epsilon))
            }
        }
    }

    fn validate_eagle3(&self, eagle: &Eagle3) -> Result<(), ConfigError> {
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
        match eagle.own_outputs {
            Some(outputs) => in_range("tokens that a head guesses", outputs.get(), self.vocabulary),
            None => Ok(()),
        }
    }
}
