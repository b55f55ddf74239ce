"""The state that a new controller needs from earlier controllers, read from the records of the event log.

Theory. A new controller learns the present from the agents' reports. It reads the facts that no agent knows from the
log: the newest generation and member id ever issued, the seated members, the number of faults, the decided step. Each
record is in the log before the commands that depend on it are sent.

With several nodes each line that a controller writes has a *place*: the pair (term, number). A deposed controller may
have written lines that no other node has. The first line of a controller has a field ``after``. The field names the
line before it in the log of this node. A line of an earlier term after the named line is void: another controller has
decided without it, and the commands of the line may never have been carried out. The lines of a controller that was
alone have no place. They are void for every leader.

Invariants:
1. ``ReplayedState.read`` of no records is the past of a new run.
2. Generation, member id and attempt never go backwards, so each is issued only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, cast

import msgspec

from holdfast.core.decide.stop_policy import STOP_CODE, Action, Answered, LadderVerdict
from holdfast.core.ids import NO_GENERATION, Generation, MemberId, NodeId
from holdfast.core.job.failed_devices import DeviceFailure
from holdfast.core.job.failed_nodes import NodeAnswer, NodeFault
from holdfast.core.protocol.messages import Field, LogRecord

SNAPSHOT = "snapshot"
AFTER = "after"
"""Field of the first line of a controller: the place of the last line before it, as ``term.number``."""

LinePlace = tuple[int, int]
"""The place of a line of a controller in the event log: term and number."""

NO_PLACE: LinePlace = (0, 0)
Line = TypeVar("Line")


def place_of_text(text: str) -> LinePlace:
    """Return the place of a line that is written as ``term.number``.

    Example:
        >>> place_of_text("2.17")
        (2, 17)
    """
    term, _, number = text.partition(".")
    return int(term), int(number)


def text_of_place(place: LinePlace) -> str:
    """Return the place of a line as ``term.number``: the inverse of :func:`place_of_text`."""
    term, number = place
    return f"{term}.{number}"


def in_force(
    lines: Iterable[tuple[LinePlace, Mapping[str, object], Line]], *, without_place: bool
) -> list[Line]:
    """Return the lines of a log that are not void, in their order.

    Args:
        lines: for each record its place, its parsed data and the line itself, in the order of the log.
        without_place: whether lines without a place are in force. Give True in a job of one node, where no line has a
            place. Give True also for a controller that is alone: it continues the decisions of an earlier controller
            of its node.
    """
    kept: list[tuple[LinePlace, Line]] = []
    newest = 0
    for place, data, line in lines:
        if place == NO_PLACE:
            if without_place:
                kept.append((place, line))
            continue
        if AFTER in data and place[0] > newest:
            last = place_of_text(str(data[AFTER]))
            kept = [each for each in kept if each[0] <= last]
        if place[0] >= newest:  # otherwise it is the late line of a deposed controller
            newest = place[0]
            kept.append((place, line))
    return [line for _, line in kept]


class Placement(msgspec.Struct, frozen=True):
    """The seat of one member: node, local rank and rank."""

    member_id: MemberId
    rank: int
    local_rank: int
    node_id: NodeId


class ReplayedState(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about earlier controllers of this run that the records of the event log hold."""

    generation: Generation = NO_GENERATION  # the newest generation that was issued, by a start or a fence
    seated: Generation = NO_GENERATION  # the generation that ``seats`` belong to
    seats: tuple[Placement, ...] = ()
    # Replacements of members that died since the start of ``seated``, oldest first; the job has not resumed with them.
    newcomers: tuple[Placement, ...] = ()
    last_member: int = 0
    attempts: int = 0
    step: int = 0  # the step last decided for the job
    base_step: int = 0
    sealed_step: int = -1  # newest sealed checkpoint, -1: none
    # The newest generation that sealed a checkpoint, and the newest step it sealed.
    sealed_last: tuple[Generation, int] = (NO_GENERATION, -1)
    session: bool = False  # a session was opened in this run
    in_place: bool = False  # the newest start kept living processes and added newcomers
    opened: bool = False  # all sessions of the seated members were opened
    root: str = ""  # where the sessions save
    exit_source: str = ""
    agreed_step: int | None = None
    released: bool = False
    unequal: str = ""  # why copies of the state are unequal, until a session of newer workers opens
    answered: tuple[Answered, ...] = ()
    device_failures: tuple[DeviceFailure, ...] = ()
    node_faults: tuple[NodeFault, ...] = ()
    failing_nodes: tuple[tuple[NodeId, NodeAnswer], ...] = ()  # with the last announced answer
    ends: LadderVerdict | None = None  # set once it was decided that the run ends
    once: tuple[tuple[int, str, str], ...] = ()  # rank, name and value (JSON), see ``made_once``

    @staticmethod
    def read(records: Iterable[LogRecord]) -> ReplayedState:
        """Return the state after all records of a run, oldest first."""
        past = ReplayedState()
        for record in records:
            past = past.after(record)
        return past

    @property
    def seated_members(self) -> dict[int, MemberId]:
        """The id of the newest member of each rank, by rank."""
        return {seat.rank: seat.member_id for seat in (*self.seats, *self.newcomers)}

    def after(self, record: LogRecord, at_s: float | None = None) -> ReplayedState:
        """Return the state after one more record.

        Args:
            record: the record.
            at_s: time of the record in seconds on the reader's clock; None if writer and reader use the same clock.
        """
        data = record.data
        if at_s is not None and "at_s" in data:
            data = {**data, "read_s" if record.kind == SNAPSHOT else "at_s": at_s}
        fold = _FOLDS.get(record.kind)
        return self if fold is None else msgspec.structs.replace(self, **fold(self, data))

    def snapshot(self, now: float) -> LogRecord:
        """Return this whole state as one record, from which a later reader can start.

        Args:
            now: the present time in seconds, on the clock of the times in this state.
        """
        return LogRecord(kind=SNAPSHOT, data={"past": msgspec.json.encode(self).decode(), "at_s": now})


Data = dict[str, Field]
Changes = dict[str, object]


def _int(data: Data, key: str) -> int:
    value = data[key]
    assert isinstance(value, int), (key, value)
    return value


def _list(data: Data, key: str) -> list[str]:
    value = data[key]
    assert isinstance(value, list), (key, value)
    return [str(item) for item in value]


def _generation(data: Data) -> Generation:
    return Generation.parse(str(data["generation"]))


def _started(past: ReplayedState, data: Data) -> Changes:
    generation = _generation(data)
    columns = (_list(data, "members"), _list(data, "nodes"), _list(data, "local_ranks"))
    seats = tuple(
        Placement(MemberId(int(member)), rank, int(local_rank), NodeId(node))
        for rank, (member, node, local_rank) in enumerate(zip(*columns, strict=True))
    )
    seated: Changes = {
        "generation": generation,
        "seated": generation,
        "seats": seats,
        "newcomers": (),
        "in_place": bool(data["in_place"]),
        "last_member": max([past.last_member, *(s.member_id for s in seats)]),
    }
    if data["in_place"]:
        return seated | {"opened": True}
    return seated | {
        "attempts": _int(data, "attempt") + 1,
        "opened": False,
        "released": False,
    }


def _replaced(past: ReplayedState, data: Data) -> Changes:
    columns = (_list(data, key) for key in ("members", "ranks", "local_ranks", "nodes"))
    seats = tuple(
        Placement(MemberId(int(member)), int(rank), int(local_rank), NodeId(node))
        for member, rank, local_rank, node in zip(*columns, strict=True)
    )
    return {
        "last_member": max([past.last_member, *(s.member_id for s in seats)]),
        "newcomers": (*past.newcomers, *seats),
    }


def _fenced(past: ReplayedState, data: Data) -> Changes:
    return {"generation": _generation(data), "released": False}


def _planned(past: ReplayedState, data: Data) -> Changes:
    return {"step": _int(data, "step")}


def _verdict(past: ReplayedState, data: Data) -> Changes:
    return _decided(past, data) | (_answered(past, data) if data.get("counts", True) else {})


def _decided(past: ReplayedState, data: Data) -> Changes:
    """Return the new values of the fields of the state that the decision in a log record changes.

    A decision counts even if it has not been carried out yet.
    """
    if data["action"] in STOP_CODE:
        action, reason = cast(Action, data["action"]), str(data["reason"])
        evidence = tuple(_list(data, "evidence"))
        return {
            "ends": LadderVerdict(
                action=action, reason=reason, evidence=evidence, save=past.step > past.base_step
            )
        }
    if data["action"] == "replace_from_memory":  # all ranks go back to that step if it is older
        step = _int(data, "memory_step")
        return {"step": step, "base_step": min(past.base_step, step)}
    return {}


def _answered(past: ReplayedState, data: Data) -> Changes:
    at_s = data["at_s"]
    assert isinstance(at_s, int | float), data
    columns = (_list(data, "digests"), _list(data, "failed_steps"), _list(data, "occurrences"))
    failures = tuple(
        (digest, int(step), int(occurrence)) for digest, step, occurrence in zip(*columns, strict=True)
    )
    answered = Answered(at_s=at_s, action=str(data["action"]), step=_int(data, "step"), failures=failures)
    return {"answered": (*past.answered, answered)}


def _opened(past: ReplayedState, data: Data) -> Changes:
    step = _int(data, "step")
    return {
        "session": True,
        "opened": True,
        "unequal": "",
        "base_step": step,
        "step": step,
        "sealed_step": min(past.sealed_step, step),
        "root": str(data["root"]),
    }


def _sealed(past: ReplayedState, data: Data) -> Changes:
    step = _int(data, "step")
    last = max(past.sealed_last, (_generation(data), step))
    return {"sealed_step": max(past.sealed_step, step), "sealed_last": last}


def _snapshot(past: ReplayedState, data: Data) -> Changes:
    """Return the whole state that a snapshot holds. Its times are shifted from the writer's clock to the reader's."""
    whole = msgspec.json.decode(str(data["past"]), type=ReplayedState)
    at_s, read_s = data["at_s"], data.get("read_s", data["at_s"])
    assert isinstance(at_s, int | float) and isinstance(read_s, int | float), data
    shift_s = read_s - at_s
    answered = tuple(msgspec.structs.replace(each, at_s=each.at_s + shift_s) for each in whole.answered)
    node_faults = tuple(msgspec.structs.replace(each, at_s=each.at_s + shift_s) for each in whole.node_faults)
    shifted = {"answered": answered, "node_faults": node_faults}
    return {name: getattr(whole, name) for name in ReplayedState.__struct_fields__} | shifted


def _device_failed(past: ReplayedState, data: Data) -> Changes:
    failure = DeviceFailure(
        node_id=NodeId(str(data["node"])),
        local_rank=_int(data, "local_rank"),
        step=_int(data, "step"),
        digest=str(data["digest"]),
        certain=bool(data["certain"]),
        occurrence=_int(data, "occurrence"),
    )
    return {"device_failures": (*past.device_failures, failure)}


def _node_failed(past: ReplayedState, data: Data) -> Changes:
    at_s = data["at_s"]
    assert isinstance(at_s, int | float), data
    fault = NodeFault(
        node_id=NodeId(str(data["node"])),
        at_s=at_s,
        cause=str(data["cause"]),
        occurrence=_int(data, "occurrence"),
        digest=str(data["digest"]),
        step=_int(data, "step"),
    )
    return {"node_faults": (*past.node_faults, fault)}


def _node_announced(past: ReplayedState, data: Data, answer: NodeAnswer | None) -> Changes:
    node_id = NodeId(str(data["node"]))
    others = tuple(each for each in past.failing_nodes if each[0] != node_id)
    if answer is not None:
        return {"failing_nodes": (*others, (node_id, answer))}
    faults = tuple(fault for fault in past.node_faults if fault.node_id != node_id)
    return {"failing_nodes": others, "node_faults": faults}


def _made_once(past: ReplayedState, data: Data) -> Changes:
    return {"once": (*past.once, (_int(data, "rank"), str(data["name"]), str(data["value"])))}


_FOLDS: dict[str, Callable[[ReplayedState, Data], Changes]] = {
    "generation_started": _started,
    "fenced": _fenced,
    "members_replaced": _replaced,
    "planned": _planned,
    "verdict": _verdict,
    "session_opened": _opened,
    "sealed": _sealed,
    "device_failed": _device_failed,
    "node_failed": _node_failed,
    "node_left_out": lambda past, data: _node_announced(past, data, "left_out"),
    "node_kept": lambda past, data: _node_announced(past, data, "kept"),
    "node_used_again": lambda past, data: _node_announced(past, data, None),
    "made_once": _made_once,
    SNAPSHOT: _snapshot,
    "copies_differ": lambda past, data: {"unequal": str(data["reason"])},
    "exit_requested": lambda past, data: {"exit_source": str(data["source"])},
    "exit_agreed": lambda past, data: {"agreed_step": _int(data, "step")},
    "exit_cancelled": lambda past, data: {"exit_source": ""} if data["done"] else {},
    "finished": lambda past, data: {"released": True, "step": _int(data, "step")},
}
