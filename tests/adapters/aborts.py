"""Work of the ranks of ``test_wrapper_reset.py``: trainings in which a step is aborted, healed and run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel as DDP

from holdfast.core.ids import Generation
from holdfast.frameworks.torch.comm.comm_state import CommState, GroupAborted, fabric
from holdfast.frameworks.torch.state.wrapper_reset import heal, heal_pipelines, heal_scaler, rehearsals_needed
from tests.adapters.features import digest
from tests.adapters.worlds import Line

WIDTH = 32
STEPS = 6
ABORTED_STEP = 3

DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_find_unused": {"find_unused_parameters": True},
    "ddp_bucket_view": {"gradient_as_bucket_view": True},
    "ddp_static": {"static_graph": True},
}
FSDP_OPTIONS = {"fsdp2": True, "fsdp2_no_reshard": False}


class Boom(Exception):
    """The exception that the user code of these scenarios raises."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.b(torch.relu(self.a(x)))
        return y


class Bomb(nn.Module):
    """A module that runs ``action`` in forward or backward when armed."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = ""
        self.action: Callable[[], None] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        if self.armed == "forward":
            self.action()
        elif self.armed == "backward":
            register: Callable[[Callable[[Tensor], None]], Any] = x.register_hook
            register(self._hook)
        return x

    def _hook(self, grad: Tensor) -> None:
        self.action()


def _build(kind: str) -> tuple[nn.Module, Bomb]:
    torch.manual_seed(0)
    bomb = Bomb()
    model = nn.Sequential(Block(), Block(), bomb, Block(), Block())
    if kind in DDP_OPTIONS:
        return DDP(model, bucket_cap_mb=0.005, **DDP_OPTIONS[kind]), bomb
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh, reshard_after_forward=FSDP_OPTIONS[kind])
    fully_shard(model, mesh=mesh, reshard_after_forward=FSDP_OPTIONS[kind])
    return model, bomb


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step * 10 + rank))


def _backward(model: nn.Module, step: int, rank: int) -> None:
    (model(_batch(step, rank)) ** 2).mean().backward()


@contextmanager
def _shielded(state: CommState) -> Iterator[None]:
    state.shield(True)
    try:
        yield
    finally:
        state.shield(False)


def abort_and_retry(
    line: Line, kind: str, where: str, how: str, healed: bool = True, early: bool = False
) -> str:
    """Train; abort step 3 ``where`` (forward, backward or "" = never) by ``how`` (raise, poison, both).

    ``early``: heal once before the first forward, as a rank does whose first step was fenced, or that joins a job.

    Returns: digest of the weights.
    """
    dist.init_process_group("gloo")
    state = fabric()
    model, bomb = _build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if early:
        heal(model)

    def act() -> None:
        if how in ("poison", "both"):
            state.poison("the test says so")
        if how in ("raise", "both"):
            raise Boom

    bomb.action = act
    for step in range(STEPS):
        if step == ABORTED_STEP and where:
            bomb.armed = where
            raised = False
            with _shielded(state):
                try:
                    _backward(model, step, line.rank)
                except Boom:
                    raised = True
            assert raised == (how != "poison")
            bomb.armed = ""
            assert state.quiesce()
            if healed:
                heal(model)
            if how != "raise":
                assert state.poisoned
                state.reconfigure(Generation(1, 2))
        _backward(model, step, line.rank)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters())


def scaler_retry(line: Line, aborted: bool, healed: bool) -> str:
    """Abort a step of one rank with GradScaler between ``unscale_`` and ``step``, then run the same step again."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        for attempt in range(2 if aborted and step == 1 else 1):
            optimizer.zero_grad()
            scaler.scale(model(_batch(step, 0)[:, :4]).sum()).backward()
            if aborted and step == 1 and attempt == 0:
                scaler.unscale_(optimizer)
                if healed:
                    heal_scaler(scaler)
                continue
            scaler.step(optimizer)
            scaler.update()
    return digest(model.parameters())


class Wide(nn.Module):
    """A model of several megabytes in layers of different sizes: the layout of DDP's buckets changes the sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(a, b) for a, b in ((64, 900), (900, 500), (500, 1100), (1100, 64))]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _wide(static: bool) -> tuple[DDP, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DDP(Wide(), bucket_cap_mb=1, static_graph=static)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _wide_step(model: nn.Module, step: int, rank: int) -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step * 10 + rank))
    (model(x) ** 2).mean().backward()


def rehearse(line: Line, fresh_at: int, rehearsals: bool, static: bool) -> dict[str, Any]:
    """Train 8 steps. At step ``fresh_at`` continue with a new DDP, as a new process would, rehearsed or not."""
    dist.init_process_group("gloo")
    state = fabric()
    model, optimizer = _wide(static)
    assert rehearsals_needed(model)
    passes = 0
    for step in range(8):
        if step == fresh_at:
            old_model, old_optimizer = model, optimizer
            model, optimizer = _wide(static)
            model.load_state_dict(old_model.state_dict())
            optimizer.load_state_dict(old_optimizer.state_dict())
            while rehearsals and rehearsals_needed(model):
                state.loopback()
                _wide_step(model, step, line.rank)
                heal(model)
                passes += 1
                assert passes < 5
            state.reconfigure(state.generation)
        _wide_step(model, step, line.rank)
        optimizer.step()
        optimizer.zero_grad()
    assert not rehearsals_needed(model)
    return {"digest": digest(model.parameters()), "passes": passes}


def pipeline_retry(line: Line, several: bool, where: str, healed: bool = True) -> str:
    """Train a pipeline of two ranks.

    The last rank aborts step 3 in its second micro-batch and the other one is poisoned.

    The stages ask their neighbours for shapes, again after the abort. ``several``: two stages per rank, interleaved.
    """
    dist.init_process_group("gloo")
    state = fabric()
    torch.manual_seed(0)
    layers = [nn.Sequential(Block(), Bomb()) for _ in range(4)]
    own = [line.rank, line.rank + 2] if several else [line.rank]
    stages: list[Any] = [PipelineStage(layers[i], i, 4 if several else 2, torch.device("cpu")) for i in own]
    loss_fn = nn.MSELoss()
    run: Any = (
        ScheduleInterleaved1F1B(stages, 4, loss_fn=loss_fn)
        if several
        else Schedule1F1B(stages[0], 4, loss_fn=loss_fn)
    )
    optimizer = torch.optim.AdamW([p for i in own for p in layers[i].parameters()], lr=1e-2)
    bomb = layers[own[-1]][1]
    assert isinstance(bomb, Bomb)
    passes = 0

    def act() -> None:
        nonlocal passes
        passes += 1
        if passes == 2:
            state.poison("the test says so")
            raise Boom

    bomb.action = act

    def work(step: int) -> None:
        if line.rank == 0:
            run.step(_batch(step, 0))
        else:
            run.step(target=_batch(step, 1), losses=[])

    for step in range(STEPS):
        if step == ABORTED_STEP and where:
            bomb.armed = where if line.rank == 1 else ""
            with _shielded(state):
                try:
                    work(step)
                except (Boom, GroupAborted):
                    pass
                except RuntimeError as error:  # torch wraps what a stage raises
                    assert "stage" in str(error) or "forward" in str(error), error
            assert state.poisoned and state.quiesce()
            bomb.armed = ""
            optimizer.zero_grad()
            if healed:
                heal_pipelines()
            state.reconfigure(Generation(1, 2))
        work(step)
        optimizer.step()
        optimizer.zero_grad()
    return digest([p for i in own for p in layers[i].parameters()])
