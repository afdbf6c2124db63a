//! What a request came to, for the access log: an extension of its reply, which goes on counting while that is streamed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::response::Response;
use lacuna_engine::Event;
use serde::{Serialize, Serializer};

/// Tokens of a reply, whoever its parts are written by.
#[derive(Debug, Clone)]
pub(crate) struct Account(Arc<Counts>);

#[derive(Debug, Serialize)]
struct Counts {
    #[serde(serialize_with = "text")]
    model: Arc<str>,
    prompt_tokens: Count,
    /// Of the prompt, those that were not computed again.
    cached_tokens: Count,
    completion_tokens: Count,
}

fn text<S: Serializer>(text: &str, serializer: S) -> Result<S::Ok, S::Error> {
    text.serialize(serializer)
}

#[derive(Debug, Default)]
struct Count(AtomicUsize);

impl Count {
    fn add(&self, tokens: usize) {
        self.0.fetch_add(tokens, Ordering::Relaxed);
    }
}

impl Serialize for Count {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.load(Ordering::Relaxed).serialize(serializer)
    }
}

impl Serialize for Account {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl Account {
    pub(crate) fn of(model: &Arc<str>) -> Self {
        Self(Arc::new(Counts {
            model: Arc::clone(model),
            prompt_tokens: Count::default(),
            cached_tokens: Count::default(),
            completion_tokens: Count::default(),
        }))
    }

    /// Of a reply for which so many tokens were computed, and none were written.
    pub(crate) fn of_texts(model: &str, tokens: usize) -> Self {
        let account = Self::of(&model.into());
        account.0.prompt_tokens.add(tokens);
        account
    }

    /// Counts what an event tells.
    pub(crate) fn count(&self, event: &Event) {
        match event {
            Event::Started {
                prompt_tokens,
                reused_tokens,
                ..
            } => {
                self.0.prompt_tokens.add(*prompt_tokens);
                self.0.cached_tokens.add(*reused_tokens);
            }
            Event::Token { .. } => self.0.completion_tokens.add(1),
            _ => {}
        }
    }

    pub(crate) fn attach(&self, response: &mut Response) {
        response.extensions_mut().insert(self.clone());
    }
}
