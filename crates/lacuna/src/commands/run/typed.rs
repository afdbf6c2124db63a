//! What is typed in a chat: messages of one or several lines, and commands.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use lacuna_cli::tell;
use lacuna_kv::folder::SessionName;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};
use signal_hook::consts::SIGINT;

/// What opens and closes a message of several lines.
const QUOTES: &str = "\"\"\"";
/// Lines that are remembered, for arrow keys of later chats.
const MOST_HISTORY: usize = 1000;

/// What somebody typed.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed {
    Message(String),
    Command(Command),
    /// Nothing, or a command that was given up.
    Nothing,
    /// That the chat is over.
    End,
}

/// What a chat does besides answering.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Memory,
    Image(String),
    New(Option<SessionName>),
    Fork(SessionName),
    Switch(Option<SessionName>),
    Drop(SessionName),
    Save(Option<SessionName>),
    Load(SessionName),
    Rewind(usize),
    Retry,
}

/// Names of commands and what each does, as `/help` lists them.
const COMMANDS: [(&str, &str); 12] = [
    (
        "/image FILE",
        "show an image with the next message, if the model sees",
    ),
    (
        "/fork NAME",
        "go on in a copy of this conversation; it takes memory only where the two differ",
    ),
    (
        "/switch [NAME]",
        "go to another conversation of this chat; without a name, list them",
    ),
    ("/new [NAME]", "begin another one"),
    ("/drop NAME", "forget one, and give its memory back"),
    (
        "/save [NAME]",
        "keep this one as a session, now and whenever the chat ends",
    ),
    ("/load NAME", "go to a session that was kept"),
    ("/rewind [TURNS]", "go back, one turn or several"),
    ("/retry", "ask the last question again"),
    ("/memory", "what takes how much"),
    ("/help", "this list"),
    ("/exit", "end the chat, as Ctrl-D does"),
];

/// Says what can be typed.
pub(super) fn help() {
    for (name, what) in COMMANDS {
        tell!("  {name:16} {what}");
    }
    tell!(
        "A line that ends with \\ goes on in the next one, and so does text between {QUOTES} and {QUOTES}."
    );
    tell!(
        "Ctrl-C ends a reply; what it has said stays. A message that begins with / is typed with another / before it."
    );
}

/// Reads what is typed, with what was typed before at the arrow keys. It does so on a thread of its own, so that whoever
/// waits for it can be asked to end meanwhile.
pub(super) struct Keyboard {
    wanted: Sender<()>,
    lines: Receiver<rustyline::Result<String>>,
    /// Whether an interrupt wakes the thread, which gives the terminal back as it was.
    wakes: bool,
}

impl Keyboard {
    /// How soon it is seen that a chat is asked to end.
    const LOOK: Duration = Duration::from_millis(100);
    /// How long the thread may take to give the terminal back.
    const FAREWELL: Duration = Duration::from_secs(1);

    /// With a file of lines that were typed before, which those that follow are added to.
    pub(super) fn new(history: Option<&Path>) -> Result<Self> {
        let mut typist = Typist::new(history)?;
        // Who may print while a line is typed has the editor wait for more than keys: for interrupts, too.
        let wakes = typist.editor.create_external_printer().is_ok();
        let (wanted, wants) = channel();
        let (send, lines) = channel();
        let read = move || {
            while wants.recv().is_ok() && send.send(typist.read()).is_ok() {}
        };
        thread::Builder::new()
            .name("keyboard".into())
            .spawn(read)
            .context("cannot start a thread that reads what is typed")?;
        Ok(Self {
            wanted,
            lines,
            wakes,
        })
    }

    /// The next message or command; the end as soon as `is_over`. What is wrong with a line is an error, and the next one
    /// may be typed, unless it is a [`ReadlineError`].
    pub(super) fn read(&self, is_over: impl Fn() -> bool) -> Result<Typed> {
        const GONE: &str = "the thread that reads what is typed has ended";
        self.wanted.send(()).context(GONE)?;
        let line = loop {
            match self.lines.recv_timeout(Self::LOOK) {
                Ok(line) => break line,
                Err(RecvTimeoutError::Timeout) if is_over() => {
                    self.interrupt();
                    return Ok(Typed::End);
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!(GONE),
            }
        };
        match line {
            Ok(line) => understood(&line),
            Err(ReadlineError::Interrupted) => {
                tell!("Ctrl-D or /exit ends the chat; /help says what else can be typed");
                Ok(Typed::Nothing)
            }
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::InvalidData => {
                bail!("this line was left out, since it is not UTF-8; set the terminal to UTF-8")
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Has the thread stop reading, so that the terminal is as it was before.
    fn interrupt(&self) {
        if self.wakes && signal_hook::low_level::raise(SIGINT).is_ok() {
            self.lines.recv_timeout(Self::FAREWELL).ok();
        }
    }
}

/// What reads lines, on the thread of a [`Keyboard`].
struct Typist {
    editor: Editor<Lines, FileHistory>,
    history: Option<PathBuf>,
}

impl Typist {
    fn new(history: Option<&Path>) -> Result<Self> {
        let config = Config::builder()
            .max_history_size(MOST_HISTORY)?
            .history_ignore_space(true)
            .build();
        let mut editor = Editor::with_config(config)?;
        editor.set_helper(Some(Lines));
        if let Some(history) = history {
            match editor.load_history(history) {
                Err(ReadlineError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {}
                loaded => loaded.unwrap_or_else(|error| {
                    tell!(
                        "cannot read what was typed before from `{}`: {error}",
                        history.display()
                    );
                }),
            }
        }
        Ok(Self {
            editor,
            history: history.map(Path::to_path_buf),
        })
    }

    fn read(&mut self) -> rustyline::Result<String> {
        let line = self.editor.readline("> ")?;
        if !line.trim().is_empty() {
            self.editor.add_history_entry(&line)?;
            self.remember();
        }
        Ok(line)
    }

    /// Adds what was typed to the file; once that fails no more is written.
    fn remember(&mut self) {
        if let Some(history) = &self.history
            && let Err(error) = self.editor.append_history(history)
        {
            tell!(
                "cannot keep what is typed in `{}`: {error}",
                history.display()
            );
            self.history = None;
        }
    }
}

/// What a line means.
fn understood(line: &str) -> Result<Typed> {
    let bare = line.trim();
    if bare.is_empty() {
        return Ok(Typed::Nothing);
    }
    if let Some(path) = shown_file(bare) {
        return Ok(Typed::Command(Command::Image(path.to_owned())));
    }
    let mut words = bare.split_whitespace();
    let first = words.next().unwrap_or_default();
    let is_command = first
        .strip_prefix('/')
        .is_some_and(|name| !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_lowercase()));
    if is_command {
        return command(first, &words.collect::<Vec<_>>());
    }
    let message = message(bare);
    Ok(match message.trim().is_empty() {
        true => Typed::Nothing,
        false => Typed::Message(message),
    })
}

/// The file that a line `/image FILE` names, in quotation marks or without.
fn shown_file(line: &str) -> Option<&str> {
    let rest = line.strip_prefix("/image")?;
    let path = rest.strip_prefix(char::is_whitespace)?.trim();
    let quoted = ['"', '\''].into_iter().find_map(|mark| {
        let inner = path.strip_prefix(mark)?.strip_suffix(mark)?;
        (!inner.is_empty()).then_some(inner)
    });
    Some(quoted.unwrap_or(path))
}

/// A message without what made it one of several lines.
fn message(typed: &str) -> String {
    let quoted = typed
        .strip_prefix(QUOTES)
        .and_then(|rest| rest.strip_suffix(QUOTES));
    match quoted {
        Some(text) => text.trim_matches('\n').to_owned(),
        None => {
            let text = typed.replace("\\\n", "\n");
            match text.strip_prefix("//") {
                Some(rest) => format!("/{rest}"),
                None => text,
            }
        }
    }
}

fn command(name: &str, words: &[&str]) -> Result<Typed> {
    let given = |word: &&str| {
        word.parse::<SessionName>()
            .map_err(|why| anyhow!("`{word}`: {why}"))
    };
    let usage = || {
        let known = COMMANDS
            .iter()
            .find(|(usage, _)| usage.split(' ').next() == Some(name));
        match known {
            Some((usage, _)) => anyhow!("it is typed as `{usage}`"),
            None => anyhow!("there is no command `{name}`; /help lists those there are"),
        }
    };
    let command = match (name, words) {
        ("/exit" | "/quit" | "/bye", []) => return Ok(Typed::End),
        ("/help", []) => Command::Help,
        ("/memory", []) => Command::Memory,
        ("/retry", []) => Command::Retry,
        ("/new", []) => Command::New(None),
        ("/new", [name]) => Command::New(Some(given(name)?)),
        ("/fork", [name]) => Command::Fork(given(name)?),
        ("/switch", []) => Command::Switch(None),
        ("/switch", [name]) => Command::Switch(Some(given(name)?)),
        ("/drop", [name]) => Command::Drop(given(name)?),
        ("/save", []) => Command::Save(None),
        ("/save", [name]) => Command::Save(Some(given(name)?)),
        ("/load", [name]) => Command::Load(given(name)?),
        ("/rewind", []) => Command::Rewind(1),
        ("/rewind", [turns]) => {
            let turns = turns.parse().ok().filter(|turns| *turns > 0);
            Command::Rewind(turns.ok_or_else(usage)?)
        }
        _ => return Err(usage()),
    };
    Ok(Typed::Command(command))
}

/// When a message is whole, and what a command may go on as.
struct Lines;

impl Validator for Lines {
    fn validate(&self, typed: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match goes_on(typed.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

/// Whether more lines belong to what was typed.
fn goes_on(typed: &str) -> bool {
    match typed.trim_start().strip_prefix(QUOTES) {
        Some(rest) => !rest.trim_end().ends_with(QUOTES),
        None => typed.ends_with('\\'),
    }
}

impl Completer for Lines {
    type Candidate = String;

    fn complete(
        &self,
        line: &str,
        position: usize,
        _context: &rustyline::Context<'_>,
    ) -> rustyline::Result<(usize, Vec<String>)> {
        let begun = &line[..position];
        let names = COMMANDS
            .iter()
            .filter_map(|(usage, _)| usage.split(' ').next());
        let fitting = names.filter(|name| begun.starts_with('/') && name.starts_with(begun));
        Ok((0, fitting.map(str::to_owned).collect()))
    }
}

impl Hinter for Lines {
    type Hint = String;
}

impl Highlighter for Lines {}

impl Helper for Lines {}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(name: &str) -> SessionName {
        name.parse().expect("a name")
    }

    #[test]
    fn lines_are_messages_or_commands() {
        for (line, expected) in [
            ("Hello there", Typed::Message("Hello there".into())),
            ("  ", Typed::Nothing),
            ("/exit", Typed::End),
            ("/bye", Typed::End),
            ("/rewind", Typed::Command(Command::Rewind(1))),
            ("/rewind 3", Typed::Command(Command::Rewind(3))),
            (
                "/fork plan-b",
                Typed::Command(Command::Fork(name("plan-b"))),
            ),
            ("/save", Typed::Command(Command::Save(None))),
            (
                "//etc is a folder",
                Typed::Message("/etc is a folder".into()),
            ),
            (
                "/usr/bin is one, too",
                Typed::Message("/usr/bin is one, too".into()),
            ),
            ("one\\\ntwo", Typed::Message("one\ntwo".into())),
            (
                "\"\"\"\none\n  two\n\"\"\"",
                Typed::Message("one\n  two".into()),
            ),
            ("\"\"\"\"\"\"", Typed::Nothing),
        ] {
            assert_eq!(understood(line).expect(line), expected, "{line}");
        }
    }

    #[test]
    fn a_line_that_shows_an_image_names_its_file() {
        for (line, expected) in [
            ("/image cat.png", "cat.png"),
            ("  /image  a cat.png ", "a cat.png"),
            ("/image 'a cat.png'", "a cat.png"),
            ("/image \"a cat.png\"", "a cat.png"),
            ("/image \"", "\""),
        ] {
            let shown = Typed::Command(Command::Image(expected.into()));
            assert_eq!(understood(line).expect(line), shown, "{line}");
        }
        let error = understood("/image").expect_err("no file").to_string();
        assert_eq!(error, "it is typed as `/image FILE`");
        let message = Typed::Message("see /image cat.png".into());
        assert_eq!(understood("see /image cat.png").expect("text"), message);
    }

    #[test]
    fn commands_that_are_typed_wrong_say_how() {
        for (line, expected) in [
            (
                "/frok",
                "there is no command `/frok`; /help lists those there are",
            ),
            ("/fork", "it is typed as `/fork NAME`"),
            ("/rewind 0", "it is typed as `/rewind [TURNS]`"),
            ("/help me", "it is typed as `/help`"),
        ] {
            let error = understood(line).expect_err(line);
            assert_eq!(error.to_string(), expected);
        }
        let error = understood("/save ../notes")
            .expect_err("a path")
            .to_string();
        assert!(
            error.contains("`../notes`: a session's name has up to 64"),
            "{error}"
        );
    }

    #[test]
    fn text_goes_on_until_it_is_closed() {
        for (typed, expected) in [
            ("one", false),
            ("one\\", true),
            ("one\\\ntwo", false),
            ("\"\"\"one", true),
            ("\"\"\"one\"\"\"", false),
            ("\"\"\"one\ntwo\n\"\"\" ", false),
        ] {
            assert_eq!(goes_on(typed), expected, "{typed}");
        }
    }
}
