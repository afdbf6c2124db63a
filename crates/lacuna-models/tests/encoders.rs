//! Encoders against `transformers`, on tiny random models, from files of both kinds; that a text's
//! embedding does not depend on what else is in the batch; and what is refused.
//!
//! `reference/README.md` says what the fixtures are and how they were made.

mod runner;

use std::fs;
use std::path::PathBuf;

use half::f16;
use lacuna_files::{Mapping, ModelFiles};
use lacuna_kernels::{Cpu, CpuConfig, CpuError, MatmulPrecision};
use lacuna_kv::{KvElements, KvError};
use lacuna_models::{ForwardError, Model, normalize};
use lacuna_text::tokenizer::Special;
use runner::encoder::{self, Encoder, modules};
use runner::{floats, folder, relative_error};
use serde::Deserialize;
use serde_json::{Value, json};

/// Float32 arithmetic against float64.
const BOUND: f32 = 1e-4;
const POOLINGS: [&str; 3] = ["mean", "first", "last"];

#[derive(Deserialize)]
struct Expected {
    width: usize,
    texts: Vec<Vec<u32>>,
}

fn fixture() -> PathBuf {
    folder().join("encoders/bert")
}

fn expected() -> Expected {
    let text = fs::read(fixture().join("expected.json")).expect("a committed fixture");
    serde_json::from_slice(&text).expect("valid JSON")
}

/// The reference's vectors, brought to a length of 1 if asked for.
fn reference(pooling: &str, width: usize, normalized: bool) -> Vec<f32> {
    let mut all = floats(&format!("encoders/bert/{pooling}.f32"));
    if normalized {
        all.chunks_exact_mut(width).for_each(normalize);
    }
    all
}

fn gguf(pooling: &str, threads: usize) -> Encoder {
    let path = fixture().join(format!("{pooling}.gguf"));
    Encoder::open(&path, threads).expect("the fixture loads")
}

/// The fixture's folder with other files beside the model's own.
fn folder_with(files: &[(&str, Value)]) -> tempfile::TempDir {
    encoder::folder_with(&fixture().join("hf"), files)
}

#[test]
fn gguf_files_match_the_reference_in_every_pooling() {
    let expected = expected();
    for pooling in POOLINGS {
        let found = gguf(pooling, 1).embed(&expected.texts);
        let wanted = reference(pooling, expected.width, true);
        let error = relative_error(&found.expect("valid texts"), &wanted);
        println!("{pooling}: relative error {error:.2e}");
        assert!(error <= BOUND, "{pooling}: {error:e}");
    }
}

#[test]
fn folders_pool_as_sentence_transformers_says() {
    let expected = expected();
    for (pooling, mode) in [
        ("mean", "pooling_mode_mean_tokens"),
        ("first", "pooling_mode_cls_token"),
        ("last", "pooling_mode_lasttoken"),
    ] {
        for normalized in [false, true] {
            let kinds = ["Transformer", "Pooling", "Normalize"];
            let kinds = &kinds[..2 + usize::from(normalized)];
            let folder = folder_with(&[
                ("modules.json", modules(kinds)),
                ("1_Pooling/config.json", json!({mode: true})),
            ]);
            let mut encoder = Encoder::open(folder.path(), 1).expect("the fixture loads");
            let found = encoder.embed(&expected.texts).expect("valid texts");
            let wanted = reference(pooling, expected.width, normalized);
            let error = relative_error(&found, &wanted);
            assert!(error <= BOUND, "{pooling}, {normalized}: {error:e}");
        }
    }
    let mut plain = Encoder::open(&fixture().join("hf"), 1).expect("the fixture loads");
    let found = plain.embed(&expected.texts).expect("valid texts");
    let wanted = reference("mean", expected.width, true);
    assert!(
        relative_error(&found, &wanted) <= BOUND,
        "the mean, of length 1"
    );
}

#[test]
fn an_embedding_does_not_depend_on_the_batch_or_on_threads() {
    let texts = expected().texts;
    for pooling in POOLINGS {
        let encoders = [1, 3].map(|threads| gguf(pooling, threads));
        same_in_any_batch(encoders, &texts);
    }
}

#[test]
fn an_embedding_of_rounded_products_is_near_and_does_not_depend_on_the_batch_either() {
    let texts = expected().texts;
    for pooling in POOLINGS {
        let exact = gguf(pooling, 1).embed(&texts).expect("valid texts");
        let Some(cpus) = rounding([1, 3]) else { return };
        let mut encoders = cpus.map(|cpu| {
            let path = fixture().join(format!("{pooling}.gguf"));
            Encoder::open_with(&path, cpu).expect("it loads")
        });
        let rounded = encoders[0].embed(&texts).expect("valid texts");
        assert!(rounded != exact, "nothing was rounded");
        let error = |(a, b): (&f32, &f32)| (a - b).powi(2);
        let errors: f32 = rounded.iter().zip(&exact).map(error).sum();
        let all: f32 = exact.iter().map(|x| x.powi(2)).sum();
        assert!(errors <= 1e-4 * all, "{pooling}: {}", errors / all);
        same_in_any_batch(encoders, &texts);
    }
}

/// Processors with so many threads that round what they multiply, if this one has instructions for it.
fn rounding<const N: usize>(threads: [usize; N]) -> Option<[Cpu; N]> {
    let cpus = threads.map(|threads| {
        let config = CpuConfig {
            threads: threads.try_into().expect("at least one"),
            precision: MatmulPrecision::Bf16.into(),
            ..CpuConfig::default()
        };
        match Cpu::new(config) {
            Err(CpuError::NoBf16(_)) => None,
            cpu => Some(cpu.expect("threads")),
        }
    });
    let all: Vec<Cpu> = cpus.into_iter().flatten().collect();
    all.try_into().ok()
}

/// Checks that texts have the same vectors together, in another order and alone, by both encoders.
fn same_in_any_batch(mut encoders: [Encoder; 2], texts: &[Vec<u32>]) {
    let alone = texts.iter().flat_map(|text| {
        let text = std::slice::from_ref(text);
        encoders[0].embed(text).expect("a valid text")
    });
    let alone: Vec<f32> = alone.collect();
    let reversed: Vec<Vec<u32>> = texts.iter().rev().cloned().collect();
    for encoder in &mut encoders {
        assert!(encoder.embed(texts).expect("valid texts") == alone);
        let found = encoder.embed(&reversed).expect("valid texts");
        let mut rows: Vec<&[f32]> = found.chunks_exact(expected().width).collect();
        rows.reverse();
        assert!(rows.concat() == alone);
        // What an earlier batch left in the arena is of no account.
        assert!(encoder.embed(texts).expect("valid texts") == alone);
    }
}

#[test]
fn texts_that_cannot_be_computed_are_refused() {
    let mut encoder = gguf("mean", 1);
    let mut refused = |texts: &[Vec<u32>]| encoder.embed(texts).expect_err("refused");
    assert!(matches!(
        refused(&[]),
        ForwardError::BatchTooLarge { tokens: 0, .. }
    ));
    assert_eq!(
        refused(&[vec![1], vec![]]),
        ForwardError::EmptyText { index: 1 }
    );
    assert_eq!(
        refused(&[vec![1], vec![1; 25]]),
        ForwardError::TextTooLong {
            index: 1,
            tokens: 25,
            limit: 24
        }
    );
    assert!(matches!(
        refused(&[vec![64]]),
        ForwardError::TokenOutOfRange { token: 64, .. }
    ));
    let many = vec![vec![1]; 9];
    assert!(matches!(
        refused(&many),
        ForwardError::BatchTooLarge { logit_rows: 9, .. }
    ));
}

#[test]
fn each_kind_of_model_refuses_what_the_other_does() {
    let mut encoder = gguf("mean", 1);
    let refused = encoder
        .model
        .forward(&encoder.cpu, &mut [], &mut encoder.scratch);
    assert_eq!(refused, Err(ForwardError::NoLogits));
    let elements = KvElements::default();
    assert!(matches!(
        encoder.model.spec().kv_geometry(elements),
        Err(KvError::EmptyGeometry)
    ));
    let chat = folder().join("qwen3/model.gguf");
    let mut chat = Encoder::open(&chat, 1).expect("the fixture loads");
    assert_eq!(chat.embed(&[vec![1]]), Err(ForwardError::NoEmbeddings));
}

#[test]
fn a_folder_may_say_that_texts_are_shorter() {
    let settings = json!({"max_seq_length": 10, "do_lower_case": false});
    let shorter = folder_with(&[("sentence_bert_config.json", settings)]);
    let encoder = Encoder::open(shorter.path(), 1).expect("the fixture loads");
    assert_eq!(encoder.model.spec().context_tokens, 10);
    let longer = json!({"max_seq_length": 1000});
    let longer = folder_with(&[("sentence_bert_config.json", longer)]);
    let encoder = Encoder::open(longer.path(), 1).expect("the fixture loads");
    assert_eq!(
        encoder.model.spec().context_tokens,
        24,
        "as many as positions"
    );
    let none = folder_with(&[("sentence_bert_config.json", json!({"max_seq_length": 0}))]);
    assert!(Encoder::open(none.path(), 1).is_err());
}

#[test]
fn a_pipeline_that_is_not_run_is_refused_by_name() {
    let mean = json!({"pooling_mode_mean_tokens": true});
    let usual = ["Transformer", "Pooling"];
    let outside = json!([{"path": "", "type": "Transformer"},
                         {"path": "../1_Pooling", "type": "Pooling"}]);
    let both = json!({"pooling_mode_mean_tokens": true, "pooling_mode_cls_token": true});
    let wide = json!({"pooling_mode_mean_tokens": true, "word_embedding_dimension": 32});
    for (modules, pooling, named) in [
        (
            modules(&["Transformer", "Pooling", "Dense"]),
            mean.clone(),
            "Dense",
        ),
        (modules(&["Transformer"]), mean.clone(), "modules.json"),
        (outside, mean.clone(), "../1_Pooling"),
        (
            modules(&usual),
            json!({"pooling_mode_max_tokens": true}),
            "pooling",
        ),
        (modules(&usual), json!({}), "pooling"),
        (modules(&usual), both, "pooling"),
        (modules(&usual), wide, "32"),
        (modules(&usual), json!("mean"), "1_Pooling/config.json"),
        (json!({"path": 1}), mean, "modules.json"),
    ] {
        let folder = folder_with(&[
            ("modules.json", modules),
            ("1_Pooling/config.json", pooling),
        ]);
        let error = Encoder::open(folder.path(), 1).err().expect("refused");
        assert!(error.to_string().contains(named), "{named}: {error}");
    }
    let without = folder_with(&[("modules.json", modules(&usual))]);
    let error = Encoder::open(without.path(), 1).err().expect("refused");
    assert!(
        error.to_string().contains("settings of its modules"),
        "{error}"
    );
}

/// The published model, from text on: vocabulary, positions up to 256 and pooling as its folder says.
#[test]
#[ignore = "needs all-MiniLM-L6-v2: run .ci/fetch-models minilm"]
fn minilm_is_as_similar_as_can_be_to_the_reference() {
    let reference = folder().join("encoders/all-minilm-l6-v2");
    let sentences = fs::read(reference.join("sentences.json")).expect("committed");
    let sentences: Vec<String> = serde_json::from_slice(&sentences).expect("valid JSON");
    assert_eq!(sentences.len(), 200);
    let wanted = fs::read(reference.join("embeddings.f16")).expect("committed");
    let halves = wanted.as_chunks::<2>().0.iter();
    let halves = halves.map(|half| f16::from_le_bytes(*half).to_f32());
    let mut wanted: Vec<f32> = halves.collect();
    // Half precision changes lengths more than directions.
    wanted.chunks_exact_mut(384).for_each(normalize);
    let path = folder().join("../target/models/all-minilm-l6-v2");
    let precise = Encoder::open(&path, 1).expect("the published model");
    let rounded =
        rounding([1]).map(|[cpu]| Encoder::open_with(&path, cpu).expect("the published model"));
    for (mut encoder, bound) in [(Some(precise), 0.999_999), (rounded, 0.9999)]
        .into_iter()
        .filter_map(|(encoder, bound)| Some((encoder?, bound)))
    {
        assert_eq!(encoder.model.spec().context_tokens, 256);
        let mut least = f32::INFINITY;
        for (sentence, wanted) in sentences.iter().zip(wanted.chunks_exact(384)) {
            let tokens = encoder.model.tokenizer().encode(sentence, Special::PROMPT);
            let found = encoder.embed(&[tokens.expect("tokens")]).expect("a text");
            let cosine: f32 = found.iter().zip(wanted).map(|(a, b)| a * b).sum();
            least = least.min(cosine);
            assert!(cosine >= bound, "{cosine} of {sentence:?}");
        }
        println!("least similarity {least} in {:?}", encoder.cpu.precision());
    }
}

#[test]
fn files_that_contradict_themselves_or_lack_a_tensor_are_refused_by_name() {
    let gguf = fs::read(fixture().join("mean.gguf")).expect("a committed fixture");
    let load = |bytes: Vec<u8>| {
        let files = ModelFiles::from_gguf(Mapping::from(bytes)).expect("a GGUF file");
        let refused = Model::load(files).map(drop).expect_err("not whole");
        refused.to_string()
    };
    let replaced = |from: &str, to: &str| {
        let mut bytes = gguf.clone();
        let places = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(from.as_bytes()));
        for at in places.collect::<Vec<_>>() {
            bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        }
        bytes
    };
    for part in [
        "position_embd.weight",
        "token_types.weight",
        "token_embd_norm.bias",
        "blk.1.attn_q.bias",
        "blk.1.attn_output_norm.weight",
        "blk.2.ffn_up.bias",
        "blk.2.layer_output_norm.bias",
    ] {
        let other = part.replace("weight", "wxight").replace("bias", "bixs");
        let shown = load(replaced(part, &other));
        assert!(shown.contains(part) || shown.contains(&other), "{shown}");
    }
    let config = fs::read(fixture().join("hf/config.json")).expect("a committed fixture");
    let config: Value = serde_json::from_slice(&config).expect("valid JSON");
    for (field, value, named) in [
        ("max_position_embeddings", json!(25), "position_embeddings"),
        ("max_position_embeddings", json!(0), "0"),
        ("type_vocab_size", json!(3), "token_type_embeddings"),
        ("type_vocab_size", json!(0), "token types"),
        ("num_attention_heads", json!(5), "query"),
        ("is_decoder", json!(true), "is_decoder"),
        (
            "position_embedding_type",
            json!("relative_key"),
            "relative_key",
        ),
        ("hidden_act", json!("relu6"), "relu6"),
        ("layer_norm_eps", json!(-1), "epsilon"),
    ] {
        let mut changed = config.clone();
        changed[field] = value;
        let folder = folder_with(&[("config.json", changed)]);
        let error = Encoder::open(folder.path(), 1).err().expect("refused");
        assert!(error.to_string().contains(named), "{field}: {error}");
    }
}
