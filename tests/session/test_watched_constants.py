"""Tensors and numbers that the script changes in a form that the search of the source does not find."""

from __future__ import annotations

import linecache
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from holdfast.errors import StepError
from holdfast.exit_codes import Exit
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.content_digest import digest_of_content
from holdfast.session.variables import watched_constants
from holdfast.session.variables.watched_constants import CONTENT, READ_EVERY, WatchedConstants
from tests.session.launch import run_job

pytestmark = pytest.mark.torch

PLACE = (("train.py", 1), (("train.py", 1),))


class Source:
    """The part of the adapter that reads tensors. It counts the digests."""

    def __init__(self) -> None:
        self.digests = 0

    def digest_of(self, value: object) -> int | None:
        """Return a digest of the content of ``value``."""
        self.digests += 1
        return digest_of_content(value)

    def changes_of(self, value: object) -> int | None:
        """Return the count of the changes of a tensor."""
        return private_api.write_count(value) if isinstance(value, torch.Tensor) else None

    def __getattr__(self, name: str) -> object:
        """Return a method that nothing here calls. The protocols ask only whether it exists."""
        return lambda *given: None


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Return the variables of a script, which a test sets."""
    values: dict[str, object] = {}
    monkeypatch.setattr(
        watched_constants, "present_values", lambda names: {n: v for n, v in values.items() if n in names}
    )
    return values


def watching(script: dict[str, object], **values: object) -> tuple[WatchedConstants, Source]:
    """Return the watch over a script with the variables ``values``, after the looks that read all of them.

    The next 7 looks compare the counts only.
    """
    script.update(values)
    source = Source()
    constants = WatchedConstants(source)  # type: ignore[arg-type]
    constants.watch(dict.fromkeys(script, PLACE))
    assert not any(constants.look() for _ in range(17))
    return constants, source


def returned(value: torch.Tensor) -> torch.Tensor:
    """Return the argument."""
    return value


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "view": lambda bank: bank[1].mul_(2.0),
    "selected": lambda bank: bank.select(0, 1).add_(1.0),
    "rows": lambda bank: [row.add_(1.0) for row in bank],
    "returned": lambda bank: returned(bank).add_(1.0),
    "foreach": lambda bank: torch._foreach_add_([bank], 1.0),
    "out": lambda bank: torch.add(bank, 1.0, out=bank),
}


@pytest.mark.parametrize("form", CHANGES)
def test_a_change_of_a_tensor_is_found_at_the_next_look(script: dict[str, object], form: str) -> None:
    constants, source = watching(script, bank=torch.ones(3, 2), scale=torch.ones(2), settings=[1, 2])
    before = source.digests
    assert not constants.look() and source.digests == before, "nothing has changed, so nothing is read"
    CHANGES[form](script["bank"])  # type: ignore[arg-type]
    assert constants.look() == {"bank": PLACE}
    (text,) = constants.texts({"bank": script["bank"]}, fresh=False).values()
    assert constants.first("bank").startswith(CONTENT) and text != constants.first("bank")
    assert not constants.look(), "it is one of the changed variables now"


@pytest.mark.parametrize(
    "change",
    [
        lambda script: script["rows"][1].add_(1.0),
        lambda script: script["rows"].append(torch.ones(2)),
        lambda script: script.update(rows=[torch.ones(2), torch.zeros(2)]),
        lambda script: script["numbers"]["lr"].insert(0, 0.5),
    ],
    ids=["item", "more", "rebound", "numbers"],
)
def test_a_change_of_a_container_is_found_soon(
    script: dict[str, object], change: Callable[[dict[str, object]], object]
) -> None:
    constants, _ = watching(script, rows=[torch.ones(2), torch.ones(2)], numbers={"lr": [1.0]})
    change(script)
    assert [len(found) for _ in range(READ_EVERY) if (found := constants.look())] == [1]


def test_what_is_not_counted_is_found_when_all_values_are_read(
    script: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_constants, "SMALL_SIZE_BYTES_MAX", 0)
    bank, average = torch.ones(3), torch.ones(3)
    constants, _ = watching(script, bank=bank, array=bank.numpy(), average=average)
    bank.numpy()[1] = 2.0  # NumPy shares the memory, and torch does not count its writes
    average.data.mul_(0.5)
    assert not any(constants.look() for _ in range(64 - 17)), "the next look that reads all is the 64th"
    assert constants.look().keys() == {"bank", "array", "average"}


def test_of_what_is_small_one_value_is_read_at_some_looks(script: dict[str, object]) -> None:
    averages = [torch.ones(3) for _ in range(4)]
    constants, source = watching(
        script, **{f"average_{number}": each for number, each in enumerate(averages)}
    )
    averages[2].data.mul_(0.5)
    before = source.digests
    found = [name for _ in range(4 * READ_EVERY) for name in constants.look()]
    assert found == ["average_2"] and source.digests == before + 4


def test_writes_without_another_content_are_read_a_few_times_only(
    script: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_constants, "SMALL_SIZE_BYTES_MAX", 0)
    buffer = torch.zeros(3)
    constants, source = watching(script, buffer=buffer)
    before = source.digests
    for _ in range(20):
        buffer.zero_()
        assert not constants.look()
    assert source.digests == before + watched_constants.VAIN_MAX
    buffer.add_(1.0)
    assert any(constants.look() for _ in range(64))


def test_what_cannot_change_or_is_too_large_is_not_read(
    script: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_constants, "SIZE_BYTES_MAX", 1000)
    _, source = watching(
        script, data=torch.ones(1000), name="sgd", rate=0.1, empty=[], net=torch.nn.Linear(1, 1)
    )
    assert source.digests == 0


def test_classes_of_tensors_do_not_count_as_tensors(script: dict[str, object]) -> None:
    """Regression: ``isinstance(x, torch.Tensor)`` in a model ended the search of all variables with a TypeError."""
    kinds = (torch.Tensor, np.ndarray)
    constants, source = watching(script, one=torch.Tensor, several=kinds, by_name={"array": np.ndarray})
    assert not any(constants.look() for _ in range(64)) and not constants.changed
    assert source.digests <= 6, "of the containers only"


def test_a_tensor_that_was_freed_is_not_compared_before_its_name_is_read(script: dict[str, object]) -> None:
    constants, _ = watching(script, bank=torch.ones(3), scale=torch.ones(2))
    del script["bank"]
    script["scale"] = torch.ones(2)  # another tensor with the same content
    assert not any(constants.look() for _ in range(2 * READ_EVERY))


def test_a_container_in_itself_and_a_long_list_are_not_watched(script: dict[str, object]) -> None:
    inside: list[object] = [1.0]
    inside.append(inside)
    constants, source = watching(script, inside=inside, names=["a"] * 20_000, numbers={"all": [0.5] * 20_000})
    assert source.digests == 1 and not constants.changed, "only the digest of the first one was tried"


def test_the_changed_constants_of_a_job_are_known_from_its_state() -> None:
    constants = WatchedConstants(None)
    constants.stand_at({"bank": f"{CONTENT}00000000", "count": 3, "name": "sgd"})
    assert constants.changed == {"bank"}


SCRIPT = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import holdfast
from tests.others.beat import beat
class Knob:
    w = 1.0
def main():
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bank, scale = torch.zeros(3, 4), torch.ones(4)
    rows, knob = list(torch.zeros(3, 4)), Knob()
    with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
        for step in s.steps(until=10):
            with step:
                beat(s.step)
                out = model(torch.full((2, 4), s.step + 1.0) * scale)
                weight = sum(row.sum().item() for row in rows) + bank.sum().item()
                optimizer.zero_grad()
                (out.square().sum() * (knob.w + 1e-3 * weight)).backward()
                optimizer.step()
            if s.step % 4 == 3:
                {change}
    Path(f"ended-{{dist.get_rank()}}").touch()
main()
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bank", "row = bank[s.step % 3]; row.mul_(0.9).add_(out.detach().mean(0))"),
        ("rows", "torch._foreach_add_(rows, out.detach().mean())"),
        ("knob.w", "Knob.w *= 0.9"),
    ],
)
def test_a_process_that_has_the_first_content_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.format(change=change))
    done = run_job(tmp_path, 2, "train.py")
    assert done.returncode == 0, done.stdout
    assert f"the updates depend on {name} (" in done.stdout, done.stdout
    assert "scale" not in done.stdout
    monkeypatch.setenv("KILL", "1:4")  # no update has seen the change behind step 3 yet
    done = run_job(tmp_path, 2, "--root", "killed", "train.py")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert f"the updates depend on {name} = " in done.stdout, done.stdout


class Number(NamedTuple):
    """A form in which a number changes that the search of the source does not find.

    Attributes:
        change: the statement that changes it.
        define: functions and classes.
        init: the statement that makes it.
        read: the expression that reads it.
    """

    change: str
    define: str = "class C:\n    w = 1.0"
    init: str = "o = C()"
    read: str = "o.w"


COOLED = "class C:\n    w = 1.0\n    def cool(self, x=0.9):\n        self.w *= x\n        return x"
NUMBERS = {
    "class": Number("C.w *= 0.9"),
    "class method": Number(
        "o.cool()", "class C:\n    w = 1.0\n    @classmethod\n    def cool(cls):\n        cls.w *= 0.9"
    ),
    "class of self": Number(
        "o.cool()", "class C:\n    w = 1.0\n    def cool(self):\n        type(self).w *= 0.9"
    ),
    "shared attributes": Number(
        "p.w *= 0.9",
        "class C:\n    shared = {'w': 1.0}\n    def __init__(self):\n        self.__dict__ = self.shared",
        "o, p = C(), C()",
    ),
    "name in a variable": Number("setattr(o, name, getattr(o, name) * 0.9)", init="o, name = C(), 'w'"),
    "method in a variable": Number("getattr(o, name)()", COOLED, "o, name = C(), 'cool'"),
    "key of a sort": Number("sorted([0.9], key=o.cool)", COOLED),
    "thread": Number("t = threading.Thread(target=o.cool); t.start(); t.join()", COOLED),
    "partial": Number("cool()", COOLED, "o = C()\n    cool = functools.partial(C.cool, o, 0.9)"),
    "partial method": Number("o.colder()", f"{COOLED}\n    colder = functools.partialmethod(cool, 0.9)"),
    "coroutine": Number(
        "asyncio.run(o.cool())", "class C:\n    w = 1.0\n    async def cool(self):\n        self.w *= 0.9"
    ),
    "deep": Number("a(o)", "\n".join((
        COOLED, *(f"def {one}(o):\n    {two}(o)" for one, two in ("ab", "bc", "cd", "de")), "def e(o):\n    o.cool()",
    ))),
    "item": Number(
        "p.w *= 0.9",
        "class C(dict):\n    __getattr__ = dict.__getitem__\n    __setattr__ = dict.__setitem__",
        "p = C(w=1.0)",
        'p["w"]',
    ),
    "own operator": Number(
        "o << 0.9", "class C:\n    w = 1.0\n    def __lshift__(self, x):\n        self.w *= x"
    ),
}  # fmt: skip

NUMBER_SCRIPT = """
import asyncio, functools, threading
import torch
import holdfast
{define}
class Settings:
    scale, name = 2.0, "sgd"
    @property
    def half(self):
        return self.scale / 2
def main():
    torch.manual_seed(0)
    model, settings = torch.nn.Linear(4, 4), Settings()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    {init}
    with holdfast.session(model=model, optimizer=optimizer, checkpoint={place!r}) as s:
        for step in s.steps(until={until}):
            with step:
                out = model(torch.full((2, 4), s.step + 1.0)).square().sum()
                optimizer.zero_grad()
                (out * {read} * settings.scale * settings.half).backward()
                optimizer.step()
            if step.number >= 2:
                {change}
main()
"""


def trained(where: Path, text: str) -> None:
    """Run the script ``text`` in this process."""
    (file := where / "numbers.py").write_text(text)
    linecache.checkcache()
    module = types.ModuleType("numbers_of_script")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module  # as the main module of a script
    try:
        exec(compile(text, str(file), "exec"), vars(module))
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_the_source_never_seems_to_change_is_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """Regression: a resumed process began with the first value: other weights, exit code 0, and no word."""
    form, place = NUMBERS[name], str(tmp_path / "ckpt")
    trained(tmp_path, NUMBER_SCRIPT.format(**form._asdict(), place=place, until=6))
    (said,) = [each for each in caplog.messages if "the updates depend on" in each]
    assert f"the updates depend on {form.read} (numbers.py:" in said
    with pytest.raises(StepError, match=rf"depend on {re.escape(form.read)} = 1\.0, as at the first step"):
        trained(tmp_path, NUMBER_SCRIPT.format(**form._asdict(), place=place, until=9))


def train_and_resume_silently(where: Path, text: str, form: Number, caplog: pytest.LogCaptureFixture) -> None:
    """Run a script with ``form`` up to step 20 and, from its checkpoint, up to step 25. No variable is named."""
    for until in (20, 25):
        trained(where, text.format(**form._asdict(), place=str(where / "ckpt"), until=until))
    assert not [each for each in caplog.messages if "depend on" in each], caplog.messages


def test_the_mode_of_a_module_is_not_watched(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The code after a block may evaluate, and the next block then sets the mode again."""
    define = (
        "class C(torch.nn.Module):\n    def forward(self, x):\n"
        "        return torch.nn.functional.dropout(x, 0.1, self.training)"
    )
    text = NUMBER_SCRIPT.replace(
        "            with step:\n", "            with step:\n                o.train()\n"
    )
    form = Number("o.eval()", define, read="o(torch.ones(2)).sum()")
    train_and_resume_silently(tmp_path, text, form, caplog)


def test_a_number_that_a_block_sets_for_itself_is_not_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deep layer may keep the size of its batch, which is by chance that of the first one after a resume."""
    define = "\n".join((
        "class C:\n    w = 1.0\n    def put(self, n):\n        self.w = 1.0 + n // 5 % 2",
        *(f"def {one}(o, n):\n    {two}(o, n)" for one, two in ("ab", "bc", "cd", "de")),
        "def e(o, n):\n    o.put(n)",
    ))  # fmt: skip
    text = NUMBER_SCRIPT.replace(
        "            with step:\n", "            with step:\n                a(o, step.number)\n"
    )
    form = Number("pass", define, read="o.w")
    train_and_resume_silently(tmp_path, text, form, caplog)


def test_a_number_that_each_epoch_sets_is_not_watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The code around the loop runs again in a process that continues, so such a number needs no word."""
    form = Number("pass", read="o.w * o.v")
    text = NUMBER_SCRIPT.replace(
        "        for step in s.steps(until={until}):",
        "        for epoch in s.epochs(3):\n"
        "          o.v = 0.5 ** (epoch % 2)\n"
        "          for step in s.steps([0] * 3):",
    )
    train_and_resume_silently(tmp_path, text, form, caplog)
