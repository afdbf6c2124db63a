//! What can be said about a request before it is taken.

use lacuna_kv::KvCache;

use crate::request::{Refusal, Request};

/// The limits that hold for every request.
#[derive(Debug, Clone)]
pub(crate) struct Rules {
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary: usize,
    pub(crate) max_running: usize,
    pub(crate) max_waiting: usize,
    pub(crate) cache: KvCache,
}

impl Rules {
    /// Most alternatives listed with a token's log-probability.
    const MOST_LOGPROBS: usize = 128;

    /// Refuses what could never run.
    pub(crate) fn check(&self, request: &Request) -> Result<(), Refusal> {
        request.sampling.validate()?;
        let (prompt, context) = (request.prompt.len(), self.context_tokens);
        let (asked, most) = (request.choices.get(), self.max_running);
        if prompt == 0 {
            return Err(Refusal::EmptyPrompt);
        }
        if prompt > context {
            return Err(Refusal::PromptTooLong { prompt, context });
        }
        if asked > most {
            return Err(Refusal::TooManyChoices { asked, most });
        }
        let vocabulary = self.vocabulary;
        let beyond = request
            .prompt
            .iter()
            .find(|&&token| token as usize >= vocabulary);
        if let Some(&token) = beyond {
            return Err(Refusal::TokenOutOfRange { token, vocabulary });
        }
        match request.logprobs {
            Some(asked) if asked > Self::MOST_LOGPROBS => Err(Refusal::TooManyLogprobs {
                asked,
                most: Self::MOST_LOGPROBS,
            }),
            _ => Ok(()),
        }
    }
}
