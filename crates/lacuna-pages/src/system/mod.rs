//! What the system says about memory: what it would still give, how hard it is pressed, and what this
//! process holds.
//!
//! Linux hands out more than it has and kills a process when that comes due, so a refusal as an
//! error value needs a limit set beforehand. These are the numbers to set it from. Each reading costs
//! a few small files, some 100 us; elsewhere than on Linux nothing is known.

mod groups;
mod process;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};

use crate::units::ByteLength;
pub use process::ProcessMemory;

/// The system's memory as this process may use it, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SystemMemory {
    /// What can be committed before the system or this process's control group runs short: the
    /// smaller of `MemAvailable` and what the group and those it lies in leave below their limits.
    /// Memory that the system would take back for it counts, which is above all that of files, mapped
    /// weights included. `None` where nobody says.
    pub available: Option<ByteLength>,
    /// What processes may have in all: the machine's memory, or the smallest limit of those groups.
    pub limit: Option<ByteLength>,
    /// The part of the last ten seconds in which every task of the control group, or of the machine
    /// where groups do not say, waited for memory, in percent.
    pub stalled_percent: f32,
}

impl SystemMemory {
    /// As of now.
    #[must_use]
    pub fn read() -> Self {
        Self::read_under(Path::new("/"))
    }

    /// The same, of the files below `root`.
    fn read_under(root: &Path) -> Self {
        let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
        let machine = text("proc/meminfo");
        let groups = groups::of_this_process(root);
        let rooms = groups.iter().filter_map(groups::Group::room);
        let limits = groups.iter().filter_map(groups::Group::limit);
        let pressure = groups.iter().find_map(groups::Group::pressure);
        let pressure = pressure.unwrap_or_else(|| text("proc/pressure/memory"));
        Self {
            available: smallest(kibibytes(&machine, "MemAvailable:"), rooms),
            limit: smallest(kibibytes(&machine, "MemTotal:"), limits),
            stalled_percent: full_percent(&pressure).unwrap_or(0.0),
        }
    }

    /// What is best left untouched: an eighth of [`SystemMemory::limit`], at least 8 and at most 64
    /// MiB. The kernel keeps page tables, sockets and the program's own code there, and whatever was
    /// taken since the reading.
    #[must_use]
    pub fn reserve(&self) -> ByteLength {
        let eighth = self.limit.map_or(u64::MAX, |limit| limit.get() / 8);
        ByteLength::new(eighth.clamp(Self::LEAST_RESERVE, Self::MOST_RESERVE))
    }

    const LEAST_RESERVE: u64 = 8 << 20;
    const MOST_RESERVE: u64 = 64 << 20;

    /// What is available beyond the reserve.
    #[must_use]
    pub fn spare(&self) -> Option<ByteLength> {
        let available = self.available?;
        Some(available.saturating_sub(self.reserve()))
    }
}

/// [`SystemMemory::available`] as of now.
#[must_use]
pub fn available_memory() -> Option<ByteLength> {
    SystemMemory::read().available
}

fn smallest(one: Option<u64>, others: impl Iterator<Item = u64>) -> Option<ByteLength> {
    one.into_iter().chain(others).min().map(ByteLength::new)
}

/// The value of a line such as `MemTotal:  100 kB`, in bytes.
fn kibibytes(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kibibytes.checked_mul(1024)
}

/// Of a pressure file, the share of the last ten seconds in which every task waited.
fn full_percent(text: &str) -> Option<f32> {
    let line = text.lines().find_map(|line| line.strip_prefix("full "))?;
    let average = line
        .split(' ')
        .find_map(|field| field.strip_prefix("avg10="))?;
    average.parse().ok()
}

/// `path`, which is absolute, below `root`.
fn under(root: &Path, path: &Path) -> PathBuf {
    root.join(path.strip_prefix("/").unwrap_or(path))
}
