//! `lacuna tokenize`: text to token ids and back. Only the vocabulary is loaded.

use anyhow::{Context, Result};
use lacuna::{AddSpecial, Decode, ParseSpecial, Special, Tokenizer};
use serde::Serialize;

use crate::cli::TokenizeArgs;
use crate::commands::text_or_stdin;
use lacuna_cli::open_files;
use lacuna_cli::output;

#[derive(Serialize)]
struct Report {
    tokens: Vec<u32>,
    text: String,
}

pub(crate) fn run(args: &TokenizeArgs) -> Result<()> {
    let files = open_files(&args.model)?;
    let tokenizer = lacuna::Tokenizer::from_files(&files)?;
    let input = text_or_stdin(args.prompt.as_deref())?;
    let report = if args.decode {
        decode(&tokenizer, &input)?
    } else {
        encode(&tokenizer, input, args)?
    };
    if args.model.json {
        return output::json(&report);
    }
    let line = if args.decode {
        report.text
    } else {
        let ids: Vec<String> = report.tokens.iter().map(u32::to_string).collect();
        ids.join(" ")
    };
    output::text(&(line + "\n"))
}

fn encode(tokenizer: &Tokenizer, text: String, args: &TokenizeArgs) -> Result<Report> {
    let add = if args.add_special {
        AddSpecial::Yes
    } else {
        AddSpecial::No
    };
    let parse = if args.parse_special {
        ParseSpecial::Yes
    } else {
        ParseSpecial::No
    };
    Ok(Report {
        tokens: tokenizer.encode(&text, Special { add, parse })?,
        text,
    })
}

fn decode(tokenizer: &Tokenizer, input: &str) -> Result<Report> {
    let tokens = input
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty())
        .map(|word| {
            word.parse()
                .with_context(|| format!("`{word}` is not a token id"))
        })
        .collect::<Result<Vec<u32>>>()?;
    Ok(Report {
        text: tokenizer.decode(&tokens, Decode::MARKUP)?,
        tokens,
    })
}
