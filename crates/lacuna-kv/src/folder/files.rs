//! The folder as files: listed, made whole or not at all, set aside, and given up for room.
//!
//! ```text
//! DIR/lock                      held by whoever writes or makes room
//! DIR/<fingerprint>/settings    what the fingerprint is of, to say what differs
//! DIR/<fingerprint>/*.rows      segments of groups          | *.point   of resume points
//! DIR/<fingerprint>/*.part      being written               | *.bad     set aside
//! DIR/<fingerprint>/*.session   a conversation with a name, see [`super::sessions`]
//! DIR/<fingerprint>/*.verified  which segments were compared already, see [`super::verified`]
//! ```
//!
//! A segment is written under another name, brought to the disk, and renamed. So there is never half of one under
//! its own name, whenever the process ends; what is left of the other name is removed by the next that writes.
//! Removing a segment hurts nobody who has it open.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::index::Named;
use super::sessions;

const LOCK: &str = "lock";
pub(crate) const SETTINGS: &str = "settings";
const PART: &str = "part";
const BAD: &str = "bad";

/// A file of a cache folder that takes room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) path: PathBuf,
    pub(crate) bytes: u64,
    /// When it was last of use, or until when it is to be kept.
    pub(crate) used: SystemTime,
    pub(crate) named: Named,
}

impl Stored {
    /// The first to go has the least: what is of no use, then what no session needs, of that what was used last the
    /// longest ago, and of what was used at one time that to which others lead.
    fn order(&self, kept: &HashSet<PathBuf>) -> (bool, bool, SystemTime, Reverse<Option<u32>>) {
        let (useful, first_group) = match self.named {
            Named::Segment(first_group) => (true, Some(first_group)),
            Named::Part | Named::Bad => (false, None),
        };
        let kept = kept.contains(&self.path);
        (useful, kept, self.used, Reverse(first_group))
    }
}

/// Makes a folder that its owner alone can read, unless it is there.
pub(crate) fn create_private_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Makes a file that its owner alone can read.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

/// Waits until nobody else writes to the folder `root`. Dropping the file lets others.
pub(crate) fn lock(root: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(root.join(LOCK))?;
    file.lock()?;
    Ok(file)
}

/// A name that `path` has while it is written.
pub(crate) fn part_of(path: &Path) -> PathBuf {
    path.with_extension(PART)
}

/// Brings a file that is written to the disk, and gives it its name.
pub(crate) fn commit(file: &File, part: &Path, path: &Path) -> io::Result<()> {
    file.sync_all()?;
    fs::rename(part, path)?;
    // The name is in the folder.
    let brought = path.parent().map(|folder| File::open(folder)?.sync_all());
    unless_full(brought.unwrap_or(Ok(())))
}

/// Some systems cannot bring a folder to the disk, and need not: only a disk that is full fails.
fn unless_full(brought: io::Result<()>) -> io::Result<()> {
    match brought {
        Err(error) if error.kind() == io::ErrorKind::StorageFull => Err(error),
        _ => Ok(()),
    }
}

/// Removes a file, unless another process has.
pub(crate) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Sets a segment aside that is damaged, so that it is not read again and can be looked at.
pub(crate) fn set_aside(path: &Path) {
    // A file that cannot be renamed, in a folder that cannot be written, is taken out of the index all the same.
    fs::rename(path, path.with_extension(BAD)).ok();
}

/// No segment is kept for longer than this ahead: a time that is further away is a clock's that jumped.
const LONGEST_PIN: Duration = Duration::from_secs(24 * 60 * 60);

/// Takes note that a segment is of use at `now`, or is to be kept until `until` if it can be. What was promised for
/// longer stays.
pub(crate) fn touch(file: &File, now: SystemTime, until: Option<SystemTime>) -> io::Result<()> {
    let before = file.metadata()?.modified()?;
    file.set_modified(used(before, now, until))
}

/// When what was last of use at `before`, or was promised until then, is so from `now` on.
pub(crate) fn used(before: SystemTime, now: SystemTime, until: Option<SystemTime>) -> SystemTime {
    let latest = now + LONGEST_PIN;
    let promised = Some(before).filter(|&promised| promised <= latest);
    let times = [promised, until.map(|until| until.min(latest))];
    times.into_iter().flatten().fold(now, SystemTime::max)
}

/// The folders of fingerprints in `root`. Others in it are nobody's business.
pub(crate) fn subfolders(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = Vec::new();
    for entry in fs::read_dir(root)? {
        let entry = entry?;
        let name = entry.file_name();
        let hex = name.to_str().is_some_and(|name| {
            name.len() == 32 && name.bytes().all(|byte| byte.is_ascii_hexdigit())
        });
        if hex && entry.file_type()?.is_dir() {
            folders.push(entry.path());
        }
    }
    folders.sort();
    Ok(folders)
}

/// Every segment in one folder of `root`, and what was to be one. Whoever is not locked out may remove some
/// meanwhile, and the folder: then there is nothing.
pub(crate) fn stored(folder: &Path) -> io::Result<Vec<Stored>> {
    let mut files = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(files),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let name = path.file_name().and_then(OsStr::to_str);
        let (Some(named), Ok(metadata)) = (name.and_then(Named::of), entry.metadata()) else {
            continue;
        };
        if !metadata.is_file() {
            continue;
        }
        files.push(Stored {
            bytes: room(metadata.len()),
            used: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            named,
            path,
        });
    }
    Ok(files)
}

/// Bytes that a file of so many takes: whole blocks of most file systems.
pub(crate) fn room(bytes: u64) -> u64 {
    bytes.next_multiple_of(4096)
}

/// Bytes of all segments in `root`, of every fingerprint.
pub(crate) fn all_stored(root: &Path) -> io::Result<Vec<Stored>> {
    let mut all = Vec::new();
    for folder in subfolders(root)? {
        all.extend(stored(&folder)?);
    }
    Ok(all)
}

/// The segments in `root` that sessions need.
fn all_kept(root: &Path) -> io::Result<HashSet<PathBuf>> {
    let mut all = HashSet::new();
    for folder in subfolders(root)? {
        all.extend(sessions::kept(&folder)?);
    }
    Ok(all)
}

/// Removes what is least needed in `root` until `bytes` more come to no more than `limit`, and says what all come to
/// then, without those. The caller has the lock, so that what is half written is nobody's.
pub(crate) fn make_room(root: &Path, bytes: u64, limit: u64) -> io::Result<u64> {
    let mut files = all_stored(root)?;
    let mut held: u64 = files.iter().map(|file| file.bytes).sum();
    let kept = match held + bytes > limit {
        true => all_kept(root)?,
        false => HashSet::new(),
    };
    files.sort_by_key(|file| file.order(&kept));
    for file in files {
        if held + bytes <= limit && file.named != Named::Part {
            continue;
        }
        remove(&file.path)?;
        held -= file.bytes;
    }
    Ok(held)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(first_group: u32, letter: &str, suffix: &str) -> String {
        format!("{first_group:08x}-0001-{}.{suffix}", letter.repeat(32))
    }

    fn file(folder: &Path, name: &str, bytes: usize, used: u64) {
        let path = folder.join(name);
        fs::write(&path, vec![0; bytes]).expect("a file");
        let file = OpenOptions::new().write(true).open(&path);
        let used = SystemTime::UNIX_EPOCH + Duration::from_secs(used);
        file.and_then(|file| file.set_modified(used))
            .expect("a time");
    }

    #[test]
    fn what_is_promised_for_longer_stays_and_times_of_clocks_that_jumped_do_not() {
        let root = tempfile::tempdir().expect("a folder");
        let path = root.path().join("segment");
        let second = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let day = LONGEST_PIN.as_secs();
        file(root.path(), "segment", 1, 5);
        for (now, until, expected) in [
            (1000, None, 1000),
            (900, None, 1000),
            (1001, Some(4601), 4601),
            (1002, None, 4601),
            (1003, Some(2000), 4601),
            (5000, None, 5000),
            (5000, Some(5000 + 9 * day), 5000 + day),
            (5001, None, 5000 + day),
        ] {
            let file = OpenOptions::new().write(true).open(&path);
            touch(&file.expect("a file"), second(now), until.map(second)).expect("a time");
            let found = fs::metadata(&path).and_then(|file| file.modified());
            assert_eq!(found.expect("a time"), second(expected), "at {now}");
        }
        file(root.path(), "segment", 1, 100 * day);
        let opened = OpenOptions::new().write(true).open(&path);
        touch(&opened.expect("a file"), second(6000), None).expect("a time");
        let found = fs::metadata(&path).and_then(|file| file.modified());
        assert_eq!(found.expect("a time"), second(6000));
    }

    fn names(root: &Path) -> Vec<String> {
        let files = all_stored(root).expect("a folder").into_iter();
        let name = |file: Stored| {
            file.path
                .file_name()
                .map(|name| name.to_string_lossy().into())
        };
        let mut names: Vec<String> = files.filter_map(name).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_of_no_use_goes_first_and_then_what_was_used_last_the_longest_ago_leaves_first() {
        let root = tempfile::tempdir().expect("a folder");
        let (one, two) = (
            root.path().join("0".repeat(32)),
            root.path().join("1".repeat(32)),
        );
        for folder in [&one, &two] {
            create_private_folder(folder).expect("a folder");
        }
        file(&one, &name(0, "a", "rows"), 4096, 5);
        file(&one, &name(4, "b", "rows"), 4096, 5);
        file(&two, &name(0, "c", "rows"), 4096, 9);
        file(&two, &name(0, "d", "bad"), 4096, 99);
        file(&two, &name(0, "e", "part"), 4096, 99);
        file(&one, SETTINGS, 4096, 1);
        file(&one, "film.part", 4096, 1);
        file(root.path(), "film.part", 4096, 1);
        let _lock = lock(root.path()).expect("nobody writes");
        assert_eq!(make_room(root.path(), 0, 1 << 20).expect("room"), 4 * 4096);
        assert_eq!(
            names(root.path()).len(),
            4,
            "what is half written is nobody's"
        );
        let left = |bytes| {
            make_room(root.path(), bytes, 5 * 4096).expect("room");
            names(root.path())
        };
        assert_eq!(left(4096).len(), 4, "there is room");
        assert_eq!(
            left(2 * 4096),
            [
                name(0, "a", "rows"),
                name(0, "c", "rows"),
                name(4, "b", "rows")
            ]
        );
        assert_eq!(left(3 * 4096), [name(0, "a", "rows"), name(0, "c", "rows")]);
        assert_eq!(left(4 * 4096), [name(0, "c", "rows")]);
    }

    #[test]
    fn of_a_full_folder_what_a_session_needs_stays_though_it_was_used_first() {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("0".repeat(32));
        create_private_folder(&folder).expect("a folder");
        let names = [name(0, "a", "rows"), name(0, "b", "rows")];
        file(&folder, &names[0], 4096, 5);
        file(&folder, &names[1], 4096, 9);
        let id = sessions::SessionId {
            name: "notes".parse().expect("a name"),
            owner: crate::prefix::Namespace::COMMON,
        };
        sessions::keep(&folder, &id, 16, &names[..1]).expect("room");
        // Nothing is to come, and there is too much already.
        assert_eq!(make_room(root.path(), 0, 4096).expect("room"), 4096);
        assert_eq!(super::tests::names(root.path()), names[..1]);
    }

    #[test]
    fn folders_of_fingerprints_have_32_digits_and_what_else_is_there_is_left_alone() {
        let root = tempfile::tempdir().expect("a folder");
        let path = |name: &str| root.path().join(name);
        let own = path(&"0f".repeat(16));
        fs::create_dir(&own).expect("a folder");
        // Digits of another number, as many other letters, both of neither, and a file.
        for name in ["0f", &"0f".repeat(17), &"film".repeat(8), "film"] {
            fs::create_dir(path(name)).expect("a folder");
        }
        fs::write(path(&"a".repeat(32)), "").expect("a file");
        assert_eq!(subfolders(root.path()).expect("a folder"), [own]);
    }

    #[test]
    fn what_another_process_has_removed_is_nobodys_trouble_and_what_else_fails_is_said() {
        let root = tempfile::tempdir().expect("a folder");
        let (gone, folder, film) = (
            root.path().join("gone"),
            root.path().join("folder"),
            root.path().join("film"),
        );
        fs::create_dir(&folder).expect("a folder");
        fs::write(&film, "").expect("a file");
        assert_eq!(stored(&gone).expect("nothing is there"), []);
        assert!(stored(&film).is_err(), "it is no folder");
        remove(&gone).expect("it is gone");
        remove(&film).expect("a file");
        assert!(!film.exists());
        assert!(remove(&folder).is_err(), "it is no file");
    }

    #[test]
    fn of_the_disk_that_a_name_is_brought_to_only_fullness_is_a_failure() {
        assert!(unless_full(Ok(())).is_ok());
        assert!(unless_full(Err(io::ErrorKind::Unsupported.into())).is_ok());
        let full = unless_full(Err(io::ErrorKind::StorageFull.into()));
        assert_eq!(
            full.expect_err("it is full").kind(),
            io::ErrorKind::StorageFull
        );
    }

    #[cfg(unix)]
    #[test]
    fn nobody_but_the_owner_reads_what_was_said() {
        use std::os::unix::fs::PermissionsExt;
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("a/b");
        create_private_folder(&folder).expect("a folder");
        let part = folder.join("x.part");
        let file = create_private(&part).expect("a file");
        commit(&file, &part, &folder.join("x.rows")).expect("a name");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o777;
        assert_eq!(mode(&folder), 0o700);
        assert_eq!(mode(&folder.join("x.rows")), 0o600);
        assert!(!part.exists());
    }
}
