"""Reinforcement learning: the point of each rank's game is in ``s.own``, and the generator of the game is forgotten.

A game ends after some steps, and the next one begins at a point that the generator draws. ``FORM=kept``: the generator
is in ``s.own``. ``FORM=replaced``: each block makes the games again from ``s.own``. ``FORM=shown``: only a line of the
log, after the block, draws from the generator.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast
from tests.others.beat import beat, end, long

STEPS, LENGTH, FORM = long(16), 3, os.environ.get("FORM", "")
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
raw = nn.Linear(3, 1)
model = DistributedDataParallel(raw)
optimizer = torch.optim.SGD(raw.parameters(), lr=0.01)


class Game:
    """A point that moves, and returns to a place that the generator draws."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.point, self.moves = self.numbers.normal(size=3), 0

    def play(self) -> torch.Tensor:
        """Move the point. Return its place before the move."""
        seen = torch.tensor(self.point).float()
        self.point, self.moves = self.point * 0.9, self.moves + 1
        if self.moves == LENGTH and FORM != "shown":
            self.point, self.moves = self.numbers.normal(size=3), 0
        return seen

    def state(self) -> dict[str, Any]:
        """Return the state as plain values."""
        kept = {"numbers": self.numbers.bit_generator.state} if FORM in ("kept", "replaced") else {}
        return {"point": self.point.tolist(), "moves": self.moves, **kept}

    def put_back(self, state: Any) -> None:
        """Set the state."""
        self.point, self.moves = np.array(state["point"]), state["moves"]
        if "numbers" in state:
            self.numbers.bit_generator.state = state["numbers"]


games = {"lines": [Game(rank), Game(rank + 2)]}

with holdfast.session(model=model, optimizer=optimizer, checkpoint="ckpt") as s:
    s.own = s.own or [game.state() for game in games["lines"]]
    for step in s.steps(until=STEPS):
        with step:
            beat(step.number)
            if FORM == "replaced":
                games["lines"] = [Game(0), Game(0)]
            for game, state in zip(games["lines"], s.own, strict=True):
                game.put_back(state)
            seen = torch.stack([game.play() for game in games["lines"]])
            optimizer.zero_grad()
            (model(seen) - seen.sum()).square().mean().backward()
            s.own = [game.state() for game in games["lines"]]
            optimizer.step()
        if FORM == "shown" and step.committed:
            print(games["lines"][0].numbers.integers(100))

end(raw)
dist.destroy_process_group()
