"""The kernel's count of processes killed for lack of memory, in the control group of this process."""

from __future__ import annotations

from pathlib import Path


def memory_events(
    cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Path | None:
    """Return the file with the line ``oom_kill N`` for this process's control group (version 1 or 2); None without one.

    ``root`` is the directory where the control groups are mounted. In a container, the kernel may report the path of
    the group on the host. The group at ``root`` itself is then the group of the container.
    """
    try:
        lines = cgroups.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, place = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, name = (root, "memory.events") if not controllers else (root / "memory", "memory.oom_control")
        for directory in (base / place.lstrip("/"), base):
            if (directory / name).is_file():
                return directory / name
    return None


class OomKills:
    """The number of processes of a control group that were killed because the group or the host had no memory left.

    Args:
        file: the file that :func:`memory_events` has found. With None the number stays 0.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen = self._read()

    def rose_by(self) -> int:
        """Return the increase of the number since the last call, or since this object was made."""
        before, self._seen = self._seen, self._read()
        return max(0, self._seen - before)

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:  # the group is gone: nothing is known
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
