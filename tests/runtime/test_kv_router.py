"""Keys of several nodes: one agent owns them, the others forward requests and repeat them after a lost answer."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.core.protocol.peer_messages import KvBack, KvForward
from holdfast.runtime.agent.agent_events import KvAnswered, KvEvent, KvForwarded
from holdfast.runtime.agent.kv_router import KvRouter
from holdfast.runtime.agent.kv_server import KvServer

A, B = NodeId("node0"), NodeId("node1")
HERE, THERE = MemberId(1), MemberId(2)


class Node:
    """The key-value store of one agent with one worker, and its connection to the other node."""

    def __init__(self, me: NodeId, worker: MemberId, base: Path) -> None:
        self.worker = worker
        self.heard: list[KvReply] = []
        self.wire: list[tuple[NodeId, KvForward | KvBack]] = []
        self.keys = KvRouter(me, KvServer.open(base / f"{me}.log"), self.post)
        self.keys.live_at(A)

    def post(self, event: KvEvent) -> None:
        """Handle an event of the router as the agent does."""
        match event:
            case KvForwarded():
                self.wire.append((event.node_id, event.request))
            case KvAnswered() if event.member_id == self.worker:
                self.heard.append(event.reply)
            case KvAnswered() if event.node_id:
                self.wire.append((event.node_id, KvBack(member_id=event.member_id, reply=event.reply)))

    def deliver(self, other: Node, me: NodeId) -> None:
        """Deliver everything that this node has sent."""
        sent, self.wire = self.wire, []
        for _, message in sent:
            other.keys.heard(me, message)


def add(number: int) -> KvRequest:
    return KvRequest(request_id=number, op="add", keys=("count",), amount=1)


def test_one_node_owns_the_keys_and_a_lost_question_is_asked_again(tmp_path: Path) -> None:
    home, away = Node(A, HERE, tmp_path), Node(B, THERE, tmp_path)
    home.keys.request(HERE, add(1))
    assert [reply.number for reply in home.heard] == [1] and not home.wire
    away.keys.request(THERE, add(1))
    assert not away.heard and [to for to, _ in away.wire] == [A]
    away.wire.clear()  # the connection broke
    away.keys.line_is_up(A)
    away.deliver(home, B)
    assert len(home.heard) == 1 and [to for to, _ in home.wire] == [B]
    home.wire.clear()  # the answer is lost: the change was made, and is not made again
    away.keys.line_is_up(A)
    away.deliver(home, B)
    home.deliver(away, A)
    assert [(reply.request_id, reply.number) for reply in away.heard] == [(1, 2)]
    away.keys.line_is_up(A)
    assert not away.wire, "it is answered"


def test_a_new_start_of_all_begins_with_its_first_request(tmp_path: Path) -> None:
    """The first request of the new start may reach any node. Messages from before that start no longer count."""
    home, away = Node(A, HERE, tmp_path), Node(B, THERE, tmp_path)
    for node in (home, away):
        node.keys.begin(0)
    home.keys.request(HERE, add(1))
    away.keys.request(THERE, add(1))
    stray, away.wire = away.wire, []
    away.keys.begin(1)
    away.keys.request(MemberId(4), add(1))
    away.deliver(home, B)
    home.keys.begin(1)
    home.keys.heard(B, stray[0][1])
    home.keys.request(MemberId(3), add(1))
    home.keys.request(HERE, KvRequest(request_id=9, op="get", keys=("count",)))
    assert home.heard[-1].value == b"2", "one of each that lives"


def test_the_successor_of_an_agent_asks_where_the_keys_are(tmp_path: Path) -> None:
    Node(B, THERE, tmp_path).keys.begin(0)
    events: list[KvEvent] = []
    successor = KvRouter(B, KvServer.open(tmp_path / "node1.log"), events.append)
    successor.request(THERE, add(1))
    assert [type(event) for event in events] == [KvForwarded] and events[0].node_id == A


def test_a_worker_that_is_gone_is_answered_nothing(tmp_path: Path) -> None:
    home, away = Node(A, HERE, tmp_path), Node(B, THERE, tmp_path)
    away.keys.request(THERE, add(1))
    away.keys.forget(THERE)
    away.deliver(home, B)
    home.deliver(away, A)
    assert not away.heard
    away.keys.live_at(B)
    away.keys.request(THERE, add(2))
    assert [reply.number for reply in away.heard] == [1] and not away.wire, "its own keys from now on"
