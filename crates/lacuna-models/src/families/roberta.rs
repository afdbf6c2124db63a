//! RoBERTa and XLM-RoBERTa (BGE-M3, multilingual E5, BGE rerankers): BERT with positions that are counted
//! from behind the padding token's number. GGUF files call them BERT, and have only the rows that are used.

use super::bert::{self, bert};
use super::facts::Key;
use super::{Facts, Family, Naming};
use crate::error::ConfigError;
use crate::spec::ModelSpec;

pub(crate) const FAMILY: Family = Family {
    name: "roberta",
    classes: &[
        "RobertaModel",
        "XLMRobertaModel",
        "RobertaForSequenceClassification",
        "XLMRobertaForSequenceClassification",
    ],
    spec,
    naming: Naming {
        parts: PARTS,
        inside: Some("roberta"),
        ..bert::FAMILY.naming
    },
    shapes: &[],
};

/// BERT's, but for the classifier's.
const PARTS: &[(&str, &str)] = &{
    let mut parts = [("", ""); bert::FAMILY.naming.parts.len()];
    let mut index = 0;
    while index < parts.len() - 2 {
        parts[index] = bert::FAMILY.naming.parts[index];
        index += 1;
    }
    parts[index] = ("cls", "classifier.dense");
    parts[index + 1] = ("cls.output", "classifier.out_proj");
    parts
};

fn spec(facts: &Facts<'_>) -> Result<ModelSpec, ConfigError> {
    let padding: Option<usize> = facts.get(Key::huggingface("pad_token_id"))?;
    bert(facts, padding.unwrap_or(USUAL_PADDING) + 1)
}

/// The padding token that all of them have.
const USUAL_PADDING: usize = 1;
