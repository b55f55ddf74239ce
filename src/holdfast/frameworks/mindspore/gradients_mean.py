"""The script's choice between the mean and the sum of the gradients (``gradients_mean``).

MindSpore reads ``gradients_mean`` only in its parallel modes, where it is False unless the script sets True. Without a
parallel mode MindSpore reduces nothing, and Holdfast's gate does it: there the mean is taken unless the script sets
False. MindSpore stores the value but not whether the script has set it, so its setter is replaced when this module is
imported.
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
    """Return True for the mean over the ranks that hold the same part of a parameter, False for the sum."""
    if native:
        return bool(ms.get_auto_parallel_context(NAME))
    return not _said or _said[-1]
