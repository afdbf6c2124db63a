//! Random blocks of every element type, made directly: no weight is ever quantized.
//!
//! Integers are uniform over what their bits can hold, and scales are chosen so that the values
//! have the standard deviation asked for. Layouts are those of `ggml-common.h`.

use half::f16;
use half::slice::HalfFloatSliceExt;

use lacuna_files::DType;

/// Scales differ between blocks by these factors, whose squares average about 1.
const SPREAD: [f32; 8] = [0.72, 0.80, 0.88, 0.96, 1.02, 1.08, 1.14, 1.28];
/// Standard deviations of uniform integers of 4, 5, 6 and 8 bits.
const DEVIATION_4: f32 = 4.609_77;
const DEVIATION_5: f32 = 9.233_09;
const DEVIATION_6: f32 = 18.472_95;
const DEVIATION_8: f32 = 73.9;
/// Root mean squares of the levels of IQ4_NL and IQ4_XS, and of the doubled floats of MXFP4.
const LEVELS_SQUARE: f32 = 67.438_86;
const FLOATS_SQUARE: f32 = 5.852_35;
/// Sub-block scales of IQ4_XS and Q3_K are drawn from -32 to -17 and 16 to 31: their root mean square.
const SUB_SCALE_SIGNED: f32 = 24.443_81;
/// Sub-block scales of Q2_K are drawn from 8 to 15: their root mean square, and the standard deviation of
/// its weights.
const SUB_SCALE_2: f32 = 11.726_04;
const DEVIATION_2: f32 = 1.118_03;
/// Root mean squares of -4 to 3, and of -1 to 1.
const SQUARE_3: f32 = 2.345_21;
const SQUARE_TERNARY: f32 = 0.816_497;
/// Root mean squares of the points of IQ2 and IQ3 types, times what their scales are multiplied with.
const SQUARE_IQ2_XXS: f32 = 23.117_746 / 8.0;
const SQUARE_IQ2_XS: f32 = 24.217_268 / 8.0;
const SQUARE_IQ2_S: f32 = 24.430_343 / 8.0;
const SQUARE_IQ3_XXS: f32 = 30.848_673 / 4.0;
const SQUARE_IQ3_S: f32 = 7.594_2;
/// Sub-block scales of IQ2 and IQ3 types are odd numbers from 17 to 31: their root mean square.
const SUB_SCALE_ODD: f32 = 24.433_58;
/// Sub-block scales of Q4_K and Q5_K are drawn from 32 to 63, those of Q6_K from 16 to 47: their
/// root mean squares.
const SUB_SCALE_K: f32 = 48.385_78;
const SUB_SCALE_6: f32 = 32.830_07;

/// A stream of random weights, the same for the same seeds on every machine.
#[derive(Clone, Debug)]
pub(crate) struct Generator {
    state: u64,
}

/// SplitMix64 (Steele, Lea, Flood 2014): one multiplication chain per eight bytes, and any state is
/// a good one, so that every tensor can start its own stream.
impl Generator {
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        let mut generator = Self { state: seed };
        let state = generator
            .next()
            .wrapping_add(stream.wrapping_mul(0xd134_2543_de82_ef95));
        Self { state }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.state;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn bytes(&mut self, out: &mut [u8]) {
        for piece in out.chunks_mut(8) {
            piece.copy_from_slice(&self.next().to_le_bytes()[..piece.len()]);
        }
    }

    /// Fills whole blocks of `dtype` with values of mean 0 and this standard deviation.
    pub(super) fn fill(&mut self, dtype: DType, deviation: f32, out: &mut [u8]) {
        match dtype {
            DType::F32 => self.f32(deviation, out),
            DType::F16 => self.f16(deviation, out),
            DType::Bf16 => self.bf16(deviation, out),
            DType::Q8_0 => self.q8_0(deviation, out),
            DType::Q4_0 => self.centred(
                Scales::new(deviation / DEVIATION_4),
                out.as_chunks_mut::<18>().0,
            ),
            DType::Q5_0 => self.centred(
                Scales::new(deviation / DEVIATION_5),
                out.as_chunks_mut::<22>().0,
            ),
            DType::Q4_1 => self.offset(
                Scales::new(deviation / DEVIATION_4),
                7.5,
                out.as_chunks_mut::<20>().0,
            ),
            DType::Q5_1 => self.offset(
                Scales::new(deviation / DEVIATION_5),
                15.5,
                out.as_chunks_mut::<24>().0,
            ),
            DType::Q4K => {
                let scales = Scales::new(deviation / (DEVIATION_4 * SUB_SCALE_K));
                self.sub_scaled(&scales, 7.5, out.as_chunks_mut::<144>().0);
            }
            DType::Q5K => {
                let scales = Scales::new(deviation / (DEVIATION_5 * SUB_SCALE_K));
                self.sub_scaled(&scales, 15.5, out.as_chunks_mut::<176>().0);
            }
            DType::Q6K => self.q6_k(deviation, out),
            DType::Iq4Nl => self.centred(
                Scales::new(deviation / LEVELS_SQUARE),
                out.as_chunks_mut::<18>().0,
            ),
            DType::Iq4Xs => {
                let scales = Scales::new(deviation / (LEVELS_SQUARE * SUB_SCALE_SIGNED));
                self.iq4_xs(&scales, out.as_chunks_mut::<136>().0);
            }
            DType::Q2K => {
                let scales = Scales::new(deviation / (DEVIATION_2 * SUB_SCALE_2));
                self.q2_k(&scales, out.as_chunks_mut::<84>().0);
            }
            DType::Q3K => {
                let scales = Scales::new(deviation / (SQUARE_3 * SUB_SCALE_SIGNED));
                self.q3_k(&scales, out.as_chunks_mut::<110>().0);
            }
            DType::Iq2Xxs => {
                let scales = Scales::new(deviation / (SQUARE_IQ2_XXS * SUB_SCALE_ODD));
                self.points(&scales, (9, 8), out.as_chunks_mut::<66>().0);
            }
            DType::Iq2Xs => {
                let scales = Scales::new(deviation / (SQUARE_IQ2_XS * SUB_SCALE_ODD));
                self.points(&scales, (66, 1), out.as_chunks_mut::<74>().0);
            }
            DType::Iq2S => {
                let scales = Scales::new(deviation / (SQUARE_IQ2_S * SUB_SCALE_ODD));
                self.points(&scales, (74, 1), out.as_chunks_mut::<82>().0);
            }
            DType::Iq3Xxs => {
                let scales = Scales::new(deviation / (SQUARE_IQ3_XXS * SUB_SCALE_ODD));
                self.points(&scales, (69, 4), out.as_chunks_mut::<98>().0);
            }
            DType::Iq3S => {
                let scales = Scales::new(deviation / (SQUARE_IQ3_S * SUB_SCALE_ODD));
                self.points(&scales, (106, 1), out.as_chunks_mut::<110>().0);
            }
            DType::Tq1_0 => {
                // Bytes are fractions of 256, rounded up, of which all digits of base 3 are known.
                let byte = |random: u64| (((random * 243) >> 32) * 256).div_ceil(243) as u8;
                let scales = Scales::new(deviation / SQUARE_TERNARY);
                self.ternary(&scales, byte, out.as_chunks_mut::<54>().0);
            }
            DType::Tq2_0 => {
                let byte = |random: u64| {
                    let digits = (random * 81) >> 32;
                    let digit = |n: u32| (digits / 3_u64.pow(n) % 3) << (2 * n);
                    (0..4).map(digit).sum::<u64>() as u8
                };
                let scales = Scales::new(deviation / SQUARE_TERNARY);
                self.ternary(&scales, byte, out.as_chunks_mut::<66>().0);
            }
            DType::Mxfp4 => self.mxfp4(deviation / FLOATS_SQUARE, out.as_chunks_mut::<17>().0),
        }
    }

    /// Uniform over plus and minus the square root of 3 deviations.
    pub(crate) fn value(&mut self, deviation: f32) -> f32 {
        const HALF_WIDTH: f32 = 1.732_050_8;
        let integer = (self.next() >> 32) as u32 as i32;
        integer as f32 * (deviation * HALF_WIDTH / 2_147_483_648.0)
    }

    fn f32(&mut self, deviation: f32, out: &mut [u8]) {
        for bytes in out.as_chunks_mut::<4>().0 {
            *bytes = self.value(deviation).to_le_bytes();
        }
    }

    fn bf16(&mut self, deviation: f32, out: &mut [u8]) {
        for bytes in out.as_chunks_mut::<2>().0 {
            let [_, _, low, high] = self.value(deviation).to_le_bytes();
            *bytes = [low, high];
        }
    }

    /// Converts in groups, which uses the processor's instruction for it.
    fn f16(&mut self, deviation: f32, out: &mut [u8]) {
        let (mut values, mut halves) = ([0.0f32; 64], [f16::ZERO; 64]);
        for group in out.chunks_mut(128) {
            values.fill_with(|| self.value(deviation));
            halves.convert_from_f32_slice(&values);
            for (bytes, half) in group.as_chunks_mut::<2>().0.iter_mut().zip(&halves) {
                *bytes = half.to_le_bytes();
            }
        }
    }

    /// Scale, then 32 signed bytes. -128 never occurs in quantized models, and kernels rely on
    /// that.
    fn q8_0(&mut self, deviation: f32, out: &mut [u8]) {
        let scales = Scales::new(deviation / DEVIATION_8);
        for block in out.as_chunks_mut::<34>().0 {
            self.bytes(&mut block[2..]);
            for byte in &mut block[2..] {
                *byte = if *byte == 0x80 { 0x81 } else { *byte };
            }
            let (scale, _) = scales.pick(self.next());
            block[..2].copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// Q4_0 and Q5_0: a scale, then only bits. Their integers are half a step below 0 on average,
    /// so the scale's sign is drawn too.
    fn centred<const N: usize>(&mut self, scales: Scales, out: &mut [[u8; N]]) {
        for block in out {
            self.bytes(&mut block[2..]);
            let choice = self.next();
            let (scale, _) = scales.pick(choice);
            let signed = if choice >> 63 == 0 { scale } else { -scale };
            block[..2].copy_from_slice(&signed.to_le_bytes());
        }
    }

    /// Q4_1 and Q5_1: scale and minimum, then only bits; the minimum puts the middle at 0.
    fn offset<const N: usize>(&mut self, scales: Scales, middle: f32, out: &mut [[u8; N]]) {
        for block in out {
            self.bytes(&mut block[4..]);
            let (scale, value) = scales.pick(self.next());
            block[..2].copy_from_slice(&scale.to_le_bytes());
            block[2..4].copy_from_slice(&f16::from_f32(-value * middle).to_le_bytes());
        }
    }

    /// Q4_K and Q5_K: scale and minimum scale, 8 sub-scales and 8 sub-minima of 6 bits, then only
    /// bits. Sub-minima equal sub-scales, so that one ratio puts the middle of every sub-block at
    /// 0.
    fn sub_scaled<const N: usize>(&mut self, scales: &Scales, middle: f32, out: &mut [[u8; N]]) {
        for block in out {
            self.bytes(&mut block[16..]);
            let (scale, value) = scales.pick(self.next());
            block[..2].copy_from_slice(&scale.to_le_bytes());
            block[2..4].copy_from_slice(&f16::from_f32(value * middle).to_le_bytes());
            let sub = self.next().to_le_bytes().map(|byte| 32 | (byte & 31));
            for j in 0..4 {
                let (low, high) = (sub[j], sub[j + 4]);
                block[4 + j] = low | ((high >> 4) << 6);
                block[8 + j] = low | ((high >> 4) << 6);
                block[12 + j] = (high & 15) | ((high & 15) << 4);
            }
        }
    }

    /// A scale, 8 sub-scales of 6 bits less 32, whose upper two bits are equal, then only bits.
    fn iq4_xs(&mut self, scales: &Scales, out: &mut [[u8; 136]]) {
        for block in out {
            self.bytes(&mut block[2..]);
            for bits in &mut block[2..4] {
                let low = *bits & 0x55;
                *bits = low | (low << 1);
            }
            let (scale, _) = scales.pick(self.next());
            block[..2].copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// 16 sub-scales with equal sub-minima, so that one ratio puts the middle of every sub-block at 0, then
    /// only bits, the scale and the minimum's.
    fn q2_k(&mut self, scales: &Scales, out: &mut [[u8; 84]]) {
        for block in out {
            self.bytes(&mut block[..80]);
            for sub in &mut block[..16] {
                *sub = 0x88 | ((*sub & 7) * 0x11);
            }
            let (scale, value) = scales.pick(self.next());
            block[80..82].copy_from_slice(&scale.to_le_bytes());
            block[82..].copy_from_slice(&f16::from_f32(1.5 * value).to_le_bytes());
        }
    }

    /// Only bits, then 16 sub-scales of 6 bits less 32, whose upper two bits are equal, and the scale.
    fn q3_k(&mut self, scales: &Scales, out: &mut [[u8; 110]]) {
        for block in out {
            self.bytes(&mut block[..108]);
            for bits in &mut block[104..108] {
                let low = *bits & 0x55;
                *bits = low | (low << 1);
            }
            let (scale, _) = scales.pick(self.next());
            block[108..].copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// A scale, then only bits; bytes from the first one to the end, at a distance, hold sub-scales of four
    /// bits: the upper nibble, or both.
    fn points<const N: usize>(
        &mut self,
        scales: &Scales,
        (first, distance): (usize, usize),
        out: &mut [[u8; N]],
    ) {
        for block in out {
            self.bytes(&mut block[2..]);
            for sub in block[first..].iter_mut().step_by(distance) {
                *sub |= if distance == 1 { 0x88 } else { 0x80 };
            }
            let (scale, _) = scales.pick(self.next());
            block[..2].copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// Bytes of digits of base 3, as `byte` makes them of 32 random bits, then the scale.
    fn ternary<const N: usize>(
        &mut self,
        scales: &Scales,
        byte: impl Fn(u64) -> u8,
        out: &mut [[u8; N]],
    ) {
        for block in out {
            let (digits, end) = block.split_at_mut(N - 2);
            digits.fill_with(|| byte(self.next() >> 32));
            let (scale, _) = scales.pick(self.next());
            end.copy_from_slice(&scale.to_le_bytes());
        }
    }

    /// A power of two, then only bits: of the two powers around the scale, each as often as makes their
    /// squares that of the scale on average.
    fn mxfp4(&mut self, scale: f32, out: &mut [[u8; 17]]) {
        // The exponent of the float is that of the power below.
        let below = (scale.to_bits() >> 23) as i32 - 127;
        let ratio = f32::from_bits(scale.to_bits() & 0x7F_FFFF | 127 << 23);
        let above = f64::from((ratio * ratio - 1.0) / 3.0) * 2f64.powi(32);
        for block in out {
            self.bytes(&mut block[1..]);
            let more = f64::from((self.next() >> 32) as u32) < above;
            block[0] = (below + 128 + i32::from(more)).clamp(0, 254) as u8;
        }
    }

    /// 4 low bits and 2 high bits per element, 16 signed sub-scales, a scale.
    fn q6_k(&mut self, deviation: f32, out: &mut [u8]) {
        let scales = Scales::new(deviation / (DEVIATION_6 * SUB_SCALE_6));
        for block in out.as_chunks_mut::<210>().0 {
            self.bytes(&mut block[..208]);
            for sub in &mut block[192..208] {
                let size = 16 + (*sub & 31);
                *sub = if *sub >> 7 == 0 {
                    size
                } else {
                    size.wrapping_neg()
                };
            }
            let (scale, _) = scales.pick(self.next());
            block[208..].copy_from_slice(&scale.to_le_bytes());
        }
    }
}

/// The block scales to draw from: as stored, and as the number that is stored.
struct Scales([(f16, f32); 8]);

impl Scales {
    fn new(scale: f32) -> Self {
        Self(SPREAD.map(|factor| {
            let stored = f16::from_f32(scale * factor);
            (stored, stored.to_f32())
        }))
    }

    fn pick(&self, random: u64) -> (f16, f32) {
        self.0[(random & 7) as usize]
    }
}
