"""Ranks of a torch script without a launcher of Holdfast: forks of one process that has imported torch.

:func:`statuses` does what torchrun does. The import of torch takes 4 s of processor time, so one server per process of
pytest imports it once and forks the ranks of each call. The process groups are torch's own.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.runtime.agent.zygote import preload
from holdfast.runtime.node.spawn import free_port

ROOT = Path(__file__).resolve().parents[1]
BOUND_S = 100.0
_servers: list[subprocess.Popen[str]] = []  # at most one


def statuses(world: int, *command: str, env: Mapping[str, str] | None = None) -> list[int]:
    """Run ``SCRIPT ARGUMENT...`` or ``-m MODULE ARGUMENT...`` as ``world`` ranks with one torch thread each.

    Args:
        env: the whole environment of the ranks; by default that of this process.

    Returns: the exit status of each rank in order: a code, or minus a signal; -9 after 100 s.
    """
    environment = {**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}
    with tempfile.NamedTemporaryFile("r", errors="replace") as output:
        request = {"world": world, "command": command, "env": environment, "output": output.name}
        found: list[int] = _ask(request)
        if any(found):
            sys.stderr.write(output.read())  # pytest shows this when the test fails
    return found


def _ask(request: dict[str, Any]) -> list[int]:
    if not _servers:
        command = [sys.executable, "-m", "tests.ranks"]
        pipe, one_thread = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}
        _servers.append(
            subprocess.Popen(command, cwd=ROOT, env=one_thread, stdin=pipe, stdout=pipe, text=True)
        )
    server = _servers[0]
    assert server.stdin is not None and server.stdout is not None
    try:
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        found: list[int] = json.loads(server.stdout.readline())
    except BaseException:  # the time limit of the test: the next answer would belong to this request
        server.kill()
        _close()
        raise
    return found


@atexit.register
def _close() -> None:
    """End the server, if there is one."""
    for server in _servers:
        server.communicate()
    _servers.clear()


def be(rank: int, world: int, port: int, request: dict[str, Any]) -> None:
    """Run the script as one rank, in the forked process."""
    with open(request["output"], "a") as output, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ.clear()
    os.environ |= {**request["env"], **{name: str(value) for name, value in told.items()}}
    random.seed()
    command = request["command"]
    try:
        if command[0] == "-m":
            sys.argv = command[1:]
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = command
            sys.path[0] = os.path.dirname(command[0])
            runpy.run_path(command[0], run_name="__main__")
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(3)
    sys.stdout.flush()
    os._exit(0)


def _run(request: dict[str, Any]) -> list[int]:
    """Fork the ranks and return how each ended. Kill those that still run at the end of the time limit."""
    port = free_port()
    pids: dict[int, int] = {}  # by pidfd
    for rank in range(request["world"]):
        pid = os.fork()
        if pid == 0:
            be(rank, request["world"], port, request)
        pids[os.pidfd_open(pid)] = pid
    poller = select.poll()
    for fd in pids:
        poller.register(fd, select.POLLIN)
    ended: dict[int, int] = {}
    deadline_s = time.monotonic() + BOUND_S
    while len(ended) < len(pids):
        ready = [fd for fd, _ in poller.poll(1000 * max(0.0, deadline_s - time.monotonic()))]
        if not ready:
            ready = [fd for fd in pids if fd not in ended]
            for fd in ready:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        for fd in ready:
            poller.unregister(fd)
            ended[fd] = os.waitstatus_to_exitcode(os.waitpid(pids[fd], 0)[1])
            os.close(fd)
    return [ended[fd] for fd in pids]


def main() -> None:
    """Serve one request per line of stdin until stdin ends."""
    preloaded = preload("torch", ())
    assert preloaded.threads == 1 and not preloaded.missing, preloaded
    for line in sys.stdin:
        print(json.dumps(_run(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
