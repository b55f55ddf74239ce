"""``holdfast.once``: a rank's first value stays, for every later process of the rank and every later controller."""

from __future__ import annotations

from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.made_once import NAMES_MAX, VALUE_LENGTH_MAX
from holdfast.core.protocol.messages import LogRecord, OnceAsked, OnceTold, Send
from tests.core.test_controller import Job


def ask(job: Job, rank: int, name: str, value: str = "") -> OnceTold:
    """Ask for a value, and return the answer to the rank."""
    job.post(OnceAsked(member_id=job.members[rank], name=name, value=value))
    (told,) = job.sent(OnceTold)
    assert (told.member_id, told.name) == (job.members[rank], name)
    return told


def test_the_first_value_of_a_rank_stays() -> None:
    job = Job().up()
    assert ask(job, 1, "id").value == ""
    assert ask(job, 1, "id", '"a"').value == '"a"'
    # the record is in the log before the process gets the answer
    assert [type(c) for c in job.last] == [LogRecord, Send]
    assert ask(job, 1, "id", '"b"').value == '"a"'
    assert ask(job, 1, "id").value == '"a"'
    assert ask(job, 0, "id").value == "" and ask(job, 1, "other").value == ""
    assert len([r for r in job.records if r.kind == "made_once"]) == 1


def test_a_successor_knows_the_values_also_from_a_snapshot() -> None:
    job = Job().up()
    ask(job, 2, "id", "[1, 2]")
    past = ReplayedState.read(job.records)
    assert past.once == ((2, "id", "[1, 2]"),)
    again = ReplayedState.read([past.snapshot(1.0)])
    successor = Job(past=again).up()
    assert ask(successor, 2, "id", "[3]").value == "[1, 2]"


def test_a_rank_without_room_is_told_so() -> None:
    job = Job().up()
    for number in range(NAMES_MAX):
        assert not ask(job, 0, str(number), "1").full
    assert ask(job, 0, "another", "1") == OnceTold(job.members[0], "another", "", full=True)
    assert not ask(job, 0, "7", "2").full and not ask(job, 1, "another", "1").full
    assert ask(job, 1, "long", "1" * (VALUE_LENGTH_MAX + 1)).full
