//! Experts as a user meets them: what a run has found of them is what a replay of its record finds.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

fn mixture() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families/qwen3-moe/model.gguf")
}

fn lacuna(args: &[&str]) -> Result<Value, String> {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        .output()
        .expect("the program starts");
    match output.status.success() {
        true => Ok(serde_json::from_slice(&output.stdout).expect("one JSON object")),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

#[test]
fn a_run_finds_what_a_replay_of_its_record_finds() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let record = folder.path().join("trace.jsonl");
    let (model, record) = (mixture(), record.to_str().expect("text").to_owned());
    let model = model.to_str().expect("text");
    let run = |more: &[&str]| {
        let args = [
            "run", model, "--raw", "-p", "abc", "-n", "24", "--temp", "0", "--json",
        ];
        lacuna(&[&args, more].concat()).expect("it runs")
    };
    let read = run(&["--weights", "direct", "--record-experts", &record]);
    let experts = &read["memory"]["weights"]["experts"];
    assert!(experts["misses"].as_u64() > Some(0), "{experts}");
    assert!(experts["read_bytes"].as_u64() > Some(0), "{experts}");
    assert_eq!(experts["slots"], experts["experts"], "all have room");
    let replay = [
        "bench",
        "experts",
        "--trace",
        &record,
        "--resident",
        "25,100",
        "--json",
    ];
    let replay = lacuna(&replay).expect("a record");
    let rows = replay["rows"].as_array().expect("rows");
    assert_eq!(rows.last().expect("two rows")["lru"], experts["hit_rate"]);
    // The same by number.
    let slots = rows[0]["slots"].to_string();
    let by_number = [
        "bench", "experts", "--trace", &record, "--slots", &slots, "--json",
    ];
    let by_number = lacuna(&by_number).expect("a record");
    assert_eq!(by_number["rows"], serde_json::json!([rows[0]]));
    let plan = [
        "plan",
        model,
        "--weights",
        "direct",
        "--trace",
        &record,
        "--json",
    ];
    let plan = lacuna(&plan).expect("a plan");
    let forecast = &plan["residency"]["expert_forecast"];
    assert_eq!(forecast["hit_rate"], experts["hit_rate"]);
    let mapped = run(&[]);
    assert_eq!(mapped["tokens"], read["tokens"]);
    assert!(mapped["memory"]["weights"]["experts"].is_null());
}

#[test]
fn what_is_no_record_of_this_model_is_refused() {
    let folder = tempfile::tempdir().expect("a scratch folder");
    let record = folder.path().join("trace.jsonl");
    let path = record.to_str().expect("text");
    let model = mixture();
    let plan = [
        "plan",
        model.to_str().expect("text"),
        "--weights",
        "direct",
        "--trace",
        path,
    ];
    std::fs::write(&record, "{\"experts\":999,\"layers\":1}\n").expect("room");
    let error = lacuna(&plan).expect_err("another model");
    assert!(error.contains("999 experts"), "{error}");
    std::fs::write(&record, "what\n").expect("room");
    let error = lacuna(&plan).expect_err("no record");
    assert!(error.contains("line 1"), "{error}");
    let error = lacuna(&["run", "demo", "-p", "a", "--record-experts", path]);
    let error = error.expect_err("it has no experts");
    assert!(error.contains("no experts"), "{error}");
}
