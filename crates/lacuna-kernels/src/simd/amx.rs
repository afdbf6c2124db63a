//! AMX: one instruction multiplies sixteen rows of 32 bf16 with sixteen columns of as many, and adds up in f32, or rows of
//! bytes, and adds up in 32 bits.
//!
//! What a tile register holds is said by a configuration of the thread. It is loaded before products and released after
//! them, so that a switch to another thread saves no tiles.
//!
//! # Safety
//! 1. An [`Amx`] exists only if the CPU has AMX for bf16 and bytes and the system has granted its registers to the process:
//!    `detect` is its only maker. So its instructions are sound once a configuration is loaded.
//! 2. While a [`Registers`] lives, the thread has its configuration: it cannot leave the thread, and a second one is not made
//!    before it is dropped.
//! 3. Tiles are read and written whole: sixteen lines, or as many as a [`Tiles`] says of rows and sums, the last of which is
//!    within what is passed; that is checked before. Of a [`ByteTiles`] they are as large as the arrays that are passed.
//! 4. The compiler has no use for tile registers, so they keep what one statement puts there for the next.
#![expect(unsafe_code, reason = "instructions; see # Safety")]

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::cell::Cell;
use std::marker::PhantomData;

use super::{Chunk, LANES, Line};
use crate::activations::BLOCK;
use crate::tile::LineBytes;

/// Rows of a tile, and lanes of each.
pub(crate) const ROWS: usize = LANES;

/// Products of two tiles of rows and two of tokens in 32 columns.
pub(crate) const PRODUCTS: usize = 4 * ROWS * LANES * 32;

thread_local! {
    /// Whether a [`Tiles`] of this thread lives.
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// What a line of a tile is in memory.
///
/// # Safety
/// It is sixteen words without anything between, any bits of which are a value.
pub(crate) unsafe trait Words: Copy {}

// SAFETY: sixteen words.
unsafe impl Words for Line {}
// SAFETY: sixteen words, any bits of which are a float.
unsafe impl Words for Chunk {}
// SAFETY: the same.
unsafe impl Words for [f32; LANES] {}
// SAFETY: sixteen words, which may lie at any address.
unsafe impl Words for LineBytes {}

/// One side of a product: some tiles, each of blocks of lines, sixteen as a rule, which begins where its slice does.
pub(crate) struct Side<'a, W, const N: usize> {
    pub(crate) tiles: [&'a [W]; N],
    /// How far the lines of a block are apart, and blocks, in lines.
    pub(crate) line: usize,
    pub(crate) block: usize,
}

impl<'a, W, const N: usize> Side<'a, W, N> {
    /// Blocks one behind the other.
    pub(crate) fn packed(tiles: [&'a [W]; N]) -> Self {
        Self {
            tiles,
            line: 1,
            block: ROWS,
        }
    }

    /// Whether each tile has so many blocks of so many lines.
    #[inline(always)]
    fn has(&self, blocks: usize, lines: usize) -> bool {
        let Some(before) = blocks.checked_sub(1) else {
            return true;
        };
        let last = before.saturating_mul(self.block);
        let last = last.saturating_add(self.line.saturating_mul(lines - 1));
        self.tiles.iter().all(|lines| last < lines.len())
    }
}

/// Sums of `R` tiles of rows and `T` tiles of tokens.
pub(crate) struct Sums<'a, W, const R: usize, const T: usize> {
    pub(crate) lines: &'a mut [W],
    /// How far the lines of a sum are apart.
    pub(crate) line: usize,
    /// The first line of each.
    pub(crate) first: [[usize; T]; R],
}

impl<W, const R: usize, const T: usize> Sums<'_, W, R, T> {
    /// Whether all of them have so many lines.
    #[inline(always)]
    fn has(&self, lines: usize) -> bool {
        let rest = self.line.saturating_mul(lines - 1);
        let all = self.first.as_flattened().iter();
        all.into_iter()
            .all(|first| first.saturating_add(rest) < self.lines.len())
    }
}

/// Proof that the CPU multiplies tiles of bf16 and of bytes, and this process may use them.
#[derive(Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    /// The instructions, if this CPU has them and the system grants them.
    pub(crate) fn detect() -> Option<Self> {
        // Bits of leaf 7: AMX-BF16, AMX-TILE and AMX-INT8. No CPU has had one without the others.
        const NEEDED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        let features = __cpuid_count(7, 0).edx;
        (features & NEEDED == NEEDED && granted()).then_some(Self(()))
    }
}

/// Asks the system for tile registers, which a process has only after it asked: they enlarge what is saved of each
/// thread that uses them.
#[cfg(target_os = "linux")]
fn granted() -> bool {
    const REQUEST_PERMISSION: libc::c_int = 0x1023;
    const TILE_DATA: libc::c_ulong = 18;
    // SAFETY: the call takes two numbers and changes nothing in memory.
    unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn granted() -> bool {
    false
}

/// How many rows tile registers have, and bytes in each row.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Of each register, its rows and their bytes.
    const fn new(registers: [[usize; 2]; 8]) -> Self {
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        let mut register = 0;
        while register < 8 {
            rows[register] = registers[register][0] as u8;
            row_bytes[register] = registers[register][1] as u16;
            register += 1;
        }
        Self {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            row_bytes,
            rows,
        }
    }
}

/// The tile registers of this thread.
struct Registers(PhantomData<*const ()>);

impl Registers {
    /// # Panics
    /// When this thread has taken them already.
    fn take(_: Amx, configuration: &'static Configuration) -> Self {
        let in_use = IN_USE.replace(true);
        assert!(!in_use, "the tiles of this thread are in use");
        // SAFETY: 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) configuration, options(nostack, preserves_flags, readonly));
        }
        Self(PhantomData)
    }
}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: 1; nothing else has tiles of this thread, by 2.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        IN_USE.set(false);
    }
}

/// By rows, from one on: so many in the registers of rows and sums, sixteen in those of tokens, a line each.
static CONFIGURATIONS: [Configuration; ROWS] = {
    let mut all = [const { Configuration::new([[0; 2]; 8]) }; ROWS];
    let mut index = 0;
    while index < ROWS {
        let (rows, tokens) = ([index + 1, LINE_BYTES], [ROWS, LINE_BYTES]);
        all[index] = Configuration::new([rows, rows, rows, rows, rows, rows, tokens, tokens]);
        index += 1;
    }
    all
};

const LINE_BYTES: usize = size_of::<Line>();

/// Sums that the registers of a [`ByteTiles`] hold at a time.
pub(crate) const BYTE_SUMS: usize = 4;

/// Registers for tiles of bf16.
pub(crate) struct Tiles {
    /// Rows of a tile, 1 to [`ROWS`].
    rows: usize,
    /// Held for as long as they are used.
    _registers: Registers,
}

impl Tiles {
    /// Takes the registers, for tiles of so many rows, 1 to [`ROWS`]; of tokens there are always as many as lanes.
    ///
    /// # Panics
    /// When this thread has taken them already, or there are no such tiles.
    pub(crate) fn new(amx: Amx, rows: usize) -> Self {
        Self {
            rows,
            _registers: Registers::take(amx, &CONFIGURATIONS[rows - 1]),
        }
    }

    /// Adds to sums, or makes them of nothing where they are `fresh`, the products of `R` tiles of rows and `T` tiles of
    /// tokens in so many blocks of 32 columns: lane `t` of line `r` of a sum is that of row `r` and token `t`.
    ///
    /// A line of `rows` has the 32 columns of a row; of these a block has as many as the tile, and so have sums. Line `j` of a block of `tokens` has columns `2 * j` and `2 * j + 1`
    /// of each token.
    ///
    /// Per block, the products of even columns are added up in order, those of odd ones apart, and the sum of both is
    /// added to that of the blocks before. What is subnormal counts as zero.
    ///
    /// # Panics
    /// When one of them is not there to its end.
    #[inline(always)]
    pub(crate) fn multiply<A: Words, B: Words, C: Words, const R: usize, const T: usize>(
        &self,
        blocks: usize,
        rows: Side<'_, A, R>,
        tokens: Side<'_, B, T>,
        sums: Sums<'_, C, R, T>,
        fresh: bool,
    ) {
        const { assert!((T == 1 || T == 2) && (R == 1 || R == 2)) };
        assert!(rows.has(blocks, self.rows) && tokens.has(blocks, ROWS) && sums.has(self.rows));
        let bytes = |lines: usize| lines * size_of::<Line>();
        let mut weights = rows.tiles.map(|lines| lines.as_ptr().cast::<Line>());
        let mut x = tokens.tiles.map(|lines| lines.as_ptr().cast::<Line>());
        let (row_line, token_line) = (bytes(rows.line), bytes(tokens.line));
        let sum_line = bytes(sums.line);
        let out: *mut Line = sums.lines.as_mut_ptr().cast();
        // SAFETY: 1, 2, 4; 3: what is read and written was checked above.
        unsafe {
            macro_rules! tile {
                ($instruction:literal, $at:expr, $line:expr) => {
                    asm!(
                        $instruction,
                        at = in(reg) $at,
                        line = in(reg) $line,
                        options(nostack, preserves_flags),
                    )
                };
            }
            macro_rules! registers {
                ($instruction:literal) => {
                    asm!($instruction, options(nostack, preserves_flags, nomem))
                };
            }
            macro_rules! sum {
                ($zero:literal, $load:literal, $r:expr, $t:expr) => {
                    if $r < R && $t < T {
                        if fresh {
                            registers!($zero);
                        } else {
                            tile!($load, out.add(sums.first[$r % R][$t % T]), sum_line);
                        }
                    }
                };
            }
            sum!("tilezero tmm0", "tileloadd tmm0, [{at} + {line}]", 0, 0);
            sum!("tilezero tmm1", "tileloadd tmm1, [{at} + {line}]", 0, 1);
            sum!("tilezero tmm2", "tileloadd tmm2, [{at} + {line}]", 1, 0);
            sum!("tilezero tmm3", "tileloadd tmm3, [{at} + {line}]", 1, 1);
            for _ in 0..blocks {
                tile!("tileloadd tmm4, [{at} + {line}]", weights[0], row_line);
                tile!("tileloadd tmm6, [{at} + {line}]", x[0], token_line);
                registers!("tdpbf16ps tmm0, tmm4, tmm6");
                if T == 2 {
                    tile!("tileloadd tmm7, [{at} + {line}]", x[T - 1], token_line);
                    registers!("tdpbf16ps tmm1, tmm4, tmm7");
                }
                if R == 2 {
                    tile!("tileloadd tmm5, [{at} + {line}]", weights[R - 1], row_line);
                    registers!("tdpbf16ps tmm2, tmm5, tmm6");
                }
                if R == 2 && T == 2 {
                    registers!("tdpbf16ps tmm3, tmm5, tmm7");
                }
                // Behind the last block there may be nothing.
                for next in &mut weights {
                    *next = next.wrapping_add(rows.block);
                }
                for next in &mut x {
                    *next = next.wrapping_add(tokens.block);
                }
            }
            macro_rules! store {
                ($store:literal, $r:expr, $t:expr) => {
                    if $r < R && $t < T {
                        tile!($store, out.add(sums.first[$r % R][$t % T]), sum_line);
                    }
                };
            }
            store!("tilestored [{at} + {line}], tmm0", 0, 0);
            store!("tilestored [{at} + {line}], tmm1", 0, 1);
            store!("tilestored [{at} + {line}], tmm2", 1, 0);
            store!("tilestored [{at} + {line}], tmm3", 1, 1);
        }
    }

    /// [`PRODUCTS`] so many times, of zeros that are in registers: what the machine does at best.
    pub(crate) fn multiply_zeros(&self, times: usize) {
        // SAFETY: 1, 2, 4; nothing is read or written but registers.
        unsafe {
            asm!(
                "tilezero tmm4",
                "tilezero tmm5",
                "tilezero tmm6",
                "tilezero tmm7",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                options(nostack, preserves_flags, nomem),
            );
            for _ in 0..times {
                asm!(
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    options(nostack, preserves_flags, nomem),
                );
            }
        }
    }
}

/// Registers for the sums of sixteen tokens and sixteen rows of weights over 32 columns, or over those of each of `PARTS`
/// parts: signed bytes, whose sums are of 32 bits.
pub(crate) struct ByteTiles<const PARTS: usize>(
    /// Held for as long as they are used.
    Registers,
);

impl<const PARTS: usize> ByteTiles<PARTS> {
    const CONFIGURATION: Configuration = {
        assert!(PARTS == 1 || PARTS == 2);
        let columns = BLOCK / PARTS;
        let sums = [ROWS, LINE_BYTES];
        let (tokens, weights) = ([ROWS, columns], [columns / 4, LINE_BYTES]);
        Configuration::new([sums, sums, sums, sums, tokens, tokens, weights, weights])
    };

    /// Takes the registers.
    ///
    /// # Panics
    /// When this thread has taken them already.
    pub(crate) fn new(amx: Amx) -> Self {
        Self(Registers::take(amx, const { &Self::CONFIGURATION }))
    }

    /// Makes the `SUM`-th sum the products of the columns of a part: a token's are 32 bytes, and word `g` of lane `r` of
    /// the weights is columns `4 * g ..` of row `r`.
    #[inline(always)]
    pub(crate) fn multiply<const SUM: usize>(
        &self,
        tokens: &[[u32; 8]; ROWS],
        weights: &[Line; 8],
        part: usize,
    ) {
        const { assert!(SUM < BYTE_SUMS) };
        assert!(part < PARTS);
        macro_rules! multiply {
            ($sum:literal, $tokens:literal, $weights:literal) => {
                // SAFETY: 1, 2, 4; 3: sixteen rows of the columns of a part, and as many lines as it has words.
                unsafe {
                    asm!(
                        concat!("tileloadd ", $tokens, ", [{tokens} + {row}]"),
                        concat!("tileloadd ", $weights, ", [{weights} + {line}]"),
                        concat!("tilezero ", $sum),
                        concat!("tdpbssd ", $sum, ", ", $tokens, ", ", $weights),
                        tokens = in(reg) tokens.as_ptr().cast::<u8>().add(part * BLOCK / PARTS),
                        row = in(reg) size_of::<[u32; 8]>(),
                        weights = in(reg) weights.as_ptr().add(part * 8 / PARTS),
                        line = in(reg) LINE_BYTES,
                        options(nostack, preserves_flags, readonly),
                    )
                }
            };
        }
        match SUM {
            0 => multiply!("tmm0", "tmm4", "tmm6"),
            1 => multiply!("tmm1", "tmm5", "tmm7"),
            2 => multiply!("tmm2", "tmm4", "tmm6"),
            _ => multiply!("tmm3", "tmm5", "tmm7"),
        }
    }

    /// Writes the `SUM`-th sum: lane `r` of line `t` is that of row `r` and token `t`.
    #[inline(always)]
    pub(crate) fn store<const SUM: usize>(&self, out: &mut [Line; ROWS]) {
        const { assert!(SUM < BYTE_SUMS) };
        macro_rules! store {
            ($sum:literal) => {
                // SAFETY: 1, 2, 4; 3: sixteen lines.
                unsafe {
                    asm!(
                        concat!("tilestored [{out} + {line}], ", $sum),
                        out = in(reg) out,
                        line = in(reg) LINE_BYTES,
                        options(nostack, preserves_flags),
                    )
                }
            };
        }
        match SUM {
            0 => store!("tmm0"),
            1 => store!("tmm1"),
            2 => store!("tmm2"),
            _ => store!("tmm3"),
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Two numbers in each word, of few bits, and sums of them that are rounded.
    fn lines(count: usize, seed: u32) -> Vec<Line> {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            u32::from(bf16::from_f32((state >> 8) as f32 / 8_388_608.0 - 1.0).to_bits())
        };
        let mut line = || Line(std::array::from_fn(|_| next() | next() << 16));
        (0..count).map(|_| line()).collect()
    }

    fn halves(word: u32) -> [f32; 2] {
        [
            f32::from_bits(word << 16),
            f32::from_bits(word & 0xFFFF_0000),
        ]
    }

    /// The sum of row `r` and token `t`, in the order of the definition.
    fn expected(weights: &[Line], x: &[Line], [r, t]: [usize; 2], mut sum: f32) -> f32 {
        for (weights, x) in weights.chunks(ROWS).zip(x.chunks(ROWS)) {
            let mut pairs = [0.0_f32; 2];
            for (word, x) in weights[r].0.into_iter().zip(x) {
                let (weights, x) = (halves(word), halves(x.0[t]));
                for i in 0..2 {
                    pairs[i] = weights[i].mul_add(x[i], pairs[i]);
                }
            }
            sum += pairs[0] + pairs[1];
        }
        sum
    }

    fn check<const R: usize, const T: usize>(amx: Amx, blocks: usize, fresh: bool) {
        let weights: [_; R] = std::array::from_fn(|r| lines(blocks * ROWS, 1 + r as u32));
        let x: [_; T] = std::array::from_fn(|t| lines(blocks * ROWS, 7 + t as u32));
        let before = bf16::from_f32(1.5).to_f32();
        let mut sums = [[Line([before.to_bits(); LANES]); ROWS]; 4];
        let registers = Tiles::new(amx, ROWS);
        let (weights, x) = (weights.each_ref(), x.each_ref());
        registers.multiply(
            blocks,
            Side::packed(weights.map(|it| &**it)),
            Side::packed(x.map(|it| &**it)),
            Sums {
                lines: sums.as_flattened_mut(),
                line: 1,
                first: std::array::from_fn(|r| std::array::from_fn(|t| ROWS * (2 * r + t))),
            },
            fresh,
        );
        for (r, t) in (0..R).flat_map(|r| (0..T).map(move |t| (r, t))) {
            for (row, line) in sums[2 * r + t].iter().enumerate() {
                for (token, sum) in line.0.into_iter().enumerate() {
                    let before = if fresh { 0.0 } else { before };
                    let defined = expected(weights[r], x[t], [row, token], before);
                    assert_eq!(f32::from_bits(sum), defined, "{R} {T} {row} {token}");
                }
            }
        }
    }

    #[test]
    fn tiles_are_multiplied_in_the_order_that_is_documented() {
        // Not every machine has them.
        let Some(amx) = Amx::detect() else { return };
        for (blocks, fresh) in [(1, true), (5, true), (0, false), (3, false)] {
            check::<1, 1>(amx, blocks, fresh);
            check::<1, 2>(amx, blocks, fresh);
            check::<2, 1>(amx, blocks, fresh);
            check::<2, 2>(amx, blocks, fresh);
        }
    }

    #[test]
    fn tiles_of_fewer_rows_write_no_others_and_lines_may_lie_apart() {
        let Some(amx) = Amx::detect() else { return };
        let (blocks, stride) = (3, 5);
        for rows in 1..=ROWS {
            let registers = Tiles::new(amx, rows);
            let (weights, x) = (lines(blocks * ROWS, 1), lines(blocks * ROWS, 7));
            // Line after line of all blocks, and nothing behind the last.
            let mut apart = vec![Line::ZERO; (rows - 1) * stride + blocks];
            for (row, block) in (0..rows).flat_map(|row| (0..blocks).map(move |block| (row, block)))
            {
                apart[row * stride + block] = weights[block * ROWS + row];
            }
            let mut sums = [Line([1.5_f32.to_bits(); LANES]); 2 * ROWS];
            registers.multiply(
                blocks,
                Side {
                    tiles: [&apart],
                    line: stride,
                    block: 1,
                },
                Side::packed([&x]),
                Sums {
                    lines: &mut sums,
                    line: 2,
                    first: [[1]],
                },
                false,
            );
            for (place, line) in sums.iter().enumerate() {
                for (token, sum) in line.0.into_iter().enumerate() {
                    let defined = match place % 2 == 1 && place / 2 < rows {
                        true => expected(&weights, &x, [place / 2, token], 1.5),
                        false => 1.5,
                    };
                    assert_eq!(f32::from_bits(sum), defined, "{rows} {place} {token}");
                }
            }
        }
    }

    /// Sums of bytes by definition: each register has one of its own, and the others stay.
    fn check_bytes<const PARTS: usize>(amx: Amx) {
        let weights = [5, 6, 7, 8].map(|seed| {
            let mut lines: [Line; 8] = lines(8, seed)[..].try_into().expect("eight");
            // The largest products there are.
            lines[0].0[1] = 0x7F80_807F;
            lines
        });
        let mut tokens = [[0x8080_7F7F; 8]; ROWS];
        for (token, line) in tokens.iter_mut().zip(lines(ROWS, 9)).skip(1) {
            token.copy_from_slice(&line.0[..8]);
        }
        let columns = 8 / PARTS;
        let registers = ByteTiles::<PARTS>::new(amx);
        for part in 0..PARTS {
            registers.multiply::<0>(&tokens, &weights[0], part);
            registers.multiply::<1>(&tokens, &weights[1], part);
            registers.multiply::<2>(&tokens, &weights[2], part);
            registers.multiply::<3>(&tokens, &weights[3], part);
            let mut sums = [[Line::ZERO; ROWS]; BYTE_SUMS];
            let [first, second, third, fourth] = &mut sums;
            registers.store::<3>(fourth);
            registers.store::<2>(third);
            registers.store::<1>(second);
            registers.store::<0>(first);
            for (weights, sums) in weights.iter().zip(&sums) {
                for (t, r) in (0..ROWS).flat_map(|t| (0..LANES).map(move |r| (t, r))) {
                    let words = part * columns..(part + 1) * columns;
                    let products = words.flat_map(|g| {
                        let bytes =
                            |word: u32| word.to_le_bytes().map(|byte| i32::from(byte as i8));
                        let (x, w) = (bytes(tokens[t][g]), bytes(weights[g].0[r]));
                        std::iter::zip(x, w).map(|(x, w)| x * w)
                    });
                    let defined: i32 = products.sum();
                    assert_eq!(
                        sums[t].0[r].cast_signed(),
                        defined,
                        "{PARTS} {part} {t} {r}"
                    );
                }
            }
        }
    }

    #[test]
    fn tiles_of_bytes_are_multiplied_and_summed_exactly() {
        let Some(amx) = Amx::detect() else { return };
        check_bytes::<1>(amx);
        check_bytes::<2>(amx);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn a_tile_that_is_not_there_to_its_end_is_not_read() {
        let Some(amx) = Amx::detect() else {
            panic!("assertion failed: no AMX here");
        };
        let (x, mut sums) = (lines(ROWS, 1), [Line::ZERO; ROWS]);
        let sums = Sums {
            lines: &mut sums,
            line: 1,
            first: [[0]],
        };
        Tiles::new(amx, ROWS).multiply(1, Side::packed([&x[1..]]), Side::packed([&x]), sums, true);
    }

    #[test]
    fn a_thread_has_one_set_of_tiles() {
        let Some(amx) = Amx::detect() else { return };
        let first = Tiles::new(amx, ROWS);
        std::thread::spawn(move || drop(Tiles::new(amx, 1)))
            .join()
            .expect("another thread has its own");
        drop(first);
        drop(Tiles::new(amx, 1));
    }
}
