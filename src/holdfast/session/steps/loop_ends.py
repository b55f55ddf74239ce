"""The ends of loops over steps: no rank leaves its loop while another rank has a further batch.

Theory. A loop ends on a rank when its loader has no more batch. If another rank has a batch, that rank begins a block,
and its gradients would meet the collectives that the script makes after the loop. So each rank counts itself, in the
key-value store of the job, at the end of its loop, and a rank without a batch waits for all others. A rank that waits
long reports its place to the controller, which passes the report to all ranks. A rank that has begun the block of that
step in that loop then reports a fault. All ranks answer the fence with their places, and the difference ends the run
(``core/decide/unequal_batches.py``).

A rank that has left its loop by ``break`` also waits, and one whose loop has reached its step ``until`` only counts
itself: the ranks have compared that step (``session/loops/loop_bounds.py``). If an exception may have ended the loop,
the rank does not wait either.

A replacement runs the code after the loop alone, before it joins. So the ranks meet only in a generation in which all
of them have started together or have committed a step.

Invariants:
1. Either all ranks of a generation meet at the end of a loop, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from holdfast.core.ids import NO_GENERATION
from holdfast.core.protocol.messages import LoopEnded, LoopEndSeen, LoopPlace
from holdfast.core.protocol.status_page import PageFlag
from holdfast.core.worker.position import BESIDE_BLOCK
from holdfast.session.steps.participant import StepParticipant

REPORT_S = 1.0  # a rank reports its place after this time; the time is doubled after each report
WAIT_S = 300.0  # a wait that has lasted this long begins again


class LoopEnds:
    """The place of one rank in its loop over steps, and its meeting with the other ranks at the end of the loop.

    Args:
        rank: protocol state of this rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: StepParticipant, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._place: LoopPlace | None = None
        self._peer: LoopEndSeen | None = None  # the newest report of a rank at the end of its loop
        starts = rank.client is not None and not rank.joining
        # The generation in which all ranks have started together, or have committed a step.
        self._common = rank.machine.generation if starts else NO_GENERATION
        self._keys: tuple[str, str] | None = None  # of the last meeting
        self._thread = threading.get_ident()
        if rank.client is not None:
            rank.client.on(LoopEndSeen, self.peer_ended)

    def place(self) -> LoopPlace | None:
        """Return the place of this rank in its newest loop; None if it has begun no loop. Called with the lock held."""
        return self._place

    def opened(self, loop: int) -> None:
        """Record that the script has begun the loop number ``loop``."""
        with self._rank.changed:
            self._place = LoopPlace(loop)

    def committed(self) -> None:
        """Record that all ranks have committed a step in the present generation."""
        self._common = self._rank.machine.generation

    # ------------------------------------------------------------------ the end of a loop

    def exhausted(self, steps: int) -> bool:
        """Wait until all ranks are at the end of the open loop, which has no more batch on this rank.

        Args:
            steps: number of steps that the loop has had.

        Returns:
            False if the job has gone back to an earlier step of the loop.
        """
        rank, step, place = self._rank, self._rank.step, self._place
        if place is None:
            return True
        with rank.changed:
            self._place = LoopPlace(place.loop, step, steps)
        if self._arrive(place.loop):
            with self._reported(place.loop, step):
                fenced = self._wait()
            if fenced:
                rank.await_fence()
                rank.await_resume()
        if rank.step == step:
            return True
        self.opened(place.loop)
        return False

    def left(self, *, waits: bool) -> None:
        """Count this rank at the end of the open loop, which it leaves with batches left.

        Args:
            waits: also wait for the other ranks. A fence ends this wait.
        """
        place = self._place
        if place is not None and threading.get_ident() == self._thread and self._arrive(place.loop) and waits:
            self._wait()

    def _arrive(self, loop: int) -> bool:
        """Count this rank at the end of ``loop``. Return whether the ranks meet there."""
        rank, client, generation = self._rank, self._rank.client, self._rank.machine.generation
        if client is None or self._world_size == 1 or rank.fenced or rank.state != "ready":
            return False
        if self._common != generation:
            return False
        before, arrived = self._keys, f"holdfast/loop-end/{generation.pack()}/{loop}/{rank.step}"
        if before is not None and before[0] == arrived:
            return True
        self._keys = arrived, f"{arrived}/all"
        if client.kv("add", (arrived,), amount=1).number == self._world_size:
            client.kv("set", self._keys[1:])
            if before is not None:
                client.kv("delete", before)
        return True

    def _wait(self) -> bool:
        """Wait until all ranks have counted themselves. Return True if a fence has ended the wait."""
        rank, keys, error = self._rank, self._keys, "timeout"
        assert keys is not None and rank.client is not None
        rank.flag(PageFlag.MEETS, True)
        try:
            while error == "timeout":
                error = rank.client.kv("wait", keys[1:], timeout_s=WAIT_S).error
        finally:
            rank.flag(PageFlag.MEETS, False)
        return error == "fenced"

    @contextmanager
    def _reported(self, loop: int, step: int) -> Iterator[None]:
        """Report the place of this rank to the controller again and again while the ``with`` body lasts long."""
        rank, over = self._rank, threading.Event()
        report = LoopEnded(member_id=rank.member_id, generation=rank.machine.generation, loop=loop, step=step)

        def repeat() -> None:
            pause_s = REPORT_S
            while not over.wait(pause_s) and rank.client is not None:
                rank.client.send(report)
                pause_s *= 2

        reporter = threading.Thread(target=repeat, name="holdfast-loop-end", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            over.set()
            reporter.join()

    # ------------------------------------------------------------------ the other ranks

    def peer_ended(self, peer: LoopEndSeen) -> None:
        """Record that another rank is at the end of its loop. Called in the client thread."""
        with self._rank.changed:
            self._peer = peer
        self.compare()

    def compare(self) -> None:
        """Report a fault if another rank has ended the loop and step whose block this rank has begun.

        If the script of this rank waits in a collective outside of the block, it may have left the loop by ``break``
        while a variable (a progress bar) still holds the loop. Then count this rank at the end of the loop.
        """
        rank = self._rank
        with rank.changed:
            peer, place = self._peer, self._place
            if peer is None or place is None or rank.client is None or rank.fenced or rank.joining:
                return
            ended = (peer.generation, peer.loop, peer.step)
            if ended != (rank.machine.generation, place.loop, rank.step):
                return
            if rank.state == "ready":
                if rank.script.position in BESIDE_BLOCK and rank.client.page.flight.waits():
                    rank.client.run_task(partial(self._arrive, place.loop))
                return
            self._peer = None
        rank.fault_seen(f"rank {peer.rank} has no batch for step {peer.step}, and this rank has one")
