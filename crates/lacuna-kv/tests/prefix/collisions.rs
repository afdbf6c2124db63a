//! Groups whose hashes are the same are told apart by what they hold: whoever can make hashes
//! collide makes the cache smaller, and reads nobody else's rows.

use std::num::NonZeroUsize;
use std::time::Instant;

use lacuna_kv::prefix::{GroupId, Inserted, Miss, Namespace, Parent, Tree};

use crate::hashing::Narrow;

const ONE: Namespace = Namespace::new(1);
const FIRST: Parent = Parent::Root(ONE);

/// A tree of groups of two tokens in which all hashes are the same.
fn colliding() -> Tree<&'static str, Narrow> {
    let two = NonZeroUsize::new(2).expect("two");
    Tree::with_hasher(two, Narrow { bits: 0 })
}

fn kept(inserted: Inserted) -> GroupId {
    match inserted {
        Inserted::New(id) => id,
        other => panic!("{other:?} instead of a new group"),
    }
}

#[test]
fn a_prompt_is_not_taken_for_another_of_the_same_hash() {
    let mut tree = colliding();
    kept(tree.insert(FIRST, &[1, 2], Instant::now(), || "one and two"));
    let found = tree.find(ONE, &[3, 4]);
    assert_eq!((found.groups, found.tail), (vec![], None));
    assert_eq!(found.miss, Some(Miss::Unseen));
}

#[test]
fn the_same_tokens_after_another_beginning_are_another_group() {
    let mut tree = colliding();
    let now = Instant::now();
    let first = kept(tree.insert(FIRST, &[1, 2], now, || "first"));
    assert_eq!(
        tree.find(ONE, &[1, 2, 1, 2]).groups,
        [first],
        "one group of two"
    );
    let after = tree.insert(
        Parent::Group(first),
        &[1, 2],
        now,
        || "the same again, later",
    );
    assert_eq!(after, Inserted::Collided);
    assert_eq!(tree.find(ONE, &[1, 2, 1, 2]).groups, [first]);
}

#[test]
fn a_group_that_collides_takes_nothing_and_replaces_nothing() {
    let mut tree = colliding();
    let now = Instant::now();
    let first = kept(tree.insert(FIRST, &[1, 2], now, || "first"));
    let second = tree.insert(FIRST, &[3, 4], now, || "second");
    assert_eq!(second, Inserted::Collided);
    assert_eq!(tree.len(), 1);
    assert_eq!(tree.get(first), Some((&"first", 1)));
    assert_eq!(tree.find(ONE, &[1, 2]).groups, [first]);
    assert!(tree.find(ONE, &[3, 4]).groups.is_empty());
    tree.release(&[first], now);
    assert_eq!(tree.evict(now), Some("first"));
    kept(tree.insert(FIRST, &[3, 4], now, || "second"));
}

#[test]
fn the_same_tokens_of_another_namespace_are_not_found_even_where_all_hashes_are_one() {
    let mut tree = colliding();
    let now = Instant::now();
    let other = Namespace::new(2);
    let first = kept(tree.insert(FIRST, &[1, 2], now, || "first"));
    for tokens in [&[1, 2][..], &[1, 2, 3, 4], &[1]] {
        let found = tree.find(other, tokens);
        assert_eq!((found.groups, found.tail), (vec![], None), "{tokens:?}");
    }
    assert_eq!(tree.find(other, &[1, 2]).miss, Some(Miss::Unseen));
    let second = tree.insert(Parent::Root(other), &[1, 2], now, || "second");
    assert_eq!(second, Inserted::Collided);
    assert_eq!(tree.get(first), Some((&"first", 1)));
}
