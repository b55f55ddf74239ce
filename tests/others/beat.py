"""Helpers of the scripts of this directory: faults that the test orders, and the report of the results.

``KILL=RANK:STEP,...``: SIGKILL, once each. ``STOP=STEP``: SIGTERM to rank 0, once. Both at the start of a step.
``KILL_INSIDE=RANK:STEP,...``: SIGKILL where the script calls ``beat_inside``, in the middle of an update.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from holdfast.frameworks.torch.state.boxes import local_of
from tests.session.once import first


def long(count: int) -> int:
    """Return ``count`` epochs or iterations, or ``TIMES`` as many where faults come at random."""
    return count * int(os.environ.get("TIMES", "1"))


def beat(step: int) -> None:
    """Inject the fault of ``step``, if there is one."""
    rank = dist.get_rank()
    here = f"{rank}:{step}"
    if here in os.environ.get("KILL", "").split(",") and first(Path(f"killed-{here}")):
        os.kill(os.getpid(), signal.SIGKILL)
    if os.environ.get("STOP") == str(step) and rank == 0 and first(Path("stopped")):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)  # the thread that reads the signal may need longer than these short steps


def beat_inside(step: int) -> None:
    """Inject the fault in the middle of the update of ``step``, if there is one."""
    here = f"{dist.get_rank()}:{step}"
    if here in os.environ.get("KILL_INSIDE", "").split(",") and first(Path(f"killed-inside-{here}")):
        os.kill(os.getpid(), signal.SIGKILL)


def end(*modules: nn.Module, **more: Any) -> None:
    """Print a digest of the trained ``modules``; ``more`` are other results."""
    total = xxhash.xxh3_128(json.dumps(more).encode())
    for module in modules:
        for tensor in module.state_dict().values():
            total.update(
                local_of(tensor.detach()).contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
    Path(f"ended-{dist.get_rank()}").write_text(total.hexdigest())
