//! Where a tensor's weights come from.

use std::io;

use lacuna_files::{DType, Tensor};
use lacuna_kernels::Matrix;

/// Weights to be written, in the order of their rows.
#[derive(Clone, Debug)]
pub(super) struct Input {
    tensor: Tensor,
    /// Rows of a head of which the halves are to alternate.
    interleaved: Option<usize>,
}

impl Input {
    pub(super) fn new(tensor: Tensor) -> Self {
        Self {
            tensor,
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
        self.interleaved.is_none().then(|| self.tensor.dtype())
    }

    /// Whether what is read has lost something already.
    pub(super) fn is_quantized(&self) -> bool {
        self.tensor.dtype().is_quantized()
    }

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
