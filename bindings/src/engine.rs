//! The engine: a model that writes, and the service that runs its texts together.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use lacuna::{
    AddSpecial, ByteLength, Decode, EncodeLimits, Grace, Handle, Limits, Message, ParseSpecial,
    Prompt, Request, Service, Special, SpecialText,
};

use crate::error::LacunaError;
use crate::opening::{LoadProgress, load};
use crate::session::Session;
use crate::settings::{EngineSettings, TextSettings};
use crate::text::TextStream;
use crate::waiting::apart;

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, uniffi::Enum)]
pub enum Role {
    /// What the app tells the model of its part.
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
}

/// What somebody said.
#[derive(Debug, Clone, PartialEq, Eq, uniffi::Record)]
pub struct Chat {
    /// Who.
    pub role: Role,
    /// What.
    pub text: String,
}

impl From<Chat> for Message {
    fn from(said: Chat) -> Self {
        let role = match said.role {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
        };
        Self::new(role, said.text)
    }
}

/// Where an engine's bytes are, now.
#[derive(Debug, Clone, PartialEq, Eq, uniffi::Record)]
pub struct Memory {
    /// What may be committed; none if nobody has said.
    pub budget_bytes: Option<u64>,
    /// The least that `setBudget` takes.
    pub least_budget_bytes: u64,
    /// Bytes of KV pages.
    pub kv_committed_bytes: u64,
    /// Of these, those that a text, a session or the cache of prompts has.
    pub kv_in_use_bytes: u64,
    /// Of these, those that several have at once.
    pub kv_shared_bytes: u64,
    /// Bytes of weights in memory, those in mapped files left out.
    pub weight_bytes: u64,
}

/// A model, ready to run. Any number of tasks may use it at once; their texts share passes and pages.
#[derive(uniffi::Object)]
pub struct Engine {
    /// None once it was shut down.
    service: Mutex<Option<Service>>,
    handle: Handle,
}

/// Bytes that tokenizing may hold: enough for a mebibyte without a space.
const TOKENIZER_BYTES: usize = 256 << 20;

#[uniffi::export]
impl Engine {
    /// Loads the model at a path, a GGUF file or a Hugging Face folder, or the one that is built in, `demo`.
    ///
    /// # Errors
    /// [`LacunaError::Model`], [`LacunaError::BudgetExceeded`], [`LacunaError::InvalidValue`].
    #[uniffi::constructor(default(settings = None, progress = None))]
    pub async fn open(
        model: String,
        settings: Option<EngineSettings>,
        progress: Option<Arc<dyn LoadProgress>>,
    ) -> Result<Arc<Self>, LacunaError> {
        apart(move || {
            let config = settings.unwrap_or_else(EngineSettings::usual).config()?;
            let model = load(&model, &config.engine_config(), progress)?;
            let service = Service::start(model, config)?;
            let handle = service.handle();
            Ok(Arc::new(Self {
                service: Mutex::new(Some(service)),
                handle,
            }))
        })
        .await
    }

    /// Answers a conversation. The reply comes piece by piece; dropping the stream ends it.
    ///
    /// # Errors
    /// [`LacunaError::InvalidValue`] for messages that the model's template refuses and for settings;
    /// [`LacunaError::ContextTooLong`], [`LacunaError::Busy`], [`LacunaError::BudgetExceeded`].
    #[uniffi::method(default(settings = None))]
    pub async fn chat(
        self: Arc<Self>,
        messages: Vec<Chat>,
        settings: Option<TextSettings>,
    ) -> Result<Arc<TextStream>, LacunaError> {
        apart(move || {
            let handle = &self.handle;
            let messages: Vec<Message> = messages.into_iter().map(Message::from).collect();
            let prompt = handle
                .model()
                .conversation(&messages, None, &limits(handle))?;
            submit(self, prompt, settings.unwrap_or_default())
        })
        .await
    }

    /// Goes on after a text as it is, without the model's template.
    ///
    /// # Errors
    /// As `chat`.
    #[uniffi::method(default(settings = None))]
    pub async fn complete(
        self: Arc<Self>,
        prompt: String,
        settings: Option<TextSettings>,
    ) -> Result<Arc<TextStream>, LacunaError> {
        apart(move || {
            let tokenizer = self.handle.model().tokenizer();
            let within = limits(&self.handle);
            let tokens = tokenizer.encode_within(&prompt, Special::PROMPT, &within);
            let prompt = Prompt {
                tokens: tokens.map_err(LacunaError::value)?,
                reader: None,
            };
            submit(self, prompt, settings.unwrap_or_default())
        })
        .await
    }

    /// An empty session: a text that the app goes on with, forks and cuts back itself.
    ///
    /// # Errors
    /// [`LacunaError::BudgetExceeded`].
    pub async fn session(self: Arc<Self>) -> Result<Arc<Session>, LacunaError> {
        apart(move || {
            let session = self.handle.session()?;
            Session::new(session, self).map(Arc::new)
        })
        .await
    }

    /// The session that was saved in a file; nothing of it is computed again.
    ///
    /// # Errors
    /// [`LacunaError::SavedSession`] for a file that is damaged, or of another model or other settings.
    pub async fn load_session(self: Arc<Self>, path: String) -> Result<Arc<Session>, LacunaError> {
        apart(move || {
            let (session, _note) = self.handle.restore_session(&PathBuf::from(path))?;
            Session::new(session, self).map(Arc::new)
        })
        .await
    }

    /// Tokens of a text, without those that a vocabulary puts around it.
    ///
    /// # Errors
    /// [`LacunaError::InvalidValue`] for a text that is longer than the context, or that the vocabulary has no tokens for.
    pub fn tokenize(&self, text: &str) -> Result<Vec<u32>, LacunaError> {
        tokenize(&self.handle, text, AddSpecial::No)
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// [`LacunaError::InvalidValue`] for a token that is none.
    pub fn detokenize(&self, tokens: &[u32]) -> Result<String, LacunaError> {
        let tokenizer = self.handle.model().tokenizer();
        let text = tokenizer.decode(tokens, Decode::default());
        text.map_err(LacunaError::value)
    }

    /// Tokens that a prompt and what follows it may have together.
    #[must_use]
    pub fn context_tokens(&self) -> u64 {
        self.handle.context_tokens() as u64
    }

    /// Where its bytes are.
    #[must_use]
    pub fn memory(&self) -> Memory {
        let (ledger, status) = (self.handle.ledger(), self.handle.status());
        Memory {
            budget_bytes: status.budget.plan.budget_bytes,
            least_budget_bytes: self.handle.least_budget().get(),
            kv_committed_bytes: ledger.committed.get(),
            kv_in_use_bytes: ledger.committed.saturating_sub(ledger.idle).get(),
            kv_shared_bytes: ledger.shared.get(),
            weight_bytes: self.handle.model().placed_bytes(),
        }
    }

    /// Makes so many bytes the budget, from the next step on, as when the system says that memory is short. What there is
    /// too much of goes: cached prompts, weights, which are read for each token then, and in the end the last texts, which
    /// wait. No text changes.
    ///
    /// # Errors
    /// [`LacunaError::BudgetExceeded`] with the least that works.
    pub fn set_budget(&self, bytes: u64) -> Result<(), LacunaError> {
        let set = self.handle.set_budget(ByteLength::new(bytes));
        set.map_err(LacunaError::budget)
    }

    /// Ends everything under way and gives all memory back. Again it does nothing.
    pub async fn shut_down(&self) {
        let service = self.service.lock();
        let taken = service.unwrap_or_else(PoisonError::into_inner).take();
        if let Some(service) = taken {
            // Where no thread can be had, dropping it does the same.
            apart(move || {
                service.shutdown(Grace::Immediate);
                Ok(())
            })
            .await
            .ok();
        }
    }
}

impl Engine {
    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// What a prompt may come to.
fn limits(handle: &Handle) -> EncodeLimits {
    EncodeLimits {
        tokens: handle.context_tokens(),
        workspace_bytes: TOKENIZER_BYTES,
    }
}

/// Tokens of a text in which special tokens that are spelled out are letters.
pub(crate) fn tokenize(
    handle: &Handle,
    text: &str,
    add: AddSpecial,
) -> Result<Vec<u32>, LacunaError> {
    let parse = ParseSpecial::No;
    let tokenizer = handle.model().tokenizer();
    let tokens = tokenizer.encode_within(text, Special { add, parse }, &limits(handle));
    tokens.map_err(LacunaError::value)
}

fn submit(
    engine: Arc<Engine>,
    prompt: Prompt,
    settings: TextSettings,
) -> Result<Arc<TextStream>, LacunaError> {
    let sampling = settings.sampling(engine.handle.model());
    let special = match prompt.reader {
        Some(_) => SpecialText::Mark,
        None => SpecialText::default(),
    };
    let limits: Limits = settings.limits(special);
    let request = Request {
        sampling,
        limits,
        ..Request::new(prompt.tokens)
    };
    let stream = engine.handle.submit(request)?;
    Ok(Arc::new(TextStream::new(stream, prompt.reader, engine)))
}
