//! The chat of `lacuna run`, typed at a terminal.
#![cfg(target_os = "linux")]

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::fs::OFlags;
use rustix::process::{Pid, Signal, kill_process};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};

/// After which nothing more is expected to come.
const PATIENCE: Duration = Duration::from_secs(120);

const QUESTION: &str = "What is ownership?";

/// A program at a terminal of its own.
struct Terminal {
    keyboard: File,
    screen: Receiver<Vec<u8>>,
    child: Child,
    /// What was shown and not looked at yet, without what steers terminals.
    shown: String,
    partial: Vec<u8>,
}

impl Terminal {
    /// `lacuna run demo` with these arguments, which keeps sessions in `folder`, up to where something can be typed.
    fn run(folder: &Path, arguments: &[&str]) -> Self {
        let ours = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
        grantpt(&ours).expect("ours");
        unlockpt(&ours).expect("ours");
        let name = ptsname(&ours, Vec::new()).expect("a name");
        let mut options = OpenOptions::new();
        options.read(true).write(true);
        options.custom_flags(OFlags::NOCTTY.bits().cast_signed());
        let theirs = options
            .open(name.to_str().expect("text"))
            .expect("its other end");
        let again = || Stdio::from(theirs.try_clone().expect("another descriptor"));
        let child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(["run", "demo", "--sessions"])
            .arg(folder)
            .args(arguments)
            .env("TERM", "xterm")
            .env_remove("NO_COLOR")
            .stdin(again())
            .stdout(again())
            .stderr(again())
            .spawn()
            .expect("the program");
        let (send, screen) = channel();
        let mut from = File::from(ours);
        let keyboard = from.try_clone().expect("another descriptor");
        std::thread::spawn(move || {
            let mut bytes = [0; 4096];
            // A terminal that nobody has open any more is an error.
            while let Ok(read) = from.read(&mut bytes)
                && read > 0
                && send.send(bytes[..read].to_vec()).is_ok()
            {}
        });
        let mut terminal = Self {
            keyboard,
            screen,
            child,
            shown: String::new(),
            partial: Vec::new(),
        };
        terminal.wait_for("/help says what else there is");
        terminal.wait_for("> ");
        terminal
    }

    /// Waits until `text` is shown, and returns what is before it.
    fn wait_for(&mut self, text: &str) -> String {
        loop {
            if let Some(at) = self.shown.find(text) {
                let before = self.shown[..at].to_owned();
                self.shown.drain(..at + text.len());
                return before;
            }
            let Ok(bytes) = self.screen.recv_timeout(PATIENCE) else {
                panic!("waits for {text:?}, and there is {:?}", self.shown);
            };
            self.partial.extend(bytes);
            let (plain, left) = without_steering(&self.partial);
            self.shown += &plain;
            self.partial = left;
        }
    }

    /// Types a line, and returns what is shown of it and up to where the next can be typed.
    fn say(&mut self, line: &str) -> String {
        self.type_line(line);
        self.wait_for("\n> ")
    }

    fn type_line(&mut self, line: &str) {
        write!(self.keyboard, "{line}\r").expect("it listens");
        let last = line.rsplit('\r').next().expect("a line");
        self.wait_for(last);
    }

    /// The reply to a message, without the line of figures.
    fn reply(&mut self, message: &str) -> String {
        let all = self.say(message);
        let (reply, figures) = all.trim_end().rsplit_once('\n').expect("a line of figures");
        assert!(figures.contains("generated tokens"), "{all:?}");
        reply.trim().to_owned()
    }

    fn end(mut self) {
        write!(self.keyboard, "\u{4}").expect("it listens");
        let ended = self.child.wait().expect("it ran");
        assert!(ended.success(), "{ended}");
    }
}

/// Text without escape sequences and carriage returns, and bytes that may begin one or a character.
fn without_steering(bytes: &[u8]) -> (String, Vec<u8>) {
    let (mut plain, mut at) = (Vec::new(), 0);
    while at < bytes.len() {
        match (bytes[at], bytes.get(at + 1)) {
            (0x1b, Some(b'[')) => {
                let ends = |byte: &u8| (0x40..0x7f).contains(byte);
                match bytes[at + 2..].iter().position(ends) {
                    Some(length) => at += 3 + length,
                    None => break,
                }
            }
            (0x1b, Some(_)) => at += 2,
            (0x1b, None) => break,
            (b'\r', _) => at += 1,
            (byte, _) => {
                plain.push(byte);
                at += 1;
            }
        }
    }
    let whole = match std::str::from_utf8(&plain) {
        Err(error) if error.error_len().is_none() => error.valid_up_to(),
        _ => plain.len(),
    };
    let left = [&plain[whole..], &bytes[at..]].concat();
    let text = String::from_utf8_lossy(&plain[..whole]).into_owned();
    (text, left)
}

fn sessions(folder: &Path) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["sessions", "list", "--sessions"])
        .arg(folder)
        .output()
        .expect("the program");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn conversations_fork_go_back_and_are_kept() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chat = Terminal::run(folder.path(), &["-n", "24"]);
    let first = chat.reply(QUESTION);
    let second = chat.reply("And what is borrowing?");
    assert!(!first.is_empty() && !second.is_empty());

    // A copy says what the original said, and neither notices the other.
    assert!(chat.say("/fork plan-b").contains("plan-b: 2 turns"));
    let memory = chat.say("/memory");
    let shared = memory
        .lines()
        .find(|line| line.starts_with("plan-b:"))
        .expect("a line");
    assert!(!shared.contains("of which 0 B are shared"), "{memory}");
    assert!(chat.say("/rewind").contains("1 turns are left"));
    assert_eq!(chat.reply("And what is borrowing?"), second);
    assert!(chat.say("/switch main").contains("main: 2 turns"));
    assert!(chat.say("/rewind 2").contains("0 turns are left"));
    assert_eq!(chat.reply(QUESTION), first);
    assert_eq!(chat.reply("And what is borrowing?"), second);
    assert_eq!(chat.reply("/retry"), second);
    let listed = chat.say("/switch");
    assert!(
        listed.contains("* main: 2 turns") && listed.contains("  plan-b: 2 turns"),
        "{listed}"
    );

    // What is saved is there for others; what is dropped is not.
    chat.say("/save notes");
    assert!(
        sessions(folder.path()).contains("notes: 4 messages"),
        "{}",
        sessions(folder.path())
    );
    assert!(chat.say("/new").contains("chat-2: 0 turns"));
    assert!(chat.say("/drop plan-b").trim().is_empty());
    // Its memory went back to the system: what is left is the other's.
    let memory = chat.say("/memory");
    let after = |mark: &str| {
        let (_, rest) = memory.split_once(mark).expect("a figure");
        rest.split_once(',').expect("words").0.to_owned()
    };
    assert_eq!(after("KV of all: "), after("without sharing "), "{memory}");
    assert!(
        chat.say("/switch plan-b")
            .contains("error: there is no conversation `plan-b`")
    );
    assert!(
        chat.say("/save notes")
            .contains("error: the conversation `main` of this chat is kept as `notes`")
    );
    chat.end();

    let mut later = Terminal::run(folder.path(), &["-n", "24"]);
    assert!(
        later
            .say("/load nothing")
            .contains("error: there is no session `nothing`")
    );
    assert!(later.say("/load notes").contains("notes: 2 turns"));
    assert_eq!(later.reply("/retry"), second);
    later.end();
}

#[test]
fn messages_have_several_lines_and_what_was_typed_is_remembered() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chat = Terminal::run(folder.path(), &["-n", "8"]);
    let plain = chat.reply(QUESTION);
    chat.say("/rewind");
    let quoted = chat.reply(&format!("\"\"\"\r{QUESTION}\r\"\"\""));
    // The lines that were typed are shown anew with each that is added.
    assert!(quoted.ends_with(&format!("\"\"\"\n{plain}")), "{quoted}");
    assert!(
        chat.say("/frok")
            .contains("error: there is no command `/frok`")
    );
    assert!(chat.say("/help").contains("/fork NAME"));
    // An empty line is no end.
    write!(chat.keyboard, "\r").expect("it listens");
    chat.wait_for("> ");
    chat.end();

    let mut later = Terminal::run(folder.path(), &["-n", "8"]);
    // The line before `/help`, by the arrow key.
    write!(later.keyboard, "\u{1b}[A\u{1b}[A\r").expect("it listens");
    assert!(
        later
            .wait_for("\n> ")
            .contains("error: there is no command `/frok`")
    );
    later.end();

    let mut without = Terminal::run(folder.path(), &["-n", "8", "--no-history"]);
    write!(without.keyboard, "\u{1b}[A\r").expect("it listens");
    assert_eq!(without.wait_for("> ").trim(), "");
    without.end();
}

#[test]
fn an_interrupted_reply_stays_as_far_as_it_came() {
    let folder = tempfile::tempdir().expect("a folder");
    let arguments = [
        "--raw",
        "--ctx",
        "60000",
        "--temp",
        "0",
        "--stop",
        "never said",
    ];
    let mut chat = Terminal::run(folder.path(), &arguments);
    chat.type_line("Once upon a time, a a a a a a a a");
    chat.wait_for(" ");
    let pid = Pid::from_child(&chat.child);
    kill_process(pid, Signal::INT).expect("it runs");
    let reply = chat.wait_for("\n> ");
    assert!(reply.contains("generated tokens"), "{reply}");
    // And it goes on.
    assert!(chat.say("/memory").contains("main:"));
    chat.end();
}

/// What was said used to be lost with the terminal, and to a signal.
#[test]
fn a_chat_that_is_asked_to_end_keeps_its_session() {
    let folder = tempfile::tempdir().expect("a folder");
    for (name, signal) in [("terminated", Signal::TERM), ("hung-up", Signal::HUP)] {
        let mut chat = Terminal::run(folder.path(), &["-n", "8", "--session", name]);
        chat.reply(QUESTION);
        // With and without something typed, once and again.
        write!(chat.keyboard, "half a line").expect("it listens");
        chat.wait_for("half a line");
        let pid = Pid::from_child(&chat.child);
        kill_process(pid, signal).expect("it runs");
        let ended = chat.child.wait().expect("it ran");
        assert!(ended.success(), "{ended}");
        let sessions = sessions(folder.path());
        assert!(
            sessions.contains(&format!("{name}: 2 messages")),
            "{sessions}"
        );
    }

    // A terminal that is closed takes the place of what is typed and of what is shown.
    let mut chat = Terminal::run(folder.path(), &["-n", "8", "--session", "closed"]);
    chat.reply(QUESTION);
    let Terminal {
        keyboard,
        screen,
        mut child,
        ..
    } = chat;
    drop((keyboard, screen));
    // The thread that looks at the screen ends, and with it the last of our end, once something is shown.
    kill_process(Pid::from_child(&child), Signal::HUP).expect("it runs");
    child.wait().expect("it ran");
    let sessions = sessions(folder.path());
    assert!(sessions.contains("closed: 2 messages"), "{sessions}");
}

/// One byte used to end the chat, and what was said was lost.
#[test]
fn a_line_that_is_not_utf_8_costs_that_line_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chat = Terminal::run(folder.path(), &["-n", "8", "--session", "talk"]);
    let first = chat.reply(QUESTION);
    chat.keyboard.write_all(b"caf\xe9\r").expect("it listens");
    let said = chat.wait_for("\n> ");
    assert!(
        said.contains("error: this line was left out, since it is not UTF-8"),
        "{said}"
    );
    assert_eq!(chat.reply("/retry"), first);
    chat.end();
    assert!(sessions(folder.path()).contains("talk: 2 messages"));
}

/// It used to be said that two words without images were too long a text, with their images.
#[test]
fn a_full_context_is_called_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chat = Terminal::run(folder.path(), &["--ctx", "40", "--temp", "0"]);
    let mut shown = chat.say(QUESTION);
    while !shown.contains("error") {
        shown = chat.say("And then?");
    }
    assert!(
        shown.contains(
            "error: this message was left out: the conversation has filled the context of 40 tokens; /rewind goes back, \
             /new begins another one, and a larger --ctx holds more"
        ),
        "{shown}"
    );
    assert!(chat.say("/new").contains("0 turns"));
    // Longer than a line of the terminal, which breaks it.
    let long = "What is ownership? ".repeat(20);
    write!(chat.keyboard, "{long}\r").expect("it listens");
    chat.wait_for(
        "error: this message was left out: it has more than the context of 40 tokens holds; shorten it",
    );
    chat.wait_for("\n> ");
    chat.end();
}

#[test]
fn a_reply_that_a_full_context_cuts_off_says_so() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["run", "demo", "--raw", "--ctx", "16", "-p", "a a a a a a"])
        .stdin(Stdio::null())
        .output()
        .expect("the program");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        error.contains("the reply was cut off: it has filled the context of 16 tokens; a larger --ctx holds more"),
        "{error}"
    );
}

/// Two copies used to be kept under one name, the last one in the place of the first.
#[test]
fn a_session_is_in_a_chat_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut chat = Terminal::run(folder.path(), &["-n", "8"]);
    chat.reply(QUESTION);
    chat.say("/save notes");
    assert!(chat.say("/load notes").contains(
        "error: the conversation `main` of this chat is kept as `notes`; /switch main goes there"
    ));
    chat.end();
}
