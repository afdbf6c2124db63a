//! Segments in files without names: what a process puts aside for itself. Nobody finds them after it.
//!
//! Each is a file of its own, so that one which makes room for others stays whole for whoever maps it. So they take
//! descriptors, and there are only so many of them.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::SystemTime;

use super::{files, locked};
use crate::swap::SwapRoom;

/// The files of one process.
#[derive(Debug)]
pub(super) struct UnnamedFiles {
    room: Arc<SwapRoom>,
    held: Mutex<HashMap<String, Held>>,
    /// How many there may be.
    most: usize,
}

#[derive(Debug)]
struct Held {
    file: File,
    bytes: u64,
    first_group: usize,
    used: SystemTime,
}

impl UnnamedFiles {
    pub(super) fn new(room: Arc<SwapRoom>) -> Self {
        #[cfg(unix)]
        let descriptors = {
            use rustix::process::{Resource, getrlimit};
            getrlimit(Resource::Nofile).current
        };
        #[cfg(not(unix))]
        let descriptors = None;
        Self {
            room,
            held: Mutex::default(),
            most: most_files(descriptors),
        }
    }

    /// Bytes of all of them.
    pub(super) fn bytes(&self) -> u64 {
        self.held().values().map(|held| held.bytes).sum()
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.held().contains_key(name)
    }

    /// A file to read from, without a position of its own.
    pub(super) fn open(&self, name: &str) -> io::Result<File> {
        let held = self.held();
        let held = held.get(name).ok_or(io::ErrorKind::NotFound)?;
        held.file.try_clone()
    }

    /// Keeps a file for which [`UnnamedFiles::take_room`] took `bytes`.
    pub(super) fn put(&self, name: &str, file: File, bytes: u64, first_group: usize) {
        let held = Held {
            file,
            bytes,
            first_group,
            used: SystemTime::now(),
        };
        if let Some(before) = self.held().insert(name.to_owned(), held) {
            self.room.give_back(before.bytes);
        }
    }

    /// Takes `bytes` for a file more, in place of those that were of use the longest ago, of one time those to which
    /// others lead; returns their names, or none when there is not as much in all.
    pub(super) fn take_room(&self, bytes: u64) -> (bool, Vec<String>) {
        let mut held = self.held();
        let mut gone = Vec::new();
        while held.len() >= self.most || !self.room.try_take(bytes) {
            let Some(name) = least_needed(&held) else {
                return (false, gone);
            };
            if let Some(least) = held.remove(&name) {
                self.room.give_back(least.bytes);
            }
            gone.push(name);
        }
        (true, gone)
    }

    /// A file for which room was taken is none.
    pub(super) fn give_back(&self, bytes: u64) {
        self.room.give_back(bytes);
    }

    /// A file is of use at `now`, or is to be kept until `until` if it can be.
    pub(super) fn touch(&self, name: &str, now: SystemTime, until: Option<SystemTime>) {
        if let Some(held) = self.held().get_mut(name) {
            held.used = files::used(held.used, now, until);
        }
    }

    pub(super) fn remove(&self, name: &str) {
        if let Some(held) = self.held().remove(name) {
            self.room.give_back(held.bytes);
        }
    }

    fn held(&self) -> MutexGuard<'_, HashMap<String, Held>> {
        locked(&self.held)
    }
}

fn least_needed(held: &HashMap<String, Held>) -> Option<String> {
    let order = |held: &Held| (held.used, Reverse(held.first_group));
    let least = held.iter().min_by_key(|(_, held)| order(held));
    least.map(|(name, _)| name.clone())
}

/// How many files there may be in a process that may have so many descriptors: a quarter, as connections and mapped
/// segments need theirs.
fn most_files(descriptors: Option<u64>) -> usize {
    let quarter = descriptors.unwrap_or(u64::MAX) / 4;
    quarter.clamp(1, MOST) as usize
}

/// Where the system allows any number: looking for the one that is needed least takes some microseconds then.
const MOST: u64 = 4096;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn files(limit: u64, most: usize) -> UnnamedFiles {
        UnnamedFiles {
            most,
            ..UnnamedFiles::new(Arc::new(SwapRoom::new(limit)))
        }
    }

    fn put(files: &UnnamedFiles, name: &str, bytes: u64, first_group: usize, used: u64) {
        assert_eq!(files.take_room(bytes), (true, Vec::new()), "{name}");
        let file = tempfile::tempfile().expect("a file");
        files.put(name, file, bytes, first_group);
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used);
        files.held().get_mut(name).expect("it is there").used = used;
    }

    #[test]
    fn what_was_used_the_longest_ago_makes_room_leaves_first_and_all_within_the_limit() {
        let files = files(100, 9);
        for (name, first_group, used) in [("a", 0, 5), ("b", 4, 5), ("c", 0, 9), ("d", 0, 7)] {
            put(&files, name, 25, first_group, used);
        }
        assert_eq!(files.take_room(20), (true, vec!["b".to_owned()]));
        files.give_back(20);
        assert!(files.open("b").is_err() && files.open("a").is_ok());
        assert!(!files.has("b") && files.has("a"));
        let of = |names: [&str; 2]| names.map(str::to_owned).to_vec();
        assert_eq!(files.take_room(60), (true, of(["a", "d"])));
        assert_eq!(files.bytes(), 25, "c");
        assert_eq!(files.take_room(41), (false, vec!["c".to_owned()]));
        files.give_back(60);
        assert!(files.room.try_take(100), "nothing is held any more");
    }

    #[test]
    fn a_quarter_of_the_descriptors_is_for_files_and_never_none_or_too_many_to_look_through() {
        for (descriptors, most) in [
            (Some(1022), 255),
            (Some(1024), 256),
            (Some(3), 1),
            (Some(4 * MOST), MOST as usize),
            (Some(1 << 30), MOST as usize),
            (None, MOST as usize),
        ] {
            assert_eq!(most_files(descriptors), most, "of {descriptors:?}");
        }
    }

    #[test]
    fn there_are_no_more_files_than_there_may_be_descriptors() {
        let files = files(100, 2);
        put(&files, "a", 1, 0, 1);
        put(&files, "b", 1, 0, 2);
        let later = SystemTime::UNIX_EPOCH + Duration::from_secs(3);
        files.touch("a", later, None);
        assert_eq!(files.take_room(1), (true, vec!["b".to_owned()]));
        files.give_back(1);
        files.remove("a");
        files.remove("a");
        assert_eq!(files.bytes(), 0);
        assert!(files.room.try_take(100), "given back once");
    }
}
