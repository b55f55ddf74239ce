"""A module whose import makes ``mindio_ttp`` and ``taskd`` importable in this process.

The import also patches MindSpore for ``mindio_ttp`` on CPU, if MindSpore's fault tolerance is switched on. An installed
package with one of the two names is left alone, and a warning names it.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
from types import ModuleType

from holdfast.compat.import_hook import VARIABLES, watch
from holdfast.compat.packages import ALIASES, PACKAGES, is_ours

log = logging.getLogger("holdfast")


def install() -> None:
    """Make the packages importable in this process. A repeated call does nothing."""
    for package in PACKAGES:
        if package in sys.modules:
            continue
        found = importlib.util.find_spec(package)
        if found is not None and not is_ours(found):
            log.warning("holdfast: the package %s that is installed is used, not Holdfast's", package)
            continue
        for name, target in ALIASES.items():
            if name.split(".")[0] == package:
                _alias(name, target)
    if any(name in os.environ for name in VARIABLES):
        watch()


def _alias(name: str, target: str) -> None:
    """Make ``name`` another name of the module ``target``. Empty ``target``: make a package that holds submodules."""
    module = importlib.import_module(target) if target else ModuleType(name)
    if not target:
        module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


install()
