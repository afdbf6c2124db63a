//! A sequence in a file: the layout byte by byte, the way back, and whatever a file may say that is not so.

use std::fs;
use std::path::{Path, PathBuf};

use lacuna_kv::folder::Fingerprint;
use lacuna_kv::saved::{Saved, SavedError, save};
use lacuna_kv::{Geometry, KvCache, KvError, KvPolicy, Sequence};
use lacuna_pages::{HostDevice, PageSize, Pool, PoolConfig};
use tempfile::TempDir;
use twox_hash::XxHash3_128;

use crate::support::{
    GEOMETRY, PAGE, STATES, WINDOWED, append, assert_states, assert_tags, cpu, pool, store,
};

const LAYOUTS: [&str; 3] = ["sparse", "sparse:head-major", "sparse:interleaved=2"];
const CAPACITY: usize = 3000;
/// Rows of so many tokens take more than the mebibyte that is checked at once.
const LONG: usize = 2100;
const PIECE: usize = 1 << 20;
/// Where the note begins.
const FIXED: usize = 88;
/// No file may have more before its pages.
const LONGEST_HEADER: u64 = 256 << 20;

fn cache(geometry: &Geometry, policy: &str) -> KvCache {
    let policy = policy.parse().expect("a policy");
    KvCache::over(pool(policy, None), geometry.clone(), policy).expect("a cache")
}

fn made_by(weights: &str) -> Fingerprint {
    Fingerprint::new([("weights", weights.to_owned())])
}

/// A sequence of tokens that are named by their positions.
fn sequence(cache: &KvCache, tokens: usize) -> Sequence {
    let mut sequence = cache.sequence(CAPACITY).expect("address space");
    let tags: Vec<usize> = (0..tokens).collect();
    if tokens > 0 {
        append(&cpu(), &mut sequence, &tags);
    }
    sequence
}

/// A file of `cached` tokens and three that are not in the cache yet.
struct Written {
    folder: TempDir,
    cache: KvCache,
    tokens: Vec<u32>,
    cached: usize,
}

impl Written {
    fn new(geometry: &Geometry, policy: &str, cached: usize) -> Self {
        let written = Self {
            folder: tempfile::tempdir().expect("a folder"),
            cache: cache(geometry, policy),
            tokens: (0..cached as u32 + 3).map(|token| token * 7 + 1).collect(),
            cached,
        };
        written.save(&written.path()).expect("a file");
        written
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("one.session")
    }

    fn save(&self, path: &Path) -> Result<(), SavedError> {
        let mut sequence = sequence(&self.cache, self.cached);
        let said = ("a nöte", &self.tokens[..]);
        save(path, &self.cache, &mut sequence, said, &made_by("a"))
    }

    fn bytes(&self) -> Vec<u8> {
        fs::read(self.path()).expect("a file")
    }

    /// What opening, verifying and restoring a file of `bytes` says; restoring does not need verifying first.
    fn refusals(&self, bytes: &[u8]) -> Option<[String; 2]> {
        let path = self.folder.path().join("other.session");
        fs::write(&path, bytes).expect("room");
        match Saved::open(&path) {
            Err(error) => Some([error.to_string(), error.to_string()]),
            Ok(mut saved) => {
                let verified = saved.verify().err()?.to_string();
                let restored = saved.restore(&self.cache, CAPACITY, &made_by("a"));
                Some([verified, restored.err()?.to_string()])
            }
        }
    }

    /// What restoring a file with `bytes` in the place `at` says, whose first part has the checksum it should.
    fn forged(&self, at: usize, bytes: &[u8]) -> Result<Sequence, SavedError> {
        let mut whole = self.bytes();
        let first = whole.len() - number(&whole, 80) as usize;
        whole[at..at + bytes.len()].copy_from_slice(bytes);
        let checksum = XxHash3_128::oneshot(&whole[32..first]);
        whole[16..32].copy_from_slice(&checksum.to_le_bytes());
        let path = self.folder.path().join("forged.session");
        fs::write(&path, whole).expect("room");
        Saved::open(&path)?.restore(&self.cache, CAPACITY, &made_by("a"))
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// Every layout of memory, and geometries with windows and states.
fn all() -> impl Iterator<Item = (&'static Geometry, &'static str)> {
    let geometries: [&Geometry; 3] = [&GEOMETRY, &WINDOWED, &STATES];
    let with = |geometry| LAYOUTS.map(|layout| (geometry, layout));
    geometries.into_iter().flat_map(with)
}

#[test]
fn what_was_saved_goes_on_as_if_it_had_never_stopped() {
    for (geometry, layout) in all() {
        for cached in [1, 43, 131, LONG] {
            let written = Written::new(geometry, layout, cached);
            let mut saved = Saved::open(&written.path()).expect("it is whole");
            assert_eq!(saved.note, "a nöte");
            assert_eq!((&saved.tokens, saved.cached), (&written.tokens, cached));
            saved.verify().expect("it is whole");
            // As in another process.
            let cache = cache(geometry, layout);
            let restored = saved.restore(&cache, cached + 2, &made_by("a"));
            let mut restored = restored.expect("it is whole");
            let mut tags: Vec<usize> = (0..cached).collect();
            assert_tags(&restored, &tags);
            tags.push(5);
            restored.prepare(1).expect("room");
            store(&cpu(), &mut restored, &[5]);
            assert_states(&mut restored, &tags);
            restored.accept(1);
            restored.release_passed().expect("pages go back");
            assert_tags(&restored, &tags);
        }
    }
}

#[test]
fn the_layout_is_the_one_that_is_documented() {
    let written = Written::new(&GEOMETRY, "sparse", LONG);
    let bytes = written.bytes();
    assert_eq!(bytes[..8], *b"lacunass");
    assert_eq!((number(&bytes, 8), number(&bytes, 12)), (1, 0));
    let [note, tokens, cached, settings] = [64, 68, 72, 76].map(|at| number(&bytes, at) as usize);
    assert_eq!([note, tokens, cached], [7, LONG + 3, LONG]);
    let pages = u64::from_le_bytes(bytes[80..88].try_into().expect("eight bytes")) as usize;
    // Keys and values of three layers, each in pages of its own.
    let rows = 6 * (LONG * 96).div_ceil(PAGE) * PAGE;
    assert_eq!(pages, rows);
    assert!(pages > PIECE && !pages.is_multiple_of(PIECE));
    let mut at = FIXED;
    let mut next = |length: usize| {
        at += length;
        &bytes[at - length..at]
    };
    assert_eq!(next(note), "a nöte".as_bytes());
    for token in &written.tokens {
        assert_eq!(next(4), token.to_le_bytes());
    }
    let settings = std::str::from_utf8(next(settings)).expect("text");
    assert!(settings.contains("weights") && settings.contains("page bytes"));
    let sums = next(16 * pages.div_ceil(PIECE)).to_vec();
    let first = at;
    assert_eq!(bytes.len(), first + pages);
    let of_pages = bytes[first..].chunks(PIECE);
    let of_pages = of_pages.flat_map(|piece| XxHash3_128::oneshot(piece).to_le_bytes());
    assert_eq!(sums, of_pages.collect::<Vec<u8>>());
    let checksum = XxHash3_128::oneshot(&bytes[32..first]).to_le_bytes();
    assert_eq!(bytes[16..32], checksum);
    let saved = Saved::open(&written.path()).expect("it is whole");
    assert_eq!(saved.page_bytes, pages as u64);
}

/// Each mebibyte has a checksum, whatever a page is: a file of larger pages had fewer than it said, and nobody could
/// open it again.
#[test]
fn pages_of_more_than_a_mebibyte_come_back_too() {
    let config = PoolConfig {
        page_size: PageSize::MIB_2,
        ..PoolConfig::default()
    };
    let pool = Pool::new(HostDevice::new().expect("a host device"), config).expect("a pool");
    let cache = KvCache::over(pool, STATES.clone(), KvPolicy::default()).expect("a cache");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("one.session");
    let mut sequence = sequence(&cache, 43);
    save(&path, &cache, &mut sequence, ("", &[7; 43]), &made_by("a")).expect("a file");
    let mut saved = Saved::open(&path).expect("it is whole");
    assert!(saved.page_bytes > 2 << 20);
    saved.verify().expect("it is whole");
    let mut restored = saved
        .restore(&cache, CAPACITY, &made_by("a"))
        .expect("it is whole");
    let mut tags: Vec<usize> = (0..43).collect();
    assert_tags(&restored, &tags);
    restored.prepare(1).expect("room");
    tags.push(5);
    store(&cpu(), &mut restored, &[5]);
    assert_states(&mut restored, &tags);
    // The second mebibyte of a page is compared too.
    let mut bytes = fs::read(&path).expect("a file");
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&path, bytes).expect("room");
    let mut saved = Saved::open(&path).expect("its first part is");
    for refused in [
        saved.verify().err(),
        saved.restore(&cache, CAPACITY, &made_by("a")).err(),
    ] {
        assert!(matches!(refused, Some(SavedError::Damaged(_))));
    }
}

#[test]
fn an_empty_sequence_is_a_file_without_pages() {
    for (geometry, layout) in all() {
        let written = Written::new(geometry, layout, 0);
        let mut saved = Saved::open(&written.path()).expect("it is whole");
        assert_eq!((saved.page_bytes, saved.tokens.len()), (0, 3));
        saved.verify().expect("it is whole");
        let restored = saved.restore(&written.cache, CAPACITY, &made_by("a"));
        assert!(restored.expect("nothing to read").is_empty());
    }
}

#[test]
fn whatever_byte_differs_or_lacks_it_is_refused() {
    let written = Written::new(&GEOMETRY, "sparse", LONG);
    let whole = written.bytes();
    assert_eq!(written.refusals(&whole), None);
    let first = whole.len() - number(&whole, 80) as usize;
    let (start, pages) = (0..FIXED, first..whole.len());
    let places = start
        .chain((FIXED..first).step_by(97))
        .chain(pages.step_by(50_021));
    for place in places.chain([first - 1, first, whole.len() - 1]) {
        let mut bytes = whole.clone();
        bytes[place] ^= 0x10;
        let refused = written.refusals(&bytes);
        let refused = refused.unwrap_or_else(|| panic!("byte {place} is taken"));
        if place >= first {
            let said = "it is damaged: its pages are not what was written";
            assert_eq!(refused, [said, said], "byte {place}");
        }
    }
    for length in [0, 7, FIXED - 1, FIXED, first - 1, first, whole.len() - 1] {
        let refused = written.refusals(&whole[..length]);
        assert!(refused.is_some(), "{length} bytes");
    }
    let mut longer = whole;
    longer.push(0);
    assert!(written.refusals(&longer).is_some());
}

#[test]
fn a_file_that_is_cut_while_it_is_open_is_damaged() {
    let written = Written::new(&GEOMETRY, "sparse", 43);
    let mut saved = Saved::open(&written.path()).expect("it is whole");
    let file = fs::File::options().write(true).open(written.path());
    let length = written.bytes().len() as u64;
    file.and_then(|file| file.set_len(length - 1)).expect("cut");
    for refused in [
        saved.verify().err(),
        saved.restore(&written.cache, CAPACITY, &made_by("a")).err(),
    ] {
        assert!(matches!(
            refused,
            Some(SavedError::Damaged("it ends too early"))
        ));
    }
}

#[test]
fn what_a_file_says_of_itself_is_believed_only_where_it_can_be() {
    let written = Written::new(&GEOMETRY, "sparse", 43);
    let refused = |at, bytes: &[u8]| {
        written
            .forged(at, bytes)
            .expect_err("it is not so")
            .to_string()
    };
    assert!(
        written.forged(FIXED, b"b").is_ok(),
        "another note is as good"
    );
    let version = |number| format!("it has version {number} of the format, and this is version 1");
    assert_eq!(refused(8, &2u32.to_le_bytes()), version(2));
    assert_eq!(refused(8, &0u32.to_le_bytes()), version(0));
    assert_eq!(refused(12, &1u32.to_le_bytes()), version(1));
    assert_eq!(
        refused(0, b"L"),
        "it is damaged: it does not begin as a session does"
    );
    assert_eq!(
        refused(FIXED, &[0xff]),
        "it is damaged: its text is not UTF-8"
    );
    let settings = FIXED + 7 + 4 * written.tokens.len();
    assert_eq!(
        refused(settings, &[0xff]),
        "it is damaged: its text is not UTF-8"
    );
    let length = "it is damaged: it does not have the length it says";
    assert_eq!(
        refused(72, &47u32.to_le_bytes()),
        length,
        "more than there are"
    );
    for at in [64, 68, 76, 80, 84] {
        assert_eq!(refused(at, &u32::MAX.to_le_bytes()), length, "at {at}");
    }
    // A page holds 42 rows and two thirds of one.
    let pages = "it is damaged: it has other pages than its tokens take";
    assert_eq!(refused(72, &42u32.to_le_bytes()), pages);
    assert!(
        written.forged(72, &44u32.to_le_bytes()).is_ok(),
        "the same pages"
    );
}

/// What a file says about its lengths does not decide how much memory is taken.
#[test]
fn a_first_part_of_more_than_256_mebibytes_is_not_read() {
    let written = Written::new(&GEOMETRY, "sparse", 1);
    let open = |note: u64| {
        let mut bytes = written.bytes()[..FIXED].to_vec();
        bytes[64..].fill(0);
        bytes[64..68].copy_from_slice(&(note as u32).to_le_bytes());
        let path = written.folder.path().join("long.session");
        fs::write(&path, bytes).expect("room");
        let file = fs::File::options()
            .write(true)
            .open(&path)
            .expect("it is there");
        // A hole: it takes no room.
        file.set_len(FIXED as u64 + note).expect("a length");
        Saved::open(&path)
            .expect_err("it is not what was written")
            .to_string()
    };
    let longest = LONGEST_HEADER - FIXED as u64;
    assert_eq!(
        open(longest + 1),
        "it is damaged: it does not have the length it says"
    );
    assert_eq!(
        open(1 << 20),
        "it is damaged: its first part is not what was written"
    );
}

#[test]
fn a_sequence_is_restored_only_where_it_fits() {
    let written = Written::new(&GEOMETRY, "sparse", 43);
    let mut saved = Saved::open(&written.path()).expect("it is whole");
    let refused = saved.restore(&written.cache, 42, &made_by("a"));
    let Err(SavedError::Kv(KvError::ContextFull {
        capacity,
        held,
        requested,
    })) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!((capacity, held, requested), (42, 0, 43));
    assert!(saved.restore(&written.cache, 43, &made_by("a")).is_ok());
    let other = saved.restore(&written.cache, 43, &made_by("b"));
    let Err(SavedError::Settings(differing)) = other else {
        panic!("{other:?}");
    };
    assert_eq!(differing, ["weights"]);
    for (geometry, layout, expected) in [
        (&*GEOMETRY, "sparse:head-major", "KV layout"),
        (&*WINDOWED, "sparse", "KV rows"),
    ] {
        let other = saved.restore(&cache(geometry, layout), 43, &made_by("a"));
        let Err(SavedError::Settings(differing)) = other else {
            panic!("{other:?}");
        };
        assert_eq!(differing, [expected]);
    }
}

/// What is not all there is not written: rows that were released, and states that are not those after the tokens.
#[test]
fn a_sequence_that_nothing_can_go_on_from_is_not_saved() {
    let written = Written::new(&STATES, "sparse", 43);
    let before = written.bytes();
    let refused = |geometry: &Geometry, spoil: &dyn Fn(&mut Sequence)| {
        let cache = cache(geometry, "sparse");
        let mut sequence = sequence(&cache, 43);
        spoil(&mut sequence);
        let said = ("", &written.tokens[..]);
        let saved = save(&written.path(), &cache, &mut sequence, said, &made_by("a"));
        assert!(matches!(saved, Err(SavedError::Policy { .. })), "{saved:?}");
        assert!(written.bytes() == before);
    };
    refused(&GEOMETRY, &|sequence| {
        sequence.release_before(1).expect("pages go back");
    });
    refused(&STATES, &|sequence| {
        sequence.prepare(2).expect("room");
        store(&cpu(), sequence, &[43, 44]);
        sequence.accept(1);
        assert!(sequence.is_spent());
    });
    refused(&STATES, &|sequence| {
        // In the middle of a step.
        sequence.prepare(1).expect("room");
        store(&cpu(), sequence, &[43]);
    });
}

/// Pages are given to one sequence after another as they are, and a file is shown to others: it had what somebody
/// else's sequence, or one's own before it was cut, had left behind the last row.
#[test]
fn nothing_but_rows_of_its_tokens_is_in_a_file() {
    for (geometry, layout) in all() {
        for cached in [1, 43, 131] {
            let written = Written::new(geometry, layout, cached);
            let saved = |sequence: &mut Sequence| {
                let path = written.folder.path().join("other.session");
                let said = ("a nöte", &written.tokens[..]);
                save(&path, &written.cache, sequence, said, &made_by("a")).expect("a file");
                fs::read(path).expect("a file")
            };
            let mut others = [0, 1, 2].map(|_| sequence(&written.cache, 150));
            // What another has from its beginning on is shared where nothing passes.
            if *geometry == *GEOMETRY {
                let mut cut = others[0].share_prefix(cached).expect("room");
                assert!(
                    saved(&mut cut) == written.bytes(),
                    "{layout}, {cached} of 150"
                );
            }
            drop(others);
            let mut after = sequence(&written.cache, cached);
            assert!(
                saved(&mut after) == written.bytes(),
                "{layout}, {cached} in used pages"
            );
        }
    }
}

/// A step that was prepared and has changed nothing is no part of what is saved.
#[test]
fn a_step_that_has_not_begun_is_over_when_the_sequence_is_saved() {
    let written = Written::new(&STATES, "sparse", 43);
    let mut sequence = sequence(&written.cache, 43);
    sequence.prepare(9).expect("room");
    let said = ("a nöte", &written.tokens[..]);
    let path = written.folder.path().join("other.session");
    save(&path, &written.cache, &mut sequence, said, &made_by("a")).expect("a file");
    assert_eq!(sequence.prepared(), 0);
    let mut saved = Saved::open(&path).expect("it is whole");
    assert_eq!(saved.cached, 43);
    let restored = saved.restore(&written.cache, CAPACITY, &made_by("a"));
    assert_tags(
        &restored.expect("it is whole"),
        &(0..43).collect::<Vec<_>>(),
    );
}

/// Only what ends too early is damaged.
#[test]
fn what_the_system_cannot_read_is_said_by_the_system() {
    let folder = tempfile::tempdir().expect("a folder");
    let refused = Saved::open(folder.path());
    assert!(matches!(refused, Err(SavedError::Io(_))), "{refused:?}");
}

#[test]
fn saving_replaces_what_was_there_whole_or_leaves_it() {
    let written = Written::new(&GEOMETRY, "sparse", 43);
    let before = written.bytes();
    for name in ["paged", "dense", "grow:mlx"] {
        let other = cache(&GEOMETRY, name);
        for tokens in [43, 0] {
            let mut sequence = sequence(&other, tokens);
            let said = ("", &written.tokens[..]);
            let refused = save(&written.path(), &other, &mut sequence, said, &made_by("a"));
            assert!(matches!(refused, Err(SavedError::Policy { policy }) if policy == name));
            assert!(written.bytes() == before);
        }
    }
    // A folder is in the way when all of it is written.
    let path = written.folder.path().join("folder");
    fs::create_dir(&path).expect("a folder");
    fs::write(path.join("file"), "").expect("a file");
    assert!(matches!(written.save(&path), Err(SavedError::Io(_))));
    assert!(path.join("file").exists());
    written.save(&written.path()).expect("a file");
    assert!(written.bytes() == before);
    let entries = fs::read_dir(written.folder.path())
        .expect("a folder")
        .flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.sort();
    assert_eq!(
        names,
        ["folder", "one.session"],
        "nothing is left of what failed"
    );
}
