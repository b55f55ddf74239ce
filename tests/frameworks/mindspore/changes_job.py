"""A MindSpore training whose learning rate and own state change outside of its blocks; see ``changes.py``."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

import holdfast.mindspore
from tests.frameworks.changes import EPOCH_STEPS, EPOCHS, Changes


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
        """A schedule goes on, an average follows."""
        self.changes.made(step)
        rate = self.optimizer.learning_rate
        ops.assign(rate, ms.Tensor(rate.asnumpy() * np.float32(0.5)))
        ops.assign(self.average, ms.Tensor((self.average.asnumpy() + self.weight.asnumpy()) / 2))

    def learn(self, step: Any) -> None:
        """Its block, and what is behind it."""
        way, number = self.changes.way, step.number
        rng = np.random.default_rng(100 * number + self.rank)
        x = rng.standard_normal((8, 8)).astype(np.float32)
        with step:
            if way == "block" and (number + 1) % EPOCH_STEPS == 0:
                self.change(number)
            self.changes.struck(number, "mid")
            self.changes.struck(number, "term")
            self.cell(ms.Tensor(x), ms.Tensor(x[:, :1].copy()))
        if way == "behind" and step.committed and (number + 1) % EPOCH_STEPS == 0:
            self.changes.struck(number, "behind")
            self.change(number)
            self.changes.struck(number, "changed")

    def digest(self) -> str:
        """Of all parameters."""
        whole = b"".join(p.asnumpy().tobytes() for p in self.cell.get_parameters())
        return hashlib.sha256(whole).hexdigest()[:16]


def main() -> None:
    """Train."""
    job = Job()
    changes, way = job.changes, job.changes.way
    save = {"save_every_steps": 3} if "save" in sys.argv else {}
    arguments: dict[str, Any] = {"checkpoint": "ckpts", "state": changes.state, **save}
    with holdfast.mindspore.session(job.cell, **arguments) as s:
        for epoch in range(EPOCHS):
            until = (epoch + 1) * EPOCH_STEPS if way == "between" else EPOCHS * EPOCH_STEPS
            for step in s.steps(until=until):
                number = step.number
                if way == "before" and number and number % EPOCH_STEPS == 0 and not step.again:
                    job.change(number)
                    changes.struck(number, "changed")
                job.learn(step)
            if way != "between":
                break
            job.change(s.step)
            changes.struck(s.step, "changed")
        if not s.exiting:
            rate = float(job.optimizer.learning_rate.asnumpy())
            changes.told(job.digest(), float(job.average.asnumpy().sum()), rate)


if __name__ == "__main__":
    main()
