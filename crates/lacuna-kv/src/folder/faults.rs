//! A disk that refuses, fills, half-writes and stalls, as it is told: for tests of what stands on a folder.

use std::fs::File;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// What a disk does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Trouble {
    /// What it is asked.
    #[default]
    Nothing,
    /// Nothing: every call fails.
    Refuses,
    /// It has no room left.
    Full,
    /// It fails in the middle of what is written.
    HalfWrites,
    /// Nothing for now: calls wait until it does something else.
    Stalls,
}

/// Tells a disk what to do. Clones tell the same disk.
#[derive(Clone, Debug, Default)]
pub struct DiskFaults(Arc<(Mutex<Trouble>, Condvar)>);

/// What a folder asks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Read,
    /// Whatever changes something.
    Write,
}

impl DiskFaults {
    fn trouble(&self) -> MutexGuard<'_, Trouble> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the disk does from now on.
    pub fn set(&self, trouble: Trouble) {
        *self.trouble() = trouble;
        self.0.1.notify_all();
    }

    /// What it does once it does something.
    fn answer(&self) -> Trouble {
        let stalls = |trouble: &mut Trouble| *trouble == Trouble::Stalls;
        let waited = self.0.1.wait_while(self.trouble(), stalls);
        *waited.unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn check(&self, call: Call) -> io::Result<()> {
        match (self.answer(), call) {
            (Trouble::Refuses, _) => Err(io::Error::other("injected")),
            (Trouble::Full, Call::Write) => Err(io::ErrorKind::StorageFull.into()),
            _ => Ok(()),
        }
    }

    pub(crate) fn write_all(&self, mut file: &File, bytes: &[u8]) -> io::Result<()> {
        self.check(Call::Write)?;
        if self.answer() == Trouble::HalfWrites {
            file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(io::Error::other("injected"));
        }
        file.write_all(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn a_disk_that_fails_in_the_middle_has_half_of_what_was_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("file");
        let disk = DiskFaults::default();
        let held = |trouble| {
            disk.set(trouble);
            let file = File::create(&path).expect("a file");
            let written = disk.write_all(&file, b"what was said").is_ok();
            let mut bytes = Vec::new();
            let file = File::open(&path).and_then(|mut file| file.read_to_end(&mut bytes));
            file.expect("a file");
            (written, bytes)
        };
        assert_eq!(held(Trouble::Nothing), (true, b"what was said".to_vec()));
        assert_eq!(held(Trouble::HalfWrites), (false, b"what w".to_vec()));
        assert_eq!(held(Trouble::Full), (false, Vec::new()));
        assert_eq!(held(Trouble::Refuses), (false, Vec::new()));
    }
}
