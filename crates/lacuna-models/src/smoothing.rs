//! What keys are smoothed by where they are stored in few bits: found from a pass over a short text.
//!
//! Keys have much that is the same for every token, which changes no weight of attention and takes most of a block's scale, and
//! channels in which keys are large and queries small, or the other way round. Subtracting the mean of keys is what
//! SageAttention does (arXiv:2411.10958, "smooth K") and moving scales from one factor of a product to the other what
//! SmoothQuant does (arXiv:2211.10438); here both are decided once, before the first row is stored, because rows are shared.

use lacuna_kernels::{AttentionShape, Cpu};
use lacuna_kv::{Geometry, KeySmoothing, KvCache, Layer, Side, SmoothedKeys, ValueRows};
use lacuna_text::tokenizer::{Special, Tokenizer};

use crate::error::ForwardError;
use crate::executor::{LogitRows, Segment};
use crate::model::Model;
use crate::scratch::Scratch;

/// Prose, code, lists and other languages. What it says does not matter.
const TEXT: &str = include_str!("smoothing.txt");

/// Tokens of it that are looked at: enough for means to settle. With 32 to 128 perplexities of SmolLM2 and Gemma 3 270M
/// (docs/measurements.md, KV element types) were higher.
const TOKENS: usize = 256;

/// Fewer tokens say too little.
const FEWEST_TOKENS: usize = 32;

/// How much of the factors that would make the error of scores least, if all keys weighed the same, is used, as a power. They
/// do not weigh the same. Of 0, 1/2, 3/4 and 1 the perplexities were 10.84, 10.73, 10.71 and 10.75 (SmolLM2), and 14.63, 14.25,
/// 14.23 and 14.26 (Gemma 3 270M), measured as in docs/measurements.md, KV element types.
const STRENGTH: f64 = 0.75;

/// How much smaller than the mean of a head a channel's square is taken to be at most: of channels that are zero no factor
/// can be had.
const LEAST_SHARE: f64 = 1e-4;

impl Model {
    /// The same memory for sequences whose keys are stored smoothed, where their type gains from it: computes a short text
    /// first, over rows that are given back, which takes as long as a prompt of as many tokens. As it is where contexts of
    /// `context_tokens` are too short for that, or there is no room for the text's rows.
    ///
    /// # Errors
    /// As [`Model::forward`].
    pub fn smooth_keys(
        &self,
        cpu: &Cpu,
        cache: KvCache,
        context_tokens: usize,
        scratch: &mut Scratch,
    ) -> Result<KvCache, ForwardError> {
        let Some(recorder) = KeyRecorder::for_keys_of(cache.geometry()) else {
            return Ok(cache);
        };
        let tokens = tokens(self.tokenizer(), context_tokens);
        if tokens.is_empty() {
            return Ok(cache);
        }
        // Experts that this text chooses are nobody's.
        let trace = scratch.record(None);
        scratch.record_keys(Some(recorder));
        let had_room = self.compute(cpu, &cache, context_tokens, &tokens, scratch);
        let recorder = scratch.record_keys(None);
        scratch.record(trace);
        // Nobody has asked for anything yet: memory is as it was.
        scratch.give_back();
        Ok(match (had_room?, recorder) {
            (true, Some(recorder)) => cache.with_key_smoothing(recorder.smoothing()),
            _ => cache,
        })
    }

    /// Computes `tokens` in a sequence of their own. Returns whether there was room for it.
    fn compute(
        &self,
        cpu: &Cpu,
        cache: &KvCache,
        context_tokens: usize,
        tokens: &[u32],
        scratch: &mut Scratch,
    ) -> Result<bool, ForwardError> {
        let Ok(mut sequence) = cache.sequence(context_tokens) else {
            return Ok(false);
        };
        for chunk in tokens.chunks(scratch.limits().tokens) {
            if sequence.prepare(chunk.len()).is_err() {
                return Ok(false);
            }
            let segment = Segment {
                tokens: chunk,
                sequence: &mut sequence,
                logits: LogitRows::None,
                images: &[],
            };
            self.forward(cpu, &mut [segment], scratch)?;
            sequence.accept(chunk.len());
        }
        Ok(true)
    }
}

/// Tokens of a text that is like many; none where the vocabulary makes too few of it, or there is no room for more than
/// `room`.
fn tokens(tokenizer: &Tokenizer, room: usize) -> Vec<u32> {
    let mut tokens = tokenizer.encode(TEXT, Special::PROMPT).unwrap_or_default();
    tokens.truncate(TOKENS.min(room));
    if tokens.len() < FEWEST_TOKENS {
        tokens.clear();
    }
    tokens
}

/// Sums over what passes store and attend with.
#[derive(Debug)]
pub(crate) struct KeyRecorder {
    /// Of the rows of each layer.
    layers: Vec<Option<Recorded>>,
}

#[derive(Debug)]
struct Recorded {
    head_dim: usize,
    /// `[kv_heads, head_dim]` each, of keys but for the first of a sequence: that is unlike all others.
    keys: usize,
    sums: Vec<f64>,
    squares: Vec<f64>,
    /// The same of the queries that read them.
    query_squares: Vec<f64>,
    /// Whether scores may all be less by the same number.
    may_shift: bool,
}

impl KeyRecorder {
    /// One for sequences of `geometry`, if keys of it are to be smoothed.
    fn for_keys_of(geometry: &Geometry) -> Option<Self> {
        if !geometry.element(Side::Key).gains_from_smoothing() {
            return None;
        }
        let mut layers = Vec::new();
        layers.resize_with(geometry.layers().len(), || None);
        for (Layer(layer), rows) in geometry.own_rows() {
            // Values that are part of keys would be smoothed with them.
            if rows.values == ValueRows::Apart {
                let zeros = vec![0.0; rows.row_elements(Side::Key)];
                layers[layer] = Some(Recorded {
                    head_dim: rows.key_dim,
                    keys: 0,
                    sums: zeros.clone(),
                    squares: zeros.clone(),
                    query_squares: zeros,
                    may_shift: true,
                });
            }
        }
        Some(Self { layers })
    }

    /// Adds keys that `layer` stores, whole rows of them, behind `before` others.
    pub(crate) fn keys(&mut self, Layer(layer): Layer, rows: &[f32], before: usize) {
        let Some(Some(recorded)) = self.layers.get_mut(layer) else {
            return;
        };
        let width = recorded.sums.len();
        for row in rows.chunks_exact(width).skip(usize::from(before == 0)) {
            recorded.keys += 1;
            let sums = recorded.sums.iter_mut().zip(&mut recorded.squares);
            for ((sum, square), x) in sums.zip(row) {
                let x = f64::from(*x);
                *sum += x;
                *square += x * x;
            }
        }
    }

    /// Adds queries of the rows of `layer`, `[tokens, query_heads, head_dim]`.
    pub(crate) fn queries(
        &mut self,
        Layer(layer): Layer,
        queries: &[f32],
        shape: &AttentionShape,
        has_sinks: bool,
    ) {
        let Some(Some(recorded)) = self.layers.get_mut(layer) else {
            return;
        };
        // A sink is compared with scores, and a cap changes them by what they are.
        recorded.may_shift &= !has_sinks && shape.soft_cap.is_none();
        let sharing = shape.query_heads / shape.kv_heads;
        for (head, query) in queries.chunks_exact(shape.head_dim).enumerate() {
            let kv_head = head % shape.query_heads / sharing;
            let squares = &mut recorded.query_squares[kv_head * shape.head_dim..];
            for (square, x) in squares.iter_mut().zip(query) {
                *square += f64::from(*x) * f64::from(*x);
            }
        }
    }

    /// What has come of it.
    fn smoothing(self) -> KeySmoothing {
        let layers = self.layers.into_iter();
        let of = |recorded: Option<Recorded>| recorded.as_ref().and_then(Recorded::smoothed);
        KeySmoothing::new(layers.map(of).collect())
    }
}

impl Recorded {
    /// `None` where nothing is known, or what is known is of no use.
    fn smoothed(&self) -> Option<SmoothedKeys> {
        let count = self.keys as f64;
        let (mut centre, mut factors) = (Vec::new(), Vec::new());
        let heads = self.sums.chunks_exact(self.head_dim);
        let squares = self.squares.chunks_exact(self.head_dim);
        let queries = self.query_squares.chunks_exact(self.head_dim);
        for ((sums, squares), queries) in heads.zip(squares).zip(queries) {
            let means = sums.iter().map(|sum| match self.may_shift {
                true => sum / count,
                false => 0.0,
            });
            let means: Vec<f64> = means.collect();
            let left = squares.iter().zip(&means).zip(sums);
            let left = left.map(|((square, mean), sum)| {
                (square - 2.0 * mean * sum + count * mean * mean).max(0.0)
            });
            centre.extend(means.iter().map(|mean| *mean as f32));
            factors.extend(head_factors(&left.collect::<Vec<_>>(), queries)?);
        }
        let usable = |x: &f32| x.is_finite();
        let all = centre.iter().chain(&factors).all(usable);
        all.then(|| SmoothedKeys::new(centre, factors))
    }
}

/// What the keys of a head are multiplied by, from sums of squares of what is left of keys and of queries.
///
/// An error that is spread over all channels alike, as it is after the transform, is felt as `sum(queries^2 / factor^2)` times
/// `sum(keys^2 * factor^2)`, which is least where `factor^4` is `queries^2 / keys^2`.
fn head_factors(keys: &[f64], queries: &[f64]) -> Option<Vec<f32>> {
    let floor = |of: &[f64]| {
        let mean = of.iter().sum::<f64>() / of.len() as f64;
        (mean.is_finite() && mean > 0.0).then_some(mean * LEAST_SHARE)
    };
    let (least_key, least_query) = (floor(keys)?, floor(queries)?);
    let pairs = keys.iter().zip(queries);
    let logs = pairs
        .map(|(key, query)| 0.25 * STRENGTH * (query.max(least_query) / key.max(least_key)).ln());
    let logs: Vec<f64> = logs.collect();
    let mean = logs.iter().sum::<f64>() / logs.len() as f64;
    Some(logs.iter().map(|log| (log - mean).exp() as f32).collect())
}

#[cfg(test)]
mod tests {
    use lacuna_kernels::ElementType;
    use lacuna_kv::{Keep, KvElements, LayerCache, RowSpec};

    use super::*;

    const HEAD_DIM: usize = 32;

    fn geometry(elements: KvElements, values: ValueRows) -> Geometry {
        let rows = RowSpec {
            kv_heads: 2,
            key_dim: HEAD_DIM,
            value_dim: HEAD_DIM,
            values,
            keep: Keep::All,
        };
        let layers = vec![LayerCache::None, LayerCache::Rows(rows)];
        Geometry::new(layers, elements).expect("whole blocks")
    }

    fn recorder() -> KeyRecorder {
        let elements = KvElements::both(ElementType::Q4_0);
        KeyRecorder::for_keys_of(&geometry(elements, ValueRows::Apart)).expect("few bits")
    }

    const SHAPE: AttentionShape = AttentionShape::causal(4, 2, HEAD_DIM, 1.0);

    /// Rows whose elements are `mean` more or less their number from 1 on.
    fn keys(mean: f32) -> Vec<f32> {
        let row = |sign: f32| (0..2 * HEAD_DIM).map(move |i| mean + sign * (1 + i) as f32);
        let rows = [1.0, -1.0, 1.0, -1.0].into_iter();
        rows.flat_map(row).collect()
    }

    fn of_layer(recorder: KeyRecorder) -> Option<SmoothedKeys> {
        recorder.smoothing().layer(Layer(1)).cloned()
    }

    #[test]
    fn keys_lose_their_mean_and_channels_go_to_the_factor_that_has_less() {
        let mut recorder = recorder();
        // The first row of a sequence does not count, and neither does a layer that stores none.
        let first = [1e6; 2 * HEAD_DIM];
        recorder.keys(Layer(1), &[&first[..], &keys(10.0)].concat(), 0);
        recorder.keys(Layer(1), &keys(10.0), 5);
        recorder.keys(Layer(0), &keys(1e9), 5);
        let query: Vec<f32> = vec![3.0; 4 * HEAD_DIM];
        recorder.queries(Layer(1), &query, &SHAPE, false);
        let found = of_layer(recorder).expect("keys and queries were seen");
        assert!(found.centre().iter().all(|x| (x - 10.0).abs() < 1e-5));
        // With queries alike everywhere factors fall as keys grow, and their product is 1.
        for factors in found.factors().chunks(HEAD_DIM) {
            assert!(factors.windows(2).all(|two| two[0] > two[1]));
            let log: f32 = factors.iter().map(|factor| factor.ln()).sum();
            assert!(log.abs() < 1e-4, "{log}");
        }
        let ratio = found.factors()[0] / found.factors()[HEAD_DIM - 1];
        let expected = (HEAD_DIM as f64).powf(2.0 * 0.25 * STRENGTH);
        assert!((f64::from(ratio) - expected).abs() < 1e-4, "{ratio}");
    }

    #[test]
    fn query_heads_belong_to_the_head_that_they_read() {
        let mut recorder = recorder();
        recorder.keys(Layer(1), &keys(0.0), 1);
        let mut query = vec![1.0; 4 * HEAD_DIM];
        // The first channel of the third head, which reads the second.
        query[2 * HEAD_DIM] = 100.0;
        recorder.queries(Layer(1), &query, &SHAPE, false);
        let found = of_layer(recorder).expect("keys and queries were seen");
        let share =
            |head: usize| found.factors()[head * HEAD_DIM] / found.factors()[head * HEAD_DIM + 1];
        assert!(share(1) > 3.0 * share(0), "{} {}", share(1), share(0));
    }

    #[test]
    fn scores_that_are_compared_with_others_are_not_shifted() {
        let capped = AttentionShape {
            soft_cap: Some(50.0),
            ..SHAPE
        };
        for (shape, has_sinks, shifts) in [
            (SHAPE, false, true),
            (SHAPE, true, false),
            (capped, false, false),
        ] {
            let mut recorder = recorder();
            recorder.keys(Layer(1), &keys(10.0), 1);
            recorder.queries(Layer(1), &[1.0; 4 * HEAD_DIM], &shape, has_sinks);
            let found = of_layer(recorder).expect("keys and queries were seen");
            assert_eq!(found.centre().iter().any(|x| *x != 0.0), shifts);
        }
    }

    #[test]
    fn what_is_not_known_or_of_no_use_is_left_alone() {
        assert!(of_layer(recorder()).is_none(), "nothing was seen");
        for damaged in [0.0, f32::NAN, f32::INFINITY] {
            let mut recorder = recorder();
            recorder.keys(Layer(1), &[damaged; 4 * HEAD_DIM], 1);
            recorder.queries(Layer(1), &[1.0; 4 * HEAD_DIM], &SHAPE, false);
            assert!(of_layer(recorder).is_none(), "{damaged}");
        }
        let fine = KvElements {
            key: ElementType::Q8_0,
            value: ElementType::Q4_0,
        };
        assert!(KeyRecorder::for_keys_of(&geometry(fine, ValueRows::Apart)).is_none());
        let few = KvElements::both(ElementType::Q4_0);
        let mut latent =
            KeyRecorder::for_keys_of(&geometry(few, ValueRows::InKeys)).expect("few bits");
        latent.keys(Layer(1), &keys(1.0), 1);
        assert!(
            of_layer(latent).is_none(),
            "values would be smoothed with keys"
        );
    }
}
