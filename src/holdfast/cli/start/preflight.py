"""Checks of this host before the first worker starts. Without them each restart would fail in the same way.

A start is refused only if it must fail: if the host lacks room for status pages, processes, or a working interpreter.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from pathlib import Path

from holdfast.core.protocol.status_page import FILE_SIZE_BYTES
from holdfast.errors import UsageError
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import SHARED_MEMORY

OWN_THREADS = 8  # of agent, controller and zygote
WORKER_THREADS = 2  # the main thread and the client thread of a worker
INTERPRETER_TIMEOUT_S = 60.0


def require_start(settings: RunSettings) -> None:
    """Check that the workers of this node can be started at all.

    Raises:
        UsageError: there is no room for their status pages, the user may have no more processes, or the interpreter
            does not work.
    """
    if why := no_room_for_pages(settings.nproc):
        raise UsageError(
            why, hint=f"df -h {SHARED_MEMORY}; in a container: --shm-size; or fewer --nproc-per-node"
        )
    per_worker = 1 if settings.kind == "executable" else WORKER_THREADS
    if why := no_processes_for(settings.nproc, per_worker):
        raise UsageError(why, hint="ulimit -u (a container: --pids-limit), or fewer --nproc-per-node")
    if settings.python and settings.kind != "executable":
        _require_interpreter(settings)


def no_room_for_pages(nproc: int, where: Path = SHARED_MEMORY) -> str:
    """Return why the status pages of ``nproc`` workers have no room in the directory ``where``; empty if there is room.

    Also empty if ``where`` cannot be written, because the pages then go to the run directory.
    """
    if not os.access(where, os.W_OK | os.X_OK):
        return ""
    need, free = nproc * FILE_SIZE_BYTES, shutil.disk_usage(where).free
    if free >= need:
        return ""
    return f"no room for status pages in {where}: {free >> 10} KiB free, {nproc} x {FILE_SIZE_BYTES >> 10} KiB needed"


def no_processes_for(nproc: int, per_worker: int = WORKER_THREADS) -> str:
    """Return why this user cannot start the processes of ``nproc`` workers; empty if the limit allows them.

    ``per_worker`` is the number of threads of one worker.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:  # root is not limited
        return ""
    used, need = threads_of(os.getuid()), OWN_THREADS + nproc * per_worker
    if used + need <= limit:
        return ""
    return f"this user may have {limit} processes and threads, has {used}, and the run takes {need} more at least"


def threads_of(user: int) -> int:
    """Return the number of threads of the user with id ``user`` that ``/proc`` shows."""
    count = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        except OSError:  # the process has ended
            continue
        if int(fields["Uid"].split()[0]) == user:
            count += int(fields.get("Threads", "0"))
    return count


def _require_interpreter(settings: RunSettings) -> None:
    """Check that the interpreter of PYTHON_EXEC can import Holdfast's worker. Raises: UsageError."""
    asks = "; import sys; from holdfast.frame_encryption import missing; sys.exit(missing() or 0)"
    code = "import holdfast.runtime.worker.entry" + (asks if settings.encrypts else "")
    words = [settings.python, "-c", code]
    named = f"PYTHON_EXEC={settings.python}"
    hint = "name an interpreter that has Holdfast installed, or leave PYTHON_EXEC out"
    try:
        done = subprocess.run(
            words,
            cwd=settings.cwd or None,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return  # a slow interpreter is not refused
    except OSError as error:
        raise UsageError(f"{named} cannot be started: {error.strerror}", hint=hint) from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        why = said[-1] if said else f"it ends with code {done.returncode}"
        raise UsageError(f"{named} cannot run a worker: {why}", hint=hint)
