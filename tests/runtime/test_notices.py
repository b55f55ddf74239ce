"""Sources of notices: parsing of their answers, requests on loopback, reports of their watch; health."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from holdfast.core.ids import NodeId
from holdfast.core.protocol.notices import NO_DEADLINE, Notice
from holdfast.errors import ProtocolError, UsageError
from holdfast.runtime.agent.notice_watch import NoticeWatch, sources_of
from holdfast.runtime.node.health_checks import BuiltIn, HealthCommand, KernelLog, broken_by
from holdfast.runtime.node.notice_forms import (
    Foreseen,
    aws_action,
    azure_events,
    gcp_maintenance,
    gcp_preempted,
    slurm_end,
    slurm_job,
    slurm_node,
    users_word,
)
from holdfast.runtime.node.notice_sources import (
    Aws,
    Azure,
    CommandNotices,
    File,
    Gcp,
    NoticeSource,
    Slurm,
    SlurmEnd,
    output_of,
    read_sources,
)
from holdfast.runtime.node.process_info import alive
from holdfast.runtime.node.run_settings import RunSettings
from tests.runtime.runs import until

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z
AZURE_BODY = b"""{"DocumentIncarnation": 2, "Events": [
    {"EventId": "a", "EventType": "Freeze", "Resources": ["gpu-1"], "NotBefore": ""},
    {"EventId": "b", "EventType": "Preempt", "Resources": ["gpu-2"], "NotBefore": ""},
    {"EventId": "c", "EventType": "Preempt", "Resources": ["gpu-1"], "NotBefore": "Mon, 21 Sep 2026 14:13:50 GMT"}]}"""
JOB_LINE = (
    "JobId=7 JobName=train RunTime=00:00:10 TimeLimit={} TimeMin=N/A StartTime=2026-01-01T00:00:00 EndTime={}"
)
NODE_LINE = (
    "NodeName=gpu-1 Arch=x86_64 CPUTot=4 State={} ThreadsPerCore=1 Reason=bad fan [root@2026-11-24T08:00:00]"
)


def test_a_spot_instance_of_aws_says_when_it_goes() -> None:
    body = b'{"action": "terminate", "time": "2026-09-21T14:15:20Z"}'
    assert aws_action(body, NOW) == Foreseen("AWS spot: terminate", 120.0)
    assert aws_action(body, NOW + 500).left_s == 0.0


def test_gcp_gives_half_a_minute_or_one() -> None:
    assert gcp_preempted(b"FALSE\n") is None
    assert gcp_preempted(b"TRUE") == Foreseen("GCP: preempted", 30.0)
    assert gcp_maintenance(b"NONE") is None and gcp_maintenance(b"MIGRATE_ON_HOST_MAINTENANCE") is None
    assert gcp_maintenance(b"TERMINATE_ON_HOST_MAINTENANCE") == Foreseen("GCP: host maintenance", 60.0)


def test_azure_tells_of_neighbours_and_of_freezes_too() -> None:
    assert azure_events(AZURE_BODY, "gpu-1", NOW) == [Foreseen("Azure: Preempt", 30.0)]
    assert azure_events(AZURE_BODY, "gpu-2", NOW) == [Foreseen("Azure: Preempt", 0.0)]
    assert azure_events(b'{"Events": []}', "gpu-1", NOW) == []


@pytest.mark.parametrize(
    ("state", "leaves"),
    [
        ("IDLE", False),
        ("ALLOCATED", False),
        ("MIXED+DRAIN", True),
        ("DRAINING*", True),
        ("ALLOCATED+DRAIN", True),
    ],
)
def test_a_node_that_slurm_drains_is_to_leave(state: str, leaves: bool) -> None:
    found = slurm_node(NODE_LINE.format(state))
    assert (found is not None) is leaves
    assert found is None or found == Foreseen("Slurm: drained (bad fan)")


def test_the_end_of_a_job_of_slurm_is_that_of_all_nodes() -> None:
    assert slurm_end("", NOW) is None and slurm_end("0", NOW) is None
    assert slurm_end(str(int(NOW) + 60), NOW) == Foreseen("Slurm: end of the time", 60.0, whole_job=True)


@pytest.mark.parametrize(
    ("text", "left_s"),
    [
        ("", NO_DEADLINE),
        ("leave\n", NO_DEADLINE),
        ("90", 80.0),
        ("+90s", 80.0),
        ("2026-09-21T14:14:20", 60.0),
        ("2026-09-21T16:14:20+02:00", 60.0),
        (str(int(NOW) + 7), 7.0),
        ("5", 0.0),
    ],
)
def test_a_file_says_no_time_a_span_or_a_moment(text: str, left_s: float) -> None:
    assert users_word(text, "file f", NOW, NOW - 10).left_s == left_s


@pytest.mark.parametrize(
    "read",
    [
        lambda: aws_action(b"<html>", NOW),
        lambda: aws_action(b'{"action": "stop"}', NOW),
        lambda: gcp_preempted(b"<html>"),
        lambda: azure_events(b'{"Events": [{"EventType": "Preempt", "NotBefore": "soon"}]}', "", NOW),
        lambda: slurm_end("tomorrow", NOW),
        lambda: slurm_node("Node gpu-1 not found"),
        lambda: slurm_job("Invalid job id specified", NOW),
        lambda: slurm_job("JobId=7 EndTime=soon", NOW),
        lambda: users_word("soon", "file f", NOW, NOW),
    ],
)
def test_what_is_not_understood_is_no_notice_and_no_withdrawal(read: Callable[[], object]) -> None:
    with pytest.raises(ProtocolError):
        read()


class Metadata(BaseHTTPRequestHandler):
    """A fake of the metadata service of each cloud. ``pages`` are its documents."""

    pages: ClassVar[dict[str, bytes]] = {}
    needs: ClassVar[dict[str, str]] = {}

    def do_PUT(self) -> None:
        self._answer(b"token", {"X-aws-ec2-metadata-token-ttl-seconds": ""})

    def do_GET(self) -> None:
        self._answer(self.pages.get(self.path), self.needs)

    def _answer(self, body: bytes | None, needs: dict[str, str]) -> None:
        allowed = all(
            name in self.headers and self.headers[name].endswith(value) for name, value in needs.items()
        )
        self.send_response(401 if not allowed else 404 if body is None else 200)
        self.end_headers()
        self.wfile.write(body or b"")

    def log_message(self, *words: Any) -> None:
        return


@pytest.fixture
def metadata() -> Iterator[tuple[str, type[Metadata]]]:
    """Yield the address of a fake service on loopback, and its pages."""

    class Service(Metadata):
        pages: ClassVar[dict[str, bytes]] = {}
        needs: ClassVar[dict[str, str]] = {}

    server = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", Service
    server.shutdown()
    thread.join()
    server.server_close()


def look(source: NoticeSource) -> list[Foreseen]:
    """Query a source once."""
    return asyncio.run(source.look())


def test_aws_is_asked_with_a_token(metadata: tuple[str, type[Metadata]]) -> None:
    url, service = metadata
    source = Aws(url)
    service.needs = {"X-aws-ec2-metadata-token": "token"}
    assert look(source) == []
    service.pages["/latest/meta-data/spot/instance-action"] = (
        b'{"action": "stop", "time": "2026-01-01T00:00:00Z"}'
    )
    assert look(source) == [Foreseen("AWS spot: stop", 0.0)]
    service.needs = {"X-aws-ec2-metadata-token": "another"}
    with pytest.raises(ProtocolError, match="401"):
        look(source)


def test_gcp_is_asked_in_its_flavor_and_its_lead_shrinks(metadata: tuple[str, type[Metadata]]) -> None:
    url, service = metadata
    service.needs = {"Metadata-Flavor": "Google"}
    service.pages["/computeMetadata/v1/instance/preempted"] = b"TRUE"
    source = Gcp(url)
    (first,), (second,) = look(source), look(source)
    assert second.left_s < first.left_s == 30.0


def test_azure_is_asked_for_the_machine_and_its_events(metadata: tuple[str, type[Metadata]]) -> None:
    url, service = metadata
    service.needs = {"Metadata": "true"}
    service.pages["/metadata/instance/compute/name?api-version=2021-02-01&format=text"] = b"gpu-2"
    service.pages["/metadata/scheduledevents?api-version=2020-07-01"] = AZURE_BODY
    assert look(Azure(url)) == [Foreseen("Azure: Preempt", 0.0)]


def test_a_file_that_is_there_is_a_notice(tmp_path: Path) -> None:
    source = File(str(tmp_path / "leave"))
    assert look(source) == []
    (tmp_path / "leave").touch()
    assert look(source) == [Foreseen(f"file {tmp_path / 'leave'}")]


def test_a_command_says_nothing_while_the_node_stays() -> None:
    assert look(CommandNotices("true")) == []
    assert look(CommandNotices("echo leave")) == [Foreseen("command echo")]
    with pytest.raises(ProtocolError, match="code 1"):
        look(CommandNotices("false"))


def test_a_command_that_does_not_end_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; wait"
    with pytest.raises(ProtocolError, match="longer than"):
        asyncio.run(output_of(("sh", "-c", script), timeout_s=0.5))
    child = int((tmp_path / "pid").read_text())
    until("its child is gone", lambda: not alive(child))


def test_a_command_may_print_much() -> None:
    code, said = asyncio.run(output_of((sys.executable, "-c", "print('x' * 10**6); raise SystemExit(2)")))
    assert code == 2 and said.startswith("xxx") and len(said) <= 4096


def fake_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """Put a program on the path that prints this line as scontrol does."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho '{line}'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_slurm_is_asked_by_scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_scontrol(tmp_path, monkeypatch, NODE_LINE.format("IDLE+DRAIN"))
    assert look(Slurm({"SLURMD_NODENAME": "gpu-1"})) == [Foreseen("Slurm: drained (bad fan)")]


def test_the_end_of_a_job_is_asked_from_slurm_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: Slurm 22.05 sets no SLURM_JOB_END_TIME, and the job was killed at its time limit without a save."""
    fake_scontrol(tmp_path, monkeypatch, JOB_LINE.format("01:00:00", "2036-01-01T00:00:00"))
    for variables in ({"SLURM_JOB_ID": "7"}, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1"}):
        (found,) = look(SlurmEnd(variables))
        assert found.whole_job and found.left_s > 1e6, "an end that was extended counts"
    monkeypatch.setenv("PATH", "")
    assert look(SlurmEnd({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "1"})) == [
        Foreseen("Slurm: end of the time", 0.0, whole_job=True)
    ], "in a container without scontrol"
    told, events = watched(SlurmEnd({"SLURM_JOB_ID": "7"}), looks=2)
    assert told == [] and [kind for kind, _ in events] == ["notice_source_failed"]


@pytest.mark.parametrize(
    ("limit", "end", "left_s"),
    [
        ("00:01:00", datetime.fromtimestamp(NOW + 60).isoformat(timespec="seconds"), 60.0),
        ("UNLIMITED", "2036-01-01T00:00:00", None),
        ("01:00:00", "Unknown", None),
    ],
)
def test_a_job_that_slurm_shows(limit: str, end: str, left_s: float | None) -> None:
    found = slurm_job(JOB_LINE.format(limit, end), NOW)
    assert (None if found is None else found.left_s) == (
        None if left_s is None else pytest.approx(left_s, abs=1.0)
    )


def test_a_container_without_scontrol_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told, events = watched(Slurm({"SLURMD_NODENAME": "gpu-1"}), looks=3)
    assert told == [] and [kind for kind, _ in events] == ["notice_source_failed"]


def test_sources_are_named_by_a_list() -> None:
    assert [type(s) for s in read_sources("aws, gcp=http://127.0.0.1:1,file=/x,slurm", {})] == [
        Aws,
        Gcp,
        File,
        SlurmEnd,
        Slurm,
    ]
    assert read_sources("none", {}) == read_sources("auto", {}) == read_sources("", {}) == []
    assert [type(s) for s in read_sources("auto", {"SLURM_JOB_ID": "7"})] == [SlurmEnd, Slurm]
    for wrong in ("spot", "file", "file=", "aws=ftp://x", "command= "):
        with pytest.raises(UsageError, match="no such source") as caught:
            read_sources(wrong, {})
        assert caught.value.hint


class Script:
    """A source with predefined answers, one per query. An exception is raised."""

    name, period_s = "script", 1.0

    def __init__(self, *says: list[Foreseen] | Exception) -> None:
        self.says = list(says)

    async def look(self) -> list[Foreseen]:
        said = self.says.pop(0)
        if isinstance(said, Exception):
            raise said
        return said


def watched(source: NoticeSource, looks: int) -> tuple[list[Notice], list[tuple[str, dict[str, Any]]]]:
    """Return the notices and events of ``looks`` queries."""
    told: list[Notice] = []
    events: list[tuple[str, dict[str, Any]]] = []

    class Fake:
        def append(self, kind: str, data: Any, *, durable: bool = False) -> None:
            events.append((kind, data))

    watch = NoticeWatch(NodeId("node1"), [source], told.append, Fake())

    async def run() -> None:
        for _ in range(looks):
            await watch.look(source)

    asyncio.run(run())
    return told, events


def test_only_what_has_changed_is_told() -> None:
    late, soon = Foreseen("spot", 100.0), Foreseen("spot", 10.0)
    told, events = watched(Script([], [late], [late], [soon], OSError("no route"), [soon], []), looks=7)
    assert [(n.left_s, n.withdrawn) for n in told] == [(100.0, False), (10.0, False), (10.0, True)]
    assert {n.node_id for n in told} == {NodeId("node1")} and len(events) == 1


def test_the_end_of_the_job_is_no_notice_of_one_node() -> None:
    (told,), _ = watched(Script([Foreseen("slurm", 5.0, whole_job=True)]), looks=1)
    assert told.node_id == NodeId("")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "Xid 79"),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics SM Warp Exception", ""),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=9, MMU Fault", ""),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "EDAC MC0: 1 UE"),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0", ""),
        ("blk_update_request: critical medium error, dev sda, sector 1", "critical medium error"),
        ("systemd[1]: Started Session 1", ""),
    ],
)
def test_a_line_of_the_kernel_tells_broken_hardware_from_programs(line: str, what: str) -> None:
    assert broken_by(line) == what


def test_what_the_kernel_has_said_before_does_not_count_and_what_it_says_stays(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    xid = "4,1,2,-;NVRM: Xid (PCI:0000:3b:00): 79, off the bus\n"
    path.write_text(xid)
    log = KernelLog(path)
    node = BuiltIn((), log, shm=tmp_path / "none")
    assert look(node) == []
    with path.open("a") as file:
        file.write(xid + xid)
    assert look(node) == look(node) == [Foreseen("health: kernel log: Xid 79")]
    log.close()


def test_a_full_disk_is_a_sick_node_and_what_cannot_be_read_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = KernelLog(tmp_path / "none")
    assert look(BuiltIn((tmp_path, tmp_path / "none"), log)) == []
    monkeypatch.setattr("holdfast.runtime.node.health_checks.DISK_FREE_BYTES_LEAST", 1 << 62)
    assert look(BuiltIn((tmp_path, tmp_path / "none"), log)) == [Foreseen(f"health: {tmp_path} is full")]


def test_the_users_command_says_whether_the_node_is_fit() -> None:
    assert look(HealthCommand("true", 1.0)) == []
    words = f"{sys.executable} -c 'raise SystemExit(3)'"
    assert look(HealthCommand(words, 1.0)) == [Foreseen(f"health: {sys.executable} ended with 3")]
    with pytest.raises(OSError):
        look(HealthCommand("/no/such/command", 1.0))


def test_checks_of_its_own_are_for_nodes_that_are_not_alone(tmp_path: Path) -> None:
    alone = RunSettings(run_id="r", health="true", notices="file=/x")
    assert [s.name for s in sources_of(alone, tmp_path, {})] == ["file /x", "health command"]
    several = RunSettings(run_id="r", nnodes=2, nnodes_max=3)
    assert [s.name for s in sources_of(several, tmp_path, {})] == ["health"]
