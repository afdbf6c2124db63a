//! What a command leaves on the terminal: results on standard output, everything else on standard
//! error, and an exit code of 2 for arguments that make no sense and 1 for what went wrong.
//!
//! Nothing else in the program prints. Output that cannot be written ends the command: quietly when
//! whoever read it has gone, as `head` does, and with an error when the disk is full. What a file or
//! a model says cannot steer the terminal: control characters are shown as escapes.

use std::fmt;
use std::io::{self, IsTerminal, StdoutLock, Write};
use std::process::ExitCode;

use anyhow::Result;
use lacuna_engine::EngineError;
use lacuna_kernels::CpuError;
use lacuna_kv::KvError;
use lacuna_models::PromptError;
use lacuna_models::plan::PlanError;
use lacuna_pages::Error as PagesError;
use lacuna_server::StartError;
use lacuna_text::tokenizer::TokenizerError;
use serde::Serialize;

use crate::markdown::Styled;

/// Arguments that cannot be carried out whatever the files say.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Usage(pub String);

/// Standard output that cannot be written to.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub struct OutputError(io::Error);

/// Prints one JSON object and a line feed on standard output.
///
/// # Errors
/// [`OutputError`], as for everything that is printed there.
pub fn json(value: &impl Serialize) -> Result<()> {
    on_stdout(|out| {
        serde_json::to_writer(&mut *out, value)?;
        writeln!(out)
    })
}

/// Prints for people on standard output what `write` writes.
///
/// # Errors
/// [`OutputError`].
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    on_stdout(|out| write(&mut Escaping(out)))
}

/// Prints text that is itself the result, such as a model's: on a terminal without what would steer
/// it, elsewhere as it is.
///
/// # Errors
/// [`OutputError`].
pub fn text(text: &str) -> Result<()> {
    on_stdout(|out| match out.is_terminal() {
        true => Escaping(out).write_all(text.as_bytes()),
        false => out.write_all(text.as_bytes()),
    })
}

/// Prints a part of the result in the looks that it has, on a terminal [that shows them](shows_styles).
///
/// # Errors
/// [`OutputError`].
pub fn styled(parts: &[Styled]) -> Result<()> {
    on_stdout(|out| {
        for Styled { text, style } in parts {
            let codes = style.codes();
            let usual = if codes.is_empty() { "" } else { "\u{1b}[0m" };
            out.write_all(codes.as_bytes())?;
            Escaping(&mut *out).write_all(text.as_bytes())?;
            out.write_all(usual.as_bytes())?;
        }
        Ok(())
    })
}

/// Whether standard output is a terminal on which text may have more than one look: not where `NO_COLOR` is set, nor on
/// one that knows none.
#[must_use]
pub fn shows_styles() -> bool {
    let is_set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty());
    let knows_none = is_set("TERM").is_none_or(|terminal| terminal == "dumb");
    io::stdout().is_terminal() && is_set("NO_COLOR").is_none() && !knows_none
}

/// Prints text beside the result on standard error, such as what a model thinks: on a terminal dimly, and
/// nowhere with what would steer one. There is nobody to tell when that fails.
pub fn aside(text: &str) {
    let mut out = io::stderr().lock();
    let (dim, usual) = match out.is_terminal() {
        true => ("\u{1b}[2m", "\u{1b}[22m"),
        false => ("", ""),
    };
    write!(out, "{dim}").ok();
    Escaping(&mut out).write_all(text.as_bytes()).ok();
    write!(out, "{usual}").ok();
    out.flush().ok();
}

fn on_stdout(write: impl FnOnce(&mut StdoutLock<'_>) -> io::Result<()>) -> Result<()> {
    let mut out = io::stdout().lock();
    let written = write(&mut out).and_then(|()| out.flush());
    Ok(written.map_err(OutputError)?)
}

/// Prints a line for people on standard error. There is nobody to tell when that fails.
#[macro_export]
macro_rules! tell {
    ($($line:tt)*) => {
        $crate::output::line(format_args!($($line)*))
    };
}

/// What [`tell!`](crate::tell) does.
#[doc(hidden)]
pub fn line(line: fmt::Arguments<'_>) {
    let mut out = Escaping(io::stderr().lock());
    writeln!(out, "{line}").ok();
}

/// A name from a file as a part of a line: without line feeds, which would begin one of its own.
#[must_use]
pub fn name(name: &str) -> String {
    name.chars()
        .map(|c| match is_steering(c) || matches!(c, '\n' | '\t') {
            true => c.escape_default().to_string(),
            false => c.to_string(),
        })
        .collect()
}

/// Whether a terminal would do something else with `c` than show it and go on: control characters
/// but line feed and tab, and those that change the order in which others are shown.
fn is_steering(c: char) -> bool {
    let is_order =
        matches!(c, '\u{200E}' | '\u{200F}' | '\u{202A}'..='\u{202E}' | '\u{2066}'..='\u{2069}');
    is_order || (c.is_control() && !matches!(c, '\n' | '\t'))
}

/// Writes text with escapes, such as `\u{1b}`, for the characters that would steer a terminal.
struct Escaping<W>(W);

impl<W: Write> Write for Escaping<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for chunk in bytes.utf8_chunks() {
            let mut plain = chunk.valid();
            while let Some(at) = plain.find(is_steering) {
                let (before, rest) = plain.split_at(at);
                let mut after = rest.chars();
                let escaped = after.next().map(char::escape_default);
                self.0.write_all(before.as_bytes())?;
                write!(
                    self.0,
                    "{}",
                    escaped.into_iter().flatten().collect::<String>()
                )?;
                plain = after.as_str();
            }
            self.0.write_all(plain.as_bytes())?;
            if !chunk.invalid().is_empty() {
                self.0.write_all("\u{FFFD}".as_bytes())?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Prints what the command line asks to be shown (help, version) or what is wrong with it.
pub fn usage(error: &clap::Error) -> ExitCode {
    match error.print() {
        Err(cause) if !error.use_stderr() => report(&OutputError(cause).into()),
        _ => ExitCode::from(if error.use_stderr() { 2 } else { 0 }),
    }
}

/// Prints `error` with its causes and says how the process should exit.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if let Some(OutputError(cause)) = error.downcast_ref()
        && cause.kind() == io::ErrorKind::BrokenPipe
    {
        return ExitCode::SUCCESS;
    }
    tell!("error: {}", with_causes(error));
    if let Some(advice) = advice(error) {
        tell!("help: {advice}");
    }
    ExitCode::from(if is_usage(error) { 2 } else { 1 })
}

/// `error` and what it came from, each said once: many errors say their cause themselves, and have it as their cause
/// besides.
#[must_use]
pub fn with_causes(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |said, cause| {
        let cause = cause.to_string();
        match said.is_empty() {
            true => cause,
            false if said.contains(&cause) => said,
            false => format!("{said}: {cause}"),
        }
    })
}

/// The engine's error in `error`, if it is one.
fn engine(error: &anyhow::Error) -> Option<&EngineError> {
    match error.downcast_ref() {
        Some(StartError::Engine(error)) => Some(error),
        _ => error.downcast_ref(),
    }
}

/// `error` with what could be asked for instead, if memory is what it lacks: `advice` names options of
/// the command that take less.
#[must_use]
pub fn advise(error: anyhow::Error, advice: &str) -> anyhow::Error {
    let (what, raise) = match engine(&error) {
        Some(EngineError::BudgetTooSmall(_) | EngineError::ProcessTooLarge { .. }) => {
            ("", "raise --budget, or ")
        }
        Some(EngineError::MemoryShort { .. }) => ("", ""),
        Some(EngineError::Kv(KvError::Pages(PagesError::OutOfPages { .. }))) => {
            ("the memory for KV pages is full: ", "raise --budget, or ")
        }
        _ => return error,
    };
    anyhow::anyhow!("{what}{}; {raise}{advice}", with_causes(&error))
}

/// Whether a text was refused because it cannot fit the context.
#[must_use]
pub fn is_long_text(error: &anyhow::Error) -> bool {
    let of_engine = engine(error).is_some_and(|error| {
        matches!(
            error,
            EngineError::PromptTooLong { .. } | EngineError::Kv(KvError::ContextFull { .. })
        )
    });
    let tokenizer = match error.downcast_ref() {
        Some(PromptError::Tokenizer(error)) => Some(error),
        _ => error.downcast_ref(),
    };
    of_engine
        || matches!(
            tokenizer,
            Some(TokenizerError::TooLong { .. } | TokenizerError::TooManyTokens { .. })
        )
}

/// Which options have to do with `error`. The libraries' own messages name none, because whoever
/// calls a library has no options.
fn advice(error: &anyhow::Error) -> Option<&'static str> {
    if let Some(PlanError::BatchTooLarge { .. }) = error.downcast_ref() {
        return Some("--batch takes the tokens of one pass");
    }
    if is_long_text(error) {
        return Some("--ctx takes the tokens of the context");
    }
    match error.downcast_ref() {
        Some(StartError::OpenToAll { .. }) => return Some("--open-to-all lets everybody in"),
        Some(StartError::NotShared { .. }) => {
            return Some("--share-prefixes has all keys share them");
        }
        _ => {}
    }
    Some(match engine(error)? {
        EngineError::TooManyThreads { .. } => "--threads takes the number of threads",
        EngineError::Cpu(CpuError::NoBf16(_)) | EngineError::RoundedNeurons => {
            "--matmul-precision f32 computes products in f32"
        }
        EngineError::Kv(KvError::NoPageSize) => "--kv dense needs no pages",
        EngineError::Plan(PlanError::BatchTooLarge { .. }) => {
            "--max-batched-tokens takes the tokens of one pass"
        }
        EngineError::NotFinite(_) => {
            "--check-finite looks after every layer and names the first one that is damaged"
        }
        _ => return None,
    })
}

fn is_usage(error: &anyhow::Error) -> bool {
    let opens = matches!(error.downcast_ref(), Some(StartError::OpenToAll { .. }));
    opens
        || error.downcast_ref::<Usage>().is_some()
        || matches!(
            engine(error),
            Some(
                EngineError::TooManyThreads { .. }
                    | EngineError::Cpu(CpuError::NoBf16(_))
                    | EngineError::RoundedNeurons
                    | EngineError::Plan(PlanError::EmptyContext | PlanError::EmptyBatch)
                    | EngineError::Sampling(_)
            )
        )
}

/// `bytes` in the largest binary unit that leaves at least one whole.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() / 10).min(4);
    let value = bytes as f64 / f64::from(1u32 << 10).powi(power.cast_signed());
    let digits = if power == 0 || value >= 100.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", UNITS[power as usize])
}

/// What follows on weights that were something else in their file.
pub fn converted(from: Option<&str>) -> String {
    from.map_or_else(String::new, |from| format!(", converted from {from}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn escaped(text: &str) -> String {
        let mut out = Vec::new();
        write!(Escaping(&mut out), "{text}").expect("memory takes it");
        String::from_utf8(out).expect("text")
    }

    #[test]
    fn what_would_steer_a_terminal_is_shown_instead() {
        assert_eq!(
            escaped("a\u{1b}[2Jb\r\u{7}\u{7f}\u{9b}c\n\td"),
            "a\\u{1b}[2Jb\\r\\u{7}\\u{7f}\\u{9b}c\n\td"
        );
        assert_eq!(escaped("\u{202e}gpj.exe"), "\\u{202e}gpj.exe");
        assert_eq!(escaped("él, 東京, 🦀"), "él, 東京, 🦀");
        assert_eq!(name("two\nlines\u{1b}"), "two\\nlines\\u{1b}");
    }

    #[test]
    fn a_cause_is_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("writing failed: {0}")]
        struct Writing(#[from] io::Error);

        let full = || Writing(io::Error::other("the disk is full"));
        let error = anyhow::Error::new(full()).context("cannot write `a.gguf`");
        assert_eq!(
            with_causes(&error),
            "cannot write `a.gguf`: writing failed: the disk is full"
        );
        let error = anyhow::anyhow!("the disk is slow").context("cannot write");
        assert_eq!(with_causes(&error), "cannot write: the disk is slow");
    }

    #[test]
    fn an_output_that_is_full_is_an_error_and_one_that_nobody_reads_is_not() {
        let full = OutputError(io::ErrorKind::StorageFull.into());
        assert_eq!(report(&full.into()), ExitCode::from(1));
        let closed = OutputError(io::ErrorKind::BrokenPipe.into());
        assert_eq!(report(&closed.into()), ExitCode::SUCCESS);
        let elsewhere = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(report(&elsewhere.into()), ExitCode::from(1));
    }

    #[test]
    fn bytes_are_readable() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(117_440_512), "112 MiB");
        assert_eq!(bytes(9 << 29), "4.5 GiB");
    }
}
