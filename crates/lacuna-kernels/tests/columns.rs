//! Products with the columns that are needed are those with the whole matrix, bit for bit.

mod support;

use lacuna_kernels::{Activations, ColumnLayout, Columns, Cpu, DType, Matrix, NotFinite};
use support::{Random, Storage, cpu, levels, random_matrix};

const PACKED: [DType; 5] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::Q8_0,
    DType::Q4_0,
];

/// A matrix's columns, apart from it.
struct Packed {
    layout: ColumnLayout,
    scales: Vec<u8>,
    columns: Vec<u8>,
}

impl Packed {
    fn of(w: &Matrix<'_>) -> Result<Self, NotFinite> {
        let layout = ColumnLayout::new(w.dtype(), w.rows(), w.cols()).expect("it can be packed");
        let mut scales = vec![0; layout.scale_bytes()];
        layout.pack_scales(w, &mut scales)?;
        let mut columns = vec![0; layout.column_bytes() * w.cols()];
        // In two pieces, as large matrices are packed.
        let middle = w.cols() / 2;
        let (first, second) = columns.split_at_mut(middle * layout.column_bytes());
        layout.pack(w, 0..middle, first)?;
        layout.pack(w, middle..w.cols(), second)?;
        Ok(Self {
            layout,
            scales,
            columns,
        })
    }

    /// The product, with `each` sections of columns in a call, of which only those are there that are needed.
    fn product(&self, cpu: &Cpu, x: &[f32], each: usize) -> Vec<f32> {
        let (cols, bytes) = (self.layout.cols(), self.layout.column_bytes());
        let tokens = x.len() / cols;
        let mut out = vec![f32::NAN; tokens * self.layout.rows()];
        let step = each * ColumnLayout::SECTION;
        for start in (0..cols).step_by(step) {
            let range = start..cols.min(start + step);
            let needed = |column: &usize| (0..tokens).any(|token| x[token * cols + column] != 0.0);
            let numbers: Vec<u32> = range.clone().filter(needed).map(|it| it as u32).collect();
            let columns = Columns {
                layout: self.layout,
                scales: &self.scales,
                range,
                numbers: &numbers,
                bytes: |at: usize| &self.columns[numbers[at] as usize * bytes..][..bytes],
            };
            cpu.matmul_columns(&mut out, x, &columns);
        }
        out
    }
}

fn whole(cpu: &Cpu, w: &Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let tokens = x.len() / w.cols();
    let mut storage = Storage::new(Activations::storage_bytes(tokens, w.cols()).unwrap_or(0));
    let mut out = vec![f32::NAN; tokens * w.rows()];
    let x = cpu.activations(x, tokens, w.cols(), storage.bytes());
    cpu.matmul(&mut out, &x, w);
    out
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn products_are_those_of_the_whole_matrix() {
    let mut random = Random::new(5);
    for dtype in PACKED {
        for (rows, cols, tokens) in [(32, 32, 1), (96, 1120, 1), (544, 640, 3), (64, 1536, 19)] {
            let bytes = random_matrix(dtype, rows, cols, 1.0, (rows + cols) as u64);
            let w = Matrix::new(dtype, rows, cols, &bytes).expect("a valid shape");
            let packed = Packed::of(&w).expect("finite weights");
            for keep in [0.0, 0.04, 0.5, 1.0] {
                let mut x = random.units(tokens * cols);
                let chances = random.units(tokens * cols);
                for (x, chance) in x.iter_mut().zip(chances) {
                    if chance.abs() >= keep {
                        *x = 0.0;
                    }
                }
                for level in levels() {
                    for threads in [1, 3] {
                        let cpu = cpu(level, threads);
                        let expected = bits(&whole(&cpu, &w, &x));
                        for each in [1, 2, 9] {
                            let found = bits(&packed.product(&cpu, &x, each));
                            assert_eq!(found, expected, "{dtype} {level:?} {rows}x{cols}, {keep}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn what_is_not_finite_in_activations_is_not_finite_in_results() {
    for dtype in PACKED {
        let bytes = random_matrix(dtype, 32, 64, 1.0, 3);
        let w = Matrix::new(dtype, 32, 64, &bytes).expect("a valid shape");
        let packed = Packed::of(&w).expect("finite weights");
        for level in levels() {
            let mut x = [0.0; 64];
            x[40] = f32::NAN;
            let out = packed.product(&cpu(level, 1), &x, 1);
            assert!(
                out.iter().all(|value| !value.is_finite()),
                "{dtype} {level:?}"
            );
        }
    }
}

#[test]
fn matrices_that_are_not_finite_or_not_of_whole_groups_are_refused() {
    assert_eq!(ColumnLayout::new(DType::F16, 48, 64), None);
    assert_eq!(ColumnLayout::new(DType::Q8_0, 64, 48), None);
    assert_eq!(ColumnLayout::new(DType::Q4K, 64, 256), None);
    for dtype in PACKED {
        let mut bytes = random_matrix(dtype, 32, 64, 1.0, 3);
        let row_bytes = dtype.row_bytes(64).expect("whole blocks");
        // The last element of row 5, or the scale that it has.
        let at = 6 * row_bytes - dtype.block_bytes();
        let infinite: &[u8] = match dtype {
            DType::F32 => &[0, 0, 0x80, 0x7F],
            DType::Bf16 => &[0x80, 0xFF],
            _ => &[0, 0x7C],
        };
        bytes[at..at + infinite.len()].copy_from_slice(infinite);
        let w = Matrix::new(dtype, 32, 64, &bytes).expect("a valid shape");
        let refused = Packed::of(&w).err();
        assert_eq!(refused, Some(NotFinite { row: 5 }), "{dtype}");
    }
}
