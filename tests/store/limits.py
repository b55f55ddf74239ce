"""What the machine refuses to a test, really; and a process that is halted at the worst moment."""

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
    """No thread can be started: no address space is left for a stack as large as all of it."""
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
        """Have it end: exit code, and what it wrote to stderr."""
        _, errors = self._process.communicate("\n", timeout=60)
        return self._process.returncode, errors


@contextlib.contextmanager
def halting(script: str, *arguments: object) -> Iterator[Halted]:
    """Run ``script`` with ``sys.argv[1:]`` until it publishes."""
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _HALT + script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "halted\n"
            yield Halted(process)
        finally:
            process.kill()


def descriptors() -> dict[str, str]:
    """What this process has open, by number: other tests' leftovers may be collected, and closed, at any time."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[name] = str(Path("/proc/self/fd", name).readlink())
    return found
