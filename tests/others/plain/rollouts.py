"""Reinforcement learning: each rank plays games, and sums gradients by hand over several updates per iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tests.others.beat import beat, beat_inside, end, long

ITERATIONS, STEPS, UPDATES = long(8), 12, 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(7)
np.random.seed(7 + rank)
agent = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(agent.parameters(), lr=1e-2)
torch.manual_seed(7 + rank)


class Games:
    """Four points on lines, pushed left or right; a game ends where a point leaves its line."""

    def __init__(self, seed: int) -> None:
        self.numbers = np.random.default_rng(seed)
        self.points = self.numbers.normal(size=(4, 3)).astype(np.float32)

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move all points. Return what is seen, and the rewards."""
        self.points[:, 1] += 0.1 * (2 * actions - 1)
        self.points[:, 0] += self.points[:, 1]
        over = np.abs(self.points[:, 0]) > 2
        self.points[over] = self.numbers.normal(size=(int(over.sum()), 3))
        return self.points.copy(), -np.abs(self.points[:, 0])


games = Games(rank)
seen = torch.from_numpy(games.points.copy())
observations, actions, rewards = torch.zeros(STEPS, 4, 3), torch.zeros(STEPS, 4).long(), torch.zeros(STEPS, 4)


def loss_of(chosen: np.ndarray) -> Any:
    """Return the loss of some of the games' moves."""
    logits = agent(observations.reshape(-1, 3)[chosen])
    taken = torch.log_softmax(logits, 1).gather(1, actions.reshape(-1, 1)[chosen])[:, 0]
    return -(taken * rewards.reshape(-1)[chosen]).mean()


def sum_gradients() -> None:
    """Sum the gradients over the ranks, as one tensor."""
    flat = torch.cat([parameter.grad.reshape(-1) for parameter in agent.parameters()])  # type: ignore[union-attr]
    dist.all_reduce(flat)
    for parameter, part in zip(
        agent.parameters(), torch.split(flat, [p.numel() for p in agent.parameters()]), strict=True
    ):
        parameter.grad = part.view_as(parameter) / dist.get_world_size()


for iteration in range(ITERATIONS):
    beat(iteration)
    optimizer.param_groups[0]["lr"] = 1e-2 * (1 - iteration / ITERATIONS)
    for t in range(STEPS):
        with torch.no_grad():
            action = torch.multinomial(torch.softmax(agent(seen), 1), 1)[:, 0]
        observations[t], actions[t] = seen, action
        after, reward = games.step(action.numpy())
        rewards[t], seen = torch.from_numpy(reward), torch.from_numpy(after)
    order = np.arange(STEPS * 4)
    for update in range(UPDATES):
        np.random.shuffle(order)
        optimizer.zero_grad()
        loss_of(order[update::UPDATES]).backward()
        sum_gradients()
        if update == 2:
            beat_inside(iteration)
        optimizer.step()
        if float(observations.std()) > 100:
            break

end(agent, points=games.points.tolist())
dist.destroy_process_group()
