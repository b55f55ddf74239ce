"""The abort of NCCL's collectives: ``abort()`` on each communicator, in a helper thread, because it may never return.

torch's own threads watch NCCL, and with torch's defaults they end the process when a peer is gone. No survivor would be
left. Holdfast switches this off and finds the same conditions by other means: the agent detects a death, the progress
watcher detects a collective that does not end, and a time limit detects an abort that does not return.
The abort has not been run on a GPU: the tests of this repository cover only the bookkeeping.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from holdfast.frameworks.torch import private_api

SURVIVE: Mapping[str, str] = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # the default is 3: the first error of a peer ends this process
    # Otherwise a stuck watchdog ends this process, whatever the first variable says.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # the script gets the error and can report it; the watchdog only aborts
}
"""Values of torch's environment variables that keep a process alive when its peers are lost."""


def outlive_peers() -> None:
    """Set torch's environment variables so that an NCCL error does not end the process; keep values set by the user.

    Call it before the first group is made.
    """
    for name, value in SURVIVE.items():
        os.environ.setdefault(name, value)


class Abortable(Protocol):
    """A backend with an ``abort`` that may block (``ProcessGroupNCCL``)."""

    def abort(self) -> None: ...

    def get_error(self) -> Any: ...


class Abort:
    """One abort of several NCCL backends, run in a daemon thread; its caller decides how long to wait.

    Communicators that are aborted one after the other can wait for each other (nccl issue 1013, torch issue 119797).
    All communicators of a process are therefore aborted inside one NCCL group call.
    """

    def __init__(self, backends: Sequence[Abortable]) -> None:
        self._backends = backends
        self._ended = threading.Event()
        self.error: RuntimeError | None = None

    @property
    def done(self) -> bool:
        """True after every backend has been aborted."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Wait until every backend has been aborted; this may never return."""
        self._ended.wait()

    def start(self) -> Abort:
        """Start the abort and return this object at once."""
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
            except RuntimeError as error:  # an abort that raises has ended too; the caller may read the error
                self.error = error
        self._ended.set()


def error_of(backend: Abortable) -> str:
    """Return the error that NCCL found outside of the collectives (a link, another rank), or an empty text."""
    found = backend.get_error()
    name: str = getattr(found, "name", str(found))
    return "" if name == "SUCCESS" else name
