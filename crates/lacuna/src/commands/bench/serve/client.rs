//! A client of an OpenAI-compatible server: one streamed completion, timed.

use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use ureq::Agent;

/// Requests to one server.
#[derive(Debug, Clone)]
pub(super) struct Client {
    agent: Agent,
    url: String,
    key: Option<String>,
    model: String,
}

/// A reply, timed from when it was asked for.
#[derive(Debug, Default)]
pub(super) struct Reply {
    pub(super) first_token: Option<Duration>,
    pub(super) gaps: Vec<Duration>,
    pub(super) prompt_tokens: u64,
    /// If the server says how many it found in its cache.
    pub(super) reused_tokens: Option<u64>,
    pub(super) generated_tokens: u64,
}

/// How a request ended.
#[derive(Debug)]
pub(super) enum Outcome {
    Replied(Reply),
    /// The server said that it is full.
    Refused,
}

impl Client {
    /// A client of the server at `url`, asking for the first model it lists.
    pub(super) fn new(url: &str, key: Option<&str>) -> Result<Self> {
        let config = Agent::config_builder().http_status_as_error(false);
        let mut client = Self {
            agent: config.build().into(),
            url: url.trim_end_matches('/').trim_end_matches("/v1").to_owned(),
            key: key.map(str::to_owned),
            model: String::new(),
        };
        let models = client.get("/v1/models")?;
        let model = models.pointer("/data/0/id").and_then(Value::as_str);
        client.model = model.context("the server lists no model")?.to_owned();
        Ok(client)
    }

    pub(super) fn model(&self) -> &str {
        &self.model
    }

    /// The JSON at `path`.
    pub(super) fn get(&self, path: &str) -> Result<Value> {
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

    /// Asks for a completion and reads it to its end.
    pub(super) fn complete(&self, prompt: &str, max_tokens: usize) -> Result<Outcome> {
        let body = json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let mut request = self
            .agent
            .post(format!("{}/v1/completions", self.url))
            .header("Content-Type", "application/json");
        if let Some(key) = &self.key {
            request = request.header("Authorization", format!("Bearer {key}"));
        }
        let asked = Instant::now();
        let mut response = request.send(body.to_string())?;
        match response.status().as_u16() {
            200 => {}
            429 | 503 => return Ok(Outcome::Refused),
            status => {
                let text = response.body_mut().read_to_string().unwrap_or_default();
                bail!("the server answered {status}: {text}");
            }
        }
        let lines = BufReader::new(response.into_body().into_reader()).lines();
        Ok(Outcome::Replied(read(lines, asked)?))
    }
}

fn read(lines: impl Iterator<Item = std::io::Result<String>>, asked: Instant) -> Result<Reply> {
    let mut reply = Reply::default();
    let mut last = None;
    for line in lines {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ") else {
            continue;
        };
        if data == "[DONE]" {
            return Ok(reply);
        }
        let now = Instant::now();
        let chunk: Value = serde_json::from_str(data)?;
        if let Some(error) = chunk.get("error") {
            bail!("the reply broke off: {error}");
        }
        let text = chunk.pointer("/choices/0/text").and_then(Value::as_str);
        if text.is_some_and(|text| !text.is_empty()) {
            match last.replace(now) {
                None => reply.first_token = Some(now - asked),
                Some(last) => reply.gaps.push(now - last),
            }
        }
        reply.note_usage(&chunk["usage"]);
    }
    bail!("the reply ended without [DONE]")
}

impl Reply {
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

    fn reply(text: &str) -> Result<Reply> {
        read(text.lines().map(|line| Ok(line.to_owned())), Instant::now())
    }

    #[test]
    fn tokens_are_timed_and_figures_kept() {
        let reply = reply(
            "data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\n\
             data: {\"choices\":[{\"text\":\"\"}]}\n\n\
             data: {\"choices\":[{\"text\":\"b\"}]}\n\n\
             data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":3,\
             \"prompt_tokens_details\":{\"cached_tokens\":4}}}\n\ndata: [DONE]\n\n",
        )
        .expect("whole");
        assert!(reply.first_token.is_some());
        assert_eq!(reply.gaps.len(), 1);
        assert_eq!((reply.prompt_tokens, reply.generated_tokens), (7, 3));
        assert_eq!(reply.reused_tokens, Some(4));
    }

    #[test]
    fn a_reply_that_breaks_off_is_an_error() {
        reply("data: {\"choices\":[{\"text\":\"a\"}]}\n\n").expect_err("no end");
        reply("data: {\"error\":{\"message\":\"x\"}}\n\n").expect_err("an error");
    }
}
