"""The state of torch's ``ZeroRedundancyOptimizer``, in which each rank updates some parameters and sends them to all.

Theory. Its ``step()`` communicates, so the loss of a rank during ``step()`` leaves some parameters updated and others
not. The update is therefore *tentative*: it is made before the vote, after a copy of the weights and of this rank's
optimizer state. If the update fails, it is undone, like an update inside ``step.update(name)``. The state of a
parameter lies whole on the rank that updates the parameter. The parameters and the number of ranks determine that
rank. So a process that begins without state knows its tensors in a checkpoint, even if another number of ranks wrote
the checkpoint.

Invariants:
1. The optimizer's ``state`` and the ``state`` of its local optimizer are the same object.
2. Every value of the state of a parameter is a tensor, so the catalogue names it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holdfast.errors import StateError
from holdfast.frameworks.common.state_tree import Leaf, Plain, tensor_value
from holdfast.frameworks.torch.state.hand_sharded import HandCut
from holdfast.frameworks.torch.state.optimizer_state import OptimizerState, local_part, parameters_of
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.layout_completion import PREFIX, SHARDED

log = logging.getLogger("holdfast")


def state_of(name: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> OptimizerState:
    """Return the state object for one optimizer: a :class:`ZeroState` for torch's ``ZeroRedundancyOptimizer``."""
    kind = OptimizerState if local_part(optimizer) is None else ZeroState
    return kind(name, optimizer, parameters)


def tentative(optimizers: Mapping[str, Optimizer], rank: int) -> frozenset[str]:
    """Return the names of the optimizers whose update communicates and is therefore made tentatively.

    Rank 0 logs a warning about the cost.
    """
    names = frozenset(name for name, optimizer in optimizers.items() if local_part(optimizer) is not None)
    for name in sorted(names) if rank == 0 else ():
        weights = sum(p.numel() * p.element_size() for p in parameters_of(optimizers[name]))
        log.warning(
            "holdfast: optimizer %r communicates in step(): each step first copies its weights (%.1f MB) and this "
            "rank's part of its state, to undo an update that a lost rank breaks off. One rank holds each part: that "
            "of a lost rank comes from the last copy in memory (--memory-every), and the steps since are done again",
            name,
            weights / 1e6,
        )
    return names


class ZeroState(OptimizerState):
    """This rank's part of the state of one ``ZeroRedundancyOptimizer``."""

    def __init__(self, name: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__(name, optimizer, parameters)
        self.prefix = f"{PREFIX}{name}{SHARDED}"
        local = local_part(optimizer)
        for group, own in zip(optimizer.param_groups, local.param_groups if local else (), strict=False):
            for key, value in own.items():
                group.setdefault(key, value)  # torch does so at the first step, in groups that were added

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, whose ``state`` is set to that of its local optimizer.

        It is set at each access, because ``load_state_dict`` of either optimizer makes a new ``state`` object.
        """
        outer = super().optimizer
        local = local_part(outer)
        if local is not None and outer.state is not local.state:
            outer.state = local.state
        return outer

    def kind(self) -> str:
        """Return the class name of the optimizer together with that of its local optimizer."""
        return f"{super().kind()}({type(local_part(self.optimizer)).__name__})"

    def split(self, leaf: Leaf, groups: Sequence[Mapping[str, Any]], state: Mapping[Any, Any]) -> Plain:
        """Return the optimizer's state as plain values. ``leaf`` returns the plain value that replaces a tensor.

        Raises:
            StateError: a parameter's state has a value that is not a tensor. Such values of two ranks could not be
                distinguished.
        """
        for of_one in state.values():
            for key, value in of_one.items():
                if not isinstance(value, torch.Tensor) or "." in key:
                    raise StateError(
                        f"optimizer {self.name!r}: {self.kind()} keeps a {type(value).__name__} as {key!r} of a "
                        "parameter, and only tensors can be distinguished by rank",
                        hint="use an optimizer whose state is tensors (Adam, AdamW, SGD)",
                    )
        return super().split(leaf, groups, state)

    def prepare(
        self, saved: Plain, catalogue: Catalogue, targets: dict[str, torch.Tensor], cuts: HandCut
    ) -> Callable[[], None]:
        """Make memory for the saved state of the parameters that this rank updates; see the base class.

        The plain values ``saved`` may come from any rank: the catalogue names the tensors of all ranks.
        """
        local = local_part(self.optimizer)
        assert local is not None
        own = {self.name_of(p) for p in parameters_of(local)}
        found: dict[str, dict[str, Plain]] = {}
        for entry in catalogue.tensors:
            fqn, _, key = entry.fqn.removeprefix(f"{self.prefix}.").rpartition(".")
            if entry.fqn.startswith(f"{self.prefix}.") and fqn in own:
                found.setdefault(fqn, {})[key] = tensor_value(entry.fqn)
        return super().prepare({**saved, "state": found}, catalogue, targets, cuts)
