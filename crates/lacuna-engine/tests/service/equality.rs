//! What else is in the batch never changes an answer.

use crate::support::{alone, config, finish, greedy, prompt, start};

#[test]
fn a_batch_of_different_lengths_gives_what_each_gives_alone() {
    let requests = || (0..6u32).map(|seed| greedy(prompt(seed, 7 + 40 * seed as usize), 12));
    let expected: Vec<_> = requests().map(alone).collect();
    let service = start(config());
    let streams: Vec<_> = requests()
        .map(|request| service.handle().submit(request).expect("taken"))
        .collect();
    for (stream, expected) in streams.into_iter().zip(expected) {
        assert_eq!(finish(stream).expect("an answer"), expected);
    }
}
