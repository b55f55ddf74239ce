"""The training loop of a simulated process: its script, its steps and its saves.

The state machines of the step and of the script are the real ones. Before and after some blocks the simulated script
runs other code, which takes time. The code after a block also changes the state. Until this code has ended, the
parameters belong to no step, and ``applied`` is None.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

from holdfast.core.ids import Generation, LayoutVersion, MemberId, NodeId, SaveId
from holdfast.core.protocol.messages import (
    Assignment,
    ExitAgreed,
    FaultSeen,
    Finished,
    Message,
    SaveReported,
    SessionOpened,
    StepReached,
)
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.core.worker.worker_machine import ADVANCED, WAIT_REACHED, Advanced, WorkerMachine
from holdfast.sim.collectives import Collectives
from holdfast.sim.sim_layouts import CATALOGUE_TIMEOUT_S, LayoutScene, SimLayouts
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_store import SimShare

COMPUTE_S = 0.1
UPDATE_S = 0.01
SCRIPT_S = 0.03
SCRIPT_CHANCE = 0.2
"""Probability that the script runs other code before a block. The probability after a block is equal."""
SAVE_EVERY = 5
VERIFY_EVERY = 4


class TrainingScene(LayoutScene, Protocol):
    """The interface of the simulated world that a training loop uses."""

    memory: Memory
    collectives: Collectives
    everyone: tuple[int, ...]
    until: int

    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def clock(self, node_id: NodeId) -> float: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...


class SimTraining(ABC):
    """The training loop of one process.

    Attributes:
        applied: number of updates in the parameters; None during an update and during the code after its block.
        flipped: a bit of this rank's copy of the state has flipped.
        wrong: this rank applied gradients that a flipped bit of some rank had changed.
        alive: the process has not died.
        stopped: a signal has stopped the process (SIGSTOP).
        comparing: this rank waits for the result of a comparison, the all-reduce about layouts and copies of the state
            that runs between two steps.
        busy: the script runs code outside of a block, or builds process groups, and so waits for no order.
    """

    def __init__(
        self, world: TrainingScene, node_id: NodeId, seat: Assignment, worker: WorkerMachine
    ) -> None:
        self.world = world
        self.node_id = node_id
        self.member_id: MemberId = seat.member_id
        self.rank = seat.rank
        self.alive, self.stopped = True, False
        self.worker = worker
        self.machine, self.script = worker.steps, worker.script
        self.applied: int | None = 0
        self.flipped = self.wrong = self.comparing = self.busy = False
        self.save_error = False
        # The vote of step s compares the flipped bit only if s % VERIFY_EVERY has this value.
        self.flipped_at = 0
        self.exit_source = ""
        self.holding = SimLayouts(self, world)
        self.tally: Tally | None = None
        self.wants: LayoutVersion | None = None  # this rank waits for the catalogue of this version
        self._agreed = (worker.steps.generation, -1)
        self._asking = False  # the open vote is the first vote of a comparison, which is about layouts
        self._next: Callable[[], None] = lambda: None  # called after the comparison of the copies
        self._voted = 0  # the number of the last vote of a step

    # ---------------------------------------------------------------- the process around it

    @property
    def runs(self) -> bool:
        """True if the process is alive and no signal has stopped it."""
        return self.alive and not self.stopped

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message to the agent of this process."""

    @abstractmethod
    def glitch(self) -> None:
        """Break a collective of this rank."""

    @abstractmethod
    def updates(self) -> None:
        """Check the invariants of the simulation when this rank begins an update."""

    @abstractmethod
    def report(self, event: Message) -> None:
        """Pass an event to the state machine of the worker, and execute the commands that it returns."""

    def later(self, delay_s: float, label: str, action: Callable[[], None]) -> None:
        """Call ``action`` after ``delay_s`` virtual seconds, unless the process is then dead or stopped."""

        def run() -> None:
            if self.runs:
                action()

        self.world.later_on(self.node_id, delay_s, f"{label}:{self.rank}", run)

    def advanced(self, event: ScriptEvent | None = None) -> None:
        """Report to the state machine of a fenced worker that its script or its step has advanced.

        ``event`` is the event of the script; None if only the step has advanced.
        """
        if self.machine.fenced is not None:
            self.report(ADVANCED if event is None else Advanced(event))

    def move(self, *events: ScriptEvent) -> None:
        """Update the recorded position of the script by ``events``, in their order."""
        for event in events:
            self.script.handle(event)
        self.advanced(events[-1])

    def fault_seen(self, what: str) -> None:
        """Report to the agent that a collective broke (``what``). A fenced rank reports nothing."""
        here = self.machine
        if here.fenced is None:
            self.send(
                FaultSeen(member_id=self.member_id, generation=here.generation, step=here.step, what=what)
            )

    # ---------------------------------------------------------------- steps

    def open_at(self, step: int) -> None:
        """Open the session of this process with the state of ``step``, and report that to the agent."""
        self.move(ScriptEvent.LOOP_OPENED, ScriptEvent.RETURNED)
        self.script.allow_rewind(step)
        self.applied = step
        opened = SessionOpened(
            member_id=self.member_id,
            generation=self.machine.generation,
            step=step,
            root="/checkpoints",
            live=True,
        )
        self.send(opened)
        self.holding.look()
        self.machine.open(step)
        self.advanced()

    def next_step(self) -> None:
        """Begin the next step, or leave the loop after the last step. A fenced rank begins no step."""
        if self.machine.state != "ready" or self.holding.stop(self.later, self.next_step):
            return
        if self.machine.step >= self.world.until:
            self._leave_loop("done")
        elif self.machine.fenced is None:
            self.move(ScriptEvent.STEP_TAKEN, ScriptEvent.STEP_GIVEN)
            self._run_script("before", self._begin)

    def _run_script(self, where: str, then: Callable[[], None]) -> None:
        """Call ``then``. With probability ``SCRIPT_CHANCE`` the script first runs other code for a while."""
        self.busy = self.world.jitter(0.0, 1.0) < SCRIPT_CHANCE

        def ended() -> None:
            self.busy = False
            then()

        if self.busy:
            self.later(self.world.jitter(0.0, SCRIPT_S), where, ended)
        else:
            ended()

    def wait(self) -> None:
        """Resume training if the order to resume has arrived and the script is ready for an order."""
        if self.worker.resume is not None and not self.busy:
            self.report(WAIT_REACHED)

    def _begin(self) -> None:
        if self.machine.state != "ready":
            return
        if not self.machine.begin():
            self.move(ScriptEvent.HELD)
            self.wait()
            return
        self.move(ScriptEvent.BLOCK_BEGUN)
        where = (self.machine.generation, self.machine.step)
        delay_s = COMPUTE_S * self.world.jitter(0.9, 1.1)
        self.later(delay_s, "computed", lambda: self._computed(where))

    def _computed(self, where: tuple[Generation, int]) -> None:
        if self.machine.state != "compute" or where != (self.machine.generation, self.machine.step):
            return
        self.world.memory.note(self.rank, self.machine.step, self.applied)
        if self.machine.enter_vote():
            turn = self.machine.step % VERIFY_EVERY
            self._cast(
                Ballot(
                    step=self.machine.step,
                    plan=1,
                    digest=self.holding.digest(self.flipped and self.flipped_at == turn),
                    exit=bool(self.exit_source),
                    save=(self.machine.step + 1) % SAVE_EVERY == 0,
                    hold=self.holding.pause.asks(self.machine.generation),
                    unsound=self.world.collectives.group(self.machine.generation).broken,
                )
            )
            self._voted = self.holding.agreement.vote.vote

    def _cast(self, ballot: Ballot) -> None:
        self.world.collectives.vote(self, self.holding.ballot(ballot), self.holding.agreement.vote.vote)

    def vote_result(self, tally: Tally) -> None:
        """Handle the tally of a vote on a step, when the vote completes on this rank."""
        if not self.runs or self.machine.state != "voting":
            return
        self.tally = tally
        self.holding.read(tally)
        if tally.differ:
            self.machine.vote_refused()
            self.holding.tell_difference(self.flipped)
        elif not tally.passed:
            self.machine.vote_refused()
            self.fault_seen(tally.reason)
        elif self.machine.vote_passed() == "updating":
            self.update()
        self.advanced()
        self.wait()

    def vote_broken(self) -> None:
        """Handle the failure of the all-reduce of a vote on this rank."""
        if self.runs and self.machine.state == "voting":
            self.tally = None
            self.machine.vote_broken()
            self.advanced()
            self.fault_seen("the vote broke")
        elif self.runs and self.comparing:
            self.comparing = False
            self.fault_seen("the comparison broke")

    def update(self) -> None:
        """Begin the update of the present step. It ends after about ``UPDATE_S`` virtual seconds."""
        self.updates()
        self.applied = None
        step = self.machine.step
        self.later(UPDATE_S * self.world.jitter(0.5, 1.5), "updated", lambda: self._updated(step))

    def _updated(self, step: int) -> None:
        if self.machine.state != "updating" or self.machine.step != step:
            return
        self.applied = step + 1
        self.wrong |= self.world.collectives.group(self.machine.generation).round(self._voted).wrong
        memory = self.world.memory
        if memory.due(step + 1):
            memory.begin(self.rank)
            self.later(self.world.jitter(0.001, 0.01), "keep", lambda: self._kept(step))
            return
        self._committed()

    def _kept(self, step: int) -> None:
        if self.machine.state == "updating" and self.machine.step == step:  # not torn meanwhile
            self.world.memory.commit(self.rank, step + 1, self.applied)
            self._committed()

    def _committed(self) -> None:
        self.holding.drift()
        self.script.handle(ScriptEvent.BLOCK_ENDED)
        self.machine.end_block()
        self.applied = None  # until the code after the block is done
        self.advanced()
        self._run_script("after", self._come_back)

    def _come_back(self) -> None:
        step = self.applied = self.machine.step
        self.move(ScriptEvent.RETURNED)
        here, tally = self.machine, self.tally
        if here.fenced is not None:
            self.wait()
            return
        if self.worker.reaches():
            self.send(StepReached(member_id=self.member_id, generation=here.generation, step=step))
        if tally is not None and tally.exit:
            self.send(ExitAgreed(member_id=self.member_id, generation=here.generation, step=step))
            self._leave_loop("exit")
        elif tally is not None and tally.save:
            self._compare(self._save_and_continue)
        else:
            self.next_step()

    # ---------------------------------------------------------------- saves and the end

    def _save_and_continue(self) -> None:
        self._save("periodic")
        self.next_step()

    def _leave_loop(self, reason: str) -> None:
        self.move(ScriptEvent.LOOP_OVER)

        def leave() -> None:
            self._save("exit" if reason == "exit" else "final")
            self.later(0.1, "finish", lambda: self._finish(reason))

        self._compare(leave)

    def _compare(self, then: Callable[[], None]) -> None:
        """Agree with all ranks on their layouts, and compare all copies of the state. Then call ``then``."""
        self._next, self._asking = then, True
        self._between(0, 0)

    def _between(self, plan: int, digest: int) -> None:
        self.comparing, self.wants = True, None
        self._cast(Ballot(step=self.machine.step, between=True, plan=plan, digest=digest))

    def compared(self, tally: Tally) -> None:
        """Handle the tally of a comparison of layouts and copies between two steps, when it completes on this rank."""
        if not self.runs or not self.comparing:
            return
        self.comparing = False
        self.holding.read(tally)
        first, self._asking = self._asking, False
        here = (self.machine.generation, self.machine.step)
        if tally.differ:
            self.holding.tell_difference(self.flipped)
        elif tally.moved:
            version = self.wants = self.holding.agreement.version
            self.later(CATALOGUE_TIMEOUT_S, "no catalogue", lambda: self.came(version, late=True))
            self.came(version)
        elif first and self._agreed != here:
            self._between(1, self.holding.digest(self.flipped))
        else:
            self._agreed = here
            self._next()

    def came(self, version: LayoutVersion, *, late: bool = False) -> None:
        """Cast the ballot of the next comparison, if the catalogue that this rank waits for has arrived or is late.

        Args:
            version: version of the layouts in the catalogue.
            late: True if the time limit for the catalogue has passed. The ballot then reports that it did not arrive.
        """
        if self.wants == version and (late or self.holding.have >= version):
            self._between(1, self.holding.digest(self.flipped))

    def _finish(self, reason: str) -> None:
        here = self.machine
        if here.state != "ready" or here.fenced is not None:
            return
        here.finish()
        self.send(
            Finished(
                member_id=self.member_id,
                generation=here.generation,
                step=here.step,
                reason="exit" if reason == "exit" else "done",
            )
        )

    def _save(self, kind: str) -> None:
        save_id = SaveId("sim", self.machine.generation, self.machine.step, 0, kind)
        self.holding.plan(save_id)
        self.write(save_id, self.world.everyone, "save")

    def write(
        self, save_id: SaveId, sources: tuple[int, ...], label: str, then: Callable[[], None] = lambda: None
    ) -> None:
        """Copy this rank's share of a save now, and write the copy later. After the write, call ``then``.

        ``sources`` are all ranks that take part in the save.
        """
        shards = self.world.store.share_of(self.rank, sources)
        share = SimShare(self.rank, shards, self.applied, self.flipped or self.wrong)

        def written() -> None:
            self._written(save_id, sources, share)
            then()

        self.later(self.world.jitter(0.01, 0.05), label, written)

    def _written(self, save_id: SaveId, sources: tuple[int, ...], share: SimShare) -> None:
        sealed, error = False, ""
        if self.save_error:
            self.save_error, error = False, "no space left on device"
        else:
            sealed = self.world.store.write(save_id.directory(), save_id.step, sources, share)
        self.send(
            SaveReported(
                member_id=self.member_id,
                generation=self.machine.fenced or self.machine.generation,
                save_id=save_id,
                sealed=sealed,
                size_bytes=0,
                duration_s=0.0,
                error=error,
            )
        )
