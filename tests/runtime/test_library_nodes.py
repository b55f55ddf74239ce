"""Library mode over two nodes, both on this machine: one agent each, one key space, one answer to a death."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.core.launch_environment import ProcessPlace
from holdfast.errors import UnsupportedError
from holdfast.runtime.worker.library_nodes import agree, own_address, towards
from tests.runtime.runs import exists, until

RANK = """
import json, os, pathlib, sys, time
from holdfast.core.launch_environment import ProcessPlace
from holdfast.runtime.worker.library_mode import join_or_start_agent
rank, here = int(os.environ["RANK"]), pathlib.Path("sums")

def exchange(vector):
    part = here / f"{rank}.new"
    part.write_text(json.dumps(vector))
    part.rename(here / str(rank))
    while not all((here / str(other)).exists() for other in range(4)):
        time.sleep(0.01)
    return [sum(column) for column in zip(*(json.loads((here / str(other)).read_text()) for other in range(4)))]

client = join_or_start_agent(ProcessPlace(rank, 4, rank % 2, 2, rank // 2, "127.0.0.1"), exchange)
print(client.run_dir, flush=True)
client.kv("add", ("here",), amount=1)
while int(client.kv("get", ("here",)).value or b"0") < 4:
    time.sleep(0.01)
print("joined", flush=True)
time.sleep(600 if sys.argv[1] == "stay" else 0.2)
client.close()
"""


@contextmanager
def ranks_of_two_nodes(where: Path, mode: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Yield four ranks, and kill them at the end."""
    (where / "sums").mkdir()
    job = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": f"nodes-{os.getpid()}-{mode}",
    }
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", RANK, mode], env={**os.environ, **job, "RANK": str(rank)}, cwd=where,
                    stdout=subprocess.PIPE, text=True,
                )
            )
            for rank in range(4)
        ]  # fmt: skip
        try:
            yield ranks
        finally:
            for rank in ranks:
                rank.kill()


def run_dirs(ranks: list[subprocess.Popen[str]]) -> list[Path]:
    """Return the run directory of each rank, once all of them have used one key space."""
    found = []
    for rank in ranks:
        assert rank.stdout is not None
        found.append(Path(rank.stdout.readline().strip()))
        assert rank.stdout.readline() == "joined\n"
    return found


def agents(dirs: list[Path]) -> list[int]:
    """Return the process ids of the agents of these runs."""
    events = [e for each in sorted(set(dirs)) for e in event_log.read(each / "events.jsonl").events]
    return [int(e.data["pid"]) for e in events if e.kind == "agent_started"]


@pytest.mark.processes
def test_each_node_has_an_agent_and_all_ranks_one_key_space(tmp_path: Path) -> None:
    with ranks_of_two_nodes(tmp_path, "go") as ranks:
        dirs = run_dirs(ranks)
        assert dirs[0] == dirs[1] != dirs[2] == dirs[3]
        assert [rank.wait(60) for rank in ranks] == [0] * 4
        pids = agents(dirs)
        assert len(pids) == 2
        until("the agents are gone", lambda: not any(map(exists, pids)))


@pytest.mark.processes
def test_a_death_on_one_node_ends_the_ranks_of_the_other(tmp_path: Path) -> None:
    with ranks_of_two_nodes(tmp_path, "stay") as ranks:
        dirs = run_dirs(ranks)
        ranks[3].kill()
        assert all(rank.wait(60) != 0 for rank in ranks)
        pids = agents(dirs)
        until("the agents are gone", lambda: not any(map(exists, pids)))


def test_the_ranks_agree_on_contact_and_token() -> None:
    said: list[list[int]] = []
    seats = [ProcessPlace(rank, 4, rank % 2, 2, -1, "127.0.0.1") for rank in range(4)]

    def collect(vector: list[int]) -> list[int]:
        said.append(vector)
        return vector

    for seat in seats:
        try:
            agree(seat, collect)
        except UnsupportedError:
            continue
    total = [sum(column) for column in zip(*said, strict=True)]
    nodes = [agree(seat, lambda vector: total) for seat in seats]
    assert [(each.number, each.total) for each in nodes] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert len({each.token for each in nodes}) == len({each.contact for each in nodes}) == 1
    assert nodes[0].contact.startswith("127.0.0.1:") and len(nodes[0].token) == 64


@pytest.mark.parametrize(
    "seats",
    [
        [ProcessPlace(0, 3, 0, 2), ProcessPlace(1, 3, 1, 2), ProcessPlace(2, 3, 0, 1)],
        [
            ProcessPlace(0, 4, 0, 2),
            ProcessPlace(1, 4, 0, 2),
            ProcessPlace(2, 4, 1, 2),
            ProcessPlace(3, 4, 1, 2),
        ],
    ],
    ids=["nodes of two sizes", "ranks in turn"],
)
def test_ranks_that_lie_otherwise_are_refused_by_all_of_them(seats: list[ProcessPlace]) -> None:
    numbers = [
        [
            seat.local_world_size,
            seat.local_world_size**2,
            int(seat.rank % seat.local_world_size != seat.local_rank),
        ]
        for seat in seats
    ]
    total = [sum(column) for column in zip(*numbers, strict=True)]
    for seat in seats:
        with pytest.raises(UnsupportedError, match="as many ranks"):
            agree(seat, lambda vector: [*total, *vector[3:]])


def test_an_address_that_means_this_host() -> None:
    assert own_address("127.0.0.1") == towards("127.0.0.1") == "127.0.0.1"
    assert own_address("no-such-host.invalid")
