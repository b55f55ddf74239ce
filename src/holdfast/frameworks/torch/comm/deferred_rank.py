"""Placeholder answers for torch code that asks for the rank in a spare, a process whose rank is not known yet.

The rank becomes known when the spare is *called*: it then becomes a member of the job.
``init_process_group``, DDP's constructor and a loader's iterator only pass the rank on. They get a placeholder, which
is replaced at the call. A ``DistributedSampler`` made without a rank asks for the rank and stores the answer, so its
rank is corrected at the call. All other code that asks for the rank waits for the call
(``runtime/node/deferred_rank.py``). The first use of a GPU also waits, because the memory of the GPU is full with the
state of the rank that trains there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.runtime.node.deferred_rank import DeferredRank

_samplers: WeakSet[DistributedSampler[Any]] = WeakSet()


def install(stand_in: DeferredRank) -> None:
    """Install the placeholder answers for code that asks for the rank. Call this once, in a spare."""
    hold_before_device(stand_in)
    if not stand_in.fixed:
        _answer_later(stand_in)


def hold_before_device(stand_in: DeferredRank) -> None:
    """Make the first use of CUDA, from Python or from C++, wait until the spare is called."""
    private_api.before_first_use_of_cuda(stand_in.hold)


def _answer_later(stand_in: DeferredRank) -> None:
    """Install the placeholder answers in a spare that may become any rank."""
    before = sys.excepthook

    def become(rank: int) -> None:
        for group in fabric().groups():
            group.become(rank)
        for sampler in _samplers:
            sampler.rank = rank
        private_api.set_global_rank(rank)
        if sys.excepthook.__module__ == c10d.__name__:
            sys.excepthook = before  # torch's hook would write the placeholder rank before each line

    def exempt(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with stand_in.exempt():
                return function(*args, **kwargs)

        return call

    made = DistributedSampler.__init__

    @functools.wraps(made)
    def make_sampler(
        self: DistributedSampler[Any],
        dataset: Any,
        num_replicas: int | None = None,
        rank: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        with stand_in.exempt():
            made(self, dataset, num_replicas, rank, *args, **kwargs)
        if rank is None and not stand_in.called:
            _samplers.add(self)

    DistributedSampler.__init__ = make_sampler  # type: ignore[method-assign]
    DistributedDataParallel.__init__ = exempt(DistributedDataParallel.__init__)  # type: ignore[method-assign]
    # A loader's iterator passes the rank to datapipes and does not store it.
    private_api.wrap_distributed_settings(exempt)
    c10d.init_process_group = dist.init_process_group = exempt(c10d.init_process_group)
    stand_in.on_call(become)
