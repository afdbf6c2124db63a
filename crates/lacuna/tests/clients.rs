//! Programs that people use against a server, against `lacuna serve`: the official clients of its
//! interfaces, libraries over them, and a browser. Ignored until asked for: `.ci/test-server` installs what
//! they need and runs them.

mod served;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use served::Served;

/// A server of the demo, on another device than the processor where that is asked for.
fn serve(arguments: &[&str]) -> Served {
    let device = std::env::var("LACUNA_TEST_DEVICE").unwrap_or_default();
    let device: &[&str] = match device.as_str() {
        "" => &[],
        device => &["--device", device],
    };
    Served::start("demo", &[device, arguments].concat())
}

/// One of a tiny model that sees.
fn serve_seeing() -> Served {
    let model = root().join("reference/vision/gemma3/hf");
    Served::start(model.to_str().expect("UTF-8"), &["--name", "demo"])
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Python that has the clients, of which some go with others only in an environment of their own.
fn python() -> PathBuf {
    root().join("target/clients/bin/python")
}

fn python_of_interfaces() -> PathBuf {
    root().join("target/clients-interfaces/bin/python")
}

fn succeeds(command: &mut Command) -> String {
    let output = command
        .output()
        .expect("the program that .ci/test-server installs");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a script against a server, and looks for what it says that works in the table of docs/server.md. Of a model that
/// sees there is another server, which scripts that send images are told of.
fn finds_what_it_expects(program: impl AsRef<OsStr>, script: &str) {
    let server = serve(&[]);
    let seeing = serve_seeing();
    let script = root().join("crates/lacuna/tests/clients").join(script);
    let modules = root().join("target/clients-node/node_modules");
    let mut client = Command::new(program);
    let output = succeeds(
        client
            .env("NODE_PATH", modules)
            .arg(script)
            .args([&server.url, &seeing.url]),
    );
    let documented =
        std::fs::read_to_string(root().join("docs/server.md")).expect("docs/server.md");
    let lines = output.lines().filter(|line| line.starts_with('{'));
    let mut rows = 0;
    for line in lines {
        let works: BTreeMap<String, Vec<String>> = serde_json::from_str(line).expect("a line");
        for (client, features) in works {
            let row = format!("| `{client}` | {} |", features.join(", ").replace('_', " "));
            assert!(documented.contains(&row), "docs/server.md has no row {row}");
            rows += 1;
        }
    }
    assert!(rows > 0, "it says what works: {output}");
}

#[test]
#[ignore = "needs the OpenAI client: run .ci/test-server"]
fn the_official_openai_client_finds_what_it_expects() {
    finds_what_it_expects(python(), "openai_client.py");
}

#[test]
#[ignore = "needs the OpenAI client and openai-agents: run .ci/test-server"]
fn openais_responses_and_agents_over_them_find_what_they_expect() {
    finds_what_it_expects(python_of_interfaces(), "responses_client.py");
}

#[test]
#[ignore = "needs the Anthropic client: run .ci/test-server"]
fn the_official_anthropic_client_finds_what_it_expects() {
    finds_what_it_expects(python_of_interfaces(), "anthropic_client.py");
}

#[test]
#[ignore = "needs the Ollama client: run .ci/test-server"]
fn the_official_ollama_client_finds_what_it_expects() {
    finds_what_it_expects(python_of_interfaces(), "ollama_client.py");
}

#[test]
#[ignore = "needs llm: run .ci/test-server"]
fn the_program_llm_finds_what_it_expects() {
    finds_what_it_expects(python_of_interfaces(), "llm_client.py");
}

#[test]
#[ignore = "needs LiteLLM: run .ci/test-server"]
fn litellm_finds_what_it_expects_by_each_interface() {
    let python = root().join("target/clients-litellm/bin/python");
    finds_what_it_expects(python, "litellm_client.py");
}

#[test]
#[ignore = "needs Node and the AI SDK: run .ci/test-server"]
fn the_ai_sdk_finds_what_it_expects() {
    finds_what_it_expects("node", "ai_client.cjs");
}

#[test]
#[ignore = "needs instructor and pydantic-ai: run .ci/test-server"]
fn libraries_that_ask_for_nested_models_get_them() {
    // Schemas with `$ref` and `$defs` used to be refused in tools.
    let server = serve(&[]);
    let script = root().join("crates/lacuna/tests/clients/nested_models.py");
    succeeds(Command::new(python()).arg(script).arg(&server.url));
}

#[test]
#[ignore = "needs the OpenAI client, LangChain and llm: run .ci/test-server"]
fn clients_of_embeddings_find_what_they_expect() {
    let model = root().join("reference/encoders/bert/mean.gguf");
    let server = Served::start(model.to_str().expect("UTF-8"), &[]);
    let script = root().join("crates/lacuna/tests/clients/embeddings.py");
    succeeds(Command::new(python()).arg(script).arg(&server.url));
}

#[test]
#[ignore = "needs the Ollama client: run .ci/test-server"]
fn the_official_ollama_client_has_embeddings() {
    let model = root().join("reference/encoders/bert/mean.gguf");
    let server = Served::start(model.to_str().expect("UTF-8"), &[]);
    let script = root().join("crates/lacuna/tests/clients/ollama_client.py");
    let mut client = Command::new(python_of_interfaces());
    succeeds(client.arg(script).args([&server.url, "embeddings"]));
}

#[test]
#[ignore = "needs Chromium and its driver: run .ci/test-server"]
fn the_page_does_everything_it_offers() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let keys = folder.path().join("keys.txt");
    std::fs::write(&keys, "a-key-of-its-own\n").expect("room");
    let server = serve(&["--threads", "1", "--budget", "160MiB"]);
    let keyed = serve(&["--api-key-file", keys.to_str().expect("UTF-8")]);
    let seeing = serve_seeing();
    let pictures = root().join("target/page");
    std::fs::create_dir_all(&pictures).expect("room");
    succeeds(
        Command::new(python())
            .arg(root().join("crates/lacuna/tests/clients/browser.py"))
            .args([&server.url, &keyed.url, "a-key-of-its-own"])
            .arg(&pictures)
            .arg(&seeing.url),
    );
    for name in [
        "page-light",
        "page-dark",
        "page-phone-light",
        "page-phone-dark",
        "page-picture",
    ] {
        let bytes = std::fs::read(pictures.join(name).with_extension("png")).expect("a picture");
        assert!(bytes.starts_with(b"\x89PNG"), "{name}");
    }
}
