//! From a request's events to its reply: what is the same whether it is sent whole or as a stream.

use std::collections::TryReserveError;
use std::sync::Arc;

use axum::response::Response;
use lacuna_engine::{Event, FinishReason, PromptToken, Request};
use lacuna_models::Model;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

pub(crate) mod parts;
mod whole;

use crate::app::{App, seconds_now};
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::http::ignored::Ignored;
use crate::openai::events;
use crate::openai::logprobs::{Scored, Scores, ScoresText};
use crate::openai::parameters::Delivery;
use crate::openai::reply::parts::{PartReader, Parts};
use crate::openai::streams::Streams;
use crate::structured::calls::Call;

/// Which of the two interfaces the reply is for.
#[derive(Debug, Clone)]
pub(crate) enum Dialect {
    /// Chats, with what takes the text of a reply apart.
    Chat { parts: PartReader },
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
    /// Choices of each prompt. They are counted through, prompt by prompt.
    choices: usize,
    prompts: Vec<Note>,
    /// The likeliest tokens that are listed in the place of each token of the prompt, if it is to be
    /// scored beside the reply.
    prompt_logprobs: Option<usize>,
    /// Alternatives to each token that are wanted in the reply.
    logprobs: Option<usize>,
    stops: Vec<String>,
    model: Arc<Model>,
    /// Where memory for a whole reply is taken.
    bodies: Bodies,
    ignored: Ignored,
}

/// What a reply has to say of a prompt.
#[derive(Debug, Clone, Default)]
pub(crate) struct Note {
    /// What the reply begins with.
    pub(crate) echo: Option<String>,
    /// The first token, which has no probability.
    pub(crate) first: Option<u32>,
}

/// What an event adds to one choice.
#[derive(Debug, Default)]
pub(crate) struct Part {
    pub(crate) choice: usize,
    /// What the model thinks.
    pub(crate) reasoning: String,
    pub(crate) text: String,
    pub(crate) calls: Vec<Call>,
    pub(crate) scored: Vec<Scored>,
    pub(crate) finish: Option<Finish>,
}

/// How a choice ended.
#[derive(Debug, Clone)]
pub(crate) struct Finish {
    pub(crate) reason: &'static str,
    /// The stop string or token that came up, as vLLM tells it.
    pub(crate) stop: Value,
}

/// Tokens of a reply.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Figures {
    prompt_tokens: usize,
    reused_tokens: usize,
    generated_tokens: usize,
    /// Those that were generated in thoughts, if the model tells its thoughts from what it says.
    reasoning_tokens: Option<usize>,
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

/// Turns events into parts.
#[derive(Debug)]
pub(crate) struct Reader {
    choices: Vec<Choice>,
    prompts: Vec<Prompted>,
    stops: Vec<String>,
    unfinished: usize,
    pub(crate) figures: Figures,
}

/// A choice as far as it has come.
#[derive(Debug, Clone)]
struct Choice {
    /// Takes the text apart.
    parts: PartReader,
    called: usize,
    begun: bool,
}

/// A prompt as far as it has been scored.
#[derive(Debug)]
struct Prompted {
    note: Note,
    scored: Vec<Scored>,
    /// Alternatives to each of its tokens that the reply begins with, if it does with them.
    top: Option<usize>,
}

/// Sends the reply to a request as its form says.
pub(crate) async fn send(streams: Streams, form: Form) -> Result<Response, ApiError> {
    let ignored = form.ignored.clone();
    let mut response = match form.delivery {
        Delivery::Whole => whole::respond(streams, &form).await?,
        Delivery::Stream { usage } => events::respond(streams, form, usage).await?,
    };
    ignored.attach(&mut response);
    Ok(response)
}

/// The engine went away before the request was done.
pub(crate) fn broken_off() -> ApiError {
    ApiError::internal("the engine stopped before the reply was finished")
}

impl Part {
    fn of(choice: usize) -> Self {
        Self {
            choice,
            ..Self::default()
        }
    }
}

impl Reader {
    /// What an event of prompt number `prompt` adds. Choices are checked against the request's number.
    pub(crate) fn read(&mut self, prompt: usize, event: Event) -> Result<Option<Part>, ApiError> {
        let each = self.choices.len() / self.prompts.len();
        let part = match event {
            Event::Started {
                prompt_tokens,
                reused_tokens,
                ..
            } => {
                self.figures.prompt_tokens += prompt_tokens;
                self.figures.reused_tokens += reused_tokens;
                return Ok(None);
            }
            Event::PromptScored(scored) => {
                self.prompts[prompt].add(scored);
                return Ok(None);
            }
            Event::Failed(failure) => return Err(failure.into()),
            Event::Token {
                choice,
                token,
                text,
                logprobs,
            } => {
                let mut part = self.part(prompt, prompt * each + choice);
                if logprobs.is_some() {
                    part.scored.push(Scored { token, logprobs });
                }
                let thinks = self.choices[part.choice].parts.is_reasoning();
                self.add(&mut part, |parts| parts.push(&text));
                self.figures.generated_tokens += 1;
                if let Some(tokens) = &mut self.figures.reasoning_tokens {
                    *tokens += usize::from(thinks);
                }
                part
            }
            Event::Finished {
                choice,
                reason,
                text,
                ..
            } => {
                let mut part = self.part(prompt, prompt * each + choice);
                self.add(&mut part, |parts| parts.finish(&text));
                part.finish = Some(self.finish(part.choice, reason));
                self.unfinished -= 1;
                part
            }
        };
        Ok(Some(part))
    }

    /// What an event of a choice adds to; the first begins with what is to be repeated of the prompt.
    fn part(&mut self, prompt: usize, choice: usize) -> Part {
        let mut part = Part::of(choice);
        let prompt = &self.prompts[prompt];
        let first = !std::mem::replace(&mut self.choices[choice].begun, true);
        if let Some(echo) = prompt.note.echo.as_ref().filter(|_| first) {
            part.text = echo.clone();
            part.scored = prompt.echoed();
        }
        part
    }

    /// Adds to a part what its text turns out to be.
    fn add(&mut self, part: &mut Part, read: impl FnOnce(&mut PartReader) -> Parts) {
        let choice = &mut self.choices[part.choice];
        let parts = read(&mut choice.parts);
        choice.called += parts.calls.len();
        part.reasoning += &parts.reasoning;
        part.text += &parts.text;
        part.calls.extend(parts.calls);
    }

    fn finish(&self, choice: usize, reason: FinishReason) -> Finish {
        Finish {
            reason: match reason {
                FinishReason::MaxTokens | FinishReason::ContextFull => "length",
                _ if self.choices[choice].called > 0 => "tool_calls",
                _ => "stop",
            },
            stop: match reason {
                FinishReason::StopString(stop) => self.stops[stop].as_str().into(),
                FinishReason::StopToken(token) => token.into(),
                _ => Value::Null,
            },
        }
    }

    /// Calls that choice has made so far.
    pub(crate) fn called(&self, choice: usize) -> usize {
        self.choices[choice].called
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.unfinished == 0
    }
}

impl Prompted {
    fn new(note: &Note, top: Option<usize>) -> Self {
        let first = note.first.map(|token| Scored {
            token,
            logprobs: None,
        });
        Self {
            note: note.clone(),
            scored: first.into_iter().collect(),
            top,
        }
    }

    fn add(&mut self, scored: Vec<PromptToken>) {
        let scored = scored.into_iter().map(|scored| Scored {
            token: scored.token,
            logprobs: Some(scored.logprobs),
        });
        self.scored.extend(scored);
    }

    /// Its tokens as those of a reply, with as many alternatives as that has.
    fn echoed(&self) -> Vec<Scored> {
        let Some(top) = self.top else {
            return Vec::new();
        };
        let mut scored = self.scored.clone();
        for logprobs in scored
            .iter_mut()
            .filter_map(|scored| scored.logprobs.as_mut())
        {
            logprobs.top.truncate(top);
        }
        scored
    }
}

impl Figures {
    pub(crate) fn json(self) -> Value {
        let mut json = json!({
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.generated_tokens,
            "total_tokens": self.prompt_tokens + self.generated_tokens,
            "prompt_tokens_details": {"cached_tokens": self.reused_tokens},
        });
        if let Some(tokens) = self.reasoning_tokens {
            json["completion_tokens_details"] = json!({"reasoning_tokens": tokens});
        }
        json
    }
}

impl Form {
    pub(crate) fn new(
        app: &App,
        id: String,
        dialect: Dialect,
        delivery: Delivery,
        requests: &[Request],
    ) -> Self {
        // They differ in their prompts alone.
        let first = requests.first();
        let stops = first.map(|request| request.limits.stop.clone());
        Self {
            id,
            created: seconds_now(),
            model_name: Arc::clone(&app.model_name),
            dialect,
            delivery,
            choices: first.map_or(1, |request| request.choices.get()),
            prompts: vec![Note::default(); requests.len()],
            prompt_logprobs: None,
            logprobs: first.and_then(|request| request.logprobs),
            stops: stops.unwrap_or_default(),
            model: Arc::clone(app.model()),
            bodies: app.bodies().clone(),
            ignored: Ignored::default(),
        }
    }

    /// The same, with what it says of each prompt, and whether they are scored beside the reply.
    pub(crate) fn about(self, prompts: Vec<Note>, prompt_logprobs: Option<usize>) -> Self {
        Self {
            prompts,
            prompt_logprobs,
            ..self
        }
    }

    /// The same, for a request of which that has no effect.
    pub(crate) fn ignoring(self, ignored: Ignored) -> Self {
        Self { ignored, ..self }
    }

    pub(crate) fn reader(&self) -> Reader {
        let parts = match &self.dialect {
            Dialect::Chat { parts } => parts.clone(),
            Dialect::Text => PartReader::none(),
        };
        let figures = Figures {
            reasoning_tokens: parts.knows_thoughts().then_some(0),
            ..Figures::default()
        };
        let choice = Choice {
            parts,
            called: 0,
            begun: false,
        };
        let prompts = self.prompts.iter();
        Reader {
            choices: vec![choice; self.choices()],
            prompts: prompts
                .map(|note| Prompted::new(note, self.logprobs))
                .collect(),
            stops: self.stops.clone(),
            unfinished: self.choices(),
            figures,
        }
    }

    /// Choices of all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.choices * self.prompts.len()
    }

    /// The scores of a part's tokens, and the character at which the next part's text begins.
    ///
    /// # Errors
    /// When the system refuses memory.
    pub(crate) fn scores(
        &self,
        part: &Part,
        offset: usize,
    ) -> Result<(Option<ScoresText>, usize), TryReserveError> {
        let mut scores = match self.dialect {
            Dialect::Chat { .. } => Scores::of_chat(),
            Dialect::Text => Scores::of_text_from(offset),
        };
        for scored in &part.scored {
            scores.push(&self.model, scored)?;
        }
        let next = scores.next_offset();
        Ok((scores.close(), next))
    }
}
