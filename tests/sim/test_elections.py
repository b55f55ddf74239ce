"""Elections: every history within bounds, and mutants that must be caught."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.election import Election
from holdfast.core.ids import NodeId
from holdfast.core.protocol.messages import (
    Command,
    Message,
    Send,
)
from holdfast.core.protocol.peer_messages import (
    RequestVote,
    StartController,
    VoteReply,
    VoterSet,
    WitnessReply,
)
from holdfast.sim.elections import ElectionSearch
from holdfast.sim.invariants import Violation


@pytest.mark.more
def test_three_agents_elect_once_and_hear_of_it() -> None:
    assert ElectionSearch(3, (1, 1, 1), 0, announced=True).run().elections == 1


def test_two_elections_with_a_crash_at_any_moment() -> None:
    result = ElectionSearch(3, (1, 2), 1, announced=False).run()
    assert result.elections == 2 and result.states > 10_000


@pytest.mark.parametrize("agents", [2, pytest.param(3, marks=pytest.mark.more)])
def test_two_elections_with_a_host_that_is_installed_again_at_any_moment(agents: int) -> None:
    result = ElectionSearch(agents, (2, 3)[:agents], 0, announced=False, reinstalls=1).run()
    assert result.states > 100


@pytest.mark.parametrize(
    ("old", "new", "holders"),
    [
        (2, 3, {0, 2}),
        (3, 2, {0}),
        *(pytest.param(*each, marks=pytest.mark.more) for each in ((3, 4, {2, 3}), (4, 3, {0, 1}))),
    ],
)
def test_a_host_is_installed_again_while_the_electorate_changes(
    old: int, new: int, holders: set[int]
) -> None:
    """Regression: a blank vote counted beside some that remember. Two leaders of one term had no other common voter."""
    agents = max(old, new)
    names = tuple(NodeId(f"n{i}") for i in range(agents))
    before, after = VoterSet(0, 1, names[:old]), VoterSet(1, 2, names[:new])
    search = ElectionSearch(agents, (2, 2, 2), 0, announced=False, reinstalls=1)
    search.electorates = tuple(after if i in holders else before for i in range(agents))
    assert search.run().elections == 1


PAIR, GROWS, SHRINKS = ((0, 1), (0, 1)), ((0,), (0, 1)), ((0, 1), (0, 1, 2), (0, 1, 2))
BESIDE = ((0, 1), (0, 1), (0, 1))
"""The voters that each agent has stored: two voters, one that takes a second, three that become two; two voters, and a
host that has lost its vote."""


def with_a_witness(
    stored: tuple[tuple[int, ...], ...], campaigns: tuple[int, ...], machine: type[Election] = Election,
    *, changes: int = 1, reinstalls: int = 0, announced: bool = False,
) -> ElectionSearch:  # fmt: skip
    """Return a search with a witness, in which agents have stored these voters."""
    search = ElectionSearch(
        len(stored), campaigns, 0, announced=announced, machine=machine, reinstalls=reinstalls
    )
    search.changes = changes
    first = stored[-1]
    search.electorates = tuple(
        VoterSet(0, 1 if each == first else 2, tuple(search.names[i] for i in each), witness=True)
        for each in stored
    )
    return search


def test_a_witness_decides_which_of_two_continues() -> None:
    assert with_a_witness(PAIR, (1, 1), announced=True).run().elections == 2
    assert with_a_witness(SHRINKS, (1, 2, 1)).run().elections == 2
    assert with_a_witness(BESIDE, (1, 1, 1)).run().elections > 0
    assert with_a_witness(GROWS, (1, 1), changes=3, announced=True).run().elections == 1


def test_a_witness_decides_while_a_host_is_installed_again() -> None:
    """Of two voters, the one that remembers asks the witness. The other one is then taken as the second voter again."""
    assert with_a_witness(PAIR, (2, 2), reinstalls=1).run().elections == 2
    assert with_a_witness(PAIR, (2, 2), reinstalls=1, announced=True).run().elections == 2
    assert with_a_witness(SHRINKS, (2, 2), reinstalls=1).run().elections == 1
    assert with_a_witness(GROWS, (2, 2), changes=3, reinstalls=1, announced=True).run().elections == 1


class VotesTwice(Election):
    """A mutant that forgets its vote of this term."""

    def _asked(self, ask: RequestVote) -> None:
        if self.role == "follower":
            self.kept = msgspec.structs.replace(self.kept, voted_for="")
        super()._asked(ask)


class ActsBeforeKeeping(Election):
    """A mutant that answers before it stores its state."""

    def handle(self, now: float, event: Message) -> list[Command]:
        commands = super().handle(now, event)
        return sorted(commands, key=lambda c: not isinstance(c, Send | StartController))


class LeadsByPlurality(Election):
    """A mutant for which every vote is a majority."""

    def _elected(self, electorate: object, votes: object) -> bool:
        return True


class AsksBeforeTheChangeIsCommitted(Election):
    """A mutant that asks the witness although its change to two voters may be known to no other agent."""

    def _has_witness(self, electorate: VoterSet) -> bool:
        return electorate.witness and len(electorate.voters) == 2


class IgnoresTheWitness(Election):
    """A mutant for which each claim is granted."""

    def _witnessed(self, said: WitnessReply) -> None:
        super()._witnessed(msgspec.structs.replace(said, voters=(self.me,)))


@pytest.mark.parametrize(
    ("mutant", "stored"), [(AsksBeforeTheChangeIsCommitted, SHRINKS), (IgnoresTheWitness, PAIR)]
)
def test_mutants_with_a_witness_are_caught(
    mutant: type[Election], stored: tuple[tuple[int, ...], ...]
) -> None:
    with pytest.raises(Violation) as caught:
        with_a_witness(stored, (1, 1, 1)[: len(stored)], mutant).run()
    assert caught.value.name in {"one_leader_per_term", "one_electorate_per_number"}


class TrustsBlankVotes(Election):
    """A mutant for which the vote of a host that was installed again is like any other."""

    def handle(self, now: float, event: Message) -> list[Command]:
        if isinstance(event, VoteReply):
            event = msgspec.structs.replace(event, blank=False)
        return super().handle(now, event)


def test_trusting_a_host_that_was_installed_again() -> None:
    with pytest.raises(Violation) as caught:
        ElectionSearch(3, (2, 2), 0, announced=False, machine=TrustsBlankVotes, reinstalls=1).run()
    assert caught.value.name == "one_leader_per_term"


@pytest.mark.parametrize(
    ("mutant", "names"),
    [
        (VotesTwice, {"one_vote_per_term", "one_leader_per_term"}),
        (ActsBeforeKeeping, {"one_vote_per_term", "one_leader_per_term"}),
        (LeadsByPlurality, {"one_leader_per_term"}),
    ],
)
def test_mutants_are_caught(mutant: type[Election], names: set[str]) -> None:
    with pytest.raises(Violation) as caught:
        ElectionSearch(3, (1, 1), 1, announced=False, machine=mutant).run()
    assert caught.value.name in names
