"""The ``Work`` objects of the process groups: their waits end when the process is poisoned.

Theory. There are three ways to wait (:class:`Wait`):

- A collective of gloo runs on its own thread, so short waits (slices of 50 ms) cost nothing. The end of a slice is not
  a fault. A fault is a work whose ``is_completed()`` is True and whose ``wait()`` raises.
- A point-to-point call of gloo is different: gloo closes the connection when a wait times out, and the work has no
  callback. So its one blocking wait runs in a helper thread.
- A work of NCCL is ordered on the device's stream. It is never waited for in slices.

Errors of lost peers are distinguished from wrong calls (:func:`is_bug`).

A block that runs again repeats the calls that it has begun, but not calls that were begun before the block. A wait for
a call from before the block returns only if the call has succeeded (:func:`too_late`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from copy import copy
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, Protocol, TypeVar

import torch

from holdfast.errors import FaultError, StepError
from holdfast.frameworks.torch.comm.comm_state import SLICE, CommState
from holdfast.frameworks.torch.private_api import Work

Future = torch.futures.Future[Any]
E = TypeVar("E", bound=BaseException)

_BUGS = (AttributeError, TypeError, NotImplementedError, ValueError, IndexError)
_COMPLAINTS = (
    "ProcessGroupGloo::",  # prefix of gloo's errors about arguments of the call
    "No backend type associated with device type",  # a tensor on a device that the group has no backend for
)


class Wait(Enum):
    """The ways to wait for a work: in short slices, in a helper thread, or on the device's stream."""

    SLICES = "slices"
    THREAD = "thread"
    STREAM = "stream"


def is_bug(error: BaseException) -> bool:
    """Return True if ``error`` comes from a wrong call or from this process alone, not from a lost peer."""
    if isinstance(error, (*_BUGS, torch.OutOfMemoryError)):
        return True
    return any(complaint in str(error) for complaint in _COMPLAINTS)


class InnerWork(Protocol):
    """The methods that this module uses of a ``Work``, which torch returns for a collective of an inner group."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...
    def get_future(self) -> Future: ...
    def _source_rank(self) -> int: ...
    def block_current_stream(self) -> None: ...


class Several:
    """One ``Work`` object for several works, for collectives that gloo does not offer in coalesced form."""

    def __init__(self, works: list[InnerWork]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            if timeout:
                work.wait(timeout)
            else:
                work.wait()
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def _source_rank(self) -> int:
        return 0

    def block_current_stream(self) -> None:
        for work in self._works:
            work.block_current_stream()


def too_late(what: str) -> StepError:
    """Return the error of a late wait: the call was begun before the open block, and got no data from its peers."""
    return StepError(
        f"{what} was begun before this block, and without effect: its block was rehearsed, or cut off by a recovery",
        hint="call wait() before the end of the block that begins the call",
    )


class LocalWork(Work):
    """The work of a collective that completed at once.

    Args:
        outputs: the value of the future.
        fabric: set if the collective completed on local data. Then no later block may wait for it.
        what: name of the collective.
    """

    def __init__(self, outputs: list[Any], fabric: CommState | None = None, what: str = "") -> None:
        super().__init__()
        self._outputs = outputs
        self._fabric = fabric
        self._what = what
        self._block = 0 if fabric is None else fabric.moment.block

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._fabric is not None and self._fabric.moment.block != self._block:
            raise too_late(self._what)
        return True

    def get_future(self) -> Future:
        return _resolved(self._outputs)

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def result(self) -> list[Any]:
        return self._outputs

    def source_rank(self) -> int:
        return 0

    _source_rank = source_rank

    def synchronize(self) -> None:
        return None

    def block_current_stream(self) -> None:
        return None


class GuardedWork(Work):
    """The work of a collective in progress on the inner group.

    Args:
        fabric: receives the first fault.
        what: name of the collective, for messages.
        inner: the work of the inner group.
        outputs: the value of the future.
        way: the way to wait for ``inner``.
        fill: completes the outputs on local data if the collective breaks inside a shield.
        after: finishes a successful collective, for example by a copy of this rank's part; run once.
        count: number of this collective, for the flight recorder.
    """

    def __init__(
        self,
        fabric: CommState,
        what: str,
        inner: InnerWork,
        outputs: list[Any],
        way: Wait,
        fill: Callable[[], None] | None,
        after: Callable[[], None] | None,
        count: int = 0,
    ) -> None:
        super().__init__()
        self._fabric = fabric
        self._what = what
        self._inner = inner
        self._outputs = outputs
        self._way = way
        self._fill = fill
        self._after = after
        self._count = count
        self._begun = fabric.moment
        self._lock = threading.Lock()
        self._ended: Literal["", "well", "broken"] = ""
        self._error: BaseException | None = None
        self._future: Future | None = None
        self._outcome: Future | None = None
        self._waiting: Blocking | None = None
        fabric.track(self)

    # ------------------------------------------------------------------ waiting

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the collective has ended or the process is poisoned.

        Raises: PeerLost or GroupAborted (poisoned, see :meth:`CommState.give_up`), StepError (it was begun before a
        recovery), RuntimeError (the timeout ran out).
        """
        lost = self._begun.epoch != self._fabric.epoch
        # A work of NCCL says neither whether it succeeded, nor whether it was aborted.
        if not self._ended and not (lost and self._way is Wait.STREAM):
            limit_s = timeout.total_seconds() if timeout else 0.0
            try:
                self._await(time.monotonic() + limit_s if limit_s > 0 else None)
            except (_UserTimeout, *_BUGS):
                raise
            except RuntimeError as error:
                self._break(error)
            else:
                self._succeed()
        if lost and (self._ended == "broken" or self._way is Wait.STREAM):
            raise too_late(self._what)
        if self._error is not None:
            raise self._error
        return True

    def _await(self, deadline_s: float | None) -> None:
        if self._way is Wait.STREAM:
            self._inner.wait()
            return
        if self._way is Wait.THREAD:
            self._blocking().join(lambda: self._fabric.poisoned, deadline_s, self._what)
            return
        inner = self._inner
        while True:
            try:
                inner.wait(SLICE)
                return
            except RuntimeError:
                if inner.is_completed():
                    inner.wait()  # raises the collective's own error, unless it has just ended without one
                    return
                if self._fabric.poisoned:
                    raise
                if deadline_s is not None and time.monotonic() >= deadline_s:
                    raise _UserTimeout(f"{self._what}: not complete within the given timeout") from None

    def _blocking(self) -> Blocking:
        with self._lock:
            if self._waiting is None:
                self._waiting = Blocking(self._inner)
                _WAITERS.run(self._waiting)
            return self._waiting

    # ------------------------------------------------------------------ ends

    def _succeed(self) -> None:
        with self._lock:
            if self._ended:
                return
            if self._after is not None:
                self._after()
            self._ended = "well"
            future = self._future
        self._fabric.ended(self._count)
        self._fabric.forget(self)
        if future is not None and not future.done():
            future.set_result(self._outputs)

    def _break(self, cause: BaseException) -> None:
        """Report the fault and end the collective: on local data before the vote of a step, otherwise with an error."""
        self._fabric.broke(self._what, cause, self._begun.epoch)
        self._end_broken()

    def _end_broken(self) -> None:
        error: BaseException | None = None
        try:
            self._fabric.give_up(self._what)
            if self._begun.block != self._fabric.moment.block:
                raise too_late(self._what)
        except BaseException as refusal:  # kept for wait() to raise: this may run in a thread of gloo
            error = _frameless(refusal)
        with self._lock:
            if self._ended:
                return
            if error is None and self._fill is not None:
                self._fill()
            self._error = error
            self._ended = "broken"
            future = self._future
        self._fabric.ended(self._count, broken=True)
        if self.settled():
            self._fabric.forget(self)
        if future is not None and not future.done():
            future.set_result(self._outputs)

    def release(self) -> None:
        """End the collective for all code that waits on its future, because the process is poisoned."""
        if self._way is Wait.THREAD:
            self._blocking()  # :meth:`settled` knows the end only of a call that is waited for
        if self._future is not None:
            self._end_broken()

    def settled(self) -> bool:
        """Return True if the collective can no longer write into memory of this process.

        A collective becomes settled soon after its sockets are shut down. The end of a point-to-point call is known
        only if a thread waits for the call. Without such a thread it counts as settled.
        """
        if self._way is Wait.THREAD:
            return self._waiting is None or self._waiting.ended.is_set()
        return self._inner.is_completed()

    # ------------------------------------------------------------------ the rest of Work

    def get_future(self) -> Future:
        """Return a future of the outputs that also completes when the process is poisoned.

        If the collective broke, a ``then`` callback raises the error, so that the returned future fails.
        ``Future.set_exception`` is not used: it would store the Python exception as the *value*, and DDP's C++ reducer
        would read the exception as tensors and crash.
        """
        if self._way is Wait.STREAM:
            return self._inner.get_future()
        with self._lock:
            if self._outcome is not None:
                return self._outcome
            future: Future = torch.futures.Future()
            self._future = future
            self._outcome = future.then(self._outputs_or_error)
            ended = bool(self._ended)
        if ended:
            future.set_result(self._outputs)
        elif self._way is Wait.THREAD:
            self._blocking().then(self._on_blocking)
        else:
            self._inner.get_future().add_done_callback(self._on_inner)
        if self._fabric.poisoned:
            self.release()
        return self._outcome

    def _outputs_or_error(self, _: Future) -> list[Any]:
        if isinstance(self._error, Exception):
            raise self._error
        return self._outputs

    def _on_inner(self, inner: Future) -> None:
        try:
            inner.value()
        except RuntimeError as error:
            self._break(error)
        else:
            self._succeed()

    def _on_blocking(self, waiting: Blocking) -> None:
        if waiting.error is None:
            self._succeed()
        else:
            self._break(waiting.error)

    def is_completed(self) -> bool:
        if self._ended or self._way is not Wait.THREAD:
            return bool(self._ended) or self._inner.is_completed()
        return self._waiting is not None and self._waiting.ended.is_set()

    def is_success(self) -> bool:
        return bool(self._ended) and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Any]:
        return self._outputs

    def source_rank(self) -> int:
        return self._inner._source_rank()

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()


class _UserTimeout(RuntimeError):
    """The error of a wait that has lasted longer than the caller's own timeout; it is not a fault."""


class _Interrupted(FaultError, RuntimeError):
    """The error of a wait for a point-to-point call during which the process was poisoned."""


class Blocking:
    """A wait for one work that cannot be interrupted; a helper thread runs it."""

    def __init__(self, inner: InnerWork) -> None:
        self._inner = inner
        self.ended = threading.Event()
        self.error: RuntimeError | None = None
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Blocking], None]] = []

    def run(self) -> None:
        """Wait until the work ends, then call the callbacks."""
        try:
            self._inner.wait()
        except RuntimeError as error:
            self.error = _frameless(error)
        with self._lock:
            self.ended.set()
            callbacks = self._callbacks
        for callback in callbacks:
            callback(self)

    def then(self, callback: Callable[[Blocking], None]) -> None:
        """Call ``callback`` when the wait has ended, or now if it already has."""
        with self._lock:
            if not self.ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def join(self, stopped: Callable[[], bool], deadline_s: float | None, what: str) -> None:
        """Wait until the helper thread has ended its wait.

        Raises: the work's own error; FaultError once ``stopped()`` returns True; RuntimeError after ``deadline_s``
        (monotonic time).
        """
        while not self.ended.wait(SLICE.total_seconds()):
            if stopped():
                raise _Interrupted(f"{what} was interrupted")
            if deadline_s is not None and time.monotonic() >= deadline_s:
                raise _UserTimeout(f"{what}: not complete within the given timeout")
        if self.error is not None:
            raise copy(self.error)  # a copy, because raising adds frames to an error


class _Waiters:
    """A pool of daemon threads that run :class:`Blocking` waits; a new one is started if none is idle."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Blocking] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0

    def run(self, job: Blocking) -> None:
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._loop, name="holdfast-p2p-wait", daemon=True).start()
        self._jobs.put(job)

    def _loop(self) -> None:
        while True:
            self._jobs.get().run()
            with self._lock:
                self._idle += 1


_WAITERS = _Waiters()


def _frameless(error: E) -> E:
    """Return the error without its frames, which would keep alive the work, the broken group and its tensors."""
    error.__context__ = None
    return error.with_traceback(None)


def _resolved(outputs: list[Any]) -> Future:
    future: Future = torch.futures.Future()
    future.set_result(outputs)
    return future
