//! `lacuna serve` in a process of its own.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use serde_json::Value;

/// A server that ends with the test.
pub(crate) struct Served {
    process: Child,
    pub(crate) url: String,
}

impl Served {
    pub(crate) fn start(model: &str, arguments: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(["serve", model, "--port", "0", "--json"])
            .args(arguments)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        let ready: Value = serde_json::from_str(&line).expect("one JSON object");
        let url = ready["url"].as_str().expect("a URL").to_owned();
        Self { process, url }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}
