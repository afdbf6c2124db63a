//! What chats and completions have in common: sampling, limits, and the form of the reply.

use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::num::NonZeroUsize;
use std::sync::Arc;

use lacuna_engine::{Limits, Penalties, Request, Sampling, StopText};
use lacuna_models::RecommendedSampling;
use lacuna_text::reply::Effort;
use lacuna_text::tokenizer::SpecialText;
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::http::body;
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::fields;

/// The fields of [`Parameters`].
const FIELDS: [&str; 33] = [
    "cache_salt",
    "session",
    "max_tokens",
    "max_completion_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "n",
    "best_of",
    "priority",
    "prompt_logprobs",
    "return_tokens_as_token_ids",
    "stream",
    "stream_options",
    "echo",
    "include_reasoning",
    "reasoning_effort",
    "reasoning",
    "thinking_token_budget",
    "reasoning_budget_tokens",
    "thinking_budget_tokens",
];

/// Stop strings at most.
const MOST_STOPS: usize = 16;
/// Bytes of a stop string at most.
const MOST_STOP_BYTES: usize = 1024;

/// Tokens that end a reply at most.
const MOST_STOP_TOKENS: usize = 256;
/// Alternatives listed for each token at most, as OpenAI has it.
pub(crate) const MOST_LOGPROBS: usize = 20;

/// Sampling, limits, and the form of the reply.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Parameters {
    pub(crate) cache_salt: Option<String>,
    /// The name under which a cache folder keeps the conversation.
    pub(crate) session: Option<String>,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) max_completion_tokens: Option<usize>,
    pub(crate) min_tokens: Option<usize>,
    pub(crate) temperature: Option<f32>,
    pub(crate) top_p: Option<f32>,
    pub(crate) top_k: Option<i64>,
    pub(crate) min_p: Option<f32>,
    pub(crate) presence_penalty: Option<f32>,
    pub(crate) frequency_penalty: Option<f32>,
    pub(crate) repetition_penalty: Option<f32>,
    pub(crate) logit_bias: Option<BTreeMap<String, f32>>,
    pub(crate) seed: Option<i64>,
    pub(crate) stop: Option<OneOrMany>,
    pub(crate) stop_token_ids: Option<Vec<u32>>,
    pub(crate) include_stop_str_in_output: Option<bool>,
    pub(crate) ignore_eos: Option<bool>,
    pub(crate) skip_special_tokens: Option<bool>,
    pub(crate) n: Option<NonZeroUsize>,
    /// Choices made, of which the best `n` would be sent: only all of them can be.
    pub(crate) best_of: Option<NonZeroUsize>,
    pub(crate) priority: Option<i32>,
    pub(crate) prompt_logprobs: Option<usize>,
    /// Whether scored tokens are called by their ids, as vLLM has it.
    pub(crate) return_tokens_as_token_ids: Option<bool>,
    pub(crate) stream: Option<bool>,
    pub(crate) stream_options: Option<StreamOptions>,
    /// Whether completions begin with their prompt.
    pub(crate) echo: Option<bool>,
    /// Whether chats tell what the model thinks.
    pub(crate) include_reasoning: Option<bool>,
    pub(crate) reasoning_effort: Option<Effort>,
    /// The same and more, as routers have it.
    pub(crate) reasoning: Option<Reasoning>,
    /// Tokens that may be thought, as vLLM has it; a negative number is no bound.
    pub(crate) thinking_token_budget: Option<i64>,
    /// And as llama.cpp has it.
    pub(crate) reasoning_budget_tokens: Option<i64>,
    pub(crate) thinking_budget_tokens: Option<i64>,
    /// What another interface calls the field that says it.
    #[serde(skip)]
    pub(crate) budget_field: Option<&'static str>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Reasoning {
    pub(crate) effort: Option<Effort>,
    /// Tokens that may be thought.
    pub(crate) max_tokens: Option<i64>,
    /// Whether it is thought and not told.
    pub(crate) exclude: Option<bool>,
    pub(crate) enabled: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct StreamOptions {
    include_usage: Option<bool>,
    /// Figures with every chunk, as vLLM has it.
    continuous_usage_stats: Option<bool>,
    /// Padding against traffic analysis, which nobody here sends: no effect.
    #[serde(rename = "include_obfuscation")]
    _include_obfuscation: Option<bool>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub(crate) enum OneOrMany {
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
        /// Which chunks carry figures.
        usage: UsageChunks,
    },
}

/// Which chunks of a stream carry figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UsageChunks {
    None,
    /// One more after all the others.
    Last,
    /// That one, and each of the others.
    Every,
}

impl Parameters {
    /// Takes the common fields out of a request and leaves those of its own kind.
    pub(crate) fn take(
        object: &mut Map<String, Value>,
        ignored: &mut Ignored,
    ) -> Result<Self, ApiError> {
        fields::take_without_effect(object)?;
        let fields = FIELDS
            .iter()
            .filter_map(|&field| object.remove_entry(field));
        body::read::<Self>(fields.collect(), ignored)?.checked()
    }

    /// The same, if values are in the ranges that are known before the model is asked.
    pub(crate) fn checked(self) -> Result<Self, ApiError> {
        self.check().map(|()| self)
    }

    fn check(&self) -> Result<(), ApiError> {
        within("temperature", self.temperature, 0.0, 2.0)?;
        within("presence_penalty", self.presence_penalty, -2.0, 2.0)?;
        within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)?;
        let choices = self.choices();
        if let Some(made) = self.best_of.filter(|&made| made != choices) {
            return Err(ApiError::field(
                "best_of",
                format!(
                    "`best_of` is {made}, but all choices that are made are sent: it must be `n`, {choices}"
                ),
            ));
        }
        if self.prompt_logprobs.is_some_and(|top| top > MOST_LOGPROBS) {
            return Err(ApiError::field(
                "prompt_logprobs",
                format!("`prompt_logprobs` must be 0 to {MOST_LOGPROBS}"),
            ));
        }
        if self.prompt_logprobs.is_some() && self.stream == Some(true) {
            return Err(ApiError::field(
                "prompt_logprobs",
                "`prompt_logprobs` are not sent as a stream; leave out `stream`",
            ));
        }
        Ok(())
    }

    /// The request to the engine. `default_tokens` bounds a reply that sets no bound of its own, and
    /// `recommended` is how tokens are chosen where the request does not say.
    pub(crate) fn request(
        &self,
        prompt: Vec<u32>,
        default_tokens: Option<usize>,
        recommended: &RecommendedSampling,
    ) -> Result<Request, ApiError> {
        Ok(Request {
            choices: self.choices(),
            sampling: self.sampling(recommended)?,
            limits: Limits {
                max_tokens: self.max_tokens()?.or(default_tokens),
                min_tokens: self.min_tokens.unwrap_or(0),
                stop: self.stops()?,
                stop_tokens: self.stop_tokens()?,
                stop_text: match self.include_stop_str_in_output {
                    Some(true) => StopText::Show,
                    _ => StopText::Hide,
                },
                ignore_eos: self.ignore_eos == Some(true),
                special: match self.skip_special_tokens {
                    Some(false) => SpecialText::Show,
                    _ => SpecialText::Skip,
                },
            },
            priority: self.priority.unwrap_or(0),
            prompt_logprobs: self.prompt_logprobs,
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

    /// Replies that are wanted for each prompt.
    pub(crate) fn choices(&self) -> NonZeroUsize {
        self.n.unwrap_or(NonZeroUsize::MIN)
    }

    pub(crate) fn prompt_logprobs(&self) -> Option<usize> {
        self.prompt_logprobs
    }

    pub(crate) fn echoes(&self) -> bool {
        self.echo == Some(true)
    }

    pub(crate) fn includes_reasoning(&self) -> bool {
        let excluded = self
            .reasoning
            .as_ref()
            .and_then(|reasoning| reasoning.exclude);
        self.include_reasoning
            .or(excluded.map(|excluded| !excluded))
            != Some(false)
    }

    pub(crate) fn effort(&self) -> Option<Effort> {
        let reasoning = self.reasoning.as_ref();
        let off = reasoning.is_some_and(|reasoning| reasoning.enabled == Some(false));
        let effort = reasoning.and_then(|reasoning| reasoning.effort);
        self.reasoning_effort
            .or(effort)
            .or(off.then_some(Effort::None))
    }

    /// How many tokens may be thought, and the field that says it.
    pub(crate) fn reasoning_budget(&self) -> Option<(&'static str, usize)> {
        let reasoning = self
            .reasoning
            .as_ref()
            .and_then(|reasoning| reasoning.max_tokens);
        let said = [
            ("thinking_token_budget", self.thinking_token_budget),
            ("reasoning_budget_tokens", self.reasoning_budget_tokens),
            ("thinking_budget_tokens", self.thinking_budget_tokens),
            ("reasoning.max_tokens", reasoning),
        ];
        let (field, most) = said
            .into_iter()
            .find_map(|(field, most)| Some((field, most?)))?;
        // Other servers take -1 for no bound.
        let field = self.budget_field.unwrap_or(field);
        usize::try_from(most).ok().map(|most| (field, most))
    }

    /// No token at all is enough for a reply that has something to say of the prompt.
    fn max_tokens(&self) -> Result<Option<usize>, ApiError> {
        let (field, most) = match self.max_completion_tokens {
            Some(most) => ("max_completion_tokens", Some(most)),
            None => ("max_tokens", self.max_tokens),
        };
        if most == Some(0) && !self.echoes() && self.prompt_logprobs.is_none() {
            return Err(ApiError::field(
                field,
                format!("`{field}` must be at least 1, or 0 with `echo` or `prompt_logprobs`"),
            ));
        }
        Ok(most)
    }

    /// How the reply is sent.
    pub(crate) fn delivery(&self) -> Result<Delivery, ApiError> {
        let Some(options) = self.stream_options.as_ref() else {
            return Ok(match self.stream {
                Some(true) => Delivery::Stream {
                    usage: UsageChunks::None,
                },
                _ => Delivery::Whole,
            });
        };
        if self.stream != Some(true) {
            return Err(ApiError::field(
                "stream_options",
                "`stream_options` needs `stream: true`",
            ));
        }
        let last = options.include_usage == Some(true);
        Ok(Delivery::Stream {
            usage: match options.continuous_usage_stats {
                Some(true) if last => UsageChunks::Every,
                _ if last => UsageChunks::Last,
                _ => UsageChunks::None,
            },
        })
    }

    /// What the request says, else what the model's makers recommend, else all tokens as likely as
    /// they are.
    fn sampling(&self, recommended: &RecommendedSampling) -> Result<Sampling, ApiError> {
        let seed = self.seed.map_or_else(any_seed, i64::cast_unsigned);
        let default = Sampling {
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            ..Sampling::default()
        }
        .recommended_by(recommended);
        let repetition = default.penalties.repetition;
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(default.temperature),
            top_k: self.top_k()?.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            penalties: Penalties {
                repetition: self.repetition_penalty.unwrap_or(repetition),
                presence: self.presence_penalty.unwrap_or(0.0),
                frequency: self.frequency_penalty.unwrap_or(0.0),
                ..Penalties::default()
            },
            logit_bias: self.logit_bias()?,
            seed,
        })
    }

    /// Other servers take -1 for "all", the engine 0.
    fn top_k(&self) -> Result<Option<usize>, ApiError> {
        match self.top_k {
            None => Ok(None),
            Some(-1) => Ok(Some(0)),
            Some(top_k) => usize::try_from(top_k)
                .map(Some)
                .map_err(|_| ApiError::field("top_k", "`top_k` must be -1, 0 or more")),
        }
    }

    /// JSON has text alone for the names of fields, so tokens come as text.
    fn logit_bias(&self) -> Result<Arc<[(u32, f32)]>, ApiError> {
        let biases = self.logit_bias.iter().flatten();
        let biases = biases.map(|(token, &bias)| {
            let field = || format!("logit_bias.{token}");
            within(&field(), Some(bias), -100.0, 100.0)?;
            let token = token.parse();
            let token = token.map_err(|_| {
                ApiError::field(
                    field(),
                    "`logit_bias` has ids of tokens as the names of its fields",
                )
            })?;
            Ok((token, bias))
        });
        biases.collect()
    }

    fn stop_tokens(&self) -> Result<Vec<u32>, ApiError> {
        let tokens = self.stop_token_ids.clone().unwrap_or_default();
        if tokens.len() > MOST_STOP_TOKENS {
            return Err(ApiError::field(
                "stop_token_ids",
                format!("at most {MOST_STOP_TOKENS} tokens end a reply"),
            ));
        }
        Ok(tokens)
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
        let mut strict = Ignored::new(true);
        Parameters::take(&mut object, &mut strict).map(|parameters| (parameters, object))
    }

    fn check(value: Value) -> Result<Request, ApiError> {
        let (parameters, _) = take(value)?;
        parameters.delivery()?;
        parameters.request(vec![1], None, &RecommendedSampling::default())
    }

    #[test]
    fn what_a_request_does_not_say_is_as_the_model_recommends() {
        let recommended = RecommendedSampling {
            temperature: Some(0.5),
            top_k: Some(20),
            repetition_penalty: Some(1.25),
            ..RecommendedSampling::default()
        };
        let request = |body: Value| {
            let (parameters, _) = take(body).expect("valid");
            let request = parameters.request(vec![1], None, &recommended);
            request.expect("valid").sampling
        };
        let silent = request(json!({}));
        assert_eq!((silent.temperature, silent.top_k), (0.5, 20));
        assert_eq!((silent.top_p, silent.penalties.repetition), (1.0, 1.25));
        let said = request(json!({"temperature": 1, "top_k": -1, "repetition_penalty": 1}));
        assert_eq!((said.temperature, said.top_k), (1.0, 0));
        assert_eq!(said.penalties.repetition, 1.0);
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
    fn each_field_reaches_the_engine() {
        let request = check(json!({
            "max_tokens": 9, "min_tokens": 2, "stop": "x", "stop_token_ids": [5, 6],
            "include_stop_str_in_output": true, "ignore_eos": true, "skip_special_tokens": false,
            "logit_bias": {"7": -100, "8": 1.5}, "n": 2, "best_of": 2, "priority": -3,
            "prompt_logprobs": 1, "top_k": -1,
        }))
        .expect("valid");
        let limits = &request.limits;
        assert_eq!((limits.max_tokens, limits.min_tokens), (Some(9), 2));
        assert_eq!(
            (limits.stop.len(), &limits.stop_tokens[..]),
            (1, &[5, 6][..])
        );
        assert_eq!(limits.stop_text, StopText::Show);
        assert_eq!(
            (limits.ignore_eos, limits.special),
            (true, SpecialText::Show)
        );
        assert_eq!(*request.sampling.logit_bias, [(7, -100.0), (8, 1.5)]);
        assert_eq!((request.choices.get(), request.priority), (2, -3));
        assert_eq!(request.prompt_logprobs, Some(1));
    }

    #[test]
    fn a_reply_of_no_tokens_must_have_something_to_say() {
        for said in [json!({"echo": true}), json!({"prompt_logprobs": 0})] {
            let mut body = said;
            body["max_tokens"] = json!(0);
            check(body.clone()).unwrap_or_else(|error| panic!("{body}: {error:?}"));
        }
        assert!(check(json!({"max_tokens": 0})).is_err());
    }

    #[test]
    fn values_out_of_range_are_named() {
        for (value, field) in [
            (json!({"max_tokens": 0}), "max_tokens"),
            (json!({"max_tokens": -1}), "max_tokens"),
            (json!({"max_tokens": 1e30}), "max_tokens"),
            (json!({"max_completion_tokens": 0}), "max_completion_tokens"),
            (json!({"min_tokens": -1}), "min_tokens"),
            (json!({"n": 0}), "n"),
            (json!({"best_of": 2}), "best_of"),
            (json!({"temperature": 2.5}), "temperature"),
            (json!({"temperature": "hot"}), "temperature"),
            (json!({"top_k": -2}), "top_k"),
            (json!({"stop": [1]}), "stop"),
            (json!({"stop": vec!["x"; 17]}), "stop"),
            (json!({"stop_token_ids": [-1]}), "stop_token_ids[0]"),
            (json!({"stop_token_ids": vec![1; 257]}), "stop_token_ids"),
            (json!({"logit_bias": {"1": 101}}), "logit_bias.1"),
            (json!({"logit_bias": {"one": 1}}), "logit_bias.one"),
            (json!({"ignore_eos": "yes"}), "ignore_eos"),
            (json!({"priority": 1e12}), "priority"),
            (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
            (
                json!({"prompt_logprobs": 1, "stream": true}),
                "prompt_logprobs",
            ),
            (
                json!({"stream_options": {"what": 1}}),
                "stream_options.what",
            ),
            (json!({"stream_options": {}}), "stream_options"),
            (json!({"reasoning_effort": "extreme"}), "reasoning_effort"),
            (json!({"include_reasoning": "no"}), "include_reasoning"),
        ] {
            let body = check(value.clone()).err().expect("refused").body();
            assert_eq!(body["error"]["param"], field, "{value}: {body}");
        }
    }

    #[test]
    fn figures_come_with_the_chunks_that_were_asked_for() {
        for (options, usage) in [
            (Value::Null, UsageChunks::None),
            (json!({}), UsageChunks::None),
            (json!({"continuous_usage_stats": true}), UsageChunks::None),
            (json!({"include_usage": true}), UsageChunks::Last),
            (
                json!({"include_usage": true, "continuous_usage_stats": true}),
                UsageChunks::Every,
            ),
        ] {
            let body = json!({"stream": true, "stream_options": options});
            let (parameters, _) = take(body).expect("valid");
            let delivery = parameters.delivery().expect("valid");
            assert_eq!(delivery, Delivery::Stream { usage });
        }
    }
}
