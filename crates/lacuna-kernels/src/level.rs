//! The sets of instructions the kernels are compiled for, and the proof that this CPU has one.

use std::str::FromStr;

use crate::cpu::CpuError;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::{Dotprod, I8mm, Neon, Widening};
use crate::simd::{Kernel, Simd, portable::Portable};
#[cfg(target_arch = "x86_64")]
use crate::simd::{
    avx2::{Avx2, Vnni},
    avx512::Avx512Vnni,
};

/// A set of instructions the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Level {
    /// What the compilation target guarantees.
    Portable,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// The same with AVX-VNNI: many without AVX-512 since 2021.
    AvxVnni,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512Vnni,
    /// The same with AMX for bf16: servers since 2023.
    Amx,
    /// 64-bit ARM with NEON, which all have.
    Neon,
    /// 64-bit ARM with dot products of bytes too: most since 2018.
    NeonDotprod,
    /// 64-bit ARM with products of matrices of bytes too: many since 2021.
    NeonI8mm,
}

impl Level {
    /// Every level of every architecture, the slower ones of each first.
    pub const ALL: [Level; 8] = [
        Level::Portable,
        Level::Avx2,
        Level::AvxVnni,
        Level::Avx512Vnni,
        Level::Amx,
        Level::Neon,
        Level::NeonDotprod,
        Level::NeonI8mm,
    ];

    /// The levels that this CPU has, slowest first.
    pub fn available() -> impl DoubleEndedIterator<Item = Level> {
        Level::ALL
            .into_iter()
            .filter(|level| Proof::detect(*level).is_some())
    }

    /// The best level that this CPU has.
    pub fn best() -> Level {
        Level::available().next_back().unwrap_or(Level::Portable)
    }

    /// The name that `LACUNA_CPU` takes and reports show.
    pub const fn name(self) -> &'static str {
        match self {
            Level::Portable => "portable",
            Level::Avx2 => "avx2",
            Level::AvxVnni => "avxvnni",
            Level::Avx512Vnni => "avx512vnni",
            Level::Amx => "amx",
            Level::Neon => "neon",
            Level::NeonDotprod => "neondotprod",
            Level::NeonI8mm => "neoni8mm",
        }
    }
}

impl FromStr for Level {
    type Err = CpuError;

    fn from_str(name: &str) -> Result<Self, CpuError> {
        let mut levels = Level::ALL.into_iter();
        levels
            .find(|level| level.name() == name)
            .ok_or_else(|| CpuError::UnknownLevel(name.into()))
    }
}

/// The proof that this CPU has a level.
#[derive(Clone, Copy)]
pub(crate) enum Proof {
    Portable(Portable),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(Avx2<Vnni>),
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni(Avx512Vnni),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon<Widening>),
    #[cfg(target_arch = "aarch64")]
    NeonDotprod(Neon<Dotprod>),
    #[cfg(target_arch = "aarch64")]
    NeonI8mm(Neon<I8mm>),
}

/// An expression of the lane operations that a [`Proof`] is of.
macro_rules! with_simd {
    ($proof:expr, |$simd:ident| $body:expr) => {{
        use $crate::level::Proof;
        match $proof {
            Proof::Portable($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            Proof::Avx2($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            Proof::AvxVnni($simd) => $body,
            #[cfg(target_arch = "x86_64")]
            Proof::Avx512Vnni($simd) => $body,
            #[cfg(target_arch = "aarch64")]
            Proof::Neon($simd) => $body,
            #[cfg(target_arch = "aarch64")]
            Proof::NeonDotprod($simd) => $body,
            #[cfg(target_arch = "aarch64")]
            Proof::NeonI8mm($simd) => $body,
        }
    }};
}
pub(crate) use with_simd;

impl Proof {
    /// The level, if this CPU has it.
    pub(crate) fn detect(level: Level) -> Option<Self> {
        match level {
            Level::Portable => Some(Proof::Portable(Portable)),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => Avx2::detect().map(Proof::Avx2),
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => Avx2::detect().map(Proof::AvxVnni),
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => Avx512Vnni::detect().map(Proof::Avx512Vnni),
            #[cfg(target_arch = "x86_64")]
            Level::Amx => Avx512Vnni::detect_amx().map(Proof::Avx512Vnni),
            #[cfg(target_arch = "aarch64")]
            Level::Neon => Neon::detect().map(Proof::Neon),
            #[cfg(target_arch = "aarch64")]
            Level::NeonDotprod => Neon::detect().map(Proof::NeonDotprod),
            #[cfg(target_arch = "aarch64")]
            Level::NeonI8mm => Neon::detect().map(Proof::NeonI8mm),
            // Those of another architecture.
            _ => None,
        }
    }

    /// Runs a kernel compiled for the level.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        with_simd!(self, |simd| simd.vectorize(kernel))
    }
}
