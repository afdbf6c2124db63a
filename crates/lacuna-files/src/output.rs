//! Files that are written: whole or not at all, and never in the place of something that is no file.

use std::collections::BTreeMap;
use std::fs::{self, File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A file being written. It appears, or replaces the one that was there, when it is finished; what
/// is dropped before leaves nothing behind.
///
/// One process at a time writes a file: the unfinished one is locked, so that a second writer neither
/// removes it nor puts its half in the place of the whole.
///
/// A link stays a link, and what it leads to is replaced. Devices and pipes cannot be replaced by a
/// file: what is written goes to them as it comes.
#[derive(Debug)]
pub struct OutputFile {
    file: File,
    /// Where the file is until it is finished, and where then. `None` for devices and pipes.
    places: Option<Places>,
}

#[derive(Debug)]
struct Places {
    part: PathBuf,
    path: PathBuf,
    /// Of the file at `part`, as long as nobody puts another there.
    identity: Identity,
}

/// Which file something is, whatever it is called now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Identity {
    #[cfg(unix)]
    device: u64,
    #[cfg(unix)]
    inode: u64,
    // The standard library names no more of a file there.
    #[cfg(not(unix))]
    created: Option<std::time::SystemTime>,
}

impl Identity {
    #[cfg(unix)]
    fn new(metadata: &Metadata) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }

    #[cfg(not(unix))]
    fn new(metadata: &Metadata) -> Self {
        Self {
            created: metadata.created().ok(),
        }
    }

    pub(crate) fn of(file: &File) -> io::Result<Self> {
        file.metadata().map(|metadata| Self::new(&metadata))
    }

    /// Whether that file itself is at `path`, rather than a link to it, another one or none.
    pub(crate) fn is_at(self, path: &Path) -> bool {
        fs::symlink_metadata(path).is_ok_and(|there| Self::new(&there) == self)
    }
}

/// Where the unfinished files of this process are, and which they are.
static UNFINISHED: Mutex<BTreeMap<PathBuf, Identity>> = Mutex::new(BTreeMap::new());

fn unfinished() -> MutexGuard<'static, BTreeMap<PathBuf, Identity>> {
    UNFINISHED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Removes every [`OutputFile`] of this process that is not finished, for one that ends at once, as when it is
/// interrupted: what writes them fails from here on.
pub fn remove_unfinished_files() {
    for (part, identity) in std::mem::take(&mut *unfinished()) {
        if identity.is_at(&part) {
            fs::remove_file(part).ok();
        }
    }
}

/// Locks the unfinished file that is open. Where files cannot be locked, as on some file systems of
/// networks, one is written without.
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(written_elsewhere()),
        Ok(()) | Err(TryLockError::Error(_)) => Ok(()),
    }
}

fn written_elsewhere() -> io::Error {
    io::Error::new(
        io::ErrorKind::ResourceBusy,
        "another process is writing this file; wait for it, or name another file",
    )
}

/// Removes the unfinished file that a process left when it was killed, or whatever else has its name:
/// a link itself, rather than what it leads to, since that could be anywhere.
fn remove_left(part: &Path) -> io::Result<()> {
    let there = match fs::symlink_metadata(part) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        there => there?,
    };
    // Held until the file is removed: while it is, no other process can have begun to write it.
    let mut _locked = None;
    if there.is_file() {
        let mut options = OpenOptions::new();
        options.read(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(
            &mut options,
            libc::O_NOFOLLOW | libc::O_NONBLOCK,
        );
        let file = options.open(part)?;
        lock(&file)?;
        // Between the two its writer may have finished, and another begun.
        if !Identity::of(&file)?.is_at(part) {
            return Err(written_elsewhere());
        }
        _locked = Some(file);
    }
    fs::remove_file(part)
}

/// Who may read a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Readers {
    /// Those who could read the one before, or whom the system lets.
    AsUsual,
    Owner,
}

impl OutputFile {
    /// Starts a file that is to be at `path`. A pipe is waited for until someone reads it.
    ///
    /// # Errors
    /// When there is a folder, or what the system says; nothing is there then that was not before.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_for(path, Readers::AsUsual)
    }

    /// The same for a file that its owner alone may read, also where others may read the one that it replaces.
    ///
    /// # Errors
    /// As [`create`](Self::create).
    pub fn create_private(path: &Path) -> io::Result<Self> {
        Self::create_for(path, Readers::Owner)
    }

    fn create_for(path: &Path, readers: Readers) -> io::Result<Self> {
        match fs::metadata(path) {
            Ok(there) if there.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
            Ok(there) if !there.is_file() => Ok(Self {
                file: OpenOptions::new().write(true).open(path)?,
                places: None,
            }),
            Ok(there) => Self::beside(fs::canonicalize(path)?, Some(&there), readers),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            Err(_) => match fs::read_link(path) {
                // A link to what is not there yet.
                Ok(target) => {
                    Self::create_for(&path.parent().unwrap_or(path).join(target), readers)
                }
                Err(_) => Self::beside(path.to_owned(), None, readers),
            },
        }
    }

    /// Writes a file of these contents to `path`.
    ///
    /// # Errors
    /// As [`create`](Self::create) and [`finish`](Self::finish).
    pub fn write_whole(path: &Path, contents: &[u8]) -> io::Result<()> {
        let mut output = Self::create(path)?;
        output.write_all(contents)?;
        output.finish()
    }

    /// Starts a file beside `path`, which `replaced` is at now.
    fn beside(path: PathBuf, replaced: Option<&Metadata>, readers: Readers) -> io::Result<Self> {
        let mut part = path.clone().into_os_string();
        part.push(".part");
        let part = PathBuf::from(part);
        remove_left(&part)?;
        let mut options = OpenOptions::new();
        options.write(true).create_new(true);
        #[cfg(unix)]
        if readers == Readers::Owner {
            std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        let file = options.open(&part)?;
        lock(&file)?;
        let identity = Identity::of(&file)?;
        // Before it was locked, another process may have taken it for one that was left.
        if !identity.is_at(&part) {
            return Err(written_elsewhere());
        }
        unfinished().insert(part.clone(), identity);
        let output = Self {
            file,
            places: Some(Places {
                part,
                path,
                identity,
            }),
        };
        if let Some(replaced) = replaced
            && readers == Readers::AsUsual
            && replaced.permissions() != output.file.metadata()?.permissions()
        {
            output.file.set_permissions(replaced.permissions())?;
        }
        Ok(output)
    }

    /// Puts the file where it is to be.
    ///
    /// # Errors
    /// What the system says; no file is left then, and one that was there before stays.
    pub fn finish(mut self) -> io::Result<()> {
        let Some(Places {
            part,
            path,
            identity,
        }) = &self.places
        else {
            return Ok(());
        };
        self.file.sync_data()?;
        let mut unfinished = unfinished();
        if !identity.is_at(part) {
            return Err(io::Error::new(
                io::ErrorKind::NotFound,
                format!(
                    "what was written was removed or replaced at `{}` meanwhile; write it again",
                    part.display()
                ),
            ));
        }
        fs::rename(part, path)?;
        unfinished.remove(part);
        drop(unfinished);
        self.places = None;
        Ok(())
    }
}

impl Write for OutputFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if let Some(Places { part, identity, .. }) = &self.places {
            let mut unfinished = unfinished();
            // Another's file of the name stays, and is still to be removed when it is interrupted.
            if unfinished.get(part) == Some(identity) {
                unfinished.remove(part);
            }
            // What is left of an incomplete file is of no use; failing to remove it adds nothing.
            if identity.is_at(part) {
                fs::remove_file(part).ok();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(path: &Path, text: &str) -> io::Result<()> {
        OutputFile::write_whole(path, text.as_bytes())
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_is_replaced_when_it_is_whole_and_not_before() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, "first").unwrap();
        let mut output = OutputFile::create(&path).unwrap();
        output.write_all(b"half of the seco").unwrap();
        drop(output);
        assert_eq!(fs::read(&path).unwrap(), b"first");
        write(&path, "second").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"second");
        assert_eq!(names(folder.path()), ["file"]);
        assert!(write(folder.path(), "a folder").is_err());
    }

    /// The second used to remove what the first wrote, and the first then put the second's half in place.
    #[test]
    fn one_writer_at_a_time_has_a_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut first = OutputFile::create(&path).unwrap();
        first.write_all(b"the whole ").unwrap();
        let second = OutputFile::create(&path).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::ResourceBusy, "{second}");
        first.write_all(b"of it").unwrap();
        first.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"the whole of it");
        // One that nobody writes any more is in nobody's way.
        fs::write(folder.path().join("file.part"), "left").unwrap();
        write(&path, "next").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"next");
        assert_eq!(names(folder.path()), ["file"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_another_put_in_the_place_of_ones_own_is_not_taken_for_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, part) = (folder.path().join("file"), folder.path().join("file.part"));
        let mut output = OutputFile::create(&path).unwrap();
        output.write_all(b"whole").unwrap();
        fs::rename(&part, folder.path().join("away")).unwrap();
        fs::write(&part, "half").unwrap();
        assert!(output.finish().is_err());
        assert!(!path.exists());
        assert_eq!(fs::read(&part).unwrap(), b"half");
    }

    #[cfg(unix)]
    #[test]
    fn a_link_stays_one_and_a_private_file_stays_private() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let folder = tempfile::tempdir().unwrap();
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        symlink("file", &link).unwrap();
        write(&link, "made").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"made");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        write(&link, "replaced").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"replaced");
        assert!(link.is_symlink());
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[cfg(unix)]
    #[test]
    fn what_is_for_its_owner_alone_is_so_in_the_place_of_what_others_could_read() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, "for all").unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        let mut output = OutputFile::create_private(&path).unwrap();
        output.write_all(b"secret").unwrap();
        output.finish().unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"secret");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[cfg(unix)]
    #[test]
    fn what_has_the_name_of_the_unfinished_file_is_not_written_through() {
        let folder = tempfile::tempdir().unwrap();
        let (path, other) = (folder.path().join("file"), folder.path().join("other"));
        fs::write(&other, "precious").unwrap();
        std::os::unix::fs::symlink("other", folder.path().join("file.part")).unwrap();
        write(&path, "new").unwrap();
        assert_eq!(fs::read(&other).unwrap(), b"precious");
        assert_eq!(names(folder.path()), ["file", "other"]);
    }

    /// A privileged user's `-o /dev/null` used to leave a file in the device's place.
    #[cfg(unix)]
    #[test]
    fn devices_and_pipes_are_written_to_and_stay() {
        use std::os::unix::fs::FileTypeExt;

        let folder = tempfile::tempdir().unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink("/dev/null", &link).unwrap();
        write(&link, "gone").unwrap();
        let kind = |path: &Path| fs::metadata(path).unwrap().file_type();
        assert!(kind(Path::new("/dev/null")).is_char_device());
        assert!(link.is_symlink());
        let full = write(Path::new("/dev/full"), "too much");
        assert_eq!(full.unwrap_err().kind(), io::ErrorKind::StorageFull);

        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        assert!(made.unwrap().success());
        let reader = {
            let pipe = pipe.clone();
            std::thread::spawn(move || fs::read(pipe).unwrap())
        };
        write(&pipe, "through").unwrap();
        assert_eq!(reader.join().unwrap(), b"through");
        assert!(kind(&pipe).is_fifo());
    }
}
