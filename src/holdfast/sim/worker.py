"""A simulated training process: the real state machine of a worker, and a simulated execution of its commands."""

from __future__ import annotations

from typing import Protocol

import msgspec

from holdfast.core.decide.decision import RankReport
from holdfast.core.ids import MEMORY, Generation, NodeId
from holdfast.core.protocol.health_messages import StateDigests
from holdfast.core.protocol.messages import (
    Assignment,
    Catalogued,
    Command,
    ExitOrder,
    Fence,
    JoinAsked,
    Joined,
    Leave,
    Message,
    RankState,
    Receive,
    Release,
    ResumeInPlace,
    SetTimer,
    Settle,
    Settled,
    StartMembers,
    StateOffered,
    StateRefused,
    Tick,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.notices import HoldOrder, HoldOver
from holdfast.core.worker.decision_orders import (
    CarryOut,
    DecisionOrder,
    LookAtWeights,
    OrderKind,
)
from holdfast.core.worker.position import ScriptEvent
from holdfast.core.worker.worker_machine import (
    AnswerFence,
    ApplyUpdate,
    BreakCollectives,
    BuildGroups,
    ContinueStep,
    EndServing,
    GroupsBuilt,
    OrderEnded,
    ReportBroken,
    RestoreState,
    ServingEnded,
    StateRestored,
    WeightsSeen,
    WorkerMachine,
)
from holdfast.exit_codes import Exit
from holdfast.sim.sim_training import VERIFY_EVERY, SimTraining, TrainingScene

BUILD_S = (0.0, 0.01)


class Surroundings(TrainingScene, Protocol):
    """The interface of the simulated world that a worker uses."""

    def uplink(self, worker: SimWorker, message: Message) -> None: ...
    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None: ...
    def died(self, worker: SimWorker, code: int | None, killed_by: int | None) -> None: ...
    def updates(self, worker: SimWorker) -> None: ...
    def fetch(self, newcomer: SimWorker, rank: int) -> int | None: ...
    def holders(self, rank: int) -> list[int]: ...
    def lose_track(self) -> None: ...


class SimWorker(SimTraining):
    """One simulated training process, from its start to its end. :class:`SimTraining` explains most attributes."""

    world: Surroundings

    def __init__(self, world: Surroundings, node_id: NodeId, seat: Assignment, order: StartMembers) -> None:
        machine = WorkerMachine(seat.member_id, order.generation, joining=order.join, observe=self._observe)
        super().__init__(world, node_id, seat, machine)
        self.opened = False
        # This rank's state was compared with the other copies, and is now saved or transferred.
        self._vouching = False
        self.repeated: dict[type[Message], Message] = {}
        self.queued: list[Message] = []
        self._resume = order.resume
        self._newest = order.generation
        self._answers: list[Settled] = []  # to the newest fence, the newest one last
        self._released = False

    # ---------------------------------------------------------------- process

    def start(self) -> None:
        """Start the process: send ``WorkerHello`` at once, and open the session after the time that imports take."""
        self.hello()
        self.later(self.world.jitter(0.02, 0.06), "open", self._ask if self.script.joining else self._open)

    def told(self) -> RankReport:
        """Return the step and state of this rank, as the controller can know them.

        They come from the rank's answer to the newest fence. Without an answer they come from its status page. A rank
        that opened its session after its answer, and has died since, counts as one without a session: the controller
        may not know of the death yet.
        """
        answers = [answer for answer in self._answers if answer.generation == self.machine.fenced]
        if answers and self.alive:
            return RankReport(self.rank, answers[-1].state, answers[-1].step, True)
        if answers and answers[0].state == "starting":
            return RankReport(self.rank, "starting", answers[0].step, False)
        return RankReport(self.rank, self.machine.state, self.machine.step, self.alive)

    def hello(self) -> None:
        """Send the member id, rank and step of this process to its agent, at the start or after a reconnection."""
        self.send(
            WorkerHello(
                member_id=self.member_id,
                generation=self.machine.generation,
                rank=self.rank,
                pid=int(self.member_id),
                state=self.machine.state,
                step=self.machine.step,
            )
        )

    def send(self, message: Message) -> None:
        """Send a message to the agent of this process."""
        self.world.uplink(self, message)

    def updates(self) -> None:
        """Check the invariants of the simulation when this rank begins an update."""
        self.world.updates(self)

    def fail(self, what: str) -> None:
        """Simulate an exception in user code with the text ``what``. The process exits a little later."""
        if not self.runs:
            return
        step = self.machine.step
        self.machine.fail()
        self.advanced()
        failed = WorkerFailed(
            member_id=self.member_id,
            generation=self.machine.generation,
            step=step,
            kind="ValueError",
            what=what,
            traceback="",
            digest=f"{what}@{self.member_id}",
        )
        self.send(failed)
        self.later(0.03, "exit", lambda: self.world.died(self, 1, None))

    @property
    def can_be_compared(self) -> bool:
        """True if this rank has a whole copy of its box, and had one at the fence of a recovery in progress.

        The controller compares the copies of the ranks that were open at the fence. It does not wait for the others.
        """
        late = [a for a in self._answers[:1] if a.generation == self.machine.fenced and a.state == "starting"]
        return self.alive and self.opened and self.machine.state != "torn" and not late

    def flip(self) -> None:
        """Flip a bit of this rank's copy of the state, unless no comparison of copies could find the flip.

        A comparison cannot find a flip if no other rank holds the same box. It also cannot find a flip that happens
        after the comparison and before the compared state is saved or transferred.
        """
        compared = self.comparing or self._vouching
        if self.opened and not compared and len(self.world.holders(self.rank)) > 1:
            self.flipped = True
            self.flipped_at = int(self.world.jitter(0, VERIFY_EVERY))

    def glitch(self) -> None:
        """Break a collective of this rank. A collective that breaks during an update leaves the update torn."""
        if not self.runs or self.machine.fenced is not None:
            return
        if self.machine.state in ("compute", "updating"):
            self.machine.fail()
            self.fault_seen("a collective broke")
            self.wait()
        elif self.machine.state == "voting":
            self.vote_broken()

    def _observe(self, old: RankState, new: RankState, step: int) -> None:
        self.world.moved(self, old, new)

    # ---------------------------------------------------------------- start

    def _open(self) -> None:
        step, memory = self.world.store.newest_step(self._resume), self.world.memory
        if self._resume.startswith(MEMORY):
            wanted = int(self._resume.removeprefix(MEMORY))
            if all(memory.verify(rank, wanted) for rank in self.world.everyone):  # every rank has this state
                step = wanted
                memory.load(self.rank, step)
        self._open_session(step)
        self.world.collectives.group(self.machine.generation).members.add(self.member_id)
        self.next_step()

    def _open_session(self, step: int, *, replayed: bool = False) -> None:
        self.world.memory.opened(self.rank, step, replayed=replayed)
        self.opened = True
        self.open_at(step)

    def _ask(self) -> None:
        self.send(JoinAsked(member_id=self.member_id, generation=self.machine.generation))

    def _receive(self, order: Receive) -> None:
        """Receive the state of this newcomer from a rank that holds its box, rehearse, and ask to join the job."""
        if self.opened or not self.script.joining:
            return
        shards, memory = self.world.store.shards, self.world.memory
        holders = [int(r) for r in order.sources if int(r) % shards == self.rank % shards]
        found = [step for rank in holders if (step := self.world.fetch(self, rank)) is not None]
        if not memory.sound(self.rank, order):
            self._refuse(order.generation, order.step, "a flipped bit")
            return
        if not (order.kept or order.replays or found):  # every holder has died since the order was sent
            self.later(0.01, "exit", lambda: self.world.died(self, 1, None))
            return
        applied = memory.take(self.rank, order) if order.kept or order.replays else found[0]
        self.holding.inherit(order)
        self._open_session(order.step, replayed=order.replays)
        self.applied = applied
        joined = Joined(member_id=self.member_id, generation=self.machine.generation, step=self.machine.step)
        self.later(self.world.jitter(0.05, 0.2), "join", lambda: self.send(joined))

    def _refuse(self, generation: Generation, step: int, reason: str, *, alone: bool = False) -> None:
        self.send(
            StateRefused(
                member_id=self.member_id, generation=generation, step=step, reason=reason, alone=alone
            )
        )

    # ---------------------------------------------------------------- control plane

    def receive(self, message: Message) -> None:
        """Handle one message from the agent. A message of an older generation is ignored."""
        generation = getattr(message, "generation", self._newest)
        if not self.runs or generation < self._newest:
            return
        self._newest = generation
        match message:
            case Fence() | Settle() | ResumeInPlace():
                self.report(message)
            case Receive():
                self._receive(message)
            case Leave():
                code = message.code
                self.later(0.002, "leave", lambda: self.world.died(self, code, None))
            case Release() if not self._released:
                self._released = True
                self.later(0.01, "return", lambda: self.world.died(self, int(Exit.OK), None))
            case Catalogued():
                self.holding.catalogued(message)
                self.came(message.version)
            case HoldOrder():
                self.holding.pause.handle(message)
            case HoldOver():
                self.holding.stop_over(message)
            case ExitOrder():
                self.exit_source = "" if message.cancel else message.source

    def report(self, event: Message) -> None:
        """Pass an event to the state machine of the worker, and execute the commands that it returns."""
        for command in self.worker.handle(self.world.clock(self.node_id), event):
            self._execute(command)
        self.machine.check()

    def _execute(self, command: Command) -> None:
        match command:
            case AnswerFence():
                self._answers = [
                    each for each in self._answers if each.generation == command.answer.generation
                ]
                self._answers.append(command.answer)
                self.send(msgspec.structs.replace(command.answer, kept=self.world.memory.steps(self.rank)))
            case BreakCollectives():
                self.comparing = self._vouching = False
                self.wants = None
                if self.machine.state == "voting":
                    self.later(self.world.jitter(0.0, 0.005), "poison", self.vote_broken)
            case ApplyUpdate():
                self.update()
            case SetTimer():
                tick = Tick(name=command.name)
                self.later(command.delay_s, f"tick {command.name}", lambda: self.report(tick))
            case CarryOut():
                self._carry_out(command.order)
            case LookAtWeights():
                self.report(WeightsSeen(trained=True))
            case EndServing():
                self.report(ServingEnded(command.generation))
                self.wait()
            case RestoreState():
                self.applied = self.world.memory.load(self.rank, command.step)
                self.world.memory.keep_only(self.rank, command.step)
                self.report(StateRestored(command.step, command.generation))
            case BuildGroups():
                self._build(command.generation)
            case ReportBroken() if command.differ:
                self._refuse(command.generation, self.machine.step, command.reason, alone=True)
            case ReportBroken():
                self.fault_seen(command.reason)
            case ContinueStep():
                self._continue(command.generation)

    def _build(self, generation: Generation) -> None:
        self.busy = True

        def built() -> None:
            self.busy = False
            differ = self.member_id in self.world.collectives.own_groups
            error = "the ranks hold different process groups" if differ else ""
            self.report(GroupsBuilt(generation, error, differ=differ))
            self.wait()

        self.later(self.world.jitter(*BUILD_S), "build", built)

    def _continue(self, generation: Generation) -> None:
        self.move(ScriptEvent.BLOCK_LEFT)
        self._vouching, self._answers, self.tally = False, [], None
        self.world.collectives.group(generation).members.add(self.member_id)
        self.next_step()

    def _carry_out(self, order: DecisionOrder) -> None:
        settle, memory = order.settle, self.world.memory

        def ended() -> None:
            self.report(OrderEnded(settle.generation))

        match order.kind:
            case OrderKind.DIGESTS:
                self._vouching = True
                digests = StateDigests(
                    member_id=self.member_id,
                    generation=settle.generation,
                    step=settle.step,
                    copies=(self.holding.copy(self.flipped),),
                )

                def vouch() -> None:
                    self.send(digests)
                    ended()

                self.later(self.world.jitter(0.001, 0.005), "vouch", vouch)
            case OrderKind.GO_BACK if not memory.verify(self.rank, settle.rewind):
                self._refuse(settle.generation, settle.rewind, "a flipped bit")
                ended()
            case OrderKind.GIVE | OrderKind.GO_BACK:
                self.send(
                    StateOffered(
                        member_id=self.member_id,
                        generation=settle.generation,
                        step=settle.step if settle.rewind < 0 else settle.rewind,
                        host="sim",
                        port=self.rank,
                    )
                )
                ended()
            case OrderKind.SAVE if settle.save is not None:
                self.write(settle.save.save_id, settle.save.sources, "gasp", ended)
