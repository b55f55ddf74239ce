"""Several nodes: files and commands use the ranks of the job; torchrun's console flags use the ranks of a node."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.screen.run_view import Watch
from holdfast.core.protocol.messages import Field
from holdfast.runtime.node.run_processes import sweep
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.spawn import free_port
from tests.cli.command import HOLDFAST, Run, clean_environment
from tests.cli.test_status import FAULT, Made, swept
from tests.runtime.runs import without_torch

__all__ = ["swept"]

BOUND_S = 90
SCRIPT = """\
import os, pathlib, time
rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print("rank", rank, "is", os.environ["LOCAL_RANK"], "here", flush=True)
pathlib.Path(f"said-{rank}").touch()
if (rank, attempt) == ("3", "0"):
    while not all(pathlib.Path(f"said-{each}").exists() for each in range(4)):
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""


class Pair:
    """Two nodes of two workers, both on loopback. Rank 3 dies once; ``-t 1:3`` shows the second worker of each node."""

    def __init__(self, base: Path) -> None:
        self.base = base
        (base / "train.py").write_text(SCRIPT)
        token = base / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        env = clean_environment(without_torch(base))
        job = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}",
               "--token-file", str(token), "--run-id", "two", "-t", "1:3"]  # fmt: skip
        self.launchers = [
            subprocess.Popen(
                [HOLDFAST, "run", *job, "--node-rank", str(node), "train.py"],
                cwd=base, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for node in range(2)
        ]  # fmt: skip

    def console(self, node: int) -> str:
        """Return what the command of a node printed, after its end."""
        return self.launchers[node].communicate(timeout=BOUND_S)[0]

    def close(self) -> None:
        """Kill the launchers and remove all that they left."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait()
        for settings in self.base.glob("runs/*/run.json"):
            run = RunDir(settings.parent)
            sweep(run)
            run.remove_pages()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    started = Pair(tmp_path)
    yield started
    started.close()


@pytest.mark.processes
def test_each_node_shows_and_finds_the_ranks_that_it_has(pair: Pair, holdfast: Run) -> None:
    consoles = [pair.console(node) for node in (0, 1)]
    assert [launcher.returncode for launcher in pair.launchers] == [0, 0], "\n".join(consoles)
    for node, rank in ((0, 1), (1, 3)):
        said = [line for line in consoles[node].splitlines() if " here" in line]
        assert said == [f"rank {rank} is 1 here"] * 2, consoles[node]

    twice = "rank 2 is 0 here\n" * 2
    assert holdfast("logs", "two-node1", "--rank", "2").stdout == twice
    assert holdfast("logs", "two-node1", "--rank", "2", "-f").stdout == twice
    assert holdfast("logs", "two-node1", "--attempt", "0").stdout == (
        "[rank 2] rank 2 is 0 here\n[rank 3] rank 3 is 1 here\n"
    )
    for extra in ([], ["-f"], ["--paths"]):
        elsewhere = holdfast("logs", "two-node1", "--rank", "0", *extra)
        assert elsewhere.returncode == 2 and "rank 0 ran on node0" in elsewhere.stderr
        assert "on node0: holdfast logs RUN --rank 0" in elsewhere.stderr
    unknown = holdfast("logs", "two-node1", "--rank", "4")
    assert unknown.returncode == 2 and "has ranks 0 to 3, not 4" in unknown.stderr

    there, here = (holdfast("report", f"two-node{node}").stdout.splitlines() for node in (0, 1))
    command = here[-1].partition("holdfast ")[2].split()
    assert command[0] == "logs" and holdfast(*command).stdout == "rank 3 is 1 here\n"
    assert there[-1].endswith("on node1: holdfast logs RUN --rank 3 --attempt 0")
    assert there[-3].split() == ["log", "on", "node1"], "not a path that this host does not have"


def seen_from(made: Made, node: str) -> Watch:
    """Return the run as seen on one of its nodes. All nodes have the same events."""
    settings = msgspec.structs.replace(made.settings, node=node, nnodes=2, nnodes_max=3)
    watch = Watch(made.directory, settings)
    watch.poll()
    return watch


def test_a_rank_that_moved_has_a_log_on_both_nodes(tmp_path: Path, swept: None) -> None:
    made = Made(tmp_path, "moved")
    members: dict[str, Field] = {"members": [1, 2], "nodes": ["node0", "node1"], "local_ranks": [0, 0]}
    made.journal.append(
        "generation_started", {"generation": "1.1", "attempt": 0, "in_place": False, **members}
    )
    newcomer: dict[str, Field] = {"ranks": [1], "members": [3], "nodes": ["node2"], "local_ranks": [5]}
    made.journal.append("members_replaced", {"generation": "1.2", **newcomer})
    made.journal.append("detected", {**FAULT, "member_id": 3})
    watches = [seen_from(made, f"node{n}") for n in range(3)]
    assert [watch.local_rank(0, 1) for watch in watches] == [None, 0, 5]
    assert [watch.local_rank(0, 0) for watch in watches] == [0, None, None]
    assert watches[0].story.faults[0].node == "node2", (
        "a newcomer that dies before it has joined is known, too"
    )


def test_a_rank_that_fewer_nodes_do_not_have(tmp_path: Path, holdfast: Run, swept: None) -> None:
    made = Made(tmp_path, "fewer", workers=1)
    RunSettings.save(msgspec.structs.replace(made.settings, nnodes=2, nnodes_max=2), made.directory.path)
    made.start(0, 1)
    made.close()
    found = holdfast("logs", "fewer", "--rank", "1", "--attempt", "0")
    assert found.returncode == 2 and "attempt 0 had no rank 1" in found.stderr
