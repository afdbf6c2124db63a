//! Hugging Face folders: both spellings of `config.json`, one or several weights files.

use super::*;

const BASE: &str = r#""model_type": "llama", "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 272,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-05"#;
const LLAMA3: &str = r#""rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64"#;

fn config(more: &str) -> Config {
    serde_json::from_str(&format!("{{{BASE}{more}}}")).unwrap()
}

fn rope(more: &str) -> Result<Rope, Error> {
    config(more).rope(Path::new("config.json"))
}

/// A safetensors file with F32 vectors of two elements.
fn weights_file(names: &[&str]) -> Vec<u8> {
    let lines: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, name)| {
            format!(
                r#""{name}":{{"dtype":"F32","shape":[2],"data_offsets":[{},{}]}}"#,
                i * 8,
                i * 8 + 8
            )
        })
        .collect();
    let header = format!("{{{}}}", lines.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.resize(bytes.len() + names.len() * 8, 0);
    bytes
}

fn folder(config: &str, files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(CONFIG_FILE), config).unwrap();
    for (name, bytes) in files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn tensors(files: &[(&str, Vec<u8>)]) -> Result<Tensors, Error> {
    let folder = folder(&format!("{{{BASE}}}"), files);
    Folder::open(folder.path()).unwrap().tensors()
}

#[test]
fn what_is_left_out_of_a_config_has_the_usual_default() {
    let config = config("");
    assert_eq!((config.kv_heads(), config.head_size()), (4, 8));
    assert!(!config.tie_word_embeddings);
    assert_eq!(config.hidden_act, "silu");
    assert_eq!(config.eos_token_id, TokenIds(vec![]));
    assert_eq!(
        rope("").unwrap(),
        Rope {
            theta: 10_000.0,
            scaling: RopeScaling::None
        }
    );
}

#[test]
fn token_ids_are_one_or_several_or_none() {
    assert_eq!(config(r#", "eos_token_id": 7"#).eos_token_id.0, [7]);
    assert_eq!(config(r#", "eos_token_id": [7, 8]"#).eos_token_id.0, [7, 8]);
    assert!(
        config(r#", "eos_token_id": null"#)
            .eos_token_id
            .0
            .is_empty()
    );
}

#[test]
fn both_spellings_of_rotary_parameters_mean_the_same() {
    let older = rope(&format!(
        r#", "rope_theta": 8000.0, "rope_scaling": {{{LLAMA3}}}"#
    ))
    .unwrap();
    let newer = rope(&format!(
        r#", "rope_parameters": {{"rope_theta": 8000.0, {LLAMA3}}}"#
    ))
    .unwrap();
    assert_eq!(older, newer);
    let scaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64,
    };
    assert_eq!(
        newer,
        Rope {
            theta: 8000.0,
            scaling
        }
    );
    let oldest = rope(r#", "rope_scaling": {"type": "linear", "factor": 2.0}"#).unwrap();
    assert_eq!(oldest.scaling, RopeScaling::Linear { factor: 2.0 });
    let plain =
        rope(r#", "rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}"#).unwrap();
    assert_eq!(
        plain,
        Rope {
            theta: 5.0,
            scaling: RopeScaling::None
        }
    );
}

#[test]
fn rotary_parameters_that_cannot_be_used_are_named() {
    let message = |more: &str| rope(more).unwrap_err().to_string();
    assert!(message(r#", "rope_scaling": {"rope_type": "longrope"}"#).contains("longrope"));
    assert!(
        message(r#", "rope_scaling": {"rope_type": "linear"}"#).contains("`factor` is missing")
    );
    assert!(message(r#", "rope_scaling": {"rope_type": "linear", "factor": -1}"#).contains("-1"));
    assert!(message(r#", "rope_theta": 0.0"#).contains("rope_theta"));
    let layers = r#", "rope_parameters": {"full_attention": {"rope_theta": 1.0}}"#;
    assert!(message(layers).contains("each kind of layer"));
}

#[test]
fn sizes_no_model_has_are_refused() {
    for (field, value) in [
        ("num_key_value_heads", "0"),
        ("num_key_value_heads", "3"),
        ("head_dim", "0"),
    ] {
        let folder = folder(&format!("{{{BASE}, \"{field}\": {value}}}"), &[]);
        let error = Folder::open(folder.path()).unwrap_err();
        assert!(matches!(error, Error::Config { field: named, .. } if named == field));
    }
    let huge = format!(
        "{{{}}}",
        BASE.replace("\"hidden_size\": 32", "\"hidden_size\": 4000000000")
    );
    let folder = folder(&huge, &[]);
    assert!(matches!(
        Folder::open(folder.path()),
        Err(Error::Config {
            field: "hidden_size",
            ..
        })
    ));
}

#[test]
fn a_folder_that_is_no_model_says_what_is_missing() {
    let empty = tempfile::tempdir().unwrap();
    std::fs::write(empty.path().join("tiny.gguf"), b"GGUF").unwrap();
    let error = Folder::open(empty.path()).unwrap_err();
    assert!(error.to_string().contains("such as tiny.gguf"), "{error}");
    let broken = folder("{", &[]);
    assert!(matches!(
        Folder::open(broken.path()),
        Err(Error::Json { .. })
    ));
    let nameless = folder("{}", &[]);
    let error = Folder::open(nameless.path()).unwrap_err();
    assert!(error.to_string().contains("model_type"), "{error}");
    assert!(matches!(tensors(&[]), Err(Error::NoWeights { .. })));
}

#[test]
fn weights_come_from_one_file_or_from_those_of_the_index() {
    let one = tensors(&[(WEIGHTS_FILE, weights_file(&["a", "b"]))]).unwrap();
    assert_eq!(one.len(), 2);
    let index =
        br#"{"metadata": {"total_size": 24}, "weight_map": {"a": "x", "b": "y", "c": "x"}}"#;
    let many = tensors(&[
        (INDEX_FILE, index.to_vec()),
        ("x", weights_file(&["a", "c"])),
        ("y", weights_file(&["b"])),
    ]);
    let many = many.unwrap();
    assert_eq!(many.len(), 3);
    assert!(many.require_shape("c", &[2]).is_ok());
}

#[test]
fn an_index_that_does_not_hold_is_refused() {
    let index = |map: &str| {
        (
            INDEX_FILE,
            format!(r#"{{"weight_map": {map}}}"#).into_bytes(),
        )
    };
    let outside = tensors(&[index(r#"{"a": "../x"}"#)]);
    assert!(matches!(outside, Err(Error::IndexName { name, .. }) if name == "../x"));
    let missing = tensors(&[index(r#"{"a": "x"}"#)]);
    assert!(matches!(
        missing,
        Err(Error::File(mapping::Error::NotFound { .. }))
    ));
    let absent = tensors(&[
        index(r#"{"a": "x", "b": "x"}"#),
        ("x", weights_file(&["a"])),
    ]);
    assert!(matches!(absent, Err(Error::IndexTensor { name, .. }) if name == "b"));
    let map = r#"{"a": "x", "b": "y"}"#;
    let twice = [
        index(map),
        ("x", weights_file(&["a", "b"])),
        ("y", weights_file(&["b"])),
    ];
    assert!(matches!(tensors(&twice), Err(Error::DuplicateTensor { name, .. }) if name == "b"));
    let damaged = tensors(&[(WEIGHTS_FILE, b"junk".to_vec())]);
    assert!(matches!(damaged, Err(Error::Weights { .. })));
}
