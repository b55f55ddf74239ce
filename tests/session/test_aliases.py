"""Local names for objects of the script: what a step does to the object counts under the name of the object."""

from __future__ import annotations

import linecache
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.exit_codes import Exit
from holdfast.session.variables.deciding_variables import deciding_variables
from tests.session.launch import run_job, run_undisturbed_and_killed

CLASSES = """
from functools import partial

from torch import nn


class Weight:
    def __init__(self):
        self.count = 0

    def next(self):
        self.count += 1
        return self.count

    def advance(self, holder):
        self.count += 1
        holder.share = self.count

    def __call__(self, loss):
        return loss * self.next()


class Base:
    total = 0

    def __init__(self):
        self.steps = 0

    def next(self):
        self.steps += 1
        return self.steps

    @classmethod
    def of_all(cls):
        cls.total += 1
        return cls.total

    def of_type(self):
        type(self).total += 1
        return type(self).total


class Child(Base):
    def next(self):
        for n in [1]:
            steps = super().next()
        return steps


def counted():
    n = 0

    def count():
        nonlocal n
        n += 1
        return n

    return count


class Plain:
    def __call__(self, loss):
        return loss * 2


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.passes = 0

    def forward(self, loss):
        self.passes += 1
        return loss * self.passes


class Holder:
    def __init__(self):
        self.weight, self.other, self.share, self.plain = Weight(), Weight(), 1, Plain()
        self.by_name = {"a": self.weight}
        self.children = [Child(), Child()]
        self.child, self.deep, self.lists = Child(), {"a": {"b": {"n": 0}}}, {"a": []}
        self.bound = partial(Weight.next, Weight())
        self.first, self.second = counted(), counted()
        self.two = {"a": self.weight, "b": self.other}
        self.many = [Weight() for _ in range(12)]
        self.both = [self.weight, self.other]
        self.state, self.kept, self.before, self.rates = {"n": 0}, None, Weight(), (1, 2)
        self.scales = nn.ModuleList([Scale()])

    @property
    def current(self):
        return self.weight

    def found(self):
        assert self.weight is not None
        return self.weight

    def either(self):
        if self.share:
            return self.weight
        return self.other

    def new(self):
        return Weight()

    def loss(self, loss):
        weight = self.weight
        return loss * weight.next()

    def sum(self, loss):
        total = 0
        for each in self.both:
            total += each(loss)
        return total

    def watch(self, loss):
        for each in self.both:
            each.next()
        return loss


class Watcher:
    def __init__(self, holder):
        self.share = holder.weight

    def mark(self):
        self.share.count += 1


_SETTINGS = Weight()


def settings():
    return _SETTINGS


def scaled(weight, loss):
    mine = weight
    mine.count += 1
    return loss * mine.count
"""
STEP = ".backward()\noptimizer.step()"
FOUND: dict[str, tuple[str, ...]] = {
    f"w = holder.weight\nw.count += 1\n(loss * w.count){STEP}": ("holder.weight.count",),
    f"w = holder.weight\n(loss * w.next()){STEP}": ("holder.weight.count",),
    f"h = holder\nw = h.weight\nw.count += 1\n(loss * w.count){STEP}": ("holder.weight.count",),
    f"w, n = holder.weight, 1\nw.count += n\n(loss * w.count){STEP}": ("holder.weight.count",),
    f"if (w := holder.weight) is not None:\n    w.count += 1\n(loss * w.count){STEP}": (
        "holder.weight.count",
    ),
    f"w = holder.weight if loss else None\nw.count += 1\n(loss * w.count){STEP}": ("holder.weight.count",),
    f"w = holder.weight\nw.count += 1\n(loss * holder.weight.count){STEP}": ("holder.weight.count",),
    f"w = holder.current\nw.count += 1\n(loss * w.count){STEP}": ("holder.weight.count",),
    f"w = holder.found()\nw.count += 1\n(loss * holder.found().count){STEP}": ("holder.weight.count",),
    f"settings().count += 1\nargs = settings()\n(loss * args.count){STEP}": ("_SETTINGS.count",),
    f"w = holder.by_name['a']\nw.count += 1\n(loss * w.count){STEP}": ("by_name:a.count",),
    f"holder.by_name['a'].count += 1\n(loss * holder.by_name['a'].count){STEP}": ("by_name:a.count",),
    f"w = holder.by_name.get('a')\nw.count += 1\n(loss * w.count){STEP}": ("by_name:a.count",),
    f"kept = holder.state\nkept['n'] += 1\n(loss * kept['n']){STEP}": ('holder.state["n"]',),
    f"held = holder.tensor\nheld += 1\n(loss * held){STEP}": ("holder.tensor",),
    f"scaled(holder.weight, loss){STEP}": ("holder.weight.count",),
    f"holder.loss(loss){STEP}": ("holder.weight.count",),
    # The variable that has the object gives it its name.
    f"w = holder.other\nw.count += 1\n(loss * other.count){STEP}": ("other.count",),
    f"holder.other.count += 1\n(loss * other.count){STEP}": ("other.count",),
    f"holder.current.count += 1\n(loss * holder.current.count){STEP}": ("holder.weight.count",),
    # Two attributes have one object.
    f"watcher.share.count += 1\n(loss * holder.weight.count){STEP}": ("watcher.share.count",),
    f"watcher.mark()\n(loss * holder.weight.count){STEP}": ("holder.weight.count",),
    # Two objects of one class have one method.
    f"(loss * holder.weight.next()){STEP}\nholder.before.next()": ("holder.weight.count",),
    # A call of one of several objects.
    f"holder.sum(loss){STEP}": ("both:0.count", "other.count"),
    f"sum(each(loss) for each in holder.both){STEP}": ("both:0.count", "other.count", "holder.both"),
    f"holder.by_name['a'](loss){STEP}": ("by_name:a.count",),
    f"holder.both[1](loss){STEP}": ("other.count",),
    f"total = 0\nfor n in (0, 1):\n    total += holder.both[n](loss)\ntotal{STEP}": (
        "both:0.count",
        "other.count",
        "holder.both",
    ),
    f"total = 0\nfor key, each in holder.by_name.items():\n    total += each.next()\n(loss * total){STEP}": (
        "by_name:a.count",
    ),
    f"for each, n in zip(holder.both, (1, 2)):\n    each.advance(holder)\n(loss * holder.share){STEP}": (
        "both:0.count",
        "other.count",
    ),
    f"({{'a': holder.weight.next}}['a']() * loss){STEP}": ("holder.weight.count",),
    f"choices = {{'a': holder.weight.next}}\nn = choices['a']()\n(loss * n){STEP}": ("holder.weight.count",),
    f"holder.scales[0](loss){STEP}": ("holder.scales.0.passes",),
    f"total = 0\nfor each in holder.both:\n    each.count += 1\n    total += each.count\n(loss * total){STEP}": (
        "both:0.count",
        "other.count",
    ),
    f"for each in holder.both:\n    each.count += 1\nloss{STEP}": (),
    f"for each in holder.both:\n    each.count += 1\n(loss * sum(w.count for w in holder.both)){STEP}": (
        "both:0.count",
        "other.count",
        "holder.both",
    ),
    f"n = 0\nfor key, each in holder.two.items():\n    each.count += 1\n    n += each.count\n(loss * n){STEP}": (
        "two:a.count",
        "other.count",
    ),
    f"n = 0\nfor i, (each, m) in enumerate(zip(holder.both, [1, 2])):\n    n += each.next()\n(loss * n){STEP}": (
        "both:0.count",
        "other.count",
    ),
    f"held = holder.many[-1]\nheld.count += 1\n(loss * held.count){STEP}": ("many:11.count",),
    f"held = holder.many[10:]\n(loss * len(held)){STEP}": (),
    f"held = holder.two.get('none')\n(loss * 2){STEP}": (),
    # Methods of a base class and of a class, and a bound argument.
    f"(loss * holder.child.next()){STEP}": ("holder.child.steps",),
    f"child = holder.child\n(loss * child.next()){STEP}": ("holder.child.steps",),
    f"n = 0\nfor each in holder.children:\n    n += each.next()\n(loss * n){STEP}": (
        "children:0.steps",
        "children:1.steps",
    ),
    f"(loss * holder.child.of_type()){STEP}": ("holder.child.__class__.total",),
    f"(loss * holder.child.of_all()){STEP}": ("holder.child.__class__.total",),
    f"(loss * holder.bound()){STEP}": ("next:self.count",),
    f"(loss * holder.first() * holder.second()){STEP}": ("counted:n", "counted_:n"),
    f"held = holder.deep['a']['b']\nheld['n'] += 1\n(loss * held['n']){STEP}": ('deep:a:b["n"]',),
    f"holder.lists['a'].append(1)\n(loss * len(holder.lists['a'])){STEP}": ('holder.lists["a"]',),
    f"held = holder.lists['a']\nheld.append(1)\n(loss * len(held)){STEP}": ("lists:a",),
    # What a step makes, or sets first, carries nothing; and a name keeps the object of before.
    f"w = holder.new()\nw.count += 1\n(loss * w.count){STEP}": (),
    f"w = holder.weight\nw.count = 0\nw.count += 1\n(loss * w.count){STEP}": (),
    f"w = holder.weight\nw.count += 1\nloss{STEP}": (),
    f"holder.watch(loss){STEP}": (),
    f"w = holder.before\nholder.before = loss\n(loss * w.count){STEP}": ("holder.before",),
    f"first, second = holder.rates\n(loss * first){STEP}": (),
    f"holder.plain(loss){STEP}": (),
    f"kept = holder.kept\nholder.kept = loss\n(loss * 2){STEP}": (),
}


@pytest.mark.parametrize("code", FOUND)
def test_names_of_objects_behind_local_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    assert found_in(tmp_path, monkeypatch, code, "with session:\n    for step in steps:\n") == set(
        FOUND[code]
    )


def test_the_loop_that_runs_now_is_not_repeated_for_each_of_its_objects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"each.count += 1\n(loss * each.count){STEP}"
    found = found_in(tmp_path, monkeypatch, code, "for each in holder.both:\n    for step in steps:\n")
    assert found == {"each.count"}


def found_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, around: str) -> set[str]:
    """Return the variables that the search finds for a step with the code ``code``.

    Args:
        tmp_path: directory for the script.
        monkeypatch: the fixture.
        code: the code of the step.
        around: the lines around the block of the step.
    """
    block = "".join(f"            {line}\n" for line in code.splitlines())
    text = f"{CLASSES}{around}        with step:\n{block}"
    (file := tmp_path / "train.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("train")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "train", module)
    exec(compile(CLASSES, str(file), "exec"), vars(module))
    # The search looks up these names in this function, as in that of a script.
    holder, settings, scaled, _SETTINGS = module.Holder(), module.settings, module.scaled, module._SETTINGS
    watcher = module.Watcher(holder)
    holder.tensor, loss, other = torch.zeros(1), torch.ones(1), holder.other
    line = next(n for n, each in enumerate(text.splitlines(), 1) if each.endswith("optimizer.step()"))
    found = deciding_variables(((str(file), line),), update=True)
    assert all((settings, scaled, _SETTINGS, other, loss, watcher)) and isinstance(
        holder.scales, nn.ModuleList
    )
    return set(found)


JOB = str(Path(__file__).with_name("alias_job.py"))


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    ("form", "name"),
    [("local", "trainer.part.passes"), ("items", 'parts["square"].passes'), ("settings", "_SETTINGS.passes")],
)
def test_a_count_of_an_object_behind_a_local_name_is_refused(tmp_path: Path, form: str, name: str) -> None:
    """Regression: a replacement began with a count of 0. The job ended with other weights and exit code 0."""
    done = run_job(tmp_path, 2, JOB, form)
    assert done.returncode == Exit.BAD_INPUT and name in done.stdout, done.stdout


@pytest.mark.torch
@pytest.mark.processes
def test_local_names_on_which_no_update_depends_are_exact_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "depend" not in run_undisturbed_and_killed(tmp_path, monkeypatch, "1:5,0:8", JOB, "harmless")
