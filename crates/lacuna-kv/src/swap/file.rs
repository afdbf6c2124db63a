//! The file behind a swap: without a name, past the page cache where that is possible.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;

/// Something that keeps bytes while a process runs. One thread uses it.
pub trait SwapDevice: std::fmt::Debug + Send + Sync {
    /// Keeps `bytes` from `offset` on.
    ///
    /// # Errors
    /// What the system says; what was there before may be gone.
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Fills `bytes` with what was kept from `offset` on.
    ///
    /// # Errors
    /// What the system says.
    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Gives everything from `offset` on back to the system, as far as that is possible.
    fn discard_from(&self, offset: u64);
}

/// Why a file is no swap file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapFileError {
    /// It would take the memory that it is to free.
    #[error("its files are in memory")]
    InMemory,
    /// The system refuses.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// A file that ends with the process.
#[derive(Debug)]
pub(super) struct TemporaryFile(File);

impl TemporaryFile {
    pub(super) fn create(folder: &Path) -> Result<Self, SwapFileError> {
        let file = Self(create(folder)?);
        #[cfg(target_os = "linux")]
        if in_memory(&file.0)? {
            return Err(SwapFileError::InMemory);
        }
        Ok(file)
    }
}

/// Whether a file system keeps files in memory: magic numbers of `tmpfs` and `ramfs`, from `linux/magic.h`.
#[cfg(target_os = "linux")]
fn in_memory(file: &File) -> io::Result<bool> {
    const TMPFS: u64 = 0x0102_1994;
    const RAMFS: u64 = 0x8584_58f6;
    // Signed or not, wider or narrower, by architecture.
    #[expect(clippy::cast_sign_loss, reason = "the magic numbers have 32 bits")]
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok(kind == TMPFS || kind == RAMFS)
}

/// A file without a name. Direct reads and writes leave the page cache to those who use it, and cost as much memory
/// as they say; file systems that have none go through it.
#[cfg(target_os = "linux")]
fn create(folder: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags, open};
    use rustix::io::Errno;
    let unnamed = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mode = Mode::RUSR | Mode::WUSR;
    for flags in [unnamed | OFlags::DIRECT, unnamed] {
        match open(folder, flags, mode) {
            Ok(file) => return Ok(File::from(file)),
            Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    create_and_unlink(folder)
}

#[cfg(not(target_os = "linux"))]
fn create(folder: &Path) -> io::Result<File> {
    create_and_unlink(folder)
}

/// A file whose name is removed at once.
fn create_and_unlink(folder: &Path) -> io::Result<File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    for attempt in 0..16 {
        let path = folder.join(format!("lacuna-swap-{}-{attempt}", std::process::id()));
        match options.open(&path) {
            Ok(file) => {
                std::fs::remove_file(&path)?;
                return Ok(file);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::ErrorKind::AlreadyExists.into())
}

impl SwapDevice for TemporaryFile {
    fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut file = &self.0;
        file.seek(SeekFrom::Start(offset))?;
        file.write_all(bytes)
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut file = &self.0;
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(bytes)
    }

    fn discard_from(&self, offset: u64) {
        // What stays is room on a disk, until the process ends.
        self.0.set_len(offset).ok();
    }
}

/// Memory as direct reads and writes need it.
#[derive(Debug)]
pub(super) struct Aligned {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Aligned {
    /// What every disk of today is content with.
    const ALIGNMENT: usize = 4096;

    pub(super) fn new(length: usize) -> Self {
        let memory = vec![0; length + Self::ALIGNMENT];
        Self {
            start: memory.as_ptr().align_offset(Self::ALIGNMENT),
            memory,
            length,
        }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.length]
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.length]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    #[test]
    fn what_is_kept_is_read_again_and_what_is_discarded_is_given_back() {
        let folder = folder();
        let file = TemporaryFile(create(folder.path()).expect("a file"));
        let mut memory = Aligned::new(2 * 4096);
        for (at, byte) in memory.bytes_mut().iter_mut().enumerate() {
            *byte = (at % 251) as u8;
        }
        let written = memory.bytes().to_vec();
        file.write(4096, memory.bytes()).expect("room");
        memory.bytes_mut().fill(0);
        file.read(4096, memory.bytes_mut()).expect("it is there");
        assert_eq!(memory.bytes(), written);
        let length = |file: &TemporaryFile| file.0.metadata().expect("a file").len();
        assert_eq!(length(&file), 3 * 4096);
        file.discard_from(2 * 4096);
        assert_eq!(length(&file), 2 * 4096);
        assert!(file.read(4096, memory.bytes_mut()).is_err(), "half is gone");
        let mut memory = Aligned::new(4096);
        file.read(4096, memory.bytes_mut()).expect("half is there");
        assert_eq!(memory.bytes(), &written[..4096]);
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 0);
    }

    #[test]
    fn a_file_whose_name_somebody_has_gets_another_and_what_else_fails_is_said() {
        let folder = folder();
        let name = |attempt: u32| format!("lacuna-swap-{}-{attempt}", std::process::id());
        let path = |attempt| folder.path().join(name(attempt));
        for attempt in 0..2 {
            std::fs::write(path(attempt), "somebody's").expect("room");
        }
        let mut file = create_and_unlink(folder.path()).expect("a file");
        file.write_all(b"mine").expect("room");
        assert_eq!(folder.path().read_dir().expect("a folder").count(), 2);
        for attempt in 0..2 {
            let bytes = std::fs::read(path(attempt)).expect("a file");
            assert_eq!(bytes, b"somebody's");
        }
        for attempt in 2..16 {
            std::fs::write(path(attempt), "somebody's").expect("room");
        }
        let kind = |folder: &Path| {
            create_and_unlink(folder)
                .expect_err("no name is left")
                .kind()
        };
        assert_eq!(kind(folder.path()), io::ErrorKind::AlreadyExists);
        assert_eq!(kind(&path(99)), io::ErrorKind::NotFound);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn files_in_memory_are_told_from_others() {
        use rustix::fs::{MemfdFlags, memfd_create};
        let memory = memfd_create("lacuna-test", MemfdFlags::CLOEXEC).expect("memory");
        assert!(in_memory(&File::from(memory)).expect("it is open"));
        let other = File::open("/proc/self/status").expect("a process has one");
        assert!(!in_memory(&other).expect("it is open"));
    }

    /// Where the file system has such files, which is asked here in the same words.
    #[cfg(target_os = "linux")]
    #[test]
    fn a_file_never_has_a_name_and_goes_past_the_page_cache_where_that_can_be() {
        use std::os::fd::AsRawFd;
        use std::os::unix::fs::PermissionsExt;

        use rustix::fs::{Mode, OFlags, fcntl_getfl, open};
        use rustix::io::{FdFlags, fcntl_getfd};
        let folder = folder();
        let file = create(folder.path()).expect("a file");
        assert!(
            fcntl_getfd(&file)
                .expect("it is open")
                .contains(FdFlags::CLOEXEC)
        );
        let mode = file.metadata().expect("a file").permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "nobody else reads it");
        let flags = fcntl_getfl(&file).expect("it is open");
        assert!(flags.contains(OFlags::RDWR), "{flags:?}");
        let has = |more| {
            let flags = OFlags::TMPFILE | OFlags::RDWR | more;
            open(folder.path(), flags, Mode::RUSR).is_ok()
        };
        if has(OFlags::empty()) {
            let path = format!("/proc/self/fd/{}", file.as_raw_fd());
            let path = std::fs::read_link(path).expect("it is open");
            let path = path.to_string_lossy();
            assert!(!path.contains("lacuna-swap"), "it had a name: {path}");
        }
        assert_eq!(flags.contains(OFlags::DIRECT), has(OFlags::DIRECT));
    }
}
