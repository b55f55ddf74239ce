"""Periodic saves of four real processes: killed in the middle of one, and with a disk that cannot follow."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.store.root import Root
from tests.session.test_jobs import Result, events, start

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def left_behind(where: Path) -> list[str]:
    """Command lines of processes that name ``where`` in their environment or arguments."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"HOLDFAST_RUN_DIR={where}".encode() in text:
                found.append((entry / "cmdline").read_text())
    return found


def test_all_ranks_killed_while_a_save_is_in_flight_go_on_from_it(
    tmp_path: Path, bare: Callable[[str], Result], slow_disk: Callable[[float], None]
) -> None:
    """The only checkpoint there is has not been written yet when the last process that held the state dies."""
    slow_disk(0.5)
    got = start("holdfast", tmp_path, "--layout", "ddp", "--save-every", "4", "--die-all", "4")
    assert got.code == 0, got.output
    assert "resumed at step 4" in got.output
    assert got.digests == bare("ddp").digests
    (waited,) = events(tmp_path, "writers_awaited")
    assert len(waited["data"]["pids"]) == 4 and not waited["data"]["left"]
    assert not left_behind(tmp_path)


def test_one_rank_killed_while_a_save_is_in_flight_loses_nothing(
    tmp_path: Path, bare: Callable[[str], Result], slow_disk: Callable[[float], None]
) -> None:
    """The last-gasp is written beside the periodic save; both are sealed in the end."""
    slow_disk(0.3)
    got = start("holdfast", tmp_path, "--layout", "hsdp", "--save-every", "4", "--die", "1@5")
    assert got.code == 0, got.output
    assert got.digests == bare("hsdp").digests
    (root,) = tmp_path.glob("runs/*/checkpoints")
    saved = {(v.step, v.save_id.kind) for v in Root(root).list(deep=True) if v.valid and v.save_id}
    assert saved == {(5, "last-gasp"), (8, "periodic"), (9, "final")}, "step 4 was sealed, and pruned later"
    assert all(v.valid for v in Root(root).list()), "an unfinished step 4 would not be pruned"
    assert not left_behind(tmp_path)
