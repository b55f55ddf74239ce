"""The ends of loops over steps: no rank leaves its loop while another rank has a further batch.

Theory. A loop ends on a rank when its loader has no more batch. If another rank has a batch, that rank begins a block,
and its gradients would meet the collectives that the script makes after the loop. So the ranks meet at the end of each
loop by one vote. A rank that waits long in this vote reports its place to the controller, which passes the report to
all ranks. A rank that has begun the block of that step in that loop then reports a fault. All ranks answer the fence
with their places, and the difference ends the run (``core/decide/unequal_batches.py``).

A rank may leave its loop by ``break``. Its next vote between two steps is then the one at the end of an epoch or of the
session. That vote completes the vote of the ranks at the ends of their loops, and is cast again
(``VoteCaster.cast``).

A replacement runs the code after the loop alone, before it joins. So the ranks meet only in a generation in which all
of them have started together or have committed a step. A loop that reaches its step ``until`` needs no meeting: the
ranks have compared that step (``session/loops/loop_bounds.py``).

Invariants:
1. Either all ranks of a generation meet at the end of a loop, or none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.core.ids import NO_GENERATION
from holdfast.core.protocol.messages import LoopEnded, LoopEndSeen, LoopPlace
from holdfast.core.worker.vote import Ballot
from holdfast.errors import PeerLost
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.voting import VoteCaster

REPORT_S = 1.0  # a rank reports its place after this time; the time is doubled after each report
NOT_ENDED = -1


class LoopEnds:
    """The place of one rank in its loop over steps, and its meeting with the other ranks at the end of the loop.

    Args:
        rank: protocol state of this rank.
        votes: casts the votes of this rank.
        world_size: number of ranks.
    """

    def __init__(self, rank: StepParticipant, votes: VoteCaster, world_size: int) -> None:
        self._rank = rank
        self.votes = votes
        self._alone = world_size == 1 or rank.client is None
        self._place: LoopPlace | None = None
        self._peer: LoopEndSeen | None = None  # the newest report of a rank at the end of its loop
        starts = rank.client is not None and not rank.joining
        # The generation in which all ranks have started together, or have committed a step.
        self._common = rank.machine.generation if starts else NO_GENERATION
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

    def meet(self, steps: int) -> bool:
        """Wait until all ranks are at the end of the open loop, which has no more batch on this rank.

        Args:
            steps: number of steps that the loop has had.

        Returns:
            False if the job has gone back to an earlier step of the loop.
        """
        rank, step, place = self._rank, self._rank.step, self._place
        if self._alone or place is None:
            return True
        with rank.changed:
            self._place = LoopPlace(place.loop, step, steps)
        if self._common != rank.machine.generation:
            return True
        try:
            with self._reported(place.loop, step):
                tally = self.votes.cast(Ballot(step=step, between=True, ended=True))
            if tally.passed:
                return True
            rank.fault_seen(f"at the end of a loop, before step {step}: {tally.reason}")
        except PeerLost as error:
            rank.fault_seen(f"at the end of a loop, before step {step}: {error.message}")
        rank.await_fence()
        rank.await_resume()
        if rank.step == step:
            return True
        self.opened(place.loop)
        return False

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
        """Report a fault if another rank has ended the loop and step whose block this rank has begun."""
        rank = self._rank
        with rank.changed:
            peer, place = self._peer, self._place
            if peer is None or place is None or rank.fenced or rank.joining or rank.state == "ready":
                return
            ended = (peer.generation, peer.loop, peer.step)
            if ended != (rank.machine.generation, place.loop, rank.step):
                return
            self._peer = None
        rank.fault_seen(f"rank {peer.rank} has no batch for step {peer.step}, and this rank has one")
