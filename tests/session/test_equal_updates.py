"""The comparison of the updates that ranks make, after one of them was replaced."""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict, UserDict, deque
from collections.abc import Mapping
from datetime import timedelta
from decimal import Decimal
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest

from holdfast.core.worker.vote import Ballot, Tally
from holdfast.errors import StepError
from holdfast.session.steps.equal_updates import EqualUpdates
from holdfast.session.steps.update_differences import Updates, in_words


class Numbers:
    """Learning rates of optimizers, as given."""

    def __init__(self) -> None:
        self.of: dict[str, list[float]] = {}
        self.declared: list[object] = []

    def scheduled_settings(self, optimizer: str) -> dict[str, list[float]]:
        """Return the learning rates of one optimizer."""
        return {"lr": self.of.get(optimizer, [])}

    def declares(self, value: object) -> bool:
        """Return whether an object is a trainer, or in ``declared``: the tests declare those as state."""
        return isinstance(value, Trainer) or any(value is each for each in self.declared)

    def objects(self) -> list[object]:
        """Return the declared objects with a state."""
        return [each for each in self.declared if hasattr(each, "state_dict")]

    def keeps(self, owner: object, attribute: str) -> bool:
        return False

    def in_user_state(self, value: object) -> bool:
        """Return whether an object is in ``declared``."""
        return any(value is each for each in self.declared)

    def digest_of(self, value: object) -> int | None:
        """Return no digest."""
        return None

    def batches_drawn(self, value: object) -> int | None:
        """Return nothing: these tests have no loaders."""
        return None

    def content_of(self, value: object, size_bytes_max: int) -> bytes | None:
        """Return nothing: these tests have no tensors."""
        return None


class Trainer:
    """An object of the script that counts."""

    def __init__(self) -> None:
        self.count = 0


class Counter:
    """An object of the script that counts, and is no state."""

    def __init__(self) -> None:
        self.count = 0


class Rank:
    """One rank, whose blocks step the given optimizers."""

    def __init__(self, *, scaled: bool = False, replaces: bool = False, first: bool = False) -> None:
        self.numbers = Numbers()
        self.checked = EqualUpdates(0 if first else 1, self.numbers, scaled=scaled, searches=True)
        if replaces:
            self.checked.joins()

    def block(self, step: int, updates: Mapping[str, float]) -> Ballot:
        """Step optimizers with these learning rates in a block, and return the ballot."""
        self.checked.opens()
        for name, rate in updates.items():
            self.numbers.of[name] = [rate]
            self.checked.steps(name, "")
        return self.checked.ballot(Ballot(step=step), alike=True)

    def behind(self, name: str) -> None:
        """Step an optimizer after the vote."""
        self.numbers.of[name] = [0.5]
        self.checked.steps(name, "")


def vote(step: int, ranks: list[Rank], *updates: Mapping[str, float]) -> Tally:
    """Vote on one step, and let all ranks read the tally and commit."""
    ballots = [rank.block(step, made).encode() for rank, made in zip(ranks, updates, strict=True)]
    tally = Tally.read([sum(column) for column in zip(*ballots, strict=True)], len(ranks))
    for rank in ranks:
        rank.checked.read(tally, step)
    commit(ranks)
    return tally


def commit(ranks: list[Rank]) -> None:
    """Commit the step of the newest vote on all ranks."""
    for rank in ranks:
        rank.checked.committed(ended=False)


D, G = {"d": 0.1}, {"g": 0.1}


@pytest.mark.parametrize("other", [{}, G, {"d": 0.2}, {**D, **G}])
def test_a_replacement_with_another_update_is_refused(other: Mapping[str, float]) -> None:
    ranks = [Rank(), Rank()]
    vote(3, ranks, D, D)
    ranks[1] = Rank(replaces=True)
    vote(4, ranks, D, D)
    with pytest.raises(
        StepError, match=r"step 5: this rank steps 'd' \(lr 0.1\), and not all ranks do the same"
    ):
        vote(5, ranks, D, other)


SGD = {"lr": [0.1, 0.1], "weight_decay": [0.0, 0.0], "momentum": [0.9, 0.9], "betas": []}


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"d": SGD}, ""),
        ({}, "rank 3 makes no update"),
        ({"d": {"lr": []}, "g": SGD}, "rank 3 steps 'd', 'g' (lr 0.1)"),
        ({"d": {**SGD, "momentum": [0.9, 0.8]}}, "momentum of 'd' is 0.9 here and 0.8 on rank 3"),
        ({"d": {**SGD, "betas": [0.9]}}, "betas of 'd' has 0 numbers here and 1 on rank 3"),
        (
            {"d": {**{setting: [7.0, 7.0] for setting in SGD}, "betas": [0.5]}},
            (
                "lr of 'd' is 0.1 here and 7.0 on rank 3, weight_decay of 'd' is 0.0 here and 7.0 on rank 3, "
                "momentum of 'd' is 0.9 here and 7.0 on rank 3 and 1 more setting"
            ),
        ),
    ],
)
def test_the_setting_or_the_optimizer_that_differs_is_named(theirs: Updates, words: str) -> None:
    assert in_words({"d": SGD}, 3, theirs) == words


@pytest.mark.parametrize("when", [2, 4])
def test_ranks_with_tasks_of_their_own_are_not_refused(when: int) -> None:
    """They have differed before the replacement, or they differ without one."""
    ranks = [Rank(), Rank()]
    assert vote(when, ranks, D, G).uneven
    ranks[1] = Rank(replaces=when == 2)
    assert vote(5, ranks, D, {}).passed
    assert vote(6, ranks, D, G).passed


def test_an_update_behind_the_vote_is_refused_at_the_next_vote() -> None:
    ranks = [Rank(), Rank(replaces=True)]
    vote(4, ranks, D, D)
    ranks[0].behind("g")
    commit(ranks)
    with pytest.raises(
        StepError, match=r"step 4: this rank steps 'd'.*A checkpoint of step 5 would hold this"
    ):
        vote(5, ranks, D, D)


def test_a_replacement_does_not_know_the_step_before_its_first_one() -> None:
    ranks = [Rank(), Rank()]
    vote(3, ranks, D, D)
    ranks[0].behind("g")
    ranks[1].behind("g")
    commit(ranks)
    ranks[1] = Rank(replaces=True)
    assert vote(4, ranks, D, D) == Tally(passed=True)


def test_an_update_that_a_scaler_leaves_out_is_not_compared() -> None:
    ranks = [Rank(scaled=True), Rank(scaled=True, replaces=True)]
    assert vote(3, ranks, D, {}) == Tally(passed=True)
    with pytest.raises(StepError, match="steps 'd'"):
        vote(4, ranks, D, {"d": 0.2})


def loop(rank: Rank, step: int, seen: int, until: int) -> Ballot:
    """Run a loop of the script that steps an optimizer by a variable, up to its vote in ``step``."""
    ballot = Ballot(step=step)
    while step < until:
        rank.checked.opens()
        if seen < 99:
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        ballot = rank.checked.ballot(Ballot(step=step), alike=True)
        seen += 1
        step += 1
    return ballot


def epochs(rank: Rank, step: int, seen: int, until: int) -> Ballot:
    """Run a loop as in ``loop``, that sets the variable when an epoch begins."""
    ballot = Ballot(step=step)
    while step < until:
        if step == 99:
            seen = 0
        ballot = _block(rank, step, seen)
        seen += 1
        step += 1
    return ballot


def _block(rank: Rank, step: int, seen: int) -> Ballot:
    rank.checked.opens()
    if seen < 99:
        rank.numbers.of["d"] = [0.1]
        rank.checked.steps("d", "")
    return rank.checked.ballot(Ballot(step=step), alike=True)


def told(ranks: list[Rank], *ballots: Ballot) -> Tally:
    """Let all ranks read the tally of their ballots."""
    vectors = [ballot.encode() for ballot in ballots]
    tally = Tally.read([sum(column) for column in zip(*vectors, strict=True)], len(ranks))
    for rank in ranks:
        rank.checked.read(tally, ballots[0].step)
    return tally


def means(rank: Rank, step: int, kept: dict[str, float], *, alike: bool = True) -> Ballot:
    """Run a block whose update depends on a mean in a dict of the state, up to its vote."""
    while step < 99:
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        kept["mean"] *= 0.5
        if kept["mean"] < 99:
            rank.checked.steps("d", "")
        return rank.checked.ballot(Ballot(step=step), alike=alike)
    return Ballot(step=step)


def test_a_value_in_the_state_on_which_updates_depend_must_be_equal_in_each_vote() -> None:
    ranks, kept = [Rank(), Rank()], [{"mean": 8.0}, {"mean": 8.0}]
    for rank, values in zip(ranks, kept, strict=True):
        rank.numbers.declared = [values]
    for step in range(2):
        ballots = [means(rank, step, values) for rank, values in zip(ranks, kept, strict=True)]
        assert ballots[0].user_state > 0 and told(ranks, *ballots) == Tally(passed=True)
    kept[1]["mean"] += 1.0
    ballots = [means(rank, 2, values) for rank, values in zip(ranks, kept, strict=True)]
    with pytest.raises(
        StepError, match=r'step 2: .*not the same on all ranks \(here kept\["mean"\] = 1.0 \('
    ):
        told(ranks, *ballots)


def test_ranks_that_hold_different_tensors_may_have_different_values_in_the_state() -> None:
    """The stages of a pipeline: a replacement gets the values of a rank that holds the same tensors."""
    ranks, kept = [Rank(), Rank()], [{"mean": 8.0}, {"mean": 9.0}]
    for rank, values in zip(ranks, kept, strict=True):
        rank.numbers.declared = [values]
    ballots = [means(rank, 1, values, alike=False) for rank, values in zip(ranks, kept, strict=True)]
    assert told(ranks, *ballots) == Tally(passed=True)


def test_a_replacement_with_other_variables_is_refused_at_its_first_vote() -> None:
    ranks = [Rank(), Rank(replaces=True)]
    with pytest.raises(
        StepError,
        match=r"step 5: the updates depend on.*\(here step = 5, seen = 5 .*ranks have the same values",
    ):
        told(ranks, loop(ranks[0], 5, 5, 6), loop(ranks[1], 5, 0, 6))


def test_a_first_vote_that_did_not_pass_is_not_the_first_one() -> None:
    ranks = [Rank(), Rank(replaces=True)]
    broken = msgspec.structs.replace(loop(ranks[0], 5, 5, 6), unsound=True)
    assert not told(ranks, broken, loop(ranks[1], 5, 0, 6)).passed
    with pytest.raises(StepError, match="ranks have the same values"):
        told(ranks, loop(ranks[0], 5, 5, 6), loop(ranks[1], 5, 0, 6))


def test_variables_are_not_compared_after_the_first_vote_or_where_they_have_differed() -> None:
    ranks = [Rank(), Rank(replaces=True)]
    assert told(ranks, loop(ranks[0], 5, 5, 6), loop(ranks[1], 5, 5, 6)) == Tally(passed=True)
    assert told(ranks, loop(ranks[0], 6, 6, 7), loop(ranks[1], 6, 7, 7)) == Tally(passed=True, mixed=True)
    ranks[1] = Rank(replaces=True)
    assert told(ranks, loop(ranks[0], 7, 7, 8), loop(ranks[1], 7, 0, 8)) == Tally(passed=True, mixed=True)


def test_an_attribute_of_state_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    rank, trainer = Rank(first=True), Trainer()
    for _ in range(2):
        rank.checked.opens()
        if trainer.count < 99:
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        trainer.count += 1
    assert rank.checked.ballot(Ballot(step=1), alike=True).variables == 0 and not caplog.messages


def resumed(step: int, seen: int, *, ended: bool = False, mixed: bool = False) -> Rank:
    """Return a rank of a job that continues at ``step``, where ``seen`` was the script's count at the last vote."""
    ranks = [Rank(), Rank()]
    told(ranks, *(loop(rank, 0, 0, 1) for rank in ranks))
    commit(ranks)
    told(ranks, loop(ranks[0], step - 1, seen + mixed, step), loop(ranks[1], step - 1, seen, step))
    for rank in ranks:
        rank.checked.committed(ended=ended)
    after = Rank()
    after.checked.variables.stand_at({"step": step, **ranks[0].checked.variables.kept()}, {})
    return after


@pytest.mark.parametrize(("newest", "ended"), [(7, False), (2, False), (7, True)])
def test_a_count_that_begins_again_in_a_resumed_job_is_refused(newest: int, ended: bool) -> None:
    """The loop only adds to it, so it is no count of the steps of an epoch."""
    with pytest.raises(
        StepError, match=rf"depend on seen = 0, as at the first step.*before: seen = {newest}\."
    ):
        loop(resumed(8, newest, ended=ended), 8, 0, 9)


def test_a_count_that_a_resumed_job_begins_in_the_middle_is_refused() -> None:
    with pytest.raises(StepError, match=r"depend on seen = 5; at the step before: seen = 7\."):
        loop(resumed(8, 7), 8, 5, 9)


def test_a_count_that_goes_on_or_began_with_an_epoch_or_is_of_one_rank_is_not_refused() -> None:
    loop(resumed(8, 7), 8, 7, 9)
    loop(resumed(8, 7), 8, 8, 9)
    loop(resumed(8, 0), 8, 0, 9)
    epochs(resumed(8, 7, ended=True), 8, 0, 9)
    loop(resumed(8, 7, mixed=True), 8, 0, 9)


def passes(rank: Rank, step: int, seen: int, until: int, *, reset: bool = False) -> dict[str, Any]:
    """Run a loop as in ``loop``, and commit its steps.

    Return the rank-local values where the script takes the step ``until``; ``reset``: each block sets the variable to 0
    after it has read it.
    """
    kept: dict[str, Any] = {}
    rank.checked.variables.enters_loop(starts=False, puts_back=False)
    while step < until:
        rank.checked.opens()
        if seen < 99:
            if reset:
                seen = 0
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        rank.checked.ballot(Ballot(step=step), alike=True)
        kept = {**rank.checked.variables.of_rank(ended=False)}
        rank.checked.committed(ended=False)
        seen += 1
        kept.update(rank.checked.variables.passed())
        step += 1
    return kept


def after(kept: Mapping[str, Any]) -> Rank:
    """Return a rank whose process continues the job with the rank-local values ``kept``."""
    rank = Rank(replaces=True)
    rank.checked.variables.stand_at({}, kept)
    return rank


def test_a_count_that_begins_again_at_the_second_step_is_refused() -> None:
    """Regression: its values at the first update and at the step before were equal, so nothing was refused."""
    kept = passes(Rank(), 0, 0, 1)
    with pytest.raises(
        StepError, match=r"seen = 0, as at the first step.*at the step before: seen = 1\."
    ) as caught:
        passes(after(kept), 1, 0, 2)
    assert "or in s.own if it is of one rank" in str(caught.value.hint)
    passes(after(kept), 1, 1, 2)
    passes(after(passes(Rank(), 0, 0, 1, reset=True)), 1, 1, 2, reset=True)


def test_a_count_that_is_lost_in_its_first_update_with_another_value_is_refused() -> None:
    """Regression: the values of one rank were kept from the vote on that showed the difference, so not before it."""
    rank = Rank()
    passes(rank, 0, 0, 1)
    loop(rank, 1, 1, 2)
    kept = rank.checked.variables.of_rank(ended=False)
    with pytest.raises(StepError, match=r"seen = 0, as at the first step.*at the step before: seen = 1\."):
        passes(after(kept), 2, 0, 3)
    passes(after(kept), 2, 2, 3)


def test_a_variable_of_the_same_name_in_another_function_is_not_read() -> None:
    rank = Rank()
    assert passes(rank, 0, 0, 1)["update_variables"][3] == {"seen": 1}
    seen = 7
    assert rank.checked.variables.passed()["update_variables"][3] == {} and seen == 7


def taught(rank: Rank, step: int, teacher: object, until: int) -> dict[str, Any]:
    """Run a loop of the script with an object that it makes at step 3. Return the rank-local values at its end."""
    kept: dict[str, Any] = {}
    while step < until:
        if step == 3:
            teacher = object()
        rank.checked.opens()
        if teacher != 99:
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        rank.checked.ballot(Ballot(step=step), alike=True)
        kept = rank.checked.variables.of_rank(ended=False)
        rank.checked.committed(ended=False)
        step += 1
    return kept


def test_an_object_that_is_none_again_is_refused() -> None:
    """Regression: an object had no value, so None looked like the value of all steps before: other weights."""
    kept = taught(Rank(), 0, None, 6)
    with pytest.raises(StepError, match=r"teacher = 'None', as at the first.*before: teacher = 'an object'"):
        taught(after(kept), 6, None, 7)
    taught(after(kept), 6, object(), 7)
    taught(after(taught(Rank(), 0, None, 2)), 2, None, 5)


def normalized(rank: Rank, step: int, data: float, until: int) -> dict[str, Any]:
    """Run a loop whose first step keeps an array of its data. Return the rank-local values at its end."""
    kept: dict[str, Any] = {}
    mean = None
    while step < until:
        rank.checked.opens()
        if mean is None:
            mean = np.full(2, data)
        if mean.sum() < 99:
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        rank.checked.ballot(Ballot(step=step), alike=True)
        rank.checked.variables.voted(mixed=True)
        kept = rank.checked.variables.of_rank(ended=False)
        rank.checked.committed(ended=False)
        step += 1
    return kept


def test_an_array_of_one_rank_that_a_replacement_sets_from_other_data_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the first array and the newest one were equal, so a third one had not begun again: other weights."""
    kept = normalized(Rank(), 0, 0.5, 6)
    with pytest.raises(StepError, match=r"mean = 'an array .*; at the step before: mean = 'an array "):
        normalized(after(kept), 6, 0.75, 7)
    normalized(after(kept), 6, 0.5, 7)
    assert not caplog.messages
    resumes = Rank(first=True)
    resumes.checked.variables.stand_at({}, kept)
    normalized(resumes, 6, 0.75, 7)
    assert "depend on mean = 'an array (2,) with checksum" in caplog.messages[0], "or another setting"


def test_an_object_of_all_steps_is_no_value() -> None:
    assert taught(Rank(), 0, object(), 6) == {}


def without_an_update(rank: Rank, *, ended: bool) -> Rank:
    """Let ``rank`` run a block without an update."""
    rank.checked.opens()
    rank.checked.committed(ended=ended)
    return rank


@pytest.mark.parametrize("ended", [False, True])
def test_a_resumed_job_whose_first_block_makes_no_update_is_compared_at_its_first_update(ended: bool) -> None:
    """Regression: such a block ended the comparison, and a count that had begun again was taken over."""
    with pytest.raises(StepError, match=r"depend on seen = 0, as at the first step.*before: seen = 7\."):
        loop(without_an_update(resumed(8, 7), ended=ended), 9, 0, 10)
    loop(without_an_update(resumed(8, 7), ended=ended), 9, 7, 10)


def test_an_epoch_that_ends_without_an_update_may_begin_its_count_again() -> None:
    epochs(without_an_update(resumed(8, 7), ended=True), 9, 0, 10)


def of_one_rank(seen: int, *, ended: bool = False) -> Rank:
    """Return a rank of a job that continues at step 8, whose ranks had different counts, this one ``seen``."""
    ranks = [Rank(), Rank()]
    told(ranks, loop(ranks[0], 0, 0, 1), loop(ranks[1], 0, 3, 1))
    commit(ranks)
    told(ranks, loop(ranks[0], 7, 0, 8), loop(ranks[1], 7, seen, 8))
    kept = ranks[1].checked.variables.of_rank(ended=ended)
    after = Rank()
    after.checked.variables.stand_at(ranks[1].checked.variables.kept(), kept)
    return after


@pytest.mark.parametrize(("seen", "first"), [(3, ", as at the first step of the job"), (5, "")])
def test_a_count_of_one_rank_that_begins_again_is_refused(seen: int, first: str) -> None:
    with pytest.raises(
        StepError, match=f"depend on seen = {seen}{first}; at the step before: seen = 9."
    ) as caught:
        loop(of_one_rank(9), 8, seen, 9)
    assert "s.attach(NAME, object)" in str(caught.value.hint)


def test_a_count_of_one_rank_that_goes_on_or_began_with_an_epoch_is_not_refused() -> None:
    loop(of_one_rank(9), 8, 9, 9)
    loop(of_one_rank(9), 8, 10, 9)
    epochs(of_one_rank(9, ended=True), 8, 3, 9)


def test_a_job_without_updates_at_a_step_keeps_the_values_of_the_step_before() -> None:
    rank = of_one_rank(9)
    kept = rank.checked.variables.of_rank(ended=False)
    loop(rank, 8, 10, 9)
    rank.checked.variables.voted(mixed=True)
    rank.checked.committed(ended=False)
    rank.checked.opens()
    newest = rank.checked.variables.of_rank(ended=False)["update_variables"][1]
    assert kept["update_variables"][1]["seen"] == 9 and newest["seen"] == 10


def test_an_array_that_some_steps_fill_is_refused_where_it_is_empty_again() -> None:
    """It is the data of each rank, so the ranks do not compare it."""

    def train(rank: Rank, step: int, filled: float) -> None:
        past = np.full(2, filled)
        for number in (step,):
            rank.checked.opens()
            if number % 3 == 0:
                past[number % 2] = rank.checked.variables.number() + 1
            rank.numbers.of["d"] = [0.1]
            if past.sum() < 99:
                rank.checked.steps("d", "")
            past = past + number

    rank = Rank()
    train(rank, 4, 0.5)
    assert rank.checked.ballot(Ballot(step=4), alike=True).variables == 0
    kept = rank.checked.variables.of_rank(ended=False)
    goes_on, begins_again = Rank(), Rank()
    goes_on.checked.variables.stand_at({}, kept)
    begins_again.checked.variables.stand_at({}, kept)
    train(goes_on, 5, 0.25)
    with pytest.raises(StepError, match=r"past = 'an array \(2,\) of zeros'; at the step before: past = "):
        train(begins_again, 5, 0.0)


def test_an_object_that_the_session_keeps_for_each_rank_is_left_out() -> None:
    rank, counter = Rank(), Counter()
    rank.checked.variables.leave_out(lambda: (counter,))
    for _ in range(2):
        rank.checked.opens()
        if counter.count < 99:
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
        counter.count += 1
    assert rank.checked.variables.of_rank(ended=False) == {} and not rank.checked.variables.names()


def both_replaced(step: int, seen: int, *, ended: bool = False) -> list[Rank]:
    """Return the ranks of a job whose processes have all replaced lost ones before the vote of ``step``."""
    ranks = [resumed(step, seen, ended=ended), resumed(step, seen, ended=ended)]
    for rank in ranks:
        rank.checked.joins()
    return ranks


def test_a_count_that_no_rank_has_any_more_is_refused() -> None:
    """Regression: the replacements were compared with each other, and both began with the count of a start."""
    ranks = both_replaced(8, 7)
    with pytest.raises(StepError, match=r"depend on seen = 0, as at the first step.*before: seen = 7\."):
        told(ranks, loop(ranks[0], 8, 0, 9), loop(ranks[1], 8, 0, 9))


def test_a_count_that_began_again_on_a_rank_of_the_job_as_well_is_not_refused() -> None:
    ranks = [Rank(), both_replaced(8, 7)[1]]
    assert told(ranks, loop(ranks[0], 8, 0, 9), loop(ranks[1], 8, 0, 9)) == Tally(passed=True)
    ranks = both_replaced(8, 7, ended=True)
    assert told(ranks, epochs(ranks[0], 8, 0, 9), epochs(ranks[1], 8, 0, 9)) == Tally(passed=True)


def test_variables_are_named_once_for_all_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    rank, count = Rank(first=True), 0
    for _ in range(2):
        rank.checked.opens()
        if count < 99:
            rank.checked.steps("d", "")
            rank.checked.steps("g", "")
        count += 1
    assert len(caplog.messages) == 1 and "depend on count" in caplog.messages[0]


class Kind(Enum):
    """The mode of a schedule."""

    FIRST = "first"
    SECOND = "second"


PLAIN = {
    "pair": ((1, 2), (1, 3)),
    "none": (None, 2.5),
    "numpy": (np.int64(2), np.int64(3)),
    "nested": ({"data": [{"shard": 1}]}, {"data": [{"shard": 2}]}),
    "set": ({"b", "a"}, {"b", "a", "c"}),
    "subclass": (OrderedDict(seen=1), OrderedDict(seen=2)),
    "complex": (1j, 2j),
    "bytes": (b"a", b"b"),
    "buffer": (memoryview(b"a"), memoryview(b"b")),
    "array": (array("d", [0.0]), array("d", [1.0])),
    "decimal": ([Decimal(1)], [Decimal(2)]),
    "duration": (timedelta(1), timedelta(2)),
    "enum": (Kind.FIRST, Kind.SECOND),
    "count": (itertools.count(1), itertools.count(2)),
    "iterator": (iter([1, 2]), iter([1])),
    "long": (b"a" * 100, b"a" * 99 + b"b"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_value_of_any_kind_is_compared(kind: str) -> None:
    """Regression: a pair, a dict, a number of NumPy and None were no values, so nothing was compared."""
    rank = Rank(first=True)
    seen: Any = PLAIN[kind][0]
    numbers: list[Mapping[str, int]] = []
    for _ in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if seen != 99:
            rank.checked.steps("d", "")
        seen = PLAIN[kind][1]
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == set(numbers[1]) == {"seen"} and numbers[0] != numbers[1]


def test_equal_numbers_of_two_types_are_one_value() -> None:
    """Regression: a strength that is ``0.0`` before the loop, and that its function returns as ``0``, was refused."""
    rank = Rank(first=True)
    strength: float = 0.0
    numbers: list[Mapping[str, int]] = []
    for _ in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if strength != 99:
            rank.checked.steps("d", "")
        strength = max(0, -1)
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == {"strength"} and numbers[0] == numbers[1]


def test_a_dict_that_only_its_methods_change_is_compared() -> None:
    """Regression: nothing assigned to it, so it was no variable that a step takes over."""
    rank = Rank(first=True)
    past: dict[str, int] = {"seen": 0}
    numbers: list[Mapping[str, int]] = []
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if past != {"seen": 99}:
            rank.checked.steps("d", "")
        past.update(seen=number + 1)
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == set(numbers[1]) == {"past"} and numbers[0] != numbers[1]


def test_an_element_of_a_mapping_that_is_no_dict_is_compared() -> None:
    """Regression: it had no value (``os.environ["STEP"]``)."""
    rank = Rank(first=True)
    past: UserDict[str, int] = UserDict(seen=0)
    numbers: list[Mapping[str, int]] = []
    for _ in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if past["seen"] < 99:
            rank.checked.steps("d", "")
        past["seen"] += 1
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == set(numbers[1]) == {'past["seen"]'} and numbers[0] != numbers[1]


@pytest.mark.parametrize("form", ["setattr", "vars", "dict"])
def test_each_form_of_an_attribute_is_compared(form: str) -> None:
    """Regression: an attribute that ``setattr`` sets was no variable that a step takes over."""
    rank, counter = Rank(first=True), Counter()
    numbers: list[Mapping[str, int]] = []
    for _ in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if getattr(counter, "count") < 99:  # noqa: B009
            rank.checked.steps("d", "")
        if form == "setattr":
            setattr(counter, "count", counter.count + 1)  # noqa: B010
        if form == "vars":
            vars(counter)["count"] += 1
        if form == "dict":
            counter.__dict__["count"] = counter.count + 1
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == set(numbers[1]) == {"counter.count"} and numbers[0] != numbers[1]


def test_a_set_that_only_its_methods_change_is_compared() -> None:
    rank = Rank(first=True)
    past: set[int] = set()
    numbers: list[Mapping[str, int]] = []
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if 99 not in past:
            rank.checked.steps("d", "")
        past.add(number)
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == set(numbers[1]) == {"past"} and numbers[0] != numbers[1]


class Moved:
    """Like a tensor, with methods that change it in place."""

    dtype = "float32"

    def __init__(self) -> None:
        self.value = self.data = 0.0

    def lerp_(self, other: float) -> None:
        """Move the value towards ``other``."""
        self.value += 0.1 * (other - self.value)

    def copy_(self, other: float) -> None:
        """Set the value."""
        self.value = other


def test_a_tensor_that_only_its_methods_change_is_found() -> None:
    """A tensor that each step sets before it reads it takes nothing over from the step before."""
    rank = Rank(first=True)
    moved, place = Moved(), Moved()
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        place.copy_(number)
        moved.lerp_(number)
        if moved.value + place.value < 99:
            rank.checked.steps("d", "")
    assert rank.checked.variables.names() == "moved.value"


def test_a_tensor_that_is_set_by_its_data_is_found() -> None:
    rank, moved = Rank(first=True), Moved()
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if moved is not None:
            rank.checked.steps("d", "")
        moved.data = number
    assert rank.checked.variables.names() == "moved"


class Meter:
    """A mean that a property computes, as in the loops of detectors."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def update(self, value: float) -> None:
        """Add a value."""
        self.total += value
        self.count += 1

    @property
    def mean(self) -> float:
        """The mean of all values."""
        return self.total / max(1, self.count)


def test_the_variables_behind_a_property_are_compared() -> None:
    """Regression: a mean that is a property was no variable that a step takes over."""
    rank, meter = Rank(first=True), Meter()
    numbers: list[Mapping[str, int]] = []
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if meter.mean < 99:
            rank.checked.steps("d", "")
        meter.update(number)
        numbers.append(rank.checked.variables.numbers())
    assert set(numbers[0]) == {"meter.total", "meter.count"} and numbers[0] != numbers[1]


class Meters:
    """Meters by name, which are also attributes, as in torchvision's references."""

    def __init__(self) -> None:
        self.meters: dict[str, Meter] = {}

    def __getattr__(self, name: str) -> Meter:
        return self.meters[name]

    def update(self, **values: float) -> None:
        """Add values to the meters of their names."""
        for name, value in values.items():
            if name not in self.meters:
                self.meters[name] = Meter()
            self.meters[name].update(value)


@pytest.mark.parametrize("attribute", [False, True])
def test_a_meter_that_is_not_there_yet_is_found(attribute: bool) -> None:
    """Regression: the mean of an epoch on which a schedule depends began again in a replacement, without a word."""
    rank, meters = Rank(first=True), Meters()
    steps = Steps()
    for epoch in range(2):
        for step in steps.steps():
            rank.checked.opens()
            rank.numbers.of["d"] = [0.1]
            rank.checked.steps("d", "")
            meters.update(loss=1.0 + step + epoch)
        if attribute:
            scheduler_step(meters.loss.mean)
        else:
            scheduler_step(meters.meters["loss"].mean)
    assert "meters.meters" in rank.checked.variables.names().split(", ")


class Steps:
    """A session with two steps per epoch."""

    def steps(self) -> range:
        """Return the numbers of the steps."""
        return range(2)


def scheduler_step(loss: float) -> None:
    """Take a loss, as a schedule does."""


def test_an_object_in_a_list_that_a_method_changes_is_found() -> None:
    rank, meters = Rank(first=True), [Meter(), Meter()]
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if sum(each.total for each in meters) < 99:
            rank.checked.steps("d", "")
        meters[number].update(1.0)
    assert rank.checked.variables.names() == "meters[0].total, meters[1].total, meters"


def test_a_list_that_each_step_empties_first_is_not_compared() -> None:
    rank = Rank(first=True)
    past: list[int] = []
    for number in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        past.clear()
        past.append(number)
        if past != [99]:
            rank.checked.steps("d", "")
        assert not rank.checked.variables.numbers()


@pytest.mark.parametrize("past", [[object()], [[[[[1]]]]], [0] * 2000, {"net": object()}])
def test_of_a_container_of_objects_and_of_a_large_one_the_number_of_items_is_compared(past: Any) -> None:
    """Regression: a pool of earlier images began empty in a replacement, with no word and exit code 0."""
    rank = Rank(first=True)
    numbers: list[Mapping[str, int]] = []
    for number in range(3):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if past:
            rank.checked.steps("d", "")
        numbers.append(rank.checked.variables.numbers())
        if number == 0:
            past = past.copy()
        elif isinstance(past, dict):
            past["more"] = object()
        else:
            past.append(object())
    assert set(numbers[0]) == {"past"} and numbers[0] == numbers[1] != numbers[2]


def test_a_container_of_declared_objects_is_not_compared() -> None:
    rank = Rank(first=True)
    past: list[object] = [object()]
    rank.numbers.declared = [past[0]]
    for _ in range(2):
        rank.checked.opens()
        rank.numbers.of["d"] = [0.1]
        if past:
            rank.checked.steps("d", "")
        past.append(object())
        assert not rank.checked.variables.numbers()


@pytest.mark.parametrize(
    "past", [[0.5], deque([0.5]), np.array([0.5, 0.5]), [0.5] * 500], ids=["list", "deque", "array", "long"]
)
def test_a_history_is_compared_and_a_declared_one_is_not(past: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a replacement drew by an empty history, and no value of it was compared."""
    for declared in (True, False):
        rank = Rank(first=True)
        rank.numbers.declared = [past] if declared else []
        numbers: list[Mapping[str, int]] = []
        for _ in range(2):
            rank.checked.opens()
            rank.numbers.of["d"] = [0.1]
            if past[0] < 99:
                rank.checked.steps("d", "")
            past[0] += 1
            numbers.append(rank.checked.variables.numbers())
        assert len(caplog.messages) == (not declared) and (numbers[0] == numbers[1]) == declared
        assert all(set(each) == {"past"} for each in numbers) != declared
