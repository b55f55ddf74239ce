"""Real limits of the machine for a test, and a process that is halted at the worst moment."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """Let every start of a thread fail: no address space is left for a stack of that size."""
    old = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(old)


_HALT = """
import sys
at = ["os.link", "os.rename"]

def halt(event, _arguments):
    if event in at:
        at.clear()
        print("halted", flush=True)
        sys.stdin.readline()

sys.addaudithook(halt)
"""


class Halted:
    """A process that waits just before the first file that it has written appears."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def go_on(self) -> tuple[int, str]:
        """Let the process end. Return its exit code and stderr."""
        _, errors = self._process.communicate("\n", timeout=60)
        return self._process.returncode, errors


@contextlib.contextmanager
def halting(script: str, *arguments: object) -> Iterator[Halted]:
    """Run ``script`` with ``sys.argv[1:]`` until it publishes a file."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _HALT + script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "halted\n"
            yield Halted(process)
        finally:
            process.kill()


def descriptors() -> dict[str, str]:
    """Return the open files of this process by number. Leftovers of other tests may be closed at any time."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = str(Path("/proc/self/fd", name).readlink())
    return found
