"""The drill's training under torchft: one replica group per process, as in torchft's own example.

``peers.py`` starts it with the variables of one replica. A new process takes its state from a living one.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.utils.data import DataLoader, DistributedSampler
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from holdfast.drill.corpus import load
from holdfast.drill.model import SIZES
from holdfast.drill.trace import Trace
from holdfast.drill.training import Windows, accumulate, build, parse

TIMEOUT = timedelta(seconds=5)


def main() -> None:
    """Train until ``--steps`` are committed."""
    settings = parse()
    replica, replicas = int(os.environ["BENCH_REPLICA"]), int(os.environ["BENCH_REPLICAS"])
    size = SIZES[settings.size]
    parts = build(settings, 1)
    data = Windows(load(size.text_bytes), size.context, size.epoch_steps * size.batch * replicas)
    sampler: DistributedSampler[Any] = DistributedSampler(data, replicas, replica, seed=settings.seed)
    loader = DataLoader(data, size.batch, sampler=sampler, drop_last=True)
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def state() -> dict[str, Any]:
        return {"model": parts.model.state_dict(), "optimizer": parts.optimizer.state_dict()}

    def restore(found: dict[str, Any]) -> None:
        parts.model.load_state_dict(found["model"])
        parts.optimizer.load_state_dict(found["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT), min_replica_size=2, rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, replica_id=f"replica_{replica}", load_state_dict=restore, state_dict=state,
        use_async_quorum=True, timeout=TIMEOUT, connect_timeout=TIMEOUT,
    )  # fmt: skip
    parts.network = DistributedDataParallel(manager, parts.model)
    optimizer = Optimizer(manager=manager, optim=parts.optimizer)
    trace = Trace(settings.trace, lambda: replica)
    assert settings.trace is not None
    (settings.trace / f"rank-{replica:05d}.pid").write_text(str(os.getpid()))
    epoch = 0
    while manager.current_step() < settings.steps:
        sampler.set_epoch(epoch)
        for batch in loader:
            before = manager.current_step()
            optimizer.zero_grad()
            accumulate(parts, batch)
            optimizer.step()
            if manager.current_step() > before:
                trace.committed(manager.current_step())
            if manager.current_step() >= settings.steps:
                break
        epoch += 1
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
