//! A real model with windows, Gemma 3 270M: how well it predicts, and what memory its KV cache takes.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// What `lacuna command MODEL args` reports, with `input` as a file on its standard input.
fn report(command: &str, args: &[&str], input: &Path) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .arg(command)
        .arg(root().join("target/models/gemma-3-270m-q4_k_m.gguf"))
        .args(args)
        .arg("--json")
        .stdin(Stdio::from(File::open(input).expect("readable")))
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// The first `bytes` bytes of an English text.
fn english(bytes: usize) -> tempfile::NamedTempFile {
    let text = fs::read_to_string(root().join("models/demo/heldout.txt")).expect("committed");
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    let cut = &text[..text.floor_char_boundary(bytes)];
    file.write_all(cut.as_bytes()).expect("written");
    file
}

fn number(report: &Value, path: &str) -> u64 {
    let found = report.pointer(path).and_then(Value::as_u64);
    found.unwrap_or_else(|| panic!("{path} is a number in {report}"))
}

/// As `bench/peers/agreement.py` found it with llama.cpp, on the same file and windows.
#[test]
#[ignore = "needs Gemma 3: run .ci/fetch-models"]
fn perplexity_is_that_of_llama_cpp() {
    const LLAMA_CPP: f64 = 14.562;
    let text = english(8_000);
    let path = text.path().to_str().expect("UTF-8");
    // On every processor alike.
    let args = [path, "--ctx", "512", "--matmul-precision", "f32"];
    let found = report("perplexity", &args, text.path());
    let perplexity = found["perplexity"].as_f64().expect("a number");
    let error = (perplexity / LLAMA_CPP - 1.0).abs();
    assert!(error < 0.005, "{found}");
}

#[test]
#[ignore = "needs Gemma 3: run .ci/fetch-models"]
fn windows_keep_their_rows_and_no_more_however_long_the_text() {
    // K and V of one head of 256 in f16.
    const ROW_BYTES: u64 = 2 * 256 * 2;
    const BUFFERS: u64 = 2 * 18;
    for bytes in [6_000, 12_000] {
        let text = english(bytes);
        let args = ["--raw", "--temp", "0", "-n", "2", "--ctx", "32768"];
        let found = report("run", &args, text.path());
        // The last token chosen has no row.
        let tokens = number(&found, "/prompt_tokens") + number(&found, "/generated_tokens") - 1;
        let rows = 3 * tokens + 15 * 512;
        let page = number(&found, "/kv/page_bytes");
        let most = rows * ROW_BYTES + BUFFERS * page;
        let committed = number(&found, "/kv/committed_bytes");
        assert!(
            committed <= most,
            "{committed} after {tokens} tokens, {most} at most"
        );
        let least = (rows - 15) * ROW_BYTES;
        assert!(committed >= least, "rows of a window are missing");
        let kernel = number(&found, "/memory/resident/shared_memory_bytes");
        assert!(kernel <= most, "{kernel} by the kernel, {most} at most");
    }
}
