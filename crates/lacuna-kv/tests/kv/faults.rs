//! A device that fails in the middle of a change, and then to undo it.

use lacuna_kv::folder::Fingerprint;
use lacuna_kv::saved::save;
use lacuna_kv::swap::{Swap, SwapSizes};
use lacuna_kv::{KvCache, KvError, KvPolicy, Sequence};
use lacuna_pages::faults::{Completion, Failing, Faults, FaultyDevice};
use lacuna_pages::{ByteLength, HostDevice, PageSize, Pool, PoolConfig};

use crate::support::{GEOMETRY, PAGE, append, assert_tags, cpu};
use crate::swap::Disk;

/// A sequence of 150 tokens whose next row lies in a page that `other` shares.
fn about_to_copy() -> (Sequence, Sequence, Faults) {
    let (_, one, other, faults) = about_to_copy_in_cache();
    (one, other, faults)
}

fn about_to_copy_in_cache() -> (KvCache, Sequence, Sequence, Faults) {
    let host = HostDevice::new().expect("a host device");
    let (device, faults) = FaultyDevice::new(host, Completion::Immediate);
    let config = PoolConfig {
        page_size: PageSize::new(PAGE as u64).expect("a page size"),
        ..PoolConfig::default()
    };
    let pool = Pool::new(device, config).expect("a pool");
    let cache = KvCache::over(pool, GEOMETRY.clone(), KvPolicy::default()).expect("a cache");
    let mut one = cache.sequence(400).expect("address space");
    append(&cpu(), &mut one, &(0..200).collect::<Vec<_>>());
    let other = one.fork().expect("pages");
    one.truncate(150).expect("a working device");
    (cache, one, other, faults)
}

#[test]
fn rows_lost_by_a_failure_that_cannot_be_undone_are_never_read_and_never_written_over() {
    // The second try of `prepare` put fresh memory where rows had been, and a step read a hole.
    let (mut lost, mut kept) = (0, 0);
    for call in 0..40 {
        let (mut one, other, faults) = about_to_copy();
        faults.fail(Failing::From(call));
        let prepared = one.prepare(1);
        faults.fail(Failing::Nothing);
        if one.has_lost_rows() {
            lost += 1;
            let again = one.prepare(1);
            for prepared in [prepared, again] {
                assert!(matches!(prepared, Err(KvError::RowsLost)), "call {call}");
            }
        } else {
            kept += u32::from(prepared.is_err());
            let tags: Vec<usize> = (0..150).chain(900..910).collect();
            append(&cpu(), &mut one, &tags[150..]);
            assert_tags(&one, &tags);
        }
        assert_tags(&other, &(0..200).collect::<Vec<_>>());
    }
    assert!(lost > 0 && kept > 0, "{lost} lost, {kept} kept");
}

/// A hole would be written to a file as if it were rows.
#[test]
fn rows_that_are_lost_are_neither_saved_nor_moved_out() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.session");
    let mut lost = 0;
    for call in 0..40 {
        let (cache, mut one, _other, faults) = about_to_copy_in_cache();
        faults.fail(Failing::From(call));
        one.prepare(1).ok();
        faults.fail(Failing::Nothing);
        if !one.has_lost_rows() {
            continue;
        }
        lost += 1;
        let fingerprint = Fingerprint::new([("weights", "a".to_owned())]);
        let saved = save(&path, &cache, &mut one, ("", &[0; 150]), &fingerprint);
        assert!(saved.is_err() && !path.exists(), "call {call}");
        let page = PAGE as u64;
        let sizes = SwapSizes {
            limit: ByteLength::new(2000 * page),
            piece: ByteLength::new(3 * page),
            block: ByteLength::new(20 * page),
        };
        let swap = Swap::over(Box::<Disk>::default(), sizes, &cache).expect("it is sparse");
        let Err(Some(one)) = swap.leave(one, 0, 16) else {
            panic!("call {call}: it is moved out");
        };
        assert!(one.has_lost_rows());
        assert_eq!(swap.status().held.get(), 0);
    }
    assert!(lost > 0);
}

#[test]
fn a_late_device_changes_no_row() {
    let host = HostDevice::new().expect("a host device");
    let (device, faults) = FaultyDevice::new(host, Completion::Late);
    let pool = Pool::new(device, PoolConfig::default()).expect("a pool");
    let cache =
        KvCache::over(pool.clone(), GEOMETRY.clone(), KvPolicy::default()).expect("a cache");
    for round in 0..3 {
        let mut one = cache.sequence(400).expect("address space");
        let tags: Vec<usize> = (round..round + 300).collect();
        append(&cpu(), &mut one, &tags);
        assert_tags(&one, &tags);
        drop(one);
        assert!(pool.ledger().retiring.get() > 0, "not done yet");
        faults.complete();
    }
}
