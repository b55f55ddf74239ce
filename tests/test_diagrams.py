"""The diagrams of the documents equal those that their text sources give."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from scripts.diagrams import FOLDER, svg_of

SOURCES = sorted(FOLDER.glob("*.txt"))
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_each_svg_is_drawn_from_its_source(source: Path) -> None:
    drawn = source.with_suffix(".svg").read_text()
    assert drawn == svg_of(source.read_text()), "python scripts/diagrams.py"
    ElementTree.fromstring(drawn)


def test_each_diagram_has_a_source_and_is_shown_in_a_document() -> None:
    assert SOURCES
    assert {path.stem for path in FOLDER.glob("*.svg")} == {path.stem for path in SOURCES}
    shown = (ROOT / "README.md").read_text() + (ROOT / "ARCHITECTURE.md").read_text()
    assert all(f"docs/diagrams/{source.stem}.svg" in shown for source in SOURCES)


def test_hyphens_and_bars_of_a_label_are_no_lines() -> None:
    svg = svg_of("kill -9 | key-value\n")
    assert ">kill -9 | key-value<" in svg
    assert '<path d=""/>' in svg


def test_an_arrow_ends_in_a_head() -> None:
    svg = svg_of("a +-->| b\n  |   |\n  v   +\n")
    assert svg.count("<polygon") == 2
    assert [each in svg for each in (">a<", ">b<")] == [True, True]
