//! What requests of different namespaces share: nothing.

use lacuna_engine::{Event, Miss, Request};
use lacuna_kv::prefix::Namespace;

use crate::support::{alone, config, contents, greedy, idle, prompt, start, together};

fn of(namespace: u128, seed: u32) -> Request {
    Request {
        prefix_namespace: Namespace::new(namespace),
        ..greedy(prompt(seed, 300), 6)
    }
}

#[test]
fn a_prompt_of_one_namespace_is_unseen_in_another() {
    let service = start(config());
    let first = |request: Request| {
        let mut stream = service.handle().submit(request).expect("taken");
        let first = stream.blocking_recv();
        while stream.blocking_recv().is_some() {}
        match first {
            Some(Event::Started {
                reused_tokens,
                miss,
                ..
            }) => (reused_tokens, miss),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(first(of(1, 4)), (0, Some(Miss::Unseen)));
    assert_eq!(first(of(2, 4)), (0, Some(Miss::Unseen)));
    assert!(first(of(1, 4)).0 > 200);
    assert!(first(of(2, 4)).0 > 200);
    // One that only begins the same is no different.
    let mut longer = of(3, 4);
    longer.prompt.extend(prompt(9, 50));
    assert_eq!(first(longer), (0, Some(Miss::Unseen)));
    idle(&service);
}

#[test]
fn requests_of_many_namespaces_at_once_say_what_each_says_alone() {
    let service = start(config());
    let expected = contents(&alone(of(0, 5)));
    let requests = (0..6).map(|number| of(number % 3, 5)).collect();
    let answers = together(&service, requests);
    let fresh = answers.iter().filter(|answer| answer[0].reused == 0);
    assert_eq!(
        fresh.count(),
        3,
        "the first of each namespace computes its prompt"
    );
    for answer in &answers {
        assert_eq!(contents(answer), expected);
    }
}
