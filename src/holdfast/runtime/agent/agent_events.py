"""The events that the components of an agent post to their owner, which is the agent or its election.

Theory. A component (the worker processes, the connections to other agents, the key-value router, ...) knows its owner
only as one function ``post``. The owner has one dispatcher, which names the handler of every type of event. Messages of
``core/protocol/`` are posted in the same way; the dispatcher gives them to the state machine.

Invariants:
1. ``post`` handles an event before it returns. There is no queue between a component and its owner, so effects happen
   in the order of the posts. The driver of a state machine is the only queue: an event that comes while the driver
   handles another one is handled after that one.
2. A handler may call the component that posts. A component therefore posts only when its own fields are consistent, and
   does not rely on them after the post. A started process is listed as living before ``MemberStarted`` is posted, and
   an ended one is no longer listed before ``ProcessGone``: the state machine may order the death of the process, or the
   next start, inside the post.
3. Events are posted in the thread of the event loop. A component that runs threads hands events over with
   ``call_soon_threadsafe``.
4. No component posts in its constructor: its owner is not complete then.
5. A component may post after the end of its owner has begun. A closed driver ignores the event.
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
    """The agent waits for no exiting process any longer: each has freed its memory, or its end makes no progress."""


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
        error: why the page could not be read in time; ``exited`` then holds no facts from the page.
    """

    exited: MemberExited
    error: str = ""


class FromPeer(msgspec.Struct, frozen=True):
    """A message of another agent has come. Those of one connection are posted in their order."""

    node_id: NodeId
    message: PeerMessage


class TurnedAway(msgspec.Struct, frozen=True):
    """Another agent has refused this agent, which has not joined a job yet.

    After this agent has joined, a refusal is only logged. Such a refusal comes from another job, or from a wrongly
    started host at the address of a lost node.
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
    """A worker of this node has requested keys that another node serves. It is posted again if the request was lost."""

    node_id: NodeId
    request: KvForward


class KvAnswered(msgspec.Struct, frozen=True):
    """The answer to a key-value request of a member is known.

    Attributes:
        node_id: the node whose agent forwarded the request, if the member is not connected to this agent; otherwise
            empty.
    """

    member_id: MemberId
    reply: KvReply
    node_id: NodeId


class RecordsWanted(msgspec.Struct, frozen=True):
    """A connected worker has to write the records of its framework, because evidence is being collected."""

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
