//! The program, run to its end.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

pub(crate) fn lacuna(args: &[&str]) -> Output {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        .output();
    output.expect("the program starts")
}

/// What it prints, of a command that succeeds.
pub(crate) fn json(args: &[&str]) -> Value {
    let output = lacuna(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {error}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Asserts that it ends with `code` and says `words`.
pub(crate) fn refused(args: &[&str], code: i32, words: &str) {
    let output = lacuna(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    assert!(
        error.contains(words),
        "{args:?} should say `{words}`: {error}"
    );
    assert!(!error.contains("panicked"), "{args:?}: {error}");
}

/// A path as an argument.
pub(crate) fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}
