//! Neurons of two small matrices, by themselves.

use std::path::Path;

use lacuna_files::reader::faults::{Fault, FaultyDevice};
use lacuna_files::reader::{Caching, ReadThreads};
use lacuna_files::{ModelFiles, gguf};
use lacuna_kernels::{Activations, Cpu, CpuConfig, DType, Matrix};
use proptest::prelude::*;

use super::*;
use crate::plan::{AHEAD_NEURONS, PredictorUse, UpUse};
use crate::weights::columns;

const ROWS: usize = 64;
/// Two blocks: of several sections, and of less than one.
const COLS: [usize; 2] = [1600, 96];
const NAMES: [&str; 2] = ["a.weight", "b.weight"];
/// What is multiplied with the gates before them, where there are gates, and how many elements its rows have.
const UP_NAMES: [&str; 2] = ["a.up", "b.up"];
const UP_COLS: usize = 96;

/// Rows of activations that predictors tell apart.
const PATTERNS: usize = 8;

/// What predictors say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// What is true of one row.
    Truth,
    Nothing,
    All,
    Anything,
}

impl Says {
    const EACH: [Self; 4] = [Self::Truth, Self::Nothing, Self::All, Self::Anything];

    /// The score of a neuron of a block for a pattern.
    fn of(self, block: usize, neuron: usize, pattern: usize) -> f32 {
        let yes = match self {
            Self::Truth => sparse(block, 1, EVERY, pattern)[neuron] != 0.0,
            Self::Nothing => false,
            Self::All => true,
            Self::Anything => (neuron * 31 + pattern * 17 + neuron / 7) % 5 < 2,
        };
        if yes { 1.0 } else { -1.0 }
    }
}

/// Of so many neurons, about one is active where predictors can tell the truth.
const EVERY: usize = 23;

/// What a norm leaves before rows of some patterns.
fn normed(patterns: &[usize]) -> Vec<f32> {
    let mut rows = vec![0.0; patterns.len() * PATTERNS];
    for (row, pattern) in rows.chunks_exact_mut(PATTERNS).zip(patterns) {
        row[*pattern] = 1.0;
    }
    rows
}

/// Two matrices in a file, and their columns in another.
struct Subject {
    files: ModelFiles,
    columns: Tensors,
    predictors: Option<ModelFiles>,
    uses: Vec<NeuronUse>,
    _folder: tempfile::TempDir,
}

impl Subject {
    fn new(dtype: DType) -> Self {
        Self::of(dtype, None)
    }

    /// With rows of a type beside the columns, if one is named.
    fn of(dtype: DType, up: Option<DType>) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        write(dtype, up, &path);
        let files = ModelFiles::open(&path).expect("a valid file");
        let uses = (0..NAMES.len()).map(|matrix| {
            let columns = ColumnLayout::new(dtype, ROWS, COLS[matrix]);
            NeuronUse {
                name: NAMES[matrix].to_owned(),
                matrix,
                layout: NeuronLayout {
                    columns: columns.expect("whole groups"),
                    rows: up.map(|up| (up, UP_COLS)),
                },
                up: up.map(|_| UpUse {
                    name: UP_NAMES[matrix].to_owned(),
                    matrix: NAMES.len() + matrix,
                }),
                predictor: None,
            }
        });
        let uses: Vec<_> = uses.collect();
        let path = folder.path().join("columns");
        columns::make(&files, &path, "content", &uses, &mut ()).expect("it is written");
        let columns = columns::open(&path, "content", &uses).expect("what was written");
        assert!(columns::open(&path, "other content", &uses).is_none());
        assert!(columns::open(&path, "content", &uses[..1]).is_some());
        let mut with_other_rows = uses.clone();
        with_other_rows[1].layout.rows = Some((DType::F32, UP_COLS + 1));
        assert!(columns::open(&path, "content", &with_other_rows).is_none());
        Self {
            uses,
            files,
            columns,
            predictors: None,
            _folder: folder,
        }
    }

    /// The same with predictors, each of a norm of its block's number.
    fn foretold(dtype: DType, says: Says) -> Self {
        let mut subject = Self::new(dtype);
        let mut header = gguf::Writer::new();
        for (name, cols) in NAMES.iter().zip(COLS) {
            for (part, dtype, shape) in [
                ("narrow", DType::F16, vec![PATTERNS, PATTERNS]),
                ("wide", DType::F16, vec![cols, PATTERNS]),
                ("bias", DType::F32, vec![cols]),
                ("margin", DType::F32, vec![1]),
            ] {
                let declared = header.tensor(&format!("{name}.{part}"), dtype, &shape);
                declared.expect("whole blocks");
            }
        }
        let path = subject._folder.path().join("predictors");
        let mut body = header.begin(Vec::new()).expect("room in memory");
        let halves = |values: &[f32]| -> Vec<u8> {
            let halves = values.iter().map(|value| half::f16::from_f32(*value));
            halves.flat_map(half::f16::to_le_bytes).collect()
        };
        let narrow: Vec<f32> = (0..PATTERNS * PATTERNS)
            .map(|at| f32::from(u8::from(at % (PATTERNS + 1) == 0)))
            .collect();
        for (block, cols) in COLS.into_iter().enumerate() {
            let wide: Vec<f32> = (0..cols * PATTERNS)
                .map(|at| says.of(block, at / PATTERNS, at % PATTERNS))
                .collect();
            let bias = vec![0u8; 4 * cols];
            for (part, bytes) in [
                ("narrow", halves(&narrow)),
                ("wide", halves(&wide)),
                ("bias", bias),
                ("margin", vec![0u8; 4]),
            ] {
                let name = format!("{}.{part}", NAMES[block]);
                body.tensor(&name, &bytes).expect("as declared");
            }
        }
        std::fs::write(&path, body.finish().expect("whole")).expect("room for it");
        subject.predictors = Some(ModelFiles::open(&path).expect("a valid file"));
        for (block, of) in subject.uses.iter_mut().enumerate() {
            of.predictor = Some(PredictorUse {
                norm: VectorId(block),
                width: PATTERNS,
                rank: PATTERNS,
            });
        }
        subject
    }

    fn neurons(&self, slots: usize, every: u64, fault: Fault) -> Neurons {
        let predictors = self.predictors.as_ref().map(ModelFiles::tensors);
        let tensors = [&self.columns].into_iter().chain(predictors);
        let files = Files::open(tensors, Caching::Avoided);
        let files = files.expect("they open");
        let counters = Arc::new(Counters::default());
        let threads = ReadThreads::new().expect("threads");
        let device = FaultyDevice::new(Box::new(threads), every, fault);
        let reader = FileReader::with(Box::new(ReadThreads::new().expect("threads")));
        let neurons = Neurons::new(
            &files,
            reader,
            (&self.columns, predictors),
            &self.uses,
            counters,
        );
        let mut neurons = neurons.expect("they are there");
        neurons.reader = FileReader::with(Box::new(device));
        place(&mut neurons, slots);
        neurons
    }

    fn matrix(&self, matrix: usize) -> lacuna_files::Tensor {
        let tensor = self.files.tensors().require(NAMES[matrix]);
        tensor.expect("it was written")
    }

    fn whole(&self, cpu: &Cpu, matrix: usize, x: &[f32]) -> Vec<f32> {
        let tensor = self.matrix(matrix);
        let (cols, tokens) = (COLS[matrix], x.len() / COLS[matrix]);
        let w = Matrix::new(tensor.dtype(), ROWS, cols, tensor.bytes()).expect("its shape");
        let bytes = Activations::storage_bytes(tokens, cols).unwrap_or(0);
        let mut storage = vec![0u64; bytes.div_ceil(8)];
        let mut out = vec![0.0; tokens * ROWS];
        let x = cpu.activations(x, tokens, cols, bytemuck::cast_slice_mut(&mut storage));
        cpu.matmul(&mut out, &x, &w);
        out
    }
}

fn write(dtype: DType, up: Option<DType>, path: &Path) {
    let downs = NAMES.into_iter().zip(COLS);
    let downs = downs.map(|(name, cols)| (name, dtype, [ROWS, cols]));
    let ups = UP_NAMES.into_iter().zip(COLS);
    let ups = ups.filter_map(|(name, neurons)| Some((name, up?, [neurons, UP_COLS])));
    let tensors: Vec<_> = downs.chain(ups).collect();
    let mut header = gguf::Writer::new();
    for (name, dtype, shape) in &tensors {
        header.tensor(name, *dtype, shape).expect("whole blocks");
    }
    let mut body = header.begin(Vec::new()).expect("room in memory");
    for (name, dtype, [rows, cols]) in tensors {
        let bytes = rows * dtype.row_bytes(cols).expect("whole blocks");
        // Below every exponent of all ones, and no two columns alike.
        let bytes: Vec<u8> = (0..bytes)
            .map(|at| (at * 31 + at / 255) as u8 & 0x3B)
            .collect();
        body.tensor(name, &bytes).expect("as declared");
    }
    std::fs::write(path, body.finish().expect("whole")).expect("room for it");
}

fn place(neurons: &mut Neurons, slots: usize) {
    let more = neurons.room_for(slots).expect("address space");
    neurons.resize(more);
}

fn product(
    neurons: &mut Neurons,
    cpu: &Cpu,
    matrix: usize,
    x: &[f32],
) -> Result<Vec<f32>, ForwardError> {
    let mut out = vec![f32::NAN; x.len() / COLS[matrix] * ROWS];
    neurons.begin(MatrixId(matrix), x);
    while let Some(lent) = neurons.next()? {
        let columns = neurons.lent().columns(lent.range);
        cpu.matmul_columns(&mut out, x, &columns);
    }
    Ok(out)
}

/// Activations of which about one in `every` is not zero.
fn sparse(matrix: usize, tokens: usize, every: usize, seed: usize) -> Vec<f32> {
    let number = |at: usize| (at * 2_654_435_761 + seed * 40_503) >> 7;
    let value = |at| match number(at) % every {
        0 => (number(at + 7) % 1000) as f32 / 500.0 - 0.9,
        _ => 0.0,
    };
    (0..tokens * COLS[matrix]).map(value).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn neurons_that_tokens_needed_shortly_before_are_not_read_again() {
    let subject = Subject::new(DType::F16);
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let mut neurons = subject.neurons(100, 1, Fault::Delay);
    let mut x = vec![0.0; COLS[0]];
    x[3] = 1.0;
    x[700] = -2.0;
    x[1599] = 0.5;
    product(&mut neurons, &cpu, 0, &x).expect("it is read");
    let first = neurons.counters.now();
    assert_eq!((first.all, first.needed, first.found), (1600, 3, 0));
    assert_eq!(first.read_bytes, 3 * 4096, "a page each");
    x[4] = 1.0;
    product(&mut neurons, &cpu, 0, &x).expect("it is read");
    let second = neurons.counters.now().since(first);
    assert_eq!(
        (second.needed, second.found, second.read_bytes),
        (4, 3, 4096)
    );
    assert_eq!(second.hit_rate(), Some(0.75));
    // Fewer slots than a pass takes: those that are there are found again, and no more.
    place(&mut neurons, 2);
    for _ in 0..2 {
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
    }
    let before = neurons.counters.now();
    product(&mut neurons, &cpu, 0, &x).expect("it is read");
    assert_eq!(neurons.counters.now().since(before).found, 2);
}

#[test]
fn rows_beside_columns_are_those_of_the_same_neurons() {
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    for (down, up) in [
        (DType::F16, DType::F16),
        (DType::Q8_0, DType::Q4_0),
        (DType::F32, DType::Q8_0),
    ] {
        let subject = Subject::of(down, Some(up));
        for slots in [0, 5, 2000] {
            let mut neurons = subject.neurons(slots, 3, Fault::Shorten);
            assert!(neurons.has_rows(MatrixId(0)) && !neurons.has_rows(MatrixId(2)));
            for (matrix, every) in [(0, 3), (1, 2), (0, 3), (0, 1)] {
                let x = sparse(matrix, 1, every, 5);
                let tensor = subject.files.tensors().require(UP_NAMES[matrix]);
                let tensor = tensor.expect("it was written");
                let row_bytes = up.row_bytes(UP_COLS).expect("whole blocks");
                let mut out = vec![f32::NAN; ROWS];
                let mut found = Vec::new();
                neurons.begin(MatrixId(matrix), &x);
                while let Some(lent) = neurons.next().expect("it is read") {
                    neurons.each_rows(|numbers, rows| {
                        assert_eq!((rows.dtype(), rows.cols()), (up, UP_COLS));
                        assert_eq!(rows.rows(), numbers.len());
                        for (at, number) in numbers.iter().enumerate() {
                            let expected = &tensor.bytes()[*number as usize * row_bytes..];
                            assert_eq!(rows.row(at), &expected[..row_bytes]);
                        }
                        found.extend_from_slice(numbers);
                    });
                    let columns = neurons.lent().columns(lent.range);
                    cpu.matmul_columns(&mut out, &x, &columns);
                }
                let needed = (0u32..).zip(&x).filter(|(_, x)| **x != 0.0);
                assert!(needed.map(|(number, _)| number).eq(found));
                assert_eq!(bits(&out), bits(&subject.whole(&cpu, matrix, &x)));
            }
        }
    }
}

#[test]
fn a_neuron_that_cannot_be_read_is_an_error_of_its_pass_alone() {
    let subject = Subject::new(DType::Q8_0);
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let x = sparse(0, 2, 9, 1);
    let expected = bits(&subject.whole(&cpu, 0, &x));
    let mut neurons = subject.neurons(64, 40, Fault::Fail);
    let mut failed = 0;
    for _ in 0..12 {
        neurons.settle();
        match product(&mut neurons, &cpu, 0, &x) {
            Ok(found) => assert_eq!(bits(&found), expected),
            Err(error) => {
                failed += 1;
                let text = error.to_string();
                assert!(text.contains("a.weight") && text.contains("the disk is broken"));
            }
        }
    }
    assert!(failed > 0 && failed < 12, "{failed} passes failed");
}

#[test]
fn what_is_foretold_is_read_before_and_counted() {
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let x = sparse(0, 1, EVERY, 2);
    let needed = x.iter().filter(|x| **x != 0.0).count() as u64;
    let expected = {
        let subject = Subject::new(DType::F16);
        let mut neurons = subject.neurons(0, 1, Fault::Delay);
        let found = product(&mut neurons, &cpu, 0, &x).expect("it is read");
        assert_eq!(bits(&found), bits(&subject.whole(&cpu, 0, &x)));
        (bits(&found), neurons.counters.now())
    };
    assert_eq!(expected.1.recall(), None);
    for says in Says::EACH {
        let subject = Subject::foretold(DType::F16, says);
        let mut neurons = subject.neurons(0, 1, Fault::Delay);
        assert!(neurons.predicts(VectorId(0), 8) && !neurons.predicts(VectorId(0), 9));
        assert!(!neurons.predicts(VectorId(2), 1));
        neurons.expect(&cpu, VectorId(0), &normed(&[2]));
        let asked = neurons.counters.now().read_bytes;
        let found = product(&mut neurons, &cpu, 0, &x).expect("it is read");
        assert_eq!(bits(&found), expected.0, "{says:?}");
        let now = neurons.counters.now();
        assert_eq!((now.needed, now.predicted_needed), (needed, needed));
        assert_eq!((now.all, now.found), (1600, 0));
        match says {
            Says::Truth => {
                assert_eq!((now.predicted, now.predicted_right), (needed, needed));
                assert_eq!((now.ahead, now.ahead_needed), (needed, needed));
                assert_eq!((now.wasted_bytes, now.read_bytes), (0, asked));
                assert_eq!((now.recall(), now.precision()), (Some(1.0), Some(1.0)));
                assert_eq!(now.read_bytes, expected.1.read_bytes);
            }
            Says::Nothing => {
                assert_eq!((now.predicted, now.predicted_right, asked), (0, 0, 0));
                assert_eq!((now.wasted_bytes, now.recall()), (0, Some(0.0)));
                assert_eq!(now.read_bytes, expected.1.read_bytes);
            }
            Says::All => {
                assert_eq!((now.predicted, now.predicted_right), (1600, needed));
                assert_eq!(now.recall(), Some(1.0));
            }
            Says::Anything => {
                let recall = now.recall().expect("something was foretold");
                assert!(recall > 0.0 && recall < 1.0 && now.precision() < Some(1.0));
            }
        }
        // Nothing of it is needed.
        neurons.expect(&cpu, VectorId(0), &normed(&[2]));
        product(&mut neurons, &cpu, 0, &vec![0.0; COLS[0]]).expect("nothing is read");
        let in_vain = neurons.counters.now().since(now);
        assert_eq!(in_vain.wasted_bytes, in_vain.read_bytes);
        assert_eq!(in_vain.read_bytes > 0, says != Says::Nothing);
        let now = neurons.counters.now();
        // What was foretold of a pass is nothing to the next.
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
        let again = neurons.counters.now().since(now);
        assert_eq!((again.predicted, again.predicted_needed), (0, 0));
        assert_eq!(again.read_bytes, expected.1.read_bytes);
    }
}

#[test]
fn what_turns_out_not_to_be_needed_is_asked_for_less_and_less() {
    let subject = Subject::foretold(DType::F16, Says::All);
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let mut neurons = subject.neurons(0, 1, Fault::Delay);
    let mut asked = Vec::new();
    for _ in 0..4 {
        let before = neurons.counters.now();
        neurons.expect(&cpu, VectorId(0), &normed(&[0]));
        product(&mut neurons, &cpu, 0, &sparse(0, 1, 400, 0)).expect("it is read");
        let now = neurons.counters.now().since(before);
        assert_eq!(now.predicted, 1600);
        asked.push(now.ahead);
    }
    // All have a score of 1, which is too little in the end.
    assert_eq!(asked[0], AHEAD_NEURONS as u64);
    assert_eq!(asked[3], 0, "{asked:?}");
}

#[test]
fn what_has_a_slot_is_not_read_ahead_and_what_was_foretold_gets_one() {
    let subject = Subject::foretold(DType::F16, Says::Truth);
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let mut neurons = subject.neurons(COLS[0], 1, Fault::Delay);
    let x = sparse(0, 1, EVERY, 5);
    for pass in 0..2 {
        let before = neurons.counters.now();
        neurons.expect(&cpu, VectorId(0), &normed(&[5]));
        product(&mut neurons, &cpu, 0, &x).expect("it is read");
        let of = neurons.counters.now().since(before);
        assert_eq!(of.predicted_right, of.needed);
        assert_eq!(of.found, pass * of.needed);
        assert_eq!(of.read_bytes == 0, pass == 1);
    }
}

#[test]
fn a_read_ahead_of_time_that_fails_is_made_again_when_it_is_needed() {
    let cpu = Cpu::new(CpuConfig::default()).expect("threads");
    let subject = Subject::foretold(DType::F16, Says::All);
    let mut neurons = subject.neurons(0, 1, Fault::Delay);
    let threads = Box::new(ReadThreads::new().expect("threads"));
    neurons.reader = FileReader::with(Box::new(FaultyDevice::new(threads, 2, Fault::Fail)));
    // Those that are asked for are read with one call.
    let mut x = vec![0.0; COLS[0]];
    for column in [10, 50, 100] {
        x[column] = 1.5;
    }
    let expected = bits(&subject.whole(&cpu, 0, &x));
    let mut read = Vec::new();
    for _ in 0..3 {
        let before = neurons.counters.now();
        neurons.expect(&cpu, VectorId(0), &normed(&[0]));
        let found = product(&mut neurons, &cpu, 0, &x).expect("it is read in the end");
        assert_eq!(bits(&found), expected);
        let reads = neurons.counters.now().since(before);
        assert_eq!((reads.ahead, reads.ahead_needed), (128, 3));
        read.push(reads.read_bytes);
    }
    // The second read fails, and of what remains the second.
    assert_eq!(read, [read[0], 2 * read[0], 2 * read[0]]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever is foretold, of whichever block and whenever, a product is that with the whole matrix.
    #[test]
    fn products_do_not_depend_on_what_is_foretold(
        passes in prop::collection::vec(
            (0usize..2, prop::collection::vec(0usize..PATTERNS, 1..9), 0usize..4, any::<bool>()),
            1..8,
        ),
        slots in 0usize..1700,
        which in 0usize..3,
        says in 0usize..4,
        of in 0usize..3,
    ) {
        let types = [DType::F32, DType::F16, DType::Q4_0];
        let subject = Subject::foretold(types[of], Says::EACH[says]);
        let fault = [Fault::Shorten, Fault::Delay, Fault::Reorder][which];
        let cpu = Cpu::new(CpuConfig::default()).expect("threads");
        let mut neurons = subject.neurons(slots, 2, fault);
        for (matrix, patterns, expected, settles) in passes {
            if settles {
                neurons.settle();
            }
            // Of this block, of the other, of both, or of none.
            if expected & 1 == 1 {
                neurons.expect(&cpu, VectorId(1 - matrix), &normed(&patterns));
            }
            if expected & 2 == 2 {
                neurons.expect(&cpu, VectorId(matrix), &normed(&patterns));
            }
            let rows = patterns.iter();
            let x: Vec<f32> = rows.flat_map(|at| sparse(matrix, 1, EVERY, *at)).collect();
            let found = product(&mut neurons, &cpu, matrix, &x).expect("whole reads");
            prop_assert_eq!(bits(&found), bits(&subject.whole(&cpu, matrix, &x)));
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Whatever is in memory, and in whatever order reads end, a product is that with the whole matrix.
    #[test]
    fn products_are_those_of_the_whole_matrix(
        passes in prop::collection::vec((0usize..2, 1usize..20, 1usize..60, 0usize..1000), 1..6),
        slots in 0usize..1700,
        other in 0usize..1700,
        which in 0usize..3,
        of in 0usize..5,
    ) {
        let types = [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4_0];
        let subject = Subject::new(types[of]);
        let fault = [Fault::Shorten, Fault::Delay, Fault::Reorder][which];
        let cpu = Cpu::new(CpuConfig::default()).expect("threads");
        let mut neurons = subject.neurons(slots, 2, fault);
        for (index, (matrix, tokens, every, seed)) in passes.into_iter().enumerate() {
            if index == 2 {
                place(&mut neurons, other);
            }
            let x = sparse(matrix, tokens, every, seed);
            let found = product(&mut neurons, &cpu, matrix, &x);
            let found = found.expect("whole reads");
            prop_assert_eq!(bits(&found), bits(&subject.whole(&cpu, matrix, &x)));
        }
    }
}
