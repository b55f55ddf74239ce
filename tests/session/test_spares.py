"""Real spares: one takes the place of a killed worker, bit for bit; spares may be killed, or run out."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holdfast
from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import KvReply
from holdfast.errors import PeerLost
from holdfast.exit_codes import Exit
from holdfast.runtime.worker.worker_client import NO_SAVES, WorkerClient
from holdfast.session.session import Session
from tests.runtime.runs import exists, until

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("spare_job.py"))
ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
RANKS = {"ddp": 3, "hsdp": 4}
STEPS = 12
EVERYTHING = pytest.mark.skipif("HOLDFAST_SPARES" not in os.environ, reason="make spares")


class Job:
    """A run of ``spare_job.py``."""

    launcher: subprocess.Popen[bytes]

    def __init__(self, where: Path, layout: str) -> None:
        self.where = where
        self.ranks = RANKS[layout]
        self.result = where / "result"
        self.output = where / "output"

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of a kind."""
        logs = list(self.where.glob("runs/*/events.jsonl"))
        lines = logs[0].read_text().splitlines(keepends=True) if logs else []
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line["data"] for line in found if line.get("kind") == kind]

    def wait(self, kind: str, count: int) -> dict[str, Any]:
        """Wait for the ``count``-th event of a kind, and return its data."""
        found: dict[str, Any] = until(kind, lambda: next(iter(self.events(kind)[count - 1 :]), None))
        return found

    def kill(self, *ranks: int) -> None:
        """Kill the newest process of each of these ranks with SIGKILL."""
        pids = {e["rank"]: e["pid"] for e in self.events("member_started")}
        for rank in ranks:
            os.kill(pids[rank], signal.SIGKILL)

    def zygote(self) -> int:
        """Return the process id of the zygote."""
        (endpoint,) = self.where.glob("runs/*/zygote.json")
        return int(json.loads(endpoint.read_text())["pid"])

    def open(self, gate: int) -> None:
        """Let the job pass a step."""
        (self.result / f"go-{gate}").touch()

    def digests(self) -> list[str]:
        """Return the digests of the finished job, by rank."""
        return [self.said(rank)["digest"] for rank in range(self.ranks)]

    def said(self, rank: int) -> dict[str, Any]:
        """Return what one rank wrote at the end."""
        found: dict[str, Any] = json.loads((self.result / f"rank-{rank}.json").read_text())
        return found


@contextmanager
def running(
    where: Path, *arguments: str, spares: int = 0, layout: str = "ddp", code: int = 0
) -> Iterator[Job]:
    """Yield a running job. At the end, wait for it and check its exit code."""
    job = Job(where, layout)
    job.result.mkdir(parents=True)
    command = [str(BIN / "holdfast"), "run", "--nproc-per-node", str(job.ranks), "--hang-factor", "0"]
    command += ["--spares", str(spares)] if spares else []
    command += [JOB, "--steps", str(STEPS), "--result", str(job.result), "--layout", layout, *arguments]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with job.output.open("wb") as output:
        launcher = subprocess.Popen(command, cwd=where, env=environment, stdout=output, stderr=output)
        job.launcher = launcher
        try:
            yield job
            assert launcher.wait(100) == code, job.output.read_text()
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGTERM)
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(60)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return digests of the undisturbed run by layout, each computed when needed."""
    known: dict[str, list[str]] = {}

    class Lazy(dict[str, list[str]]):
        def __missing__(self, layout: str) -> list[str]:
            with running(tmp_path_factory.mktemp(layout), layout=layout) as job:
                pass
            self[layout] = job.digests()
            return self[layout]

    return Lazy(known)


@pytest.mark.executes_zygotes
def test_spares_take_the_place_of_the_lost(tmp_path: Path, undisturbed: dict[str, list[str]]) -> None:
    """A spare is killed and built again. A spare replaces a killed worker. Two workers die at once, with one spare.

    A called spare draws with the loader workers of its rehearsal; from the next epoch on it has new ones.
    """
    with running(tmp_path, "--gates", "3,6,9", "--workers", "2", spares=1) as job:
        assert job.wait("spare_waits", 1)["state"] == "ready"
        os.kill(job.events("spare_started")[0]["pid"], signal.SIGKILL)
        assert job.wait("spare_gone", 1)["state"] == "ready"
        second = job.wait("spare_waits", 2)["member_id"]
        job.kill(0)
        called = job.wait("spare_called", 1)
        assert (called["member_id"], called["state"], called["rank"]) == (second, "ready", 0)
        job.open(3)
        third = job.wait("spare_waits", 3)["member_id"]
        job.kill(0, 1)
        job.open(6)
        job.open(9)
    assert job.digests() == undisturbed["ddp"]
    assert [(e["member_id"], e["becomes"]) for e in job.events("spare_called")][:1] == [(second, 4)]
    assert third not in {e["member_id"] for e in job.events("member_started")}
    assert {e["steps_lost"] for e in job.events("recovered")} == {0}
    assert [job.said(rank)["environment"] for rank in range(job.ranks)] == [0, 1, 2]


@pytest.mark.more
def test_a_spare_that_gets_no_state_is_one_more_lost_rank(
    tmp_path: Path, undisturbed: dict[str, list[str]]
) -> None:
    """The spare reports an error that is no bug of the script.

    Its newcomer also fails, and then all ranks start again.
    """
    with running(tmp_path, "--gates", "3", "--refuse", spares=1) as job:
        job.wait("spare_waits", 1)
        job.kill(1)
        job.wait("spare_called", 1)
        job.open(3)
    assert job.digests() == undisturbed["ddp"]
    errors = [e["what"] for e in job.events("detected")[1:]]
    assert len(errors) == 2 and all(e.startswith("PeerLost: ") and "damaged" in e for e in errors)
    assert [e["action"] for e in job.events("verdict")][-1] == "restart_last_gasp"


@pytest.mark.parametrize("where", ["in the block", "after it"])
def test_a_session_that_never_opened_ends_with_the_error_that_kept_it_closed(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A called spare cannot take its state.

    It finds this when the block reads ``s.step``, or when an empty block ends.
    """
    client: Any = SimpleNamespace(
        **{"generation": Generation(1, 2), "member_id": MemberId(4), "rank": 0, "joining": True},
        **{"world_size": 1, "local_rank": 0, "local_world_size": 1},
        **{"run_dir": None, "stand_in": SimpleNamespace(called=False, wait=lambda: None)},
        **{"on": lambda *given: None, "open_session": lambda: None, "on_orphaned": lambda handler: None},
        **{"saves": NO_SAVES, "kv": lambda *given, value: KvReply(request_id=0, value=value)},
    )

    def refuse(session: Session, _: WorkerClient) -> None:
        raise PeerLost("damaged")

    monkeypatch.setattr(WorkerClient, "_current", client)
    monkeypatch.setattr(Session, "_take_over", refuse)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters())
    with (
        pytest.raises(PeerLost, match="damaged"),
        holdfast.session(model=net, optimizer=optimizer) as s,
    ):
        assert s.step == 0 if where == "in the block" else True


@EVERYTHING
def test_a_script_that_asks_for_its_rank_holds_its_spare(
    tmp_path: Path, undisturbed: dict[str, list[str]]
) -> None:
    with running(tmp_path, "--gates", "3", "--ask", spares=1) as job:
        assert job.wait("spare_waits", 1)["state"] == "held"
        job.kill(1)
        assert job.wait("spare_called", 1)["state"] == "held"
        job.open(3)
    assert job.digests() == undisturbed["ddp"]
    assert [job.said(rank)["asked"] for rank in range(job.ranks)] == [0, 1, 2]
    assert [e["action"] for e in job.events("verdict")] == ["replace"]


@EVERYTHING
@pytest.mark.parametrize("layout", ["ddp", "hsdp"])
def test_as_many_spares_as_workers_are_ready_whatever_is_asked(
    tmp_path: Path, undisturbed: dict[str, list[str]], layout: str
) -> None:
    with running(tmp_path, "--gates", "3", "--ask", spares=RANKS[layout], layout=layout) as job:
        job.wait("spare_waits", job.ranks)
        job.kill(1)
        called = job.wait("spare_called", 1)
        assert (called["state"], called["rank"]) == ("ready", 1)
        job.open(3)
    assert job.digests() == undisturbed[layout]
    assert [job.said(rank)["asked"] for rank in range(job.ranks)] == list(range(job.ranks))


@EVERYTHING
def test_a_stopped_spare_is_not_used(tmp_path: Path, undisturbed: dict[str, list[str]]) -> None:
    with running(tmp_path, "--gates", "3", spares=1) as job:
        job.wait("spare_waits", 1)
        os.kill(job.events("spare_started")[0]["pid"], signal.SIGSTOP)
        job.kill(1)
        job.open(3)
        job.wait("joined", 1)
    assert job.digests() == undisturbed["ddp"]
    assert len(job.events("verdict")) == 1


@pytest.mark.more
def test_a_stopped_zygote_is_replaced_and_forks_the_newcomer(
    tmp_path: Path, undisturbed: dict[str, list[str]]
) -> None:
    """The first newcomer never becomes a process. The survivors wait for the second one."""
    with running(tmp_path, "--gates", "3") as job:
        job.wait("resumed", 1)
        os.kill(job.zygote(), signal.SIGSTOP)
        job.kill(1)
        job.open(3)
        assert job.wait("zygote_silent", 1)["asked"] == [job.ranks + 1]
        assert job.wait("joined", 1)["member_id"] == job.ranks + 2
    assert job.digests() == undisturbed["ddp"]
    assert {e["steps_lost"] for e in job.events("recovered")} == {0}


def test_an_interrupt_saves_and_ends_a_job_whose_newcomer_never_was_a_process(tmp_path: Path) -> None:
    """Regression: the exit waited for the newcomer, and only a second interrupt, without a save, ended the job."""
    with running(tmp_path, "--gates", "3", code=int(Exit.REQUEUE)) as job:
        job.wait("resumed", 1)
        zygote = job.zygote()
        os.kill(zygote, signal.SIGSTOP)
        job.kill(1)
        job.wait("members_replaced", 1)
        job.launcher.send_signal(signal.SIGINT)
    assert "no lost rank is replaced" in job.events("verdict")[-1]["reason"]
    # The ranks may have made a step more before the kill.
    assert re.search(r"saved step [1-3] \(last-gasp\)", job.output.read_text())
    pids = [zygote, *(e["pid"] for kind in ("agent_started", "member_started") for e in job.events(kind))]
    assert not any(exists(pid) for pid in pids)


@EVERYTHING
def test_a_spare_that_a_stopped_zygote_was_asked_for_is_built_by_the_next_one(
    tmp_path: Path, undisturbed: dict[str, list[str]]
) -> None:
    with running(tmp_path, "--gates", "3,6", spares=1) as job:
        job.wait("spare_waits", 1)
        os.kill(job.zygote(), signal.SIGSTOP)
        job.kill(1)
        job.wait("spare_called", 1)
        job.open(3)
        job.wait("zygote_silent", 1)
        assert job.wait("spare_gone", 1)["state"] == "building"
        job.wait("spare_waits", 2)
        job.open(6)
    assert job.digests() == undisturbed["ddp"]
    assert len(job.events("verdict")) == 1


@EVERYTHING
def test_spares_end_with_their_agent_and_are_built_again(
    tmp_path: Path, undisturbed: dict[str, list[str]]
) -> None:
    with running(tmp_path, "--gates", "3,6", spares=1) as job:
        job.wait("spare_waits", 1)
        first = job.events("spare_started")[0]["pid"]
        os.kill(job.events("agent_started")[0]["pid"], signal.SIGKILL)
        until("the spare is gone", lambda: not Path(f"/proc/{first}").exists())
        job.wait("agent_started", 2)
        job.open(3)
        job.wait("spare_waits", 2)
        job.kill(0)
        job.wait("spare_called", 1)
        job.open(6)
    assert job.digests() == undisturbed["ddp"]
