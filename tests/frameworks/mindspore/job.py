"""A small MindSpore training with shuffling, BatchNorm and Adam. Its result is the digest of all its parameters.

``python job.py [native] [pynative] [guarded]``: MindSpore's own AllReduce, no graph, a training cell of our own.
"""

from __future__ import annotations

import gc
import hashlib
import os
import signal
import socket
import sys
import time
from typing import Any

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
from mindspore import nn, ops

import holdfast.mindspore
from holdfast.frameworks.common.tcp_group import TcpGroup

EPOCHS = 5
OPTIONS = frozenset(sys.argv[1:])


class Bare(nn.Cell):  # type: ignore[misc]
    """A training cell without a ``grad_reducer``."""

    def __init__(self, network: Any, optimizer: Any) -> None:
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.optimizer = optimizer
        self.weights = optimizer.parameters
        self.grad = ops.GradOperation(get_by_list=True)

    def construct(self, x: Any, y: Any) -> Any:
        """Run one step."""
        loss = self.network(x, y)
        grads = self.grad(self.network, self.weights)(x, y)
        return ops.depend(loss, self.optimizer(grads))


class Watch(ms.train.Callback):  # type: ignore[misc]
    """A callback that prints each step, slowly enough to be hit by a kill. The learning rate falls with each epoch.

    ``JOB_DIE`` and ``JOB_CUT`` (RANK@STEP) inject a fault from inside, once.
    """

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Halve the learning rate, as a schedule that depends on the present rate."""
        for parameter in run_context.original_args().train_network.get_parameters():
            if parameter.name == "learning_rate":
                ops.assign(parameter, ms.Tensor(parameter.asnumpy() * np.float32(0.5)))

    def on_train_step_begin(self, run_context: Any) -> None:
        """Inject the fault of this step."""
        at = f"{place()[0]}@{run_context.original_args().cur_step_num - 1}"
        if os.environ.get("JOB_DIE") == at:
            os.kill(os.getpid(), signal.SIGKILL)
        if os.environ.get("JOB_CUT") == at and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            cut_connections()

    def on_train_step_end(self, run_context: Any) -> None:
        """Print the step and wait."""
        print("step", run_context.original_args().cur_step_num, flush=True)
        time.sleep(0.03)


def cut_connections() -> None:
    """Break every connection between this rank and another one. No process dies."""
    for found in gc.get_objects():
        if isinstance(found, TcpGroup):
            for peer in found._peers.values():
                peer.sock.shutdown(socket.SHUT_RDWR)


def place() -> tuple[int, int]:
    """Return rank and world size under holdfast run, under msrun or in a shell loop, and under mpirun."""
    ranks = ("RANK", "RANK_ID", "OMPI_COMM_WORLD_RANK")
    sizes = ("WORLD_SIZE", "RANK_SIZE", "OMPI_COMM_WORLD_SIZE")
    rank, size = ([int(os.environ[name]) for name in names if name in os.environ] for names in (ranks, sizes))
    return next(iter(rank), 0), next(iter(size), 1)


def main() -> None:
    """Train."""
    ms.set_device("CPU")
    ms.set_context(mode=ms.PYNATIVE_MODE if "pynative" in OPTIONS else ms.GRAPH_MODE)
    if "native" in OPTIONS:
        from mindspore.communication import init

        init()
        ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True)
    ms.set_seed(1)
    rank, world = place()
    rng = np.random.default_rng(0)
    x = rng.standard_normal((256, 8)).astype(np.float32)
    data = ds.NumpySlicesDataset(
        (x, x[:, :1].copy()), ["x", "y"], shuffle=True, num_shards=world, shard_id=rank
    )
    data = data.batch(8)
    net = nn.SequentialCell(nn.Dense(8, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dense(32, 1))
    optimizer = nn.Adam(net.trainable_params(), 0.01)
    if "guarded" in OPTIONS:
        cell = Bare(nn.WithLossCell(net, nn.MSELoss()), holdfast.mindspore.guard(optimizer))
        model = ms.train.Model(cell)
    else:
        model = ms.train.Model(net, nn.MSELoss(), optimizer)
    holdfast.mindspore.train(
        model,
        EPOCHS,
        data,
        callbacks=[Watch()],
        exit_name="Net",
        checkpoint=os.environ.get("JOB_CHECKPOINT"),
        exit_file="graceful_exit.json",
    )
    whole = b"".join(p.asnumpy().tobytes() for p in model.train_network.get_parameters())
    print("digest", hashlib.sha256(whole).hexdigest()[:16], flush=True)


if __name__ == "__main__":
    main()
