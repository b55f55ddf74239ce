"""The roster: every stored answer equals the answer of a scan over all members."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.membership import Member, Roster
from holdfast.core.protocol.messages import MemberExited

RANKS = 5
NODES = ("node0", "node1", "node2")


def member_of(rank: int, member_id: int, node: str) -> Member:
    """Return a member that is not in the roster yet."""
    return Member(member_id=MemberId(member_id), rank=rank, local_rank=0, node_id=NodeId(node))


def gone(member: Member) -> MemberExited:
    """Return the end of a member."""
    return MemberExited(
        member_id=member.member_id, node_id=member.node_id, generation=Generation(1, 1),
        code=None, signal=9, state="compute", step=1,
    )  # fmt: skip


ASKED: dict[str, Callable[[Roster], object]] = {
    "living": lambda roster: [m.rank for m in roster.living],
    "dead": lambda roster: [m.rank for m in roster.dead],
    "nodes": lambda roster: set(roster.nodes),
    "on": lambda roster: [[m.rank for m in roster.on_node(NodeId(node))] for node in NODES],
    "at": lambda roster: [member and member.member_id for member in map(roster.at, range(RANKS))],
}
SEEN: dict[str, Callable[[list[Member]], object]] = {
    "living": lambda members: [m.rank for m in members if m.alive],
    "dead": lambda members: [m.rank for m in members if not m.alive],
    "nodes": lambda members: {m.node_id for m in members if m.alive},
    "on": lambda members: [[m.rank for m in members if m.alive and m.node_id == node] for node in NODES],
    "at": lambda members: [m.member_id for m in members],
}


@given(
    st.lists(st.sampled_from(NODES), min_size=RANKS, max_size=RANKS),
    st.lists(
        st.tuples(st.integers(0, RANKS - 1), st.sampled_from(NODES), st.sets(st.sampled_from(sorted(ASKED)))),
        max_size=12,
    ),
)
def test_every_answer_is_that_of_a_look_at_all(
    homes: list[str], events: list[tuple[int, str, set[str]]]
) -> None:
    """Members die and are replaced on the same node or elsewhere. Some questions are not asked each time."""
    roster = Roster()
    roster.seat(Generation(1, 1), (member_of(rank, rank + 1, home) for rank, home in enumerate(homes)))
    for number, (rank, node, asked) in enumerate(events):
        member = roster.at(rank)
        assert member is not None
        if member.alive:
            roster.bury(member, gone(member))
        else:
            roster.reseat(member_of(rank, RANKS + 1 + number, node))
        for question in sorted(asked):
            assert ASKED[question](roster) == SEEN[question](roster.members), question
    for question in ASKED:
        assert ASKED[question](roster) == SEEN[question](roster.members), question


@pytest.mark.parametrize("question", sorted(ASKED))
def test_the_only_one_of_its_node_dies_before_anybody_has_asked(question: str) -> None:
    roster = Roster()
    roster.seat(Generation(1, 1), [member_of(rank, rank + 1, NODES[rank]) for rank in range(3)])
    member = roster.members[1]
    roster.bury(member, gone(member))
    assert list(roster.nodes) == ["node0", "node2"] and roster.on_node(NodeId("node1")) == []
    assert ASKED[question](roster) is not None
