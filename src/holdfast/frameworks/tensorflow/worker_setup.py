"""The setup of a worker of ``holdfast run --framework tensorflow``: each start of the workers makes a new cluster.

Before user code every rank takes a free port and publishes it. ``TF_CONFIG`` is made from the ports of all ranks. So a
rank cannot connect to the cluster of an earlier start, and an error names a rank that does not start.
"""

from __future__ import annotations

import importlib.util
import json
import os

from holdfast.frameworks.common.tcp_group import GroupAddress, host_of, meet, start_limit_s
from holdfast.runtime.node.spawn import free_port
from holdfast.runtime.worker.worker_client import WorkerClient

VARIABLE = "TF_CONFIG"


def install() -> None:
    """Set the environment variable ``TF_CONFIG`` for this worker. Idempotent.

    Raises:
        ModuleNotFoundError: TensorFlow is not installed.
        GroupError: a rank did not start in time.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")
    client = WorkerClient.current()
    if client is None:
        return
    host = host_of(client)
    own = GroupAddress(host, free_port(host), b"")
    places = meet(
        client,
        f"tensorflow/{client.generation}",
        client.rank,
        client.world_size,
        own,
        start_limit_s(),
    )
    workers = [f"{places[rank].host}:{places[rank].port}" for rank in range(client.world_size)]
    task = {"type": "worker", "index": client.rank}
    os.environ[VARIABLE] = json.dumps({"cluster": {"worker": workers}, "task": task})
