//! Read-only bytes of a model file, mapped and shared.
//!
//! A [`Mapping`] is the only owner of file contents in this crate: parsers keep offsets into it and
//! tensors keep a clone of it, so opening a model costs address space and page-table entries, not
//! memory. Cloning is one reference count.
//!
//! # Safety
//!
//! This module opens `unsafe` for three calls: mapping a file, having the mapping watched over, and letting go of its
//! pages. `mmap` is unsafe because another process may change the file while we hold `&[u8]` to it.
//!
//! 1. *Lifetime.* The mapping lives in the same `Arc` as every slice handed out borrows from, and is
//!    unmapped when the last clone goes; no pointer to it outlives that.
//! 2. *Writability.* It is mapped read-only and private, from a regular file opened for reading, so
//!    nothing in this process can write through it.
//! 3. *Change underneath.* We cannot stop another process from changing the file, and do not promise
//!    a meaningful result if one does. What we do promise: no parser trusts a second read to equal
//!    the first (lengths are re-checked on every access, text is re-validated), and weights are only
//!    ever read as plain numbers, for which every bit pattern is a value. Other contents of the
//!    same length go unnoticed: replace model files by renaming a new one over them, never in place.
//!    A file that is *truncated* while mapped makes later reads fail with `SIGBUS`, as for every
//!    program that maps files; what becomes of them is up to [`guard_mappings`].

#![expect(
    unsafe_code,
    reason = "mappings of files are what the compiler cannot check here"
)]

#[cfg(test)]
#[cfg(any(target_os = "linux", target_os = "android", target_os = "macos"))]
#[path = "tests.rs"]
mod shrinking;

use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use lacuna_pages::guard::{self, Guard};

use crate::reader::Loaded;

/// Why a file could not be mapped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is nothing at this path.
    #[error("{}: no such file; check the path", path.display())]
    NotFound {
        /// The path as given.
        path: PathBuf,
    },
    /// The file exists but cannot be opened or examined.
    #[error("{}: cannot be read ({source}); check its permissions", path.display())]
    Unreadable {
        /// The path as given.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// A directory where a file is needed.
    #[error("{}: is a directory, and a file is needed here", path.display())]
    Directory {
        /// The path as given.
        path: PathBuf,
    },
    /// A pipe, socket or device: it has no contents that can be mapped.
    #[error("{}: is not a regular file; save its contents to a file first", path.display())]
    NotAFile {
        /// The path as given.
        path: PathBuf,
    },
    /// A file of zero bytes, usually what an interrupted copy leaves.
    #[error("{}: is empty; download or copy it again", path.display())]
    Empty {
        /// The path as given.
        path: PathBuf,
    },
    /// The operating system refused to map the file.
    #[error("{}: cannot be mapped into memory ({source})", path.display())]
    Map {
        /// The path as given.
        path: PathBuf,
        /// What the operating system said.
        source: io::Error,
    },
    /// More files are mapped than can be watched over.
    #[error("{}: too many files are open; close a model first", path.display())]
    TooMany {
        /// The path as given.
        path: PathBuf,
    },
    /// The file was lost after it had been mapped.
    #[error(transparent)]
    Lost(#[from] LostFile),
}

/// A mapped file whose contents are gone: it was made shorter, or its disk fails.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{}: has become shorter or unreadable while it was in use; put it back whole and start again",
    path.display()
)]
pub struct LostFile {
    /// The path as given.
    pub path: PathBuf,
}

/// Lets the process live on when a mapped file cannot be read any more, for example because it was
/// truncated. Its bytes read as zeros from then on, and [`Mapping::check`] says so; models check
/// after every pass.
///
/// This installs a handler of `SIGBUS` for the whole process, which passes on what has nothing to do
/// with a [`Mapping`]. A library does not do that unasked: programs call it when they start. Without
/// it such a read ends the process by that signal. Does nothing where there are no such signals.
///
/// # Errors
/// When the system refuses the handler.
pub fn guard_mappings() -> io::Result<()> {
    guard::install()
}

/// Immutable bytes, shared by reference count: a mapped file, or memory that stands in for one.
///
/// ```
/// use lacuna_files::Mapping;
///
/// let bytes = Mapping::from(b"GGUF".to_vec());
/// let other = bytes.clone(); // the same bytes, not a copy
/// assert_eq!(bytes.as_ptr(), other.as_ptr());
/// ```
#[derive(Clone)]
pub struct Mapping {
    source: Arc<Source>,
}

/// A [`Mapping`] for as long as somebody else has it; none to begin with.
#[derive(Debug, Default)]
pub(crate) struct WeakMapping(Weak<Source>);

impl WeakMapping {
    pub(crate) fn upgrade(&self) -> Option<Mapping> {
        let source = self.0.upgrade()?;
        Some(Mapping { source })
    }
}

enum Source {
    File {
        // Before the map: it must be gone when the memory is unmapped.
        guard: Guard,
        map: memmap2::Mmap,
        /// Kept open to ask for its length.
        file: File,
        path: PathBuf,
    },
    Owned(Vec<u8>),
    Read(Loaded),
    Static(&'static [u8]),
}

impl Mapping {
    /// Maps the regular file at `path`, following links.
    ///
    /// Costs no memory: pages are read when touched, and are clean, so the kernel may drop them.
    ///
    /// # Errors
    /// Every [`Error`] variant; anything but a non-empty regular file is refused before it is
    /// opened, so that a pipe cannot block the caller.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let file = open_regular(path)?;
        // SAFETY: (1) `Source` owns the mapping and slices borrow from it; (2) `Mmap::map` maps
        // read-only and private; (3) contents are only re-read with checks, as the module explains.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(|source| Error::Map {
            path: path.to_owned(),
            source,
        })?;
        let path = path.to_owned();
        // SAFETY: (1) `Source` drops the guard before the mapping, which nobody else unmaps or replaces; (2) it is
        // only read.
        let guard = unsafe { Guard::of_mapping(map.as_ptr(), map.len()) };
        match guard {
            Some(guard) => Ok(Self::new(Source::File {
                guard,
                map,
                file,
                path,
            })),
            None => Err(Error::TooMany { path }),
        }
    }

    /// Stands in for a file with bytes that live as long as the program, such as `include_bytes!`.
    pub fn from_static(bytes: &'static [u8]) -> Self {
        Self::new(Source::Static(bytes))
    }

    /// The file behind the bytes, when there is one.
    pub fn path(&self) -> Option<&Path> {
        match &*self.source {
            Source::File { path, .. } => Some(path),
            Source::Owned(_) | Source::Read(_) | Source::Static(_) => None,
        }
    }

    /// Opens the file once more, with `flags` of the system's own where it has such; `None` when no file stands
    /// behind the bytes.
    ///
    /// # Errors
    /// What the system says, and when there is another file under the path by now.
    pub(crate) fn open_again(&self, flags: i32) -> io::Result<Option<File>> {
        let Source::File { file, path, .. } = &*self.source else {
            return Ok(None);
        };
        let mut options = std::fs::OpenOptions::new();
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, flags);
        #[cfg(not(unix))]
        let _ = flags;
        let again = options.read(true).open(path)?;
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let (this, found) = (file.metadata()?, again.metadata()?);
            if (this.dev(), this.ino()) != (found.dev(), found.ino()) {
                let message = "there is another file under the path by now; start again";
                return Err(io::Error::other(message));
            }
        }
        #[cfg(not(unix))]
        let _ = file;
        Ok(Some(again))
    }

    /// Copies the bytes from `start` on into `out`. Those of a file are read without touching the mapping, so
    /// that however much of it is read, the process does not grow by its pages.
    ///
    /// # Errors
    /// What the system says, or [`io::ErrorKind::UnexpectedEof`] for bytes that are not there.
    pub fn read_at(&self, start: usize, out: &mut [u8]) -> io::Result<()> {
        #[cfg(unix)]
        if let Source::File { file, .. } = &*self.source {
            return std::os::unix::fs::FileExt::read_exact_at(file, out, start as u64);
        }
        let end = start.checked_add(out.len());
        let found = end.and_then(|end| self.get(start..end));
        out.copy_from_slice(found.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    /// What the system says of the file; `None` when no file stands behind the bytes.
    ///
    /// # Errors
    /// What the system says.
    pub(crate) fn metadata(&self) -> io::Result<Option<std::fs::Metadata>> {
        match &*self.source {
            Source::File { file, .. } => file.metadata().map(Some),
            Source::Owned(_) | Source::Read(_) | Source::Static(_) => Ok(None),
        }
    }

    /// Whether the file is still as long as it was mapped, and all of it that anyone has read could be
    /// read. Costs a system call.
    ///
    /// # Errors
    /// [`LostFile`] once that is not so; what was read since then may be zeros.
    pub fn check(&self) -> Result<(), LostFile> {
        let Source::File {
            guard,
            map,
            file,
            path,
        } = &*self.source
        else {
            return Ok(());
        };
        // The rest of the page that a shortened file now ends in reads as zeros, and raises no signal.
        let shorter = || {
            file.metadata()
                .is_ok_and(|now| now.len() < map.len() as u64)
        };
        match guard.is_lost() || shorter() {
            true => Err(LostFile { path: path.clone() }),
            false => Ok(()),
        }
    }

    /// What `read` makes of the bytes, good or bad, unless the file turns out to be lost.
    pub(super) fn read<T, E: From<Error>>(
        &self,
        read: impl FnOnce(&Self) -> Result<T, E>,
    ) -> Result<T, E> {
        let result = read(self);
        self.check().map_err(Error::from)?;
        result
    }

    /// Lets go of the memory behind bytes that are not needed soon. Reading them again reads the file.
    pub(crate) fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Source::File { map, .. } = &*self.source {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: (2) Nothing has been written through the mapping, so what is read next is again
            // what the file has, and (3) holds of that as of the first time.
            let released = unsafe { map.unchecked_advise_range(advice, range.start, range.len()) };
            // Without it the system takes the memory when it needs some.
            released.ok();
        }
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Asks for bytes that are gone through again and again to be read in pieces of huge pages, and mapped by
    /// them: they cost few entries of the processor's address cache, and its prefetcher does not stop at every
    /// 4 KiB. Linux does so where the file system has large folios, for what is not in the page cache yet;
    /// elsewhere nothing changes.
    pub fn prefer_huge_pages(&self, range: Range<usize>) {
        #[cfg(target_os = "linux")]
        if let Source::File { map, .. } = &*self.source {
            let advice = memmap2::Advice::HugePage;
            // A kernel without them reads as it always did.
            map.advise_range(advice, range.start, range.len()).ok();
        }
        #[cfg(not(target_os = "linux"))]
        let _ = range;
    }

    /// A handle that does not keep the bytes.
    pub(crate) fn downgrade(&self) -> WeakMapping {
        WeakMapping(Arc::downgrade(&self.source))
    }

    /// Whether both are clones of one mapping.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.source, &other.source)
    }

    fn new(source: Source) -> Self {
        Self {
            source: Arc::new(source),
        }
    }
}

impl Deref for Mapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &*self.source {
            Source::File { map, .. } => map,
            Source::Owned(bytes) => bytes,
            Source::Read(bytes) => bytes,
            Source::Static(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Mapping {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Source::Owned(bytes))
    }
}

impl From<Loaded> for Mapping {
    fn from(bytes: Loaded) -> Self {
        Self::new(Source::Read(bytes))
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("path", &self.path())
            .field("len", &self.len())
            .finish()
    }
}

/// Opens a regular file that is not empty, following links. Anything else is refused before it is
/// opened: to open a pipe is to wait for its other end.
///
/// # Errors
/// [`Error`], naming the path.
pub fn open_regular(path: &Path) -> Result<File, Error> {
    let kind = |metadata: io::Result<_>| {
        check_kind(path, &metadata.map_err(|error| unreadable(path, error))?)
    };
    kind(std::fs::metadata(path))?;
    let file = File::open(path).map_err(|error| unreadable(path, error))?;
    kind(file.metadata())?;
    Ok(file)
}

fn check_kind(path: &Path, metadata: &std::fs::Metadata) -> Result<(), Error> {
    let path = path.to_owned();
    if metadata.is_dir() {
        Err(Error::Directory { path })
    } else if !metadata.is_file() {
        Err(Error::NotAFile { path })
    } else if metadata.len() == 0 {
        Err(Error::Empty { path })
    } else {
        Ok(())
    }
}

fn unreadable(path: &Path, source: io::Error) -> Error {
    let path = path.to_owned();
    match source.kind() {
        io::ErrorKind::NotFound => Error::NotFound { path },
        _ => Error::Unreadable { path, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_a_file_and_shares_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        std::fs::write(&path, b"some bytes").unwrap();
        let mapping = Mapping::open(&path).unwrap();
        let clone = mapping.clone();
        drop(mapping);
        assert_eq!(&clone[..], b"some bytes");
        assert_eq!(clone.path(), Some(path.as_path()));
    }

    #[test]
    fn bytes_are_read_where_they_are_and_not_beyond() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("bytes");
        std::fs::write(&path, b"some bytes").unwrap();
        for mapping in [
            Mapping::open(&path).unwrap(),
            Mapping::from(b"some bytes".to_vec()),
            Mapping::from_static(b"some bytes"),
        ] {
            let mut word = [0; 5];
            mapping.read_at(5, &mut word).unwrap();
            assert_eq!(&word, b"bytes");
            for start in [6, 10, 11, usize::MAX] {
                let error = mapping.read_at(start, &mut word).unwrap_err();
                let kinds = [io::ErrorKind::UnexpectedEof, io::ErrorKind::InvalidInput];
                assert!(kinds.contains(&error.kind()), "{start}: {error}");
            }
        }
    }

    #[test]
    fn what_is_not_a_file_is_a_typed_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        assert!(matches!(Mapping::open(path), Err(Error::Directory { .. })));
        assert!(matches!(
            Mapping::open(&path.join("none")),
            Err(Error::NotFound { .. })
        ));
        std::fs::write(path.join("empty"), b"").unwrap();
        assert!(matches!(
            Mapping::open(&path.join("empty")),
            Err(Error::Empty { .. })
        ));
    }

    #[cfg(unix)]
    #[test]
    fn a_pipe_or_device_is_refused_without_blocking() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status();
        if made.is_ok_and(|status| status.success()) {
            assert!(matches!(Mapping::open(&pipe), Err(Error::NotAFile { .. })));
        }
        assert!(matches!(
            Mapping::open(Path::new("/dev/null")),
            Err(Error::NotAFile { .. })
        ));
    }

    #[cfg(unix)]
    #[test]
    fn a_file_without_read_permission_is_a_typed_error() {
        use std::os::unix::fs::PermissionsExt;

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, b"x").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o000)).unwrap();
        // A privileged user may read it anyway; then there is nothing to refuse.
        if File::open(&path).is_err() {
            assert!(matches!(
                Mapping::open(&path),
                Err(Error::Unreadable { .. })
            ));
        }
    }
}
