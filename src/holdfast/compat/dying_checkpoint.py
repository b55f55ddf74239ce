"""The controller of ``mindio_ttp``, without I/O: it decides which ranks write a dying checkpoint, and in which order.

A *dying checkpoint* is the checkpoint that the living ranks write after a fault, before all ranks exit.

Theory. A rank reports its step only when the controller asks. After a fault all living ranks are *stopped*: no update
may begin. Each rank finishes the update in progress and reports the last step that it completed. The newest such step
is saved. A *group* is a set of ranks that hold the same state, cut into ``shards`` parts. The ranks at positions i and
j of the group's list hold the same part when i % shards == j % shards. A rank is *sound* when its state is whole. The
step can be saved if each part of each group has a sound holder at that step. For each part the sound holder with the
least to write becomes a *writer*. Once all writers have written, one writer publishes (renames) the checkpoint. Then
all ranks exit. A writer that fails or dies is replaced by the next holder of its part.

Invariants:
1. A writer is sound, and its last completed step is the step of the plan.
2. The order to publish is sent only after every writer of one plan has succeeded. At most one plan is published.
3. Every living rank is ordered to exit exactly once, whatever happens before.
4. The end of a rank that finished its training is not a fault.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

STAND_S = 5.0  # limit for a rank to finish its update and to answer a Stop
REACH_S = 30.0  # limit for ranks at an older step to reach the newest step, if only they hold a part
SAVE_S = 1800.0
RENAME_S = 300.0
TEXT_SIZE_MAX = 1000


class TtpMessage(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """The base of the messages between a rank and the controller."""


class Here(TtpMessage, frozen=True):
    """The first message of a rank: it has connected."""

    rank: int
    world_size: int
    pid: int


class ShardGroup(msgspec.Struct, frozen=True):
    """Ranks that hold the same state, cut into ``shards`` parts. ``kind``: the script's number for a kind of state."""

    kind: int
    ranks: tuple[int, ...]
    shards: int

    def parts(self) -> list[tuple[int, ...]]:
        """Return, for each part of the state, the ranks that hold it."""
        return [self.ranks[part :: self.shards] for part in range(self.shards)]


class Replicas(TtpMessage, frozen=True):
    """Report: the shard groups that this rank belongs to."""

    rank: int
    groups: tuple[ShardGroup, ...]


class Faulted(TtpMessage, frozen=True):
    """Report: an exception has ended the training of this rank."""

    rank: int
    what: str


class Stood(TtpMessage, frozen=True):
    """Answer to :class:`Stop`: this rank begins no further update.

    ``step`` is its last completed step. ``why`` is the reason why its state is not sound; empty if the state is sound.
    """

    rank: int
    step: int
    why: str = ""


class Saved(TtpMessage, frozen=True):
    """Report: a writer has written its parts of ``step``, or failed. ``why``: the error; empty if it succeeded."""

    rank: int
    step: int
    why: str = ""


class Renamed(TtpMessage, frozen=True):
    """Report: this rank has published (renamed) the dying checkpoint, or failed.

    ``why``: the error; empty if it succeeded.
    """

    rank: int
    why: str = ""


class Done(TtpMessage, frozen=True):
    """Report: the training of this rank is over."""

    rank: int


class Stop(TtpMessage, frozen=True):
    """Order: begin no update that leads beyond ``step`` (-1 means begin none), and report the last completed step."""

    reason: str
    step: int = -1


class SaveParts(TtpMessage, frozen=True):
    """Order: write your parts of ``step``. ``plan`` has the writers by :attr:`ShardGroup.kind`."""

    step: int
    plan: dict[int, tuple[int, ...]]


class Rename(TtpMessage, frozen=True):
    """Order: publish the parts that all writers have written."""

    step: int


class LeaveOrder(TtpMessage, frozen=True):
    """Order: exit. ``saved`` says whether a checkpoint of ``step`` is published."""

    step: int
    saved: bool
    reason: str


class Lost(TtpMessage, frozen=True):
    """Event inside the controller's process, not a message of a rank: the connection to a rank has ended."""

    rank: int
    what: str


class Timer(TtpMessage, frozen=True):
    """Event inside the controller's process, not a message of a rank: the delay of an :class:`After` has passed.

    ``number`` is the number of that command.
    """

    number: int


FromRank = Here | Replicas | Faulted | Stood | Saved | Renamed | Done
Event = FromRank | Lost | Timer


class SendToRank(NamedTuple):
    """Command: send a message to a rank."""

    rank: int
    message: TtpMessage


class After(NamedTuple):
    """Command: deliver a :class:`Timer` with this number after ``delay_s``. Timers of earlier numbers are void."""

    number: int
    delay_s: float


class WriteLog(NamedTuple):
    """Command: write one line of the log."""

    kind: str
    data: dict[str, Any]


class Over(NamedTuple):
    """Command: end the controller, because nothing is left to do."""


Command = SendToRank | After | WriteLog | Over


def choose(groups: Iterable[ShardGroup], good: set[int]) -> tuple[dict[int, tuple[int, ...]], str]:
    """Choose a sound holder of each part as its writer.

    Args:
        groups: the groups of all ranks.
        good: the sound ranks at the step of the save.

    Returns:
        The writers by kind of group, and the reason why some part has no writer (empty: all parts have a writer).
    """
    plan: dict[int, list[int]] = {}
    load: dict[int, int] = {}
    for group in sorted(set(groups), key=lambda g: (g.kind, g.ranks)):
        for part, holders in enumerate(group.parts()):
            able = [rank for rank in holders if rank in good]
            if not able:
                return (
                    {},
                    f"part {part} of {group.shards} of the ranks {list(group.ranks)} is held by no sound rank any more",
                )
            writer = min(able, key=lambda rank: (load.get(rank, 0), rank))
            load[writer] = load.get(writer, 0) + 1
            plan.setdefault(group.kind, []).append(writer)
    return {kind: tuple(writers) for kind, writers in plan.items()}, ""


class DyingCheckpoint:
    """The state machine of the controller; the module docstring states its rules.

    ``phase`` is for reports: forming (ranks connect), training, stopping, reaching (slower ranks complete the newest
    step), saving, renaming, over.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.phase = "forming"
        self.step = 0
        self._here: set[int] = set()
        self._done: set[int] = set()
        self._groups: dict[int, tuple[ShardGroup, ...]] = {}
        self._stood: dict[int, Stood] = {}
        self._failed: set[tuple[int, int]] = set()  # (rank, step) of failed saves
        self._plan: dict[int, tuple[int, ...]] = {}
        self._written: set[int] = set()
        self._timer = 0
        self._out: list[Command] = []

    def handle(self, event: Event) -> list[Command]:
        """Apply one event, and return the commands that follow."""
        match event:
            case Here():
                self._come(event)
            case Replicas():
                self._groups[event.rank] = event.groups
            case Faulted() | Lost():
                self._fault(event)
            case Stood():
                self._stands(event)
            case Saved():
                self._saved(event)
            case Renamed():
                self._renamed(event)
            case Done():
                self._done.add(event.rank)
            case Timer() if event.number == self._timer:
                self._late()
        if not self._living and self.phase != "forming":
            self.phase = "over"
            self._out.append(Over())
        out, self._out = self._out, []
        return out

    # ------------------------------------------------------------------ before a fault

    def _come(self, event: Here) -> None:
        self._here.add(event.rank)
        self._log("here", rank=event.rank, pid=event.pid)
        if self.phase == "forming" and len(self._here) == self.world_size:
            self.phase = "training"
        elif self.phase == "over":
            self._send(event.rank, LeaveOrder(step=self.step, saved=False, reason="the job has ended"))
        elif self.phase not in ("forming", "training"):
            self._send(event.rank, Stop(reason="the job is being ended"))

    def _fault(self, event: Faulted | Lost) -> None:
        rank = event.rank
        if isinstance(event, Lost):
            if rank not in self._here:
                return
            self._here.discard(rank)
            self._stood.pop(rank, None)
            if rank in self._done or self.phase == "over":
                self._log("left", rank=rank)
                return
        self._log("fault", rank=rank, what=event.what[:TEXT_SIZE_MAX], lost=isinstance(event, Lost))
        if self.phase in ("forming", "training"):
            self.phase = "stopping"
            how = "was lost" if isinstance(event, Lost) else "failed"
            for other in sorted(self._living):
                self._send(other, Stop(reason=f"rank {rank} {how}: {event.what}"[:TEXT_SIZE_MAX]))
            self._after(STAND_S)
        if isinstance(event, Lost):
            self._without(rank)

    def _without(self, rank: int) -> None:
        """Continue after the death of ``rank`` during a stop or a save."""
        if self.phase == "stopping":
            self._decide_when_all_stand()
        elif self.phase in ("saving", "renaming") and rank in self._writers:
            # The parts of the dead writer may be incomplete. The next plan for the same step overwrites them.
            self._decide()
        elif self.phase == "reaching":
            self._decide()

    # ------------------------------------------------------------------ the decision

    @property
    def _living(self) -> set[int]:
        return self._here - self._done

    @property
    def _writers(self) -> set[int]:
        return {rank for writers in self._plan.values() for rank in writers}

    def _stands(self, event: Stood) -> None:
        if event.rank not in self._here:
            return
        self._stood[event.rank] = event
        self._log("stands", rank=event.rank, step=event.step, why=event.why[:TEXT_SIZE_MAX])
        if self.phase == "stopping":
            self._decide_when_all_stand()
        elif self.phase == "reaching" and event.step == self.step:
            self._decide()

    def _decide_when_all_stand(self) -> None:
        if self._living <= set(self._stood):
            self._decide()

    def _decide(self) -> None:
        """Choose the step and the writers from the answers so far, and order the saves; or end without a checkpoint."""
        stood = {r: s for r, s in self._stood.items() if r in self._here}
        self.step = max((s.step for s in stood.values() if not s.why), default=0)
        if not self.step:
            self._end("no rank has completed a step" if stood else "no rank is left")
            return
        groups = [group for own in self._groups.values() for group in own]
        if not groups:
            self._end("no rank has reported which ranks hold its state")
            return
        good = {
            r
            for r, s in stood.items()
            if s.step == self.step and not s.why and (r, s.step) not in self._failed
        }
        plan, why = choose(groups, good)
        behind = sorted(r for r, s in stood.items() if s.step < self.step and not s.why)
        if why and behind and self.phase != "reaching":
            self.phase = "reaching"
            self._log("reach", step=self.step, ranks=behind)
            for rank in behind:
                self._send(rank, Stop(reason="come up to the newest step", step=self.step))
            self._after(REACH_S)
        elif why and not (behind and self.phase == "reaching"):
            self._end(why)
        elif not why:
            self._order(plan)

    def _order(self, plan: dict[int, tuple[int, ...]]) -> None:
        self.phase, self._plan, self._written = "saving", plan, set()
        self._log("plan", step=self.step, writers=sorted(self._writers))
        for rank in sorted(self._writers):
            self._send(rank, SaveParts(step=self.step, plan=plan))
        self._after(SAVE_S)

    def _saved(self, event: Saved) -> None:
        if self.phase != "saving" or event.rank not in self._writers or event.step != self.step:
            return
        self._log("saved", rank=event.rank, step=event.step, why=event.why[:TEXT_SIZE_MAX])
        if event.why:
            self._failed.add((event.rank, event.step))
            self._decide()
            return
        self._written.add(event.rank)
        if self._written == self._writers:
            self.phase = "renaming"
            self._send(min(self._writers), Rename(step=self.step))
            self._after(RENAME_S)

    def _renamed(self, event: Renamed) -> None:
        if self.phase == "renaming" and event.rank == min(self._writers):
            self._end(event.why and f"the checkpoint was written, but not published: {event.why}")

    def _late(self) -> None:
        """Handle the end of a time limit: some ranks have not answered."""
        if self.phase == "stopping":
            self._decide()
        elif self.phase == "reaching":
            self._end(f"not every rank that holds a part came up to step {self.step}")
        elif self.phase == "saving":
            self._failed |= {(rank, self.step) for rank in self._writers - self._written}
            self._decide()
        elif self.phase == "renaming":
            self._end("the checkpoint was written, but no rank published it")

    def _end(self, why: str) -> None:
        self.phase = "over"
        self._timer += 1
        self._log("end", step=self.step, saved=not why, why=why[:TEXT_SIZE_MAX])
        for rank in sorted(self._living):
            self._send(rank, LeaveOrder(step=self.step, saved=not why, reason=why))

    # ------------------------------------------------------------------ out

    def _send(self, rank: int, message: TtpMessage) -> None:
        self._out.append(SendToRank(rank, message))

    def _after(self, delay_s: float) -> None:
        self._timer += 1
        self._out.append(After(self._timer, delay_s))

    def _log(self, kind: str, **data: Any) -> None:
        self._out.append(WriteLog(kind, data))


def replicas(infos: Sequence[dict[str, Any]]) -> tuple[ShardGroup, ...]:
    """Return the shard groups of the list that a script gives to ``tft_set_optimizer_replica``.

    The ranks of a group hold ``replica_cnt`` copies of each part of the optimizer state.

    Raises:
        ValueError: a group has no ranks or a rank twice, or ``replica_cnt`` does not divide the number of ranks.
    """
    groups = []
    for info in infos:
        ranks, copies = tuple(int(rank) for rank in info["rank_list"]), int(info["replica_cnt"])
        if not ranks or len(set(ranks)) < len(ranks) or not 0 < copies <= len(ranks) or len(ranks) % copies:
            raise ValueError(
                f"{copies} copies over the ranks {list(ranks)}: the number of ranks must be a multiple"
            )
        groups.append(ShardGroup(int(info.get("type", 0)), ranks, len(ranks) // copies))
    return tuple(groups)
