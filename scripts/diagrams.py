"""Draw the text diagrams of ``docs/diagrams/*.txt`` as SVG files beside them.

``python scripts/diagrams.py`` writes the files; ``tests/test_diagrams.py`` compares them with their sources.

The text is the picture: ``-`` and ``|`` are lines, ``+`` joins them, ``< > ^ v`` at the end of a line are arrowheads,
and all other characters are labels. Why a script: the known text-to-SVG tools need another language's runtime or are
unmaintained, and 100 lines without a dependency give the same bytes on every machine.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "diagrams"
CELL_WIDTH = 8
CELL_HEIGHT = 17
HEAD = 6
HORIZONTAL = "-+<>"
VERTICAL = "|+^v"
STYLE = (
    "text{font:13px ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;fill:#1f2328;white-space:pre}"
    "path{stroke:#57606a;stroke-width:1.3;fill:none}"
    "polygon{fill:#57606a}"
)


class Grid:
    """Characters of a diagram by row and column; a space outside of it.

    Example:
        >>> Grid("+->")[0, 1]
        '-'
    """

    def __init__(self, text: str) -> None:
        self.rows = text.rstrip("\n").split("\n")
        self.width = max(len(row) for row in self.rows)

    def __getitem__(self, place: tuple[int, int]) -> str:
        row, column = place
        inside = 0 <= row < len(self.rows) and 0 <= column < len(self.rows[row])
        return self.rows[row][column] if inside else " "

    def is_line(self, row: int, column: int) -> bool:
        """True where the character is a part of a line, and not of a label."""
        mark = self[row, column]
        beside = self[row, column - 1], self[row, column + 1]
        above, below = self[row - 1, column], self[row + 1, column]
        match mark:
            case "-":
                return any(each in HORIZONTAL for each in beside) or beside == ("|", "|")
            case "|":
                return above in VERTICAL or below in VERTICAL
            case "+":
                return any(each in HORIZONTAL for each in beside) or above in VERTICAL or below in VERTICAL
            case "<":
                return beside[1] == "-"
            case ">":
                return beside[0] == "-"
            case "^":
                return below in "|+"
            case "v":
                return above in "|+" and beside == (" ", " ")
        return False


def lines_of(grid: Grid) -> list[str]:
    """SVG elements of all lines and arrowheads, row by row."""
    paths: list[str] = []
    heads: list[str] = []
    for row in range(len(grid.rows)):
        for column in range(grid.width):
            if not grid.is_line(row, column):
                continue
            mark = grid[row, column]
            x, y = column * CELL_WIDTH, row * CELL_HEIGHT
            middle_x, middle_y = x + CELL_WIDTH // 2, y + CELL_HEIGHT // 2
            ends = {
                "left": (x, middle_y),
                "right": (x + CELL_WIDTH, middle_y),
                "up": (middle_x, y),
                "down": (middle_x, y + CELL_HEIGHT),
            }
            sides = _sides(grid, row, column)
            paths += [f"M{middle_x} {middle_y}L{ends[side][0]} {ends[side][1]}" for side in sides]
            if mark in "<>^v":
                heads.append(f'<polygon points="{_head(mark, middle_x, middle_y)}"/>')
    return [f'<path d="{"".join(paths)}"/>', *heads]


def _sides(grid: Grid, row: int, column: int) -> list[str]:
    """Sides of a cell to which its line runs from the middle."""
    around = {
        "left": (row, column - 1, "-+<"),
        "right": (row, column + 1, "-+>"),
        "up": (row - 1, column, "|+^"),
        "down": (row + 1, column, "|+v"),
    }
    fixed = {
        "-": ["left", "right"],
        "|": ["up", "down"],
        "<": ["right"],
        ">": ["left"],
        "^": ["down"],
        "v": ["up"],
    }
    mark = grid[row, column]
    if mark != "+":
        sides = list(fixed[mark])
        if mark == "|":  # a lifeline or the side of a box: a horizontal line that ends beside it touches it
            ends = (("left", column - 1), ("right", column + 1))
            sides += [side for side, end in ends if grid[row, end] == "-" and grid.is_line(row, end)]
        return sides
    return [s for s, (r, c, marks) in around.items() if grid[r, c] in marks and grid.is_line(r, c)]


def _head(mark: str, x: int, y: int) -> str:
    """Corner points of an arrowhead that points to the edge of its cell."""
    half_x, half_y = CELL_WIDTH // 2, CELL_HEIGHT // 2
    points = {
        ">": [(x + half_x, y), (x - HEAD + 2, y - HEAD + 2), (x - HEAD + 2, y + HEAD - 2)],
        "<": [(x - half_x, y), (x + HEAD - 2, y - HEAD + 2), (x + HEAD - 2, y + HEAD - 2)],
        "^": [(x, y - half_y), (x - HEAD + 2, y), (x + HEAD - 2, y)],
        "v": [(x, y + half_y), (x - HEAD + 2, y), (x + HEAD - 2, y)],
    }
    return " ".join(f"{px},{py}" for px, py in points[mark])


def labels_of(grid: Grid) -> list[str]:
    """SVG elements of all labels: words with single spaces between them are one label."""
    labels = []
    for row, text in enumerate(grid.rows):
        bare = "".join(" " if grid.is_line(row, column) else mark for column, mark in enumerate(text))
        for found in re.finditer(r"\S+(?: \S+)*", bare):
            x, y = found.start() * CELL_WIDTH, row * CELL_HEIGHT + 13
            length = len(found.group()) * CELL_WIDTH
            labels.append(f'<text x="{x}" y="{y}" textLength="{length}">{escape(found.group())}</text>')
    return labels


def svg_of(text: str) -> str:
    """The SVG document of a text diagram.

    Example:
        >>> svg_of("a --> b").startswith("<svg")
        True
    """
    grid = Grid(text)
    width, height = (grid.width + 1) * CELL_WIDTH, len(grid.rows) * CELL_HEIGHT + CELL_HEIGHT // 2
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    ground = f'<rect width="{width}" height="{height}" rx="6" fill="#fff"/>'
    body = [head, f"<style>{STYLE}</style>", ground, *lines_of(grid), *labels_of(grid), "</svg>"]
    return "\n".join(body) + "\n"


def main() -> None:
    """Write the SVG file of each source."""
    for source in sorted(FOLDER.glob("*.txt")):
        source.with_suffix(".svg").write_text(svg_of(source.read_text()))


if __name__ == "__main__":
    main()
