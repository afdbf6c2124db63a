//! Passes over a row of logits, as many as a vocabulary has tokens: 150,000 and more.
//!
//! Written over blocks, so that the compiler uses vectors: the highest logit is found in about the
//! time the row takes to be read, and sampling is a small part of a step for any batch. Values that
//! are not numbers are below all others.

use crate::error::NotFinite;

/// Values looked at together. A row has few enough blocks to sort their highest values.
pub(crate) const BLOCK: usize = 64;

/// A token and its logit, or its weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) token: u32,
    pub(crate) score: f32,
}

/// The highest of `row`; negative infinity if none is a number.
pub(crate) fn highest(row: &[f32]) -> f32 {
    let (blocks, rest) = row.as_chunks::<BLOCK>();
    let mut lanes = [f32::NEG_INFINITY; BLOCK];
    for block in blocks {
        for (lane, &value) in lanes.iter_mut().zip(block) {
            *lane = higher(*lane, value);
        }
    }
    lanes
        .iter()
        .chain(rest)
        .copied()
        .fold(f32::NEG_INFINITY, higher)
}

/// Whether a token can be chosen from `row`, as the model gives it: what forbids tokens does so
/// later, on a copy.
///
/// # Errors
/// [`NotFinite`], with the first value that is infinite or no number.
pub(crate) fn check_finite(row: &[f32]) -> Result<(), NotFinite> {
    for (index, block) in row.chunks(BLOCK).enumerate() {
        // No early exit within a block, so that the comparisons are vectorised.
        if block
            .iter()
            .fold(false, |found, value| found | !value.is_finite())
        {
            let within = block.iter().position(|value| !value.is_finite());
            return Err(NotFinite {
                token: index * BLOCK + within.unwrap_or(0),
            });
        }
    }
    Ok(())
}

/// The first token of the highest logit; the first of all if none is a number.
pub(crate) fn likeliest(row: &[f32]) -> u32 {
    let highest = highest(row);
    let mut start = 0;
    for block in row.chunks(BLOCK) {
        if block
            .iter()
            .fold(false, |found, &value| found | (value == highest))
        {
            let place = block.iter().position(|&value| value == highest);
            return (start + place.unwrap_or(0)) as u32;
        }
        start += block.len();
    }
    0
}

/// Appends the tokens whose value is `bar` or higher, in order.
pub(crate) fn at_least(row: &[f32], bar: f32, list: &mut Vec<Candidate>) {
    let mut start = 0;
    for block in row.chunks(BLOCK) {
        if block
            .iter()
            .fold(false, |found, &value| found | (value >= bar))
        {
            let tokens = (start..).zip(block);
            let high = tokens.filter(|&(_, &score)| score >= bar);
            list.extend(high.map(|(token, &score)| Candidate { token, score }));
        }
        start += block.len() as u32;
    }
}

/// A bar that at least `count` of `row` reach, and few more: the lowest of the `count` highest
/// blocks' highest values. Negative infinity when there are too few blocks.
pub(crate) fn bar(row: &[f32], count: usize, maxima: &mut Vec<f32>) -> f32 {
    if count == 0 || count > row.len().div_ceil(BLOCK) {
        return f32::NEG_INFINITY;
    }
    maxima.clear();
    maxima.extend(row.chunks(BLOCK).map(block_highest));
    let (_, bar, _) = maxima.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
    *bar
}

/// The `count` highest of `row`, from the highest down, ties in token order.
pub(crate) fn top(row: &[f32], count: usize, maxima: &mut Vec<f32>, list: &mut Vec<Candidate>) {
    list.clear();
    if count == 0 {
        return;
    }
    at_least(row, bar(row, count, maxima), list);
    let count = count.min(list.len());
    sort_head(list, count);
    list.truncate(count);
}

/// The same, as a device gives them.
#[cfg(test)]
pub(crate) fn top_k(row: &[f32], count: usize) -> Vec<lacuna_models::TokenLogit> {
    let mut list = Vec::new();
    top(row, count, &mut Vec::new(), &mut list);
    let tokens = list.into_iter();
    let tokens = tokens.map(|Candidate { token, score }| lacuna_models::TokenLogit {
        token,
        logit: score,
    });
    tokens.collect()
}

/// Moves the `count` highest to the front, from the highest down, ties in token order.
pub(crate) fn sort_head(list: &mut [Candidate], count: usize) {
    // Zeros of both signs are a tie: plus zero, they are alike.
    let order = |a: f32, b: f32| (a + 0.0).total_cmp(&(b + 0.0));
    let by_score =
        |a: &Candidate, b: &Candidate| order(b.score, a.score).then(a.token.cmp(&b.token));
    if count < list.len() {
        list.select_nth_unstable_by(count, by_score);
    }
    list[..count].sort_unstable_by(by_score);
}

/// Turns logits into weights relative to `highest`, which is finite: `exp((logit - highest) / t)`,
/// and zero for what is not a number. Returns their sum.
pub(crate) fn weigh(row: &mut [f32], highest: f32, temperature: f32) -> f64 {
    for value in &mut *row {
        *value = exp((*value - highest) / temperature);
    }
    total(row)
}

/// The sum of weights.
pub(crate) fn total(weights: &[f32]) -> f64 {
    weights.chunks(BLOCK).map(block_total).sum()
}

/// How many of `row` are not less than `bar`.
pub(crate) fn not_less(row: &[f32], bar: f32) -> usize {
    row.iter().map(|&value| usize::from(value >= bar)).sum()
}

/// The logarithm of the sum of `exp(logit)`.
pub(crate) fn log_sum_exp(row: &[f32]) -> f64 {
    let highest = highest(row);
    let block = |block: &[f32]| {
        let mut weights = [0.0; BLOCK];
        for (weight, &logit) in weights.iter_mut().zip(block) {
            *weight = exp(logit - highest);
        }
        block_total(&weights)
    };
    let sum: f64 = row.chunks(BLOCK).map(block).sum();
    f64::from(highest) + sum.ln()
}

/// The token at the part `unit`, from 0 to 1, of the weights' sum.
pub(crate) fn pick(weights: &[f32], unit: f64) -> Option<u32> {
    let mut left = unit * total(weights);
    let mut picked = None;
    for (index, block) in weights.chunks(BLOCK).enumerate() {
        let sum = block_total(block);
        if left >= sum {
            left -= sum;
            continue;
        }
        for (token, &weight) in (index * BLOCK..).zip(block) {
            if weight > 0.0 {
                picked = Some(token as u32);
            }
            left -= f64::from(weight);
            if left < 0.0 {
                return picked;
            }
        }
    }
    picked
}

fn higher(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

fn block_highest(block: &[f32]) -> f32 {
    block.iter().copied().fold(f32::NEG_INFINITY, higher)
}

/// Eight sums side by side: rounding stays within a few units of the last place.
fn block_total(block: &[f32]) -> f64 {
    let (parts, rest) = block.as_chunks::<8>();
    let mut lanes = [0f32; 8];
    for part in parts {
        for (lane, weight) in lanes.iter_mut().zip(part) {
            *lane += weight;
        }
    }
    let lanes = lanes.iter().chain(rest);
    lanes.map(|&lane| f64::from(lane)).sum()
}

/// `exp(x)` for `x` of zero or less, to within 3e-7 of it; zero below the smallest normal number and
/// for what is not a number.
fn exp(x: f32) -> f32 {
    /// Added, it leaves the nearest integer in the low bits; subtracted again, that integer.
    const ROUND: f32 = 12_582_912.0;
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    let clamped = if x > -87.0 { x } else { -87.0 };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let power = shifted - ROUND;
    let r = clamped - power * LN_2_HIGH - power * LN_2_LOW;
    let series = 1.0 / 720.0;
    let series = series * r + 1.0 / 120.0;
    let series = series * r + 1.0 / 24.0;
    let series = series * r + 1.0 / 6.0;
    let series = series * r + 0.5;
    let series = series * r + 1.0;
    let series = series * r + 1.0;
    let two_to_power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x > -87.0 {
        series * two_to_power
    } else {
        0.0
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Rows of all lengths around a few blocks, with ties and with values that are not numbers.
    fn rows() -> impl Strategy<Value = Vec<f32>> {
        let value = prop_oneof![
            8 => -30f32..30.0,
            2 => prop::sample::select(vec![1.0f32, 2.0, -3.0]),
            1 => prop::sample::select(vec![f32::NAN, f32::NEG_INFINITY, f32::INFINITY]),
        ];
        prop::collection::vec(value, 1..300)
    }

    fn number(value: f32) -> f32 {
        match value.is_nan() {
            true => f32::NEG_INFINITY,
            false => value,
        }
    }

    proptest! {
        #[test]
        fn the_likeliest_is_the_first_of_the_highest(row in rows()) {
            let numbers: Vec<f32> = row.iter().map(|&value| number(value)).collect();
            let best = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            prop_assert_eq!(highest(&row), best);
            let first = row.iter().position(|&value| value == best).unwrap_or(0);
            prop_assert_eq!(likeliest(&row) as usize, first);
        }

        #[test]
        fn a_row_is_refused_for_its_first_value_that_is_not_finite(row in rows()) {
            let first = row.iter().position(|value| !value.is_finite());
            prop_assert_eq!(check_finite(&row).err().map(|error| error.token), first);
        }

        #[test]
        fn the_top_is_what_sorting_everything_gives(row in rows(), count in 0usize..40) {
            let mut sorted: Vec<Candidate> = (0..)
                .zip(&row)
                .filter(|(_, score)| !score.is_nan())
                .map(|(token, &score)| Candidate { token, score })
                .collect();
            sorted.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.token.cmp(&b.token)));
            sorted.truncate(count);
            let mut found = Vec::new();
            top(&row, count, &mut Vec::new(), &mut found);
            prop_assert_eq!(found, sorted);
        }

        #[test]
        fn sums_are_those_of_double_precision(
            row in prop::collection::vec(-90f32..20.0, 1..300), temperature in 0.1f32..3.0,
        ) {
            let best = f64::from(highest(&row));
            let exact = |t: f64| -> f64 {
                row.iter().map(|&x| ((f64::from(x) - best) / t).exp()).sum()
            };
            let expected = best + exact(1.0).ln();
            prop_assert!((log_sum_exp(&row) - expected).abs() < 2e-6);
            let mut weights = row.clone();
            let sum = weigh(&mut weights, best as f32, temperature);
            let expected = exact(f64::from(temperature));
            prop_assert!((sum / expected - 1.0).abs() < 1e-5, "{} and {}", sum, expected);
        }

        #[test]
        fn every_weight_has_its_part(weights in prop::collection::vec(0u8..4, 1..200), unit in 0f64..1.0) {
            let weights: Vec<f32> = weights.into_iter().map(f32::from).collect();
            let target = unit * weights.iter().map(|&w| f64::from(w)).sum::<f64>();
            let mut reached = 0.0;
            let expected = weights.iter().position(|&weight| {
                reached += f64::from(weight);
                reached > target
            });
            prop_assert_eq!(pick(&weights, unit), expected.map(|token| token as u32));
        }
    }

    #[test]
    fn powers_are_right_over_the_whole_range() {
        for step in 0..870_000 {
            let x = -step as f32 * 1e-4;
            let (found, exact) = (f64::from(exp(x)), f64::from(x).exp());
            assert!(
                (found / exact - 1.0).abs() < 3e-7,
                "exp({x}) = {found}, not {exact}"
            );
        }
        assert_eq!(exp(0.0), 1.0);
        for x in [-87.5, -1e30, f32::NEG_INFINITY, f32::NAN] {
            assert_eq!(exp(x), 0.0);
        }
    }
}
