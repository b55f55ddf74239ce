"""Messages about the health of workers and of their state: stalls, evidence, step times, copies that differ.

They belong to the vocabulary of ``core/protocol/messages.py`` and follow its rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import Message


class Stalled(Message, frozen=True):
    """Report that no worker of this node has made progress within its time limit (``stall_detector.py``)."""

    node_id: NodeId
    generation: Generation  # that of the status pages
    idle_s: float  # shortest time without progress among the workers
    bound_s: float  # longest of their time limits
    step_s: float  # median of the recent steps; 0: unknown
    waiting: bool = False  # one of them is in a collective
    stopped: bool = False  # one of the processes is stopped, or a process that it waits for


class Late(Message, frozen=True):
    """Report that a process that has not done a step yet is too slow, while the other ranks train."""

    member_id: MemberId
    node_id: NodeId
    idle_s: float
    stopped: bool


class Active(Message, frozen=True):
    """Report of an agent on its workers in a recovery or before their first step (``core/watch/activity.py``).

    Attributes:
        moving: the workers that made progress since the last report: bytes of state moved, or the start advanced.
        stopped: all processes that are stopped now, whether reported before or not.
    """

    node_id: NodeId
    moving: tuple[MemberId, ...] = ()
    stopped: tuple[MemberId, ...] = ()


class ProgressResumed(Message, frozen=True):
    """Report that a worker of a stalled node makes progress again."""

    node_id: NodeId
    generation: Generation


LAST_LOOK = 0
"""Number of evidence that was not asked for: about a worker that is about to be killed because it did not answer."""


class CollectEvidence(Message, frozen=True):
    """Order to collect evidence about every worker of the node.

    The answer is :class:`Evidence` with this ``number``.
    """

    node_id: NodeId
    number: int


class CollectiveSeen(msgspec.Struct, frozen=True, array_like=True):
    """One of the last collectives of a rank. ``number`` counts those of its group; it is 0 for point-to-point."""

    group: str
    number: int
    what: str
    under_way: bool
    age_s: float = 0.0  # since it began


class DeviceSeen(msgspec.Struct, frozen=True, array_like=True):
    """The progress of the devices of a rank in the collectives of one group, as numbers in that group.

    Attributes:
        group: its name.
        given: the newest collective that the host has launched on the device.
        begun: the newest one that is known to have begun there; without timing that is ``ended``.
        ended: all up to this one have ended.
        what: the oldest one that has not ended; if there is none, the newest.
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
    """Order to write :class:`Records` to a file beside the status page. The file is the answer."""

    member_id: MemberId


class RankEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """The evidence about one worker in a stall, from its status page, /proc and its stacks.

    Attributes: see the comments. ``process`` is the state letter of /proc.
    """

    member_id: MemberId
    rank: int
    step: int
    phase: str
    idle_s: float
    bound_s: float
    sequence: int = 0  # collectives started in this step
    usual_sequence: int = 0  # usual value of ``sequence``: that at the vote of the last committed step
    process: str = ""  # R runs, S sleeps, D cannot be interrupted, T is stopped
    cpu: float = 0.0  # share of a core that its main thread used during the inspection
    wchan: str = ""  # what it waits for in the kernel
    where: str = ""  # innermost Python frame of the main thread; empty: no stack was obtained
    section: str = ""
    collectives: tuple[CollectiveSeen, ...] = ()  # the last ones, oldest first
    devices: tuple[DeviceSeen, ...] = ()  # the devices' progress in the collectives of each group
    stacks: str = ""  # file with all stacks, below the run directory
    records: str = ""  # file with the records of the framework, below the run directory
    child: int = 0  # id of a stopped process that the worker has started; 0: none
    left: bool = False  # its script has left its loops


class Evidence(Message, frozen=True):
    """Answer to :class:`CollectEvidence`: all living workers of a node. With ``LAST_LOOK`` it is about one worker."""

    node_id: NodeId
    number: int
    ranks: tuple[RankEvidence, ...]


class StepTime(msgspec.Struct, frozen=True):
    """The median seconds per step of one worker, without its waits for peers, over ``samples`` steps."""

    rank: int
    samples: int
    busy_s: float


class StepTimes(Message, frozen=True):
    """Report of an agent, sent from time to time, on the step times of its workers."""

    node_id: NodeId
    generation: Generation
    ranks: tuple[StepTime, ...]
    step_s: float = 0.0  # longest of the last steps of the workers


class CopyDigest(msgspec.Struct, frozen=True, array_like=True):
    """The digest of a part of the state that all ``holders`` have. ``what`` names the part, equally on all of them."""

    holders: str  # ranks, as ``ranks_text`` writes them: there may be thousands
    what: str
    digest: int  # xxh3-64


class CopiesDiffer(Message, frozen=True):
    """Digests of one rank's copies, sent because a vote found that copies of the state of ``step`` differ."""

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]


class StateDigests(Message, frozen=True):
    """Answer to a ``Settle`` that asks for it: digests of this rank's state of ``step``.

    The rank publishes the layout of that state first.
    """

    member_id: MemberId
    generation: Generation
    step: int
    copies: tuple[CopyDigest, ...]  # of all parts that other ranks have too; empty: cannot be compared


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ascending ``ranks`` as text: short when their distance is constant (``0-4088/8``), else ``0,3,4``."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step)):
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    return ",".join(map(str, ranks))


def ranks_of(text: str) -> Sequence[int]:
    """Return the ranks of a text of :func:`ranks_text`.

    Raises:
        ValueError: the text is not of that form.
    """
    first, dash, rest = text.partition("-")
    if not dash:
        return [int(rank) for rank in text.split(",")]
    last, _, step = rest.partition("/")
    return range(int(first), int(last) + 1, int(step))
