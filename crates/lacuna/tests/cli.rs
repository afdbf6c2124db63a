//! The command as a user meets it: results, figures, exit codes and messages.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn lacuna(args: &[&str]) -> Output {
    with_input(args, "")
}

fn with_input(args: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program starts");
    // A command that does not read its input may be gone before it is written.
    let _ = child
        .stdin
        .take()
        .expect("piped")
        .write_all(input.as_bytes());
    child.wait_with_output().expect("the program ends")
}

fn json(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "exit {:?}: {error}",
        output.status.code()
    );
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Fails unless the command exits with `code` and says `words`, without a panic.
fn refuses(args: &[&str], code: i32, words: &[&str]) {
    let output = lacuna(args);
    let error = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert_eq!(output.status.code(), Some(code), "{args:?}: {error}");
    assert!(!error.contains("panicked"), "{args:?}: {error}");
    for word in words {
        assert!(
            error.contains(&word.to_lowercase()),
            "{args:?} should say `{word}`: {error}"
        );
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn demo_file(name: &str) -> PathBuf {
    root().join("models/demo").join(name)
}

fn number(value: &Value, path: &str) -> usize {
    let found = value.pointer(path).and_then(Value::as_u64);
    usize::try_from(found.unwrap_or_else(|| panic!("{path} is a number in {value}"))).expect("fits")
}

#[test]
fn the_demo_commits_what_its_tokens_need_and_dense_the_whole_context() {
    let run = |kv| {
        json(&lacuna(&[
            "run",
            "demo",
            "-p",
            "What is ownership?",
            "-n",
            "48",
            "--json",
            "--kv",
            kv,
        ]))
    };
    let (sparse, dense) = (run("sparse"), run("dense"));
    assert_eq!(sparse["text"], dense["text"]);
    assert_eq!(sparse["tokens"], dense["tokens"]);

    let held = number(&sparse, "/prompt_tokens") + number(&sparse, "/generated_tokens");
    let needed = held * number(&sparse, "/kv/bytes_per_token");
    let buffers = 2 * number(&json(&lacuna(&["inspect", "demo", "--json"])), "/layers");
    let committed = number(&sparse, "/kv/committed_bytes");
    let page = number(&sparse, "/kv/page_bytes");
    assert!(
        committed.abs_diff(needed) <= buffers * page,
        "{committed} committed, {needed} needed"
    );
    assert!(committed < number(&sparse, "/kv/dense_bytes") / 4);

    let context = number(&json(&lacuna(&["inspect", "demo", "--json"])), "/context");
    let whole = context * number(&dense, "/kv/bytes_per_token");
    assert_eq!(number(&dense, "/kv/dense_bytes"), whole);
    let committed = number(&dense, "/kv/committed_bytes");
    assert!(committed >= whole && committed - whole < buffers * 2 * 1024 * 1024);
}

#[test]
fn the_demo_says_something_readable_about_rust() {
    let answer = json(&lacuna(&[
        "run",
        "demo",
        "-p",
        "What is ownership?",
        "-n",
        "64",
        "--json",
    ]));
    let text = answer["text"].as_str().expect("text");
    let words = text.split_whitespace().filter(|word| {
        word.chars()
            .all(|c| c.is_ascii_alphabetic() || ",.`'".contains(c))
    });
    assert!(words.count() >= 20, "{text}");
    assert!(text.to_lowercase().contains("own"), "{text}");
}

#[test]
fn what_a_model_thinks_is_told_beside_what_it_says() {
    for name in ["harmony", "thinking"] {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/replies");
        let model = root.join(name).with_extension("gguf");
        let model = model.to_str().expect("a path in UTF-8");
        let run = |more: &[&str]| {
            let args = ["run", model, "-p", "What is 2 + 2?", "--temp", "0"];
            lacuna(&[&args[..], more].concat())
        };
        let report = json(&run(&["--json"]));
        assert_eq!(report["text"], "It is 4.", "{name}");
        assert_eq!(report["reasoning"], "Simple sum.", "{name}");
        assert_eq!(report["finish_reason"], "end_of_text", "{name}");
        let shown = run(&[]);
        assert_eq!(String::from_utf8_lossy(&shown.stdout), "It is 4.\n");
        let beside = String::from_utf8_lossy(&shown.stderr);
        assert!(beside.contains("Simple sum.\n\n"), "{beside}");
        let cut = run(&["-n", "4"]);
        assert_eq!(String::from_utf8_lossy(&cut.stdout), "\n");
        // The words of the effort have different numbers of letters, each of them a token.
        let tokens = |effort| {
            let report = json(&run(&["--json", "--reasoning-effort", effort]));
            number(&report, "/prompt_tokens")
        };
        match name {
            "harmony" => assert_eq!(tokens("none") + 1, tokens("high")),
            _ => assert!(tokens("none") > tokens("high"), "it closes the thought"),
        }
        let wrong = run(&["--reasoning-effort", "extreme"]);
        assert_eq!(wrong.status.code(), Some(2));
    }
}

#[test]
fn figures_are_complete() {
    let report = json(&lacuna(&["run", "demo", "-p", "Hi", "-n", "8", "--json"]));
    for key in [
        "text",
        "prompt_tokens",
        "generated_tokens",
        "tokens",
        "ttft_ms",
        "prefill_tps",
        "decode_tps",
        "kv",
    ] {
        assert!(report.get(key).is_some(), "{key}");
    }
    for key in [
        "bytes_per_token",
        "reserved_bytes",
        "committed_bytes",
        "slack_bytes",
        "map_calls",
        "dense_bytes",
    ] {
        assert!(report["kv"].get(key).is_some(), "kv.{key}");
    }
    assert_eq!(
        report["tokens"].as_array().map(Vec::len),
        Some(number(&report, "/generated_tokens"))
    );
}

#[test]
fn same_seed_same_text_and_another_seed_another() {
    let text = |seed| {
        let args = [
            "run",
            "demo",
            "-p",
            "What is a trait?",
            "-n",
            "32",
            "--temp",
            "1.0",
            "--json",
            "--seed",
            seed,
        ];
        json(&lacuna(&args))["text"].clone()
    };
    assert_eq!(text("5"), text("5"));
    assert_ne!(text("5"), text("6"));
}

#[test]
fn guessed_tokens_change_no_text() {
    let run = |speculate: &str| {
        let prompt = "one two three four one two three four one two three four one two";
        let args = [
            "run", "demo", "--raw", "-p", prompt, "-n", "60", "--temp", "0.3", "--json",
        ];
        let report = json(&lacuna(&[&args[..], &["--speculate", speculate]].concat()));
        let guessed = number(&report, "/speculation/draft_tokens");
        assert!(number(&report, "/speculation/accepted_tokens") <= guessed);
        (report["tokens"].clone(), report["text"].clone(), guessed)
    };
    let (tokens, text, none) = run("off");
    assert_eq!(none, 0);
    for speculate in ["ngram", "ngram:3"] {
        let (found, shown, _) = run(speculate);
        assert_eq!(
            (found, shown),
            (tokens.clone(), text.clone()),
            "{speculate}"
        );
    }
    let wrong = ["run", "demo", "-p", "Hi", "--speculate", "ngram:0"];
    refuses(&wrong, 2, &["ngram:0", "ngram:N"]);
}

#[test]
fn a_draft_model_changes_no_text_and_is_in_the_budget() {
    let run = |options: &[&str]| {
        let prompt = "Tell me about ownership.";
        let args = [
            "run", "demo", "-p", prompt, "-n", "60", "--temp", "0.5", "--json", "--budget",
            "100MiB",
        ];
        json(&lacuna(&[&args[..], options].concat()))
    };
    let plain = run(&[]);
    let draft = ["--draft-model", "demo", "--draft-tokens", "3"];
    let drafted = run(&draft);
    assert_eq!(drafted["tokens"], plain["tokens"]);
    assert!(
        number(&drafted, "/speculation/draft_model/draft_tokens")
            <= number(&drafted, "/speculation/draft_tokens")
    );
    let part = |report: &Value, name: &str| number(report, &format!("/memory/budget/{name}"));
    assert_eq!(part(&plain, "draft_bytes"), 0);
    assert!(part(&drafted, "draft_bytes") > 0);
    let plan = [
        "plan", "demo", "--json", "--budget", "100MiB", "--batch", "512",
    ];
    let plan = json(&lacuna(&[&plan[..], &draft].concat()));
    for name in ["draft_bytes", "activation_bytes"] {
        let planned = number(&plan, &format!("/budget/parts/{name}"));
        assert_eq!(planned, part(&drafted, name), "{name}");
    }
    assert_eq!(
        number(&plan, "/draft/loaded_bytes"),
        part(&drafted, "draft_bytes")
    );
}

#[test]
fn a_plan_says_what_is_streamed_as_contexts_fill() {
    let plan = json(&lacuna(&[
        "plan",
        "qwen3-0.6b",
        "--json",
        "--budget",
        "840MB",
        "--ctx",
        "4096",
        "--disk-rate",
        "1GB",
        "--memory-rate",
        "40GB",
    ]));
    let placed = &plan["residency"];
    let by_tokens = placed["by_tokens"].as_array().expect("a list");
    let first = by_tokens.first().expect("an empty context");
    assert_eq!(first["tokens"], 0);
    assert_eq!(first["streamed_bytes"], placed["streamed_bytes"]);
    let full = by_tokens.last().expect("a full context");
    assert_eq!(full["tokens"], 4096);
    let of = |at: &serde_json::Value| {
        let bytes = at["streamed_bytes"].as_u64().expect("a number");
        (bytes, at["seconds_per_token"].as_f64().expect("a number"))
    };
    for pair in by_tokens.windows(2) {
        let [(bytes, seconds), (more, longer)] = [of(&pair[0]), of(&pair[1])];
        assert!(more >= bytes && longer >= seconds, "{pair:?}");
    }
    assert!(of(full) > of(first), "KV takes the place of weights");
}

#[test]
fn a_head_that_guesses_changes_no_text_and_is_in_the_plan() {
    let path = |name: &str| root().join("reference/heads").join(name);
    let path = |name: &str| path(name).to_str().expect("a path in UTF-8").to_owned();
    let own = path("qwen3.5/hf");
    a_head_changes_no_text(&own, &[]);
    let (assisted, assistant) = (
        path("gemma4-assistant/hf"),
        path("gemma4-assistant/head.gguf"),
    );
    a_head_changes_no_text(&assisted, &["--draft-model", &assistant]);
    let of_head = number(
        &json(&lacuna(&["inspect", &own, "--json"])),
        "/head_weight_bytes",
    );
    assert!(of_head > 0);
    let plan = |options: &[&str]| {
        let args = ["plan", &own, "--ctx", "128", "--json"];
        json(&lacuna(&[&args[..], options].concat()))
    };
    let planned = plan(&["--speculate", "mtp"]);
    assert_eq!(number(&planned, "/head/weight_bytes"), of_head);
    assert_eq!(plan(&[]).get("head"), None);

    let (model, head) = (path("eagle3/model.gguf"), path("eagle3/head"));
    a_head_changes_no_text(&model, &["--draft-model", &head]);
    let named = |options: &[&'static str]| {
        let args = ["run", &model, "-p", "A", "--draft-model", &head];
        [&args[..], options].concat().join("\n")
    };
    let refuses = |args: &str, status, words: &[&str]| {
        refuses(&args.split('\n').collect::<Vec<_>>(), status, words);
    };
    refuses(
        &named(&["--speculate", "off"]),
        2,
        &["--draft-model", "mtp"],
    );
    refuses(
        &format!("run\n{head}\n-p\nA"),
        1,
        &["no model", "draft model"],
    );
    refuses(
        &format!("run\ndemo\n-p\nA\n--draft-model\n{head}"),
        1,
        &["rows of 16"],
    );
}

/// A run with guesses of a head, of the model's files or of those that `options` name, has the text of one without, and the
/// memory of its plan.
fn a_head_changes_no_text(model: &str, options: &[&str]) {
    let run = |options: &[&str]| {
        let args = [
            "run",
            model,
            "--raw",
            "-p",
            "ABCABCABCABC",
            "-n",
            "40",
            "--temp",
            "0",
            "--json",
            "--budget",
            "100MiB",
            "--ctx",
            "128",
        ];
        json(&lacuna(&[&args[..], options].concat()))
    };
    let part = |report: &Value, name: &str| number(report, &format!("/memory/budget/{name}"));
    let plain = run(&["--speculate", "off"]);
    for speculate in ["mtp", "mtp:2", "auto"] {
        let guessed = run(&[options, &["--speculate", speculate]].concat());
        assert_eq!(guessed["tokens"], plain["tokens"], "{speculate}");
        assert!(number(&guessed, "/speculation/draft_tokens") > 0);
        let plan = [
            "plan",
            model,
            "--json",
            "--budget",
            "100MiB",
            "--ctx",
            "128",
            "--speculate",
            speculate,
        ];
        let plan = json(&lacuna(&[&plan[..], options].concat()));
        for name in ["activation_bytes", "read_weight_bytes"] {
            let planned = number(&plan, &format!("/budget/parts/{name}"));
            assert_eq!(planned, part(&guessed, name), "{speculate}: {name}");
            assert!(planned >= part(&plain, name), "{speculate}: {name}");
        }
        assert!(number(&plan, "/head/weight_bytes") > 0);
        let keeps_rows = !model.contains("assistant");
        assert_eq!(number(&plan, "/head/kv_bytes_per_token") > 0, keeps_rows);
    }
}

#[test]
fn a_head_that_is_not_there_is_asked_for_in_vain() {
    for command in ["run", "plan"] {
        let mut args = vec![command, "demo", "--speculate", "mtp"];
        args.extend(
            (command == "run")
                .then_some(["-p", "Hi"])
                .into_iter()
                .flatten(),
        );
        refuses(&args, 1, &["no head that guesses tokens", "ngram"]);
    }
    // Where there is none, the text itself is guessed from.
    let auto = [
        "run",
        "demo",
        "--raw",
        "-p",
        "one two one two one two",
        "-n",
        "20",
        "--temp",
        "0",
        "--json",
        "--speculate",
    ];
    let text = |how: &str| json(&lacuna(&[&auto[..], &[how]].concat()))["text"].clone();
    assert_eq!(text("auto"), text("off"));
    json(&lacuna(&["plan", "demo", "--json", "--speculate", "auto"]));
}

#[test]
fn a_draft_model_of_another_vocabulary_is_refused_before_the_model_is_loaded() {
    let other = root().join("reference/families/qwen3-yarn/model.gguf");
    let other = other.to_str().expect("a path in UTF-8");
    let args = ["run", "demo", "-p", "Hi", "--draft-model", other];
    refuses(&args, 1, &["another vocabulary", "its token 0"]);
    // What a plan approves runs: this used to be planned.
    let args = ["plan", "demo", "--draft-model", other];
    refuses(&args, 1, &["another vocabulary", "its token 0"]);
    let states = root().join("reference/families/mamba2/model.gguf");
    let states = states.to_str().expect("a path in UTF-8");
    let args = ["run", "demo", "-p", "Hi", "--draft-model", states];
    refuses(&args, 1, &["the draft model keeps states"]);
    let alone = ["run", "demo", "-p", "Hi", "--draft-tokens", "3"];
    refuses(&alone, 2, &["--draft-model"]);
    let many = [
        "run",
        "demo",
        "-p",
        "Hi",
        "--draft-model",
        "demo",
        "--draft-tokens",
        "64",
    ];
    refuses(&many, 2, &["1 to 63"]);
    let several = ["serve", "demo", "other=demo", "--draft-model", "demo"];
    refuses(&several, 2, &["--draft-model is for one model"]);
}

#[test]
fn a_model_s_own_sampling_is_used_where_nothing_is_asked_for() {
    let model = root().join("reference/qwen3/hf");
    let folder = tempfile::tempdir().expect("a scratch folder");
    for entry in std::fs::read_dir(model).expect("a committed fixture") {
        let entry = entry.expect("readable");
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).expect("room to copy");
    }
    let config = r#"{"do_sample": true, "temperature": 0.5, "top_k": 20, "eos_token_id": 271}"#;
    std::fs::write(folder.path().join("generation_config.json"), config).expect("room for it");
    let model = folder.path().to_str().expect("UTF-8");
    let run = |more: &[&str]| {
        let mut args = vec!["run", model, "-p", "What", "-n", "2", "--json"];
        args.extend(more);
        lacuna(&args)
    };
    let output = run(&[]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("the model recommends temperature 0.5, top-k 20"),
        "{said}"
    );
    let sampling = json(&output)["sampling"].clone();
    assert_eq!(sampling["temperature"], 0.5);
    assert_eq!(sampling["top_k"], 20);
    assert_eq!(sampling["recommended"]["min_p"], serde_json::Value::Null);
    let sampling = json(&run(&["--temp", "0"]))["sampling"].clone();
    assert_eq!(sampling["temperature"], 0.0, "what is asked for counts");
    assert_eq!(sampling["top_k"], 20);
    let silent = lacuna(&["run", "demo", "-p", "What", "-n", "2", "--json"]);
    assert!(!String::from_utf8_lossy(&silent.stderr).contains("recommends"));
    assert_eq!(json(&silent)["sampling"]["temperature"], 0.0);
}

#[test]
fn stop_strings_end_the_text() {
    let whole = json(&lacuna(&[
        "run",
        "demo",
        "-p",
        "What is ownership?",
        "-n",
        "40",
        "--json",
    ]));
    let text = whole["text"].as_str().expect("text");
    let stop = text
        .split_whitespace()
        .nth(5)
        .expect("more than five words");
    let cut = json(&lacuna(&[
        "run",
        "demo",
        "-p",
        "What is ownership?",
        "-n",
        "40",
        "--json",
        "--stop",
        stop,
    ]));
    let expected = &text[..text.find(stop).expect("it is there")];
    assert_eq!(cut["text"].as_str(), Some(expected));
    assert_eq!(cut["finish_reason"], "stop_string");
}

#[test]
fn text_streams_to_standard_output_and_figures_to_standard_error() {
    let output = with_input(
        &["run", "demo", "--raw", "-n", "12"],
        "The ownership of a value",
    );
    let (out, error) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{error}");
    assert!(!out.trim().is_empty());
    assert!(error.contains("KV") && error.contains("dense"), "{error}");
    assert!(!out.contains("dense ("), "{out}");
}

#[test]
fn text_survives_tokenizing_and_back() {
    let text = "Ownership — él, 東京, 🦀!\n\tfn main() {}  ";
    let tokens = json(&lacuna(&["tokenize", "demo", "-p", text, "--json"]));
    let ids: Vec<String> = tokens["tokens"]
        .as_array()
        .expect("ids")
        .iter()
        .map(ToString::to_string)
        .collect();
    let back = json(&with_input(
        &["tokenize", "demo", "--decode", "--json"],
        &ids.join(" "),
    ));
    assert_eq!(back["text"].as_str(), Some(text));
}

#[test]
fn logits_have_a_row_for_each_token_asked_for() {
    let last = json(&lacuna(&["logits", "demo", "--tokens", "1,2,3", "--json"]));
    let all = json(&lacuna(&[
        "logits", "demo", "--tokens", "1,2,3", "--all", "--json",
    ]));
    assert_eq!(last["logits"].as_array().map(Vec::len), Some(1));
    assert_eq!(all["logits"].as_array().map(Vec::len), Some(3));
    assert_eq!(last["logits"][0], all["logits"][2]);
    let vocabulary = number(
        &json(&lacuna(&["inspect", "demo", "--json"])),
        "/vocabulary",
    );
    assert_eq!(last["logits"][0].as_array().map(Vec::len), Some(vocabulary));
}

#[test]
fn latent_rows_and_what_is_made_when_a_model_is_loaded_are_told() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families");
    let of = |file: &str| {
        let path = families.join("deepseek-v2-lite").join(file);
        let path = path.to_str().expect("text").to_owned();
        let inspected = json(&lacuna(&["inspect", &path, "--json"]));
        let planned = json(&lacuna(&["plan", &path, "--ctx", "64", "--json"]));
        (inspected, planned)
    };
    // Four heads' keys of eight elements, of rows of twenty, in three layers and f32.
    for (file, derived) in [
        ("model.gguf", 0),
        ("model-older.gguf", 3 * 4 * 8 * 20 * 4),
        ("hf", 3 * 4 * 8 * 20 * 4),
    ] {
        let (inspected, planned) = of(file);
        assert_eq!(
            inspected["kinds"][0]["latent"],
            serde_json::json!({"rank": 20, "key_dim": 8, "value_dim": 10, "query_rank": null})
        );
        let row = number(&inspected, "/kv_bytes_per_token/f16");
        assert_eq!(row, 3 * (20 + 4) * 2, "{file}");
        let made = number(&inspected, "/derived_weight_bytes");
        assert_eq!(made, derived, "{file}");
        assert_eq!(number(&planned, "/weights/derived_bytes"), derived);
    }
}

#[test]
fn a_synthetic_model_runs() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("m.gguf");
    let path = file.to_str().expect("UTF-8");
    let made = json(&lacuna(&[
        "synth",
        "qwen3-0.6b",
        "--layers",
        "1",
        "--dtype",
        "q4_0",
        "-o",
        path,
        "--json",
    ]));
    assert_eq!(
        number(&made, "/bytes"),
        usize::try_from(file.metadata().expect("written").len()).expect("fits")
    );
    // It used to be replaced without a word.
    let again = ["synth", "qwen3-0.6b", "--layers", "1", "-o", path];
    let refused = lacuna(&again);
    assert!(!refused.status.success());
    let error = String::from_utf8_lossy(&refused.stderr);
    assert!(
        error.contains("is there already; --overwrite replaces it"),
        "{error}"
    );
    let replaced = [&again[..], &["--dtype", "q4_0", "--overwrite"]].concat();
    assert!(lacuna(&replaced).status.success());
    let report = json(&lacuna(&[
        "run", path, "--raw", "-p", "x", "-n", "3", "--ctx", "4096", "--json",
    ]));
    assert_eq!(number(&report, "/kv/bytes_per_token"), 2 * 8 * 128 * 2);
    assert_eq!(number(&report, "/kv/dense_bytes"), 4096 * 2 * 8 * 128 * 2);
}

#[test]
fn weights_that_are_converted_are_said_and_counted_as_committed() {
    let folder = root().join("reference/forms/fp8-tensor/hf");
    let folder = folder.to_str().expect("UTF-8");
    // Seven matrices of a layer, in blocks of 34 bytes.
    let bytes = (5 * 64 + 2 * 32) * 2 * 34;
    let inspected = json(&lacuna(&["inspect", folder, "--json"]));
    assert_eq!(number(&inspected, "/converted_weight_bytes"), bytes);
    let types = inspected["tensors"].as_array().expect("a list");
    let converted = types.iter().find(|total| total["type"] == "q8_0");
    assert_eq!(converted.expect("there")["converted_from"], "fp8, rounded");
    let plan = json(&lacuna(&["plan", folder, "--ctx", "64", "--json"]));
    assert_eq!(number(&plan, "/weights/converted_bytes"), bytes);
    assert_eq!(number(&plan, "/empty/converted_weight_bytes"), bytes);
    assert_eq!(
        number(&plan, "/weights/bytes") + bytes,
        number(&inspected, "/weight_bytes")
    );
    let ran = lacuna(&["run", folder, "--raw", "-p", "AB", "-n", "2", "--ctx", "64"]);
    let said = String::from_utf8_lossy(&ran.stderr);
    assert!(ran.status.success(), "{said}");
    assert!(said.contains("from fp8, rounded to q8_0"), "{said}");
}

#[test]
fn published_kv_sizes_come_out_of_plan() {
    const GIB: usize = 1 << 30;
    for (shape, context, kv_type, bytes) in [
        ("qwen3-0.6b", "1024", "f32", 234_881_024),
        ("qwen3-0.6b", "1024", "f16", 117_440_512),
        ("llama-3-8b", "8192", "f32", 2 * GIB),
        ("llama-3-8b", "8192", "f16", GIB),
        ("llama-3-70b", "8192", "f32", 5 * GIB),
        ("llama-3-70b", "8192", "f16", 5 * GIB / 2),
        ("llama-3-405b", "131072", "f32", 126 * GIB),
        ("llama-3-405b", "131072", "f16", 63 * GIB),
        ("qwen3-4b", "32768", "f16", 9 * GIB / 2),
    ] {
        let args = [
            "plan",
            shape,
            "--ctx",
            context,
            "--kv-type",
            kv_type,
            "--json",
        ];
        let (sparse, dense) = (
            json(&lacuna(&args)),
            json(&lacuna(&[&args[..], &["--kv", "dense"]].concat())),
        );
        assert_eq!(number(&sparse, "/kv/row_bytes"), bytes, "{shape}");
        assert_eq!(number(&sparse, "/full/kv_bytes"), bytes, "{shape}");
        assert_eq!(number(&sparse, "/empty/kv_bytes"), 0, "{shape}");
        assert_eq!(number(&dense, "/empty/kv_bytes"), bytes, "{shape}");
    }
    let qwen = json(&lacuna(&["plan", "qwen3-4b", "--json"]));
    assert_eq!(number(&qwen, "/kv/bytes_per_token"), 147_456);
}

#[test]
fn the_engine_takes_what_was_planned() {
    let plan = json(&lacuna(&["plan", "demo", "--ctx", "512", "--json"]));
    let run = "run demo -p Hi -n 4 --ctx 512 --json";
    let report = json(&lacuna(&run.split(' ').collect::<Vec<_>>()));
    let arena = number(&plan, "/activations/bytes");
    assert_eq!(number(&report, "/memory/activation_bytes"), arena);
    let weights = number(&plan, "/weights/bytes");
    assert_eq!(number(&report, "/memory/weight_bytes"), weights);
    let reserved = number(&plan, "/kv/reserved_bytes");
    assert_eq!(number(&report, "/kv/reserved_bytes"), reserved);
}

#[test]
fn a_plan_is_the_same_every_time_and_its_map_too() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let run = |name: &str| {
        let map = folder.path().join(name);
        let path = map.to_str().expect("UTF-8");
        let output = lacuna(&["plan", "qwen3-0.6b", "--ctx", "1024", "--map", path]);
        assert!(output.status.success());
        (
            output.stdout,
            std::fs::read_to_string(map).expect("written"),
        )
    };
    let (first, second) = (run("a.map"), run("b.map"));
    assert_eq!(first, second);
    let (table, map) = first;
    assert!(String::from_utf8_lossy(&table).contains("KV cache"));
    assert!(
        map.lines()
            .any(|line| line.contains(" sequence-0.layer-27.v 1024x1x8x128 f16 virtual"))
    );
}

#[test]
fn a_budget_that_is_too_small_is_reported_with_what_to_change() {
    let args = "plan qwen3-4b --ctx 32768 --budget 3GiB --json";
    let output = lacuna(&args.split(' ').collect::<Vec<_>>());
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    let report: Value = serde_json::from_slice(&output.stdout).expect("the plan all the same");
    assert_eq!(report["budget"]["fits"], false);
    let change = report["budget"]["changes"][0].as_str().expect("a change");
    assert!(
        change.starts_with("--ctx ") && error.contains(change),
        "{error}"
    );

    let (flag, tokens) = change.split_once(' ').expect("an argument");
    let args = [
        "plan", "qwen3-4b", flag, tokens, "--budget", "3GiB", "--json",
    ];
    assert_eq!(json(&lacuna(&args))["budget"]["fits"], true);
    refuses(
        &["plan", "qwen3-4b", "--budget", "20MiB"],
        1,
        &["smaller model"],
    );
}

#[test]
fn a_context_beyond_what_the_model_was_made_for_is_allowed_with_a_warning() {
    for args in [
        "run demo -p Hi -n 1 --ctx 5000",
        "plan demo --ctx 5000",
        "logits demo --tokens 1,2 --ctx 5000",
    ] {
        let output = lacuna(&args.split(' ').collect::<Vec<_>>());
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args}: {said}");
        assert!(
            said.contains("--ctx 5000") && said.contains("1024 tokens"),
            "{said}"
        );
    }
    let output = lacuna(&["plan", "demo", "--ctx", "1024"]);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
}

#[test]
fn a_plan_says_whether_weights_are_mapped_or_read() {
    for (arguments, expected) in [
        (&["plan", "qwen3-0.6b"][..], ", mapped from the file; "),
        (
            &["plan", "qwen3-0.6b", "--budget", "2GiB"],
            ", read from the file; ",
        ),
        (
            &["plan", "qwen3-0.6b", "--weights", "pread"],
            ", read from the file; ",
        ),
    ] {
        let output = lacuna(arguments);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(text.contains(expected), "{arguments:?}: {text}");
    }
}

#[test]
fn a_plan_of_nonsense_is_refused() {
    refuses(&["plan", "qwen3-4b", "--ctx", "0"], 2, &["ctx"]);
    refuses(&["plan", "qwen3-4b", "--batch", "0"], 2, &["batch"]);
    refuses(&["plan", "qwen3-4b", "--kv", "cloud"], 2, &["cloud"]);
    refuses(&["plan", "qwen3-4b", "--kv-type", "k=q9"], 2, &["q9"]);
    refuses(&["plan", "qwen3-4b", "--budget", "2G"], 2, &["2GiB"]);
    refuses(
        &["plan", "qwen3-4b", "--logits", "some"],
        2,
        &["last", "all"],
    );
    refuses(&["plan", "gpt-9"], 2, &["gpt-9", "qwen3-4b"]);
    refuses(&["plan", "demo", "--dtype", "f16"], 2, &["--dtype"]);
    let huge = ["plan", "qwen3-4b", "--ctx", "99999999999999"];
    refuses(&huge, 1, &["address space"]);
    refuses(&["plan", "none.gguf"], 1, &["none.gguf"]);
}

#[test]
fn arguments_that_make_no_sense_exit_with_2() {
    refuses(
        &["run", "demo", "-p", "x", "--kv", "cloud"],
        2,
        &["sparse", "dense"],
    );
    refuses(&["run", "demo", "-p", "x", "--kv-type", "q9"], 2, &["f16"]);
    refuses(
        &["run", "demo", "-p", "x", "--threads", "0"],
        2,
        &["threads"],
    );
    refuses(
        &["run", "demo", "-p", "x", "--threads", "100000"],
        2,
        &["machine has"],
    );
    refuses(&["run", "demo", "-p", "x", "--ctx", "0"], 2, &["ctx"]);
    refuses(&["run", "demo", "-p", "x", "--temp", "-1"], 2, &["temp"]);
    refuses(&["run", "demo", "-p", "x", "--top-p", "2"], 2, &["top_p"]);
    refuses(&["logits", "demo", "--tokens", "1,x"], 2, &["x"]);
    refuses(
        &["synth", "gpt-9", "-o", "never-written.gguf"],
        2,
        &["qwen3-0.6b"],
    );
    refuses(&["frobnicate"], 2, &["frobnicate"]);
}

#[test]
fn what_cannot_be_done_exits_with_1_and_says_why() {
    refuses(
        &["run", "no-such-file.gguf", "-p", "x"],
        1,
        &["no-such-file.gguf"],
    );
    refuses(
        &["logits", "demo", "--tokens", "4000000000"],
        1,
        &["out of range"],
    );
    refuses(&["run", "demo", "-p", "", "--raw"], 1, &["empty"]);
    let long = "ownership ".repeat(3000);
    refuses(&["run", "demo", "-p", &long], 1, &["context", "--ctx"]);
    refuses(
        &["run", "demo", "-p", "x", "--ctx", "99999999999999"],
        1,
        &["address space"],
    );
    refuses(
        &["tokenize", "demo", "--decode", "-p", "1 two"],
        1,
        &["two"],
    );
    refuses(
        &["perplexity", "demo", "no-such-file.txt"],
        1,
        &["no-such-file.txt"],
    );
}

#[test]
fn a_context_that_memory_cannot_hold_is_an_error_and_not_the_end_of_the_machine() {
    let args = "run demo -p x -n 2 --ctx 1000000000 --json --kv";
    let run = |kv| args.split(' ').chain([kv]).collect::<Vec<_>>();
    refuses(&run("dense"), 1, &["not enough memory", "--ctx"]);
    let report = json(&lacuna(&run("sparse")));
    let reserved = number(&report, "/kv/reserved_bytes");
    assert!(reserved > 1_000_000_000_000, "address space is not memory");
}

/// Gemma without its first token predicts as if it had not been trained.
#[test]
fn where_texts_begin_with_a_token_every_window_that_is_scored_does() {
    let model = root().join("reference/families/gemma3/hf");
    let folder = tempfile::tempdir().expect("a folder");
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(model.join(name), folder.path().join(name)).expect("copied");
    }
    let settings = r#"{"bos_token": "<s>", "add_bos_token": true}"#;
    std::fs::write(folder.path().join("tokenizer_config.json"), settings).expect("written");
    let text = folder.path().join("text");
    std::fs::write(&text, "BADE").expect("written");
    let path = |path: &Path| path.to_str().expect("UTF-8").to_owned();
    let (model, text) = (path(folder.path()), path(&text));

    let found = json(&lacuna(&[
        "perplexity",
        &model,
        &text,
        "--ctx",
        "3",
        "--json",
    ]));
    let windows = [[1, 5, 4], [1, 7, 8]];
    assert_eq!(number(&found, "/windows"), windows.len());
    assert_eq!(number(&found, "/tokens"), 4);
    let nats: f64 = windows.iter().map(|window| surprise(&model, window)).sum();
    let perplexity = found["perplexity"].as_f64().expect("a number");
    assert!((perplexity / (nats / 4.0).exp() - 1.0).abs() < 1e-5);
}

/// Negative log-probability of all tokens but the first, by rows of logits.
fn surprise(model: &str, tokens: &[usize]) -> f64 {
    let ids: Vec<String> = tokens.iter().map(usize::to_string).collect();
    let ids = ids.join(",");
    let mut report = json(&lacuna(&[
        "logits", model, "--tokens", &ids, "--all", "--json",
    ]));
    let rows: Vec<Vec<f64>> =
        serde_json::from_value(report["logits"].take()).expect("rows of numbers");
    let after = rows.iter().zip(&tokens[1..]);
    let each = after.map(|(row, &next)| {
        let total: f64 = row.iter().map(|logit| logit.exp()).sum();
        total.ln() - row[next]
    });
    each.sum()
}

#[test]
fn a_vocabulary_without_weights_tokenizes() {
    let file = root().join("reference/tokenizers/qwen2/vocab.gguf");
    let path = file.to_str().expect("UTF-8");
    let tokens = json(&lacuna(&["tokenize", path, "-p", "Hello, 世界", "--json"]));
    let ids = tokens["tokens"].to_string();
    let ids = ids.trim_matches(['[', ']']);
    let back = json(&lacuna(&[
        "tokenize", path, "--decode", "-p", ids, "--json",
    ]));
    assert_eq!(back["text"], "Hello, 世界");
    refuses(&["run", path, "-p", "x"], 1, &["token_embd"]);
}

#[test]
fn a_file_without_one_of_its_tensors_is_refused_by_inspect_too() {
    let whole = std::fs::read(root().join("reference/qwen3/model.gguf")).expect("a fixture");
    let name = b"blk.1.ffn_down.weight";
    let at = whole.windows(name.len()).position(|window| window == name);
    let mut other = whole;
    other[at.expect("in the directory") + b"blk.1.ffn_".len()] = b'x';
    let folder = tempfile::tempdir().expect("a scratch folder");
    let file = folder.path().join("m.gguf");
    std::fs::write(&file, other).expect("room");
    let inspected = lacuna(&["inspect", file.to_str().expect("UTF-8")]);
    let error = String::from_utf8_lossy(&inspected.stderr);
    assert!(!inspected.status.success(), "{error}");
    assert!(error.contains("blk.1.ffn_down.weight"), "{error}");
}

#[test]
fn damaged_files_are_refused_whole() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let demo = std::fs::read(demo_file("lacuna-demo-q8_0.gguf")).expect("the demo model");
    let write = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).expect("room");
        path.to_str().expect("UTF-8").to_owned()
    };
    for keep in [0, 3, 16, 1000, demo.len() / 2, demo.len() - 1] {
        let path = write("cut.gguf", &demo[..keep]);
        refuses(&["run", &path, "-p", "x", "-n", "1"], 1, &["cut.gguf"]);
    }
    let mut counted = demo.clone();
    counted[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
    refuses(
        &["inspect", &write("count.gguf", &counted)],
        1,
        &["count.gguf"],
    );
    refuses(
        &["inspect", &write("text.gguf", b"hello, I am no model")],
        1,
        &["text.gguf"],
    );
    let folder_path = folder.path().to_str().expect("UTF-8");
    refuses(&["run", folder_path, "-p", "x"], 1, &["config.json"]);
}

/// A copy of the demo model with one block of a matrix scaled by what is no number.
fn demo_with_a_weight_that_is_no_number(folder: &Path) -> String {
    let source = demo_file("lacuna-demo-q8_0.gguf");
    let mut bytes = std::fs::read(&source).expect("committed");
    let files = lacuna::ModelFiles::open(&source).expect("a model");
    let down = files
        .tensors()
        .require("blk.2.ffn_down.weight")
        .expect("there");
    // The scale of the first block.
    bytes[down.file_range().start..][..2].copy_from_slice(&0x7E00_u16.to_le_bytes());
    let damaged = folder.join("damaged.gguf");
    std::fs::write(&damaged, bytes).expect("written");
    damaged.to_str().expect("text").to_owned()
}

#[test]
fn a_weight_that_is_no_number_is_found_in_its_layer_when_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let damaged = demo_with_a_weight_that_is_no_number(folder.path());
    let run = ["--raw", "-p", "What", "-n", "2", "--check-finite"];
    refuses(&[&["run", &damaged], &run[..]].concat(), 1, &["layer 2"]);
    assert!(
        lacuna(&[&["run", "demo"], &run[..]].concat())
            .status
            .success()
    );
}

/// Such logits used to end the reply as if the model had said it was done: exit code 0, and
/// `perplexity NaN`.
#[test]
fn logits_that_are_not_finite_are_an_error_of_every_command_that_computes_them() {
    let folder = tempfile::tempdir().expect("a folder");
    let damaged = demo_with_a_weight_that_is_no_number(folder.path());
    let text = demo_file("heldout.txt");
    let text = text.to_str().expect("text");
    for args in [
        &["run", &damaged, "--raw", "-p", "What", "-n", "2"][..],
        &["run", &damaged, "-p", "What", "-n", "2", "--json"],
        &["run", &damaged, "-p", "What", "-n", "2", "--temp", "1"],
        &["logits", &damaged, "--tokens", "300,301"],
        &["perplexity", &damaged, text, "--ctx", "32"],
    ] {
        refuses(args, 1, &["not finite", "--check-finite"]);
        let output = lacuna(args);
        assert!(output.stdout.is_empty(), "nothing looks like a result");
    }
}

/// Whoever calls a library has no command line: what to do is said in words there, and in options
/// by `output.rs`.
#[test]
fn no_text_of_a_library_names_an_option_of_the_command_line() {
    const PROGRAM: [&str; 5] = ["lacuna", "lacuna-bench", "lacuna-cli", "tests", "target"];
    let mut folders = vec![root().join("crates")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path
                .file_name()
                .and_then(|name| name.to_str())
                .expect("text");
            if path.is_dir() && !PROGRAM.contains(&name) {
                folders.push(path);
            } else if name.ends_with(".rs") && name != "tests.rs" {
                files += 1;
                names_no_option(&path);
            }
        }
    }
    assert!(files > 100, "the libraries are looked at: {files} files");
}

fn names_no_option(path: &Path) {
    let source = std::fs::read_to_string(path).expect("text");
    // Tests at the end of a file may start programs.
    let source = source.split("\n#[cfg(test)]\nmod tests {").next();
    for (number, line) in source.unwrap_or_default().lines().enumerate() {
        let is_option = |at: usize| {
            let before = line[..at].chars().next_back();
            before.is_some_and(|c| " \"'`(".contains(c))
                && line[at + 2..].starts_with(|c: char| c.is_ascii_lowercase())
        };
        let mut places = line.match_indices("--").map(|(at, _)| at);
        assert!(
            line.trim_start().starts_with("//") || !places.any(is_option),
            "{}:{}: {line}",
            path.display(),
            number + 1
        );
    }
}

/// A cache that has one model, as if it had been downloaded.
fn cache_with_a_model() -> tempfile::TempDir {
    let cache = tempfile::tempdir().expect("a scratch folder");
    let root = cache.path().join("models--owner--name");
    let snapshot = root.join("snapshots/0123");
    std::fs::create_dir_all(&snapshot).expect("room");
    std::fs::create_dir_all(root.join("refs")).expect("room");
    std::fs::write(root.join("refs/main"), "0123").expect("room");
    let model = self::root().join("reference/qwen3/model.gguf");
    std::fs::copy(model, snapshot.join("model.gguf")).expect("room");
    std::fs::write(snapshot.join("broken.gguf"), "GGUF").expect("room");
    cache
}

#[test]
fn downloaded_models_are_listed_with_what_they_need_and_can_be_removed() {
    let cache = cache_with_a_model();
    let with_cache = |args: &[&str]| {
        Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(args)
            .env("HF_HUB_CACHE", cache.path())
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .output()
            .expect("the program starts")
    };
    let listed = json(&with_cache(&["list", "--ctx", "64", "--json"]));
    let models = listed["models"].as_array().expect("a list");
    let [broken, whole] = models.as_slice() else {
        panic!("two models: {listed}");
    };
    assert_eq!(whole["id"], "owner/name:model.gguf");
    assert_eq!(whole["needs"]["context_tokens"], 64);
    let planned = json(&lacuna(&[
        "plan",
        whole["path"].as_str().expect("a path"),
        "--ctx",
        "64",
        "--json",
    ]));
    assert_eq!(
        whole["needs"]["mapped_weight_bytes"],
        planned["weights"]["bytes"]
    );
    assert_eq!(broken["needs"], Value::Null);
    assert!(broken["refused"].is_string(), "{broken}");

    let found = with_cache(&["pull", "owner/name:model.gguf"]);
    let path = String::from_utf8_lossy(&found.stdout);
    assert_eq!(path.trim_end(), whole["path"].as_str().expect("a path"));

    let asked = with_cache(&["rm", "owner/name"]);
    assert!(!asked.status.success(), "nobody could be asked");
    assert!(String::from_utf8_lossy(&asked.stderr).contains("--yes"));
    assert!(with_cache(&["rm", "owner/name", "--yes"]).status.success());
    let listed = json(&with_cache(&["list", "--json"]));
    assert_eq!(listed["models"], serde_json::json!([]));
}

#[test]
fn shells_and_man_are_given_every_command() {
    let commands = ["run", "serve", "quantize", "pull", "completions"];
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let script = lacuna(&["completions", shell]);
        let script = String::from_utf8_lossy(&script.stdout);
        for command in commands {
            assert!(script.contains(command), "{shell} {command}");
        }
    }
    let page = lacuna(&["man"]);
    assert!(String::from_utf8_lossy(&page.stdout).contains(".TH lacuna 1"));
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().to_str().expect("UTF-8");
    assert!(lacuna(&["man", "--output", path]).status.success());
    for command in commands {
        let page = folder.path().join(format!("lacuna-{command}.1"));
        let page = std::fs::read_to_string(page).expect("a page for each");
        assert!(page.contains(".SH SYNOPSIS"), "{command}");
    }
    // There used to be pages of the help of help.
    for page in std::fs::read_dir(folder.path()).expect("a folder") {
        let name = page.expect("a page").file_name();
        assert!(!name.to_string_lossy().contains("-help"), "{name:?}");
    }
}

/// It was offered, and always refused.
#[test]
fn commands_that_the_demo_model_is_none_for_do_not_offer_it() {
    for (command, offers) in [("embed", false), ("rerank", false), ("run", true)] {
        for asked in ["-h", "--help"] {
            let help = lacuna(&[command, asked]);
            assert!(help.status.success(), "{command}");
            let help = String::from_utf8_lossy(&help.stdout);
            assert_eq!(help.contains("`demo`"), offers, "{help}");
        }
    }
}
