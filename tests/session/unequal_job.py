"""Two ranks with DDP, and numbers of batches that may differ: ``python unequal_job.py KIND DIRECTORY``.

Rank 1 has ``MORE`` batches more in each epoch, except in the kinds ``equal`` and ``lost ...``. In the kinds
``until...`` the epochs end at a step, and the loaders begin again. ``until, lost N`` kills rank 1 before step N.
In the kind ``break alone`` both ranks have more batches, and only rank 0 leaves its loop early.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

import holdfast
from holdfast.session.steps.loop_ends import REPORT_S
from holdfast.session.steps.step import Step

BATCHES, MORE, EPOCHS = 6, 3, 3
LOST_IN = 1  # epoch
UNTIL = 10  # steps of an epoch that ends at a step: more than a loader has batches


class Share(torch.utils.data.IterableDataset[torch.Tensor]):
    """The batches of one rank."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[torch.Tensor]:
        generator = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(self.count):
            yield torch.randn(4, 8, generator=generator)


class Unsummed(torch.nn.Module):
    """A model without DDP: the ranks have the same gradients, and meet only in votes."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        out = self.inner(batch)
        assert isinstance(out, torch.Tensor)
        return out


def once(directory: str, name: str) -> bool:
    """Return True at the first call with this name in all processes of the job."""
    try:
        (Path(directory) / name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def kill_once(directory: str) -> None:
    """Kill this process, unless another process of the job was killed before."""
    if once(directory, "lost"):
        os.kill(os.getpid(), signal.SIGKILL)


def kept(steps: Iterator[Step], by: list[object]) -> Iterator[Step]:
    """Return ``steps``. ``by`` holds a reference to them, as a progress bar does."""
    by.append(steps)
    return steps


def main() -> None:
    """Train."""
    kind, directory = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 4)
    model: torch.nn.Module = torch.nn.parallel.DistributedDataParallel(net)
    if kind == "no collective in the block":
        model = Unsummed(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    equal = kind == "equal" or kind.startswith("lost")
    share = Share(BATCHES + MORE * (rank if kind != "break alone" else 1) * (not equal))
    loader = torch.utils.data.DataLoader(share, batch_size=None)
    with holdfast.session(model=model, optimizer=optimizer, seed=3, checkpoint=f"{directory}/ckpts") as s:
        for epoch in s.epochs(EPOCHS):
            until = UNTIL * (epoch + 1) if kind.startswith("until") else None
            held: list[object] = []
            for step in kept(s.steps(loader, until=until), held if kind == "break, held" else []):
                if kind.startswith("until, lost") and rank == 1 and step.number == int(kind.split()[-1]):
                    kill_once(directory)  # before the block
                alone = kind == "break alone" and rank == 0
                if (kind.startswith("break,") or kind == "break" or alone) and step.number >= BATCHES * (
                    epoch + 1
                ):
                    break
                with step as batch:
                    loss = model(batch if kind != "no collective in the block" else torch.ones(4, 8))
                    loss.pow(2).mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                last = step.committed and step.number == BATCHES * (epoch + 1) - 1
                if last and rank == 1 and equal:
                    time.sleep(2 * REPORT_S if epoch == LOST_IN else 0)  # the other rank waits for this one
                    if kind.startswith("lost before the end") and epoch == LOST_IN:
                        kill_once(directory)
                if last and rank == 0 and kind.startswith("lost at the end") and epoch == LOST_IN:
                    signal.signal(signal.SIGALRM, lambda *_: kill_once(directory))
                    signal.setitimer(signal.ITIMER_REAL, REPORT_S / 2)
            print("after the loop of epoch", epoch, len(held), flush=True)
            if (
                kind not in ("plain", "no collective in the block")
                and not kind.endswith("replaced")
                and until is None
            ):
                # As large as the gradients: without a meeting, it would get their sum.
                dist.all_reduce(torch.ones(36))
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters())).hexdigest()
    (Path(directory) / f"digest-{rank}").write_text(digest)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
