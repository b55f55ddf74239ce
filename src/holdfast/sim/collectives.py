"""Simulated collectives: the all-reduce of a vote, and its failure.

A vote completes when every rank of the generation has entered it. The ranks receive the result at different times. If a
peer dies before a rank has received the result, the vote may break for that rank. The rank is then in doubt.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.worker.step import StepMachine
from holdfast.core.worker.vote import Ballot, Tally

FEW_RANKS = 64
COLLECTIVE_TIMEOUT_S = 30.0


class Voter(Protocol):
    """The attributes and methods of a rank that the collectives use."""

    member_id: MemberId
    node_id: NodeId
    rank: int
    alive: bool
    machine: StepMachine
    applied: int | None

    flipped: bool
    comparing: bool

    def vote_result(self, tally: Tally) -> None: ...
    def compared(self, tally: Tally) -> None: ...
    def vote_broken(self) -> None: ...
    def glitch(self) -> None: ...


class CollectivesScene(Protocol):
    """The interface of the simulated world that the collectives use."""

    world_size: int
    rng: random.Random

    @property
    def workers(self) -> Mapping[MemberId, Voter]: ...
    def later_on(self, node_id: NodeId, delay_s: float, label: str, action: Callable[[], None]) -> None: ...
    def jitter(self, low_s: float, high_s: float) -> float: ...


class Round:
    """One vote of one generation: its ballots, the members that wait for the result, and the tally."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ballots: dict[MemberId, Ballot] = {}
        self.waiting: set[MemberId] = set()
        self.tally: Tally | None = None
        self.wrong = False  # a flipped bit in one rank's gradients has changed the sum on all ranks

    def enter(self, member_id: MemberId, ballot: Ballot) -> bool:
        """Add the ballot of a member. Return True if the vote now has the ballots of all ranks."""
        self.ballots[member_id] = ballot
        self.waiting.add(member_id)
        if len(self.ballots) < self.world_size:
            return False
        vectors = [b.encode() for b in self.ballots.values()]
        self.tally = Tally.read([sum(column) for column in zip(*vectors, strict=True)], self.world_size)
        return True


class SimGroup:
    """The simulated collectives of one generation: its votes, by number."""

    def __init__(self, generation: Generation, world_size: int) -> None:
        self.generation = generation
        self.world_size = world_size
        self.broken = False
        self.members: set[MemberId] = set()
        self.rounds: dict[int, Round] = {}

    def round(self, number: int) -> Round:
        """Return the vote with this number, counted within the generation. Create it at the first request."""
        return self.rounds.setdefault(number, Round(self.world_size))


class Collectives:
    """The simulated collectives of all generations of a job."""

    def __init__(self, scene: CollectivesScene) -> None:
        self.scene = scene
        self.own_groups: set[MemberId] = set()  # processes that hold groups which a replacement lacks
        self._groups: dict[Generation, SimGroup] = {}

    def group(self, generation: Generation) -> SimGroup:
        """Return the collectives of a generation. Create them at the first request."""
        return self._groups.setdefault(generation, SimGroup(generation, self.scene.world_size))

    def vote(self, worker: Voter, ballot: Ballot, number: int) -> None:
        """Enter the ballot of a rank into the vote with the number ``number``. The last ballot completes the vote."""
        group = self.group(worker.machine.generation)
        if group.broken:
            self._break(worker, 0.7)
            return
        round_ = group.round(number)
        round_.wrong |= worker.flipped
        if not round_.enter(worker.member_id, ballot) or round_.tally is None:
            return
        for member_id in sorted(round_.waiting):
            voter = self.scene.workers[member_id]
            deliver = partial(self.deliver, group, round_, voter)
            self._later(voter, self.scene.jitter(0.0005, 0.006), "voted", deliver)

    def deliver(self, group: SimGroup, round_: Round, voter: Voter) -> None:
        """Deliver the result of a completed vote of ``group`` to one rank (``voter``)."""
        assert round_.tally is not None
        round_.waiting.discard(voter.member_id)
        if round_.ballots[voter.member_id].between:
            voter.compared(round_.tally)
        else:
            voter.vote_result(round_.tally)

    def _later(self, voter: Voter, delay_s: float, label: str, action: Callable[[], None]) -> None:
        self.scene.later_on(voter.node_id, delay_s, f"{label}:{voter.rank}", action)

    def forget_wrong(self) -> None:
        """From now on, treat the gradients of all votes so far as correct, even those that a flipped bit has changed.

        The caller has found that no two copies of the state differ now, so no comparison can detect the flipped bit.
        """
        for group in self._groups.values():
            for round_ in group.rounds.values():
                round_.wrong = False

    def _break(self, worker: Voter, chance: float) -> None:
        """Break the vote of a rank: soon with probability ``chance``, otherwise at the time-out of the collective."""
        where = (worker.machine.generation, worker.machine.step)

        def broken() -> None:
            if where == (worker.machine.generation, worker.machine.step):
                worker.vote_broken()

        soon = self.scene.rng.random() < chance
        delay_s = self.scene.jitter(0.0, 0.004) if soon else COLLECTIVE_TIMEOUT_S
        self._later(worker, delay_s, "broken", broken)

    def break_off(self, generation: Generation) -> None:
        """Break the collectives of a generation after the loss of a member or of a connection.

        A random part of the ranks notices the break soon. The other ranks hang until they are fenced.
        """
        group = self.group(generation)
        if group.broken and self.scene.world_size > FEW_RANKS:
            return  # the first call has handled the ranks that were in a collective
        group.broken = True
        for member_id in sorted(group.members):
            worker = self.scene.workers[member_id]
            if not worker.alive or worker.machine.generation != generation:
                continue
            if worker.machine.state == "voting" or worker.comparing:
                self._break(worker, 0.5)
            elif worker.machine.state == "compute" and self.scene.rng.random() < 0.5:
                self._later(worker, self.scene.jitter(0.0, 0.03), "glitch", worker.glitch)
