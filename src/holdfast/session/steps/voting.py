"""The votes of one rank: each is cast here, counted, and keeps what all ranks know of each other's layouts up to date.

Theory. ``core/worker/layout_agreement.py``: versions of layouts are names of votes, so every vote must be counted, say
its words on the layout, and be answered when it says that somebody moved. One place does that for all of them.

Invariants:
1. All ranks of a generation cast the same votes in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from holdfast.core.ids import NO_VERSION
from holdfast.core.protocol.layout_messages import Layout
from holdfast.core.protocol.messages import Catalogued, LayoutPublished, Receive
from holdfast.core.protocol.status_page import PageFlag
from holdfast.core.worker.layout_agreement import LayoutAgreement, LayoutAnnouncement
from holdfast.core.worker.vote import Ballot, Tally
from holdfast.frameworks.common.adapter import Adapter, Collected
from holdfast.session.steps.participant import StepParticipant

CATALOGUE_TIMEOUT_S = 15.0


class VoteCaster:
    """Of one session.

    Args:
        rank, adapter: of the session.
    """

    def __init__(self, rank: StepParticipant, adapter: Adapter) -> None:
        self._rank = rank
        self._adapter = adapter
        self._told = LayoutAgreement()
        self._size = -1
        self._size_bytes = 0  # of what this rank has told
        self._telling = threading.Lock()  # a survivor tells from the client's task thread what it gives

    def cast(self, ballot: Ballot) -> Tally:
        """Vote with all ranks. What they hold is told before this returns, where the tally asks for it.

        Raises:
            PeerLost: the vote broke.
        """
        rank, adapter = self._rank, self._adapter
        said = self._told.ballot(ballot, rank.machine.generation, rank.catalogue_version)
        tally = Tally.read(self._sums(said), adapter.world_size)
        with self._telling:
            self._send(self._told.read(tally))
        return tally

    def _sums(self, ballot: Ballot) -> list[int]:
        """Of all ranks. Between two steps the page says that this is what is waited for; in a step its phase does."""
        if not ballot.between:
            return self._adapter.vote(ballot.encode())
        self._rank.flag(PageFlag.MEETS, True)
        try:
            return self._adapter.vote(ballot.encode())
        finally:
            self._rank.flag(PageFlag.MEETS, False)

    def tell(self, collected: Collected | None = None) -> None:
        """Tell what this rank holds when that has changed: at once, for a fault that may come before the next vote."""
        if collected is None:
            size = self._adapter.state_size()
            if size == self._size:
                return
            collected, self._size = self._adapter.collect(), size
        else:
            self._size = -1  # that of another moment: looked at again when the next step has ended
        said = collected.layout(self._adapter.rank, self._adapter.world_size)
        self._size_bytes, layout = sum(t.size_bytes for t in said.tensors), said.encode()
        with self._telling:
            self._send(self._told.note(layout, self._rank.machine.generation))

    def inherit(self, order: Receive) -> None:
        """A newcomer takes over what the rank that it replaces has told, and everyone's layouts."""
        if order.version != NO_VERSION:
            catalogued = Catalogued(
                member_id=order.member_id,
                generation=order.generation,
                version=order.version,
                layouts=order.layouts,
            )
            self._rank.on_catalogued(catalogued)
            if self._rank.client is not None:
                # Its agent may be that of a node which held no rank before: it has not heard of any layout.
                self._rank.client.send(catalogued)
        # Said again by the one who lives: agent and controller may both be successors by the next fault.
        self._send(self._told.inherit(order.version, order.layouts.by_rank()[self._adapter.rank]))

    def _send(self, telling: LayoutAnnouncement | None) -> None:
        """Tell the controller what this rank holds."""
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
        """The last vote said that all tell their layouts: wait for them, not for ever."""
        self._rank.await_catalogue(self._told.version, CATALOGUE_TIMEOUT_S)

    def layouts(self) -> Mapping[int, Layout]:
        """Of all ranks, the newest that have come."""
        own, rank = self._told.layout, self._rank
        if rank.client is None and own is not None:
            return {self._adapter.rank: own}
        with rank.changed:
            return rank.layouts
