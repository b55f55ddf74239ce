"""Holdfast keeps distributed training jobs alive: no committed step lost, the same bits as an undisturbed run.

``with holdfast.session(...) as s: for step in s.steps(loader, until=N): with step as batch: ...`` protects a training;
``holdfast.load(path, model)`` reads weights. Importing this package loads no framework.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.errors import (
    AuthError,
    CheckpointInvalid,
    CheckpointMismatch,
    ComputeError,
    DataError,
    EmptyLoaderError,
    FaultError,
    FrameworkError,
    GroupError,
    HoldfastError,
    ImpureBlockError,
    InternalError,
    JobError,
    JobSaved,
    NonFiniteError,
    NothingToResume,
    NotMet,
    PeerLost,
    ProtocolError,
    ScriptError,
    StateError,
    StepError,
    StoreDenied,
    StoreError,
    StoreUnreachable,
    StoreWriteError,
    UnequalBatchesError,
    UnmatchedCollectiveError,
    UnsupportedError,
    UsageError,
    UserError,
)
from holdfast.frameworks.common.import_hook import arm
from holdfast.version import VERSION

if TYPE_CHECKING:
    from holdfast.session.api import load
    from holdfast.session.api import open_session as session
    from holdfast.session.once import once
    from holdfast.store.manage.retention import BestInterval, EverySeconds, EverySteps, KeepEvery

__version__ = VERSION

__all__ = [
    "AuthError",
    "BestInterval",
    "CheckpointInvalid",
    "CheckpointMismatch",
    "ComputeError",
    "DataError",
    "EmptyLoaderError",
    "EverySeconds",
    "EverySteps",
    "FaultError",
    "FrameworkError",
    "GroupError",
    "HoldfastError",
    "ImpureBlockError",
    "InternalError",
    "JobError",
    "JobSaved",
    "KeepEvery",
    "NonFiniteError",
    "NotMet",
    "NothingToResume",
    "PeerLost",
    "ProtocolError",
    "ScriptError",
    "StateError",
    "StepError",
    "StoreDenied",
    "StoreError",
    "StoreUnreachable",
    "StoreWriteError",
    "UnequalBatchesError",
    "UnmatchedCollectiveError",
    "UnsupportedError",
    "UsageError",
    "UserError",
    "__version__",
    "load",
    "once",
    "session",
]

_LAZY = {
    "load": "holdfast.session.api:load",
    "once": "holdfast.session.once:once",
    "session": "holdfast.session.api:open_session",
    "BestInterval": "holdfast.store.manage.retention:BestInterval",
    "EverySeconds": "holdfast.store.manage.retention:EverySeconds",
    "EverySteps": "holdfast.store.manage.retention:EverySteps",
    "KeepEvery": "holdfast.store.manage.retention:KeepEvery",
}


_FACES = ("mindspore", "tensorflow", "torch")
"""Modules of the frameworks, imported at their first use."""


def __getattr__(name: str) -> Any:
    if name in _FACES:
        return import_module(f"holdfast.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, _, attribute = _LAZY[name].partition(":")
    found = globals()[name] = getattr(import_module(module), attribute)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


arm()
