"""Records of private names of another package, and their check: see ``private_api.py``."""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from holdfast.runtime.node.torch_build import Version


class Feature(Enum):
    """The feature that is lost if a name is missing."""

    GROUPS = "recovery in place"
    DDP = "recovery in place of DDP"
    FSDP2 = "recovery in place of FSDP2"
    PIPELINES = "recovery in place of pipelines"
    STATE = "saving and loading"
    DATA = "data loaders"
    NCCL = "recovery in place on NCCL"


class Use(NamedTuple):
    """A private name and what Holdfast needs it for.

    Attributes:
        path: ``module:name`` or ``module:Class.name``; the attribute of a class may be one of its instances.
        purpose: what Holdfast does with it.
        feature: the feature that needs it.
        since, until: first and last version that has it; without ``until``, the newest version also has it.
        takes: parameters that a function must have at least.
    """

    path: str
    purpose: str
    feature: Feature
    since: Version = (2, 12)
    until: Version | None = None
    takes: tuple[str, ...] = ()

    def in_version(self, version: Version) -> bool:
        """Return True if this version should have the name."""
        return self.since <= version and (self.until is None or version <= self.until)


def probe(use: Use) -> str:
    """Check that the installed torch has the name as it is used here; return the problem, or an empty text."""
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
    """Return True if instances have the attribute: a method's code names it, or an annotation does."""
    return any(
        name in getattr(base, "__annotations__", {})
        or any(
            _in_code(value.__code__, name) for value in vars(base).values() if isinstance(value, FunctionType)
        )
        for base in kind.__mro__
    )


def _in_code(code: CodeType, name: str) -> bool:
    return name in code.co_names or any(isinstance(c, CodeType) and _in_code(c, name) for c in code.co_consts)
