"""The console of ``holdfast run``: output of ranks on stdout, messages of Holdfast on stderr, one status line.

On a terminal the status line stays at the bottom. In a pipe or file it is printed every ``PLAIN_PERIOD_S`` seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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
UPDATED_ROWS_MAX = 4
NAME = "holdfast: "


def clock(at: float | None = None) -> str:
    """Return Unix time ``at`` (None means now) as the local time of day: ``21:52:45``."""
    return time.strftime("%H:%M:%S", time.localtime(at))


def dated(text: str) -> str:
    """Return ``text`` with the name of Holdfast and the time of day before it: ``holdfast: 21:52:45 ...``."""
    return f"{NAME}{clock()} {text}"


def marked(rank: int, line: str) -> str:
    """Return a line of a rank with ``[rank N]`` before it. A ``[rankN]:`` that torch has printed is removed."""
    return f"[rank {rank}] {line.removeprefix(f'[rank{rank}]: ')}"


class SafeConsole(Console):
    """A rich console without highlighting, in which control characters of printed text are escaped."""

    def __init__(
        self, *, stderr: bool = False, soft_wrap: bool = False, width_columns: int | None = None
    ) -> None:
        super().__init__(highlight=False, stderr=stderr, soft_wrap=soft_wrap, width=width_columns)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield rich's segments of an object, with control characters of the text escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=shown(segment.text))


class Hanging:
    """A text that rich wraps between words, with later lines indented below the second word of the first line.

    An id or path is not broken.
    """

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
    """Return a console for tables and long lines on stdout. It wraps lines only on a terminal."""
    console = SafeConsole()
    return console if console.is_terminal else SafeConsole(width_columns=UNWRAPPED_WIDTH)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout.

    On a terminal wide cells are folded, except in a table of more than ``ROWS_FOLDED_MAX`` rows (folding is slow).
    """
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
    """The console of one run. Use it as a context manager, so that the status line is removed at the end."""

    def __init__(self, *, marked: bool, prefix: Callable[[int], str] | None = None) -> None:
        """Make the console of one run.

        Args:
            marked: True if ``[rank N]`` is printed before each line of a rank.
            prefix: returns the text to print before each line of a rank, in place of ``[rank N]``.
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
        """Print a line of a rank's output. If ``always_marked``, print ``[rank N]`` before it in any case."""
        text = self._of_rank(rank, line, always_marked=always_marked)
        if self._live is not None and self._console is not None:
            self._console.print(Text.from_ansi(coloured(text)))
        else:
            echo_line(text)

    def _of_rank(self, rank: int, line: str, *, always_marked: bool = False) -> str:
        if self._prefix is not None:
            return f"{self._prefix(rank)}{line}"
        return marked(rank, line) if self._marked or always_marked else line

    def say(self, text: str) -> None:
        """Print one message of Holdfast, with the time of day."""
        if self._live is not None and self._console is not None:
            self._console.print(Text.assemble((dated(""), "dim"), text))
        else:
            echo(dated(text), err=True)

    def status(self, text: str, updated: Sequence[tuple[int, str]] = ()) -> None:
        """Replace the status line. Without a terminal, print it once per ``PLAIN_PERIOD_S`` seconds.

        Args:
            text: the status of the run.
            updated: (rank, newest text) of each unfinished line that a rank overwrites, such as a progress bar. On a
                terminal, the first ``UPDATED_ROWS_MAX`` are shown above the status line.
        """
        now_s = time.monotonic()
        if self._live is not None:
            bars = [Text.from_ansi(coloured(self._of_rank(*bar))) for bar in updated[:UPDATED_ROWS_MAX]]
            rows = [*bars, Text(text, style="bold")]
            for row in rows:
                row.overflow, row.no_wrap = "ellipsis", True
            self._live.update(Group(*rows), refresh=True)
        elif now_s - self._said_at_s >= PLAIN_PERIOD_S:
            self._said_at_s = now_s
            self.say(text)
