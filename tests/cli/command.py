"""The real command, in a subprocess."""

from __future__ import annotations

import errno
import os
import pty
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

HOLDFAST = str(Path(sys.executable).parent / "holdfast")
Run = Callable[..., subprocess.CompletedProcess[str]]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of this process without the variables of another launcher."""
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("PET_", "HOLDFAST_", "SLURM_", "TORCHELASTIC_"))
    }
    return {**kept, "OMP_NUM_THREADS": "1", **(extra or {})}


def on_terminal(*args: str, cwd: Path, env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run ``holdfast`` with all three streams at a terminal. Return its exit code and the terminal's output."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [HOLDFAST, *args], cwd=cwd, env=clean_environment({"TERM": "xterm", **(env or {})}),
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
    )  # fmt: skip
    os.close(theirs)
    shown = b""
    try:
        while data := os.read(ours, 65536):
            shown += data
    except OSError as error:  # no process holds the other end now
        if error.errno != errno.EIO:
            raise
    finally:
        os.close(ours)
    return process.wait(), shown.decode()


def working_in(root: Path) -> dict[int, str]:
    """Return the command line, by pid, of each living process that works in ``root``, except this one."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(entry / "cwd") == str(root) and int(entry.name) != os.getpid():
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # the process has ended, or belongs to another user
    return found
