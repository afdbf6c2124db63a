//! `lacuna fit-predictors` as a user meets it, on the sparse sibling of the demo.

mod program;

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use program::{json, refused, text};

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
    fs::write(&path, b"GGUF").expect("room");
    let run = ["run", model, "-p", "The ", "-n", "1", "--neurons", neurons];
    refused(&run, 1, "fit the predictors again");
    // What is fitted again takes the place of what was damaged.
    fit(&heldout, &small);
    assert_eq!(says()["text"], without["text"]);
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
