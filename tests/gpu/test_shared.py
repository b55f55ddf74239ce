"""Jobs of several ranks on one GPU.

A lost rank is replaced bit for bit, with CUDA graphs as well. Spares and forks do not use the device.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from holdfast import event_log
from tests.runtime.runs import until
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("shared_job.py"))
GRAPH_JOB = str(Path(__file__).with_name("graph_job.py"))
RANKS = 4
AT = 5


class Done:
    """A job that has ended well, or runs in the background."""

    def __init__(self, where: Path, *arguments: str) -> None:
        self.where = where
        self.result = where / "result"
        self.result.mkdir(parents=True)
        self._arguments = arguments
        self.output = ""

    def run(self, *options: str) -> Done:
        """Run the job to its end."""
        done: subprocess.CompletedProcess[str] = run_job(
            self.where, RANKS, *options, JOB, "--result", str(self.result), *self._arguments
        )
        assert done.returncode == 0, done.stdout
        self.output = done.stdout
        return self

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of a kind."""
        logs = list(self.where.glob("runs/*/events.jsonl"))
        return [e.data for e in event_log.read(logs[0]).events if e.kind == kind] if logs else []

    def digests(self) -> list[str]:
        """Return the digests by rank."""
        return [(self.result / f"rank-{rank}").read_text() for rank in range(RANKS)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return Done(tmp_path_factory.mktemp("undisturbed")).run()


def test_workers_are_forked_and_equal(undisturbed: Done) -> None:
    """The imports of the zygote do not initialise CUDA, so its forks can use it."""
    assert undisturbed.events("zygote_unusable") == []
    assert len(set(undisturbed.digests())) == 1


@pytest.mark.parametrize("side", [(), ("--side",)])
def test_a_killed_rank_is_replaced_bit_for_bit(
    tmp_path: Path, undisturbed: Done, side: tuple[str, ...]
) -> None:
    done = Done(tmp_path, "--die", f"2@{AT}", *side).run()
    assert done.digests() == undisturbed.digests()
    assert [(e["rank"], e["steps_lost"]) for e in done.events("recovered")] == [(2, 0)]
    assert [e["action"] for e in done.events("verdict")] == ["replace"]


def test_a_preload_that_uses_the_device_costs_the_forks_and_nothing_else(
    tmp_path: Path, undisturbed: Done
) -> None:
    done = Done(tmp_path).run("--preload", "tests.gpu.uses_cuda")
    assert "initialised CUDA" in done.events("zygote_unusable")[0]["reason"]
    assert "initialised CUDA" in done.output
    assert done.digests() == undisturbed.digests()


def test_a_spare_is_held_before_its_first_allocation(tmp_path: Path, undisturbed: Done) -> None:
    done = Done(tmp_path, "--gate", str(AT))
    faults: list[BaseException] = []

    def call_the_spare() -> None:
        try:
            spare = until("spare_waits", lambda: done.events("spare_waits"))[0]
            assert spare["state"] == "held"
            (pid,) = [e["pid"] for e in done.events("spare_started")]
            until("all ranks", lambda: len(list(done.result.glob("device-*"))) == RANKS)
            assert not (done.result / f"device-{pid}").exists()
            os.kill(next(e["pid"] for e in done.events("member_started") if e["rank"] == 1), signal.SIGKILL)
            until("the spare on the device", lambda: (done.result / f"device-{pid}").exists())
        except BaseException as error:
            faults.append(error)
        (done.result / "go").touch()

    caller = threading.Thread(target=call_the_spare)
    caller.start()
    done.run("--spares", "1")
    caller.join()
    assert not faults, repr(faults)
    assert [e["state"] for e in done.events("spare_called")] == ["held"], json.dumps(
        done.events("spare_called")
    )
    assert done.digests() == undisturbed.digests()


def graph_job(where: Path, ranks: int, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the job with CUDA graphs in ``where``. Return its end, and the digests by rank that it has written."""
    result = where / "result"
    result.mkdir(parents=True)
    done = run_job(where, ranks, GRAPH_JOB, "--result", str(result), *arguments)
    return done, [path.read_text() for path in sorted(result.glob("rank-*"))]


@pytest.mark.parametrize("graph", ["compiled", "callables"])
def test_forward_and_backward_may_lie_in_cuda_graphs(tmp_path: Path, graph: str) -> None:
    calm, due = graph_job(tmp_path / "calm", 2, "--graph", graph)
    killed, digests = graph_job(tmp_path / "killed", 2, "--graph", graph, "--die", "6")
    assert calm.returncode == killed.returncode == 0, killed.stdout
    assert "1 fault, 0 steps lost" in killed.stdout
    assert digests == due and len(due) == 2


@pytest.mark.parametrize("die", ["-1", "6"])
def test_an_update_in_a_cuda_graph_is_refused(tmp_path: Path, die: str) -> None:
    """Regression: a job that was killed in its first ten steps ended with exit code 0, without a vote on any update."""
    done, _ = graph_job(tmp_path, 1, "--graph", "update", "--die", die)
    assert done.returncode == 3, done.stdout
    assert "no optimizer of the session took a step" in done.stdout and "CUDA graph" in done.stdout
