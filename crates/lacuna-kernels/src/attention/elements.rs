//! How elements are stored, two chunks at a time.

use crate::simd::{LANES, Simd, padded};

/// Thirty-two elements.
pub(super) trait Pair: 'static {
    /// How they are stored.
    type Stored: Copy;

    /// Whole pairs and the bytes after them.
    fn split(head: &[u8]) -> (&[Self::Stored], &[u8]);
    /// The pair that starts with `tail` and goes on with zeros.
    fn pad(tail: &[u8]) -> Self::Stored;
    /// Thirty-two elements as f32.
    fn load<S: Simd>(s: S, pair: &Self::Stored) -> [S::F; 2];
}

macro_rules! pair {
    ($name:ident, $bytes:literal, |$s:ident, $pair:ident| $load:expr) => {
        pub(super) struct $name;

        impl Pair for $name {
            type Stored = [u8; $bytes];

            #[inline(always)]
            fn load<S: Simd>($s: S, $pair: &Self::Stored) -> [S::F; 2] {
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

pair!(F32, 128, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_f32_bytes(&half[0]), s.load_f32_bytes(&half[1])]
});
pair!(F16, 64, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_f16(&half[0]), s.load_f16(&half[1])]
});
pair!(Bf16, 64, |s, pair| {
    let half = pair.as_chunks().0;
    [s.load_bf16(&half[0]), s.load_bf16(&half[1])]
});
pair!(Q8_0, 34, |s, block| {
    let scale = s.splat_f16([block[0], block[1]]);
    let half = block[2..].as_chunks::<LANES>().0;
    [
        s.mul(scale, s.load_i8(&half[0])),
        s.mul(scale, s.load_i8(&half[1])),
    ]
});
pair!(Q4_0, 18, |s, block| {
    let scale = s.splat_f16([block[0], block[1]]);
    let nibbles = block[2..].as_chunks::<LANES>().0;
    let [low, high] = s.load_nibbles(&nibbles[0]);
    [s.mul(scale, low), s.mul(scale, high)]
});

/// Evaluates an expression with the [`Pair`] of an [`ElementType`](crate::ElementType); `q8_0` may have
/// one of its own.
macro_rules! with_element {
    ($element:expr, |$E:ident| $body:expr) => {
        with_element!($element, |$E| $body, q8_0: {
            type $E = $crate::attention::elements::Q8_0;
            $body
        })
    };
    ($element:expr, |$E:ident| $body:expr, q8_0: $other:expr) => {
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
            $crate::element::ElementType::Q4_0 => {
                type $E = $crate::attention::elements::Q4_0;
                $body
            }
            $crate::element::ElementType::Q8_0 => $other,
        }
    };
}
pub(super) use with_element;
