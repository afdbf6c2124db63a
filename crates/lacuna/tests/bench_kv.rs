//! `lacuna bench memory | growth | batch | prefix` on a small shape: figures that fit together, and
//! the promises of the sparse policy.

use std::process::{Command, Output};

use serde_json::Value;

/// Demo shape: 4 layers of K and V, 8 buffers, 2,048 bytes per token in f16, pages of 4 KiB.
const BYTES_PER_TOKEN: f64 = 2_048.0;
const PAGES_OF_A_STEP: f64 = 8.0 * 4_096.0;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .arg("bench")
        .args(args)
        .output()
        .expect("the program starts")
}

fn report(args: &[&str]) -> Value {
    let output = bench(args);
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

fn number(value: &Value, path: &str) -> f64 {
    let found = value.pointer(path).and_then(Value::as_f64);
    found.unwrap_or_else(|| panic!("{path} is a number in {value}"))
}

fn policy<'a>(report: &'a Value, name: &str) -> &'a Value {
    let policies = report["policies"].as_array().expect("policies");
    let found = policies.iter().find(|policy| policy["policy"] == name);
    found.unwrap_or_else(|| panic!("{name} in {report}"))
}

#[cfg(target_os = "linux")]
#[test]
fn sparse_memory_follows_the_tokens_by_ledger_and_by_kernel() {
    // Larger than the demo's context, so that the kernel's count has little else in it.
    let report = report(&[
        "memory",
        "qwen3-0.6b",
        "--ctx",
        "2048",
        "--layers",
        "4",
        "--json",
    ]);
    let per_token = number(&report, "/bytes_per_token");
    for point in policy(&report, "sparse")["points"]
        .as_array()
        .expect("points")
    {
        let (rows, committed) = (
            number(point, "/row_bytes"),
            number(point, "/committed_bytes"),
        );
        assert_eq!(rows, number(point, "/tokens") * per_token);
        assert!(
            rows <= committed && committed <= rows + 8.0 * 65_536.0,
            "{point}"
        );
        let kernel = number(point, "/kernel_bytes");
        let allowed = (committed * 0.02).max(512.0 * 1_024.0);
        assert!((kernel - committed).abs() <= allowed, "{point}");
    }
    let dense = &policy(&report, "dense")["points"];
    assert_eq!(number(dense, "/0/committed_bytes"), 2_048.0 * per_token);
    let growing = policy(&report, "grow:double-linear");
    let last = growing["points"]
        .as_array()
        .and_then(|points| points.last());
    let last = last.expect("points");
    assert!(
        number(last, "/peak_bytes") > number(last, "/committed_bytes"),
        "both sizes at once"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn growing_by_mapping_copies_and_zeroes_nothing() {
    let report = report(&["growth", "demo", "--tokens", "700", "--json"]);
    let sparse = policy(&report, "sparse");
    for nothing in ["/copied_bytes", "/zeroed_bytes", "/resizes"] {
        assert_eq!(number(sparse, nothing), 0.0, "{nothing}");
    }
    assert!(number(sparse, "/peak_bytes") <= 700.0 * BYTES_PER_TOKEN + PAGES_OF_A_STEP);
    assert_eq!(number(policy(&report, "dense"), "/resizes"), 0.0);
    // 256, 512, 768: two moves, of 256 and of 512 rows.
    let copying = policy(&report, "grow:mlx");
    assert_eq!(number(copying, "/resizes"), 2.0);
    assert_eq!(number(copying, "/copied_bytes"), 768.0 * BYTES_PER_TOKEN);
    for row in report["policies"].as_array().expect("policies") {
        let step = &row["step"];
        let order = ["/median_us", "/p99_us", "/p999_us", "/max_us"].map(|part| number(step, part));
        assert!(order.is_sorted() && order[0] > 0.0, "{step}");
        assert_eq!(number(row, "/tokens"), 700.0);
    }
}

#[test]
fn the_published_resize_table_is_printed_row_by_row() {
    let report = report(&["growth", "demo", "--tokens", "1", "--kv", "dense", "--json"]);
    let rows = report["resize_table"].as_array().expect("rows");
    let rows: Vec<[f64; 4]> = rows
        .iter()
        .map(|row| ["/tokens", "/cells", "/mib", "/resizes"].map(|column| number(row, column)))
        .collect();
    let published = [
        [89.0, 256.0, 16.0, 0.0],
        [809.0, 1_024.0, 64.0, 2.0],
        [6_409.0, 8_192.0, 512.0, 5.0],
        [25_609.0, 32_768.0, 2_048.0, 7.0],
        [40_009.0, 49_152.0, 3_072.0, 8.0],
        [64_009.0, 65_536.0, 4_096.0, 9.0],
        [80_009.0, 81_920.0, 5_120.0, 10.0],
    ];
    assert_eq!(rows, published);
}

#[cfg(target_os = "linux")]
#[test]
fn a_budget_holds_many_sparse_sequences_and_few_dense_ones() {
    let report = report(&["batch", "demo", "--budget", "128MiB", "--json"]);
    let (sparse, dense) = (policy(&report, "sparse"), policy(&report, "dense"));
    assert!(number(sparse, "/utilisation") >= 0.95, "{sparse}");
    assert!(number(sparse, "/sequences") >= 3.0 * number(dense, "/sequences"));
    for row in [sparse, dense] {
        assert!(number(row, "/committed_bytes") <= number(&report, "/budget_bytes"));
        let steps = row["steps"].as_array().expect("steps");
        assert_eq!(steps.len() as f64, number(row, "/sequences"));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_shared_prefix_is_there_once() {
    let report = report(&[
        "prefix",
        "demo",
        "--prefix",
        "1024",
        "--sessions",
        "5",
        "--json",
    ]);
    let sparse = policy(&report, "sparse");
    assert_eq!(number(sparse, "/sessions"), 5.0);
    assert_eq!(
        number(sparse, "/copied_bytes"),
        0.0,
        "the prefix is whole pages"
    );
    let limit = number(&report, "/prefix_bytes") + 6.0 * PAGES_OF_A_STEP;
    assert!(number(sparse, "/committed_bytes") <= limit, "{sparse}");
    let copying = policy(&report, "grow:mlx");
    assert!(number(copying, "/committed_bytes") >= 6.0 * number(&report, "/prefix_bytes"));
}

#[test]
fn a_plot_is_written_and_nonsense_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("memory.svg");
    let path = path.to_str().expect("text");
    let output = bench(&["memory", "demo", "--ctx", "64", "--plot", path]);
    assert!(output.status.success());
    let picture = std::fs::read_to_string(path).expect("written");
    assert!(picture.starts_with("<svg") && picture.contains("GiB committed"));
    for (args, word) in [
        (["memory", "demo", "--layers", "9"], "--layers 9"),
        (["memory", "demo", "--kv", "tape"], "tape"),
        (["batch", "demo", "--budget", "some"], "some"),
        (
            ["memory", "demo", "--ctx", "9000000000000000"],
            "9000000000000000",
        ),
    ] {
        let output = bench(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{args:?}");
        assert!(error.contains(word), "{error}");
    }
}
