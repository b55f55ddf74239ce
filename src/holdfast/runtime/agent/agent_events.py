"""The events that the components of an agent post to their owner, which is the agent or its election.

Theory. A component (the worker processes, the connections to other agents, the key-value router, ...) knows its owner
only as one function ``post``. The owner has one dispatcher, which names the handler of every type of event. Messages of
``core/protocol/`` are posted in the same way; the dispatcher gives them to the state machine.

Invariants:
1. ``post`` handles an event before it returns. There is no queue between a component and its owner, so effects happen
   in the order of the posts. The driver of a state machine is the only queue: an event that arrives while the
   driver handles another one is handled after that one.
2. A handler may call the component that posts. A component therefore posts only when its own fields are consistent, and
   does not rely on them after the post. For example, a started process is in the list of living processes before
   ``MemberStarted`` is posted, and an ended process has left the list before ``ProcessGone`` is posted. Inside the post
   the state machine may order the kill of that process, or the next start.
3. Events are posted in the thread of the event loop. A component that runs threads hands events over with
   ``call_soon_threadsafe``.
4. No component posts in its constructor, because its owner is not complete then.
5. A component may post while its owner is ending. A closed driver ignores the event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

import msgspec

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import HeldStates, KvReply, MemberExited, MemberStarted, Message
from holdfast.core.protocol.peer_messages import KvBack, KvForward, PeerHere, PeerMessage
from holdfast.exit_codes import Exit
from holdfast.runtime.net.driver import watched


class PartFailed(msgspec.Struct, frozen=True):
    """The failure of a component's background task, which ended with an exception that no other code handles.

    The owner of the component ends with the same exception.
    """

    error: BaseException


class MemoryFreed(msgspec.Struct, frozen=True):
    """The end of the wait for exiting processes: each has freed its memory, or its exit is stuck or takes too long."""


class ProcessGone(msgspec.Struct, frozen=True):
    """The end of a member's process. Its process group is already killed. Only the first such event of a member counts.

    Attributes:
        pid: the process id; 0 if no process of the member is known.
        code: the exit code; None if it is not known or a signal ended the process.
        killed_by: the signal that ended the process; None if it is not known or the process exited.
        died_ns: the time of the end, on the monotonic clock.
    """

    member_id: MemberId
    pid: int
    code: int | None
    killed_by: int | None
    died_ns: int


class DeathRead(msgspec.Struct, frozen=True):
    """The result of reading the status page of a dead member.

    Attributes:
        exited: the report of the member's end, for the state machine.
        error: why the page could not be read; ``exited`` then has no facts from the page. Empty if the page was read.
    """

    exited: MemberExited
    error: str = ""


class FromPeer(msgspec.Struct, frozen=True):
    """A message from another agent. The messages of one connection are posted in the order of their arrival."""

    node_id: NodeId
    message: PeerMessage


class TurnedAway(msgspec.Struct, frozen=True):
    """The event that another agent has refused this agent, while this agent and its connected agents have no job.

    A refusal after that time is only logged. It comes from an agent of another job, or from a wrongly started host at
    the address of a lost node.
    """

    reason: str


class KvReceived(msgspec.Struct, frozen=True):
    """A key-value message from another agent: a request for this agent, or the reply to a forwarded request."""

    node_id: NodeId
    message: KvForward | KvBack


class JobNamed(msgspec.Struct, frozen=True):
    """The name of the job, which is known as soon as its agents have met. After this event workers may start."""

    job: str


class NotJoined(msgspec.Struct, frozen=True):
    """The failure of this agent to join a job. The run on this node ends with exit code ``code``."""

    code: Exit
    reason: str


class KvForwarded(msgspec.Struct, frozen=True):
    """A key-value request of a worker of this node, to be sent to the agent of node ``node_id``.

    The event is posted again if the request may have been lost with a connection.
    """

    node_id: NodeId
    request: KvForward


class KvAnswered(msgspec.Struct, frozen=True):
    """The reply to a key-value request of a member.

    Attributes:
        node_id: the node whose agent forwarded the request; empty if the member's node is this one.
    """

    member_id: MemberId
    reply: KvReply
    node_id: NodeId


class RecordsWanted(msgspec.Struct, frozen=True):
    """The order to ask a connected worker for the flight records of its framework, as evidence about a hang."""

    member_id: MemberId


class LookedLast(msgspec.Struct, frozen=True):
    """The report that all evidence about a silent worker is collected and posted. The owner then kills the worker.

    Attributes:
        grace_s: seconds between SIGTERM and SIGKILL; 0 sends SIGKILL at once.
    """

    member_id: MemberId
    grace_s: float


ProcessEvent = MemberStarted | ProcessGone | PartFailed
PeersEvent = FromPeer | PeerHere | TurnedAway | PartFailed
LinkEvent = Message | PartFailed
ElectionEvent = Message | KvReceived | JobNamed | NotJoined
KvEvent = KvForwarded | KvAnswered
ReplicationEvent = HeldStates | PartFailed
WatchEvent = Message | RecordsWanted | LookedLast | PartFailed
AgentEvent = ProcessEvent | ElectionEvent | KvEvent | ReplicationEvent | WatchEvent | DeathRead


def start_task(work: Coroutine[None, None, None], post: Callable[[PartFailed], None]) -> asyncio.Task[None]:
    """Start ``work`` as a task, and return the task. If the task raises, ``PartFailed`` is posted at once."""
    return watched(work, lambda error: post(PartFailed(error)))
