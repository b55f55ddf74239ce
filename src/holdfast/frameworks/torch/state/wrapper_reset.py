"""The reset of wrappers after an aborted step.

An exception (or a poisoned collective) in forward or backward leaves wrappers in the middle of a step. DDP's reducer
waits for gradients that will not come. FSDP2 has unsharded parameters and half-reduced gradients. GradScaler is in the
state "already unscaled". A pipeline schedule holds losses and activations of the aborted step, with which it would
continue. A retry on top of that raises an error, or silently trains with other weights. :func:`heal`,
:func:`heal_scaler` and :func:`heal_pipelines` reset them to their state between two steps. The attributes of torch that
they need are in ``private_api.py``. The tests compare the weights after an abort bit for bit with those of an
undisturbed run.

Rules for the caller:
1. Every rank of a generation heals before its first forward in it, also a rank that had nothing to abort: a healed DDP
   reducer rebuilds its buckets, and that is a collective.
2. After a rehearsal (loopback) that ended in order, the reducer is healed only once its buckets are set: it would
   forget the rehearsal. Then it is healed, by rule 1.
3. A healed pipeline exchanges its start messages with its neighbours again in its next step, so all its ranks must be
   healed, newcomers included.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holdfast.errors import UnsupportedError, UsageError
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.parameter_names import data_parallel
from holdfast.runtime.node.torch_build import TESTED


def heal(model: nn.Module) -> None:
    """Reset a model after an aborted step: reducers of DDP, unshard and reduce state of FSDP2, all gradients.

    Args:
        model: the outermost module, wrapped or not; anything else in it is left alone.

    Raises:
        UnsupportedError: this torch keeps FSDP2's state in another way than the one known here.
    """
    for ddp in data_parallel(model):
        if not fabric().looped:
            private_api.reset_reducer(ddp)
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if sharded:
        try:
            private_api.reset_sharded(sharded)
        except AttributeError as error:
            raise UnsupportedError(
                f"FSDP2 of torch {torch.__version__} cannot be healed after an abort: {error}",
                hint=f"use torch {TESTED}, or restart the job after a fault: --on-fault restart",
            ) from error
    for parameter in model.parameters():
        parameter.grad = None


def forget_pass(model: nn.Module) -> None:
    """Reset the reducers, which keep their buckets and count their passes from zero, as healed reducers do."""
    for ddp in data_parallel(model):
        private_api.reset_reducer(ddp)


def heal_scaler(scaler: torch.amp.GradScaler) -> None:
    """Forget that gradients of the aborted step were unscaled: otherwise the retry steps with scaled ones."""
    private_api.forget_unscaled(scaler)


class Scaling:
    """The session's ``GradScaler``, and the refusal of others.

    The scale of another one would be in no checkpoint, a replacement would begin with another scale than its peers, and
    an aborted step would leave it in the state "already unscaled".

    Args:
        scaler: the session's, or None.
        extras: the user's own state, which may hold further ones.
    """

    def __init__(self, scaler: Any, extras: Mapping[str, Any]) -> None:
        self._scaler = scaler
        self._extras = extras
        self._settled = False  # an update was made, with no other scaler

    def heal(self) -> None:
        """Heal the session's scaler after an aborted step."""
        if self._scaler is not None:
            heal_scaler(self._scaler)

    def settle(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse other scalers at the first update of this process. Raises: UsageError."""
        self.refuse_others(optimizers)
        self._settled = True

    def refuse_others(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse, up to the first update of this process, another scaler that unscales for one of the optimizers.

        Raises:
            UsageError: such a scaler is in use.
        """
        if self._settled:
            return
        ours = {id(self._scaler), *map(id, self._extras.values())}
        updated = list(optimizers)
        for scaler in instances("torch.amp.grad_scaler", "GradScaler"):
            if id(scaler) not in ours and any(private_api.scales(scaler, each) for each in updated):
                raise UsageError(
                    f"a {type(scaler).__name__} scales the gradients of the session's optimizer and is not part of the "
                    "session, so a process that joins or resumes begins with another scale",
                    hint="holdfast.session(..., scaler=scaler); in Fabric scaler=fabric.strategy.precision.scaler, in "
                    "accelerate scaler=accelerator.scaler",
                )


def heal_pipelines() -> None:
    """Reset every pipeline schedule of this process after an aborted step.

    Raises:
        UnsupportedError: this torch keeps a schedule's state in another way than the one known here.
    """
    for schedule in instances(*private_api.PIPELINE_SCHEDULE):
        try:
            private_api.reset_schedule(schedule)
        except AttributeError as error:
            raise UnsupportedError(
                f"a pipeline of torch {torch.__version__} cannot be healed after an abort: {error}",
                hint=f"use torch {TESTED}, or restart the job after a fault: --on-fault restart",
            ) from error


def instances(module: str, kind: str) -> list[Any]:
    """Return all living objects of a class, and of its subclasses, from a module that may be imported.

    It finds objects that no caller passes to Holdfast, such as pipeline schedules.
    """
    if module not in sys.modules:
        return []
    classes = {getattr(sys.modules[module], kind)}
    while more := {derived for each in classes for derived in each.__subclasses__()} - classes:
        classes |= more
    # An object refers to its class. Not isinstance(): it reads __class__, which some objects answer with code.
    return [item for item in gc.get_referrers(*classes) if type(item) in classes]


def rehearsals_needed(model: nn.Module) -> bool:
    """Return True while a DDP module in ``model`` has yet to rebuild its buckets.

    DDP sets the layout of its buckets after the first backward passes (two, with ``static_graph`` three); the layout
    decides the order of gloo's sums. A process that starts from the beginning in a job that has already trained
    rehearses forward and backward in loopback until this is False. Without that its sums would differ from those of the
    undisturbed run. A process that has trained the previous step knows one pass already (not with ``static_graph``):
    for it ``rebuild_buckets`` is enough.
    """
    return any(
        not private_api.has_rebuilt_buckets(ddp) and _will_rebuild(ddp) for ddp in data_parallel(model)
    )


def dividing(model: nn.Module, world_size: int) -> list[nn.Parameter]:
    """Return one parameter of each DDP module whose sums depend on whether its gradients are in the buckets already.

    If they are, the reducer divides by the number of ranks; otherwise it multiplies by the inverse. The results are
    equal for powers of two only.
    """
    if world_size & (world_size - 1) == 0:
        return []
    found = [ddp for ddp in data_parallel(model) if ddp.gradient_as_bucket_view]
    return [p for ddp in found for p in [q for q in ddp.parameters() if q.requires_grad][:1]]


def rebuild_buckets(model: nn.Module) -> None:
    """Set DDP's buckets now, after a pass and in loopback, instead of at the start of its next forward.

    That saves a pass, and a collective that may break: the reducer broadcasts its bucket indices, here to itself.
    """
    for ddp in data_parallel(model):
        if not private_api.has_rebuilt_buckets(ddp):
            private_api.rebuild_buckets(ddp)


def _will_rebuild(ddp: DistributedDataParallel) -> bool:
    return ddp.static_graph or not ddp.find_unused_parameters
