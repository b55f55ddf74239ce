"""The state that all process groups of one process share: poison, shield, seal, loopback, generation.

Theory. A fault concerns the whole process: a rank with one broken group would send wrong data through its healthy
groups. The first error therefore *poisons* all groups of the process. The effect of a collective then depends on the
time of its call:

- Inside a step, before its vote (*shield*): the collective completes at once on local data. So DDP's reducer and
  FSDP2's hooks end without an error, and the vote rejects the step.
- At any other time: the collective raises :class:`~holdfast.errors.PeerLost`.

Two modes are independent of faults. Between the vote and the end of the block (*seal*), collectives of user code are
refused. In *loopback* there are no peers: collectives complete on local data, for example in a rehearsal.

Invariants:
1. ``poisoned`` is set by the first error, cleared only by :meth:`CommState.reconfigure`, and read lock-free.
2. Two inner groups never share a key space of the store in which they connect. Generation and group name the key space,
   and each rank builds a group at most once in a generation.
3. No caller waits for the end of a poisoned inner group. A separate thread destroys the group, because the destructor
   joins gloo's threads, and one of them may be in a long wait.
4. Before the first group is made, this state has no thread and no socket, so a zygote may fork after ``install()``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist

from holdfast.core.ids import NO_GENERATION, Generation
from holdfast.errors import GroupError, InternalError, PeerLost, StepError
from holdfast.frameworks.common.adapter import Aborted, OnCollective, Unsevered
from holdfast.frameworks.torch.comm.group_numbers import GroupChange, GroupKey, GroupNumbers
from holdfast.frameworks.torch.comm.nccl_abort import Abort, Abortable
from holdfast.frameworks.torch.comm.setup_record import place_in_script_of_call
from holdfast.frameworks.torch.comm.vote_lengths import sum_of_equal_lengths
from holdfast.runtime.node.flight_recorder import Flight
from holdfast.runtime.node.shm_allreduce import SharedMemoryAllReduce

SLICE = timedelta(milliseconds=50)
"""Longest time between two checks of the poison flag while a collective is in progress."""

QUIESCE_S = 0.5
ABORTS_S = 20.0
"""Longest wait for an abort of NCCL, in seconds: to abort tens of communicators takes several seconds."""
REBUILD_TIMEOUT_S = 60.0
BURIALS_S = 1.0
_PENDING_PRUNE = 512


class GroupAborted(Aborted):
    """The exception that ends a call of torch because a peer is lost whose data the call must return.

    A function that sends Python objects then completes on local data.
    """


class Inner(Protocol):
    """An inner group: the C++ process group of one generation, and the means to abort it."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def unsevered(self) -> Sequence[Abortable]:
        """Return the NCCL backends whose abort has not begun; such an abort may block."""

    def sever(self, abort: Abort | None = None) -> None:
        """Make every collective in progress end with an error; idempotent, from any thread, returns at once.

        Args:
            abort: the common abort of the NCCL backends of several groups, this group's included. If None, make an
                abort for this group alone.
        """

    def severed(self) -> bool:
        """Return False while an NCCL abort begun by :meth:`sever` is still running."""

    def error(self) -> str:
        """Return an error that NCCL found outside of the collectives, or an empty text."""

    def close(self) -> None:
        """Shut down a healthy group; gloo's threads end when the caller drops its last reference."""

    def bury(self) -> None:
        """Begin to destroy the group in the background, after :meth:`sever`; returns at once."""

    def buried(self, timeout_s: float = 0.0) -> bool:
        """Return True if the destruction that :meth:`bury` began has ended, after a wait of at most ``timeout_s``."""


class Handle(Protocol):
    """A process group that user code holds. It stays the same object when a new generation replaces its inner group."""

    @property
    def order(self) -> tuple[tuple[int, ...], int]:
        """The sort key by which all ranks rebuild their groups in the same order: (global ranks, ordinal).

        The global ranks are empty for the default group. The ordinal counts the groups of the same ranks.
        """

    @property
    def inner(self) -> Inner | None: ...

    @property
    def key(self) -> GroupKey:
        """The identity of this group in this process."""

    @property
    def built_in(self) -> Generation | None:
        """The generation in which ``inner`` was built; None if there is no inner group."""

    def meet(self, generation: Generation, changes: Sequence[GroupChange]) -> None:
        """Wait until every rank is about to rebuild its groups, and compare ``changes`` with the ranks they concern.

        Raises: GroupsDiffer: a rank holds other groups. GroupError: not every rank came.
        """

    def connect(self) -> None:
        """Connect a group that was made while its process had no peers. Raises: GroupError."""

    def rebuild(self, generation: Generation) -> None:
        """Replace the inner group by a new one of ``generation``.

        Raises:
            GroupError: the new group could not be built; the old one is still in place.
        """

    def become(self, rank: int) -> None:
        """Take over ``rank`` in this process, which was a spare until now."""

    def replaceable(self) -> str:
        """Return the reason why the inner group cannot be replaced; empty if it can."""

    def build_vote(self, generation: Generation) -> Inner:
        """Return a new gloo group over the ranks of this group, used only for votes. Raises: GroupError."""

    def open_board(self, generation: Generation) -> SharedMemoryAllReduce | None:
        """Return the board (shared-memory all-reduce) of this group's ranks; None in a job of several nodes.

        Raises: StateError.
        """

    def leave(self) -> None:
        """End the threads of this group that use Python objects, because the process is about to end."""


class Pending(Protocol):
    """The methods of a collective in progress that :class:`CommState` calls."""

    def settled(self) -> bool:
        """Return True if the collective can no longer write into memory of this process."""

    def release(self) -> None:
        """Complete the future of this collective, so that all code that waits for it continues."""


class CommMoment(NamedTuple):
    """Two counts that identify a moment: reconfigurations of the groups, and begun blocks (repeated runs included)."""

    epoch: int
    block: int


class Poisoning(NamedTuple):
    """A poisoning of this process: its number, and its reason."""

    number: int
    reason: str


class WaitTime:
    """The last span of time in which collectives of this process were in progress.

    The span begins with the newest collective, and ends when no collective is in progress. The process may have done
    other work in this span.
    """

    def __init__(self) -> None:
        self._begun_ns = 0
        self._ended_ns = 0

    def begin(self) -> None:
        """Record that a collective begins now."""
        self._begun_ns = time.monotonic_ns()

    def end(self) -> None:
        """Record that no collective is in progress now."""
        self._ended_ns = time.monotonic_ns()

    def take(self) -> tuple[int, int] | None:
        """Return start and end of the span (monotonic ns), once; None if there is no span since the last call."""
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
        self.aside_thread = 0  # thread whose collectives complete on local data (``set_aside``); 0: none
        self.calm = True  # none of the modes above is on, so collectives take the fast path
        self.collectives = 0
        self.flight: Flight | None = None  # set from the first group on, if the process has a status page
        self.generation = NO_GENERATION
        # Name of this start of the ranks, for groups that torch's store connects (``control_store.agree_on_start``).
        self.start = ""
        self._lock = threading.RLock()
        self.moment = CommMoment(0, 0)
        self._last = Poisoning(0, "")
        self.numbers = GroupNumbers()
        self._groups: list[Handle] = []
        self._pending: dict[int, Pending] = {}
        self._graveyard: list[Inner] = []
        self._vote: Inner | None = None
        self._board: SharedMemoryAllReduce | None = None
        self._boarded = False  # True once ``board`` has looked for a board in this generation
        self._on_poison: list[Callable[[str], None]] = []
        self._on_collective: OnCollective | None = None
        self._on_wait: Callable[[int, int], None] | None = None
        self._waited = WaitTime()
        self._local = threading.local()

    @property
    def epoch(self) -> int:
        """The number of reconfigurations so far. A late error of an older epoch is ignored."""
        return self.moment.epoch

    # ------------------------------------------------------------------ modes

    @property
    def cut_off(self) -> bool:
        """True if a peer is lost and this process is in a block: what it begins now ends without its peers."""
        return self.poisoned and (self.shielded or self.sealed)

    def shield(self, on: bool) -> None:
        """Switch the shield on or off. It is on inside a step before its vote.

        While the shield is on, broken collectives complete on local data instead of raising.
        """
        self.shielded = on
        if on:
            self.moment = self.moment._replace(block=self.moment.block + 1)

    def seal_updates(self, on: bool) -> None:
        """Forbid or allow collectives of user code; they are forbidden between the vote and the end of the block.

        A forbidden collective raises :class:`StepError`.
        """
        with self._lock:
            self.sealed = on
            self._refresh()

    def loopback(self) -> None:
        """Make all collectives complete on local data until :meth:`reconfigure`. Empty the list of :meth:`calls`."""
        self._local.calls = []
        with self._lock:
            self.looped = True
            self._refresh()

    def set_aside(self, on: bool) -> None:
        """Make the collectives of the calling thread complete on local data if ``on``, otherwise communicate again.

        The session calls it before it runs the script's code after a block that has not committed. Each rank runs that
        code a different number of times, so a collective in the code has no peers. Other threads still communicate;
        they may be in the middle of a save.
        """
        with self._lock:
            self.aside_thread = threading.get_ident() if on else 0
            self._refresh()

    def on_poison(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` at the first broken collective of this process, in the thread that found the error.

        :meth:`poison` does not call it, because its caller knows the reason.
        """
        self._on_poison.append(callback)

    def on_collective(
        self, callback: OnCollective | None, on_wait: Callable[[int, int], None] | None = None
    ) -> None:
        """Call ``callback(count, what, joint)`` at the start of every collective; None removes the callback.

        ``count`` is the number of the collective in this process, ``what`` its name; the status page shows both.
        ``joint``: all ranks of the job make the collective.
        ``on_wait(since_ns, until_ns)`` is called after collectives have ended, with the span of :class:`WaitTime`.
        """
        self._on_collective, self._on_wait = callback, on_wait

    def note_wait(self) -> None:
        """Call ``on_wait`` once with the span of the last collectives, unless a collective is in progress."""
        if self._on_wait is not None and not self._pending and (span := self._waited.take()) is not None:
            self._on_wait(*span)

    def _refresh(self) -> None:
        self.calm = not (self.poisoned or self.sealed or self.looped or self.aside_thread)

    # ------------------------------------------------------------------ poison

    def poison(self, reason: str) -> None:
        """Break all process groups of this process.

        Waits end, sockets of gloo are shut down, and NCCL is aborted in the background. Idempotent; returns at once.
        """
        with self._lock:
            self._last = Poisoning(self._last.number + 1, reason)
            if not self.poisoned:
                self.reason = reason
                self.poisoned = True
                self._refresh()
            pending = list(self._pending.values())
        self.sever(self._inners())
        for work in pending:
            work.release()

    def sever(self, inners: Sequence[Inner]) -> None:
        """Make every collective in progress in ``inners`` end, with one common abort for all NCCL backends."""
        with self._lock:
            abort = Abort([backend for inner in inners for backend in inner.unsevered()])
            for inner in inners:
                inner.sever(abort)
        abort.start()

    def broke(self, what: str, error: BaseException, epoch: int) -> None:
        """Poison this process after a failed collective, and call the callbacks of :meth:`on_poison`, once.

        Args:
            what: name of the collective.
            epoch: value of ``self.epoch``, the count of reconfigurations, when the collective began. A fault of a
                collective from before the last reconfiguration is ignored.
        """
        with self._lock:
            if self.poisoned or epoch != self.epoch:
                return
            reason = f"{what}: {_first_line(error)}"
            self.poison(reason)
        for callback in list(self._on_poison):
            callback(reason)

    def check(self, what: str) -> bool:
        """Return True if a collective must complete on local data.

        Call this only while :attr:`calm` is False: the process is poisoned, or :meth:`seal_updates`, :meth:`loopback`
        or :meth:`set_aside` is in effect.

        Args:
            what: the collective, for the error.

        Raises:
            StepError: the step has voted (see :meth:`seal_updates`).
            PeerLost: the process is poisoned, and the shield is off.
            GroupAborted: the process is poisoned, and the call must return data of a peer (:meth:`returning_data`).
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
        """Return if a collective of this poisoned process may complete on local data; otherwise raise an error.

        Raises: PeerLost, GroupAborted.
        """
        if not self.shielded:
            raise PeerLost(
                f"{what}: a peer is lost ({self.reason})",
                hint="see the fault that holdfast names: all ranks recover from it, or start again",
            )
        if getattr(self._local, "strict", 0):
            raise GroupAborted(f"{what}: {self.reason}")

    def returning_data(self, on: bool) -> None:
        """Mark the start (``on``) or the end of a call that must return data of a peer; calls are counted per thread.

        In a poisoned process a collective of such a call raises :class:`GroupAborted`.
        """
        self._local.strict = getattr(self._local, "strict", 0) + (1 if on else -1)

    def refuse_own_data(self, what: str) -> None:
        """Raise GroupAborted in a call that must return data of a peer (:meth:`returning_data`); otherwise return."""
        if getattr(self._local, "strict", 0):
            raise GroupAborted(f"{what}: nothing is kept of what it returned in the lost process")

    def note_call(self, what: str, *, by_function: bool = False) -> None:
        """Record a collective of the script that completes on local data, if this is loopback.

        ``by_function``: a function of ``torch.distributed`` has called this method.
        """
        calls = getattr(self._local, "calls", None)
        if self.looped and calls is not None and (place := place_in_script_of_call(by_function=by_function)):
            calls.append(f"{what} {place}")

    def calls(self) -> Sequence[str]:
        """Return kind and place of the collectives that the script has made on this thread in the newest loopback."""
        return getattr(self._local, "calls", ())

    def begin_alone(self, what: str) -> None:
        """Count a call of a function of ``torch.distributed`` that completes on local data without a collective.

        Never returns in a newcomer that must not make a collective (``on_collective``).
        """
        self.collectives += 1
        if self._on_collective is not None:
            self._on_collective(self.collectives, what, False)
        self.note_call(what, by_function=True)

    # ------------------------------------------------------------------ works

    def begin(self, what: str, *, joint: bool = False) -> bool:
        """Count a collective. Return True if it must complete on local data.

        ``joint``: all ranks of the job make it.

        Raises: StepError, PeerLost or GroupAborted if the collective is not allowed now, see :meth:`check`.
        """
        self.collectives += 1
        if self._on_collective is not None:
            self.note_wait()
            self._waited.begin()
            self._on_collective(self.collectives, what, joint)
        elif self.flight is not None:
            self.flight.counted(self.collectives)
        if self.calm:
            return False
        local = self.check(what)
        if local:
            self.note_call(what)
        return local

    def ended(self, count: int, broken: bool = False) -> None:
        """Record in the flight recorder that the collective with number ``count`` has ended."""
        if self.flight is not None:
            self.flight.end(count, broken)

    def track(self, work: Pending) -> None:
        """Record a collective in progress: the memory of its tensors must not be reused before its end."""
        if len(self._pending) >= _PENDING_PRUNE:
            with self._lock:
                self._pending = {k: w for k, w in self._pending.items() if not w.settled()}
        self._pending[id(work)] = work
        if self.poisoned:
            work.release()

    def forget(self, work: Pending) -> None:
        """Remove a collective that has ended from the collectives in progress."""
        self._pending.pop(id(work), None)
        if not self._pending:
            self._waited.end()

    def quiesce(self) -> bool:
        """Wait until no collective of the poisoned generation can still write into memory of this process.

        Call it after a poison and before buffers are restored. Wait at most ``QUIESCE_S`` (0.5 s) for gloo: a
        collective that has not ended by then waits on sockets that are shut down, so it writes nothing. Wait at most
        ``ABORTS_S`` (20 s) for aborts of NCCL.

        Returns: False if an NCCL abort did not return. This process must then be replaced.
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
        """Register a new group of this process."""
        with self._lock:
            self._groups.append(group)

    def groups(self) -> list[Handle]:
        """Return all registered groups of this process."""
        with self._lock:
            return list(self._groups)

    def session_opens(self) -> None:
        """Record the present groups: a replacement makes them as well (``group_numbers.py``)."""
        self.numbers.session_opens([group.key for group in self.groups()])

    def drop(self, group: Handle) -> None:
        """Unregister a group that the user destroyed.

        For the default group, this also closes the vote group and the board.
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

        A thread of gloo frees its collective after the waiter has continued. If it frees a tensor's Python object while
        the interpreter is ending, the whole process aborts (signal 6, seen once in some hundred runs). If a collective
        without a waiter is in progress, no thread is ended, because the collective may never end.
        Threads that destroy broken groups are waited for first, at most ``BURIALS_S``, because the end of Python would
        interrupt them.
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
        """Destroy a broken inner group in the background, because its destructor may wait for a long time."""
        self.sever([inner])
        inner.bury()
        self._graveyard = [each for each in (*self._graveyard, inner) if not each.buried()]

    def stopped(self) -> Callable[[], str]:
        """Return a function that reports whether this process was poisoned after the call of this method.

        The function returns the reason of the newest poisoning, or an empty text if there was none.
        """
        seen = self._last
        return lambda: self._last.reason if self._last != seen else ""

    def reconfigure(self, generation: Generation) -> None:
        """Give every group new connections under ``generation``, and clear poison and loopback.

        All ranks of the generation call this method. If the groups of this generation exist and the process is not
        poisoned, the method only ends loopback, and connects groups that were made in it.

        Raises: GroupsDiffer if another rank holds other groups. GroupError if the process has no control plane, a group
        cannot be rebuilt, ``generation`` is too old, or another fault arrives before the end (the process stays
        poisoned; call it again with the next generation).
        """
        with self._lock:
            groups = sorted(self._groups, key=lambda g: g.order)
            there = all(g.built_in == self.generation for g in groups if not g.order[0])
            looped = generation == self.generation and not self.poisoned and there
            if not looped and (generation < self.generation or (generation == self.generation and there)):
                raise GroupError(f"groups of generation {generation} exist already; now {self.generation}")
            seen = self._last
        if looped:
            self._end_loopback(groups)
            return
        for group in groups:
            if reason := group.replaceable():
                raise GroupError(f"the process groups cannot be rebuilt in place: {reason}")
        if not self.quiesce():
            raise Unsevered(
                f"an abort of NCCL did not return within {ABORTS_S:g} s", hint="this process must be replaced"
            )
        with self._lock:
            self.generation = generation
            self.moment = self.moment._replace(epoch=self.moment.epoch + 1)
            self._pending.clear()
            vote, self._vote = self._vote, None
        if vote is not None:
            self.bury(vote)
        self._leave_board()
        keys = [group.key for group in groups]
        self.numbers.restart(keys)
        for group in groups:
            if not group.order[0]:
                group.meet(generation, self.numbers.changes(keys))
            group.rebuild(generation)
        with self._lock:
            if self._last != seen:
                raise GroupError(f"another fault while the groups were rebuilt: {self._last.reason}")
            self.poisoned = False
            self.reason = ""
            self.looped = False
            self._refresh()

    def _end_loopback(self, groups: Sequence[Handle]) -> None:
        """Communicate again. All ranks have made the same groups in their check runs, and connect them now."""
        for group in groups:
            if group.built_in != self.generation:
                group.connect()
        with self._lock:
            self.looped = False
            self._refresh()

    # ------------------------------------------------------------------ vote

    def vote_group(self) -> dist.ProcessGroup:
        """Return the gloo group over all ranks that is used only for votes. Raises: GroupError.

        All ranks must call this together when the group does not exist yet.
        """
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
        """Return the board for votes; None if the job has several nodes or no launcher.

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
        """Broadcast a small value from rank ``source`` over the board, the shared memory of the node.

        Each call must be followed by a vote before the next call.

        Returns: the data of ``source``; this rank's ``data`` if the communication is broken.

        Raises: StepError, PeerLost, GroupAborted: the broadcast is not allowed now, see :meth:`check`. InternalError:
        there is no board.
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
        """Sum the vote ``vector`` (int64) over all ranks, over the board or the group of :meth:`vote_group`.

        Returns: the sums; the vector itself if there is one process and no default group.

        Raises: PeerLost if the vote breaks, or the process is poisoned or in loopback. If the process was poisoned
        during the vote, the step is in doubt.
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
            if board is None:
                sums = sum_of_equal_lengths(vector, self._sum_by_group)
            else:
                sums = board.reduce(vector, self._refuse_vote)
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
    """Wait at most 50 ms (``SLICE``) for a collective; return True if it has ended. Raises: the collective's error."""
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # raises if the collective failed; returns if it ended after the slice
    return True


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


_FABRIC = CommState()


def fabric() -> CommState:
    """Return the :class:`CommState` of this process."""
    return _FABRIC
