"""A training function as a name that every node can resolve: module, name in the module, and directory of the module.

The ranks are processes of Holdfast, and unpickle nothing. So they receive only the name of the function and import the
function, as spawned processes of :mod:`multiprocessing` do. The argument of the function is sent as plain values.
"""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from holdfast.errors import ScriptError, UsageError

MAIN = "__main__"
HINT = "define it with def at the top level of a module, or give the path of a script"


class TrainFunction(NamedTuple):
    """The name of a function, and the file that defines it."""

    module: str
    name: str
    root: str  # directory on sys.path with the module; empty: the module must be installed on each node
    file: str  # file of the module, below ``root``


def name_function(train: Callable[..., Any]) -> TrainFunction:
    """Return the name by which another process finds the function ``train``.

    For a function of the driver's own script, the name of the script's file is the module name for the ranks.

    Raises:
        UsageError: only this process can find the function, for example a lambda, a nested function, a method, a
            partial, or a function of a notebook.
    """
    shown = getattr(train, "__qualname__", repr(train))
    module, name = getattr(train, "__module__", None), getattr(train, "__qualname__", "")
    if not module or not name.isidentifier():
        raise UsageError(
            f"the training function {shown} has no name that the ranks could find it by", hint=HINT
        )
    loaded = sys.modules.get(module)
    if getattr(loaded, name, None) is not train:
        raise UsageError(f"{module}.{name} is another object than the training function {shown}", hint=HINT)
    file = getattr(loaded, "__file__", None)
    if module == MAIN:
        spec = getattr(loaded, "__spec__", None)
        module = spec.name if spec is not None else Path(file).stem if file else ""
        if not file or not all(part.isidentifier() for part in module.split(".")):
            raise UsageError(
                f"the training function {name} is defined in {file or 'no file'}, which no rank can import",
                hint=HINT,
            )
    path = Path(os.path.abspath(file or ""))
    parts = len(module.split(".")) + (path.name == "__init__.py")
    root = path.parents[parts - 1]
    if not file or str(root) in {sysconfig.get_path(each) for each in ("stdlib", "purelib", "platlib")}:
        return TrainFunction(module, name, "", "")
    return TrainFunction(module, name, str(root), str(path.relative_to(root)))


def load_function(module: str, name: str, root: str) -> Callable[..., Any]:
    """Return the function that :func:`name_function` named. Put ``root`` first on ``sys.path`` if it is not there.

    Raises:
        ScriptError: the module has no such function.
    """
    if root and root not in sys.path:
        sys.path.insert(0, root)
    found = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ScriptError(
            f"{module} has no function {name} in this process",
            hint="define it at the top level, outside of any condition on __name__",
        )
    function: Callable[..., Any] = found
    return function


def find_place(here: str, drivers: str, root: str, file: str) -> str:
    """Return this node's directory that corresponds to the driver's ``root`` and holds ``file``; empty if none does.

    Args:
        here: working directory of this process.
        drivers: working directory of the driver. A ``root`` below it is searched below ``here`` first, because Ray
            copies the working directory of a job to each node.
        root: directory of the code on the driver's node.
        file: path of a file below ``root``.
    """
    below = os.path.relpath(root, drivers)
    candidates = (
        [root] if below.startswith(os.pardir) else [os.path.normpath(os.path.join(here, below)), root]
    )
    return next((each for each in candidates if os.path.isfile(os.path.join(each, file))), "")
