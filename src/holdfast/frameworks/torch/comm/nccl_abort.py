"""The way out of NCCL: ``abort()`` on each communicator, in a helper thread, because it may never return.

torch has threads of its own that watch NCCL, and as shipped they end the process when a peer is gone: no survivor would
be left to go on. What they look for is found here by other means: a death by the agent, a collective that does not end
by the watch over progress, an abort that does not return by its bound.

Not run without a GPU: the tests of this repository exercise the bookkeeping only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.frameworks.torch import private_api

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

    def get_error(self) -> Any: ...


class Abort:
    """One abort of several backends, under way in a daemon thread; the waiter sets the bound.

    Communicators that are aborted one after the other can wait for each other (nccl issue 1013, torch issue 119797):
    all communicators of a process are aborted inside one NCCL group call.
    """

    def __init__(self, backends: Sequence[Abortable]) -> None:
        self._backends = backends
        self._ended = threading.Event()
        self.error: RuntimeError | None = None

    @property
    def done(self) -> bool:
        """True when every backend is aborted."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when every backend is aborted; that may be never."""
        self._ended.wait()

    def start(self) -> Abort:
        """Begin; returns at once."""
        if self._backends:
            threading.Thread(target=self._run, name="holdfast-nccl-abort", daemon=True).start()
        else:
            self._ended.set()
        return self

    def _run(self) -> None:
        end = private_api.begin_together(self._backends[0])
        for call in (*(backend.abort for backend in self._backends), end):
            try:
                call()
            except (
                RuntimeError
            ) as error:  # an abort that raises has ended too; the caller may look at the error
                self.error = error
        self._ended.set()


def error_of(backend: Abortable) -> str:
    """The error that a backend has found beside the collectives (a link, another rank), or an empty text."""
    found = backend.get_error()
    name: str = getattr(found, "name", str(found))
    return "" if name == "SUCCESS" else name
