//! Mixtures of experts: which experts a token has, and whose tokens each expert has.
//!
//! A router scores all experts of a layer for each token, and the best few compute it. [`Routes`] turns
//! that round: the tokens of a batch sorted by expert, so that each expert's rows of weights are read
//! once for all tokens that chose it. A *choice* is one expert of one token, numbered
//! `token * used + rank`, the best expert of a token first; its *place* is where it comes when choices
//! are sorted by expert, then by token. The places of one expert are a *band*.

use std::ops::Range;

use crate::activations::{Activations, Input, Tiling};
use crate::elementwise::activation::{Apply, Sigmoid};
use crate::level::{Level, Proof};
use crate::matrix::Matrix;
use crate::simd::{Kernel, LANES, Simd, exp, padded};

/// How a layer's router chooses experts and weighs them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// Experts there are.
    pub experts: usize,
    /// Experts of each token, from 1 to all.
    pub used: usize,
    /// What makes scores of the router's logits.
    pub scores: Scores,
    /// Experts are chosen from a few groups only.
    pub groups: Option<Groups>,
    /// Whether the weights of a token are made to sum to 1.
    pub normalized: bool,
    /// What all weights are multiplied by.
    pub scale: f32,
}

/// What makes scores of a router's logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scores {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
    /// The softmax over the chosen experts alone.
    SoftmaxOfChosen,
}

/// Groups of neighbouring experts, of which each token first chooses a few.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups there are: a divisor of the number of experts, at most [`Groups::MOST`].
    pub count: usize,
    /// Groups that a token's experts are chosen from, from 1 to all.
    pub used: usize,
    /// What groups are compared by.
    pub score: GroupScore,
}

impl Groups {
    /// The most groups there may be; published models have 8.
    pub const MOST: usize = 64;
}

/// What groups of experts are compared by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score.
    Largest,
    /// The sum of the two largest.
    SumOfTwo,
}

/// Added to the sum of scores that weights are divided by, so that no scores at all make no weights.
const LEAST_SUM: f32 = 1e-20;

impl Routing {
    /// Each token has all of `experts` experts, and nothing is weighed.
    pub const fn all(experts: usize) -> Self {
        Self {
            experts,
            used: experts,
            scores: Scores::Softmax,
            groups: None,
            normalized: false,
            scale: 1.0,
        }
    }

    /// Chooses the experts of one token. `scores` are its logits, and may be changed; `bias` is added to
    /// scores where they are compared and nowhere else.
    fn choose(
        &self,
        proof: Proof,
        scores: &mut [f32],
        bias: Option<&[f32]>,
        choices: &mut [u32],
        weights: &mut [f32],
    ) {
        match self.scores {
            Scores::Softmax => proof.run(Softmax { x: scores }),
            Scores::Sigmoid => proof.run(Apply {
                function: Sigmoid,
                x: scores,
            }),
            Scores::SoftmaxOfChosen => {}
        }
        let key = |expert: usize| scores[expert] + bias.map_or(0.0, |bias| bias[expert]);
        let keys = |experts: Range<usize>| experts.map(|expert| (expert as u32, key(expert)));
        match self.groups {
            None => {
                largest(keys(0..self.experts), choices, weights);
            }
            Some(groups) => {
                let size = self.experts / groups.count;
                let allowed = groups.choose(|group| keys(group * size..(group + 1) * size));
                let members = allowed[..groups.used].iter().flat_map(|&group| {
                    let first = group as usize * size;
                    keys(first..first + size)
                });
                largest(members, choices, weights);
            }
        }
        for (weight, &choice) in weights.iter_mut().zip(&*choices) {
            *weight = scores[choice as usize];
        }
        if self.scores == Scores::SoftmaxOfChosen {
            proof.run(Softmax { x: &mut *weights });
        }
        let divisor = match self.normalized {
            true => weights.iter().sum::<f32>() + LEAST_SUM,
            false => 1.0,
        };
        for weight in weights {
            *weight = *weight / divisor * self.scale;
        }
    }
}

impl Groups {
    /// The groups to choose from, in ascending order, so that of equal experts the first is chosen;
    /// `members` are the numbered keys of a group's experts.
    fn choose<I: Iterator<Item = (u32, f32)>>(
        &self,
        members: impl Fn(usize) -> I,
    ) -> [u32; Self::MOST] {
        let score = |group: usize| {
            let (mut best, mut scores) = ([0; 2], [f32::NEG_INFINITY; 2]);
            match self.score {
                GroupScore::Largest => {
                    largest(members(group), &mut best[..1], &mut scores[..1]);
                    scores[0]
                }
                GroupScore::SumOfTwo => {
                    let found = largest(members(group), &mut best, &mut scores);
                    scores[..found].iter().sum()
                }
            }
        };
        let (mut chosen, mut scores) = ([0; Self::MOST], [0.0; Self::MOST]);
        let keys = (0..self.count).map(|group| (group as u32, score(group)));
        largest(keys, &mut chosen[..self.used], &mut scores[..self.used]);
        chosen[..self.used].sort_unstable();
        chosen
    }
}

/// Finds the numbers of the largest of `keys` and those keys, the largest first and of equal ones that
/// which comes first; returns how many were found, all that were asked for if there are so many. What
/// is no number counts as less than all numbers.
fn largest(
    keys: impl Iterator<Item = (u32, f32)>,
    numbers: &mut [u32],
    values: &mut [f32],
) -> usize {
    let mut found = 0;
    for (number, key) in keys {
        let key = if key.is_nan() { f32::NEG_INFINITY } else { key };
        let at = values[..found].partition_point(|&value| value >= key);
        if at == values.len() {
            continue;
        }
        found = values.len().min(found + 1);
        numbers.copy_within(at..found - 1, at + 1);
        values.copy_within(at..found - 1, at + 1);
        (numbers[at], values[at]) = (number, key);
    }
    found
}

/// `x = e^x / sum of e^x`, less the largest of them first.
struct Softmax<'a> {
    x: &'a mut [f32],
}

impl Kernel for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let largest = self.x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let shift = s.splat(largest);
        let (chunks, tail) = self.x.as_chunks_mut::<LANES>();
        for x in chunks {
            s.store(exp(s, s.sub(s.load(x), shift)), x);
        }
        let mut lanes = [0.0; LANES];
        s.store(exp(s, s.sub(s.load(&padded(tail)), shift)), &mut lanes);
        tail.copy_from_slice(&lanes[..tail.len()]);
        // One after another, so that all levels round alike.
        let sum: f32 = self.x.iter().sum();
        self.x.iter_mut().for_each(|x| *x /= sum);
    }
}

/// The experts of a batch's tokens, and the tokens of each expert, in words that the caller lends; see
/// [`Cpu::route`](crate::Cpu::route).
///
/// ```text
/// 1         how many bands
/// choices   expert of each choice
/// choices   token of each place
/// choices   place of each choice
/// experts   scratch
/// bands     expert of each band
/// bands + 1 the first place of each band, and their end
/// bands + 1 the same in rows of quantized activations, of which a band may have some to spare
/// ```
#[derive(Clone, Copy)]
pub struct Routes<'a> {
    used: usize,
    experts: &'a [u32],
    tokens: &'a [u32],
    places: &'a [u32],
    bands: &'a [u32],
    starts: &'a [u32],
    stored: &'a [u32],
}

/// The words of [`Routes`] while they are made.
struct Words<'a> {
    count: &'a mut u32,
    experts: &'a mut [u32],
    tokens: &'a mut [u32],
    places: &'a mut [u32],
    next: &'a mut [u32],
    bands: &'a mut [u32],
    starts: &'a mut [u32],
    stored: &'a mut [u32],
}

impl<'a> Words<'a> {
    fn split(words: &'a mut [u32], tokens: usize, routing: &Routing) -> Self {
        let choices = tokens * routing.used;
        let bands = routing.experts.min(choices);
        let mut rest = words;
        let mut next = |len: usize| {
            let (part, tail) = std::mem::take(&mut rest).split_at_mut(len);
            rest = tail;
            part
        };
        Self {
            count: &mut next(1)[0],
            experts: next(choices),
            tokens: next(choices),
            places: next(choices),
            next: next(routing.experts),
            bands: next(bands),
            starts: next(bands + 1),
            stored: next(bands + 1),
        }
    }

    /// Sorts choices by expert, when the experts of all are known. Counting: as many steps as there are
    /// choices and experts.
    fn sort(self, used: usize, tiling: Tiling) {
        self.next.fill(0);
        for &expert in &*self.experts {
            self.next[expert as usize] += 1;
        }
        let (mut bands, mut start, mut stored) = (0, 0, 0);
        for (expert, next) in self.next.iter_mut().enumerate() {
            let count = std::mem::replace(next, start);
            if count > 0 {
                self.bands[bands] = expert as u32;
                self.starts[bands] = start;
                self.stored[bands] = stored;
                bands += 1;
                start += count;
                stored += tiling.stored(count as usize) as u32;
            }
        }
        self.starts[bands] = start;
        self.stored[bands] = stored;
        *self.count = bands as u32;
        let choices = self.experts.iter().zip(self.places).enumerate();
        for (choice, (&expert, place)) in choices {
            let next = &mut self.next[expert as usize];
            *place = *next;
            self.tokens[*next as usize] = (choice / used) as u32;
            *next += 1;
        }
    }
}

impl<'a> Routes<'a> {
    /// Words that the routes of `tokens` tokens take, or `None` if there are too many to number.
    pub fn words(tokens: usize, routing: &Routing) -> Option<usize> {
        let choices = tokens.checked_mul(routing.used)?;
        // Rows to spare make numbers larger than the number of choices, by less than another time.
        choices
            .checked_mul(2)
            .filter(|&most| most <= u32::MAX as usize)?;
        let bands = routing.experts.min(choices);
        let each = 3 * choices + routing.experts;
        each.checked_add(3 * bands + 3)
    }

    /// Bytes of storage that quantized activations of `cols` values take for all choices of `tokens`
    /// tokens, or `None` as [`Activations::storage_bytes`] says it.
    pub fn storage_bytes(tokens: usize, used: usize, cols: usize) -> Option<usize> {
        let choices = tokens.checked_mul(used)?;
        // Each expert's tokens fill tiles of their own. The worst is five tokens in a tile of eight.
        let rows = choices.checked_mul(8)? / 5;
        rows.checked_mul(Activations::storage_bytes(1, cols)?)
    }

    /// Writes the routes of tokens that have all experts in ascending order.
    pub(crate) fn write_all(words: &mut [u32], tokens: usize, routing: &Routing, tiling: Tiling) {
        let words = Words::split(words, tokens, routing);
        for choices in words.experts.chunks_exact_mut(routing.experts) {
            for (choice, expert) in choices.iter_mut().zip(0..) {
                *choice = expert;
            }
        }
        words.sort(routing.used, tiling);
    }

    /// What [`Cpu::route`](crate::Cpu::route) wrote to `words`.
    ///
    /// # Panics
    /// When there are too few words.
    pub fn new(words: &'a [u32], tokens: usize, routing: &Routing) -> Self {
        let choices = tokens * routing.used;
        let most = routing.experts.min(choices);
        let (count, rest) = words.split_at(1);
        let bands = count[0] as usize;
        let (experts, rest) = rest.split_at(choices);
        let (token_of, rest) = rest.split_at(choices);
        let (places, rest) = rest.split_at(choices);
        let rest = &rest[routing.experts..];
        let (starts, stored) = rest[most..].split_at(most + 1);
        Self {
            used: routing.used,
            experts,
            tokens: token_of,
            places,
            bands: &rest[..bands],
            starts: &starts[..=bands],
            stored: &stored[..=bands],
        }
    }

    /// The experts of a token, the best first.
    ///
    /// # Panics
    /// When there is no such token.
    pub fn experts(&self, token: usize) -> &'a [u32] {
        &self.experts[token * self.used..][..self.used]
    }

    /// Choices of all tokens.
    pub fn choices(&self) -> usize {
        self.places.len()
    }

    /// Experts that some token has.
    pub fn bands(&self) -> usize {
        self.bands.len()
    }

    /// Those experts, each once and in ascending order.
    pub fn chosen(&self) -> &'a [u32] {
        self.bands
    }

    /// The expert of a band.
    pub(crate) fn expert(&self, band: usize) -> usize {
        self.bands[band] as usize
    }

    /// Where bands start, and where the last ends.
    pub(crate) fn starts(&self) -> &'a [u32] {
        self.starts
    }

    /// The same in rows of quantized activations.
    pub(crate) fn stored(&self) -> &'a [u32] {
        self.stored
    }

    fn places_of(&self, band: usize) -> Range<usize> {
        self.starts[band] as usize..self.starts[band + 1] as usize
    }

    /// Choices of some bands, or of all, and of the one that most tokens have.
    pub(crate) fn sizes(&self, bands: Option<&[u32]>) -> (usize, usize) {
        let add = |(all, longest): (usize, usize), band| {
            let size = self.places_of(band).len();
            (all + size, longest.max(size))
        };
        match bands {
            None => (0..self.bands()).fold((0, 0), add),
            Some(bands) => bands.iter().map(|band| *band as usize).fold((0, 0), add),
        }
    }

    /// The places of a token's choices, the best first.
    pub(crate) fn places(&self, token: usize) -> &'a [u32] {
        &self.places[token * self.used..][..self.used]
    }
}

/// Routes all tokens of `logits`, `[tokens, experts]`.
pub(crate) struct Route<'a> {
    pub(crate) routing: &'a Routing,
    pub(crate) logits: &'a mut [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) scales: Option<&'a [f32]>,
    pub(crate) weights: &'a mut [f32],
    pub(crate) words: &'a mut [u32],
}

impl Route<'_> {
    pub(crate) fn run(self, proof: Proof, tiling: Tiling) {
        let Routing { experts, used, .. } = *self.routing;
        let tokens = self.logits.len() / experts;
        let words = Words::split(self.words, tokens, self.routing);
        let choices = words.experts.chunks_exact_mut(used);
        let weights = self.weights.chunks_exact_mut(used);
        let rows = self.logits.chunks_exact_mut(experts);
        for ((scores, choices), weights) in rows.zip(choices).zip(weights) {
            self.routing
                .choose(proof, scores, self.bias, choices, weights);
            if let Some(scales) = self.scales {
                let scales = choices.iter().map(|&expert| scales[expert as usize]);
                weights
                    .iter_mut()
                    .zip(scales)
                    .for_each(|(w, scale)| *w *= scale);
            }
        }
        words.sort(used, tiling);
    }
}

/// Which rows experts read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertInput {
    /// `[tokens, cols]`: all experts of a token read its row.
    Tokens,
    /// `[choices, cols]`: each reads a row of its own, by place.
    Choices,
}

/// Activations that experts are multiplied with; see
/// [`Cpu::expert_activations`](crate::Cpu::expert_activations).
pub struct ExpertActivations<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) cols: usize,
    pub(crate) from: ExpertInput,
    pub(crate) routes: Routes<'a>,
    pub(crate) level: Level,
    pub(crate) tiling: Tiling,
    /// Bands of tiles, or nothing.
    pub(crate) quantized: &'a [u8],
}

impl<'a> ExpertActivations<'a> {
    /// Values per row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The rows that a band reads.
    pub(crate) fn input(&self, band: usize) -> Input<'a> {
        let places = self.routes.places_of(band);
        let (x, cols) = (self.x, self.cols);
        match self.from {
            ExpertInput::Tokens => Input {
                x,
                cols,
                rows: Some(&self.routes.tokens[places]),
            },
            ExpertInput::Choices => Input {
                x: &x[places.start * cols..places.end * cols],
                cols,
                rows: None,
            },
        }
    }

    /// Tokens of a band, and how many of them a tile has.
    pub(crate) fn tile(&self, band: usize) -> (usize, usize) {
        let tokens = self.routes.places_of(band).len();
        (tokens, self.tiling.tile(tokens))
    }

    /// What the expert of a band is multiplied with.
    pub(crate) fn band(&self, band: usize) -> Activations<'a> {
        let (tokens, tile) = self.tile(band);
        let quantized = match self.quantized {
            [] => &[][..],
            all => {
                let row = Activations::storage_bytes(1, self.cols).unwrap_or(0);
                let stored = &self.routes.stored[band..band + 2];
                &all[stored[0] as usize * row..stored[1] as usize * row]
            }
        };
        Activations {
            input: self.input(band),
            tokens,
            tile,
            level: self.level,
            quantized,
        }
    }
}

/// One expert's matrix, and what is added to its products.
#[derive(Clone, Copy)]
pub struct Expert<'a> {
    /// `[rows, cols]`
    pub matrix: Matrix<'a>,
    /// One for each row.
    pub bias: Option<&'a [f32]>,
}

/// Sums what the experts of each token have made of it, the best first.
pub(crate) struct Combine<'a> {
    /// `[tokens, width]` from `first` on.
    pub(crate) out: &'a mut [f32],
    pub(crate) first: usize,
    /// `[choices, width]` by place.
    pub(crate) y: &'a [f32],
    /// `[tokens, used]`
    pub(crate) weights: &'a [f32],
    pub(crate) routes: &'a Routes<'a>,
    pub(crate) width: usize,
}

impl Kernel for Combine<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { routes, width, .. } = self;
        for (index, out) in self.out.chunks_exact_mut(width).enumerate() {
            let token = self.first + index;
            out.fill(0.0);
            let weights = &self.weights[token * routes.used..][..routes.used];
            for (&place, weight) in routes.places(token).iter().zip(weights) {
                let y = &self.y[place as usize * width..][..width];
                for (out, y) in out.iter_mut().zip(y) {
                    // Rounded twice at all levels.
                    *out += y * weight;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn best<const N: usize>(keys: &[f32]) -> ([u32; N], [f32; N]) {
        let (mut numbers, mut values) = ([9; N], [0.0; N]);
        let keys = keys.iter().enumerate();
        let keys = keys.map(|(number, key)| (number as u32, *key));
        assert_eq!(largest(keys, &mut numbers, &mut values), N);
        (numbers, values)
    }

    #[test]
    fn the_largest_come_first_and_of_equal_ones_the_first() {
        let (numbers, values) = best::<3>(&[0.5, 2.0, -1.0, 2.0, 0.5]);
        assert_eq!(numbers, [1, 3, 0]);
        assert_eq!(values, [2.0, 2.0, 0.5]);
    }

    #[test]
    fn what_is_no_number_is_chosen_last_and_never_twice() {
        let nan = f32::NAN;
        assert_eq!(best::<2>(&[nan, f32::NEG_INFINITY, 1.0]).0, [2, 0]);
        let (numbers, _) = best::<4>(&[nan; 4]);
        assert_eq!(numbers, [0, 1, 2, 3]);
    }

    #[test]
    fn storage_holds_the_tiles_of_any_bands() {
        // Bands of five tokens have the most to spare.
        for count in 1..200 {
            let most = Routes::storage_bytes(count, 1, 32).expect("small") / 52;
            for (one_by_one, streamed, amx) in [(1, 64, false), (1, 64, true), (3, 0, false)] {
                let tiling = Tiling {
                    widest: 6,
                    one_by_one,
                    streamed,
                    amx,
                };
                assert!(tiling.stored(count) <= most, "{count}");
            }
        }
    }
}
