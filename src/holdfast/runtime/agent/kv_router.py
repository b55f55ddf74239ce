"""The key-value requests of one node's workers: served by this agent, or by the one that owns the key space.

With several nodes the keys of a generation live in the agent of rank 0's node. The others forward, and ask once more
when the line to it is up again: whatever was swallowed, a change is made once (``runtime/agent/kv_server.py``).

That agent serves until the run ends, also when the workers of its own node are gone: those of other nodes may still
wait for each other. It has cleared its keys before the first request of a new start of all workers, whichever node that
comes from; a request of an older start belongs to nobody any more. Where the keys live outlives the agent as they do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.core.protocol.peer_messages import KvBack, KvForward
from holdfast.runtime.agent.kv_server import KvServer, Replies


class KvRouter:
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
        self._forwarded: dict[tuple[MemberId, int], KvForward] = {}  # without an answer yet
        self._asked_by: dict[MemberId, NodeId] = {}  # nodes of the workers of others

    def live_at(self, node_id: str) -> None:
        """The keys of the generation that begins live there; empty: each agent has its own."""
        self._server.live_at("" if node_id == self._me else node_id)

    def begin(self, attempt: int) -> None:
        """Workers of the ``attempt``-th start of the job are about to start here."""
        self._server.begin(attempt)

    def request(self, member_id: MemberId, request: KvRequest) -> None:
        """A worker of this node asks."""
        if not self._server.home:
            self._serve(member_id, request)
            return
        forward = KvForward(member_id=member_id, request=request, attempt=self._server.attempt)
        self._forwarded[member_id, request.request_id] = forward
        self._send(NodeId(self._server.home), forward)

    def heard(self, node_id: NodeId, message: KvForward | KvBack) -> None:
        """Another agent asks for a worker of its own, or answers."""
        if isinstance(message, KvForward):
            self._server.begin(message.attempt)  # the order to start may come to this node later
            if message.attempt < self._server.attempt:
                return
            self._asked_by[message.member_id] = node_id
            self._serve(message.member_id, message.request)
        elif self._forwarded.pop((message.member_id, message.reply.request_id), None) is not None:
            self._answer([(message.member_id, message.reply)])

    def line_is_up(self, node_id: NodeId) -> None:
        """A line to another agent is up, for the first time or again."""
        if node_id == self._server.home:
            for forward in self._forwarded.values():
                self._send(node_id, forward)

    def forget(self, member_id: MemberId) -> None:
        """The line of a worker closed: it asks again when it is back."""
        self._server.forget(member_id)
        for key in [key for key in self._forwarded if key[0] == member_id]:
            del self._forwarded[key]

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
