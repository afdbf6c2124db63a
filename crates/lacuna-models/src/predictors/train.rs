//! Fits a block's predictor: logistic regression of each neuron through a few directions that all share, by gradient descent
//! with Adam (Kingma and Ba, 2015) over rows drawn at random.
//!
//! The text is divided by place: most is learned from, the next part says where to draw the line so that the recall that
//! was asked for is met, and the last, which nothing has seen, how good that is.

use std::ops::Range;

use half::f16;
use lacuna_kernels::{Activation, Cpu, DType, Matrix};

use super::record::Recorded;
use super::{Predictor, Workspace, plain};
use crate::synth::Generator;

/// Rows of a step of descent. Fewer make steps that are more noise, and more cost more than they help.
const BATCH: usize = 128;

/// Steps of descent, and the rate of the first; the rate falls evenly to nothing. Where Adam's steps are as large,
/// directions have settled long before the end.
pub(super) const STEPS: usize = 1000;
const RATE: f32 = 3e-3;

/// Adam's own: how long it remembers gradients and their squares, and what keeps it from dividing by zero.
const DECAYS: [f32; 2] = [0.9, 0.999];
const EPSILON: f32 = 1e-8;

/// Rows that are left for drawing the line, and as many for saying how good it is: one of so many each.
const HELD_OUT: usize = 10;

/// How good a predictor is, on rows that it was not fitted to.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Quality {
    /// Neurons of these rows.
    pub(super) all: u64,
    /// Those of them that were active.
    pub(super) active: u64,
    /// Those that were named.
    pub(super) named: u64,
    /// Those that were both.
    pub(super) right: u64,
}

/// Fits a predictor of so many shared directions, which names so large a part of active neurons; `step` is told of each step.
pub(super) fn train(
    cpu: &Cpu,
    of: &Recorded,
    (rank, recall): (usize, f64),
    seed: u64,
    step: &mut dyn FnMut(),
) -> (Predictor, Quality) {
    let held_out = of.rows() / HELD_OUT;
    let learned = 0..of.rows() - 2 * held_out;
    let calibrated = learned.end..learned.end + held_out;
    let reported = calibrated.end..of.rows();
    let mut descent = Descent::new(cpu, of, learned, rank, seed);
    for at in 0..STEPS {
        descent.step(RATE * (1.0 - at as f32 / STEPS as f32));
        step();
    }
    let mut predictor = descent.predictor();
    let threshold = threshold(cpu, of, &predictor, calibrated, recall);
    predictor.bias.iter_mut().for_each(|it| *it -= threshold);
    // Where sums before were 0. What is named at all is as likely as that, if nothing less likely need be.
    predictor.margin = (-threshold).max(0.0);
    let mut quality = Quality::default();
    each_score(cpu, of, &predictor, reported, &mut |score, is_active| {
        let is_named = score >= 0.0;
        quality.all += 1;
        quality.active += u64::from(is_active);
        quality.named += u64::from(is_named);
        quality.right += u64::from(is_named && is_active);
    });
    (predictor, quality)
}

/// Which score so large a part of active neurons have, or more.
fn threshold(
    cpu: &Cpu,
    of: &Recorded,
    predictor: &Predictor,
    rows: Range<usize>,
    recall: f64,
) -> f32 {
    let mut scores = Vec::new();
    each_score(cpu, of, predictor, rows, &mut |score, is_active| {
        if is_active {
            scores.push(score);
        }
    });
    if scores.is_empty() {
        return 0.0;
    }
    let missed = ((1.0 - recall) * scores.len() as f64) as usize;
    let missed = missed.min(scores.len() - 1);
    *scores.select_nth_unstable_by(missed, f32::total_cmp).1
}

/// Gives the scores of rows to `each`, with whether the neuron is active.
fn each_score(
    cpu: &Cpu,
    of: &Recorded,
    predictor: &Predictor,
    rows: Range<usize>,
    each: &mut dyn FnMut(f32, bool),
) {
    let (mut work, mut x) = (Workspace::default(), Vec::new());
    for start in rows.clone().step_by(BATCH) {
        let some = start..rows.end.min(start + BATCH);
        x.resize(some.len() * of.shape.width, 0.0);
        for (row, x) in some.clone().zip(x.chunks_exact_mut(of.shape.width)) {
            of.x(row, x);
        }
        let scores = predictor.scores(cpu, &x, &mut work);
        for (row, scores) in some.zip(scores.chunks_exact(of.shape.neurons)) {
            for (score, is_active) in scores.iter().zip(of.active(row)) {
                each(*score, is_active);
            }
        }
    }
}

/// A matrix or a vector that is learned.
struct Learned {
    values: Vec<f32>,
    /// The gradient of the last step, its mean over steps, and that of its square.
    gradient: Vec<f32>,
    moments: [Vec<f32>; 2],
}

impl Learned {
    fn new(values: Vec<f32>) -> Self {
        let zeros = || vec![0.0; values.len()];
        Self {
            gradient: zeros(),
            moments: [zeros(), zeros()],
            values,
        }
    }

    /// Goes a step down. `steps` is how many there are with this one.
    fn descend(&mut self, rate: f32, steps: i32) {
        let [forget, forget_squares] = DECAYS;
        let unbias = 1.0 - forget.powi(steps);
        let unbias_squares = (1.0 - forget_squares.powi(steps)).sqrt();
        let (rate, epsilon) = (rate * unbias_squares / unbias, EPSILON * unbias_squares);
        let [means, squares] = &mut self.moments;
        let of = self.values.iter_mut().zip(&self.gradient);
        for (((value, gradient), mean), square) in of.zip(means).zip(squares) {
            *mean = forget * *mean + (1.0 - forget) * gradient;
            *square = forget_squares * *square + (1.0 - forget_squares) * gradient * gradient;
            *value -= rate * *mean / (square.sqrt() + epsilon);
        }
    }

    fn matrix(&self, rows: usize, columns: usize) -> Matrix<'_> {
        matrix(&self.values, rows, columns)
    }
}

fn matrix(values: &[f32], rows: usize, columns: usize) -> Matrix<'_> {
    let matrix = Matrix::new(DType::F32, rows, columns, bytemuck::cast_slice(values));
    matrix.expect("as many elements as it has")
}

/// A predictor under way.
struct Descent<'a> {
    cpu: &'a Cpu,
    of: &'a Recorded,
    /// The rows that are learned from.
    rows: Range<usize>,
    rank: usize,
    random: Generator,
    /// What `x` is divided by, so that its elements are about 1.
    scale: f32,
    steps: i32,
    narrow: Learned,
    wide: Learned,
    bias: Learned,
    /// `[batch, width]`, and turned.
    x: [Vec<f32>; 2],
    /// `[batch, rank]`, and turned.
    inner: [Vec<f32>; 2],
    /// How much too likely a neuron is held to be, `[batch, neurons]`, and turned.
    error: [Vec<f32>; 2],
    /// The gradient of `inner`, `[batch, rank]`, and turned.
    inner_error: [Vec<f32>; 2],
    /// `wide` turned, `[rank, neurons]`.
    wide_turned: Vec<f32>,
}

impl<'a> Descent<'a> {
    fn new(cpu: &'a Cpu, of: &'a Recorded, rows: Range<usize>, rank: usize, seed: u64) -> Self {
        let (width, neurons) = (of.shape.width, of.shape.neurons);
        let mut random = Generator::new(seed, 0);
        let mut x = vec![0.0; width];
        let (mut squares, mut active) = (0.0, vec![0u32; neurons]);
        for row in rows.clone() {
            of.x(row, &mut x);
            squares += x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>();
            let each = active.iter_mut().zip(of.active(row));
            each.for_each(|(count, is_active)| *count += u32::from(is_active));
        }
        let scale = (squares / (rows.len() * width) as f64).sqrt() as f32;
        // Half a row more of either: what has never been seen is not impossible.
        let logit = |count: &u32| {
            let active = f64::from(*count) + 0.5;
            (active / (rows.len() as f64 + 1.0 - active)).ln() as f32
        };
        let bias = active.iter().map(logit).collect();
        let deviation = 1.0 / (width as f32).sqrt();
        let narrow = (0..rank * width).map(|_| random.value(deviation)).collect();
        let both = |elements: usize| [vec![0.0; BATCH * elements], vec![0.0; BATCH * elements]];
        Self {
            cpu,
            of,
            rows,
            rank,
            random,
            scale: if scale > 0.0 { scale } else { 1.0 },
            steps: 0,
            narrow: Learned::new(narrow),
            wide: Learned::new(vec![0.0; neurons * rank]),
            bias: Learned::new(bias),
            x: both(width),
            inner: both(rank),
            error: both(neurons),
            inner_error: both(rank),
            wide_turned: vec![0.0; neurons * rank],
        }
    }

    fn step(&mut self, rate: f32) {
        let (cpu, rank) = (self.cpu, self.rank);
        let (width, neurons) = (self.of.shape.width, self.of.shape.neurons);
        let [x, x_turned] = &mut self.x;
        let [inner, inner_turned] = &mut self.inner;
        let [error, error_turned] = &mut self.error;
        let [inner_error, inner_error_turned] = &mut self.inner_error;
        let mut drawn = [0; BATCH];
        for (row, x) in drawn.iter_mut().zip(x.chunks_exact_mut(width)) {
            *row = self.rows.start + (self.random.next() % self.rows.len() as u64) as usize;
            self.of.x(*row, x);
            x.iter_mut().for_each(|x| *x /= self.scale);
        }
        // How likely each neuron is held to be.
        let narrow = self.narrow.matrix(rank, width);
        cpu.matmul(inner, &plain(cpu, x, BATCH), &narrow);
        let wide = self.wide.matrix(neurons, rank);
        let linear = (&wide, Some(&self.bias.values[..]));
        let likely = Some(Activation::Sigmoid);
        cpu.linear_each(
            [&mut error[..]],
            &plain(cpu, inner, BATCH),
            [linear],
            likely,
        );
        // The gradient of the cross entropy, mean over rows.
        for (row, error) in drawn.iter().zip(error.chunks_exact_mut(neurons)) {
            for (error, is_active) in error.iter_mut().zip(self.of.active(*row)) {
                *error = (*error - f32::from(u8::from(is_active))) / BATCH as f32;
            }
        }
        // Back through both matrices.
        turn(&self.wide.values, neurons, &mut self.wide_turned);
        let wide_turned = matrix(&self.wide_turned, rank, neurons);
        cpu.matmul(inner_error, &plain(cpu, error, BATCH), &wide_turned);
        turn(error, BATCH, error_turned);
        turn(inner, BATCH, inner_turned);
        let inner_turned = matrix(inner_turned, rank, BATCH);
        cpu.matmul(
            &mut self.wide.gradient,
            &plain(cpu, error_turned, neurons),
            &inner_turned,
        );
        let sums = self
            .bias
            .gradient
            .iter_mut()
            .zip(error_turned.chunks_exact(BATCH));
        sums.for_each(|(sum, errors)| *sum = errors.iter().sum());
        turn(inner_error, BATCH, inner_error_turned);
        turn(x, BATCH, x_turned);
        let x_turned = matrix(x_turned, width, BATCH);
        cpu.matmul(
            &mut self.narrow.gradient,
            &plain(cpu, inner_error_turned, rank),
            &x_turned,
        );
        self.steps += 1;
        for learned in [&mut self.narrow, &mut self.wide, &mut self.bias] {
            learned.descend(rate, self.steps);
        }
    }

    /// What has been learned, rounded as files have it.
    fn predictor(self) -> Predictor {
        let halves = |values: &[f32], divisor: f32| -> Vec<u8> {
            let halves = values.iter().map(|value| {
                let most = f16::MAX.to_f32();
                f16::from_f32((value / divisor).clamp(-most, most))
            });
            halves.flat_map(f16::to_le_bytes).collect()
        };
        Predictor {
            width: self.of.shape.width,
            rank: self.rank,
            narrow: halves(&self.narrow.values, self.scale),
            wide: halves(&self.wide.values, 1.0),
            bias: self.bias.values,
            margin: 0.0,
        }
    }
}

/// Rows as columns.
fn turn(values: &[f32], rows: usize, out: &mut [f32]) {
    let columns = values.len() / rows;
    for (column, out) in out.chunks_exact_mut(rows).enumerate() {
        for (row, out) in out.iter_mut().enumerate() {
            *out = values[row * columns + column];
        }
    }
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::CpuConfig;

    use super::*;
    use crate::predictors::{BlockShape, Input, NeuronRecorder};
    use crate::program::{MatrixId, VectorId};

    /// Neurons that are active where a row points their way in a few directions, of many that it has.
    fn recorded(rows: usize) -> Recorded {
        const WIDTH: usize = 48;
        const NEURONS: usize = 100;
        const DIRECTIONS: usize = 4;
        let mut random = Generator::new(7, 1);
        let weights: Vec<f32> = (0..NEURONS * DIRECTIONS)
            .map(|_| random.value(1.0))
            .collect();
        let shape = BlockShape {
            name: "a.weight".to_owned(),
            width: WIDTH,
            neurons: NEURONS,
        };
        let (norm, width) = (VectorId(3), WIDTH);
        let inputs = [(5, Input { norm, width })].into();
        let mut recorder = NeuronRecorder::new([(5, &shape)].into_iter(), &inputs, rows);
        for _ in 0..rows {
            let x: Vec<f32> = (0..WIDTH).map(|_| random.value(20.0)).collect();
            recorder.input(norm, &x);
            let active = weights.chunks_exact(DIRECTIONS).map(|weights| {
                let sum: f32 = weights.iter().zip(&x).map(|(w, x)| w * x).sum();
                (sum - 40.0).max(0.0)
            });
            recorder.active(MatrixId(5), &active.collect::<Vec<_>>());
        }
        recorder.into_blocks().remove(0)
    }

    #[test]
    fn what_a_few_directions_decide_is_foretold_and_is_the_same_every_time() {
        let cpu = Cpu::new(CpuConfig::default()).expect("threads");
        let of = recorded(4000);
        let (predictor, found) = train(&cpu, &of, (8, 0.95), 1, &mut || ());
        let share = |part: u64, whole: u64| part as f64 / whole as f64;
        let active = share(found.active, found.all);
        assert!((0.1..0.25).contains(&active), "{active}");
        let recall = share(found.right, found.active);
        assert!((0.93..0.98).contains(&recall), "{recall}");
        let named = share(found.named, found.all);
        assert!(named < 1.4 * active, "{named} of {active}");
        // At the margin half of what is named is needed, and so most of what is above it.
        let (mut above, mut right) = (0, 0);
        each_score(
            &cpu,
            &of,
            &predictor,
            3600..4000,
            &mut |score, is_active| {
                above += u64::from(score >= predictor.margin);
                right += u64::from(score >= predictor.margin && is_active);
            },
        );
        assert!(right > 0 && share(right, above) > 0.7, "{right} of {above}");
        let again = train(&cpu, &of, (8, 0.95), 1, &mut || ());
        assert_eq!(again.0, predictor);
    }
}
