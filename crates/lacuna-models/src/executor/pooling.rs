//! The rows of a text become one.

use crate::spec::Pooling;

/// Pools `rows`, whole rows of `output`'s width and at least one, into `output`. The order of the sums is
/// that of the rows, so a text's vector does not depend on what else is in the batch.
pub(super) fn pool(pooling: Pooling, rows: &[f32], output: &mut [f32]) {
    let width = output.len();
    match pooling {
        Pooling::First => output.copy_from_slice(&rows[..width]),
        Pooling::Last => output.copy_from_slice(&rows[rows.len() - width..]),
        Pooling::Mean => {
            output.fill(0.0);
            for row in rows.chunks_exact(width) {
                for (sum, value) in output.iter_mut().zip(row) {
                    *sum += value;
                }
            }
            let count = (rows.len() / width) as f32;
            output.iter_mut().for_each(|sum| *sum /= count);
        }
    }
}

/// Brings a vector to a length of 1; one of zeros stays as it is.
pub fn normalize(vector: &mut [f32]) {
    // In f64, where no square of an f32 overflows.
    let squares = vector.iter().map(|value| f64::from(*value).powi(2));
    let length = squares.sum::<f64>().sqrt();
    if length > 0.0 {
        for value in vector {
            *value = (f64::from(*value) / length) as f32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_is_picked_or_the_mean_is_taken() {
        let rows = [1.0, 2.0, 3.0, 4.0, 5.0, 12.0];
        let pooled = |pooling| {
            let mut output = [f32::NAN; 2];
            pool(pooling, &rows, &mut output);
            output
        };
        assert_eq!(pooled(Pooling::First), [1.0, 2.0]);
        assert_eq!(pooled(Pooling::Last), [5.0, 12.0]);
        assert_eq!(pooled(Pooling::Mean), [3.0, 6.0]);
    }

    #[test]
    fn a_vector_is_brought_to_a_length_of_1_unless_it_has_none() {
        let mut one = [5.0, 12.0];
        normalize(&mut one);
        assert_eq!(one, [5.0 / 13.0, 12.0 / 13.0]);
        let mut large = [f32::MAX, 0.0];
        normalize(&mut large);
        assert_eq!(large, [1.0, 0.0]);
        let mut none = [0.0; 2];
        normalize(&mut none);
        assert_eq!(none, [0.0; 2]);
    }
}
