"""Messages about the health of workers and of their state: stalls, evidence, step times, digests of copies.

These messages follow the rules of ``core/protocol/messages.py``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import Message, OutsideCollectives


class Stalled(Message, frozen=True):
    """Report of an agent: no worker of its node has made progress within its time limit (``stall_detector.py``)."""

    node_id: NodeId
    generation: Generation  # the generation on the status pages
    idle_s: float  # shortest time without progress among the workers
    bound_s: float  # longest of their time limits
    step_s: float  # median of the recent steps; 0: unknown
    waiting: bool = False  # at least one worker is in a collective
    stopped: bool = False  # the process of a worker is stopped, or a process that it waits for


class Late(Message, frozen=True):
    """Report that a process has made no progress for too long before its first step, while the other ranks train."""

    member_id: MemberId
    node_id: NodeId
    idle_s: float
    stopped: bool


class Active(Message, frozen=True):
    """Report of an agent on its workers in a recovery or before their first step (``core/watch/activity.py``).

    Attributes:
        moving: the workers that made progress since the last report: they moved bytes of state, or their start
            advanced.
        stopped: all processes that are stopped now, whether reported before or not.
    """

    node_id: NodeId
    moving: tuple[MemberId, ...] = ()
    stopped: tuple[MemberId, ...] = ()


class ProgressResumed(Message, frozen=True):
    """Report of an agent that a worker of its stalled node makes progress again."""

    node_id: NodeId
    generation: Generation


LAST_LOOK = 0
"""The ``number`` of evidence that no order asked for: about a worker just before it is killed, because it did not
answer.
"""


class CollectEvidence(Message, frozen=True):
    """Order to an agent to collect evidence about every worker of its node.

    The answer is :class:`Evidence` with this ``number``.
    """

    node_id: NodeId
    number: int


class CollectiveSeen(msgspec.Struct, frozen=True, array_like=True):
    """One of the last collectives of a rank. ``number`` counts the collectives of its group; 0 means point-to-point."""

    group: str
    number: int
    what: str
    under_way: bool
    age_s: float = 0.0  # seconds since the collective began


class DeviceSeen(msgspec.Struct, frozen=True, array_like=True):
    """The progress of the devices of a rank in the collectives of one group. Each number counts these collectives.

    Attributes:
        group: name of the group.
        given: the newest collective that the host has launched on the device.
        begun: the newest collective that is known to have begun on the device; equal to ``ended`` if no start is
            recorded.
        ended: all collectives up to this one have ended.
        what: description of the oldest collective that has not ended; if all have ended, of the newest.
    """

    group: str
    given: int
    begun: int
    ended: int
    what: str


class Records(msgspec.Struct, frozen=True):
    """The contents of the flight recorders of a worker's framework: a summary per device, and the full records."""

    devices: tuple[DeviceSeen, ...] = ()
    recorders: dict[str, msgspec.Raw] = {}  # JSON by the name of the recorder


class ShowRecords(Message, frozen=True):
    """Order to a worker to write :class:`Records` to a file beside its status page. The file is the answer."""

    member_id: MemberId


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence about one worker in a stall, from its status page, /proc and its stacks."""

    member_id: MemberId
    rank: int
    step: int
    phase: str
    idle_s: float
    bound_s: float
    sequence: int = 0  # collectives started in this step
    usual_sequence: int = 0  # value of ``sequence`` at the vote of the last committed step
    process: str = ""  # state letter of /proc: R runs, S sleeps, D cannot be interrupted, T is stopped
    cpu: float = 0.0  # share of a core that its main thread used during the inspection
    wchan: str = ""  # kernel function in which it waits
    where: str = ""  # innermost Python frame of the main thread; empty: no stack was obtained
    section: str = ""
    collectives: tuple[CollectiveSeen, ...] = ()  # the last ones, oldest first
    devices: tuple[DeviceSeen, ...] = ()  # the devices' progress in the collectives of each group
    stacks: str = ""  # file with all stacks, below the run directory
    records: str = ""  # file with the records of the framework, below the run directory
    outside: OutsideCollectives | None = None  # the newest; None: it has made none
    child: int = 0  # id of a stopped process that the worker has started; 0: none
    left: bool = False  # its script has left its loops over steps
    meets: bool = False  # it waits between two steps for an agreement of all ranks


class Evidence(Message, frozen=True):
    """Answer to :class:`CollectEvidence` about all living workers of a node.

    With ``LAST_LOOK`` as ``number`` the message comes without an order, about one worker that is about to be killed.
    """

    node_id: NodeId
    number: int
    ranks: tuple[RankEvidence, ...]


class StepTime(msgspec.Struct, frozen=True):
    """The median duration of a step of one worker in seconds, over ``samples`` steps, without its waits for peers."""

    rank: int
    samples: int
    busy_s: float


class StepTimes(Message, frozen=True):
    """Report that an agent sends every few seconds: the step times of its workers."""

    node_id: NodeId
    generation: Generation
    ranks: tuple[StepTime, ...]
    step_s: float = 0.0  # longest duration among the last steps of the workers


class CopyDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of one rank's copy of a part of the state.

    All ``holders`` have this part and give it the same name (``what``).
    """

    holders: str  # ranks, as ``ranks_text`` writes them: there may be thousands
    what: str
    digest: int  # xxh3-64


class CopiesDiffer(Message, frozen=True):
    """Report of one rank after a vote has found differing copies of the state of ``step``: digests of its copies."""

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]


class StateDigests(Message, frozen=True):
    """Answer to a decision that asks for digests (``Settle.vouch``): the digests of this rank's state of ``step``.

    The rank publishes the layout of that state before this message.
    """

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]  # of all parts that other ranks also have; empty: nothing can be compared


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ``ranks`` as text: ``0-4088/8`` if their distance is constant, otherwise ``0,3,4``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def ranks_of(text: str) -> Sequence[int]:
    """Return the ranks that :func:`ranks_text` wrote as ``text``.

    Raises:
        ValueError: the text is not of that form.
    """
    first, dash, rest = text.partition("-")
    if not dash:
        return [int(rank) for rank in text.split(",")]
    last, _, step = rest.partition("/")
    return range(int(first), int(last) + 1, int(step))
