//! What a request gives, as plain Python objects.

use lacuna_engine::{Event, FinishReason, TokenLogprobs, Usage};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;

use crate::problem::Problem;

/// `(of the token, its place among all, [(token, log-probability)])`.
type Logprobs = (f32, usize, Vec<(u32, f32)>);

fn logprobs(found: TokenLogprobs) -> Logprobs {
    (found.chosen, found.rank, found.top)
}

/// Why a text ended, in vLLM's words, and the stop string or token that ended it.
pub(crate) fn reason(
    py: Python<'_>,
    reason: FinishReason,
    stops: &[String],
) -> PyResult<(&'static str, Py<PyAny>)> {
    let stop = match reason {
        FinishReason::StopString(stop) => stops.get(stop).into_py_any(py)?,
        FinishReason::StopToken(token) => token.into_py_any(py)?,
        _ => py.None(),
    };
    let name = match reason {
        FinishReason::MaxTokens | FinishReason::ContextFull => "length",
        _ => "stop",
    };
    Ok((name, stop))
}

/// One event as a tuple that begins with its name.
pub(crate) fn event(py: Python<'_>, event: Event, stops: &[String]) -> PyResult<Py<PyAny>> {
    match event {
        Event::Started {
            prompt_tokens,
            reused_tokens,
            miss,
            difference,
        } => (
            "started",
            prompt_tokens,
            reused_tokens,
            miss.map(|miss| miss.name()),
            difference.map(|difference| (difference.at, difference.text)),
        )
            .into_py_any(py),
        Event::PromptScored(scored) => {
            let scored = scored.into_iter();
            let scored: Vec<_> = scored.map(|it| (it.token, logprobs(it.logprobs))).collect();
            ("prompt", scored).into_py_any(py)
        }
        Event::Token {
            choice,
            token,
            text,
            logprobs: found,
        } => ("token", choice, token, text, found.map(logprobs)).into_py_any(py),
        Event::Finished {
            choice,
            reason: why,
            text,
            usage,
        } => {
            let (name, stop) = reason(py, why, stops)?;
            ("finished", choice, name, stop, text, usage.generated_tokens).into_py_any(py)
        }
        Event::Failed(failure) => Err(Problem::from(lacuna_server::Problem::from(failure)).into()),
    }
}

/// A choice as far as it has come.
#[derive(Default)]
pub(crate) struct Choice {
    text: String,
    tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
    finish: Option<FinishReason>,
}

/// The whole of what a request gave.
#[derive(Default)]
pub(crate) struct Gathered {
    pub(crate) stops: Vec<String>,
    prompt_tokens: usize,
    reused_tokens: usize,
    scored: Vec<(u32, Logprobs)>,
    choices: Vec<Choice>,
}

impl Gathered {
    pub(crate) fn new(choices: usize, stops: Vec<String>) -> Self {
        Self {
            stops,
            choices: std::iter::repeat_with(Choice::default)
                .take(choices)
                .collect(),
            ..Self::default()
        }
    }

    /// Takes an event up.
    pub(crate) fn add(&mut self, event: Event) -> Result<(), Problem> {
        match event {
            Event::Started {
                prompt_tokens,
                reused_tokens,
                ..
            } => (self.prompt_tokens, self.reused_tokens) = (prompt_tokens, reused_tokens),
            Event::PromptScored(scored) => {
                let scored = scored.into_iter();
                self.scored
                    .extend(scored.map(|it| (it.token, logprobs(it.logprobs))));
            }
            Event::Token {
                choice,
                token,
                text,
                logprobs: found,
            } => {
                let choice = &mut self.choices[choice];
                choice.tokens.push(token);
                choice.text += &text;
                choice.logprobs.extend(found.map(logprobs));
            }
            Event::Finished {
                choice,
                reason,
                text,
                usage: Usage { .. },
            } => {
                let choice = &mut self.choices[choice];
                choice.text += &text;
                choice.finish = Some(reason);
            }
            Event::Failed(failure) => return Err(lacuna_server::Problem::from(failure).into()),
        }
        Ok(())
    }

    /// Whether every choice has ended.
    pub(crate) fn is_whole(&self) -> bool {
        self.choices.iter().all(|choice| choice.finish.is_some())
    }

    /// `(prompt tokens, cached tokens, scored prompt, choices)`.
    pub(crate) fn into_python(self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let stops = self.stops;
        let choices = self.choices.into_iter().map(|choice| {
            let (name, stop) = match choice.finish {
                Some(why) => reason(py, why, &stops)?,
                None => ("abort", py.None()),
            };
            (choice.text, choice.tokens, choice.logprobs, name, stop).into_py_any(py)
        });
        let choices = choices.collect::<PyResult<Vec<_>>>()?;
        (self.prompt_tokens, self.reused_tokens, self.scored, choices).into_py_any(py)
    }
}
