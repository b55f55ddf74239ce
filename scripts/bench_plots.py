"""Draw ``bench/history.csv`` as one SVG file: each figure that was measured more than once, its runs in their order.

``make bench-plots`` writes ``bench/history.svg``; ``tests/test_history.py`` compares the two.
Lines of 150 pixels need no plotting library.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

HISTORY = Path(__file__).resolve().parent.parent / "bench" / "history.csv"
PICTURE = HISTORY.with_suffix(".svg")
COLUMNS = ("date", "claim", "series", "n", "min", "value", "p90", "max", "unit", "commit", "command", "note")
RUNS_MIN = 2
ROW = 22
LABEL_WIDTH = 620
LINE_WIDTH = 150
WIDTH = 1010
STYLE = (
    "text{font:12px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328}"
    ".claim{font-weight:bold}polyline{fill:none;stroke:#0969da;stroke-width:1.5}"
)


class Figure(NamedTuple):
    """One figure over time. values: medians (or counts) of its runs, oldest first."""

    claim: str
    series: str
    unit: str
    values: list[float]


def rows(path: Path = HISTORY) -> list[dict[str, str]]:
    """Records of the history, as text by column."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def figures(records: list[dict[str, str]]) -> list[Figure]:
    """Figures with at least ``RUNS_MIN`` values, in the order of the file."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for record in sorted(records, key=lambda each: each["date"]):
        if record["value"]:
            key = (record["claim"], record["series"], record["unit"])
            found.setdefault(key, []).append(float(record["value"]))
    return [Figure(*key, values) for key, values in sorted(found.items()) if len(values) >= RUNS_MIN]


def points(values: list[float], left: int, top: int) -> str:
    """Corner points of a line: the first run at the left, zero at the bottom of the row."""
    high = max(values) or 1.0
    step = LINE_WIDTH / (len(values) - 1)
    height = ROW - 8
    return " ".join(
        f"{left + i * step:.1f},{top + 4 + height * (1 - v / high):.1f}" for i, v in enumerate(values)
    )


def svg_of(records: list[dict[str, str]]) -> str:
    """The SVG document of a history."""
    body: list[str] = []
    top, claim = 10, ""
    for figure in figures(records):
        if figure.claim != claim:
            claim = figure.claim
            body.append(f'<text class="claim" x="10" y="{top + 15}">{escape(claim)}</text>')
            top += ROW
        shown = f"{figure.values[0]:g} to {figure.values[-1]:g} {figure.unit}".rstrip()
        body += [
            f'<text x="20" y="{top + 15}">{escape(figure.series)}</text>',
            f'<polyline points="{points(figure.values, LABEL_WIDTH, top)}"/>',
            f'<text x="{LABEL_WIDTH + LINE_WIDTH + 20}" y="{top + 15}">{escape(shown)}</text>',
        ]
        top += ROW
    size = f'width="{WIDTH}" height="{top + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 10}" {size}>'
    ground = f'<rect {size} fill="#fff"/>'
    return "\n".join([head, f"<style>{STYLE}</style>", ground, *body, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(svg_of(rows()))
