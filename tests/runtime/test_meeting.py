"""Agents of one job connect: on one machine, each at its own loopback address."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.protocol.messages import ExitRun
from holdfast.exit_codes import Exit
from holdfast.runtime.node.agent_client import AgentLink
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.node.spawn import free_port
from tests.runtime.runs import BOUND_S, Run, until

pytestmark = pytest.mark.processes

TOKEN, ANOTHER = (hashlib.sha256(text).hexdigest().encode() for text in (b"t", b"x"))


def address(number: int) -> str:
    """Return the address at which the agent of a node listens."""
    return f"127.0.7.{number + 1}"


class Nodes:
    """The contacts of a job of several nodes, and its runs."""

    def __init__(self, base: Path, count: int, spares: int = 0) -> None:
        self.base = base
        self.port = free_port(address(0))
        self.shape: dict[str, Any] = {
            "nnodes": count,
            "nnodes_max": count + spares,
            "nproc": 1,
            "args": ("3",),
        }

    def node(self, number: int, *contacts: str, token: bytes = TOKEN, home: str = "", **settings: Any) -> Run:
        """Return one node of the job. The caller starts its agent."""
        place = self.base / (home or f"host{number}")
        place.mkdir()
        run = Run(
            place,
            contacts=contacts or (f"{address(0)}:{self.port}",),
            **{"node": f"node{number}", "bind": address(number), **self.shape, **settings},
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


@contextmanager
def listener() -> Iterator[socket.socket]:
    """Yield a contact without an agent: each round of connection attempts reaches it and is refused."""
    with socket.create_server((address(9), 0)) as server:
        server.settimeout(BOUND_S)
        yield server


def rounds(server: socket.socket, count: int) -> None:
    """Wait until ``count`` more rounds of connection attempts have begun."""
    for _ in range(count):
        server.accept()[0].close()


def sockets_of(pid: int) -> int:
    """Return the number of open sockets of a process."""
    count = 0
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor was closed in the meantime
            count += os.readlink(fd).startswith("socket:")
    return count


def lines(*listeners: tuple[str, int]) -> int:
    """Return the number of open connections that agents have accepted here."""
    local = {f"{socket.inet_aton(host)[::-1].hex()}:{port:04x}".upper() for host, port in listeners}
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1] in local and row[3] == "01" for row in rows)


def test_agents_that_wait_for_each_other_keep_one_line(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 3)
    with listener() as server:
        port = free_port(address(1))
        contacts = (
            f"{address(0)}:{nodes.port}",
            f"{address(1)}:{port}",
            f"{address(9)}:{server.getsockname()[1]}",
        )
        with nodes.node(0, *contacts) as first, nodes.node(1, *contacts[1:], contacts[0]) as second:
            first.start()
            second.start()
            first.wait_event("peer_here")
            second.wait_event("peer_here")
            rounds(server, 6)
            before = [sockets_of(run.agents[-1].pid) for run in (first, second)]
            rounds(server, 12)
            until("one line is left", lambda: lines((address(0), nodes.port), (address(1), port)) == 1)
            after = [sockets_of(run.agents[-1].pid) for run in (first, second)]
            assert all(now <= then + 1 for now, then in zip(after, before, strict=True)), (
                "one dial may be under way"
            )


def test_a_stranger_at_the_address_of_a_lost_node_ends_nothing(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2, spares=1)
    nodes.shape["args"] = ("2000",)
    with nodes.node(0) as first, nodes.node(1) as second:
        with nodes.node(2) as spare:
            for run in (first, second, spare):
                run.start()
            first.wait_event("member_started", 2)
            first.wait_event("peer_here", 2)
            second.wait_event("peer_here", 2)
        place = f"{address(2)}:{nodes.port}"
        with nodes.node(2, place, token=ANOTHER, home="stranger", nnodes=2) as stranger:
            stranger.start()
            for run in (first, second):
                assert "token" in run.wait_event("peer_foreign").data["reason"]
        with nodes.node(2, home="mistake", nproc=2) as mistake:
            mistake.start()
            assert mistake.wait() == Exit.USAGE
        assert [run.agents[-1].poll() for run in (first, second)] == [None, None]
        assert not first.events("run_ended")


def test_a_contact_port_that_another_program_has_is_named_at_once(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    with socket.create_server((address(0), nodes.port)), nodes.node(0) as run:
        run.start()
        assert run.wait() == Exit.USAGE
        reason = run.events("run_ended")[0].data["reason"]
        assert f"{address(0)}:{nodes.port}" in reason and "another --master-port" in reason


def test_agents_on_one_address_share_the_contact(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    nodes.shape["bind"] = address(0)
    with nodes.node(0) as first, nodes.node(1) as second:
        for run in (first, second):
            run.start()
        assert [run.wait() for run in (first, second)] == [0, 0]


@pytest.mark.parametrize(
    ("what", "then"),
    [
        ({"token": ANOTHER}, "one token file"),
        ({"nproc": 2}, "the same --nnodes and --nproc-per-node"),
        ({"node": "node0"}, "a --node-rank of its own"),
    ],
    ids=["token", "shape", "number"],
)
def test_who_does_not_belong_to_the_job_is_told_what_to_do(
    tmp_path: Path, what: dict[str, Any], then: str
) -> None:
    nodes = Nodes(tmp_path, 2)
    with nodes.node(0) as first, nodes.node(1, **what) as second:
        first.start()
        until("it listens", lambda: first.events("agent_started"))
        second.start()
        assert second.wait() == Exit.USAGE
        reason = second.events("run_ended")[0].data["reason"]
        assert reason.count("\n  next: ") == 1 and then in reason
        first.stop()


def test_nodes_that_do_not_meet_in_time_end_with_a_code_that_says_try_again(tmp_path: Path) -> None:
    with Nodes(tmp_path, 2).node(1, join_s=1.0) as run:
        run.start()
        assert run.wait() == Exit.UNMET
        (ended,) = run.events("run_ended")
        assert ended.data["reason"].startswith("1 of 2 agents met within 1 s: node1 is at 127.0.7.2")
        assert f"{run.settings.contacts[0]}: no process listens there" in ended.data["reason"]
        assert run.nothing_left()


def test_a_first_contact_of_several_addresses_is_found_at_the_one_that_answers(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    contacts = [f"{address(number)}:{nodes.port}" for number in (8, 0)]
    with (
        nodes.node(0, *contacts, first_contacts=2) as first,
        nodes.node(1, *contacts, first_contacts=2) as second,
    ):
        for run in (first, second):
            run.start()
        assert [run.wait() for run in (first, second)] == [0, 0]
        assert first.events("founded") and not second.events("founded")


def test_of_several_hosts_behind_one_name_one_founds_the_job(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    contacts = [f"{address(number)}:{nodes.port}" for number in (1, 0)]
    with (
        nodes.node(0, *contacts, first_contacts=2) as first,
        nodes.node(1, *contacts, first_contacts=2) as second,
    ):
        for run in (second, first):
            run.start()
        assert [run.wait() for run in (first, second)] == [0, 0]
        assert first.events("founded") and not second.events("founded")


def test_who_meets_without_an_owner_of_the_first_contact_is_told(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path, 2)
    contacts = [f"{address(number)}:{nodes.port}" for number in (8, 0)]
    with nodes.node(1, *contacts) as second, nodes.node(0, *contacts, join_s=5.0) as first:
        second.start()
        until("it listens", lambda: second.events("agent_started"))
        first.start()
        assert first.wait() == Exit.USAGE
        reason = first.events("run_ended")[0].data["reason"]
        assert "2 agents met, but none of them listens at the first contact" in reason and "--bind" in reason
        second.stop()


@pytest.mark.more
def test_a_job_whose_hosts_all_leave_and_start_again_at_once_meets_again(tmp_path: Path) -> None:
    """Regression: agents heard the job's name from one that was about to leave; none founded it, all waited in vain."""
    nodes = Nodes(tmp_path, 3)
    with nodes.node(2, args=("100000",)) as leaving:
        with nodes.node(0, args=("100000",)) as first, nodes.node(1, args=("100000",)) as second:
            for run in (first, second, leaving):
                run.start()
            leaving.wait_event("member_started", 3)
        again = [nodes.node(number, home=f"again{number}", join_s=25.0) for number in range(3)]
        leaving.wait_event("no_majority")
        for run in again[:2]:
            run.start()
        leaving.wait()
    with again[0], again[1], again[2]:
        again[2].start()
        assert [run.wait() for run in again] == [0, 0, 0], again[0].events("run_ended")
        assert again[0].events("founded")
