//! Folders with quantized weights: what they are worth by the libraries that read them, and what becomes of
//! files that are damaged.
//!
//! `reference/README.md` says what the fixtures are and how they were made.

mod runner;

use std::fs;
use std::path::Path;

use lacuna_files::{DType, ModelFiles, Tensor};
use lacuna_kernels::{ElementType, Matrix};
use lacuna_kv::KvPolicy;
use lacuna_models::Model;
use lacuna_models::plan::WeightPlan;
use proptest::prelude::*;
use runner::{Runner, TOKENS, check_rows, expected, floats, folder};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// What a fixture says besides logits.
#[derive(Deserialize)]
struct Kept {
    /// Matrices whose values are kept, one after another.
    values: Vec<String>,
}

fn names() -> Vec<String> {
    let entries = fs::read_dir(folder().join("forms")).expect("committed fixtures");
    let mut names: Vec<String> = entries
        .map(|entry| entry.expect("readable").file_name())
        .map(|name| name.into_string().expect("UTF-8"))
        .collect();
    names.sort();
    assert!(names.len() >= 15, "{names:?}");
    names
}

fn open(name: &str) -> ModelFiles {
    let path = folder().join("forms").join(name).join("hf");
    ModelFiles::open(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// The elements of a tensor.
fn decoded(tensor: &Tensor) -> Vec<f32> {
    let (columns, rows) = tensor.shape().split_last().expect("a dimension");
    let rows = rows.iter().product();
    let matrix = Matrix::new(tensor.dtype(), rows, *columns, tensor.bytes()).expect("whole blocks");
    let mut row = vec![0.0; *columns];
    let mut all = Vec::new();
    for index in 0..rows {
        matrix.dequantize_row(index, &mut row);
        all.extend(&row);
    }
    all
}

/// Whether its weights are not what the file's are worth exactly.
fn is_rounded(files: &ModelFiles, name: &str) -> bool {
    let mut tensors = files.tensors().iter();
    let tensor = tensors.find(|tensor| tensor.name == name).expect("there");
    let from = tensor.converted_from.expect("converted");
    from.ends_with("rounded")
}

#[test]
fn matrices_are_worth_what_other_implementations_say() {
    for name in names() {
        let path = format!("forms/{name}");
        let kept = fs::read(folder().join(&path).join("expected.json")).expect("committed");
        let kept: Kept = serde_json::from_slice(&kept).expect("valid JSON");
        let reference = floats(&format!("{path}/values.f32"));
        let (files, mut rest) = (open(&name), &reference[..]);
        for matrix in &kept.values {
            let found = decoded(&files.tensors().require(matrix).expect("a matrix"));
            let (reference, after) = rest.split_at(found.len());
            rest = after;
            if !is_rounded(&files, matrix) {
                assert!(found == reference, "{name}: {matrix}");
                continue;
            }
            for (found, reference) in found.chunks(32).zip(reference.chunks(32)) {
                let largest = reference
                    .iter()
                    .fold(0.0f32, |most, value| most.max(value.abs()));
                // Steps are rounded up to 11 bits.
                let bound = largest / 254.0 * 1.001;
                for (found, reference) in found.iter().zip(reference) {
                    let error = (found - reference).abs();
                    assert!(error <= bound, "{name}: {matrix}: {error} of {largest}");
                }
            }
        }
        assert!(rest.is_empty(), "{name}: {} more values", rest.len());
    }
}

/// The model of a fixture with all weights in F32.
fn in_floats(name: &str) -> Model {
    let files = open(name);
    let tensors = files.tensors().iter().map(|summary| {
        let tensor = files
            .tensors()
            .require(summary.name)
            .expect("of a known type");
        Stored {
            name: summary.name.to_owned(),
            dtype: "F32".to_owned(),
            shape: tensor.shape().to_vec(),
            bytes: decoded(&tensor)
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect(),
        }
    });
    let file = written(&tensors.collect::<Vec<_>>());
    let copy = tempfile::tempdir().expect("a scratch folder");
    let from = folder().join("forms").join(name).join("hf");
    fs::write(copy.path().join("model.safetensors"), file).expect("room");
    let without = |config: &mut Map<String, Value>| {
        config.remove("quantization");
        config.remove("quantization_config");
    };
    write_config(&from, copy.path(), without);
    fs::copy(
        from.join("tokenizer.json"),
        copy.path().join("tokenizer.json"),
    )
    .expect("room");
    Model::load(ModelFiles::open(copy.path()).expect("it opens")).expect("it loads")
}

/// Writes a folder's description with a change.
fn write_config(from: &Path, to: &Path, change: impl Fn(&mut Map<String, Value>)) {
    let config = fs::read(from.join("config.json")).expect("a committed fixture");
    let mut config: Map<String, Value> = serde_json::from_slice(&config).expect("valid JSON");
    change(&mut config);
    let config = serde_json::to_vec(&config).expect("JSON");
    fs::write(to.join("config.json"), config).expect("room");
}

fn runner(model: Model) -> Runner {
    Runner::of(model, KvPolicy::default(), ElementType::F32, 1, TOKENS)
}

#[test]
fn logits_of_all_weights_are_those_of_the_reference() {
    for name in names() {
        let expected = expected(&format!("forms/{name}"));
        let reference = floats(&format!("forms/{name}/logits.f32"));
        let found = runner(in_floats(&name)).logits(&expected.tokens);
        let files = open(&name);
        let mut tensors = files.tensors().iter();
        let rounded = tensors.any(|tensor| {
            tensor
                .converted_from
                .is_some_and(|from| from.ends_with("rounded"))
        });
        let bound = if rounded { 3e-2 } else { 1e-4 };
        check_rows(&found, &expected, &reference, bound, &name);
    }
}

#[test]
fn every_form_runs() {
    for name in names() {
        let expected = expected(&format!("forms/{name}"));
        let reference = floats(&format!("forms/{name}/logits.f32"));
        let model = Model::load(open(&name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        let found = runner(model).logits(&expected.tokens);
        // What rounded activations cost.
        check_rows(&found, &expected, &reference, 1e-1, &name);
    }
}

#[test]
fn converted_weights_are_planned_as_memory_and_the_others_as_mapped() {
    let files = open("gptq");
    let described = lacuna_models::describe(&files).expect("a model");
    let plan = WeightPlan::of(files.tensors(), &described);
    let converted: usize = plan
        .tensors
        .iter()
        .map(|tensor| match tensor.converted_from {
            Some(from) => {
                assert_eq!((from, tensor.type_name.as_str()), ("gptq", "q4_0"));
                tensor.bytes
            }
            None => 0,
        })
        .sum();
    // Three matrices of 64 x 64 and two of 32 x 64 in blocks of 18 bytes; then three more of 64 x 64.
    assert_eq!(converted, (5 * 64 + 2 * 32) * 2 * 18);
    assert_eq!(plan.converted_bytes(), converted as u64);
    assert_eq!(plan.bytes(), plan.converted_bytes() + plan.mapped_bytes());
    let q = files
        .tensors()
        .require("model.layers.0.self_attn.q_proj.weight")
        .expect("there");
    assert_eq!((q.dtype(), q.bytes().len()), (DType::Q4_0, 64 * 2 * 18));
}

/// A tensor of a safetensors file.
#[derive(Clone)]
struct Stored {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn stored(file: &[u8]) -> Vec<Stored> {
    let (length, rest) = file.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes")) as usize;
    let (header, data) = rest.split_at(length);
    let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
    let lines = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__");
    let mut all: Vec<(usize, Stored)> = lines
        .map(|(name, line)| {
            let line: (String, Vec<usize>, [usize; 2]) = (
                serde_json::from_value(line["dtype"].clone()).expect("a type"),
                serde_json::from_value(line["shape"].clone()).expect("a shape"),
                serde_json::from_value(line["data_offsets"].clone()).expect("a range"),
            );
            let (dtype, shape, [start, end]) = line;
            let bytes = data[start..end].to_vec();
            let tensor = Stored {
                name,
                dtype,
                shape,
                bytes,
            };
            (start, tensor)
        })
        .collect();
    all.sort_by_key(|(start, _)| *start);
    all.into_iter().map(|(_, tensor)| tensor).collect()
}

fn written(tensors: &[Stored]) -> Vec<u8> {
    let (mut header, mut data) = (Map::new(), Vec::<u8>::new());
    for tensor in tensors {
        let start = data.len();
        data.extend(&tensor.bytes);
        let line = json!({
            "dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, data.len()],
        });
        header.insert(tensor.name.clone(), line);
    }
    let header = serde_json::to_string(&header).expect("JSON");
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(data);
    file
}

/// A copy of a fixture's folder.
fn copied(name: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().expect("a scratch folder");
    let from = folder().join("forms").join(name).join("hf");
    for file in ["model.safetensors", "tokenizer.json", "config.json"] {
        fs::copy(from.join(file), copy.path().join(file)).expect("room to copy");
    }
    copy
}

/// The refusal of a folder, in words; every tensor is looked at before the model is.
fn load(folder: &Path) -> Result<(), String> {
    let files = ModelFiles::open(folder).map_err(|error| error.to_string())?;
    for tensor in files.tensors().iter() {
        if let Ok(Some(tensor)) = files.tensors().get(tensor.name) {
            tensor.bytes();
        }
    }
    Model::load(files)
        .map(|_| ())
        .map_err(|error| error.to_string())
}

#[test]
fn a_folder_that_lacks_a_tensor_or_has_it_in_another_shape_or_type_is_refused() {
    for name in names() {
        let copy = copied(&name);
        let path = copy.path().join("model.safetensors");
        let tensors = stored(&fs::read(&path).expect("a copy"));
        let refused = |tensors: &[Stored], change: &str| {
            fs::write(&path, written(tensors)).expect("room");
            let error = load(copy.path()).err();
            let error = error.unwrap_or_else(|| panic!("{name}: {change} is accepted"));
            assert!(error.contains('`'), "{name}: {change}: {error}");
        };
        for (index, tensor) in tensors.iter().enumerate() {
            // One matrix is like another.
            let looked_at = [
                "k_proj",
                "layers.0.mlp.experts.g",
                "experts.3.up",
                "switch_mlp.up",
            ];
            if !looked_at.iter().any(|part| tensor.name.contains(part)) {
                continue;
            }
            // Not of weights, or the same as what is usual.
            let idle = ["activation_scale", "g_idx"];
            let is_idle = idle.iter().any(|part| tensor.name.ends_with(part));
            if is_idle && name != "gptq-order" {
                continue;
            }
            let mut without = tensors.clone();
            without.remove(index);
            refused(&without, &format!("without {}", tensor.name));
            let with = |change: &dyn Fn(&mut Stored)| {
                let mut tensors = tensors.clone();
                change(&mut tensors[index]);
                tensors
            };
            let deeper = with(&|tensor| tensor.shape.push(1));
            if tensor.bytes.len() > 2 && !tensor.shape.ends_with(&[1]) {
                refused(&deeper, &format!("{} one dimension deeper", tensor.name));
            }
            if tensor.shape.len() > 1 && tensor.shape.iter().filter(|&&size| size > 1).count() > 1 {
                let flat = with(&|tensor| tensor.shape = vec![tensor.shape.iter().product()]);
                refused(&flat, &format!("{} flat", tensor.name));
            }
            let complex = with(&|tensor| {
                tensor.dtype = "F6_E2M3".to_owned();
            });
            refused(&complex, &format!("{} of another type", tensor.name));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn a_damaged_folder_is_refused_or_loads(
        which in any::<prop::sample::Index>(),
        in_header in any::<bool>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let names = names();
        let name = which.get(&names);
        let copy = copied(name);
        let path = copy.path().join("model.safetensors");
        let mut bytes = fs::read(&path).expect("a copy");
        let header = 8 + u64::from_le_bytes(*bytes.first_chunk().expect("a length")) as usize;
        let range = if in_header { 8..header } else { header..bytes.len() };
        for (at, value) in changes {
            let at = range.start + at.index(range.len());
            bytes[at] = value;
        }
        fs::write(&path, bytes).expect("room");
        // Either way.
        let _ = load(copy.path());
    }
}
