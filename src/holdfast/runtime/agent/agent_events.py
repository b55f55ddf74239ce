"""The events that the parts of an agent post to their owner, which is the agent or its election.

Theory. A part (the worker processes, the connections to other agents, the key-value router, ...) knows its owner only
as one function ``post``. The owner has one dispatcher, which names the handler of every type of event. Messages of
``core/protocol/`` are posted in the same way; the dispatcher gives them to the state machine.

Invariants:
1. ``post`` handles an event before it returns. There is no queue between a part and its owner, so effects happen in the
   order of the posts. The driver of a state machine is the only queue: what it is given while it handles an event is
   handled after that event.
2. A handler may call the part that posts. A part therefore posts only when its own fields are consistent, and does not
   rely on them after the post. A started process is living before ``MemberStarted``, and an ended one is not living
   before ``ProcessGone``: the state machine may order its death, or the next start, inside the post.
3. Events are posted in the thread of the event loop. A part with threads of its own hands them over with
   ``call_soon_threadsafe``.
4. No part posts in its constructor: its owner is not complete then.
5. A part may post after the end of its owner has begun. A closed driver ignores it.
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
    """A background task ended with an exception that no other code handles. Its owner ends with this exception."""

    error: BaseException


class MemoryFreed(msgspec.Struct, frozen=True):
    """No exiting process is left to wait for: their memory is free, or their ends make no progress."""


class ProcessGone(msgspec.Struct, frozen=True):
    """The process of a member has stopped running, and its group is killed. The first event of a member counts.

    Attributes:
        pid: 0 if no process of the member is known.
        code: its exit code, if it is known.
        killed_by: the signal that ended it, if it is known.
        died_ns: the time of its end, on the monotonic clock.
    """

    member_id: MemberId
    pid: int
    code: int | None
    killed_by: int | None
    died_ns: int


class DeathRead(msgspec.Struct, frozen=True):
    """The status page of a member that is gone was read.

    Attributes:
        exited: the report for the state machine.
        error: why the page could not be read in time; then ``exited`` says that nothing is known.
    """

    exited: MemberExited
    error: str = ""


class FromPeer(msgspec.Struct, frozen=True):
    """A message of another agent has come. Those of one connection are posted in their order."""

    node_id: NodeId
    message: PeerMessage


class TurnedAway(msgspec.Struct, frozen=True):
    """Another agent has refused this one, which has not joined a job yet.

    A refusal after that is only logged. It comes from another job, or from a wrongly started host at the address of a
    lost node.
    """

    reason: str


class KvReceived(msgspec.Struct, frozen=True):
    """A message of another agent about the key-value store has come."""

    node_id: NodeId
    message: KvForward | KvBack


class JobNamed(msgspec.Struct, frozen=True):
    """The agents of the job have met, and the job has its name. Workers may start."""

    job: str


class NotJoined(msgspec.Struct, frozen=True):
    """This agent cannot take part in the job. The run ends here with this exit code, for this reason."""

    code: Exit
    reason: str


class KvForwarded(msgspec.Struct, frozen=True):
    """A request of a worker of this node is for the keys of another node. A lost one is posted again."""

    node_id: NodeId
    request: KvForward


class KvAnswered(msgspec.Struct, frozen=True):
    """A request of a member has its answer.

    Attributes:
        node_id: the node whose agent forwarded the request, for a member that is not connected here. Empty: none did.
    """

    member_id: MemberId
    reply: KvReply
    node_id: NodeId


class RecordsWanted(msgspec.Struct, frozen=True):
    """The watcher collects evidence, and this connected worker has to write the records of its framework."""

    member_id: MemberId


class LookedLast(msgspec.Struct, frozen=True):
    """All available evidence of a silent worker has been posted; the worker is to be killed after ``grace_s``."""

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
    """Start ``work`` as a task, and return the task. An exception of the task is posted at once."""
    return watched(work, lambda error: post(PartFailed(error)))
