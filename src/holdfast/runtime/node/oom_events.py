"""What the kernel has counted for the control group of this process: how often memory ran out."""

from __future__ import annotations

from pathlib import Path


def memory_events(
    cgroups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Path | None:
    """The file with the line ``oom_kill N`` of this process's control group, of version 2 or 1; None: there is none.

    In a container the group may be shown by its place outside; the one that is mounted is its own then.
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
    """Processes of a control group that were killed because its memory, or the host's, ran out.

    Args:
        file: as :func:`memory_events` finds it.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._seen = self._read()

    def rose_by(self) -> int:
        """Since the last call."""
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
