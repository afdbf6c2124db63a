//! `lacuna embed` as a user meets it, on a tiny encoder with a vocabulary of letters.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn fixture(name: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders");
    let path: PathBuf = root.join(name);
    path.to_str().expect("UTF-8").to_owned()
}

fn model() -> String {
    fixture("bert/mean.gguf")
}

fn embed(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["embed", &model()])
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A command that refuses its arguments may be gone before it is written.
    let _ = child
        .stdin
        .take()
        .expect("piped")
        .write_all(input.as_bytes());
    child.wait_with_output().expect("the program ends")
}

/// The objects that a successful run prints, one a line.
fn lines(args: &[&str], input: &str) -> Vec<Value> {
    let output = embed(args, input);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("JSON lines")
}

fn vector(line: &Value) -> Vec<f64> {
    let elements = line["embedding"].as_array().expect("a list").iter();
    elements
        .map(|number| number.as_f64().expect("a number"))
        .collect()
}

fn length(vector: &[f64]) -> f64 {
    vector
        .iter()
        .map(|element| element * element)
        .sum::<f64>()
        .sqrt()
}

#[test]
fn every_line_gets_the_vector_that_it_has_alone() {
    // More lines than are read at once, and passes of a few of them.
    let texts: Vec<String> = (0..300u32)
        .map(|index| {
            char::from(b'a' + (index % 26) as u8)
                .to_string()
                .repeat(1 + index as usize % 9)
        })
        .collect();
    let input = texts.join("\n") + "\n";
    let found = lines(&["--json", "--batch", "40"], &input);
    assert_eq!(found.len(), texts.len());
    for (line, text) in found.iter().zip(&texts) {
        assert_eq!(line["text"], text.as_str());
        // A letter a token, between those that go around a text.
        assert_eq!(line["tokens"], text.len() + 2);
        assert!((length(&vector(line)) - 1.0).abs() < 1e-5);
    }
    for index in [0, 8, 257] {
        let alone = lines(&[&texts[index], "--json", "--threads", "1"], "");
        assert_eq!(alone, [found[index].clone()]);
    }
}

#[test]
fn where_nothing_multiplies_bf16_it_is_refused_with_the_way_out() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["embed", &model(), "abc", "--matmul-precision", "bf16"])
        .env("LACUNA_CPU", "portable")
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8(output.stderr).expect("UTF-8");
    assert!(error.contains("portable"), "{error}");
    assert!(error.contains("--matmul-precision f32"), "{error}");
}

#[test]
fn plain_output_is_the_numbers_and_dash_is_standard_input() {
    let output = embed(&["-"], "abcd\r\n");
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let numbers: Vec<f64> = text
        .split_whitespace()
        .map(|it| it.parse().expect("a number"))
        .collect();
    assert_eq!(numbers, vector(&lines(&["abcd", "--json"], "")[0]));
}

#[test]
fn fewer_dimensions_are_the_first_brought_to_length_1_again() {
    let whole = vector(&lines(&["abcd", "--json"], "")[0]);
    let cut = vector(&lines(&["abcd", "--json", "--dimensions", "5"], "")[0]);
    let scale = length(&whole[..5]);
    assert_eq!(cut.len(), 5);
    for (a, b) in whole.iter().zip(&cut) {
        assert!((a / scale - b).abs() < 1e-6);
    }
    assert_eq!(
        lines(&["abcd", "--json", "--dimensions", "24"], ""),
        lines(&["abcd", "--json"], "")
    );
}

#[test]
fn texts_that_are_longer_than_the_model_takes_are_refused_or_cut() {
    let long = "a ".repeat(40);
    let output = embed(&["--json"], &format!("ab\n{long}\n"));
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.contains("text 2") && error.contains("--truncate"),
        "{error}"
    );
    let cut = lines(&[&long, "--json", "--truncate"], "");
    assert_eq!(cut[0]["tokens"], 24);
    let same = lines(&[&"a ".repeat(22), "--json"], "");
    assert_eq!(cut[0]["embedding"], same[0]["embedding"]);
}

#[test]
fn what_cannot_be_embedded_is_refused_by_number() {
    for (args, input, code, named) in [
        (&["--json"][..], "a\n\nb\n", 1, "text 2 is empty"),
        (&["  "][..], "", 1, "text 1 is empty"),
        (&[][..], "", 1, "standard input"),
        (&["a", "--dimensions", "0"][..], "", 2, "dimensions"),
        (&["a", "--dimensions", "25"][..], "", 2, "24"),
    ] {
        let output = embed(args, input);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
        assert!(error.contains(named), "{args:?}: {error}");
    }
}

#[test]
fn each_command_refuses_the_other_kind_of_model() {
    let run = |args: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(args)
            .stdin(Stdio::null())
            .output()
            .expect("the program starts");
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let encoder = model();
    assert!(run(&["embed", "demo", "a"]).contains("makes no embeddings"));
    let reranker = fixture("bert-scores/hf");
    for args in [
        &["run", &encoder, "-p", "a"][..],
        &["embed", &reranker, "a"][..],
    ] {
        let error = run(args);
        assert!(
            error.contains("embeddings") && !error.contains("panicked"),
            "{args:?}: {error}"
        );
    }
    for model in ["demo", &encoder] {
        assert!(run(&["rerank", model, "a", "b"]).contains("reranker"));
    }
}

fn succeeds(args: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    String::from_utf8(output.stdout).expect("UTF-8")
}

#[test]
fn texts_are_printed_behind_their_scores_best_first() {
    let reranker = fixture("bert-scores/hf");
    let texts = ["a", "x y z", "abcd", "q.", "a"];
    let args = [&["rerank", &reranker, "ab!", "--json"], &texts[..]].concat();
    let lines = succeeds(&args);
    let lines: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(lines.len(), texts.len());
    let score = |line: &Value| line["relevance_score"].as_f64().expect("a number");
    assert!(lines.is_sorted_by(|a, b| score(a) >= score(b)), "{lines:?}");
    for line in &lines {
        let index = line["index"].as_u64().expect("a number") as usize;
        assert_eq!(line["text"], texts[index]);
    }
    let best = succeeds(&[&["rerank", &reranker, "ab!", "--top", "1"], &texts[..]].concat());
    let text = lines[0]["text"].as_str().expect("text");
    assert_eq!(best, format!("{:.4}  {text}\n", score(&lines[0])));
}

#[test]
fn the_plan_of_an_encoder_is_what_it_commits() {
    let encoder = model();
    let plan = |more: &[&str]| -> Value {
        let args = [&["plan", &encoder, "--json"], more].concat();
        serde_json::from_str(&succeeds(&args)).expect("JSON")
    };
    let usual = plan(&[]);
    assert_eq!(
        (&usual["dimensions"], &usual["context_tokens"]),
        (&24.into(), &24.into())
    );
    let parts = usual["committed"].as_object().expect("parts").values();
    let sum: u64 = parts.map(|part| part.as_u64().expect("bytes")).sum();
    assert_eq!(usual["committed_bytes"], sum);
    let small = plan(&["--batch", "1", "--ctx", "8"]);
    let activations = |plan: &Value| {
        plan["committed"]["activation_bytes"]
            .as_u64()
            .expect("bytes")
    };
    assert!(activations(&small) < activations(&usual));
    assert_eq!(small["batch_tokens"], 1);
    // One that is longer than a pass has memory for itself, and one that is not has none.
    assert_eq!(usual["long_text_bytes"], 0);
    assert!(small["long_text_bytes"].as_u64() > Some(activations(&small)));
    let table = succeeds(&["plan", &encoder]);
    assert!(table.contains("embeddings of 24 elements"), "{table}");
    let reranker = succeeds(&["plan", &fixture("bert-scores/hf")]);
    assert!(reranker.contains("scores of pairs"), "{reranker}");
}

#[test]
fn prompts_are_put_in_front_by_name_or_as_written() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        let from = Path::new(&fixture("bert/hf")).join(file);
        std::fs::copy(from, folder.path().join(file)).expect("room to copy");
    }
    let prompts = r#"{"prompts": {"query": "abcd "}}"#;
    let settings = folder.path().join("config_sentence_transformers.json");
    std::fs::write(settings, prompts).expect("room for it");
    let model = folder.path().to_str().expect("UTF-8");
    let embedding = |args: &[&str]| -> Value {
        let line = succeeds(&[&["embed", model, "--json"], args].concat());
        let line: Value = serde_json::from_str(&line).expect("JSON");
        line["embedding"].clone()
    };
    let written = embedding(&["abcd x"]);
    assert_eq!(embedding(&["x", "--prompt-name", "query"]), written);
    assert_eq!(embedding(&["x", "--prompt", "abcd "]), written);
    assert_ne!(embedding(&["x"]), written);
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["embed", model, "x", "--prompt-name", "passage"])
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("query"), "{error}");
}

#[test]
fn a_server_of_embeddings_refuses_a_folder_for_kv_that_it_would_not_use() {
    let folder = tempfile::tempdir().expect("a folder");
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["serve", &model(), "--kv-cache"])
        .arg(folder.path().join("kv"))
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(error.contains("leave out --kv-cache"), "{error}");
    assert!(!folder.path().join("kv").exists());
}
