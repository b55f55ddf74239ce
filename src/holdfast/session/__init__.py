"""What a training script touches. ``holdfast.session(...)`` opens a session; this package is that function too."""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """Python binds a subpackage to its name in the parent: so the package itself can be called."""

    def __call__(self, *places: Any, **arguments: Any) -> Any:
        from holdfast.session.api import open_session

        return open_session(*places, **arguments)


sys.modules[__name__].__class__ = _Callable
