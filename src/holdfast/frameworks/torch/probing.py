"""Records of private names of another package, and the check that the package has them; used by ``private_api.py``."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from holdfast.runtime.node.torch_build import Version


class Feature(Enum):
    """The feature of Holdfast that is lost if a private name is missing."""

    GROUPS = "recovery in place"
    DDP = "recovery in place of DDP"
    FSDP2 = "recovery in place of FSDP2"
    PIPELINES = "recovery in place of pipelines"
    STATE = "saving and loading"
    DATA = "data loaders"
    NCCL = "recovery in place on NCCL"


class Use(NamedTuple):
    """A private name of another package, and the purpose for which Holdfast needs it.

    Attributes:
        path: ``module:name`` or ``module:Class.name``; a name in a class may be an attribute of its instances only.
        purpose: the use of the name in Holdfast.
        feature: the feature that needs the name.
        since, until: first and last version that has the name; without ``until``, the newest version also has it.
        takes: parameters that a function must have at least.
    """

    path: str
    purpose: str
    feature: Feature
    since: Version = (2, 12)
    until: Version | None = None
    takes: tuple[str, ...] = ()

    def in_version(self, version: Version) -> bool:
        """Return True if this version of the package should have the name."""
        return self.since <= version and (self.until is None or version <= self.until)


def probe(use: Use) -> str:
    """Check that the installed package has the name as Holdfast uses it; return the problem, or an empty text."""
    module, _, rest = use.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        return f"{use.path}: {error}"
    *owners, last = rest.split(".")
    for owner in owners:
        if not hasattr(found, owner):
            return f"{use.path}: there is no {owner}"
        found = getattr(found, owner)
    if not hasattr(found, last) and not (isinstance(found, type) and _speaks_of(found, last)):
        return f"{use.path}: there is no such name"
    if use.takes:
        missing = set(use.takes) - set(inspect.signature(getattr(found, last)).parameters)
        if missing:
            return f"{use.path}: it no longer takes {', '.join(sorted(missing))}"
    return ""


def _speaks_of(kind: type, name: str) -> bool:
    """Return True if instances of ``kind`` probably have attribute ``name``: a method or an annotation names it."""
    return any(
        name in getattr(base, "__annotations__", {})
        or any(
            _in_code(value.__code__, name) for value in vars(base).values() if isinstance(value, FunctionType)
        )
        for base in kind.__mro__
    )


def _in_code(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(isinstance(c, CodeType) and _in_code(c, name) for c in code.co_consts)
