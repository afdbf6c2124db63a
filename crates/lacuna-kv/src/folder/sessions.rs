//! Conversations with names: which segments each needs, so that these leave the folder last, and all of them when it
//! is removed.
//!
//! ```text
//! DIR/<fingerprint>/<name>~<owner>.session
//!
//! lacuna session 1
//! <tokens>
//! <a segment's file>              a line for each
//! <checksum of the lines before>
//! ```
//!
//! A file is written whole under another name first, and one that is not what was written names nothing. What it holds
//! is no more than names: whoever goes on with a conversation sends it, and is answered from its segments.

use std::collections::HashSet;
use std::fmt;
use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::SystemTime;

use super::files;
use super::index::Named;
use crate::checksum::xxh3_128;
use crate::prefix::Namespace;

const SUFFIX: &str = "session";
const FIRST_LINE: &str = "lacuna session 1";
/// Sessions of one owner under one fingerprint at most: then the one that was used the longest ago gives way.
pub const MOST_SESSIONS: usize = 256;
/// No file of a session is longer: a million tokens have a thousand segments.
const LONGEST: u64 = 4 << 20;

/// What a conversation is called: 1 to 64 letters, digits, `-`, `_` and `.`, which is not the first.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SessionName(String);

/// Why a text is no name of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a session's name has up to 64 letters, digits, `-`, `_` and `.`, which is not the first")]
pub struct NotASessionName;

impl FromStr for SessionName {
    type Err = NotASessionName;

    fn from_str(name: &str) -> Result<Self, NotASessionName> {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        let usable = (1..=64).contains(&name.len()) && name.bytes().all(known);
        match usable && !name.starts_with('.') {
            true => Ok(Self(name.to_owned())),
            false => Err(NotASessionName),
        }
    }
}

impl fmt::Display for SessionName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A conversation by name, of one of those who may use the folder.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct SessionId {
    /// What it is called.
    pub name: SessionName,
    /// Whose it is: others may call theirs the same.
    pub owner: Namespace,
}

/// A conversation that a folder keeps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptSession {
    /// Which.
    pub id: SessionId,
    /// What it was computed by: the name of a folder within the folder.
    pub fingerprint: String,
    /// Tokens whose rows are kept.
    pub tokens: usize,
    /// Bytes of files that it needs, those that others need too included.
    pub bytes: u64,
    /// When it was last gone on with.
    pub used: SystemTime,
}

/// A session's file, read.
#[derive(Debug)]
struct Held {
    path: PathBuf,
    id: SessionId,
    tokens: usize,
    /// Names of files beside it.
    segments: Vec<String>,
    used: SystemTime,
}

/// The sessions that the cache folder `root` keeps, by name.
///
/// # Errors
/// When the folder cannot be read.
pub fn sessions(root: &Path) -> io::Result<Vec<KeptSession>> {
    let mut all = Vec::new();
    for folder in files::subfolders(root)? {
        let bytes = |segment: &String| fs::metadata(folder.join(segment)).map_or(0, |it| it.len());
        let fingerprint = folder.file_name().unwrap_or_default().to_string_lossy();
        all.extend(held(&folder)?.into_iter().map(|held| KeptSession {
            bytes: held.segments.iter().map(bytes).sum(),
            fingerprint: fingerprint.clone().into_owned(),
            id: held.id,
            tokens: held.tokens,
            used: held.used,
        }));
    }
    all.sort_by(|a, b| (&a.id.name.0, a.used).cmp(&(&b.id.name.0, b.used)));
    Ok(all)
}

/// Removes sessions of the cache folder `root` that are called `name`, of `owner` or of everybody, and the segments that
/// no other session needs. Returns how many sessions that were.
///
/// # Errors
/// When something cannot be removed.
pub fn remove_session(
    root: &Path,
    name: &SessionName,
    owner: Option<Namespace>,
) -> io::Result<usize> {
    let _lock = files::lock(root)?;
    let mut removed = 0;
    for folder in files::subfolders(root)? {
        let (gone, left): (Vec<_>, Vec<_>) = held(&folder)?.into_iter().partition(|held| {
            held.id.name == *name && owner.is_none_or(|owner| owner == held.id.owner)
        });
        let needed: HashSet<&String> = left.iter().flat_map(|held| &held.segments).collect();
        for session in &gone {
            // Its name goes last: what is interrupted is done again.
            for segment in session
                .segments
                .iter()
                .filter(|name| !needed.contains(name))
            {
                files::remove(&folder.join(segment))?;
            }
            files::remove(&session.path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// The segments that sessions in `folder` need.
pub(super) fn kept(folder: &Path) -> io::Result<HashSet<PathBuf>> {
    let held = held(folder)?.into_iter();
    let names = held.flat_map(|held| held.segments);
    Ok(names.map(|name| folder.join(name)).collect())
}

/// Takes note that the session `id` of `folder` has so many tokens, in these segments, in the place of what it had. The
/// caller has the lock.
pub(super) fn keep(
    folder: &Path,
    id: &SessionId,
    tokens: usize,
    segments: &[String],
) -> io::Result<()> {
    let mut text = format!("{FIRST_LINE}\n{tokens}\n");
    for segment in segments {
        text.push_str(segment);
        text.push('\n');
    }
    text.push_str(&format!("{:032x}\n", xxh3_128(text.as_bytes())));
    let path = folder.join(file_name(id));
    if !path.exists() {
        let mut others = held(folder)?;
        others.retain(|held| held.id.owner == id.owner);
        others.sort_by_key(|held| held.used);
        let surplus = (others.len() + 1).saturating_sub(MOST_SESSIONS);
        for session in &others[..surplus] {
            files::remove(&session.path)?;
        }
    }
    // Of no other's name: those end with what this one begins with.
    let part = folder.join(format!("{}.part", file_name(id)));
    let mut file = files::create_private(&part)?;
    let written = file.write_all(text.as_bytes());
    let named = written.and_then(|()| files::commit(&file, &part, &path));
    if named.is_err() {
        fs::remove_file(&part).ok();
    }
    named
}

/// Whether there is a session `id` in `folder`.
pub(super) fn is_kept(folder: &Path, id: &SessionId) -> bool {
    folder.join(file_name(id)).exists()
}

/// Every file of a session in `folder`, those that name nothing included.
pub(super) fn files_of_sessions(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let there = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = there.map(|entry| entry.path());
    paths.filter(|path| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let stem = name.strip_suffix(".part").unwrap_or(&name);
        named(stem).is_some()
    })
}

fn file_name(id: &SessionId) -> String {
    format!("{}~{:032x}.{SUFFIX}", id.name, id.owner.bits())
}

fn named(file: &str) -> Option<SessionId> {
    let (name, owner) = file
        .strip_suffix(SUFFIX)?
        .strip_suffix('.')?
        .split_once('~')?;
    let hex = owner.len() == 32 && owner.bytes().all(|byte| byte.is_ascii_hexdigit());
    Some(SessionId {
        name: name.parse().ok()?,
        owner: Namespace::new(u128::from_str_radix(owner, 16).ok().filter(|_| hex)?),
    })
}

fn held(folder: &Path) -> io::Result<Vec<Held>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let id = path.file_name().and_then(|name| named(name.to_str()?));
        if let Some(id) = id {
            all.extend(read(path, id));
        }
    }
    Ok(all)
}

/// `None` for what is not what was written: then it keeps nothing, and is replaced when it is gone on with.
fn read(path: PathBuf, id: SessionId) -> Option<Held> {
    let file = fs::File::open(&path).ok()?;
    let used = file.metadata().ok()?.modified().ok()?;
    let mut text = String::new();
    file.take(LONGEST).read_to_string(&mut text).ok()?;
    let (body, checksum) = text.strip_suffix('\n')?.rsplit_once('\n')?;
    let body = format!("{body}\n");
    if checksum != format!("{:032x}", xxh3_128(body.as_bytes())) {
        return None;
    }
    let mut lines = body.lines();
    if lines.next()? != FIRST_LINE {
        return None;
    }
    let tokens = lines.next()?.parse().ok()?;
    let segments: Vec<String> = lines.map(str::to_owned).collect();
    // Nothing but segments is kept or removed for its sake, whoever wrote it.
    let usable = |name: &String| matches!(Named::of(name), Some(Named::Segment(_)));
    segments.iter().all(usable).then_some(Held {
        path,
        id,
        tokens,
        segments,
        used,
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn id(name: &str, owner: u128) -> SessionId {
        SessionId {
            name: name.parse().expect("a name"),
            owner: Namespace::new(owner),
        }
    }

    fn segment(folder: &Path, first_group: u32) -> String {
        let name = format!("{first_group:08x}-0001-{}.rows", "a".repeat(32));
        fs::write(folder.join(&name), [0; 10]).expect("a file");
        name
    }

    fn root() -> (tempfile::TempDir, PathBuf) {
        let root = tempfile::tempdir().expect("a folder");
        let folder = root.path().join("0".repeat(32));
        files::create_private_folder(&folder).expect("a folder");
        (root, folder)
    }

    #[test]
    fn names_are_no_paths() {
        for name in ["a", "notes-2.old_1", &"x".repeat(64)] {
            assert_eq!(
                name.parse::<SessionName>().map(|name| name.to_string()),
                Ok(name.to_owned())
            );
        }
        for name in [
            "",
            ".",
            "..",
            ".a",
            "a/b",
            "a\\b",
            "a~b",
            "a b",
            "a\0",
            "ä",
            &"x".repeat(65),
        ] {
            assert_eq!(
                name.parse::<SessionName>(),
                Err(NotASessionName),
                "{name:?}"
            );
        }
    }

    #[test]
    fn what_is_kept_is_told_and_removed_with_what_no_other_needs() {
        let (root, folder) = root();
        let names: Vec<String> = (0..3).map(|group| segment(&folder, group)).collect();
        keep(&folder, &id("a", 0), 40, &names[..2]).expect("room");
        keep(&folder, &id("a", 7), 50, &names[1..]).expect("room");
        keep(&folder, &id("b", 0), 0, &[]).expect("room");
        let found = sessions(root.path()).expect("a folder").into_iter();
        let found: Vec<_> = found.map(|it| (it.id, it.tokens, it.bytes)).collect();
        let expected = [
            (id("a", 0), 40, 20),
            (id("a", 7), 50, 20),
            (id("b", 0), 0, 0),
        ];
        assert_eq!(found, expected);
        let all = names.iter().map(|name| folder.join(name)).collect();
        assert_eq!(kept(&folder).expect("a folder"), all);
        let a = &id("a", 0).name;
        let remove = |owner| remove_session(root.path(), a, owner).expect("removed");
        assert_eq!(remove(Some(Namespace::new(3))), 0);
        assert_eq!(remove(Some(Namespace::COMMON)), 1);
        let left: Vec<bool> = names
            .iter()
            .map(|name| folder.join(name).exists())
            .collect();
        assert_eq!(left, [false, true, true], "the other one needs the second");
        assert_eq!(remove(None), 1);
        assert!(!names.iter().any(|name| folder.join(name).exists()));
        assert_eq!(sessions(root.path()).expect("a folder").len(), 1);
    }

    #[test]
    fn a_session_is_known_by_its_name_and_its_owner_whatever_else_has_one_like_it() {
        let (root, folder) = root();
        keep(&folder, &id("a", 0xff), 16, &[]).expect("room");
        assert!(is_kept(&folder, &id("a", 0xff)));
        assert!(!is_kept(&folder, &id("a", 0)) && !is_kept(&folder, &id("b", 0xff)));
        let whole = folder.join(file_name(&id("a", 0xff)));
        // Owners of which a number could be made, and that are none: too short, too long, and with a sign.
        for owner in [
            "ff",
            &format!("{:033x}", 0xff),
            &format!("+{:031x}", 0xff),
            &"g".repeat(32),
        ] {
            let path = folder.join(format!("a~{owner}.session"));
            fs::copy(&whole, path).expect("room");
        }
        let found = sessions(root.path()).expect("a folder");
        assert_eq!((found.len(), &found[0].id), (1, &id("a", 0xff)));
        assert_eq!(files_of_sessions(&folder).collect::<Vec<_>>(), [whole]);
    }

    #[test]
    fn a_file_that_is_not_what_was_written_names_nothing() {
        let (_root, folder) = root();
        let name = segment(&folder, 0);
        keep(&folder, &id("a", 0), 16, std::slice::from_ref(&name)).expect("room");
        let path = folder.join(file_name(&id("a", 0)));
        let whole = fs::read(&path).expect("a file");
        for at in 0..whole.len() {
            fs::write(&path, &whole[..at]).expect("room");
            assert!(kept(&folder).expect("a folder").is_empty(), "cut at {at}");
            let mut other = whole.clone();
            other[at] ^= 1 << (at % 8);
            fs::write(&path, other).expect("room");
            assert!(kept(&folder).expect("a folder").is_empty(), "byte {at}");
        }
        // Even with a checksum that is right, nothing but segments is removed with it.
        let body = format!("{FIRST_LINE}\n16\n../../secret\n");
        let text = format!("{body}{:032x}\n", xxh3_128(body.as_bytes()));
        fs::write(&path, text).expect("room");
        assert!(kept(&folder).expect("a folder").is_empty());
        fs::write(&path, whole).expect("room");
        assert_eq!(kept(&folder).expect("a folder").len(), 1);
    }

    #[test]
    fn of_many_names_of_one_owner_the_one_that_was_used_the_longest_ago_gives_way() {
        let (root, folder) = root();
        keep(&folder, &id("other", 7), 0, &[]).expect("room");
        for number in 0..MOST_SESSIONS {
            let id = id(&format!("s{number}"), 0);
            keep(&folder, &id, 0, &[]).expect("room");
            let used = SystemTime::UNIX_EPOCH + Duration::from_secs(1000 - number as u64);
            let file = fs::File::options()
                .write(true)
                .open(folder.join(file_name(&id)));
            file.and_then(|file| file.set_modified(used))
                .expect("a time");
        }
        let there = |name: &str| {
            let all = sessions(root.path()).expect("a folder");
            all.iter().any(|it| it.id.name.0 == name)
        };
        keep(&folder, &id("s0", 0), 1, &[]).expect("room");
        assert!(there("s255"), "the same name takes no room");
        keep(&folder, &id("one-more", 0), 1, &[]).expect("room");
        assert!(there("one-more") && there("other") && there("s254") && !there("s255"));
        assert_eq!(files_of_sessions(&folder).count(), MOST_SESSIONS + 1);
    }
}
