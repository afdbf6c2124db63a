//! A reply in the forms that OpenAI has for chats and completions.

use std::collections::TryReserveError;
use std::sync::Arc;

use axum::response::Response;
use lacuna_models::Model;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::app::{App, seconds_now};
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::chunks::Chunks;
use crate::openai::logprobs::{PromptScores, Scores, ScoresText, TextPlace, TokenNames};
use crate::openai::parameters::Delivery;
use crate::reply::streams::Streams;
use crate::reply::whole::{self, Gathered};
use crate::reply::{Ended, Figures, Finish, Part, Prompted, Reader, events};
use crate::structured::calls::Call;

/// Which of the two forms the reply has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    Chat,
    /// Completions.
    Text,
}

/// What is the same in every part of a reply.
#[derive(Debug)]
pub(crate) struct Form {
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model_name: Arc<str>,
    pub(crate) dialect: Dialect,
    delivery: Delivery,
    /// The likeliest tokens that are listed in the place of each token of the prompt, if it is to be
    /// scored beside the reply.
    prompt_logprobs: Option<usize>,
    /// Whether scored tokens are called by their ids.
    token_ids: bool,
    model: Arc<Model>,
    /// Where memory for a whole reply is taken.
    bodies: Bodies,
    ignored: Ignored,
}

/// A choice, or a part of one, as it is sent.
#[derive(Serialize)]
pub(crate) struct ChoiceText<'a> {
    pub(crate) index: usize,
    #[serde(flatten)]
    pub(crate) content: Content<'a>,
    pub(crate) logprobs: Option<ScoresText>,
    pub(crate) finish_reason: Option<&'static str>,
    pub(crate) stop_reason: Option<&'a Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) prompt_logprobs: Option<&'a RawValue>,
}

/// What a choice says.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Content<'a> {
    Message(Message<'a>),
    /// What a part adds to a message.
    Delta(Value),
    Text(&'a str),
}

#[derive(Serialize)]
pub(crate) struct Message<'a> {
    role: &'static str,
    content: Option<&'a str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    reasoning_content: &'a str,
    refusal: (),
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<Value>,
}

#[derive(Serialize)]
struct Whole<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceText<'a>>,
    usage: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_logprobs: Option<&'a RawValue>,
}

/// Sends the reply to a request as its form says.
pub(crate) async fn send(
    streams: Streams,
    reader: Reader,
    form: Form,
) -> Result<Response, ApiError> {
    let ignored = form.ignored.clone();
    let mut response = match form.delivery {
        Delivery::Whole => send_whole(streams, reader, &form).await?,
        Delivery::Stream { usage } => {
            let chunks = Chunks::new(form, usage, reader.choices());
            events::respond(streams, reader, chunks).await?
        }
    };
    ignored.attach(&mut response);
    Ok(response)
}

/// Waits for the end and sends everything at once.
async fn send_whole(
    streams: Streams,
    mut reader: Reader,
    form: &Form,
) -> Result<Response, ApiError> {
    let scores = || form.empty_scores(TextPlace::default());
    let (mut gathered, memory) =
        whole::gather(streams, &mut reader, scores, form.names(), &form.bodies).await?;
    let scores: Vec<_> = gathered
        .iter_mut()
        .map(|choice| std::mem::take(&mut choice.scores).close())
        .collect();
    let prompts = form.prompt_scores(&reader)?;
    let whole = form.whole(&gathered, scores, &prompts, &reader);
    let written = memory.write(whole).await?;
    drop((gathered, prompts));
    Ok(written.respond())
}

/// Tokens, as they are told.
pub(super) fn usage(figures: &Figures) -> Value {
    let mut json = json!({
        "prompt_tokens": figures.prompt_tokens,
        "completion_tokens": figures.generated_tokens,
        "total_tokens": figures.prompt_tokens + figures.generated_tokens,
        "prompt_tokens_details": figures.cached(),
    });
    if let Some(tokens) = figures.reasoning_tokens {
        json["completion_tokens_details"] = json!({"reasoning_tokens": tokens});
    }
    json
}

pub(super) fn finish_reason(finish: &Finish) -> &'static str {
    match finish.reason {
        Ended::MaxTokens | Ended::ContextFull => "length",
        Ended::Calls => "tool_calls",
        Ended::Stop => "stop",
    }
}

impl Form {
    pub(crate) fn new(app: &App, id: String, dialect: Dialect, delivery: Delivery) -> Self {
        Self {
            id,
            created: seconds_now(),
            model_name: Arc::clone(&app.model_name),
            dialect,
            delivery,
            prompt_logprobs: None,
            token_ids: false,
            model: Arc::clone(app.model()),
            bodies: app.bodies().clone(),
            ignored: Ignored::default(),
        }
    }

    /// The same, with the scores of prompts beside the reply, if they are wanted.
    pub(crate) fn scoring_prompts(self, prompt_logprobs: Option<usize>) -> Self {
        Self {
            prompt_logprobs,
            ..self
        }
    }

    /// The same, with scored tokens called by their ids, if that is wanted.
    pub(crate) fn naming_ids(self, token_ids: bool) -> Self {
        Self { token_ids, ..self }
    }

    fn names(&self) -> TokenNames<'_> {
        match self.token_ids {
            true => TokenNames::ids(&self.model),
            false => TokenNames::texts(&self.model),
        }
    }

    /// The same, for a request of which that has no effect.
    pub(crate) fn ignoring(self, ignored: Ignored) -> Self {
        Self { ignored, ..self }
    }

    /// The scores of a part's tokens, the first of which stands at `place`, and where the next part's does.
    ///
    /// # Errors
    /// When the system refuses memory.
    pub(super) fn scores(
        &self,
        part: &Part,
        place: TextPlace,
    ) -> Result<(Option<ScoresText>, TextPlace), TryReserveError> {
        let mut scores = self.empty_scores(place);
        for scored in &part.scored {
            scores.push(self.names(), scored)?;
        }
        let next = scores.next();
        Ok((scores.close(), next))
    }

    /// Scores of a text whose first token stands at `place`.
    fn empty_scores(&self, place: TextPlace) -> Scores {
        match self.dialect {
            Dialect::Chat => Scores::of_chat(),
            Dialect::Text => Scores::of_text_from(place),
        }
    }

    /// For each prompt its scores, if they are wanted beside the reply.
    fn prompt_scores(
        &self,
        reader: &Reader,
    ) -> Result<Vec<Option<Box<RawValue>>>, TryReserveError> {
        let Some(top) = self.prompt_logprobs else {
            return Ok(vec![None; reader.prompts.len()]);
        };
        let one = |prompt: &Prompted| {
            let mut scores = PromptScores::new(top);
            for scored in &prompt.scored {
                scores.push(self.names(), scored)?;
            }
            Ok(Some(scores.close()))
        };
        reader.prompts.iter().map(one).collect()
    }

    fn whole<'a>(
        &'a self,
        gathered: &'a [Gathered],
        scores: Vec<Option<ScoresText>>,
        prompts: &'a [Option<Box<RawValue>>],
        reader: &Reader,
    ) -> Whole<'a> {
        let chat = self.dialect == Dialect::Chat;
        let each = gathered.len() / prompts.len();
        let choices = gathered.iter().zip(scores).enumerate();
        let choices = choices.map(|(index, (choice, logprobs))| ChoiceText {
            index,
            content: match chat {
                true => Content::Message(message(choice)),
                false => Content::Text(&choice.text),
            },
            logprobs,
            finish_reason: choice.finish.as_ref().map(finish_reason),
            stop_reason: choice.finish.as_ref().map(|finish| &finish.stop),
            prompt_logprobs: match chat {
                true => None,
                false => prompts[index / each].as_deref(),
            },
        });
        Whole {
            id: &self.id,
            object: match self.dialect {
                Dialect::Chat => "chat.completion",
                Dialect::Text => "text_completion",
            },
            created: self.created,
            model: &self.model_name,
            choices: choices.collect(),
            usage: usage(&reader.figures),
            prompt_logprobs: match prompts {
                [prompt] if chat => prompt.as_deref(),
                _ => None,
            },
        }
    }
}

fn message(choice: &Gathered) -> Message<'_> {
    let shown = choice.calls.is_empty() || !choice.text.is_empty();
    Message {
        role: "assistant",
        content: shown.then_some(choice.text.as_str()),
        reasoning_content: &choice.reasoning,
        refusal: (),
        tool_calls: choice.calls.iter().map(Call::json).collect(),
    }
}
