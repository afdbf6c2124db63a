//! Rows of matrices as kernels read them: the bits of the file, in an order in which sixteen bytes are read at once.
//!
//! Blocks of a file have a scale, then weights, which leaves neither where a load of four words could begin. Here a row has
//! first the weights of all blocks, then what else they have, each kind by itself, then the bias of the row where the
//! matrix has one. It is as long as in the file but for that, and what makes it a multiple of sixteen bytes.
//!
//! Weights of four bits lie as in `Q4_0`: of 32, a byte has the `i`-th below the one sixteen further on. Bits beyond the
//! fourth are in a word of their own for 32 weights (fifth bits), or in two (fifth and sixth): bit `k` of byte `j` is that
//! of weight `4 k + j`, so that a shift and a mask give those of four weights at their places.

use lacuna_kernels::DType;

/// Weights of a block, which is a unit of quantized ones, and elements of a block of quantized activations.
pub(crate) const BLOCK: usize = 32;
/// Weights of a unit of floats of two bytes, and of four: 32 bytes.
const HALVES: usize = 16;
const SINGLES: usize = 8;
/// What rows are multiples of, in bytes.
const STEP: usize = 16;

/// Weights that a thread takes at once, of a type that there is a kernel for.
pub(crate) fn unit(dtype: DType) -> usize {
    match dtype {
        DType::F32 => SINGLES,
        DType::F16 | DType::Bf16 => HALVES,
        _ => BLOCK,
    }
}

/// Bytes of a row of `columns`, whose bytes in the file are `file_bytes`.
pub(crate) fn row_bytes(dtype: DType, columns: usize, file_bytes: usize, has_bias: bool) -> usize {
    let bias = if has_bias { size_of::<f32>() } else { 0 };
    weight_bytes(dtype, columns, file_bytes) + bias.next_multiple_of(STEP)
}

/// The same without a bias.
fn weight_bytes(dtype: DType, columns: usize, file_bytes: usize) -> usize {
    match dtype {
        // Whole units: those beyond the last column are zero.
        DType::F32 => columns.next_multiple_of(SINGLES) * 4,
        DType::F16 | DType::Bf16 => columns.next_multiple_of(HALVES) * 2,
        _ => file_bytes.next_multiple_of(STEP),
    }
}

/// Puts a row of a file in order, at the end of `out`.
pub(crate) fn arrange(
    dtype: DType,
    columns: usize,
    row: &[u8],
    bias: Option<f32>,
    out: &mut Vec<u8>,
) {
    let end = out.len() + weight_bytes(dtype, columns, row.len());
    match dtype {
        DType::Q8_0 => {
            planes(out, row, 34, |out, block| out.extend(&block[2..]));
            planes(out, row, 34, |out, block| out.extend(&block[..2]));
        }
        DType::Q4_0 | DType::Iq4Nl => {
            planes(out, row, 18, |out, block| out.extend(&block[2..]));
            planes(out, row, 18, |out, block| out.extend(&block[..2]));
        }
        DType::Q4_1 => {
            planes(out, row, 20, |out, block| out.extend(&block[4..]));
            planes(out, row, 20, |out, block| out.extend(&block[..4]));
        }
        DType::Q5_0 => {
            planes(out, row, 22, |out, block| out.extend(&block[6..]));
            planes(out, row, 22, |out, block| fifth_of_bits(out, &block[2..6]));
            planes(out, row, 22, |out, block| out.extend(&block[..2]));
        }
        DType::Q5_1 => {
            planes(out, row, 24, |out, block| out.extend(&block[8..]));
            planes(out, row, 24, |out, block| fifth_of_bits(out, &block[4..8]));
            planes(out, row, 24, |out, block| out.extend(&block[..4]));
        }
        DType::Q4K => {
            planes(out, row, 144, |out, block| {
                nested_nibbles(out, &block[16..])
            });
            planes(out, row, 144, |out, block| out.extend(&block[..16]));
        }
        DType::Q5K => {
            planes(out, row, 176, |out, block| {
                nested_nibbles(out, &block[48..])
            });
            planes(out, row, 176, |out, block| out.extend(&block[..16]));
            planes(out, row, 176, |out, block| {
                for sub_block in 0..8 {
                    bits(out, 1, |weight| block[16 + weight] >> sub_block & 1);
                }
            });
        }
        DType::Q6K => {
            planes(out, row, 210, |out, block| {
                for sub_block in 0..8 {
                    nibbles(out, |weight| sixth(block, sub_block, weight) & 15);
                }
            });
            planes(out, row, 210, |out, block| {
                for sub_block in 0..8 {
                    bits(out, 2, |weight| sixth(block, sub_block, weight) >> 4);
                }
            });
            planes(out, row, 210, |out, block| out.extend(&block[192..208]));
            planes(out, row, 210, |out, block| out.extend(&block[208..]));
        }
        DType::Iq4Xs => {
            planes(out, row, 136, |out, block| out.extend(&block[8..]));
            planes(out, row, 136, |out, block| out.extend(&block[..8]));
        }
        DType::Mxfp4 => {
            planes(out, row, 17, |out, block| out.extend(&block[1..]));
            planes(out, row, 17, |out, block| out.push(block[0]));
        }
        _ => out.extend(row),
    }
    out.resize(end, 0);
    if let Some(bias) = bias {
        out.extend(bias.to_le_bytes());
        out.resize(end + STEP, 0);
    }
}

/// Part of each block, one after the other.
fn planes(
    out: &mut Vec<u8>,
    row: &[u8],
    block_bytes: usize,
    mut part: impl FnMut(&mut Vec<u8>, &[u8]),
) {
    for block in row.chunks_exact(block_bytes) {
        part(out, block);
    }
}

/// Nibbles of 32 weights.
fn nibbles(out: &mut Vec<u8>, weight: impl Fn(usize) -> u8) {
    out.extend((0..16).map(|index| weight(index) | weight(index + 16) << 4));
}

/// Nibbles of 256 weights, of which 32 bytes have 64: the low ones first.
fn nested_nibbles(out: &mut Vec<u8>, bytes: &[u8]) {
    for sub_block in 0..8 {
        let source = &bytes[sub_block / 2 * 32..][..32];
        nibbles(out, |weight| source[weight] >> (4 * (sub_block % 2)) & 15);
    }
}

/// `width` bits of each of 32 weights: see the top.
fn bits(out: &mut Vec<u8>, width: usize, weight: impl Fn(usize) -> u8) {
    // Four weights have a bit in each byte of a word; of two bits, a word has those of sixteen.
    for first in (0..8).step_by(8 / width) {
        for byte in 0..4 {
            let fours = (first..first + 8 / width).enumerate();
            let packed = fours.map(|(place, four)| weight(4 * four + byte) << (width * place));
            out.push(packed.fold(0, |all, one| all | one));
        }
    }
}

/// Fifth bits that are one after the other in four bytes.
fn fifth_of_bits(out: &mut Vec<u8>, source: &[u8]) {
    bits(out, 1, |weight| source[weight / 8] >> (weight % 8) & 1);
}

/// A weight of six bits of a sub-block of `Q6_K`: each half of 128 weights has 64 bytes of low bits and 32 of high ones.
fn sixth(block: &[u8], sub_block: usize, weight: usize) -> u8 {
    let (half, run) = (sub_block / 4, sub_block % 4);
    let low = block[half * 64 + run % 2 * 32 + weight] >> (4 * (run / 2)) & 15;
    let high = block[128 + half * 32 + weight] >> (2 * run) & 3;
    low | high << 4
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_as_long_as_in_the_file_but_for_what_fills_sixteen_bytes() {
        for (dtype, columns, file_bytes) in [
            (DType::Q8_0, 96, 3 * 34),
            (DType::Q4_0, 96, 3 * 18),
            (DType::Q4_1, 64, 40),
            (DType::Q5_0, 32, 22),
            (DType::Q5_1, 32, 24),
            (DType::Q4K, 512, 288),
            (DType::Q5K, 256, 176),
            (DType::Q6K, 256, 210),
            (DType::Iq4Nl, 96, 3 * 18),
            (DType::Iq4Xs, 512, 272),
            (DType::Mxfp4, 96, 3 * 17),
            (DType::F32, 5, 20),
            (DType::F16, 17, 34),
        ] {
            let row: Vec<u8> = (0..file_bytes).map(|byte| byte as u8).collect();
            for bias in [None, Some(1.5)] {
                let mut out = vec![7; 3];
                arrange(dtype, columns, &row, bias, &mut out);
                let bytes = row_bytes(dtype, columns, file_bytes, bias.is_some());
                assert_eq!(out.len() - 3, bytes, "{dtype}");
                assert!(bytes.is_multiple_of(STEP));
                if let Some(bias) = bias {
                    assert_eq!(out[3 + bytes - STEP..][..4], bias.to_le_bytes());
                }
            }
        }
    }

    #[test]
    fn every_bit_of_a_row_is_somewhere() {
        // Each bit of a block set alone leads to one bit that is set.
        for (dtype, columns, block_bytes) in [
            (DType::Q8_0, 32, 34),
            (DType::Q5_0, 32, 22),
            (DType::Q5_1, 32, 24),
            (DType::Q4K, 256, 144),
            (DType::Q5K, 256, 176),
            (DType::Q6K, 256, 210),
            (DType::Iq4Nl, 32, 18),
            (DType::Iq4Xs, 256, 136),
            (DType::Mxfp4, 32, 17),
        ] {
            let mut found = std::collections::HashSet::new();
            for bit in 0..8 * block_bytes {
                let mut row = vec![0; block_bytes];
                row[bit / 8] = 1 << (bit % 8);
                let mut out = Vec::new();
                arrange(dtype, columns, &row, None, &mut out);
                let set: Vec<usize> = (0..8 * out.len())
                    .filter(|bit| out[bit / 8] >> (bit % 8) & 1 == 1)
                    .collect();
                assert_eq!(set.len(), 1, "{dtype}, bit {bit}");
                assert!(found.insert(set[0]), "{dtype}, bit {bit}");
            }
        }
    }
}
