"""The setup of a worker of ``holdfast run --framework mindspore``, by environment variables and without msrun.

A script that never calls ``mindspore.communication.init()`` does not use this setup: its gradients travel over
Holdfast's own connections. In other scripts ``init()`` first waits for all ranks (and names a missing one). Then rank 0
starts MindSpore's scheduler, a process of this worker's process group that ends with the worker. Finally MindSpore's
own ``init`` runs.
"""

from __future__ import annotations

import atexit
import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from holdfast.errors import InternalError
from holdfast.frameworks.common.tcp_group import GroupAddress, host_of, meet, start_limit_s
from holdfast.runtime.worker.worker_client import WorkerClient

MODULES = ("mindspore.communication", "mindspore.communication.management")
SCHEDULER = "import mindspore; mindspore.set_device('CPU'); mindspore.communication.init()"
_installed = False


def install() -> None:
    """Set the environment variables that MindSpore scripts read, and replace ``init`` by :func:`_init`. Idempotent.

    Raises:
        ModuleNotFoundError: MindSpore is not installed.
    """
    global _installed
    client = WorkerClient.current()
    if client is None or _installed:
        return
    _installed = True
    os.environ.setdefault("RANK_ID", str(client.rank))
    os.environ.setdefault("RANK_SIZE", str(client.world_size))
    os.environ.setdefault("DEVICE_ID", str(client.local_rank))
    original = importlib.import_module(MODULES[1]).init
    for name in MODULES:
        setattr(importlib.import_module(name), "init", _init(original))  # noqa: B010


def _init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of ``mindspore.communication.init`` for a worker of Holdfast."""

    def init(backend_name: str | None = None) -> None:
        client = WorkerClient.current()
        if client is None:
            raise InternalError(
                "mindspore.communication.init() after the worker's line to its agent was closed"
            )
        own = GroupAddress(host_of(client), 0, b"")
        space = f"mindspore/{client.generation}"
        meet(client, space, client.rank, client.world_size, own, start_limit_s())
        env = _cluster(client)
        if client.rank == 0:
            subprocess.Popen(
                [sys.executable, "-c", SCHEDULER],
                env={**os.environ, **env, "MS_ROLE": "MS_SCHED"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.environ.update(env)
        original(backend_name)
        _leave_unannounced()

    return init


def _leave_unannounced() -> None:
    """Make this process end without a message to MindSpore's scheduler, which ends with rank 0 in any case.

    Otherwise MindSpore unregisters the process at its end, and deletes the connection as soon as the answer has come.
    MindSpore's receiving thread may still read from this connection. The process then ends with signal 11. In a
    process that MindSpore takes for failed, MindSpore itself sends no such message.
    """
    core = importlib.import_module("mindspore._c_expression")
    atexit.register(core.set_cluster_exit_with_exception)  # runs before MindSpore's own exit handler


def _cluster(client: WorkerClient) -> dict[str, str]:
    """Return the environment variables with which one MindSpore worker finds the scheduler."""
    return {
        "MS_ROLE": "MS_WORKER",
        "MS_WORKER_NUM": str(client.world_size),
        "MS_SCHED_HOST": os.environ["MASTER_ADDR"],
        "MS_SCHED_PORT": os.environ["MASTER_PORT"],
        "MS_NODE_ID": str(client.rank),
        "MS_TOPO_TIMEOUT": str(int(start_limit_s())),
        # Without this MindSpore ends a worker that lost the scheduler, while the worker still has a state to save.
        "MS_DISABLE_HEARTBEAT": "1",
    }
