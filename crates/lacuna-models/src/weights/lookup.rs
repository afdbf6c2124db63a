//! Rows of tables that nothing is multiplied with.

use std::io;

use lacuna_kernels::{Cpu, Matrix};

use super::Linear;

/// Tables of fewer bytes stay mapped: what they could take is little.
const LARGE_TABLE: usize = 4 << 20;

/// Bytes that are read at once of rows that are converted.
const READ_BYTES: usize = 4096;

impl Linear {
    /// From now on rows that are looked up are read from the file, if the matrix is large. Pages that are
    /// mapped stay with the process, sixteen for the sake of one row, until most of the table is there;
    /// and of a vocabulary's table most rows are never asked for.
    pub(super) fn read_rows(&mut self) {
        let large = self.matrix().bytes().len() >= LARGE_TABLE;
        self.reads_rows = large && self.tensor.mapping().path().is_some();
    }

    /// Writes the rows `tokens` of `table`, which is this matrix wherever it is, to `out`, `[tokens, columns]`.
    ///
    /// # Panics
    /// When a token is not a row, or `out` has another size.
    pub(crate) fn look_up(&self, table: &Matrix<'_>, cpu: &Cpu, out: &mut [f32], tokens: &[u32]) {
        if !self.reads_rows {
            return cpu.embed(out, table, tokens);
        }
        assert_eq!(
            out.len(),
            tokens.len() * self.columns,
            "the output is [tokens, columns]"
        );
        cpu.fill_rows(out, self.columns, |row, out| {
            let row = tokens[row] as usize;
            // What cannot be read that way is looked for in the mapping, which remembers that its file is
            // lost.
            if self.read_row(table, row, out).is_err() {
                table.dequantize_row(row, out);
            }
        });
    }

    /// The same, with the first row for tokens that are none.
    pub(crate) fn look_up_known(
        &self,
        table: &Matrix<'_>,
        cpu: &Cpu,
        out: &mut [f32],
        tokens: &[u32],
    ) {
        let known = |token: &u32| (*token as usize) < table.rows();
        if tokens.iter().all(known) {
            return self.look_up(table, cpu, out, tokens);
        }
        for (row, token) in out.chunks_exact_mut(self.columns).zip(tokens) {
            let token = if known(token) { *token } else { 0 };
            self.look_up(table, cpu, row, &[token]);
        }
    }

    /// Reads a row from the file.
    fn read_row(&self, table: &Matrix<'_>, row: usize, out: &mut [f32]) -> io::Result<()> {
        let (dtype, row_bytes) = (table.dtype(), table.row_bytes());
        assert!(row < table.rows(), "row {row} of {}", table.rows());
        let mut at = self.start + row * row_bytes;
        let mut bytes = [0; READ_BYTES];
        let blocks = READ_BYTES / dtype.block_bytes();
        for out in out.chunks_mut(blocks * dtype.block_len()) {
            let len = out.len() / dtype.block_len() * dtype.block_bytes();
            let bytes = &mut bytes[..len];
            self.tensor.read_at(at, bytes)?;
            let part = Matrix::new(dtype, 1, out.len(), bytes);
            part.expect("whole blocks").dequantize_row(0, out);
            at += len;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use lacuna_files::{Mapping, gguf};
    use lacuna_kernels::{CpuConfig, DType};

    use super::*;

    #[test]
    fn rows_that_are_read_are_those_of_the_mapping() {
        // Rows of more than is read at once, and of less.
        for columns in [5120, 256] {
            for dtype in [DType::F32, DType::F16, DType::Bf16, DType::Q8_0, DType::Q4K] {
                let row_bytes = dtype.row_bytes(columns).expect("whole blocks");
                let bytes: Vec<u8> = (0..5 * row_bytes).map(|i| (i * 31 % 251) as u8).collect();
                let mut header = gguf::Writer::new();
                header
                    .tensor("table", dtype, &[5, columns])
                    .expect("whole blocks");
                let mut body = header.begin(Vec::new()).expect("room in memory");
                body.tensor("table", &bytes).expect("as declared");
                let file = tempfile::NamedTempFile::new().expect("a scratch file");
                std::fs::write(file.path(), body.finish().expect("whole")).expect("room for it");
                let mapping = Mapping::open(file.path()).expect("a file");
                let opened = gguf::File::open(mapping).expect("a valid file");
                let table = opened.tensors().require("table").expect("it is there");
                let mut linear = Linear::new(table, 1, 4, columns, None).expect("it fits");
                let cpu = Cpu::new(CpuConfig::default()).expect("threads");
                let rows = |linear: &Linear| -> Vec<u32> {
                    let mut out = vec![0.0; 3 * columns];
                    linear.look_up(&linear.matrix(), &cpu, &mut out, &[3, 0, 3]);
                    out.into_iter().map(f32::to_bits).collect()
                };
                let mapped = rows(&linear);
                assert!(!linear.reads_rows);
                linear.read_rows();
                assert!(!linear.reads_rows, "it is small");
                linear.reads_rows = true;
                assert_eq!(rows(&linear), mapped, "{dtype}, {columns}");
            }
        }
    }
}
