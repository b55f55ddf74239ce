"""Library mode: ranks of another launcher find or start one agent, which watches them and ends with them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from holdfast import event_log
from holdfast.core.launch_environment import ProcessPlace
from holdfast.errors import UnsupportedError, UsageError
from holdfast.runtime.node.process_info import start_ticks
from holdfast.runtime.worker.library_mode import (
    Pointer,
    _find_agent,
    _refuse_twice,
    join_or_start_agent,
)
from tests.runtime.runs import exists, no_descriptor, until

RANK = """
import os, sys, time
from holdfast.core.launch_environment import ProcessPlace
from holdfast.runtime.worker.library_mode import join_or_start_agent
rank = int(os.environ["RANK"])
client = join_or_start_agent(ProcessPlace(rank, 3, rank, 3))
print(client.run_dir, flush=True)
client.kv("add", ("here",), amount=1)
while int(client.kv("get", ("here",)).value or b"0") < 3:
    time.sleep(0.01)
print("joined", flush=True)
# All ranks end at one time. A rank that ends long before the others is a lost rank, and the others are ended.
end = client.kv("compare_set", ("end",), value=str(time.monotonic() + 1.0).encode()).value
time.sleep(600 if sys.argv[1] == "stay" else max(0.0, float(end) - time.monotonic()))
client.close()
"""


def variables() -> dict[str, str]:
    """Return torchrun's variables for all ranks.

    The job name is unique to this process, as other checkouts may be tested.
    """
    job = f"test-{os.getpid()}"
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": job}


def start_ranks(tmp_path: Path, mode: str) -> list[subprocess.Popen[str]]:
    """Start three ranks with the variables of torchrun."""
    return [
        subprocess.Popen(
            [sys.executable, "-c", RANK, mode],
            env={**variables(), "RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 2, 0)
    ]


def run_dir_of(rank: subprocess.Popen[str]) -> Path:
    """Return the run directory that a rank prints, once it has joined."""
    assert rank.stdout is not None
    path = Path(rank.stdout.readline().strip())
    assert rank.stdout.readline() == "joined\n"
    return path


def gone(pid: int) -> bool:
    return not exists(pid)


def agent_pid(run_dir: Path) -> int:
    return next(
        int(e.data["pid"])
        for e in event_log.read(run_dir / "events.jsonl").events
        if e.kind == "agent_started"
    )


@pytest.mark.processes
def test_all_ranks_share_one_agent_that_ends_after_them(tmp_path: Path) -> None:
    for _ in range(2):  # the second time, the pointer of the first run exists
        ranks = start_ranks(tmp_path, "go")
        dirs = {run_dir_of(rank) for rank in ranks}
        assert len(dirs) == 1
        run_dir = dirs.pop()
        for rank in ranks:
            assert rank.wait(30) == 0
            assert rank.stdout is not None
            rank.stdout.close()
        pid = agent_pid(run_dir)
        until("the agent is gone", partial(gone, pid))
        assert not (run_dir / "agent.json").exists() and not (run_dir / "pages").exists()
    assert len([path for path in (tmp_path / "runs").iterdir() if path.is_dir()]) == 2


@pytest.mark.processes
def test_a_dead_rank_is_seen_and_the_others_leave(tmp_path: Path) -> None:
    ranks = start_ranks(tmp_path, "stay")
    try:
        run_dir = next(iter({run_dir_of(rank) for rank in ranks}))
        ranks[0].kill()

        def dead() -> bool:
            events = event_log.read(run_dir / "events.jsonl").events
            return any(e.kind == "member_exited" and e.data["rank"] == 1 for e in events)

        until("seen", dead)
        assert [rank.wait(30) != 0 for rank in ranks] == [True, True, True]
        until("the agent is gone", lambda: not exists(agent_pid(run_dir)))
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()


@pytest.mark.parametrize(
    "seat", [ProcessPlace(0, 4, 0, 2, said="RANK=0"), ProcessPlace(5, 8, 1, 0, said="RANK=5")]
)
def test_several_nodes_are_refused_by_name(seat: ProcessPlace) -> None:
    with pytest.raises(UnsupportedError, match=r"one node.*RANK") as caught:
        join_or_start_agent(seat)
    assert "holdfast run --nnodes" in caught.value.hint


def test_a_pointer_that_cannot_be_read_does_not_say_that_its_writer_has_ended(tmp_path: Path) -> None:
    """Regression: the pointer of a running job was removed, and other ranks waited for 30 s without the cause."""
    pointer, seat = tmp_path / "library-0.json", ProcessPlace(0, 3, 0, 3, said="RANK=0")
    here = Pointer(str(tmp_path), os.getpid(), start_ticks(os.getpid()))
    pointer.write_bytes(msgspec.json.encode(here))
    for look in (_find_agent, partial(_refuse_twice, seat=seat)):
        with (
            no_descriptor(),
            pytest.raises(UsageError, match=r"library-0.json.*Too many open files") as caught,
        ):
            look(pointer)
        assert "ulimit" in caught.value.hint and pointer.exists()
    with pytest.raises(UsageError, match="still runs"):
        _refuse_twice(pointer, seat)


def test_the_pointer_of_another_job_that_cannot_be_read_stays(tmp_path: Path) -> None:
    other, ended = tmp_path / "library-1.json", tmp_path / "library-2.json"
    other.mkdir()
    ended.write_bytes(msgspec.json.encode(Pointer(str(tmp_path), os.getpid(), 0)))
    _refuse_twice(tmp_path / "library-0.json", ProcessPlace(0, 3, 0, 3, said="RANK=0"))
    assert other.exists() and not ended.exists()
    with pytest.raises(UsageError, match=r"library-1.json.*Is a directory"):
        _find_agent(other)


@pytest.mark.processes
@pytest.mark.parametrize("twice", ["0", "1"])
def test_two_processes_never_take_the_same_rank(tmp_path: Path, twice: str) -> None:
    """Two starts have equal variables, as two jobs in one terminal do. The second is refused, the first continues."""
    ranks = start_ranks(tmp_path, "stay")
    try:
        for rank in ranks:
            run_dir_of(rank)
        late = subprocess.run(
            [sys.executable, "-c", RANK, "go"], env={**variables(), "RANK": twice}, cwd=tmp_path,
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert late.returncode != 0 and "UsageError" in late.stderr and "MASTER_PORT" in late.stderr
        assert [rank.poll() for rank in ranks] == [None, None, None]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            assert rank.stdout is not None
            rank.stdout.close()
