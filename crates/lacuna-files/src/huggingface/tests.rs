//! Hugging Face folders: both spellings of `config.json`, one or several weights files.

use super::*;

const BASE: &str = r#""model_type": "llama", "hidden_size": 32, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 272,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-05"#;
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
fn a_wrapper_around_a_model_of_language_is_read_through() {
    let wrapped = folder(
        r#"{"architectures": ["Gemma3ForConditionalGeneration"], "tie_word_embeddings": true,
            "hidden_size": 7, "text_config": {"hidden_size": 32}, "vision_config": {}}"#,
        &[],
    );
    let folder = Folder::open(wrapped.path()).unwrap();
    let config = folder.config();
    assert_eq!(config.class(), "Gemma3ForConditionalGeneration");
    assert_eq!(config.map()["hidden_size"], 32);
    assert_eq!(config.map()["tie_word_embeddings"], true);
    // It is moved and not copied.
    assert!(config.map().get("text_config").is_none());
}

#[test]
fn a_description_that_is_larger_than_any_is_not_read() {
    let padded = |bytes: usize| {
        let said = r#"{"model_type": "llama"}"#;
        let folder = folder(&(said.to_owned() + &" ".repeat(bytes - said.len())), &[]);
        Folder::open(folder.path())
    };
    assert!(padded(MAX_CONFIG_BYTES).is_ok());
    let refused = padded(MAX_CONFIG_BYTES + 1).unwrap_err();
    assert!(
        matches!(refused, Error::TooLarge { bytes, limit, .. } if (bytes, limit) == (4_194_305, 4_194_304)),
        "{refused}"
    );
}

#[test]
fn numbers_that_only_python_writes_are_the_largest_or_none() {
    let python = folder(
        r#"{"model_type": "a \"NaN\" \\", "limits": [0.0, Infinity, -Infinity], "of": NaN}"#,
        &[],
    );
    let folder = Folder::open(python.path()).unwrap();
    let map = folder.config().map();
    assert_eq!(folder.config().class(), "a \"NaN\" \\");
    assert_eq!(map["limits"][0], 0.0);
    assert_eq!(map["limits"][1], f64::MAX);
    assert_eq!(map["limits"][2], f64::MIN);
    assert!(map["of"].is_null());
    assert!(matches!(
        Config::parse(br#"{"model_type": Infinit}"#),
        Err(Error::Json { .. })
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
