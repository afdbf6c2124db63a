//! What can be said about a request before it is taken.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lacuna_kv::KvCache;
use lacuna_models::Shown;
use lacuna_pages::ByteLength;

use crate::budget::{Pages, capacity, projected_bytes};

use crate::request::{Limits, Refusal, Request};
use crate::request_memory::RequestMemory;

/// The KV cache that there is now: another one once a device was opened again.
#[derive(Debug, Clone)]
pub(crate) struct CurrentCache(Arc<Mutex<KvCache>>);

impl CurrentCache {
    pub(crate) fn new(cache: KvCache) -> Self {
        Self(Arc::new(Mutex::new(cache)))
    }

    /// A handle to it.
    pub(crate) fn get(&self) -> KvCache {
        let cache = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cache.clone()
    }

    pub(crate) fn replace(&self, cache: KvCache) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = cache;
    }
}

/// The limits that hold for every request.
#[derive(Debug, Clone)]
pub(crate) struct RequestLimits {
    pub(crate) context_tokens: usize,
    pub(crate) vocabulary: usize,
    /// Elements of a row of an image, for a model that takes some.
    pub(crate) image_width: Option<usize>,
    /// Whether all tokens of an image have to be computed in one pass.
    pub(crate) images_whole: bool,
    pub(crate) max_running: usize,
    pub(crate) max_waiting: usize,
    /// Bytes of KV pages there can be.
    pub(crate) kv_bytes: Arc<AtomicU64>,
    pub(crate) pages: Pages,
    pub(crate) cache: CurrentCache,
    pub(crate) request_memory: RequestMemory,
}

impl RequestLimits {
    /// Most alternatives listed with a token's log-probability.
    const MOST_LOGPROBS: usize = 128;

    /// Refuses what could never run. Returns the tokens that each choice may have, its prompt
    /// included: as many as the context and the budget allow.
    pub(crate) fn check(&self, request: &Request) -> Result<usize, Refusal> {
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
        self.check_images(request)?;
        let beyond = request.prompt.iter().enumerate().find(|(index, token)| {
            let mut images = request.images.iter();
            let is_shown = images.any(|shown| shown.positions.contains(index));
            !is_shown && **token as usize >= vocabulary
        });
        if let Some((_, &token)) = beyond {
            return Err(Refusal::TokenOutOfRange { token, vocabulary });
        }
        let asked = request.logprobs.max(request.prompt_logprobs);
        if let Some(asked) = asked.filter(|&asked| asked > Self::MOST_LOGPROBS) {
            let most = Self::MOST_LOGPROBS;
            return Err(Refusal::TooManyLogprobs { asked, most });
        }
        self.check_settings(request)?;
        self.capacity(request)
    }

    /// Whether the model can take the images, each of them in one pass where that has to be.
    fn check_images(&self, request: &Request) -> Result<(), Refusal> {
        let mut behind = 0;
        for image in &request.images {
            let Shown {
                positions,
                grid,
                rows,
            } = image;
            let reason = match self.image_width {
                None => Some("the model does not see"),
                Some(width) if Some(rows.len()) != positions.len().checked_mul(width) => {
                    Some("it was encoded for another model")
                }
                _ if positions.start < behind || positions.end >= request.prompt.len() => {
                    Some("images stand apart from one another, and text comes last")
                }
                _ if positions.is_empty() => Some("it has no tokens"),
                _ if grid.rows.checked_mul(grid.columns) != Some(positions.len()) => {
                    Some("its tokens are not as many as its rows and columns have")
                }
                _ if self.images_whole && positions.len() > self.pages.step_tokens => {
                    Some("it has more tokens than one pass computes; use a larger batch")
                }
                _ if request.prompt_logprobs.is_some() => {
                    Some("prompts with images are not scored")
                }
                _ => None,
            };
            if let Some(reason) = reason {
                return Err(Refusal::Image {
                    positions: positions.clone(),
                    reason,
                });
            }
            behind = positions.end;
        }
        Ok(())
    }

    fn check_settings(&self, request: &Request) -> Result<(), Refusal> {
        let Limits {
            min_tokens,
            max_tokens,
            ref stop_tokens,
            ..
        } = request.limits;
        if let Some(most) = max_tokens.filter(|&most| most < min_tokens) {
            let least = min_tokens;
            return Err(Refusal::MinTokens { least, most });
        }
        let biased = request.sampling.logit_bias.iter();
        let biased = biased.map(|&(token, _)| ("logit_bias", token));
        let stops = stop_tokens.iter().map(|&token| ("stop_token_ids", token));
        let vocabulary = self.vocabulary;
        match biased
            .chain(stops)
            .find(|&(_, token)| token as usize >= vocabulary)
        {
            None => Ok(()),
            Some((setting, token)) => Err(Refusal::SettingOutOfRange {
                setting,
                token,
                vocabulary,
            }),
        }
    }

    /// Takes what the request holds until its end from the account, or keeps as much of what it has.
    pub(crate) fn hold(&self, request: &mut Request) -> Result<(), Refusal> {
        let bytes = request.held_bytes();
        match &mut request.memory {
            Some(held) => held.resize(bytes)?,
            none => *none = Some(self.request_memory.try_take(bytes)?),
        }
        Ok(())
    }

    fn capacity(&self, request: &Request) -> Result<usize, Refusal> {
        let (prompt, choices) = (request.prompt.len(), request.choices.get());
        let (pages, limit) = (&self.pages, self.kv_bytes.load(Ordering::Relaxed));
        let capacity = capacity(pages, prompt, choices, self.context_tokens, limit);
        let wanted = prompt.saturating_add(request.limits.max_tokens.unwrap_or(1));
        let wanted = wanted.min(self.context_tokens);
        match wanted <= capacity {
            true => Ok(capacity),
            false => Err(Refusal::TooLarge {
                needed: ByteLength::new(projected_bytes(pages, prompt, wanted, choices)),
                budget: ByteLength::new(limit),
            }),
        }
    }
}
