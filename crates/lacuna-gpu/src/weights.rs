//! Weights in device memory: planned, then brought there once.
//!
//! Matrices keep the bits of their file, in the order in which kernels read them. They lie in a few large pieces, because
//! devices make few allocations; norms lie in one of their own, as f32.

use std::collections::HashMap;

use lacuna_kernels::DType;
use lacuna_models::program::{MatrixId, Op, VectorId};
use lacuna_models::{ExecutorError, MatrixWeights, Model};
use lacuna_pages::vulkan::{DeviceMemory, VulkanQueue};
use lacuna_pages::{ByteLength, DeviceError};

use crate::arranged;

/// Pieces are about so long: few enough for any device, and not much more than is needed.
const PIECE_BYTES: u64 = 256 << 20;

/// Rows are put in order and brought to the device in parts of about so many bytes: as many as are staged at once.
const PART_BYTES: usize = 4 << 20;

/// Matrices begin at multiples of this: the strictest alignment of windows that Vulkan allows a device to ask for.
const ALIGNMENT: u64 = 256;

/// Where a matrix lies, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    pub(crate) dtype: DType,
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
        (self.rows * self.row_bytes) as u64
    }
}

/// Where everything will lie.
#[derive(Debug, Default, PartialEq, Eq)]
struct Layout {
    /// Bytes of each piece.
    pieces: Vec<u64>,
    matrices: HashMap<MatrixId, Placed>,
    vectors: HashMap<VectorId, u32>,
    /// Elements of all vectors.
    elements: usize,
}

impl Layout {
    fn of(model: &Model) -> Self {
        let mut layout = Self::default();
        let program = model.program();
        for op in program.steps().iter().flat_map(|step| program.ops(step)) {
            match op {
                Op::Product { outputs, .. } => {
                    for (id, _) in outputs {
                        layout.add_matrix(model, *id);
                    }
                }
                Op::Norm {
                    weight: Some(id), ..
                } => layout.add_vector(model, *id),
                _ => {}
            }
        }
        layout
    }

    fn add_matrix(&mut self, model: &Model, id: MatrixId) {
        if self.matrices.contains_key(&id) {
            return;
        }
        let weights = model.matrix(id);
        let matrix = weights.matrix;
        let (dtype, columns) = (matrix.dtype(), matrix.cols());
        let has_bias = weights.bias.is_some();
        let row_bytes = arranged::row_bytes(dtype, columns, matrix.row_bytes(), has_bias);
        let bytes = (matrix.rows() * row_bytes) as u64;
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

    /// Room for so many elements behind those that there are.
    fn elements(&mut self, count: usize) -> u32 {
        let start = self.elements;
        self.elements += count;
        u32::try_from(start).expect("vectors of a model have fewer than 2^32 elements")
    }
}

/// A model's weights in device memory.
#[derive(Debug)]
pub(crate) struct DeviceWeights {
    layout: Layout,
    pieces: Vec<DeviceMemory>,
    vectors: DeviceMemory,
}

impl DeviceWeights {
    /// Copies the weights of `model` to the device.
    ///
    /// # Errors
    /// What the device refuses, and a file that was lost meanwhile.
    pub(crate) fn upload(queue: &VulkanQueue, model: &Model) -> Result<Self, ExecutorError> {
        let layout = Layout::of(model);
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
        Ok(weights)
    }

    fn copy_matrices(&self, model: &Model) -> Result<(), DeviceError> {
        let mut part = Vec::new();
        for (&id, placed) in &self.layout.matrices {
            let piece = &self.pieces[placed.piece];
            let MatrixWeights { matrix, bias, .. } = model.matrix(id);
            let most = (PART_BYTES / placed.row_bytes).max(1);
            for start in (0..placed.rows).step_by(most) {
                part.clear();
                for row in start..placed.rows.min(start + most) {
                    let bias = bias.map(|bias| bias[row]);
                    let bytes = matrix.row(row);
                    arranged::arrange(placed.dtype, placed.columns, bytes, bias, &mut part);
                }
                let offset = (start * placed.row_bytes) as u64;
                piece.write(placed.offset + offset, &part)?;
            }
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

    /// Where a matrix lies.
    ///
    /// # Panics
    /// For one that nothing is multiplied with.
    pub(crate) fn matrix(&self, id: MatrixId) -> (&Placed, &DeviceMemory) {
        let placed = self.layout.matrices.get(&id);
        let placed = placed.expect("all matrices of products are laid out");
        (placed, &self.pieces[placed.piece])
    }

    /// Where a vector begins among all.
    ///
    /// # Panics
    /// For one that no norm has.
    pub(crate) fn vector(&self, id: VectorId) -> u32 {
        let start = self.layout.vectors.get(&id).copied();
        start.expect("all vectors of norms are laid out")
    }

    /// All vectors.
    pub(crate) fn vectors(&self) -> &DeviceMemory {
        &self.vectors
    }

    /// The types of all matrices.
    pub(crate) fn types(model: &Model) -> Vec<DType> {
        let matrices = Layout::of(model).matrices;
        matrices.values().map(|placed| placed.dtype).collect()
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
