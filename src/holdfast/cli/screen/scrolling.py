"""Display of a changing text that is longer than the terminal, with keys to scroll."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import time
import tty
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

KEY = re.compile(rb"\x1b[\[O][0-9]*[A-Za-z~]|.", re.DOTALL)
LINE = {"A": -1, "B": 1, "k": -1, "j": 1}
PAGE = {"5~": -1, "6~": 1, "b": -1, " ": 1}
FIRST, LAST, QUIT = ("H", "1~", "g"), ("F", "4~", "G"), "q"


class Scroller:
    """A window on a long text, with keys to scroll. Use it as a context manager.

    Keys are read only if stdin is a terminal and this process is in its foreground.
    """

    def __init__(self, console: Console) -> None:
        self.quit = False
        self._console = console
        self._top = 0
        self._lines = 0
        self._input: int | None = None
        self._before: list[Any] = []

    def __enter__(self) -> Scroller:
        try:
            fd = sys.stdin.fileno()
            if (
                os.tcgetpgrp(fd) != os.getpgrp()
            ):  # in the background a process that touches its terminal is stopped
                return self
            self._before = termios.tcgetattr(fd)
        except (OSError, ValueError, termios.error):  # no terminal
            return self
        signal.signal(signal.SIGTERM, _leave)
        tty.setcbreak(fd)
        self._input = fd
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._before)

    @property
    def _page(self) -> int:
        """The number of text lines of the window. The last line of the screen shows the position."""
        return max(self._console.height - 1, 1)

    def window(self, whole: RenderableType) -> RenderableType:
        """Return the visible part of ``whole``, a text for rich. If the whole text fits, return it unchanged."""
        lines = self._console.render_lines(whole, pad=False)
        self._lines = len(lines)
        self._move(0)
        if self._lines <= self._console.height:
            return whole
        end = self._top + self._page
        shown = [part for line in lines[self._top : end] for part in (*line, Segment.line())]
        keys = "; arrows, page up, page down; q: leave" if self._input is not None else ""
        place = f"lines {self._top + 1} to {min(end, self._lines)} of {self._lines}{keys}"
        return Group(Segments(shown), Text(place, style="dim reverse", no_wrap=True, overflow="ellipsis"))

    def wait(self, until_s: float) -> bool:
        """Wait for a key and scroll by it. Return False if no key was pressed by ``until_s`` (monotonic clock)."""
        left_s = max(until_s - time.monotonic(), 0.0)
        if self._input is None:
            time.sleep(left_s)
            return False
        if not select.select([self._input], [], [], left_s)[0]:
            return False
        keys = os.read(self._input, 1024)
        if not keys:  # the terminal is gone
            self._input = None
        for key in KEY.findall(keys):
            self._press(key.decode(errors="replace").removeprefix("\x1b").lstrip("[O"))
        return bool(keys)

    def _press(self, key: str) -> None:
        if key == QUIT:
            self.quit = True
        elif key in FIRST:
            self._top = 0
        elif key in LAST:
            self._move(self._lines)
        else:
            self._move(LINE.get(key, 0) + PAGE.get(key, 0) * self._page)

    def _move(self, lines: int) -> None:
        last = self._lines - self._page if self._lines > self._console.height else 0
        self._top = min(max(self._top + lines, 0), last)


def _leave(number: int, _frame: object) -> NoReturn:
    """Exit through ``SystemExit`` after a signal, so that ``__exit__`` restores the terminal."""
    sys.exit(128 + number)
