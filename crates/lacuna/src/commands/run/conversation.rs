//! A conversation: its session, what was said, and where it is kept.

use anyhow::{Result, bail};
use lacuna::{Engine, KvReport, Message, Sampling, Session};
use lacuna_engine::Sampler;
use lacuna_kv::folder::SessionName;

use super::images::Images;
use crate::cli::RunArgs;
use crate::commands::sessions::{Named, Opened};

/// What is said with a model, as far as it has come.
pub(super) struct Conversation {
    pub(super) session: Session,
    /// What was said; nothing where text is continued without a template.
    pub(super) messages: Vec<Message>,
    /// What messages show.
    pub(super) images: Images,
    turns: Vec<Turn>,
    /// Where it is kept when the command ends, if it is.
    named: Option<Named>,
}

/// Where a turn began.
#[derive(Clone)]
struct Turn {
    /// What was asked.
    text: String,
    messages: usize,
    images: usize,
    /// Tokens that the session had; not known of turns that another process took.
    tokens: Option<usize>,
}

impl Conversation {
    /// A new one.
    pub(super) fn new(engine: &Engine, sampling: &Sampling, args: &RunArgs) -> Result<Self> {
        let session = engine.session(sampling.clone())?;
        Ok(Self::of(session, instructions(args), None))
    }

    /// The one of a session, or a new one that will be kept in it.
    pub(super) fn named(
        engine: &Engine,
        sampling: &Sampling,
        args: &RunArgs,
        opened: Opened,
    ) -> Result<Self> {
        let (named, session, messages) = opened.restore(engine, sampling, &args.model.model)?;
        let messages = match messages.is_empty() {
            true => instructions(args),
            false => messages,
        };
        Ok(Self::of(session, messages, Some(named)))
    }

    fn of(session: Session, messages: Vec<Message>, named: Option<Named>) -> Self {
        let asked = messages
            .iter()
            .enumerate()
            .filter(|(_, message)| message.role == "user");
        let turns = asked.map(|(messages, asked)| Turn {
            text: asked.content.as_str().unwrap_or_default().to_owned(),
            messages,
            images: 0,
            tokens: None,
        });
        Self {
            turns: turns.collect(),
            session,
            messages,
            images: Images::default(),
            named,
        }
    }

    /// Notes that a turn begins in which `text` is asked.
    pub(super) fn begin_turn(&mut self, text: &str) {
        self.turns.push(Turn {
            text: text.to_owned(),
            messages: self.messages.len(),
            images: self.images.placed(),
            tokens: Some(self.session.tokens().len()),
        });
    }

    /// Turns that can be gone back.
    pub(super) fn turns(&self) -> usize {
        self.turns.len()
    }

    /// Goes back to before so many turns, and gives back the memory of what comes after. Returns what was asked in the
    /// first of them.
    pub(super) fn rewind(&mut self, turns: usize) -> Result<String> {
        let there_are = self.turns.len();
        let first = there_are.checked_sub(turns);
        let Some((first, turn)) =
            first.and_then(|first| Some((first, self.turns.get(first)?.clone())))
        else {
            bail!("{there_are} turns can be gone back");
        };
        // Where the tokens are not known the next prompt tells.
        if let Some(tokens) = turn.tokens {
            self.session.truncate(tokens)?;
        }
        self.messages.truncate(turn.messages);
        self.images.truncate(turn.images);
        self.turns.truncate(first);
        Ok(turn.text)
    }

    /// Another one that has said the same, whose pages are those of this one until either goes on.
    pub(super) fn fork(&mut self, sampling: &Sampling) -> Result<Self> {
        Ok(Self {
            session: self.session.fork(Sampler::new(sampling.clone())?)?,
            messages: self.messages.clone(),
            images: self.images.clone(),
            turns: self.turns.clone(),
            named: None,
        })
    }

    /// Will be kept as a session of that name from here on, which there is none of yet.
    pub(super) fn name(
        &mut self,
        sampling: &Sampling,
        args: &RunArgs,
        name: &SessionName,
    ) -> Result<()> {
        if !self.images.is_empty() {
            bail!("it shows images, which are not kept");
        }
        let how = (args.raw, args.engine.kv);
        let named = Named::create((&args.folder, name), &args.model.model, sampling, how)?;
        self.named = Some(named);
        Ok(())
    }

    /// Whether it is kept.
    pub(super) fn is_named(&self) -> bool {
        self.named.is_some()
    }

    /// Whether it is kept as the session of that name.
    pub(super) fn is_kept_as(&self, name: &SessionName) -> bool {
        self.named.as_ref().is_some_and(|named| named.is(name))
    }

    /// Writes it where it is kept, if it is and anything was said.
    pub(super) fn save(&mut self, engine: &Engine) -> Result<()> {
        match &self.named {
            Some(named) if !self.session.tokens().is_empty() => {
                named.save(engine, &mut self.session, self.messages.clone())
            }
            _ => Ok(()),
        }
    }

    /// What it takes.
    pub(super) fn kv(&self) -> KvReport {
        self.session.kv()
    }
}

/// What comes before the conversation, if anything does.
fn instructions(args: &RunArgs) -> Vec<Message> {
    let system = args.system.iter();
    system
        .map(|text| Message::new("system", text.as_str()))
        .collect()
}
