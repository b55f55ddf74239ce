"""The directory of the checkpoints belongs to the job: a process that starts later may name another one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import cast

import pytest

from holdfast.core.protocol.messages import KvReply
from holdfast.errors import UsageError
from holdfast.runtime.worker.worker_client import JobSaves, WorkerClient
from holdfast.session.checkpoints.job_root import root_of_job
from tests.session.launch import run_job

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


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("kill", "ends", "flags"),
    [
        ("1:7", "replace", ()),
        ("0:7", "replace", ("--spares", "1")),
        ("0:7,1:7", "resumed at step 5 from", ()),
    ],
)
def test_later_processes_save_where_the_job_has_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str, ends: str, flags: tuple[str, ...]
) -> None:
    results = []
    for name, kills in (("undisturbed", ""), ("killed", kill)):
        (where := tmp_path / name).mkdir()
        monkeypatch.setenv("KILL", kills)
        done = run_job(where, 2, *flags, JOB)
        assert done.returncode == 0, done.stdout
        assert not kills or ends in done.stdout, done.stdout
        assert not (where / "later").exists(), done.stdout
        weights = [(where / f"ended-{rank}").read_text().split(maxsplit=1) for rank in (0, 1)]
        assert [place for place, _ in weights] == [str(where / "first")] * 2
        results.append([values for _, values in weights])
    assert results[0] == results[1]
