//! Every operation of every level against the portable one, from ordinary inputs to the extremes.

use super::*;
use crate::level::{Level, Proof};

/// What operations are given.
struct Inputs {
    floats: [[f32; LANES]; 16],
    words: [[u32; LANES]; 4],
    bytes: Vec<u8>,
}

/// Bytes of a tile's row, and from one row to the next.
const ROW: usize = 37;
const STRIDE: usize = 41;

/// What an operation made, named; floats as bits.
type Results = Vec<(&'static str, Vec<u32>)>;

/// The bits of a float; of what is not a number there are many.
fn bits(x: f32) -> u32 {
    if x.is_nan() { 0x7FC0_0000 } else { x.to_bits() }
}

/// Where the sign of a zero may be any.
fn unsigned_zero(x: u32) -> u32 {
    if x << 1 == 0 { 0 } else { x }
}

#[inline(always)]
fn floats<S: Simd>(s: S, x: S::F) -> Vec<u32> {
    let mut lanes = [0.0; LANES];
    s.store(x, &mut lanes);
    lanes.map(bits).into()
}

#[inline(always)]
fn words<S: Simd>(s: S, x: S::U) -> Vec<u32> {
    lanes(s, x).into()
}

impl Inputs {
    /// `N` bytes from `at` on.
    fn bytes<const N: usize>(&self, at: usize) -> &[u8; N] {
        self.bytes[at..].first_chunk().expect("there are more")
    }

    /// Quantized ones are not below -127.
    fn activations(&self) -> [u32; LANES] {
        let limited = |x: u8| x.cast_signed().max(-127).cast_unsigned();
        self.words[2].map(|x| u32::from_le_bytes(x.to_le_bytes().map(limited)))
    }

    #[inline(always)]
    fn loads<S: Simd>(&self, s: S, out: &mut Results) {
        let first = self.floats[0].first_chunk().expect("eight of sixteen");
        let table: [i8; 16] = each!(0, |i| self.bytes[20 + i].cast_signed());
        let [low, high] = s.load_named(&table, self.bytes(0));
        let named = s.named(&table, self.bytes(0)).map(u32::from);
        let halves = s.load_f16_halves([self.bytes(0), self.bytes(40)]);
        out.extend([
            ("load_f32_bytes", floats(s, s.load_f32_bytes(self.bytes(0)))),
            ("load_f16", floats(s, s.load_f16(self.bytes(0)))),
            ("load_bf16", floats(s, s.load_bf16(self.bytes(0)))),
            ("load_i8", floats(s, s.load_i8(self.bytes(0)))),
            ("load_named, low", floats(s, low)),
            ("load_named, high", floats(s, high)),
            ("named", named.into()),
            ("load_f16_halves", floats(s, halves)),
            ("load_twice", floats(s, s.load_twice(first))),
            (
                "splat_f16",
                floats(s, s.splat_f16(u16::from_le_bytes(*self.bytes(5)))),
            ),
            ("splat", floats(s, s.splat(self.floats[0][3]))),
        ]);
        let mut stored = [0; 32];
        s.store_f16(s.load(&self.floats[0]), &mut stored);
        let stored = stored.as_chunks::<2>().0.iter();
        let stored = stored.map(|x| bits(half::f16::from_le_bytes(*x).to_f32_const()));
        out.push(("store_f16", stored.collect()));
    }

    #[inline(always)]
    fn arithmetic<S: Simd>(&self, s: S, out: &mut Results) {
        let [a, b, c] = each!(s.splat(0.0), |i| s.load(&self.floats[i]));
        let whole: [f32; LANES] = each!(0.0, |i| f32::from(self.bytes[i].cast_signed().max(-127)));
        out.extend([
            ("add", floats(s, s.add(a, b))),
            ("sub", floats(s, s.sub(a, b))),
            ("mul", floats(s, s.mul(a, b))),
            ("div", floats(s, s.div(a, b))),
            ("fused", floats(s, s.fused(a, b, c))),
            ("max", floats(s, s.max(a, b))),
            ("exp2_whole", floats(s, s.exp2_whole(s.load(&whole)))),
        ]);
        out.push(("largest", vec![bits(s.largest([a, b]))]));
        for times in [1.0, 0.5, 127.0] {
            let within = |x: f32| {
                let x = x * times;
                if x.is_nan() {
                    0.5
                } else {
                    x.clamp(-127.0, 127.0)
                }
            };
            let x = each!(a, |i| s.load(&self.floats[i].map(within)));
            let (words, sums) = s.to_bytes(x);
            out.push(("to_bytes, words", words.into()));
            out.push(("to_bytes, sums", sums.map(i32::cast_unsigned).into()));
        }
        for n in 0..=LANES + 1 {
            out.push(("keep_first", floats(s, s.keep_first(a, n, b))));
        }
    }

    #[inline(always)]
    fn reductions<S: Simd>(&self, s: S, out: &mut Results) {
        let all = each!(s.splat(0.0), |i| s.load(&self.floats[i]));
        let half = each!(s.splat(0.0), |i| all[i]);
        out.push(("sum", vec![bits(s.sum(all[0]))]));
        if self.floats[0].iter().all(|x| !x.is_nan()) {
            let most = unsigned_zero(bits(s.max_lane(all[0])));
            out.push(("max_lane", vec![most]));
        }
        out.push(("sum_each", floats(s, s.sum_each(all))));
        out.push(("sum_halves", floats(s, s.sum_halves(half))));
        for x in s.transpose_halves(half) {
            out.push(("transpose_halves", floats(s, x)));
        }
        for x in s.transpose(all) {
            out.push(("transpose", floats(s, x)));
        }
        out.extend([
            ("exchange 1", floats(s, s.exchange::<1>(all[0]))),
            ("exchange 2", floats(s, s.exchange::<2>(all[0]))),
            ("exchange 4", floats(s, s.exchange::<4>(all[0]))),
            ("exchange 8", floats(s, s.exchange::<8>(all[0]))),
        ]);
    }

    #[inline(always)]
    fn integers<S: Simd>(&self, s: S, out: &mut Results) {
        let [v, w] = each!(s.u_splat(0), |i| s.u_load(&self.words[i]));
        out.extend([
            ("u_splat", words(s, s.u_splat(self.words[0][2]))),
            ("u_and", words(s, s.u_and(v, w))),
            ("u_or", words(s, s.u_or(v, w))),
            ("u_xor", words(s, s.u_xor(v, w))),
            ("u_mul", words(s, s.u_mul(v, w))),
            ("u_add", words(s, s.u_add(v, w))),
            ("u_sub", words(s, s.u_sub(v, w))),
            ("bits_to_f32", floats(s, s.bits_to_f32(v))),
            ("i_to_f32", floats(s, s.i_to_f32(v))),
            ("f16_low", floats(s, s.f16_low(v))),
            (
                "lookup",
                words(
                    s,
                    s.lookup(self.bytes(5), s.u_and(w, s.u_splat(0x0F0F_0F0F))),
                ),
            ),
        ]);
        let magnitudes = each!(v, |i| s.u_and(
            s.u_load(&self.words[i % self.words.len()]),
            s.u_splat(0x3F3F_3F3F)
        ));
        for with_signs in s.with_signs(magnitudes, w) {
            out.push(("with_signs", words(s, with_signs)));
        }
        for shift in 0..32 {
            out.push(("u_shl", words(s, s.u_shl(v, shift))));
            out.push(("u_shr", words(s, s.u_shr(v, shift))));
            out.push(("i_shr", words(s, s.i_shr(v, shift))));
        }
    }

    #[inline(always)]
    fn bytes_to_lanes<S: Simd>(&self, s: S, out: &mut Results) {
        let widened = s.widen_words([self.bytes(0), self.bytes(40)]);
        let each: [u16; LANES] = each!(0, |i| self.words[3][i] as u16);
        out.extend([
            (
                "u_halves",
                words(s, s.u_halves([self.bytes(0), self.bytes(70)])),
            ),
            ("widen_words", words(s, widened)),
            ("f16_each", floats(s, s.f16_each(each))),
            ("to_bits", words(s, s.to_bits(s.f16_each(each)))),
        ]);
        let tile = Tile::strided(&self.bytes, STRIDE, ROW);
        for at in [0, 1, 17, 33] {
            out.push(("f16_column", floats(s, s.f16_column(&tile, at))));
            out.push(("gather", words(s, s.gather(&tile, at))));
        }
        for x in [0, 3, 21].into_iter().flat_map(|at| s.columns(&tile, at)) {
            out.push(("columns", words(s, x)));
        }
    }

    #[inline(always)]
    fn dot_products<S: Simd>(&self, s: S, out: &mut Results) {
        let [v, w] = each!(s.u_splat(0), |i| s.u_load(&self.words[i]));
        let y = s.u_load(&self.activations());
        let small = s.u_and(w, s.u_splat(0x7F7F_7F7F));
        out.push(("dot_unsigned", words(s, s.dot_unsigned(v, small, y))));
        let [first, second] = s.widen(w);
        let small = s.u_and(w, s.u_splat(0x0F0F_0F0F));
        let (mut pairs, mut sum) = (s.u_splat(0), v);
        for x in self.words[2] {
            pairs = s.add_pairs(pairs, small, x);
        }
        for x in s.widen_all(self.words[2].first_chunk().expect("eight of sixteen")) {
            sum = s.dot2(s.dot2(sum, first, x), second, x);
        }
        for x in [first, second, pairs, s.sum_pairs(pairs), sum] {
            out.push(("products in pairs", words(s, x)));
        }
        let x = *self.activations().first_chunk().expect("four of sixteen");
        #[cfg(target_arch = "aarch64")]
        out.push(("dot_sixteen", self.dot_sixteen(s)));
        let squares = s.dot_squares(v, w, x);
        for x in [s.zip(v, w), s.unzip(v, w), [squares, squares]].as_flattened() {
            out.push(("products of two tokens", words(s, *x)));
        }
    }

    /// Also of the definition, because the portable level has instructions for it too.
    #[cfg(target_arch = "aarch64")]
    #[inline(always)]
    fn dot_sixteen<S: Simd>(&self, s: S) -> Vec<u32> {
        let (start, a, b) = (self.words[0], self.words[1], self.activations());
        let four = |x: &[u32; LANES]| *x.first_chunk::<4>().expect("four of sixteen");
        let found = neon::dot_sixteen(s, four(&start), four(&a), four(&b));
        for lane in 0..4 {
            let products = a[lane].to_le_bytes().into_iter().zip(b[lane].to_le_bytes());
            let products = products.map(|(a, b)| i32::from(a as i8) * i32::from(b as i8));
            let defined = products.fold(start[lane] as i32, i32::wrapping_add);
            assert_eq!(found[lane] as i32, defined, "lane {lane} of dot_sixteen");
        }
        found.into()
    }

    /// A block of 32 products, of weights with the offsets that storage types have.
    #[inline(always)]
    fn blocks<S: Simd>(&self, s: S, out: &mut Results) {
        let scale: [f32; LANES] = each!(0.0, |i| {
            // As if from a binary16: a product with an integer is exact.
            let scale = f32::from_bits(self.floats[1][i].to_bits() & 0xFFFF_E000);
            if scale.abs() < 65_536.0 { scale } else { 0.375 }
        });
        let (scale, unit) = (s.load(&scale), s.splat(self.floats[3][0]));
        let activations = self.activations();
        let activations = activations.as_chunks::<8>().0;
        let blocks: [_; 2] = each!(ActivationBlock::<1>::ZERO, |t| {
            let bytes = activations[t].iter().flat_map(|x| x.to_le_bytes());
            let sum: i32 = bytes.map(|x| i32::from(x.cast_signed())).sum();
            ActivationBlock {
                q: [activations[t]],
                start: [S::START - 128 * sum],
                ..ActivationBlock::ZERO
            }
        });
        let tile = Tile::strided(&self.bytes, STRIDE, ROW);
        let mut dots = s.dot_rows(&tile, 3, [&blocks[0], &blocks[1]]).to_vec();
        for (offset, mask) in [
            (0, 0x7F7F_7F7F),
            (-8, 0x0F0F_0F0F),
            (-16, 0x1F1F_1F1F),
            (-32, 0x3F3F_3F3F),
        ] {
            let mut dot = s.dot_start(s.u_splat(blocks[0].start[0].cast_unsigned()));
            for (i, x) in activations[0].iter().enumerate() {
                let weights = s.u_and(s.u_load(&self.words[i % 4]), s.u_splat(mask));
                dot = s.dot4(dot, s.weights(weights, offset), s.u_splat(*x));
            }
            dots.push(dot);
        }
        for dot in dots {
            let added = s.dot_end(dot, scale, unit, s.load(&self.floats[2]));
            let added = floats(s, added).into_iter().map(unsigned_zero);
            out.push(("a block", added.collect()));
        }
    }
}

impl Kernel for &Inputs {
    type Output = Results;

    const MULTIPLIES_BYTES: bool = true;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Results {
        let mut out = Vec::new();
        self.loads(s, &mut out);
        self.arithmetic(s, &mut out);
        self.reductions(s, &mut out);
        self.integers(s, &mut out);
        self.bytes_to_lanes(s, &mut out);
        self.dot_products(s, &mut out);
        self.blocks(s, &mut out);
        out
    }
}

/// Runs a kernel at `level`, if this CPU has it.
fn at<K: Kernel>(level: Level, kernel: K) -> Option<K::Output> {
    Proof::detect(level).map(|proof| proof.run(kernel))
}

/// Numbers that look random, the same in every run.
fn random() -> impl FnMut() -> u32 {
    let mut state = 1_u64;
    move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        (state.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32) as u32
    }
}

/// By round: small floats, any floats, extreme ones; any words, or extreme ones among them.
fn inputs(round: usize, random: &mut impl FnMut() -> u32) -> Inputs {
    const FLOATS: [f32; 19] = [
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::MAX,
        f32::MIN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        f32::MIN_POSITIVE,
        1e-40,
        -1e-42,
        65_504.0,
        65_519.9,
        65_520.0,
        // Halves of the smallest binary16, and what is between two of them.
        2.98e-8,
        2.99e-8,
        1.000_488_3,
        1.001_464_8,
    ];
    const WORDS: [u32; 6] = [0, u32::MAX, 0x8080_8080, 0x7F7F_7F7F, 0x807F_0100, 1 << 31];
    let mut float = || match round % 3 {
        0 => (random() >> 8) as f32 / 8_388_608.0 - 1.0,
        1 => f32::from_bits(random()),
        _ => match FLOATS.get(random() as usize % (FLOATS.len() + 4)) {
            Some(extreme) => *extreme,
            None => f32::from_bits(random()),
        },
    };
    let floats = std::array::from_fn(|_| std::array::from_fn(|_| float()));
    let mut word = || match WORDS.get(random() as usize % (2 * WORDS.len())) {
        Some(extreme) if round.is_multiple_of(2) => *extreme,
        _ => random(),
    };
    let words = std::array::from_fn(|_| std::array::from_fn(|_| word()));
    Inputs {
        floats,
        words,
        bytes: (0..LANES * STRIDE + 64).map(|_| random() as u8).collect(),
    }
}

#[test]
fn every_operation_of_every_level_is_that_of_the_portable_one() {
    let mut random = random();
    for round in 0..600 {
        let inputs = inputs(round, &mut random);
        let defined = at(Level::Portable, &inputs).expect("it is everywhere");
        for level in Level::ALL {
            let Some(found) = at(level, &inputs) else {
                continue;
            };
            assert_eq!(found.len(), defined.len());
            for ((name, found), (_, defined)) in found.iter().zip(&defined) {
                assert_eq!(found, defined, "{name} at {level:?} in round {round}");
            }
        }
    }
}

/// All binary16 there are, read and written.
struct Halves;

impl Kernel for Halves {
    type Output = Vec<(f32, [u8; 2])>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let mut out = Vec::new();
        for first in (0..=u16::MAX).step_by(LANES) {
            let bytes = each!([0; 2], |i| (first + i as u16).to_le_bytes());
            let bytes: [[u8; 2]; LANES] = bytes;
            let (mut lanes, mut stored) = ([0.0; LANES], [0; 2 * LANES]);
            let read = s.load_f16(bytes.as_flattened().first_chunk().expect("sixteen"));
            s.store(read, &mut lanes);
            s.store_f16(read, &mut stored);
            out.extend(
                lanes.into_iter().zip(
                    *stored
                        .as_chunks()
                        .0
                        .first_chunk::<LANES>()
                        .expect("sixteen"),
                ),
            );
        }
        out
    }
}

#[test]
fn every_binary16_is_read_and_written_as_itself() {
    for level in Level::ALL {
        for (bits, (read, written)) in at(level, Halves).into_iter().flatten().enumerate() {
            let value = half::f16::from_bits(bits as u16);
            if value.is_nan() {
                assert!(read.is_nan(), "{bits:x} at {level:?}");
            } else {
                assert_eq!(read.to_bits(), value.to_f32_const().to_bits(), "{level:?}");
                assert_eq!(written, value.to_le_bytes(), "{level:?}");
            }
        }
    }
}

/// Pairs of bf16 and their products, at a level and with its operations.
struct PairsOfBf16<'a>(Bf16Products, &'a Inputs);

impl Kernel for PairsOfBf16<'_> {
    type Output = ([[u32; LANES]; 2], [f32; LANES]);

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Self::Output {
        let Self(proof, inputs) = self;
        let load = |i: usize| s.load(&inputs.floats[i]);
        let pairs = s.round_pairs(proof, [load(0), load(1)]);
        let others = s.round_pairs(proof, [load(2), load(3)]);
        let rows = s.round_rows(proof, [load(0), load(1)]);
        let (mut bits, mut sums) = ([[0.0; LANES]; 2], [0.0; LANES]);
        s.store(pairs, &mut bits[0]);
        s.store(rows, &mut bits[1]);
        s.store(s.multiply_pairs(proof, pairs, others, load(4)), &mut sums);
        (bits.map(|bits| bits.map(f32::to_bits)), sums)
    }
}

/// Of ordinary numbers: what is subnormal, or not a number, may be treated in more than one way.
#[test]
fn pairs_of_bf16_are_rounded_and_multiplied_as_the_portable_level_does() {
    let mut random = random();
    for level in Level::ALL {
        let (Some(simd), Some(proof)) = (Proof::detect(level), Bf16Products::detect(level)) else {
            continue;
        };
        for _ in 0..200 {
            let inputs = inputs(0, &mut random);
            let (found, found_sums) = simd.run(PairsOfBf16(proof, &inputs));
            let (defined, defined_sums) = portable::Portable.vectorize(PairsOfBf16(proof, &inputs));
            assert_eq!(found, defined);
            assert_eq!(found_sums, defined_sums);
        }
    }
}
