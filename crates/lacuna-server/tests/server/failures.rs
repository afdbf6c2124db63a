//! What a client is told when the model itself fails.

use std::path::Path;
use std::sync::Arc;

use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::Model;
use lacuna_server::Server;
use serde_json::json;

use crate::support::{CHAT, COMPLETION, assert_nothing_held, config, get, post, question};

/// A server of the demo model with one block of a matrix scaled by what is no number.
fn damaged() -> Server {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/lacuna-demo-q8_0.gguf");
    let mut bytes = std::fs::read(&path).expect("committed");
    let files = ModelFiles::open(&path).expect("a model");
    let matrix = files.tensors().require("blk.2.ffn_down.weight");
    let scale = matrix.expect("there").file_range().start;
    bytes[scale..][..2].copy_from_slice(&0x7E00_u16.to_le_bytes());
    let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a whole file");
    let model = Arc::new(Model::load(files).expect("a model"));
    Server::start(model, config()).expect("the server starts")
}

/// They used to end the reply as if it were finished, with status 200.
#[test]
fn logits_that_are_not_finite_are_an_error_of_the_server() {
    let server = damaged();
    for (path, body) in [
        (CHAT, question(json!({}))),
        (CHAT, question(json!({"stream": true}))),
        (CHAT, question(json!({"temperature": 1}))),
        (
            CHAT,
            question(json!({"response_format": {"type": "json_object"}})),
        ),
        (
            COMPLETION,
            json!({"prompt": "What", "max_tokens": 4, "logprobs": 2}),
        ),
    ] {
        let response = post(&server, path, &body);
        assert_eq!(response.status, 500, "{body}: {response:?}");
        let error = &response.json()["error"];
        assert_eq!(error["code"], "logits_not_finite", "{error}");
        assert_eq!(error["type"], "server_error", "{error}");
    }
    assert_eq!(get(&server, "/health").status, 200, "the server goes on");
    assert_nothing_held(&server);
}
