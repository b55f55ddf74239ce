"""An import hook that patches MindSpore for ``mindio_ttp`` on CPU. A process without MindSpore imports no patch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TFT_VARIABLE = "MS_ENABLE_TFT"
VARIABLES = (TFT_VARIABLE, "MS_ENABLE_GRACEFUL_EXIT")
"""Environment variables that switch on MindSpore's fault tolerance and its graceful exit."""
PACKAGE = "mindspore"


class _Patching(Loader):
    """A loader that loads MindSpore with its original loader, and then applies the patches."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        from holdfast.compat.mindspore_cpu import apply

        apply()


class _Finder(MetaPathFinder):
    """A finder for the package ``mindspore`` alone, which removes itself when the package is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Patching(spec.loader)
        return spec


def watch() -> None:
    """Patch MindSpore when the script imports it, or now if it is already imported."""
    if PACKAGE in sys.modules:
        from holdfast.compat.mindspore_cpu import apply

        apply()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
