//! Experts in slots: the same bits as where all are mapped, whatever the number of slots, the reader and its faults; and
//! the same hits as a replay of which experts tokens chose.
#![allow(clippy::expect_used, reason = "a test may panic")]

mod runner;

use std::io::Write;
use std::sync::{Arc, Mutex};

use lacuna_files::ModelFiles;
use lacuna_files::reader::faults::{Fault, FaultyDevice};
use lacuna_files::reader::{ReadDevice, ReadThreads};
use lacuna_kernels::{DType, ElementType};
use lacuna_kv::KvPolicy;
use lacuna_models::plan::{ExpertSlots, Rates, Residency, WeightPlan, WeightSource};
use lacuna_models::synth;
use lacuna_models::trace::{Trace, TraceWriter};
use lacuna_models::{ForwardError, Loading, LogitRows, MakeDevice, Model, Segment};
use runner::{Runner, folder};

/// Mixtures of experts, each with something of its own: experts in one tensor or a tensor each, gate and up apart or
/// together, biases, blocks without gates, a block that all tokens have.
const MIXTURES: [&str; 10] = [
    "qwen3-moe/model.gguf",
    "qwen3-moe/hf",
    "mixtral/model.gguf",
    "mixtral/hf",
    "gpt-oss/model.gguf",
    "deepseek-v2-lite/model.gguf",
    "qwen3.5-moe/model.gguf",
    "gemma4-experts/model.gguf",
    "granite-moe/hf",
    "nemotron-h-moe/model.gguf",
];

/// The files of a model, and a plan of its weights with so many slots in each layer.
struct Subject {
    files: ModelFiles,
    weights: WeightPlan,
}

impl Subject {
    fn open(name: &str) -> Self {
        let path = folder().join("families").join(name);
        let files = ModelFiles::open(&path).expect("the fixture opens");
        let description = lacuna_models::describe(&files).expect("a model");
        let weights = WeightPlan::of(files.tensors(), &description);
        Self { files, weights }
    }

    fn all(&self) -> Residency {
        Residency::plan(&self.weights, WeightSource::Direct, None)
    }

    fn with_slots(&self, slots: usize) -> Residency {
        Residency {
            experts: ExpertSlots::of(&self.weights.experts, slots),
            ..self.all()
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
    let policy = KvPolicy::default();
    Runner::of(model, policy, ElementType::F32, threads, context)
}

fn tokens(model: &Model) -> Vec<u32> {
    let vocabulary = model.spec().vocabulary as u32;
    (0..23).map(|at| (at * 37 + 3) % vocabulary).collect()
}

/// Logits of chunks, each after those before, then of each token by itself.
fn in_parts(runner: &mut Runner, tokens: &[u32]) -> Vec<f32> {
    let mut sequence = runner.sequence();
    let mut logits = Vec::new();
    for chunk in [&tokens[..9], &tokens[9..14], &tokens[14..15], &tokens[15..]] {
        logits.extend(runner.extend(&mut sequence, chunk));
    }
    let mut sequence = runner.sequence();
    for token in tokens {
        logits.extend(runner.extend(&mut sequence, &[*token]));
    }
    logits
}

fn faulty(every: u64, fault: Fault) -> impl Fn() -> Box<dyn ReadDevice> {
    move || {
        let threads = ReadThreads::new().expect("threads");
        Box::new(FaultyDevice::new(Box::new(threads), every, fault))
    }
}

#[test]
fn any_number_of_slots_gives_the_same_bits() {
    for name in MIXTURES {
        let subject = Subject::open(name);
        let mapped = subject.load(Residency::mapped(), None);
        let tokens = tokens(&mapped);
        let expected = in_parts(&mut runner(mapped, 1), &tokens);
        let all = subject.all().experts.expect("it has experts").experts;
        for (slots, threads) in [(1, 1), (2, 2), (all.div_ceil(2), 1), (all - 1, 2), (all, 1)] {
            let model = subject.load(subject.with_slots(slots), None);
            let mut runner = runner(model, threads);
            let found = in_parts(&mut runner, &tokens);
            assert!(found == expected, "{name} with {slots} slots");
            let counts = runner.model.expert_counts().expect("it has slots");
            assert!(
                counts.misses > 0 && counts.read_bytes > 0,
                "{name}: {counts:?}"
            );
            let repeat = runner.model.expert_counts().expect("as before");
            in_parts(&mut runner, &tokens);
            let again = runner
                .model
                .expert_counts()
                .expect("as before")
                .since(repeat);
            assert_eq!(again.misses == 0, slots == all, "{name} with {slots} slots");
        }
    }
}

#[test]
fn reads_that_are_late_short_interrupted_or_out_of_order_change_no_bit() {
    for name in ["qwen3-moe/model.gguf", "gpt-oss/model.gguf"] {
        let subject = Subject::open(name);
        let mapped = subject.load(Residency::mapped(), None);
        let tokens = tokens(&mapped);
        let expected = in_parts(&mut runner(mapped, 1), &tokens);
        for fault in [
            Fault::Shorten,
            Fault::Delay,
            Fault::Reorder,
            Fault::Interrupt,
        ] {
            for every in [2, 3] {
                let model = subject.load(subject.with_slots(3), Some(&faulty(every, fault)));
                let found = in_parts(&mut runner(model, 2), &tokens);
                assert!(found == expected, "{name} with {fault:?} of {every}");
            }
        }
    }
}

#[test]
fn an_expert_that_cannot_be_read_is_an_error_of_its_pass_and_of_no_later_one() {
    let subject = Subject::open("qwen3-moe/model.gguf");
    let mapped = subject.load(Residency::mapped(), None);
    let tokens = tokens(&mapped);
    let expected = runner(mapped, 1).logits(&tokens);
    // Each reader counts for itself: loading reads fewer tensors than fail.
    let every = 3 * subject.weights.tensors.len() as u64 + 1;
    let model = subject.load(subject.with_slots(2), Some(&faulty(every, Fault::Fail)));
    let mut runner = runner(model, 1);
    let (mut failed, mut worked) = (0, 0);
    for _ in 0..16 {
        let mut sequence = runner.sequence();
        sequence.prepare(tokens.len()).expect("room");
        let segment = Segment {
            tokens: &tokens,
            sequence: &mut sequence,
            logits: LogitRows::All,
            images: &[],
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
                // Rows of the table are read by a reader of their own, which fails now and then, too.
                let is_table = error.name.starts_with("token_embd");
                assert!(is_table || error.name.contains("_exps."), "{error}");
                failed += usize::from(!is_table);
                assert!(error.to_string().contains("the disk is broken"), "{error}");
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(failed > 0 && worked > 0, "{failed} failed, {worked} worked");
}

#[test]
fn slots_that_go_and_come_while_a_model_runs_change_no_bit() {
    let subject = Subject::open("qwen3-moe/model.gguf");
    let mapped = subject.load(Residency::mapped(), None);
    let tokens = tokens(&mapped);
    let expected = in_parts(&mut runner(mapped, 1), &tokens);
    let all = subject.all().experts.expect("it has experts").experts;
    let mut runner = runner(subject.load(subject.all(), None), 1);
    for slots in [all, 3, 1, all - 1, 2, all] {
        let residency = subject.with_slots(slots);
        runner
            .model
            .place_weights(&residency)
            .expect("nothing is read");
        assert_eq!(runner.model.placed_bytes(), residency.memory_bytes());
        let found = in_parts(&mut runner, &tokens);
        assert!(found == expected, "{slots} slots");
    }
}

#[test]
fn sequences_that_are_computed_together_have_what_each_has_alone() {
    for name in ["qwen3-moe/model.gguf", "gpt-oss/model.gguf"] {
        let subject = Subject::open(name);
        let mapped = subject.load(Residency::mapped(), None);
        let tokens = tokens(&mapped);
        let parts = [&tokens[..6], &tokens[6..7], &tokens[7..]];
        let mut alone = runner(mapped, 1);
        let expected = parts.map(|part| alone.logits(part)).concat();
        for slots in [2, 5] {
            let mut runner = runner(subject.load(subject.with_slots(slots), None), 2);
            let mut sequences = parts.map(|_| runner.sequence());
            let mut segments = Vec::new();
            for (sequence, tokens) in sequences.iter_mut().zip(parts) {
                sequence.prepare(tokens.len()).expect("room");
                segments.push(Segment {
                    tokens,
                    sequence,
                    logits: LogitRows::All,
                    images: &[],
                });
            }
            let found = runner
                .model
                .forward(&runner.cpu, &mut segments, &mut runner.scratch);
            assert!(
                found.expect("valid tokens") == expected,
                "{name} with {slots} slots"
            );
        }
    }
}

#[test]
fn a_file_that_becomes_shorter_ends_the_pass_with_an_error() {
    let copy = tempfile::tempdir().expect("a scratch folder");
    let path = copy.path().join("model.gguf");
    let original = folder().join("families/qwen3-moe/model.gguf");
    std::fs::copy(original, &path).expect("room to copy");
    let subject = Subject::open(path.to_str().expect("text"));
    let model = subject.load(subject.with_slots(2), None);
    let tokens = tokens(&model);
    let mut runner = runner(model, 1);
    runner.logits(&tokens);
    let file = std::fs::OpenOptions::new().write(true).open(&path);
    let file = file.expect("it is there");
    let whole = file.metadata().expect("it is there").len();
    file.set_len(whole / 2).expect("it is cut");
    let mut sequence = runner.sequence();
    sequence.prepare(tokens.len()).expect("room");
    let segment = Segment {
        tokens: &tokens,
        sequence: &mut sequence,
        logits: LogitRows::All,
        images: &[],
    };
    let error = runner
        .model
        .forward(&runner.cpu, &mut [segment], &mut runner.scratch)
        .expect_err("experts are gone");
    assert!(
        matches!(error, ForwardError::Weights(_) | ForwardError::Lost(_)),
        "{error}"
    );
}

/// What several owners write to.
#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panics").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_replay_of_what_tokens_chose_finds_what_the_slots_found() {
    for name in [
        "qwen3-moe/model.gguf",
        "gpt-oss/model.gguf",
        "granite-moe/hf",
    ] {
        let subject = Subject::open(name);
        let all = subject.all().experts.expect("it has experts").experts;
        for slots in 1..=all {
            let mut runner = runner(subject.load(subject.with_slots(slots), None), 2);
            let (tokens, record) = (tokens(&runner.model), Shared::default());
            let writer = TraceWriter::new(runner.model.program(), Box::new(record.clone()));
            runner.scratch.record(Some(writer.expect("memory")));
            in_parts(&mut runner, &tokens);
            let writer = runner.scratch.record(None).expect("it was there");
            writer.finish().expect("memory");
            let record = record.0.lock().expect("nobody panics");
            let trace = Trace::read(&record[..]).expect("a record");
            assert_eq!(trace.uses.len(), (4 + tokens.len()) * trace.layers);
            let (found, counts) = (trace.replay(slots), runner.model.expert_counts());
            let counts = counts.expect("it has slots");
            let engine = (counts.hits, counts.misses);
            assert_eq!(
                (found.hits, found.misses),
                engine,
                "{name} with {slots} slots"
            );
            // Every expert is read once for each time that it is missing.
            let misses: u64 = subject.weights.experts.iter().map(|it| it.bytes).sum();
            let layers = trace.layers as u64;
            assert_eq!(counts.read_bytes * layers, counts.misses * misses, "{name}");
        }
    }
}

#[test]
fn experts_get_what_other_weights_leave() {
    let shape = synth::Shape::find("qwen3-30b-a3b").expect("a shape");
    let weights = synth::Model::new(shape, DType::Q4_0).weights();
    let weights = weights.expect("whole blocks");
    let plan = |room| Residency::plan(&weights, WeightSource::Direct, Some(room));
    let whole = Residency::plan(&weights, WeightSource::Direct, None);
    let slots = |plan: &Residency| plan.experts.expect("it has experts");
    assert_eq!((slots(&whole).slots, slots(&whole).layers), (128, 48));
    let rates = Rates {
        memory: 25_000_000_000,
        disk: 4_000_000_000,
    };
    let (mut before, mut seconds) = (0, f64::INFINITY);
    for percent in 10..=100 {
        let room = whole.memory_bytes() / 100 * percent;
        let plan = plan(room);
        assert!(plan.memory_bytes() <= room, "{percent} %");
        let now = slots(&plan);
        assert!(now.slots >= before, "{percent} %");
        assert!(plan.streamed.is_empty(), "matrices stay before experts do");
        let one = now.bytes / now.slots as u64;
        let unused = room - plan.memory_bytes();
        assert!(
            unused < one,
            "{percent} %: room for one more, {unused} of {one}"
        );
        let takes = plan.seconds_per_token(1_800_000_000, rates, None);
        assert!(takes <= seconds, "{percent} %");
        (before, seconds) = (now.slots, takes);
    }
    assert!(before >= 127, "{before}");
    // Below, matrices are streamed and experts go through two slots; less again, and that is the least.
    let few = plan(whole.memory_bytes() / 20);
    assert_eq!(slots(&few).slots, ExpertSlots::LEAST);
    assert!(few.streamed_bytes > 0);
    let least = plan(0);
    let spare = whole.to_spare(&weights);
    assert_eq!(whole.memory_bytes() - spare, least.memory_bytes());
    // What KV pages come to need they get from experts first.
    let less = whole
        .less(&weights, 1 << 20)
        .expect("there is much to spare");
    assert_eq!(slots(&less).slots, 127);
    assert!(less.streamed.is_empty());
    assert!(less.less(&weights, spare).is_none());
}
