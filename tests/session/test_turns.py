"""Epochs and phases are done once in the life of the job, whichever process runs the script again."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from holdfast.errors import StepError, UsageError
from holdfast.exit_codes import Exit
from holdfast.session.loops.script_source import counter_around, enclosed, has_ended, helper, leaves
from holdfast.session.loops.turn_position import TurnPosition
from tests.session.launch import run_job
from tests.session.turns_job import RANKS

JOB = str(Path(__file__).with_name("turns_job.py"))
Ends = tuple[list[str], dict[str, list[str]]]


def ends(where: Path, *arguments: str) -> tuple[Ends, str]:
    """Run the job.

    Return the final values of each rank, the lines of each file of an epoch or phase, and the output.
    """
    where.mkdir(exist_ok=True)
    done = run_job(where, RANKS, *arguments)
    assert done.returncode == 0, done.stdout
    logs = sorted(where.glob("runs/*/attempt-*/rank-*.log"))
    lines = sorted(line for log in logs for line in log.read_text().splitlines() if " ends at " in line)
    assert len(lines) == RANKS, done.stdout
    return (lines, {path.name: path.read_text().splitlines() for path in where.glob("*.txt")}), done.stdout


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ends]:
    """Return the undisturbed run of a way."""
    return cache(lambda way: ends(tmp_path_factory.mktemp("calm"), JOB, way)[0])


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "kill", "flags", "rung"),
    [
        (
            "shared",
            "1:7:block",
            (),
            "replace",
        ),  # an evaluation of all ranks, which the newcomer need not run
        pytest.param(
            "plain", "0:6:after", (), "replace", marks=pytest.mark.more
        ),  # the file of that epoch is written by the newcomer
        pytest.param("shared", "0:6:after", (), "restart last gasp", marks=pytest.mark.more),
        # All ranks have ended the turn. The state that the lost rank kept of this step is from before or after that.
        pytest.param("sharded", "1:6:prelude", (), "replace from memory", marks=pytest.mark.more),
        ("sharded", "1:6:uncopied", (), "replace from memory"),
        pytest.param("sharded", "0:6:after", (), "restart from memory", marks=pytest.mark.more),
        pytest.param(
            "phased", "1:6:block", ("--on-fault", "restart"), "restart last gasp", marks=pytest.mark.more
        ),
        pytest.param(
            "plain", "1:6:block", (), "replace", marks=pytest.mark.more
        ),  # the first step of an epoch
        pytest.param("plain", "1:6:written", (), "replace", marks=pytest.mark.more),
        pytest.param("plain", "1:6:prelude", (), "replace", marks=pytest.mark.more),
        pytest.param("phased", "1:2:after", (), "replace", marks=pytest.mark.more),
        pytest.param("left", "1:6:written", (), "replace", marks=pytest.mark.more),
    ],
)
def test_what_follows_a_loop_is_done_once_for_each_epoch(
    tmp_path: Path, calm: Callable[[str], Ends], way: str, kill: str, flags: tuple[str, ...], rung: str
) -> None:
    told, output = ends(tmp_path / "job", *flags, JOB, way, kill)
    assert (tmp_path / "job/struck").exists() and f"F001: {rung}" in output, output
    assert told == calm(way), output


@pytest.mark.torch
@pytest.mark.processes
def test_a_count_of_epochs_of_the_scripts_own_is_refused_at_the_start(tmp_path: Path) -> None:
    done = run_job(tmp_path, RANKS, JOB, "start")
    assert done.returncode == Exit.BAD_INPUT and "s.epochs(N)" in done.stdout, done.stdout
    assert not re.search(r"after: step [1-9]", done.stdout), done.stdout


# ---------------------------------------------------------------------- one process

STEPS = 3


class Script:
    """A training in this process."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.loader = DataLoader(TensorDataset(torch.randn(STEPS * 2, 4)), 2, shuffle=True)
        self.done: list[Any] = []

    def session(self, root: Path, **arguments: Any) -> Any:
        """Return a session of this script."""
        given = {"model": self.net, "optimizer": self.optimizer, "checkpoint": root, "verify_block": 0}
        return holdfast.session(**{**given, **arguments})

    def step(self, step: Any) -> None:
        """Run one step."""
        with step as (x,):
            self.net(x).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def learn(self, steps: Iterator[holdfast.Step], stop: int = -1) -> None:
        """Run a loop that stops after step ``stop``."""
        for step in steps:
            self.step(step)
            if step.number == stop:
                break

    def train(self, root: Path, epochs: int, **arguments: Any) -> list[Any]:
        """Train over epochs. Return each epoch with the step at its end."""
        with self.session(root, **arguments) as s:
            for epoch in s.epochs(epochs):
                self.learn(s.steps(self.loader))
                self.done.append((epoch, s.step))
        return self.done


@pytest.mark.torch
def test_epochs_draw_the_data_of_one_loop_over_them(tmp_path: Path) -> None:
    one, other = Script(), Script()
    with one.session(tmp_path / "one") as s:
        one.learn(s.steps(one.loader, epochs=3))
    assert other.train(tmp_path / "other", 3) == [(0, 3), (1, 6), (2, 9)]
    assert torch.equal(one.net.weight, other.net.weight)


@pytest.mark.torch
def test_a_job_that_is_over_does_nothing_again_and_more_epochs_follow(tmp_path: Path) -> None:
    assert len(Script().train(tmp_path, 2)) == 2
    assert Script().train(tmp_path, 2) == []
    assert Script().train(tmp_path, 3) == [(2, 9)]


@pytest.mark.torch
def test_an_exit_in_an_epoch_leaves_what_follows_to_the_next_start(tmp_path: Path) -> None:
    stop, script = tmp_path / "stop", Script()
    with (
        pytest.raises(SystemExit) as ended,
        script.session(tmp_path / "ckpt", exit_file=stop) as s,
    ):
        for epoch in s.epochs(3):
            for step in s.steps(script.loader):
                if step.number >= STEPS and not s._rank.exit_source:
                    s._rank.ask_exit("test")
                script.step(step)
            script.done.append(epoch)
    assert ended.value.code == Exit.REQUEUE and script.done == [0]
    assert Script().train(tmp_path / "ckpt", 3) == [(1, 6), (2, 9)]


@pytest.mark.torch
@pytest.mark.parametrize(("count", "told"), [(3, True), (5, False), (6, False)])
def test_a_smaller_number_of_epochs_than_before_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int, told: bool
) -> None:
    """Regression: after a resume, a smaller number of epochs ended the job early, and no message said so."""
    leave_after(tmp_path, epochs=5)
    assert len(Script().train(tmp_path, count)) == count - 1
    assert ("s.epochs(3) was s.epochs(5) before, and 1 of these epochs are over" in caplog.text) == told


@pytest.mark.torch
def test_the_number_of_the_epochs_that_are_left_is_refused(tmp_path: Path) -> None:
    """Regression: s.epochs(N - start_epoch) ended the job early, with code 0."""
    leave_after(tmp_path, epochs=5)
    with pytest.raises(UsageError, match=r"s\.epochs\(4\) was s\.epochs\(5\) before") as refused:
        Script().train(tmp_path, 4)
    assert "N - start_epoch" in str(refused.value)
    assert len(Script().train(tmp_path, 5)) == 4


def leave_after(directory: Path, *, epochs: int) -> None:
    """Train one epoch of a job of ``epochs``, and leave the job with a save."""
    script = Script()
    with pytest.raises(SystemExit), script.session(directory) as s:
        for _ in s.epochs(epochs):
            for step in s.steps(script.loader):
                if step.number >= STEPS:
                    s._rank.ask_exit("test")
                script.step(step)


@pytest.mark.torch
def test_a_loop_that_was_left_stays_left_and_so_do_epochs(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(ZeroDivisionError), script.session(tmp_path) as s:
        for _ in s.epochs(3):
            for step in s.steps(script.loader):
                script.step(step)
                if step.number == 1:
                    break
            raise ZeroDivisionError
    again = Script()
    with again.session(tmp_path) as s:
        for epoch in s.epochs(3):
            again.learn(s.steps(again.loader), stop=1)
            again.done.append((epoch, s.step))
            if epoch == 1:
                break
    assert again.done == [(0, 2), (1, 2 + STEPS)]
    assert Script().train(tmp_path, 3) == []


@pytest.mark.torch
def test_an_exception_does_not_end_the_loop_that_it_leaves(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(ZeroDivisionError), script.session(tmp_path) as s:
        for _ in s.epochs(3):
            for step in s.steps(script.loader):
                script.step(step)
                if step.number == 1:
                    raise ZeroDivisionError
    assert Script().train(tmp_path, 2) == [(0, 3), (1, 6)]


@pytest.mark.torch
def test_a_break_after_a_block_that_has_not_committed_is_an_error(tmp_path: Path) -> None:
    script = Script()
    with (
        pytest.raises(StepError, match="left its loop after the block of step 0, which has not committed"),
        script.session(tmp_path, verify_block=2000) as s,
    ):
        for step in s.steps(script.loader):
            script.step(step)  # the first time is only a check
            break


@pytest.mark.torch
def test_a_phase_in_a_block_is_an_error_that_says_where_the_script_was(tmp_path: Path) -> None:
    """Regression: the vote on the end of the phase was cast inside the step without an error."""
    script = Script()
    with (
        pytest.raises(StepError, match="'loop_ahead' does not fit a script that is in_block") as caught,
        script.session(tmp_path) as s,
    ):
        for step in s.steps(script.loader):
            with step:
                for _ in s.phase("warmup"):
                    script.done.append(step.number)
    assert (
        "step_given -> before_block" in caught.value.message and "outside of the block" in caught.value.hint
    )
    assert script.done == []


@pytest.mark.torch
def test_a_script_that_ends_without_the_loop_of_the_job_is_an_error(tmp_path: Path) -> None:
    script = Script()
    with pytest.raises(ZeroDivisionError), script.session(tmp_path) as s:
        for step in s.steps(script.loader):
            script.step(step)
            raise ZeroDivisionError
    with pytest.raises(UsageError, match="without loop 0 over steps"), Script().session(tmp_path):
        pass
    with (
        pytest.raises(UsageError, match="a second loop over steps in the session"),
        script.session(tmp_path) as s,
    ):
        while True:
            script.learn(s.steps(script.loader))
    with pytest.raises(UsageError, match="that the session does not know"), script.session(tmp_path) as s:
        for _ in range(2):
            script.learn(s.steps(script.loader))


# ---------------------------------------------------------------------- the record


def test_a_process_that_comes_in_later_numbers_its_loops_as_the_others() -> None:
    walk = TurnPosition()
    part = walk.enter('phase "warmup"', 1)
    walk.begin(part, 0)
    assert walk.next_loop() == 0
    walk.end(part, 4)
    walk.leave(part)
    epochs = walk.enter("epochs", 3)
    for start in (4, 7):
        assert walk.begin(epochs, start) == start
        walk.next_loop()
        if start == 4:
            walk.end(epochs, 7)
    late = TurnPosition()
    late.stand_at(walk.record)
    over = late.enter('phase "warmup"', 1)
    assert (over.done, over.turns) == (1, 1)
    late.leave(over)
    here = late.enter("epochs", 3)
    assert (here.done, here.turns, late.begin(here, 9), late.next_loop()) == (1, 3, 7, 2)
    assert late.passed == 2 and late.missing(2) == "" and late.epoch == 1


def test_another_part_in_the_place_of_one_is_refused() -> None:
    walk, other = TurnPosition(), TurnPosition()
    part = walk.enter('phase "a"', 1)
    walk.begin(part, 0)
    other.stand_at(walk.record)
    assert other.missing(-1) == 'phase "a" of the job'
    with pytest.raises(UsageError, match='phase "a" stood where this script has'):
        other.enter("epochs", 3)


def test_parts_inside_a_turn_are_forgotten_with_it() -> None:
    walk = TurnPosition()
    epochs = walk.enter("epochs", 2)
    for _ in range(2):
        walk.begin(epochs, 0)
        for name in ("a", "b"):
            inner = walk.enter(f'phase "{name}"', 1)
            assert (inner.done, inner.way) == (0, f"0.{epochs.done}.{'ab'.index(name)}")
            walk.begin(inner, 0)
            walk.next_loop()
            walk.end(inner, 0)
            walk.leave(inner)
        walk.end(epochs, 0)
    assert set(walk.record["parts"]) == {"0"} and walk.loops == 4


def test_a_loop_around_a_call_is_seen_and_one_around_the_session_is_not() -> None:
    def here() -> bool:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        return enclosed(frame.f_back, entered_by)

    def call() -> bool:
        return here()

    found = []
    for _ in range(1):
        frame = inspect.currentframe()
        assert frame is not None
        entered_by = (frame, frame.f_lasti)
        found += [here(), call()]
        for _ in range(1):
            found += [here(), call()]
        assert not enclosed(frame, None)
    assert found == [False, False, True, True]


def test_a_call_in_enumerate_is_seen_and_one_beside_it_is_not() -> None:
    found = []

    def here() -> list[int]:
        frame = inspect.currentframe()
        assert frame is not None and frame.f_back is not None
        found.append(counter_around(frame.f_back) != "")
        return [1]

    def through(items: list[int], _: object = None) -> list[int]:
        return items

    for _ in enumerate(here()):
        pass
    for _ in enumerate(
        through(here()),
        start=1,
    ):
        pass
    for _ in zip(here(), enumerate([1]), strict=True):
        here()
    through(here(), list(enumerate([1])))
    assert found == [True, True, True, False, False]  # zip counts as well


def test_a_break_is_told_from_an_exception() -> None:
    told = []

    def numbers() -> Iterator[int]:
        try:
            yield 0
        except GeneratorExit:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            told.append(leaves(frame.f_back))
            raise

    def left() -> int:
        for each in numbers():
            return each
        return 1

    for _, _ in enumerate(numbers()):
        break
    left()
    with pytest.raises(ZeroDivisionError):
        for each in numbers():
            1 / each
    assert told == [True, True, False]


Turn = Callable[[Iterator[Any]], Iterator[Any]]


def log_every(steps: Iterator[Any], limit: int = 3) -> Iterator[Any]:
    i = 0
    for each in steps:
        yield each
        i += 1
        if i >= limit:
            break


def numbered(steps: Iterator[Any], limit: int = 3) -> Iterator[Any]:
    for i, each in enumerate(steps):
        yield each
        if i + 1 == limit:
            return


def knowing(steps: Iterator[Any], limit: int = 3) -> Iterator[Any]:
    i = 0
    for each in steps:
        yield each
        i += bool(getattr(each, "committed", True)) and each.committed
        if i >= limit:
            break


def drawing(steps: Iterator[Any], limit: int = 3) -> Iterator[Any]:
    freq = 2
    for i in range(limit):
        each = next(steps)
        yield each
        if i % freq == 5 and each.committed:
            print(each)


def passed(steps: Iterator[Any]) -> Iterator[Any]:
    yield from steps


def timed(steps: Iterator[Any]) -> Iterator[Any]:
    i, seconds = 0, 60
    for each in steps:
        yield each
        i += 1
        if i * 20 >= seconds:
            break


@pytest.mark.parametrize(
    ("way", "stops_at", "names"),
    [
        (log_every, 9, "i and limit"),
        (numbered, 9, "i and limit"),
        (drawing, 9, "i and limit"),
        (log_every, 2, ""),  # the loop over the helper has ended first
        (passed, 2, ""),
        (timed, 9, ""),
    ],
)
def test_a_helper_that_has_counted_turns_is_named(way: Turn, stops_at: int, names: str) -> None:
    """A third turn ends the helper; two of the turns were no steps."""
    found = []

    def steps() -> Iterator[Any]:
        around, turns = None, 0
        try:
            while True:
                frame = inspect.currentframe()
                assert frame is not None and frame.f_back is not None
                around, turns = helper(frame.f_back), turns + 1
                yield [turns]
        except GeneratorExit:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            ended = around is not None and has_ended(around, frame.f_back)
            found.append(around.has_counted(0, turns, turns - 2) if around is not None and ended else "")
            raise

    for turn in way(steps()):
        if turn == [stops_at]:
            break
    assert len(found) == 1 and found[0].partition(" (")[0] == names


def test_a_helper_without_turns_of_its_own_or_with_knowledge_of_them_is_not_named() -> None:
    def asks(way: Turn) -> Any:
        seen = []

        def steps() -> Iterator[Any]:
            frame = inspect.currentframe()
            assert frame is not None and frame.f_back is not None
            seen.append(helper(frame.f_back))
            yield 0

        next(way(steps()))
        return seen[0]

    assert asks(knowing) is None
    assert asks(log_every).has_counted(0, 1, 1) == ""
