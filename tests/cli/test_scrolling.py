"""``holdfast status --watch`` on a screen that is shorter than its output."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.command import HOLDFAST, clean_environment
from tests.cli.test_status import Made, swept

__all__ = ["swept"]

pytestmark = pytest.mark.usefixtures("swept")

ROWS, COLUMNS, RANKS = 16, 80, 24
DOWN, PAGE_DOWN, HOME = b"\x1b[B", b"\x1b[6~", b"\x1b[H"
BOUND_S = 60.0


def of_a_terminal() -> dict[str, str]:
    """Return an environment that does not fix the size of the terminal."""
    found = clean_environment({"TERM": "xterm"})
    return {name: value for name, value in found.items() if name not in ("LINES", "COLUMNS")}


class Watched:
    """The command at its own terminal, and the text that the terminal received."""

    def __init__(self, where: Path) -> None:
        self.ours, theirs = pty.openpty()
        self.before = termios.tcgetattr(theirs)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.process = subprocess.Popen(
            ["setsid", "--ctty", HOLDFAST, "status", "--watch"], cwd=where,
            env=of_a_terminal(), stdin=theirs, stdout=theirs, stderr=theirs,
        )  # fmt: skip
        self.theirs = theirs
        self.text = ""

    def shows(self, words: str) -> None:
        """Wait for ``words``, and drop the text up to them."""
        end_s = time.monotonic() + BOUND_S
        while words not in self.text:
            assert time.monotonic() < end_s, (words, self.text)
            if select.select([self.ours], [], [], 0.2)[0]:
                self.text += os.read(self.ours, 65536).decode()
        self.text = self.text.split(words, 1)[1]

    def press(self, keys: bytes) -> None:
        """Send keys, as a user does."""
        os.write(self.ours, keys)

    def end(self) -> None:
        """Kill the command if it still runs."""
        self.process.kill()
        self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    run = Made(tmp_path, "alpha-1", workers=RANKS)
    run.start(0, 1)
    run.serve()
    command = Watched(tmp_path)
    try:
        yield command
    finally:
        command.end()
        run.close()


def test_keys_move_what_is_longer_than_the_screen(watched: Watched) -> None:
    watched.shows("lines 1 to 15 of ")
    watched.press(DOWN)
    watched.shows("lines 2 to 16 of ")
    watched.press(PAGE_DOWN)
    watched.shows("next: holdfast logs -f alpha-1")  # the last line
    watched.press(HOME)
    watched.shows("lines 1 to 15 of ")
    watched.press(b"q")
    watched.shows("next: holdfast logs -f alpha-1")  # all lines stay on the screen
    assert watched.process.wait(BOUND_S) == 0
    assert termios.tcgetattr(watched.theirs) == watched.before


def test_the_terminal_is_put_back_after_a_signal(watched: Watched) -> None:
    watched.shows("lines 1 to 15 of ")
    watched.process.send_signal(signal.SIGTERM)
    assert watched.process.wait(BOUND_S) == 128 + signal.SIGTERM
    assert termios.tcgetattr(watched.theirs) == watched.before
