//! `lacuna bench` as a user meets it: complete figures that fit together, and clear refusals.

use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .arg("bench")
        .args(args)
        .output()
        .expect("the program starts")
}

fn report(device: &str) -> Value {
    let output = bench(&["pages", "--quick", "--device", device, "--json"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn number(value: &Value, path: &str) -> f64 {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{path} is a number in {value}"))
}

const SHARING: [&str; 3] = ["share", "share_run_of_16", "copy_on_write"];

#[cfg(target_os = "linux")]
#[test]
fn the_host_device_is_measured_throughout() {
    let report = report("host");
    let rows = report["operations"].as_array().expect("rows");
    assert!(
        rows.iter().any(|row| row["page_bytes"] == 65_536),
        "{rows:?}"
    );
    for row in rows {
        let others = [
            "commit_and_map",
            "map_recycled",
            "unmap",
            "seal",
            "give_back",
        ];
        for name in others.iter().chain(&SHARING) {
            let (median, tail) = (
                number(row, &format!("/{name}/median_us")),
                number(row, &format!("/{name}/p99_us")),
            );
            assert!(
                0.0 < median && median <= tail,
                "{name}: {median} and {tail}"
            );
        }
    }
    assert_eq!(report["reading"]["scattered"], true);
    for path in [
        "/reading/pages_gb_per_s",
        "/reading/huge_array_gb_per_s",
        "/reading/ratio",
    ] {
        assert!(number(&report, path) > 0.0, "{path}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn decoding_asks_the_device_once_per_page_boundary() {
    let report = report("host");
    assert_eq!(
        number(&report, "/decode/batches_per_1000_tokens"),
        1_000.0 / 32.0
    );
    assert_eq!(
        number(&report, "/decode/pages_per_1000_tokens"),
        72_000.0 / 32.0
    );
    let operations = number(&report, "/decode/map_operations_per_1000_tokens");
    assert!(
        (1_000.0 / 32.0..=72_000.0 / 32.0).contains(&operations),
        "{operations}"
    );
    let (ledger, kernel) = (
        number(&report, "/decode/mappings"),
        number(&report, "/decode/kernel_mappings"),
    );
    // Libraries and heaps of the process move the kernel's count by a few.
    assert!(
        (ledger - kernel).abs() < 16.0,
        "{ledger} by the ledger, {kernel} by the kernel"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn growing_by_mapping_holds_the_rows_and_by_copying_more() {
    let report = report("host");
    for lengths in report["growth"]["lengths"].as_array().expect("lengths") {
        let rows = 2.0 * 2_048.0 * number(lengths, "/tokens");
        assert_eq!(number(lengths, "/mapping/peak_bytes"), rows);
        assert!(number(lengths, "/copying/peak_bytes") > rows);
    }
}

#[test]
fn the_dense_device_has_no_figures_for_what_it_cannot_do() {
    let report = report("dense");
    for row in report["operations"].as_array().expect("rows") {
        assert!(SHARING.iter().all(|name| row[name].is_null()), "{row}");
        assert!(number(row, "/commit_and_map/median_us") > 0.0);
        assert!(number(row, "/give_back/median_us") > 0.0);
    }
    assert_eq!(number(&report, "/decode/batches_per_1000_tokens"), 0.0);
    assert_eq!(report["reading"]["scattered"], false);
    let whole = number(&report, "/growth/context_tokens") * 2.0 * 2_048.0;
    assert_eq!(
        number(&report, "/growth/lengths/0/mapping/peak_bytes"),
        whole
    );
}

#[test]
fn the_table_names_the_machine_and_every_column() {
    let output = bench(&["pages", "--quick", "--device", "dense"]);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8_lossy(&output.stdout);
    for word in [
        " cores, ",
        "commit+map",
        "copy on write",
        "give back",
        "per 1,000 tokens",
        "GB/s",
    ] {
        assert!(text.contains(word), "`{word}` in {text}");
    }
    assert!(
        output.stderr.is_empty(),
        "no progress bar outside a terminal"
    );
}

#[test]
fn a_device_that_is_not_there_is_refused_by_name() {
    let output = bench(&["pages", "--quick", "--device", "tape"]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{error}");
    assert!(
        error.contains("host, host-huge, dense or vulkan"),
        "{error}"
    );
}

#[test]
fn speed_is_told_for_every_prompt_depth_and_batch() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "speed", "demo", "-p", "4,8", "-n", "2", "--json"])
        .args([
            "--depth",
            "0,300",
            "--batch",
            "1,3",
            "--kv-type",
            "f16",
            "f32",
        ])
        .args(["--threads", "1", "--repeats", "1"])
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let (prefill, decode) = (&report["prefill"], &report["decode"]);
    assert_eq!(prefill.as_array().map(Vec::len), Some(2 * 2));
    assert_eq!(decode.as_array().map(Vec::len), Some(2 * 2 * 2));
    for row in decode.as_array().expect("rows") {
        let step_s = number(row, "/step_ms") / 1e3;
        let per_second = number(row, "/sequences") / step_s;
        assert!((number(row, "/tokens_per_second") / per_second - 1.0).abs() < 1e-9);
        // Eight buffers of 128 elements a row: the second type's are twice as long.
        let element_bytes = if row["kv_type"] == "f16" { 2.0 } else { 4.0 };
        let cached = number(row, "/sequences") * (number(row, "/depth") + 1.0) * 8.0 * 128.0;
        let bytes = number(&report, "/weight_bytes") + cached * element_bytes;
        assert!((number(row, "/gb_per_s") * step_s * 1e9 / bytes - 1.0).abs() < 1e-9);
    }
    for (rows, rate, limit) in [
        (prefill, "/gmac_per_s", "/limits/int8_gmac_per_s"),
        (decode, "/gb_per_s", "/limits/read_gb_per_s"),
    ] {
        for row in rows.as_array().expect("rows") {
            // The limit beside a row is not the middle one of the run, and on a loaded machine the two
            // lie far apart; a wrong unit would be a factor of a thousand at least.
            let part = number(row, rate) / number(&report, limit);
            let told = number(row, "/of_limit") / part;
            assert!(part > 0.0 && (0.001..1000.0).contains(&told), "{row}");
        }
    }
    for row in decode.as_array().expect("rows") {
        assert!(number(row, "/step_p99_ms") >= number(row, "/step_ms"));
    }
}

#[test]
fn a_speed_of_nothing_is_refused() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "speed", "demo", "--threads", "100000"])
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(2));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("threads"), "{error}");
}

fn kernels(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "kernels", "--quick", "--threads", "1"])
        .args(args)
        .output()
        .expect("the program starts")
}

fn rows(output: &Output) -> (Value, Vec<Value>) {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let rows = report["kernels"].as_array().expect("rows").clone();
    (report, rows)
}

#[test]
fn every_kernel_has_figures_that_fit_together() {
    let output = kernels(&["--tokens", "1,20", "--depth", "64", "--json"]);
    let (report, rows) = rows(&output);
    // Twenty-three types with two matrices at both numbers of tokens, and a vocabulary for one token; six
    // types of cached rows, of heads and latent ones; those of an encoder; four kernels without types; the barrier.
    assert_eq!(rows.len(), 23 * (2 * 2 + 1) + 2 * 6 * 2 + 1 + 4 * 2 + 1);
    for row in &rows {
        assert!(number(row, "/time_us") >= 0.0, "{row}");
        if row["kernel"] != "matmul" {
            continue;
        }
        let (rows, cols) = row["shape"]
            .as_str()
            .and_then(|s| s.split_once('x'))
            .expect("a shape");
        let weights = rows.parse::<f64>().expect("rows") * cols.parse::<f64>().expect("columns");
        let rate = weights * number(row, "/tokens") / number(row, "/time_us") / 1e3;
        assert!(
            (number(row, "/gmac_per_s") / rate - 1.0).abs() < 1e-9,
            "{row}"
        );
        let limits = ["read_gb_per_s", "int8_gmac_per_s", "f32_gmac_per_s"];
        assert!(
            limits
                .iter()
                .any(|name| number(&report, &format!("/limits/{name}")) > 0.0)
        );
        assert!(number(row, "/of_limit") > 0.0, "{row}");
    }
}

#[test]
fn kernels_can_be_picked_by_name_type_and_tokens() {
    let output = kernels(&["--type", "Q8_0", "--tokens", "2", "--depth", "32", "--json"]);
    let (_, picked) = rows(&output);
    let kinds: Vec<&str> = picked
        .iter()
        .filter_map(|row| row["kernel"].as_str())
        .collect();
    let expected = [
        "matmul",
        "matmul",
        "matmul",
        "attention",
        "latent-attention",
    ];
    assert_eq!(kinds, expected);
    assert!(
        picked
            .iter()
            .all(|row| row["type"] == "q8_0" && row["tokens"] == 2),
        "{picked:?}"
    );
    let told = ["--matmul-precision", "f32"];
    let output = kernels(&[&["--kernel", "rope,barrier", "--tokens", "1"], &told[..]].concat());
    let text = String::from_utf8_lossy(&output.stdout);
    for word in [" cores, ", "floats in f32", "rope", "barrier", "of limit"] {
        assert!(text.contains(word), "`{word}` in {text}");
    }
    assert!(
        !text.contains("matmul") && output.stderr.is_empty(),
        "{text}"
    );
}

#[test]
fn kernels_that_do_not_exist_are_refused() {
    for (args, words) in [
        (["--type", "q9_9"], "unknown weight type `q9_9`"),
        (["--kernel", "convolution"], "possible values: matmul"),
        (["--tokens", "0"], "--tokens"),
    ] {
        let output = kernels(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(words), "{error}");
    }
    let output = kernels(&["--kernel", "rope", "--type", "f16"]);
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn replies_are_as_long_as_they_may_be_when_the_models_end_is_ignored() {
    let generated = |more: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(["bench", "serve", "--model", "demo", "--sessions", "8"])
            .args(["--rate", "0", "--prompt-tokens", "8", "--spread", "0"])
            .args(["--reply-tokens", "600", "--json"])
            .args(more)
            .output()
            .expect("the program starts");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{error}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        number(&report, "/generated_tokens")
    };
    assert!(
        generated(&[]) < 4800.0,
        "the demo model ends some by itself"
    );
    assert_eq!(generated(&["--ignore-eos"]), 4800.0);
}

/// What 10,000 texts leave behind is what 100 do: by the kernel's account, but for what its own pages and the
/// allocator's come to.
#[cfg(target_os = "linux")]
#[test]
fn embedding_many_texts_takes_no_more_memory_than_a_few() {
    const SLACK_BYTES: f64 = 1e6;
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../reference/encoders/bert/mean.gguf"
    );
    let folder = tempfile::tempdir().expect("a scratch folder");
    let texts: String = (0..200)
        .map(|index| "abcd ".repeat(1 + index % 4) + "x\n")
        .collect();
    let input = folder.path().join("texts.txt");
    std::fs::write(&input, texts).expect("room for it");
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "embed", model, "--rounds", "50", "--json"])
        .arg("--input")
        .arg(&input)
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(
        (
            number(&report, "/early/texts"),
            number(&report, "/late/texts")
        ),
        (100.0, 10_100.0)
    );
    // Everything, pages of files included, and what of it is no file's.
    for account in ["pss_bytes", "anonymous_bytes"] {
        let kept = |when: &str| number(&report, &format!("/{when}/{account}"));
        assert!(kept("late") - kept("early") < SLACK_BYTES, "{report}");
    }
    assert!(number(&report, "/texts_per_second") > 0.0);
    assert!(number(&report, "/tokens") > number(&report, "/texts"));
}

#[cfg(target_os = "linux")]
#[test]
fn loading_is_told_for_every_way_warm_and_cold_and_for_kv_memory_from_the_start() {
    const DEMO: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../models/demo/lacuna-demo-q8_0.gguf"
    );
    let folder = tempfile::tempdir().expect("a folder");
    // A file of its own, which no other test has mapped: such pages are not dropped.
    let model = folder.path().join("demo.gguf");
    std::fs::copy(DEMO, &model).expect("room for it");
    let plot = folder.path().join("loading.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "loading", model.to_str().expect("UTF-8"), "--json"])
        .args(["-p", "8", "-n", "3", "--repeats", "1", "--threads", "1"])
        .args(["--kv-tokens", "0,512", "--plot"])
        .arg(&plot)
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let rows = report["loading"].as_array().expect("rows");
    let of = |row: &Value| (row["weights"].clone(), row["cache"].clone());
    let expected = ["mmap", "pread", "direct"].map(|way| ["cold", "warm"].map(|it| (way, it)));
    let expected = expected.as_flattened().iter();
    let expected: Vec<_> = expected.map(|&(way, it)| (way.into(), it.into())).collect();
    assert_eq!(rows.iter().map(of).collect::<Vec<_>>(), expected);
    let bytes = std::fs::metadata(&model).expect("it is there").len() as f64;
    for row in rows {
        assert_eq!(number(row, "/file_bytes"), bytes);
        assert!(
            number(row, "/first_token_s") > number(row, "/load_s"),
            "{row}"
        );
        assert!(number(row, "/tokens_per_s") > 0.0 && number(row, "/prompt_tokens_per_s") > 0.0);
        let end = &row["end"];
        let parts = ["/anonymous_bytes", "/file_bytes", "/shared_memory_bytes"];
        let sum: f64 = parts.iter().map(|part| number(end, part)).sum();
        assert!(
            (sum / number(end, "/pss_bytes") - 1.0).abs() < 0.01,
            "{row}"
        );
        assert_eq!(row["reading"].is_null(), row["weights"] == "mmap", "{row}");
    }
    let anonymous = |row: usize| number(&rows[row], "/end/anonymous_bytes");
    assert!(
        anonymous(3) > anonymous(1) + bytes / 2.0,
        "what is read is memory of the process"
    );
    let kv = report["kv"].as_array().expect("rows");
    let taken: Vec<f64> = kv.iter().map(|row| number(row, "/kv_bytes")).collect();
    assert!(taken.len() == 2 && taken[1] > 4.0 * taken[0], "{taken:?}");
    let drawn = std::fs::read_to_string(&plot).expect("a picture");
    assert!(drawn.contains("direct, cold"), "{drawn}");
    let refused = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "loading", "demo"])
        .output()
        .expect("the program starts");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn guesses_are_all_right_where_replies_have_no_choice() {
    let of = |choices: &str| {
        let arguments = ["speculate", "demo", "-n", "40", "--rounds", "1", "--json"];
        let more = ["--sequences", "1", "--threads", "1", "--choices", choices];
        bench(&[&arguments[..], &more].concat())
    };
    let output = of("1,200");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    let [alone, among] = &report["rows"].as_array().expect("rows")[..] else {
        panic!("{report}")
    };
    assert_eq!(
        [&alone["fixture"], &among["fixture"]],
        ["1 of 1", "1 of 200"]
    );
    // How many are worth it is up to the clock.
    let guessed = number(alone, "/draft_tokens");
    assert!(guessed > 0.0, "{alone}");
    assert_eq!(number(alone, "/accepted_tokens"), guessed);
    assert_eq!(number(among, "/tokens"), 40.0);
    let refused = of("1000000");
    assert_eq!(refused.status.code(), Some(2));
}

#[test]
fn images_are_measured_with_what_the_machine_can_do() {
    let reference = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    let folder = reference.join("vision/qwen2.5-vl/hf");
    let folder = folder.to_str().expect("UTF-8");
    let output = bench(&[
        "images",
        folder,
        "--size",
        "112x56",
        "--threads",
        "1",
        "--json",
    ]);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    for figure in ["/patches", "/rows_per_second", "/gmac_per_s", "/of_limit"] {
        assert!(number(&report, figure) > 0.0, "{figure}: {report}");
    }
    let blind = bench(&["images", "demo", "--json"]);
    let error = String::from_utf8_lossy(&blind.stderr);
    assert!(
        !blind.status.success() && error.contains("image"),
        "{error}"
    );
}

#[test]
fn guesses_are_measured_on_every_text_alone_and_together() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(["bench", "speculate", "demo", "-n", "12", "--rounds", "1"])
        .args(["--sequences", "2", "--threads", "1", "--json"])
        .args(["--draft-model", "demo"])
        .output()
        .expect("the program starts");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    let report: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
    assert_eq!(report["draft_model"], "demo");
    let rows = report["rows"].as_array().expect("rows");
    let kinds: Vec<_> = rows
        .iter()
        .map(|row| (&row["fixture"], &row["sequences"]))
        .collect();
    assert_eq!(rows.len(), 6, "{kinds:?}");
    for row in rows {
        assert!(
            number(row, "/tokens") > 0.0 && number(row, "/speedup") > 0.0,
            "{row}"
        );
        assert!(
            number(row, "/accepted_tokens") <= number(row, "/draft_tokens"),
            "{row}"
        );
        assert!(
            number(row, "/draft_model_tokens") <= number(row, "/draft_tokens"),
            "{row}"
        );
    }
}
