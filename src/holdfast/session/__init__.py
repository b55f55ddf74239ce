"""The objects that a training script uses. The package itself can be called: ``holdfast.session(...)``."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A module that can be called: ``holdfast.session`` names this package, and users call this name as a function."""

    def __call__(self, *places: Any, **arguments: Any) -> Any:
        from holdfast.session.api import open_session

        return open_session(*places, **arguments)


sys.modules[__name__].__class__ = _Callable
