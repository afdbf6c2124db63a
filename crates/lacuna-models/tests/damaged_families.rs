//! Descriptions that contradict themselves: whatever one of a family's numbers becomes, the model is
//! refused with an error or it runs; nothing panics, hangs or takes memory without end.

mod runner;

use std::fs;
use std::path::PathBuf;

use lacuna_files::huggingface::Config;
use lacuna_files::{Mapping, ModelFiles};
use lacuna_models::plan::ArenaPlan;
use lacuna_models::program::Program;
use lacuna_models::{BatchLimits, Description, Loading, Model, describe, is_head, with_head};
use proptest::prelude::*;
use runner::folder;
use serde_json::{Map, Value, json};

const LIMITS: BatchLimits = BatchLimits {
    tokens: 3,
    logit_rows: 1,
    context_tokens: 64,
};

fn fixtures() -> Vec<PathBuf> {
    let kinds = ["families", "encoders"].into_iter();
    let entries =
        kinds.flat_map(|kind| fs::read_dir(folder().join(kind)).expect("committed fixtures"));
    let mut paths: Vec<PathBuf> = entries
        .map(|entry| entry.expect("readable").path())
        .collect();
    paths.sort();
    paths
}

/// What a field may become.
fn wrong_values() -> Vec<Value> {
    vec![
        Value::Null,
        json!(0),
        json!(1),
        json!(7),
        json!(-1),
        json!(1.5),
        json!(1e300),
        json!(4_294_967_296_u64),
        json!(2_000_000_000),
        json!("sliding_attention"),
        json!([]),
        json!([0]),
        json!(["full_attention"]),
        json!({}),
        json!(true),
        json!({"full_attention": {"rope_type": "yarn", "factor": 0}, "sliding_attention": {}}),
        json!({"rope_type": "yarn", "factor": 1e-300, "rope_theta": 1.0}),
        json!({"rope_type": "longrope", "short_factor": [0], "long_factor": []}),
    ]
}

/// Every description with one field, at any depth, changed or left out.
fn damaged(config: &Map<String, Value>) -> Vec<Map<String, Value>> {
    let mut all = Vec::new();
    for (key, value) in config {
        let mut changed = |value: Option<Value>| {
            let mut copy = config.clone();
            match value {
                Some(value) => copy.insert(key.clone(), value),
                None => copy.remove(key),
            };
            all.push(copy);
        };
        changed(None);
        wrong_values()
            .into_iter()
            .for_each(|value| changed(Some(value)));
        if let Value::Object(inner) = value {
            for inner in damaged(inner) {
                changed(Some(Value::Object(inner)));
            }
        }
    }
    all
}

/// Plans what was described, which is where sizes that do not fit together would show.
fn plan(program: &Program) {
    if let Ok(plan) = ArenaPlan::new(program, LIMITS) {
        assert_eq!(plan.verify(program), Ok(()));
    }
}

#[test]
fn a_config_that_is_damaged_is_refused_or_planned() {
    let configs = fixtures()
        .into_iter()
        .map(|path| path.join("hf/config.json"));
    for config in configs.filter(|path| path.exists()) {
        let text = fs::read(config).expect("a committed fixture");
        let config: Map<String, Value> = serde_json::from_slice(&text).expect("valid JSON");
        for config in damaged(&config) {
            let text = serde_json::to_vec(&config).expect("JSON");
            let described = Config::parse(&text).map(|config| Description::from_config(&config));
            if let Ok(Ok(description)) = described {
                plan(&Program::new(&description.spec));
            }
        }
    }
}

/// Heads in files of their own, each with a model that it is for.
const HEADS: [[&str; 2]; 4] = [
    ["heads/eagle3/model.gguf", "heads/eagle3/head"],
    ["heads/eagle3/model.gguf", "heads/eagle3/speculators/head"],
    [
        "heads/gemma4-assistant/model.gguf",
        "heads/gemma4-assistant/head",
    ],
    [
        "heads/gemma4-assistant-dense/model.gguf",
        "heads/gemma4-assistant-dense/head",
    ],
];

/// Plans what a model is with a head beside it, if it may be.
fn plan_beside(model: ModelFiles, head: &ModelFiles) {
    if is_head(head)
        && let Ok(files) = with_head(model, head)
        && let Ok(description) = describe(&files)
        && let Ok(model) =
            Model::load_described(files, description.with_head(), Loading::mapped(&mut ()))
    {
        plan(model.program());
        plan(model.program().head().expect("it was given one"));
    }
}

#[test]
fn the_config_of_a_head_that_is_damaged_is_refused_or_planned() {
    for [model, head] in HEADS {
        let model = ModelFiles::open(&folder().join(model)).expect("a committed fixture");
        let text = fs::read(folder().join(head).join("config.json")).expect("a committed fixture");
        let config: Map<String, Value> = serde_json::from_slice(&text).expect("valid JSON");
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let weights = "model.safetensors";
        fs::copy(
            folder().join(head).join(weights),
            scratch.path().join(weights),
        )
        .expect("room");
        for config in damaged(&config) {
            let text = serde_json::to_vec(&config).expect("JSON");
            fs::write(scratch.path().join("config.json"), text).expect("room");
            if let Ok(head) = ModelFiles::open(scratch.path()) {
                plan_beside(model.clone(), &head);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_head_in_gguf_with_damaged_metadata_is_refused_or_planned(
        which in 0..HEADS.len(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let [model, head] = HEADS[which];
        // One has no GGUF file.
        let head = head.replace("/speculators/head", "/normed/head");
        let mut bytes = fs::read(folder().join(format!("{head}.gguf"))).expect("a committed fixture");
        let header = bytes.len().min(4096);
        for (at, value) in changes {
            let at = at.index(header);
            bytes[at] = value;
        }
        let model = ModelFiles::open(&folder().join(model)).expect("a committed fixture");
        if let Ok(head) = ModelFiles::from_gguf(Mapping::from(bytes)) {
            plan_beside(model, &head);
        }
    }

    #[test]
    fn a_gguf_file_with_damaged_metadata_is_refused_or_runs(
        which in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let names = ["model.gguf", "model-older.gguf", "mean.gguf"];
        let paths = fixtures().into_iter().flat_map(|path| names.map(|name| path.join(name)));
        let paths: Vec<PathBuf> = paths.filter(|path| path.exists()).collect();
        let mut bytes = fs::read(which.get(&paths)).expect("a committed fixture");
        // Metadata and the directory of tensors come first.
        let header = bytes.len().min(4096);
        for (at, value) in changes {
            let at = at.index(header);
            bytes[at] = value;
        }
        if let Ok(files) = ModelFiles::from_gguf(Mapping::from(bytes))
            && let Ok(model) = Model::load(files)
        {
            plan(model.program());
        }
    }
}
