//! Sixteen lanes of f32 or u32, at each instruction-set level.
//!
//! The kernels are written once, generic over [`Simd`]; a level supplies the lane operations. A
//! value of a level is the proof that the CPU has its instructions: it is made by the level's
//! `detect` only, so the kernels themselves are safe code. Everything is inlined into the one
//! function per kernel and level that enables the instructions, [`Simd::vectorize`]. What is written
//! for one level alone asks for its proof: `Simd::avx2`, `Simd::avx512`.
//!
//! Lane sums have one fixed order at all levels: lanes `i` and `i + 8`, then `i + 4`, `i + 2`,
//! `i + 1`. With fused multiply-add, results are the same on all levels; the portable level uses
//! separate roundings for floats, and fused ones only where quantized blocks are accumulated.

/// An array whose element `i` is an expression of `i`.
///
/// Unlike `std::array::from_fn` it makes no closure: a closure would be compiled without the
/// instructions of the level and keep vectors out of registers.
macro_rules! each {
    ($init:expr, |$i:ident| $element:expr) => {{
        let mut array = [$init; _];
        for $i in 0..array.len() {
            array[$i] = $element;
        }
        array
    }};
}
pub(crate) use each;

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) mod avx512;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
pub(crate) mod portable;
#[cfg(test)]
mod tests;

use crate::activations::{ActivationBlock, BLOCK};
use crate::level::Level;
use crate::processor::multiplies_bf16_faster;
use crate::tile::Tile;

/// Lanes of every vector.
pub(crate) const LANES: usize = 16;

/// A word of each lane, in memory.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Line(pub(crate) [u32; LANES]);

impl Line {
    pub(crate) const ZERO: Self = Self([0; LANES]);
}

/// A float of each lane, in memory: aligned so that loads do not straddle cache lines.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Chunk(pub(crate) [f32; LANES]);

impl Chunk {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);
}

/// An operation that can run at any level.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// Whether it, or what it runs at a level, multiplies bytes or prepares them for that. What does not is the
    /// same at levels that differ in that alone.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "read by levels of x86-64")
    )]
    const MULTIPLIES_BYTES: bool = false;

    /// Runs at the level of `simd`; must be `#[inline(always)]`, like all it calls in its loops.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// How many registers a kernel may count on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Registers {
    /// Few: a vector takes several of them.
    Few,
    /// Thirty-two, each a whole vector.
    Many,
}

/// How a level multiplies bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Products {
    /// By [`Simd::dot4`], in one instruction.
    Quads,
    /// In two steps. Small ones are summed in 16 bits first, by [`Simd::add_pairs`]; others are
    /// widened to 16 bits and summed in 32, by [`Simd::dot2`].
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only levels of x86-64 do")
    )]
    Pairs,
    /// By [`Simd::dot_squares`], in one instruction.
    #[cfg_attr(
        not(target_arch = "aarch64"),
        expect(dead_code, reason = "only levels of 64-bit ARM do")
    )]
    Squares,
}

/// How a level multiplies one token.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum SingleToken {
    /// Sixteen rows side by side, like a few tokens.
    Sixteen,
    /// Eight rows side by side, as is written for AVX2.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only levels of x86-64 do")
    )]
    Eight,
    /// Sixteen rows one after the other, as is written for NEON.
    #[cfg_attr(
        not(target_arch = "aarch64"),
        expect(dead_code, reason = "only levels of 64-bit ARM do")
    )]
    EachRow,
}

/// Proof that the CPU multiplies pairs of bf16 and adds them up in f32: no level, because few kernels use it.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Products(());

impl Bf16Products {
    /// The instructions, if this CPU has them beside a level.
    pub(crate) fn detect(level: Level) -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        if matches!(level, Level::Avx512Vnni | Level::Amx) {
            return is_x86_feature_detected!("avx512bf16").then_some(Self(()));
        }
        let _ = level;
        None
    }

    /// Whether a level has them, and they are faster than products in f32 for many tokens and no slower for one; with AMX one
    /// token takes longer.
    pub(crate) fn are_faster(level: Level) -> bool {
        level == Level::Avx512Vnni && multiplies_bf16_faster() && Self::detect(level).is_some()
    }
}

/// A level: the lane operations and the proof that this CPU has them.
pub(crate) trait Simd: Copy + Send + Sync + 'static {
    /// Sixteen f32.
    type F: Copy;
    /// Sixteen u32, or 64 bytes.
    type U: Copy;

    /// Guides the sizes of register tiles.
    const REGISTERS: Registers;
    /// Tokens per tile of quantized activations, at most 6.
    const TOKENS: usize;
    /// Sixteen-row tiles per packed panel, 1 or 2.
    const TILES: usize;
    /// How bytes of packed panels are multiplied.
    const PRODUCTS: Products;
    /// How one token is multiplied.
    const SINGLE_TOKEN: SingleToken;
    /// What [`Simd::dot_start`] takes for nothing; the sum of the activations is in it too.
    const START: i32;
    /// Whether a level of these operations has AMX.
    #[cfg(target_arch = "x86_64")]
    const MAY_HAVE_AMX: bool = false;

    /// The proof that the CPU has AVX2, where the level has it: for what is written for it alone.
    #[cfg(target_arch = "x86_64")]
    fn avx2(self) -> Option<avx2::Avx2> {
        None
    }

    /// The same of AVX-512 VNNI.
    #[cfg(target_arch = "x86_64")]
    fn avx512(self) -> Option<avx512::Avx512Vnni> {
        None
    }

    /// The proof that the CPU multiplies tiles, where the level in use has it.
    #[cfg(target_arch = "x86_64")]
    fn amx(self) -> Option<amx::Amx> {
        None
    }

    /// Adds products of sixteen signed bytes and as many others, which are not -128, four to a lane.
    #[cfg(target_arch = "aarch64")]
    fn dot_sixteen(
        self,
        sum: std::arch::aarch64::int32x4_t,
        a: std::arch::aarch64::int8x16_t,
        b: std::arch::aarch64::int8x16_t,
    ) -> std::arch::aarch64::int32x4_t {
        neon::Bytes::dot(neon::Widening, sum, a, b)
    }

    /// Runs `kernel` compiled for this level.
    fn vectorize<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, x: f32) -> Self::F;
    fn load(self, x: &[f32; 16]) -> Self::F;
    fn store(self, x: Self::F, out: &mut [f32; 16]);
    /// Little-endian binary32.
    fn load_f32_bytes(self, x: &[u8; 64]) -> Self::F;
    /// Little-endian binary16.
    fn load_f16(self, x: &[u8; 32]) -> Self::F;
    /// Little-endian upper halves of binary32.
    fn load_bf16(self, x: &[u8; 32]) -> Self::F;
    /// Signed bytes.
    fn load_i8(self, x: &[u8; 16]) -> Self::F;
    /// What the low nibbles of bytes name in a table, then the high ones.
    fn load_named(self, table: &[i8; 16], x: &[u8; 16]) -> [Self::F; 2];
    /// The same as bytes.
    #[inline(always)]
    fn named(self, table: &[i8; 16], x: &[u8; 16]) -> [u8; 32] {
        each!(0, |i| {
            let nibble = x[i % 16] >> (i / 16 * 4) & 15;
            table[usize::from(nibble)].cast_unsigned()
        })
    }
    /// Eight little-endian binary16, then eight more.
    fn load_f16_halves(self, x: [&[u8; 16]; 2]) -> Self::F;
    /// Eight f32 in lanes 0 to 7, and again in lanes 8 to 15.
    fn load_twice(self, x: &[f32; 8]) -> Self::F;
    /// A little-endian binary16 in every lane.
    fn splat_f16(self, x: u16) -> Self::F;
    /// Little-endian binary16, rounded to nearest even.
    fn store_f16(self, x: Self::F, out: &mut [u8; 32]);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, fused where the level has it.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a * b + c`, always fused.
    fn fused(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a > b ? a : b`: `b` if one is not a number.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `2^x` for whole `x` in `-127..=127`; `2^-127` is 0.
    fn exp2_whole(self, x: Self::F) -> Self::F;
    /// The first `n` lanes of `x`, then `fill`.
    fn keep_first(self, x: Self::F, n: usize, fill: Self::F) -> Self::F;
    /// The sum of all lanes.
    fn sum(self, x: Self::F) -> f32;
    /// The largest lane; what it is if a lane is not a number depends on the level.
    fn max_lane(self, x: Self::F) -> f32;
    /// Lane `j` of the result is the sum of the lanes of `x[j]`.
    fn sum_each(self, x: [Self::F; 16]) -> Self::F;
    /// Lane `j` of the result is the sum of lanes 0 to 7 of `x[j]`, lane `8 + j` that of lanes 8 to
    /// 15: lanes `i` and `i + 4`, then `i + 2`, `i + 1`.
    fn sum_halves(self, x: [Self::F; 8]) -> Self::F;

    /// Lane `r` of element `c` of the result is lane `c` of element `r`.
    #[inline(always)]
    fn transpose(self, x: [Self::F; 16]) -> [Self::F; 16] {
        let mut lanes = [[0.0; LANES]; LANES];
        for r in 0..LANES {
            self.store(x[r], &mut lanes[r]);
        }
        each!(x[0], |c| {
            let column = each!(0.0, |r| lanes[r][c]);
            self.load(&column)
        })
    }

    /// The same of each half: lane `r` of element `c` is lane `c` of element `r`, lane `8 + r` is lane `8 + c`.
    #[inline(always)]
    fn transpose_halves(self, x: [Self::F; 8]) -> [Self::F; 8] {
        let mut lanes = [[0.0; LANES]; LANES / 2];
        for r in 0..LANES / 2 {
            self.store(x[r], &mut lanes[r]);
        }
        each!(x[0], |c| {
            let column = each!(0.0, |r| lanes[r % 8][r / 8 * 8 + c]);
            self.load(&column)
        })
    }

    /// The lanes, each pair of those that are `APART` (1, 2, 4 or 8) apart exchanged.
    fn exchange<const APART: usize>(self, x: Self::F) -> Self::F;

    fn u_splat(self, x: u32) -> Self::U;
    fn u_load(self, x: &[u32; 16]) -> Self::U;
    fn u_store(self, x: Self::U, out: &mut [u32; 16]);
    fn u_and(self, a: Self::U, b: Self::U) -> Self::U;
    fn u_or(self, a: Self::U, b: Self::U) -> Self::U;
    fn u_xor(self, a: Self::U, b: Self::U) -> Self::U;
    fn u_mul(self, a: Self::U, b: Self::U) -> Self::U;
    fn u_shl(self, x: Self::U, bits: u32) -> Self::U;
    fn u_shr(self, x: Self::U, bits: u32) -> Self::U;
    /// Arithmetic shift.
    fn i_shr(self, x: Self::U, bits: u32) -> Self::U;
    /// Bytes of eight words, below 64, or their negatives where a bit says so, and 64 more: of word `g`, bits `4 * g ..` of each
    /// lane.
    #[inline(always)]
    fn with_signs(self, magnitudes: [Self::U; 8], bits: Self::U) -> [Self::U; 8] {
        let offsets = self.u_splat(0x4040_4040);
        each!(bits, |g| {
            let bits = self.u_and(self.u_shr(bits, 4 * g as u32), self.u_splat(15));
            // Four bits times the constant puts bit `i` at bit `8 * i`, and others elsewhere.
            let spread = self.u_mul(bits, self.u_splat(0x0020_4081));
            let ones = self.u_and(spread, self.u_splat(0x0101_0101));
            // Seven ones in bytes that are negated. A magnitude without them is 127 less it, and no byte reaches the next one.
            let sevens = self.u_sub(self.u_shl(ones, 7), ones);
            let turned = self.u_xor(magnitudes[g], sevens);
            self.u_sub(self.u_add(turned, offsets), sevens)
        })
    }
    /// The bits of lanes as floats.
    fn bits_to_f32(self, x: Self::U) -> Self::F;
    /// The bits of floats.
    #[cfg_attr(
        not(any(target_arch = "x86_64", test)),
        expect(dead_code, reason = "for tiles that x86-64 multiplies")
    )]
    #[inline(always)]
    fn to_bits(self, x: Self::F) -> Self::U {
        let mut lanes = [0.0; LANES];
        self.store(x, &mut lanes);
        self.u_load(&lanes.map(f32::to_bits))
    }
    /// Lanes as signed integers to floats.
    fn i_to_f32(self, x: Self::U) -> Self::F;
    /// The binary16 in the lower half of each lane.
    fn f16_low(self, x: Self::U) -> Self::F;

    /// Lane `r`: the binary16 at `at` of row `r`.
    ///
    /// # Panics
    /// When `at + 2` exceeds the row.
    fn f16_column(self, tile: &Tile<'_>, at: usize) -> Self::F;
    /// Lane `r`: the four bytes at `at` of row `r`.
    ///
    /// # Panics
    /// When `at + 4` exceeds the row.
    fn gather(self, tile: &Tile<'_>, at: usize) -> Self::U;
    /// Sixteen bytes at `at` of each row; lane `r` of group `g` is bytes `4 * g ..` of row `r`.
    ///
    /// # Panics
    /// When `at + 16` exceeds the row.
    fn columns(self, tile: &Tile<'_>, at: usize) -> [Self::U; 4];

    /// The largest magnitude of all lanes; not a number if one is not.
    #[inline(always)]
    fn largest(self, x: [Self::F; 2]) -> f32 {
        let mut largest = 0;
        for x in x {
            let mut lanes = [0.0_f32; LANES];
            self.store(x, &mut lanes);
            for lane in lanes {
                // As integers, of which those that are not numbers are the largest.
                largest = largest.max(lane.to_bits() & 0x7FFF_FFFF);
            }
        }
        f32::from_bits(largest)
    }
    /// Lanes between -127 and 127 as signed bytes, to nearest even, four to a word, and the sums of
    /// both vectors' bytes. A lane that is not a number may become any byte.
    #[inline(always)]
    fn to_bytes(self, x: [Self::F; 2]) -> ([u32; 8], [i32; 2]) {
        let (mut words, mut sums) = ([0; 8], [0; 2]);
        for half in 0..2 {
            let mut lanes = [0.0_f32; LANES];
            self.store(x[half], &mut lanes);
            let bytes: [i8; LANES] = each!(0, |i| lanes[i].round_ties_even() as i8);
            sums[half] = bytes.iter().map(|byte| i32::from(*byte)).sum();
            for i in 0..4 {
                words[4 * half + i] = word(each!(0, |j| bytes[4 * i + j]));
            }
        }
        (words, sums)
    }

    /// Prepares bytes as weights for [`Simd::dot4`]: each byte plus `offset`, wrapping, is the
    /// signed weight.
    fn weights(self, bytes: Self::U, offset: i8) -> Self::U;
    /// Start of integer sums. `bias` holds start values of [`ActivationBlock`](crate::activations)s, which some
    /// levels use to correct an unsigned representation of the weights.
    #[inline(always)]
    fn dot_start(self, _bias: Self::U) -> Self::U {
        self.u_splat(0)
    }
    /// Signed bytes as 16-bit numbers: bytes 0 and 1 of each lane, and bytes 2 and 3.
    #[inline(always)]
    fn widen(self, bytes: Self::U) -> [Self::U; 2] {
        let lanes = lanes(self, bytes);
        let wide: [_; 2] = each!([0; LANES], |i| each!(0, |lane| {
            let bytes = lanes[lane].to_le_bytes();
            pair([bytes[2 * i] as i8, bytes[2 * i + 1] as i8])
        }));
        each!(bytes, |i| self.u_load(&wide[i]))
    }
    /// The same of 32 bytes.
    #[inline(always)]
    fn widen_all(self, bytes: &[u32; 8]) -> [u32; 16] {
        each!(0, |i| {
            let bytes = bytes[i / 2].to_le_bytes();
            let at = 2 * (i % 2);
            pair([bytes[at] as i8, bytes[at + 1] as i8])
        })
    }
    /// Adds to each lane the product of two 16-bit numbers and two others.
    #[inline(always)]
    fn dot2(self, sum: Self::U, weights: Self::U, activations: u32) -> Self::U {
        let (mut sums, mut lanes) = ([0; LANES], [0; LANES]);
        self.u_store(sum, &mut sums);
        self.u_store(weights, &mut lanes);
        let [a, b] = unpair(activations);
        let sums = each!(0, |lane| {
            let [x, y] = unpair(lanes[lane]);
            (x * a + y * b).wrapping_add_unsigned(sums[lane]) as u32
        });
        self.u_load(&sums)
    }
    /// Adds products of four unsigned weights and four signed bytes to two 16-bit sums per lane.
    #[inline(always)]
    fn add_pairs(self, sums: Self::U, weights: Self::U, activations: u32) -> Self::U {
        let (all, lanes) = (lanes(self, sums), lanes(self, weights));
        let x = activations.to_le_bytes();
        let all = each!(0, |lane| {
            let w = lanes[lane].to_le_bytes();
            let term = |i: usize| i32::from(w[i]) * i32::from(x[i] as i8);
            let [a, b] = unpair(all[lane]);
            let sums = [a + term(0) + term(1), b + term(2) + term(3)];
            u32::from(sums[0] as u16) | u32::from(sums[1] as u16) << 16
        });
        self.u_load(&all)
    }
    /// The two 16-bit sums of each lane as one.
    #[inline(always)]
    fn sum_pairs(self, sums: Self::U) -> Self::U {
        self.dot2(self.u_splat(0), sums, 0x0001_0001)
    }
    /// The lanes of both in turn: those of the first halves, and of the second ones.
    #[inline(always)]
    fn zip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        let (a, b) = (lanes(self, a), lanes(self, b));
        let zipped: [[u32; LANES]; 2] = each!([0; LANES], |half| each!(0, |i| {
            let at = LANES / 2 * half + i / 2;
            if i % 2 == 0 { a[at] } else { b[at] }
        }));
        each!(self.u_splat(0), |half| self.u_load(&zipped[half]))
    }
    /// The even lanes of both, and the odd ones: what [`Simd::zip`] was given.
    #[inline(always)]
    fn unzip(self, a: Self::U, b: Self::U) -> [Self::U; 2] {
        let (a, b) = (lanes(self, a), lanes(self, b));
        let unzipped: [[u32; LANES]; 2] = each!([0; LANES], |odd| each!(0, |i| {
            let at = 2 * i + odd;
            if at < LANES { a[at] } else { b[at - LANES] }
        }));
        each!(self.u_splat(0), |odd| self.u_load(&unzipped[odd]))
    }
    /// Products of eight rows and two tokens: of lanes `2 * r` and `2 * r + 1` of the weights, eight signed
    /// bytes of row `r`, and eight of the activations. To lane `2 * r` that of the first two words is
    /// added, to the next one that of the others.
    #[inline(always)]
    fn dot_squares(self, sums: Self::U, weights: Self::U, activations: [u32; 4]) -> Self::U {
        let (sums, weights) = (lanes(self, sums), lanes(self, weights));
        let sums = each!(0, |i| {
            let mut sum = sums[i];
            for word in 0..2 {
                let w = weights[i / 2 * 2 + word].to_le_bytes();
                let x = activations[i % 2 * 2 + word].to_le_bytes();
                for (w, x) in w.into_iter().zip(x) {
                    let product = i32::from(w.cast_signed()) * i32::from(x.cast_signed());
                    sum = sum.wrapping_add_signed(product);
                }
            }
            sum
        });
        self.u_load(&sums)
    }
    /// The bytes of the table that the bytes of `index`, which are below 16, name.
    #[inline(always)]
    fn lookup(self, table: &[u8; 16], index: Self::U) -> Self::U {
        let index = lanes(self, index);
        let found = each!(0, |lane| {
            let bytes = index[lane].to_le_bytes();
            u32::from_le_bytes(each!(0, |i| table[usize::from(bytes[i] & 15)]))
        });
        self.u_load(&found)
    }
    /// Pairs of neighbours rounded to bf16, to nearest even, the first of each in the lower half: of the first
    /// vector in lanes 0 to 7, of the second in lanes 8 to 15.
    #[inline(always)]
    fn round_pairs(self, _: Bf16Products, x: [Self::F; 2]) -> Self::F {
        let mut floats = [[0.0; LANES]; 2];
        for (x, floats) in x.into_iter().zip(&mut floats) {
            self.store(x, floats);
        }
        let bits = |x: f32| u32::from(half::bf16::from_f32(x).to_bits());
        let floats = floats.as_flattened();
        let pairs = each!(0, |i| bits(floats[2 * i]) | bits(floats[2 * i + 1]) << 16);
        self.bits_to_f32(self.u_load(&pairs))
    }
    /// Rounded to bf16, to nearest even: the lanes of the first vector in the lower halves, of the second in the upper.
    #[inline(always)]
    fn round_rows(self, proof: Bf16Products, x: [Self::F; 2]) -> Self::F {
        let mut rows = [[0.0; LANES]; 2];
        for (x, row) in x.into_iter().zip(&mut rows) {
            self.store(x, row);
        }
        let pair = |lane: usize| [rows[0][lane], rows[1][lane]];
        let mut pairs = [[0.0; LANES]; 2];
        for lane in 0..LANES {
            pairs.as_flattened_mut()[2 * lane..][..2].copy_from_slice(&pair(lane));
        }
        self.round_pairs(proof, [self.load(&pairs[0]), self.load(&pairs[1])])
    }
    /// Of two rows of [rounded pairs](Simd::round_pairs), what [`Simd::round_rows`] makes of their first sixteen elements,
    /// and of their last.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn rows_of_pairs(self, _: Bf16Products, rows: [Self::F; 2]) -> [Self::F; 2] {
        let [first, second] = rows.map(|row| lanes(self, self.to_bits(row)));
        each!(self.splat(0.0), |half| {
            let pairs = each!(0, |i| {
                let lane = LANES / 2 * half + i / 2;
                match i % 2 {
                    0 => first[lane] & 0xFFFF | second[lane] << 16,
                    _ => first[lane] >> 16 | second[lane] & 0xFFFF_0000,
                }
            });
            self.bits_to_f32(self.u_load(&pairs))
        })
    }
    /// Adds to each lane the products of two pairs of bf16. What is subnormal may count as zero.
    #[inline(always)]
    fn multiply_pairs(self, _: Bf16Products, a: Self::F, b: Self::F, sum: Self::F) -> Self::F {
        let (mut pairs, mut sums) = ([[0.0; LANES]; 2], [0.0; LANES]);
        self.store(a, &mut pairs[0]);
        self.store(b, &mut pairs[1]);
        self.store(sum, &mut sums);
        let [a, b] = pairs.map(|pairs| pairs.map(f32::to_bits));
        let upper = |pair: u32| f32::from_bits(pair & 0xFFFF_0000);
        let sums = each!(0.0, |i| {
            let sum = upper(a[i]).mul_add(upper(b[i]), sums[i]);
            upper(a[i] << 16).mul_add(upper(b[i] << 16), sum)
        });
        self.load(&sums)
    }
    /// Thirty-two bytes, then thirty-two more.
    fn u_halves(self, x: [&[u8; 32]; 2]) -> Self::U;
    fn u_add(self, a: Self::U, b: Self::U) -> Self::U;
    fn u_sub(self, a: Self::U, b: Self::U) -> Self::U;
    /// Sixteen little-endian u16, eight from each.
    fn widen_words(self, x: [&[u8; 16]; 2]) -> Self::U;
    /// Sixteen binary16.
    #[cfg_attr(
        not(any(target_arch = "x86_64", test)),
        expect(dead_code, reason = "for formats that x86-64 unpacks so")
    )]
    fn f16_each(self, x: [u16; 16]) -> Self::F;
    /// Adds to each lane the product of four weights below 128, unsigned, and four signed bytes.
    fn dot_unsigned(self, sum: Self::U, weights: Self::U, activations: Self::U) -> Self::U;
    /// Lane `r` of element `t` is the product of the 32 signed bytes at `at` of row `r` and block `t`,
    /// as [`Simd::dot_end`] takes it.
    ///
    /// # Panics
    /// When `at + 32` exceeds the row.
    #[inline(always)]
    fn dot_rows<const T: usize>(
        self,
        tile: &Tile<'_>,
        at: usize,
        blocks: [&ActivationBlock<1>; T],
    ) -> [Self::U; T] {
        each!(self.u_splat(0), |t| {
            let mut lanes = [0; LANES];
            for (row, lane) in lanes.iter_mut().enumerate() {
                let row = &tile.row(row)[at..at + BLOCK];
                let bytes = blocks[t].q[0].iter().flat_map(|word| word.to_le_bytes());
                let products = row.iter().zip(bytes);
                let products =
                    products.map(|(x, q)| i32::from(x.cast_signed()) * i32::from(q.cast_signed()));
                *lane = products.sum::<i32>().cast_unsigned();
            }
            self.u_load(&lanes)
        })
    }
    /// Adds to each lane the product of four weights and four signed bytes. On most levels weights are prepared for the same
    /// instruction as bytes without a sign.
    #[inline(always)]
    fn dot4(self, sum: Self::U, weights: Self::U, activations: Self::U) -> Self::U {
        self.dot_unsigned(sum, weights, activations)
    }
    /// `round(dot * scale) * activation_scale + acc`, fused: the canonical step over a block.
    #[inline(always)]
    fn dot_end(
        self,
        sum: Self::U,
        scale: Self::F,
        activation_scale: Self::F,
        acc: Self::F,
    ) -> Self::F {
        self.fused(self.mul(self.i_to_f32(sum), scale), activation_scale, acc)
    }
    /// Hints that the cache line of an address, which may be any, will be read soon.
    fn prefetch_line(self, address: *const u8);
    /// The same, less soon: it goes to the second-level cache.
    fn prefetch_far(self, address: *const u8);
    /// Hints that `bytes` will be read within a few microseconds.
    #[inline(always)]
    fn prefetch_bytes(self, bytes: &[u8]) {
        for line in bytes.chunks(64) {
            self.prefetch_far(line.as_ptr());
        }
    }
}

/// The lanes of a vector.
#[inline(always)]
fn lanes<S: Simd>(s: S, x: S::U) -> [u32; LANES] {
    let mut lanes = [0; LANES];
    s.u_store(x, &mut lanes);
    lanes
}

/// Four signed bytes.
#[inline(always)]
fn word(bytes: [i8; 4]) -> u32 {
    u32::from_le_bytes(each!(0, |i| bytes[i].cast_unsigned()))
}

/// Two signed bytes as 16-bit numbers in a word.
#[inline(always)]
fn pair(bytes: [i8; 2]) -> u32 {
    let [low, high] = bytes.map(|byte| u32::from(i16::from(byte) as u16));
    low | high << 16
}

/// The two 16-bit numbers in a word.
#[inline(always)]
fn unpair(word: u32) -> [i32; 2] {
    [word as u16, (word >> 16) as u16].map(|half| i32::from(half as i16))
}

/// `e^x` for `x <= 88`, within 2 units in the last place; 0 below -87.7; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let (fraction, whole) = exp_parts(s, s.max(s.splat(-87.9), x));
    s.mul(s.add(fraction, s.splat(1.0)), s.exp2_whole(whole))
}

/// `e^x = (1 + p) * 2^k`: `p`, between -0.3 and 0.42, and the whole number `k`, for `x` between -88
/// and 88.
#[inline(always)]
fn exp_parts<S: Simd>(s: S, x: S::F) -> (S::F, S::F) {
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to a whole number
    let shifted = s.fma(x, s.splat(std::f32::consts::LOG2_E), s.splat(ROUND));
    let whole = s.sub(shifted, s.splat(ROUND));
    // ln 2 in two parts, so that the remainder is exact.
    let rest = s.fma(whole, s.splat(-0.693_359_4), x);
    let rest = s.fma(whole, s.splat(2.121_944_4e-4), rest);
    let mut sum = s.splat(1.987_569_1e-4);
    for coefficient in [
        1.398_199_9e-3,
        8.333_452e-3,
        4.166_579_6e-2,
        1.666_666_5e-1,
        0.5,
    ] {
        sum = s.fma(sum, rest, s.splat(coefficient));
    }
    let square = s.mul(rest, rest);
    (s.fma(sum, square, rest), whole)
}

/// The hyperbolic tangent, within 4 units in the last place; NaN stays NaN.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::F) -> S::F {
    // From 10 on it is 1 in f32.
    let x = at_most(s, x, 10.0);
    let x = s.max(s.splat(-10.0), x);
    let (fraction, whole) = exp_parts(s, s.add(x, x));
    // e^2x - 1 without the cancellation that subtracting 1 from e^2x would be near 0: the power of two
    // less 1 is exact.
    let power = s.exp2_whole(whole);
    let less_one = s.fma(fraction, power, s.sub(power, s.splat(1.0)));
    s.div(less_one, s.add(less_one, s.splat(2.0)))
}

/// The smaller one of `x` and a constant; NaN stays NaN.
#[inline(always)]
pub(crate) fn at_most<S: Simd>(s: S, x: S::F, most: f32) -> S::F {
    let minus = s.splat(-1.0);
    s.mul(s.max(s.splat(-most), s.mul(x, minus)), minus)
}

/// Runs a kernel at a level by itself. However small it is, it does not become a part of the function that calls it, so
/// it has all registers.
// An attribute of `vectorize` itself has no effect: functions with target features have theirs at their calls.
#[inline(never)]
pub(crate) fn apart<S: Simd, K: Kernel>(s: S, kernel: K) -> K::Output {
    s.vectorize(kernel)
}

/// Up to 16 elements, then zeros.
#[inline(always)]
pub(crate) fn padded<T: Copy + Default, const N: usize>(tail: &[T]) -> [T; N] {
    let mut out = [T::default(); N];
    out[..tail.len()].copy_from_slice(tail);
    out
}
