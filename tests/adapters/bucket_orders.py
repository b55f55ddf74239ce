"""Work of the ranks of ``test_bucket_layouts.py``: DDP modules whose buckets are set without a pass."""

from __future__ import annotations

import copy
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.bucket_layouts import BucketLayouts, form_of
from holdfast.frameworks.torch.state.wrapper_reset import forget_pass
from tests.adapters.worlds import Line

FIRST = [[7, 6], [5, 4, 3, 2], [1, 0]]
OTHER = [[0, 2, 4, 6], [1, 3, 5, 7]]
CAP_MB = 0.0004


def _wrapped(group: Any = None, cap: float = CAP_MB, width: int = 8, **options: Any) -> DDP:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    return DDP(layers, process_group=group, bucket_cap_mb=cap, **options)


def _train(model: DDP, rank: int) -> float:
    """Make a pass, and return the largest difference of a gradient from the mean over the ranks of its group."""
    width = model.module[0].in_features
    x = torch.randn(4, width, generator=torch.Generator().manual_seed(rank))
    model.zero_grad()
    (model(x) ** 2).sum().backward()
    alone = copy.deepcopy(model.module)
    alone.zero_grad()
    (alone(x) ** 2).sum().backward()
    worst = 0.0
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        dist.all_reduce(theirs.grad, group=model.process_group)
        mean = theirs.grad / dist.get_world_size(model.process_group)
        worst = max(worst, float((ours.grad - mean).abs().max()))
    return worst


def set_buckets(line: Line) -> dict[str, Any]:
    """Set given layouts, a wrong one and the order of the parameters, and train after each of them."""
    dist.init_process_group("gloo")
    model = _wrapped()
    seen: dict[str, Any] = {"given": private_api.rebuild_buckets(model, FIRST), "refused": 0}
    wrong: list[list[list[int]]] = [[[1, 0]], [[*range(9)]]]
    for layout in wrong:
        try:
            private_api.rebuild_buckets(model, layout)
        except RuntimeError:
            seen["refused"] += 1
    errors = [_train(model, line.rank)]
    seen["ordered"] = private_api.rebuild_buckets(model, [])
    errors.append(_train(model, line.rank))
    forget_pass(model)
    errors.append(_train(model, line.rank))
    seen["recorded"] = private_api.rebuild_buckets(model)
    errors += [_train(model, line.rank) for _ in range(2)]
    seen["logged"] = private_api.logged_buckets(model)
    return {**seen, "error": max(errors)}


def load(line: Line, cap: float, static: bool) -> dict[str, Any]:
    """Train one step, and give the layout of this process to a new one, whose buckets may have another limit."""
    dist.init_process_group("gloo")
    old = _wrapped()
    layouts = BucketLayouts([old], 2)
    before = layouts.values()
    _train(old, line.rank)
    layouts.build()
    new = _wrapped(cap=cap, static_graph=static)
    joined = BucketLayouts([new], 2)
    joined.load(layouts.values())
    rehearses = joined.needs_rehearsal(looped=True)
    return {
        "before": before,
        "rehearses": rehearses,
        "unready": joined.unready,
        "values": rehearses or joined.values() == layouts.values(),
        "excused": joined.give_up(),
    }


def load_used(line: Line, find: bool) -> dict[str, Any]:
    """Train with a layer that one rank alone uses, then load the layout in a new process and rehearse there alone."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
    options: dict[str, Any] = {"static_graph": True, "find_unused_parameters": find}
    old, new = (DDP(_Branch(copy.deepcopy(layers), line.rank), **options) for _ in range(2))
    layouts = BucketLayouts([old], 2)
    for _ in range(3):
        old(torch.ones(1, 8)).sum().backward()
        layouts.build()
    joined = BucketLayouts([new], 2)
    joined.load(layouts.values())
    fabric().loopback()
    while joined.needs_rehearsal(looped=True):
        new.zero_grad()
        new(torch.ones(1, 8)).sum().backward()
        joined.rehearsed(computed=True)
    forget_pass(new)
    fabric().reconfigure(fabric().generation)
    fabric().shield(True)  # another block
    for model in (old, new):
        model.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
    pairs = zip(old.parameters(), new.parameters(), strict=True)
    return {
        "equal": [a.grad is not None and torch.equal(a.grad, b.grad) for a, b in pairs if b.grad is not None]
    }


def read_in_a_pass(line: Line) -> dict[str, Any]:
    """Read the layouts in another thread while DDP calls its communication hook, in the middle of a backward pass."""
    dist.init_process_group("gloo")
    model = _wrapped(static_graph=True)
    layouts = BucketLayouts([model], 2)
    read: list[Any] = []

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        reader = threading.Thread(target=lambda: read.append(layouts.values()))
        reader.start()
        reader.join()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    # DDP compares the annotations with these types, and not with their names.
    kind = vars(dist)["GradBucket"]
    hook.__annotations__ = {"bucket": kind, "return": torch.futures.Future[torch.Tensor]}
    model.register_comm_hook(None, hook)
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        layouts.build()
    return {"used": read[-1][0]["used"]}


class _Branch(nn.Module):
    """A model of two layers; rank 1 uses the first one alone."""

    def __init__(self, layers: nn.ModuleList, rank: int) -> None:
        super().__init__()
        self.layers, self.rank = layers, rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [n, 8] -> [n, 8]."""
        x = self.layers[0](x)
        out: torch.Tensor = x if self.rank else self.layers[1](x)
        return out


def agree(line: Line, known: list[Any]) -> dict[str, Any]:
    """Let the ranks agree; ``known`` has the layout of each rank, None for none."""
    dist.init_process_group("gloo")
    model = _wrapped()
    layouts = BucketLayouts([model], len(known))
    mine = known[line.rank]
    if mine is None:
        layouts.give_up()
    else:
        _build(layouts, model, mine)
    layouts.agree(line.rank, partial=False, vote=fabric().reduce_vote)
    errors = [_train(model, line.rank) for _ in range(3)]
    return {"values": _buckets(layouts), "error": max(errors)}


def agree_in_groups(line: Line) -> dict[str, Any]:
    """Let the ranks agree in two groups of two, with different models. One rank of each has no layout."""
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    half = line.rank % 2
    model = _wrapped(groups[half], width=8 + 4 * half)
    layouts = BucketLayouts([model], 4)
    if line.rank in (1, 2):
        _build(layouts, model, [FIRST, OTHER][half])
    layouts.agree(line.rank, partial=True, vote=fabric().reduce_vote)
    errors = [_train(model, line.rank) for _ in range(3)]
    return {"values": _buckets(layouts), "error": max(errors)}


def agree_unknown(line: Line) -> dict[str, Any]:
    """Rank 0 has final buckets that its layouts do not know, and rank 1 has none."""
    dist.init_process_group("gloo")
    model = _wrapped()
    layouts = BucketLayouts([model], 2)
    if line.rank == 0:
        private_api.rebuild_buckets(model, FIRST)
    layouts.agree(line.rank, partial=False, vote=fabric().reduce_vote)
    errors = [_train(model, line.rank) for _ in range(3)]
    return {"values": _buckets(layouts), "error": max(errors)}


def _build(layouts: BucketLayouts, model: DDP, layout: list[list[int]]) -> None:
    """Let the process take ``layout`` from a loaded state."""
    layouts.load([{"of": form_of(model), "buckets": layout}])
    assert not layouts.needs_rehearsal(looped=True)


def _buckets(layouts: BucketLayouts) -> Any:
    values: Any = layouts.values()
    return [None if each is None else each["buckets"] for each in values]
