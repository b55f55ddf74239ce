"""The way out of NCCL: ``abort()`` on each communicator, in a helper thread, because it may never return.

torch has threads of its own that watch NCCL, and as shipped they end the process when a peer is gone: no survivor would
be left to go on. What they look for is found here by other means: a death by the agent, a collective that does not end
by the watch over progress, an abort that does not return by its bound.

Not run without a GPU: the tests of this repository exercise the bookkeeping only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Protocol

SURVIVE: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # 3 as shipped: the first error of a peer ends this process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # else the same, whatever the first says, when its watchdog is stuck
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the script gets the error and can say so; the watchdog only aborts
}
"""What keeps a process alive whose peers are lost, by torch's environment variables."""


def outlive_peers() -> None:
    """Before the first group: torch leaves errors of NCCL to us, unless the user has decided otherwise."""
    for name, value in SURVIVE.items():
        os.environ.setdefault(name, value)


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
