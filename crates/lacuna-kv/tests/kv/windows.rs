//! Layers that see the last rows only, and give back the pages behind.

use lacuna_kernels::ElementType;
use lacuna_kv::{Geometry, Keep, KvCache, KvElements, KvError, KvPolicy, Layer, LayerCache};
use lacuna_pages::faults::{Completion, Failing, FaultyDevice};
use lacuna_pages::{HostDevice, PageSize, Pool, PoolConfig};

use crate::support::{
    PAGE, WINDOWED, append, assert_rows, assert_tags, cpu, extend, pool, rows, store, window,
};

const SPARSE: [&str; 3] = ["sparse", "sparse:head-major", "sparse:interleaved=2"];

fn sparse(geometry: &Geometry, name: &str) -> KvCache {
    let policy: KvPolicy = name.parse().expect("a policy");
    KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache")
}

/// Two full layers and six with a window of 100 rows. 128 bytes a row: 32 rows a page.
fn mostly_windowed() -> Geometry {
    let layer = |index: usize| match index % 4 {
        3 => rows(1, 32, 32, Keep::All),
        _ => rows(1, 32, 32, window(100)),
    };
    let layers: Vec<LayerCache> = (0..8).map(layer).collect();
    Geometry::new(layers, KvElements::both(ElementType::F32)).expect("a model")
}

#[test]
fn memory_of_windows_is_flat_while_tokens_come() {
    let (cpu, geometry) = (cpu(), mostly_windowed());
    let cache = sparse(&geometry, "sparse");
    let mut sequence = cache.sequence(20_000).expect("address space");
    let full = |tokens: usize| tokens * geometry.kept_bytes_per_token();
    assert_eq!(geometry.window_bytes(), 6 * 100 * 256);
    for chunk in [1, 500, 1, 1, 999].into_iter().cycle().take(30) {
        extend(&cpu, &mut sequence, chunk);
        assert_rows(&sequence);
        let held = sequence.report().committed_bytes;
        let tokens = sequence.len();
        let windows = held - full(tokens).min(held);
        // The first page of a window and its last are not full of rows that are of use, and those of
        // full layers and pages mapped ahead come to less than one a buffer.
        let spare = 2 * 12 * PAGE + 4 * PAGE;
        assert!(
            windows <= geometry.window_bytes() + spare,
            "{windows} at {tokens}"
        );
        assert!(held >= geometry.useful_bytes(tokens), "{held} at {tokens}");
    }
    assert_eq!(sequence.len(), 9_012);
}

/// Pages mapped ahead used to come to one more for each buffer with a window, for as long as there
/// were tokens.
#[test]
fn no_buffer_takes_more_than_a_page_beside_its_rows_while_tokens_come_one_at_a_time() {
    let window_rows = 128;
    let layer = |index: usize| match index % 4 {
        3 => rows(1, 32, 32, Keep::All),
        _ => rows(1, 32, 32, window(window_rows)),
    };
    let layers = (0..8).map(layer).collect();
    let elements = KvElements::both(ElementType::F32);
    let geometry = Geometry::new(layers, elements).expect("a model");
    assert_eq!(window_rows * 32 * 4 % PAGE, 0, "a window of whole pages");
    let cpu = cpu();
    let cache = sparse(&geometry, "sparse");
    let mut sequence = cache.sequence(1_000).expect("address space");
    for tokens in 1..=1_000 {
        extend(&cpu, &mut sequence, 1);
        sequence.release_passed().expect("pages go back");
        let held = (2 * tokens + 6 * tokens.min(window_rows)) * 256;
        let committed = sequence.report().committed_bytes;
        assert!(committed <= held + 16 * PAGE, "{committed} at {tokens}");
    }
}

#[test]
fn a_long_prompt_needs_the_window_and_its_chunk_and_no_more() {
    let (cpu, geometry) = (cpu(), mostly_windowed());
    let cache = sparse(&geometry, "sparse");
    let mut sequence = cache.sequence(20_000).expect("address space");
    for _ in 0..40 {
        extend(&cpu, &mut sequence, 64);
    }
    let most = geometry.kept_bytes_per_token() * 40 * 64 + 6 * (100 + 64) * 256 + 2 * 16 * PAGE;
    let peak = sequence.report().peak_committed_bytes;
    assert!(peak <= most, "{peak} of {most}");
    let planned = |chunk| {
        let policy = cache.policy();
        let planned = policy.peak_bytes(&geometry, cache.page_size(), 20_000, 40 * 64, chunk);
        planned.expect("a context that fits")
    };
    let buffers = sequence.buffers().len();
    assert!(
        (peak..=peak + buffers * PAGE).contains(&planned(64)),
        "{peak}"
    );
    assert!(planned(1) < peak, "one token at a time needs less");
    assert!(planned(usize::MAX) >= planned(64));
}

#[test]
fn what_windows_have_passed_goes_back_in_one_batch_and_only_in_whole_pages() {
    let (cpu, geometry) = (cpu(), mostly_windowed());
    let cache = sparse(&geometry, "sparse");
    let mut sequence = cache.sequence(2000).expect("address space");
    extend(&cpu, &mut sequence, 500);
    let counts = || cache.ledger().counts;
    let before = counts();
    let mut batches = 0;
    for _ in 0..320 {
        sequence.prepare(1).expect("room");
        let (tag, start) = (sequence.len(), counts());
        store(&cpu, &mut sequence, &[tag]);
        sequence.accept(1);
        assert_eq!(
            counts(),
            start,
            "nothing is given back before it is asked for"
        );
        sequence.release_passed().expect("pages go back");
        let released = counts().batches - start.batches;
        assert!(released <= 1);
        batches += released;
        sequence.release_passed().expect("nothing to do");
        assert_eq!(counts().batches - start.batches, released);
    }
    assert_eq!(batches, 10, "a page of each buffer every 32 tokens");
    assert_eq!(counts().pages_unmapped - before.pages_unmapped, 10 * 12);
}

/// A step that is not followed by `release_passed` leaves its pages to the next one.
#[test]
fn the_next_step_gives_back_what_the_last_one_left() {
    let (cpu, geometry) = (cpu(), mostly_windowed());
    let cache = sparse(&geometry, "sparse");
    let [mut one, mut other] = [(); 2].map(|()| cache.sequence(2000).expect("address space"));
    for _ in 0..500 {
        extend(&cpu, &mut one, 1);
        other.prepare(1).expect("room");
        let tag = other.len();
        store(&cpu, &mut other, &[tag]);
        other.accept(1);
    }
    assert_rows(&other);
    assert!(other.report().peak_committed_bytes <= one.report().peak_committed_bytes + 12 * PAGE);
    other.prepare(0).expect("room");
    assert_eq!(other.report().committed_bytes, one.report().committed_bytes);
}

#[test]
fn truncation_goes_back_as_far_as_the_rows_are_there_and_says_how_far_that_is() {
    let cpu = cpu();
    for name in SPARSE {
        let cache = sparse(&WINDOWED, name);
        let mut sequence = cache.sequence(1000).expect("address space");
        extend(&cpu, &mut sequence, 40);
        assert_eq!(sequence.fewest_tokens(), 0, "no window is full");
        extend(&cpu, &mut sequence, 560);
        let fewest = sequence.fewest_tokens();
        assert!((1..600).contains(&fewest), "{name}: {fewest}");
        for refused in [
            sequence.truncate(fewest - 1),
            sequence.share_prefix(fewest - 1).map(drop),
            sequence.truncate(1),
        ] {
            let error = refused.expect_err("rows are gone");
            assert!(
                matches!(error, KvError::Released { first, .. } if first == fewest),
                "{error}"
            );
        }
        assert_rows(&sequence);
        let shared = sequence.share_prefix(fewest).expect("memory");
        assert_rows(&shared);
        sequence.truncate(fewest).expect("pages go back");
        assert_rows(&sequence);
        let tags: Vec<usize> = (0..fewest).chain(2000..2300).collect();
        append(&cpu, &mut sequence, &tags[fewest..]);
        assert_tags(&sequence, &tags);
        assert_rows(&shared);
        sequence.truncate(0).expect("everything goes back");
        assert_eq!(sequence.report().committed_bytes, 0);
        assert_eq!(sequence.fewest_tokens(), 0);
        extend(&cpu, &mut sequence, 300);
        assert_rows(&sequence);
    }
}

#[test]
fn policies_that_keep_every_row_truncate_windows_to_any_length() {
    let cpu = cpu();
    for name in ["dense", "grow:mlx", "paged"] {
        let cache = sparse(&WINDOWED, name);
        let mut sequence = cache.sequence(1000).expect("address space");
        extend(&cpu, &mut sequence, 600);
        sequence.truncate(7).expect("rows are there");
        assert_rows(&sequence);
    }
}

#[test]
fn a_fork_has_the_window_and_goes_its_own_way() {
    let cpu = cpu();
    for name in SPARSE {
        let cache = sparse(&WINDOWED, name);
        let mut first = cache.sequence(1000).expect("address space");
        extend(&cpu, &mut first, 500);
        let mut second = first.fork().expect("memory");
        assert_rows(&second);
        let tags: Vec<usize> = (0..500).chain(3000..3200).collect();
        append(&cpu, &mut second, &tags[500..]);
        extend(&cpu, &mut first, 3);
        assert_tags(&second, &tags);
        assert_rows(&first);
        let held = second.report().committed_bytes;
        drop(first);
        assert_eq!(second.report().committed_bytes, held);
        assert_tags(&second, &tags);
    }
}

/// What stays because the device refuses is given back by the next step, and no row is touched.
#[test]
fn a_device_that_refuses_keeps_pages_for_a_while_and_loses_no_row() {
    let cpu = cpu();
    let host = HostDevice::new().expect("a host device");
    let (device, faults) = FaultyDevice::new(host, Completion::Immediate);
    let config = PoolConfig {
        page_size: PageSize::new(PAGE as u64).expect("a page size"),
        ..PoolConfig::default()
    };
    let pool = Pool::new(device, config).expect("a pool");
    let geometry = mostly_windowed();
    let cache = KvCache::over(pool, geometry, KvPolicy::default()).expect("a cache");
    let mut sequence = cache.sequence(2000).expect("address space");
    let mut refusals = 0;
    for _ in 0..400 {
        sequence.prepare(1).expect("room");
        let tag = sequence.len();
        store(&cpu, &mut sequence, &[tag]);
        sequence.accept(1);
        let before = sequence.report().committed_bytes;
        faults.fail(Failing::Once(0));
        if sequence.release_passed().is_err() {
            refusals += 1;
            assert_eq!(sequence.report().committed_bytes, before);
            assert_eq!(sequence.first_held(Layer(0)), sequence.len() - 99);
        }
        faults.fail(Failing::Nothing);
        assert_rows(&sequence);
    }
    assert!(refusals > 5, "{refusals}");
    sequence.release_passed().expect("pages go back");
    let mut other = cache.sequence(2000).expect("address space");
    (0..400).for_each(|_| extend(&cpu, &mut other, 1));
    assert_eq!(
        sequence.report().committed_bytes,
        other.report().committed_bytes
    );
}
