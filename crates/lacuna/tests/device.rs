//! The program with `--device vulkan`: what it writes, what it tells, what it refuses. Most of it needs a driver with
//! sparse buffers (`.ci/install-vulkan`) and runs when asked for (`.ci/test-vulkan`).

mod served;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Output};

use serde_json::Value;

use served::Served;

/// What a device is compared with computes as it does.
const IN_F32: [&str; 2] = ["--matmul-precision", "f32"];

fn lacuna(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(args)
        // What is kept is not among what its user keeps.
        .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
        .output()
        .expect("the program starts")
}

fn json(args: &[&str]) -> Value {
    let output = lacuna(args);
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {told}");
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// What it says when it does not do what it is asked to.
fn refusal(args: &[&str]) -> String {
    let output = lacuna(args);
    assert!(!output.status.success(), "{args:?}");
    String::from_utf8(output.stderr).expect("UTF-8")
}

fn run<'a>(more: &[&'a str]) -> Vec<&'a str> {
    let args = ["run", "demo", "-p", "What is ownership?", "--temp", "0"];
    [&args[..], &["-n", "64", "--json"], &IN_F32, more].concat()
}

#[test]
fn without_a_driver_it_says_so() {
    let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
        .args(run(&["--device", "vulkan"]))
        .env("VK_DRIVER_FILES", "/no/such/driver.json")
        .env("VK_ICD_FILENAMES", "/no/such/driver.json")
        .output()
        .expect("the program starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{told}");
    assert!(told.contains("there is no device to compute on"), "{told}");
    assert!(told.contains("on the processor"), "{told}");
}

#[test]
fn commands_that_cannot_have_it_do_not_take_it() {
    let told = refusal(&["embed", "demo", "--device", "vulkan"]);
    assert!(told.contains("--device"), "{told}");
}

#[test]
fn what_is_no_device_and_no_number_of_layers_is_refused() {
    for (more, what) in [
        (
            &["--device", "vulkan:x"][..],
            "there is no device `vulkan:x`",
        ),
        (&["--device", "cuda"], "use cpu, vulkan, or vulkan:N"),
        (&["--gpu-layers", "2"], "name one with --device"),
        (&["--device", "vulkan", "--gpu-layers", "0"], "1 at least"),
        (
            &["--device", "vulkan", "--gpu-layers", "-3"],
            "`-3` is no number of layers",
        ),
        (
            &["--device", "vulkan", "--gpu-layers", "most"],
            "use auto, all, or how many",
        ),
    ] {
        let told = refusal(&run(more));
        assert!(told.contains(what), "{more:?}: {told}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn it_writes_what_the_processor_writes() {
    let device = json(&run(&["--device", "vulkan"]));
    let processor = json(&run(&[]));
    assert_eq!(device["tokens"], processor["tokens"]);
    assert_eq!(device["text"], processor["text"]);
    assert_eq!(device["tokens"].as_array().map(Vec::len), Some(64));
    let memory = &device["memory"]["device"];
    let bytes = |what: &str| memory[what].as_u64().unwrap_or_default();
    assert!(bytes("weight_bytes") > 2_000_000, "{memory}");
    assert!(bytes("activation_bytes") > 0, "{memory}");
    assert!(processor["memory"]["device"].is_null());
}

/// What is drawn from is sorted out on the device; where all logits come back instead, the draws are the same.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn it_draws_from_a_few_tokens_as_from_all_logits() {
    let drawn = |more: &[&str]| {
        let args = ["run", "demo", "-p", "What is ownership?", "--json"];
        let drawing = ["-n", "48", "--temp", "0.9", "--top-k", "40"];
        let device = ["--device", "vulkan"];
        json(&[&args[..], &drawing, &device, more].concat())["tokens"].clone()
    };
    let few = drawn(&["--seed", "11"]);
    // A penalty too small to change a logit, for which all of them are needed.
    assert_eq!(
        drawn(&["--seed", "11", "--frequency-penalty", "1e-30"]),
        few
    );
    assert_ne!(drawn(&["--seed", "12"]), few, "the draw decides");
}

#[test]
#[ignore = "needs SmolLM2 and a sparse Vulkan device: run .ci/fetch-models smollm2 and .ci/install-vulkan"]
fn smollm2_writes_what_it_writes_on_the_processor() {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../target/models/smollm2-135m-instruct-q4_1.gguf"
    );
    let written = |more: &[&str]| {
        let prompt = "Explain in a few sentences what a page table is.";
        let args = ["run", model, "-p", prompt, "--temp", "0", "-n", "32"];
        let usual = ["--ctx", "512", "--json"];
        json(&[&args[..], &usual, &IN_F32, more].concat())["tokens"].clone()
    };
    let wanted = written(&[]);
    assert_eq!(wanted.as_array().map(Vec::len), Some(32));
    assert_eq!(written(&["--device", "vulkan"]), wanted);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn its_speed_is_measured_beside_what_its_memory_delivers() {
    let speed = ["bench", "speed", "demo", "--device", "vulkan"];
    let few = ["-p", "40", "-n", "3", "--depth", "30", "--batch", "1,2"];
    let told = json(&[&speed[..], &few, &["--repeats", "1", "--json"]].concat());
    assert!(told["device"].is_string(), "{told}");
    let positive = |value: &Value| value.as_f64().is_some_and(|value| value > 0.0);
    assert!(positive(&told["limits"]["device_copy_gb_per_s"]), "{told}");
    assert!(told["limits"]["int8_gmac_per_s"].is_null(), "{told}");
    assert!(positive(&told["prefill"][0]["tokens_per_second"]), "{told}");
    assert!(told["prefill"][0]["of_limit"].is_null(), "{told}");
    for step in 0..2 {
        assert!(positive(&told["decode"][step]["of_limit"]), "{told}");
    }
    for more in [&["--gpu-layers", "2"][..], &["--record-experts", "trace"]] {
        let told = refusal(&[&speed[..], more].concat());
        assert!(told.contains(&more[0][2..]), "{told}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn pages_are_found_as_the_variable_says() {
    let with = |pages: &str| {
        Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(run(&["--device", "vulkan"]))
            .env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"))
            .env("LACUNA_VULKAN_PAGES", pages)
            .output()
            .expect("the program starts")
    };
    let of = |pages: &str, what: &str| {
        let output = with(pages);
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && told.contains(what),
            "{pages}: {told}"
        );
        let said: Value = serde_json::from_slice(&output.stdout).expect("one JSON object");
        said["tokens"].clone()
    };
    let wanted = of("device", "computing on");
    assert_eq!(
        of("lookup", "whose kernels look pages of KV rows up"),
        wanted
    );
    assert_eq!(of("unused", "which has no pages"), wanted);
    let refused = with("sparse");
    let told = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success(), "{told}");
    assert!(told.contains("use one of unused, lookup, device"), "{told}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_a_driver_makes_of_kernels_is_kept_in_the_cache_folder() {
    let cache = tempfile::tempdir().expect("a folder");
    let run = || {
        let output = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args(run(&["--device", "vulkan"]))
            .env("XDG_CACHE_HOME", cache.path())
            .output()
            .expect("the program starts");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{told}");
        let folder = std::fs::read_dir(cache.path().join("lacuna/kernels"));
        let names = folder
            .expect("it was made")
            .map(|entry| entry.expect("an entry").file_name());
        names.collect::<Vec<_>>()
    };
    let names = run();
    assert_eq!(names.len(), 1, "{names:?}");
    assert_eq!(run(), names, "it is found, and nothing is left beside it");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn guesses_do_not_change_what_it_writes() {
    let plain = json(&run(&["--device", "vulkan"]));
    let guessed = json(&run(&["--device", "vulkan", "--speculate", "ngram"]));
    assert_eq!(plain["tokens"], guessed["tokens"]);
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn logits_are_near_those_of_the_processor() {
    let args = ["logits", "demo", "--tokens", "1,2,3", "--all", "--json"];
    let row = |more: &[&str]| -> Vec<f64> {
        let found = json(&[&args[..], &IN_F32, more].concat());
        let row = found["logits"][0].as_array().expect("a row for each token");
        row.iter().filter_map(Value::as_f64).collect()
    };
    let (found, wanted) = (row(&["--device", "vulkan"]), row(&[]));
    assert_eq!(found.len(), wanted.len());
    let square = |x: f64| x * x;
    let pairs = found.iter().zip(&wanted);
    let apart: f64 = pairs.map(|(a, b)| square(a - b)).sum();
    let length: f64 = wanted.iter().copied().map(square).sum();
    assert!((apart / length).sqrt() <= 1e-3, "{apart} of {length}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_text_is_predicted_as_well_as_on_the_processor() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("text.txt");
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let text = std::fs::read_to_string(root.join("heldout.txt")).expect("committed");
    let part: String = text.chars().take(3000).collect();
    std::fs::write(&path, part).expect("room");
    let path = path.to_str().expect("UTF-8");
    let args = ["perplexity", "demo", path, "--ctx", "256", "--json"];
    let of = |more: &[&str]| {
        let found = json(&[&args[..], &IN_F32, more].concat());
        found["perplexity"].as_f64().expect("a number")
    };
    let (device, processor) = (of(&["--device", "vulkan"]), of(&[]));
    assert!(
        (device / processor - 1.0).abs() <= 5e-3,
        "{device} and {processor}"
    );
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_session_goes_on_where_its_pages_ended() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    let session = ["--session", "notes", "--sessions", path];
    let on_device = [&["--device", "vulkan"][..], &session].concat();
    let first = json(&run(&on_device));
    assert_eq!(first["reused_tokens"], 0);
    let second = json(&run(&on_device));
    let reused = second["reused_tokens"].as_u64().unwrap_or_default();
    assert!(reused > 0, "{second}");
    // Its pages are the device's own: another adds in another order.
    let elsewhere = json(&run(&session));
    assert_eq!(elsewhere["reused_tokens"], 0, "{elsewhere}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_session_with_states_goes_on_as_on_the_processor() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    let model = root.join("families/qwen3.5/model.gguf");
    let model = model.to_str().expect("UTF-8");
    let tokens = |device: &str| {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().to_str().expect("UTF-8");
        ["hello", "abc"].map(|prompt| {
            let said = json(&[
                "run",
                model,
                IN_F32[0],
                IN_F32[1],
                "--device",
                device,
                "--session",
                "notes",
                "--sessions",
                path,
                "--raw",
                "-p",
                prompt,
                "--temp",
                "0",
                "-n",
                "8",
                "--json",
            ]);
            (said["reused_tokens"].clone(), said["tokens"].clone())
        })
    };
    let found = tokens("vulkan");
    assert!(found[1].0.as_u64() > Some(0), "{found:?}");
    assert_eq!(found, tokens("cpu"));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn images_are_seen_as_on_the_processor() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision");
    let path = |family: &str, file: &str| {
        let path = root.join(family).join(file);
        path.to_str().expect("UTF-8").to_owned()
    };
    // Prompts that images make a difference to.
    let models = [
        ("qwen2-vl", "model.gguf", Some("mmproj.gguf"), "a"),
        ("qwen2.5-vl", "hf", None, "a"),
        ("qwen3.5", "model.gguf", None, "a"),
        ("gemma3", "hf", None, "What is it"),
        ("idefics3", "hf", None, "a"),
    ];
    for (family, model, projector, prompt) in models {
        let (model, image) = (path(family, model), path(family, "image-0.png"));
        let projector = projector.map(|file| path(family, file));
        let projector: Vec<&str> = match &projector {
            Some(projector) => vec!["--mmproj", projector],
            None => Vec::new(),
        };
        let tokens = |more: &[&str]| {
            let args = [
                "run", &model, "--temp", "0", "-p", prompt, "-n", "8", "--json",
            ];
            json(&[&args[..], &projector, &IN_F32, more].concat())["tokens"].clone()
        };
        let wanted = tokens(&["--image", &image]);
        assert_eq!(
            tokens(&["--image", &image, "--device", "vulkan"]),
            wanted,
            "{family}"
        );
        assert_ne!(tokens(&[]), wanted, "{family} looks at it");
    }
    let (model, image) = (path("qwen3-vl", "hf"), path("qwen3-vl", "image-0.png"));
    let text = ["run", &model, "--device", "vulkan", "-p", "a", "-n", "1"];
    let said = refusal(&[&text[..], &["--image", &image]].concat());
    assert!(said.contains("with --device"), "{said}");
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn what_it_cannot_do_is_refused_by_name() {
    for (more, what) in [
        (&["--kv", "paged"][..], "by the policy `paged`"),
        (&["--kv-type", "q4_0"], "elements of type q4_0"),
        (&["--check-finite"], "not finite"),
        (
            &["--weights", "direct", "--budget", "512MiB"],
            "read into memory",
        ),
        (&["--draft-model", "demo"], "a draft model"),
        (&["--record-experts", "chosen"], "--record-experts"),
    ] {
        let told = refusal(&run(&[&["--device", "vulkan"][..], more].concat()));
        assert!(told.contains(what), "{more:?}: {told}");
    }
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn the_budget_holds_what_the_device_has_too() {
    let told = refusal(&run(&["--device", "vulkan", "--budget", "4MiB"]));
    assert!(told.contains("budget"), "{told}");
    let fits = json(&run(&["--device", "vulkan", "--budget", "256MiB"]));
    assert_eq!(fits["tokens"].as_array().map(Vec::len), Some(64));
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_plan_says_what_the_device_will_have() {
    let context = [
        "--ctx",
        "256",
        "--device",
        "vulkan",
        "--gpu-layers",
        "3",
        "--json",
    ];
    let planned = json(&[&["plan", "demo", "--batch", "512"][..], &context].concat());
    let prompt = ["run", "demo", "-p", "What is ownership?", "-n", "2"];
    let found = json(&[&prompt[..], &context].concat())["memory"].clone();
    for what in [
        "layers",
        "host_layers",
        "weight_bytes",
        "activation_bytes",
        "staging_bytes",
    ] {
        assert_eq!(planned["device"][what], found["device"][what], "{what}");
    }
    let full = &planned["full"];
    assert_eq!(full["device_bytes"], found["budget"]["device_bytes"]);
    let kv = [&planned["device"]["kv_bytes"], &full["kv_bytes"]].map(Value::as_u64);
    assert!(Some(0) < kv[0] && kv[0] < kv[1], "{kv:?}");
    let told = refusal(&["plan", "qwen3-0.6b", "--device", "vulkan"]);
    assert!(told.contains("a model's own file"), "{told}");
}

/// Its first two layers on the processor, its last two on the device.
#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_split_writes_what_the_processor_writes_and_says_where_its_layers_are() {
    let split = run(&["--device", "vulkan:0", "--gpu-layers", "2"]);
    let said = json(&split);
    assert_eq!(said["tokens"], json(&run(&[]))["tokens"]);
    let whole = json(&run(&["--device", "vulkan", "--gpu-layers", "99"]));
    let [some, all] = [said, whole].map(|said| said["memory"]["device"].clone());
    assert_eq!(
        (&some["layers"], &some["host_layers"]),
        (&2.into(), &2.into())
    );
    assert_eq!(
        (&all["layers"], &all["host_layers"]),
        (&4.into(), &0.into())
    );
    let weights = [some, all].map(|memory| memory["weight_bytes"].as_u64().unwrap_or_default());
    assert!(0 < weights[0] && weights[0] < weights[1], "{weights:?}");

    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().to_str().expect("UTF-8");
    let session = [&split[..], &["--session", "notes", "--sessions", path]].concat();
    let turns = [(); 2].map(|()| json(&session)["reused_tokens"].as_u64().unwrap_or_default());
    assert!(turns[0] == 0 && turns[1] > 0, "{turns:?}");

    let told = refusal(&run(&["--device", "vulkan:9"]));
    assert!(told.contains("no Vulkan device 9; there are 0 "), "{told}");
}

/// What a server answers to a prompt: so few tokens that none of them is a matter of an activation which the device and the
/// processor round to two bytes beside each other.
fn complete(server: &Served, prompt: &str) -> Value {
    let body = format!(r#"{{"model":"demo","prompt":"{prompt}","temperature":0,"max_tokens":24}}"#);
    exchange(server, "POST /v1/completions HTTP/1.1", &body)
}

/// What a server answers to one request.
fn exchange(server: &Served, request: &str, body: &str) -> Value {
    let address = server.url.strip_prefix("http://").expect("plain");
    let mut stream = TcpStream::connect(address).expect("it listens");
    write!(
        stream,
        "{request}\r\nHost: {address}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .expect("it reads");
    let mut reply = String::new();
    stream.read_to_string(&mut reply).expect("it answers");
    let (_, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
    serde_json::from_str(body).unwrap_or_else(|_| panic!("one JSON object: {reply}"))
}

#[test]
#[ignore = "needs a sparse Vulkan device: run .ci/install-vulkan"]
fn a_server_answers_as_on_the_processor_and_shares_what_begins_the_same() {
    let sentence = "Ownership is a set of rules that govern how a Rust program manages memory. All programs have to";
    // Longer than a page of all layers together, which has 64 KiB where kernels look pages up.
    let prompt = &[sentence; 3].join(" ");
    let device = Served::start("demo", &["--device", "vulkan"]);
    let first = complete(&device, prompt);
    let again = std::thread::scope(|scope| {
        // Several at once: what is shared is not written to.
        let threads: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| complete(&device, prompt)))
            .collect();
        let replies = threads.into_iter().map(|thread| thread.join());
        replies.collect::<Result<Vec<_>, _>>().expect("no panic")
    });
    let processor = Served::start("demo", &IN_F32);
    let text = |reply: &Value| reply["choices"][0]["text"].clone();
    assert_eq!(text(&first), text(&complete(&processor, prompt)));
    let split = Served::start("demo", &["--device", "vulkan", "--gpu-layers", "1"]);
    // Longer than a page of each layer.
    let prompt = [sentence; 24].join(" ");
    let wanted = complete(&processor, &prompt);
    for cached in [false, true] {
        let reply = complete(&split, &prompt);
        assert_eq!(text(&reply), text(&wanted), "split");
        let tokens = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert_eq!(tokens.as_u64() > Some(0), cached, "{reply}");
    }
    let memory = exchange(&split, "GET /memory HTTP/1.1", "");
    let (on_device, ledger) = (&memory["device"], &memory["ledger"]);
    assert_eq!(
        (&on_device["layers"], &on_device["host_layers"]),
        (&1.into(), &3.into())
    );
    let bytes = |value: &Value| value.as_u64().unwrap_or_default();
    let pages = [&on_device["kv_bytes"], &ledger["host_beside_bytes"]].map(bytes);
    assert!(pages[0] > 0 && pages[1] > 0, "{memory}");
    assert_eq!(pages.iter().sum::<u64>(), bytes(&ledger["committed_bytes"]));
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    for reply in again {
        assert_eq!(text(&reply), text(&first));
        let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
        assert!(cached.as_u64().unwrap_or_default() > 0, "{reply}");
    }
}
