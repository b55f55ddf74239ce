"""Ranks of a torch script as forks of one process that has imported torch: ``ranks.py WORLD SCRIPT ARGUMENT...``."""

from __future__ import annotations

import os
import runpy
import sys

import torch
import torch.distributed

from holdfast.runtime.spawn import free_port


def main(world: int, script: str, arguments: list[str]) -> None:
    """Print the exit status of each rank, in order: a code, or minus a signal."""
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])  # what the first one imports, once for all
    port = free_port()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
                           "MASTER_PORT": str(port)}  # fmt: skip
            sys.argv = [script, *arguments]
            sys.path[0] = os.path.dirname(script)
            try:
                runpy.run_path(script, run_name="__main__")
            except BaseException:
                sys.excepthook(*sys.exc_info())
                sys.stderr.flush()
                os._exit(3)
            os._exit(0)
        pids.append(pid)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
