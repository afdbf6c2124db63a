//! Neurons that are foretold: the same bits whatever predictors say, how good they are that are fitted, and files of them that
//! are refused.

use std::fs;
use std::path::{Path, PathBuf};

use lacuna_files::gguf::Writer;
use lacuna_files::reader::faults::{Fault, FaultyDevice};
use lacuna_files::reader::{ReadDevice, ReadThreads};
use lacuna_files::{DType, ModelFiles};
use lacuna_models::plan::{Residency, WeightPlan};
use lacuna_models::{
    ColumnsError, FitSettings, LogitRows, Model, PredictorFit, PredictorFitter, PredictorsError,
    with_columns,
};
use lacuna_text::tokenizer::Special;

use crate::runner::folder;
use crate::{Subject, both_ways_of, runner, subjects};

/// What predictors say that nobody has fitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    Nothing,
    All,
    Anything,
}

/// Writes predictors of a model whose columns are in `folder`.
fn foretell(says: Says, files: &ModelFiles, folder: &Path) -> PathBuf {
    const RANK: usize = 3;
    let description = lacuna_models::describe(files).expect("a model");
    let plan = WeightPlan::of_files(files, &description);
    let content = files.content(Some(folder)).expect("it is read");
    let content: String = content.iter().map(|byte| format!("{byte:02x}")).collect();
    let hidden = description.spec.hidden;
    let mut header = Writer::new();
    header.set("lacuna.predictors.version", 1u32);
    header.set("lacuna.predictors.weights", &content[..]);
    for of in &plan.neurons {
        for (part, dtype, shape) in [
            ("narrow", DType::F16, vec![RANK, hidden]),
            ("wide", DType::F16, vec![of.neurons(), RANK]),
            ("bias", DType::F32, vec![of.neurons()]),
            ("margin", DType::F32, vec![1]),
        ] {
            let declared = header.tensor(&format!("{}.{part}", of.name), dtype, &shape);
            declared.expect("whole blocks");
        }
    }
    let mut body = header.begin(Vec::new()).expect("room in memory");
    // Of either sign, about 1 in f16.
    let halves = |count: usize| -> Vec<u8> {
        let half = |at: usize| [(at * 29) as u8, 0x38 | ((at * 37) as u8 & 0x83)];
        (0..count).flat_map(half).collect()
    };
    for of in &plan.neurons {
        let bias: f32 = match says {
            Says::Nothing => f32::MIN,
            Says::All => f32::MAX,
            Says::Anything => 0.0,
        };
        let bias: Vec<u8> = (0..of.neurons()).flat_map(|_| bias.to_le_bytes()).collect();
        for (part, bytes) in [
            ("narrow", halves(RANK * hidden)),
            ("wide", halves(RANK * of.neurons())),
            ("bias", bias),
            ("margin", 0.5f32.to_le_bytes().to_vec()),
        ] {
            let name = format!("{}.{part}", of.name);
            body.tensor(&name, &bytes).expect("as declared");
        }
    }
    let path = folder.join(format!("{}.predictors", &content[..32]));
    fs::write(&path, body.finish().expect("whole")).expect("room for it");
    path
}

/// Predictors fitted to a model's own activations on `tokens`, in `folder`.
fn fit(
    files: &ModelFiles,
    folder: &Path,
    settings: FitSettings,
    tokens: &[u32],
) -> Result<PredictorFit, PredictorsError> {
    let mut fitter = PredictorFitter::new(files, folder, settings, tokens.len())?;
    let model = Model::load(files.clone()).expect("it loads");
    let mut runner = runner(model, 2);
    while let Some(recorder) = fitter.recorder() {
        runner.scratch.record_neurons(Some(recorder));
        for window in tokens.chunks(160) {
            let mut sequence = runner.sequence();
            let read = runner.pass(&mut sequence, window, LogitRows::None);
            read.expect("valid tokens");
        }
        let recorder = runner.scratch.record_neurons(None);
        fitter.fit(
            &runner.cpu,
            recorder.expect("it is there"),
            &mut |_, _, _| (),
        )?;
    }
    fitter.finish()
}

#[test]
fn logits_do_not_depend_on_what_is_foretold() {
    let columns = tempfile::tempdir().expect("a folder");
    for subject in subjects(columns.path()) {
        for says in [Says::Nothing, Says::All, Says::Anything] {
            foretell(says, &subject.files, columns.path());
            let foretold = Subject::open(Path::new(&subject.what), columns.path());
            let foretold = foretold.expect("it has neurons");
            let (with, without) = (foretold.plan(None), subject.plan(None));
            let fixed = |plan: &Residency| plan.neurons.map_or(0, |it| it.fixed_bytes);
            assert!(fixed(&with) > fixed(&without), "predictors take memory");
            assert_eq!(
                with.memory_bytes() - without.memory_bytes(),
                fixed(&with) - fixed(&without)
            );
            for (slots, threads) in [(0, 1), (5, 3)] {
                let model = foretold.load(foretold.with_slots(slots), None);
                let mut runner = runner(model, threads);
                let found = both_ways_of(&mut runner, &subject.tokens);
                assert_eq!(found, subject.expected, "{}, {says:?}", subject.what);
                let reads = runner.model.neuron_reads().expect("they are read");
                // Each token by itself is a pass; all eleven together are too many.
                assert!(reads.predicted_needed > 0 && reads.predicted_needed < reads.needed);
                match says {
                    Says::Nothing => assert_eq!((reads.predicted, reads.wasted_bytes), (0, 0)),
                    Says::All => assert_eq!(reads.recall(), Some(1.0)),
                    Says::Anything => {
                        assert!(reads.predicted_right <= reads.predicted.min(reads.needed))
                    }
                }
            }
        }
    }
}

#[test]
fn predictors_are_fitted_to_what_a_model_does_and_the_same_every_time() {
    let columns = tempfile::tempdir().expect("a folder");
    let path = folder().join("families/nemotron-h/model.gguf");
    let subject = Subject::open(&path, columns.path()).expect("it has neurons");
    // No two stretches of it are alike.
    let tokens: Vec<u32> = (0..1600u32)
        .map(|at| (at * (at + 7) / 3 + at / 11) % 64)
        .collect();
    let settings = FitSettings {
        rank: 16,
        ..FitSettings::default()
    };
    let error = fit(&subject.files, columns.path(), settings, &tokens[..639]);
    let Err(error @ PredictorsError::TextTooShort { .. }) = error else {
        panic!("{error:?}")
    };
    assert!(error.to_string().contains("has 639 tokens, and 640"));
    let found = fit(&subject.files, columns.path(), settings, &tokens).expect("it is fitted");
    let bytes = fs::read(&found.path).expect("it is written");
    assert!(found.bytes > 0 && (found.bytes as usize) < bytes.len());
    assert_eq!(found.blocks.len(), subject.weights.neurons.len());
    assert!(found.all.recall >= 0.9, "{found:?}");
    // Half of all neurons are active of a model that nobody has trained.
    assert!(found.all.named_share < 0.8, "{found:?}");
    let again = fit(&subject.files, columns.path(), settings, &tokens).expect("it is fitted");
    assert_eq!(again, found);
    assert_eq!(fs::read(&found.path).expect("it is written"), bytes);
    let foretold = Subject::open(&path, columns.path()).expect("it has neurons");
    let mut runner = runner(foretold.load(foretold.with_slots(4), None), 2);
    assert_eq!(both_ways_of(&mut runner, &subject.tokens), subject.expected);
    let reads = runner.model.neuron_reads().expect("they are read");
    assert!(reads.recall() > Some(0.8), "{reads:?}");
    assert!(reads.precision() > Some(0.5), "{reads:?}");
}

#[test]
fn most_neurons_that_a_trained_model_needs_are_foretold() {
    let columns = tempfile::tempdir().expect("a folder");
    let demo = folder().join("../models/demo");
    let path = demo.join("lacuna-demo-sparse-q8_0.gguf");
    let text = fs::read_to_string(demo.join("heldout.txt")).expect("committed with the model");
    let files = ModelFiles::open(&path).expect("it opens");
    let spec = lacuna_models::describe(&files).expect("a model").spec;
    let tokenizer = lacuna_models::tokenizer(&files, &spec).expect("it has one");
    let tokens = tokenizer.encode(&text, Special::NONE).expect("it is text");
    let settings = FitSettings {
        rank: 32,
        ..FitSettings::default()
    };
    let fitted = fit(&files, columns.path(), settings, &tokens[..8192]).expect("it is fitted");
    assert!(fitted.all.recall >= 0.9, "{fitted:?}");
    assert!(fitted.all.named_share < 0.4, "{fitted:?}");
    // And of another part of the text, as tokens come.
    let further = tokens[12_000..12_048].to_vec();
    let subject = Subject::with_tokens(&path, columns.path(), |_| further).expect("it has neurons");
    let slots = subject.weights.neurons[0].neurons() * 2 / 5;
    let mut runner = runner(subject.load(subject.with_slots(slots), None), 2);
    assert!(both_ways_of(&mut runner, &subject.tokens) == subject.expected);
    let reads = runner.model.neuron_reads().expect("they are read");
    println!("{:?} of them foretold: {reads:?}", reads.recall());
    assert!(reads.recall() >= Some(0.9), "{reads:?}");
    assert!(reads.precision() > Some(0.2), "{reads:?}");
}

#[test]
fn a_model_without_such_neurons_and_a_file_that_is_not_its_predictors_are_refused() {
    let columns = tempfile::tempdir().expect("a folder");
    let files = ModelFiles::open(&folder().join("qwen3/model.gguf")).expect("it opens");
    let settings = FitSettings::default();
    let error = PredictorFitter::new(&files, columns.path(), settings, 5000);
    let error = error.expect_err("SwiGLU").to_string();
    assert!(error.contains("SwiGLU"), "{error}");
    let sparse = ModelFiles::open(&folder().join("families/nemotron-h/model.gguf"));
    let sparse = sparse.expect("it opens");
    let error = PredictorFitter::new(&sparse, columns.path(), settings, 1 << 40);
    let error = error.expect_err("more than any memory").to_string();
    assert!(
        error.contains("1099511627776 tokens are more than"),
        "{error}"
    );
    let path = folder().join("families/nemotron-h/model.gguf");
    let files = ModelFiles::open(&path).expect("it opens");
    let files = with_columns(files, columns.path(), &mut ()).expect("it is made");
    let file = foretell(Says::Anything, &files, columns.path());
    let whole = fs::read(&file).expect("it is written");
    let open = || {
        let files = ModelFiles::open(&path).expect("it opens");
        with_columns(files, columns.path(), &mut ())
    };
    assert!(open().expect("it is whole").predictors().is_some());
    let refused = |bytes: &[u8]| {
        fs::write(&file, bytes).expect("room");
        let error = open().expect_err("it is damaged");
        assert!(matches!(
            error,
            ColumnsError::Predictors(PredictorsError::Damaged { .. })
        ));
        let text = error.to_string();
        assert!(text.contains(".predictors: ") && text.contains("fit the predictors again"));
        text
    };
    let find = |what: &[u8]| {
        let mut places = whole.windows(what.len());
        places.position(|it| it == what).expect("it is there") + what.len()
    };
    let with = |at: usize, bytes: &[u8]| {
        let mut other = whole.clone();
        other[at..at + bytes.len()].copy_from_slice(bytes);
        other
    };
    refused(b"");
    refused(&whole[..whole.len() / 2]);
    // The last value, and what fills up to the next multiple of 32 bytes.
    let last = whole.len() - 32;
    refused(&whole[..last + 3]);
    // After the key comes the type of its value, then this.
    let version = find(b"lacuna.predictors.version") + 4;
    assert!(refused(&with(version, &[9])).contains("another version"));
    let weights = find(b"lacuna.predictors.weights") + 12;
    assert!(refused(&with(weights, b"00000000")).contains("other weights"));
    let not_finite = refused(&with(last, &f32::NAN.to_le_bytes()));
    assert!(not_finite.contains("not finite"), "{not_finite}");
    // Dimensions come after the name and how many there are.
    let shape = find(b"ffn_down.weight.narrow") + 4;
    assert!(refused(&with(shape, &[8])).contains("ffn_down.weight.narrow"));
    assert!(refused(&with(shape + 8, &[0])).contains(".narrow"));
    fs::remove_file(&file).expect("it is there");
    assert!(open().expect("there are none").predictors().is_none());
}

#[test]
fn what_cannot_be_read_ahead_of_time_is_read_when_it_is_needed() {
    let columns = tempfile::tempdir().expect("a folder");
    let path = folder().join("families/nemotron-h/model.gguf");
    let subject = Subject::open(&path, columns.path()).expect("it has neurons");
    foretell(Says::All, &subject.files, columns.path());
    let foretold = Subject::open(&path, columns.path()).expect("it has neurons");
    for fault in [Fault::Fail, Fault::Shorten, Fault::Delay, Fault::Reorder] {
        // Two after another never fail, and each is made twice.
        let device = || -> Box<dyn ReadDevice> {
            let threads = ReadThreads::new().expect("threads");
            Box::new(FaultyDevice::new(Box::new(threads), 61, fault))
        };
        let model = foretold.load(foretold.with_slots(0), Some(&device));
        let mut runner = runner(model, 1);
        for _ in 0..4 {
            let mut sequence = runner.sequence();
            let mut found = Vec::new();
            for token in &subject.tokens {
                found.extend(runner.extend(&mut sequence, &[*token]));
            }
            let of_one_by_one = subject.expected.len() / 2;
            assert_eq!(found, &subject.expected[of_one_by_one..], "{fault:?}");
        }
    }
}
