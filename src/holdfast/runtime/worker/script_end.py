"""The sessions that are open when the script ends, and that are then left as a ``with`` statement leaves them.

Theory. A ``with`` statement tells its session how the block ends. A script may call ``session.__enter__()`` instead,
for example in the constructor of a class. If it then raises, or ends without a call of ``__exit__``, nothing tells the
session: the state of the last committed step is lost, the final checkpoint is not written, and the other ranks wait.
So each session is registered here while it is open, and the end of the script leaves the sessions that are left over.

A worker of ``holdfast run`` runs the script in :func:`leaves_sessions`. Other processes use the hooks of Python: the
exception hook gets the exception that ends the script, and an exit handler runs after any other end. The handler knows
neither the argument of ``sys.exit``, nor whether the other ranks have finished, and may start no thread. So it leaves
the session with an error: the ranks keep the state of the last committed step if they can, and the exit code is not 0.

Invariants:
1. A session is left at most once by its script's end, and only in the process that has entered it.
2. A session that its script has left is not left again.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit

_OPEN: dict[AbstractContextManager[object], int] = {}
"""Process identifier by open session. A process that was forked meanwhile has the entries of its parent."""
_watched = False


def entered(session: AbstractContextManager[object]) -> None:
    """Register ``session``, which is open now."""
    _OPEN[session] = os.getpid()
    if not _watched:
        _install_hooks()


def left(session: AbstractContextManager[object]) -> None:
    """Remove ``session``, which the script leaves. If it is not registered, do nothing."""
    _OPEN.pop(session, None)


@contextmanager
def leaves_sessions() -> Iterator[None]:
    """Run the script in the body. Leave the sessions that it leaves open, with its exception if there is one.

    Raises:
        BaseException: the exception of the body, or an exception of a session that was left.
    """
    global _watched
    _watched = True
    try:
        yield
    except BaseException as error:
        _leave_all(error)
        raise
    _leave_all(None)


def _leave_all(error: BaseException | None) -> None:
    while _OPEN:
        session, process = _OPEN.popitem()
        if process == os.getpid():
            session.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def _install_hooks() -> None:
    global _watched
    _watched = True
    show = sys.excepthook

    def leave_and_show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            _leave_all(error)
        finally:
            show(kind, error, trace)

    sys.excepthook = leave_and_show
    atexit.register(_leave_at_exit)


def _leave_at_exit() -> None:
    """Leave the open sessions with an error, and end the process with the exit code of a usage error.

    An exception of an exit handler would not change the exit code.
    """
    if os.getpid() not in _OPEN.values():
        return
    error: BaseException = UsageError(
        "the script has ended, and its session is still open: the final checkpoint is not written",
        hint="use `with holdfast.session(...) as s:`, or call s.__exit__(None, None, None) at the end",
    )
    try:
        _leave_all(error)
    except BaseException as further:
        error = further
    sys.excepthook(type(error), error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Exit.BAD_INPUT)
