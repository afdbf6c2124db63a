//! The memory control groups that this process lies in, versions 1 and 2.
//!
//! `/proc/self/cgroup` has the group's path in its hierarchy, and `/proc/self/mountinfo` which part of
//! the hierarchy is mounted where. In a container the two need not match: the path may be the host's,
//! or relative to a namespace, and the mount may begin at the container's own group.

use std::fs;
use std::path::{Component, Path, PathBuf};

use super::under;

/// Which files a group has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    /// A hierarchy for the memory controller.
    One,
    /// One hierarchy for all controllers.
    Two,
}

/// One group.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Group {
    version: Version,
    folder: PathBuf,
}

/// A mounted part of a hierarchy.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    version: Version,
    /// The group that is mounted.
    root: PathBuf,
    /// Where.
    point: PathBuf,
}

/// The group of this process and all those it lies in that can be seen, the innermost first.
pub(super) fn of_this_process(root: &Path) -> Vec<Group> {
    let text = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let mounts: Vec<Mount> = (text("proc/self/mountinfo").lines())
        .filter_map(Mount::parse)
        .collect();
    let cgroup = text("proc/self/cgroup");
    let places = cgroup.lines().filter_map(membership);
    let groups = places.flat_map(|(version, path)| groups(root, &mounts, version, path));
    groups.collect()
}

/// What a line of `/proc/self/cgroup` says, if it is about memory.
fn membership(line: &str) -> Option<(Version, &Path)> {
    let mut fields = line.splitn(3, ':').skip(1);
    let (controllers, path) = (fields.next()?, fields.next()?);
    let version = match controllers {
        "" => Version::Two,
        _ if controllers.split(',').any(|name| name == "memory") => Version::One,
        _ => return None,
    };
    Some((version, Path::new(path)))
}

/// The group at `path` of a hierarchy and those it lies in, as far as they are mounted.
fn groups(root: &Path, mounts: &[Mount], version: Version, path: &Path) -> Vec<Group> {
    let mounts = || mounts.iter().filter(|mount| mount.version == version);
    let found = mounts().find_map(|mount| {
        let folder = mount.folder(root, path)?;
        Some((mount, folder))
    });
    // A path that is not below any mount is one of another namespace; what is mounted then is this
    // process's group or one it lies in.
    let first = || {
        mounts()
            .next()
            .map(|mount| (mount, under(root, &mount.point)))
    };
    let Some((mount, folder)) = found.or_else(first) else {
        return Vec::new();
    };
    let top = under(root, &mount.point);
    let folders = folder.ancestors().take_while(|one| one.starts_with(&top));
    let group = |folder: &Path| Group {
        version,
        folder: folder.to_owned(),
    };
    folders.map(group).collect()
}

impl Mount {
    /// A line of `mountinfo`: number, parent, device, root, mount point, options, any number of tags,
    /// `-`, kind, source, options of the file system.
    fn parse(line: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut fields = mount.split(' ').skip(3);
        let (root, point) = (unescape(fields.next()?), unescape(fields.next()?));
        let mut system = system.split(' ');
        let (kind, options) = (system.next()?, system.nth(1)?);
        let version = match kind {
            "cgroup2" => Version::Two,
            "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
            _ => return None,
        };
        Some(Self {
            version,
            root: root.into(),
            point: point.into(),
        })
    }

    /// Where the group at `path` of the hierarchy can be seen, if below this mount.
    fn folder(&self, root: &Path, path: &Path) -> Option<PathBuf> {
        let inside = path.strip_prefix(&self.root).ok()?;
        let outside = |part| part == Component::ParentDir;
        if inside.components().any(outside) {
            return None;
        }
        let folder = under(root, &self.point).join(inside);
        folder.is_dir().then_some(folder)
    }
}

/// A path of `mountinfo`, in which blanks and the like are octal.
fn unescape(path: &str) -> String {
    let escapes = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n")];
    let replaced = escapes
        .into_iter()
        .fold(path.to_owned(), |path, (code, text)| {
            path.replace(code, text)
        });
    replaced.replace("\\134", "\\")
}

impl Group {
    /// The most that the group may hold, those in it included; `None` where there is no limit.
    ///
    /// Version 1 says as much as it knows of groups that cannot be seen. Version 2 slows a group down
    /// above `high`, which is no place to be either.
    pub(super) fn limit(&self) -> Option<u64> {
        let limits = match self.version {
            Version::One => [
                self.number("memory.limit_in_bytes"),
                self.stat(&["hierarchical_memory_limit"]),
            ],
            Version::Two => [self.number("memory.max"), self.number("memory.high")],
        };
        // Version 1 has the largest number of whole pages for "no limit".
        let limited = |&limit: &u64| limit < i64::MAX as u64 - (1 << 20);
        limits.into_iter().flatten().filter(limited).min()
    }

    /// What the group leaves below its limit when the system takes back what it can.
    pub(super) fn room(&self) -> Option<u64> {
        let usage = match self.version {
            Version::One => self.number("memory.usage_in_bytes"),
            Version::Two => self.number("memory.current"),
        };
        let held = usage?.saturating_sub(self.reclaimable());
        Some(self.limit()?.saturating_sub(held))
    }

    /// Pages of files, which can be read again, and what the kernel would give up of its own. Shared
    /// memory and locked pages are in other lists of the kernel and so do not count.
    fn reclaimable(&self) -> u64 {
        let names: &[&str] = match self.version {
            Version::One => &["total_inactive_file", "total_active_file"],
            Version::Two => &["inactive_file", "active_file", "slab_reclaimable"],
        };
        self.stat(names).unwrap_or(0)
    }

    /// The text of the group's own pressure file.
    pub(super) fn pressure(&self) -> Option<String> {
        fs::read_to_string(self.folder.join("memory.pressure")).ok()
    }

    /// The number a control file holds; `None` for `max` or no such file.
    fn number(&self, name: &str) -> Option<u64> {
        let text = fs::read_to_string(self.folder.join(name)).ok()?;
        text.trim().parse().ok()
    }

    /// The sum of these lines of `memory.stat`; `None` when there is none of them.
    fn stat(&self, names: &[&str]) -> Option<u64> {
        let text = fs::read_to_string(self.folder.join("memory.stat")).ok()?;
        let values = text.lines().filter_map(|line| {
            let (name, value) = line.split_once(' ')?;
            names
                .contains(&name)
                .then(|| value.trim().parse::<u64>().ok())?
        });
        values.reduce(u64::saturating_add)
    }
}
