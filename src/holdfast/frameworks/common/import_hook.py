"""The installation of Holdfast's process groups in a script that another launcher started.

``holdfast run`` installs them before any user code. Under another launcher they must be installed between the import of
torch and the first ``init_process_group``, whether the script imports torch or holdfast first. Only a process that its
launcher started as one of several is changed.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from holdfast.core.launch_environment import is_told_of_others

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # slow to import, and each process of Holdfast imports this module
    Loader = MetaPathFinder = object

GROUPS = "holdfast.frameworks.torch.comm.backend"
FRAMEWORK = "torch"


def arm() -> None:
    """Install Holdfast's process groups: now if torch is loaded, otherwise right after the import of torch.

    A process without other ranks stays unchanged.
    """
    if not is_told_of_others(os.environ):
        return
    module = sys.modules.get(FRAMEWORK)
    if module is None:
        sys.meta_path.insert(0, _AfterImport())
    elif not getattr(getattr(module, "__spec__", None), "_initializing", False):
        importlib.import_module(GROUPS).install()


class _AfterImport(MetaPathFinder):
    """An import finder that finds torch in the usual way and installs Holdfast's process groups after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return torch's spec, with a loader that installs the process groups; None for other modules.

        The finder removes itself at the first import of torch.
        """
        if fullname != FRAMEWORK:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """Create the module with the module's original loader."""
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its original loader, then install the process groups."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        # If GROUPS is in sys.modules, GROUPS itself imports torch now. The importer of GROUPS installs the groups.
        if GROUPS not in sys.modules:
            importlib.import_module(GROUPS).install()
