"""The way out of NCCL: ``abort()`` on each communicator, in a helper thread, because it may never return.

Not run without a GPU: the tests of this repository exercise the bookkeeping only.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Abortable(Protocol):
    """A backend with an ``abort`` that may block (``ProcessGroupNCCL``)."""

    def abort(self) -> None: ...


class Abort:
    """One abort under way. It runs in a daemon thread; whoever waits for :attr:`done` sets the bound."""

    def __init__(self, backend: Abortable) -> None:
        self._backend = backend
        self.done = False
        self.error: RuntimeError | None = None

    def start(self) -> Abort:
        """Begin; returns at once."""
        threading.Thread(target=self._run, name="holdfast-nccl-abort", daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self._backend.abort()
        except RuntimeError as error:  # an abort that raises has ended too; the caller may look at the error
            self.error = error
        self.done = True
