"""The directory of the checkpoints belongs to the job: a process that starts later may name another one."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import cast

import pytest

from holdfast.core.protocol.messages import KvReply
from holdfast.errors import UsageError
from holdfast.exit_codes import Exit
from holdfast.runtime.worker.torchrun_root import note_root, root_before
from holdfast.runtime.worker.worker_client import JobSaves, WorkerClient
from holdfast.session.checkpoints.job_root import root_of_job
from tests.session.launch import run_job, run_torchrun

JOB = str(Path(__file__).with_name("renamed_job.py"))


class Keys:
    """The key-value store of an agent, as one rank sees it; ``root``: where the job has saved before."""

    def __init__(self, stored: dict[str, bytes], rank: int, root: str = "") -> None:
        self.stored, self.rank, self.saves = stored, rank, JobSaves(root, "")

    def kv(self, op: str, keys: tuple[str, ...], value: bytes) -> KvReply:
        """Publish ``value``, unless there is one."""
        assert op == "compare_set"
        return KvReply(request_id=0, value=self.stored.setdefault(keys[0], value))


def taken(
    stored: dict[str, bytes], rank: int, root: Path | None, *, before: str = "", later: bool
) -> Path | None:
    """Return the place of one rank that names ``root``."""
    found = root_of_job(cast(WorkerClient, Keys(stored, rank, before)), root, later=later)
    assert found is None or isinstance(found, Path)
    return found


def test_ranks_of_one_start_that_save_in_different_places_are_refused() -> None:
    stored: dict[str, bytes] = {}
    for rank in (0, 1):
        assert taken(stored, rank, Path("/a/device0"), later=False) == Path("/a/device0")
    with pytest.raises(
        UsageError, match=r"/a/device2, rank 0 in /a/device0: no checkpoint would be complete"
    ):
        taken(stored, 2, Path("/a/device2"), later=False)
    with pytest.raises(UsageError, match="rank 2 saves in no place"):
        taken(stored, 2, None, later=False)


def test_two_spellings_of_one_directory_are_equal(tmp_path: Path) -> None:
    stored: dict[str, bytes] = {}
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for rank, name in enumerate(("real", "link")):
        assert taken(stored, rank, tmp_path / name, later=False) == tmp_path / name


@pytest.mark.parametrize("names", ["other", None])
def test_a_process_that_starts_later_takes_the_place_of_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, names: str | None
) -> None:
    stored: dict[str, bytes] = {}
    other = None if names is None else tmp_path / names
    taken(stored, 0, tmp_path, later=False)
    assert taken(stored, 1, other, later=True) == tmp_path
    said = f"rank 1 was started again and names {other or 'no place for checkpoints'}; it saves in {tmp_path}"
    assert said in caplog.text
    # After a restart of all ranks no rank has published yet.
    assert taken({}, 1, other, before=str(tmp_path), later=True) == tmp_path
    assert caplog.text.count(said) == 2


def test_a_host_may_mount_the_place_at_another_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored: dict[str, bytes] = {}
    taken(stored, 0, tmp_path / "mount-a", later=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    for later in (False, True):
        assert taken(stored, 1, tmp_path / "mount-b", later=later) == tmp_path / "mount-b"
    (tmp_path / "mount-a").mkdir()
    assert taken(stored, 1, tmp_path / "mount-b", later=True) == tmp_path / "mount-a"


def weights_of(done: subprocess.CompletedProcess[str], where: Path) -> list[str]:
    """Return the weights of both ranks of a job that has ended well, and that has saved in ``where / "first"`` only."""
    assert done.returncode == 0, done.stdout
    assert not (where / "later").exists(), done.stdout
    ended = [(where / f"ended-{rank}").read_text().split(maxsplit=1) for rank in (0, 1)]
    assert [place for place, _ in ended] == [str(where / "first")] * 2
    return [weights for _, weights in ended]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the weights of the job without a fault."""
    where = tmp_path_factory.mktemp("undisturbed")
    return weights_of(run_job(where, 2, JOB), where)


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "ends", "flags"),
    [
        ("1:7", "replace", ()),
        ("0:7", "replace", ("--spares", "1")),
        ("all", "resumed at step 5 from", ()),
    ],
)
def test_later_processes_save_where_the_job_has_saved(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: list[str],
    kill: str,
    ends: str,
    flags: tuple[str, ...],
) -> None:
    monkeypatch.setenv("KILL_ALL" if kill == "all" else "KILL", kill)
    done = run_job(tmp_path, 2, *flags, JOB)
    assert ends in done.stdout, done.stdout
    assert weights_of(done, tmp_path) == undisturbed


@pytest.mark.torch
@pytest.mark.processes
def test_the_next_start_of_a_run_continues_where_it_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
) -> None:
    """A scheduler repeats the command with the same run id.

    Other arguments, ``--root`` or another run id begin a new job.
    """
    monkeypatch.setenv("STOP", "8")
    done = run_job(tmp_path, 2, "--run-id", "it", JOB)
    assert done.returncode == Exit.REQUEUE, done.stdout
    assert done.stdout.strip().endswith(f"it continues at step 9 from {tmp_path / 'first'}"), done.stdout
    done = run_job(tmp_path, 2, "--run-id", "it", JOB)
    assert "resumed at step 9 from" in done.stdout, done.stdout
    assert weights_of(done, tmp_path) == undisturbed
    for flags in (
        ("--run-id", "it", JOB, "another"),
        ("--run-id", "it", "--root", "own", JOB),
        ("--run-id", "that", JOB),
    ):
        shutil.rmtree(tmp_path / "later", ignore_errors=True)
        assert "resumed at step" not in run_job(tmp_path, 2, *flags).stdout


def test_a_place_with_checkpoints_that_the_script_names_in_a_new_start_is_taken(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    named, before = tmp_path / "named", str(tmp_path / "before")
    assert taken({}, 0, named, before=before, later=False) == tmp_path / "before"
    (named / "step-00000005.it.g1.1.a0").mkdir(parents=True)
    assert taken({}, 0, named, before=before, later=False) == named


@pytest.mark.torch
@pytest.mark.processes
def test_the_next_start_of_torchrun_continues_in_the_directory_of_the_start_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: list[str]
) -> None:
    monkeypatch.setenv("KILL", "1:7")
    done = run_torchrun(tmp_path, 2, "--max-restarts", "1", JOB)
    assert "resumed at step 7 from" in done.stdout, done.stdout
    assert weights_of(done, tmp_path) == undisturbed


def test_the_place_of_a_torchrun_is_read_by_its_next_start_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert root_before() == ""  # no start before
    note_root("/a")  # not started by torchrun
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    (directory,) = tmp_path.iterdir()
    assert not list(directory.iterdir())
    (directory / "torchrun-1-1").write_text("/of an ended process with the same pid")
    note_root("/b")
    assert [path.read_text() for path in directory.iterdir()] == ["/b"]
    assert root_before() == "/b"
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    assert root_before() == ""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(os, "getppid", os.getpid)
    assert root_before() == ""  # of another torchrun
