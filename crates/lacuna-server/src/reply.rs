//! From the engine's events to a reply: what is the same in every interface.
//!
//! [`Reader`] turns events into [`Part`]s: what is thought, said and called. An interface writes them
//! as they come ([`events::Writer`]), or gathered ([`whole`]).

use std::time::Duration;

use lacuna_engine::{Difference, Event, FinishReason, Miss, PromptToken, Request};
use serde_json::{Value, json};

pub(crate) mod events;
pub(crate) mod parts;
pub(crate) mod streams;
pub(crate) mod whole;

use crate::http::error::ApiError;
use crate::openai::logprobs::Scored;
use crate::reply::parts::{PartReader, Parts};
use crate::structured::calls::Call;

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
    pub(crate) reason: Ended,
    /// The stop string or token that came up, as vLLM tells it.
    pub(crate) stop: Value,
}

/// What a choice came to its end by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ended {
    /// As many tokens as were asked for.
    MaxTokens,
    /// No room in the context for another.
    ContextFull,
    /// It calls tools.
    Calls,
    /// The model is done, or was stopped.
    Stop,
}

/// Tokens of a reply, and the longest times that one of its choices took, as the engine tells them: when an event
/// is read says little of when it came.
#[derive(Debug, Clone, Default)]
pub(crate) struct Figures {
    pub(crate) prompt_tokens: usize,
    pub(crate) reused_tokens: usize,
    /// Why no more of the prompt was reused.
    pub(crate) miss: Option<Miss>,
    /// Where the prompt leaves what is kept, if it does.
    pub(crate) difference: Option<Difference>,
    pub(crate) generated_tokens: usize,
    /// Those that were generated in thoughts, if the model tells its thoughts from what it says.
    pub(crate) reasoning_tokens: Option<usize>,
    pub(crate) prompt_time: Duration,
    pub(crate) generation_time: Duration,
}

impl Figures {
    /// Of the prompt, what was found in the prefix cache, and why it was no more: the tokens from there
    /// on had to be computed.
    pub(crate) fn cached(&self) -> Value {
        let mut cached = json!({"cached_tokens": self.reused_tokens});
        if let Some(miss) = self.miss {
            cached["cache_miss"] = miss.name().into();
        }
        if let Some(difference) = self.difference() {
            cached["cache_difference"] = difference;
        }
        cached
    }

    /// Where the prompt leaves what is kept: so many tokens agree, and what it says from there on.
    pub(crate) fn difference(&self) -> Option<Value> {
        let difference = self.difference.as_ref()?;
        Some(json!({"at": difference.at, "text": difference.text}))
    }
}

/// Turns events into parts.
#[derive(Debug)]
pub(crate) struct Reader {
    choices: Vec<Choice>,
    pub(crate) prompts: Vec<Prompted>,
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
pub(crate) struct Prompted {
    note: Note,
    pub(crate) scored: Vec<Scored>,
    /// Alternatives to each of its tokens that the reply begins with, if it does with them.
    top: Option<usize>,
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
    /// For `prompts`, each of them with as many choices as `request` asks for. The requests of one
    /// reply differ in their prompts alone.
    pub(crate) fn new(request: Option<&Request>, prompts: &[Note], parts: PartReader) -> Self {
        let figures = Figures {
            reasoning_tokens: parts.knows_thoughts().then_some(0),
            ..Figures::default()
        };
        let choice = |index| Choice {
            parts: parts.clone().of_choice(index),
            called: 0,
            begun: false,
        };
        let each = request.map_or(1, |request| request.choices.get());
        let top = request.and_then(|request| request.logprobs);
        let choices: Vec<Choice> = (0..each * prompts.len()).map(choice).collect();
        Self {
            unfinished: choices.len(),
            choices,
            prompts: prompts
                .iter()
                .map(|note| Prompted::new(note, top))
                .collect(),
            stops: request.map_or_else(Vec::new, |request| request.limits.stop.clone()),
            figures,
        }
    }

    /// Choices of all prompts.
    pub(crate) fn choices(&self) -> usize {
        self.choices.len()
    }

    /// What an event of prompt number `prompt` adds. Choices are checked against the request's number.
    pub(crate) fn read(&mut self, prompt: usize, event: Event) -> Result<Option<Part>, ApiError> {
        let each = self.choices.len() / self.prompts.len();
        let part = match event {
            Event::Started {
                prompt_tokens,
                reused_tokens,
                miss,
                difference,
            } => {
                self.figures.prompt_tokens += prompt_tokens;
                self.figures.reused_tokens += reused_tokens;
                self.figures.miss = miss;
                self.figures.difference = difference;
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
                usage,
            } => {
                self.figures.prompt_time = self.figures.prompt_time.max(usage.prompt_time);
                self.figures.generation_time =
                    self.figures.generation_time.max(usage.generation_time);
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
                FinishReason::MaxTokens => Ended::MaxTokens,
                FinishReason::ContextFull => Ended::ContextFull,
                _ if self.choices[choice].called > 0 => Ended::Calls,
                _ => Ended::Stop,
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
