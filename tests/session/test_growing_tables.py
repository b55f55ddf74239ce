"""Tables that a script makes larger for a longer batch.

Regression: a replacement with a smaller table than the lost rank ended the run, although its results were right. A
table in a buffer outside of the ``state_dict`` ended it after each loss of a rank. Scripts without any fault got a
warning about their tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.session.variables.growing_tables import agree, growing_tables, in_message
from tests.session.launch import run_job, run_undisturbed_and_killed
from tests.session.test_deciding_variables import HEAD

JOB = str(Path(__file__).with_name("lengths_job.py"))

USED = "loss = x * table[:n]\nloss.backward()\noptimizer.step()"
"""A use of a part of the table in an update."""

GROWN: dict[str, tuple[Mapping[str, set[int]], set[str]]] = {
    f"if n > size:\n    size = n\n    table = make(n)\n{USED}": ({"table": {0}}, {"size"}),
    f"if table is None or len(table) < n:\n    table = make(n).to(x.dtype)\n{USED}": ({"table": {0}}, set()),
    (
        "if n > size or table.dtype != x.dtype:\n"
        "    size = n\n"
        "    table = make(n)\n"
        "    table = table.to(x.dtype)\n"
        "loss = x * table[None, :n] + mask.to(x)[:n, :n]\n"
        "if mask.shape[0] < n:\n"
        "    mask = make(n, n)\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ({"table": {0}, "mask": {0, 1}}, {"size"}),
    (
        "if n > len(table):\n"
        "    table = make(n)\n"
        "loss = x * table.index_select(0, places) + F.embedding(places, table)\n"
        "loss.backward()\n"
        "optimizer.step()"
    ): ({"table": {0}}, set()),
    # The table is read as a whole, or from its end, or changed elsewhere, or by its old content.
    f"if n > size:\n    size = n\n    table = make(n)\nx = x + table.sum()\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\nx = x + table[-1]\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\nx = x + table[0]\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\ntable[:n] += x\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\ntable[:n].copy_(x)\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\nif loss > 3:\n    table = make(n)\n{USED}": (
        {},
        set(),
    ),
    f"if n > size:\n    size = n\n    table = cat([table, x])\n{USED}": ({}, set()),
    # The size, or its condition, decides about more than the table.
    f"if n > size:\n    size = n\n    table = make(n)\nx = x / size\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\n    x = x / n\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\n    optimizer.step()\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\n    dist.all_reduce(x)\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\n    continue\n{USED}": ({}, set()),
    f"if n > size:\n    size = n\n    table = make(n)\nif size > 9:\n    x = 2 * x\n{USED}": ({}, set()),
}


@pytest.mark.parametrize("code", GROWN)
def test_tables_that_a_loop_only_makes_larger(tmp_path: Path, code: str) -> None:
    text = HEAD + "".join(f"            {line}\n" for line in code.splitlines())
    (file := tmp_path / "train.py").write_text(text)
    line = next(n for n, code in enumerate(text.splitlines(), 1) if "optimizer.step()" in code)
    tables, sizes = GROWN[code]
    found = growing_tables(((str(file), line),))
    assert ({name: set(each) for name, each in found.tables.items()}, set(found.sizes)) == (tables, sizes)


def test_tables_agree_by_the_parts_that_both_have() -> None:
    short, long, other = (
        f"a table with first parts {parts}" for parts in ("1:0000000a", "1:0000000a 2:0000000b", "1:0000000c")
    )
    assert agree(short, long) and agree(long, short) and not agree(other, long) and not agree(long, other)
    assert in_message(long) == "a table with checksum 0000000b of the first 2 rows"
    assert in_message(3) == 3 and in_message("None") == "None"


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize(
    "form", ["attributes", "buffers", "sharded", pytest.param("unsynced", marks=pytest.mark.more)]
)
def test_a_replacement_continues_with_a_smaller_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    assert "depend" not in run_undisturbed_and_killed(tmp_path, monkeypatch, "1:5,0:9", JOB, form)


@pytest.mark.torch
@pytest.mark.processes
def test_a_table_whose_entries_depend_on_its_size_is_refused_after_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KILL", "1:5")
    done = run_job(tmp_path, 2, JOB, "stretched")
    assert done.returncode == Exit.BAD_INPUT, done.stdout
    assert "depend on net.tables.table = 'a table with checksum" in done.stdout, done.stdout
