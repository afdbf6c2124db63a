//! Neurons that are read one by one: the same bits as where files are mapped, whatever the room, the reader and the number of
//! threads; and files of columns that are made once and used while they fit.
#![allow(clippy::expect_used, reason = "a test may panic")]

mod predictors;
#[path = "../runner/mod.rs"]
mod runner;

use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use lacuna_files::ModelFiles;
use lacuna_files::reader::faults::{Fault, FaultyDevice};
use lacuna_files::reader::{ReadDevice, ReadThreads};
use lacuna_kernels::ElementType;
use lacuna_kv::KvPolicy;
use lacuna_models::plan::{NeuronSlots, Residency, WeightPlan, WeightSource};
use lacuna_models::{
    ColumnsError, ForwardError, Loading, LogitRows, MakeDevice, Model, quantize, with_columns,
};
use runner::{Runner, families, folder};
use serde::Deserialize;

struct Subject {
    what: String,
    files: ModelFiles,
    weights: WeightPlan,
    tokens: Vec<u32>,
    /// All tokens in one pass, then each by itself, where files are mapped.
    expected: Vec<f32>,
}

impl Subject {
    /// `None` for a model that has no such neurons.
    fn open(path: &Path, columns: &Path) -> Option<Self> {
        Self::with_tokens(path, columns, |vocabulary| {
            (0..11).map(|at| (at * 37 + 3) % vocabulary).collect()
        })
    }

    fn with_tokens(
        path: &Path,
        columns: &Path,
        tokens: impl FnOnce(u32) -> Vec<u32>,
    ) -> Option<Self> {
        let files = ModelFiles::open(path).expect("the fixture opens");
        let files = match with_columns(files, columns, &mut ()) {
            Ok(files) => files,
            Err(ColumnsError::NoZeros | ColumnsError::Type { .. }) => return None,
            Err(error) => panic!("{}: {error}", path.display()),
        };
        let description = lacuna_models::describe(&files).expect("a model");
        let model = Model::load(files.clone()).expect("it loads");
        let tokens = tokens(model.spec().vocabulary as u32);
        Some(Self {
            what: path.display().to_string(),
            weights: WeightPlan::of_files(&files, &description),
            expected: both_ways(model, 1, &tokens),
            tokens,
            files,
        })
    }

    fn plan(&self, room: Option<u64>) -> Residency {
        Residency::plan(&self.weights, WeightSource::Direct, room)
    }

    fn with_slots(&self, slots: usize) -> Residency {
        Residency {
            neurons: NeuronSlots::of(&self.weights.neurons, slots),
            ..self.plan(None)
        }
    }

    fn load(&self, residency: Residency, device: Option<MakeDevice<'_>>) -> Model {
        let loading = Loading {
            residency,
            device,
            progress: &mut (),
        };
        Model::load_as(self.files.clone(), loading).expect("it loads")
    }
}

fn runner(model: Model, threads: usize) -> Runner {
    let context = model.spec().context_tokens.min(192);
    Runner::of(
        model,
        KvPolicy::default(),
        ElementType::F32,
        threads,
        context,
    )
}

/// Logits of a pass over all of `tokens`, then of each by itself.
fn both_ways(model: Model, threads: usize, tokens: &[u32]) -> Vec<f32> {
    both_ways_of(&mut runner(model, threads), tokens)
}

fn both_ways_of(runner: &mut Runner, tokens: &[u32]) -> Vec<f32> {
    let mut logits = runner.logits(tokens);
    let mut sequence = runner.sequence();
    for token in tokens {
        logits.extend(runner.extend(&mut sequence, &[*token]));
    }
    logits
}

/// Every fixture that has such neurons.
fn subjects(columns: &Path) -> Vec<Subject> {
    let paths = families().into_iter().flat_map(|name| {
        ["model.gguf", "hf"].map(|file| folder().join(format!("families/{name}/{file}")))
    });
    let mut paths: Vec<PathBuf> = paths.filter(|path| path.exists()).collect();
    paths.sort();
    let writes = |path: &PathBuf| {
        let files = ModelFiles::open(path).expect("the fixture opens");
        let described = lacuna_models::describe(&files);
        described.is_ok_and(|made| made.spec.pooled().is_none())
    };
    let found = paths.iter().filter(|path| writes(path));
    let found = found.filter_map(|path| Subject::open(path, columns));
    found.collect()
}

#[test]
fn logits_are_those_of_mapped_files() {
    let columns = tempfile::tempdir().expect("a folder");
    let subjects = subjects(columns.path());
    for family in ["nemotron-h/", "nemotron-h-moe/", "gemma3n/", "llama-relu/"] {
        let mut found = subjects.iter();
        assert!(found.any(|it| it.what.contains(family)), "{family}");
    }
    for subject in &subjects {
        let least = subject.plan(Some(0));
        let most = subject.plan(None);
        let room = least.memory_bytes().midpoint(most.memory_bytes());
        let neurons = most.neurons.expect("there are neurons");
        assert_eq!(neurons.slots, neurons.neurons, "{}", subject.what);
        assert_eq!(least.neurons.map(|it| it.slots), Some(0));
        let few = subject.with_slots(3);
        for (residency, threads) in [
            (least, 1),
            (subject.plan(Some(room)), 3),
            (few, 2),
            (most, 2),
        ] {
            let model = subject.load(residency.clone(), None);
            let found = both_ways(model, threads, &subject.tokens);
            assert_eq!(found, subject.expected, "{}, {residency:?}", subject.what);
        }
    }
}

#[test]
fn rows_and_columns_of_neurons_are_of_any_type_that_lies_in_blocks_with_a_scale() {
    let folder_of = tempfile::tempdir().expect("a folder");
    for name in ["f16", "q8_0", "q4_0"] {
        let files = ModelFiles::open(&folder().join("families/gemma3n/model.gguf"));
        let recipe = name.parse().expect("a type");
        let plan = quantize::Plan::new(&files.expect("the fixture opens"), recipe);
        let path = folder_of.path().join(format!("{name}.gguf"));
        let written = plan.expect("whole blocks");
        let written = written.write_file(&path, NonZeroUsize::MIN, &mut ());
        written.expect("room for it");
        let subject = Subject::open(&path, folder_of.path()).expect("it has neurons");
        let most = subject.plan(None).neurons.expect("there are neurons");
        let each = most.neuron_bytes / (most.layers * most.neurons) as u64;
        // A column of 32 elements without scales, and a row of 32 with them.
        let expected = match name {
            "f16" => 64 + 64,
            "q8_0" => 32 + 36,
            _ => 16 + 20,
        };
        assert_eq!((most.layers, each), (2, expected), "{name}");
        for (slots, threads) in [(0, 1), (9, 2), (most.neurons, 2)] {
            let model = subject.load(subject.with_slots(slots), None);
            let found = both_ways(model, threads, &subject.tokens);
            assert!(found == subject.expected, "{name}, {slots} slots");
        }
    }
}

#[test]
fn a_block_with_gates_reads_what_its_gates_say_and_not_what_they_leave_out() {
    let columns = tempfile::tempdir().expect("a folder");
    let path = folder().join("families/llama-relu/hf");
    let subject = Subject::open(&path, columns.path()).expect("it has neurons");
    let residency = subject.with_slots(0);
    let neurons = residency.neurons.expect("there are neurons");
    // A row of 32 elements of `up` and a column of 32 of `down`, of four bytes each.
    assert_eq!(neurons.neuron_bytes, 2 * 288 * 256);
    // Neither matrix is there otherwise: what streams or stays are the others.
    let of_blocks = |name: &str| name.contains("up_proj") || name.contains("down_proj");
    assert!(subject.weights.uses.iter().all(|of| !of_blocks(&of.name)));
    let mut runner = runner(subject.load(residency, None), 2);
    let mut sequence = runner.sequence();
    let (_, one_by_one) = subject.expected.split_at(subject.expected.len() / 2);
    let mut logits = Vec::new();
    for token in &subject.tokens {
        logits.extend(runner.extend(&mut sequence, &[*token]));
    }
    assert_eq!(logits, one_by_one);
    let reads = runner.model.neuron_reads().expect("they are read");
    let share = reads.active_share().expect("passes ran");
    assert!((0.3..0.7).contains(&share), "{share} of random gates");
    // Neighbours share pages here, so bytes are no less than needed and no more than all.
    let passes = subject.tokens.len() as u64;
    assert!(reads.read_bytes >= reads.needed * 256);
    assert!(reads.read_bytes <= passes * (neurons.neuron_bytes + 8 * 4096));
}

#[test]
fn neurons_are_counted_and_those_with_slots_are_found() {
    let columns = tempfile::tempdir().expect("a folder");
    let path = folder().join("families/nemotron-h/model.gguf");
    let subject = Subject::open(&path, columns.path()).expect("it has neurons");
    let mut runner = runner(subject.load(subject.plan(None), None), 1);
    let expected = &subject.expected[..subject.expected.len() / 2];
    assert_eq!(runner.logits(&subject.tokens), expected);
    let first = runner.model.neuron_reads().expect("they are read");
    assert!(first.needed > 0 && first.needed <= first.all && first.found == 0);
    assert!(first.read_bytes > 0);
    assert_eq!(runner.logits(&subject.tokens), expected);
    let second = runner
        .model
        .neuron_reads()
        .expect("they are read")
        .since(first);
    assert_eq!((second.needed, second.found), (first.needed, first.needed));
    assert_eq!(second.read_bytes, 0, "all have slots");
    // Slots go and come while it runs.
    for slots in [2, 0, 5] {
        let placed = runner.model.place_weights(&subject.with_slots(slots));
        placed.expect("they are placed");
        assert_eq!(runner.logits(&subject.tokens), expected, "{slots}");
    }
}

/// What PyTorch says of a trained model (`models/demo/reference-sparse.json`): which part of each block's activations is not
/// zero with these tokens.
#[derive(Deserialize)]
struct Counted {
    tokens: Vec<u32>,
    blocks: Vec<f64>,
}

#[test]
fn a_trained_model_needs_as_many_neurons_as_its_activations_are_not_zero() {
    #[derive(Deserialize)]
    struct Reference {
        active_shares: Counted,
    }
    let demo = folder().join("../models/demo");
    let text = fs::read(demo.join("reference-sparse.json")).expect("committed with the model");
    let counted: Reference = serde_json::from_slice(&text).expect("valid JSON");
    let Counted { tokens, blocks } = counted.active_shares;
    let columns = tempfile::tempdir().expect("a folder");
    let path = demo.join("lacuna-demo-sparse-q8_0.gguf");
    let subject = Subject::with_tokens(&path, columns.path(), |_| tokens).expect("it has neurons");
    let all = subject.plan(None).neurons.expect("there are neurons");
    assert_eq!(all.layers, blocks.len());
    let half = subject.with_slots(all.neurons / 2);
    let mut runner = runner(subject.load(half, None), 2);
    let (whole, one_by_one) = subject.expected.split_at(subject.expected.len() / 2);
    assert!(runner.logits(&subject.tokens) == whole);
    let before = runner.model.neuron_reads().expect("they are read");
    let mut sequence = runner.sequence();
    let mut logits = Vec::new();
    for token in &subject.tokens {
        logits.extend(runner.extend(&mut sequence, &[*token]));
    }
    assert!(logits == one_by_one);
    let reads = runner.model.neuron_reads().expect("they are read");
    let reads = reads.since(before);
    let passes = subject.tokens.len();
    assert_eq!(reads.all, (passes * all.layers * all.neurons) as u64);
    // Activations are rounded to 8 bits here and not there, which moves some across zero.
    let share = reads.active_share().expect("passes ran");
    let expected = blocks.iter().sum::<f64>() / blocks.len() as f64;
    println!(
        "{share} of neurons for {expected}, {:?} found",
        reads.hit_rate()
    );
    assert!(
        (share / expected - 1.0).abs() < 0.01,
        "{share} for {expected}"
    );
}

#[test]
fn a_neuron_that_cannot_be_read_is_an_error_that_names_its_matrix() {
    let columns = tempfile::tempdir().expect("a folder");
    let path = folder().join("families/nemotron-h/model.gguf");
    let subject = Subject::open(&path, columns.path()).expect("it has neurons");
    let device = || -> Box<dyn ReadDevice> {
        let threads = ReadThreads::new().expect("threads");
        // Later than what loading takes.
        Box::new(FaultyDevice::new(Box::new(threads), 60, Fault::Fail))
    };
    let mut runner = runner(subject.load(subject.with_slots(0), Some(&device)), 1);
    let expected = &subject.expected[..subject.expected.len() / 2];
    let (mut failed, mut worked) = (0, 0);
    for _ in 0..100 {
        let mut sequence = runner.sequence();
        match runner.pass(&mut sequence, &subject.tokens, LogitRows::All) {
            Ok(logits) => {
                worked += 1;
                assert_eq!(logits, expected);
            }
            Err(ForwardError::Weights(error)) => {
                failed += 1;
                assert!(error.name.contains("ffn_down"), "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(failed > 0 && worked > 0, "{failed} failed, {worked} worked");
}

#[test]
fn a_file_of_columns_is_made_once_and_again_when_it_is_not_that_of_the_model() {
    let folder_of = tempfile::tempdir().expect("a folder");
    let open = |path: &str| {
        let files = ModelFiles::open(&folder().join(path)).expect("the fixture opens");
        with_columns(files, folder_of.path(), &mut ())
    };
    let made = || -> Vec<PathBuf> {
        let entries = fs::read_dir(folder_of.path()).expect("a folder");
        let paths = entries.map(|entry| entry.expect("readable").path());
        let mut paths: Vec<PathBuf> = paths
            .filter(|path| path.extension().is_some_and(|it| it == "columns"))
            .collect();
        paths.sort();
        paths
    };
    let path = "families/nemotron-h/model.gguf";
    open(path).expect("it is made");
    let [file] = &made()[..] else {
        panic!("one file, not {:?}", made())
    };
    let bytes = fs::read(file).expect("a file");
    let time = |path: &Path| fs::metadata(path).and_then(|it| it.modified()).ok();
    let first = time(file);
    open(path).expect("it is there");
    assert_eq!(time(file), first, "made once");
    // Cut off, as by a full disk or a crash of the system; and of another version.
    fs::write(file, &bytes[..bytes.len() / 2]).expect("room");
    open(path).expect("it is made again");
    assert_eq!(fs::read(file).expect("a file"), bytes);
    let at = bytes
        .windows(7)
        .position(|it| it == b"version")
        .expect("its key")
        + 11;
    let mut other = bytes.clone();
    other[at] ^= 0x40;
    fs::write(file, &other).expect("room");
    open(path).expect("it is made again");
    assert_eq!(fs::read(file).expect("a file"), bytes);
    // Another model has a file of its own.
    open("families/nemotron-h/hf").expect("it is made");
    assert_eq!(made().len(), 2);
    let error = open("qwen3/model.gguf").expect_err("SwiGLU");
    assert!(matches!(error, ColumnsError::NoZeros));
    assert!(error.to_string().contains("do not ask for single neurons"));
}
