"""Two nodes that connect by IPv6: a killed rank is replaced, and its state comes from the other node."""

from __future__ import annotations

import secrets
import socket
import threading
from pathlib import Path

import pytest

from holdfast import event_log
from holdfast.runtime.node.spawn import free_port
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("listen_job.py"))


def has_ipv6() -> bool:
    """Return whether ``::1`` is an address of this machine."""
    try:
        free_port("::1")
    except OSError:
        return False
    return socket.has_ipv6


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on loopback here")
def test_nodes_meet_and_replace_by_ipv6(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    words = ["--nnodes", "2", "--rdzv-endpoint", f"[::1]:{free_port('::1')}", "--bind", "::1"]
    words += ["--token-file", str(token), "--run-id", "it"]
    ended: dict[int, tuple[int, str]] = {}

    def launch(node: int) -> None:
        done = run_job(tmp_path, 1, *words, "--node-rank", str(node), JOB)
        ended[node] = done.returncode, done.stdout

    nodes = [threading.Thread(target=launch, args=(node,)) for node in range(2)]
    for node in nodes:
        node.start()
    for node in nodes:
        node.join()
    assert [ended[node][0] for node in range(2)] == [0, 0], ended
    assert ", 1 fault, 0 steps lost" in ended[0][1]
    events = event_log.read(tmp_path / "runs/it-node0/events.jsonl").events
    assert [e.data["action"] for e in events if e.kind == "verdict"] == ["replace"]
