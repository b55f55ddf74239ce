"""Hosts of one job with different versions: a different Holdfast is refused, a different framework gives a warning."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.screen.run_view import Watch
from holdfast.core.ids import NodeId
from holdfast.core.protocol.peer_messages import Peer, PeerHello, PeerMessage
from holdfast.errors import ProtocolError
from holdfast.exit_codes import Exit
from holdfast.runtime.agent.peers import PEER_MESSAGES
from holdfast.version import VERSION
from tests.runtime.runs import SOURCE, until
from tests.runtime.test_meeting import Nodes, address

pytestmark = pytest.mark.processes


def other_source(base: Path, file: str, before: str, after: str) -> str:
    """Copy the package with one line replaced. Return the path for Python."""
    shutil.copytree(SOURCE / "holdfast", base / "holdfast", ignore=shutil.ignore_patterns("__pycache__"))
    text = (base / "holdfast" / file).read_text()
    assert text.count(before) == 1
    (base / "holdfast" / file).write_text(text.replace(before, after))
    return str(base)


def with_torch(base: Path, version: str) -> str:
    """Make a directory in which package managers find this version of torch. Return the path for Python."""
    about = base / f"torch-{version}.dist-info" / "METADATA"
    about.parent.mkdir(parents=True)
    about.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    return os.pathsep.join((str(base), str(SOURCE)))


def test_another_version_of_holdfast_is_refused_with_both_nodes_and_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, 2)
    other = other_source(tmp_path / "other", "version.py", f'"{VERSION}"', '"9.8.7"')
    with nodes.node(0, join_s=8.0) as first, nodes.node(1) as second:
        first.start()
        until("it listens", lambda: first.events("agent_started"))
        monkeypatch.setenv("PYTHONPATH", other)
        second.start()
        assert second.wait() == Exit.USAGE
        told = f"node1 has holdfast 9.8.7, node0 has {VERSION}"
        reason = second.events("run_ended")[0].data["reason"]
        assert reason == f"{told}\n  next: install the same version of holdfast on every host"
        assert told in first.wait_event("peer_refused").data["reason"]
        assert first.wait() == Exit.UNMET
        assert told in first.events("run_ended")[0].data["reason"]


def test_another_protocol_is_refused_and_not_taken_for_another_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, 2)
    other = other_source(
        tmp_path / "other", "core/protocol/messages.py", "PROTOCOL_VERSION = 4\n", "PROTOCOL_VERSION = 5\n"
    )
    with nodes.node(0) as first, nodes.node(1) as second:
        first.start()
        until("it listens", lambda: first.events("agent_started"))
        monkeypatch.setenv("PYTHONPATH", other)
        second.start()
        assert second.wait() == Exit.USAGE
        reason = second.events("run_ended")[0].data["reason"]
        assert f"protocol version 4, this process 5 ({address(0)}:{nodes.port})" in reason
        assert "the same version of holdfast" in reason and "token" not in reason
        first.stop()


def test_another_torch_is_warned_of_once_and_trained_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path, 3)
    runs = [nodes.node(number) for number in range(3)]
    with runs[0], runs[1], runs[2]:
        for number, run in enumerate(runs):
            torch = "2.98.0" if number else "2.99.0"
            monkeypatch.setenv("PYTHONPATH", with_torch(tmp_path / f"site{number}", torch))
            run.start()
        assert [run.wait() for run in runs] == [0, 0, 0]
        (told,) = runs[0].events("versions_differ")
        assert (told.data["what"], told.data["here"], told.data["there"]) == ("torch", "2.99.0", "2.98.0")
        for run in runs[1:]:
            assert [e.data["node"] for e in run.events("versions_differ")] == ["node0"]
    watch = Watch(runs[1].dir, runs[1].settings)
    watch.poll()
    (warning,) = [text for text in watch.story.warnings if "torch" in text]
    assert warning.startswith("torch is 2.98.0 on this host, 2.99.0 on node0: ")


@pytest.mark.parametrize("name, text", [("torch", "2" * 65), ("t" * 65, "2")])
def test_a_hello_with_endless_versions_is_no_message(name: str, text: str) -> None:
    peer = Peer(NodeId("node1"), "/home", "127.0.0.1", 1)
    hello = PeerHello(peer=peer, job="", nodes=2, slots=(1,), holdfast="1", versions={"torch": "2"})
    assert PEER_MESSAGES.decode(PEER_MESSAGES.encode(hello)) == hello
    bad: list[PeerMessage] = [
        msgspec.structs.replace(hello, versions={name: text}),
        msgspec.structs.replace(hello, versions={str(n): "1" for n in range(17)}),
        msgspec.structs.replace(hello, holdfast=text * 65),
    ]
    for each in bad:
        with pytest.raises(ProtocolError):
            PEER_MESSAGES.decode(PEER_MESSAGES.encode(each))
