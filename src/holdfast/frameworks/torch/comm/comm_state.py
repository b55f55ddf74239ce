"""State that all process groups of one process share: poison, shield, seal, loopback, generation.

Theory. A fault is a fact about the whole process: a rank with one broken group would feed garbage through its healthy
ones, so the first error poisons every group. What a poisoned group then does depends on where the caller stands. Inside
a step before its vote (*shield*) every collective completes at once on local data, so that DDP's reducer and FSDP2's
hooks end in order and the vote says no; anywhere else it raises :class:`~holdfast.errors.PeerLost`. In *loopback* there
are no peers yet: collectives complete on own data, for rehearsals.

Invariants:
1. ``poisoned`` is set by the first error, cleared only by :meth:`CommState.reconfigure`, and read lock-free.
2. Two inner groups never share a key space: it is named by the generation, and a generation is built at most once.
3. Nobody waits for the end of an inner group that was poisoned: it is destroyed in a thread of its own, which joins
   gloo's threads, and one of those may sit in a wait that ends much later.
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
"""Longest time between two looks at the poison flag while a collective is under way."""

QUIESCE_S = 0.5
ABORTS_S = 20.0
"""Tens of communicators take seconds to abort."""
REBUILD_TIMEOUT_S = 60.0
BURIALS_S = 1.0
_PENDING_PRUNE = 512


class GroupAborted(Aborted):
    """A call that must return data of a lost peer was made inside a step: the step ends here and is run again."""


class Inner(Protocol):
    """One built group: the C++ process group and the way out of it."""

    @property
    def group(self) -> dist.ProcessGroup: ...

    def unsevered(self) -> Sequence[Abortable]:
        """Backends whose abort may block and has not begun."""

    def sever(self, abort: Abort | None = None) -> None:
        """Make every collective under way end with an error; idempotent, from any thread, returns at once.

        Args:
            abort: aborts what :meth:`unsevered` named, together with other groups.
        """

    def severed(self) -> bool:
        """False while a severing step (an NCCL abort) is still running."""

    def error(self) -> str:
        """An error that the backends have found beside the collectives, or an empty text."""

    def close(self) -> None:
        """Orderly end of a healthy group, complete when the caller lets go of it."""

    def bury(self) -> None:
        """Begin to end a severed group; returns at once."""

    def buried(self, timeout_s: float = 0.0) -> bool:
        """True when that has ended, after at most ``timeout_s``."""


class Handle(Protocol):
    """A process group that user code holds and that survives generations."""

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
        """Replace the inner group by a fresh one of ``generation``. Raises: GroupError; the old one is still there."""

    def become(self, rank: int) -> None:
        """A spare was called as this rank."""

    def replaceable(self) -> str:
        """Empty, or the reason why this group cannot be rebuilt."""

    def build_vote(self, generation: Generation) -> Inner:
        """A private gloo group over the same ranks. Raises: GroupError."""

    def open_board(self, generation: Generation) -> SharedMemoryAllReduce | None:
        """The board of these ranks; None when they are not all on one node. Raises: StateError."""

    def leave(self) -> None:
        """The process ends: no thread of this group may be left that touches Python objects."""


class Pending(Protocol):
    """A collective under way."""

    def settled(self) -> bool:
        """True when it can no longer write into memory of this process."""

    def release(self) -> None:
        """Free whoever waits for the future of this work."""


class CommState:
    """All process groups of this process. Use :func:`fabric`; every method may be called from any thread."""

    def __init__(self) -> None:
        self.poisoned = False
        self.reason = ""
        self.shielded = False
        self.sealed = False
        self.looped = False
        self.calm = True  # none of the above needs attention: the fast path of every collective
        self.collectives = 0
        self.flight: Flight | None = None  # of a process with a status page, from its first group on
        self.generation = NO_GENERATION
        self.start = ""  # of the ranks, where torch's store carries the groups: see rendezvous.agree_on_start
        self._lock = threading.RLock()
        self.epoch = 0  # grows with every reconfigure: a late error of an older epoch is no news
        self._poisonings = 0
        self._news = ""  # reason of the last poisoning
        self._groups: list[Handle] = []
        self._pending: dict[int, Pending] = {}
        self._graveyard: list[Inner] = []
        self._vote: Inner | None = None
        self._board: SharedMemoryAllReduce | None = None
        self._boarded = False  # looked for a board in this generation
        self._on_poison: list[Callable[[str], None]] = []
        self._on_collective: Callable[[int, str], None] | None = None
        self._on_wait: Callable[[int, int], None] | None = None
        self._begun_ns = 0  # when the last collective began
        self._ended_ns = 0  # when the last one that was under way ended
        self._local = threading.local()

    # ------------------------------------------------------------------ modes

    def shield(self, on: bool) -> None:
        """On: inside a step before its vote; broken collectives complete on local data instead of raising."""
        self.shielded = on

    def seal_updates(self, on: bool) -> None:
        """On: between vote and block end; any collective of user code raises :class:`StepError`."""
        with self._lock:
            self.sealed = on
            self._refresh()

    def loopback(self) -> None:
        """From now on collectives complete on own data, until :meth:`reconfigure`."""
        with self._lock:
            self.looped = True
            self._refresh()

    def on_poison(self, callback: Callable[[str], None]) -> None:
        """Call ``callback(reason)`` when a collective of this process breaks first, in the thread that saw it.

        Not called for :meth:`poison`: who calls that knows already.
        """
        self._on_poison.append(callback)

    def on_collective(
        self, callback: Callable[[int, str], None] | None, on_wait: Callable[[int, int], None] | None = None
    ) -> None:
        """Call ``callback(count, what)`` at the start of every collective (for the status page); None removes it.

        ``on_wait(since_ns, until_ns)`` hears later how long the last collectives kept this process from going on.
        """
        self._on_collective, self._on_wait = callback, on_wait

    def note_wait(self) -> None:
        """All collectives have ended: from the begin of the last one to here nothing else was done, as far as known."""
        if self._on_wait is not None and not self._pending and self._ended_ns > self._begun_ns:
            since_ns, self._begun_ns = self._begun_ns, self._ended_ns
            self._on_wait(since_ns, self._ended_ns)

    def _refresh(self) -> None:
        self.calm = not (self.poisoned or self.sealed or self.looped)

    # ------------------------------------------------------------------ poison

    def poison(self, reason: str) -> None:
        """Break every group of this process: waits end, sockets of gloo are shut, NCCL is aborted in the background.

        Idempotent; returns at once.
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
        """Make every collective under way in these groups end; one abort for all backends of NCCL."""
        with self._lock:
            abort = Abort([backend for inner in inners for backend in inner.unsevered()])
            for inner in inners:
                inner.sever(abort)
        abort.start()

    def broke(self, what: str, error: BaseException, epoch: int) -> None:
        """A collective begun in ``epoch`` failed in this process: poison it and tell who asked to know, once."""
        with self._lock:
            if self.poisoned or epoch != self.epoch:
                return
            reason = f"{what}: {_first_line(error)}"
            self.poison(reason)
        for callback in list(self._on_poison):
            callback(reason)

    def check(self, what: str) -> bool:
        """Decide what a collective does when not calm: True = complete on local data.

        Raises: StepError (sealed), PeerLost (poisoned outside a shield), GroupAborted (see :meth:`returning_data`).
        """
        if self.sealed:
            raise StepError(
                f"{what} between the vote of a step and its end",
                hint="an update that is not the only one, or that makes collectives, belongs "
                "in `with step.update('name'): optimizer.step()`, other collectives after the block",
            )
        if self.poisoned:
            self.give_up(what)
            return True
        return self.looped

    def give_up(self, what: str) -> None:
        """Return when a poisoned collective may complete on local data. Raises: PeerLost, GroupAborted."""
        if not self.shielded:
            raise PeerLost(
                f"{what}: a peer is lost ({self.reason})",
                hint="see the fault that holdfast names: all ranks recover from it, or start again",
            )
        if getattr(self._local, "strict", 0):
            raise GroupAborted(f"{what}: {self.reason}")

    def returning_data(self, on: bool) -> None:
        """Mark (counted, per thread) a call whose result depends on the peers' data: poisoned, it aborts the step."""
        self._local.strict = getattr(self._local, "strict", 0) + (1 if on else -1)

    # ------------------------------------------------------------------ works

    def begin(self, what: str) -> bool:
        """Count a collective; True = do not communicate, complete on local data. Raises as :meth:`check`."""
        self.collectives += 1
        if self._on_collective is not None:
            self.note_wait()
            self._begun_ns = time.monotonic_ns()
            self._on_collective(self.collectives, what)
        elif self.flight is not None:
            self.flight.counted(self.collectives)
        return False if self.calm else self.check(what)

    def ended(self, count: int, broken: bool = False) -> None:
        """Collective ``count`` is over; for the flight recorder."""
        if self.flight is not None:
            self.flight.end(count, broken)

    def track(self, work: Pending) -> None:
        """Remember a collective until it has ended: nobody may reuse its memory before."""
        if len(self._pending) >= _PENDING_PRUNE:
            with self._lock:
                self._pending = {k: w for k, w in self._pending.items() if not w.settled()}
        self._pending[id(work)] = work
        if self.poisoned:
            work.release()

    def forget(self, work: Pending) -> None:
        """The collective has ended."""
        self._pending.pop(id(work), None)
        if not self._pending:
            self._ended_ns = time.monotonic_ns()

    def quiesce(self) -> bool:
        """Wait until no collective of the poisoned generation can still write into memory of this process.

        Call it after a poison and before buffers are restored. A gloo collective that has not ended after ``QUIESCE_S``
        sits in a wait whose sockets are shut: it ends later with an error and writes nothing. Aborts of NCCL have
        ``ABORTS_S``.

        Returns: False when an NCCL abort did not return: kill and replace this process.
        """
        begun_s = time.monotonic()
        while True:
            with self._lock:
                works = list(self._pending.values())
                inners = self._inners()
            severed = all(i.severed() for i in inners)
            if severed and all(w.settled() for w in works):
                return True
            waited_s = (
                time.monotonic() - begun_s
            )  # after the look: this process may have been stopped for so long
            if waited_s >= (QUIESCE_S if severed else ABORTS_S):
                return severed
            time.sleep(0.001)

    # ------------------------------------------------------------------ groups

    def add(self, group: Handle) -> None:
        """A group was made."""
        with self._lock:
            self._groups.append(group)

    def groups(self) -> list[Handle]:
        """All that exist."""
        with self._lock:
            return list(self._groups)

    def drop(self, group: Handle) -> None:
        """A group was destroyed by the user."""
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
        """The script has ended: let the threads of healthy groups end before Python does.

        A thread of gloo drops its collective after the waiter has gone on; when it then frees a tensor's Python object
        and the interpreter is already ending, the whole process is aborted (signal 6, seen once in some hundred runs).
        A collective under way that nobody waits for may never end: then everything stays as it is. A thread that is
        ending a broken group would be cut off in the middle.
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
        """End a broken inner group (invariant 3)."""
        self.sever([inner])
        inner.bury()
        self._graveyard = [each for each in (*self._graveyard, inner) if not each.buried()]

    def stopped(self) -> Callable[[], str]:
        """A predicate that becomes non-empty (the reason) when this process is poisoned from now on."""
        seen = self._poisonings
        return lambda: self._news if self._poisonings != seen else ""

    def reconfigure(self, generation: Generation) -> None:
        """Give every group fresh connections under ``generation``; clears poison and loopback.

        All ranks of the generation call it. The same generation again, unpoisoned, only leaves loopback.

        Raises: GroupError when the process has no control plane, a group cannot be rebuilt, the generation does not
            grow, or another fault arrives meanwhile (the process stays poisoned; call it again with the next one).
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
        """Private gloo group over all ranks, made at first use by all of them. Raises: GroupError."""
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
        """Where ranks of one node vote without messages; None when the job has several nodes, or no launcher.

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
        """A small broadcast over the board, followed by a vote: what ``source`` gave; own ``data`` when broken.

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
        """Sum ``vector`` (int64) over all ranks: over the board, or by a private group.

        Returns: the sums; the vector itself when there is one process and no default group.

        Raises: PeerLost when broken, poisoned (before or meanwhile: then the outcome is in doubt) or in loopback.
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
    """Wait one slice. True = ended well; raises what the collective raised."""
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait()  # ended between the slice and now, or with an error of its own: this tells which
    return True


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


_FABRIC = CommState()


def fabric() -> CommState:
    """The one instance of this process."""
    return _FABRIC
