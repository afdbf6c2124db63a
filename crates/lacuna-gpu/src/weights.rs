//! Weights in device memory: planned, then brought there once.
//!
//! Matrices keep the bits of their file, in the order in which kernels read them. They lie in a few large pieces, because
//! devices make few allocations; norms lie in one of their own, as f32.

use std::collections::HashMap;

use lacuna_kernels::{DType, Matrix};
use lacuna_kv::{Geometry, Side};
use lacuna_models::program::{ExpertsId, Factor, MatrixId, Op, VectorId};
use lacuna_models::{ExecutorError, MatrixWeights, Model};
use lacuna_pages::vulkan::{DeviceMemory, VulkanQueue};
use lacuna_pages::{ByteLength, DeviceError};

use crate::arranged;
use crate::kernels::{VECTOR_BYTES, Wanted};
use crate::part::Part;

/// Pieces are about so long: few enough for any device, and not much more than is needed.
const PIECE_BYTES: u64 = 256 << 20;

/// Rows are put in order and brought to the device in parts of about so many bytes: as many as are staged at once.
const PART_BYTES: usize = 4 << 20;

/// Matrices begin at multiples of this: the strictest alignment of windows that Vulkan allows a device to ask for.
const ALIGNMENT: u64 = 256;

/// What lies together: a matrix, or those of a layer's experts, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Together {
    One(MatrixId),
    Experts(ExpertsId),
}

impl Together {
    /// Calls `each` for every matrix, in order.
    fn each<E>(
        self,
        model: &Model,
        mut each: impl FnMut(usize, MatrixWeights<'_>) -> Result<(), E>,
    ) -> Result<(), E> {
        match self {
            Self::One(id) => each(0, model.matrix(id)),
            Self::Experts(id) => {
                let mut experts = model.experts(id).enumerate();
                experts.try_for_each(|(number, weights)| each(number, weights))
            }
        }
    }
}

/// Where a matrix lies, or those of experts, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) dtype: DType,
    /// How many matrices there are, of so many rows each.
    pub(crate) experts: usize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) row_bytes: usize,
    /// Which piece, and the first byte in it.
    pub(crate) piece: usize,
    pub(crate) offset: u64,
    /// Whether each row ends with what is added to products with it.
    pub(crate) has_bias: bool,
}

impl Placed {
    pub(crate) fn bytes(&self) -> u64 {
        self.experts as u64 * self.matrix_bytes()
    }

    /// Those of one matrix.
    pub(crate) fn matrix_bytes(&self) -> u64 {
        (self.rows * self.row_bytes) as u64
    }
}

/// Where everything will lie.
#[derive(Debug, Default, PartialEq, Eq)]
struct Layout {
    /// Bytes of each piece.
    pieces: Vec<u64>,
    matrices: HashMap<Together, Placed>,
    vectors: HashMap<VectorId, u32>,
    /// Elements of all vectors.
    elements: usize,
}

impl Layout {
    fn of(part: &Part) -> Self {
        let mut layout = Self::default();
        let model = &part.model;
        for op in part.ops() {
            match op {
                Op::Product { outputs, .. } => {
                    for (id, _) in outputs {
                        let weights = model.matrix(*id);
                        let has_bias = weights.bias.is_some();
                        layout.add_matrices(Together::One(*id), (1, weights.matrix), has_bias);
                    }
                }
                Op::ExpertProduct { outputs, .. } => {
                    for (id, _) in outputs {
                        let count = model.experts(*id).len();
                        let has_bias = model.experts(*id).any(|expert| expert.bias.is_some());
                        if let Some(first) = model.experts(*id).next() {
                            let matrices = (count, first.matrix);
                            layout.add_matrices(Together::Experts(*id), matrices, has_bias);
                        }
                    }
                }
                _ => vectors(op).for_each(|id| layout.add_vector(model, id)),
            }
        }
        layout
    }

    /// Room for so many matrices like the first.
    fn add_matrices(
        &mut self,
        id: Together,
        (experts, matrix): (usize, Matrix<'_>),
        has_bias: bool,
    ) {
        if self.matrices.contains_key(&id) {
            return;
        }
        let (dtype, columns) = (matrix.dtype(), matrix.cols());
        let row_bytes = arranged::row_bytes(dtype, columns, matrix.row_bytes(), has_bias);
        let bytes = (experts * matrix.rows() * row_bytes) as u64;
        let fits = |end: &u64| *end == 0 || end + bytes <= PIECE_BYTES;
        if !self.pieces.last().is_some_and(fits) {
            self.pieces.push(0);
        }
        let piece = self.pieces.len() - 1;
        let end = &mut self.pieces[piece];
        let offset = *end;
        *end = (offset + bytes).next_multiple_of(ALIGNMENT);
        let placed = Placed {
            dtype,
            experts,
            rows: matrix.rows(),
            columns,
            row_bytes,
            piece,
            offset,
            has_bias,
        };
        self.matrices.insert(id, placed);
    }

    fn add_vector(&mut self, model: &Model, id: VectorId) {
        if !self.vectors.contains_key(&id) {
            let start = self.elements(model.vector(id).len());
            self.vectors.insert(id, start);
        }
    }

    /// Room for so many elements behind those that there are, which are whole vectors of four.
    fn elements(&mut self, count: usize) -> u32 {
        let start = self.elements;
        self.elements = (start + count).next_multiple_of(4);
        u32::try_from(start).expect("vectors of a model have fewer than 2^32 elements")
    }
}

/// Whether some KV rows are blocks of bytes.
pub(crate) fn in_blocks(geometry: &Geometry) -> bool {
    let element = |side| geometry.element(side).block_len() > 1;
    Side::BOTH.into_iter().any(element)
}

/// Whether all heads of KV rows are floats that fill whole vectors.
pub(crate) fn in_vectors(geometry: &Geometry) -> bool {
    let mut heads = geometry.own_rows().flat_map(|(_, rows)| {
        let bytes = |side| geometry.element(side).bytes(rows.head_dim(side));
        Side::BOTH.map(bytes)
    });
    !in_blocks(geometry) && heads.all(|bytes| bytes.is_multiple_of(VECTOR_BYTES))
}

/// The vectors that an operation reads.
fn vectors(op: &Op) -> impl Iterator<Item = VectorId> {
    let two = match *op {
        Op::Norm { weight, .. } => [weight, None],
        Op::BiasedNorm { weight, bias, .. } => [Some(weight), Some(bias)],
        Op::Attend { sinks, .. } => [sinks, None],
        Op::Route { bias, scales, .. } => [bias, scales],
        Op::Convolve { weights, bias, .. } => [Some(weights), bias],
        Op::TimeSteps { bias, .. } => [Some(bias), None],
        Op::Decay { rates, .. } => [Some(rates), None],
        Op::Scan { skip, .. } => [skip, None],
        Op::Scale {
            factor: Factor::Learned(vector) | Factor::Columns(vector),
            ..
        } => [Some(vector), None],
        _ => [None; 2],
    };
    two.into_iter().flatten()
}

/// A model's weights in device memory.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    layout: Layout,
    pieces: Vec<DeviceMemory>,
    vectors: DeviceMemory,
}

impl DeviceWeights {
    /// Copies the weights of `part` to the device.
    ///
    /// # Errors
    /// What the device refuses, and a file that was lost meanwhile.
    pub(crate) fn upload(queue: &VulkanQueue, part: &Part) -> Result<Self, ExecutorError> {
        let (model, layout) = (&part.model, Layout::of(part));
        let memory = |bytes: u64| queue.memory(ByteLength::new(bytes.max(4)));
        let pieces = layout.pieces.iter().map(|&bytes| memory(bytes));
        let weights = Self {
            pieces: pieces.collect::<Result<_, DeviceError>>()?,
            vectors: memory(4 * layout.elements as u64)?,
            layout,
        };
        weights.copy_matrices(model)?;
        weights.copy_vectors(model)?;
        // Whatever was read of a file that is lost is of no use.
        model.files().check()?;
        // What the processor computes with is mapped again as it is read.
        model.files().release();
        Ok(weights)
    }

    fn copy_matrices(&self, model: &Model) -> Result<(), DeviceError> {
        let mut part = Vec::new();
        for (&id, placed) in &self.layout.matrices {
            let piece = &self.pieces[placed.piece];
            let most = (PART_BYTES / placed.row_bytes).max(1);
            id.each(model, |number, weights| {
                let MatrixWeights { matrix, bias, .. } = weights;
                let first = placed.offset + number as u64 * placed.matrix_bytes();
                for start in (0..placed.rows).step_by(most) {
                    part.clear();
                    for row in start..placed.rows.min(start + most) {
                        let bias = match placed.has_bias {
                            true => Some(bias.map_or(0.0, |bias| bias[row])),
                            false => None,
                        };
                        let bytes = matrix.row(row);
                        arranged::arrange(placed.dtype, placed.columns, bytes, bias, &mut part);
                    }
                    piece.write(first + (start * placed.row_bytes) as u64, &part)?;
                }
                Ok(())
            })?;
        }
        Ok(())
    }

    fn copy_vectors(&self, model: &Model) -> Result<(), DeviceError> {
        let mut all = vec![0f32; self.layout.elements];
        let mut put = |start: u32, elements: &[f32]| {
            all[start as usize..][..elements.len()].copy_from_slice(elements);
        };
        for (&id, &start) in &self.layout.vectors {
            put(start, model.vector(id));
        }
        self.vectors.write(0, bytemuck::cast_slice(&all))?;
        Ok(())
    }

    /// Where a matrix lies, or those of experts.
    ///
    /// # Panics
    /// For one that nothing is multiplied with.
    pub(crate) fn matrices(&self, id: Together) -> (&Placed, &DeviceMemory) {
        let placed = self.layout.matrices.get(&id);
        let placed = placed.expect("all matrices of products are laid out");
        (placed, &self.pieces[placed.piece])
    }

    /// Where a vector begins among all.
    ///
    /// # Panics
    /// For one that no operation has.
    pub(crate) fn vector(&self, id: VectorId) -> u32 {
        let start = self.layout.vectors.get(&id).copied();
        start.expect("all vectors of operations are laid out")
    }

    /// All vectors.
    pub(crate) fn vectors(&self) -> &DeviceMemory {
        &self.vectors
    }

    /// Bytes of device memory that [`DeviceWeights::upload`] takes, but for what a device rounds up.
    pub(crate) fn bytes_for(part: &Part) -> u64 {
        let layout = Layout::of(part);
        layout.pieces.iter().sum::<u64>() + 4 * layout.elements as u64
    }

    /// The kernels that `part` takes with KV rows of `geometry`.
    pub(crate) fn wanted(part: &Part, geometry: &Geometry) -> Wanted {
        let is_state = |op: &Op| matches!(op, Op::Convolve { .. } | Op::Scan { .. });
        let mut wanted = Wanted {
            states: part.ops().any(is_state),
            blocks: in_blocks(geometry),
            vectors: in_vectors(geometry),
            ..Wanted::default()
        };
        for (id, placed) in Layout::of(part).matrices {
            match id {
                Together::One(_) => wanted.types.push(placed.dtype),
                Together::Experts(_) => wanted.expert_types.push(placed.dtype),
            }
        }
        wanted
    }

    /// The longest row of a matrix, in bytes.
    pub(crate) fn longest_row(&self) -> u64 {
        let rows = self.layout.matrices.values();
        rows.map(|placed| placed.row_bytes as u64)
            .max()
            .unwrap_or(0)
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> u64 {
        let pieces = self.pieces.iter().map(|piece| piece.length().get());
        pieces.sum::<u64>() + self.vectors.length().get()
    }
}
