"""Simulated collectives of ranks on several hosts.

An all-reduce completes on a rank only while the host of that rank is connected to all other hosts of the group. The
loss of a host does not break the all-reduce at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from holdfast.core.ids import NO_GENERATION, Generation, MemberId, NodeId
from holdfast.core.worker.vote import Ballot
from holdfast.sim.collectives import Collectives, CollectivesScene, Round, SimGroup, Voter
from holdfast.sim.hosts.network import Network
from holdfast.sim.hosts.step_history import Contribution
from holdfast.sim.invariants import Violation

RETRY_S = 0.2


class HostCollectivesScene(CollectivesScene, Protocol):
    """The interface of the simulated world that these collectives use."""

    network: Network

    def is_steady(self, node_id: NodeId) -> bool: ...
    @property
    def workers(self) -> Mapping[MemberId, Voter]: ...


class HostCollectives(Collectives):
    """The collectives of all generations of a job on several hosts."""

    scene: HostCollectivesScene

    def __init__(self, scene: HostCollectivesScene) -> None:
        super().__init__(scene)
        self._made_of: dict[tuple[Generation, int], dict[int, Contribution]] = {}
        self._newest = NO_GENERATION  # the newest generation in which a vote on a step has passed
        self._last: dict[MemberId, tuple[Generation, int]] = {}  # the newest vote on a step, by member

    def vote(self, worker: Voter, ballot: Ballot, number: int) -> None:
        """Enter the ballot of a rank into the vote with the number ``number``.

        In a vote on a step, the rank's gradients are recorded with the ballot.

        Raises:
            Violation: the vote completes although a newer generation already trains.
        """
        group = self.group(worker.machine.generation)
        group.broken |= any(self._has_left(group, self.scene.workers[member]) for member in group.members)
        if not ballot.between:
            where = self._last[worker.member_id] = (worker.machine.generation, number)
            self._made_of.setdefault(where, {})[worker.rank] = Contribution(worker.rank, worker.applied)
        super().vote(worker, ballot, number)
        if group.broken or ballot.between or group.round(number).tally is None:
            return
        if group.generation < self._newest and not self._woke_alone(group):
            text = f"step {ballot.step} passes in generation {group.generation}, {self._newest} trains"
            raise Violation("one_side_trains", text)
        self._newest = max(group.generation, self._newest)

    def _woke_alone(self, group: SimGroup) -> bool:
        """Return True if all ranks of ``group`` are on one host that was paused.

        They need no other host for a step. So they make steps after the pause until their agent hears of the leader
        that has given them up.
        """
        hosts = {self.scene.workers[member].node_id for member in group.members}
        return len(hosts) == 1 and not self.scene.is_steady(*hosts)

    def loss(self, member_id: MemberId) -> tuple[Contribution, ...]:
        """Return the gradients that the last update of a member has used, one entry per rank, ordered by rank."""
        return tuple(made for _, made in sorted(self._made_of[self._last[member_id]].items()))

    def deliver(self, group: SimGroup, round_: Round, voter: Voter) -> None:
        """Deliver the result of a completed vote to one rank, when its host is connected to all hosts of the group."""
        if not voter.alive or voter.machine.generation != group.generation:
            return
        if not self._is_connected(group, voter.node_id):
            self._later(voter, RETRY_S, "votes", lambda: self.deliver(group, round_, voter))
        elif not group.broken or voter.member_id in round_.waiting:
            super().deliver(group, round_, voter)

    def _break(self, worker: Voter, chance: float) -> None:
        connected = self._is_connected(self.group(worker.machine.generation), worker.node_id)
        super()._break(worker, chance if connected else 0.0)

    @staticmethod
    def _has_left(group: SimGroup, voter: Voter) -> bool:
        """Return True if a rank is fenced or belongs to another generation than ``group``.

        A fenced rank has closed its connections. A rank that was paused at the time of the fence may still enter a vote
        of the old generation. That vote cannot complete.
        """
        return voter.machine.fenced is not None or voter.machine.generation != group.generation

    def _is_connected(self, group: SimGroup, node_id: NodeId) -> bool:
        hosts = {self.scene.workers[member_id].node_id for member_id in group.members}
        return all(host == node_id or self.scene.network.connects(host, node_id) for host in hosts)
