"""The state that all process groups of one process share: poison, shield, seal, loopback, generation.

Theory. A fault concerns the whole process: a rank with one broken group would send wrong data through its healthy
groups. The first error therefore poisons every group. The effect of a poison on a collective depends on where the
collective is called. Inside a step before its vote (*shield*), each collective completes at once on local data. DDP's
reducer and FSDP2's hooks then end in order, and the vote rejects the step. Anywhere else the collective raises
:class:`~holdfast.errors.PeerLost`. Between the vote and the end of the block (*seal*), collectives of user code are
refused. In *loopback* there are no peers: collectives complete on local data, for rehearsals.

Invariants:
1. ``poisoned`` is set by the first error, cleared only by :meth:`CommState.reconfigure`, and read lock-free.
2. Two inner groups never share a key space: it is named by the generation, and a generation is built at most once.
3. No caller waits for the end of a poisoned inner group. It is destroyed in a separate thread, which joins gloo's
   threads, and one of those may be in a wait that ends much later.
4. Nothing here is specific to a process before the first group is made: a zygote may fork after ``install()``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.errors import GroupError, InternalError, PeerLost, StepError
from holdfast.frameworks.common.adapter import Aborted, Unsevered
from holdfast.frameworks.torch.comm.nccl_abort import Abort, Abortable
from holdfast.runtime.node.flight_recorder import Flight
from holdfast.runtime.node.shm_allreduce import SharedMemoryAllReduce

SLICE = timedelta(milliseconds=50)
"""Longest time between two checks of the poison flag while a collective is in progress."""

QUIESCE_S = 0.5
ABORTS_S = 20.0
"""Bound of an abort of NCCL, in seconds: tens of communicators take seconds to abort."""
REBUILD_TIMEOUT_S = 60.0
BURIALS_S = 1.0
_PENDING_PRUNE = 512


class GroupAborted(Aborted):
    """The exception that leaves a step, to run it again, because a call in it must return data of a lost peer."""


class Inner(Protocol):
    """A built group: the C++ process group and the means to abort it."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def unsevered(self) -> Sequence[Abortable]:
        """Return the backends whose abort may block and has not begun."""

    def sever(self, abort: Abort | None = None) -> None:
        """Make every collective in progress end with an error; idempotent, from any thread, returns at once.

        Args:
            abort: aborts the backends of :meth:`unsevered` together with those of other groups.
        """

    def severed(self) -> bool:
        """Return False while an NCCL abort begun by :meth:`sever` is still running."""

    def error(self) -> str:
        """Return an error that the backends found outside of the collectives, or an empty text."""

    def close(self) -> None:
        """End a healthy group in order; complete when the caller drops its last reference."""

    def bury(self) -> None:
        """Begin to destroy a severed group; returns at once."""

    def buried(self, timeout_s: float = 0.0) -> bool:
        """Return True if the destruction has ended, after a wait of at most ``timeout_s``."""


class Handle(Protocol):
    """A process group that user code holds and that exists across generations."""

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """Position in the order in which all ranks rebuild their groups (global ranks, ordinal)."""

    @property
    def inner(self) -> Inner | None: ...

    @property
    def built_in(self) -> Generation | None:
        """The generation of ``inner``."""

    def meet(self, generation: Generation) -> None:
        """Wait until every rank is about to rebuild. Raises: GroupError."""

    def rebuild(self, generation: Generation) -> None:
        """Replace the inner group by a new one of ``generation``.

        Raises:
            GroupError: the new group could not be built; the old one is still in place.
        """

    def become(self, rank: int) -> None:
        """Take over ``rank`` in this process, which was a spare until now."""

    def replaceable(self) -> str:
        """Return the reason why this group cannot be rebuilt; empty if it can."""

    def build_vote(self, generation: Generation) -> Inner:
        """Return a new private gloo group over the same ranks. Raises: GroupError."""

    def open_board(self, generation: Generation) -> SharedMemoryAllReduce | None:
        """Return the shared-memory all-reduce of these ranks; None if they are on several nodes. Raises: StateError."""

    def leave(self) -> None:
        """End all threads of this group that use Python objects, because the process ends."""


class Pending(Protocol):
    """A collective in progress."""

    def settled(self) -> bool:
        """Return True if the collective can no longer write into memory of this process."""

    def release(self) -> None:
        """Complete the future of this work, so that all waiters continue."""


class WaitTime:
    """The time that this process has waited for its last collectives, from the first that began to the last that ended.

    Other work of the process in that time is not known.
    """

    def __init__(self) -> None:
        self._begun_ns = 0
        self._ended_ns = 0

    def begin(self) -> None:
        """Note that a collective begins now."""
        self._begun_ns = time.monotonic_ns()

    def end(self) -> None:
        """Note that the last collective in progress has ended now."""
        self._ended_ns = time.monotonic_ns()

    def take(self) -> tuple[int, int] | None:
        """Return the begin and the end in ns, once; None if no collective has ended since."""
        if self._ended_ns <= self._begun_ns:
            return None
        since_ns, self._begun_ns = self._begun_ns, self._ended_ns
        return since_ns, self._ended_ns


class CommState:
    """The shared state of all process groups of this process.

    Use :func:`fabric`. Every method may be called from any thread.
    """

    def __init__(self) -> None:
        self.poisoned = False
        self.reason = ""
        self.shielded = False
        self.sealed = False
        self.looped = False
        self.aside_thread = 0  # its collectives complete on local data; 0: none
        self.calm = True  # nothing above is set, so collectives take the fast path
        self.collectives = 0
        self.flight: Flight | None = None  # set from the first group on, if the process has a status page
        self.generation = NO_GENERATION
        # Name of the ranks' start, used where torch's store connects the groups: see ``control_store.agree_on_start``.
        self.start = ""
        self._lock = threading.RLock()
        self.epoch = 0  # grows with every reconfigure; a late error of an older epoch is ignored
        self._poisonings = 0
        self._news = ""  # reason of the last poisoning
        self._groups: list[Handle] = []
        self._pending: dict[int, Pending] = {}
        self._graveyard: list[Inner] = []
        self._vote: Inner | None = None
        self._board: SharedMemoryAllReduce | None = None
        self._boarded = False  # a board was looked for in this generation
        self._on_poison: list[Callable[[str], None]] = []
        self._on_collective: Callable[[int, str], None] | None = None
        self._on_wait: Callable[[int, int], None] | None = None
        self._waited = WaitTime()
        self._local = threading.local()

    # ------------------------------------------------------------------ modes

    def shield(self, on: bool) -> None:
        """Switch the shield, which is on inside a step before its vote.

        While it is on, broken collectives complete on local data instead of raising.
        """
        self.shielded = on

    def seal_updates(self, on: bool) -> None:
        """Forbid or allow collectives of user code; they are forbidden between the vote and the end of the block.

        A forbidden collective raises :class:`StepError`.
        """
        with self._lock:
            self.sealed = on
            self._refresh()

    def loopback(self) -> None:
        """Make collectives complete on local data until :meth:`reconfigure`."""
        with self._lock:
            self.looped = True
            self._refresh()

    def set_aside(self, on: bool) -> None:
        """Make the collectives of this thread complete on local data, or no longer.

        The code that the thread runs now is run again. Other threads of the script may be in the middle of a save.
        """
        with self._lock:
            self.aside_thread = threading.get_ident() if on else 0
            self._refresh()

    def on_poison(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` at the first broken collective of this process, in the thread that saw it.

        It is not called for :meth:`poison`, whose caller knows the reason.
        """
        self._on_poison.append(callback)

    def on_collective(
        self, callback: Callable[[int, str], None] | None, on_wait: Callable[[int, int], None] | None = None
    ) -> None:
        """Call ``callback(count, what)`` at the start of every collective (for the status page); None removes it.

        ``on_wait(since_ns, until_ns)`` is called later with the time that this process spent in the last collectives.
        """
        self._on_collective, self._on_wait = callback, on_wait

    def note_wait(self) -> None:
        """Report the time in which the process waited for its last collectives, if none is in progress."""
        if self._on_wait is not None and not self._pending and (span := self._waited.take()) is not None:
            self._on_wait(*span)

    def _refresh(self) -> None:
        self.calm = not (self.poisoned or self.sealed or self.looped or self.aside_thread)

    # ------------------------------------------------------------------ poison

    def poison(self, reason: str) -> None:
        """Break every group of this process.

        Waits end, sockets of gloo are shut down, and NCCL is aborted in the background. Idempotent; returns at once.
        """
        with self._lock:
            self._poisonings += 1
            self._news = reason
            if not self.poisoned:
                self.reason = reason
                self.poisoned = True
                self._refresh()
            pending = list(self._pending.values())
        self.sever(self._inners())
        for work in pending:
            work.release()

    def sever(self, inners: Sequence[Inner]) -> None:
        """Make every collective in progress in these groups end; one abort for all backends of NCCL."""
        with self._lock:
            abort = Abort([backend for inner in inners for backend in inner.unsevered()])
            for inner in inners:
                inner.sever(abort)
        abort.start()

    def broke(self, what: str, error: BaseException, epoch: int) -> None:
        """Poison this process after a failed collective, and call the registered callbacks, once.

        Args:
            epoch: the epoch in which the collective was begun. A fault of an older epoch is ignored.
        """
        with self._lock:
            if self.poisoned or epoch != self.epoch:
                return
            reason = f"{what}: {_first_line(error)}"
            self.poison(reason)
        for callback in list(self._on_poison):
            callback(reason)

    def check(self, what: str) -> bool:
        """Return True if a collective must complete on local data; called if :attr:`calm` is False.

        Args:
            what: the collective, for the error.

        Raises:
            StepError: the step has voted (see :meth:`seal_updates`).
            PeerLost: the process is poisoned, outside a shield.
            GroupAborted: see :meth:`returning_data`.
        """
        if self.sealed:
            raise StepError(
                f"{what} between the vote of a step and its end",
                hint="an update that is not the only one, or that makes collectives, belongs "
                "in `with step.update('name'): optimizer.step()`, other collectives after the block",
            )
        if self.aside_thread == threading.get_ident():
            return True
        if self.poisoned:
            self.give_up(what)
            return True
        return self.looped

    def give_up(self, what: str) -> None:
        """Return if a poisoned collective may complete on local data. Raises: PeerLost, GroupAborted."""
        if not self.shielded:
            raise PeerLost(
                f"{what}: a peer is lost ({self.reason})",
                hint="see the fault that holdfast names: all ranks recover from it, or start again",
            )
        if getattr(self._local, "strict", 0):
            raise GroupAborted(f"{what}: {self.reason}")

    def returning_data(self, on: bool) -> None:
        """Mark the begin or the end of a call whose result depends on the peers' data; counted per thread.

        In a poisoned process such a call aborts the step.
        """
        self._local.strict = getattr(self._local, "strict", 0) + (1 if on else -1)

    # ------------------------------------------------------------------ works

    def begin(self, what: str) -> bool:
        """Count a collective; return True if it must complete on local data without peers. Raises as :meth:`check`."""
        self.collectives += 1
        if self._on_collective is not None:
            self.note_wait()
            self._waited.begin()
            self._on_collective(self.collectives, what)
        elif self.flight is not None:
            self.flight.counted(self.collectives)
        return False if self.calm else self.check(what)

    def ended(self, count: int, broken: bool = False) -> None:
        """Record in the flight recorder that collective ``count`` has ended."""
        if self.flight is not None:
            self.flight.end(count, broken)

    def track(self, work: Pending) -> None:
        """Remember a collective until it has ended, because its memory must not be reused before."""
        if len(self._pending) >= _PENDING_PRUNE:
            with self._lock:
                self._pending = {k: w for k, w in self._pending.items() if not w.settled()}
        self._pending[id(work)] = work
        if self.poisoned:
            work.release()

    def forget(self, work: Pending) -> None:
        """Forget a collective that has ended."""
        self._pending.pop(id(work), None)
        if not self._pending:
            self._waited.end()

    def quiesce(self) -> bool:
        """Wait until no collective of the poisoned generation can still write into memory of this process.

        Call it after a poison and before buffers are restored. A gloo collective that has not ended after ``QUIESCE_S``
        is in a wait whose sockets are shut down: it ends later with an error and writes nothing. An abort of NCCL may
        take ``ABORTS_S``.

        Returns: False if an NCCL abort did not return: kill and replace this process.
        """
        begun_s = time.monotonic()
        while True:
            with self._lock:
                works = list(self._pending.values())
                inners = self._inners()
            severed = all(i.severed() for i in inners)
            if severed and all(w.settled() for w in works):
                return True
            # Read the clock after the checks: this process may have been stopped in between.
            waited_s = time.monotonic() - begun_s
            if waited_s >= (QUIESCE_S if severed else ABORTS_S):
                return severed
            time.sleep(0.001)

    # ------------------------------------------------------------------ groups

    def add(self, group: Handle) -> None:
        """Register a new group."""
        with self._lock:
            self._groups.append(group)

    def groups(self) -> list[Handle]:
        """Return all registered groups."""
        with self._lock:
            return list(self._groups)

    def drop(self, group: Handle) -> None:
        """Unregister a group that the user destroyed.

        With the default group, the vote group and the shared-memory board are also closed.
        """
        with self._lock:
            if group in self._groups:
                self._groups.remove(group)
            if group.order[0]:
                return
            vote, self._vote = self._vote, None
        if vote is not None:
            vote.close()
        self._leave_board()

    def leave(self) -> None:
        """End the threads of healthy groups before Python ends.

        A thread of gloo drops its collective after the waiter has continued. If it then frees a tensor's Python object
        while the interpreter is ending, the whole process is aborted (signal 6, seen once in some hundred runs). If a
        collective without a waiter is in progress, no thread is ended, because the collective may never end. Threads
        that destroy broken groups are waited for, at most ``BURIALS_S``, because the end of Python would interrupt
        them.
        """
        deadline_s = time.monotonic() + BURIALS_S
        for inner in self._graveyard:
            inner.buried(max(0.0, deadline_s - time.monotonic()))
        with self._lock:
            busy = self.poisoned or not all(work.settled() for work in self._pending.values())
        if not busy:
            for group in reversed(self.groups()):
                group.leave()

    def _inners(self) -> list[Inner]:
        built = [g.inner for g in self._groups]
        return [i for i in (*built, self._vote) if i is not None]

    def _default(self) -> Handle | None:
        return next((g for g in reversed(self._groups) if not g.order[0]), None)

    def bury(self, inner: Inner) -> None:
        """Destroy a broken inner group in the background (invariant 3)."""
        self.sever([inner])
        inner.bury()
        self._graveyard = [each for each in (*self._graveyard, inner) if not each.buried()]

    def stopped(self) -> Callable[[], str]:
        """Return a function that returns an empty text, and the reason once the process is poisoned again."""
        seen = self._poisonings
        return lambda: self._news if self._poisonings != seen else ""

    def reconfigure(self, generation: Generation) -> None:
        """Give every group new connections under ``generation``; clears poison and loopback.

        All ranks of the generation call it. With the current generation, in a process that is not poisoned, it only
        ends loopback.

        Raises: GroupError if the process has no control plane, a group cannot be rebuilt, the generation does not grow,
        or another fault arrives before the end (the process stays poisoned; call it again with the next generation).
        """
        with self._lock:
            groups = sorted(self._groups, key=lambda g: g.order)
            whole = all(g.built_in == self.generation for g in groups)
            if generation == self.generation and not self.poisoned and whole:
                self.looped = False
                self._refresh()
                return
            if generation < self.generation or (generation == self.generation and whole):
                raise GroupError(f"groups of generation {generation} exist already; now {self.generation}")
            seen = self._poisonings
        for group in groups:
            if reason := group.replaceable():
                raise GroupError(f"the process groups cannot be rebuilt in place: {reason}")
        if not self.quiesce():
            raise Unsevered(
                f"an abort of NCCL did not return within {ABORTS_S:g} s", hint="this process must be replaced"
            )
        with self._lock:
            self.generation = generation
            self.epoch += 1
            self._pending.clear()
            vote, self._vote = self._vote, None
        if vote is not None:
            self.bury(vote)
        self._leave_board()
        for group in groups:
            if not group.order[0]:
                group.meet(generation)
            group.rebuild(generation)
        with self._lock:
            if self._poisonings != seen:
                raise GroupError(f"another fault while the groups were rebuilt: {self._news}")
            self.poisoned = False
            self.reason = ""
            self.looped = False
            self._refresh()

    # ------------------------------------------------------------------ vote

    def vote_group(self) -> dist.ProcessGroup:
        """Return the private gloo group over all ranks, which all of them make at first use. Raises: GroupError."""
        with self._lock:
            default = self._default()
            vote = self._vote
        if vote is None:
            if default is None:
                raise GroupError(
                    "no default process group", hint="call torch.distributed.init_process_group first"
                )
            vote = default.build_vote(self.generation)
            with self._lock:
                self._vote = vote
            if self.poisoned:
                vote.sever()
        return vote.group

    def board(self) -> SharedMemoryAllReduce | None:
        """Return the shared-memory all-reduce for votes; None if the job has several nodes or no launcher.

        Raises: StateError.
        """
        with self._lock:
            default = self._default()
            if not self._boarded and default is not None:
                self._board = default.open_board(self.generation)
                self._boarded = True
            return self._board

    def _leave_board(self) -> None:
        with self._lock:
            board, self._board, self._boarded = self._board, None, False
        if board is not None:
            board.close()

    def share(self, source: int, data: bytes) -> bytes:
        """Broadcast a small value from rank ``source`` through shared memory (the *board* of the node).

        Each call must be followed by a vote before the next call.

        Returns: the data of ``source``; the own ``data`` if the communication is broken.

        Raises: as :meth:`check`; InternalError without a board.
        """
        board = self.board()
        if board is None:
            raise InternalError("share() without a board")
        if self.begin("broadcast"):
            return data
        if source == board.rank:
            board.tell(data)
            return data
        epoch = self.epoch
        try:
            return board.hear(source, self._refuse_vote)
        except PeerLost as error:
            self.broke("broadcast", error, epoch)
            self.give_up("broadcast")
            return data

    def reduce_vote(self, vector: list[int]) -> list[int]:
        """Sum ``vector`` (int64) over all ranks, over the board or a private group.

        Returns: the sums; the vector itself if there is one process and no default group.

        Raises: PeerLost if the vote breaks, the process is poisoned, or it is in loopback. If it was poisoned during
        the vote, the outcome is in doubt.
        """
        self._refuse_vote()
        if self._default() is None:
            return list(vector)
        epoch = self.epoch
        if error := next(filter(None, (inner.error() for inner in self._inners())), ""):
            self.broke("NCCL", GroupError(f"an error beside the collectives: {error}"), epoch)
            self._refuse_vote()
        board = self.board()
        try:
            sums = self._sum_by_group(vector) if board is None else board.reduce(vector, self._refuse_vote)
        except (RuntimeError, PeerLost) as error:
            self.broke("vote", error, epoch)
            raise PeerLost(f"the vote broke: {_first_line(error)}") from error
        self._refuse_vote()
        return sums

    def _sum_by_group(self, vector: list[int]) -> list[int]:
        votes = torch.tensor(vector, dtype=torch.int64)
        work = self.vote_group().allreduce([votes], dist.AllreduceOptions())
        while not _ended(work):
            self._refuse_vote()
        return [int(x) for x in votes.tolist()]

    def _refuse_vote(self) -> None:
        if self.poisoned:
            raise PeerLost(f"no vote: {self.reason}")
        if self.looped:
            raise PeerLost("no vote: this process rehearses in loopback")


def _ended(work: dist.Work) -> bool:
    """Wait one slice; return True if the collective ended without error. Raises: the error of the collective."""
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # it ended after the slice, or with an error: this call shows which
    return True


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


_FABRIC = CommState()


def fabric() -> CommState:
    """Return the :class:`CommState` of this process."""
    return _FABRIC
