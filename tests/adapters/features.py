"""Work of the ranks of ``test_groups_features.py``.

Each function returns numbers that must equal those of plain gloo.
"""

from __future__ import annotations

import copy
import hashlib
import tempfile
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
import torch.distributed.nn.functional as _differentiable
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel as DDP

from holdfast.frameworks.torch.comm.control_store import install_rendezvous
from tests.adapters.worlds import Line

Numbers = list[float] | str
dnn: Any = _differentiable
coalescing_manager: Any = c10d._coalescing_manager
new_subgroups: Any = dist.new_subgroups


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(16)
        self.a = nn.Linear(16, 32)
        self.b = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(F.relu(self.a(self.n(x))))
        return y


def digest(tensors: Iterable[Tensor]) -> str:
    """Return a digest of the bits of local tensors."""
    found = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(local.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def functional_collectives(rank: int, size: int) -> Numbers:
    group = c10d._get_default_group()
    x = torch.full((4,), float(rank + 1))
    out = [
        fc.all_reduce(x, "sum", group),
        fc.all_gather_tensor(x, 0, group),
        fc.reduce_scatter_tensor(torch.arange(4.0 * size), "sum", 0, group),
        fc.all_to_all_single(torch.arange(float(2 * size)) + rank, None, None, group),
        fc.broadcast(x, 0, group),
        *fc.all_reduce_coalesced([x, x.clone()], "sum", group),
        *fc.all_gather_into_tensor_coalesced([x, x.clone()], group),
        *fc.reduce_scatter_tensor_coalesced(
            [torch.ones(4 * size), torch.arange(2.0 * size)], "sum", [0, 0], group
        ),
    ]
    return digest([t + 0 for t in out])


def functional_autograd(rank: int, size: int) -> Numbers:
    group = c10d._get_default_group()
    x = torch.ones(4 * size, requires_grad=True)
    y: Any = fc.all_gather_tensor_autograd(fc.reduce_scatter_tensor_autograd(x, "sum", 0, group), 0, group)
    total: Any = (y * torch.arange(4.0 * size)).sum()
    total.backward()
    z = torch.ones(3, requires_grad=True)
    dnn.all_reduce(z * (rank + 1)).sum().backward()
    gathered: Any = torch.stack(dnn.all_gather(z)).sum()
    gathered.backward()
    dnn.reduce_scatter(torch.empty(3), [z * i for i in range(size)]).sum().backward()
    assert x.grad is not None and z.grad is not None
    return digest([x.grad, z.grad])


def tensor_parallel(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = MLP()
    alone = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(model, mesh, {"a": ColwiseParallel(), "b": RowwiseParallel()})
    x = torch.randn(4, 16)
    y = model(x)
    assert torch.allclose(y, alone(x), atol=1e-5)
    y.sum().backward()
    t = distribute_tensor(torch.randn(8, 8), mesh, [Shard(0)])
    t = t.redistribute(mesh, [Shard(1)]).redistribute(mesh, [Replicate()])
    p = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()]).redistribute(mesh, [Shard(0)])
    return digest([*grads(model), t.full_tensor(), p.full_tensor()])


def sequence_parallel(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = MLP()
    mesh = init_device_mesh("cpu", (size,))
    plan: dict[str, Any] = {
        "n": SequenceParallel(),
        "a": ColwiseParallel(input_layouts=Shard(1)),
        "b": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh, plan)
    model(torch.randn(2, 8, 16)).sum().backward()
    x = distribute_tensor(torch.randn(4, 8, requires_grad=True), mesh, [Shard(1)])
    with loss_parallel():
        loss: Any = F.cross_entropy(x, torch.randint(8, (4,)))
        loss.backward()
    return digest(grads(model))


def _train(model: Any, steps: int = 3) -> str:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters())


def fsdp2(rank: int, size: int) -> Numbers:
    torch.manual_seed(rank)
    model = nn.Sequential(MLP(), MLP())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return _train(model)


def fsdp1(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(nn.Sequential(MLP(), MLP()), device_id=torch.device("cpu"))
    return _train(model)


def hsdp(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(MLP(), MLP())
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return _train(model)


def fsdp_and_tensor_parallel(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(MLP(), MLP())
    for layer in model:
        parallelize_module(layer, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    flat = mesh["dp", "tp"]._flatten("all")
    ones = torch.ones(1)
    dist.all_reduce(ones, group=flat.get_group())
    assert ones.item() == 4
    return _train(model)


def _pipeline(schedule: Any, rank: int, size: int) -> Numbers:
    torch.manual_seed(rank)
    module = nn.Linear(16, 16)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    run = schedule(stage, 4, loss_fn=lambda out, target: ((out - target) ** 2).mean())
    for _ in range(3):
        if rank == 0:
            run.step(torch.randn(8, 16))
        else:
            run.step(target=torch.randn(8, 16), losses=[])
    return digest(grads(module))


def pipeline_gpipe(rank: int, size: int) -> Numbers:
    return _pipeline(ScheduleGPipe, rank, size)


def pipeline_1f1b(rank: int, size: int) -> Numbers:
    return _pipeline(Schedule1F1B, rank, size)


def point_to_point(rank: int, size: int) -> Numbers:
    x = torch.ones(3) * rank
    if rank == 0:
        dist.send(x, 1)
        work = dist.isend(x, 1)
        assert work is not None
        work.wait()
        dist.send(torch.full((3,), 7.0), 1)
        dist.send_object_list([{"a": 5}], 1)
    else:
        dist.recv(x, 0)
        work = dist.irecv(x, 0)
        assert work is not None
        work.wait()
        y = torch.zeros(3)
        assert dist.recv(y) == 0 and y[0] == 7
        got: list[Any] = [None]
        dist.recv_object_list(got, 0)
        assert got == [{"a": 5}]
    z = torch.zeros(3)
    ops = [dist.P2POp(dist.isend, torch.ones(3) * rank, 1 - rank), dist.P2POp(dist.irecv, z, 1 - rank)]
    for batched in dist.batch_isend_irecv(ops):
        batched.wait(timedelta(seconds=20))
    return [*x.tolist(), *z.tolist()]


def all_to_all(rank: int, size: int) -> Numbers:
    a = torch.empty(4)
    dist.all_to_all_single(a, torch.arange(4.0) + 10 * rank)
    sizes = [1, 3] if rank == 0 else [3, 1]
    b = torch.empty(4)
    dist.all_to_all_single(b, torch.ones(4) * rank, sizes, sizes)
    c = [torch.empty(2), torch.empty(2)]
    dist.all_to_all(c, [torch.ones(2) * rank, torch.ones(2) * rank])
    return digest([a, b, *c])


def plain_collectives(rank: int, size: int) -> Numbers:
    x = torch.ones(2) * (rank + 1)
    found = []
    dist.reduce(x, 0)
    dist.broadcast(x, 0)
    rows = [torch.empty(2) for _ in range(size)]
    dist.all_gather(rows, x)
    found += [t.clone() for t in rows]
    dist.gather(x, rows if rank == 0 else None, 0)
    dist.scatter(x, rows if rank == 0 else None, 0)
    dist.reduce_scatter(x, [torch.arange(2.0) + i for i in range(size)])
    found.append(x.clone())
    flat = torch.empty(2 * size)
    dist.all_gather_into_tensor(flat, x)
    dist.reduce_scatter_tensor(x, torch.arange(2.0 * size), op=dist.ReduceOp.MAX)
    dist.barrier()
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT, dist.ReduceOp.BAND):
        whole = torch.arange(2) + rank
        dist.all_reduce(whole, op=op)
        found.append(whole)
    half = torch.ones(2, dtype=torch.bfloat16)
    dist.all_reduce(half)
    return digest([*found, flat, x, half.float()])


def reduce_scatter_bits(rank: int, size: int) -> Numbers:
    """Return sums whose order matters. Holdfast's algorithm differs from gloo's and must give the same bits."""
    torch.manual_seed(rank)
    out, single = torch.empty(100_003), torch.empty(100_003)
    source = torch.randn(100_003 * size) * 1e3
    dist.reduce_scatter_tensor(single, source)
    dist.reduce_scatter(out, list(source.chunk(size)))
    return digest([out, single])


def coalescing(rank: int, size: int) -> Numbers:
    x, y = torch.ones(2), torch.ones(3) * rank
    with coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    out = torch.empty(2 * size)
    with coalescing_manager():
        dist.all_gather_into_tensor(out, x)
    refused = ""  # torch's own bookkeeping is broken after this: nothing may follow in this world
    try:
        with coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(x)
    except RuntimeError as error:
        refused = str(error)[:40]
    return digest([x, y, out]) + refused


def objects(rank: int, size: int) -> Numbers:
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank})
    from_first = [rank]
    dist.broadcast_object_list(from_first, 0)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [10, 11] if rank == 0 else None, 0)
    return repr((everyone, from_first, gathered, mine))


def asynchronous(rank: int, size: int) -> Numbers:
    x = torch.ones(4) * (rank + 1)
    first = dist.all_reduce(x, async_op=True)
    first.wait()
    assert first.is_completed() and first.is_success()
    second = dist.all_reduce(x, async_op=True)
    value = second.get_future().wait()
    third = dist.all_reduce(x, async_op=True)
    doubled = third.get_future().then(lambda f: f.value()[0] * 2).wait()
    third.wait(timedelta(seconds=20))
    fourth = torch.empty(4)
    scattered = dist.reduce_scatter_tensor(fourth, torch.arange(8.0), async_op=True)
    scattered.wait()
    return digest([x, value[0], doubled, fourth])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        y: Tensor = self.b(self.a(x))
        return self.c(y) if both else y


def _ddp(rank: int, prepare: Callable[[DDP], None] | None = None, **options: Any) -> str:
    torch.manual_seed(0)
    model = DDP(Two(), **options)
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for i in range(5):
        model(torch.randn(4, 8), "find_unused_parameters" not in options or i % 2 == 0).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return digest(model.parameters())


def ddp_variants(rank: int, size: int) -> Numbers:
    found = [
        _ddp(rank),
        _ddp(rank, find_unused_parameters=True),
        _ddp(rank, gradient_as_bucket_view=True),
        _ddp(rank, static_graph=True),
        _ddp(rank, lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook)),
        _ddp(rank, lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    ]
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    found.append(_ddp(rank, lambda m: m.register_comm_hook(state, powerSGD_hook.powerSGD_hook)))
    return " ".join(found)


def ddp_join(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    with model.join():
        for _ in range(3 + rank):
            model(torch.randn(3, 4)).sum().backward()
    return digest(model.parameters())


def zero_one(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    # The import warns, which is an error under pytest.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return digest(model.parameters())


def subgroups(rank: int, size: int) -> Numbers:
    alone = dist.new_group([0])
    x = torch.ones(1)
    if rank == 0:
        dist.all_reduce(x, group=alone)
    else:
        assert dist.get_rank(alone) == -1
    turned = dist.new_group([1, 0])
    dist.all_reduce(x, group=turned)
    new_subgroups(1)
    again = dist.new_group(backend="gloo")
    dist.all_reduce(x, group=again)
    assert dist.get_process_group_ranks(turned) == [0, 1]
    dist.destroy_process_group(again)
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return [x.item()]


def distributed_checkpoint(rank: int, size: int) -> Numbers:
    where = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(where, 0)
    torch.manual_seed(rank)
    model = nn.Sequential(MLP())
    fully_shard(model)
    before = digest(model.parameters())
    dcp_save({"model": model.state_dict()}, checkpoint_id=where[0])
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    dcp_load({"model": model.state_dict()}, checkpoint_id=where[0])
    assert digest(model.parameters()) == before
    return before


def compiled_collective(rank: int, size: int) -> Numbers:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def f(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y)
        return y + 1

    found: list[float] = f(torch.ones(3)).tolist()
    return found


def compiled_ddp(rank: int, size: int) -> Numbers:
    torch.manual_seed(0)
    model = torch.compile(
        DDP(nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8))), backend="aot_eager"
    )
    return _train(model)


def destroy_and_begin_again(rank: int, size: int) -> Numbers:
    dist.destroy_process_group()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    dist.destroy_process_group()
    dist.init_process_group()
    dist.all_reduce(x)
    return [x.item()]


TWO_RANKS: tuple[Callable[[int, int], Numbers], ...] = (
    *(functional_collectives, functional_autograd, tensor_parallel, sequence_parallel, fsdp2, fsdp1),
    *(pipeline_gpipe, pipeline_1f1b, point_to_point, all_to_all, plain_collectives, reduce_scatter_bits),
    *(objects, asynchronous, ddp_variants, ddp_join, zero_one, subgroups),
    *(distributed_checkpoint, compiled_collective, compiled_ddp, coalescing),
)
FOUR_RANKS: tuple[Callable[[int, int], Numbers], ...] = (hsdp, fsdp_and_tensor_parallel, reduce_scatter_bits)


def run_features(line: Line, names: list[str]) -> dict[str, Numbers]:
    """Run several features in one world; a failure names its feature."""
    install_rendezvous()  # a no-op where install() ran; the plain worlds have no other store
    dist.init_process_group("gloo")
    found: dict[str, Numbers] = {}
    for name in names:
        try:
            found[name] = globals()[name](line.rank, line.world_size)
        except BaseException as error:
            raise RuntimeError(f"in {name}: {type(error).__name__}: {error}") from error
    return found
