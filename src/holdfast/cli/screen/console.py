"""What ``holdfast run`` shows: the output of ranks on stdout, its own words on stderr, one status line.

On a terminal the status line stays at the bottom; elsewhere it is a plain line every ``PLAIN_PERIOD_S`` seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holdfast.cli.screen.escaping import coloured, echo, echo_line, shown

PLAIN_PERIOD_S = 30.0
UNWRAPPED_WIDTH = 100_000  # columns of a pipe or a file
ROWS_FOLDED_MAX = 1000
INDENT, INDENT_MAX = 4, 8  # columns
WRAPPED_LEAST = 20
NAME = "holdfast: "


def clock(at: float | None = None) -> str:
    """Unix time ``at``, by default now, as the time of day here: ``21:52:45``."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def dated(text: str) -> str:
    """A console line of a run: its name and the time of day before it."""
    return f"{NAME}{clock()} {text}"


def marked(rank: int, line: str) -> str:
    """A line of a rank with its number, once: torch puts it before the lines of a traceback, too."""
    return f"[rank {rank}] {line.removeprefix(f'[rank{rank}]: ')}"


class SafeConsole(Console):
    """As rich's, without highlighting; what is printed cannot drive the terminal, but styles and the status line do."""

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, width_columns: int | None = None
    ) -> None:
        super().__init__(highlight=False, stderr=stderr, soft_wrap=soft_wrap, width=width_columns)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """As rich's."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


class Hanging:
    """Lines that are broken between words, and go on below their second word: an id or a path stays whole to copy."""

    def __init__(self, text: Text) -> None:
        self._text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        plain = self._text.plain
        indent = len(plain) - len(plain.lstrip())
        first = plain[indent:].partition(" ")[0]
        below = indent + len(first) + 1 if len(first) < INDENT_MAX else INDENT
        lines = self._text.wrap(console, max(options.max_width - below, WRAPPED_LEAST), overflow="fold")
        for number, line in enumerate(lines):
            if number:
                line.pad_left(below)
            line.rstrip()
            yield line


def table_console() -> SafeConsole:
    """For tables and long lines on stdout: nothing is wrapped but on a terminal."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width_columns=UNWRAPPED_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. On a terminal a wide cell is folded, but not in thousands of rows: that takes seconds."""
    console = table_console()
    rows = [tuple(map(shown, row)) for row in rows]
    if console.is_terminal and len(rows) <= ROWS_FOLDED_MAX:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name, overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    lines = (columns, *rows)
    widths = [max(map(cell_len, cells)) for cells in zip(*lines, strict=True)]
    padded = (
        [f"{cell}{' ' * (width - cell_len(cell))}" for cell, width in zip(line, widths, strict=True)]
        for line in lines
    )
    echo("\n".join("  ".join(cells).rstrip() for cells in padded))


class Screen:
    """The console of one run. Use it as a context manager: the status line needs to be taken down."""

    def __init__(self, *, marked: bool, prefix: Callable[[int], str] | None = None) -> None:
        """Args:
        marked: each line of a rank carries the rank.
        prefix: what stands before the lines of a rank instead.
        """
        self._marked = marked
        self._prefix = prefix
        self._live: Live | None = None
        self._console: SafeConsole | None = None
        self._said_at_s = time.monotonic()

    def __enter__(self) -> Screen:
        if sys.stdout.isatty() and sys.stderr.isatty():
            self._console = SafeConsole(soft_wrap=True)
            self._live = Live(console=self._console, auto_refresh=False, transient=True,
                              redirect_stdout=False, redirect_stderr=False)  # fmt: skip
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def rank(self, rank: int, line: str, *, always_marked: bool = False) -> None:
        """A line that a rank printed."""
        if self._prefix is not None:
            text = f"{self._prefix(rank)}{line}"
        else:
            text = marked(rank, line) if self._marked or always_marked else line
        if self._live is not None and self._console is not None:
            self._console.print(Text.from_ansi(coloured(text)))
        else:
            echo_line(text)

    def say(self, text: str) -> None:
        """A line of our own."""
        if self._live is not None and self._console is not None:
            self._console.print(Text.assemble((dated(""), "dim"), text))
        else:
            echo(dated(text), err=True)

    def status(self, text: str) -> None:
        """Replace the status line; elsewhere than on a terminal print it when it is due."""
        now_s = time.monotonic()
        if self._live is not None:
            self._live.update(Text(text, style="bold", overflow="ellipsis", no_wrap=True), refresh=True)
        elif now_s - self._said_at_s >= PLAIN_PERIOD_S:
            self._said_at_s = now_s
            self.say(text)
