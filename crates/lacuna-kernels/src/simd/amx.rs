//! AMX: one instruction multiplies sixteen rows of 32 bf16 with sixteen columns of as many, and adds up in f32.
//!
//! What a tile register holds is said by a configuration of the thread. It is loaded before products and released after
//! them, so that a switch to another thread saves no tiles.
//!
//! # Safety
//! 1. An [`Amx`] exists only if the CPU has AMX for bf16 and the system has granted its registers to the process:
//!    `detect` is its only maker. So its instructions are sound once a configuration is loaded.
//! 2. While a [`Tiles`] lives, the thread has its configuration: it cannot leave the thread, and a second one is not made
//!    before it is dropped.
//! 3. Tiles are read and written whole: sixteen lines, which what is passed has from there on; lengths are checked before.
//! 4. The compiler has no use for tile registers, so they keep what one statement puts there for the next.
#![expect(unsafe_code, reason = "instructions; see # Safety")]

use std::arch::asm;
use std::arch::x86_64::__cpuid_count;
use std::cell::Cell;
use std::marker::PhantomData;

use super::{LANES, Line};

/// Rows of a tile, and lanes of each.
pub(crate) const ROWS: usize = LANES;

/// Products of two tiles of rows and two of tokens in 32 columns.
pub(crate) const PRODUCTS: usize = 4 * ROWS * LANES * 32;

thread_local! {
    /// Whether a [`Tiles`] of this thread lives.
    static IN_USE: Cell<bool> = const { Cell::new(false) };
}

/// Proof that the CPU multiplies tiles of bf16 and this process may use them.
#[derive(Clone, Copy)]
pub(crate) struct Amx(());

impl Amx {
    /// The instructions, if this CPU has them and the system grants them.
    pub(crate) fn detect() -> Option<Self> {
        // Bits of leaf 7: AMX-BF16 and AMX-TILE.
        const NEEDED: u32 = 1 << 22 | 1 << 24;
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

/// What tile registers hold: sixteen rows of a line each, all of them.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static WHOLE: Configuration = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut register = 0;
    while register < 8 {
        (row_bytes[register], rows[register]) = (size_of::<Line>() as u16, ROWS as u8);
        register += 1;
    }
    Configuration {
        palette: 1,
        start_row: 0,
        reserved: [0; 14],
        row_bytes,
        rows,
    }
};

/// The tile registers of this thread.
pub(crate) struct Tiles {
    of_this_thread: PhantomData<*const ()>,
}

impl Tiles {
    /// Takes the registers.
    ///
    /// # Panics
    /// When this thread has taken them already.
    pub(crate) fn new(_: Amx) -> Self {
        let in_use = IN_USE.replace(true);
        assert!(!in_use, "the tiles of this thread are in use");
        // SAFETY: 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) &WHOLE, options(nostack, preserves_flags, readonly));
        }
        Self {
            of_this_thread: PhantomData,
        }
    }

    /// Adds to sums, or makes them of nothing where they are `fresh`, the products of `R` tiles of sixteen rows and `T`
    /// tiles of tokens: lane `t` of line `r` in sum `2 * rows + tokens` is that of row `r` and token `t`.
    ///
    /// `weights` are sixteen lines, one for each row, for each block of 32 columns. `x` are as many blocks of sixteen
    /// lines, of which line `j` has columns `2 * j` and `2 * j + 1` of each token.
    ///
    /// Per block, the products of even columns are added up in order, those of odd ones apart, and the sum of both is
    /// added to that of the blocks before. What is subnormal counts as zero.
    ///
    /// # Panics
    /// When lengths differ from that.
    #[inline(always)]
    pub(crate) fn multiply<const R: usize, const T: usize>(
        &self,
        weights: [&[Line]; R],
        x: [&[Line]; T],
        sums: &mut [[Line; ROWS]],
        fresh: bool,
    ) {
        const { assert!((T == 1 || T == 2) && (R == 1 || R == 2)) };
        let blocks = weights[0].len() / ROWS;
        let all = weights.iter().chain(&x);
        assert!(all.into_iter().all(|lines| lines.len() == blocks * ROWS));
        assert!(sums.len() >= 2 * R - 2 + T);
        let mut weights = weights.map(|weights| weights.as_ptr());
        let mut x = x.map(|x| x.as_ptr());
        let sums: *mut [Line; ROWS] = sums.as_mut_ptr();
        // SAFETY: 1, 2, 4; 3: lengths are checked above.
        unsafe {
            macro_rules! tile {
                ($instruction:literal, $at:expr) => {
                    asm!(
                        $instruction,
                        at = in(reg) $at,
                        line = in(reg) size_of::<Line>(),
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
                ($zero:literal, $load:literal, $sum:expr) => {
                    if fresh {
                        registers!($zero);
                    } else {
                        tile!($load, sums.add($sum));
                    }
                };
            }
            sum!("tilezero tmm0", "tileloadd tmm0, [{at} + {line}]", 0);
            if T == 2 {
                sum!("tilezero tmm1", "tileloadd tmm1, [{at} + {line}]", 1);
            }
            if R == 2 {
                sum!("tilezero tmm2", "tileloadd tmm2, [{at} + {line}]", 2);
            }
            if R == 2 && T == 2 {
                sum!("tilezero tmm3", "tileloadd tmm3, [{at} + {line}]", 3);
            }
            for _ in 0..blocks {
                tile!("tileloadd tmm4, [{at} + {line}]", weights[0]);
                tile!("tileloadd tmm6, [{at} + {line}]", x[0]);
                registers!("tdpbf16ps tmm0, tmm4, tmm6");
                if T == 2 {
                    tile!("tileloadd tmm7, [{at} + {line}]", x[T - 1]);
                    registers!("tdpbf16ps tmm1, tmm4, tmm7");
                }
                if R == 2 {
                    tile!("tileloadd tmm5, [{at} + {line}]", weights[R - 1]);
                    registers!("tdpbf16ps tmm2, tmm5, tmm6");
                }
                if R == 2 && T == 2 {
                    registers!("tdpbf16ps tmm3, tmm5, tmm7");
                }
                for next in weights.iter_mut().chain(&mut x) {
                    *next = next.add(ROWS);
                }
            }
            tile!("tilestored [{at} + {line}], tmm0", sums);
            if T == 2 {
                tile!("tilestored [{at} + {line}], tmm1", sums.add(1));
            }
            if R == 2 {
                tile!("tilestored [{at} + {line}], tmm2", sums.add(2));
            }
            if R == 2 && T == 2 {
                tile!("tilestored [{at} + {line}], tmm3", sums.add(3));
            }
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

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: 1; nothing else has tiles of this thread, by 2.
        unsafe { asm!("tilerelease", options(nostack, preserves_flags, nomem)) };
        IN_USE.set(false);
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
        let registers = Tiles::new(amx);
        let (weights, x) = (weights.each_ref(), x.each_ref());
        registers.multiply(weights.map(|it| &**it), x.map(|it| &**it), &mut sums, fresh);
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
    fn a_thread_has_one_set_of_tiles() {
        let Some(amx) = Amx::detect() else { return };
        let first = Tiles::new(amx);
        std::thread::spawn(move || drop(Tiles::new(amx)))
            .join()
            .expect("another thread has its own");
        drop(first);
        drop(Tiles::new(amx));
    }
}
