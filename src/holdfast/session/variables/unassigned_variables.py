"""Placeholder values for variables that a block did not assign because the block was left early.

Theory. A block that is aborted is left before its end, at its vote or at a fault. The script continues after the block,
and Python offers no way to skip that code. An assignment such as ``loss = train(batch)`` may not have run. Then
``print(loss)`` without ``if step.committed:`` would end the job with an error that a run without faults does not have.
Therefore each name that the rest of the block would have assigned, and that has no value yet, gets a
:class:`NotComputed`. This object is a nan that accepts every operation on a result, and warns the user once.

A block that uses such a variable must not compute with a nan. The value would come from an earlier block, or from
code that is skipped when a block runs again, and this process has run neither. So while a block is open, each
placeholder is exchanged for a :class:`NotAssigned`, which refuses every operation except conversion to text.
"""

from __future__ import annotations

import ctypes
import dis
import logging
import math
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any, NoReturn

from holdfast.errors import StepError
from holdfast.runtime.worker.script_frames import OURS, frames_outside

log = logging.getLogger("holdfast")

_WRITES_THROUGH = sys.version_info >= (3, 13)
"""True if a write into ``frame.f_locals`` changes the variable of the frame (Python 3.13 and later)."""

_USES = (
    "iter", "next", "len", "bool", "getitem", "setitem", "contains", "call", "float", "int", "index", "neg",
    "eq", "ne", "lt", "le", "gt", "ge",
    *(kind + name for kind in ("", "r", "i") for name in ("add", "sub", "mul", "truediv", "matmul", "pow")),
)  # fmt: skip
"""The operations that a :class:`NotAssigned` refuses, without their underscores."""

_told: set[str] = set()
_bound: set[str] = set()  # variables that may have a placeholder


class NotComputed(float):
    """The placeholder for a variable that a block did not assign: a nan.

    Its attributes, its items and calls of it return the placeholder itself.

    Args:
        name: the variable, named in the warning.
    """

    def __new__(cls, name: str) -> NotComputed:
        """Return a new nan."""
        return super().__new__(cls, math.nan)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """Return this placeholder for any attribute (``loss.item()``, ...). Warn once per name."""
        if attribute.startswith("_"):  # array protocols, pickling and copying are not supported
            raise AttributeError(attribute)
        return self._tell()

    def __getitem__(self, key: object) -> NotComputed:
        """Return this placeholder, for ``metrics["loss"]``."""
        return self._tell()

    def __call__(self, *args: object, **kwargs: object) -> NotComputed:
        """Return this placeholder, for a call such as ``loss.item()``."""
        return self._tell()

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator without items."""
        self._tell()
        return iter(())

    def __len__(self) -> int:
        """Return 0."""
        return 0

    def __repr__(self) -> str:
        """Return ``nan``."""
        self._tell()
        return "nan"

    def __format__(self, form: str) -> str:
        """Return a formatted nan, for ``f"{loss:.4f}"``."""
        self._tell()
        return super().__format__(form)

    def _tell(self) -> NotComputed:
        if self._name not in _told:
            _told.add(self._name)
            log.warning(
                "holdfast: code after the block uses %r, which a block that does not count has not assigned: it is "
                "nan there; write `if step.committed:` around that code",
                self._name,
            )
        return self


class NotAssigned:
    """The placeholder for a variable while a block is open. Printing is allowed; other operations raise StepError.

    Args:
        name: the variable, named in the error.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        """Return ``nan``."""
        return "nan"

    @classmethod
    def __torch_function__(
        cls, function: object, types: object, args: Iterable[object] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise the error for a function of torch, also if the placeholder is in a list (``torch.cat((x, y))``)."""
        given = deque((*args, *(kwargs or {}).values()))
        while not isinstance(first := given.popleft(), cls):
            given.extend(first if isinstance(first, tuple | list) else ())
        _refuse(first)

    def __getattr__(self, attribute: str) -> NoReturn:
        """Raise an error for any attribute (``x.to(device)``), because the missing value may have that attribute."""
        _refuse(self, kind=_UnassignedAttributeError)


class _UnassignedAttributeError(StepError, AttributeError):
    """The error for an attribute of a variable without a value. With this error ``hasattr`` returns False."""


def _refuse(unassigned: NotAssigned, *_: object, kind: type[StepError] = StepError) -> NoReturn:
    name = vars(unassigned).get("_name", "")
    raise kind(
        f"the block uses {name!r}, to which this process has not assigned a value: an earlier block does, "
        "or code that does not run where a block runs again (`if not step.again:`)",
        hint="assign it in the block, or keep it in session(state={...}), or in s.own if it is of one rank. Batches of "
        "several loaders: s.steps(loader, second)",
    )


for _use in _USES:
    setattr(NotAssigned, f"__{_use}__", _refuse)


def bind(trace: TracebackType | None) -> None:
    """Assign a placeholder to each unset variable to which the rest of an aborted block would have assigned a value.

    Args:
        trace: the traceback of the exception that left the block. None if nothing is assigned.
    """
    if trace is None:
        return
    frame = trace.tb_frame
    values = frame.f_locals
    unset = [name for name in _assigned_after(frame, trace.tb_lasti) if name not in values]
    _assign(frame, {name: NotComputed(name) for name in unset})
    _bound.update(unset)


def exchange(*, inside: bool) -> None:
    """Exchange the placeholders in the frames of the script.

    Args:
        inside: True if a block begins, which must not compute with placeholders; False if a block has ended.
    """
    if not _bound:
        return
    kind, other = (NotAssigned, NotComputed) if inside else (NotComputed, NotAssigned)
    left: set[str] = set()
    for frame in frames_outside((OURS,)):
        values = frame.f_locals
        found = [name for name in _bound if isinstance(values.get(name), other)]
        _assign(frame, {name: kind(name) for name in found})
        left.update(found)
    _bound.intersection_update(left)


def _assign(frame: FrameType, placeholders: Mapping[str, NotComputed | NotAssigned]) -> None:
    if not placeholders:
        return
    frame.f_locals.update(placeholders)
    if not _WRITES_THROUGH:
        ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(frame), ctypes.c_int(0))


def _assigned_after(frame: FrameType, offset: int) -> Iterator[str]:
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > offset and instruction.opname.startswith("STORE_"):
            names = instruction.argval
            for name in names if isinstance(names, tuple) else (names,):
                if isinstance(name, str) and not instruction.opname.startswith(
                    ("STORE_ATTR", "STORE_GLOBAL")
                ):
                    yield name
