"""A simulated training process: the real step and script machines and vote, an abstract training loop around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from holdfast.core.decide.decision import RankReport
from holdfast.core.ids import MEMORY, Generation, LayoutVersion, MemberId, NodeId, SaveId
from holdfast.core.protocol.health_messages import StateDigests
from holdfast.core.protocol.messages import (
    Assignment,
    Catalogued,
    ExitAgreed,
    ExitOrder,
    FaultSeen,
    Fence,
    Finished,
    JoinAsked,
    Joined,
    Leave,
    Message,
    RankState,
    Receive,
    Release,
    ResumeInPlace,
    SaveReported,
    SaveShare,
    SessionOpened,
    Settle,
    Settled,
    StartMembers,
    StateOffered,
    StateRefused,
    StepReached,
    WorkerFailed,
    WorkerHello,
)
from holdfast.core.protocol.notices import HoldOrder
from holdfast.core.worker.position import ScriptEvent, ScriptMachine
from holdfast.core.worker.step import StepMachine
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.exit_codes import Exit
from holdfast.sim.collectives import Collectives
from holdfast.sim.sim_layouts import CATALOGUE_TIMEOUT_S, LayoutScene, SimLayouts
from holdfast.sim.sim_memory_tier import Memory
from holdfast.sim.sim_store import SimShare

COMPUTE_S = 0.1
UPDATE_S = 0.01
SAVE_EVERY = 5
VERIFY_EVERY = 4


class Surroundings(LayoutScene, Protocol):
    """What a worker needs of the world."""

    memory: Memory
    collectives: Collectives
    everyone: tuple[int, ...]
    until: int

    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...
    def uplink(self, worker: SimWorker, message: Message) -> None: ...
    def moved(self, worker: SimWorker, old: RankState, new: RankState) -> None: ...
    def died(self, worker: SimWorker, code: int | None, killed_by: int | None) -> None: ...
    def updates(self, worker: SimWorker) -> None: ...
    def fetch(self, newcomer: SimWorker, rank: int) -> int | None: ...
    def holders(self, rank: int) -> list[int]: ...
    def lose_track(self) -> None: ...


class SimWorker:
    """One process life. ``applied``: the updates that its parameters hold; None while one is half done."""

    def __init__(self, world: Surroundings, node_id: NodeId, seat: Assignment, order: StartMembers) -> None:
        self.world = world
        self.node_id = node_id
        self.member_id: MemberId = seat.member_id
        self.rank = seat.rank
        self.machine = StepMachine(order.generation, self._observe)
        self.script = ScriptMachine(joining=order.join)
        self.applied: int | None = 0
        self.alive = True
        self.flipped = False  # a bit of its own copy has changed
        self.wrong = False  # a flipped bit, here or elsewhere, was in the gradients that it applied
        self._flipped_at = 0  # the turn in which it is compared
        self._agreed = (order.generation, -1)
        self.comparing = False  # waits for a vote between two steps
        self._asking = False  # of these, the first one: who holds what
        self._wants: LayoutVersion | None = None  # waits for the catalogue of this version
        self._next: Callable[[], None] = lambda: None  # what waits until the copies were compared
        self.holding = SimLayouts(self, world)
        self._vouching = False  # the state of a decision was compared, and goes somewhere
        self._given: Settle | None = None  # vouch for the state of this decision
        self.stopped = False
        self.save_error = False
        self.opened = False
        self.repeated: dict[type[Message], Message] = {}
        self.queued: list[Message] = []
        self._resume = order.resume
        self._settled: Settle | None = None  # serve the state of this decision
        self._newest = order.generation
        self._told: tuple[Generation, RankState, int] | None = None
        self._reached = False
        self._exit_source = ""
        self._order: SaveShare | None = None
        self._ordered: SaveId | None = None
        self._tally: Tally | None = None
        self._voted = 0  # the number of the last vote of a step
        self._released = False

    # ---------------------------------------------------------------- process

    def start(self) -> None:
        """The process exists: hello, then import, load, open the session."""
        self.hello()
        self._later(self.world.jitter(0.02, 0.06), "open", self._ask if self.script.joining else self._open)

    def report(self) -> RankReport:
        """Where this rank stands, as far as anyone can know: what it answered to the newest fence, or its page."""
        told = self._told
        if self.alive and told is not None and told[0] == self.machine.fenced:
            return RankReport(self.rank, told[1], told[2], True)
        return RankReport(self.rank, self.machine.state, self.machine.step, self.alive)

    def hello(self) -> None:
        """Say who this is, now or after a reconnection."""
        self.world.uplink(
            self,
            WorkerHello(
                member_id=self.member_id,
                generation=self.machine.generation,
                rank=self.rank,
                pid=int(self.member_id),
                state=self.machine.state,
                step=self.machine.step,
            ),
        )

    def send(self, message: Message) -> None:
        """To the agent."""
        self.world.uplink(self, message)

    def fail(self, what: str) -> None:
        """User code raises; the process exits a little later."""
        if not self.alive or self.stopped:
            return
        step = self.machine.step
        self.machine.fail()
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
        self._later(0.03, "exit", lambda: self.world.died(self, 1, None))

    def flip(self) -> None:
        """A bit of this rank's copy changes. Where it holds the copy alone, or between the comparison and what follows
        at once, nothing could ever tell."""
        if (
            self.opened
            and not self.comparing
            and not self._vouching
            and len(self.world.holders(self.rank)) > 1
        ):
            self.flipped = True
            self._flipped_at = int(self.world.jitter(0, VERIFY_EVERY))

    def glitch(self) -> None:
        """A collective of this rank breaks; in an update it is one that user code makes, and tears it."""
        if not self.alive or self.stopped or self.machine.fenced is not None:
            return
        if self.machine.state in ("compute", "updating"):
            self.machine.fail()
            self._fault_seen("a collective broke")
        elif self.machine.state == "voting":
            self.vote_broken()

    def _later(self, delay_s: float, label: str, action: Callable[[], None]) -> None:
        def run() -> None:
            if self.alive and not self.stopped:
                action()

        self.world.later_on(self.node_id, delay_s, f"{label}:{self.rank}", run)

    # ---------------------------------------------------------------- training loop

    def _open(self) -> None:
        step, memory = self.world.store.newest_step(self._resume), self.world.memory
        if self._resume.startswith(MEMORY):
            wanted = int(self._resume.removeprefix(MEMORY))
            if all(memory.verify(rank, wanted) for rank in self.world.everyone):  # what the ranks agree on
                step = wanted
                memory.load(self.rank, step)
        self._open_at(step)
        self.world.collectives.group(self.machine.generation).members.add(self.member_id)
        self._next_step()

    def _open_at(self, step: int, *, replayed: bool = False) -> None:
        self.world.memory.opened(self.rank, step, replayed=replayed)
        self._moved(ScriptEvent.LOOP_OPENED, ScriptEvent.RETURNED)
        self.script.allow_rewind(step)
        self.applied = step
        self.opened = True
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

    def _ask(self) -> None:
        self.send(JoinAsked(member_id=self.member_id, generation=self.machine.generation))

    def _receive(self, order: Receive) -> None:
        """A newcomer takes its shard from a source that holds it, rehearses, and joins."""
        if self.opened or not self.script.joining:
            return
        shards, memory = self.world.store.shards, self.world.memory
        holders = [int(r) for r in order.sources if int(r) % shards == self.rank % shards]
        found = [step for rank in holders if (step := self.world.fetch(self, rank)) is not None]
        if not memory.sound(self.rank, order):
            self._refuse(order.generation, order.step)
            return
        if not (order.kept or order.replays or found):  # every holder has died since
            self._later(0.01, "exit", lambda: self.world.died(self, 1, None))
            return
        applied = memory.take(self.rank, order) if order.kept or order.replays else found[0]
        self.holding.inherit(order)
        self._open_at(order.step, replayed=order.replays)
        self.applied = applied
        joined = Joined(member_id=self.member_id, generation=self.machine.generation, step=self.machine.step)
        self._later(self.world.jitter(0.05, 0.2), "join", lambda: self.send(joined))

    def _refuse(self, generation: Generation, step: int) -> None:
        self.send(
            StateRefused(member_id=self.member_id, generation=generation, step=step, reason="a flipped bit")
        )

    def _next_step(self) -> None:
        if self.machine.state != "ready" or self.holding.stop(self._later, self._next_step):
            return
        if self.machine.step >= self.world.until:
            self._leave_loop("done")
            return
        if self.machine.begin():
            self._moved(ScriptEvent.STEP_TAKEN, ScriptEvent.STEP_GIVEN, ScriptEvent.BLOCK_BEGUN)
            where = (self.machine.generation, self.machine.step)
            delay_s = COMPUTE_S * self.world.jitter(0.9, 1.1)
            self._later(delay_s, "computed", lambda: self._computed(where))

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
                    digest=self.holding.digest(self.flipped and self._flipped_at == turn),
                    exit=bool(self._exit_source),
                    save=(self.machine.step + 1) % SAVE_EVERY == 0,
                    hold=self.holding.asked == self.machine.generation,
                    unsound=self.world.collectives.group(self.machine.generation).broken,
                )
            )
            self._voted = self.holding.told.vote.vote

    def _cast(self, ballot: Ballot) -> None:
        self.world.collectives.vote(self, self.holding.ballot(ballot), self.holding.told.vote.vote)

    def vote_result(self, tally: Tally) -> None:
        """The all-reduce completed here."""
        if not self.alive or self.stopped or self.machine.state != "voting":
            return
        self._tally = tally
        self.holding.read(tally)
        if tally.differ:
            self.machine.vote_refused()
            self.holding.tell_difference(self.flipped)
        elif not tally.passed:
            self.machine.vote_refused()
            self._fault_seen(tally.reason)
        elif self.machine.vote_passed() == "updating":
            self._update()

    def vote_broken(self) -> None:
        """The all-reduce broke here."""
        if self.alive and not self.stopped and self.machine.state == "voting":
            self._tally = None
            self.machine.vote_broken()
            self._fault_seen("the vote broke")
        elif self.alive and not self.stopped and self.comparing:
            self.comparing = False
            self._fault_seen("the comparison broke")

    def _update(self) -> None:
        self.world.updates(self)
        self.applied = None
        step = self.machine.step
        self._later(UPDATE_S * self.world.jitter(0.5, 1.5), "updated", lambda: self._updated(step))

    def _updated(self, step: int) -> None:
        if self.machine.state != "updating" or self.machine.step != step:
            return
        self.applied = step + 1
        self.wrong |= self.world.collectives.group(self.machine.generation).round(self._voted).wrong
        memory = self.world.memory
        if memory.due(step + 1):
            memory.begin(self.rank)
            self._later(self.world.jitter(0.001, 0.01), "keep", lambda: self._kept(step))
            return
        self._committed()

    def _kept(self, step: int) -> None:
        if self.machine.state == "updating" and self.machine.step == step:  # not torn meanwhile
            self.world.memory.commit(self.rank, step + 1, self.applied)
            self._committed()

    def _committed(self) -> None:
        self.holding.drift()
        self._moved(ScriptEvent.BLOCK_ENDED)
        self.machine.end_block()
        self._moved(ScriptEvent.RETURNED)
        self._vouch()
        self._write_ordered()
        self._offer()
        if self.machine.fenced is not None:
            return
        if not self._reached:
            self._reached = True
            reached = StepReached(
                member_id=self.member_id, generation=self.machine.generation, step=self.machine.step
            )
            self.send(reached)
        tally = self._tally
        if tally is not None and tally.exit:
            agreed = ExitAgreed(
                member_id=self.member_id, generation=self.machine.generation, step=self.machine.step
            )
            self.send(agreed)
            self._leave_loop("exit")
        elif tally is not None and tally.save:
            self._compare(self._save_and_go_on)
        else:
            self._next_step()

    def _save_and_go_on(self) -> None:
        self._save("periodic")
        self._next_step()

    def _leave_loop(self, reason: str) -> None:
        self._moved(ScriptEvent.LOOP_OVER)

        def leave() -> None:
            self._save("exit" if reason == "exit" else "final")
            self._later(0.1, "finish", lambda: self._finish(reason))

        self._compare(leave)

    def _compare(self, then: Callable[[], None]) -> None:
        """Agree with all ranks on who holds what, and compare all copies, before ``then``."""
        self._next, self._asking = then, True
        self._between(0, 0)

    def _between(self, plan: int, digest: int) -> None:
        self.comparing, self._wants = True, None
        self._cast(Ballot(step=self.machine.step, between=True, plan=plan, digest=digest))

    def compared(self, tally: Tally) -> None:
        """A vote between two steps completed here."""
        if not self.alive or self.stopped or not self.comparing:
            return
        self.comparing = False
        self.holding.read(tally)
        first, self._asking = self._asking, False
        here = (self.machine.generation, self.machine.step)
        if tally.differ:
            self.holding.tell_difference(self.flipped)
        elif tally.moved:
            version = self._wants = self.holding.told.version
            self._later(CATALOGUE_TIMEOUT_S, "no catalogue", lambda: self._came(version, late=True))
            self._came(version)
        elif first and self._agreed != here:
            self._between(1, self.holding.digest(self.flipped))
        else:
            self._agreed = here
            self._next()

    def _came(self, version: LayoutVersion, *, late: bool = False) -> None:
        """The catalogue that is waited for may be there; without it the next vote says that it never came."""
        if self._wants == version and (late or self.holding.have >= version):
            self._between(1, self.holding.digest(self.flipped))

    def _vouch(self) -> None:
        settle = self._given
        here = self.machine.state in ("ready", "aborted", "finished")
        if settle is None or self.machine.step != settle.step or not here:
            return
        self._given, self._vouching = None, True
        copies = (self.holding.copy(self.flipped),)
        vouched = StateDigests(
            member_id=self.member_id, generation=settle.generation, step=settle.step, copies=copies
        )
        self._later(self.world.jitter(0.001, 0.005), "vouch", lambda: self.send(vouched))

    def _finish(self, reason: str) -> None:
        if self.machine.state != "ready" or self.machine.fenced is not None:
            return
        self.machine.finish()
        finished = Finished(
            member_id=self.member_id,
            generation=self.machine.generation,
            step=self.machine.step,
            reason="exit" if reason == "exit" else "done",
        )
        self.send(finished)

    def _save(self, kind: str) -> None:
        generation, step = self.machine.generation, self.machine.step
        save_id = SaveId("sim", generation, step, 0, kind)
        everyone = self.world.everyone
        self.holding.plan(save_id)
        shards = self.world.store.share_of(self.rank, everyone)
        share = SimShare(self.rank, shards, self.applied, self.flipped or self.wrong)
        self._later(self.world.jitter(0.01, 0.05), "save", lambda: self._written(save_id, everyone, share))

    def _offer(self) -> None:
        settle, machine = self._settled, self.machine
        if settle is None or machine.step != settle.step or machine.state not in ("ready", "aborted"):
            return
        self._settled = None
        if settle.rewind >= 0 and not self.world.memory.verify(self.rank, settle.rewind):
            self._refuse(settle.generation, settle.rewind)
            return
        self.send(
            StateOffered(
                member_id=self.member_id,
                generation=settle.generation,
                step=settle.step if settle.rewind < 0 else settle.rewind,
                host="sim",
                port=self.rank,
            )
        )

    def _write_ordered(self) -> None:
        order = self._order
        if order is None or order.save_id.step != self.machine.step or self._ordered == order.save_id:
            return
        if self.machine.state not in ("ready", "aborted", "finished"):
            return
        self._ordered = order.save_id
        shards = self.world.store.share_of(self.rank, order.sources)
        share = SimShare(self.rank, shards, self.applied, self.flipped or self.wrong)
        save_id, sources = order.save_id, order.sources
        self._later(self.world.jitter(0.01, 0.05), "gasp", lambda: self._written(save_id, sources, share))

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

    def _fault_seen(self, what: str) -> None:
        if self.machine.fenced is None:
            seen = FaultSeen(
                member_id=self.member_id,
                generation=self.machine.generation,
                step=self.machine.step,
                what=what,
            )
            self.send(seen)

    # ---------------------------------------------------------------- client thread

    def receive(self, message: Message) -> None:
        """One message of the control plane."""
        if not self.alive or self.stopped:
            return
        generation = getattr(message, "generation", self._newest)
        if generation < self._newest:
            return
        self._newest = generation
        match message:
            case Fence():
                self._fenced(message)
            case Settle():
                self._settle(message)
            case Receive():
                self._receive(message)
            case ResumeInPlace():
                self._resumed(message)
            case Leave():
                code = message.code
                self._later(0.002, "leave", lambda: self.world.died(self, code, None))
            case Release():
                self._release()
            case Catalogued():
                self.holding.catalogued(message)
                self._came(message.version)
            case HoldOrder():
                self.holding.asked = message.generation
            case ExitOrder():
                self._exit_source = "" if message.cancel else message.source
            case _:
                return

    def _fenced(self, fence: Fence) -> None:
        if not self.machine.fence(fence.generation):
            return
        self._order = self._settled = self._given = None
        self.comparing = self._vouching = False
        self._wants = None
        self._answer()
        if self.machine.state == "voting":
            self._later(self.world.jitter(0.0, 0.005), "poison", self.vote_broken)

    def _settle(self, settle: Settle) -> None:
        if self.machine.fenced != settle.generation:
            return
        self._order = settle.save
        self._settled = settle if settle.then == "replace" else None
        self._given = settle if settle.vouch else None
        if self.machine.decide(settle.step) == "apply":
            self._update()
        self._vouch()
        self._write_ordered()
        self._offer()

    def _resumed(self, resume: ResumeInPlace) -> None:
        fenced = self.machine.fenced
        waits = self.script.joining if fenced is None else fenced == resume.generation
        if waits and resume.step < self.machine.step and self.machine.state in ("ready", "aborted"):
            self._told = (resume.generation, self.machine.state, resume.step)
            self.applied = self.world.memory.load(self.rank, resume.step)
            self.world.memory.keep_only(self.rank, resume.step)
            self.machine.rewind(resume.step)
        if not waits or not self.machine.retry(resume.generation):
            return
        self.script.join()
        self._moved(ScriptEvent.BLOCK_LEFT)
        self._vouching = False
        self._told, self._reached, self._order, self._tally = None, False, None, None
        self.world.collectives.group(resume.generation).members.add(self.member_id)
        self._next_step()

    def _release(self) -> None:
        if not self._released:
            self._released = True
            self._later(0.01, "return", lambda: self.world.died(self, int(Exit.OK), None))

    def _moved(self, *events: ScriptEvent) -> None:
        for event in events:
            self.script.handle(event)

    def _observe(self, old: RankState, new: RankState, step: int) -> None:
        self.world.moved(self, old, new)
        self._answer()

    def _answer(self) -> None:
        fenced = self.machine.fenced
        if fenced is None or not self.machine.settled:
            return
        now = (fenced, self.machine.state, self.machine.step)
        if now == self._told:
            return
        self._told = now
        settled = Settled(
            member_id=self.member_id,
            generation=fenced,
            state=self.machine.state,
            step=self.machine.step,
            kept=self.world.memory.steps(self.rank),
            rewind=self.script.offers_rewind,
        )
        self.send(settled)
