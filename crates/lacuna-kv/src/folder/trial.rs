//! Folders of a small model, for tests of what is in this module.

use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use lacuna_kernels::ElementType;
use lacuna_pages::{ByteLength, PagePin, PageRange};

use super::faults::DiskFaults;
use super::segment::Kind;
use super::write::NewSegment;
use super::{CacheFolder, Fingerprint, FolderConfig};
use crate::geometry::Geometry;
use crate::prefix::Namespace;
use crate::swap::SwapRoom;
use crate::{KvCache, KvElements};

const MINUTE: Duration = Duration::from_secs(60);

/// Two layers that keep all rows.
pub(super) fn cache() -> KvCache {
    let geometry = Geometry::uniform(2, 2, 16, KvElements::both(ElementType::F32));
    let cache = KvCache::new(geometry, "sparse".parse().expect("a policy"));
    cache.expect("the system has pages")
}

pub(super) fn fingerprint() -> Fingerprint {
    Fingerprint::new([("weights", "a".to_owned())])
}

pub(super) fn config(root: &Path, limit: u64) -> FolderConfig {
    FolderConfig {
        path: root.to_owned(),
        limit: ByteLength::new(limit),
        remote: None,
        key: None,
    }
}

pub(super) fn open(root: &Path, limit: u64) -> CacheFolder {
    let folder = CacheFolder::open(config(root, limit), &cache(), fingerprint());
    folder.expect("a folder")
}

/// On a disk that does what it is told.
pub(super) fn open_on(disk: &DiskFaults, root: &Path) -> CacheFolder {
    let config = config(root, 1 << 30);
    let folder = CacheFolder::open_faulty(disk.clone(), config, &cache(), fingerprint());
    folder.expect("a folder")
}

/// Of files without names.
pub(super) fn open_unnamed(disk: &DiskFaults, root: &Path, room: &Arc<SwapRoom>) -> CacheFolder {
    let room = Arc::clone(room);
    let folder = CacheFolder::open_unnamed(root.to_owned(), room, &cache(), Some(disk.clone()));
    folder.expect("a folder")
}

/// As many tokens as so many groups have, others for another seed.
pub(super) fn tokens(folder: &CacheFolder, seed: u32, groups: usize) -> Vec<u32> {
    let tokens = 0..(groups * folder.shared.shape.group_tokens()) as u32;
    tokens.map(|index| index % 50 + seed * 100).collect()
}

/// Pages that nobody else has.
pub(super) fn pages(folder: &CacheFolder, bytes: u64) -> Vec<PagePin> {
    let pool = &folder.shared.pool;
    let mut buffer = pool.reserve(ByteLength::new(bytes), "tried").expect("room");
    buffer.ensure_mapped(0..bytes as usize).expect("memory");
    let written: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    buffer.write(0, &written).expect("mapped");
    let pages = PageRange::of(0..buffer.pages().get());
    buffer.seal(pages).expect("mapped");
    buffer.pin(pages).expect("sealed")
}

/// A segment of the whole groups of `tokens`, from group `first` on.
pub(super) fn segment(folder: &CacheFolder, tokens: &[u32], first: usize) -> NewSegment {
    let (shape, root) = (&folder.shared.shape, folder.root(Namespace::COMMON));
    let group = shape.group_tokens();
    let mut chain = root;
    let chains = tokens.chunks_exact(group).map(|tokens| {
        chain = chain.after(tokens);
        chain
    });
    let chains: Vec<_> = chains.collect();
    let groups = first..chains.len();
    NewSegment {
        kind: Kind::Rows,
        before: first.checked_sub(1).map_or(root, |last| chains[last]),
        first_group: first,
        tokens: tokens[first * group..chains.len() * group].to_vec(),
        chains: chains[first..].to_vec(),
        pins: shape.groups_of(&groups, pages(folder, shape.rows_bytes(&groups))),
    }
}

/// Has the folder write that, and waits until it has.
pub(super) fn write(folder: &CacheFolder, tokens: &[u32], first: usize) {
    folder.shared.offer(segment(folder, tokens, first));
    settle(folder);
}

pub(super) fn settle(folder: &CacheFolder) {
    assert!(folder.settle(MINUTE), "done within a minute");
}

pub(super) fn within_a_minute<T>(mut ask: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + MINUTE;
    loop {
        match ask() {
            Some(answer) => return answer,
            None => assert!(Instant::now() < until, "an answer within a minute"),
        }
        thread::sleep(Duration::from_micros(200));
    }
}
