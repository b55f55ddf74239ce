"""The check of a block by a second run: the differences that it finds, their names, and the state that it preserves."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holdfast
from holdfast.errors import ImpureBlockError, StateError, UsageError
from holdfast.session.steps.step import Step
from tests.session.test_solo import Job, bare, same

pytestmark = pytest.mark.torch


def test_a_checked_training_is_the_bare_one() -> None:
    """The training has dropout, BatchNorm and a scheduler, with a check at each step."""
    job, runs, committed = Job(), 0, []
    with job.session(verify_block=1) as s:
        for step in s.steps(job.loader, until=8):
            with step as batch:
                runs += 1
                job.update(batch)
            if step.committed:
                committed.append(step.number)
    assert (committed, runs) == (list(range(8)), 16)
    assert same(job, bare(8))


def test_one_step_in_so_many_is_checked() -> None:
    job, runs = Job(), []
    with job.session(verify_block=4) as s:
        for step in s.steps(job.loader, until=9):
            with step as batch:
                runs.append(step.number)
                job.update(batch)
    assert runs == [0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 7, 8]


class Warmup:
    """A learning rate that rises with each call of ``step``."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the rate of all groups."""
        self.calls += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * self.calls


class Script:
    """A training of two weights, with blocks that use leftovers of other blocks."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.net = nn.Linear(2, 1)
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.average = torch.optim.swa_utils.AveragedModel(self.net)
        self.ahead = torch.randn(4, 2)
        self.baseline = torch.zeros(())
        self.total = torch.zeros(3)
        self.count = 0
        self.generator = torch.Generator()
        self.numbers = np.random.default_rng(1)
        self.warmup = Warmup()
        self.seen = torch.ones(4, 2)
        self.shown = np.ones((4, 2), np.float32)
        self.stream = (torch.full((4, 2), float(n)) for n in itertools.count())

    def learn(self, x: Tensor) -> None:
        """Run one update."""
        self.optimizer.zero_grad()
        self.net(x).square().mean().backward()
        self.optimizer.step()

    def prefetching(self) -> None:
        """Draw the batch of the next block at the end of this block, before its update."""
        self.optimizer.zero_grad()
        self.net(self.ahead).square().mean().backward()
        self.ahead = torch.randn(4, 2)
        self.optimizer.step()

    def counting(self) -> None:
        """Count in a number of the script."""
        self.count += 1
        self.learn(torch.ones(4, 2) * self.count)

    def dividing(self) -> None:
        """Divide the loss by an average that the model has in an attribute without a declaration (RetinaNet)."""
        average = 0.9 * getattr(self.net, "average", 10.0) + 0.1 * 5.0
        setattr(self.net, "average", average)  # noqa: B010
        self.learn(torch.ones(4, 2) / average)

    def averaging(self) -> None:
        """Write into a tensor from outside the block, in place."""
        self.baseline.mul_(0.9).add_(1.0)
        self.learn(torch.ones(4, 2) - self.baseline)

    def reporting(self) -> None:
        """Add to a sum for a log, which no computation uses, and use what the block before has left."""
        self.total.add_(torch.ones(3))
        self.total += 1.0
        value = self.baseline.lerp(torch.ones(()), 0.5)
        self.baseline.copy_(value)
        self.learn(torch.ones(4, 2) - value)

    def drawing(self) -> None:
        """Draw from a generator that is not in the state."""
        self.learn(torch.rand(4, 2, generator=self.generator))

    def iterating(self) -> None:
        """Draw from an iterator of the script."""
        stream = self.stream
        self.learn(next(stream))

    def playing(self) -> None:
        """Move a game that is no tensor, and store what is seen in a tensor that every block fills."""
        self.shown += 1.0
        self.seen[:] = torch.Tensor(self.shown)
        self.learn(self.seen)

    def normalizing(self) -> None:
        """Write a trained weight before the forward pass."""
        with torch.no_grad():
            self.net.weight.copy_(self.net.weight / 1.1)
        self.learn(torch.ones(4, 2))

    def decaying(self) -> None:
        """Shrink the trained weights through ``.data`` before the update, as fastai's wrapper of an optimizer does."""
        self.optimizer.zero_grad()
        self.net(torch.ones(4, 2)).square().mean().backward()
        for parameter in self.net.parameters():
            parameter.data.mul_(0.9)
        self.optimizer.step()

    def scheduling(self) -> None:
        """Set the learning rate from an object that counts its calls."""
        self.warmup.step(self.optimizer)
        self.learn(torch.ones(4, 2))

    def pure(self) -> None:
        """Use nothing that other blocks have left."""
        self.learn(torch.ones(4, 2))

    def train(self, way: Callable[[], None], behind: Callable[[], object] = int, **arguments: Any) -> int:
        """Run blocks of ``way``, with a call of ``behind`` after each. Return how many runs there were."""
        runs = 0
        with holdfast.session(
            model=self.net,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            state={"average": self.average},
            **arguments,
        ) as s:
            for step in s.steps(until=2):
                with step:
                    runs += 1
                    way()
                behind()
        return runs


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        (
            "prefetching",
            r"test_block_proof.py:\d+ uses the float32 \[4, 2\] that test_block_proof.py:\d+ made in the run",
        ),
        ("counting", r"the run before has changed: .*self.count \(was 2, then 3\)"),
        ("averaging", r"uses the float32 \[\] that test_block_proof.py:\d+ wrote in the run before"),
        ("reporting", r"uses the float32 \[\] that test_block_proof.py:\d+ wrote in the run before"),
        ("drawing", r"test_block_proof.py:\d+ draws from a generator that is not in session\(state=...\)"),
        (
            "playing",
            r"test_block_proof.py:\d+ uses a float32 \[4, 2\] that has other values than in the run before",
        ),
        ("dividing", r"the run before has changed: self.net.average \(was [0-9.]+, then [0-9.]+\)"),
        ("iterating", r"the run before has changed: .*stream \(drawn from\)"),
        ("scheduling", r"self.warmup.calls \(was 2, then 3\),.*lr of group 0 of optimizer 'default' differ"),
    ],
)
def test_an_impure_block_is_refused_before_its_update(way: str, cause: str) -> None:
    script = Script()
    weights = script.net.weight.detach().clone()
    with pytest.raises(ImpureBlockError, match=cause):
        script.train(getattr(script, way))
    assert torch.equal(script.net.weight, weights)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("way", "refused"), [("iterating", True), ("pure", False)])
def test_a_block_that_removes_its_gradients_after_a_named_update_is_checked(way: str, refused: bool) -> None:
    """It votes at its end, where it has no gradients."""
    script, runs = Script(), 0
    weights = script.net.weight.detach().clone()
    with (
        pytest.raises(ImpureBlockError, match=r"changed: runs .* \(the gradient of weight at update 'first'")
        if refused
        else nullcontext(),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                runs += 1
                with step.update("first"):
                    getattr(script, way)()
                script.net.zero_grad()
    assert torch.equal(script.net.weight, weights) == refused
    assert runs == (4 if refused else 3)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("way", ["normalizing", "decaying"])
def test_a_block_that_writes_a_trained_weight_before_its_update_is_refused_by_name(
    way: str, named: bool
) -> None:
    """A block that runs again would write it twice. Regression: a counter of the script was named as the cause."""
    script = Script()
    with (
        pytest.raises(ImpureBlockError, match=r"it writes weight before its update \(write weights after"),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step, step.update("all") if named else nullcontext():
                getattr(script, way)()


class Shards:
    """A loader class of the script. It stores its position in an attribute."""

    def __init__(self) -> None:
        self.current_position = 0

    def next_batch(self) -> Tensor:
        """Return the next batch."""
        self.current_position += 1
        return torch.full((4, 2), float(self.current_position))


def test_the_position_of_a_loader_of_the_script_is_named_before_times() -> None:
    """Regression: the error named the variables that held times, which each run of the block sets."""
    script, shards, began_s = Script(), Shards(), 0.0
    with (
        pytest.raises(ImpureBlockError, match=r"changed: shards.current_position \(was 2, then 3\), began_s"),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                began_s += 0.5
                batch: list[float] = shards.next_batch().tolist()  # plain numbers, as read from a file
                script.learn(torch.tensor(batch))


def test_the_steps_of_the_session_are_no_cause() -> None:
    """Regression: the error named the variable that held `s.steps(...)`, as an iterator from which the block draws."""
    script, schedule = Script(), {"steps": 0}
    with (
        pytest.raises(ImpureBlockError, match="finds other values") as caught,
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        steps = s.steps(until=2)
        for step in steps:
            with step:
                for group in script.optimizer.param_groups:
                    group["lr"] = 0.01 * schedule["steps"]
                schedule["steps"] += 1
                script.pure()
    assert "drawn from" not in str(caught.value)
    assert str(caught.value.hint).startswith(
        "what a block changes and uses later goes into session(state={...})"
    )


def test_an_element_on_which_the_updates_depend_is_named_before_a_meter_in_a_tensor() -> None:
    """Regression: the error named only a tensor of the meter, which no update uses."""
    script, progress, mean = Script(), {"iterations": 0}, torch.zeros(())
    with (
        pytest.raises(
            ImpureBlockError,
            match=r"""finds other values of progress\["iterations"\], on which its updates depend; .*\d uses the """,
        ),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                for group in script.optimizer.param_groups:
                    group["lr"] = 0.01 * progress["iterations"]
                progress["iterations"] += 1
                mean = mean * 0.9 + 0.1
                script.pure()


def test_a_buffer_that_gets_its_first_tensors_is_named() -> None:
    """The pool of earlier images of a GAN. Regression: a list of tensors had no value, so nothing was compared."""
    script = Script()
    past: list[torch.Tensor] = []
    with (
        pytest.raises(ImpureBlockError, match="finds other values of past, on which its updates depend"),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                new = torch.ones(4, 2)
                if len(past) < 8:
                    past.append(new)
                else:
                    new = past[step.number % 8]
                script.learn(new)


def test_a_variable_that_the_runs_have_not_assigned_is_no_cause() -> None:
    """Regression: its placeholder has the methods of an iterator, so it was named as drawn from."""
    script, shards = Script(), Shards()
    with (
        pytest.raises(ImpureBlockError) as caught,
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                script.learn(torch.tensor(shards.next_batch().tolist()))
            if step.committed:
                shown = step.number
                print(shown)
    assert "shards.current_position" in str(caught.value) and "shown" not in str(caught.value)


class Settings(dict[str, float]):
    """Settings of a script, read as attributes. An unknown name raises a KeyError."""

    rate: float
    unknown: float
    __getattr__ = dict.__getitem__


class LooseSettings(dict[str, float]):
    """Settings of a script, read as attributes. An unknown name gives None."""

    rate: float
    __getattr__ = dict.get


def test_a_script_may_keep_its_settings_in_a_dict_with_attributes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: the search for generators asked each variable for an attribute, so the run ended at step 0."""
    script, settings, loose = Script(), Settings(rate=0.5), LooseSettings(rate=0.5)
    with holdfast.session(model=script.net, optimizer=script.optimizer) as s:
        for step in s.steps(until=2):
            with step:
                rate = settings.rate * loose.rate
                if script.count:
                    rate *= settings.unknown
                script.learn(torch.ones(4, 2) * rate)
    assert s.step == 2 and not caplog.messages


def test_a_dict_with_attributes_in_the_state_is_refused_by_name() -> None:
    """Regression: a KeyError for ``may_differ`` ended the script."""
    script = Script()
    with (
        pytest.raises(StateError, match=r"state\.seen: an object of type .*Settings cannot be saved"),
        holdfast.session(
            model=script.net, optimizer=script.optimizer, state={"seen": Settings(steps=0)}
        ) as s,
    ):
        for step in s.steps(until=2):
            with step:
                script.pure()


def test_a_dict_with_attributes_is_not_named_as_a_generator() -> None:
    """Regression: an object that has each attribute counted as a generator of NumPy."""
    script, loose, calls = Script(), LooseSettings(rate=0.5), 0
    with (
        pytest.raises(ImpureBlockError) as caught,
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                calls += 1
                script.learn(torch.ones(4, 2) * loose.rate * calls)
    assert "calls" in str(caught.value) and "loose" not in str(caught.value)


@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("offset", [1, *(pytest.param(count, marks=pytest.mark.more) for count in (0, 100))])
def test_a_variable_that_counts_runs_of_blocks_is_named(
    caplog: pytest.LogCaptureFixture, offset: int, first: int, tmp_path: Path
) -> None:
    """Regression: a variable that the script sets from the step after its block was named at step 0."""
    script, calls, behind, steps, clock, newest, index = Script(), 0, 0, 0, 10**12, offset - 9, 0
    momenta, fresh = (number / 9 for number in range(90)), (number for number in range(9))
    if first:
        with holdfast.session(model=script.net, optimizer=script.optimizer, checkpoint=tmp_path) as s:
            for step in s.steps(until=first):
                with step:
                    script.pure()
        newest = offset + first
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        holdfast.session(
            model=script.net, optimizer=script.optimizer, checkpoint=tmp_path, verify_block=1
        ) as s,
    ):
        for step in s.steps(until=first + 4):
            with step:
                calls += 1
                clock += 1
                index = step.number % 2  # no count: each run of the block sets it
                fresh = (number for number in range(9))
                assert next(fresh) == 0
                script.pure()
            assert next(momenta) >= 0
            newest = step.number + offset  # no count: right in a process that joins
            behind += 1
            if step.committed:
                steps += 1
    assert (calls, behind, steps, newest, index) == (8, 8, 4, first + 3 + offset, (first + 3) % 2)
    (told,) = [line for line in caplog.messages if "not a count of steps" in line]
    assert f"step {first}: not a count of steps: calls, behind, momenta. A block runs again" in told


def test_a_generator_whose_numbers_change_no_result_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """EnCodec decides by a generator whether a step trains the discriminator. Regression: no warning named it."""
    script, dice, seeded, kept = Script(), torch.Generator(), torch.Generator(), torch.Generator()
    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        holdfast.session(model=script.net, optimizer=script.optimizer, state={"kept": kept}) as s,
    ):
        for step in s.steps(until=2):
            with step:
                seeded.manual_seed(7)
                assert all(torch.rand(1, generator=each) < 1 for each in (dice, seeded, kept))
                script.pure()
    (told,) = [line for line in caplog.messages if "not a count of steps" in line]
    assert "not a count of steps: dice. A block" in told and "which also takes generators" in told


@pytest.mark.parametrize(
    ("loop", "hint"),
    [
        ("_, step in enumerate(s.steps(until=3))", "step.number"),
        ("step, _ in zip(s.steps(until=3), range(3))", "step.number for a range"),
        ("_, step in list(zip('ab', s.steps(until=3), strict=False))", "step.number for a range"),
        ("step in itertools.islice(s.steps(until=9), 3)", "until=N"),
        ("_, step in enumerate(steps, 1)", "step.number"),
        ("step, _ in zip(steps, range(3))", "step.number for a range"),
        ("_, step in list(zip('ab', steps, strict=False))", "step.number for a range"),
        ("step in itertools.islice(steps, 3)", "until=N"),
    ],
)
def test_what_counts_the_runs_of_blocks_is_refused_before_the_first_one(loop: str, hint: str) -> None:
    """Regression: ``zip`` with a range ended the loop before its last steps, with exit code 0."""
    script = Script()
    text = f"steps = s.steps(until=9)\nfor {loop}:\n    with step:\n        script.pure()\n"
    text = text if " steps" in loop or "(steps" in loop else text.partition("\n")[2]
    with (
        pytest.raises(UsageError, match="counts the runs of blocks, not the steps") as raised,
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        exec(compile(text, "loop.py", "exec"), {"s": s, "script": script, "itertools": itertools})
    assert hint in str(raised.value.hint)


def logged(items: Iterable[Step]) -> Iterator[Step]:
    """Yield the items, with a line for some of them."""
    for count, item in enumerate(items):
        yield item
        if count % 2 == 0:
            print(f"{count} items")


def numbered(items: Iterable[Step]) -> Iterator[tuple[int, Step]]:
    """Yield the items with their numbers."""
    for count, item in enumerate(items):
        yield count + 1, item


def test_a_helper_that_counts_the_steps_for_its_lines_is_allowed() -> None:
    """Regression: such a helper was refused, also in the script that the documents show."""
    script = Script()
    with holdfast.session(model=script.net, optimizer=script.optimizer) as s:
        for step in logged(s.steps(until=3)):
            with step:
                script.pure()
        assert s.step == 3
    with (
        pytest.raises(UsageError, match="counts the runs of blocks, not the steps"),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        next(numbered(s.steps(until=6)))


def test_zip_in_the_arguments_of_the_steps_counts_nothing() -> None:
    script, inputs = Script(), [torch.ones(3, 4)] * 2
    with holdfast.session(model=script.net, optimizer=script.optimizer) as s:
        for step in s.steps(list(zip(inputs, inputs, strict=True))):
            with step:
                script.pure()
        assert s.step == 2


@pytest.mark.parametrize(
    "around", ["steps", "iter(steps)", "map(lambda step: step, steps)", "(step for step in steps)"]
)
def test_a_variable_that_holds_the_steps_can_be_iterated(around: str) -> None:
    script = Script()
    text = f"steps = s.steps(until=3)\nfor step in {around}:\n    with step:\n        script.pure()\n"
    text += "    for _, pair in enumerate(zip('ab', 'cd')):\n        list(pair)\n"
    with holdfast.session(model=script.net, optimizer=script.optimizer) as s:
        exec(compile(text, "loop.py", "exec"), {"s": s, "script": script})
        assert s.step == 3


@pytest.mark.parametrize(
    ("behind", "cause"), [("scheduler", "lr of group 0 of optimizer"), ("average", "state 'average'")]
)
def test_state_that_changes_behind_a_block_that_does_not_count_is_refused(behind: str, cause: str) -> None:
    script = Script()
    way = {
        "scheduler": script.scheduler.step,
        "average": lambda: script.average.update_parameters(script.net),
    }[behind]
    with pytest.raises(ImpureBlockError, match=f"{cause}.* changed after a block that did not count"):
        script.train(script.pure, way)


class Table(nn.Module):
    """A table of positions outside of the ``state_dict`` that grows with the longest batch, as rotary embeddings do."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scaled = scaled
        self.weight = nn.Parameter(torch.ones(1))
        self.longest = 0
        self.make(2)

    def make(self, length: int) -> None:
        """Make the table for batches up to a length. ``scaled``: all entries depend on the length."""
        positions = torch.arange(length, dtype=torch.float32)
        self.longest = length
        self.register_buffer("table", positions / length if self.scaled else positions, persistent=False)

    def forward(self, batch: Tensor) -> Tensor:
        if len(batch) > self.longest:
            self.make(len(batch))
        assert isinstance(self.table, Tensor)
        return (self.weight * batch * self.table[: len(batch)]).sum()


@pytest.mark.parametrize("scaled", [False, True])
def test_a_table_that_the_block_enlarges_is_no_change_if_its_first_part_stays(scaled: bool) -> None:
    net = Table(scaled)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    batches = [torch.ones(length) for length in (4, 6, 3, 6)]
    done = []
    with (
        pytest.raises(ImpureBlockError, match="buffer table changed") if scaled else nullcontext(),
        holdfast.session(model=net, optimizer=optimizer, verify_block=1) as s,
    ):
        for step in s.steps(batches):
            with step as batch:
                net(batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                done.append(step.number)
    assert scaled or done == [0, 1, 2, 3]


def test_the_count_of_a_schedule_is_named_before_those_of_meters() -> None:
    script, meter, other, third, last, schedule = Script(), Shards(), Shards(), Shards(), Shards(), Warmup()
    with (
        pytest.raises(ImpureBlockError, match=r"changed: schedule.calls \(was 2, then 3\), "),
        holdfast.session(model=script.net, optimizer=script.optimizer) as s,
    ):
        for step in s.steps(until=2):
            with step:
                for each in (meter, other, third, last):
                    each.next_batch()
                schedule.step(script.optimizer)
                script.pure()


def test_without_the_check_each_block_runs_once() -> None:
    script = Script()
    assert script.train(script.prefetching, verify_block=0) == 2


class Unordered(torch.autograd.Function):
    """A kernel whose sums have another order each time, unless torch is asked for deterministic ones."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return a copy of ``x``."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return gradients with another last bit each time."""
        once = torch.are_deterministic_algorithms_enabled()
        return gradients[0] if once else gradients[0] + int.from_bytes(os.urandom(2), "little")


def test_kernels_that_are_not_deterministic_are_no_impurity(caplog: pytest.LogCaptureFixture) -> None:
    script = Script()

    def block() -> None:
        script.optimizer.zero_grad()
        unordered: Any = Unordered.apply
        unordered(script.net(torch.ones(4, 2))).mean().backward()
        script.optimizer.step()

    with caplog.at_level(logging.WARNING, "holdfast"):
        assert script.train(block, verify_block=1) == 6  # no later block is checked
    assert "agree with deterministic algorithms" in caplog.text


@pytest.mark.parametrize("every", [50, 0])
def test_a_batch_that_cannot_be_handed_out_twice_is_not_checked(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Regression: nothing said so."""
    script, runs = Script(), 0

    class Opaque:
        """An object of an unknown kind."""

        x = torch.ones(4, 2)

        __slots__ = ()

    with (
        caplog.at_level(logging.WARNING, "holdfast"),
        holdfast.session(model=script.net, optimizer=script.optimizer, verify_block=every) as s,
    ):
        for step in s.steps([Opaque(), Opaque()]):
            with step as batch:
                runs += 1
                script.learn(batch.x)
    assert runs == 2
    assert caplog.text.count("the block is not checked") == (every > 0)
    assert caplog.text.count("Opaque, which cannot be copied") == (every > 0)


def test_a_block_that_skips_its_batch_is_not_the_one_that_is_checked() -> None:
    script, runs = Script(), []
    with holdfast.session(model=script.net, optimizer=script.optimizer) as s:
        for step in s.steps(until=4):
            with step:
                runs.append(step.number)
                if step.number:
                    script.learn(torch.ones(4, 2))
    assert runs == [0, 0, 1, 1, 2, 3]
