//! Which segments were compared whole since the machine was started, so that the process after one that was killed
//! need not read gigabytes again before its first token.
//!
//! ```text
//! DIR/<fingerprint>/<start of the machine>.verified     24 bytes for each: a file's name (8), its state (16), hashed
//! ```
//!
//! A *state* is what the system says of a file: device, number, length, and when it was written and changed last.
//! Whoever writes to a file changes it, even within one tick of the system's clock, which is that of most files'
//! times: segments are given times of their own, to the nanosecond, as they are written and used. Notes are appended,
//! by every process that uses the folder, and of one name the last holds; a note that is torn, lost or damaged is one
//! of no file.
//!
//! What is believed here is the system: that nothing changes a file in the page cache but through it, and that it has
//! the times of files right. What left the page cache is not believed, since a disk may have changed it
//! ([`is_in_memory`]).

use std::collections::HashMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::{files, locked};
use crate::checksum::xxh3_128;

/// What a file of notes ends with.
pub(super) const SUFFIX: &str = "verified";
/// Of one note.
const BYTES: usize = 24;
/// A file of more notes is begun again with those that hold: each use of a segment appends one.
const MOST: usize = 1 << 16;

/// What is known of the segments of one folder. All is forgotten with the next start of the machine.
#[derive(Debug)]
pub(super) struct Verified {
    /// `None` where the system does not say when it was started: nothing is believed then.
    path: Option<PathBuf>,
    notes: Mutex<Notes>,
}

#[derive(Debug, Default)]
struct Notes {
    /// By what a name hashes to.
    states: HashMap<u64, u128>,
    /// Notes that the file has not got.
    new: Vec<u8>,
    /// How many it has.
    written: usize,
}

/// What the system says of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    hash: u128,
    /// Whether its last change was so long ago that another would have another time, by any system's clock.
    settled: bool,
}

/// The slowest clocks that times of files are taken from tick a hundred times a second.
const SETTLED: Duration = Duration::from_millis(50);

impl State {
    /// The present state of a file.
    #[cfg(unix)]
    pub(super) fn of(file: &File) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let found = file.metadata()?;
        let times = [
            found.mtime(),
            found.mtime_nsec(),
            found.ctime(),
            found.ctime_nsec(),
        ];
        let numbers = [found.dev(), found.ino(), found.len()];
        let numbers = numbers.into_iter().flat_map(u64::to_le_bytes);
        let times = times.into_iter().flat_map(i64::to_le_bytes);
        let seconds = u64::try_from(found.ctime()).unwrap_or(0);
        let changed = UNIX_EPOCH + Duration::new(seconds, found.ctime_nsec() as u32);
        let ago = SystemTime::now().duration_since(changed);
        Ok(Self {
            hash: xxh3_128(&numbers.chain(times).collect::<Vec<_>>()),
            settled: ago.is_ok_and(|ago| ago > SETTLED),
        })
    }

    #[cfg(not(unix))]
    pub(super) fn of(_: &File) -> io::Result<Self> {
        Err(io::ErrorKind::Unsupported.into())
    }
}

impl Verified {
    /// What is known of `folder`. Notes of an earlier start of the machine are removed.
    pub(super) fn open(folder: &Path) -> Self {
        Self::since(start_of_machine(), folder)
    }

    /// Nothing, of files that nobody finds after this process.
    pub(super) fn nothing() -> Self {
        Self {
            path: None,
            notes: Mutex::default(),
        }
    }

    fn since(start: Option<String>, folder: &Path) -> Self {
        let Some(start) = start else {
            return Self::nothing();
        };
        let path = folder.join(start).with_extension(SUFFIX);
        for old in files_of_notes(folder).filter(|old| *old != path) {
            // It is tried again with the next start.
            fs::remove_file(old).ok();
        }
        let bytes = fs::read(&path).unwrap_or_default();
        let mut notes = Notes::default();
        for note in bytes.as_chunks::<BYTES>().0 {
            let name = u64::from_le_bytes(std::array::from_fn(|index| note[index]));
            let state = u128::from_le_bytes(std::array::from_fn(|index| note[8 + index]));
            notes.states.insert(name, state);
            notes.written += 1;
        }
        Self {
            path: Some(path),
            notes: Mutex::new(notes),
        }
    }

    /// Whether the segment `name` was compared whole when its file was in this state.
    pub(super) fn has(&self, name: &str, state: State) -> bool {
        locked(&self.notes).states.get(&hashed(name)) == Some(&state.hash)
    }

    /// Takes note that all of the segment `name` was compared after its file was in this state.
    pub(super) fn note_compared(&self, name: &str, state: State) {
        if state.settled {
            self.note(name, state);
        }
    }

    /// Takes note that all of the segment `name` is known, and that its file has this state since, with a time of its
    /// own.
    pub(super) fn note(&self, name: &str, state: State) {
        if self.path.is_none() {
            return;
        }
        let (name, mut notes) = (hashed(name), locked(&self.notes));
        if notes.states.insert(name, state.hash) != Some(state.hash) {
            notes.new.extend(name.to_le_bytes());
            notes.new.extend(state.hash.to_le_bytes());
        }
    }

    /// Takes note again after `touch`, which changes the times of `file` and nothing else, if it was known before.
    pub(super) fn across(
        &self,
        name: &str,
        file: &File,
        touch: impl FnOnce(&File) -> io::Result<()>,
    ) -> io::Result<()> {
        let known = State::of(file).is_ok_and(|state| self.has(name, state));
        touch(file)?;
        if known {
            self.note(name, State::of(file)?);
        }
        Ok(())
    }

    /// Appends what is new to the file. It need not be on the disk: it is of no use once the machine has stopped.
    pub(super) fn save(&self) -> io::Result<()> {
        let mut notes = locked(&self.notes);
        let Some(path) = self.path.as_deref().filter(|_| !notes.new.is_empty()) else {
            return Ok(());
        };
        let new = std::mem::take(&mut notes.new);
        notes.written += new.len() / BYTES;
        if notes.written > MOST {
            return notes.begin_again(path);
        }
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(path)?.write_all(&new)
    }
}

impl Notes {
    /// What others append to the old file meanwhile is lost, and compared again.
    fn begin_again(&mut self, path: &Path) -> io::Result<()> {
        if self.states.len() > MOST / 2 {
            // Most are of segments that are gone.
            self.states.clear();
        }
        let part = files::part_of(path);
        let mut file = files::create_private(&part)?;
        let note = |(name, state): (&u64, &u128)| {
            let mut note = name.to_le_bytes().to_vec();
            note.extend(state.to_le_bytes());
            note
        };
        file.write_all(&self.states.iter().flat_map(note).collect::<Vec<_>>())?;
        self.written = self.states.len();
        fs::rename(part, path)
    }
}

/// The files of notes in `folder`, of whichever start of the machine.
pub(super) fn files_of_notes(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let there = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = there.map(|entry| entry.path());
    paths.filter(|path| path.extension().is_some_and(|suffix| suffix == SUFFIX))
}

fn hashed(name: &str) -> u64 {
    xxh3_128(name.as_bytes()) as u64
}

/// What the system calls the time since it was started: another for each start.
fn start_of_machine() -> Option<String> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(id.trim().to_owned()).filter(|id| is_plain(id))
}

/// Whether a start of the machine can be in the name of a file.
fn is_plain(id: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_hexdigit() || byte == b'-';
    id.len() == 36 && id.bytes().all(known)
}

/// How far apart bytes are that are looked at: the system takes pages away in longer runs than this.
#[cfg(target_os = "linux")]
const LOOK: u64 = 64 << 10;

/// Whether `length` bytes of `file` from `start` on, or to its end, are in the page cache, as far as a look at some of
/// them tells. What is not comes from the disk when it is used.
#[cfg(target_os = "linux")]
pub(super) fn is_in_memory(file: &File, start: u64, length: u64) -> bool {
    use rustix::io::{ReadWriteFlags, preadv2};
    let mut byte = [0];
    let end = file.metadata().map_or(0, |it| it.len());
    let end = end.min(start.saturating_add(length));
    let looks = (start..end).step_by(LOOK as usize);
    looks.chain(end.checked_sub(1)).all(|at| {
        let bytes = &mut [io::IoSliceMut::new(&mut byte)];
        preadv2(file, bytes, at, ReadWriteFlags::NOWAIT) == Ok(1)
    })
}

#[cfg(not(target_os = "linux"))]
pub(super) fn is_in_memory(_: &File, _: u64, _: u64) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    fn since(start: &str, folder: &Path) -> Verified {
        Verified::since(Some(start.to_owned()), folder)
    }

    fn segment(folder: &Path, name: &str) -> File {
        let path = folder.join(name);
        fs::write(&path, name).expect("a file");
        let file = OpenOptions::new().write(true).open(path).expect("a file");
        file.set_modified(SystemTime::now()).expect("a time");
        file
    }

    fn numbered(hash: u128) -> State {
        State {
            hash,
            settled: true,
        }
    }

    fn state(file: &File) -> State {
        State::of(file).expect("a state")
    }

    #[cfg(unix)]
    #[test]
    fn a_segment_is_known_as_it_is_to_every_process_until_the_machine_starts_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (segment(folder.path(), "a"), segment(folder.path(), "b"));
        let first = since("1", folder.path());
        assert!(!first.has("a", state(&a)));
        first.note("a", state(&a));
        first.save().expect("room");
        let second = since("1", folder.path());
        assert!(second.has("a", state(&a)), "noted by the first");
        assert!(!second.has("b", state(&a)) && !second.has("b", state(&b)));
        second.note("b", state(&b));
        first.note("a", state(&b));
        second.save().expect("room");
        first.save().expect("room");
        let third = since("1", folder.path());
        assert!(third.has("b", state(&b)) && third.has("a", state(&b)));
        assert!(!third.has("a", state(&a)), "the last note of a name holds");
        assert!(!since("2", folder.path()).has("b", state(&b)));
        assert_eq!(files_of_notes(folder.path()).count(), 0, "of no use");
    }

    #[cfg(unix)]
    #[test]
    fn whoever_writes_to_a_segment_is_noticed_and_its_use_is_no_change() {
        use std::os::unix::fs::FileExt;
        let folder = tempfile::tempdir().expect("a folder");
        let file = segment(folder.path(), "a");
        let verified = since("1", folder.path());
        verified.note("a", state(&file));
        let touch = |file: &File| file.set_modified(SystemTime::now());
        for _ in 0..3 {
            let before = state(&file);
            verified.across("a", &file, touch).expect("a time");
            assert!(verified.has("a", state(&file)) && !verified.has("a", before));
        }
        file.write_all_at(b"b", 0).expect("room");
        assert!(!verified.has("a", state(&file)));
        verified.across("a", &file, touch).expect("a time");
        assert!(!verified.has("a", state(&file)), "not known before");
    }

    #[cfg(unix)]
    #[test]
    fn what_was_compared_is_noted_once_nobody_can_have_written_to_it_in_the_same_tick() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = segment(folder.path(), "a");
        let verified = since("1", folder.path());
        let fresh = State {
            settled: false,
            ..state(&file)
        };
        verified.note_compared("a", fresh);
        assert!(!verified.has("a", fresh));
        std::thread::sleep(2 * SETTLED);
        verified.note_compared("a", state(&file));
        assert!(verified.has("a", fresh));
    }

    #[cfg(unix)]
    #[test]
    fn notes_that_are_torn_are_of_no_file_and_too_many_are_begun_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = segment(folder.path(), "a");
        let path = folder.path().join("1.verified");
        let verified = since("1", folder.path());
        verified.note("a", state(&file));
        verified.save().expect("room");
        let bytes = fs::read(&path).expect("notes");
        assert_eq!(bytes.len(), BYTES);
        for cut in 0..BYTES {
            fs::write(&path, &bytes[..cut]).expect("room");
            assert!(!since("1", folder.path()).has("a", state(&file)));
            let mut other = bytes.clone();
            other[cut] ^= 1;
            fs::write(&path, other).expect("room");
            assert!(!since("1", folder.path()).has("a", state(&file)));
        }
        fs::write(&path, &bytes).expect("room");
        let verified = since("1", folder.path());
        for number in 0..MOST as u128 {
            verified.note("b", numbered(number));
        }
        verified.save().expect("room");
        let length = fs::metadata(&path).expect("notes").len();
        assert_eq!(length, 2 * BYTES as u64, "the last of each");
        let verified = since("1", folder.path());
        assert!(verified.has("a", state(&file)) && verified.has("b", numbered(MOST as u128 - 1)));
    }

    #[test]
    fn nothing_is_known_where_the_system_does_not_say_when_it_was_started() {
        let folder = tempfile::tempdir().expect("a folder");
        let verified = Verified::since(None, folder.path());
        verified.note("a", numbered(1));
        verified.save().expect("nothing to write");
        assert!(!verified.has("a", numbered(1)));
        assert_eq!(fs::read_dir(folder.path()).expect("a folder").count(), 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn what_was_written_is_in_memory() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("a");
        fs::write(&path, vec![1; 1 << 20]).expect("room");
        let file = File::open(path).expect("a file");
        assert!(is_in_memory(&file, 0, u64::MAX) && is_in_memory(&file, 5000, 70_000));
        let write_only = fs::OpenOptions::new()
            .write(true)
            .open(folder.path().join("a"));
        assert!(
            !is_in_memory(&write_only.expect("a file"), 0, 1),
            "nobody can tell"
        );
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_was_just_written_is_not_settled() {
        let folder = tempfile::tempdir().expect("a folder");
        // On a machine that is busy, time may pass between the two.
        let fresh = |_| state(&segment(folder.path(), "a")).settled;
        assert!(!(0..1000).all(fresh));
        let file = segment(folder.path(), "a");
        std::thread::sleep(2 * SETTLED);
        assert!(state(&file).settled);
    }

    #[test]
    fn a_file_has_as_many_notes_as_it_may_and_is_then_begun_again_with_those_that_hold() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("1.verified");
        let notes = || fs::metadata(&path).expect("notes").len() / BYTES as u64;
        let verified = since("1", folder.path());
        verified.note("a", numbered(1));
        verified.note("b", numbered(1));
        verified.save().expect("room");
        locked(&verified.notes).written = MOST - 1;
        verified.note("a", numbered(2));
        verified.save().expect("room");
        assert_eq!(notes(), 3, "as many as there may be");
        verified.note("a", numbered(3));
        verified.save().expect("room");
        assert_eq!(notes(), 2);
        assert!(since("1", folder.path()).has("a", numbered(3)));
        // What is held for ever would fill the file by itself.
        let begun = |names: usize| {
            let mut all = Notes::default();
            all.states.extend((0..names as u64).map(|name| (name, 1)));
            all.begin_again(&path).expect("room");
            (notes(), all.written)
        };
        assert_eq!(begun(MOST / 2), (MOST as u64 / 2, MOST / 2));
        assert_eq!(begun(MOST / 2 + 1), (0, 0), "most are gone");
    }

    #[test]
    fn a_start_of_the_machine_is_one_that_can_be_in_a_name() {
        let start = "0f3e5c1a-93b0-4c5e-8a55-0123456789ab";
        assert!(is_plain(start));
        assert!(!is_plain("") && !is_plain(&start[1..]) && !is_plain(&format!("{start}0")));
        assert!(!is_plain(&start.replace('-', "/")));
        // Where the system says it at all.
        assert!(start_of_machine().is_none_or(|start| is_plain(&start)));
    }
}
