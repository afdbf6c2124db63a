//! Weights in memory, streamed and read row by row: the same bits as where they are mapped, whatever
//! the room, the reader and its faults; and plans that keep within their room.
#![allow(clippy::expect_used, reason = "a test may panic")]

mod runner;

use std::fs;
use std::path::{Path, PathBuf};

use lacuna_files::ModelFiles;
use lacuna_files::reader::faults::{Fault, FaultyDevice};
use lacuna_files::reader::{ReadDevice, ReadThreads};
use lacuna_kernels::{DType, ElementType};
use lacuna_kv::KvPolicy;
use lacuna_models::plan::{Residency, WeightPlan, WeightSource};
use lacuna_models::synth;
use lacuna_models::{ForwardError, LoadError, Loading, LogitRows, MakeDevice, Model, Segment};
use proptest::prelude::*;
use runner::{Runner, folder};

/// The files of a model, and where its weights may be.
struct Subject {
    what: String,
    files: ModelFiles,
    weights: WeightPlan,
}

impl Subject {
    fn open(path: &Path) -> Self {
        let files = ModelFiles::open(path).expect("the fixture opens");
        let description = lacuna_models::describe(&files).expect("a model");
        Self {
            what: path.display().to_string(),
            weights: WeightPlan::of(files.tensors(), &description),
            files,
        }
    }

    /// The least memory, the most, and some between.
    fn rooms(&self) -> [u64; 3] {
        let [least, most] = [Some(0), None].map(|room| {
            let plan = Residency::plan(&self.weights, WeightSource::Direct, room);
            plan.memory_bytes()
        });
        [
            least,
            least + most.saturating_sub(least) / 2,
            most.max(least),
        ]
    }

    fn load(
        &self,
        residency: Residency,
        device: Option<MakeDevice<'_>>,
    ) -> Result<Model, LoadError> {
        let loading = Loading {
            residency,
            device,
            progress: &mut (),
        };
        Model::load_as(self.files.clone(), loading)
    }

    fn placed(&self, source: WeightSource, room: u64) -> Model {
        let residency = Residency::plan(&self.weights, source, Some(room));
        self.load(residency, None).expect("it loads")
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
fn both_ways(runner: &mut Runner, tokens: &[u32]) -> Vec<f32> {
    let mut logits = runner.logits(tokens);
    let mut sequence = runner.sequence();
    for token in tokens {
        logits.extend(runner.extend(&mut sequence, &[*token]));
    }
    logits
}

/// Every fixture of a model that writes: its GGUF file and its folder.
fn fixtures() -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = ["llama3", "qwen3", "qwen3-untied"]
        .map(|name| folder().join(name).join("model.gguf"))
        .into();
    paths.push(folder().join("qwen3/split-00001-of-00003.gguf"));
    let families = fs::read_dir(folder().join("families")).expect("committed fixtures");
    for family in families.flatten() {
        for file in ["model.gguf", "hf"] {
            let path = family.path().join(file);
            if path.exists() {
                paths.push(path);
            }
        }
    }
    paths.sort();
    paths
}

/// Tokens that every fixture's vocabulary has.
fn tokens(model: &Model) -> Vec<u32> {
    let vocabulary = model.spec().vocabulary as u32;
    (0..11).map(|at| (at * 37 + 3) % vocabulary).collect()
}

#[test]
fn every_family_gives_the_same_bits_wherever_its_weights_are() {
    let (mut streamed, mut tables) = (0, 0);
    for path in fixtures() {
        let subject = Subject::open(&path);
        let mapped = subject.load(Residency::mapped(), None).expect("it loads");
        let tokens = tokens(&mapped);
        let expected = both_ways(&mut runner(mapped, 1), &tokens);
        let [least, some, _] = subject.rooms();
        for (room, source) in [
            (least, WeightSource::Direct),
            (some, WeightSource::Direct),
            (least, WeightSource::Pread),
        ] {
            let model = subject.placed(source, room);
            let held = model.weight_plan().loaded.clone().expect("it is loaded");
            assert!(held.memory_bytes() <= room, "{}", subject.what);
            streamed += usize::from(!held.streamed.is_empty());
            tables += usize::from(!held.tables.is_empty());
            let found = both_ways(&mut runner(model, 2), &tokens);
            assert!(
                found == expected,
                "{} in {room} bytes, {source:?}",
                subject.what
            );
        }
    }
    assert!(
        streamed > 100 && tables > 50,
        "{streamed} streamed, {tables} with tables"
    );
}

#[test]
fn passes_without_logits_and_passes_that_fail_leave_the_order_of_reads_whole() {
    let subject = Subject::open(&folder().join("qwen3-untied/model.gguf"));
    let mapped = subject.load(Residency::mapped(), None).expect("it loads");
    let tokens = tokens(&mapped);
    let expected = runner(mapped, 1).logits(&tokens);
    let model = subject.placed(WeightSource::Direct, subject.rooms()[0]);
    let mut runner = runner(model, 1);
    let last = expected.len() / tokens.len() * (tokens.len() - 1);
    for _ in 0..3 {
        let mut sequence = runner.sequence();
        for (index, chunk) in [&tokens[..4], &tokens[4..9], &tokens[9..]]
            .into_iter()
            .enumerate()
        {
            let logits = if index == 2 {
                LogitRows::Last
            } else {
                LogitRows::None
            };
            sequence.prepare(chunk.len()).expect("room");
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits,
            };
            let found = runner
                .model
                .forward(&runner.cpu, &mut [segment], &mut runner.scratch);
            let found = found.expect("valid tokens").to_vec();
            sequence.accept(chunk.len());
            if index == 2 {
                assert!(found == expected[last..], "the last row");
            }
        }
    }
}

/// A device of threads with a fault.
fn faulty(every: u64, fault: Fault) -> impl Fn() -> Box<dyn ReadDevice> {
    move || {
        let threads = ReadThreads::new().expect("threads");
        Box::new(FaultyDevice::new(Box::new(threads), every, fault))
    }
}

#[test]
fn short_late_reordered_and_interrupted_reads_change_no_bit() {
    for name in [
        "qwen3-untied/model.gguf",
        "families/gemma3n/model.gguf",
        "families/qwen3-moe/model.gguf",
    ] {
        let subject = Subject::open(&folder().join(name));
        let mapped = subject.load(Residency::mapped(), None).expect("it loads");
        let tokens = tokens(&mapped);
        let expected = both_ways(&mut runner(mapped, 1), &tokens);
        for fault in [
            Fault::Shorten,
            Fault::Delay,
            Fault::Reorder,
            Fault::Interrupt,
        ] {
            for every in [2, 3, 5] {
                let residency = Residency::plan(
                    &subject.weights,
                    WeightSource::Direct,
                    Some(subject.rooms()[0]),
                );
                let model = subject.load(residency, Some(&faulty(every, fault)));
                let found = both_ways(&mut runner(model.expect("it loads"), 1), &tokens);
                assert!(found == expected, "{name} with {fault:?} of {every}");
            }
        }
    }
}

#[test]
fn a_disk_that_fails_is_an_error_of_the_pass_that_names_the_tensor_and_of_no_later_one() {
    let subject = Subject::open(&folder().join("qwen3-untied/model.gguf"));
    let mapped = subject.load(Residency::mapped(), None).expect("it loads");
    let tokens = tokens(&mapped);
    let expected = runner(mapped, 1).logits(&tokens);
    let residency = Residency::plan(
        &subject.weights,
        WeightSource::Direct,
        Some(subject.rooms()[0]),
    );
    let streamed: Vec<String> = residency
        .streamed
        .iter()
        .map(|it| it.name.clone())
        .collect();
    // Each reader counts for itself: loading reads fewer tensors than fail, a pass reads more.
    let loads = subject.weights.tensors.len() as u64 + 1;
    let model = subject.load(residency, Some(&faulty(loads, Fault::Fail)));
    let mut runner = runner(model.expect("it loads"), 1);
    let (mut failed, mut worked) = (0, 0);
    for _ in 0..12 {
        let mut sequence = runner.sequence();
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens: &tokens,
            sequence: &mut sequence,
            logits: LogitRows::All,
        };
        match runner
            .model
            .forward(&runner.cpu, &mut [segment], &mut runner.scratch)
        {
            Ok(found) => {
                worked += 1;
                assert!(found == expected);
            }
            Err(ForwardError::Weights(error)) => {
                failed += 1;
                let is_table = error.name.starts_with("token_embd");
                assert!(is_table || streamed.contains(&error.name), "{error}");
                assert!(error.to_string().contains("the disk is broken"), "{error}");
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failed > 0 && worked > 0, "{failed} failed, {worked} worked");
}

#[test]
fn a_model_on_a_broken_disk_is_not_loaded() {
    let subject = Subject::open(&folder().join("llama3/model.gguf"));
    let residency = Residency::plan(&subject.weights, WeightSource::Direct, None);
    let loaded = subject.load(residency, Some(&faulty(3, Fault::Fail)));
    let error = loaded.map(drop).expect_err("a tensor cannot be read");
    assert!(matches!(error, LoadError::Weights(_)), "{error}");
}

#[test]
fn a_file_that_becomes_shorter_ends_the_pass_with_an_error() {
    let copy = tempfile::tempdir().expect("a scratch folder");
    let path = copy.path().join("model.gguf");
    fs::copy(folder().join("qwen3-untied/model.gguf"), &path).expect("room to copy");
    let subject = Subject::open(&path);
    let model = subject.placed(WeightSource::Direct, subject.rooms()[0]);
    let tokens = tokens(&model);
    let mut runner = runner(model, 1);
    runner.logits(&tokens);
    let file = fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("it is there");
    let whole = file.metadata().expect("it is there").len();
    file.set_len(whole / 2).expect("it is cut");
    let mut sequence = runner.sequence();
    sequence.prepare(tokens.len()).expect("room");
    let segment = Segment {
        tokens: &tokens,
        sequence: &mut sequence,
        logits: LogitRows::All,
    };
    let error = runner
        .model
        .forward(&runner.cpu, &mut [segment], &mut runner.scratch)
        .expect_err("weights are gone");
    assert!(
        matches!(error, ForwardError::Weights(_) | ForwardError::Lost(_)),
        "{error}"
    );
}

fn shape(name: &str) -> WeightPlan {
    let shape = synth::Shape::find(name).expect("a shape");
    synth::Model::new(shape, DType::Q4_0)
        .weights()
        .expect("whole blocks")
}

#[test]
fn more_memory_never_reads_more_and_what_is_read_is_spread_over_the_pass() {
    let weights = shape("qwen3-4b");
    let whole = Residency::plan(&weights, WeightSource::Direct, None);
    assert_eq!((whole.streamed_bytes, whole.ring_bytes), (0, 0));
    let file: u64 = weights.mapped_bytes();
    assert!(
        whole.memory_bytes() <= file + file / 50,
        "{}",
        whole.memory_bytes()
    );
    let mut before = u64::MAX;
    for percent in 15..=100 {
        let room = whole.memory_bytes() / 100 * percent;
        let plan = Residency::plan(&weights, WeightSource::Direct, Some(room));
        assert_eq!(
            plan,
            Residency::plan(&weights, WeightSource::Direct, Some(room))
        );
        assert!(plan.memory_bytes() <= room, "{percent} %");
        assert!(plan.streamed_bytes <= before, "{percent} %");
        before = plan.streamed_bytes;
        let pinned = file - plan.streamed_bytes;
        assert!(
            pinned + plan.ring_bytes + 20_000_000 > room.min(file),
            "{percent} %: {pinned} bytes stay"
        );
        // Halves of the pass read alike.
        let middle = plan.streamed.iter().take_while(|it| {
            let layer = it
                .name
                .split('.')
                .nth(1)
                .and_then(|it| it.parse::<usize>().ok());
            layer.is_some_and(|layer| layer < 18)
        });
        let first: u64 = middle.map(|it| it.bytes).sum();
        let apart = first.abs_diff(plan.streamed_bytes - first);
        assert!(apart <= 30_000_000, "{percent} %: {apart}");
    }
}

#[test]
fn memory_that_is_given_up_adds_to_what_is_streamed_and_takes_nothing_back() {
    let weights = shape("qwen3-4b");
    let mut plan = Residency::plan(&weights, WeightSource::Direct, Some(2_100_000_000));
    let mut steps = 0;
    while let Some(less) = plan.less(&weights, 40 << 20) {
        assert!(less.memory_bytes() + (40 << 20) <= plan.memory_bytes());
        let still = |it| less.streamed.contains(it);
        assert!(plan.streamed.iter().all(still), "nothing comes to memory");
        assert!(less.to_spare(&weights) < plan.to_spare(&weights));
        plan = less;
        steps += 1;
    }
    assert!(steps > 30, "{steps}");
    assert!(
        plan.to_spare(&weights) < 40 << 20,
        "as long as there is something to spare"
    );
}

#[test]
fn tables_of_which_a_token_needs_a_row_stay_on_disk() {
    let subject = Subject::open(&folder().join("families/gemma3n/model.gguf"));
    let plan = Residency::plan(&subject.weights, WeightSource::Direct, None);
    let names: Vec<&str> = plan.tables.iter().map(|table| &*table.name).collect();
    assert!(names.contains(&"per_layer_token_embd.weight"), "{names:?}");
    let cached = Residency::plan(&subject.weights, WeightSource::Pread, None);
    assert!(
        cached.tables.is_empty(),
        "without a bound all may be in memory"
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    /// Whatever the room, a plan keeps within it or says what it takes at least.
    #[test]
    fn a_plan_fits_its_room_or_is_the_least_there_is(
        name in prop::sample::select(vec!["qwen3-4b", "llama-3-8b", "qwen3-0.6b", "qwen3-30b-a3b"]),
        room in 0u64..12_000_000_000,
    ) {
        let weights = shape(name);
        let least = Residency::plan(&weights, WeightSource::Direct, Some(0)).memory_bytes();
        let plan = Residency::plan(&weights, WeightSource::Direct, Some(room));
        prop_assert!(plan.memory_bytes() <= room.max(least));
        if room >= least {
            prop_assert!(plan.memory_bytes() <= room);
        }
    }
}
