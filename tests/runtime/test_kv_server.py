"""The key-value store: meaning of each operation, waits, and survival of its agent's death."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.ids import MemberId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.runtime.agent import kv_server
from holdfast.runtime.agent.kv_server import KvServer
from tests.runtime.runs import no_file_beyond

ANNE, BERT = MemberId(1), MemberId(2)


class Caller:
    """One member that numbers its requests."""

    def __init__(self, server: KvServer, who: MemberId) -> None:
        self.server = server
        self.who = who
        self.number = 0

    def ask(self, op: Any, *keys: str, now: float = 0.0, **more: Any) -> list[tuple[MemberId, KvReply]]:
        self.number += 1
        return self.server.request(now, self.who, KvRequest(request_id=self.number, op=op, keys=keys, **more))

    def one(self, op: Any, *keys: str, **more: Any) -> KvReply:
        ((who, reply),) = self.ask(op, *keys, **more)
        assert who == self.who
        return reply


def test_every_operation(tmp_path: Path) -> None:
    anne = Caller(KvServer.open(tmp_path / "kv"), ANNE)
    assert anne.one("get", "a").error == "missing"
    assert anne.one("set", "a", value=b"1").ok
    assert anne.one("get", "a").value == b"1"
    assert anne.one("add", "a", amount=4).number == 5
    assert anne.one("add", "new", amount=-2).number == -2
    assert anne.one("append", "text", value=b"x").ok and anne.one("append", "text", value=b"y").ok
    assert anne.one("get", "text").value == b"xy"
    assert anne.one("add", "text", amount=1).error == "not a number"
    assert anne.one("check", "a", "text").ok and not anne.one("check", "a", "b").ok
    assert anne.one("count").number == 3 and anne.one("count", "te").number == 1
    assert anne.one("delete", "a", "b").number == 1 and not anne.one("check", "a").ok
    assert anne.one("set").error == "missing"


def test_compare_set_is_that_of_torch(tmp_path: Path) -> None:
    anne = Caller(KvServer.open(tmp_path / "kv"), ANNE)
    assert anne.one("compare_set", "k", expected=b"old", value=b"new").value == b"old"
    assert not anne.one("check", "k").ok
    assert anne.one("compare_set", "k", value=b"first").value == b"first"
    reply = anne.one("compare_set", "k", expected=b"other", value=b"no")
    assert (reply.value, reply.ok) == (b"first", False)
    assert anne.one("compare_set", "k", expected=b"first", value=b"second").value == b"second"


def test_waits_end_by_a_set_a_timeout_or_the_callers_death(tmp_path: Path) -> None:
    server = KvServer.open(tmp_path / "kv")
    anne, bert = Caller(server, ANNE), Caller(server, BERT)
    assert anne.ask("wait", "x", "y", timeout_s=5.0) == []
    assert len(bert.ask("set", "x")) == 1
    replies = bert.ask("set", "y")
    assert [(who, reply.request_id, reply.error) for who, reply in replies] == [(BERT, 2, ""), (ANNE, 1, "")]
    assert anne.one("wait", "x").ok
    assert anne.ask("wait", "never", timeout_s=5.0) == []
    assert server.expire(4.9) == []
    assert [(who, reply.error) for who, reply in server.expire(5.0)] == [(ANNE, "timeout")]
    assert anne.ask("wait", "late") == []
    server.forget(ANNE)
    assert len(bert.ask("set", "late")) == 1


def test_a_successor_knows_every_answered_change_and_makes_none_twice(tmp_path: Path) -> None:
    first = KvServer.open(tmp_path / "kv")
    anne = Caller(first, ANNE)
    anne.one("set", "a", value=b"v")
    assert anne.one("add", "n", amount=1).number == 1
    with (tmp_path / "kv").open("ab") as log:
        log.write(b"\0\0\0\x40torn")
    second = KvServer.open(tmp_path / "kv")
    again = Caller(second, ANNE)
    again.number = 1
    assert again.one("add", "n", amount=1).number == 1
    assert again.one("get", "a").value == b"v"
    assert again.one("add", "n", amount=1).number == 2
    third = Caller(KvServer.open(tmp_path / "kv"), BERT)
    assert third.one("get", "n").value == b"2"


def test_limits_and_a_log_that_is_shortened(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(kv_server, "SIZE_BYTES_MAX", 1000)
    monkeypatch.setattr(kv_server, "LOG_SIZE_BYTES_MAX", 4000)
    anne = Caller(KvServer.open(tmp_path / "kv"), ANNE)
    for number in range(400):
        assert anne.one("set", "k", value=b"%d" % number * 50).ok
    assert (tmp_path / "kv").stat().st_size < 20_000, "a tenth of what was asked, and the newest answers"
    assert anne.one("set", "big", value=bytes(2000)).error == "full"
    assert Caller(KvServer.open(tmp_path / "kv"), BERT).one("get", "k").value == b"399" * 50


def test_where_nothing_can_be_written_the_workers_are_served(tmp_path: Path) -> None:
    """Records that the log lacks are written when there is room.

    A successor before that time knows the earlier state.
    """
    log = tmp_path / "kv"
    anne = Caller(KvServer.open(log), ANNE)
    assert anne.one("set", "before", value=b"1").ok
    size_bytes = log.stat().st_size
    with no_file_beyond(size_bytes + 100):
        for number in range(3):
            assert anne.one("set", "big", value=bytes(1000 + number)).ok
            assert len(anne.one("get", "big").value) == 1000 + number
        assert log.stat().st_size == size_bytes
    meanwhile = Caller(KvServer.open(log), BERT)
    assert meanwhile.one("get", "before").value == b"1" and meanwhile.one("get", "big").error == "missing"
    assert anne.one("set", "after", value=b"2").ok
    assert anne.one("set", "then", value=b"3").ok
    successor = Caller(KvServer.open(log), BERT)
    assert [successor.one("get", key).value for key in ("before", "after", "then")] == [b"1", b"2", b"3"]
    assert len(successor.one("get", "big").value) == 1002


def test_the_keys_go_once_when_all_start_again(tmp_path: Path) -> None:
    anne = Caller(KvServer.open(tmp_path / "kv"), ANNE)
    anne.server.begin(0)
    anne.server.live_at("node1")
    assert anne.one("set", "k", value=b"1").ok
    anne.ask("wait", "never", timeout_s=1.0)
    anne.server.begin(0)
    assert anne.one("count").number == 1, "said again"
    successor = KvServer.open(tmp_path / "kv")
    assert (successor.attempt, successor.home) == (0, "node1")
    successor.begin(1)
    assert Caller(successor, BERT).one("count").number == 0 and successor.expire(99.0) == []
    third = KvServer.open(tmp_path / "kv")
    assert (third.attempt, third.home) == (1, "node1") and Caller(third, BERT).one("count").number == 0


def test_a_change_from_before_the_log_was_shortened_is_not_made_twice(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(kv_server, "LOG_SIZE_BYTES_MAX", 4000)
    first = KvServer.open(tmp_path / "kv")
    anne, bert = Caller(first, ANNE), Caller(first, BERT)
    assert anne.one("add", "n", amount=3).number == 3
    assert anne.one("append", "text", value=b"x").ok
    inode, count = (tmp_path / "kv").stat().st_ino, 0
    while (tmp_path / "kv").stat().st_ino == inode:
        assert bert.one("set", "k", value=bytes(100)).ok
        count += 1
    second = KvServer.open(tmp_path / "kv")
    again = Caller(second, ANNE)
    assert again.one("add", "n", amount=3).number == 3
    assert again.one("append", "text", value=b"x").ok
    assert again.one("get", "n").value == b"3" and again.one("get", "text").value == b"x"
    assert count > 10


DIES = """
import os, signal, sys
from pathlib import Path
from holdfast.core.ids import MemberId
from holdfast.core.protocol.messages import KvRequest
from holdfast.runtime.agent import kv_server
kv_server.LOG_SIZE_BYTES_MAX = 4000
server = kv_server.KvServer.open(Path(sys.argv[1]))
folder, steps = str(Path(sys.argv[1]).parent), int(sys.argv[2])
def trap(event, args):
    global steps
    if event in ("os.rename", "open") and folder in str(args):
        steps -= 1
        if steps == 0:
            os.kill(os.getpid(), signal.SIGKILL)
sys.addaudithook(trap)
for number in range(1, 1000):
    request = KvRequest(request_id=number, op="add", keys=("n",), amount=1)
    print(server.request(0.0, MemberId(1), request)[0][1].number, flush=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("steps", [1, 2, 3])  # before the new file exists, before its rename, after it
def test_an_agent_that_is_killed_while_it_shortens_its_log_loses_nothing(tmp_path: Path, steps: int) -> None:
    command = [sys.executable, "-c", DIES, str(tmp_path / "kv"), str(steps)]
    child = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=60)
    assert child.returncode == -signal.SIGKILL
    answered = int(child.stdout.split()[-1])
    successor = Caller(KvServer.open(tmp_path / "kv"), ANNE)
    assert answered > 10 and successor.one("get", "n").value == b"%d" % answered
    successor.number = answered - 1
    assert successor.one("add", "n", amount=1).number == answered, "it is asked again, and not made again"
    assert successor.one("add", "n", amount=1).number == answered + 1
