"""A loop with Hugging Face's Accelerate, protected by the plain session.

    pip install 'holdfast[torch]' accelerate scikit-learn
    holdfast run --nproc-per-node 4 examples/accelerate_loop.py        # then kill -9 any worker

Holdfast adds: import holdfast; with holdfast.session(...) as s; for step in s.steps(...); with step as batch.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast  # + Holdfast


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--cpu", action="store_true", default=not torch.cuda.is_available())
    given = parser.parse_args()
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=given.cpu)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps * accelerator.num_processes)
    loader = DataLoader(data, 16, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)

    with holdfast.session(model=net, optimizer=optimizer, scheduler=schedule) as s:  # + Holdfast
        for step in s.steps(loader, until=given.steps):  # + Holdfast
            with step as (x, y):  # + Holdfast
                loss = nn.functional.cross_entropy(net(x), y)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step.committed and step.number % 20 == 19:
                accelerator.print(f"step {step.number + 1} epoch {step.epoch} loss {loss.item():.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
