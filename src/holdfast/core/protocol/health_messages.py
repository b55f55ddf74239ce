"""Messages about what is seen of workers and of their state: stillness, evidence, pace, copies that differ.

Part of the vocabulary of ``core/protocol/messages.py``, under the same rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import Message


class Stalled(Message, frozen=True):
    """Every worker of this node has been without progress for longer than its bound (``core/watch/stall_detector.py``)."""

    node_id: NodeId
    generation: Generation  # of the pages
    idle_s: float  # the shortest of their stillnesses: it was within its bound so long ago
    bound_s: float  # the longest of their bounds
    step_s: float  # median of the recent steps; 0: unknown
    waiting: bool = False  # one of them is in a collective
    stopped: bool = False  # the process of one of them is, or one that it waits for


class Late(Message, frozen=True):
    """A process that has not done a step yet is too slow for one that starts beside others that train."""

    member_id: MemberId
    node_id: NodeId
    idle_s: float
    stopped: bool


class Active(Message, frozen=True):
    """What workers of this node do in a recovery, or before their first step (``core/watch/activity.py``).

    ``moving``: have made progress since this was said last: bytes given, taken, compared or written, or a start that
    has come further. ``stopped``: all processes that are stopped now, whatever was said before.
    """

    node_id: NodeId
    moving: tuple[MemberId, ...] = ()
    stopped: tuple[MemberId, ...] = ()


class ProgressResumed(Message, frozen=True):
    """A worker of a stalled node moves again."""

    node_id: NodeId
    generation: Generation


LAST_LOOK = 0
"""Number of evidence that nobody has asked for: about a worker that is about to be killed for its silence."""


class CollectEvidence(Message, frozen=True):
    """Collect evidence about every worker of the node, and answer :class:`Evidence` with this ``number``."""

    node_id: NodeId
    number: int


class CollectiveSeen(msgspec.Struct, frozen=True, array_like=True):
    """One of the last collectives of a rank; ``number`` counts those of its group, point-to-point has none (0)."""

    group: str
    number: int
    what: str
    under_way: bool
    age_s: float = 0.0  # since it began


class DeviceSeen(msgspec.Struct, frozen=True, array_like=True):
    """Collectives of one group on the devices of a rank, by their numbers in the group.

    Attributes:
        group: its name.
        given: the newest one that the host has given to the device.
        begun: the newest one that is known to have begun there; without timing that is ``ended``.
        ended: all up to this one are over.
        what: the oldest one that is not over, or the newest.
    """

    group: str
    given: int
    begun: int
    ended: int
    what: str


class Records(msgspec.Struct, frozen=True):
    """What the flight recorders of a worker's framework hold: a summary of its devices, and all of it."""

    devices: tuple[DeviceSeen, ...] = ()
    recorders: dict[str, msgspec.Raw] = {}  # JSON by the name of the recorder


class ShowRecords(Message, frozen=True):
    """Write :class:`Records` beside the status page; an answer is the file."""

    member_id: MemberId


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in a stall, from its status page, /proc and its stacks. ``process`` is the letter of its state."""

    member_id: MemberId
    rank: int
    step: int
    phase: str
    idle_s: float
    bound_s: float
    sequence: int = 0  # collectives started in this step
    usual_sequence: int = 0  # the same at the vote of the last committed step
    process: str = ""  # R runs, S sleeps, D cannot be interrupted, T is stopped
    cpu: float = 0.0  # share of a core that its main thread used while it was looked at
    wchan: str = ""  # what it waits for in the kernel
    where: str = ""  # innermost Python frame of the main thread; empty: it did not answer
    section: str = ""
    collectives: tuple[CollectiveSeen, ...] = ()  # the last ones, oldest first
    devices: tuple[DeviceSeen, ...] = ()  # where they are in the collectives of each group
    stacks: str = ""  # file with all stacks, below the run directory
    records: str = ""  # file with the records of the framework, below the run directory
    child: int = 0  # a process that it has started, and that is stopped; 0: none
    left: bool = False  # its script has left its loops


class Evidence(Message, frozen=True):
    """Answer to :class:`CollectEvidence`: all workers of a node that live; or a last look at one, with ``LAST_LOOK``."""

    node_id: NodeId
    number: int
    ranks: tuple[RankEvidence, ...]


class StepTime(msgspec.Struct, frozen=True):
    """One worker's median seconds per step without waiting for peers, over ``samples`` steps."""

    rank: int
    samples: int
    busy_s: float


class StepTimes(Message, frozen=True):
    """How fast the workers of a node are, now and then."""

    node_id: NodeId
    generation: Generation
    ranks: tuple[StepTime, ...]
    step_s: float = 0.0  # the longest of their last steps


class CopyDigest(msgspec.Struct, frozen=True, array_like=True):
    """Digest of a part of the state that ``holders`` have in common; ``what`` names it, the same on all of them."""

    holders: str  # ranks, as ``ranks_text`` writes them: there may be thousands
    what: str
    digest: int  # xxh3-64


class CopiesDiffer(Message, frozen=True):
    """A vote said that copies of the state of ``step`` differ: the digests of this rank's."""

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]


class StateDigests(Message, frozen=True):
    """Answer to a ``Settle`` that asks for it: digests of this rank's state of ``step``, whose layout it has told."""

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]  # of all that other ranks hold too; empty: cannot be compared


def ranks_text(ranks: Sequence[int]) -> str:
    """Ascending ``ranks``, short where their distance is always the same: ``0-4088/8``, else ``0,3,4``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def ranks_of(text: str) -> Sequence[int]:
    """Inverse of :func:`ranks_text`. Raises: ValueError."""
    first, dash, rest = text.partition("-")
    if not dash:
        return [int(rank) for rank in text.split(",")]
    last, _, step = rest.partition("/")
    return range(int(first), int(last) + 1, int(step))
