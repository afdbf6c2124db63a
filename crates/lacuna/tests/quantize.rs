//! `lacuna quantize` as a user meets it.

mod program;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use lacuna::DType;
use lacuna::files::gguf::Writer;

use program::{json, lacuna, refused, text};

#[test]
fn the_demo_in_fewer_bits_says_nearly_the_same() {
    let folder = tempfile::tempdir().expect("a folder");
    let heldout = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/heldout.txt");
    let heldout = fs::read_to_string(heldout).expect("the text is there");
    let sample = folder.path().join("sample.txt");
    fs::write(&sample, &heldout[..4000]).expect("written");
    let perplexity = |model: &str| {
        let found = json(&["perplexity", model, text(&sample), "--ctx", "256", "--json"]);
        found["perplexity"].as_f64().expect("a number")
    };
    let whole = perplexity("demo");
    // How much worse a type may be: far more than it is, and far less than a wrong layout costs.
    for (name, most) in [
        ("q6_k", 1.02),
        ("q4_k_m", 1.08),
        ("iq4_nl", 1.10),
        ("q2_k", 1.8),
    ] {
        let path = folder.path().join(name).with_extension("gguf");
        let report = json(&["quantize", "demo", text(&path), "--type", name, "--json"]);
        assert_eq!(report["type"], name);
        assert_eq!(
            report["bytes"].as_u64(),
            Some(fs::metadata(&path).expect("there").len())
        );
        assert!(
            report["requantized"].as_u64() > Some(0),
            "the demo is in Q8_0"
        );
        let found = perplexity(text(&path));
        assert!(found < whole * most, "{name}: {found} where it was {whole}");
    }
}

#[test]
fn a_file_is_replaced_only_when_that_is_asked_for() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    fs::write(&path, "precious").expect("written");
    let args = ["quantize", "demo", text(&path), "--type", "q4_0"];
    refused(&args, 1, "--overwrite");
    assert_eq!(fs::read(&path).expect("there"), b"precious");
    let output = lacuna(&[&args[..], &["--overwrite"]].concat());
    let shown = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && shown.contains("of q4_0 weights"),
        "{shown}"
    );
    // In its own place, too.
    let args = [
        "quantize",
        text(&path),
        text(&path),
        "--type",
        "q8_0",
        "--overwrite",
        "--json",
    ];
    let report = json(&args);
    assert_eq!(
        report["bytes"].as_u64(),
        Some(fs::metadata(&path).expect("there").len())
    );
    let files: Vec<_> = fs::read_dir(folder.path()).expect("readable").collect();
    assert_eq!(files.len(), 1, "nothing is left beside it");
}

#[test]
fn what_cannot_be_made_says_what_to_do() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("model.gguf");
    let to = |name| ["quantize", "demo", text(&path), "--type", name];
    refused(&to("q9"), 2, "q4_k_m");
    refused(&to("iq2_xxs"), 2, "importance matrix");
    refused(&["quantize", "demo", text(&path)], 2, "--type");
    refused(
        &["quantize", "nowhere.gguf", text(&path), "--type", "q8_0"],
        1,
        "nowhere.gguf",
    );
    assert!(!path.exists());
    let missing = folder.path().join("none/model.gguf");
    refused(
        &["quantize", "demo", text(&missing), "--type", "q8_0"],
        1,
        "cannot be written",
    );
    refused(
        &["quantize", "demo", text(folder.path()), "--type", "q8_0"],
        1,
        "cannot be written",
    );
    #[cfg(unix)]
    {
        let null = lacuna(&["quantize", "demo", "/dev/null", "--type", "q8_0"]);
        assert!(null.status.success());
        assert!(!fs::metadata("/dev/null").expect("there").is_file());
    }
}

/// Writes a file of one matrix of zeros.
fn write_zeros(path: &Path, rows: usize) {
    let mut header = Writer::new();
    header.set("general.architecture", "llama");
    let name = "blk.0.ffn_up.weight";
    header
        .tensor(name, DType::F16, &[rows, 1024])
        .expect("it fits");
    let file = fs::File::create(path).expect("created");
    let mut body = header.begin(file).expect("written");
    let row = [0; 2048];
    let written = body.stream(name, |out| (0..rows).try_for_each(|_| out.write_all(&row)));
    written.expect("as long as declared");
    body.finish().expect("whole");
}

/// What is held is pieces of tensors, whatever they come to.
#[cfg(target_os = "linux")]
#[test]
fn memory_does_not_grow_with_the_model() {
    let folder = tempfile::tempdir().expect("a folder");
    let (source, out) = (folder.path().join("source"), folder.path().join("out"));
    let peak = |rows: usize| {
        write_zeros(&source, rows);
        let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(["quantize", text(&source), text(&out), "--type", "bf16"])
            .args(["--threads", "2", "--overwrite"])
            .stdout(Stdio::null())
            .spawn()
            .expect("the program starts");
        let status = format!("/proc/{}/status", child.id());
        let mut most = 0_u64;
        // Until there is nothing more to be read of it. A peak can only be missed from below.
        while child.try_wait().expect("a child").is_none() {
            let found = fs::read_to_string(&status).unwrap_or_default();
            let line = found.lines().find_map(|line| line.strip_prefix("VmHWM:"));
            let kilobytes = line.and_then(|line| line.trim().trim_end_matches(" kB").parse().ok());
            most = most.max(kilobytes.unwrap_or(0));
            thread::sleep(Duration::from_millis(1));
        }
        most
    };
    // 16 and 96 MiB are read, and as much is written.
    let (small, large) = (peak(8 << 10), peak(48 << 10));
    assert!(
        large > 0 && large < small + 16_384,
        "{small} kB, then {large} kB"
    );
}

/// Half a model used to stay, of any size.
#[cfg(target_os = "linux")]
#[test]
fn what_is_interrupted_leaves_no_file() {
    use rustix::process::{Pid, Signal, kill_process};

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("m.gguf");
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        // So large that it is not written before the signal comes.
        let args = ["synth", "llama-3-8b", "--dtype", "f32", "-o", text(&path)];
        let mut child = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(args)
            .spawn()
            .expect("the program starts");
        let part = folder.path().join("m.gguf.part");
        while !part.exists() {
            let ended = child.try_wait().expect("it ran");
            assert!(ended.is_none(), "{ended:?}");
            std::thread::yield_now();
        }
        kill_process(Pid::from_child(&child), signal).expect("it runs");
        let ended = child.wait().expect("it ran");
        assert_eq!(ended.code(), Some(code), "{ended}");
        let mut left = std::fs::read_dir(folder.path()).expect("a folder");
        assert!(left.next().is_none(), "nothing is left");
    }
}
