//! What files of encoders say, whatever the family: how rows are pooled, and what a classifier makes of it.

use serde_json::Value;

use super::facts::{Fact, Facts, Key};
use crate::error::ConfigError;
use crate::spec::{
    Activation, Biases, Dense, FeedForward, Judgement, Mask, ModelSpec, NormKind, OutputSpec,
    Pooled, PooledResult, Pooling,
};
use lacuna_files::gguf::Metadata;

/// Refuses what is called an encoder and is none.
pub(super) fn expect_encoder(facts: &Facts<'_>) -> Result<(), ConfigError> {
    facts.expect(Key::huggingface("is_decoder"), false, "encoders are")?;
    facts.expect(Key::gguf("attention.causal"), false, "encoders are")
}

/// Makes every token see the whole text, or as far to either side as half its window.
pub(super) fn see_both_sides(spec: &mut ModelSpec) {
    for layer in &mut spec.layers {
        let mask = &mut layer.attention_mut().mask;
        *mask = match *mask {
            Mask::Window(tokens) => Mask::Around(tokens.get() / 2),
            Mask::Causal => Mask::Full,
            other => other,
        };
    }
}

/// Makes tokens of a decoder see those after them where its file says so, as embedding models made of decoders do.
pub(super) fn see_both_sides_if_said(
    spec: &mut ModelSpec,
    facts: &Facts<'_>,
) -> Result<(), ConfigError> {
    if facts.get(Key::new("attention.causal", "is_causal"))? != Some(false) {
        return Ok(());
    }
    let is_limited = |mask| matches!(mask, None | Some(Mask::Window(_)));
    if spec.layers.iter().any(|layer| is_limited(layer.mask())) {
        return Err(ConfigError::Unsupported {
            feature: "layers with windows or states whose tokens see those after them".to_owned(),
            supported: "attention to the whole text is",
        });
    }
    see_both_sides(spec);
    Ok(())
}

/// How the family pools where its file says nothing, which is as sentence-transformers does; `classifier` is
/// the layer of its classifiers before the scores.
pub(super) fn pooled(facts: &Facts<'_>, classifier: Option<Dense>) -> Result<Pooled, ConfigError> {
    if let Some(pooled) = said(facts, (Pooling::First, classifier), Judgement::Pair)? {
        return Ok(pooled);
    }
    Ok(embedding(Pooling::Mean))
}

/// Makes a decoder pool where its file says so.
pub(super) fn pool_if_said(spec: &mut ModelSpec, facts: &Facts<'_>) -> Result<(), ConfigError> {
    if spec.pooled().is_some() {
        return Ok(());
    }
    if let Some(pooled) = said(facts, (Pooling::Last, None), Judgement::Question)? {
        spec.output = OutputSpec::Pooled(Pooled {
            final_norm: true,
            ..pooled
        });
    }
    Ok(())
}

/// Rows that become an embedding of length 1 in this way.
pub(super) const fn embedding(pooling: Pooling) -> Pooled {
    Pooled {
        final_norm: false,
        pooling,
        dense: [None; 2],
        answers: None,
        result: PooledResult::Embedding { normalized: true },
    }
}

/// Classes of `transformers` whose output is scores end so.
const CLASSIFIES: &str = "ForSequenceClassification";

/// What the file says of pooling. Numbers are those of `llama_pooling_type` in llama.cpp; folders say it by
/// their class, or elsewhere.
fn said(
    facts: &Facts<'_>,
    (pooling, classifier): (Pooling, Option<Dense>),
    judgement: Judgement,
) -> Result<Option<Pooled>, ConfigError> {
    let class = facts.class().unwrap_or_default();
    let classifies = class.ends_with(CLASSIFIES);
    match facts.get::<usize>(Key::gguf("pooling_type"))? {
        None if classifies => {
            let labels = facts.get(Key::huggingface("id2label"))?;
            let Labels(labels) = labels.unwrap_or(Labels::USUAL);
            scores((pooling, classifier), labels, judgement).map(Some)
        }
        None | Some(0) => Ok(None),
        Some(1) => Ok(Some(embedding(Pooling::Mean))),
        Some(2) => Ok(Some(embedding(Pooling::First))),
        Some(3) => Ok(Some(embedding(Pooling::Last))),
        Some(4) => {
            let has_layer = facts.has_tensor("cls.weight") == Some(true);
            let labels = facts.rows_of("cls.output.weight").unwrap_or(0);
            let layer = classifier.filter(|_| has_layer);
            scores((pooling, layer), labels, judgement).map(Some)
        }
        Some(other) => Err(ConfigError::Unsupported {
            feature: format!("pooling_type {other}"),
            supported: "1 (mean), 2 (first token), 3 (last token) and 4 (scores) are",
        }),
    }
}

fn scores(
    (pooling, classifier): (Pooling, Option<Dense>),
    labels: usize,
    judgement: Judgement,
) -> Result<Pooled, ConfigError> {
    // Of two, the file does not say which of a pair is the better.
    let most = match judgement {
        Judgement::Pair => 1,
        Judgement::Question => 2,
    };
    if labels == 0 || labels > most {
        return Err(ConfigError::Unsupported {
            feature: format!("a classifier of {labels} labels"),
            supported: "rerankers, which have one score, or one each for yes and for no, are",
        });
    }
    let last = Dense::plain(labels);
    Ok(Pooled {
        final_norm: false,
        pooling,
        dense: match classifier {
            Some(layer) => [Some(layer), Some(last)],
            None => [Some(last), None],
        },
        answers: None,
        result: PooledResult::Score(judgement),
    })
}

/// How many labels a classifier has.
struct Labels(usize);

impl Labels {
    /// What `transformers` takes where a file does not say it.
    const USUAL: Self = Self(2);
}

impl Fact for Labels {
    fn from_gguf(_: &Metadata, _: &str) -> Result<Option<Self>, ConfigError> {
        Ok(None)
    }

    fn from_json(value: &Value) -> Option<Self> {
        value.as_object().map(|labels| Self(labels.len()))
    }

    const EXPECTED: &'static str = "names of labels by number";
}

/// Biases everywhere, and norms that have them.
pub(super) fn give_biases(spec: &mut ModelSpec) {
    spec.norm.kind = NormKind::BiasedLayer;
    for layer in &mut spec.layers {
        layer.attention_mut().biases = Biases::ALL;
    }
}

/// The activation that the file names, which is the same in all layers; GELU itself where it is silent.
pub(super) fn activation(spec: &ModelSpec, facts: &Facts<'_>) -> Activation {
    let first = spec.layers.first().map(|layer| layer.feed_forward);
    match first {
        // No key of GGUF says it. The reference has the exact function, and llama.cpp the approximation by tanh.
        Some(FeedForward::Gated(block)) if !facts.is_gguf() => block.activation,
        _ => Activation::GeluErf,
    }
}
