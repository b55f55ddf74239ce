"""The routing of workers' key-value requests: this agent answers them, or forwards them to another node's agent.

With several nodes the agent of rank 0's node has the keys of a generation. The other agents forward requests to that
agent. When a lost connection to that agent is up again, they send the unanswered requests again. A repeated change is
still made only once (``runtime/agent/kv_server.py``).

The agent with the keys serves them until the run ends, even if its node has no workers, because workers of other nodes
may still wait for each other. When all workers start again, the keys are cleared before the first request of the new
start is served, whichever node sends this request. A request of an earlier start is dropped. The keys, and the name of
the node that has them, outlive the agent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import KvRequest
from holdfast.core.protocol.peer_messages import KvBack, KvForward
from holdfast.runtime.agent.agent_events import KvAnswered, KvEvent, KvForwarded
from holdfast.runtime.agent.kv_server import KvServer, Replies


class KvRouter:
    """The router of one agent's key-value requests.

    Args:
        me: the node of this agent.
        server: the key-value store of this agent.
        post: receives replies for workers, and requests for another agent. Its handler must not call the router.
    """

    def __init__(self, me: NodeId, server: KvServer, post: Callable[[KvEvent], None]) -> None:
        self._me = me
        self._server = server
        self._post = post
        self._forwarded: dict[tuple[MemberId, int], KvForward] = {}  # without an answer so far
        self._asked_by: dict[MemberId, NodeId] = {}  # by worker: the node that forwarded its request

    def live_at(self, node_id: str) -> None:
        """Set the node whose agent has the keys of the new generation.

        If ``node_id`` is empty, each agent has the keys of its own workers.
        """
        self._server.live_at("" if node_id == self._me else node_id)

    def begin(self, attempt: int) -> None:
        """Prepare for the ``attempt``-th start of the job's workers: drop the keys of earlier starts."""
        self._server.begin(attempt)

    def request(self, member_id: MemberId, request: KvRequest) -> None:
        """Answer or forward a key-value request of a worker of this node."""
        if not self._server.home:
            self._serve(member_id, request)
            return
        forward = KvForward(member_id=member_id, request=request, attempt=self._server.attempt)
        self._forwarded[member_id, request.request_id] = forward
        self._post(KvForwarded(NodeId(self._server.home), forward))

    def heard(self, node_id: NodeId, message: KvForward | KvBack) -> None:
        """Handle a message of another agent: a request of one of its workers, or the reply to a forwarded request."""
        if isinstance(message, KvForward):
            # This request may reach this node before the order to start its workers.
            self._server.begin(message.attempt)
            if message.attempt < self._server.attempt:
                return
            self._asked_by[message.member_id] = node_id
            self._serve(message.member_id, message.request)
        elif self._forwarded.pop((message.member_id, message.reply.request_id), None) is not None:
            self._answer([(message.member_id, message.reply)])

    def line_is_up(self, node_id: NodeId) -> None:
        """Forward the unanswered requests again if the newly connected agent of ``node_id`` has the keys."""
        if node_id == self._server.home:
            for forward in self._forwarded.values():
                self._post(KvForwarded(node_id, forward))

    def forget(self, member_id: MemberId) -> None:
        """Drop the unanswered requests of a worker whose connection closed.

        The worker sends them again after it reconnects.
        """
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
            self._post(KvAnswered(member_id, reply, self._asked_by.get(member_id, NodeId(""))))
