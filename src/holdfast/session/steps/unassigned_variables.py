"""Variables of a block that was left before it had assigned them: code behind the block finds a value that says so.

Theory. A block that does not count is left in its middle: where it would vote, or where a fault met it. The script goes
on behind the block, and Python cannot be made to leave that out. ``loss = train(batch)`` has then assigned nothing, and
``print(loss)`` without ``if step.committed:`` would end the job for an error that no undisturbed run has. So each name
that the block would have assigned, and that has no value yet, gets :class:`NotComputed`: a nan that answers to
everything a result is asked, and tells the user, once, what to write.
"""

from __future__ import annotations

import ctypes
import dis
import logging
import math
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

log = logging.getLogger("holdfast")

_WRITES_THROUGH = sys.version_info >= (3, 13)
"""What is put into ``frame.f_locals`` is put into the frame."""

_told: set[str] = set()


class NotComputed(float):
    """The value of a variable that a block would have assigned. Any attribute, item or call of it is itself."""

    def __new__(cls, name: str) -> NotComputed:
        """Not a number."""
        return super().__new__(cls, math.nan)

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        """``loss.detach()``, ``loss.item()``, ..."""
        if attribute.startswith("_"):  # protocols of arrays, pickling, copying: it has none
            raise AttributeError(attribute)
        return self._tell()

    def __getitem__(self, key: object) -> NotComputed:
        """``metrics["loss"]``."""
        return self._tell()

    def __call__(self, *args: object, **kwargs: object) -> NotComputed:
        """Of what is an attribute."""
        return self._tell()

    def __iter__(self) -> Iterator[Any]:
        """Without items."""
        self._tell()
        return iter(())

    def __len__(self) -> int:
        """None."""
        return 0

    def __repr__(self) -> str:
        """As printed."""
        self._tell()
        return "nan"

    def __format__(self, form: str) -> str:
        """``f"{loss:.4f}"``."""
        self._tell()
        return super().__format__(form)

    def _tell(self) -> NotComputed:
        if self._name not in _told:
            _told.add(self._name)
            log.warning(
                "holdfast: code behind the block uses %r, which a block that does not count has not assigned: it is "
                "nan there; write `if step.committed:` around that code",
                self._name,
            )
        return self


def bind(trace: TracebackType | None) -> None:
    """Give a value to what the block that ``trace`` comes from would have assigned from there on."""
    if trace is None:
        return
    frame = trace.tb_frame
    values = frame.f_locals
    unset = [name for name in _assigned_after(frame, trace.tb_lasti) if name not in values]
    for name in unset:
        values[name] = NotComputed(name)
    if unset and not _WRITES_THROUGH:
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
