"""The history of a run: the one fold of its event log into typed facts, for every reader that shows or judges a run.

Theory. Status, report, launcher, doctor and drill read the same log. All facts that they need are derived here: the
faults with their phases and answers, the seats of the ranks, the steps, the checkpoints, the end. The readers add only
words. A successor of the controller uses another fold, ``core.job.log_replay``. That fold refuses a record of a wrong
form, because decisions depend on the record. The fold of this module ignores unknown kinds and accepts the shorter
records of older versions. A test keeps the facts of both folds equal.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import msgspec

from holdfast.core.decide.stop_policy import STOP_CODE
from holdfast.core.job.fault import SEEN, reach
from holdfast.event_log import Event
from holdfast.exit_codes import Exit
from holdfast.history.host_history import HostHistory
from holdfast.history.lost_time import LostTime

STEPPING = frozenset({"session_opened", "planned", "finished", "agent_ended", "run_ended"})
"""Kinds of events whose field ``step`` is a step that the job has reached."""
WARNINGS = {
    "root_not_shared": "{root} is not the same directory on {nodes}: checkpoints of several nodes need shared storage, "
    "without it a lost node costs everything",
    "versions_differ": "{what} is {here} on this host, {there} on {node}: they may compute differently; install the "
    "same on every host",
    "start_forgotten": "the event log of the leader's host does not have the start of this job: its "
    "processes on {node} held step {step} and leave; the job starts again from its newest checkpoint",
    "no_majority": "{reason}: sealing what is committed here, then leaving",
    "stood_still": "the processes of this host stood still for {stood_s:.0f} s (frozen, suspended, or without a CPU): "
    "the other hosts may have continued without this host",
    "zygote_unusable": "every worker starts from scratch, which takes longer: {reason}",
    "spares_given_up": "no spare can be built on {node} ({why}): lost workers are replaced without; see spares/ in the "
    "run directory",
    "notice_source_failed": "{source} cannot be asked whether this host will leave ({error}): its last answer stands",
    "status_not_sent": "the state of this host cannot be shown at {place} ({error})",
}
"""The text of a warning by kind of event, with placeholders for the data of the event."""


class FaultView(msgspec.Struct):
    """One fault and its recovery. ``phases``: seconds from the fault to the end of each phase of the recovery."""

    number: int
    at: float  # Unix time
    rank: int
    member_id: int
    kind: str
    phase: str
    step: int
    attempt: int
    what: str
    node: str = ""
    action: str = ""
    reason: str = ""
    phases: dict[str, float] = {}
    steps_lost: int = 0

    @property
    def name(self) -> str:
        """The name of the fault, such as ``F003``."""
        return f"F{self.number:03d}"

    @property
    def recovered_s(self) -> float | None:
        """Seconds from the fault to the next committed step; None if no step was committed since."""
        return self.phases.get("resumed")


class RunHistory:
    """All facts about a run, from the events of its log."""

    def __init__(self) -> None:
        self.attempt = -1
        self.generation = ""
        self.members: dict[int, int] = {}  # member id -> rank, of the newest generation
        self._nodes: dict[int, str] = {}  # by member id
        # (start of all workers, rank) -> local rank by node, oldest first
        self.places: dict[tuple[int, int], dict[str, int]] = {}
        self.session = False
        self.cut_off = False
        self.root = ""
        self.step = 0
        self.steps_lost = 0
        self.sealed_step = -1
        self.kept_step = -1  # newest checkpoint, sealed in this run or found at a start
        self.found_step = -1  # step of the checkpoint at the start of the run
        self.exiting = ""
        self.agreed_step = -1  # the step at which all ranks leave
        self.cancels: list[bool] = []  # answers to cancellations of an exit
        self.ended: dict[str, Any] | None = None
        self.ended_at = self.heard_at = 0.0
        self.faults: list[FaultView] = []
        self.warnings: list[str] = []
        self.saves: list[str] = []  # one line for each complete checkpoint
        self._save_s = 0.0  # duration of the share that was written last
        self._unsaved_step = -1
        self.hosts = HostHistory(self.warnings)
        self.exits: dict[int, dict[str, Any]] = {}  # member id -> its end, and the size of its log then
        self.losses = LostTime()
        self._open: list[tuple[FaultView, float]] = []  # unrecovered faults, and CLOCK_MONOTONIC

    @classmethod
    def read(cls, events: Iterable[Event]) -> Self:
        """Return the history after the events ``events``, oldest first."""
        history = cls()
        for event in events:
            history.take(event)
        return history

    @property
    def left(self) -> bool:
        """True if this node has left a job that continues on other nodes."""
        return self.ended is not None and bool(self.ended.get("left"))

    @property
    def unanswered(self) -> list[FaultView]:
        """The faults from which the job has not recovered, oldest first."""
        return [fault for fault, _ in self._open]

    @property
    def last_fault(self) -> FaultView | None:
        """The newest fault; None if there was no fault."""
        return self.faults[-1] if self.faults else None

    def take(self, event: Event) -> None:
        """Apply one event of the log. Unknown kinds are ignored."""
        self.heard_at = max(self.heard_at, event.t_wall)
        self.losses.take(event)
        self.hosts.take(event)
        if event.kind in STEPPING:
            self.step = max(self.step, int(event.data.get("step", 0)))
        if event.kind in WARNINGS:
            self._warn(event)
        fold = getattr(self, f"_on_{event.kind}", None)
        if fold is not None:
            fold(event, event.data)
        if event.kind in SEEN and event.kind != "detected":
            for fault, at_mono_s in self._open:
                reach(fault.phases, event.kind, round(event.t_mono - at_mono_s, 6))

    def _warn(self, event: Event) -> None:
        lists = {
            key: ", ".join(map(str, value)) for key, value in event.data.items() if isinstance(value, list)
        }
        text = WARNINGS[event.kind].format_map(event.data | lists)
        if event.kind != "versions_differ" or text not in self.warnings:  # a restarted agent reports it again
            self.warnings.append(text)

    def _on_generation_started(self, event: Event, data: dict[str, Any]) -> None:
        self.generation = str(data["generation"])
        if not data.get("in_place"):
            self.attempt = int(data["attempt"])
            self.members = {int(m): rank for rank, m in enumerate(data["members"])}
        self._seat(range(len(data["members"])), data)

    def _on_members_replaced(self, event: Event, data: dict[str, Any]) -> None:
        self._seat(data["ranks"], data)
        self.members |= dict(zip(data["members"], data["ranks"], strict=True))
        for fault, _ in self._open:
            # A newcomer was lost before its join. The controller makes no new decision for it.
            if not fault.action and fault.rank in data["ranks"]:
                fault.action = "replace"
                fault.reason = "it was lost before it had joined: the decision stands"

    def _seat(self, ranks: Iterable[int], data: dict[str, Any]) -> None:
        nodes = data.get("nodes", ())  # older versions have not written this field
        self._nodes.update(zip(data["members"], nodes, strict=False))
        for rank, node, local_rank in zip(ranks, nodes, data.get("local_ranks", ()), strict=False):
            self.places.setdefault((self.attempt, rank), {})[node] = local_rank

    def _on_detected(self, event: Event, data: dict[str, Any]) -> None:
        ago_s = float(data["detected_s"])
        fault = FaultView(
            number=len(self.faults) + 1,
            at=event.t_wall - ago_s,
            rank=int(data["rank"]),
            member_id=int(data["member_id"]),
            kind=str(data["kind"]),
            phase=str(data["phase"]),
            step=int(data["step"]),
            attempt=max(self.attempt, 0),
            what=str(data["what"]),
            node=self._nodes.get(int(data["member_id"]), ""),
            phases={"detected": round(ago_s, 6)},
        )
        self.faults.append(fault)
        self._open.append((fault, event.t_mono - ago_s))

    def _on_member_exited(self, event: Event, data: dict[str, Any]) -> None:
        self.exits[int(data["member_id"])] = data

    def ranks_on(self, node: str) -> list[int]:
        """Return the ranks whose newest process is on this node, according to this log."""
        newest = {rank: member for member, rank in sorted(self.members.items())}
        return sorted(rank for rank, member in newest.items() if self._nodes.get(member) == node)

    def _on_verdict(self, event: Event, data: dict[str, Any]) -> None:
        for fault, _ in self._open:
            fault.action, fault.reason = str(data["action"]), str(data["reason"])
        if data["action"] not in STOP_CODE:
            proofs = map(str, data.get("unmatched", ()))  # older versions have not written this field
            self.warnings += [
                f"{proof.splitlines()[0]}; a second time in a row ends the run" for proof in proofs
            ]

    def _on_restored(self, event: Event, data: dict[str, Any]) -> None:
        self.step = int(data["step"])
        self.steps_lost += int(data["steps_lost"])

    def _on_recovered(self, event: Event, data: dict[str, Any]) -> None:
        for fault, _ in self._open:
            if fault.member_id == data["member_id"]:
                fault.phases = {phase: float(data[f"{phase}_s"]) for phase in SEEN}
                fault.steps_lost = int(data["steps_lost"])
        self._open = [(fault, at) for fault, at in self._open if fault.member_id != data["member_id"]]

    def _on_session_opened(self, event: Event, data: dict[str, Any]) -> None:
        step = int(data.get("step", 0))
        self.sealed_step = min(self.sealed_step, step)  # a newer one could not be loaded, or is not trusted
        self.kept_step = step or -1
        if not self.session:
            self.found_step = self.kept_step
        self.session = True
        self.root = str(data.get("root", ""))

    def _on_saved(self, event: Event, data: dict[str, Any]) -> None:
        self._save_s = float(data["duration_s"])
        if data["error"] and data["step"] != self._unsaved_step:  # the other ranks report the same
            self._unsaved_step = int(data["step"])
            self.warnings.append(f"rank {data['rank']} could not save step {data['step']}: {data['error']}")

    def _on_sealed(self, event: Event, data: dict[str, Any]) -> None:
        self.sealed_step = max(self.sealed_step, int(data["step"]))
        self.kept_step = max(self.kept_step, self.sealed_step)
        self.saves.append(f"saved step {data['step']} ({data.get('save_kind', '')}) in {self._save_s:.2f} s")

    def _on_exit_requested(self, event: Event, data: dict[str, Any]) -> None:
        self.exiting = str(data["source"])

    def _on_exit_agreed(self, event: Event, data: dict[str, Any]) -> None:
        self.agreed_step = int(data["step"])

    def _on_exit_cancelled(self, event: Event, data: dict[str, Any]) -> None:
        self.cancels.append(bool(data["done"]))
        self.exiting = "" if data["done"] else self.exiting

    def _on_no_majority(self, event: Event, data: dict[str, Any]) -> None:
        self.cut_off = True

    def _on_agent_ended(self, event: Event, data: dict[str, Any]) -> None:
        # An agent that gave up on controllers ends the run alone; otherwise the run has already ended.
        if self.ended is None:
            cause = Exit(data["code"]).name
            self._on_run_ended(event, {**data, "cause": cause, "reason": "no controller could be kept"})

    def _on_run_ended(self, event: Event, data: dict[str, Any]) -> None:
        self.ended, self.ended_at = data, event.t_wall
