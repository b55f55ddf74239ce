"""A script that a launcher other than ours started says ``import holdfast``: put our process groups in place in time.

``holdfast run`` does this before any user code. Elsewhere it must happen between the import of torch and the first
``init_process_group``; whichever of torch and holdfast the script imports first. Only processes that a launcher started
as one of several are touched.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from holdfast.core.launch_environment import is_told_of_others

GROUPS = "holdfast.frameworks.torch.comm.backend"
FRAMEWORK = "torch"


def arm() -> None:
    """Install the groups now when torch is loaded, else right after its import; nothing in a single process."""
    if not is_told_of_others(os.environ):
        return
    module = sys.modules.get(FRAMEWORK)
    if module is None:
        sys.meta_path.insert(0, _AfterImport())
    elif not getattr(getattr(module, "__spec__", None), "_initializing", False):
        importlib.import_module(GROUPS).install()


class _AfterImport(importlib.abc.MetaPathFinder):
    """Finds torch as everybody would, and calls :func:`arm` again when its import has ended."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Only for torch itself, once."""
        if fullname != FRAMEWORK:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the real loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the real loader, then install."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        if GROUPS not in sys.modules:  # else torch is imported by them, for whoever installs them next
            importlib.import_module(GROUPS).install()
