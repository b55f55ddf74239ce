"""Plain tensors that are declared as regions of larger ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint

from holdfast.core.ids import NO_GENERATION, SaveId
from holdfast.errors import CheckpointMismatch, StateError
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state.boxes import CHECKPOINTABLE, declare, region_of
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.layouts.layout import Box, Catalogue
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read.load import LoadTarget, load_into
from holdfast.store.write.writer import write_share

pytestmark = pytest.mark.torch


class Cut(torch.nn.Module):
    """A module with some rows of a 6 x 4 weight, declared as such."""

    def __init__(self, first: int, rows: int) -> None:
        super().__init__()
        whole = torch.arange(24.0).reshape(6, 4)
        self.weight = torch.nn.Parameter(whole[first : first + rows].clone())
        declare(self.weight, shape=(6, 4), offsets=(first, 0))


def test_declared_region_is_saved_and_loaded_as_such(tmp_path: Path) -> None:
    def trained(first: int, rows: int) -> TorchState:
        model = Cut(first, rows)
        optimizer = torch.optim.AdamW(model.parameters())
        model.weight.grad = torch.ones_like(model.weight) * (1 + torch.arange(first, first + rows)[:, None])
        optimizer.step()
        return TorchState(model, {"default": optimizer})

    states = [trained(0, 2), trained(2, 4)]
    sources = [state.collect() for state in states]
    layouts = [source.layout(rank, 2) for rank, source in enumerate(sources)]
    moments = "optimizer.default.weight.exp_avg"
    boxes = {(m.fqn, m.shape, m.box) for layout in layouts for m in layout.tensors if m.shape}
    assert boxes == {
        (name, (6, 4), Box((first, 0), (rows, 4)))
        for name in ("weight", moments, f"{moments}_sq")
        for first, rows in ((0, 2), (2, 4))
    }
    catalogue = Catalogue.from_layouts(dict(enumerate(layouts)))
    made = plan(catalogue, frozenset((0, 1)))
    save_id = SaveId("run", NO_GENERATION, 1, 0, "final")
    for rank, source in enumerate(sources):
        write_share(tmp_path, save_id, catalogue, made, rank, source, source.values, {})
    whole = Cut(0, 6)  # as one rank, without any optimizer state yet
    fresh = TorchState(whole, {"default": torch.optim.AdamW(whole.parameters())})
    restore = fresh.restore(catalogue, sources[0].values)
    targets = [LoadTarget(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()]
    load_into(tmp_path / save_id.directory(), targets)
    restore.finish()
    parts = [state.names.parameters["weight"] for state in states]
    assert torch.equal(whole.weight.detach(), torch.cat(parts).detach())
    moment = fresh.collect().tensors[moments]
    assert torch.equal(moment, torch.cat([source.tensors[moments] for source in sources]))


class Shards(torch.nn.Module):
    """A module with rows of a 6 x 4 weight in a padded tensor, with no attributes but ``CheckpointableTensor``'s."""

    def __init__(self, rows: list[tuple[int, int]], padding: int = 1) -> None:
        super().__init__()
        whole = torch.arange(24.0).reshape(6, 4)
        cut = [whole[first : first + count] for first, count in rows]
        self.weight = torch.nn.Parameter(torch.cat([*cut, torch.full((padding, 4), -1.0)]))
        offer(self.weight, rows)
        self.register_buffer("scale", self.weight.detach().clone())
        offer(self.get_buffer("scale"), rows)


def offer(tensor: torch.Tensor, rows: list[tuple[int, int]]) -> None:
    """Set the attributes of DCP's protocol. Each pair is the first row in the global tensor and the number of rows."""
    starts = [sum(count for _, count in rows[:number]) for number in range(len(rows))]
    tensor.global_shape = (6, 4)  # type: ignore[attr-defined]
    tensor.global_offsets = tuple((first, 0) for first, _ in rows)  # type: ignore[attr-defined]
    tensor.local_offsets = tuple((start, 0) for start in starts)  # type: ignore[attr-defined]
    tensor.local_sizes = tuple((count, 4) for _, count in rows)  # type: ignore[attr-defined]


def test_a_checkpointable_tensor_is_saved_and_loaded_as_its_shards(tmp_path: Path) -> None:
    """DCP's protocol of torch 2.15 allows several shards in one tensor, and padding that no checkpoint holds."""
    rows = [[(0, 2), (4, 1)], [(5, 1), (2, 2)]]
    states = []
    for held in rows:
        model = Shards(held)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        model.weight.grad = model.weight.detach().clone()
        optimizer.step()
        states.append(TorchState(model, {"default": optimizer}))
    sources = [state.collect() for state in states]
    layouts = [source.layout(rank, 2) for rank, source in enumerate(sources)]
    moments = "optimizer.default.weight.exp_avg"
    for rank, held in enumerate(rows):
        for name in ("weight", "scale", moments):
            boxes = {m.box for m in layouts[rank].tensors if m.fqn == name and m.shape == (6, 4)}
            assert boxes == {Box((first, 0), (count, 4)) for first, count in held}
    catalogue = Catalogue.from_layouts(dict(enumerate(layouts)))
    save_id = SaveId("run", NO_GENERATION, 1, 0, "final")
    for rank, source in enumerate(sources):
        made = plan(catalogue, frozenset((0, 1)))
        write_share(tmp_path, save_id, catalogue, made, rank, source, source.values, {})
    for again in ([(0, 6)], [(3, 3)]):
        model = Shards(again, padding=2)
        with torch.no_grad():
            model.weight.fill_(-2.0)
        fresh = TorchState(model, {"default": torch.optim.AdamW(model.parameters())})
        restore = fresh.restore(catalogue, sources[0].values)
        targets = [LoadTarget(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()]
        load_into(tmp_path / save_id.directory(), targets)
        restore.finish()
        ((first, count),) = again
        whole = torch.arange(24.0).reshape(6, 4)[first : first + count]
        assert torch.equal(model.weight.detach(), torch.cat([whole, torch.full((2, 4), -2.0)]))
        moment = torch.zeros(count, 4).lerp_(whole, 1 - 0.9)  # as AdamW computes it
        found = fresh.collect().tensors[moments]
        assert torch.equal(found, torch.cat([moment, torch.zeros(2, 4)])), "padding is not left to chance"


def test_copies_of_a_block_keep_their_shards() -> None:
    """The copies made at the start of a block have the layout of the live state, buffers and user tensors included."""
    model, average = Shards([(0, 2)]), torch.zeros(3, 4)
    offer(average, [(0, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    adapter = TorchAdapter(model, optimizer, None, None, {"average": average}, 0)
    adapter.begin(0)
    now, before = adapter.collect().layout(0, 1), adapter.collect(frozen=True).layout(0, 1)
    assert before == now
    assert {m.shape for m in now.tensors} == {(6, 4)}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("global_offsets", ((5, 0),)),
        ("global_offsets", ((0, 0), (2, 0))),
        ("local_offsets", ((2, 0),)),
        ("local_sizes", ((2,),)),
        ("global_shape", (6, 4, 1)),
    ],
)
def test_shards_that_cannot_be(name: str, value: object) -> None:
    model = Shards([(0, 2)])
    setattr(model.weight, name, value)
    with pytest.raises(StateError, match=r"weight: .* says that it holds shards") as caught:
        TorchState(model, {})
    assert "CheckpointableTensor" in caught.value.hint


def test_attributes_that_are_not_all_there_say_nothing() -> None:
    model = Shards([(0, 2)])
    del model.weight.local_sizes  # type: ignore[attr-defined]
    (weight,) = [m for m in TorchState(model, {}).collect().layout(0, 1).tensors if m.fqn == "weight"]
    assert weight.shape == (3, 4)


@pytest.mark.skipif(not hasattr(checkpoint, "CheckpointableTensor"), reason="torch has it from 2.15 on")
def test_the_protocol_is_the_one_of_torch() -> None:
    protocol: Any = vars(checkpoint)["CheckpointableTensor"]
    assert tuple(protocol.__annotations__) == CHECKPOINTABLE
    assert isinstance(Shards([(0, 2)]).weight, protocol)


def test_regions_that_cannot_be() -> None:
    with pytest.raises(StateError, match="is no region of"):
        declare(torch.zeros(2, 2), shape=(4, 2), offsets=(3, 0))
    marked = torch.nn.Linear(2, 2)
    marked.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="weight is one part of a tensor-parallel weight"):
        TorchState(marked, {})


class Cutting(torch.optim.Optimizer):
    """An optimizer that keeps the state of its rows only, and declares it."""

    def __init__(self, parameters: Any, rank: int) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rank = rank

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["momentum"] = torch.full((3, 4), float(self.rank))
                declare(self.state[p]["momentum"], p.shape, (3 * self.rank, 0))


def _cutting(rank: int, *, stepped: bool) -> TorchState:
    model = torch.nn.Linear(4, 6, bias=False)
    optimizer = Cutting(model.parameters(), rank)
    if stepped:
        optimizer.step()
    return TorchState(model, {"default": optimizer})


def test_state_that_an_optimizer_cuts_comes_back_in_its_parts() -> None:
    sources = [_cutting(rank, stepped=True).collect() for rank in range(2)]
    catalogue = Catalogue.from_layouts({rank: each.layout(rank, 2) for rank, each in enumerate(sources)})
    name = "optimizer.default.weight.momentum"
    for stepped in (False, True):
        fresh = _cutting(1, stepped=stepped)
        restore = fresh.restore(catalogue, sources[0].values, (1, 2))
        for meta, data in restore.buffers():
            data[:] = sources[1].view(meta.fqn, meta.box)
        restore.finish()
        again = fresh.collect()
        assert torch.equal(again.tensors[name], torch.ones(3, 4))
        assert list(again.parts(name)) == [Box((3, 0), (3, 4))]


def test_another_number_of_ranks_cannot_load_what_an_optimizer_cut() -> None:
    sources = [_cutting(rank, stepped=True).collect() for rank in range(2)]
    catalogue = Catalogue.from_layouts({rank: each.layout(rank, 2) for rank, each in enumerate(sources)})
    with pytest.raises(
        CheckpointMismatch, match=r"weight\.momentum: .* for 2 ranks, and this is rank 0 of 3"
    ):
        _cutting(0, stepped=False).restore(catalogue, sources[0].values, (0, 3))


def test_nothing_follows_for_a_rank_that_has_not_declared_its_part_yet() -> None:
    layouts = {
        0: _cutting(0, stepped=True).collect().layout(0, 2),
        1: _cutting(1, stepped=False).collect().layout(1, 2),
    }
    catalogue = catalogue_of({rank: layout.encode() for rank, layout in layouts.items()})
    entry = catalogue.by_fqn["optimizer.default.weight.momentum"]
    assert catalogue.boxes(entry) == [(Box((0, 0), (3, 4)), (0,))]


def test_a_declared_tensor_in_a_file_of_the_script_needs_no_class_of_holdfast(tmp_path: Path) -> None:
    """Regression: ``torch.load`` refused such a file, because a class of Holdfast was in it."""
    held = torch.zeros(2, 4)
    declare(held, shape=(6, 4), offsets=(2, 0))
    torch.save({"queue": held}, tmp_path / "queue.pth")
    read = torch.load(tmp_path / "queue.pth", weights_only=True)["queue"]
    assert torch.equal(read, held) and region_of(read) == region_of(held) is not None
