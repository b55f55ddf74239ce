"""A small training with everything that can break exactness; run as a script, with a session or bare.

It has dropout, BatchNorm, accumulation 2, a scheduler and random augmentation in loader workers, with DDP, HSDP or one
process.
``python job.py --layout ddp --steps 12 --result DIR [--bare] [--cut RANK@STEP] ...`` writes one digest per rank. It
also writes the objects that a process kept from its step 2 to the end.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import holdfast
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.rng import Draws, reseed, sample_seed, seed_all
from holdfast.store.shared_memory import memory_slots

SEED = 7
WIDTH = 24
BATCH = 8
EPOCH_STEPS = 5


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Samples with augmentation from torch's default generator.

    With ``epoch`` it seeds the generator (the bare loop).
    """

    def __init__(self, length: int, epoch: int | None) -> None:
        self.length = length
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.epoch is not None:
            seed_all(sample_seed(SEED, self.epoch, index))
        x = torch.linspace(0, 1 + index % 5, WIDTH) + 0.1 * torch.randn(WIDTH)
        return x, x.sin().sum()


class Net(nn.Module):
    """A model with BatchNorm and dropout between linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.body = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Shape [batch, WIDTH] -> [batch]."""
        out: Tensor = self.last(self.body(self.norm(self.first(x)))).squeeze(-1)
        return out


def build(layout: str, world: int) -> tuple[Net, nn.Module]:
    """Return the plain model and the wrapped one."""
    torch.manual_seed(SEED)
    net = Net()
    wrapped: nn.Module = net
    if layout == "ddp":
        wrapped = DistributedDataParallel(net)
    elif layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(net.body, mesh=mesh)
        fully_shard(net, mesh=mesh)
    elif layout == "fsdp":
        fully_shard(net.body)
        fully_shard(net)
    return net, wrapped


GRAPHS = 0


def counting(graph: Any, examples: Any) -> Any:
    """Compile a graph to itself, and count it."""
    global GRAPHS
    GRAPHS += 1
    return graph.forward


def identity(wrapped: nn.Module) -> dict[str, Any]:
    """Return the objects that a process must keep while others are replaced."""
    return {
        "pid": os.getpid(),
        "model": id(wrapped),
        "parameters": [
            (id(p), (p.to_local() if isinstance(p, DTensor) else p).data_ptr()) for p in wrapped.parameters()
        ],
        "graphs": GRAPHS,
        "breaks": sum(counters["graph_break"].values()),
    }


def gradients(run: nn.Module, wrapped: nn.Module, batch: Any) -> None:
    """Compute two micro-batches. The second one exchanges gradients. ``run`` is ``wrapped``, compiled or not."""
    halves = list(zip(batch[0].chunk(2), batch[1].chunk(2), strict=True))
    for number, (x, y) in enumerate(halves):
        last = number == 1
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        hold = isinstance(wrapped, DistributedDataParallel) and not last
        with wrapped.no_sync() if hold else nullcontext():  # type: ignore[operator]
            loss = ((run(x) - y) ** 2).mean() / 2
            loss.backward()


def clamp(net: Net) -> None:
    """Change the weights without the optimizer."""
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.05, 0.05)


def digest(net: Net, optimizer: torch.optim.Optimizer, lr: float, *, buffers: bool) -> str:
    """Return a digest of weights, optimizer state, learning rate (and buffers) of this rank."""
    total = xxhash.xxh3_128(repr(lr).encode())
    tensors = [*net.parameters(), *(net.buffers() if buffers else ())]
    for parameter in net.parameters():
        tensors += [v for v in optimizer.state[parameter].values() if isinstance(v, Tensor)]
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total.update(local.detach().contiguous().numpy().tobytes())
    return total.hexdigest()


class Faults:
    """The faults of this rank, each once."""

    def __init__(self, arguments: argparse.Namespace, rank: int) -> None:
        self.cut = self._at(arguments.cut, rank)
        self.die = self._at(arguments.die, rank)
        self.dies_at = int(arguments.die.rpartition("@")[2] or -1)
        self.ask = self._at(arguments.ask_exit, rank)
        self.die_all = arguments.die_all
        self.die_late = self._at(arguments.die_late, rank)
        self.tear = self._at(arguments.tear, rank)
        self.torn = f"fault-{arguments.tear.partition('@')[0]}" if arguments.tear else ""
        self.die_copying = self._at(arguments.die_copying, rank)
        self.rot = arguments.rot
        self.rot_log = arguments.rot_log
        self.clamp = arguments.clamp

    def _at(self, spec: str, rank: int) -> int:
        at_rank, _, step = spec.partition("@")
        return int(step) if at_rank and int(at_rank) == rank else -1

    def run(self, step: int, marker: Path) -> None:
        """Inject the fault of this step, in the middle of the step."""
        if step == self.cut:
            self.cut = -1
            for inner in fabric()._inners():
                inner.sever()
        if step == self.dies_at:
            self._wait_for_all(marker.parent, int(marker.name.rpartition("-")[2]))
        if step == self.die and not marker.exists():
            marker.write_text("")
            if self.rot:
                self._flip_bits("memory", 4096)
            if self.rot_log:
                self._flip_bits("updates", 4096 + 64)
            os.kill(os.getpid(), 9)
        if step == self.die_copying and not marker.exists():
            marker.write_text("")
            self._die_copying()
        if step == self.die_all and not marker.exists():
            marker.write_text(str(os.getpid()))
            self._kill_all(marker.parent)
        if step == self.ask and not marker.exists():
            marker.write_text("")
            os.kill(os.getpid(), 12)

    def _wait_for_all(self, place: Path, rank: int) -> None:
        """Wait until every rank is inside its block. Before the block, a rank cannot return to an earlier state."""
        (place / f"inside-{rank}").write_text("")
        until_s = time.monotonic() + 30
        while (
            len(list(place.glob("inside-*"))) < int(os.environ["WORLD_SIZE"]) and time.monotonic() < until_s
        ):
            time.sleep(0.001)

    def _die_copying(self) -> None:
        """Die in the middle of the next copy of a state to memory."""
        copy, boxes = memory_slots.copy_hashed, iter(range(3))

        def copy_or_die(pieces: Iterable[memoryview], goal: memoryview) -> int:
            if next(boxes, None) is None:
                os.kill(os.getpid(), 9)
            return copy(pieces, goal)

        memory_slots.copy_hashed = copy_or_die

    def _flip_bits(self, kind: str, at: int) -> None:
        """Flip one bit in each state, or in the log, that this rank keeps in memory."""
        pages = Path(os.environ["HOLDFAST_RUN_DIR"]) / "pages"
        for path in pages.glob(f"{kind}-{int(os.environ['RANK']):05d}*"):
            with path.open("r+b") as file:
                file.seek(at)
                byte = file.read(1)[0]
                file.seek(at)
                file.write(bytes([byte ^ 16]))

    def run_late(self, step: int, marker: Path) -> None:
        """Die between the update and the end of the block, or raise because of the loss of the rank that died.

        This happens once. If the other ranks did not have the result of the vote yet, the step is run again.
        """
        if step in (self.die_late, self.tear) and marker.exists():
            return
        if step == self.die_late:
            while self.torn and not marker.with_name(self.torn).exists():
                time.sleep(
                    0.001
                )  # if the fence came before the update, the decision would make this rank torn
            marker.write_text("")
            os.kill(os.getpid(), 9)
        if step == self.tear:
            marker.write_text("")
            until_s = time.monotonic() + 30
            while not fabric().poisoned and time.monotonic() < until_s:
                time.sleep(0.001)
            raise RuntimeError("the update is torn")

    def _kill_all(self, place: Path) -> None:
        """Kill all ranks at once from rank 0, when all are there. No process is left to report the fault."""
        while len(markers := sorted(place.glob("fault-*"))) < 4 or not all(m.read_text() for m in markers):
            time.sleep(0.001)
        if markers[0].read_text() == str(os.getpid()):
            for marker in reversed(markers):
                os.kill(int(marker.read_text()), 9)
        time.sleep(60)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", default="ddp")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--checkpoint", default=None)
    for name in ("--save-every", "--memory"):
        parser.add_argument(name, type=int, default=None)
    for name in ("--bare", "--rot", "--rot-log", "--compiled", "--sgd", "--hook"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("--cut", default="")
    parser.add_argument("--die", default="")
    parser.add_argument("--die-late", default="")
    parser.add_argument("--tear", default="")
    for name in ("--die-all", "--clamp"):
        parser.add_argument(name, type=int, default=-1)
    parser.add_argument("--die-copying", default="")
    parser.add_argument("--ask-exit", default="")
    return parser.parse_args()


def main() -> None:
    """Train."""
    arguments = parse()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    net, wrapped = build(arguments.layout, world)
    run: Any = torch.compile(wrapped, backend=counting) if arguments.compiled else wrapped
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    if arguments.sgd:
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    if arguments.hook:  # no log holds the changes of the hook
        optimizer.register_step_pre_hook(lambda *_: None)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=arguments.steps)
    data = Noisy(EPOCH_STEPS * BATCH * world, 0 if arguments.bare else None)
    sampler: DistributedSampler[Any] = DistributedSampler(data, world, rank, seed=SEED)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=2)
    arguments.result.mkdir(parents=True, exist_ok=True)

    def update(batch: Any, late: Callable[[], None] = lambda: None) -> None:
        gradients(run, wrapped, batch)
        optimizer.step()
        late()
        scheduler.step()
        optimizer.zero_grad()

    before: dict[str, Any] = {}
    if arguments.bare:
        step = 0
        for epoch in range(-(-arguments.steps // EPOCH_STEPS)):
            sampler.set_epoch(epoch)
            data.epoch = epoch
            for batch in loader:
                if step < arguments.steps:
                    reseed(SEED, Draws.same(0), step)  # the seeds of all ranks are equal
                    update(batch)
                    if step == arguments.clamp:
                        clamp(net)
                    step += 1
    else:
        faults = Faults(arguments, rank)
        with holdfast.session(
            model=run,
            optimizer=optimizer,
            scheduler=scheduler,
            checkpoint=arguments.checkpoint,
            seed=SEED,
            save_every_steps=arguments.save_every,
            memory=arguments.memory,
        ) as s:
            for step_ in s.steps(loader, until=arguments.steps):
                if step_.number == 2:
                    before = identity(wrapped)
                marker = arguments.result / f"fault-{rank}"
                with step_ as batch:
                    faults.run(step_.number, marker)
                    update(batch, partial(faults.run_late, step_.number, marker))
                if step_.committed and step_.number == faults.clamp:
                    clamp(net)
    # Without DDP, each rank of a bare job has its own statistics: compare those of rank 0.
    text = digest(net, optimizer, float(scheduler.get_last_lr()[0]), buffers=rank == 0)
    facts = {"digest": text, "pid": os.getpid(), "before": before, "after": identity(wrapped)}
    (arguments.result / f"rank-{rank}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
