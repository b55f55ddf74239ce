"""The objects that a training script uses; the package itself is the function ``holdfast.session(...)``."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A package that can be called: Python binds the subpackage, not a function, to the name ``holdfast.session``."""

    def __call__(self, *places: Any, **arguments: Any) -> Any:
        from holdfast.session.api import open_session

        return open_session(*places, **arguments)


sys.modules[__name__].__class__ = _Callable
