"""A spare's place in the job: unknown, until it is called.

Theory. A spare runs the user's script before anybody knows which rank it will be. Code that works for every rank goes
on; whoever asks for the rank (``RANK`` and its kin in the environment, ``dist.get_rank()``) waits right there and gets
the true answer when the spare is called. So no wrong rank can ever get into a variable of the script. Known places
that ask without need are *exempt*: they get a stand-in, and what they made of it is corrected at the call.

A spare that was built as one rank (``fixed``) knows its rank from the start; only its generation is missing. Every
spare is held before its first use of a device, which has no room for the state of another process.
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
"""Environment variables that tell a process its place."""


class DeferredRank:
    """See the module. ``waits(ready)`` tells the agent that this process waits to be called."""

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
        """This process is a member of the job."""
        return self._called.is_set()

    def install(self) -> None:
        """Let the environment of this process ask. Nothing to do when the rank is known."""
        os.register_at_fork(after_in_child=self._in_child)
        if not self.fixed:
            os.environ.__class__ = _Environment
            _Environment.stand_in = self

    def ask(self) -> None:
        """Return when the rank is known, or at once where a stand-in will do."""
        if self.fixed or self.called or self._forked or self._exempt_depth():
            return
        self._stay("where its rank is asked for")

    def ask_once(self) -> None:
        """Return when this process is a member: what its rank has made once is known to members only."""
        if not self.called:
            self._stay("where its rank asks for what it has made once")

    def hold(self) -> None:
        """Return when this process may use a device: it is a member, and the lost ones have let go of theirs."""
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
        """In here a stand-in will do, in this thread."""
        self._local.exempt = self._exempt_depth() + 1
        try:
            yield
        finally:
            self._local.exempt -= 1

    def wait(self) -> None:
        """Built as far as possible: return when called."""
        if not self.called:
            self._waits(True)
            self._called.wait()

    def on_call(self, action: Callable[[int], None]) -> None:
        """Do ``action(rank)`` when called, in the client thread, while the main thread waits."""
        self._on_call.append(action)

    def call(self, rank: int, ending: Sequence[int] = ()) -> None:
        """This process is ``rank`` from now on; its environment says so already.

        ``ending``: as ``core/spares.Called`` says.
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
        self._forked = True  # a data loader's worker: nobody would ever tell it


class _Environment(os._Environ[str]):
    """``os.environ`` of a spare: some variables are asked for."""

    stand_in: DeferredRank | None = None

    def __getitem__(self, key: Any) -> str:
        if key in ASKED and self.stand_in is not None:
            self.stand_in.ask()
        return super().__getitem__(key)


def exempt() -> AbstractContextManager[None]:
    """A context in which a stand-in for the rank will do; nothing special in a process that knows its place."""
    found = current()
    return nullcontext() if found is None else found.exempt()


_current: DeferredRank | None = None


def current() -> DeferredRank | None:
    """The stand-in of this process; None in one that was started as a member."""
    return _current


def use(stand_in: DeferredRank) -> None:
    """Make it this process's."""
    global _current
    _current = stand_in
    stand_in.install()
