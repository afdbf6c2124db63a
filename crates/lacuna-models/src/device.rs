//! The forward pass elsewhere than on the processor: what a device has to do, and what it is given of a model.
//!
//! A device runs the same [`Program`](crate::program::Program) over rows of KV that lie in its own memory, or, where it has
//! no room for all layers, the part of it behind a [`Split`], which the processor has begun. Rows of the
//! embedding table and tables of rotations are made by the processor, bit for bit as in a pass of its own: the table stays
//! in the file, and angles are taken in 64 bits, which few devices have.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::sync::Arc;

use lacuna_kernels::{Cpu, DType, Matrix};
use lacuna_kv::{Geometry, KvCache, KvError, KvPolicy};
use lacuna_pages::DeviceError;
pub use lacuna_pages::device::KernelTime;

use crate::error::ForwardError;
use crate::executor::{self, Segment};
use crate::model::Model;
use crate::plan::ArenaPlan;
use crate::program::{ExpertsId, MatrixId, Split, VectorId};
use crate::scratch::{BatchLimits, OutOfMemory, Scratch};

/// Somewhere that models can be computed, with memory of its own.
pub trait ComputeDevice: fmt::Debug + Send + Sync {
    /// What its driver calls it.
    fn name(&self) -> &str;

    /// The same device, opened again: what one that was lost ([`DeviceError::Lost`]) held is gone.
    ///
    /// # Errors
    /// [`ExecutorError`] where it cannot be.
    fn reopened(&self) -> Result<Arc<dyn ComputeDevice>, ExecutorError>;

    /// Bytes of its memory that are free for weights, activations and KV rows, if it says so.
    fn free_bytes(&self) -> Option<u64> {
        None
    }

    /// Whether its memory is its own, as a card's is, and no part of what the processor has.
    fn has_own_memory(&self) -> bool {
        false
    }

    /// An empty KV cache in its memory. Rows of the layers that the processor computes ([`Geometry::host_layers`]) are in
    /// the processor's, under the same limit.
    ///
    /// # Errors
    /// [`ExecutorError`] for a policy or elements that it cannot compute over, and what the device refuses.
    fn kv_cache(&self, geometry: Geometry, policy: KvPolicy) -> Result<KvCache, ExecutorError>;

    /// What [`ComputeDevice::executor`] takes of memory, found without taking any.
    ///
    /// # Errors
    /// [`ExecutorError::Split`] where the model cannot be cut behind [`Geometry::host_layers`].
    fn memory_for(
        &self,
        model: &Arc<Model>,
        geometry: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<ExecutorMemory, ExecutorError>;

    /// Brings a model's weights to its memory, with activations as `plan` has them: those of the layers behind
    /// [`Geometry::host_layers`], and of the output. The processor computes the others in passes of the executor, from
    /// where their weights are mapped.
    ///
    /// # Errors
    /// [`ExecutorError`], naming what the device cannot do, before anything is brought there, and what it refuses then.
    fn executor(
        &self,
        model: Arc<Model>,
        geometry: &Geometry,
        plan: &ArenaPlan,
    ) -> Result<Box<dyn Executor>, ExecutorError>;

    /// Bytes that it reads and writes in a second where it copies its own memory: what kernels may read of it at best.
    /// Measured now, with 128 MiB of its memory: a millisecond of a GPU.
    ///
    /// # Errors
    /// What the device refuses.
    fn measure_copies(&self) -> Result<f64, ExecutorError>;
}

/// How many layers a device computes: the last ones, and the output with them. The processor computes those before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DeviceLayers {
    /// As many as there is memory for, all if there is for these.
    #[default]
    Fitting,
    /// So many, or all where there are fewer.
    Last(NonZeroUsize),
}

impl DeviceLayers {
    /// All of them, however many there are.
    pub const ALL: Self = Self::Last(NonZeroUsize::MAX);
}

/// A number of layers that is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` is no number of layers; use auto, all, or how many of the last layers the device computes, 1 at least"
)]
pub struct UnknownDeviceLayers(String);

impl FromStr for DeviceLayers {
    type Err = UnknownDeviceLayers;

    fn from_str(name: &str) -> Result<Self, UnknownDeviceLayers> {
        match name {
            "auto" => Ok(Self::Fitting),
            "all" => Ok(Self::ALL),
            count => {
                let count = count.parse().map(Self::Last);
                count.map_err(|_| UnknownDeviceLayers(name.to_owned()))
            }
        }
    }
}

/// A model in the memory of a device.
pub trait Executor: fmt::Debug + Send {
    /// What [`Model::forward`] computes, on sequences of the device's own KV cache. `cpu` looks up rows of tables.
    ///
    /// # Errors
    /// As [`Model::forward`], and [`ForwardError::Device`] when the device fails.
    fn forward(&mut self, cpu: &Cpu, segments: &mut [Segment<'_>]) -> Result<&[f32], ForwardError>;

    /// The same, of which the token of the largest logit of each row comes back in place of the row: a word, where a
    /// vocabulary is a megabyte.
    ///
    /// # Errors
    /// As [`Executor::forward`].
    fn likeliest(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
    ) -> Result<&[Likeliest], ForwardError>;

    /// The most tokens that [`Executor::top_k`] gives of a row.
    fn most_top_k(&self) -> usize;

    /// The same, of which `count` tokens of each row come back, those of the largest logits, `[rows, count]`: the largest
    /// first, of equal ones the first token. Where a logit is infinite or no number, the first of the row is the first of
    /// those, and its logit infinite: nothing is to be chosen from the row.
    ///
    /// # Panics
    /// For no tokens, or more than [`Executor::most_top_k`].
    ///
    /// # Errors
    /// As [`Executor::forward`].
    fn top_k(
        &mut self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        count: usize,
    ) -> Result<&[TokenLogit], ForwardError>;

    /// What passes have come to so far.
    fn counters(&self) -> ExecutorCounters;

    /// Where its bytes are, KV rows aside.
    fn memory(&self) -> ExecutorMemory;

    /// Has passes timed by the device's own clock, or no longer.
    ///
    /// # Errors
    /// Where the device has none.
    fn time_kernels(&mut self, timed: bool) -> Result<(), ExecutorError>;

    /// What the kernels of the last pass took, the longest first; nothing if it was not timed.
    ///
    /// # Errors
    /// [`DeviceError`] when the device fails.
    fn kernel_times(&self) -> Result<Vec<KernelTime>, ExecutorError>;
}

/// What a row of logits comes to where the likeliest token is always taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Likeliest {
    /// The token of the largest logit, the first of several.
    Token(u32),
    /// The first token whose logit is infinite or no number: nothing is to be chosen from the row.
    NotFinite(u32),
}

/// What the passes of an executor have come to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExecutorCounters {
    /// Passes that were computed.
    pub passes: u64,
    /// Submissions of them to the device.
    pub submissions: u64,
    /// Dispatches of kernels that were recorded for them: none of a pass that is as one before.
    pub recorded_dispatches: u64,
    /// Bytes that they have left for the processor.
    pub read_back_bytes: u64,
}

/// A token and its logit.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenLogit {
    /// The token.
    pub token: u32,
    /// Its logit.
    pub logit: f32,
}

/// Bytes that a model takes of a device's memory beside KV rows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ExecutorMemory {
    /// Weights.
    pub weight_bytes: u64,
    /// Activations.
    pub activation_bytes: u64,
    /// What is copied through between the device and the processor.
    pub staging_bytes: u64,
}

impl ExecutorMemory {
    /// All of it.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        self.weight_bytes + self.activation_bytes + self.staging_bytes
    }
}

/// Why a device does not run a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExecutorError {
    /// The model takes something that the device cannot do yet.
    #[error(
        "the device `{device}` cannot run this model yet: {what}, which it takes in {place}; run it on the processor"
    )]
    Operation {
        /// The device.
        device: String,
        /// What it cannot do.
        what: String,
        /// The step of the pass that takes it.
        place: String,
    },
    /// A matrix is stored in a way that the device cannot multiply with yet.
    #[error(
        "the device `{device}` cannot multiply with weights of type {dtype} yet, as `{tensor}` has them; run the model \
         on the processor, or quantize it to one of {known}"
    )]
    WeightType {
        /// The device.
        device: String,
        /// The first matrix that is so.
        tensor: String,
        /// Its type.
        dtype: DType,
        /// Types that it can multiply with.
        known: String,
    },
    /// KV memory is to be held in a way that the device cannot compute over.
    #[error(
        "the device `{device}` cannot hold KV memory so: {what}; use the policy `sparse` and f16, bf16, f32 or q8_0"
    )]
    Kv {
        /// The device.
        device: String,
        /// What it cannot do.
        what: String,
    },
    /// The device's memory does not hold what is to be there.
    #[error(
        "the device `{device}` has {free_bytes} bytes of memory left, and {layers} of the last layers take {needed_bytes} \
         there with the output, their activations and the first KV rows; run fewer layers on it, with smaller batches, or \
         a smaller model"
    )]
    Memory {
        /// The device.
        device: String,
        /// The layers that it was to compute.
        layers: usize,
        /// For weights, activations and the first KV rows.
        needed_bytes: u64,
        /// What there is.
        free_bytes: u64,
    },
    /// A layer before which a program cannot be cut.
    #[error(
        "the model cannot be cut in front of layer {layer}, of which a device would compute the rest; run all layers on \
         the device, or on the processor"
    )]
    Split {
        /// The layer.
        layer: usize,
    },
    /// Something was asked for that goes with the processor alone.
    #[error(
        "{what} cannot be had on the device `{device}` yet; leave it out, or run the model on the processor"
    )]
    Setting {
        /// The device.
        device: String,
        /// What was asked for.
        what: &'static str,
    },
    /// A pass takes more than the device shows its kernels at once.
    #[error(
        "the device `{device}` shows kernels {most} bytes at once, and {what} takes {needed}; use smaller batches or a \
         shorter context"
    )]
    Window {
        /// The device.
        device: String,
        /// What is too long.
        what: &'static str,
        /// What it takes.
        needed: u64,
        /// What there is.
        most: u64,
    },
    /// The device computes wrong numbers.
    #[error(
        "the device `{device}` computed {what} wrong when it was opened ({found} instead of {wanted}); update its driver, \
         or run the model on the processor"
    )]
    Faulty {
        /// The device.
        device: String,
        /// What was computed.
        what: &'static str,
        /// What came out.
        found: f32,
        /// What should have.
        wanted: f32,
    },
    /// There is no such device here.
    #[error(
        "there is no device to compute on: {reason}; install a driver for one, or run the model on the processor"
    )]
    Unavailable {
        /// What is missing.
        reason: String,
    },
    /// The device refuses.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Activations of what the processor computes could not be had.
    #[error(transparent)]
    Activations(#[from] OutOfMemory),
    /// KV memory could not be had.
    #[error(transparent)]
    KvMemory(#[from] KvError),
    /// A file of the weights was lost before they were read.
    #[error(transparent)]
    Lost(#[from] lacuna_files::LostFile),
}

/// A matrix of a program, where it is.
#[derive(Clone, Copy)]
pub struct MatrixWeights<'a> {
    /// What its file calls it.
    pub name: &'a str,
    /// `[rows, columns]`, in the file's own bytes.
    pub matrix: Matrix<'a>,
    /// What is added to products with its rows.
    pub bias: Option<&'a [f32]>,
}

/// What a pass over segments comes to, once they have been checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PassSize {
    /// Tokens of all segments.
    pub tokens: usize,
    /// Rows of logits that they ask for.
    pub logit_rows: usize,
}

/// What executors are given.
impl Model {
    /// A matrix of its program.
    ///
    /// # Panics
    /// For one of another program, or that is not mapped ([`Model::is_mapped`]).
    #[must_use]
    pub fn matrix(&self, id: MatrixId) -> MatrixWeights<'_> {
        assert!(self.is_mapped(), "weights that are read are lent to passes");
        let linear = self.weights().matrix(id);
        MatrixWeights {
            name: linear.name(),
            matrix: linear.matrix(),
            bias: linear.bias(),
        }
    }

    /// The matrices of a layer's experts, one after the other, all of one shape.
    ///
    /// # Panics
    /// As [`Model::matrix`].
    pub fn experts(&self, id: ExpertsId) -> impl ExactSizeIterator<Item = MatrixWeights<'_>> {
        assert!(self.is_mapped(), "weights that are read are lent to passes");
        let experts = self.weights().experts(id).iter();
        experts.map(|linear| MatrixWeights {
            name: linear.name(),
            matrix: linear.matrix(),
            bias: linear.bias(),
        })
    }

    /// Elements of a row of a table.
    ///
    /// # Panics
    /// For one of another program.
    #[must_use]
    pub fn columns(&self, table: MatrixId) -> usize {
        self.weights().matrix(table).columns()
    }

    /// A vector of its program.
    ///
    /// # Panics
    /// For one of another program.
    #[must_use]
    pub fn vector(&self, id: VectorId) -> &[f32] {
        self.weights().vector(id)
    }

    /// Whether all weights are used where their files are mapped.
    #[must_use]
    pub fn is_mapped(&self) -> bool {
        self.weights().streams().is_none()
    }

    /// Writes a row of the table for each token to `out`, `[tokens, columns]`; tokens beyond the table have the first.
    ///
    /// # Panics
    /// When `out` has another size.
    pub fn look_up(&self, cpu: &Cpu, table: MatrixId, tokens: &[u32], out: &mut [f32]) {
        let linear = self.weights().matrix(table);
        linear.look_up_known(&linear.matrix(), cpu, out, tokens);
    }

    /// Appends the positions of a segment's tokens to `positions`: so many numbers each as rotary embeddings turn by, from
    /// `first` on where it is one.
    pub fn positions(&self, segment: &Segment<'_>, first: usize, positions: &mut Vec<u32>) {
        let axes = self.spec().position_axes();
        let (start, tokens) = (positions.len(), segment.tokens.len());
        positions.resize(start + tokens * axes, 0);
        segment.positions(axes, first, &mut positions[start..]);
    }

    /// Writes cosines, then sines, of a rotary embedding to `out` for each of `positions`, in contexts of
    /// `context_tokens`.
    ///
    /// # Panics
    /// When there is no such embedding, or `out` has another size.
    pub fn rotations(
        &self,
        cpu: &Cpu,
        (rope, context_tokens): (usize, usize),
        positions: &[u32],
        out: &mut [f32],
    ) {
        let rotation = self.weights().rotation(rope);
        let positions = (positions, self.spec().position_axes());
        rotation.table(cpu, context_tokens, positions, out);
    }

    /// Computes the steps of a pass before `split` on the processor. What the others take of them is in `scratch` then
    /// ([`Scratch::rows`]), and rows of these layers are stored in sequences.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn begin(
        &self,
        cpu: &Cpu,
        segments: &mut [Segment<'_>],
        scratch: &mut Scratch,
        split: &Split,
    ) -> Result<(), ForwardError> {
        let mut pass = self.pass(cpu, segments, scratch)?;
        let program = self.program();
        let computed = pass.run_steps(program, program.steps_before(split));
        // First, because whatever a lost file's zeros led to is no news.
        self.files().check()?;
        computed
    }

    /// Whether `segments` can be computed in a pass of at most `limits`.
    ///
    /// # Errors
    /// [`ForwardError`], saying what is wrong with them.
    pub fn check_segments(
        &self,
        segments: &[Segment<'_>],
        limits: BatchLimits,
    ) -> Result<PassSize, ForwardError> {
        if self.spec().pooled().is_some() {
            return Err(ForwardError::NoLogits);
        }
        let size = executor::check(segments, limits, self.spec())?;
        Ok(PassSize {
            tokens: size.tokens,
            logit_rows: size.logit_rows,
        })
    }
}
