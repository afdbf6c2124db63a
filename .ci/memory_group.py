"""Control groups with a memory limit, of either version: what scripts beside this one run programs in.

Needs root and the memory controller.
"""

import os
import pathlib
import signal
import subprocess
import time


def number(path):
    return int(path.read_text().strip())


class Group:
    """A control group with a memory limit."""

    MOUNTS = [(pathlib.Path("/sys/fs/cgroup/memory"), 1), (pathlib.Path("/sys/fs/cgroup"), 2)]

    @classmethod
    def usable(cls):
        for mount, version in cls.MOUNTS:
            if version == 1 and (mount / "memory.limit_in_bytes").exists():
                return mount, 1
            controllers = mount / "cgroup.subtree_control"
            if version == 2 and controllers.exists():
                if "memory" not in controllers.read_text().split():
                    try:
                        controllers.write_text("+memory")
                    except OSError:
                        return None
                return mount, 2
        return None

    def __init__(self, limit):
        mount, self.version = self.usable()
        self.folder = mount / f"lacuna-{os.getpid()}"
        self.folder.mkdir()
        self.set_limit(limit)
        swap = self.folder / "memory.swap.max"
        if swap.exists():
            swap.write_text("0")

    def set_limit(self, limit):
        """Another limit. Of one below what is in use version 1 says that it is busy, and version 2 kills."""
        name = "memory.limit_in_bytes" if self.version == 1 else "memory.max"
        (self.folder / name).write_text(str(limit))

    def usage(self):
        """Bytes in use, without pages of files."""
        name = "memory.usage_in_bytes" if self.version == 1 else "memory.current"
        lines = (self.folder / "memory.stat").read_text().splitlines()
        files = [line for line in lines if line.startswith(("inactive_file ", "active_file "))]
        return number(self.folder / name) - sum(int(line.split()[1]) for line in files)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for _ in range(200):
            for process in (self.folder / "cgroup.procs").read_text().split():
                try:
                    os.kill(int(process), signal.SIGKILL)
                except ProcessLookupError:
                    pass
            try:
                self.folder.rmdir()
                return
            except OSError:
                time.sleep(0.02)
        raise RuntimeError(f"{self.folder} cannot be removed")

    def join(self):
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    def start(self, args, **options):
        return subprocess.Popen(args, preexec_fn=self.join, text=True, **options)

    def kills(self):
        """How often the kernel has killed in this group."""
        name = "memory.oom_control" if self.version == 1 else "memory.events"
        lines = (self.folder / name).read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))

    def peak(self):
        names = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
        path = self.folder / names[self.version]
        return number(path) if path.exists() else 0

    def refusals(self):
        """How often the group was at its limit."""
        if self.version == 1:
            return number(self.folder / "memory.failcnt")
        lines = (self.folder / "memory.events").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("max "))
