//! Random matrices in file layout and their weights in f64, decoded independently of the crate.

#![allow(
    dead_code,
    clippy::allow_attributes,
    reason = "each test file uses a part"
)]

use std::num::NonZeroUsize;

// The points are data, which `reference/` has all of decoded.
#[path = "../../src/quantized/grids/tables.rs"]
mod tables;

use half::{bf16, f16};
use lacuna_kernels::{Cpu, CpuConfig, CpuError, DType, Level, MatmulPrecision};

/// A small generator (xorshift64*), so that failures repeat.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 16
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    /// Uniform in `-1 .. 1`.
    pub(crate) fn unit(&mut self) -> f32 {
        (self.next() & 0xFF_FFFF) as f32 / 8_388_608.0 - 1.0
    }

    pub(crate) fn units(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.unit()).collect()
    }
}

/// Every level this CPU has.
pub(crate) fn levels() -> Vec<Level> {
    Level::available().collect()
}

pub(crate) fn cpu(level: Level, threads: usize) -> Cpu {
    let threads = NonZeroUsize::new(threads).expect("not zero");
    let config = CpuConfig {
        threads,
        level: Some(level),
        precision: MatmulPrecision::F32.into(),
    };
    Cpu::new(config).expect("an available level")
}

/// Every level with every precision that this CPU has.
pub(crate) fn cpus(threads: usize) -> impl Iterator<Item = Cpu> {
    let precise = levels().into_iter().map(move |level| cpu(level, threads));
    precise.chain(levels().into_iter().filter_map(move |level| {
        let config = CpuConfig {
            precision: MatmulPrecision::Bf16.into(),
            ..cpu(level, threads).config()
        };
        match Cpu::new(config) {
            Ok(cpu) => Some(cpu),
            Err(CpuError::NoBf16(refused)) if refused == level => None,
            Err(error) => panic!("{error}"),
        }
    }))
}

/// Random weights: random bytes with scales of about `scale`.
pub(crate) fn random_matrix(
    dtype: DType,
    rows: usize,
    cols: usize,
    scale: f32,
    seed: u64,
) -> Vec<u8> {
    let mut random = Random::new(seed);
    let len = rows * dtype.row_bytes(cols).expect("whole blocks");
    let mut bytes: Vec<u8> = (0..len).map(|_| random.byte()).collect();
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        set_scales(dtype, block, scale, &mut random);
    }
    bytes
}

/// Where the binary16 numbers are that scale all weights of a block, and the minimum's if it has one.
pub(crate) fn scales(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::F32 | DType::F16 | DType::Bf16 | DType::Mxfp4 => &[],
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 | DType::Iq4Nl | DType::Iq4Xs => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q6K => &[208],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Tq1_0 => &[52],
        DType::Tq2_0 => &[64],
        DType::Iq3S | DType::Iq3Xxs | DType::Iq2S | DType::Iq2Xs | DType::Iq2Xxs => &[0],
    }
}

fn set_scales(dtype: DType, block: &mut [u8], scale: f32, random: &mut Random) {
    let factor = match dtype {
        DType::F32 => return block.copy_from_slice(&(scale * random.unit()).to_le_bytes()),
        DType::Bf16 => {
            let value = bf16::from_f32(scale * random.unit());
            return block.copy_from_slice(&value.to_le_bytes());
        }
        DType::F16 => {
            let value = f16::from_f32(scale * random.unit());
            return block.copy_from_slice(&value.to_le_bytes());
        }
        DType::Mxfp4 => {
            block[0] = (i32::from(block[0] % 4) + 122 + scale.log2() as i32) as u8;
            return;
        }
        DType::Q8_0 | DType::Iq4Nl => 1.0 / 128.0,
        DType::Q4_0 | DType::Q5_0 => 1.0 / 16.0,
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => 1.0 / 32.0,
        DType::Q6K | DType::Iq4Xs => 1.0 / 4096.0,
        DType::Q2K => 1.0 / 64.0,
        DType::Q3K | DType::Iq2S | DType::Iq2Xs | DType::Iq2Xxs => 1.0 / 128.0,
        DType::Iq3S | DType::Iq3Xxs => 1.0 / 256.0,
        DType::Tq1_0 | DType::Tq2_0 => 1.0,
    };
    for at in scales(dtype) {
        let value = f16::from_f32(scale * factor * random.unit());
        block[*at..at + 2].copy_from_slice(&value.to_le_bytes());
    }
}

/// The weights of a matrix in f64, straight from the definition of the layouts.
pub(crate) fn dequantize(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let blocks = bytes.chunks_exact(dtype.block_bytes());
    blocks
        .flat_map(|block| (0..dtype.block_len()).map(move |i| weight(dtype, block, i)))
        .collect()
}

fn half_at(block: &[u8], at: usize) -> f64 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f64()
}

fn bit(bytes: &[u8], index: usize) -> u8 {
    bytes[index / 8] >> (index % 8) & 1
}

fn nibble(bytes: &[u8], i: usize) -> u8 {
    if i < 16 {
        bytes[i] & 15
    } else {
        bytes[i - 16] >> 4
    }
}

fn weight(dtype: DType, b: &[u8], i: usize) -> f64 {
    let d = || half_at(b, 0);
    match dtype {
        DType::F32 => f64::from(f32::from_le_bytes(b.try_into().expect("four bytes"))),
        DType::F16 => d(),
        DType::Bf16 => bf16::from_le_bytes([b[0], b[1]]).to_f64(),
        DType::Q8_0 => d() * f64::from(b[2 + i] as i8),
        DType::Q4_0 => d() * (f64::from(nibble(&b[2..], i)) - 8.0),
        DType::Q4_1 => d() * f64::from(nibble(&b[4..], i)) + half_at(b, 2),
        DType::Q5_0 => {
            let q = nibble(&b[6..], i) | bit(&b[2..6], i) << 4;
            d() * (f64::from(q) - 16.0)
        }
        DType::Q5_1 => {
            let q = nibble(&b[8..], i) | bit(&b[4..8], i) << 4;
            d() * f64::from(q) + half_at(b, 2)
        }
        DType::Q4K => k_weight(b, i, k_nibble(&b[16..], i)),
        DType::Q5K => k_weight(
            b,
            i,
            k_nibble(&b[48..], i) | (b[16 + i % 32] >> (i / 32) & 1) << 4,
        ),
        DType::Q6K => q6_k_weight(b, i),
        DType::Iq4Nl => d() * LEVELS[usize::from(nibble(&b[2..], i))],
        DType::Iq4Xs => iq4_xs_weight(b, i),
        DType::Mxfp4 => {
            let q = nibble(&b[1..], i);
            (f64::from(b[0]) - 127.0).exp2() * e2m1(q)
        }
        DType::Q2K => {
            let (scale, min) = (b[i / 16] & 15, b[i / 16] >> 4);
            half_at(b, 80) * f64::from(scale) * f64::from(two_bits(&b[16..], i))
                - half_at(b, 82) * f64::from(min)
        }
        DType::Q3K => q3_k_weight(b, i),
        DType::Iq3S | DType::Iq3Xxs | DType::Iq2S | DType::Iq2Xs | DType::Iq2Xxs => {
            grid_weight(dtype, b, i)
        }
        DType::Tq1_0 => half_at(b, 52) * ternary(b, i),
        DType::Tq2_0 => half_at(b, 64) * (f64::from(two_bits(b, i)) - 1.0),
    }
}

pub(crate) const LEVELS: [f64; 16] = [
    -127., -104., -83., -65., -49., -35., -22., -10., 1., 13., 25., 38., 53., 69., 89., 113.,
];

fn iq4_xs_weight(b: &[u8], i: usize) -> f64 {
    let sub = i / 32;
    let (low, high) = (
        nibble_at(&b[4..8], sub),
        b[2 + sub / 4] >> (2 * (sub % 4)) & 3,
    );
    let q = nibble(&b[8 + 16 * sub..], i % 32);
    half_at(b, 0) * (f64::from(low | high << 4) - 32.0) * LEVELS[usize::from(q)]
}

/// Points of eight or four neighbours, with signs.
fn grid_weight(dtype: DType, b: &[u8], i: usize) -> f64 {
    let (part, eight, four) = (i / 32, i % 32 / 8, i % 32 / 4);
    let word = |at: usize| u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    let nibble = |byte: u8, high: bool| f64::from(if high { byte >> 4 } else { byte & 15 });
    let of_eight = |code: u16| [8.0, 25.0, 43.0][usize::from(code >> (2 * (i % 8)) & 3)];
    let of_four = |code: u16| usize::from(code >> (4 * (i % 4)) & 15);
    let (scale, magnitude, negative) = match dtype {
        DType::Iq2Xxs => {
            let (code, more) = (
                tables::IQ2_XXS[usize::from(b[2 + 8 * part + eight])],
                word(6 + 8 * part),
            );
            (
                (0.5 + f64::from(more >> 28)) * 0.25,
                of_eight(code),
                even_sign(more >> (7 * eight), i),
            )
        }
        DType::Iq2Xs => {
            let at = 2 + 8 * part + 2 * eight;
            let both = u16::from_le_bytes([b[at], b[at + 1]]);
            let scale = nibble(b[66 + part], eight >= 2);
            let code = tables::IQ2_XS[usize::from(both % 512)];
            (
                (0.5 + scale) * 0.25,
                of_eight(code),
                even_sign(u32::from(both >> 9), i),
            )
        }
        DType::Iq2S => {
            let high = usize::from(b[66 + part] >> (2 * eight) & 3);
            let code = tables::IQ2_S[usize::from(b[2 + 4 * part + eight]) + 256 * high];
            let negative = b[34 + 4 * part + eight] >> (i % 8) & 1 == 1;
            let scale = nibble(b[74 + part], eight >= 2);
            ((0.5 + scale) * 0.25, of_eight(code), negative)
        }
        DType::Iq3Xxs => {
            let code = tables::IQ3_XXS[usize::from(b[2 + 8 * part + four])];
            let more = word(66 + 4 * part);
            let level = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0][of_four(code)];
            (
                (0.5 + f64::from(more >> 28)) * 0.5,
                level,
                even_sign(more >> (7 * eight), i),
            )
        }
        _ => {
            let high = usize::from(b[66 + part] >> four & 1);
            let code = tables::IQ3_S[usize::from(b[2 + 8 * part + four]) + 256 * high];
            let negative = b[74 + 4 * part + eight] >> (i % 8) & 1 == 1;
            let scale = nibble(b[106 + part / 2], part % 2 == 1);
            (1.0 + 2.0 * scale, (1 + 2 * of_four(code)) as f64, negative)
        }
    };
    half_at(b, 0) * scale * if negative { -magnitude } else { magnitude }
}

/// Seven signs and an eighth that makes the number of negative ones even.
fn even_sign(seven: u32, i: usize) -> bool {
    let seven = seven & 127;
    match i % 8 {
        7 => seven.count_ones() % 2 == 1,
        bit => seven >> bit & 1 == 1,
    }
}

/// Columns 128 h .. 128 h + 32 are the lowest bits of bytes 32 h .., the next 32 the bits above.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    let byte = bytes[i / 128 * 32 + i % 32];
    match i % 128 / 32 {
        0 => byte & 3,
        1 => byte >> 2 & 3,
        2 => byte >> 4 & 3,
        _ => byte >> 6,
    }
}

fn q3_k_weight(b: &[u8], i: usize) -> f64 {
    let (s, j) = (&b[96..108], i / 16);
    let low = if j < 8 { s[j] & 15 } else { s[j - 8] >> 4 };
    let scale = low | (s[8 + j % 4] >> (2 * (j / 4)) & 3) << 4;
    let less = if b[i % 32] >> (i / 32) & 1 == 1 {
        0.0
    } else {
        4.0
    };
    let q = f64::from(two_bits(&b[32..], i)) - less;
    half_at(b, 108) * (f64::from(scale) - 32.0) * q
}

/// The digits of bytes, most significant first: five of 32 bytes, of 16, and four of 4.
fn ternary(b: &[u8], i: usize) -> f64 {
    let (byte, digit) = if i < 160 {
        (b[i % 32], i / 32)
    } else if i < 240 {
        (b[32 + (i - 160) % 16], (i - 160) / 16)
    } else {
        (b[48 + (i - 240) % 4], (i - 240) / 4)
    };
    let mut rest = u32::from(byte);
    for _ in 0..digit {
        rest = rest * 3 % 256;
    }
    f64::from(rest * 3 / 256) - 1.0
}

/// Nibble `i` of bytes that hold two after each other.
fn nibble_at(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 2] >> (4 * (i % 2)) & 15
}

/// A float of a sign, two bits of exponent and one of mantissa.
fn e2m1(bits: u8) -> f64 {
    let (exponent, mantissa) = (bits >> 1 & 3, f64::from(bits & 1));
    let magnitude = match exponent {
        0 => mantissa / 2.0,
        _ => (1.0 + mantissa / 2.0) * f64::from(1 << (exponent - 1)),
    };
    if bits & 8 == 0 { magnitude } else { -magnitude }
}

/// Columns 64 j .. 64 j + 32 are the low nibbles of bytes 32 j .., the next 32 the high ones.
fn k_nibble(bytes: &[u8], i: usize) -> u8 {
    let byte = bytes[i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte & 15 } else { byte >> 4 }
}

fn k_weight(b: &[u8], i: usize, q: u8) -> f64 {
    let s = &b[4..16];
    let j = i / 32;
    let (scale, min) = if j < 4 {
        (s[j] & 63, s[j + 4] & 63)
    } else {
        (
            s[j + 4] & 15 | s[j - 4] >> 6 << 4,
            s[j + 4] >> 4 | s[j] >> 6 << 4,
        )
    };
    half_at(b, 0) * f64::from(scale) * f64::from(q) - half_at(b, 2) * f64::from(min)
}

fn q6_k_weight(b: &[u8], i: usize) -> f64 {
    let (half, l) = (i / 128, i % 32);
    let (low, high) = (&b[64 * half..], &b[128 + 32 * half..]);
    let q = match i % 128 / 32 {
        0 => low[l] & 15 | (high[l] & 3) << 4,
        1 => low[l + 32] & 15 | (high[l] >> 2 & 3) << 4,
        2 => low[l] >> 4 | (high[l] >> 4 & 3) << 4,
        _ => low[l + 32] >> 4 | (high[l] >> 6 & 3) << 4,
    };
    half_at(b, 208) * f64::from(b[192 + i / 16] as i8) * (f64::from(q) - 32.0)
}

/// Storage for activations, aligned to 64 bytes.
pub(crate) struct Storage(Vec<[u64; 8]>, usize);

impl Storage {
    pub(crate) fn new(bytes: usize) -> Self {
        Self(vec![[0; 8]; bytes.div_ceil(64)], bytes)
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        // Safe without a cast: the words are not needed as words.
        let len = self.1;
        &mut bytemuck_cast(&mut self.0)[..len]
    }
}

#[expect(unsafe_code, reason = "plain old data as bytes")]
fn bytemuck_cast(words: &mut [[u64; 8]]) -> &mut [u8] {
    // SAFETY: every byte of a `u64` is initialised and any byte is valid in one.
    unsafe { words.align_to_mut::<u8>().1 }
}
