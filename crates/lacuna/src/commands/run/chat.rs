//! A chat on a terminal: several conversations, of which one goes on.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, anyhow, bail};
use lacuna::{Engine, KvReport, Message, Sampling};
use lacuna_cli::resident::Resident;
use lacuna_cli::{output, tell};
use lacuna_kv::folder::SessionName;
use rustyline::error::ReadlineError;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use super::conversation::Conversation;
use super::images::Sight;
use super::typed::{self, Command, Keyboard, Typed};
use super::{generate, open_session, raw_turn, summarise};
use crate::cli::RunArgs;

/// What a shell makes of a program that was interrupted.
const INTERRUPTED: i32 = 130;
/// What helps in a chat whose context is full.
const MAKES_ROOM: &str =
    "/rewind goes back, /new begins another one, and a larger --ctx holds more";

/// Talks until end of input. Each turn reuses what the KV cache holds of the conversation.
pub(super) fn chat(
    engine: &mut Engine,
    sampling: Sampling,
    conversation: Conversation,
    args: &RunArgs,
) -> Result<()> {
    let sight = Sight::new(engine);
    let shows = match takes_images(args, &conversation) && sight.sees {
        true => "; /image FILE shows an image with the next one",
        false => "",
    };
    tell!(
        "{}: type a message{shows}; Ctrl-D ends the chat, /help says what else there is",
        args.model.model
    );
    let history = match args.no_history {
        true => None,
        false => args.folder.typed(),
    };
    let keyboard = Keyboard::new(history.as_deref())?;
    let name = args.session.clone();
    let mut chat = Chat {
        sight,
        signals: Signals::listen()?,
        name: name.unwrap_or(first_name()?),
        current: conversation,
        others: BTreeMap::new(),
        engine,
        sampling,
        args,
    };
    chat.current.session.keep_turns();
    args.image.iter().try_for_each(|path| chat.show(path))?;
    let mut read = Ok(());
    while !chat.signals.is_over() {
        // The one that ends the wait for what is typed is not to be taken for a second Ctrl-C.
        chat.signals.forget_interrupt();
        let done = match keyboard.read(|| chat.signals.is_over()) {
            Ok(Typed::End) => break,
            Ok(Typed::Nothing) => Ok(()),
            Ok(Typed::Message(text)) => chat.turn(&text),
            Ok(Typed::Command(command)) => chat.obey(command),
            Err(error) if error.is::<ReadlineError>() => {
                read = Err(error.context("cannot read what is typed"));
                break;
            }
            Err(error) => Err(error),
        };
        if let Err(error) = done {
            tell!("error: {}", output::with_causes(&error));
        }
    }
    // Whatever ended it, what was said is kept.
    match (chat.end(), read) {
        (Err(error), Err(read)) => {
            tell!("error: {}", output::with_causes(&read));
            Err(error)
        }
        (ended, read) => ended.and(read),
    }
}

/// Whether a conversation can show images: text that is continued as it is has no places for them, and sessions do not
/// keep them.
fn takes_images(args: &RunArgs, conversation: &Conversation) -> bool {
    !args.raw && !conversation.is_named()
}

fn first_name() -> Result<SessionName> {
    "main".parse().context("a name")
}

/// What ends replies, and the chat.
struct Signals {
    /// Ctrl-C was typed during a reply. A second time ends the program.
    interrupted: Arc<AtomicBool>,
    /// The terminal was closed, or the program is asked to end. However often: the reply ends, what was said is kept, and
    /// then the program ends. Shells and the kernel both tell of a closed terminal, so a second time means nothing.
    over: Arc<AtomicBool>,
}

impl Signals {
    fn listen() -> Result<Self> {
        let interrupted = Arc::new(AtomicBool::new(false));
        // In this order: the first time the flag is not set yet.
        flag::register_conditional_shutdown(SIGINT, INTERRUPTED, Arc::clone(&interrupted))?;
        flag::register(SIGINT, Arc::clone(&interrupted))?;
        let over = Arc::new(AtomicBool::new(false));
        flag::register(SIGTERM, Arc::clone(&over))?;
        #[cfg(unix)]
        flag::register(signal_hook::consts::SIGHUP, Arc::clone(&over))?;
        Ok(Self { interrupted, over })
    }

    fn forget_interrupt(&self) {
        self.interrupted.store(false, Ordering::Relaxed);
    }

    fn end_reply(&self) -> bool {
        self.interrupted.load(Ordering::Relaxed) || self.is_over()
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

struct Chat<'a> {
    engine: &'a mut Engine,
    sampling: Sampling,
    args: &'a RunArgs,
    signals: Signals,
    sight: Sight,
    current: Conversation,
    /// What the current one is called within the chat.
    name: SessionName,
    others: BTreeMap<String, Conversation>,
}

impl Chat<'_> {
    /// One message and its answer. Where that fails the conversation is as it was before.
    fn turn(&mut self, text: &str) -> Result<()> {
        let images = self.current.images.are_pending();
        self.current.begin_turn(text);
        let Err(error) = self.answer(text) else {
            return Ok(());
        };
        self.current.rewind(1)?;
        let left_out = match images {
            true => "this message was left out, with its images",
            false => "this message was left out",
        };
        if !output::is_long_text(&error) {
            return Err(error.context(left_out));
        }
        let context = self.engine.context_tokens();
        match self.current.turns() {
            0 => bail!(
                "{left_out}: it has more than the context of {context} tokens holds; shorten it, or start with a larger --ctx"
            ),
            _ => bail!(
                "{left_out}: the conversation has filled the context of {context} tokens; {MAKES_ROOM}"
            ),
        }
    }

    fn answer(&mut self, text: &str) -> Result<()> {
        let Self {
            engine,
            args,
            current,
            signals,
            sight,
            ..
        } = self;
        let prompt = if args.raw {
            raw_turn(engine, &current.session, text)?
        } else {
            current.messages.push(current.images.message(text));
            let said = (&*current.messages, &current.images);
            sight.prompt(engine, &mut current.session, said, args)?
        };
        signals.forget_interrupt();
        let stop = || signals.end_reply();
        let report = generate(engine, &mut current.session, prompt, args, &stop)?;
        if !args.raw {
            let reply = Message::new("assistant", report.text.as_str());
            current.messages.push(reply);
        }
        summarise(&report, MAKES_ROOM)
    }

    fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Help => typed::help(),
            Command::Memory => self.memory()?,
            Command::Image(path) => self.show(Path::new(&path))?,
            Command::New(name) => {
                let name = name.map_or_else(|| self.free_name(), Ok)?;
                self.must_be_free(&name)?;
                let new = Conversation::new(self.engine, &self.sampling, self.args)?;
                self.go_to(name, new);
            }
            Command::Fork(name) => {
                self.must_be_free(&name)?;
                let fork = self.current.fork(&self.sampling)?;
                self.go_to(name, fork);
            }
            Command::Switch(None) => self.list(),
            Command::Switch(Some(name)) => {
                if name != self.name {
                    let there = self.others.remove(&name.to_string());
                    let there = there.ok_or_else(|| self.no_conversation(&name))?;
                    self.go_to(name, there);
                }
            }
            Command::Drop(name) => {
                if name == self.name {
                    bail!("this is the one that goes on; /switch to another first");
                }
                let mut dropped = self
                    .others
                    .remove(&name.to_string())
                    .ok_or_else(|| self.no_conversation(&name))?;
                dropped.save(self.engine)?;
                drop(dropped);
                // The pool keeps free pages for whoever grows next; what is forgotten is to be given back.
                self.engine.kv_cache().pool().trim();
            }
            Command::Save(name) => self.save(name)?,
            Command::Load(name) => self.load(name)?,
            Command::Rewind(turns) => {
                self.current.rewind(turns)?;
                tell!("{} turns are left", self.current.turns());
            }
            Command::Retry => {
                let asked = self.current.rewind(1)?;
                self.turn(&asked)?;
            }
        }
        Ok(())
    }

    /// Has the next message show the image in a file.
    fn show(&mut self, path: &Path) -> Result<()> {
        if !takes_images(self.args, &self.current) {
            bail!("images are for chats without --raw and for conversations that are not kept");
        }
        let file = self.sight.read(path)?;
        self.current.images.add(file);
        Ok(())
    }

    /// Goes on with another conversation; the one so far stays.
    fn go_to(&mut self, name: SessionName, conversation: Conversation) {
        let before = std::mem::replace(&mut self.current, conversation);
        let before_name = std::mem::replace(&mut self.name, name);
        self.others.insert(before_name.to_string(), before);
        self.current.session.keep_turns();
        tell!("{}: {} turns", self.name, self.current.turns());
    }

    fn save(&mut self, name: Option<SessionName>) -> Result<()> {
        match name {
            Some(name) if self.current.is_kept_as(&name) => {}
            Some(name) => {
                self.must_not_be_kept(&name)?;
                self.current.name(&self.sampling, self.args, &name)?;
            }
            None if self.current.is_named() => {}
            None => bail!("it has no name to be kept under; it is typed as `/save NAME`"),
        }
        if self.current.session.tokens().is_empty() {
            bail!("nothing was said yet; it is kept when the chat ends");
        }
        self.current.save(self.engine)
    }

    fn load(&mut self, name: SessionName) -> Result<()> {
        self.must_be_free(&name)?;
        self.must_not_be_kept(&name)?;
        if !self.args.folder.has(&name)? {
            bail!("there is no session `{name}`; `lacuna sessions list` shows those there are");
        }
        let opened = open_session(self.args, &name)?;
        let there = Conversation::named(self.engine, &self.sampling, self.args, opened)?;
        self.go_to(name, there);
        Ok(())
    }

    fn must_be_free(&self, name: &SessionName) -> Result<()> {
        if *name == self.name || self.others.contains_key(&name.to_string()) {
            bail!("there is a conversation `{name}` in this chat; /switch {name} goes there");
        }
        Ok(())
    }

    /// A session is of one conversation, and locked by it.
    fn must_not_be_kept(&self, name: &SessionName) -> Result<()> {
        if let Some((kept, _)) = self.all().into_iter().find(|(_, it)| it.is_kept_as(name)) {
            bail!(
                "the conversation `{kept}` of this chat is kept as `{name}`; /switch {kept} goes there"
            );
        }
        Ok(())
    }

    /// A name that nobody has to think of.
    fn free_name(&self) -> Result<SessionName> {
        let taken =
            |name: &String| *name == self.name.to_string() || self.others.contains_key(name);
        let mut names = (2..).map(|number: usize| format!("chat-{number}"));
        let name = names.find(|name| !taken(name)).context("a name")?;
        Ok(name.parse()?)
    }

    fn no_conversation(&self, name: &SessionName) -> anyhow::Error {
        anyhow!("there is no conversation `{name}` in this chat; /switch lists those there are")
    }

    /// Every conversation by name, the current one marked.
    fn all(&self) -> BTreeMap<String, &Conversation> {
        let others = self.others.iter();
        let others = others.map(|(name, conversation)| (name.clone(), conversation));
        others
            .chain([(self.name.to_string(), &self.current)])
            .collect()
    }

    fn list(&self) {
        for (name, conversation) in self.all() {
            let mark = if name == self.name.to_string() {
                '*'
            } else {
                ' '
            };
            tell!("{mark} {name}: {} turns", conversation.turns());
        }
    }

    /// What takes how much: each conversation, and the process.
    fn memory(&self) -> Result<()> {
        let bytes = |bytes: usize| output::bytes(bytes as u64);
        let mut alone = 0;
        let mut dense = 0;
        for (name, conversation) in self.all() {
            let kv: KvReport = conversation.kv();
            tell!(
                "{name}: {} tokens in {} of KV, of which {} are shared with others; dense would take {}",
                conversation.session.tokens().len(),
                bytes(kv.committed_bytes),
                bytes(kv.shared_bytes),
                bytes(kv.dense_bytes),
            );
            alone += kv.committed_bytes;
            dense += kv.dense_bytes;
        }
        let ledger = self.engine.kv_cache().ledger();
        tell!(
            "KV of all: {}, without sharing {}, dense {}",
            output::bytes(ledger.committed.get()),
            bytes(alone),
            bytes(dense)
        );
        tell!(
            "weights: {}",
            output::bytes(self.engine.model().weight_bytes())
        );
        if let Some(resident) = Resident::now() {
            tell!(
                "the process, by the kernel: {}, of which files {}",
                output::bytes(resident.pss_bytes),
                output::bytes(resident.file_bytes)
            );
        }
        Ok(())
    }

    /// Keeps what has a name. One that cannot be kept does not keep the others from it.
    fn end(mut self) -> Result<()> {
        let others = std::mem::take(&mut self.others);
        let mut first = self.current.save(self.engine);
        for (_, mut conversation) in others {
            let saved = conversation.save(self.engine);
            if first.is_ok() {
                first = saved;
            } else if let Err(error) = saved {
                tell!("error: {}", output::with_causes(&error));
            }
        }
        first
    }
}
