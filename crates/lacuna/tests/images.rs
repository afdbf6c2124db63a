//! Images as users of the program meet them: what is planned for, what is said of projectors, the chat on a terminal,
//! and the memory of a server that is shown many.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/vision/gemma3")
}

fn path(name: &str) -> String {
    let path = fixtures().join(name);
    path.to_str().expect("UTF-8").to_owned()
}

fn lacuna(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_lacuna"));
    command.args(args).stdin(Stdio::null());
    command.output().expect("the program starts")
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[track_caller]
fn succeeds(output: &Output) -> String {
    assert!(output.status.success(), "{}", said(output));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn plan_says_what_images_take_before_they_are_sent() {
    let (model, image) = (path("hf"), path("image-0.png"));
    let args = [
        "plan",
        &model,
        "--ctx",
        "64",
        "--image",
        &image,
        "--image",
        "4032x3024",
    ];
    let output = lacuna(&[&args[..], &["--json"]].concat());
    let plan: Value = serde_json::from_str(&succeeds(&output)).expect("one JSON object");
    let images = &plan["images"];
    let per_token = plan["kv"]["bytes_per_token"].as_u64().expect("a number");
    // Pictures of 16 pixels a side in patches of 4, which become 4 rows.
    assert_eq!(images["tokens"], 8);
    assert_eq!(images["kv_bytes"], 8 * per_token);
    assert!(
        images["arena_bytes"]
            .as_u64()
            .is_some_and(|bytes| bytes > 16 * 12 * 4)
    );
    let photograph = &images["images"][1];
    assert_eq!(
        (&photograph["patches"], &photograph["tokens"]),
        (&json!(16), &json!(4))
    );
    let pixels = 4032 * 3024;
    let taken = pixels * 16 + (1 << 20) + 16 * (4032 + 16) * 3;
    assert_eq!(photograph["preprocessing_bytes"], taken);
    let file = &images["images"][0];
    assert!(file["width"].as_u64() > Some(0) && file["image"] == image.as_str());
    let table = succeeds(&lacuna(&args));
    assert!(
        table.contains("4032 x 3024") && table.contains("images: siglip"),
        "{table}"
    );
    for (args, code, says) in [
        (
            ["plan", &model, "--image", "60000x60000"],
            1,
            "60000 x 60000",
        ),
        (["plan", &model, "--image", "none.png"], 1, "none.png"),
        (
            ["plan", &model, "--image", "Cargo.toml"],
            1,
            "no PNG, JPEG, WebP or GIF",
        ),
        (["plan", "demo", "--image", "8x8"], 1, "takes no images"),
        (["plan", "qwen3-4b", "--image", "8x8"], 2, "--image"),
    ] {
        let refused = lacuna(&args);
        assert_eq!(
            refused.status.code(),
            Some(code),
            "{args:?}: {}",
            said(&refused)
        );
        assert!(
            said(&refused).contains(says),
            "{args:?}: {}",
            said(&refused)
        );
    }
}

#[test]
fn plan_says_what_images_of_all_shapes_take() {
    let model = path("../qwen3-vl/hf");
    let plan = |images: &[&str]| {
        let images = images.iter().flat_map(|image| ["--image", image]);
        let args = ["plan", &model, "--ctx", "64", "--json"];
        let args: Vec<&str> = args.into_iter().chain(images).collect();
        lacuna(&args)
    };
    let said = succeeds(&plan(&["64x16", "1000x1000", "8x8"]));
    let said: Value = serde_json::from_str(&said).expect("one JSON object");
    let images = said["images"]["images"].as_array().expect("three");
    let of = |key: &str| -> Vec<u64> {
        let numbers = images.iter().map(|image| image[key].as_u64());
        numbers.map(|number| number.expect("a number")).collect()
    };
    assert_eq!(of("patches"), [64, 256, 4]);
    assert_eq!(of("tokens"), [16, 64, 1]);
    let arenas = of("arena_bytes");
    assert!(arenas[2] < arenas[0] && arenas[0] < arenas[1], "{arenas:?}");
    assert_eq!(said["images"]["arena_bytes"], arenas[1]);
    let refused = plan(&["1x20000"]);
    assert_eq!(refused.status.code(), Some(1));
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        reason.contains("1 x 20000") && reason.contains("crop"),
        "{reason}"
    );
}

#[test]
fn images_that_are_as_large_as_may_be_are_so_in_fewer_tokens() {
    for model in ["../gemma4", "../gemma4-dense"] {
        let image = path(&format!("{model}/image-0.png"));
        for file in ["hf", "model.gguf"] {
            let model = path(&format!("{model}/{file}"));
            let tokens = |more: &[&str]| -> Vec<u64> {
                let args = ["plan", &model, "--ctx", "512", "--json"];
                let images = ["--image", "1000x1000", "--image", "8x8"];
                let said = succeeds(&lacuna(&[&args[..], &images, more].concat()));
                let said: Value = serde_json::from_str(&said).expect("one JSON object");
                let images = said["images"]["images"].as_array().expect("two");
                let tokens = images.iter().map(|image| image["tokens"].as_u64());
                tokens.map(|tokens| tokens.expect("a number")).collect()
            };
            // Squares of 16 a side, of which 280 have room.
            assert_eq!(tokens(&[]), [256, 256], "{model}");
            assert_eq!(tokens(&["--image-max-tokens", "9"]), [9, 9], "{model}");
            let run = |more: &[&str]| {
                let args = [
                    "run", &model, "--image", &image, "-p", "A", "-n", "2", "--json",
                ];
                let said = succeeds(&lacuna(&[&args[..], more].concat()));
                let said: Value = serde_json::from_str(&said).expect("one JSON object");
                said["prompt_tokens"].as_u64().expect("a number")
            };
            // Of 36 x 24 pixels: in six tokens two rows of three, in 280 thirteen of twenty.
            let few = run(&["--image-max-tokens", "6"]);
            assert_eq!(run(&[]) - few, 13 * 20 - 6, "{model}");
        }
    }
}

#[test]
fn images_are_held_to_as_many_tokens_as_are_asked_for() {
    for model in ["../qwen3-vl", "../mistral3"] {
        let (folder, image) = (
            path(&format!("{model}/hf")),
            path(&format!("{model}/image-0.png")),
        );
        let tokens = |more: &[&str]| -> Vec<u64> {
            let args = ["plan", &folder, "--ctx", "64", "--json"];
            let images = ["--image", "1000x1000", "--image", "8x8"];
            let said = succeeds(&lacuna(&[&args[..], &images, more].concat()));
            let said: Value = serde_json::from_str(&said).expect("one JSON object");
            let images = said["images"]["images"].as_array().expect("two");
            let tokens = images.iter().map(|image| image["tokens"].as_u64());
            tokens.map(|tokens| tokens.expect("a number")).collect()
        };
        let own = tokens(&[]);
        assert!(own[0] > 9, "{model}: {own:?}");
        assert_eq!(tokens(&["--image-max-tokens", "9"]), [9, 1], "{model}");
        assert_eq!(
            tokens(&["--image-min-tokens", "12"]),
            [own[0], 16],
            "{model}"
        );
        // The prompt has as many, and is computed.
        let run = |more: &[&str]| {
            let args = [
                "run", &folder, "--image", &image, "-p", "A", "-n", "1", "--json",
            ];
            let said = succeeds(&lacuna(&[&args[..], more].concat()));
            let said: Value = serde_json::from_str(&said).expect("one JSON object");
            said["prompt_tokens"].as_u64().expect("a number")
        };
        assert!(run(&["--image-max-tokens", "2"]) < run(&[]), "{model}");
        let refused = lacuna(&[
            "run",
            &folder,
            "-p",
            "A",
            "--image-max-tokens",
            "2",
            "--image-min-tokens",
            "3",
        ]);
        assert!(
            said(&refused).contains("3 tokens at least and 2 at most"),
            "{}",
            said(&refused)
        );
    }
    let few = ["--image-max-tokens", "5"];
    for (args, code, says) in [
        (
            vec!["run", &path("hf"), "-p", "A"],
            1,
            "sees them in one size",
        ),
        (vec!["run", "demo", "-p", "A"], 1, "takes none"),
        (
            vec!["serve", "demo", "other=demo"],
            2,
            "--image-max-tokens is for one model",
        ),
    ] {
        let refused = lacuna(&[&args[..], &few].concat());
        assert_eq!(refused.status.code(), Some(code), "{}", said(&refused));
        assert!(said(&refused).contains(says), "{}", said(&refused));
    }
}

#[test]
fn hosts_of_images_are_for_models_that_see() {
    let encoder = path("../../encoders/bert/mean.gguf");
    for model in ["demo", &encoder] {
        let args = [
            "serve",
            model,
            "--port",
            "0",
            "--allow-image-host",
            "images.example.com",
        ];
        let refused = lacuna(&args);
        assert_eq!(
            refused.status.code(),
            Some(2),
            "{model}: {}",
            said(&refused)
        );
        assert!(
            said(&refused).contains("leave out --allow-image-host"),
            "{}",
            said(&refused)
        );
    }
    let refused = lacuna(&[
        "serve",
        "demo",
        "--allow-image-host",
        "https://example.com/",
    ]);
    assert_eq!(refused.status.code(), Some(2), "{}", said(&refused));
    assert!(
        said(&refused).contains("names no host"),
        "{}",
        said(&refused)
    );
}

/// The projector of another model: its rows have more elements than the model takes.
fn of_another_model() -> Vec<u8> {
    let mut file = fs::read(fixtures().join("mmproj.gguf")).expect("committed");
    let key = b"clip.vision.projection_dim";
    let at = file.windows(key.len()).position(|window| window == key);
    // Behind the name, the type of the number.
    let at = at.expect("the key") + key.len() + 4;
    file[at..at + 4].copy_from_slice(&24u32.to_le_bytes());
    file
}

#[test]
fn a_projector_that_is_none_for_the_model_is_said_to_be() {
    let folder = tempfile::tempdir().expect("a folder");
    let put = |name: &str, bytes: &[u8]| {
        let path = folder.path().join(name);
        fs::write(&path, bytes).expect("room");
        path.to_str().expect("UTF-8").to_owned()
    };
    let good = fs::read(fixtures().join("mmproj.gguf")).expect("committed");
    let model = put(
        "model.gguf",
        &fs::read(fixtures().join("model.gguf")).expect("committed"),
    );
    let run = |more: &[&str]| {
        let args = [&["run", &model, "-p", "A", "-n", "1"], more].concat();
        let output = lacuna(&args);
        (output.status.code(), said(&output))
    };
    let (code, quiet) = run(&[]);
    assert!(
        code == Some(0) && !quiet.contains("warning"),
        "none is no news: {quiet}"
    );
    let other = put("mmproj-b.gguf", &of_another_model());
    let (code, warned) = run(&[]);
    assert_eq!(code, Some(0), "{warned}");
    assert_eq!(warned.matches("warning").count(), 1, "{warned}");
    assert!(
        warned.contains("mmproj-b.gguf") && warned.contains("rows of 24 elements"),
        "{warned}"
    );
    let (code, refused) = run(&["--mmproj", &other]);
    assert!(
        code == Some(1) && refused.contains("use the one that was made for it"),
        "{refused}"
    );
    let (_, refused) = run(&["--mmproj", &model]);
    assert!(refused.contains("no encoder of images"), "{refused}");
    let own = put("a-mmproj.gguf", &good);
    let (_, warned) = run(&[]);
    assert!(
        warned.contains("warning: 2 files beside the model"),
        "{warned}"
    );
    let (code, quiet) = run(&["--mmproj", &own]);
    assert!(code == Some(0) && !quiet.contains("warning"), "{quiet}");
}

/// What a chat on a terminal says of these lines.
#[cfg(target_os = "linux")]
fn chat(args: &str, lines: &[&str]) -> String {
    let command = format!(
        "{} run {} --no-history {args}",
        env!("CARGO_BIN_EXE_lacuna"),
        path("hf")
    );
    // A terminal for the program, of the kind that lines are not edited on.
    let mut process = Command::new("script")
        .args(["--quiet", "--return", "--command", &command, "/dev/null"])
        .env("TERM", "dumb")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script, which every Linux has");
    let mut input = process.stdin.take().expect("piped");
    for line in lines {
        writeln!(input, "{line}").expect("it reads");
    }
    // The other end of the terminal must be there until the chat has ended.
    writeln!(input, "/exit").expect("it reads");
    let mut text = String::new();
    process
        .stdout
        .take()
        .expect("piped")
        .read_to_string(&mut text)
        .expect("text");
    drop(input);
    assert!(process.wait().expect("it ends").success(), "{text}");
    text
}

#[cfg(target_os = "linux")]
#[test]
fn a_chat_on_a_terminal_shows_images() {
    let (image, other) = (path("image-0.png"), path("hf/config.json"));
    let prompts = |text: &str| -> Vec<u64> {
        let counts = text
            .lines()
            .filter_map(|line| line.split_once(" prompt + "));
        let counts = counts.map(|(before, _)| before.rsplit(' ').next().unwrap_or(before));
        counts
            .map(|count| count.trim().parse().expect("a number"))
            .collect()
    };
    let plain = chat("-n 4 --threads 1", &["A B C", "A"]);
    let shown = format!("/image {image}");
    let text = chat(
        "-n 4 --threads 1",
        &[
            &shown,
            "A B C",
            "/image none.png",
            &format!("/image {other}"),
            "A",
        ],
    );
    assert!(text.contains("/image FILE shows an image"), "{text}");
    assert!(text.contains("cannot read the image none.png"), "{text}");
    assert!(text.contains("no PNG, JPEG, WebP or GIF"), "{text}");
    let (plain, with) = (prompts(&plain), prompts(&text));
    assert_eq!((plain.len(), with.len()), (2, 2), "{text}");
    // Four tokens, two marks, and line breaks, in the first turn and as part of the second.
    assert!(
        with[0] > plain[0] + 4 && with[1] > plain[1] + 4,
        "{plain:?} {with:?}"
    );
    // The option shows one with the first message.
    let text = chat(&format!("-n 4 --threads 1 --image {image}"), &["A B C"]);
    assert_eq!(prompts(&text), with[..1], "{text}");
    let text = chat("-n 4 --threads 1 --raw", &[&shown, "A"]);
    assert!(text.contains("chats without --raw and for"), "{text}");
}

/// A server of the tiny model that sees, which ends with the test.
#[cfg(target_os = "linux")]
struct Served {
    process: Child,
    address: String,
}

#[cfg(target_os = "linux")]
impl Served {
    fn start(args: &[&str]) -> Self {
        let mut process = Command::new(env!("CARGO_BIN_EXE_lacuna"))
            .args([
                "serve",
                &path("hf"),
                "--port",
                "0",
                "--json",
                "--threads",
                "1",
            ])
            .args(args)
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let mut line = String::new();
        let mut output = BufReader::new(process.stdout.take().expect("piped"));
        output.read_line(&mut line).expect("a line");
        let ready: Value = serde_json::from_str(&line).expect("one JSON object");
        let url = ready["url"].as_str().expect("a URL");
        let address = url.strip_prefix("http://").expect("plain").to_owned();
        Self { process, address }
    }

    fn ask(&self, body: &Value) -> Value {
        let body = body.to_string();
        let mut stream = TcpStream::connect(&self.address).expect("it listens");
        write!(
            stream,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        )
        .expect("it reads");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("text");
        let (head, body) = reply.split_once("\r\n\r\n").expect("a reply");
        assert!(head.starts_with("HTTP/1.1 200"), "{reply}");
        serde_json::from_str(body).expect("JSON")
    }

    /// Bytes of its own memory and of memory it shares that are resident, by the kernel; files that are mapped can be
    /// dropped at any time.
    fn resident(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.expect("it runs");
        let of = |name: &str| -> u64 {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            number
                .and_then(|number| number.parse().ok())
                .expect("a number")
        };
        (of("RssAnon:") + of("RssShmem:")) << 10
    }
}

#[cfg(target_os = "linux")]
impl Drop for Served {
    fn drop(&mut self) {
        self.process.kill().ok();
        self.process.wait().ok();
    }
}

/// The PNG file of a picture of one color, not compressed.
#[cfg(target_os = "linux")]
fn png(side: u32, color: [u8; 3]) -> Vec<u8> {
    let row = [&[0], color.repeat(side as usize).as_slice()].concat();
    let pixels = row.repeat(side as usize);
    let mut data = vec![0x78, 1];
    let mut blocks = pixels.chunks(0xffff).peekable();
    while let Some(block) = blocks.next() {
        let length = block.len() as u16;
        data.push(u8::from(blocks.peek().is_none()));
        data.extend(length.to_le_bytes());
        data.extend((!length).to_le_bytes());
        data.extend(block);
    }
    let (mut low, mut high) = (1u32, 0u32);
    for byte in &pixels {
        low = (low + u32::from(*byte)) % 65_521;
        high = (high + low) % 65_521;
    }
    data.extend(((high << 16) | low).to_be_bytes());
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let header = [
        &side.to_be_bytes()[..],
        &side.to_be_bytes(),
        &[8, 2, 0, 0, 0],
    ]
    .concat();
    for (name, content) in [(b"IHDR", header), (b"IDAT", data), (b"IEND", Vec::new())] {
        let named = [&name[..], &content].concat();
        file.extend((content.len() as u32).to_be_bytes());
        file.extend(&named);
        file.extend(crc32(&named).to_be_bytes());
    }
    file
}

#[cfg(target_os = "linux")]
fn crc32(bytes: &[u8]) -> u32 {
    let crc = bytes.iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 * (crc & 1))
        })
    });
    !crc
}

/// What one image leaves behind would be there a thousand times: a file of these is 27 KB, and decoded as much again.
#[cfg(target_os = "linux")]
#[test]
fn a_thousand_images_leave_memory_as_ten_did() {
    const SPARE: u64 = 1 << 20;
    // Without the cache of computed prompts, which is memory that is meant to fill.
    let server = Served::start(&["--no-prefix-cache", "--ctx", "128"]);
    let show = |index: u32| {
        let [_, red, green, blue] = (index * 7919).to_be_bytes();
        let url = format!(
            "data:image/png;base64,{}",
            STANDARD.encode(png(96, [red, green, blue]))
        );
        let image = json!({"type": "image_url", "image_url": {"url": url}});
        let reply = server.ask(&json!({"max_tokens": 2, "messages": [
            {"role": "user", "content": [image, {"type": "text", "text": "A"}]}]}));
        assert!(
            reply["usage"]["prompt_tokens"].as_u64() > Some(4),
            "{reply}"
        );
    };
    (0..10).for_each(show);
    let before = server.resident();
    (10..1000).for_each(show);
    let after = server.resident();
    println!("resident after 10 images {before} bytes, after 1,000 {after}");
    assert!(
        after <= before + SPARE,
        "{before} bytes after ten images, {after} after a thousand"
    );
}
