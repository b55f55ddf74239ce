"""``gradients_mean``: whether the script has said what becomes of the sum of the gradients.

MindSpore reads it in its parallel modes only, where it is False unless the script says True. Without a parallel mode
MindSpore reduces nothing, and our gate does: there the mean is taken unless the script says False. MindSpore keeps the
value and not whether it was said, so its setter is watched from the import of this module on.
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
    """True: the mean over the ranks that hold the same part of a parameter; False: the sum."""
    if native:
        return bool(ms.get_auto_parallel_context(NAME))
    return not _said or _said[-1]
