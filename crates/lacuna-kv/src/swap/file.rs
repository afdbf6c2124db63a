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
