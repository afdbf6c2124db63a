//! Blocks of every type against what `gguf` and llama.cpp make of the same weights, and against the bounds
//! that a type has.

use std::path::Path;
use std::sync::LazyLock;

use proptest::prelude::*;

use super::*;
use lacuna_files::ModelFiles;
use lacuna_kernels::Matrix;

/// The types that recipes have.
const MADE: [DType; 18] = [
    DType::F32,
    DType::F16,
    DType::Bf16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Iq4Nl,
    DType::Iq4Xs,
    DType::Mxfp4,
    DType::Q2K,
    DType::Q3K,
    DType::Q4K,
    DType::Q5K,
    DType::Q6K,
    DType::Tq1_0,
    DType::Tq2_0,
];

/// `reference/quantized/blocks.gguf`.
static REFERENCE: LazyLock<ModelFiles> = LazyLock::new(|| {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/quantized");
    ModelFiles::open(&root.join("blocks.gguf")).expect("the fixture opens")
});

fn stored_bytes(dtype: DType, values: &[f32]) -> Result<Vec<u8>, Unfit> {
    let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
    quantize(dtype, values, &mut bytes).map(|()| bytes)
}

fn decoded(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let count = bytes.len() / dtype.block_bytes() * dtype.block_len();
    let mut values = vec![0.0; count];
    let matrix = Matrix::new(dtype, 1, count, bytes).expect("whole blocks");
    matrix.dequantize_row(0, &mut values);
    values
}

/// What is left of values that are stored.
fn after(dtype: DType, values: &[f32]) -> Vec<f32> {
    let bytes = stored_bytes(dtype, values);
    decoded(
        dtype,
        &bytes.unwrap_or_else(|unfit| panic!("{dtype}: {unfit:?}")),
    )
}

fn squares(values: &[f32], others: &[f32]) -> f64 {
    let pairs = values.iter().zip(others);
    let squares = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2));
    squares.sum()
}

fn reference(dtype: DType) -> Vec<u8> {
    let tensor = REFERENCE.tensors().require(dtype.name());
    tensor.expect("the fixture has all types").bytes().to_vec()
}

fn reference_values() -> Vec<f32> {
    let values = REFERENCE.tensors().require("values").expect("it is there");
    decoded(DType::F32, values.bytes())
}

#[test]
fn what_is_rounded_plainly_is_so_bit_for_bit() {
    let values = reference_values();
    for dtype in [
        DType::F16,
        DType::Bf16,
        DType::Q8_0,
        DType::Tq1_0,
        DType::Tq2_0,
    ] {
        assert!(
            stored_bytes(dtype, &values) == Ok(reference(dtype)),
            "{dtype}"
        );
    }
}

/// Squared errors, each times its importance.
fn weighted(values: &[f32], others: &[f32]) -> f64 {
    let weights = values.as_chunks().0.iter();
    let weights = weights.flat_map(|values: &[f32; 32]| search::importance(values, 32));
    let rests = values
        .iter()
        .zip(others)
        .map(|(a, b)| f64::from(a - b).powi(2));
    rests
        .zip(weights)
        .map(|(rest, weight)| rest * f64::from(weight))
        .sum()
}

#[test]
fn searched_scales_leave_less_error_than_those_of_others() {
    let values = reference_values();
    for dtype in MADE {
        if dtype == DType::F32 {
            continue;
        }
        let (ours, theirs) = (after(dtype, &values), decoded(dtype, &reference(dtype)));
        let (whole, others) = (weighted(&values, &ours), weighted(&values, &theirs));
        assert!(whole <= others, "{dtype}: {whole:e} and {others:e}");
        // Of plain squares, which are not what is searched for, no row has much more than theirs.
        let rows = values
            .chunks(256)
            .zip(ours.chunks(256).zip(theirs.chunks(256)));
        for (row, (values, (ours, theirs))) in rows.enumerate() {
            let (ours, theirs) = (squares(values, ours), squares(values, theirs));
            assert!(
                ours <= theirs * 1.03,
                "{dtype}, row {row}: {ours:e} and {theirs:e}"
            );
        }
    }
}

/// The error of any weight at most, as a part of the largest of its 256: half of the widest step between
/// levels that reach from it to its negative, and what rounded scales add.
fn bound(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 0.0,
        DType::F16 => 1.0 / 2048.0,
        DType::Bf16 => 1.0 / 256.0,
        DType::Q8_0 => 1.0 / 250.0,
        DType::Q6K => 1.0 / 28.0,
        DType::Q5_0 | DType::Q5_1 | DType::Q5K => 1.0 / 12.0,
        DType::Q4_0 | DType::Q4_1 | DType::Q4K => 1.0 / 5.0,
        DType::Iq4Nl | DType::Iq4Xs | DType::Mxfp4 => 1.0 / 4.0,
        DType::Q3K => 1.0 / 2.4,
        DType::Q2K => 1.0 / 1.8,
        DType::Tq1_0 | DType::Tq2_0 => 0.51,
        other => unreachable!("{other} is not made"),
    }
}

/// What rounding a scale that is too small for an ordinary 16-bit float can add: half of the least such
/// float, times all that it is multiplied by.
fn of_small_scales(dtype: DType) -> f32 {
    let factor = match dtype {
        DType::F32 | DType::Bf16 | DType::Mxfp4 => 0.0,
        DType::F16 | DType::Tq1_0 | DType::Tq2_0 => 1.0,
        DType::Q6K | DType::Iq4Xs => 128.0 * 32.0,
        DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K => 32.0 * 64.0,
        _ => 128.0,
    };
    factor * f32::from(2_u8).powi(-25)
}

/// Blocks as models have them and as they do not: of all sizes, one-sided, with few that are large.
fn values() -> impl Strategy<Value = Vec<f32>> {
    let size = (-20_i32..12).prop_map(|exponent| f32::from(2_u8).powi(exponent));
    let shape = prop::collection::vec((-1.0_f32..1.0, 0_u8..40), 256);
    (size, -0.5_f32..0.5, shape).prop_map(|(size, middle, shape)| {
        let value = |(value, far): (f32, u8)| match far {
            0 => value * 8.0,
            _ => value + middle,
        };
        shape.into_iter().map(|each| value(each) * size).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn no_weight_is_further_off_than_its_type_allows(values in values()) {
        let most = largest(&values).abs();
        for dtype in MADE {
            let off = values.iter().zip(after(dtype, &values)).map(|(a, b)| (a - b).abs());
            let off = off.fold(0.0, f32::max);
            let allowed = most * bound(dtype) + of_small_scales(dtype);
            prop_assert!(off <= allowed, "{dtype}: {off} of {most}");
        }
    }

    #[test]
    fn what_blocks_hold_is_stored_as_it_is(
        codes in prop::collection::vec(0_u8..16, 32), scale in 1_u16..2000, offset in -2000_i16..2000,
    ) {
        // Blocks that reach both ends of their levels, with scales and offsets that have few bits.
        let (scale, offset) = (f32::from(scale) / 4096.0, f32::from(offset) / 4096.0);
        let mut codes: Vec<f32> = codes.into_iter().map(f32::from).collect();
        (codes[3], codes[20]) = (0.0, 15.0);
        let of = |value: &dyn Fn(f32) -> f32| codes.iter().map(|code| value(*code)).collect::<Vec<_>>();
        let blocks = [
            (DType::Q4_0, of(&|code| scale * (code - 8.0))),
            (DType::Q4_1, of(&|code| scale * code + offset)),
            (DType::Q5_0, of(&|code| scale * (2.0 * code - 16.0 + f32::from(u8::from(code > 7.0))))),
        ];
        for (dtype, values) in &blocks {
            prop_assert_eq!(&after(*dtype, values), values, "{}", dtype);
        }
    }
}

#[test]
fn what_was_stored_once_is_stored_again_as_it_is() {
    // What a type can hold it holds: of types with one scale for a block, exactly.
    let values = reference_values();
    for dtype in MADE {
        let once = after(dtype, &values);
        let again = after(dtype, &once);
        let (lost, first) = (squares(&once, &again), squares(&values, &once));
        let exact = !matches!(
            dtype,
            DType::Q2K | DType::Q3K | DType::Q4K | DType::Q5K | DType::Q6K | DType::Iq4Xs
        );
        match exact {
            true => assert!(once == again, "{dtype} lost {lost:e}"),
            false => assert!(lost < first / 10.0, "{dtype} lost {lost:e} after {first:e}"),
        }
    }
}

#[test]
fn zeros_and_equal_weights_are_kept() {
    for dtype in MADE {
        assert_eq!(after(dtype, &[0.0; 256]), [0.0; 256], "{dtype}");
        for value in [0.75, -0.75] {
            let found = after(dtype, &[value; 256]);
            let far = found.iter().find(|found| (*found - value).abs() > 0.005);
            assert_eq!(far, None, "{dtype}");
        }
    }
}

#[test]
fn weights_that_are_no_finite_numbers_are_refused() {
    for dtype in MADE {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut values = [0.5; 256];
            values[200] = bad;
            assert_eq!(
                stored_bytes(dtype, &values),
                Err(Unfit::NotFinite),
                "{dtype}"
            );
        }
    }
}

#[test]
fn the_smallest_and_the_largest_weights_are_stored_or_refused() {
    let alternating = |size: f32| -> Vec<f32> {
        let sign = |i| if i % 3 == 0 { -size } else { size };
        (0..256).map(sign).collect()
    };
    for dtype in MADE {
        for size in [f32::MIN_POSITIVE, f32::from_bits(1), 1e-30, 1e-12] {
            let values = alternating(size);
            let off = squares(&values, &after(dtype, &values)).sqrt();
            // Nothing is left of most.
            assert!(
                off <= f64::from(size) * 16.0,
                "{dtype} of {size:e}: {off:e}"
            );
        }
        for size in [f32::MAX, 1e30, 1e12] {
            let values = alternating(size);
            match dtype {
                DType::F32 => assert_eq!(after(dtype, &values), values),
                DType::Mxfp4 => {
                    let off = (after(dtype, &values)[0] / values[0] - 1.0).abs();
                    assert!(off <= 0.25, "{size:e}: {off}");
                }
                DType::Bf16 if size < f32::MAX => {
                    assert!((after(dtype, &values)[0] / values[0] - 1.0).abs() < 0.01);
                }
                _ => {
                    let found = stored_bytes(dtype, &values);
                    assert_eq!(found, Err(Unfit::TooLarge), "{dtype} of {size:e}");
                }
            }
        }
    }
}
