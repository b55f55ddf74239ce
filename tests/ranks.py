"""Ranks of a torch script without a launcher of Holdfast: forks of one process that has imported torch.

``python -m tests.ranks WORLD (SCRIPT | -m MODULE) ARGUMENT...`` does what torchrun does, but imports torch once and not
in every rank. The process groups are torch's own.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.runtime.agent.zygote import preload
from holdfast.runtime.node.spawn import free_port

ROOT = Path(__file__).resolve().parents[1]
BOUND_S = 100.0


def statuses(world: int, *command: str, env: Mapping[str, str] | None = None) -> list[int]:
    """Return the exit status of each rank in order: a code, or minus a signal. Each rank has one torch thread."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks", str(world), *command], cwd=ROOT, timeout=BOUND_S,
        env={**(os.environ if env is None else env), "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: list[int] = json.loads(done.stdout.splitlines()[-1])
    if any(found):
        sys.stderr.write(done.stderr)  # pytest shows this when the test fails
    return found


def be(rank: int, world: int, port: int, command: list[str]) -> None:
    """Run the script as one rank, in the forked process."""
    told = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    os.environ |= {name: str(value) for name, value in told.items()}
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
    os._exit(0)


def main(world: int, command: list[str]) -> None:
    """Fork the ranks, and print how each ended when all have ended."""
    preloaded = preload("torch", ())
    assert preloaded.threads == 1 and not preloaded.missing, preloaded
    port = free_port()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            be(rank, world, port, command)
        pids.append(pid)
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
