//! The weights of a program: each tensor looked up in a file, checked, and used in place.
//!
//! A [`Linear`] keeps a handle on the mapped file, or on memory that was read from it (`fetch.rs`), and computes
//! from its bytes; matrices that files are read for, once or in each pass, are lent by `stream.rs`, those of a mixture's
//! experts by `experts.rs`, columns of those whose activations are mostly zero by `neurons.rs`. Only vectors (norms,
//! biases), a few kilobytes a layer, are copied out as `f32`, and what `latent.rs` says is made anew.

mod columns;
mod experts;
mod fetch;
mod latent;
mod lookup;
mod neurons;
mod rows;
mod shares;
mod source;
mod stream;
mod uses;

use std::ops::Range;
use std::sync::MutexGuard;

use lacuna_kernels::{Activation, Activations, Cpu, Expert, Matrix};

use crate::error::LoadError;
use crate::families::Description;
use crate::plan::{Residency, WeightPlan};
use crate::program::{ExpertsId, MatrixId, Program, TensorSpec, VectorId};
use crate::spec::{HeadSpec, LongRope, Rope, RopeScaling};
pub(crate) use columns::content_name;
pub use columns::with_columns;
pub use experts::ExpertCounts;
use fetch::Fetch;
pub use fetch::MakeDevice;
use lacuna_files::{ModelFiles, Progress, Tensor, Tensors};
pub(crate) use latent::{Derived, derived};
pub use neurons::NeuronReads;
pub use rows::RowReads;
pub(crate) use shares::active_bytes;
use shares::looked_up;
use source::Source;
pub(crate) use source::{Names, is_of_images, is_outside, name_in};
pub(crate) use stream::{Stream, Streams};
pub(crate) use uses::{expert_uses, uses};

/// What a program computes with.
#[derive(Debug)]
pub(crate) struct Weights {
    /// In the order of [`Program::tensors`].
    tensors: Vec<Weight>,
    /// In the order of [`crate::spec::ModelSpec::ropes`].
    rotations: Vec<Rotation>,
    /// The matrices that files are read for; `None` where all are mapped.
    streams: Option<Streams>,
}

/// How weights come into memory when a model is loaded.
pub struct Loading<'a> {
    /// Which are to be there, and how they are read.
    pub residency: Residency,
    /// What reads, in place of the best device there is.
    pub device: Option<MakeDevice<'a>>,
    /// Is told how much has been read.
    pub progress: &'a mut dyn Progress,
}

impl<'a> Loading<'a> {
    /// None of them: files are mapped.
    pub fn mapped(progress: &'a mut dyn Progress) -> Self {
        Self {
            residency: Residency::mapped(),
            device: None,
            progress,
        }
    }
}

/// Files that lie beside a model's own, which were made of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside<'a> {
    /// Columns of matrices.
    columns: Option<&'a Tensors>,
    /// What says beforehand which of them are needed.
    predictors: Option<&'a Tensors>,
}

impl<'a> Beside<'a> {
    pub(crate) fn of(files: &'a ModelFiles) -> Self {
        Self {
            columns: files.columns(),
            predictors: files.predictors(),
        }
    }
}

#[derive(Debug)]
enum Weight {
    Matrix(Linear),
    /// One for each expert.
    Experts(Vec<Linear>),
    Vector(Vec<f32>),
}

impl Weight {
    /// Of matrices that are gone through whole: of tables that are looked up in, a huge page would be read
    /// for the sake of a row.
    fn prefer_huge_pages(&self) {
        match self {
            Self::Matrix(matrix) => matrix.tensor.prefer_huge_pages(),
            // One tensor has all experts of a layer, or each has its own.
            Self::Experts(experts) => {
                let own = experts.iter().filter(|expert| expert.start == 0);
                own.for_each(|expert| expert.tensor.prefer_huge_pages());
            }
            Self::Vector(_) => {}
        }
    }
}

/// Frequencies of a rotary embedding.
#[derive(Debug)]
pub(crate) struct Rotation {
    /// Radians per token of each pair.
    inverse_frequencies: Vec<f32>,
    /// The same in contexts of more tokens than this.
    beyond: Option<(usize, Vec<f32>)>,
    /// What rotated vectors are multiplied by.
    attention_factor: f32,
    /// Which number of a position turns each pair.
    of_pair: Vec<u8>,
}

impl Rotation {
    /// Radians per token of each pair in contexts of up to `context_tokens` tokens. It is the context
    /// that a model runs with which decides, not how much of it is used: rows that were rotated one
    /// way cannot be mixed with rows rotated the other.
    fn inverse_frequencies(&self, context_tokens: usize) -> &[f32] {
        match &self.beyond {
            Some((original, long)) if context_tokens > *original => long,
            _ => &self.inverse_frequencies,
        }
    }

    /// Writes cosines, then sines, for each of `positions` of `axes` numbers, in contexts of `context_tokens`.
    pub(crate) fn table(
        &self,
        cpu: &Cpu,
        context_tokens: usize,
        (positions, axes): (&[u32], usize),
        out: &mut [f32],
    ) {
        let frequencies = self.inverse_frequencies(context_tokens);
        let factor = self.attention_factor;
        match axes {
            1 => cpu.rope_table(out, positions, frequencies, factor),
            _ => {
                let positions = (positions, axes);
                cpu.rope_table_of_axes(out, positions, &self.of_pair, frequencies, factor);
            }
        }
    }
}

impl Weights {
    /// Looks up all tensors of `program`, and refuses a file that has others. Matrices that `plan` leaves to their columns
    /// are had from the files beside.
    ///
    /// # Errors
    /// [`LoadError`], naming the tensor.
    pub(crate) fn load(
        tensors: &Tensors,
        beside: Beside<'_>,
        description: &Description,
        program: &Program,
        plan: &WeightPlan,
        loading: Loading<'_>,
    ) -> Result<Self, LoadError> {
        let Loading {
            residency,
            device,
            progress,
        } = loading;
        if !residency.is_mapped() {
            progress.begin("weights", Some(residency.pinned_bytes));
        }
        let (weights, rotations, files) = {
            let fetch = Fetch::new(
                [Some(tensors), beside.columns, beside.predictors],
                residency.source,
                plan,
                device,
                &mut *progress,
            )?;
            let mut source = Source::new(tensors, description, program, fetch);
            let mut weights = Vec::new();
            let rotations = source.look_up(description, program, |weight| weights.push(weight))?;
            (weights, rotations, source.fetch.finish())
        };
        let streams = files.map(|files| {
            let streams = Streams::new(&files, beside, &weights, plan, device)?;
            streams.place(&residency, progress)?;
            progress.finish();
            Ok::<_, LoadError>(streams)
        });
        let mut weights = Self {
            streams: streams.transpose()?,
            tensors: weights,
            rotations,
        };
        if residency.is_mapped() {
            for (_, tensor) in program.multiplied() {
                weights.tensors[tensor].prefer_huge_pages();
            }
        }
        // Others are where `streams` has them.
        let tables = looked_up(program).into_iter();
        for MatrixId(table) in tables.filter(|_| residency.is_mapped()) {
            if let Weight::Matrix(table) = &mut weights.tensors[table] {
                table.read_rows();
            }
        }
        Ok(weights)
    }

    /// Whether all tensors of `program` are there and no others, as for [`load`](Self::load): one after another, so that of
    /// those that are converted no more than one is in memory.
    ///
    /// # Errors
    /// [`LoadError`], naming the tensor.
    pub(crate) fn check(
        tensors: &Tensors,
        description: &Description,
        program: &Program,
    ) -> Result<(), LoadError> {
        let mut source = Source::new(tensors, description, program, Fetch::Mapped);
        source.look_up(description, program, |weight| {
            drop(weight);
            tensors.release_sources();
        })?;
        Ok(())
    }

    /// The matrices that files are read for.
    pub(crate) fn streams(&self) -> Option<&Streams> {
        self.streams.as_ref()
    }

    /// The same, for a pass that begins.
    pub(crate) fn stream(&self) -> Option<MutexGuard<'_, Stream>> {
        self.streams.as_ref().map(Streams::begin)
    }

    /// # Panics
    /// For a matrix of another program.
    pub(crate) fn matrix(&self, id: MatrixId) -> &Linear {
        match &self.tensors[id.0] {
            Weight::Matrix(matrix) => matrix,
            _ => unreachable!("a program says which of its tensors are matrices"),
        }
    }

    /// Whether a tensor that rows are multiplied with has weights that are whole numbers times a scale.
    pub(crate) fn is_quantized(&self, tensor: usize) -> bool {
        match &self.tensors[tensor] {
            Weight::Matrix(matrix) => matrix.is_quantized(),
            Weight::Experts(experts) => experts.iter().any(Linear::is_quantized),
            _ => false,
        }
    }

    /// # Panics
    /// For matrices of another program.
    pub(crate) fn experts(&self, id: ExpertsId) -> &[Linear] {
        match &self.tensors[id.0] {
            Weight::Experts(experts) => experts,
            _ => unreachable!("a program says which of its tensors are of experts"),
        }
    }

    /// # Panics
    /// For a vector of another program.
    pub(crate) fn vector(&self, id: VectorId) -> &[f32] {
        match &self.tensors[id.0] {
            Weight::Vector(vector) => vector,
            _ => unreachable!("a program says which of its tensors are vectors"),
        }
    }

    /// # Panics
    /// For a rotary embedding that the model has not.
    pub(crate) fn rotation(&self, rope: usize) -> &Rotation {
        &self.rotations[rope]
    }
}

impl Source<'_> {
    /// Gives each of `program`'s tensors to `take`, in their order, and refuses a file that has others.
    fn look_up(
        &mut self,
        description: &Description,
        program: &Program,
        mut take: impl FnMut(Weight),
    ) -> Result<Vec<Rotation>, LoadError> {
        for (number, tensor) in program.tensors().iter().enumerate() {
            take(match tensor {
                TensorSpec::Matrix(matrix) => Weight::Matrix(self.matrix(number, matrix)?),
                TensorSpec::Experts(experts) => Weight::Experts(self.experts(number, experts)?),
                TensorSpec::Vector(vector) => Weight::Vector(self.vector(vector)?),
            });
        }
        let spec = &description.spec;
        let ropes = spec.ropes.iter().map(|rope| (rope, None));
        let of_head = spec.head.iter().flat_map(HeadSpec::ropes);
        let of_head = of_head.map(|rope| (rope, Some(spec.layers.len())));
        let rotations = ropes.chain(of_head).map(|rope| Rotation::load(rope, self));
        let rotations = rotations.collect::<Result<_, _>>()?;
        self.refuse_surplus(spec)?;
        Ok(rotations)
    }
}

impl Rotation {
    /// That of `rope`, which is a head's where it is of a layer: the number of the layer in files.
    fn load(
        (rope, layer): (&Rope, Option<usize>),
        source: &mut Source<'_>,
    ) -> Result<Self, LoadError> {
        let plain = rope.inverse_frequencies();
        let divided = |factors: &[f32]| -> Vec<f32> {
            let pairs = plain.iter().zip(factors);
            pairs
                .map(|(frequency, factor)| frequency / factor)
                .collect()
        };
        let (inverse_frequencies, beyond) = match &rope.scaling {
            RopeScaling::LongRope(long) => {
                let (short, factors) = Self::long_factors((long, layer), plain.len(), source)?;
                let long = (long.original_context, divided(&factors));
                (divided(&short), Some(long))
            }
            _ => match source.rope_factors((rope, layer), "rope_freqs", plain.len())? {
                Some(factors) => (divided(&factors), None),
                None => (plain, None),
            },
        };
        Ok(Self {
            inverse_frequencies,
            beyond,
            attention_factor: rope.attention_factor(),
            of_pair: rope.axes.of_pairs(rope.dimensions / 2),
        })
    }

    fn long_factors(
        (long, layer): (&LongRope, Option<usize>),
        pairs: usize,
        source: &mut Source<'_>,
    ) -> Result<(Vec<f32>, Vec<f32>), LoadError> {
        match &long.factors {
            Some(factors) => Ok((factors.short.clone(), factors.long.clone())),
            None => Ok((
                source.required_rope_factors(layer, "rope_factors_short", pairs)?,
                source.required_rope_factors(layer, "rope_factors_long", pairs)?,
            )),
        }
    }
}

/// Rows of a matrix in the file, with an optional bias.
#[derive(Debug)]
pub(crate) struct Linear {
    tensor: Tensor,
    /// Of the tensor's bytes, those before the first row.
    start: usize,
    rows: usize,
    columns: usize,
    bias: Option<Vec<f32>>,
    /// Whether rows are looked up in the file instead of the mapping.
    reads_rows: bool,
}

impl Linear {
    /// Rows of `tensor` from `first` on.
    fn new(
        tensor: Tensor,
        first: usize,
        rows: usize,
        columns: usize,
        bias: Option<Vec<f32>>,
    ) -> Result<Self, LoadError> {
        let row_bytes = tensor.dtype().row_bytes(columns).unwrap_or(0);
        let linear = Self {
            start: first * row_bytes,
            tensor,
            rows,
            columns,
            bias,
            reads_rows: false,
        };
        match linear.view() {
            Ok(_) => Ok(linear),
            Err(source) => Err(LoadError::Tensor {
                name: linear.tensor.name().to_owned(),
                source,
            }),
        }
    }

    fn view(&self) -> Result<Matrix<'_>, lacuna_kernels::ShapeError> {
        let bytes = self.tensor.bytes();
        let own = self.bytes();
        // A whole tensor's bytes go as they are, so that surplus bytes are found.
        let bytes = match (own.start, own.end < bytes.len()) {
            (0, false) => bytes,
            _ => bytes.get(own).unwrap_or_default(),
        };
        Matrix::new(self.tensor.dtype(), self.rows, self.columns, bytes)
    }

    /// Of the tensor's bytes, those of the rows.
    fn bytes(&self) -> Range<usize> {
        let length = self.rows.saturating_mul(self.row_bytes());
        self.start..self.start.saturating_add(length)
    }

    fn row_bytes(&self) -> usize {
        self.tensor.dtype().row_bytes(self.columns).unwrap_or(0)
    }

    /// The matrix as the kernels take it: `[rows, columns]` in the file's own bytes.
    pub(crate) fn matrix(&self) -> Matrix<'_> {
        self.view()
            .expect("the same bytes were accepted when the tensor was loaded")
    }

    /// The same, which is the program's matrix `id`, from where a stream has it, if it has.
    pub(crate) fn matrix_of<'a>(&'a self, id: MatrixId, stream: Option<&'a Stream>) -> Matrix<'a> {
        match stream.and_then(|stream| stream.bytes(id)) {
            None => self.matrix(),
            Some(bytes) => Matrix::new(self.tensor.dtype(), self.rows, self.columns, bytes)
                .expect("as many bytes were read as the matrix has"),
        }
    }

    /// One of the rows, in bytes that have been read from the file just now.
    pub(crate) fn row_in<'a>(&self, bytes: &'a [u8]) -> Matrix<'a> {
        Matrix::new(self.tensor.dtype(), 1, self.columns, bytes)
            .expect("as many bytes were read as a row has")
    }

    /// What its file calls it.
    pub(crate) fn name(&self) -> &str {
        self.tensor.name()
    }

    /// Elements of a row.
    pub(crate) fn columns(&self) -> usize {
        self.columns
    }

    /// Elements of a product.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// What is added to products with its rows.
    pub(crate) fn bias(&self) -> Option<&[f32]> {
        self.bias.as_deref()
    }

    /// The matrix and its bias, as kernels take those of an expert.
    pub(crate) fn expert(&self) -> Expert<'_> {
        Expert {
            matrix: self.matrix(),
            bias: self.bias.as_deref(),
        }
    }

    /// The same, in bytes that have been read from the file.
    pub(crate) fn expert_in<'a>(&'a self, bytes: &'a [u8]) -> Expert<'a> {
        let matrix = Matrix::new(self.tensor.dtype(), self.rows, self.columns, bytes);
        Expert {
            matrix: matrix.expect("as many bytes were read as the matrix has"),
            bias: self.bias.as_deref(),
        }
    }

    /// Whether a product takes quantized activations.
    pub(crate) fn is_quantized(&self) -> bool {
        self.tensor.dtype().is_quantized()
    }

    /// `out[t] = f(W x[t] + bias)` for every token and each of several matrices, in one operation.
    /// `matrices` are those of `linears`, wherever they are.
    pub(crate) fn apply_each<const N: usize>(
        linears: [&Self; N],
        matrices: [Matrix<'_>; N],
        cpu: &Cpu,
        outs: [&mut [f32]; N],
        input: &Activations<'_>,
        function: Option<Activation>,
    ) {
        let mut each = matrices.iter().zip(linears);
        let each = [(); N].map(|()| {
            let (matrix, linear) = each.next().expect("one for each");
            (matrix, linear.bias.as_deref())
        });
        cpu.linear_each(outs, input, each, function);
    }
}
