"""The script's choice between the mean and the sum of the gradients (``gradients_mean``).

MindSpore reads ``gradients_mean`` only in its parallel modes, where the default is False. Without a parallel mode
MindSpore reduces nothing, and Holdfast's gate reduces the gradients. The default of the gate is the mean. MindSpore
stores the value but not whether the script has set it. So its setter is replaced when this module is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore.parallel import _auto_parallel_context as context

NAME = "gradients_mean"
_said: list[bool] = []


def _watched(setter: Callable[[bool], Any]) -> Callable[[bool], Any]:
    def set_gradients_mean(value: bool) -> Any:
        _said.append(value)
        return setter(value)

    return set_gradients_mean


_setters = context._set_auto_parallel_context_func_map
_setters[NAME] = _watched(_setters[NAME])


def mean_of_gradients(*, native: bool) -> bool:
    """Return True if gradients are averaged over the ranks with the same box, False if they are only summed.

    ``native``: MindSpore's own AllReduce sums them.
    """
    if native:
        return bool(ms.get_auto_parallel_context(NAME))
    return not _said or _said[-1]
