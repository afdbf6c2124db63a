//! How elements are stored, two chunks at a time.

use crate::element::ElementType;
use crate::quantized::codebooks::{CENTRED, LEVELS};
use crate::simd::{LANES, Simd, padded};

/// Thirty-two elements, which may be stored as integers in units of their own.
pub(super) trait Pair: 'static {
    /// How they are stored.
    type Stored: Copy + AsRef<[u8]>;
    /// Where their unit is, a binary16, if it is anything but 1.
    const UNIT: Option<usize>;

    /// Whole pairs and the bytes after them.
    fn split(head: &[u8]) -> (&[Self::Stored], &[u8]);
    /// The pair that starts with `tail` and goes on with zeros.
    fn pad(tail: &[u8]) -> Self::Stored;
    /// The elements, in units, as f32.
    fn in_units<S: Simd>(s: S, pair: &Self::Stored) -> [S::F; 2];

    /// What one unit is worth.
    #[inline(always)]
    fn unit(pair: &Self::Stored) -> u16 {
        let Some(at) = Self::UNIT else { return ONE };
        let bytes = pair.as_ref();
        u16::from_le_bytes([bytes[at], bytes[at + 1]])
    }

    /// The elements as f32.
    #[inline(always)]
    fn load<S: Simd>(s: S, pair: &Self::Stored) -> [S::F; 2] {
        let elements = Self::in_units(s, pair);
        if Self::UNIT.is_none() {
            return elements;
        }
        let unit = s.splat_f16(Self::unit(pair));
        [s.mul(unit, elements[0]), s.mul(unit, elements[1])]
    }
}

/// Implements [`Pair`] for a type: the bytes of a pair, where its unit is, and how its elements become
/// f32.
macro_rules! pair {
    ($name:ident, $bytes:literal, $unit:expr, |$s:ident, $pair:ident| $load:expr) => {
        pub(super) struct $name;

        impl Pair for $name {
            type Stored = [u8; $bytes];
            const UNIT: Option<usize> = $unit;

            #[inline(always)]
            fn in_units<S: Simd>($s: S, $pair: &Self::Stored) -> [S::F; 2] {
                $load
            }

            #[inline(always)]
            fn split(head: &[u8]) -> (&[Self::Stored], &[u8]) {
                head.as_chunks()
            }

            #[inline(always)]
            fn pad(tail: &[u8]) -> Self::Stored {
                padded(tail)
            }
        }
    };
}

/// 1 as a binary16.
const ONE: u16 = 0x3C00;

pair!(F32, 128, None, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_f32_bytes(&half[0]), s.load_f32_bytes(&half[1])]
});
pair!(F16, 64, None, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_f16(&half[0]), s.load_f16(&half[1])]
});
pair!(Bf16, 64, None, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_bf16(&half[0]), s.load_bf16(&half[1])]
});
pair!(Q8_0, 34, Some(0), |s, block| {
    let half = block[2..].as_chunks::<LANES>().0;
    [s.load_i8(&half[0]), s.load_i8(&half[1])]
});
pair!(Q4_0, 18, Some(0), |s, block| {
    s.load_named(&CENTRED, &block[2..].as_chunks().0[0])
});
pair!(Iq4Nl, 18, Some(0), |s, block| {
    s.load_named(&LEVELS, &block[2..].as_chunks().0[0])
});

/// What nibbles stand for, of elements that are stored as nibbles.
pub(super) fn table(element: ElementType) -> Option<&'static [i8; 16]> {
    match element {
        ElementType::F32 | ElementType::F16 | ElementType::Bf16 | ElementType::Q8_0 => None,
        ElementType::Q4_0 => Some(&CENTRED),
        ElementType::Iq4Nl => Some(&LEVELS),
    }
}

/// Evaluates an expression with the [`Pair`] of an [`ElementType`](crate::ElementType); `integers` may have
/// one of their own.
macro_rules! with_element {
    ($element:expr, |$E:ident| $body:expr) => {
        match $element {
            $crate::element::ElementType::Q8_0 => {
                type $E = $crate::attention::elements::Q8_0;
                $body
            }
            $crate::element::ElementType::Q4_0 => {
                type $E = $crate::attention::elements::Q4_0;
                $body
            }
            $crate::element::ElementType::Iq4Nl => {
                type $E = $crate::attention::elements::Iq4Nl;
                $body
            }
            other => with_element!(other, |$E| $body, integers: unreachable!("they are above")),
        }
    };
    ($element:expr, |$E:ident| $body:expr, integers: $other:expr) => {
        match $element {
            $crate::element::ElementType::F32 => {
                type $E = $crate::attention::elements::F32;
                $body
            }
            $crate::element::ElementType::F16 => {
                type $E = $crate::attention::elements::F16;
                $body
            }
            $crate::element::ElementType::Bf16 => {
                type $E = $crate::attention::elements::Bf16;
                $body
            }
            $crate::element::ElementType::Q8_0
            | $crate::element::ElementType::Q4_0
            | $crate::element::ElementType::Iq4Nl => $other,
        }
    };
}
pub(super) use with_element;
