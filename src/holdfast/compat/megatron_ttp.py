"""``mindio_ttp.megatron_ttp``: handlers of a Megatron script that save and load Holdfast's verified checkpoints.

These functions are for data parallelism, where every rank holds the whole state. So the number of parts that the script
gave to ``ttp_init_processor`` has no effect (``mindio_ttp``'s documents for Megatron give half the number of ranks).
The first rank of the plan writes the whole state. The directory is the value of ``HOLDFAST_CHECKPOINT``, or
``checkpoints``. For sharded optimizers use ``holdfast.session`` with declared regions.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.compat.framework_ttp import checked_by, sharers
from holdfast.compat.replicated_optimizer import ReplicatedOptimizer
from holdfast.core.ids import Generation, SaveId
from holdfast.errors import CheckpointInvalid, CheckpointMismatch, UnsupportedError
from holdfast.store.backends.location import ROOT_VARIABLE, Place, absolute
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.save_plan import plan as plan_of
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import LoadTarget, load_catalogue, load_into, load_values
from holdfast.store.read.validation import inspect
from holdfast.store.write.writer import write_share

__all__ = ["ReplicatedOptimizer", "load_checkpoint", "rename_save_result", "ttp_save_checkpoint"]

if TYPE_CHECKING:
    from holdfast.frameworks.torch.state.state import TorchState

Arguments = tuple[int, Any, Any, Any]
"""Arguments of ``ttp_set_ckpt_args``: iterations done, model (or a list of one), optimizer, scheduler or None."""


def refuse_parts(args: Arguments) -> None:
    """Refuse a state that :func:`ttp_save_checkpoint` cannot save, as soon as the script gives it.

    Raises:
        UnsupportedError: an optimizer that keeps a part of the state on each rank, or several model chunks.
    """
    if isinstance(args, tuple | list) and len(args) > 2:  # iteration, model, optimizer
        _refuse_parts(args[1], args[2])


@checked_by(refuse_parts)
def ttp_save_checkpoint(step: int, plan: Sequence[Mapping[str, Any]], args: Arguments) -> None:
    """Save a sealed checkpoint of the whole state, on the first rank of the plan. This function is a save handler.

    Raises:
        UnsupportedError: the writers of the plan do not all hold the whole state.
        CheckpointMismatch: ``args`` belong to another step than ``step``.
        StateError, StoreWriteError: the state cannot be collected or written.
    """
    writers = {rank for group in plan for rank in group["ranks"]}
    iteration, *parts = args
    if iteration != step:
        raise CheckpointMismatch(
            f"the plan is to save step {step}, and the arguments of ttp_set_ckpt_args are those of {iteration}",
            hint="ttp_set_ckpt_args((iteration, model, optimizer, scheduler)) after each iteration += 1",
        )
    if len(writers) > 1:
        rank, same = sharers()
        if not writers <= same or not _whole(*parts[:2]):
            raise UnsupportedError(
                f"ttp_save_checkpoint writes the state of one rank, this plan has the writers {sorted(writers)}",
                hint="register a handler of your own, or use holdfast.session, which saves states in parts",
            )
        if rank != min(writers):
            return
    collected = _state(*parts).collect()
    catalogue = Catalogue.from_layouts({0: collected.layout(0, 1)})
    save_id = SaveId(f"ttp-{secrets.token_hex(4)}", Generation(0, 0), iteration, 0, "last-gasp")
    session = {"step": iteration, "seed": 0, "world": 1, "place": {"loop": -1}}
    plan_ = plan_of(catalogue, frozenset({0}))
    values = {**collected.values, "session": session}
    write_share(_root(), save_id, catalogue, plan_, 0, collected, values, {0: {}})


def rename_save_result(step: int) -> None:
    """Check that the newest checkpoint is sealed and valid. This function is a rename handler, with nothing to rename.

    Raises:
        CheckpointInvalid: the newest checkpoint is of another step than ``step``, or damaged.
    """
    newest = Root(_root()).newest_valid().require()
    judged = inspect(newest.path, deep=True)
    if newest.step != step or not judged.valid:
        raise CheckpointInvalid(
            f"{newest.path}: {judged.reason or f'it is of step {newest.step}, not {step}'}"
        )


def load_checkpoint(model: Any, optimizer: Any, opt_param_scheduler: Any = None) -> int:
    """Load the newest valid checkpoint into the model, the optimizer and the scheduler.

    Returns:
        The iteration of the checkpoint, or 0 if there is no checkpoint.

    Raises:
        CheckpointInvalid, CheckpointMismatch: the checkpoint is damaged, or of another model.
        UnsupportedError: the optimizer keeps a part of the state on each rank, or there are several model chunks.
    """
    _refuse_parts(model, optimizer)
    found = Root(_root()).newest_valid().chosen
    if found is None:
        return 0
    values = load_values(found.path)
    session = values.get("session")
    if not isinstance(session, dict):
        raise CheckpointMismatch(f"{found.path} was not written by ttp_save_checkpoint or a session")
    restore = _state(model, optimizer, opt_param_scheduler).restore(load_catalogue(found.path), values)
    load_into(found.path, [LoadTarget(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()])
    restore.finish()
    return int(session["step"])


def _root() -> Place:
    return absolute(os.environ.get(ROOT_VARIABLE, "checkpoints"))


def _refuse_parts(model: Any, optimizer: Any) -> None:
    modules = list(model) if isinstance(model, list | tuple) else [model]
    if len(modules) != 1:
        raise UnsupportedError(f"{len(modules)} model chunks are not supported", hint="one chunk per rank")
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        if any(base.__name__ in _IN_PARTS for base in type(each).__mro__):
            raise UnsupportedError(
                f"ttp_save_checkpoint and load_checkpoint take the state of one rank as the whole state, and "
                f"{type(each).__name__} keeps a part of it on each rank",
                hint="register handlers of your own (Megatron's save_checkpoint and load_checkpoint know its parts), "
                "or leave --use-distributed-optimizer out",
            )


_IN_PARTS = ("DistributedOptimizer", "ZeroRedundancyOptimizer", "LayerWiseDistributedOptimizer")


def _whole(model: Any, optimizer: Any) -> bool:
    """Return whether this rank updates every parameter, so that its optimizer holds the whole state."""
    modules = list(model) if isinstance(model, list | tuple) else [model]
    kept = getattr(optimizer, "optimizer", optimizer).state
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    return not kept or all(p in kept for p in trained)


def _state(model: Any, optimizer: Any, scheduler: Any) -> TorchState:
    """Return the state of a model, possibly in a list, and of an optimizer, possibly in Megatron's wrapper."""
    from holdfast.frameworks.torch.state.state import TorchState  # loads torch

    (module,) = model if isinstance(model, list | tuple) else [model]
    inner = getattr(optimizer, "optimizer", optimizer)
    return TorchState(
        module, {"optimizer": inner}, {"scheduler": scheduler} if scheduler is not None else None
    )
