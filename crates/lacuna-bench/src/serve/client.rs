//! A client of an OpenAI-compatible server: one streamed completion or chat, timed.

use std::io::{BufRead, BufReader};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use ureq::Agent;

use super::load::Arrival;
use crate::arguments::LengthArgs;

/// Requests to one server.
#[derive(Debug, Clone)]
pub(crate) struct Client {
    agent: Agent,
    url: String,
    key: Option<String>,
    model: String,
    temperature: f64,
    ignore_eos: bool,
}

/// A reply and the moments it came in.
#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) asked: Instant,
    pub(crate) ended: Instant,
    /// When each piece of text came.
    pub(crate) pieces: Vec<Instant>,
    pub(crate) prompt_tokens: u64,
    /// If the server says how many it found in its cache.
    pub(crate) reused_tokens: Option<u64>,
    pub(crate) generated_tokens: u64,
}

/// How a request ended.
#[derive(Debug)]
pub(crate) enum Outcome {
    Replied(Reply),
    /// The server said that it is full, and when to come back.
    Refused {
        retry_after: Option<Duration>,
    },
    /// The client broke off, as it was told to.
    HungUp,
}

impl Client {
    /// A client of the server at `url` whose replies are as `lengths` say.
    pub(crate) fn new(url: &str, key: Option<&str>, lengths: &LengthArgs) -> Result<Self> {
        Ok(Self {
            temperature: lengths.temperature,
            ignore_eos: lengths.ignore_eos,
            ..Self::connect(url, key)?
        })
    }

    /// A client of the server at `url`, asking for the first model it lists, and always for the likeliest token.
    pub(crate) fn connect(url: &str, key: Option<&str>) -> Result<Self> {
        let config = Agent::config_builder().http_status_as_error(false);
        let mut client = Self {
            agent: config.build().into(),
            url: url.trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            key: key.map(str::to_owned),
            model: String::new(),
            temperature: 0.0,
            ignore_eos: false,
        };
        let models = client.get("/v1/models")?;
        let model = models.pointer("/data/0/id").and_then(Value::as_str);
        client.model = model.context("the server lists no model")?.to_owned();
        Ok(client)
    }

    pub(crate) fn model(&self) -> &str {
        &self.model
    }

    /// The JSON at `path`.
    pub(crate) fn get(&self, path: &str) -> Result<Value> {
        let mut request = self.agent.get(format!("{}{path}", self.url));
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let mut response = request
            .call()
            .with_context(|| format!("cannot reach {}", self.url))?;
        if !response.status().is_success() {
            bail!("{path}: the server answered {}", response.status());
        }
        Ok(serde_json::from_reader(response.body_mut().as_reader())?)
    }

    /// Tokens of `text`, where the server counts them for nothing.
    pub(crate) fn tokens(&self, text: &str) -> Option<usize> {
        let response = self.post("/tokenize", &json!({"prompt": text})).ok()?;
        let success = response.status().is_success();
        let counted: Value = serde_json::from_reader(response.into_body().into_reader()).ok()?;
        success.then(|| counted["count"].as_u64().map(|count| count as usize))?
    }

    fn post(&self, path: &str, body: &Value) -> Result<ureq::http::Response<ureq::Body>> {
        let mut request = self
            .agent
            .post(format!("{}{path}", self.url))
            .header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        Ok(request.send(body.to_string())?)
    }

    /// Asks for a completion and reads it to its end, or until `each`, which is called with every
    /// piece of text, breaks off.
    pub(crate) fn complete(
        &self,
        question: &Arrival,
        each: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Outcome> {
        let body = json!({"prompt": question.prompt, "max_tokens": question.max_tokens});
        let says = |choice: &Value| is_said(&choice["text"]);
        self.ask("/v1/completions", body, says, each)
    }

    /// Asks for the reply to a chat and reads it to its end. `body` is what is asked, but for the model and how it
    /// is sampled and sent.
    pub(crate) fn chat(&self, body: Value) -> Result<Outcome> {
        let says = |choice: &Value| {
            let delta = &choice["delta"];
            let parts = ["content", "reasoning_content", "tool_calls"];
            parts.iter().any(|part| is_said(&delta[part]))
        };
        let each = || ControlFlow::Continue(());
        self.ask("/v1/chat/completions", body, says, each)
    }

    fn ask(
        &self,
        path: &str,
        mut body: Value,
        says: impl Fn(&Value) -> bool,
        each: impl FnMut() -> ControlFlow<()>,
    ) -> Result<Outcome> {
        body["model"] = json!(self.model);
        body["temperature"] = json!(self.temperature);
        body["stream"] = json!(true);
        body["stream_options"] = json!({"include_usage": true});
        // Servers that do not know it may refuse it.
        if self.ignore_eos {
            body["ignore_eos"] = json!(true);
        }
        let asked = Instant::now();
        let mut response = self.post(path, &body)?;
        match response.status().as_u16() {
            200 => {}
            429 | 503 => {
                let header = response.headers().get("Retry-After");
                let seconds = header.and_then(|value| value.to_str().ok()?.parse().ok());
                let retry_after = seconds.map(Duration::from_secs);
                return Ok(Outcome::Refused { retry_after });
            }
            status => {
                let text = response.body_mut().read_to_string().unwrap_or_default();
                bail!("the server answered {status}: {text}");
            }
        }
        let lines = BufReader::new(response.into_body().into_reader()).lines();
        read(lines, asked, says, each)
    }
}

/// Whether a part of a reply has anything in it.
fn is_said(part: &Value) -> bool {
    match part {
        Value::String(text) => !text.is_empty(),
        Value::Array(calls) => !calls.is_empty(),
        _ => false,
    }
}

fn read(
    lines: impl Iterator<Item = std::io::Result<String>>,
    asked: Instant,
    says: impl Fn(&Value) -> bool,
    mut each: impl FnMut() -> ControlFlow<()>,
) -> Result<Outcome> {
    let mut reply = Reply::new(asked);
    for line in lines {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            reply.ended = Instant::now();
            return Ok(Outcome::Replied(reply));
        }
        let now = Instant::now();
        let chunk: Value = serde_json::from_str(data)?;
        if let Some(error) = chunk.get("error") {
            bail!("the reply broke off: {error}");
        }
        reply.note_usage(&chunk["usage"]);
        if says(&chunk["choices"][0]) {
            reply.pieces.push(now);
            if each().is_break() {
                return Ok(Outcome::HungUp);
            }
        }
    }
    bail!("the reply ended without [DONE]")
}

impl Reply {
    pub(crate) fn new(asked: Instant) -> Self {
        Self {
            asked,
            ended: asked,
            pieces: Vec::new(),
            prompt_tokens: 0,
            reused_tokens: None,
            generated_tokens: 0,
        }
    }

    /// From asking to the first text.
    pub(crate) fn first_token(&self) -> Option<Duration> {
        self.pieces.first().map(|&first| first - self.asked)
    }

    /// From asking to the end.
    pub(crate) fn seconds(&self) -> f64 {
        (self.ended - self.asked).as_secs_f64()
    }

    /// Beginning and end of the times between pieces.
    pub(crate) fn gaps(&self) -> impl Iterator<Item = (Instant, Instant)> {
        self.pieces.windows(2).map(|pair| (pair[0], pair[1]))
    }

    fn note_usage(&mut self, usage: &Value) {
        let number = |path: &str| usage.pointer(path).and_then(Value::as_u64);
        if let Some(tokens) = number("/completion_tokens") {
            self.generated_tokens = tokens;
            self.prompt_tokens = number("/prompt_tokens").unwrap_or(0);
            self.reused_tokens = number("/prompt_tokens_details/cached_tokens");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &str, each: impl FnMut() -> ControlFlow<()>) -> Result<Outcome> {
        let lines = text.lines().map(|line| Ok(line.to_owned()));
        read(
            lines,
            Instant::now(),
            |choice| is_said(&choice["text"]),
            each,
        )
    }

    const WHOLE: &str = "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\n\
         data: {\"choices\":[{\"text\":\"\"}]}\n\n\
         data: {\"choices\":[{\"text\":\"b\"}]}\n\n\
         data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
         \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n";

    #[test]
    fn tokens_are_timed_and_figures_kept() {
        let found = outcome(WHOLE, || ControlFlow::Continue(())).expect("whole");
        let Outcome::Replied(reply) = found else {
            panic!("{found:?}");
        };
        assert!(reply.first_token().is_some());
        assert_eq!(reply.gaps().count(), 1);
        assert_eq!((reply.prompt_tokens, reply.generated_tokens), (7, 3));
        assert_eq!(reply.reused_tokens, Some(4));
    }

    #[test]
    fn a_client_that_hangs_up_reads_no_further() {
        let mut pieces = 0;
        let found = outcome(WHOLE, || {
            pieces += 1;
            ControlFlow::Break(())
        });
        assert!(matches!(found, Ok(Outcome::HungUp)), "{found:?}");
        assert_eq!(pieces, 1);
    }

    #[test]
    fn a_reply_that_breaks_off_is_an_error() {
        let whole = || ControlFlow::Continue(());
        outcome("data: {\"choices\":[{\"text\":\"a\"}]}\n\n", whole).expect_err("no end");
        outcome("data: {\"error\":{\"message\":\"x\"}}\n\n", whole).expect_err("an error");
    }
}
