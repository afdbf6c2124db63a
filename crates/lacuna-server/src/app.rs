//! What every handler shares, and the way of a request from its body to the engine.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Body;
use lacuna_engine::{Constraint, Handle, HeldMemory, Request};
use lacuna_models::Model;
use lacuna_models::template::{Chat, ChatTemplate, Message, TemplateError};
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::config::ServerConfig;
use crate::http::body::Bodies;
use crate::http::error::ApiError;
use crate::http::extent::Extent;
use crate::http::ignored::Ignored;
use crate::keys::ApiKeys;
use crate::openai::streams::Streams;
use crate::sharing::Sharing;
use crate::structured::{Grammars, Rule};

/// What is done with a body, as far as it decides what memory that takes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// Its texts go through a chat template.
    Conversation,
    /// Its texts are tokenized as they are.
    Text,
}

/// What came of a body, and the memory taken for it.
#[derive(Debug)]
pub(crate) struct Prepared<T> {
    pub(crate) value: T,
    pub(crate) memory: HeldMemory,
}

/// What every handler shares.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: Handle,
    pub(crate) model_name: Arc<str>,
    pub(crate) keys: ApiKeys,
    pub(crate) sharing: Sharing,
    grammars: Grammars,
    /// When the server started, in seconds since 1970.
    pub(crate) started: u64,
    config: ServerConfig,
    template: ChatTemplate,
    tool_template: Option<ChatTemplate>,
    bodies: Bodies,
    /// Requests that are being turned into tokens; more at once than cores would only take memory.
    preparing: Arc<Semaphore>,
    replies: AtomicU64,
}

impl App {
    /// # Errors
    /// [`TemplateError`] when the model's chat template does not compile.
    pub(crate) fn new(
        engine: Handle,
        config: ServerConfig,
        sharing: Sharing,
    ) -> Result<Self, TemplateError> {
        let tokenizer = engine.model().tokenizer();
        let template = ChatTemplate::of(tokenizer)?;
        let tool_template = tokenizer.named_chat_template("tool_use");
        let tool_template = tool_template.map(ChatTemplate::compile).transpose()?;
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Ok(Self {
            model_name: config.model_name.as_str().into(),
            keys: config.keys.clone(),
            sharing,
            grammars: Grammars::default(),
            started: seconds_now(),
            template,
            tool_template,
            bodies: Bodies::new(config.limits.clone(), engine.request_memory().clone()),
            preparing: Arc::new(Semaphore::new(cores)),
            replies: AtomicU64::new(0),
            config,
            engine,
        })
    }

    pub(crate) fn model(&self) -> &Arc<Model> {
        self.engine.model()
    }

    /// Choices that run at once at most.
    pub(crate) fn max_running(&self) -> usize {
        self.config.service.max_running
    }

    /// A name for a reply, different from those before it.
    pub(crate) fn reply_id(&self, prefix: &str) -> String {
        let number = self.replies.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:x}-{number}", self.started)
    }

    /// Collects what a request says without effect, as the server is set up to take that.
    pub(crate) fn ignored(&self) -> Ignored {
        Ignored::new(self.config.strict_fields)
    }

    /// Receives a body and works on it away from the threads that serve connections, in memory that
    /// is taken from the account before.
    pub(crate) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        body: Body,
        purpose: Purpose,
        work: impl FnOnce(&Self, Map<String, Value>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Prepared<T>, ApiError> {
        let received = self.bodies.receive(body).await?;
        let place = Arc::clone(&self.preparing).acquire_owned().await;
        let memory = self.bodies.take(purpose.bytes(&received.extent)).await?;
        let app = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || {
            // Both are held to the end even if the client is gone before.
            let _place = place;
            let value = work(&app, received.object()?)?;
            Ok(Prepared { value, memory })
        })
        .await;
        done.unwrap_or_else(|_| Err(ApiError::internal("the request could not be prepared")))
    }

    /// Hands the requests of one reply to the engine, with the memory that was taken for them: for the
    /// first, as the engine takes what others need itself. If one is refused, so are all.
    pub(crate) fn submit(
        &self,
        requests: Vec<Request>,
        memory: HeldMemory,
    ) -> Result<Streams, ApiError> {
        let mut memory = Some(memory);
        let streams = requests.into_iter().map(|mut request| {
            request.memory = memory.take();
            request.deadline = Some(self.config.limits.request);
            self.engine.submit(request)
        });
        let streams = streams.collect::<Result<Vec<_>, _>>()?;
        Ok(Streams::new(streams))
    }

    /// What holds a reply to `rule`, if there is one.
    pub(crate) fn constraint(
        &self,
        rule: Option<Rule>,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        rule.map(|rule| self.grammars.constraint(self.model(), &rule))
            .transpose()
    }

    /// Tokens of a conversation that asks for a reply.
    pub(crate) fn conversation(
        &self,
        messages: &[Message],
        tools: &[Value],
        variables: Map<String, Value>,
    ) -> Result<Vec<u32>, ApiError> {
        let tokenizer = self.model().tokenizer();
        let text = |id: Option<u32>| id.and_then(|id| tokenizer.token_text(id));
        let (bos, eos) = (text(tokenizer.bos()), text(tokenizer.eos()));
        let chat = Chat {
            messages,
            bos_token: bos.as_deref(),
            eos_token: eos.as_deref(),
            tools: (!tools.is_empty()).then_some(tools),
            variables,
            ..Chat::default()
        };
        let template = match &self.tool_template {
            Some(template) if !tools.is_empty() => template,
            _ => &self.template,
        };
        let rendered = template.render(&chat)?;
        let tokens = tokenizer.encode(&rendered, template.special());
        tokens.map_err(|error| ApiError::field("messages", error.to_string()))
    }

    /// Refuses a model this server does not have.
    pub(crate) fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if asked != &*self.model_name => {
                Err(ApiError::no_model(asked, &self.model_name))
            }
            _ => Ok(()),
        }
    }
}

impl Purpose {
    /// Bytes of memory it takes at most to turn a body of that extent into tokens.
    fn bytes(self, extent: &Extent) -> usize {
        /// What a template's messages and their values, its output and text on the way to it take of
        /// each character, most of which are copied once into each.
        const RENDERED: usize = 8;
        /// What the tokenizer takes of each character.
        const TOKENIZED: usize = 192;
        /// A few small fields, errors, and stacks of parsers.
        const LEAST: usize = 64 << 10;
        // What is parsed is read into types, whose lists may be there beside the parsed ones.
        let parsed = 2 * extent.structure_bytes() + extent.text_bytes();
        let rendered = match self {
            Self::Conversation => RENDERED * extent.text_bytes(),
            Self::Text => extent.text_bytes(),
        };
        LEAST + parsed + rendered + TOKENIZED * extent.text_bytes()
    }
}

pub(crate) fn seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
