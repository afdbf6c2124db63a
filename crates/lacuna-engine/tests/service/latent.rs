//! Latent attention: what is shared, batched and held in other ways never changes an answer.

use std::path::Path;
use std::sync::{Arc, OnceLock};

use lacuna_engine::{Request, Service, ServiceConfig};
use lacuna_files::ModelFiles;
use lacuna_models::Model;

use crate::support::{Answer, config, contents, finish, greedy, together};

/// A tiny model whose layers keep one row of each token.
fn latent() -> Arc<Model> {
    static MODEL: OnceLock<Arc<Model>> = OnceLock::new();
    let load = || {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/families");
        let files = ModelFiles::open(&folder.join("deepseek-v3/model.gguf"));
        Arc::new(Model::load(files.expect("a committed fixture")).expect("a model"))
    };
    Arc::clone(MODEL.get_or_init(load))
}

fn start(policy: &str) -> Service {
    let mut config: ServiceConfig = config();
    config.engine.context_tokens = Some(512);
    config.engine.kv_policy = policy.parse().expect("a policy");
    config.prefix_cache.enabled = policy.starts_with("sparse");
    Service::start(latent(), config).expect("a service")
}

fn ask(service: &Service, request: Request) -> Vec<Answer> {
    finish(service.handle().submit(request).expect("taken")).expect("an answer")
}

/// Letters of the model's small vocabulary: `shared` that all prompts begin with, then `own`.
fn prompt(seed: u32, shared: u32, own: u32) -> Vec<u32> {
    let letter = |index: u32| 4 + index.wrapping_mul(0x9e37_79b9).rotate_left(index % 31) % 56;
    let own = (0..own).map(|index| letter(1000 * (seed + 1) + index));
    (0..shared).map(letter).chain(own).collect()
}

fn requests() -> Vec<Request> {
    let own = [3, 40, 1, 90];
    let prompts = own
        .iter()
        .zip(0..)
        .map(|(own, seed)| prompt(seed, 300, *own));
    prompts.map(|prompt| greedy(prompt, 30)).collect()
}

#[test]
fn sequences_that_share_pages_of_latent_rows_answer_as_alone() {
    let service = start("sparse");
    let first = ask(&service, requests().remove(0));
    assert_eq!(first[0].reused, 0);
    let found = together(&service, requests());
    for (found, request) in found.iter().zip(requests()) {
        assert!(found[0].reused >= 128, "{} tokens", found[0].reused);
        let alone = ask(&start("dense"), request);
        assert_eq!(contents(found), contents(&alone));
    }
}

#[test]
fn every_way_to_hold_latent_rows_answers_alike() {
    let answers = |policy: &str| {
        let found = together(&start(policy), requests());
        found
            .iter()
            .map(|answers| contents(answers))
            .collect::<Vec<_>>()
    };
    let expected = answers("dense");
    for policy in [
        "sparse:head-major",
        "sparse:interleaved=3",
        "grow:mlx",
        "paged:16",
    ] {
        assert!(answers(policy) == expected, "{policy}");
    }
}
