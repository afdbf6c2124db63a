//! Log-probabilities of tokens from a row of logits.

use crate::row;
use crate::stream::TokenLogprobs;

/// Log-probability of `chosen` and the `top` likeliest tokens, ties in token order.
pub(crate) fn of(logits: &[f32], chosen: u32, top: usize) -> TokenLogprobs {
    let normalizer = row::log_sum_exp(logits);
    let logprob = |logit: f32| (f64::from(logit) - normalizer) as f32;
    let mut ranked = Vec::new();
    row::top(logits, top, &mut Vec::new(), &mut ranked);
    let score = logits[chosen as usize];
    // Exactly as many: they are kept, and the list they come from has room for more.
    let mut listed = Vec::with_capacity(ranked.len());
    listed.extend(
        ranked
            .iter()
            .map(|candidate| (candidate.token, logprob(candidate.score))),
    );
    TokenLogprobs {
        chosen: logprob(score),
        rank: row::not_less(logits, score),
        top: listed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probabilities_sum_to_one_and_come_likeliest_first() {
        let logits = [0.5, 2.0, -1.0, 2.0];
        let found = of(&logits, 2, 4);
        let tokens: Vec<u32> = found.top.iter().map(|entry| entry.0).collect();
        assert_eq!(tokens, [1, 3, 0, 2], "ties in token order");
        let total: f32 = found.top.iter().map(|entry| entry.1.exp()).sum();
        assert!((total - 1.0).abs() < 1e-6, "{total}");
        assert_eq!(found.chosen, found.top[3].1);
        assert_eq!(found.rank, 4);
        assert_eq!(of(&logits, 1, 0).rank, 2, "the last of those as likely");
    }

    #[test]
    fn none_are_listed_unless_asked_for() {
        assert!(of(&[1.0, 2.0], 0, 0).top.is_empty());
        assert_eq!(of(&[1.0, 2.0], 0, 99).top.len(), 2);
    }
}
