"""Agreement on layouts in votes: the side of one rank, and the result of a vote of several."""

from __future__ import annotations

from holdfast.core.ids import NO_VERSION, Generation, LayoutVersion
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.vote import Ballot, Tally

G1 = Generation(1, 1)
SMALL, LARGE = Layout(b"small", b""), Layout(b"large", b"")


def vote(
    *ranks: LayoutAgreement, have: LayoutVersion, generation: Generation = G1, between: bool = False
) -> Tally:
    """Cast one vote of all ranks, and let all of them read the tally."""
    tally = cast(*ranks, have=have, generation=generation, between=between)
    for told in ranks:
        told.read(tally)
    return tally


def cast(
    *ranks: LayoutAgreement, have: LayoutVersion, generation: Generation = G1, between: bool = False
) -> Tally:
    """Cast one vote of all ranks."""
    said = [told.ballot(Ballot(step=3, between=between), generation, have).encode() for told in ranks]
    return Tally.read([sum(column) for column in zip(*said, strict=True)], len(ranks))


def started(count: int = 2) -> tuple[LayoutAgreement, ...]:
    """Return ranks that have published their first layouts."""
    ranks = tuple(LayoutAgreement() for _ in range(count))
    for told in ranks:
        assert told.note(SMALL, G1) == LayoutAnnouncement(LayoutVersion(G1, 0), SMALL)
    return ranks


def test_ranks_that_start_together_need_no_vote() -> None:
    ranks = started()
    assert not vote(*ranks, have=NO_VERSION).moved, "the catalogue may be under way"
    assert vote(*ranks, have=NO_VERSION, between=True).moved, "before a save it must be there"
    assert [told.version for told in ranks] == [LayoutVersion(G1, 2)] * 2


def test_what_one_rank_holds_makes_all_tell() -> None:
    one, other = started()
    known = LayoutVersion(G1, 0)
    assert one.note(LARGE, G1) == LayoutAnnouncement(NO_VERSION, LARGE) and one.note(LARGE, G1) is None
    tally = cast(one, other, have=known)
    assert tally.moved
    agreed = LayoutVersion(G1, 1)
    assert [one.read(tally), other.read(tally)] == [
        LayoutAnnouncement(agreed, LARGE),
        LayoutAnnouncement(agreed, SMALL),
    ]
    assert not vote(one, other, have=agreed).moved
    assert one.note(SMALL, G1) == LayoutAnnouncement(NO_VERSION, SMALL)
    assert one.note(LARGE, G1) == LayoutAnnouncement(agreed, LARGE), "as it was published"
    assert not vote(one, other, have=agreed, between=True).moved


def test_who_did_not_read_the_tally_is_told_again_in_the_next_generation() -> None:
    one, other = started()
    other.note(LARGE, G1)
    one.read(cast(one, other, have=LayoutVersion(G1, 0)))  # the other rank is in doubt
    assert [one.version, other.version] == [LayoutVersion(G1, 1), LayoutVersion(G1, 0)]
    assert vote(one, other, have=LayoutVersion(G1, 0), generation=G1.next()).moved
    assert [one.version, other.version] == [LayoutVersion(G1.next(), 1)] * 2
    one, other = started()
    other.note(LARGE, G1)
    other.read(cast(one, other, have=LayoutVersion(G1, 0)))  # now no rank holds anything new
    assert vote(one, other, have=LayoutVersion(G1, 0), generation=G1.next()).moved


def test_a_catalogue_that_was_fenced_off_is_asked_for_again() -> None:
    ranks = started()
    later = G1.next()
    assert vote(*ranks, have=NO_VERSION, generation=later).moved
    assert not vote(*ranks, have=NO_VERSION, generation=later).moved
    assert not vote(*ranks, have=LayoutVersion(later, 1), generation=later.next()).moved


def test_a_newcomer_stands_where_all_stand_or_makes_them_tell() -> None:
    survivor, _ = started()
    known, newcomer = LayoutVersion(G1, 0), LayoutAgreement()
    assert newcomer.inherit(known, SMALL) == LayoutAnnouncement(known, SMALL)
    assert newcomer.note(SMALL, G1.next()) is None
    assert not vote(survivor, newcomer, have=known, generation=G1.next()).moved
    other = LayoutAgreement()
    assert other.inherit(NO_VERSION, SMALL) == LayoutAnnouncement(NO_VERSION, SMALL)
    assert vote(survivor, other, have=known, generation=G1.next().next()).moved
    assert survivor.version == other.version == LayoutVersion(G1.next().next(), 1)
    third = LayoutAgreement()
    third.inherit(other.version, SMALL)
    assert third.note(LARGE, G1) == LayoutAnnouncement(NO_VERSION, LARGE), (
        "it has built more than the one before it"
    )


def test_a_vote_that_did_not_pass_names_nothing() -> None:
    one, other = started()
    one.note(LARGE, G1)
    said = [told.ballot(Ballot(step=3), G1, LayoutVersion(G1, 0)).encode() for told in (one, other)]
    tally = Tally.read([sum(column) for column in zip(*said, strict=True)], 3)
    assert not tally.passed and one.read(tally) is None and one.version == LayoutVersion(G1, 0)
