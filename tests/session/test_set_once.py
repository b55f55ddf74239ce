"""Variables that a script sets once, also from what a collective of the script has returned, found in its source."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.session.variables.set_once import set_once

HEAD = """
mean = None
for step in s.steps(loader):
    before(step)
    with step as (x, y):
        value = y.mean()
"""
SUM = "dist.all_reduce(value)\n"
BLOCKS: dict[str, set[str]] = {
    SUM + "if mean is None:\n    mean = value": {"mean"},
    SUM + "value = value / 2\nif self.mean is None:\n    self.mean = value.item()": {"self.mean"},
    SUM + "mean = value if mean is None else mean": {"mean"},
    SUM + "mean = mean or value.item()": {"mean"},
    SUM + "if 'mean' not in kept:\n    kept['mean'] = value": {'kept["mean"]'},
    SUM + "if not ready:\n    mean = value\n    ready = True": {"mean"},
    SUM + "if ready:\n    pass\nelse:\n    mean, ready = value, True": {"mean", "ready"},
    "torch.distributed.all_gather(parts, value)\nif mean is None:\n    mean = sum(parts)": {"mean"},
    "value = funcol.all_reduce(value, 'sum', group)\nif mean is None:\n    mean = value": {"mean"},
    "if mean is None:\n    mean = broadcast(value)": {"mean"},
    SUM + "if mean is not None:\n    continue\nmean = value": {"mean"},
    "work = dist.all_reduce(value, async_op=True)\nwork.wait()\nif mean is None:\n    mean = value": {"mean"},
    "if mean is None:\n    mean = dist.all_reduce(value, async_op=True)": set(),  # a handle
    "if mean is None:\n    mean = all_reduce(value, async_op=False)": {"mean"},
    "torch.distributed.all_gather(parts, value)\nif mean is None:\n    mean = value": set(),  # its own part
    "if mean is None:\n    mean = value\n" + SUM: set(),
    SUM + "value = y.std()\nif mean is None:\n    mean = value": set(),
    SUM + "mean = value": set(),
    SUM + "if step.number == 0:\n    mean = value": set(),
    SUM + "if mean is None:\n    mean = build(step)": set(),
    SUM
    + "seen += 1\nif seen % 8 == 0:\n    mean, seen = value, 0": set(),  # runs of the block differ in the count
    SUM + "if kept:\n    kept.mean = y\nkept.mean = value": set(),
    SUM + "def later():\n    if mean is None:\n        mean = value": set(),
}


def found(tmp_path: Path, text: str, *, summed: bool = True) -> set[str]:
    """Return what is found for the line with ``optimizer.step()``. ``summed``: from a collective."""
    (file := tmp_path / f"train{len([*tmp_path.iterdir()])}.py").write_text(text)  # trees of files are kept
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "optimizer.step()" in code)
    return {name for name, kind in set_once(((str(file), line),)).items() if kind >= summed}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_variable_that_keeps_what_a_collective_has_returned(tmp_path: Path, block: str) -> None:
    lines = (*block.splitlines(), "loss(x, y, mean).backward()", "optimizer.step()")
    assert found(tmp_path, HEAD + "".join(f"        {line}\n" for line in lines)) == BLOCKS[block]


def test_code_outside_of_a_block_and_a_script_without_a_block_have_none(tmp_path: Path) -> None:
    code = "dist.all_reduce(value)\n    if mean is None:\n        mean = value"
    assert found(tmp_path, HEAD.replace("before(step)", code) + "        optimizer.step()\n") == set()
    assert found(tmp_path, f"for step in steps:\n    {code}\n    optimizer.step()\n") == set()
    assert found(tmp_path, "optimizer.step()\n") == set()


ONCE = "if mean is None:\n            mean = value\n        optimizer.step()\n"


def test_a_variable_that_no_other_code_of_the_loop_sets(tmp_path: Path) -> None:
    assert found(tmp_path, f"{HEAD}        {ONCE}", summed=False) == {"mean"}
    assert (
        found(
            tmp_path, f"{HEAD}        {ONCE}    if step.last_in_epoch:\n        mean = None\n", summed=False
        )
        == set()
    )
