"""The variables on which an update depends through functions and objects of the script, found in its source."""

from __future__ import annotations

import argparse
import ast
import linecache
import math
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from torch import nn

from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.runtime.worker.script_frames import values_of
from holdfast.session.session import Session
from holdfast.session.variables.called_functions import CallWithBody
from holdfast.session.variables.deciding_variables import (
    deciding_variables,
    placed_variables,
    places_in_script,
)

CLASSES = """
from torch import nn


class Warmup:
    def __init__(self, inner=None):
        self.count, self.rate, self.inner = 0, 0.1, inner

    def step(self):
        self.count += 1
        share = min(1, self.count / 9)
        for group in groups:
            group["lr"] = self.rate * share

    def scale(self, loss):
        return loss * self.weight()

    def weight(self):
        return self.count

    def advance(self, by=1):
        self.count += by

    def show(self):
        print(self.count)

    def decay(self):
        share = self.advance()
        for kept in weights:
            kept *= self.count / 9

    def again(self):
        self.again()
        self.inner.advance()

    def __call__(self, loss):
        return loss * self.rate

    def change(self):
        self.rate = self.rate * 2

    @staticmethod
    def set(number):
        for group in groups:
            group["lr"] = number


class Momentum:
    def __init__(self):
        self.param_groups, self.seen = [], 0

    def step(self):
        self.seen += 1
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=1 / self.seen)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.tau, self.calls = nn.Dropout(0.1), 1.0, 0

    def forward(self, batch):
        self.calls += 1
        return self.drop(batch) / self.tau


def set_by(given):
    given.count += 1
    for group in groups:
        group["lr"] = given.count


def rate_now():
    return 0.1 * number


def set_rate(value, other):
    for group in groups:
        group["lr"] = value


def set_scaled(base, value):
    for group in groups:
        group["lr"] = base * value


def counted():
    global number
    number += 1


def schedule_of():
    seen = 0

    def step():
        nonlocal seen
        seen += 1
        for group in groups:
            group["lr"] = seen

    return step


"""
RATES = """
count = 0


def adjust():
    global count
    count += 1
    for group in groups:
        group["lr"] = count


def adjust_deeply():
    adjust()
"""
FOUND: dict[str, tuple[str, ...]] = {
    "set_by(outer.inner)\noptimizer.step()": ("schedule.count",),
    "set_by(given=schedule)\noptimizer.step()": ("schedule.count",),
    "schedule.step()\noptimizer.step()": ("schedule.count",),
    "schedule.scale(loss).backward()\noptimizer.step()\nschedule.advance()": ("schedule.count",),
    "schedule.scale(loss).backward()\noptimizer.step()\nschedule.show()": (),
    "schedule.count = step.number\nschedule.step()\noptimizer.step()": (),
    "optimizer.step()\nschedule.decay()": ("schedule.count",),
    "outer.inner.step()\noptimizer.step()": ("schedule.count",),
    "outer.again()\nouter.inner.scale(loss).backward()\noptimizer.step()": ("schedule.count",),
    "schedule(loss).backward()\noptimizer.step()\nschedule.change()": ("schedule.rate",),
    "for group in groups:\n    group['lr'] = rate_now()\noptimizer.step()\ncounted()": ("number",),
    "set_rate(seen, 1)\noptimizer.step()\nseen += 1": ("seen",),
    "set_rate(1, seen)\noptimizer.step()\nseen += 1": (),
    "set_rate(other=1, value=seen)\noptimizer.step()\nseen += 1": ("seen",),
    "Warmup.set(seen)\noptimizer.step()\nseen += 1": ("seen",),
    "schedule.set(seen)\noptimizer.step()\nseen += 1": ("seen",),
    "unknown.step()\noptimizer.step()": (),
    "own.step()\noptimizer.step()": ("own.seen",),
    "enclosed()\noptimizer.step()": ("schedule_of:seen",),  # not the variable ``seen`` of the script
    "bound()\noptimizer.step()": ("schedule.count",),
    "unnamed()\noptimizer.step()": ("unnamed:self.count",),
    "set_given(seen)\noptimizer.step()\nseen += 1": (),  # its first argument is given
    "set_scaled(seen)\noptimizer.step()\nseen += 1": ("seen",),
    "adjust()\noptimizer.step()": ("rates:count",),
    "adjust_deeply()\noptimizer.step()": ("rates:count",),
    "if rate_now() > 1:\n    seen += 1\nset_rate(seen, 1)\noptimizer.step()": ("seen",),
    "optimizer.step()\nmomentum = next(numbers)": ("numbers",),
    "optimizer.step()\nnumbers = iter([2])\nmomentum = next(numbers)": (),
    "optimizer.step()\nshare = 1 / seen\nkept.mul_(share).add_(1 - share)\nseen += 1": ("seen",),
    "optimizer.step()\nmean *= seen\nseen += 1": (),
    "optimizer.step()\nkept *= seen\nseen += 1": ("seen",),
    "net(batch).backward()\noptimizer.step()\nnet.tau *= 0.9": ("net.tau",),
    "wrapped(batch).backward()\noptimizer.step()\nnet.tau *= 0.9": ("net.tau",),
    "twice(batch).backward()\noptimizer.step()\ntwice.module.module.tau *= 0.9": ("twice.module.module.tau",),
    "loss.backward()\noptimizer.step()\nnet.drop.p = min(0.5, net.drop.p + 0.1)": ("net.drop.p",),
    "loss.backward()\noptimizer.step()\nnet.drop.p = 0.1 * seen\nseen += 1": ("seen",),
    "loss.backward()\noptimizer.step()\nnet.drop.p = 0.1 / step.number": (),
    # A branch that a flag of the command line excludes has no part in the update.
    "optimizer.step()\nif not args.adam:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif args.adam:\n    show = 1\nelse:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif args.adam:\n    kept *= seen\nseen += 1": ("seen",),
    # So has one that other bools exclude, if the loop does not set them.
    "optimizer.step()\nif off:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif off or not args.adam:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif off and seen:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif off or seen:\n    kept *= seen\nseen += 1": ("seen",),
    "optimizer.step()\nif off:\n    kept *= seen\nseen += 1\noff = seen < 9": ("off", "seen"),
    "if not off or seen > 9:\n    rate = seen\nloss = rate * out\nloss.backward()\noptimizer.step()\nseen += 1": (
        "seen",
    ),
    "optimizer.step()\nif args.rate:\n    kept *= seen\nseen += 1": ("seen",),
    "optimizer.step()\nif args.plan == 'cosine':\n    kept *= seen\nseen += 1": ("seen",),
    "optimizer.step()\nif args.plan != 'cosine':\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif args.plan in ('step', 'poly'):\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif args.plan not in {'step', 'poly'}:\n    kept *= seen\nseen += 1": ("seen",),
    "optimizer.step()\nif args.rate is None:\n    kept *= seen\nseen += 1": (),
    "optimizer.step()\nif args.rate > 1:\n    kept *= seen\nseen += 1": ("seen",),
    "optimizer.step()\nif args.plan == 'step':\n    kept *= seen\nseen += 1\nargs.plan = seen": (
        "args.plan",
        "seen",
    ),
    "optimizer.step()\nif not args.adam:\n    kept *= seen\nseen += 1\nargs.adam = seen < 9": (
        "args.adam",
        "seen",
    ),
    # What a block takes from ``own`` of the session continues with the job. At the first step there may be none.
    "if s.own:\n    seen = s.own[0]\nset_rate(seen, 1)\noptimizer.step()\nseen += 1\ns.own = [seen]": (
        "s.own",
    ),
    "if mean.own:\n    seen = mean.own[0]\nset_rate(seen, 1)\noptimizer.step()\nseen += 1\nmean.own = [seen]": (
        "mean.own",
        "seen",
    ),
}


def numbers_from(number: int) -> Iterator[int]:
    """Yield the numbers from ``number`` on."""
    while True:
        yield number


def test_each_new_field_of_a_node_has_a_type() -> None:
    """Regression: Python 3.13 warned at each search, which failed where warnings are errors; Python 3.15 raises."""
    assert set(CallWithBody._fields) - set(ast.Call._fields) <= CallWithBody._field_types.keys()


@pytest.mark.parametrize("code", FOUND)
def test_names_on_which_an_update_depends_through_calls(tmp_path: Path, code: str) -> None:
    block = "".join(f"            {line}\n" for line in code.splitlines())
    text = f"{CLASSES}with session:\n    for step in steps:\n        with step:\n{block}        shown = next(shows)\n"
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    exec(compile(CLASSES, str(file), "exec"), vars(module))
    # The search looks up these names in this function, as in that of a script.
    Warmup, rate_now, set_rate, counted = module.Warmup, module.rate_now, module.set_rate, module.counted
    set_by = module.set_by
    schedule, number, mean, numbers = Warmup(), 0, 0.5, numbers_from(3)
    outer, enclosed, own = Warmup(schedule), module.schedule_of(), module.Momentum()
    unnamed = Warmup().step
    bound, set_given, set_scaled = schedule.step, partial(set_rate, 1), partial(module.set_scaled, 1)
    (other := tmp_path / "rates.py").write_text(RATES)
    rates = types.ModuleType("rates")
    exec(compile(RATES, str(other), "exec"), vars(rates))
    adjust, adjust_deeply = rates.adjust, rates.adjust_deeply
    off, s = False, object.__new__(Session)
    shows, seen = numbers_from(4), 1  # drawn from after the block
    args = argparse.Namespace(adam=True, rate=0.1, plan="cosine")
    net = module.Net()
    wrapped, twice = nn.DataParallel(net), nn.DataParallel(nn.DataParallel(module.Net()))
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    found = deciding_variables(((str(file), line),), update=True)
    assert found == FOUND[code]
    used = (
        outer,
        enclosed,
        own,
        set_by,
        shows,
        seen,
        rate_now,
        set_rate,
        counted,
        mean,
        numbers,
        bound,
        unnamed,
    )
    assert (
        all((*used, set_given, set_scaled, adjust, adjust_deeply, wrapped, twice, args))
        and number == 0
        and not off
        and s
    )


TRAINER = """
class Scaler:
    def __init__(self):
        self.scale = 3

    def optimize(self):
        look()


class Sampler:
    def __init__(self):
        self.losses = [1.0]

    def weight(self):
        return sum(self.losses)

    def add(self, loss):
        self.losses.append(loss)


class Trainer:
    def __init__(self):
        self.scaler, self.sampler, self.count = Scaler(), Sampler(), 5

    def run(self):
        for step in [0]:
            self.one()

    def one(self):
        self.set_rate()
        self.compute()
        self.scaler.optimize()
        self.count += 1

    def set_rate(self):
        for group in groups:
            group["lr"] = 0.1 * self.count

    def compute(self):
        loss = Loss() * self.weight()
        loss.backward()
        self.sampler.add(4.0)

    def weight(self):
        return self.sampler.weight()


class Loss:
    def backward(self):
        pass

    def __mul__(self, number):
        return self


groups = [{"lr": 0.0}]
"""


def test_names_belong_to_the_frame_of_their_function(tmp_path: Path) -> None:
    """Another object steps the optimizer. Regression: its ``self`` was taken for that of the loop, which found nothing.

    The functions around the update add nothing to the depth: the weight is three calls deep, with ``one`` four.
    """
    (file := tmp_path / "trainer.py").write_text(TRAINER)
    linecache.checkcache()
    module = types.ModuleType("trainer")
    exec(compile(TRAINER, str(file), "exec"), vars(module))
    found: dict[str, object] = {}

    def look() -> None:
        for name, place, _ in placed_variables(places_in_script(), update=True):
            found.update(values_of([name], place))

    vars(module).update(look=look)
    module.Trainer().run()
    assert found == {"self.count": 5, "self.sampler.losses": [1.0, 4.0]}


DEEP = """
class Strength:
    def __init__(self):
        self.calls, self.now = 0, 0.0

    def tune(self):
        self.calls += 1
        if self.calls % 8 == 0:
            self.now = 0.1 * self.calls
        return self.now


def layer(batch):
    return part(part(batch))


def part(batch):
    return batch


for step in steps:
    with step as batch:
        batch = MODEL
        loss = batch * strength.tune()
        loss.backward()
        optimizer.step()
"""


def test_calls_of_the_loop_count_before_those_in_their_functions(tmp_path: Path) -> None:
    """Regression: the functions of StyleGAN2's networks took the bodies of all calls after them (``BODIES_MAX``)."""
    text = DEEP.replace("MODEL", "; ".join(["batch", *["batch = layer(batch)"] * 30]))
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    exec(compile(text[: text.index("for step")], str(file), "exec"), vars(module))
    strength, layer, part = module.Strength(), module.layer, module.part
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    found = deciding_variables(((str(file), line),), update=True)
    assert found == ("strength.calls", "strength.now")
    assert strength and layer and part


def test_reports_do_not_take_the_bodies_of_the_calls_in_a_function(tmp_path: Path) -> None:
    """Regression: the logger and the save of improved-diffusion took the bodies of its sampler: other weights."""
    text = DEEP.replace("MODEL", "; ".join(["batch", *["layer(batch)"] * 20]))
    text = text.replace("batch * strength.tune()", "scaled(batch)").replace(
        "def part(", "def scaled(batch):\n    return batch * strength.tune()\n\n\ndef part("
    )
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    exec(compile(text[: text.index("for step")], str(file), "exec"), vars(module))
    strength, layer, part, scaled = module.Strength(), module.layer, module.part, module.scaled
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    assert deciding_variables(((str(file), line),), update=True) == ("strength.calls", "strength.now")
    assert strength and layer and part and scaled


def test_a_nest_of_many_calls_is_searched(tmp_path: Path) -> None:
    """Regression: each level was searched twice as often as the level around it: 30 calls would take a day."""
    nest = "batch * strength.tune()"
    for _ in range(30):
        nest = f"part({nest})"
    text = DEEP.replace("MODEL", f"part(x={nest})").replace("def part(batch):", "def part(batch=None, x=0):")
    text = text.replace("loss = batch * strength.tune()", "loss = batch")
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    exec(compile(text[: text.index("for step")], str(file), "exec"), vars(module))
    strength, part = module.Strength(), module.part
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    found = deciding_variables(((str(file), line),), update=True)
    assert found == ("strength.calls", "strength.now")
    assert strength and part


SETTINGS = """
class Settings(dict):
    def __getattr__(self, name):
        return self[name]


class Strength:
    def __init__(self):
        self.calls = 0

    def tune(self):
        self.calls += 1
        return self.calls


for step in steps:
    with step as batch:
        batch = READS
        loss = batch * strength.tune()
        loss.backward()
        optimizer.step()
"""


def test_the_attributes_of_an_object_are_read_without_its_own_code() -> None:
    """``torch.distributed.reduce_op`` warns about each access of an attribute."""

    class Warns:
        """An object that is not to be asked."""

        def __init__(self) -> None:
            self.count = 3

        def __getattribute__(self, name: str) -> object:
            raise AssertionError(f"{name} was asked for")

    class Slots:
        """An object without a dict of attributes."""

        __slots__ = ()

    assert instance_of(Warns()) == {"count": 3}
    assert instance_of(Slots()) == {} and "pi" in instance_of(math)


def test_reads_of_settings_do_not_take_the_bodies_of_calls(tmp_path: Path) -> None:
    text = SETTINGS.replace("READS", "; ".join(["batch", *["batch = settings.rate"] * 200]))
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    exec(compile(text[: text.index("for step")], str(file), "exec"), vars(module))
    settings, strength = module.Settings(rate=1), module.Strength()
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    assert deciding_variables(((str(file), line),), update=True) == ("strength.calls",)
    assert settings and strength
