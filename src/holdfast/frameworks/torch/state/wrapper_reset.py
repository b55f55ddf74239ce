"""The reset of wrappers (DDP, FSDP2, GradScaler, pipeline schedules) after an aborted step.

An exception or a poisoned collective in a forward or backward pass leaves wrappers in the middle of a step. DDP's
reducer waits for gradients that will not come. FSDP2 has unsharded parameters and half-reduced gradients. GradScaler is
in the state "already unscaled". A pipeline schedule holds losses and activations of the aborted step, with which it
would continue. A retry in this condition raises an error, or silently trains with other weights. :func:`heal`,
:func:`heal_scaler` and :func:`heal_pipelines` reset (*heal*) the wrappers to their state between two steps. They use
private attributes of torch, all in ``private_api.py``. The tests compare the weights after an abort bit for bit with
those of an undisturbed run.

Rules for the caller:
1. Every rank of a generation heals before its first forward pass in that generation, even a rank that had nothing to
   abort. The reason: a healed DDP reducer rebuilds its buckets, and that is a collective.
2. After a rehearsal (loopback), first build the buckets (``bucket_layouts.py``), then call :func:`forget_pass`. A
   reducer that is reset earlier forgets the passes of the rehearsal. Therefore :func:`heal` does not reset reducers in
   loopback.
3. A healed pipeline exchanges its start messages with its neighbours again in its next step. So all its ranks must be
   healed, newcomers included.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Mapping, Set
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
    """Reset a model after an aborted step: DDP's reducers (not in loopback), FSDP2's state, and all gradients.

    Args:
        model: the outermost module, wrapped or not. Its weights and buffers are not changed.

    Raises:
        UnsupportedError: this version of torch keeps FSDP2's state in an unknown way.
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
    """Reset the DDP reducers: they keep their buckets and count their passes from zero, as healed reducers do."""
    for ddp in data_parallel(model):
        private_api.reset_reducer(ddp)


def heal_scaler(scaler: torch.amp.GradScaler) -> None:
    """Forget that gradients of the aborted step were unscaled; otherwise the retry would step with scaled gradients."""
    private_api.forget_unscaled(scaler)


def effective_scaler(scaler: Any) -> Any:
    """Return ``scaler``; None for a ``GradScaler`` that is disabled, because it has no state and changes no gradient.

    Without CUDA, torch disables each scaler that is made for CUDA.
    """
    return None if isinstance(scaler, torch.amp.GradScaler) and not scaler.is_enabled() else scaler


def scalers_of(scaler: Any, extras: Mapping[str, Any]) -> list[Any]:
    """Return the session's scaler, if there is one, and each ``GradScaler`` that is enabled in ``state=``.

    A GAN has a second one for its discriminator.
    """
    others = [each for each in extras.values() if isinstance(each, torch.amp.GradScaler)]
    return [each for each in (scaler, *others) if effective_scaler(each) is not None]


class Scaling:
    """The session's scalers, and the refusal of other scalers.

    The scale of another scaler would be in no checkpoint. A replacement would begin with another scale than its peers,
    and an aborted step would leave the scaler in the state "already unscaled".

    Args:
        scaler: the session's scaler, or None.
        extras: the user's own state, which may hold further scalers.
    """

    def __init__(self, scaler: Any, extras: Mapping[str, Any]) -> None:
        self._scaler = scaler
        self._extras = extras
        self._settled = False  # True after an update that found no other scaler

    def heal(self) -> None:
        """Reset the session's scalers after an aborted step, see :func:`heal_scaler`."""
        for scaler in scalers_of(self._scaler, self._extras):
            heal_scaler(scaler)

    def settle(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse other scalers at the first update of this process; later calls check nothing. Raises: UsageError."""
        self.refuse_others(optimizers)
        self._settled = True

    def refuse_others(self, optimizers: Iterable[Optimizer]) -> None:
        """Refuse another scaler that unscales for one of ``optimizers``; no check after :meth:`settle`.

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
                    hint="holdfast.session(..., scaler=scaler), and a second one in state={'scaler_d': scaler_d}; in "
                    "Fabric scaler=fabric.strategy.precision.scaler, in accelerate scaler=accelerator.scaler",
                )


def heal_pipelines() -> None:
    """Reset every pipeline schedule of this process after an aborted step.

    Raises:
        UnsupportedError: this version of torch keeps a schedule's state in an unknown way.
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
    """Return all living objects of class ``kind`` of ``module`` or a subclass; empty if ``module`` is not imported.

    It finds objects that no caller passes to Holdfast, such as pipeline schedules.
    """
    return instances_of({getattr(sys.modules[module], kind)}) if module in sys.modules else []


def instances_of(classes: Set[type]) -> list[Any]:
    """Return all living objects of ``classes`` and of their subclasses."""
    found, new = set(classes), set(classes)
    while new:
        new = set[type]().union(*map(type.__subclasses__, new)) - found
        found |= new
    # An object refers to its class. Not isinstance(): it reads __class__, which some objects answer with code.
    return [item for item in gc.get_referrers(*found) if type(item) in found]


def rehearsals_needed(model: nn.Module) -> bool:
    """Return True while a DDP module in ``model`` has yet to rebuild its buckets.

    DDP sets the layout of its buckets after the first backward passes: after two, or three with ``static_graph``. The
    layout decides the order of gloo's sums. So a new process of a job that has already trained rehearses: it runs
    forward and backward passes in loopback until this function returns False. Otherwise its sums would differ from
    those of an undisturbed run. DDP counts one pass in a process that has trained the previous step (none with
    ``static_graph``). Such a process needs no rehearsal: it builds the buckets from that pass.
    """
    return any(
        not private_api.has_rebuilt_buckets(ddp) and _will_rebuild(ddp) for ddp in data_parallel(model)
    )


def dividing(model: nn.Module, world_size: int) -> list[nn.Parameter]:
    """Return one parameter of each DDP module whose averages depend on where the gradients lie before the reduction.

    If the gradients lie in DDP's buckets already, the reducer divides by the number of ranks; otherwise it multiplies
    by the inverse. The results are equal only if the number of ranks is a power of two.
    """
    if world_size & (world_size - 1) == 0:
        return []
    found = [ddp for ddp in data_parallel(model) if ddp.gradient_as_bucket_view]
    return [p for ddp in found for p in [q for q in ddp.parameters() if q.requires_grad][:1]]


def _will_rebuild(ddp: DistributedDataParallel) -> bool:
    return ddp.static_graph or not ddp.find_unused_parameters
