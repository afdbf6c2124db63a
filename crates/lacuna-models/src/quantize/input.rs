//! Where a tensor's weights come from.

use std::io;

use lacuna_files::{DType, Tensor, TensorError, Tensors};
use lacuna_kernels::Matrix;

/// Weights to be written, in the order of their rows: known by name until they are, since what is converted takes
/// memory for as long as somebody has it.
#[derive(Clone, Debug)]
pub(super) struct Input {
    from: From,
    dtype: DType,
    /// Rows of a head of which the halves are to alternate.
    interleaved: Option<usize>,
}

#[derive(Clone, Debug)]
enum From {
    /// A tensor of the model's files.
    Files(String),
    /// One that was made of what they say.
    Memory(Tensor),
}

impl Input {
    /// The tensor `name` of `tensors`, which has to be there.
    pub(super) fn of_files(tensors: &Tensors, name: &str) -> Result<Self, TensorError> {
        let dtype = tensors.dtype(name)?.ok_or_else(|| TensorError::Missing {
            name: name.to_owned(),
        })?;
        Ok(Self {
            from: From::Files(name.to_owned()),
            dtype,
            interleaved: None,
        })
    }

    pub(super) fn in_memory(tensor: Tensor) -> Self {
        Self {
            dtype: tensor.dtype(),
            from: From::Memory(tensor),
            interleaved: None,
        }
    }

    /// Has row `i` of the second half of each head follow row `i` of its first half. A vector has a row for
    /// each element.
    pub(super) fn interleave(&mut self, head_rows: usize) {
        self.interleaved = Some(head_rows);
    }

    /// The type of what is read; `None` where it is not written as it is.
    pub(super) fn dtype(&self) -> Option<DType> {
        self.interleaved.is_none().then_some(self.dtype)
    }

    /// Whether what is read has lost something already.
    pub(super) fn is_quantized(&self) -> bool {
        self.dtype.is_quantized()
    }

    /// The weights, converted where they have to be; `tensors` are those that the name is of.
    pub(super) fn open(&self, tensors: &Tensors) -> Result<Opened, TensorError> {
        let tensor = match &self.from {
            From::Files(name) => tensors.require(name)?,
            From::Memory(tensor) => tensor.clone(),
        };
        Ok(Opened {
            tensor,
            interleaved: self.interleaved,
        })
    }
}

/// Weights that can be read.
#[derive(Debug)]
pub(super) struct Opened {
    tensor: Tensor,
    /// As in [`Input`].
    interleaved: Option<usize>,
}

impl Opened {
    /// The bytes of the blocks from the one on that weight `first` begins.
    pub(super) fn copy(&self, first: usize, out: &mut [u8]) -> io::Result<()> {
        let dtype = self.tensor.dtype();
        let start = first / dtype.block_len() * dtype.block_bytes();
        self.tensor.read_at(start, out)
    }

    /// The weights from `first` on, which begins a block.
    pub(super) fn decode(&self, first: usize, out: &mut [f32]) -> io::Result<()> {
        let Some(head_rows) = self.interleaved else {
            return self.decode_in_order(first, out);
        };
        let columns = match self.tensor.shape() {
            [_, columns] => *columns,
            _ => 1,
        };
        let mut done = 0;
        while done < out.len() {
            let (row, column) = ((first + done) / columns, (first + done) % columns);
            let len = (columns - column).min(out.len() - done);
            let (head, place) = (row / head_rows, row % head_rows);
            let place = place % 2 * (head_rows / 2) + place / 2;
            let from = (head * head_rows + place) * columns + column;
            self.decode_in_order(from, &mut out[done..done + len])?;
            done += len;
        }
        Ok(())
    }

    fn decode_in_order(&self, first: usize, out: &mut [f32]) -> io::Result<()> {
        let dtype = self.tensor.dtype();
        let mut bytes = vec![0; out.len() / dtype.block_len() * dtype.block_bytes()];
        self.copy(first, &mut bytes)?;
        // Rows are whole blocks, so any run of blocks is as good as a row.
        let row = Matrix::new(dtype, 1, out.len(), &bytes);
        row.expect("as many bytes as blocks").dequantize_row(0, out);
        Ok(())
    }
}
