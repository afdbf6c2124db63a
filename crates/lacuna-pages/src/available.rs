//! How much memory the system would still give.
//!
//! Linux hands out more than it has and kills a process when that comes due, so a refusal as an
//! error value needs a limit set beforehand. This is the number to set it from.

use std::fs;
use std::path::{Path, PathBuf};

use crate::units::ByteLength;

/// Memory that can be committed before the system or this process's control group runs short, as of
/// now; `None` where neither says.
///
/// The smaller of `MemAvailable` and what the control group (version 2 or 1) and those it lies in
/// leave below their limits. Costs a few file reads.
#[must_use]
pub fn available_memory() -> Option<ByteLength> {
    let system = fs::read_to_string("/proc/meminfo")
        .ok()
        .and_then(|text| mem_available(&text));
    let groups = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let group = groups
        .lines()
        .filter_map(|line| group_room(Path::new("/sys/fs/cgroup"), line))
        .min();
    system.into_iter().chain(group).min().map(ByteLength::new)
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Room left in the group that one line of `/proc/self/cgroup` names, and in its ancestors.
fn group_room(mount: &Path, line: &str) -> Option<u64> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let (root, limit, usage) = match controllers {
        "" => (mount.to_owned(), "memory.max", "memory.current"),
        "memory" => (
            mount.join("memory"),
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
        ),
        _ => return None,
    };
    let folder: PathBuf = root.join(path.trim_start_matches('/'));
    let ancestors = folder
        .ancestors()
        .take_while(|ancestor| ancestor.starts_with(&root));
    let room = |folder: &Path| {
        let limit = number(&folder.join(limit))?;
        Some(limit.saturating_sub(number(&folder.join(usage))?))
    };
    ancestors.filter_map(room).min()
}

/// The number a control file holds; `None` for `max` or no such file.
fn number(path: &Path) -> Option<u64> {
    fs::read_to_string(path).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_available_memory_is_read_by_name() {
        let text = "MemTotal:  100 kB\nMemFree:  5 kB\nMemAvailable:      42 kB\n";
        assert_eq!(mem_available(text), Some(42 << 10));
        assert_eq!(mem_available("MemAvailable: lots"), None);
    }

    #[test]
    fn the_tightest_group_decides() {
        let mount = std::env::temp_dir().join(format!("lacuna-groups-{}", std::process::id()));
        let write = |group: &str, name: &str, text: &str| {
            let folder = mount.join(group);
            fs::create_dir_all(&folder).expect("a scratch folder");
            fs::write(folder.join(name), text).expect("room");
        };
        write("outer", "memory.max", "1000\n");
        write("outer", "memory.current", "900\n");
        write("outer/inner", "memory.max", "max\n");
        write("outer/inner", "memory.current", "10\n");
        write("memory/old", "memory.limit_in_bytes", "500");
        write("memory/old", "memory.usage_in_bytes", "600");
        assert_eq!(group_room(&mount, "0::/outer/inner"), Some(100));
        assert_eq!(
            group_room(&mount, "4:memory:/old"),
            Some(0),
            "over its limit already"
        );
        assert_eq!(group_room(&mount, "3:cpuset:/"), None);
        assert_eq!(group_room(&mount, "0::/elsewhere"), None);
        assert_eq!(group_room(&mount, "nonsense"), None);
        fs::remove_dir_all(&mount).expect("a folder of this test's own");
    }

    #[test]
    fn this_machine_has_some() {
        if cfg!(target_os = "linux") {
            assert!(available_memory().is_some_and(|bytes| bytes > ByteLength::mebibytes(1)));
        }
    }
}
