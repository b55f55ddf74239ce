"""The restoring of optimizer state that the optimizer itself splits among the ranks, as ZeRO and Muon do.

Such an optimizer reduces each gradient so that a rank receives only one region of the sum. The rank updates this region
of the parameter, and then gathers the whole parameter. So the optimizer state of a rank covers one region, while its
parameter is whole. The optimizer declares the region with :func:`~holdfast.torch.declare`. A process that begins
without state cannot know the regions. The catalogue of the checkpoint has them, because the ranks declared them while
they trained.

Other optimizers keep the whole state of a parameter on one rank, which computes the update and sends it to all (Muon).
Then the catalogue has fewer holders for that state than for the parameter. A process takes the state of which it was
the holder, and no other: a copy that it never updates would be out of date, and would differ from the state of the
holder.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch.distributed.tensor import DTensor

from holdfast.errors import CheckpointMismatch
from holdfast.frameworks.common.state_tree import Plain, tensor_value
from holdfast.frameworks.torch.state.boxes import TORCH_DTYPES, declare, region_of
from holdfast.store.layouts.layout import Box, Catalogue, TensorEntry
from holdfast.store.layouts.layout_completion import PREFIX, SHARDED, optimizer_of, parameter_of
from holdfast.text import plural


class HandCut:
    """One rank's parts of optimizer state that the optimizer itself splits, from the catalogue of a checkpoint.

    Args:
        catalogue: catalogue of the checkpoint that is loaded.
        rank, world_size: rank of this process and number of ranks now.
    """

    def __init__(self, catalogue: Catalogue, rank: int, world_size: int) -> None:
        self._catalogue = catalogue
        self._rank = rank
        self._world_size = world_size
        self._known: dict[tuple[int, tuple[int, ...]], frozenset[int]] = {}  # holders, by grid and shape

    def kept(self, prefix: str, parameter: str, items: Mapping[str, Plain]) -> Mapping[str, Plain]:
        """Return the saved state of a parameter that belongs to this rank.

        Args:
            prefix: start of the names of the optimizer's entries.
            parameter: name of the parameter.
            items: its state in the plain values, which any rank may have saved.

        Returns:
            ``items`` if all holders of the parameter hold its state; otherwise the tensors that this rank held.

        Raises:
            CheckpointMismatch: some holders of the parameter hold its state, and the number of ranks has changed or the
                state contains other values than tensors.
        """
        entries = self._apart.get(f"{prefix}.{parameter}", ())
        if not entries or self._world_size == 1:
            return {**items, **{key: tensor_value(entry.fqn) for key, entry in entries if key not in items}}
        if self._catalogue.world != self._world_size:
            raise CheckpointMismatch(
                f"{entries[0][1].fqn}: the optimizer kept it on some of {plural(self._catalogue.world, 'rank')}, and "
                f"this is rank {self._rank} of {self._world_size}",
                hint="start with as many ranks as wrote it",
            )
        plain = sorted(items.keys() - {key for key, _ in entries})
        if plain or any("." in key for key, _ in entries):
            raise CheckpointMismatch(
                f"{entries[0][1].fqn}: the optimizer keeps the state of a parameter on some ranks, and with it "
                f"{', '.join(map(repr, plain)) or 'tensors in containers'}: only tensors can be distinguished by rank",
                hint="keep each value of a parameter's state as a tensor",
            )
        own = [(key, entry) for key, entry in entries if self._rank in self._holders(entry)]
        return {key: items.get(key, tensor_value(entry.fqn)) for key, entry in own}

    @cached_property
    def _apart(self) -> dict[str, list[tuple[str, TensorEntry]]]:
        """Optimizer entries with fewer holders than their parameter has, as lists by optimizer and parameter."""
        found: dict[str, list[tuple[str, TensorEntry]]] = {}
        tensors = self._catalogue.by_fqn
        for entry in self._catalogue.tensors:
            optimizer = optimizer_of(entry.fqn)
            name = parameter_of(entry.fqn, tensors) if optimizer else None
            if name is None or optimizer.endswith(SHARDED):
                continue
            kinds = [(each.grid, each.shape) for each in (entry, tensors[name])]
            if kinds[0] != kinds[1] and self._holders(entry) < self._holders(tensors[name]):
                begin = f"{PREFIX}{optimizer}.{name}"
                found.setdefault(begin, []).append((entry.fqn.removeprefix(f"{begin}."), entry))
        return found

    def _holders(self, entry: TensorEntry) -> frozenset[int]:
        kind = entry.grid, entry.shape
        if kind not in self._known:
            self._known[kind] = frozenset(rank for _, ranks in self._catalogue.boxes(entry) for rank in ranks)
        return self._known[kind]

    @cached_property
    def _own(self) -> dict[str, list[Box]]:
        found: dict[str, list[Box]] = {}
        for tensor, box, _ in self._catalogue.held_by(self._rank):
            found.setdefault(tensor.fqn, []).append(box)
        return found

    def allocate(
        self, entry: TensorEntry, parameter: str, like: torch.Tensor, there: object
    ) -> torch.Tensor | None:
        """Return memory for this rank's part of one tensor of the optimizer's state.

        Args:
            entry: the tensor in the catalogue.
            parameter: name of the parameter that it belongs to.
            like: that parameter in this process.
            there: the optimizer's present value; it is returned if it is declared as a part of the same tensor.

        Returns:
            None if the state is whole, or split in the same way as its parameter.

        Raises:
            CheckpointMismatch: the state was split for another number of ranks, and the present optimizer state
                declares no part.
        """
        if isinstance(there, DTensor) or not self._is_cut(entry, parameter):
            return None
        dtype = TORCH_DTYPES[entry.dtype]
        region = region_of(there) if isinstance(there, torch.Tensor) else None
        if isinstance(there, torch.Tensor) and region is not None and region.shape == entry.shape:
            if there.dtype is dtype and not there.requires_grad:
                return there
        boxes = self._own.get(entry.fqn, []) if self._catalogue.world == self._world_size else []
        if len(boxes) != 1:
            raise CheckpointMismatch(
                f"{entry.fqn}: the optimizer cut it for {plural(self._catalogue.world, 'rank')}, and this is rank "
                f"{self._rank} of {self._world_size}",
                hint="start with as many ranks as wrote it; or make the optimizer's state, and declare() it, before "
                "the session",
            )
        (box,) = boxes
        made = torch.empty(box.sizes, dtype=dtype, device=like.device)
        declare(made, entry.shape, box.offsets)
        return made

    def _is_cut(self, entry: TensorEntry, parameter: str) -> bool:
        of_parameter = self._catalogue.by_fqn.get(parameter)
        if not entry.shape or of_parameter is None:
            return False
        if (entry.grid, entry.shape) == (of_parameter.grid, of_parameter.shape):
            return False
        boxes = {box for box, _ in self._catalogue.boxes(entry)}
        if all(box.sizes == entry.shape for box in boxes):
            return False
        return boxes != {box for box, _ in self._catalogue.boxes(of_parameter)}
