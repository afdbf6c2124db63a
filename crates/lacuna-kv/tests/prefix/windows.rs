//! Sequences of layers with windows start at resume points, and hold the rows they would have computed.

use std::time::Instant;

use lacuna_kernels::ElementType;
use lacuna_kv::prefix::Miss;
use lacuna_kv::{Geometry, Keep, KvElements, Layer, LayerCache};

use crate::pages::{Bench, tokens};
use crate::resume::{find, resume_points, rows, window};

/// Rows of 256 bytes, 16 a page, in layers with windows of 64 and 33 rows and in one without.
fn even() -> Geometry {
    let layers = vec![
        rows(1, 64, window(64)),
        rows(1, 64, window(33)),
        rows(1, 64, Keep::All),
        rows(1, 64, window(64)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

/// Rows that straddle pages and rows that do not, windows of a few rows and of one, another layer's
/// rows.
fn uneven() -> Geometry {
    let layers = vec![
        rows(2, 12, window(100)),
        rows(2, 12, Keep::All),
        rows(1, 64, window(5)),
        LayerCache::Of(Layer(0)),
        rows(2, 12, window(1)),
    ];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

/// Windows and nothing else.
fn only_windows() -> Geometry {
    let layers = vec![rows(1, 64, window(40)); 2];
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

pub(crate) fn geometries() -> [Geometry; 3] {
    [even(), uneven(), only_windows()]
}

pub(crate) fn benches() -> impl Iterator<Item = Bench> {
    let layouts = ["sparse", "sparse:head-major", "sparse:interleaved=2"];
    layouts
        .into_iter()
        .flat_map(|policy| geometries().map(|geometry| Bench::with(geometry, policy)))
}

#[test]
fn the_next_turn_goes_on_at_the_end_of_the_last() {
    for mut bench in benches() {
        let grain = bench.cache.grain().clone();
        let mut turn = bench.start(&tokens(0, 500));
        bench.compute(&mut turn, 64);
        // The reply.
        turn.tokens.extend(tokens(1, 77));
        bench.compute(&mut turn, 1);
        let mut next = turn.tokens.clone();
        bench.leave(turn);
        next.extend(tokens(2, 60));
        let end = grain.whole_tokens(577 / grain.group_tokens());
        assert_eq!(find(&bench, &next), (end, Some(Miss::Ended)));
        let mut second = bench.start(&next);
        assert_eq!(second.sequence.len(), end);
        bench.compute(&mut second, 5);
        bench.assert_rows(&second);
        bench.leave(second);
    }
}

#[test]
fn what_is_kept_of_windows_is_what_resume_points_take() {
    let mut bench = Bench::with(even(), "sparse");
    let grain = bench.cache.grain().clone();
    let held = bench.run(&tokens(0, 1100));
    let points = resume_points(&bench, &held);
    let groups = held.path.groups().len();
    bench.leave(held);
    let kept = groups as u64 * grain.group_bytes();
    let windows = bench.owned() - kept;
    assert_eq!(bench.owned(), bench.kv.ledger().pinned.get());
    // The end of the prompt, the group before it, and the end of the tokens share all but a page.
    let most = (points.len() as u64 - 1) * grain.resume_bytes();
    assert!((1..=most).contains(&windows), "{windows} of {most}");
    assert!(
        windows <= kept + 2 * grain.resume_bytes(),
        "{windows} beside {kept}"
    );
}

#[test]
fn windows_are_evicted_before_the_groups_they_end() {
    let mut bench = Bench::with(even(), "sparse");
    let held = bench.run(&tokens(0, 700));
    let (groups, points) = (held.path.groups().len(), resume_points(&bench, &held).len());
    assert!(bench.cache.evict(Instant::now()), "whoever uses the group");
    bench.assert_rows(&held);
    bench.leave(held);
    let windows = bench.cache.tree().resume_points();
    assert!((points - 1..=points).contains(&windows));
    for left in (0..windows).rev() {
        assert!(find(&bench, &tokens(0, 700)).0 > 0);
        assert!(bench.cache.evict(Instant::now()));
        let tree = bench.cache.tree();
        assert_eq!((tree.resume_points(), tree.len()), (left, groups));
    }
    assert_eq!(find(&bench, &tokens(0, 700)), (0, Some(Miss::Passed)));
    let mut again = bench.start(&tokens(0, 700));
    bench.compute(&mut again, 100);
    bench.assert_rows(&again);
    assert_eq!(
        bench.cache.tree().len(),
        groups,
        "the groups were still good"
    );
    bench.leave(again);
    while bench.cache.evict(Instant::now()) {}
    assert!(bench.cache.tree().is_empty());
    assert_eq!(bench.owned(), 0);
}

#[test]
fn a_running_sequence_of_the_cache_holds_its_windows_and_no_more() {
    let mut bench = Bench::with(even(), "sparse");
    let grain = bench.cache.grain().clone();
    let mut held = bench.start(&tokens(0, 300));
    for end in 300..1100 {
        held.tokens = tokens(0, end);
        bench.compute(&mut held, 64);
        let report = held.sequence.report();
        let most = grain.bytes(end) + 8 * bench.kv.page_bytes() as u64;
        assert!(report.committed_bytes as u64 <= most, "at {end}");
    }
    bench.assert_rows(&held);
}
