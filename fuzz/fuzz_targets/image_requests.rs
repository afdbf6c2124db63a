//! Any bytes as the image of a request of any interface, its file or what stands in the place of one, are answered or
//! refused by name, never by an error of the server's own.
#![no_main]

use std::path::Path;
use std::sync::{Arc, OnceLock};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use lacuna_files::ModelFiles;
use lacuna_models::{Model, with_images};
use lacuna_server::{Local, ReplyPart, ServerConfig};
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Interfaces that take images.
const PATHS: [&str; 5] = [
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/api/chat",
    "/api/generate",
];

/// The tiny model that sees, behind all interfaces, without a host that images are fetched from.
fn local() -> &'static Local {
    static LOCAL: OnceLock<Local> = OnceLock::new();
    LOCAL.get_or_init(|| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../reference/vision/gemma3/hf");
        let files = ModelFiles::open(&folder).expect("committed");
        let model = Model::load(files).and_then(|model| with_images(model, None));
        let mut config = ServerConfig::default();
        config.service.engine.threads = std::num::NonZeroUsize::new(1);
        Local::start(Arc::new(model.expect("a model that sees")), config).expect("it starts")
    })
}

/// A request of an interface for one token, with `image` where that has the file of an image in base64, and `address`
/// where it has an address.
fn request(path: &str, image: &str, address: &str) -> Value {
    let user = |content: Value| json!([{"role": "user", "content": content}]);
    match path {
        "/v1/chat/completions" => json!({"max_tokens": 1, "messages": user(json!([
            {"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": "A"}]))}),
        "/v1/responses" => json!({"max_output_tokens": 1, "store": false, "input": user(json!([
            {"type": "input_image", "image_url": address}, {"type": "input_text", "text": "A"}]))}),
        "/v1/messages" => json!({"model": "model", "max_tokens": 1, "messages": user(json!([
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": image}},
            {"type": "text", "text": "A"}]))}),
        "/api/chat" => json!({"model": "model", "stream": false, "options": {"num_predict": 1},
            "messages": [{"role": "user", "content": "A", "images": [image]}]}),
        _ => json!({"model": "model", "stream": false, "options": {"num_predict": 1},
            "prompt": "A", "images": [image]}),
    }
}

fuzz_target!(|bytes: &[u8]| {
    let Some((choice, content)) = bytes.split_first() else {
        return;
    };
    let path = PATHS[usize::from(*choice) % PATHS.len()];
    let body = match usize::from(*choice) / PATHS.len() % 3 {
        // A file.
        0 => {
            let encoded = STANDARD.encode(content);
            request(path, &encoded, &format!("data:image/png;base64,{encoded}")).to_string()
        }
        // A text in its place.
        1 => {
            let text = String::from_utf8_lossy(content);
            request(path, &text, &text).to_string()
        }
        // Anything in the place of that text, JSON or not.
        _ => {
            let text = String::from_utf8_lossy(content);
            let whole = request(path, "#", "#").to_string();
            whole.replace("\"#\"", &text)
        }
    };
    let local = local();
    let mut reply = local.call("POST", path, body.into_bytes()).expect("a path");
    let (mut status, mut answer) = (0, Vec::new());
    while let Some(part) = reply.blocking_recv() {
        match part {
            ReplyPart::Head { status: found, .. } => status = found,
            ReplyPart::Body(bytes) => answer.extend(bytes),
        }
    }
    let told = String::from_utf8_lossy(&answer);
    assert!(
        matches!(status, 200 | 400 | 404 | 413 | 429),
        "{path}: {status} {told}"
    );
    assert!(!answer.is_empty(), "{path}: {status}");
});
