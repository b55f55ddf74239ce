"""The examples stay what they promise: short, and a few lines away from a script that knows nothing of Holdfast."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LINES_MAX = 80
ADDED_MAX = 5
INTEGRATION_LINES_MAX = 150
MARK = "# + Holdfast"


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_adds_little(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) < LINES_MAX
    added = [line for line in lines if MARK in line]
    assert 1 <= len(added) <= ADDED_MAX, f"{path.name} adds {len(added)} lines"
    unmarked = [line for line in lines[1:] if "holdfast" in line and MARK not in line and not is_prose(line)]
    assert not unmarked, f"{path.name}: lines that Holdfast adds end with {MARK!r}: {unmarked}"


def is_prose(line: str) -> bool:
    """A line of the docstring that says how to start the example."""
    return line.startswith("    ") and any(
        word in line for word in ("holdfast run", "pip install", "holdfast drill")
    )


@pytest.mark.parametrize("name", ["hf", "lightning"])
def test_integration_is_short(name: str) -> None:
    path = ROOT / "src" / "holdfast" / "integrations" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= INTEGRATION_LINES_MAX
