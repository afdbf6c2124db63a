//! What leaves the tree and in what order: the longest unused first, of those the deepest, of those the
//! oldest; pinned ones last, and never by the time to live.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use lacuna_kv::prefix::{GroupId, Inserted, Miss, Namespace, Parent, Tree};

const ROOT: Parent = Parent::Root(Namespace::COMMON);
const TIME_TO_LIVE: Duration = Duration::from_secs(10);

fn tree() -> (Tree<&'static str>, Instant) {
    let tree: Tree<&'static str> = Tree::new(NonZeroUsize::new(2).expect("two"));
    assert_eq!(tree.group_tokens(), 2);
    (tree, Instant::now())
}

/// Keeps a group that is used from `now` on.
fn enter(
    tree: &mut Tree<&'static str>,
    now: Instant,
    parent: Parent,
    tokens: [u32; 2],
    name: &'static str,
) -> GroupId {
    match tree.insert(parent, &tokens, now, || name) {
        Inserted::New(id) => id,
        other => panic!("{other:?}"),
    }
}

/// Groups that were last used in the same step are told apart by depth, and at one depth by age: the
/// order is the same on every run.
#[test]
fn of_groups_unused_since_the_same_moment_the_deepest_and_then_the_oldest_leaves() {
    let (mut tree, now) = tree();
    let first = enter(&mut tree, now, ROOT, [1, 2], "first");
    let under_first = enter(&mut tree, now, Parent::Group(first), [3, 4], "under first");
    let second = enter(&mut tree, now, ROOT, [5, 6], "second");
    let third = enter(&mut tree, now, ROOT, [7, 8], "third");
    tree.release(&[third], now);
    tree.release(&[second], now);
    tree.release(&[first, under_first], now);
    let order: Vec<_> = std::iter::from_fn(|| tree.evict(now)).collect();
    assert_eq!(order, ["under first", "first", "second", "third"]);
}

/// Whoever uses a group has another resume point behind it, or wants none; nobody has for one that is unused.
#[test]
fn the_resume_point_of_an_unused_group_is_not_forgotten() {
    let (mut tree, now) = tree();
    let id = enter(&mut tree, now, ROOT, [1, 2], "rows");
    tree.keep_resume_point(id, now, "point");
    assert_eq!(tree.forget_resume_point(id), Some("point"));
    assert_eq!(tree.forget_resume_point(id), None);
    tree.keep_resume_point(id, now, "point");
    tree.release(&[id], now);
    assert_eq!(tree.forget_resume_point(id), None);
    assert_eq!(tree.resume_point(id), Some(&"point"));
}

#[test]
fn the_longest_unused_leaves_before_the_deepest() {
    let (mut tree, now) = tree();
    let first = enter(&mut tree, now, ROOT, [1, 2], "first");
    let under_first = enter(&mut tree, now, Parent::Group(first), [3, 4], "under first");
    let second = enter(&mut tree, now, ROOT, [5, 6], "second");
    tree.release(&[second], now);
    tree.release(&[first, under_first], now + Duration::from_secs(1));
    let order: Vec<_> = std::iter::from_fn(|| tree.evict(now)).collect();
    assert_eq!(order, ["second", "under first", "first"]);
}

#[test]
fn a_pinned_group_outlives_the_time_to_live_and_leaves_last() {
    let (mut tree, now) = tree();
    let pinned = enter(&mut tree, now, ROOT, [1, 2], "pinned");
    let other = enter(&mut tree, now, ROOT, [3, 4], "other");
    let until = now + 3 * TIME_TO_LIVE;
    tree.pin(&[pinned], until);
    tree.pin(&[pinned], now);
    tree.release(&[pinned], now);
    tree.release(&[other], now + Duration::from_secs(1));
    assert_eq!(
        (tree.pinned(now), tree.pinned(until)),
        (1, 0),
        "a later pin stays"
    );
    let later = now + 2 * TIME_TO_LIVE;
    assert_eq!(tree.expire(later, TIME_TO_LIVE), Some("other"));
    assert_eq!(tree.expire(later, TIME_TO_LIVE), None);
    let again = enter(&mut tree, later, ROOT, [5, 6], "again");
    tree.release(&[again], later);
    assert_eq!(
        tree.evict(later),
        Some("again"),
        "the pinned one was unused for longer"
    );
    assert_eq!(
        tree.find(Namespace::COMMON, &[3, 4]).miss,
        Some(Miss::Expired)
    );
    assert_eq!(
        tree.find(Namespace::COMMON, &[5, 6]).miss,
        Some(Miss::Evicted)
    );
    assert!(!tree.is_empty());
    assert_eq!(tree.expire(until, TIME_TO_LIVE), Some("pinned"));
    assert!(tree.is_empty());
}

#[test]
fn a_group_expires_when_it_has_been_unused_for_all_of_the_time_to_live() {
    let (mut tree, now) = tree();
    let group = enter(&mut tree, now, ROOT, [1, 2], "group");
    assert_eq!(
        tree.expire(now + 5 * TIME_TO_LIVE, TIME_TO_LIVE),
        None,
        "in use"
    );
    tree.release(&[group], now);
    let almost = TIME_TO_LIVE - Duration::from_millis(1);
    assert_eq!(tree.expire(now + almost, TIME_TO_LIVE), None);
    assert_eq!(tree.expire(now + TIME_TO_LIVE, TIME_TO_LIVE), Some("group"));
}

/// A window that sequences go on from is kept for longer than one that they do not.
#[test]
fn the_window_that_was_gone_on_from_last_leaves_last() {
    let (mut tree, now) = tree();
    let later = |seconds: u64| now + Duration::from_secs(seconds);
    let groups = [[1, 2], [3, 4]].map(|tokens| enter(&mut tree, now, ROOT, tokens, "group"));
    let [first, second] = groups;
    tree.keep_resume_point(first, later(1), "window of the first");
    tree.keep_resume_point(second, later(2), "window of the second");
    assert_eq!((tree.resume_points(), tree.unused_resume_points()), (2, 0));
    tree.touch_resume_point(first, later(3));
    // What is earlier than the last time changes nothing.
    tree.touch_resume_point(first, later(1));
    tree.release(&[first], later(9));
    assert_eq!((tree.resume_points(), tree.unused_resume_points()), (2, 1));
    tree.release(&[second], later(9));
    assert_eq!(tree.unused_resume_points(), 2);
    let order: Vec<_> = std::iter::from_fn(|| tree.evict(later(10))).collect();
    assert_eq!(
        order,
        [
            "window of the second",
            "window of the first",
            "group",
            "group"
        ]
    );
    assert_eq!((tree.resume_points(), tree.unused_resume_points()), (0, 0));
}
