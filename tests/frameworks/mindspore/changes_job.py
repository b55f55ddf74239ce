"""A MindSpore training that changes its learning rate and its own state outside of its blocks; see ``changes.py``."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import holdfast.mindspore
from tests.frameworks.changes import Changes


class Job:
    """Model, data and the changes of one run."""

    def __init__(self) -> None:
        ms.set_device("CPU")
        ms.set_seed(1)
        net = nn.SequentialCell(nn.Dense(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dense(16, 1))
        self.optimizer = nn.Adam(net.trainable_params(), 0.01)
        self.cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), self.optimizer)
        self.weight = net.trainable_params()[0]
        self.average = ms.Parameter(ms.Tensor(self.weight.asnumpy()), name="average")
        self.rank = int(os.environ["RANK"])
        self.changes = Changes(self.rank, self.average)

    def change(self, step: int) -> None:
        """Advance the schedule and update the average."""
        self.changes.made(step)
        rate = self.optimizer.learning_rate
        ops.assign(rate, ms.Tensor(rate.asnumpy() * np.float32(0.5)))
        ops.assign(self.average, ms.Tensor((self.average.asnumpy() + self.weight.asnumpy()) / 2))

    def learn(self, step: Any) -> None:
        """Run the block of a step and the code after it."""
        rng = np.random.default_rng(100 * step.number + self.rank)
        x = rng.standard_normal((8, 8)).astype(np.float32)
        self.changes.learn(step, lambda _: self.cell(ms.Tensor(x), ms.Tensor(x[:, :1].copy())), self.change)

    def digest(self) -> str:
        """Return a digest of all parameters."""
        whole = b"".join(p.asnumpy().tobytes() for p in self.cell.get_parameters())
        return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    """Train."""
    job = Job()
    changes = job.changes
    save = {"save_every_steps": 6} if "save" in sys.argv else {}  # one save only, so that no save has to wait
    arguments: dict[str, Any] = {"checkpoint": "ckpts", "state": changes.state, **save}
    with holdfast.mindspore.session(job.cell, **arguments) as s:
        changes.loops(s, lambda until: s.steps(until=until), job.learn, job.change)
        if not s.exiting:
            rate = float(job.optimizer.learning_rate.asnumpy())
            changes.told(job.digest(), float(job.average.asnumpy().sum()), rate)


if __name__ == "__main__":
    main()
