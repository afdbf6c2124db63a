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
use lacuna_models::{ForwardError, LoadError, Loading, LogitRows, MakeDevice, Model};
use proptest::prelude::*;
use runner::{Runner, families, folder};

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
            let plan = self.plan(WeightSource::Direct, room);
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

    fn plan(&self, source: WeightSource, room: Option<u64>) -> Residency {
        Residency::plan(&self.weights, source, room)
    }

    fn placed(&self, source: WeightSource, room: u64) -> Model {
        let residency = self.plan(source, Some(room));
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
    let alone = ["llama3", "qwen3", "qwen3-untied"].map(|name| format!("{name}/model.gguf"));
    let split = "qwen3/split-00001-of-00003.gguf".to_owned();
    let in_families = families()
        .into_iter()
        .flat_map(|name| ["model.gguf", "hf"].map(|file| format!("families/{name}/{file}")));
    let paths = alone.into_iter().chain([split]).chain(in_families);
    let paths = paths.map(|path| folder().join(path));
    paths.filter(|path| path.exists()).collect()
}

/// Tokens that every fixture's vocabulary has.
fn tokens(model: &Model) -> Vec<u32> {
    let vocabulary = model.spec().vocabulary as u32;
    (0..11).map(|at| (at * 37 + 3) % vocabulary).collect()
}

/// A subject, and what it computes where its files are mapped.
struct Reference {
    subject: Subject,
    tokens: Vec<u32>,
    /// All tokens in one pass, then each by itself.
    expected: Vec<f32>,
}

impl Reference {
    fn open(path: &Path) -> Self {
        let subject = Subject::open(path);
        let mapped = subject.load(Residency::mapped(), None).expect("it loads");
        let tokens = tokens(&mapped);
        let expected = both_ways(&mut runner(mapped, 1), &tokens);
        Self {
            subject,
            tokens,
            expected,
        }
    }

    fn named(name: &str) -> Self {
        Self::open(&folder().join(name))
    }

    /// Logits of one pass over all tokens.
    fn logits(&self) -> &[f32] {
        &self.expected[..self.expected.len() / 2]
    }

    /// Where weights take the least memory.
    fn least(&self) -> Residency {
        self.subject.plan(WeightSource::Direct, Some(0))
    }

    #[track_caller]
    fn check(&self, model: Model, threads: usize, what: &str) {
        let found = both_ways(&mut runner(model, threads), &self.tokens);
        assert!(found == self.expected, "{} {what}", self.subject.what);
    }

    /// A pass over all tokens.
    fn pass(&self, runner: &mut Runner) -> Result<Vec<f32>, ForwardError> {
        let mut sequence = runner.sequence();
        runner.pass(&mut sequence, &self.tokens, LogitRows::All)
    }
}

#[test]
fn every_family_gives_the_same_bits_wherever_its_weights_are() {
    let (mut streamed, mut tables) = (0, 0);
    for path in fixtures() {
        let reference = Reference::open(&path);
        let [least, some, _] = reference.subject.rooms();
        for (room, source) in [
            (least, WeightSource::Direct),
            (some, WeightSource::Direct),
            (least, WeightSource::Pread),
        ] {
            let model = reference.subject.placed(source, room);
            let held = model.weight_plan().loaded.clone().expect("it is loaded");
            assert!(held.memory_bytes() <= room, "{}", path.display());
            streamed += usize::from(!held.streamed.is_empty());
            tables += usize::from(!held.tables.is_empty());
            reference.check(model, 2, &format!("in {room} bytes, {source:?}"));
        }
    }
    assert!(
        streamed > 100 && tables > 50,
        "{streamed} streamed, {tables} with tables"
    );
}

#[test]
fn passes_without_logits_and_passes_that_fail_leave_the_order_of_reads_whole() {
    let reference = Reference::named("qwen3-untied/model.gguf");
    let (tokens, expected) = (&reference.tokens, reference.logits());
    let model = reference.subject.load(reference.least(), None);
    let mut runner = runner(model.expect("it loads"), 1);
    let last = expected.len() / tokens.len() * (tokens.len() - 1);
    for _ in 0..3 {
        let mut sequence = runner.sequence();
        for (chunk, rows) in [
            (&tokens[..4], LogitRows::None),
            (&tokens[4..9], LogitRows::None),
            (&tokens[9..], LogitRows::Last),
        ] {
            let found = runner.pass(&mut sequence, chunk, rows);
            let found = found.expect("valid tokens");
            assert!(rows == LogitRows::None || found == expected[last..]);
        }
    }
}

#[test]
fn weights_leave_memory_and_come_back_and_no_bit_changes() {
    let reference = Reference::named("qwen3-untied/model.gguf");
    let weights = &reference.subject.weights;
    let all = reference.subject.plan(WeightSource::Direct, None);
    let model = reference.subject.load(all.clone(), None).expect("it loads");
    let mut runner = runner(model, 1);
    let mut held = all.clone();
    let mut steps = 0;
    for _ in 0..2 {
        while let Some(less) = held.less(weights, 1) {
            runner.model.place_weights(&less).expect("less is read");
            assert_eq!(runner.model.placed_bytes(), less.memory_bytes());
            assert!(both_ways(&mut runner, &reference.tokens) == reference.expected);
            held = less;
            steps += 1;
        }
        assert_eq!(held.to_spare(weights), 0);
        let mut bytes = 1;
        while held.streamed_bytes > 0 {
            let Some(more) = held.more(weights, bytes) else {
                bytes *= 2;
                continue;
            };
            assert!(more.memory_bytes() <= held.memory_bytes() + bytes);
            assert!(more.streamed.iter().all(|it| held.streamed.contains(it)));
            runner.model.place_weights(&more).expect("a whole file");
            assert!(both_ways(&mut runner, &reference.tokens) == reference.expected);
            held = more;
        }
        assert_eq!(held, all);
        assert_eq!(held.more(weights, u64::MAX), None);
    }
    assert!(steps > 5, "{steps}");
}

#[test]
fn weights_that_cannot_come_back_are_read_for_each_pass_as_before() {
    let reference = Reference::named("qwen3-untied/model.gguf");
    let least = reference.least();
    // Each reader counts for itself: loading reads fewer tensors than fail.
    let loads = reference.subject.weights.tensors.len() as u64 + 1;
    let device = faulty(loads, Fault::Fail);
    let model = reference
        .subject
        .load(least, Some(&device))
        .expect("it loads");
    let mut runner = runner(model, 1);
    let all = reference.subject.plan(WeightSource::Direct, None);
    let (mut refused, mut brought) = (0, 0);
    for _ in 0..3 * loads {
        let before = runner.model.placed_bytes();
        match runner.model.place_weights(&all) {
            Ok(()) => {
                brought += 1;
                runner
                    .model
                    .place_weights(&reference.least())
                    .expect("less is read");
            }
            Err(error) => {
                refused += 1;
                assert!(matches!(error, LoadError::Weights(_)), "{error}");
                assert_eq!(runner.model.placed_bytes(), before);
            }
        }
        if let Ok(found) = reference.pass(&mut runner) {
            assert!(found == reference.logits());
        }
    }
    assert!(
        refused > 0 && brought > 0,
        "{refused} refused, {brought} brought"
    );
}

/// A device of threads with a fault.
fn faulty(every: u64, fault: Fault) -> impl Fn() -> Box<dyn ReadDevice> {
    move || {
        let threads = ReadThreads::new().expect("threads");
        Box::new(FaultyDevice::new(Box::new(threads), every, fault))
    }
}

#[test]
fn short_late_reordered_interrupted_and_stalled_reads_change_no_bit() {
    for name in [
        "qwen3-untied/model.gguf",
        "families/gemma3n/model.gguf",
        "families/qwen3-moe/model.gguf",
    ] {
        let reference = Reference::named(name);
        for (fault, every) in [
            (Fault::Shorten, &[2, 3, 5][..]),
            (Fault::Delay, &[2, 3, 5]),
            (Fault::Reorder, &[2, 3, 5]),
            (Fault::Interrupt, &[2, 3, 5]),
            (Fault::Stall, &[40]),
        ] {
            for &every in every {
                let device = faulty(every, fault);
                let model = reference.subject.load(reference.least(), Some(&device));
                let what = format!("with {fault:?} of {every}");
                reference.check(model.expect("it loads"), 1, &what);
            }
        }
    }
}

#[test]
fn a_disk_that_fails_is_an_error_of_the_pass_that_names_the_tensor_and_of_no_later_one() {
    let reference = Reference::named("qwen3-untied/model.gguf");
    let residency = reference.least();
    let read = residency.streamed.iter().chain(&residency.tables);
    let read: Vec<String> = read.map(|it| it.name.clone()).collect();
    // Each reader counts for itself: loading reads fewer tensors than fail, a pass reads more.
    let loads = reference.subject.weights.tensors.len() as u64 + 1;
    let device = faulty(loads, Fault::Fail);
    let model = reference.subject.load(residency, Some(&device));
    let mut runner = runner(model.expect("it loads"), 1);
    let (mut failed, mut worked) = (0, 0);
    for _ in 0..12 {
        match reference.pass(&mut runner) {
            Ok(found) => {
                worked += 1;
                assert!(found == reference.logits());
            }
            Err(ForwardError::Weights(error)) => {
                failed += 1;
                assert!(read.contains(&error.name), "{error}");
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
    let residency = subject.plan(WeightSource::Direct, None);
    let loaded = subject.load(residency, Some(&faulty(3, Fault::Fail)));
    let error = loaded.map(drop).expect_err("a tensor cannot be read");
    assert!(matches!(error, LoadError::Weights(_)), "{error}");
}

/// A copy of a fixture, to be damaged.
fn copied(name: &str, to: &Path) -> (PathBuf, Subject) {
    let path = to.join("model.gguf");
    fs::copy(folder().join(name), &path).expect("room to copy");
    let subject = Subject::open(&path);
    (path, subject)
}

/// Cuts a file to half of what it was.
fn cut(path: &Path) {
    let file = fs::OpenOptions::new().write(true).open(path);
    let file = file.expect("it is there");
    let whole = file.metadata().expect("it is there").len();
    file.set_len(whole / 2).expect("it is cut");
}

#[test]
fn a_file_that_becomes_shorter_ends_the_pass_with_an_error() {
    let copy = tempfile::tempdir().expect("a scratch folder");
    let (path, subject) = copied("qwen3-untied/model.gguf", copy.path());
    let model = subject.placed(WeightSource::Direct, subject.rooms()[0]);
    let tokens = tokens(&model);
    let mut runner = runner(model, 1);
    runner.logits(&tokens);
    cut(&path);
    let mut sequence = runner.sequence();
    let error = runner.pass(&mut sequence, &tokens, LogitRows::All);
    let error = error.expect_err("weights are gone");
    assert!(
        matches!(error, ForwardError::Weights(_) | ForwardError::Lost(_)),
        "{error}"
    );
}

#[test]
fn a_file_that_is_cut_or_replaced_between_its_directory_and_its_weights_is_refused() {
    for source in [WeightSource::Pread, WeightSource::Direct] {
        let copy = tempfile::tempdir().expect("a scratch folder");
        let (path, subject) = copied("qwen3-untied/model.gguf", copy.path());
        cut(&path);
        let error = subject.load(subject.plan(source, None), None);
        let error = error.map(drop).expect_err("half of it is gone");
        assert!(
            matches!(error, LoadError::Weights(_) | LoadError::Lost(_)),
            "{source:?}: {error}"
        );

        let (path, subject) = copied("qwen3-untied/model.gguf", copy.path());
        let other = copy.path().join("other.gguf");
        fs::copy(folder().join("llama3/model.gguf"), &other).expect("room to copy");
        fs::rename(&other, &path).expect("it is replaced");
        let error = subject.load(subject.plan(source, None), None);
        let error = error.map(drop).expect_err("it is another file");
        assert!(matches!(error, LoadError::Reading(_)), "{error}");
        assert!(error.to_string().contains("another file"), "{error}");
    }
}

/// A file system without a disk: past the page cache is not to be had there, or is no different.
#[cfg(target_os = "linux")]
#[test]
fn a_file_in_memory_is_read_by_threads_as_well() {
    let Ok(copy) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("not tested: this system has no /dev/shm");
        return;
    };
    let reference = Reference::named("qwen3-untied/model.gguf");
    let (_, subject) = copied("qwen3-untied/model.gguf", copy.path());
    let threads = || -> Box<dyn ReadDevice> { Box::new(ReadThreads::new().expect("threads")) };
    for device in [None, Some(&threads as MakeDevice<'_>)] {
        let residency = subject.plan(WeightSource::Direct, Some(0));
        let model = subject.load(residency, device).expect("it loads");
        reference.check(model, 1, "in memory");
    }
}

#[test]
fn rows_of_tables_are_read_once_for_a_pass_ahead_of_it_where_it_is_known_and_in_few_bytes() {
    for name in ["gemma3n", "gemma4"] {
        let reference = Reference::named(&format!("families/{name}/model.gguf"));
        let residency = reference.subject.plan(WeightSource::Direct, None);
        let tables = residency.tables.len() as u64;
        assert!(tables > 0);
        let model = reference.subject.load(residency, None);
        let mut runner = runner(model.expect("it loads"), 1);
        let (first, rest) = reference.tokens.split_at(4);
        let different = |tokens: &[u32]| {
            let mut tokens = tokens.to_vec();
            tokens.sort_unstable();
            tokens.dedup();
            tokens.len() as u64
        };
        let mut sequence = runner.sequence();
        runner.model.expect(rest);
        let mut found = runner.extend(&mut sequence, first);
        let reads = runner.model.row_reads();
        assert_eq!(reads.asked, tables * 4);
        assert_eq!(reads.read, tables * different(&reference.tokens), "{name}");
        runner.model.expect(&[]);
        found.extend(runner.extend(&mut sequence, rest));
        assert!(found == reference.logits(), "{name}");
        let after = runner.model.row_reads();
        assert_eq!(after.read, reads.read, "all were there or on their way");
        assert_eq!(after.found - reads.found, tables * rest.len() as u64);
        assert!(after.read_bytes <= after.read * (16 << 10), "{after:?}");
        assert!(runner.logits(&reference.tokens) == reference.logits());
        assert_eq!(runner.model.row_reads().read, reads.read, "they are kept");
    }
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
    for name in ["gemma3n", "gemma4"] {
        let subject = Subject::open(&folder().join("families").join(name).join("model.gguf"));
        let plan = subject.plan(WeightSource::Direct, None);
        let names: Vec<&str> = plan.tables.iter().map(|table| &*table.name).collect();
        assert!(names.contains(&"per_layer_token_embd.weight"), "{names:?}");
        let cached = subject.plan(WeightSource::Pread, None);
        assert!(
            cached.tables.is_empty(),
            "without a bound all may be in memory"
        );
    }
    // The table of a large one: nothing of it is planned for but rows that are read.
    let weights = shape("gemma4-e-table");
    let plan = Residency::plan(&weights, WeightSource::Direct, None);
    let table = weights.tensors.iter().map(|it| it.bytes as u64).max();
    let rest = weights.mapped_bytes() - table.expect("tensors");
    assert!(table > Some(4 * rest));
    assert!(
        plan.memory_bytes() <= rest + (8 << 20),
        "{}",
        plan.memory_bytes()
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
