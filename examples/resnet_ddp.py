"""A ResNet on small images with DDP, protected.

    holdfast run --nproc-per-node 4 examples/resnet_ddp.py --data cifar-10-batches-bin      # then kill -9 any worker

Holdfast adds: import holdfast; with holdfast.session(...) as s; for step in s.steps(...); with step as batch.
Without CIFAR-10's binary files: scikit-learn's handwritten digits, enlarged to 32 x 32.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import holdfast  # + Holdfast


def images(folder: Path) -> TensorDataset:
    """Load CIFAR-10 (records of one label and 3 x 32 x 32 bytes); digits if it is not there."""
    files = sorted(folder.glob("data_batch_*.bin"))
    if files:
        raw = torch.from_numpy(np.concatenate([np.fromfile(file, np.uint8) for file in files])).view(-1, 3073)
        return TensorDataset(raw[:, 1:].reshape(-1, 3, 32, 32) / 255, raw[:, 0].long())
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    return TensorDataset(functional.interpolate(x, size=32).repeat(1, 3, 1, 1), torch.tensor(labels))


class Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        first = [nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.body = nn.Sequential(*first, nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width))
        self.skip = nn.Conv2d(inputs, width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.skip(x))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, default=Path("cifar-10-batches-bin"))
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = nn.Sequential(Block(3, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
    net = DistributedDataParallel(
        nn.Sequential(blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, given.steps)
    data = images(given.data)
    loader = DataLoader(data, 8, sampler=DistributedSampler(data))

    with holdfast.session(model=net, optimizer=optimizer, scheduler=schedule) as s:  # + Holdfast
        for step in s.steps(loader, until=given.steps):  # + Holdfast
            with step as (x, y):  # + Holdfast
                loss = functional.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if step.committed and step.number % 10 == 9 and dist.get_rank() == 0:
                print(
                    f"epoch: {step.epoch + 1} step: {step.number + 1}, loss is {loss.item():.4f}", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
