//! Logits against `transformers` on tiny random models, and exact equalities of our own.
//!
//! `reference/README.md` says what the fixtures are and how they were made.

mod runner;

use std::fs;

use lacuna_files::ModelFiles;
use lacuna_kernels::{DType, ElementType, Matrix};
use lacuna_kv::{KvPolicy, Layout};
use lacuna_models::{LogitRows, Segment};
use runner::{Expected, Runner, check_rows, expected, floats, folder};

/// Weights that keep float arithmetic must agree to 1e-3; Q8_0 weights also round activations.
fn bound(path: &str) -> f32 {
    let float = path.ends_with("/hf")
        || path.starts_with("qwen2/")
        || path == "qwen3/model.gguf"
        || path.starts_with("mistral");
    if float { 1e-3 } else { 5e-2 }
}

fn check_logits(path: &str) {
    let model = path.split('/').next().expect("a folder");
    let expected = expected(model);
    let reference = floats(&format!("{model}/logits.f32"));
    let found = Runner::open(path).logits(&expected.tokens);
    check_rows(&found, &expected, &reference, bound(path), path);
}

#[test]
fn hugging_face_folders_match_the_reference() {
    for model in [
        "qwen3",
        "qwen3-untied",
        "qwen2",
        "llama2",
        "llama3",
        "mistral",
    ] {
        check_logits(&format!("{model}/hf"));
    }
}

#[test]
fn gguf_files_match_the_reference() {
    for model in [
        "qwen3",
        "qwen3-untied",
        "qwen2",
        "llama2",
        "llama3",
        "mistral",
    ] {
        check_logits(&format!("{model}/model.gguf"));
    }
}

#[test]
fn split_files_match_the_reference() {
    check_logits("qwen3/split-00001-of-00003.gguf");
}

#[test]
fn the_newer_spelling_of_rope_parameters_means_the_same() {
    let folder = folder();
    let copy = tempfile::tempdir().expect("a scratch folder");
    for entry in fs::read_dir(folder.join("llama3/hf")).expect("a committed fixture") {
        let entry = entry.expect("readable");
        fs::copy(entry.path(), copy.path().join(entry.file_name())).expect("room to copy");
    }
    fs::copy(
        folder.join("llama3-new-spelling/hf/config.json"),
        copy.path().join("config.json"),
    )
    .expect("room to copy");
    let expected = expected("llama3");
    let newer = Runner::open(copy.path().to_str().expect("UTF-8")).logits(&expected.tokens);
    let older = Runner::open("llama3/hf").logits(&expected.tokens);
    assert_eq!(newer, older);
}

#[test]
fn every_weight_type_matches_its_dequantized_reference() {
    let text = fs::read(folder().join("qwen3-types/expected.json")).expect("a committed fixture");
    let all: std::collections::BTreeMap<String, Expected> =
        serde_json::from_slice(&text).expect("valid JSON");
    assert!(all.len() >= 6, "{} kinds of weights", all.len());
    for (name, expected) in all {
        let reference = floats(&format!("qwen3-types/{name}.f32"));
        let found = Runner::open(&format!("qwen3-types/{name}.gguf")).logits(&expected.tokens);
        // Rounded activations cost about 1e-1, where no two layers have weights alike.
        let bound = if name.starts_with("dynamic") {
            2e-1
        } else {
            7e-2
        };
        check_rows(&found, &expected, &reference, bound, &name);
    }
}

#[test]
fn loose_blocks_of_every_weight_type_decode_bit_for_bit() {
    let path = folder().join("qwen3-types/blocks.gguf");
    let files = ModelFiles::open(&path).expect("a committed fixture");
    let expected = floats("qwen3-types/blocks.f32");
    let mut rest = &expected[..];
    // In the order of the file.
    for dtype in DType::ALL {
        let name = dtype.name().to_uppercase();
        let tensor = files.tensors().require(&name).expect("a row of each type");
        let &[1, cols] = tensor.shape() else {
            panic!("{name} is no row: {:?}", tensor.shape())
        };
        let row = Matrix::new(dtype, 1, cols, tensor.bytes()).expect("whole blocks");
        assert_eq!(tensor.dtype(), dtype);
        let (values, after) = rest.split_at(cols);
        let mut decoded = vec![f32::NAN; values.len()];
        row.dequantize_row(0, &mut decoded);
        assert_eq!(decoded, values, "{name}");
        rest = after;
    }
    assert!(rest.is_empty(), "{} values of unknown types", rest.len());
}

#[test]
fn greedy_continuations_match_the_reference() {
    for path in [
        "qwen3/hf",
        "qwen2/hf",
        "llama3/hf",
        "mistral/hf",
        "llama2/hf",
        "mistral/model.gguf",
    ] {
        let Some(greedy) = expected(path.split('/').next().expect("a folder")).greedy else {
            continue;
        };
        let tokens = Runner::open(path).greedy(&greedy.prompt, greedy.tokens.len());
        assert_eq!(tokens, greedy.tokens, "{path}");
    }
}

#[test]
fn token_by_token_equals_one_pass_bit_for_bit() {
    for path in [
        "qwen3/model.gguf",
        "llama3/model.gguf",
        "qwen2/model.gguf",
        "qwen3-types/Q4_K_M.gguf",
    ] {
        let mut runner = Runner::with(path, KvPolicy::default(), ElementType::F16, 2);
        let vocabulary = u32::try_from(runner.model.spec().vocabulary).expect("a vocabulary");
        let tokens: Vec<u32> = (0..40).map(|i| i * 7 % vocabulary).collect();
        let whole = runner.logits(&tokens);
        for chunk in [1, 3, 16] {
            let mut sequence = runner.sequence();
            let pieces: Vec<f32> = tokens
                .chunks(chunk)
                .flat_map(|chunk| runner.extend(&mut sequence, chunk))
                .collect();
            assert!(pieces == whole, "{path} in chunks of {chunk}");
        }
    }
}

#[test]
fn sparse_equals_dense_bit_for_bit() {
    for element in [ElementType::F16, ElementType::F32] {
        let tokens = expected("qwen3").tokens;
        let logits = |policy| Runner::with("qwen3/model.gguf", policy, element, 1).logits(&tokens);
        assert!(logits(KvPolicy::default()) == logits(KvPolicy::Dense(Layout::TokenMajor)));
    }
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() {
    let tokens = expected("llama3").tokens;
    let logits = |threads| {
        Runner::with(
            "llama3/model.gguf",
            KvPolicy::default(),
            ElementType::F16,
            threads,
        )
        .logits(&tokens)
    };
    assert!(logits(1) == logits(2));
}

#[test]
fn a_batch_of_sequences_equals_each_alone_bit_for_bit() {
    let mut runner = Runner::open("qwen3/model.gguf");
    let prompts: [&[u32]; 3] = [&[5, 9, 200, 31, 7], &[1], &[44, 45, 46]];
    let alone: Vec<f32> = prompts
        .iter()
        .flat_map(|prompt| {
            let logits = runner.logits(prompt);
            logits[logits.len() - runner.model.spec().vocabulary..].to_vec()
        })
        .collect();
    let mut sequences = [(); 3].map(|()| runner.sequence());
    let mut segments: Vec<Segment<'_>> = sequences
        .iter_mut()
        .zip(prompts)
        .map(|(sequence, tokens)| {
            sequence.prepare(tokens.len()).expect("room");
            Segment {
                tokens,
                sequence,
                logits: LogitRows::Last,
                images: &[],
            }
        })
        .collect();
    let together = runner
        .model
        .forward(&runner.cpu, &mut segments, &mut runner.scratch)
        .expect("valid tokens");
    assert!(together == alone);
}

#[test]
fn truncated_equals_never_written() {
    let mut runner = Runner::open("qwen3/model.gguf");
    let mut sequence = runner.sequence();
    runner.extend(&mut sequence, &[1, 2, 3, 4, 5, 6, 7, 8]);
    sequence.truncate(3).expect("pages go back");
    let again = runner.extend(&mut sequence, &[9, 10]);
    let mut fresh = runner.sequence();
    runner.extend(&mut fresh, &[1, 2, 3]);
    assert!(again == runner.extend(&mut fresh, &[9, 10]));
}
