"""Plain tensors that are declared to be regions of larger ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from holdfast.adapters.torch.boxes import declare
from holdfast.adapters.torch.state import TorchState
from holdfast.core.ids import NO_GENERATION, SaveId
from holdfast.errors import StateError
from holdfast.store.layout import Box, Catalogue
from holdfast.store.plan import plan
from holdfast.store.reader import Target, load_into
from holdfast.store.writer import write_share

pytestmark = pytest.mark.torch


class Cut(torch.nn.Module):
    """Rows of a 6 x 4 weight, declared so."""

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
    whole = Cut(0, 6)  # as one rank, without any state yet
    fresh = TorchState(whole, {"default": torch.optim.AdamW(whole.parameters())})
    restore = fresh.restore(catalogue, sources[0].values)
    targets = [Target(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()]
    load_into(tmp_path / save_id.directory(), targets)
    restore.finish()
    parts = [state.names.parameters["weight"] for state in states]
    assert torch.equal(whole.weight.detach(), torch.cat(parts).detach())
    moment = fresh.collect().tensors[moments]
    assert torch.equal(moment, torch.cat([source.tensors[moments] for source in sources]))


def test_regions_that_cannot_be() -> None:
    with pytest.raises(StateError, match="is no region of"):
        declare(torch.zeros(2, 2), shape=(4, 2), offsets=(3, 0))
    marked = torch.nn.Linear(2, 2)
    marked.weight.tensor_model_parallel = True  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="weight is one part of a tensor-parallel weight"):
        TorchState(marked, {})
