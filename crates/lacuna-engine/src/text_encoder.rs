//! Texts and pairs of them, as the tokens that a model makes a vector of.

use std::sync::Arc;

use lacuna_models::Model;
use lacuna_models::spec::Judgement;
use lacuna_text::template::{Chat, ChatTemplate, Message};
use lacuna_text::tokenizer::{Decode, EncodeLimits, Special, TokenizerError};

use crate::error::EngineError;

/// What becomes of a text with more tokens than the model takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Excess {
    /// It is refused.
    #[default]
    Refuse,
    /// Its last tokens are left out, but for those that the vocabulary puts behind a text. Of a pair, those
    /// of the second text are.
    Cut,
}

/// A text and one that may answer it, as one sequence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pair {
    /// Both, with what is around and between them.
    pub tokens: Vec<u32>,
    /// At which token the second begins, where the model is told.
    pub second: usize,
}

/// How Qwen3-Reranker is asked whether a document answers a query: messages 0 and 1. Its makers' own words,
/// which it was trained with; no file of theirs has them.
const QUESTION: &str = "<|im_start|>system\n\
    Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
    Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
    <|im_start|>user\n\
    <Instruct>: Given a web search query, retrieve relevant passages that answer the query\n\
    <Query>: {{ messages[0].content }}\n\
    <Document>: {{ messages[1].content }}<|im_end|>\n\
    <|im_start|>assistant\n<think>\n\n</think>\n\n";

/// How often a pair is made anew with fewer tokens of its second text. Once is enough unless tokens at the
/// cut come out otherwise.
const MOST_CUTS: usize = 4;

/// Makes tokens of texts, for any number of threads.
#[derive(Debug, Clone)]
pub struct TextEncoder {
    model: Arc<Model>,
    most: usize,
    /// How many tokens the vocabulary puts behind a text.
    behind: usize,
    question: Option<Arc<ChatTemplate>>,
}

impl TextEncoder {
    /// For a model that takes `most` tokens.
    pub(crate) fn new(model: &Arc<Model>, most: usize) -> Result<Self, EngineError> {
        let question = match model.spec().judgement() {
            Some(Judgement::Question) => {
                let template = ChatTemplate::compile(QUESTION);
                Some(Arc::new(
                    template.map_err(lacuna_models::PromptError::from)?,
                ))
            }
            Some(Judgement::Pair) | None => None,
        };
        Ok(Self {
            most,
            behind: model.tokenizer().describe().added_after.len(),
            model: Arc::clone(model),
            question,
        })
    }

    /// Tokens that a text may have, those that the vocabulary puts around it included.
    #[must_use]
    pub fn max_tokens(&self) -> usize {
        self.most
    }

    /// The tokens of `text`, with those that the vocabulary puts around it.
    ///
    /// # Errors
    /// [`EngineError::Tokenizer`], also for a text that is longer than the model takes, unless it is cut.
    pub fn text(
        &self,
        text: &str,
        excess: Excess,
        limits: &EncodeLimits,
    ) -> Result<Vec<u32>, EngineError> {
        let limits = self.limits(excess, limits);
        let tokenizer = self.model.tokenizer();
        let mut tokens = tokenizer.encode_within(text, Special::PROMPT, &limits)?;
        self.cut(&mut tokens);
        Ok(tokens)
    }

    /// The tokens of two texts, put to the model as it was trained.
    ///
    /// # Errors
    /// As [`TextEncoder::text`]; where the first text alone is too long, also if pairs are cut.
    pub fn pair(
        &self,
        first: &str,
        second: &str,
        excess: Excess,
        limits: &EncodeLimits,
    ) -> Result<Pair, EngineError> {
        let within = self.limits(excess, limits);
        if let Some(question) = &self.question {
            return self.question(question, (first, second), excess, &within);
        }
        let tokenizer = self.model.tokenizer();
        let (mut tokens, second) = tokenizer.encode_pair(first, second, &within)?;
        if second + self.behind >= self.most {
            return Err(self.too_long());
        }
        self.cut(&mut tokens);
        Ok(Pair { tokens, second })
    }

    fn limits(&self, excess: Excess, limits: &EncodeLimits) -> EncodeLimits {
        EncodeLimits {
            tokens: match excess {
                Excess::Refuse => self.most,
                Excess::Cut => limits.tokens,
            },
            ..*limits
        }
    }

    /// Leaves out what is too much, before what the vocabulary puts behind.
    fn cut(&self, tokens: &mut Vec<u32>) {
        if tokens.len() > self.most {
            let behind = self.behind.min(self.most);
            let end = tokens.split_off(tokens.len() - behind);
            tokens.truncate(self.most - behind);
            tokens.extend(end);
        }
    }

    fn too_long(&self) -> EngineError {
        TokenizerError::TooManyTokens { limit: self.most }.into()
    }

    fn question(
        &self,
        question: &ChatTemplate,
        (first, second): (&str, &str),
        excess: Excess,
        limits: &EncodeLimits,
    ) -> Result<Pair, EngineError> {
        let tokenizer = self.model.tokenizer();
        let mut second = second.to_owned();
        for _ in 0..MOST_CUTS {
            let messages = [
                Message::new("query", first),
                Message::new("document", &second),
            ];
            let chat = Chat {
                messages: &messages,
                ..Chat::default()
            };
            let text = question.render_marked(&chat, tokenizer);
            let text = text.map_err(lacuna_models::PromptError::from)?;
            let tokens = tokenizer.encode_marked(&text, limits)?;
            if tokens.len() <= self.most {
                let second = tokens.len();
                return Ok(Pair { tokens, second });
            }
            let own = tokenizer.encode_within(&second, Special::NONE, limits)?;
            let kept = own.len().checked_sub(tokens.len() - self.most);
            let Some(kept) = kept.filter(|kept| *kept > 0 && excess == Excess::Cut) else {
                break;
            };
            second = tokenizer.decode(&own[..kept], Decode::TEXT)?;
        }
        Err(self.too_long())
    }
}
