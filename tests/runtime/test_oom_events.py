"""The kernel's count of processes that it killed for lack of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.runtime.node.oom_events import OomKills, memory_events


@pytest.mark.parametrize(
    ("cgroups", "file"),
    [
        ("0::/job/step\n", "job/step/memory.events"),
        ("0::/outside/of/the/container\n", "memory.events"),
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control"),
    ],
)
def test_a_rise_is_told_once(tmp_path: Path, cgroups: str, file: str) -> None:
    (tmp_path / "cgroup").write_text(cgroups)
    path = tmp_path / "fs" / file
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 3\noom_kill 3\n")
    found = memory_events(tmp_path / "cgroup", tmp_path / "fs")
    assert found == path
    kills = OomKills(found)
    assert kills.rose_by() == 0
    path.write_text("low 0\noom 4\noom_kill 4\n")
    assert (kills.rose_by(), kills.rose_by()) == (1, 0)


def test_without_such_a_file_nothing_is_told(tmp_path: Path) -> None:
    assert memory_events(tmp_path / "cgroup", tmp_path) is None
    assert OomKills(None).rose_by() == 0
