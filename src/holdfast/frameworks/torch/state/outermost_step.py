"""The outermost running ``step()`` of an optimizer.

Theory. A class may call the ``step()`` of its base class in its own. torch calls the hooks at both, if the process has
also made an optimizer of the base class. Both calls belong to one update. The outer call is known by the frame of
torch's function around it, so a call that ended with an exception is not taken for a running one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

from torch.optim import Optimizer

_FILE = sys.modules[Optimizer.__module__].__file__


class OutermostStep:
    """The frames of torch's function around the running ``step()`` of each optimizer."""

    def __init__(self) -> None:
        self._frames: dict[int, FrameType] = {}  # by the id of the optimizer

    def begins(self, optimizer: Optimizer) -> bool:
        """Return False if the ``step()`` that begins is called inside of another one of ``optimizer``."""
        around = list(_frames())
        outer = self._frames.get(id(optimizer))
        if outer is not None and any(frame is outer for frame in around[1:]):
            return False
        if around:
            self._frames[id(optimizer)] = around[0]
        return True

    def ends(self, optimizer: Optimizer) -> None:
        """Forget the ``step()`` of ``optimizer`` if it is the outermost one."""
        outer = self._frames.get(id(optimizer))
        if outer is not None and next(_frames(), None) is outer:
            del self._frames[id(optimizer)]


def _frames() -> Iterator[FrameType]:
    """Yield the frames of torch's functions around ``step()`` in this thread, from the innermost."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE:
            yield frame
        frame = frame.f_back
