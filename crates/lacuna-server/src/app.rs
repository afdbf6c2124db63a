//! What every handler shares, and the way of a request from its body to the engine.

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::body::Bytes;
use axum::extract::FromRef;
use lacuna_engine::{Constraint, Eyes, Handle, HeldMemory, ImageError, Refusal, Request};
use lacuna_kv::folder::{SessionId, SessionName};
use lacuna_models::{Model, Shown};
use lacuna_pages::return_freed_memory;
use lacuna_text::reply::{Effort, Reader};
use lacuna_text::template::{Message, TemplateError};
use lacuna_text::tokenizer::EncodeLimits;
use serde_json::{Map, Value};

use crate::config::ServerConfig;
use crate::conversation::{Conversations, Prompt};
use crate::http::account::Account;
use crate::http::body::{Arriving, Bodies};
use crate::http::doors::Doors;
use crate::http::error::ApiError;
use crate::http::extent::Extent;
use crate::http::ignored::Ignored;
#[cfg(not(feature = "image-addresses"))]
use crate::images;
#[cfg(feature = "image-addresses")]
use crate::images::addresses::Fetcher;
use crate::images::{HasImages, Image};
use crate::intake::Intake;
use crate::models::More;
use crate::preparation::Place;
use crate::reply::streams::Streams;
use crate::sessions;
use crate::sharing::{Client, Sharing};
use crate::structured::tools::ToolSyntax;
use crate::structured::{Grammars, Rule};

/// What is done with a body, as far as it decides what memory that takes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Purpose {
    /// Its texts go through a chat template.
    Conversation,
    /// Its texts are tokenized as they are.
    Text,
    /// Its texts are tokenized, however many tokens that makes, and the tokens sent back.
    Tokens,
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
    pub(crate) sharing: Sharing,
    grammars: Grammars,
    /// When the server started, in seconds since 1970.
    pub(crate) started: u64,
    config: ServerConfig,
    conversations: Conversations,
    eyes: Eyes,
    #[cfg(feature = "image-addresses")]
    fetcher: Fetcher,
    intake: Intake,
    /// Who to ask for more memory, if others may have some to give.
    more: Option<More>,
}

impl App {
    /// # Errors
    /// [`TemplateError`] when the model's chat template does not compile.
    pub(crate) fn new(
        engine: Handle,
        config: ServerConfig,
        sharing: Sharing,
        intake: Intake,
    ) -> Result<Self, TemplateError> {
        let tokenizer = engine.model().tokenizer();
        let conversations = Conversations::new(tokenizer)?;
        Ok(Self {
            model_name: config.model_name.as_str().into(),
            sharing,
            grammars: Grammars::default(),
            started: intake.started,
            conversations,
            eyes: Eyes::new(
                Arc::clone(engine.model()),
                // The engine runs with it.
                config.service.engine.cpu().unwrap_or_default(),
                Some(engine.request_memory().clone()),
            )
            .within(engine.context_tokens()),
            #[cfg(feature = "image-addresses")]
            fetcher: Fetcher::new(&config.image_hosts, config.limits.receive),
            intake,
            more: None,
            config,
            engine,
        })
    }

    /// The same for one of several models, which may get more memory.
    pub(crate) fn with_more(self, more: More) -> Self {
        Self {
            more: Some(more),
            ..self
        }
    }

    pub(crate) fn model(&self) -> &Arc<Model> {
        self.engine.model()
    }

    /// Who is let in, and what is kept of it.
    pub(crate) fn doors(&self) -> Doors {
        Doors::of(&self.config)
    }

    /// What bodies are received with, and memory taken by.
    pub(crate) fn bodies(&self) -> &Bodies {
        &self.intake.bodies
    }

    /// Choices that run at once at most.
    pub(crate) fn max_running(&self) -> usize {
        self.config.service.max_running
    }

    /// Refuses more choices than run at once. The engine does so too, but only once what reads a reply has been made for
    /// each of them.
    pub(crate) fn check_choices(&self, asked: NonZeroUsize) -> Result<(), ApiError> {
        let (asked, most) = (asked.get(), self.max_running());
        match asked > most {
            true => Err(Refusal::TooManyChoices { asked, most }.into()),
            false => Ok(()),
        }
    }

    /// Requests of the engine that run and wait at once at most: more than these are never taken together.
    pub(crate) fn most_requests(&self) -> usize {
        let service = &self.config.service;
        service.max_running.saturating_add(service.max_waiting)
    }

    /// A name for a reply, different from those before it.
    pub(crate) fn reply_id(&self, prefix: &str) -> String {
        self.intake.reply_id(prefix)
    }

    /// Collects what a request says without effect, as the server is set up to take that.
    pub(crate) fn ignored(&self) -> Ignored {
        Ignored::new(self.config.strict_fields)
    }

    /// Receives a body and works on it away from the threads that serve connections, in memory that
    /// is taken from the account before.
    pub(crate) async fn prepare<T: Send + 'static>(
        self: &Arc<Self>,
        body: Arriving,
        purpose: Purpose,
        work: impl FnOnce(&Self, Map<String, Value>) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Prepared<T>, ApiError> {
        let received = self.intake.bodies.receive(body).await?;
        let limits = self.encode_limits();
        if !matches!(purpose, Purpose::Tokens) && self.model().images().is_none() {
            // Longer than any prompt, so it is none, and nothing else has to be that long.
            let longest = received.extent.longest_text_bytes();
            let fits = self
                .model()
                .tokenizer()
                .check_length(longest, limits.tokens);
            fits.map_err(|error| ApiError::from(error).of(purpose.field()))?;
        }
        let place = self.intake.preparation.place().await;
        let bytes = purpose.bytes(&received.extent, &limits);
        let memory = self.intake.bodies.take_beside(bytes, &received).await?;
        let work = move |app: &Self| received.object().and_then(|object| work(app, object));
        self.work(place, memory, work).await
    }

    /// The same for a conversation: `read` takes its body apart, and `finish` makes of that what is wanted, once the
    /// images in it that are elsewhere have been fetched. Nothing that prepares requests waits for those.
    pub(crate) async fn prepare_shown<R, T>(
        self: &Arc<Self>,
        body: Arriving,
        read: impl FnOnce(&Self, Map<String, Value>) -> Result<R, ApiError> + Send + 'static,
        finish: impl FnOnce(&Self, R) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Prepared<T>, ApiError>
    where
        R: HasImages + Send + 'static,
        T: Send + 'static,
    {
        let work = move |app: &Self, object| {
            let mut asked = read(app, object)?;
            let seen = app.check_images(asked.images());
            seen.map_err(|error| error.renamed(&[("messages", R::FIELD)]))?;
            match asked.images().iter().any(Image::is_elsewhere) {
                true => Ok(Step::Fetch(asked, finish)),
                false => finish(app, asked).map(Step::Done),
            }
        };
        let prepared = self.prepare(body, Purpose::Conversation, work).await?;
        let memory = prepared.memory;
        match prepared.value {
            Step::Done(value) => Ok(Prepared { value, memory }),
            Step::Fetch(mut asked, finish) => {
                let fetched = self.fetch(asked.images()).await?;
                let place = self.intake.preparation.place().await;
                let work = move |app: &Self| {
                    let made = finish(app, asked);
                    // What is shown is rows by now.
                    drop(fetched);
                    made
                };
                self.work(place, memory, work).await
            }
        }
    }

    /// Puts the files of images that are elsewhere in their places. Returns the memory for them.
    #[cfg(feature = "image-addresses")]
    async fn fetch(&self, images: &mut [Image]) -> Result<HeldMemory, ApiError> {
        let memory = self.engine.request_memory();
        self.fetcher.fetch(images, memory).await
    }

    #[cfg(not(feature = "image-addresses"))]
    async fn fetch(&self, images: &mut [Image]) -> Result<HeldMemory, ApiError> {
        images.iter().try_for_each(|image| image.file().map(drop))?;
        self.intake.bodies.try_take(0)
    }

    /// Works at a place for it, in memory that has been taken for that.
    async fn work<T: Send + 'static>(
        self: &Arc<Self>,
        place: Place,
        memory: HeldMemory,
        work: impl FnOnce(&Self) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<Prepared<T>, ApiError> {
        let app = Arc::clone(self);
        let work = move || {
            let value = work(&app);
            if memory.bytes() > TRIMMED_BYTES {
                return_freed_memory();
            }
            Ok(Prepared {
                value: value.map_err(|error| error.of_holder(memory.bytes()))?,
                memory,
            })
        };
        let done = self.intake.preparation.run(place, work).await;
        done.unwrap_or_else(|| Err(ApiError::internal("the request could not be prepared")))
    }

    /// Hands the requests of one reply to the engine, with the memory that was taken for them. If one is refused, so are
    /// all; for want of memory for good where they would not fit together even alone, as what one of them finds held is
    /// the others' then.
    pub(crate) async fn submit(
        &self,
        mut requests: Vec<Request>,
        mut memory: HeldMemory,
    ) -> Result<Streams, ApiError> {
        if let Some(more) = &self.more {
            let budgets = requests.iter().filter_map(|it| self.engine.budget_for(it));
            let largest = budgets.max();
            if let Some(budget) = largest {
                more.ask(budget).await;
            }
        }
        let mut whole = 0_usize;
        for request in &mut requests {
            request.prompt.shrink_to_fit();
            whole = whole.saturating_add(request.held_bytes());
        }
        // If there is less, the engine says so, or what else is wrong.
        self.intake.bodies.hold_in_all(&mut memory, whole).ok();
        let refused = |refusal| match (refusal, &self.more) {
            (Refusal::ShuttingDown, Some(more)) => more.why_ended(),
            (refusal, _) => refusal.into(),
        };
        let streams = requests.into_iter().map(|mut request| {
            let own = request.held_bytes();
            request.memory = Some(memory.split(own));
            request.deadline = Some(self.config.limits.request);
            let taken = self.engine.submit(request);
            taken.map_err(|refusal| refused(refusal).of_holder(whole.saturating_sub(own)))
        });
        let streams = streams.collect::<Result<Vec<_>, _>>()?;
        let account = Account::of(&self.model_name);
        Ok(Streams::new(streams, account, self.more.clone()))
    }

    /// The conversation of `client` that is called `name`.
    pub(crate) fn session(
        &self,
        client: Client,
        name: Option<&str>,
    ) -> Result<Option<SessionId>, ApiError> {
        let Some(name) = name else {
            return Ok(None);
        };
        let name: SessionName = sessions::name(name)?;
        if self.cache_folder().is_none() {
            let message = "a `session` is kept in a cache folder, and this server has none";
            return Err(ApiError::field("session", message));
        }
        let owner = self.sharing.namespace(client, None);
        Ok(Some(SessionId { name, owner }))
    }

    /// Where computed prompts outlive the process.
    pub(crate) fn cache_folder(&self) -> Option<&Path> {
        let folder = self.config.service.prefix_cache.folder.as_ref();
        folder.map(|folder| folder.path.as_path())
    }

    /// What holds a reply to `rule`, if there is one.
    /// Of a reply that `reader` takes apart, only what is said.
    pub(crate) fn constraint(
        &self,
        rule: Option<Rule>,
        reader: Option<&Reader>,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let account = self.engine.request_memory();
        rule.map(|rule| {
            self.grammars
                .constraint(self.model(), &rule, reader, (account, &self.engine))
        })
        .transpose()
    }

    /// The same, with thoughts that end after `most` tokens.
    pub(crate) fn end_thoughts(
        &self,
        most: usize,
        reader: &Reader,
        constraint: Option<Box<dyn Constraint>>,
    ) -> Result<Option<Box<dyn Constraint>>, ApiError> {
        let thoughts = (most, constraint);
        let held = self
            .grammars
            .end_thoughts(self.model(), reader, thoughts, &self.engine);
        Ok(held?)
    }

    /// Whether the model's own template tells it of tools.
    pub(crate) fn teaches_tools(&self) -> bool {
        self.conversations.teaches_tools()
    }

    /// Whether the model tells its thoughts from what it says.
    pub(crate) fn tells_thoughts(&self) -> bool {
        self.conversations.format().is_some()
    }

    /// What marks calls in replies and is a control token.
    pub(crate) fn call_marks(&self) -> &Arc<[&'static str]> {
        self.conversations.call_marks()
    }

    /// How the model is taught to write calls.
    pub(crate) fn tool_syntax(&self) -> ToolSyntax {
        self.conversations.syntax()
    }

    /// The template's variables: those that a request gives, and what follows from its effort, unless it
    /// gives that too.
    pub(crate) fn template_variables(
        &self,
        given: Option<Map<String, Value>>,
        effort: Option<Effort>,
    ) -> Map<String, Value> {
        let mut variables = given.unwrap_or_default();
        if let Some(effort) = effort {
            for (name, value) in effort.variables(self.conversations.format()) {
                variables.entry(name).or_insert(value);
            }
        }
        variables
    }

    /// A conversation that asks for a reply.
    pub(crate) fn conversation(
        &self,
        messages: &[Message],
        tools: &[Value],
        variables: Map<String, Value>,
        limits: &EncodeLimits,
    ) -> Result<Prompt, ApiError> {
        let normalization = &self.config.normalization;
        let messages = normalization.messages(messages);
        let tools = normalization.tools(tools);
        let model = self.model();
        self.conversations
            .prompt(model, &messages, &tools, variables, limits)
    }

    /// Whether the model sees.
    pub(crate) fn sees(&self) -> bool {
        self.model().images().is_some()
    }

    /// Refuses images for a model that takes none, before a template is to write places for them, more than a prompt may
    /// have, and such as are where nothing is fetched from.
    pub(crate) fn check_images(&self, images: &[Image]) -> Result<(), ApiError> {
        if images.is_empty() {
            return Ok(());
        }
        if !self.sees() {
            return Err(ImageError::NoEyes.into());
        }
        let (given, limit) = (images.len(), Eyes::MOST_IMAGES);
        if given > limit {
            return Err(ImageError::TooMany { given, limit }.into());
        }
        images.iter().try_for_each(|image| match image {
            Image::File(_) => Ok(()),
            #[cfg(feature = "image-addresses")]
            Image::Address { address, field } => self.fetcher.check(address, field).map(drop),
            #[cfg(not(feature = "image-addresses"))]
            Image::Address { field, .. } => Err(images::not_fetched(field)),
        })
    }

    /// Puts images, whose files are there, in their places among the tokens of a conversation, encoded.
    pub(crate) fn show(
        &self,
        tokens: &mut Vec<u32>,
        images: &[Image],
    ) -> Result<Vec<Shown>, ApiError> {
        let files = images.iter().map(Image::file);
        let files: Vec<&Bytes> = files.collect::<Result<_, _>>()?;
        Ok(self.eyes.show(tokens, &files)?)
    }

    /// Makes `tokens` as many as they are with `images`. One that is elsewhere counts as the largest there may be.
    pub(crate) fn make_places(
        &self,
        tokens: &mut Vec<u32>,
        images: &[Image],
    ) -> Result<(), ApiError> {
        let places = images.iter().enumerate().map(|(index, image)| {
            let places = match image {
                Image::File(file) => self.eyes.stand_ins(file),
                Image::Address { .. } => self.eyes.most_stand_ins(),
            };
            places.map_err(|error| error.of_one(index, images.len()))
        });
        let places = places.collect::<Result<Vec<_>, ImageError>>()?;
        self.model().place_images(tokens, &places)?;
        Ok(())
    }

    /// What the tokens of a prompt may come to.
    pub(crate) fn encode_limits(&self) -> EncodeLimits {
        /// Most texts take no more.
        const LEAST: u64 = 1 << 20;
        /// Words of 64 KiB, which are none.
        const MOST: u64 = 16 << 20;
        let share = self.engine.request_memory().limit().get() / 8;
        EncodeLimits {
            tokens: self.engine.context_tokens(),
            workspace_bytes: share.clamp(LEAST, MOST) as usize,
        }
    }

    /// The same for tokens that are not to be continued.
    pub(crate) fn any_tokens(&self) -> EncodeLimits {
        EncodeLimits {
            tokens: usize::MAX,
            ..self.encode_limits()
        }
    }

    /// Refuses a model this server does not have.
    pub(crate) fn check_model(&self, asked: Option<&str>) -> Result<(), ApiError> {
        match asked {
            Some(asked) if !self.config.is_model(asked) => {
                Err(ApiError::no_model(asked, &self.model_name))
            }
            _ => Ok(()),
        }
    }

    /// Whether the model goes when it is not used.
    pub(crate) fn is_unloaded(&self) -> bool {
        self.intake.several
    }
}

/// How far a conversation has come whose images may be elsewhere.
enum Step<R, T, F> {
    Done(T),
    /// What was read, and what is to be done with it.
    Fetch(R, F),
}

impl FromRef<Arc<App>> for Bodies {
    fn from_ref(app: &Arc<App>) -> Self {
        app.bodies().clone()
    }
}

impl Purpose {
    /// The field that has the text.
    fn field(self) -> &'static str {
        match self {
            Self::Conversation => "messages",
            Self::Text | Self::Tokens => "prompt",
        }
    }

    /// Bytes of memory it takes at most to turn a body of that extent into tokens.
    pub(crate) fn bytes(self, extent: &Extent, limits: &EncodeLimits) -> usize {
        /// What a template's messages and their values, its output and text on the way to it take of
        /// each character, most of which are copied once into each. Marks of what is not the
        /// template's own take two bytes.
        const RENDERED: usize = 16;
        /// What is read into types, normalized text, and tokens in a list that grows.
        const ENCODED: usize = 6;
        /// Tokens of one character each, in a list that grows, and written in a reply that grows.
        const WRITTEN: usize = 32;
        /// A few small fields, errors, and stacks of parsers.
        const LEAST: usize = 64 << 10;
        let text = extent.text_bytes();
        // What is parsed is read into types, whose lists may be there beside the parsed ones.
        let parsed = 2 * extent.structure_bytes() + text;
        let merged = text
            .saturating_mul(MERGED_BYTES)
            .min(limits.workspace_bytes);
        LEAST
            + parsed
            + merged
            + match self {
                Self::Conversation => (RENDERED + ENCODED) * text,
                Self::Text => ENCODED * text,
                Self::Tokens => (RENDERED + ENCODED + WRITTEN) * text,
            }
    }
}

/// After a request that took more, what it freed is given back to the system before the account has it
/// again.
const TRIMMED_BYTES: usize = 4 << 20;

/// What the tokenizer takes at most of each byte of a short text, and of a longer one what its limits
/// let it.
const MERGED_BYTES: usize = 256;

pub(crate) fn seconds_now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
