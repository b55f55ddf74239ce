"""Agents of one job meet: on one machine, each on a loopback address of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.core.messages import ExitRun
from holdfast.exits import Exit
from holdfast.runtime.launch import AgentLink
from holdfast.runtime.rundir import write_private
from holdfast.runtime.spawn import free_port
from tests.runtime.runs import Run

pytestmark = pytest.mark.processes

TOKEN = b"t" * 64


def address(number: int) -> str:
    """Where the agent of a node listens."""
    return f"127.0.7.{number + 1}"


class Nodes:
    """Where the agents of a job of several nodes look first, and their runs."""

    def __init__(self, base: Path, count: int, spares: int = 0) -> None:
        self.base = base
        self.port = free_port(address(0))
        self.shape: dict[str, Any] = {"nnodes": count, "nnodes_max": count + spares, "nproc": 1}

    def node(self, number: int, *contacts: str, token: bytes = TOKEN, home: str = "", **settings: Any) -> Run:
        """One node of it; start its agent when you want."""
        place = self.base / (home or f"host{number}")
        place.mkdir()
        run = Run(
            place,
            node=f"node{number}",
            bind=address(number),
            contacts=contacts or (f"{address(0)}:{self.port}",),
            **{**self.shape, "args": ("3",), **settings},
        )
        write_private(run.dir.token_file, token)
        return run


def test_who_is_asked_to_leave_while_it_waits_for_the_others_leaves_at_once(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2).node(0) as run:
        run.start()
        answer = AgentLink(run.dir.path).request(ExitRun(grace_s=300.0, source="test"), timeout_s=20.0)
        assert answer.detail == "leaving at once: nothing has begun"
        assert run.wait() == Exit.UNSAVED
        (ended,) = run.events("run_ended")
        assert "nothing had begun" in ended.data["reason"] and run.nothing_left()
