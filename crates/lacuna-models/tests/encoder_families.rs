//! Families of encoders, and decoders that pool, against `transformers`, on tiny random models, from files of
//! both kinds: the rows behind the last layer, what becomes of them, and scores of pairs of texts.
//!
//! `reference/README.md` says what the fixtures are and how they were made.

mod runner;

use std::fs;
use std::path::PathBuf;

use lacuna_files::ModelFiles;
use lacuna_models::plan::WeightPlan;
use lacuna_models::spec::{Judgement, Mask};
use lacuna_models::{Texts, describe, normalize};
use runner::encoder::{self, Encoder, mode, modules};
use runner::{floats, folder, relative_error};
use serde::Deserialize;
use serde_json::{Value, json};

/// Float32 arithmetic against float64.
const BOUND: f32 = 1e-4;
const EMBEDDERS: [&str; 5] = [
    "xlm-roberta",
    "nomic-bert",
    "modern-bert",
    "gemma-embedding",
    "qwen3-embedding",
];
/// Of which there are GGUF files alone.
const GGUF_ALONE: &str = "nomic-bert-moe";
const RERANKERS: [&str; 5] = [
    "xlm-roberta-scores",
    "bert-scores",
    "modern-bert-scores",
    "qwen3-reranker",
    "qwen3-scores",
];

#[derive(Deserialize)]
struct Expected {
    /// Elements of a row, or scores of a text.
    width: usize,
    texts: Vec<Vec<u32>>,
    /// What the GGUF file says.
    #[serde(default)]
    pooling: String,
    /// Of each text, where that begins which it is compared with.
    #[serde(default)]
    seconds: Vec<usize>,
    #[serde(default)]
    dense_width: Option<usize>,
}

impl Expected {
    fn of(name: &str) -> Self {
        let text = fs::read(fixture(name).join("expected.json")).expect("a committed fixture");
        serde_json::from_slice(&text).expect("valid JSON")
    }

    fn texts(&self) -> Texts {
        let mut texts = Texts::new();
        for (index, text) in self.texts.iter().enumerate() {
            let second = self.seconds.get(index).copied();
            texts.push_pair(text, second.unwrap_or(text.len()));
        }
        texts
    }
}

fn fixture(name: &str) -> PathBuf {
    folder().join("encoders").join(name)
}

/// Names of tensors of heads that guess tokens begin as no model's do: those of ModernBERT's scores begin with `head.`.
#[test]
fn every_tensor_of_a_model_that_scores_is_planned_for() {
    for name in RERANKERS {
        let files = ModelFiles::open(&fixture(name).join("hf")).expect("a committed fixture");
        let description = describe(&files).expect("a model");
        let plan = WeightPlan::of_files(&files, &description);
        let left_out: Vec<_> = plan.tensors.iter().filter(|it| it.is_left_out).collect();
        assert!(left_out.is_empty(), "{name}: {left_out:?}");
    }
}

/// The fixture's folder with other files beside the model's own.
fn folder_with(name: &str, files: &[(&str, Value)]) -> tempfile::TempDir {
    encoder::folder_with(&fixture(name).join("hf"), files)
}

/// A folder whose rows are pooled in this way.
fn pooling_folder(name: &str, pooling: &str) -> tempfile::TempDir {
    let kinds = ["Transformer", "Pooling"];
    let files = [
        ("modules.json", modules(&kinds)),
        ("1_Pooling/config.json", mode(pooling)),
    ];
    folder_with(name, &files)
}

/// The folder of a reranker, which one that answers in tokens says in a file of its own.
fn reranker_folder(name: &str) -> tempfile::TempDir {
    let answers = json!({"true_token_id": 5, "false_token_id": 9});
    let files = [
        ("modules.json", modules(&["Transformer", "LogitScore"])),
        ("1_LogitScore/config.json", answers),
    ];
    let own = if name == "qwen3-reranker" {
        &files[..]
    } else {
        &[]
    };
    folder_with(name, own)
}

#[test]
fn rows_behind_the_last_layer_match_the_reference() {
    for name in EMBEDDERS {
        let expected = Expected::of(name);
        for pooling in ["mean", "first", "last"] {
            let folder = pooling_folder(name, pooling);
            let mut encoder = Encoder::open(folder.path(), 1).expect("the fixture loads");
            let found = encoder.vectors(&expected.texts()).expect("valid texts");
            let wanted = floats(&format!("encoders/{name}/{pooling}.f32"));
            let error = relative_error(&found, &wanted);
            println!("{name}, {pooling}: relative error {error:.2e}");
            assert!(error <= BOUND, "{name}, {pooling}: {error:e}");
        }
    }
}

#[test]
fn gguf_files_pool_as_they_say() {
    for name in EMBEDDERS.into_iter().chain([GGUF_ALONE]) {
        let expected = Expected::of(name);
        let path = fixture(name).join("model.gguf");
        let mut encoder = Encoder::open(&path, 1).expect("the fixture loads");
        let found = encoder.vectors(&expected.texts()).expect("valid texts");
        let (file, width) = match expected.dense_width {
            Some(width) => ("dense", width),
            None => (expected.pooling.as_str(), expected.width),
        };
        let mut wanted = floats(&format!("encoders/{name}/{file}.f32"));
        wanted.chunks_exact_mut(width).for_each(normalize);
        let error = relative_error(&found, &wanted);
        assert!(error <= BOUND, "{name}: {error:e}");
        assert_eq!(encoder.model.spec().embedding_width(), Some(width));
    }
}

#[test]
fn products_behind_the_pooled_row_are_read_from_their_own_folders() {
    let name = "gemma-embedding";
    let expected = Expected::of(name);
    let width = expected.dense_width.expect("it has two");
    let kinds = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"];
    for normalized in [false, true] {
        let kinds = &kinds[..4 + usize::from(normalized)];
        let files = [
            ("modules.json", modules(kinds)),
            ("1_Pooling/config.json", mode(&expected.pooling)),
        ];
        let folder = folder_with(name, &files);
        let mut encoder = Encoder::open(folder.path(), 1).expect("the fixture loads");
        let found = encoder.vectors(&expected.texts()).expect("valid texts");
        let mut wanted = floats(&format!("encoders/{name}/dense.f32"));
        if normalized {
            wanted.chunks_exact_mut(width).for_each(normalize);
        }
        let error = relative_error(&found, &wanted);
        assert!(error <= BOUND, "{normalized}: {error:e}");
    }
    for (changed, named) in [
        (json!({"in_features": 25, "out_features": 32}), "25"),
        (json!({"in_features": 24, "out_features": 0}), "3_Dense"),
        (
            json!({"in_features": 24, "out_features": 32, "activation_function": "x.Mish"}),
            "Mish",
        ),
        (json!([]), "2_Dense/config.json"),
    ] {
        let files = [
            ("modules.json", modules(&kinds)),
            ("1_Pooling/config.json", mode(&expected.pooling)),
            ("2_Dense/config.json", changed),
        ];
        let folder = folder_with(name, &files);
        let error = Encoder::open(folder.path(), 1).err().expect("refused");
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
}

#[test]
fn configurations_as_models_were_published_mean_the_same() {
    for name in ["nomic-bert", "modern-bert"] {
        let expected = Expected::of(name);
        let folder = pooling_folder(name, "mean");
        let config = fixture(name).join("hf-published/config.json");
        fs::copy(config, folder.path().join("config.json")).expect("room to copy");
        let mut encoder = Encoder::open(folder.path(), 1).expect("the fixture loads");
        let found = encoder.vectors(&expected.texts()).expect("valid texts");
        let error = relative_error(&found, &floats(&format!("encoders/{name}/mean.f32")));
        assert!(error <= BOUND, "{name}: {error:e}");
    }
}

#[test]
fn scores_match_the_reference_from_both_kinds_of_files() {
    for name in RERANKERS {
        let expected = Expected::of(name);
        let wanted = floats(&format!("encoders/{name}/scores.f32"));
        let folder = reranker_folder(name);
        let gguf = fixture(name).join("model.gguf");
        let gguf = gguf.exists().then_some(gguf.as_path());
        for path in [Some(folder.path()), gguf].into_iter().flatten() {
            let mut encoder = Encoder::open(path, 1).expect("the fixture loads");
            let found = encoder.vectors(&expected.texts()).expect("valid texts");
            let error = relative_error(&found, &wanted);
            println!("{name}: relative error {error:.2e}");
            assert!(error <= BOUND, "{}: {error:e}", path.display());
            assert_eq!(encoder.model.spec().embedding_width(), None);
            let judgement = match name.starts_with("qwen3") {
                true => Judgement::Question,
                false => Judgement::Pair,
            };
            assert_eq!(encoder.model.spec().judgement(), Some(judgement));
        }
    }
}

/// The second of two texts has a token type of its own where the table has one.
#[test]
fn where_the_second_text_begins_matters_to_bert_alone() {
    for name in ["bert-scores", "xlm-roberta-scores"] {
        let expected = Expected::of(name);
        let mut encoder = Encoder::open(&fixture(name).join("hf"), 1).expect("the fixture loads");
        let pairs = encoder.vectors(&expected.texts()).expect("valid texts");
        let wholes = encoder
            .vectors(&expected.texts.iter().collect())
            .expect("valid texts");
        assert_eq!(pairs == wholes, name != "bert-scores");
    }
}

#[test]
fn a_vector_does_not_depend_on_the_batch_or_on_threads() {
    for name in EMBEDDERS.into_iter().chain(RERANKERS).chain([GGUF_ALONE]) {
        let expected = Expected::of(name);
        let folder = match name {
            GGUF_ALONE => None,
            name if name.ends_with("scores") || name.ends_with("reranker") => {
                Some(reranker_folder(name))
            }
            name => Some(pooling_folder(name, "mean")),
        };
        let gguf = fixture(name).join("model.gguf");
        let path = folder
            .as_ref()
            .map_or(gguf.as_path(), |folder| folder.path());
        let open = |threads| Encoder::open(path, threads).expect("the fixture loads");
        let mut encoders = [1, 3].map(open);
        let all = expected.texts();
        let mut alone = Vec::new();
        for (index, text) in expected.texts.iter().enumerate() {
            let mut one = Texts::new();
            let second = expected.seconds.get(index).copied();
            one.push_pair(text, second.unwrap_or(text.len()));
            alone.extend(encoders[0].vectors(&one).expect("valid texts"));
        }
        for encoder in &mut encoders {
            assert!(
                encoder.vectors(&all).expect("valid texts") == alone,
                "{name}"
            );
        }
    }
}

#[test]
fn windows_reach_to_both_sides() {
    let masks = |name: &str| {
        let path = fixture(name).join("model.gguf");
        let encoder = Encoder::open(&path, 1).expect("the fixture loads");
        let layers = encoder.model.spec().layers.iter();
        layers.filter_map(|layer| layer.mask()).collect::<Vec<_>>()
    };
    let around = Mask::Around(4);
    assert_eq!(
        masks("modern-bert"),
        [Mask::Full, around, around, Mask::Full]
    );
    let gemma = masks("gemma-embedding");
    assert_eq!(gemma[..5], [around; 5]);
    assert_eq!(gemma[5..], [Mask::Full, around]);
    assert!(
        masks("qwen3-embedding")
            .iter()
            .all(|mask| *mask == Mask::Causal)
    );
}

#[test]
fn what_no_text_can_be_scored_by_is_refused_by_name() {
    let config = |name: &str| -> Value {
        let text = fs::read(fixture(name).join("hf/config.json")).expect("a committed fixture");
        serde_json::from_slice(&text).expect("valid JSON")
    };
    let refused = |name: &str, files: &[(&str, Value)], named: &str| {
        let folder = folder_with(name, files);
        let error = Encoder::open(folder.path(), 1).err().expect("refused");
        assert!(error.to_string().contains(named), "{named}: {error}");
    };
    let mut labels = config("bert-scores");
    labels["id2label"] = json!({"0": "a", "1": "b", "2": "c"});
    refused("bert-scores", &[("config.json", labels)], "3 labels");
    let mut experts = config("nomic-bert");
    experts["moe_every_n_layers"] = json!(2);
    refused("nomic-bert", &[("config.json", experts)], "GGUF");
    let mut positions = config("xlm-roberta");
    positions["pad_token_id"] = json!(40);
    refused("xlm-roberta", &[("config.json", positions)], "context");
    let mut biased = config("modern-bert");
    biased["mlp_bias"] = json!(true);
    refused("modern-bert", &[("config.json", biased)], "mlp_bias");
    let judge = modules(&["Transformer", "LogitScore"]);
    for (answers, named) in [
        (json!({"true_token_id": 5}), "no"),
        (json!({"true_token_id": 5, "false_token_id": 64}), "64"),
    ] {
        let files = [
            ("modules.json", judge.clone()),
            ("1_LogitScore/config.json", answers),
        ];
        refused("qwen3-reranker", &files, named);
    }
    let dense = modules(&["Transformer", "Pooling", "Dense", "Dense", "Dense"]);
    let files = [
        ("modules.json", dense),
        ("1_Pooling/config.json", mode("mean")),
    ];
    refused("gemma-embedding", &files, "Dense, Dense, Dense");
}
