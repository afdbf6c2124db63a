//! `lacuna embed`: a vector for each text.

use std::io::{BufRead, IsTerminal, Read};

use anyhow::{Context, Result, bail, ensure};
use lacuna::{Embedder, EmbedderConfig, EncodeLimits, Excess, shortened};
use lacuna_cli::{Bars, open_files, output};
use lacuna_files::Progress;
use serde::Serialize;

use crate::cli::{EmbedArgs, PassArgs};

/// One text's line with `--json`.
#[derive(Serialize)]
struct Line<'a> {
    text: &'a str,
    /// How many, those that the vocabulary puts around a text included.
    tokens: usize,
    embedding: &'a [f32],
}

/// Bytes of a line at most. The longest text that a model takes has a hundredth of it.
const MOST_LINE_BYTES: usize = 1 << 20;

/// Texts that are read, embedded and printed before the next are read.
const TEXTS_AT_ONCE: usize = 256;

/// What tokenizing a line may hold besides it.
pub(super) const LIMITS: EncodeLimits = EncodeLimits {
    tokens: usize::MAX,
    workspace_bytes: 512 << 20,
};

pub(crate) fn run(args: &EmbedArgs) -> Result<()> {
    let files = open_files(&args.model)?;
    let cannot_load = || format!("cannot load `{}`", args.model.model);
    let described = lacuna::describe(&files).with_context(cannot_load)?;
    Embedder::check(&described.spec)?;
    let most = described.spec.embedding_width().unwrap_or(0);
    if let Some(asked) = args.dimensions.filter(|asked| asked.get() > most) {
        bail!(output::Usage(format!(
            "--dimensions {asked} is more than the {most} of the model's embeddings"
        )));
    }
    let model = lacuna::Model::load(files).with_context(cannot_load)?;
    let mut embedder = Embedder::new(model.into(), &args.passes.config())?;
    let known = embedder.model().prompts();
    let prompt = match &args.prompt {
        Some(prompt) => prompt.clone(),
        None => {
            let found = known.get(args.prompt_name.as_deref());
            found
                .map_err(|error| output::Usage(error.to_string()))?
                .to_owned()
        }
    };
    let mut job = Job {
        embedder: &mut embedder,
        args,
        prompt: &prompt,
    };
    match args.text.as_deref() {
        None | Some("-") => {
            let mut progress = Bars::default();
            if !std::io::stdout().is_terminal() {
                progress.begin("embedding", None);
            }
            embed_lines(&mut job, &mut std::io::stdin().lock(), &mut progress)
        }
        Some(text) => embed(&mut job, &[text.to_owned()], 0),
    }
}

impl PassArgs {
    pub(super) fn config(&self) -> EmbedderConfig {
        EmbedderConfig {
            threads: self.cpu.threads,
            matmul_precision: self.cpu.matmul_precision,
            batch_tokens: self.batch.get(),
            context_tokens: self.ctx.map(usize::from),
            ..EmbedderConfig::default()
        }
    }

    pub(super) fn excess(&self) -> Excess {
        match self.truncate {
            true => Excess::Cut,
            false => Excess::Refuse,
        }
    }
}

/// What embeds, how, and what goes in front of each text.
struct Job<'a> {
    embedder: &'a mut Embedder,
    args: &'a EmbedArgs,
    prompt: &'a str,
}

/// Embeds each line, some at a time.
fn embed_lines(
    job: &mut Job<'_>,
    input: &mut impl BufRead,
    progress: &mut dyn Progress,
) -> Result<()> {
    let (mut done, mut is_end) = (0, false);
    // Once it has ended nothing more is read: a terminal would wait for a second end.
    while !is_end {
        let lines;
        (lines, is_end) = read_lines(input, done)?;
        progress.advance(lines.iter().map(|line| line.len() as u64 + 1).sum());
        if !lines.is_empty() {
            embed(job, &lines, done)?;
        }
        done += lines.len();
    }
    progress.finish();
    ensure!(
        done > 0,
        "there is no text on standard input; give one, a line each"
    );
    Ok(())
}

/// The next lines, as many as are embedded at once, and whether those are the last.
fn read_lines(input: &mut impl BufRead, before: usize) -> Result<(Vec<String>, bool)> {
    let mut lines = Vec::new();
    while lines.len() < TEXTS_AT_ONCE {
        match read_line(input, before + lines.len())? {
            Some(line) => lines.push(line),
            None => return Ok((lines, true)),
        }
    }
    Ok((lines, false))
}

/// The next line, without what ends it; `None` at the end.
pub(super) fn read_line(input: &mut impl BufRead, before: usize) -> Result<Option<String>> {
    let number = before + 1;
    let mut line = Vec::new();
    let most = MOST_LINE_BYTES as u64 + 1;
    let read = input.take(most).read_until(b'\n', &mut line);
    if read.context("cannot read standard input")? == 0 {
        return Ok(None);
    }
    ensure!(
        line.len() <= MOST_LINE_BYTES,
        "line {number} has more than {MOST_LINE_BYTES} bytes, which no model takes"
    );
    while line
        .last()
        .is_some_and(|byte| matches!(byte, b'\n' | b'\r'))
    {
        line.pop();
    }
    let line = String::from_utf8(line);
    line.map(Some)
        .with_context(|| format!("line {number} is not UTF-8 text"))
}

/// Embeds and prints `texts`, which come after `before` others.
fn embed(job: &mut Job<'_>, texts: &[String], before: usize) -> Result<()> {
    let Job {
        embedder,
        args,
        prompt,
    } = job;
    let encoder = embedder.encoder().clone();
    let mut tokens = Vec::with_capacity(texts.len());
    for (number, text) in (before + 1..).zip(texts) {
        ensure!(
            !text.trim().is_empty(),
            "text {number} is empty; leave it out"
        );
        let most = encoder.max_tokens();
        let text = format!("{prompt}{text}");
        let found = encoder.text(&text, args.passes.excess(), &LIMITS).with_context(|| {
            format!("text {number} cannot be embedded (the model takes {most} tokens; --truncate cuts longer texts)")
        })?;
        tokens.push(found);
    }
    let mut numbered = texts.iter().zip(&tokens);
    let mut printed = Ok(());
    embedder.embed(&tokens, |embedding| {
        let Some((text, tokens)) = numbered.next().filter(|_| printed.is_ok()) else {
            return;
        };
        printed = print(args, text, tokens.len(), embedding);
    })?;
    printed
}

fn print(args: &EmbedArgs, text: &str, tokens: usize, embedding: &[f32]) -> Result<()> {
    let dimensions = args.dimensions.map_or(embedding.len(), usize::from);
    let embedding = shortened(embedding, dimensions)?;
    if args.model.json {
        return output::json(&Line {
            text,
            tokens,
            embedding: &embedding,
        });
    }
    let numbers: Vec<String> = embedding.iter().map(f32::to_string).collect();
    output::text(&(numbers.join(" ") + "\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A terminal: after its end more can be typed. It used to be waited for, until a second end.
    struct Terminal<'a>(&'a [&'a str]);

    impl Read for Terminal<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let (typed, left) = self.0.split_first().expect("nobody reads on");
            self.0 = left;
            buffer[..typed.len()].copy_from_slice(typed.as_bytes());
            Ok(typed.len())
        }
    }

    #[test]
    fn nothing_is_read_once_the_text_has_ended() {
        let mut terminal = std::io::BufReader::new(Terminal(&["one\n", "two\n", ""]));
        let (lines, is_end) = read_lines(&mut terminal, 0).expect("text");
        assert_eq!(
            (&lines[..], is_end),
            (&["one".into(), "two".into()][..], true)
        );
    }
}
