//! Whole files: what is planned is what is written, whatever the files were.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;

use super::*;
use crate::Model;

const TWO: NonZeroUsize = NonZeroUsize::new(2).expect("not 0");

fn reference(path: &str) -> ModelFiles {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    ModelFiles::open(&root.join(path)).expect("the fixture opens")
}

/// The file that `files` become.
fn quantized(files: &ModelFiles, recipe: Recipe, threads: usize) -> Result<Vec<u8>, Error> {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("out.gguf");
    let threads = NonZeroUsize::new(threads).expect("some");
    let written = Plan::new(files, recipe)?.write_file(&path, threads, &mut ());
    let names = fs::read_dir(folder.path()).expect("readable").count();
    assert_eq!(
        names,
        usize::from(written.is_ok()),
        "a whole file or nothing"
    );
    written.map(|()| fs::read(&path).expect("it is there"))
}

fn open(bytes: Vec<u8>) -> ModelFiles {
    ModelFiles::from_gguf(bytes.into()).expect("it is GGUF")
}

/// A file of one tensor.
fn single(name: &str, shape: &[usize], values: &[f32]) -> ModelFiles {
    let mut header = gguf::Writer::new();
    header.set("general.architecture", "llama");
    header.tensor(name, DType::F32, shape).expect("it fits");
    let mut body = header.begin(Vec::new()).expect("memory");
    let bytes: Vec<u8> = values
        .iter()
        .flat_map(|value| value.to_le_bytes())
        .collect();
    body.tensor(name, &bytes).expect("as long as declared");
    open(body.finish().expect("whole"))
}

#[test]
fn a_model_runs_in_every_type() {
    // Rows of 256, which every type can hold, and of 32, which few can.
    let files = reference("qwen3-types/Q4_K_M.gguf");
    for name in Recipe::names() {
        let recipe: Recipe = name.parse().expect("a recipe");
        let plan = Plan::new(&files, recipe).expect("a plan");
        let bytes = quantized(&files, recipe, 2).expect("written");
        assert_eq!(bytes.len() as u64, plan.file_len(), "{name}");
        let found = open(bytes);
        assert_eq!(found.tensors().by_type(), plan.by_type(), "{name}");
        let Metadata::Gguf(metadata) = found.metadata() else {
            unreachable!("it is GGUF")
        };
        let number = |key| metadata.require::<u32>(key).expect(key);
        assert_eq!(number("general.file_type"), recipe.file_type());
        assert_eq!(number("general.quantization_version"), 2);
        Model::load(found).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn threads_do_not_change_a_byte_and_a_type_that_is_there_is_copied() {
    let files = crate::demo();
    let one = quantized(&files, Recipe::Q4KM, 1).expect("written");
    assert!(one == quantized(&files, Recipe::Q4KM, 3).expect("written"));
    // The demo is in Q8_0.
    let plan = Plan::new(&files, Recipe::Q8_0).expect("a plan");
    assert_eq!(plan.requantized(), 0);
    let copy = open(quantized(&files, Recipe::Q8_0, 2).expect("written"));
    for tensor in files.tensors().iter() {
        let bytes = |files: &ModelFiles| {
            files
                .tensors()
                .require(tensor.name)
                .expect("there")
                .bytes()
                .to_vec()
        };
        assert!(bytes(&copy) == bytes(&files), "{}", tensor.name);
    }
    assert!(
        Plan::new(&files, Recipe::F16)
            .expect("a plan")
            .requantized()
            > 0
    );
}

#[test]
fn parts_of_a_model_become_one_file() {
    let whole = reference("qwen3/model.gguf");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/qwen3");
    let first = fs::read_dir(folder).expect("readable").filter_map(|entry| {
        let path = entry.expect("readable").path();
        let name = path.file_name()?.to_str()?;
        name.contains("-00001-of-").then_some(path)
    });
    let first = first.last().expect("the fixture has parts");
    let parts = ModelFiles::open(&first).expect("they open");
    // The parts are Q8_0, the whole BF16, and the weights the same.
    let [whole, parts] = [whole, parts].map(|files| {
        let files = open(quantized(&files, Recipe::F32, 2).expect("written"));
        let floats = |name: &str| {
            let tensor = files.tensors().require(name).expect("there");
            let numbers = tensor.bytes().as_chunks().0.iter();
            numbers
                .map(|bytes| f32::from_le_bytes(*bytes))
                .collect::<Vec<_>>()
        };
        let tensors = files.tensors().iter();
        tensors
            .map(|tensor| (tensor.name.to_owned(), floats(tensor.name)))
            .collect::<std::collections::BTreeMap<_, _>>()
    });
    assert!(whole == parts);
    assert!(!whole.is_empty());
}

#[test]
fn tensors_longer_than_a_piece_are_whole() {
    // Rows of 96 are whole blocks of 32 and none of 256; 1,000 of them are a piece and a half.
    let values: Vec<f32> = (0..96_000)
        .map(|i| ((i * 37 % 251) as f32 - 125.0) / 256.0)
        .collect();
    let files = single("blk.0.attn_q.weight", &[1000, 96], &values);
    let found = open(quantized(&files, Recipe::F16, 2).expect("written"));
    let tensor = found
        .tensors()
        .require("blk.0.attn_q.weight")
        .expect("there");
    let matrix = lacuna_kernels::Matrix::new(DType::F16, 1, 96_000, tensor.bytes());
    let mut decoded = vec![0.0; 96_000];
    matrix.expect("as long").dequantize_row(0, &mut decoded);
    assert!(decoded == values);
    let found = open(quantized(&files, Recipe::Q6K, 2).expect("written"));
    let tensor = found
        .tensors()
        .require("blk.0.attn_q.weight")
        .expect("there");
    assert_eq!(tensor.dtype(), DType::Q8_0);
}

#[test]
fn weights_that_cannot_be_stored_are_named() {
    let mut values = [0.25; 512];
    values[300] = f32::NAN;
    let name = "blk.0.ffn_up.weight";
    let error = |values: &[f32], recipe| {
        let files = single(name, &[2, 256], values);
        quantized(&files, recipe, 2).expect_err("refused")
    };
    for recipe in [Recipe::Q4KM, Recipe::F16, Recipe::Bf16, Recipe::Q8_0] {
        let found = error(&values, recipe);
        assert!(
            matches!(&found, Error::NotFinite { tensor } if tensor == name),
            "{found}"
        );
    }
    values[300] = 1e20;
    let found = error(&values, Recipe::F16);
    assert!(found.to_string().contains(name), "{found}");
    assert!(matches!(
        found,
        Error::TooLarge {
            dtype: DType::F16,
            ..
        }
    ));
    let files = single(name, &[2, 256], &values);
    quantized(&files, Recipe::Bf16, 2).expect("it has the range");
}

#[test]
fn what_has_no_matrices_is_refused() {
    let vocabulary = {
        let mut header = gguf::Writer::new();
        header.set("general.architecture", "llama");
        open(header.to_bytes())
    };
    let vector = single("output_norm.weight", &[64], &[1.0; 64]);
    for files in [vocabulary, vector] {
        assert!(matches!(
            Plan::new(&files, Recipe::Q8_0),
            Err(Error::NoWeights)
        ));
    }
}

#[test]
fn numbers_that_are_made_up_are_no_panic() {
    let huge = u64::MAX;
    let mut header = gguf::Writer::new();
    header
        .set("general.architecture", "llama")
        .set("llama.block_count", huge)
        .set("llama.attention.head_count", huge)
        .set("llama.attention.head_count_kv", [0u64, 3].as_slice())
        .set("llama.expert_count", -1i64);
    let names = [
        "blk.18446744073709551615.ffn_down.weight",
        "blk.18446744073709551616.attn_v.weight",
        "blk..weight",
        "blk.7",
    ];
    for name in names {
        header
            .tensor(name, DType::F32, &[1, 2, 32])
            .expect("it fits");
    }
    let mut body = header.begin(Vec::new()).expect("memory");
    for name in names {
        body.tensor(name, &[0; 256]).expect("as long as declared");
    }
    let files = open(body.finish().expect("whole"));
    for name in Recipe::names() {
        quantized(&files, name.parse().expect("a recipe"), 2).expect("written");
    }
}

#[test]
fn a_disk_that_is_full_is_said_with_what_is_needed() {
    if !Path::new("/dev/full").exists() {
        return;
    }
    let plan = Plan::new(&crate::demo(), Recipe::Q8_0).expect("a plan");
    let error = plan.write_file(Path::new("/dev/full"), TWO, &mut ());
    assert!(matches!(error, Err(Error::DiskFull { needed, .. }) if needed == plan.file_len()));
}

/// It was found only after the file with zeros had replaced the one that was there.
#[test]
fn a_source_that_was_cut_off_meanwhile_replaces_nothing() {
    struct CutOff<'a>(&'a Path);
    impl Progress for CutOff<'_> {
        fn begin(&mut self, _: &str, _: Option<u64>) {}
        fn finish(&mut self) {}
        fn advance(&mut self, _: u64) {
            let file = fs::OpenOptions::new().write(true).open(self.0);
            file.and_then(|file| file.set_len(64)).expect("it is cut");
        }
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (source, path) = (
        folder.path().join("in.gguf"),
        folder.path().join("out.gguf"),
    );
    let files = single("blk.0.ffn_down.weight", &[2, 256], &[1.0; 512]);
    let recipe: Recipe = "f16".parse().expect("a recipe");
    fs::write(&source, quantized(&files, recipe, 1).expect("written")).expect("room");
    fs::write(&path, "good").expect("room");
    let files = ModelFiles::open(&source).expect("it opens");
    let plan = Plan::new(&files, Recipe::Q8_0).expect("a plan");
    let error = plan.write_file(&path, TWO, &mut CutOff(&source));
    assert!(matches!(error, Err(Error::Lost(_))), "{error:?}");
    assert_eq!(fs::read(&path).expect("it is there"), b"good");
}

/// A tensor's elements.
fn floats(files: &ModelFiles, name: &str) -> Vec<f32> {
    let tensor = files.tensors().require(name).expect("there");
    let elements = tensor.shape().iter().product();
    let mut values = vec![0.0; elements];
    let row = lacuna_kernels::Matrix::new(tensor.dtype(), 1, elements, tensor.bytes());
    row.expect("whole").dequantize_row(0, &mut values);
    values
}

fn metadata(files: &ModelFiles) -> &gguf::Metadata {
    match files.metadata() {
        Metadata::Gguf(metadata) => metadata,
        Metadata::HuggingFace(_) => panic!("not GGUF"),
    }
}

/// That `made` is what a converter has made, but for its name, the types of weights, scores, of which the
/// order decides, and what says nothing.
fn assert_converted(name: &str, made: &ModelFiles, expected: &ModelFiles) {
    let names = |files: &ModelFiles| {
        let names = files.tensors().iter().map(|tensor| tensor.name.to_owned());
        names.collect::<std::collections::BTreeSet<_>>()
    };
    assert_eq!(names(made), names(expected), "{name}");
    for tensor in names(expected) {
        let (made, expected) = (floats(made, &tensor), floats(expected, &tensor));
        // Frequencies are divided in another order.
        let close = |(a, b): (&f32, &f32)| {
            a == b || tensor == "rope_freqs.weight" && (a - b).abs() <= 1e-6 * b
        };
        assert_eq!(made.len(), expected.len(), "{name}: {tensor}");
        assert!(made.iter().zip(&expected).all(close), "{name}: {tensor}");
    }
    let others = [
        "general.name",
        "general.file_type",
        "tokenizer.ggml.scores",
        "exaone4.attention.sliding_window_pattern",
        "cohere2.rope.scaling.type",
        "command-r.rope.scaling.type",
        "hunyuan-dense.rope.scaling.factor",
        "hunyuan-dense.rope.scaling.type",
        "nemotron.rope.scaling.type",
    ];
    for (key, value) in metadata(expected).iter() {
        let found = metadata(made).iter().find(|(other, _)| *other == key);
        let same = found.is_some_and(|(_, found)| found == value);
        assert!(
            same || others.contains(&key),
            "{name}: {key} is {found:?}, not {value:?}"
        );
    }
}

#[test]
fn folders_become_what_converters_make_of_them_or_are_refused_by_family() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference");
    let folders = [root.clone(), root.join("families")];
    let folders = folders
        .iter()
        .flat_map(|folder| fs::read_dir(folder).expect("readable"));
    let mut converted = Vec::new();
    for folder in folders.map(|entry| entry.expect("readable").path()) {
        let (hf, gguf) = (folder.join("hf"), folder.join("model.gguf"));
        if !hf.join("config.json").exists() || !gguf.exists() {
            continue;
        }
        let name = folder.file_name().expect("a name").to_string_lossy();
        let open_fixture = |path| ModelFiles::open(path).expect("the fixture opens");
        let made = match quantized(&open_fixture(&hf), Recipe::F32, 2) {
            Ok(bytes) => open(bytes),
            Err(Error::Family { .. } | Error::Config(_)) => continue,
            Err(other) => panic!("{name}: {other}"),
        };
        // Types of the fixtures of before are not all F32.
        assert_converted(&name, &made, &open_fixture(&gguf));
        Model::load(made).unwrap_or_else(|error| panic!("{name}: {error}"));
        converted.push(name.into_owned());
    }
    converted.sort();
    let expected = [
        "arcee",
        "cohere2",
        "command-r",
        "ernie4-5",
        "exaone3",
        "exaone4",
        "gemma",
        "gemma2",
        "gemma3",
        "granite",
        "hunyuan",
        "llama2",
        "llama3",
        "mistral",
        "nemotron",
        "olmo2",
        "phi2",
        "qwen2",
        "qwen3",
        "qwen3-untied",
        "qwen3-yarn",
        "seed-oss",
        "smollm3",
        "stablelm",
        "stablelm-parallel",
        "starcoder2",
    ];
    assert_eq!(converted, expected);
}

/// Files of folders that embed had no word of what becomes of the rows, and wrote text.
#[test]
fn a_folder_that_embeds_becomes_a_file_that_does() {
    let from =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/encoders/qwen3-embedding/hf");
    let to = tempfile::tempdir().expect("a scratch folder");
    for name in ["model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(name), to.path().join(name)).expect("room");
    }
    let config = fs::read(from.join("config.json")).expect("a configuration");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("JSON");
    config["is_causal"] = false.into();
    let kinds = [
        ("", "Transformer"),
        ("pooling", "Pooling"),
        ("norm", "Normalize"),
    ];
    let module = |(path, kind)| {
        let kind = format!("sentence_transformers.models.{kind}");
        serde_json::json!({"path": path, "type": kind})
    };
    fs::create_dir(to.path().join("pooling")).expect("room");
    for (name, text) in [
        ("config.json", config.to_string()),
        (
            "modules.json",
            serde_json::json!(kinds.map(module)).to_string(),
        ),
        (
            "pooling/config.json",
            r#"{"pooling_mode": "mean"}"#.to_owned(),
        ),
        (
            "sentence_bert_config.json",
            r#"{"max_seq_length": 32}"#.to_owned(),
        ),
    ] {
        fs::write(to.path().join(name), text).expect("room");
    }
    let folder = ModelFiles::open(to.path()).expect("a folder");
    let own = crate::describe(&folder).expect("described").spec;
    let file = open(quantized(&folder, Recipe::F32, 2).expect("a file"));
    let made = crate::describe(&file).expect("described").spec;
    assert_eq!(made.pooled(), own.pooled());
    assert!(made.pooled().is_some());
    assert_eq!(made.context_tokens, 32);
    assert!(
        made.layers
            .iter()
            .all(|layer| layer.mask() == Some(crate::spec::Mask::Full))
    );
    // There is no key for rows that are not of length 1.
    fs::write(
        to.path().join("modules.json"),
        serde_json::json!([kinds[0], kinds[1]].map(module)).to_string(),
    )
    .expect("room");
    let folder = ModelFiles::open(to.path()).expect("a folder");
    assert!(matches!(
        quantized(&folder, Recipe::F32, 2),
        Err(Error::Family { .. })
    ));
}

/// Plans held all that they were to convert until they were written, so that a folder took as much memory as its model
/// has in larger types.
#[test]
fn of_weights_that_are_converted_one_tensor_is_held() {
    /// Bytes that are held whenever something was written.
    struct Held<'a>(&'a Tensors, Vec<usize>);

    impl Progress for Held<'_> {
        fn begin(&mut self, _item: &str, _total: Option<u64>) {}

        fn advance(&mut self, _bytes: u64) {
            self.1.push(self.0.converted_bytes());
        }

        fn finish(&mut self) {}
    }

    let to = tempfile::tempdir().expect("a scratch folder");
    for form in ["fp8-block", "gptq", "awq", "compressed-int4", "mlx"] {
        let files = reference(&format!("forms/{form}/hf"));
        let tensors = files.tensors();
        let converted = tensors.iter().filter(|it| it.converted_from.is_some());
        let largest = converted.map(|it| it.bytes).max().expect("some are");
        let whole = tensors.require("model.layers.0.self_attn.q_proj.weight");
        assert!(tensors.converted_bytes() > 0, "{form}: {whole:?} is held");
        drop(whole);

        let plan = Plan::new(&files, Recipe::Q8_0).expect("a plan");
        assert_eq!(tensors.converted_bytes(), 0, "{form} is planned");
        let mut held = Held(tensors, Vec::new());
        let written = plan.write_file(&to.path().join(form), TWO, &mut held);
        written.unwrap_or_else(|error| panic!("{form}: {error}"));
        assert_eq!(held.1.iter().max(), Some(&largest), "{form}");
        assert_eq!(tensors.converted_bytes(), 0, "{form} is written");
    }
}
