"""The votes of one rank, and the publication of its layout that a vote may require.

Theory. A vote is named by its generation and its number in that generation. This name serves as the version of a layout
(``core/worker/layout_agreement.py``). Therefore every vote of a rank goes through this module, which counts it and adds
whether the layout of this rank has changed (``moved``). After a vote in which any rank set ``moved``, every rank
publishes its layout again.

Invariants:
1. All ranks of a generation cast the same votes in the same order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from holdfast.core.ids import NO_VERSION
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import Catalogued, LayoutPublished, Receive
from holdfast.core.protocol.status_page import PageFlag
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.frameworks.common.adapter import Adapter, Collected
from holdfast.session.steps.order_tasks import POLL_S
from holdfast.session.steps.participant import StepParticipant

CATALOGUE_TIMEOUT_S = 15.0


class VoteCaster:
    """The caster of one rank's votes, which also publishes the layout of the rank.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
    """

    def __init__(self, rank: StepParticipant, adapter: Adapter) -> None:
        self._rank = rank
        self._adapter = adapter
        self._agreement = LayoutAgreement()
        self._size = -1
        self._size_bytes = 0  # of this rank's state in its published layout
        self._telling = threading.Lock()  # a survivor publishes from the task thread as well

    def cast(self, ballot: Ballot) -> Tally:
        """Vote with all ranks, publish this rank's layout if the tally requires that, and return the tally.

        Raises:
            PeerLost: the vote broke.
        """
        rank, adapter = self._rank, self._adapter
        said = self._agreement.ballot(ballot, rank.machine.generation, rank.catalogue_version)
        tally = Tally.read(self._sums(said), adapter.world_size)
        with self._telling:
            self._send(self._agreement.read(tally))
        return tally

    def _sums(self, ballot: Ballot) -> list[int]:
        """Return the sum of all ranks' ballots.

        For a vote between two steps, set a flag on the status page while this rank waits. For the vote of a step, the
        phase on the page shows the wait.
        """
        if not ballot.between:
            return self._adapter.vote(ballot.encode())
        self._rank.flag(PageFlag.MEETS, True)
        try:
            return self._adapter.vote(ballot.encode())
        finally:
            self._rank.flag(PageFlag.MEETS, False)

    def tell(self, collected: Collected | None = None) -> None:
        """Publish the layout of this rank if it has changed.

        The next vote would be too late, because a fault may come first.

        Args:
            collected: the state whose layout is published; None means the present state.
        """
        if collected is None:
            size = self._adapter.state_size()
            if size == self._size:
                return
            collected, self._size = self._adapter.collect(), size
        else:
            self._size = -1  # ``collected`` may be of another moment: check again after the next step
        said = collected.layout(self._adapter.rank, self._adapter.world_size)
        self._size_bytes, layout = sum(t.size_bytes for t in said.tensors), said.encode()
        with self._telling:
            self._send(self._agreement.note(layout, self._rank.machine.generation))

    def inherit(self, order: Receive) -> None:
        """Take over the layouts of all ranks from ``order``. The lost rank's layout becomes that of this newcomer."""
        if order.version != NO_VERSION:
            catalogued = Catalogued(
                member_id=order.member_id,
                generation=order.generation,
                version=order.version,
                layouts=order.layouts,
            )
            self._rank.on_catalogued(catalogued)
            if self._rank.client is not None:
                # This newcomer's agent may run on a node that had no rank before, so the agent knows no layout.
                self._rank.client.send(catalogued)
        # Publish the layout again: agent and controller may both be replaced before the next fault.
        self._send(self._agreement.inherit(order.version, order.layouts.by_rank()[self._adapter.rank]))

    def _send(self, telling: LayoutAnnouncement | None) -> None:
        """Send a layout of this rank to the controller. If ``telling`` is None, send nothing."""
        rank = self._rank
        if telling is not None and rank.client is not None:
            rank.client.send(
                LayoutPublished(
                    member_id=rank.member_id,
                    generation=rank.machine.generation,
                    rank=self._adapter.rank,
                    version=telling.version,
                    layout=telling.layout,
                    size_bytes=self._size_bytes,
                )
            )

    def await_catalogue(self) -> None:
        """Wait for the layouts that all ranks publish after the last vote. A time limit or a fence ends the wait."""
        rank, deadline_s = self._rank, time.monotonic() + CATALOGUE_TIMEOUT_S
        with rank.changed:
            while rank.catalogue_version < self._agreement.version:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or rank.fenced or rank.orphaned:
                    return
                rank.changed.wait(min(left_s, POLL_S))

    def layouts(self) -> Mapping[int, Layout]:
        """Return the newest known layouts of all ranks, by rank."""
        own, rank = self._agreement.layout, self._rank
        if rank.client is None and own is not None:
            return {self._adapter.rank: own}
        with rank.changed:
            return rank.layouts
