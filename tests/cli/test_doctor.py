"""``holdfast doctor``: its findings on this machine, its report on a bad place, and the estimated cost of a loss."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.cli.commands import doctor
from holdfast.exit_codes import Exit
from tests.cli.command import Run
from tests.cli.test_status import Made, swept
from tests.runtime.runs import without_torch
from tests.store.worlds import pipeline, save, save_id

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")


def test_this_machine_is_fit(holdfast: Run, tmp_path: Path) -> None:
    result = holdfast("doctor", "--checkpoint", str(tmp_path / "ck"), "--json")
    assert result.returncode == 0, result.stdout
    found = {each["what"]: each for each in json.loads(result.stdout)}
    assert found["python"]["grade"] == found["torch"]["grade"] == found["process groups"]["grade"] == "good"
    assert "probes of private names passed (tested: torch 2.12" in found["torch's names"]["found"]
    assert "MB/s" in found["checkpoints"]["found"] and not (tmp_path / "ck").exists(), "nothing is made"


def test_a_place_that_cannot_be_written(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = without_torch(tmp_path)
    assert holdfast("doctor", "--checkpoint", str(tmp_path / "ck"), env=env).returncode == 0
    # not even root may write there
    for place in (tmp_path / "file" / "ck", tmp_path / "file", Path("/proc/ck")):
        result = holdfast("doctor", "--checkpoint", str(place), env=env)
        assert result.returncode == Exit.BAD_INPUT, result.stdout
        assert "NO  checkpoints" in result.stdout and "next: session(checkpoint=" in result.stdout


@pytest.mark.torch
def test_a_private_name_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from holdfast.frameworks.torch import private_api

    failed = [("torch.nn:Module._gone: there is no such name", "recovery in place of FSDP2")]
    monkeypatch.setattr(private_api, "probed", lambda: (80, failed))
    (found,) = doctor._names()
    assert (found.grade, found.found) == ("poor", f"{failed[0][0]}: without it, no {failed[0][1]}")
    assert "--on-fault restart" in found.advice


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SHARED_LEAST_BYTES", 1 << 60)
    found = doctor._shared_memory()
    assert found.grade == "bad" and "--shm-size" in found.advice


@pytest.mark.parametrize(
    ("replicas", "grade", "says"), [(2, "good", "0 steps"), (1, "good", "lies with one rank alone")]
)
def test_what_a_lost_rank_costs(tmp_path: Path, replicas: int, grade: str, says: str) -> None:
    made = Made(tmp_path, "it")
    assert doctor._losses(made.directory.journal)[0].found.startswith("costs everything")
    root = tmp_path / "ck"
    made.journal.append("session_opened", {"step": 0, "root": str(root), "generation": "1.1"})
    assert "not known before the first checkpoint" in doctor._losses(made.directory.journal)[1].found
    save(root, pipeline(2, replicas), save_id())
    _, lost = doctor._losses(made.directory.journal)
    assert lost.grade == grade and says in lost.found


def test_temporary_files_of_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data loader processes connect through sockets in this directory, and a socket's path has a maximal length."""
    place = tmp_path / ("x" * 100)
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    found = doctor._temporary()
    assert found.grade == "poor" and "TMPDIR" in found.advice
    monkeypatch.setattr(tempfile, "tempdir", "/tmp")
    assert doctor._temporary().grade == "good"


def test_what_the_same_bits_need_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in doctor.DETERMINISTIC:
        monkeypatch.delenv(name, raising=False)
    cudnn = SimpleNamespace(benchmark=False)
    cuda = SimpleNamespace(is_available=lambda: False)
    torch = SimpleNamespace(cuda=cuda, backends=SimpleNamespace(cudnn=cudnn))
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert list(doctor._same_bits()) == [], "without a GPU there is nothing to choose"
    cuda.is_available = lambda: True
    (found,) = doctor._same_bits()
    assert found.grade == "poor" and "CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring" in found.advice
    for name, value in doctor.DETERMINISTIC.items():
        monkeypatch.setenv(name, value)
    (found,) = doctor._same_bits()
    assert found.grade == "good" and "use_deterministic_algorithms(True)" in found.found
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    (found,) = doctor._same_bits()
    assert found.grade == "poor" and "export CUBLAS_WORKSPACE_CONFIG=:4096:8;" in found.advice
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    cudnn.benchmark = True
    (found,) = doctor._same_bits()
    assert found.grade == "poor" and "cuDNN chooses" in found.found and "export" not in found.advice
