"""The refusal of DDP communication hooks that keep state.

The state of a hook is in no checkpoint, and no replacement receives it. PowerSGD, for example, starts with plain sums
and compresses gradients after some steps. The survivors would then send compressed gradients while a replacement sends
plain sums, and each would wait for the other for ever. PowerSGD also keeps rounding errors, which are lost with their
rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from holdfast.errors import UnsupportedError
from holdfast.frameworks.torch import private_api

_NO_STATE = (type(None), dist.ProcessGroup, bool, int, float, str, torch.dtype, weakref.ReferenceType)


def refuse_stateful_hooks(modules: Sequence[DistributedDataParallel]) -> None:
    """Refuse a DDP communication hook whose state object may change from step to step.

    Raises: UnsupportedError: the error names the hook.
    """
    for module in modules:
        for hook, state in private_api.comm_hooks(module):
            if not isinstance(state, _NO_STATE) and type(state).__name__ != private_api.UPCAST_HOOK_STATE:
                raise UnsupportedError(
                    f"DDP's communication hook {hook.__qualname__} has a state ({type(state).__name__}) that a "
                    "replacement would not have, and so it would not communicate as its peers do",
                    hint="use a hook without a state: "
                    "model.register_comm_hook(None, default_hooks.fp16_compress_hook), or "
                    "a function of your own that holds its constants; or use torchrun, which restarts all ranks",
                )
