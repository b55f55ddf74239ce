"""The rank of a spare process, which is unknown until the spare becomes a member of the job (until it is "called").

Theory. A spare runs the user's script before its rank is decided. Code that works for every rank runs without a wait.
Code that reads the rank (``RANK`` and similar variables, ``dist.get_rank()``) blocks until the spare is called. It then
gets the true rank, so no variable of the script ever has a wrong rank. Known code that reads the rank without need is
*exempt*: it gets a placeholder, and values that were computed from the placeholder are corrected at the call.

A spare that was built for one rank (``fixed``) knows its rank from the start; only its generation is missing. Every
spare blocks before its first use of a device, because the device has no room for the state of a second process.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from holdfast.runtime.node.process_info import END_MOST_S, END_STILL_S, await_end

ASKED = frozenset({"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "RANK_ID", "DEVICE_ID"})
"""Environment variables that contain the rank of a process, or a number that follows from it."""


class DeferredRank:
    """The unknown rank of a spare.

    Args:
        fixed: True if the spare was built for one rank, which it knows.
        waits: reports to the agent that this process waits for its call. Its argument is True if the spare is
            completely built.
    """

    def __init__(self, fixed: bool, waits: Callable[[bool], None]) -> None:
        self.fixed = fixed
        self._waits = waits
        self._called = threading.Event()
        self._local = threading.local()
        self._on_call: list[Callable[[int], None]] = []
        self._forked = False
        self._ending: tuple[int, ...] = ()

    @property
    def called(self) -> bool:
        """True if this process has become a member of the job."""
        return self._called.is_set()

    def install(self) -> None:
        """Make reads of the rank variables in ``os.environ`` block, unless the rank is known."""
        os.register_at_fork(after_in_child=self._in_child)
        if not self.fixed:
            os.environ.__class__ = _Environment
            _Environment.stand_in = self

    def ask(self) -> None:
        """Block until the rank is known. Return at once in code for which a placeholder is enough."""
        if self.fixed or self.called or self._forked or self._exempt_depth():
            return
        self._stay("where its rank is asked for")

    def ask_once(self) -> None:
        """Block until this process is a member. Only a member can read the results that its rank keeps (``once``)."""
        if not self.called:
            self._stay("where its rank asks for what it has made once")

    def hold(self) -> None:
        """Block until this process may use a device: it is a member, and lost processes have freed their devices.

        Print a warning if a lost process does not end.
        """
        if self._forked:
            return
        if not self.called:
            self._stay("before its first use of a device")
        ending, self._ending = self._ending, ()
        for pid in ending:
            if not await_end(pid, END_STILL_S, END_MOST_S):
                sys.stderr.write(
                    f"holdfast: process {pid} was lost and is not gone: its device may be full\n"
                )

    @contextmanager
    def exempt(self) -> Iterator[None]:
        """Return a context in which reads of the rank by this thread get a placeholder instead of blocking."""
        self._local.exempt = self._exempt_depth() + 1
        try:
            yield
        finally:
            self._local.exempt -= 1

    def wait(self) -> None:
        """Report that this spare is completely built, and block until it is called."""
        if not self.called:
            self._waits(True)
            self._called.wait()

    def on_call(self, action: Callable[[int], None]) -> None:
        """Register ``action(rank)``, to run when this spare is called.

        It runs in the client thread while the main thread waits.
        """
        self._on_call.append(action)

    def call(self, rank: int, ending: Sequence[int] = ()) -> None:
        """Make this process the member with rank ``rank``.

        The caller has set the rank variables of the environment before.

        Args:
            ending: pids of lost processes whose devices may not be free yet, see ``core/job/spares.Called``.
        """
        self._ending = tuple(ending)
        for action in self._on_call:
            action(rank)
        self._called.set()

    def _stay(self, where: str) -> None:
        sys.stderr.write(f"holdfast: this spare waits here, {where}:\n")
        traceback.print_stack(sys._getframe(2))
        self._waits(False)
        self._called.wait()

    def _exempt_depth(self) -> int:
        return int(getattr(self._local, "exempt", False))

    def _in_child(self) -> None:
        self._forked = True  # a forked child, such as a data loader's worker, is never called


class _Environment(os._Environ[str]):
    """``os.environ`` of a spare: reads of the rank variables block."""

    stand_in: DeferredRank | None = None

    def __getitem__(self, key: Any) -> str:
        if key in ASKED and self.stand_in is not None:
            self.stand_in.ask()
        return super().__getitem__(key)


def exempt() -> AbstractContextManager[None]:
    """Return a context in which reads of the rank by this thread get a placeholder instead of blocking.

    In a process that was started as a member the context has no effect.
    """
    found = current()
    return nullcontext() if found is None else found.exempt()


_current: DeferredRank | None = None


def current() -> DeferredRank | None:
    """Return the deferred rank of this process; None in a process that was started as a member."""
    return _current


def use(stand_in: DeferredRank) -> None:
    """Make ``stand_in`` the deferred rank of this process."""
    global _current
    _current = stand_in
    stand_in.install()
