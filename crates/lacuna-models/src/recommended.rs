//! The sampling that a model's makers recommend.

use std::fmt;

use serde::Serialize;
use serde_json::{Map, Value};

use crate::error::ConfigError;
use lacuna_files::{Metadata, gguf};

/// How a model's makers recommend that tokens are chosen: `general.sampling.*` of a GGUF file,
/// `generation_config.json` of a folder.
///
/// What they do not say is `None`. So is a value that no sampler takes: bad advice keeps nobody from
/// using a model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct RecommendedSampling {
    /// Divides the logits; 0 for the likeliest token every time.
    pub temperature: Option<f32>,
    /// Draw from so many of the likeliest tokens; 0 for all.
    pub top_k: Option<usize>,
    /// Draw from the likeliest tokens that together reach this probability.
    pub top_p: Option<f32>,
    /// Draw from tokens at least this fraction as likely as the likeliest.
    pub min_p: Option<f32>,
    /// Divides the logits of recent tokens.
    pub repetition_penalty: Option<f32>,
}

impl RecommendedSampling {
    /// What the files of a model say.
    pub(crate) fn of(metadata: &Metadata) -> Result<RecommendedSampling, ConfigError> {
        Ok(match metadata {
            Metadata::Gguf(metadata) => Self::from_gguf(metadata),
            Metadata::HuggingFace(folder) => {
                let config = folder.json("generation_config.json")?;
                Self::from_generation_config(&config.unwrap_or_default())
            }
        })
    }

    fn from_gguf(metadata: &gguf::Metadata) -> RecommendedSampling {
        let number = |key: &str| {
            let key = format!("general.sampling.{key}");
            metadata.get::<f32>(&key).ok().flatten()
        };
        let top_k = metadata.get::<i32>("general.sampling.top_k");
        RecommendedSampling {
            temperature: number("temp"),
            top_k: top_k.ok().flatten().map(|top_k| count(top_k.into())),
            top_p: number("top_p"),
            min_p: number("min_p"),
            repetition_penalty: number("penalty_repeat"),
        }
        .usable()
    }

    /// `do_sample` decides whether there is a temperature at all: without it, the likeliest token is
    /// taken; with it and nothing else, the temperature is 1.
    fn from_generation_config(config: &Map<String, Value>) -> RecommendedSampling {
        let number = |key: &str| Some(config.get(key)?.as_f64()? as f32);
        let temperature = match config.get("do_sample").and_then(Value::as_bool) {
            Some(false) => Some(0.0),
            Some(true) => number("temperature").or(Some(1.0)),
            None => number("temperature"),
        };
        RecommendedSampling {
            temperature,
            top_k: config.get("top_k").and_then(Value::as_i64).map(count),
            top_p: number("top_p"),
            min_p: number("min_p"),
            repetition_penalty: number("repetition_penalty"),
        }
        .usable()
    }

    fn usable(self) -> RecommendedSampling {
        let positive = |value: &f32| *value > 0.0 && value.is_finite();
        RecommendedSampling {
            temperature: self
                .temperature
                .filter(|value| *value >= 0.0 && value.is_finite()),
            top_k: self.top_k,
            top_p: self.top_p.filter(|value| *value > 0.0 && *value <= 1.0),
            min_p: self.min_p.filter(|value| (0.0..=1.0).contains(value)),
            repetition_penalty: self.repetition_penalty.filter(positive),
        }
    }

    /// Whether nothing is recommended.
    pub fn is_empty(&self) -> bool {
        *self == RecommendedSampling::default()
    }
}

/// Tokens to draw from; some files write -1 for all.
fn count(top_k: i64) -> usize {
    usize::try_from(top_k).unwrap_or(0)
}

/// What is said, such as `temperature 0.6, top-k 20`.
impl fmt::Display for RecommendedSampling {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let top_k = self.top_k.map(|top_k| top_k as f32);
        let said = [
            ("temperature", self.temperature),
            ("top-k", top_k),
            ("top-p", self.top_p),
            ("min-p", self.min_p),
            ("repetition penalty", self.repetition_penalty),
        ];
        let said: Vec<String> = said
            .into_iter()
            .filter_map(|(name, value)| Some(format!("{name} {}", value?)))
            .collect();
        formatter.write_str(&said.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(config: Value) -> RecommendedSampling {
        let Value::Object(config) = config else {
            panic!("an object");
        };
        RecommendedSampling::from_generation_config(&config)
    }

    #[test]
    fn a_folder_recommends_what_its_generation_config_says() {
        let found = read(json!({
            "do_sample": true, "temperature": 0.5, "top_k": 20, "top_p": 0.75,
            "repetition_penalty": 1.25, "eos_token_id": [1, 106],
        }));
        assert_eq!(
            found.to_string(),
            "temperature 0.5, top-k 20, top-p 0.75, repetition penalty 1.25"
        );
        assert_eq!(found.min_p, None);
        assert!(read(json!({"eos_token_id": 2})).is_empty());
    }

    #[test]
    fn a_gguf_file_recommends_what_its_metadata_says() {
        let mut header = gguf::Writer::new();
        header
            .set("general.sampling.temp", 0.5f32)
            .set("general.sampling.top_k", 20i32)
            .set("general.sampling.min_p", 0.25f32)
            .set("general.sampling.penalty_repeat", -1.0f32);
        let file = gguf::File::parse(lacuna_files::Mapping::from(header.to_bytes()));
        let found = RecommendedSampling::from_gguf(file.expect("a header").metadata());
        assert_eq!(found.to_string(), "temperature 0.5, top-k 20, min-p 0.25");
    }

    #[test]
    fn whether_tokens_are_drawn_at_all_decides_the_temperature() {
        assert_eq!(read(json!({"do_sample": true})).temperature, Some(1.0));
        let greedy = read(json!({"do_sample": false, "temperature": 0.6}));
        assert_eq!(greedy.temperature, Some(0.0));
        assert_eq!(read(json!({"temperature": 0.6})).temperature, Some(0.6));
    }

    #[test]
    fn advice_that_no_sampler_takes_counts_as_not_given() {
        let found = read(json!({
            "temperature": -1, "top_k": "many", "top_p": 0, "min_p": 1.5, "repetition_penalty": 1e60,
        }));
        assert!(found.is_empty(), "{found:?}");
        assert_eq!(read(json!({"top_k": -1})).top_k, Some(0));
    }
}
