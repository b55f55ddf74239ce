"""The random generators of a script, in a process that continues the job."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from holdfast.errors import StepError
from holdfast.session.variables.hidden_generators import HiddenGenerators


class Source:
    """The generators of one script."""

    def __init__(self) -> None:
        self.found: dict[str, object] = {"env.numbers": random.Random(1), "idle": random.Random(2)}

    def generators(self, variables: Mapping[str, object]) -> Mapping[str, object]:
        """Return the generators by name."""
        return self.found

    def state_of_generator(self, generator: object) -> int:
        """Return a digest of the state."""
        assert isinstance(generator, random.Random)
        return hash(generator.getstate())

    def draw(self) -> None:
        """Draw from the generator of the environment."""
        generator = self.found["env.numbers"]
        assert isinstance(generator, random.Random)
        generator.random()


def began(kept: Mapping[str, object] | None = None) -> tuple[Source, HiddenGenerators]:
    """Return a script at the start of its loop. ``kept``: the rank-local values of the process before."""
    source = Source()
    check = HiddenGenerators(source)
    if kept is not None:
        check.stand_at(kept)
    check.enters_loop()
    return source, check


def moved(place: str) -> dict[str, object]:
    """Return the rank-local values of a process whose generator has moved at one place."""
    source, check = began()
    for at in range(4):
        if place == "outside" and at == 2:
            source.draw()
        check.opens()
        if place == "block" and at == 2:
            source.draw()
        check.look()
        if place == "after" and at == 2:
            source.draw()
        check.committed()
    check.opens()
    return check.of_rank()


def test_a_generator_that_does_not_move_is_not_kept() -> None:
    assert not moved("never")


@pytest.mark.parametrize("place", ["block", "after"])
def test_a_generator_of_blocks_that_begins_again_is_refused(place: str) -> None:
    source, check = began(moved(place))
    check.opens()
    with pytest.raises(StepError, match=r"have begun again: env.numbers\. This process continues the job"):
        check.look()
    source.draw()  # the script has put it back
    check.look()
    check.committed()
    assert check.of_rank() == moved(place)


def test_a_generator_outside_of_blocks_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    _, check = began(moved("outside"))
    for _ in range(3):
        check.opens()
        check.look()
    assert caplog.text.count("random generators have begun again: env.numbers") == 1


def test_a_generator_that_draws_at_both_places_is_refused() -> None:
    source, check = began(moved("outside"))
    check.opens()
    source.draw()
    check.look()
    check.committed()
    assert check.of_rank() == moved("block")


def test_a_generator_that_the_script_puts_back_before_its_loop_has_not_begun_again() -> None:
    source = Source()
    source.draw()
    check = HiddenGenerators(source)
    check.stand_at(moved("block"))
    check.enters_loop()
    check.opens()
    check.look()


def test_a_generator_that_only_check_runs_of_the_new_process_have_moved_has_not_begun_again() -> None:
    source, check = began({})
    generator = source.found["env.numbers"]
    assert isinstance(generator, random.Random)
    begin = generator.getstate()
    for _ in range(3):
        check.opens()
        generator.setstate(begin)
        check.look()
        source.draw()


def test_another_generator_in_the_place_has_not_begun_again() -> None:
    source, check = began(moved("block"))
    check.opens()
    source.found = {"env.numbers": random.Random(1)}
    check.look()


def test_nothing_is_compared_without_a_source_or_after_the_first_step() -> None:
    nothing = HiddenGenerators(None)
    nothing.stand_at(moved("block"))
    nothing.enters_loop()
    nothing.opens()
    nothing.look()
    nothing.committed()
    source, check = began(moved("block"))
    check.opens()
    source.draw()
    check.look()
    check.committed()
    check.enters_loop()
    check.opens()
    check.look()
