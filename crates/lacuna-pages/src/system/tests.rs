//! Readings of file trees that look like a machine's or a container's.

use std::fs;
use std::path::Path;

use proptest::prelude::*;

use super::*;

/// A machine of files.
struct Tree(tempfile::TempDir);

const MIB: u64 = 1 << 20;

/// What version 1 says of a group without a limit.
const UNLIMITED: u64 = 9_223_372_036_854_771_712;

impl Tree {
    /// With 1,000 MiB of memory, of which 900 are available.
    fn new(mountinfo: &str, cgroup: &str) -> Self {
        let tree = Self(tempfile::tempdir().expect("a folder"));
        tree.write(
            "proc/meminfo",
            "MemTotal:  1024000 kB\nMemFree: 5 kB\nMemAvailable:   921600 kB\n",
        );
        tree.write("proc/self/mountinfo", mountinfo);
        tree.write("proc/self/cgroup", cgroup);
        tree
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a folder")).expect("room");
        fs::write(path, text).expect("room");
    }

    /// A group of version 2 with 10 MiB of file pages and 1 MiB of slabs that can be taken back.
    fn two(&self, folder: &str, max: &str, current: u64) {
        let name = |name: &str| format!("sys/fs/cgroup/{folder}/{name}");
        self.write(&name("memory.max"), max);
        self.write(&name("memory.high"), "max\n");
        self.write(&name("memory.current"), &format!("{current}\n"));
        let stat = format!(
            "anon 5\nfile 9\nshmem {}\ninactive_file {}\nactive_file {}\nunevictable {}\nslab_reclaimable {}\n",
            500 * MIB,
            6 * MIB,
            4 * MIB,
            700 * MIB,
            MIB
        );
        self.write(&name("memory.stat"), &stat);
    }

    /// A group of version 1 with 300 MiB of file pages, of which 290 are of groups within it.
    fn one(&self, folder: &str, limit: u64, hierarchical: u64, usage: u64) {
        let name = |name: &str| format!("sys/fs/cgroup/memory/{folder}/{name}");
        self.write(&name("memory.limit_in_bytes"), &format!("{limit}\n"));
        self.write(&name("memory.usage_in_bytes"), &format!("{usage}\n"));
        let stat = format!(
            "cache {}\ninactive_file {}\nactive_file 0\nhierarchical_memory_limit {hierarchical}\n\
             total_shmem {}\ntotal_inactive_file {}\ntotal_active_file {}\n",
            800 * MIB,
            10 * MIB,
            500 * MIB,
            200 * MIB,
            100 * MIB
        );
        self.write(&name("memory.stat"), &stat);
    }

    fn read(&self) -> SystemMemory {
        SystemMemory::read_under(self.0.path())
    }

    #[track_caller]
    fn assert(&self, available: u64, limit: u64) {
        let read = self.read();
        let bytes = |length: Option<ByteLength>| length.map(|length| length.get() / MIB);
        assert_eq!(
            (bytes(read.available), bytes(read.limit)),
            (Some(available), Some(limit))
        );
    }
}

const TWO: &str =
    "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
const ONE: &str = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                   34 31 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n\
                   35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n";

#[test]
fn without_groups_the_machine_decides() {
    Tree::new("", "").assert(900, 1000);
    let nowhere = SystemMemory::read_under(Path::new("/no such folder"));
    assert_eq!(nowhere, SystemMemory::default());
}

#[test]
fn pages_of_files_count_as_available_since_the_system_takes_them_back() {
    // A group full of what was read from files once: the story of a server that did not start.
    let tree = Tree::new(ONE, "4:memory:/job\n3:cpuset:/job\n0::/job\n");
    tree.one("", UNLIMITED, UNLIMITED, 700 * MIB);
    tree.one("job", 400 * MIB, 400 * MIB, 399 * MIB);
    tree.assert(301, 400);
}

#[test]
fn shared_memory_and_locked_pages_are_not_available() {
    let tree = Tree::new(TWO, "0::/job\n");
    tree.two("job", &format!("{}\n", 800 * MIB), 800 * MIB);
    tree.assert(11, 800);
}

#[test]
fn the_tightest_group_decides_its_own_or_one_around_it() {
    let tree = Tree::new(TWO, "0::/outer/inner\n");
    tree.two("outer", "838860800\n", 750 * MIB);
    tree.two("outer/inner", "max\n", 300 * MIB);
    tree.assert(61, 800);
    tree.two("outer/inner", "314572800", 250 * MIB);
    tree.assert(61, 300);
    tree.two("outer/inner", "314572800", 350 * MIB);
    tree.assert(0, 300);
}

#[test]
fn above_its_high_mark_a_group_is_slowed_down_so_that_is_a_limit_too() {
    let tree = Tree::new(TWO, "0::/job\n");
    tree.two("job", "838860800\n", 150 * MIB);
    tree.write("sys/fs/cgroup/job/memory.high", "209715200\n");
    tree.assert(61, 200);
}

#[test]
fn version_1_tells_the_limit_of_groups_that_cannot_be_seen() {
    let tree = Tree::new(ONE, "4:memory:/job\n");
    tree.one("job", UNLIMITED, 500 * MIB, 400 * MIB);
    tree.assert(400, 500);
}

#[test]
fn version_1_says_by_a_number_that_there_is_no_limit() {
    for (limit, expected) in [(UNLIMITED, None), (16 << 40, Some(16 << 40))] {
        let tree = Tree::new(ONE, "4:memory:/job\n");
        tree.write("proc/meminfo", "");
        tree.one("job", limit, limit, MIB);
        assert_eq!(tree.read().limit.map(ByteLength::get), expected);
    }
}

#[test]
fn hierarchies_of_other_controllers_say_nothing_of_memory() {
    let tree = Tree::new(ONE, "3:cpuset:/other\n4:memory:/job\n");
    tree.write("sys/fs/cgroup/cpuset/job/cpuset.cpus", "0\n");
    tree.one("other", 100 * MIB, 100 * MIB, 50 * MIB);
    tree.one("job", 400 * MIB, 400 * MIB, 350 * MIB);
    tree.assert(350, 400);
}

#[test]
fn a_container_sees_its_group_where_it_is_mounted_whatever_its_path_is() {
    // The path is the host's and the mount begins at the container's group.
    let own = "35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n";
    let tree = Tree::new(own, "4:memory:/docker/abc\n");
    tree.one("", 400 * MIB, 400 * MIB, 350 * MIB);
    tree.assert(350, 400);
    // A group that the container has made itself.
    let tree = Tree::new(own, "4:memory:/docker/abc/worker\n");
    tree.one("", 400 * MIB, 400 * MIB, 350 * MIB);
    tree.one("worker", 200 * MIB, 200 * MIB, 350 * MIB);
    tree.assert(150, 200);
    // The mount begins elsewhere, as when the container has moved; or the path climbs out of it.
    for path in ["/docker/new", "/../other", "/docker/abc/../new"] {
        let tree = Tree::new(own, &format!("4:memory:{path}\n"));
        tree.one("", 400 * MIB, 400 * MIB, 350 * MIB);
        tree.assert(350, 400);
    }
    // A namespace: the path is relative to what is mounted.
    let tree = Tree::new(TWO, "0::/\n");
    tree.two("", "419430400\n", 350 * MIB);
    tree.assert(61, 400);
}

#[test]
fn controllers_can_share_a_hierarchy_and_mount_points_can_have_blanks() {
    let mount =
        "35 31 0:32 / /sys/fs/my\\040groups rw master:1 shared:2 - cgroup cgroup rw,cpu,memory\n";
    let tree = Tree::new(mount, "4:cpu,memory:/job\n");
    tree.write("sys/fs/my groups/job/memory.limit_in_bytes", "419430400");
    tree.write("sys/fs/my groups/job/memory.usage_in_bytes", "104857600");
    tree.assert(300, 400);
}

#[test]
fn the_group_says_itself_how_long_it_waited_and_else_the_machine_does() {
    let machine = "some avg10=12.50 avg60=1.00 avg300=0.00 total=5\nfull avg10=3.25 avg60=0.00 avg300=0.00 total=2\n";
    let tree = Tree::new(TWO, "0::/job\n");
    assert_eq!(tree.read().stalled_percent, 0.0);
    tree.write("proc/pressure/memory", machine);
    assert_eq!(tree.read().stalled_percent, 3.25);
    tree.write(
        "sys/fs/cgroup/memory.pressure",
        "full avg10=9.00 avg60=0.00\n",
    );
    tree.write(
        "sys/fs/cgroup/job/memory.pressure",
        "full avg10=0.50 avg60=0.00\n",
    );
    assert_eq!(tree.read().stalled_percent, 0.5);
    assert_eq!(full_percent("some avg10=1.00"), None);
    assert_eq!(full_percent("full avg10=lots"), None);
}

#[test]
fn the_reserve_follows_the_limit() {
    let reserve = |limit: Option<u64>| {
        let memory = SystemMemory {
            limit: limit.map(ByteLength::mebibytes),
            available: Some(ByteLength::mebibytes(30)),
            ..SystemMemory::default()
        };
        (
            memory.reserve().get() / MIB,
            memory.spare().expect("known").get() / MIB,
        )
    };
    assert_eq!(reserve(Some(16)), (8, 22));
    assert_eq!(reserve(Some(160)), (20, 10));
    assert_eq!(reserve(Some(1 << 20)), (64, 0));
    assert_eq!(reserve(None), (64, 0));
}

#[test]
fn the_process_is_read_by_name() {
    let text = "Name:\tlacuna\nVmRSS:\t 99 kB\nRssAnon:\t      40 kB\nRssFile:\t 50 kB\nRssShmem:\t 9 kB\n";
    let expected = ProcessMemory {
        anonymous: ByteLength::kibibytes(40),
        shared_memory: ByteLength::kibibytes(9),
        file: ByteLength::kibibytes(50),
    };
    assert_eq!(ProcessMemory::parse(text), Some(expected));
    assert_eq!(ProcessMemory::parse("RssAnon: lots"), None);
}

#[test]
fn this_machine_has_some() {
    if cfg!(target_os = "linux") {
        assert!(available_memory().is_some_and(|bytes| bytes > ByteLength::mebibytes(1)));
        let held = ProcessMemory::read().expect("this process's own files");
        assert!(held.anonymous > ByteLength::ZERO && held.file > ByteLength::ZERO);
    }
}

proptest! {
    #[test]
    fn files_of_any_kind_are_read_without_a_panic(
        mountinfo in "[ -~\n]{0,200}",
        cgroup in "([0-9]:(memory|cpu,memory|):/?[a-z./]{0,20}\n){0,3}",
        stat in "(total_inactive_file|inactive_file|x) -?[0-9]{0,25}\n",
    ) {
        let tree = Tree::new(&format!("{ONE}{TWO}{mountinfo}"), &cgroup);
        for folder in ["memory/", ""] {
            tree.write(&format!("sys/fs/cgroup/{folder}memory.stat"), &stat);
            tree.write(&format!("sys/fs/cgroup/{folder}memory.max"), &stat);
        }
        let read = tree.read();
        prop_assert!(read.available <= Some(ByteLength::mebibytes(900)));
    }
}
