//! What chats and completions have in common: sampling, limits, and the form of the reply.

use std::hash::{BuildHasher, Hasher};
use std::num::NonZeroUsize;

use lacuna_engine::{Limits, Penalties, Request, Sampling};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::http::body;
use crate::http::error::ApiError;

/// Fields that say nothing to a server with one model and one queue: accepted, and without effect.
pub(crate) const IGNORED: [&str; 10] = [
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "reasoning_effort",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
    "verbosity",
];

/// Fields that would change the reply elsewhere, but not here: refused unless they ask for nothing.
const UNSUPPORTED: [&str; 11] = [
    "audio",
    "best_of",
    "echo",
    "function_call",
    "functions",
    "logit_bias",
    "modalities",
    "prediction",
    "prompt_embeds",
    "suffix",
    "web_search_options",
];

/// The fields of [`Parameters`].
const FIELDS: [&str; 15] = [
    "cache_salt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "n",
    "stream",
    "stream_options",
];

/// Stop strings at most.
const MOST_STOPS: usize = 16;
/// Bytes of a stop string at most.
const MOST_STOP_BYTES: usize = 1024;

/// Sampling, limits, and the form of the reply.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Parameters {
    cache_salt: Option<String>,
    max_tokens: Option<NonZeroUsize>,
    max_completion_tokens: Option<NonZeroUsize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repetition_penalty: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    n: Option<NonZeroUsize>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct StreamOptions {
    include_usage: Option<bool>,
    /// Padding against traffic analysis, which nobody here sends: no effect.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

/// How a reply is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// In one piece, when it is finished.
    Whole,
    /// Token by token.
    Stream {
        /// Whether the last chunk carries figures.
        usage: bool,
    },
}

impl Parameters {
    /// Takes the common fields out of a request and leaves those of its own kind.
    pub(crate) fn take(object: &mut Map<String, Value>) -> Result<Self, ApiError> {
        for field in IGNORED {
            object.remove(field);
        }
        for field in UNSUPPORTED {
            let asked = object.remove(field);
            if asked.is_some_and(|value| !asks_for_nothing(&value)) {
                return Err(ApiError::field(
                    field,
                    format!("`{field}` is not supported by this server; leave it out"),
                ));
            }
        }
        let fields = FIELDS
            .iter()
            .filter_map(|&field| object.remove_entry(field));
        body::read(fields.collect())
    }

    /// The request to the engine. `default_tokens` bounds a reply that sets no bound of its own.
    pub(crate) fn request(
        &self,
        prompt: Vec<u32>,
        default_tokens: Option<usize>,
    ) -> Result<Request, ApiError> {
        let max_tokens = self.max_completion_tokens.or(self.max_tokens);
        Ok(Request {
            choices: self.n.unwrap_or(NonZeroUsize::MIN),
            sampling: self.sampling()?,
            limits: Limits {
                max_tokens: max_tokens.map(NonZeroUsize::get).or(default_tokens),
                stop: self.stops()?,
            },
            ..Request::new(prompt)
        })
    }

    /// What separates the request's computed prompt from others of the same key.
    pub(crate) fn cache_salt(&self) -> Result<Option<&str>, ApiError> {
        match self.cache_salt.as_deref() {
            Some("") => Err(ApiError::field(
                "cache_salt",
                "`cache_salt` must not be empty; leave it out to share with all requests of the key",
            )),
            salt => Ok(salt),
        }
    }

    /// How the reply is sent.
    pub(crate) fn delivery(&self) -> Result<Delivery, ApiError> {
        let options = self.stream_options.as_ref();
        match (self.stream == Some(true), options) {
            (false, None) => Ok(Delivery::Whole),
            (false, Some(_)) => Err(ApiError::field(
                "stream_options",
                "`stream_options` needs `stream: true`",
            )),
            (true, options) => Ok(Delivery::Stream {
                usage: options.and_then(|options| options.include_usage) == Some(true),
            }),
        }
    }

    fn sampling(&self) -> Result<Sampling, ApiError> {
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        let seed = self.seed.map_or_else(any_seed, i64::cast_unsigned);
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(1.0),
            top_k: self.top_k()?,
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            penalties: Penalties {
                repetition: self.repetition_penalty.unwrap_or(1.0),
                presence: self.presence_penalty.unwrap_or(0.0),
                frequency: self.frequency_penalty.unwrap_or(0.0),
                ..Penalties::default()
            },
            seed,
        })
    }

    /// Other servers take -1 for "all", the engine 0.
    fn top_k(&self) -> Result<usize, ApiError> {
        match self.top_k {
            None | Some(-1) => Ok(0),
            Some(top_k) => usize::try_from(top_k)
                .map_err(|_| ApiError::field("top_k", "`top_k` must be -1, 0 or more")),
        }
    }

    fn stops(&self) -> Result<Vec<String>, ApiError> {
        let stops = match &self.stop {
            None => Vec::new(),
            Some(OneOrMany::One(stop)) => vec![stop.clone()],
            Some(OneOrMany::Many(stops)) => stops.clone(),
        };
        if stops.len() > MOST_STOPS || stops.iter().any(|stop| stop.len() > MOST_STOP_BYTES) {
            return Err(ApiError::field(
                "stop",
                format!("at most {MOST_STOPS} stop strings of {MOST_STOP_BYTES} bytes each"),
            ));
        }
        Ok(stops)
    }
}

/// Whether a value says what leaving the field out says.
fn asks_for_nothing(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Bool(true) => false,
        Value::Number(number) => number.as_u64() == Some(1),
        Value::String(text) => text.is_empty() || text == "none",
        Value::Array(items) => items.iter().all(|item| item == "text"),
        Value::Object(fields) => fields.is_empty(),
    }
}

fn within(name: &str, value: Option<f32>, low: f32, high: f32) -> Result<(), ApiError> {
    match value {
        Some(value) if !(low..=high).contains(&value) => Err(ApiError::field(
            name,
            format!("`{name}` is {value}, expected {low} to {high}"),
        )),
        _ => Ok(()),
    }
}

/// A seed nobody chose: the standard library's hasher is seeded by the system.
fn any_seed() -> u64 {
    std::hash::RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn take(value: Value) -> Result<(Parameters, Map<String, Value>), ApiError> {
        let Value::Object(mut object) = value else {
            panic!("an object");
        };
        Parameters::take(&mut object).map(|parameters| (parameters, object))
    }

    fn check(value: Value) -> Result<(), ApiError> {
        let (parameters, _) = take(value)?;
        parameters.delivery()?;
        parameters.request(vec![1], None).map(|_| ())
    }

    #[test]
    fn the_common_fields_are_taken_and_the_others_left() {
        let all = FIELDS.iter().map(|&field| (field.into(), Value::Null));
        let (_, left) = take(Value::Object(all.collect())).expect("null is no value");
        assert!(left.is_empty());
        let (_, left) = take(json!({"n": 2, "user": "x", "messages": []})).expect("valid");
        assert_eq!(left.keys().collect::<Vec<_>>(), ["messages"]);
    }

    #[test]
    fn a_field_that_would_change_the_reply_is_refused_unless_it_asks_for_nothing() {
        for nothing in [
            json!({"echo": false}),
            json!({"best_of": 1}),
            json!({"logit_bias": {}}),
            json!({"modalities": ["text"]}),
        ] {
            check(nothing.clone()).unwrap_or_else(|error| panic!("{nothing}: {error:?}"));
        }
        for something in [
            json!({"echo": true}),
            json!({"best_of": 2}),
            json!({"logit_bias": {"1": -100}}),
            json!({"modalities": ["audio"]}),
        ] {
            check(something).expect_err("not supported");
        }
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (value, field) in [
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_tokens": 1e30}), "max_tokens"),
            (json!({"n": 0}), "n"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (
                json!({"stream_options": {"what": 1}}),
                "stream_options.what",
            ),
            (json!({"stream_options": {}}), "stream_options"),
        ] {
            let body = check(value.clone()).expect_err("refused").body();
            assert_eq!(body["error"]["param"], field, "{value}: {body}");
        }
    }
}
