"""Liveness turns heartbeats of agents into rare events (suspected, lost); the roster keeps seats and layouts."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.ids import EVERYBODY, NO_VERSION, Generation, LayoutVersion, MemberId, NodeId
from holdfast.core.job.liveness import Liveness
from holdfast.core.job.membership import Member, Roster, assign, is_stale, place_alone
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import Catalogued, LayoutPublished
from holdfast.errors import InternalError

A = NodeId("a")
G1 = Generation(1, 1)


def test_silence_is_suspected_once_then_lost() -> None:
    watch = Liveness(Config(run_id="r", world_size=1))
    watch.hello(A, 0.0)
    events = [(t, e.kind) for t in range(20) for e in watch.tick(float(t))]
    assert events == [(3, "suspected"), (13, "lost")]
    assert not watch.is_up(A)


def test_a_beat_lifts_the_suspicion() -> None:
    watch = Liveness(Config(run_id="r", world_size=1))
    watch.hello(A, 0.0)
    assert watch.gone(A, 1.0) is not None and watch.gone(A, 1.1) is None
    assert not watch.is_up(A)
    watch.beat(A, 2.0)
    assert watch.is_up(A)
    assert [e for t in (2.5, 4.9) for e in watch.tick(t)] == []


def test_older_generations_are_stale_across_terms() -> None:
    assert is_stale(Generation(1, 9), Generation(2, 1))
    assert not is_stale(Generation(2, 1), Generation(2, 1))


def test_ranks_fill_node_after_node() -> None:
    seats = assign([(A, 2), (NodeId("b"), 4)], 5, 10)
    assert [(n, [(s.member_id, s.rank, s.local_rank) for s in here]) for n, here in seats.items()] == [
        ("a", [(10, 0, 0), (11, 1, 1)]),
        ("b", [(12, 2, 0), (13, 3, 1), (14, 4, 2)]),
    ]
    assert assign([(A, 2)], 3, 1) == {}


def test_a_rank_is_seated_once() -> None:
    roster = Roster()
    roster.seat(G1, [Member(member_id=MemberId(1), rank=0, local_rank=0, node_id=A)])
    with pytest.raises(InternalError, match="seated already"):
        roster.add(Member(member_id=MemberId(2), rank=0, local_rank=0, node_id=A))


def test_layouts_survive_a_restart_but_make_a_catalogue_only_together() -> None:
    roster = Roster()

    def publish(rank: int, version: LayoutVersion) -> bool:
        layout = LayoutPublished(
            member_id=MemberId(1),
            generation=G1,
            rank=rank,
            version=version,
            layout=Layout(str(version).encode(), b""),
        )
        return roster.publish(layout, 2) is not None

    first, second = LayoutVersion(G1, 0), LayoutVersion(G1.next(), 0)
    assert [publish(0, first), publish(1, first)] == [False, True]
    assert publish(1, first), "a rank that says it again may not have heard the answer"
    roster.seat(G1.next(), [])
    assert dict(roster.all_layouts().by_rank()) == {0: (b"1.1/0", b""), 1: (b"1.1/0", b"")}
    assert [publish(0, second), publish(1, NO_VERSION), publish(1, second)] == [False, False, True]
    successor = Roster()
    layouts = roster.all_layouts()
    catalogued = Catalogued(member_id=EVERYBODY, generation=G1.next(), version=second, layouts=layouts)
    successor.recall(catalogued, 2)
    other = Roster()
    other.recall(msgspec.structs.replace(catalogued, member_id=MemberId(1)), 2)
    roster = other
    assert publish(0, second), "one worker had it, and the others are unknown"
    roster = successor
    assert not publish(0, second) and roster.agreed(2) == second, "all have it"
    assert not publish(0, NO_VERSION) and roster.agreed(2) == NO_VERSION
    roster.forget_layouts()
    assert roster.agreed(2) == NO_VERSION and not publish(0, first)


def test_layouts_of_another_number_of_ranks_are_not_recalled() -> None:
    """The job shrank, then its controller died: an agent still has those of the larger job."""
    roster = Roster()
    version = LayoutVersion(G1, 4)
    layouts = Layouts.of({rank: Layout(b"old", b"") for rank in range(4)})
    catalogued = Catalogued(member_id=EVERYBODY, generation=G1, version=version, layouts=layouts)
    roster.recall(catalogued, 2)
    assert roster.layouts == {} and roster.agreed(2) == NO_VERSION


def test_the_place_of_an_agent_that_is_alone_follows_from_its_name() -> None:
    """Sides that are cut off know different electorates."""
    assert [place_alone(NodeId(name)) for name in ("node0", "node3", "node12")] == [1, 4, 13]
