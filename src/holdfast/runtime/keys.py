"""The key-value requests of one node's workers: served by this agent, or by the one that owns the key space.

With several nodes the keys of a generation live in the agent of rank 0's node. The others forward, and ask once more
when the line to it is up again: whatever was swallowed, a change is made once (``runtime/kv.py``).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.core.council import KvBack, KvForward
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.messages import KvReply, KvRequest
from holdfast.runtime.kv import KvServer, Replies


class Keys:
    """See the module.

    Args:
        me: this node.
        server: where this agent keeps the keys that are its own to serve.
        reply: to a worker of this node; False when it is none.
        send: to another agent; what gets lost is asked for again.
    """

    def __init__(
        self,
        me: NodeId,
        server: KvServer,
        reply: Callable[[MemberId, KvReply], bool],
        send: Callable[[NodeId, KvForward | KvBack], object],
    ) -> None:
        self._me = me
        self._server = server
        self._reply = reply
        self._send = send
        self._home: NodeId | None = None  # whose agent owns the key space; None: this one
        self._forwarded: dict[tuple[MemberId, int], KvForward] = {}  # without an answer yet
        self._asked_by: dict[MemberId, NodeId] = {}  # nodes of the workers of others

    def live_at(self, node_id: str) -> None:
        """The keys of the generation that begins live there; empty: each agent has its own."""
        self._home = NodeId(node_id) if node_id not in ("", self._me) else None

    def request(self, member_id: MemberId, request: KvRequest) -> None:
        """A worker of this node asks."""
        if self._home is None:
            self._serve(member_id, request)
            return
        forward = KvForward(member_id=member_id, request=request)
        self._forwarded[member_id, request.request_id] = forward
        self._send(self._home, forward)

    def heard(self, node_id: NodeId, message: KvForward | KvBack) -> None:
        """Another agent asks for a worker of its own, or answers."""
        if isinstance(message, KvForward):
            self._asked_by[message.member_id] = node_id
            self._serve(message.member_id, message.request)
        elif self._forwarded.pop((message.member_id, message.reply.request_id), None) is not None:
            self._answer([(message.member_id, message.reply)])

    def line_is_up(self, node_id: NodeId) -> None:
        """A line to another agent is up, for the first time or again."""
        if node_id == self._home:
            for forward in self._forwarded.values():
                self._send(node_id, forward)

    def forget(self, member_id: MemberId) -> None:
        """The line of a worker closed: it asks again when it is back."""
        self._server.forget(member_id)
        for key in [key for key in self._forwarded if key[0] == member_id]:
            del self._forwarded[key]

    def clear(self) -> None:
        """Nobody of the generation is left here."""
        self._server.clear()

    def _serve(self, member_id: MemberId, request: KvRequest) -> None:
        self._answer(self._server.request(time.monotonic(), member_id, request))
        if request.op == "wait":
            asyncio.get_running_loop().call_later(request.timeout_s, self._expire)

    def _expire(self) -> None:
        self._answer(self._server.expire(time.monotonic()))

    def _answer(self, replies: Replies) -> None:
        for member_id, reply in replies:
            if not self._reply(member_id, reply) and member_id in self._asked_by:
                self._send(self._asked_by[member_id], KvBack(member_id=member_id, reply=reply))
