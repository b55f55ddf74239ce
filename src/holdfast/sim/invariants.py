"""Invariants of a simulated run. The checks read the state of all processes, which no single state machine can see.

A broken invariant raises :class:`Violation` with the name of its check. The tests also simulate mutants of the protocol
(versions with a planted error). Such a mutant counts as caught when a check raises.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from holdfast.core.decide.decision import RankReport, committed_floor
from holdfast.core.ids import EVERYBODY, Generation, LayoutVersion, MemberId, SaveId
from holdfast.core.job.spares import is_spare
from holdfast.core.protocol.layout_messages import Layouts
from holdfast.core.protocol.messages import (
    AgentHello,
    LayoutPublished,
    LogRecord,
    Message,
    RankState,
    ResumeInPlace,
    Settle,
)
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_store import SimSave, SimStore
from holdfast.sim.worker import SimWorker


class Violation(AssertionError):
    """The error of a failed check.

    Args:
        name: name of the check, for example ``one_decision_per_generation``.
        what: description of what was observed.
    """

    def __init__(self, name: str, what: str) -> None:
        super().__init__(f"{name}: {what}")
        self.name = name


class CheckedScene(Protocol):
    """The part of a simulated job that the checks may read."""

    now: float
    events: int
    store: SimStore
    memory: Memory
    save_errors: int
    memory_losses: set[str]
    journal: list[LogRecord]
    seated: dict[int, SimWorker]
    replaced: list[SimWorker]


class Checks:
    """The checks of one simulated run, with the observations of the run that they need."""

    def __init__(self, scene: CheckedScene) -> None:
        self.scene = scene
        self.planned: set[str] = set()
        self._written: set[str] = set()  # generations with a decision in the journal that was read
        self._read = 0
        self.updated: dict[tuple[Generation, int], set[int]] = {}
        self.discarded: dict[tuple[Generation, int], set[int]] = {}
        self._published: set[MemberId] = set()  # processes whose layout a controller has received
        self._moved: list[SimWorker] = []  # workers whose state the present event has changed
        self.promised: int | None = None  # step at which the sessions of the present restart must open
        self._resumed: tuple[int, ResumeInPlace] | None = (
            None  # (number of the simulated event, order) of the last order to resume that was checked
        )
        self.distrusted = False  # copies of the state differ, so all ranks return to a checkpoint
        self._catalogues: dict[LayoutVersion, Layouts] = {}
        self._plans: dict[SaveId, LayoutVersion] = {}
        self.counts = {"forward": 0, "back": 0, "none": 0}

    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None:
        """After a change of a rank's state, check that no rank updates a step that another rank has discarded.

        ``old`` and ``new`` are states of the step protocol.
        """
        machine = worker.machine
        self._moved.append(worker)
        where = (machine.generation, machine.step)
        if new == "updating" and old != "updating":
            self.updated.setdefault(where, set()).add(worker.rank)
            others = self.discarded.get(where)
            if others:
                text = f"rank {worker.rank} updates step {where[1]}, ranks {sorted(others)} discarded it"
                raise Violation("one_fate_per_step", text)
        if new == "aborted" and old in ("voting", "in_doubt", "compute"):
            self.discarded.setdefault(where, set()).add(worker.rank)
            others = self.updated.get(where)
            if others:
                text = f"rank {worker.rank} discards step {where[1]}, ranks {sorted(others)} updated it"
                raise Violation("one_fate_per_step", text)

    def look_at_moved(self) -> None:
        """Check the workers whose state the present event has changed, and the spread of steps if there are any."""
        if not self._moved:
            return
        for worker in self._moved:
            worker.machine.check()
        self.step_spread()

    def step_spread(self) -> None:
        """Check that no two ranks of one generation are inside updates of different steps."""
        self._moved.clear()
        inside: dict[Generation, int] = {}
        for worker in self.scene.seated.values():
            if worker.alive and worker.machine.state == "updating":
                machine = worker.machine
                step = inside.setdefault(machine.generation, machine.step)
                if step != machine.step:
                    text = f"steps {step} and {machine.step} in generation {machine.generation}"
                    raise Violation("one_step_at_a_time", text)

    def sealed(self, save: SimSave) -> None:
        """Check that a sealed checkpoint is complete, holds the state of one step only, and has no flipped bits."""
        written = {shard for share in save.shares.values() for shard in share.shards}
        if written != set(range(self.scene.store.shards)):
            raise Violation("sealed_is_covered", f"{save.directory} has no copy of some shard")
        wrong = [share for share in save.shares.values() if share.shards and share.step != save.step]
        if wrong:
            raise Violation("sealed_is_one_step", f"{save.directory}: {wrong}")
        if any(share.wrong for share in save.shares.values() if share.shards):
            raise Violation("sealed_was_compared", f"{save.directory} holds what a flipped bit has done")

    def given(self, source: SimWorker) -> None:
        """Check that the state that ``source`` gives to a newcomer has no flipped bits."""
        if source.flipped or source.wrong:
            raise Violation("given_was_compared", f"rank {source.rank} gives what a flipped bit has done")

    def loaded(self, rank: int, step: int, applied: int | None) -> None:
        """Check that a state of ``step``, which a rank loads from memory, contains exactly ``step`` updates.

        ``applied`` is the number of updates in its parameters; None if the copy was taken in the middle of a change.
        """
        if applied != step:
            text = f"rank {rank} takes the state of step {step}, its parameters are of {applied}"
            raise Violation("memory_is_one_step", text)

    def catalogued(self, version: LayoutVersion, layouts: Layouts) -> None:
        """Check that all ranks receive the same layouts under one layout version."""
        if self._catalogues.setdefault(version, layouts) != layouts:
            raise Violation("one_catalogue_per_version", f"{version} means two sets of layouts")

    def plans(self, save_id: SaveId, version: LayoutVersion, has_own: bool) -> None:
        """Check that a rank plans its share of a save by the same catalogue as all other ranks.

        Args:
            save_id: id of the save.
            version: version of the layouts that the rank uses.
            has_own: True if these layouts contain the present layout of the rank.
        """
        first = self._plans.setdefault(save_id, version)
        if first != version or not has_own:
            text = f"{save_id} is planned by {first} and {version}, with the layout of this rank: {has_own}"
            raise Violation("saved_by_one_catalogue", text)

    def recorded(self, record: LogRecord) -> None:
        """Check the invariants when the controller has written a record to its event log."""
        if record.kind == "resumed" or (record.kind == "restored" and record.data["steps_lost"]):
            self.scene.replaced = []  # from now on, a rank may be at an earlier step than the replaced processes were
        if record.kind == "planned":
            self._planned(record)
        elif record.kind == "verdict":
            self._verdict(record)
        elif record.kind == "session_opened":
            self._opened(record)
            self.distrusted = False
        elif record.kind == "copies_differ":
            self.distrusted = True

    def goes_up(self, message: Message) -> None:
        """Check that a message of an agent to the controller names no spare.

        Until a spare becomes a worker, only the agent of its node may know of the spare.
        """
        seen = message.members if isinstance(message, AgentHello) else ()
        named = [getattr(message, "member_id", 0), *(m.member_id for m in seen)]
        if any(is_spare(member_id) for member_id in named):
            raise Violation("a_spare_is_nobody", f"{type(message).__name__} of {named}")

    def hears(self, message: Message) -> None:
        """Record the process of which a controller has received a layout."""
        if isinstance(message, LayoutPublished):
            self._published.add(message.member_id)

    def sending(self, settle: Settle) -> None:
        """When the controller sends a decision, check that this decision is already in the journal."""
        text = str(settle.generation)
        journal = self.scene.journal
        for record in journal[self._read :]:
            if record.kind == "planned":
                self._written.add(str(record.data["generation"]))
        self._read = len(journal)
        if text not in self._written:
            raise Violation("persist_then_act", f"the decision of {text} was sent before it was written")

    def updates(self, worker: SimWorker) -> None:
        """When a rank begins the update of step k, check that its parameters contain exactly k updates."""
        if worker.applied != worker.machine.step:
            text = f"rank {worker.rank} holds step {worker.applied} and updates step {worker.machine.step}"
            raise Violation("updates_what_it_holds", text)

    def resuming(self, resume: ResumeInPlace) -> None:
        """When the job resumes without a restart, check that every rank has the state of the step in ``resume``.

        The controller sends the order ``resume`` to all ranks in one simulated event, in which no rank changes its
        state. The check therefore runs once per event.
        """
        told = msgspec.structs.replace(resume, member_id=EVERYBODY)
        if self._resumed == (self.scene.events, told):
            return
        self._resumed = (self.scene.events, told)
        for rank, worker in sorted(self.scene.seated.items()):
            machine = worker.machine
            here = machine.state in ("ready", "aborted", "finished") and machine.step == resume.step
            kept = machine.step > resume.step and resume.step in self.scene.memory.steps(rank)
            here = here or (kept and machine.state in ("ready", "aborted"))
            behind = machine.generation < resume.generation or machine.state == "starting"
            if worker.alive and behind and not here:
                text = f"rank {rank} is {machine.state}({machine.step}), the job resumes at {resume.step}"
                raise Violation("resumed_together", text)

    def _reports(self) -> list[RankReport]:
        return [w.told() for w in (*self.scene.replaced, *(w for _, w in sorted(self.scene.seated.items())))]

    def stood(self, rank: int) -> None:
        """Raise ``Violation``: a rank that paused between two steps has waited until the time limit of the pause.

        In such a pause all ranks wait while the controller moves some of them to another node. A fence or an order of
        the controller must end the pause.
        """
        raise Violation("no_rank_waits_for_nothing", f"rank {rank} has waited until its time limit")

    def _planned(self, record: LogRecord) -> None:
        generation = str(record.data["generation"])
        if generation in self.planned:
            raise Violation("one_decision_per_generation", generation)
        self.planned.add(generation)
        for _, worker in sorted(self.scene.seated.items()):
            fenced = worker.machine.fenced
            if worker.alive and (str(fenced) != generation or not worker.machine.settled):
                text = (
                    f"rank {worker.rank} is {worker.machine.state} and fenced by {fenced}, not {generation}"
                )
                raise Violation("decided_after_all_settled", text)
        # A rank that answered the fence before its session opened may have advanced since then. The decision could not
        # consider this progress.
        known = [r for r in self._reports() if record.data["sources"] or not r.alive or r.state == "torn"]
        floors = [f for f in map(committed_floor, known) if f is not None]
        if floors and record.data["step"] != max(floors):
            text = f"decided {record.data['step']}, the ranks prove {max(floors)}"
            raise Violation("decision_is_true", text)
        self.counts[str(record.data["decision"])] += 1

    def _verdict(self, record: LogRecord) -> None:
        action, step = record.data["action"], record.data["step"]
        self.promised = None
        if action == "restart_last_gasp" and isinstance(step, int):
            self.promised = step
        if action == "restart_from_memory":
            self.promised = int(str(record.data["memory_step"]))
        if action in ("restart_checkpoint", "restart_fresh") and step:
            holders = {w.rank for _, w in self.scene.seated.items() if w.alive and self._can_reach(w, step)}
            # The controller and the agents keep the layouts. If both died, or no controller has received the layout
            # yet, and a rank dies before it publishes its own layout again, that layout is missing. The verdict names
            # it, and the newest checkpoint is used.
            unheard = {w.member_id for w in self.scene.seated.values() if not w.alive} - self._published
            excused = "layout" in f"{record.data['reason']} {record.data['evidence']}" and (
                len(self.scene.memory_losses) > 1 or bool(unheard)
            )
            excused = excused or self.scene.save_errors > 0 or self.distrusted
            excused = excused or self.scene.store.newest_step("") >= int(str(step))
            if not self.scene.store.uncovered(Layouts((), {}), tuple(holders)) and not excused:
                raise Violation("no_committed_step_is_lost", f"{action} at step {step}, holders {holders}")
            self._forgotten(str(action))

    def _forgotten(self, action: str) -> None:
        """When the job returns to a checkpoint or to the start, check that the memory tier has no newer state."""
        seated = [worker for _, worker in sorted(self.scene.seated.items())]
        kept = [set(self.scene.memory.steps(worker.rank)) for worker in seated]
        newest = max(set.intersection(*kept), default=-1) if kept else -1
        # These processes have not reported the states that they keep in memory.
        unknown = [w for w in seated if w.alive and not w.opened]
        trusted = not self.distrusted  # False: the states in memory may be wrong
        if (
            newest > self.scene.store.newest_step("")
            and trusted
            and not unknown
            and not self.scene.memory_losses
        ):
            raise Violation("no_committed_step_is_lost", f"{action}, all have step {newest} in memory")

    @staticmethod
    def _can_reach(worker: SimWorker, step: object) -> bool:
        machine = worker.machine
        if machine.state in ("ready", "aborted", "finished"):
            return machine.step == step
        return machine.state == "in_doubt" and step in (machine.step, machine.step + 1)

    def _opened(self, record: LogRecord) -> None:
        step = record.data["step"]
        if self.promised is not None and isinstance(step, int) and step < self.promised:
            text = f"restarted at {step}, step {self.promised} was promised"
            raise Violation("no_committed_step_is_lost", text)
        self.promised = None
