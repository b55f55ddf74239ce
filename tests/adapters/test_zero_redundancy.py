"""torch's ``ZeroRedundancyOptimizer``: one rank holds a parameter's state, and jobs of any size find it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.errors import CheckpointMismatch, StateError, UnsupportedError
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.save_plan import plan

torch = pytest.importorskip("torch")
dist = torch.distributed
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # warning of torch's own import
]


@contextmanager
def one_of(world_size: int, rank: int) -> Iterator[None]:
    """Make this process a rank whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(rank: int, world_size: int, kind: Any = torch.optim.AdamW, steps: int = 2) -> tuple[Any, Any, Any]:
    """Return model, optimizer and state of one rank, trained as that rank would be."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from holdfast.frameworks.torch.state.state import TorchState

    with one_of(world_size, rank):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=0.1)
        state = TorchState(model, {"default": optimizer})
        for step in range(steps):
            model(torch.full((2, 8), step / 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer, state


def of_ranks(world_size: int) -> dict[int, Any]:
    """Return the state that each rank holds."""
    return {rank: build(rank, world_size)[2].collect() for rank in range(world_size)}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_rank_finds_the_state_of_its_own_parameters(world_size: int) -> None:
    held = of_ranks(2)
    catalogue = catalogue_of({rank: each.layout(rank, 2).encode() for rank, each in held.items()})
    moments = {fqn: t for each in held.values() for fqn, t in each.tensors.items() if "(sharded)" in fqn}
    assert len(moments) == 4 * 3  # exp_avg, exp_avg_sq and step of four parameters
    found: dict[str, Any] = {}
    for rank in range(world_size):
        _, optimizer, state = build(rank, world_size, steps=0)
        restore = state.restore(catalogue, held[0].values, (rank, world_size))
        for meta, data in restore.buffers():
            giver = next(each for each in held.values() if meta.fqn in each.tensors)
            data[:] = giver.view(meta.fqn, meta.box)
        restore.finish()
        assert len(optimizer.optim.state) == sum(len(g["params"]) for g in optimizer.optim.param_groups)
        own = {fqn: t for fqn, t in state.collect().tensors.items() if "(sharded)" in fqn}
        assert not own.keys() & found.keys(), "no two ranks take the same"
        found |= own
    assert found.keys() == moments.keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in moments.items())


def test_what_the_dead_rank_held_is_missing_and_named() -> None:
    held = of_ranks(2)
    catalogue = catalogue_of({rank: each.layout(rank, 2).encode() for rank, each in held.items()})
    made = plan(catalogue, frozenset({0}))
    assert not made.complete and "optimizer.default(sharded).0.bias.exp_avg" in made.why_incomplete()


def test_an_update_is_undone_in_the_local_optimizer() -> None:
    from holdfast.frameworks.torch.state.optimizer_state import Undo

    model, optimizer, state = build(0, 2)
    before = {fqn: tensor.clone() for fqn, tensor in state.collect().tensors.items()}
    undo = Undo()
    undo.record(state.optimizers["default"].optimizer)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.optim.step()  # and no rank has sent its part
    changed = state.collect().tensors
    assert not torch.equal(changed["0.weight"], before["0.weight"])
    undo.restore()
    after = state.collect().tensors
    assert after.keys() == before.keys() and all(torch.equal(after[fqn], t) for fqn, t in before.items())


def test_state_that_is_loaded_by_the_script_is_seen() -> None:
    _, optimizer, state = build(0, 1)
    optimizer.optim.load_state_dict(optimizer.optim.state_dict())
    assert optimizer.state is not optimizer.optim.state
    tensors = state.collect().tensors
    assert tensors["optimizer.default(sharded).0.weight.exp_avg"] is optimizer.optim.state[
        optimizer.param_groups[0]["params"][0]
    ]["exp_avg"]  # fmt: skip


def test_another_local_optimizer_is_refused() -> None:
    held = of_ranks(1)
    catalogue = catalogue_of({0: held[0].layout(0, 1).encode()})
    _, _, state = build(0, 1, torch.optim.SGD, steps=0)
    with pytest.raises(
        CheckpointMismatch, match=r"ZeroRedundancyOptimizer\(AdamW\) with the settings .*\(SGD\)"
    ):
        state.restore(catalogue, held[0].values, (0, 1))


def test_what_cannot_be_exact_is_refused() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    from holdfast.frameworks.torch.state.optimizer_state import named_optimizers

    with one_of(2, 0):
        model = torch.nn.Linear(4, 2)
        overlapping = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1
        )
        with pytest.raises(
            UnsupportedError, match="ZeroRedundancyOptimizer communicates inside step"
        ) as caught:
            named_optimizers(overlapping)
        assert "overlap_with_ddp=False" in caught.value.hint
    _, optimizer, state = build(0, 1)
    next(iter(optimizer.optim.state.values()))["count"] = 3
    with pytest.raises(StateError, match="keeps a int as 'count'"):
        state.collect()
