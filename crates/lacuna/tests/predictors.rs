//! `lacuna fit-predictors` as a user meets it, on the sparse sibling of the demo.

mod program;
mod served;

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use serde_json::Value;

use program::{json, refused, text};
use served::Served;

fn demo(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    folder.join(name)
}

#[test]
fn predictors_are_fitted_by_one_command_and_used_where_neurons_are() {
    let folder = tempfile::tempdir().expect("a folder");
    let neurons = folder.path().join("neurons");
    let (model, heldout) = (demo("lacuna-demo-sparse-q8_0.gguf"), demo("heldout.txt"));
    let (model, neurons) = (text(&model), text(&neurons));
    let says = || {
        let args = ["run", model, "--raw", "-p", "The ", "-n", "24", "--json"];
        json(&[&args[..], &["--ctx", "64", "--neurons", neurons]].concat())
    };
    let without = says();
    let read = |said: &Value| said["memory"]["weights"]["neurons"].clone();
    assert_eq!(read(&without)["recall"], Value::Null);
    let fit = ["fit-predictors", model, "--neurons", neurons, "--text"];
    let fit = |file: &Path, more: &[&str]| {
        let file = text(file).to_owned();
        let args = [&fit[..], &[&file], more].concat();
        json(&args)
    };
    let small = ["--tokens", "1024", "--rank", "8", "--json"];
    let fitted = fit(&heldout, &small);
    assert_eq!(
        (&fitted["tokens"], &fitted["rank"]),
        (&1024.into(), &8.into())
    );
    let blocks = fitted["blocks"].as_array().expect("a list");
    assert_eq!(blocks.len(), 4);
    for of in blocks.iter().chain([&fitted["all"]]) {
        let share = |name: &str| of[name].as_f64().expect("a number");
        assert!(
            share("recall") <= 1.0 && share("named_share") <= 1.0,
            "{of}"
        );
        assert!(share("active_share") < 0.4, "{of}");
    }
    let path = PathBuf::from(fitted["path"].as_str().expect("a path"));
    assert!(path.starts_with(neurons));
    let with = says();
    assert_eq!(with["text"], without["text"]);
    let of = read(&with);
    assert!(of["recall"].as_f64() > Some(0.5), "{of}");
    assert!(of["predicted"].as_u64() >= of["predicted_right"].as_u64());
    assert!(of["fixed_bytes"].as_u64() > read(&without)["fixed_bytes"].as_u64());
    served_says_how_good_they_are(model, neurons);
    fs::write(&path, b"GGUF").expect("room");
    let run = ["run", model, "-p", "The ", "-n", "1", "--neurons", neurons];
    refused(&run, 1, "fit the predictors again");
    // What is fitted again takes the place of what was damaged.
    fit(&heldout, &small);
    assert_eq!(says()["text"], without["text"]);
}

/// A server's figures of neurons, before a reply and after it.
fn served_says_how_good_they_are(model: &str, neurons: &str) {
    let args = ["--ctx", "64", "--threads", "1", "--neurons", neurons];
    let server = Served::start(model, &args);
    let (_, address) = server.url.split_once("://").expect("a URL");
    let ask = |what: &str, body: &str| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        let length = body.len();
        let request = format!(
            "{what} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(request.as_bytes()).expect("sent");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("a reply");
        assert!(reply.starts_with("HTTP/1.1 200"), "{reply}");
        reply
    };
    let figures = || {
        let page = ask("GET /metrics", "");
        [
            "neurons_needed",
            "neurons_found",
            "neuron_read_bytes",
            "neurons_predicted",
            "neurons_predicted_right",
            "neurons_predicted_needed",
            "neurons_ahead",
            "neurons_ahead_needed",
            "neuron_wasted_bytes",
        ]
        .map(|name| {
            let start = format!("lacuna_{name}_total ");
            let line = page.lines().find_map(|line| line.strip_prefix(&start));
            line.expect(name).parse::<u64>().expect("a number")
        })
    };
    assert_eq!(figures(), [0; 9]);
    let body = r#"{"prompt": "The ", "max_tokens": 24, "temperature": 0}"#;
    ask("POST /v1/completions", body);
    let [
        needed,
        found,
        read,
        named,
        right,
        foretold,
        ahead,
        used,
        wasted,
    ] = figures();
    assert!(needed > found && found > 0 && read > wasted);
    assert!(named >= right && right > 0 && foretold >= right && needed >= foretold);
    assert!(ahead >= used);
}

#[test]
fn what_predictors_cannot_be_fitted_to_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let (model, heldout) = (demo("lacuna-demo-sparse-q8_0.gguf"), demo("heldout.txt"));
    let short = folder.path().join("short.txt");
    fs::write(&short, "One sentence is too little.").expect("room");
    let (neurons, none) = (
        folder.path().join("neurons"),
        folder.path().join("none.txt"),
    );
    let fit = |model: &str, file: &Path, more: &[&str], code, words| {
        let args = [
            "fit-predictors",
            model,
            "--neurons",
            text(&neurons),
            "--text",
        ];
        refused(&[&args[..], &[text(file)], more].concat(), code, words);
    };
    let model = text(&model);
    fit(model, &short, &[], 1, "640 at least are needed");
    fit(
        model,
        &heldout,
        &["--tokens", "600"],
        1,
        "the text has 600 tokens",
    );
    fit(model, &none, &[], 1, "none.txt");
    fit("demo", &heldout, &[], 1, "SwiGLU");
    fit(
        model,
        &heldout,
        &["--recall", "1.5"],
        2,
        "above 0, 1 at most",
    );
    fit(model, &heldout, &["--rank", "0"], 2, "--rank");
    assert!(!neurons.exists(), "nothing was made");
}
