"""Periodic saves of four real processes: killed in the middle of a save, and with a disk that is too slow."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.runtime.runs import until
from tests.session.test_jobs import BIN, JOB, Result, events, start

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def processes(where: Path) -> dict[int, str]:
    """Return the command line, by pid, of every process of the runs below ``where``."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_text()
            except OSError:
                continue
            if f"HOLDFAST_RUN_DIR={where}".encode() in environ or str(where) in command:
                found[int(entry.name)] = command.replace("\0", " ")
    return found


def test_all_ranks_killed_while_a_save_is_in_flight_go_on_from_it(
    tmp_path: Path, bare: Callable[[str], Result], slow_disk: Callable[[float], None]
) -> None:
    """The only checkpoint is still being written when the last process that held the state dies."""
    slow_disk(0.5)
    got = start("holdfast", tmp_path, "--layout", "ddp", "--save-every", "4", "--die-all", "4")
    assert got.code == 0, got.output
    assert "resumed at step 4" in got.output
    assert got.digests == bare("ddp").digests
    (waited,) = events(tmp_path, "writers_awaited")
    assert len(waited["data"]["pids"]) == 4 and not waited["data"]["left"]
    assert not processes(tmp_path)


@pytest.mark.more
def test_one_rank_killed_while_a_save_is_in_flight_loses_nothing(
    tmp_path: Path, bare: Callable[[str], Result], slow_disk: Callable[[float], None]
) -> None:
    """The last-gasp checkpoint is written beside the periodic save. Both are sealed in the end."""
    slow_disk(0.3)
    got = start(
        "holdfast",
        tmp_path,
        "--layout",
        "hsdp",
        "--save-every",
        "4",
        "--die",
        "1@5",
        flags=("--on-fault", "restart"),
    )
    assert got.code == 0, got.output
    assert got.digests == bare("hsdp").digests
    (root,) = tmp_path.glob("runs/*/checkpoints")
    saved = {(v.step, v.save_id.kind) for v in Root(root).list(deep=True) if v.valid and v.save_id}
    assert saved == {(5, "last-gasp"), (8, "periodic"), (9, "final")}, "step 4 was sealed, and pruned later"
    assert all(v.valid for v in Root(root).list()), "an unfinished step 4 would not be pruned"
    assert not processes(tmp_path)


def running(where: Path, save_every: int) -> subprocess.Popen[bytes]:
    """Start a job that saves until a signal ends it."""
    command = [str(BIN / "holdfast"), "run", "--nproc-per-node", "4", JOB, "--result", str(where / "result")]
    return subprocess.Popen(
        [*command, "--steps", "100000", "--save-every", str(save_every)],
        cwd=where, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


@pytest.mark.more
def test_everything_but_the_writers_killed_leaves_a_sealed_checkpoint_and_no_process(
    tmp_path: Path, slow_disk: Callable[[float], None]
) -> None:
    """Launcher, agent, controller, zygote and workers get SIGKILL, so no process is left to wait for the writers."""
    slow_disk(0.2)
    launcher = running(tmp_path, 3)
    try:
        until(
            "a save is in flight",
            lambda: list(tmp_path.glob("runs/*/checkpoints/step-00000003*/*catalogue*")),
        )
        writers = {
            pid
            for pid, command in processes(tmp_path).items()
            if "holdfast.store.write.writer_process" in command
        }
        assert len(writers) == 4
        os.kill(launcher.pid, signal.SIGKILL)
        while others := processes(tmp_path).keys() - writers:  # a living process may replace a dead one
            for pid in others:
                with suppress(ProcessLookupError):  # the process may end because of another death
                    os.kill(pid, signal.SIGKILL)
    finally:
        launcher.kill()
        launcher.wait()
    until("no process is left", lambda: not processes(tmp_path))
    (root,) = tmp_path.glob("runs/*/checkpoints")
    newest = Root(root).newest_valid(deep=True).require()
    assert newest.step == 3 and newest.sealed
    (pages,) = tmp_path.glob("runs/*/pages")
    shutil.rmtree(pages.resolve())  # the agent would remove it, but it was also killed


def test_a_user_who_stops_the_job_is_not_kept_waiting_by_writers(
    tmp_path: Path, slow_disk: Callable[[float], None]
) -> None:
    """The second Ctrl-C also ends the writers, however slow the disk is."""
    slow_disk(30.0)
    launcher = running(tmp_path, 3)
    try:
        until("a save is in flight", lambda: list(tmp_path.glob("runs/*/checkpoints/step-*")))
        launcher.send_signal(signal.SIGINT)
        until("the first one is heard", lambda: events(tmp_path, "exit_requested"))
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(25) == Exit.INTERRUPTED
    finally:
        launcher.kill()
        launcher.wait()
    assert not processes(tmp_path)
