"""docs/parity.md cannot drift: each of the 238 rows is there once, and each proof that it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROWS = {"L": 54, "P": 29, "C": 33, "R": 14, "T": 38, "G": 16, "F": 20, "W": 4, "A": 13, "I": 17}
STATES = {"works", "replaced", "not applicable", "not yet"}
PROOF = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """Cells of every row: id, capability, state, text."""
    lines = (ROOT / "docs" / "parity.md").read_text().splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if re.match(r"\| [A-Z]\d\d ", line)
    ]


@cache
def names_in(path: str) -> set[str]:
    """Names of the test functions of a file."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name[:5] == "test_"
    }


def test_every_capability_has_one_row() -> None:
    wanted = [f"{letter}{number:02}" for letter, count in ROWS.items() for number in range(1, count + 1)]
    assert len(wanted) == 238
    assert [row[0] for row in rows()] == wanted
    assert all(len(row) == 4 and row[2] in STATES for row in rows())


def test_every_row_is_backed() -> None:
    faults = []
    for name, capability, state, text in rows():
        proofs = PROOF.findall(text)
        faults += [f"{name}: no {path}::{test}" for path, test in proofs if test not in names_in(path)]
        if not capability or not text or (state == "works" and not proofs):
            faults.append(f"{name}: {state}, without a proof or a reason")
    assert not faults


def test_the_totals_are_right() -> None:
    text = (ROOT / "docs" / "parity.md").read_text()
    said = re.search(
        r"(\d+) work, (\d+) are replaced, (\d+) are not applicable, (\d+) (?:is|are) not there yet", text
    )
    assert said is not None
    order = ("works", "replaced", "not applicable", "not yet")
    assert [int(n) for n in said.groups()] == [sum(row[2] == state for row in rows()) for state in order]
