"""The watch over one node's notices, which announce the end of the node, such as a preemption.

Theory. A source reports all notices that are valid now. The watch posts only the differences from the previous report:
a new notice, a changed deadline, a withdrawn notice. If a source fails, its notices stay valid. Each reason of a
failure is logged once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from holdfast.core.ids import NodeId
from holdfast.core.protocol.notices import NO_DEADLINE, Notice
from holdfast.errors import ProtocolError
from holdfast.event_log import EventSink
from holdfast.runtime.node.health_checks import BuiltIn, HealthCommand, KernelLog
from holdfast.runtime.node.notice_forms import Foreseen
from holdfast.runtime.node.notice_sources import NoticeSource, read_sources
from holdfast.runtime.node.run_settings import RunSettings


class NoticeWatch:
    """The watch over the notices of one node.

    Args:
        node_id: the watched node, on which this agent runs.
        sources: the sources to ask.
        post: receives each new, changed or withdrawn notice.
        journal: the event log of this node.
    """

    def __init__(
        self,
        node_id: NodeId,
        sources: Sequence[NoticeSource],
        post: Callable[[Notice], None],
        journal: EventSink,
    ) -> None:
        self._node_id = node_id
        self._sources = sources
        self._post = post
        self._journal = journal
        self._standing: dict[
            str, dict[str, tuple[Foreseen, float]]
        ] = {}  # by name of the source: the posted notices that are valid, each with its deadline
        self._failures: dict[str, str] = {}

    @classmethod
    def of(
        cls,
        settings: RunSettings,
        run_dir: Path,
        post: Callable[[Notice], None],
        journal: EventSink,
    ) -> Self:
        """Return the watch with the sources that ``settings`` names.

        Raises:
            UsageError: ``--notices`` names an unknown source, or a source that cannot work here.
        """
        return cls(NodeId(settings.node), sources_of(settings, run_dir, os.environ), post, journal)

    @property
    def leaving(self) -> bool:
        """True while any notice is in force, including a notice about bad health."""
        return any(self._standing.values())

    async def watch(self) -> None:
        """Ask all sources periodically until cancelled."""
        await asyncio.gather(*(self._follow(source) for source in self._sources))

    async def _follow(self, source: NoticeSource) -> None:
        while True:
            await self.look(source)
            await asyncio.sleep(source.period_s)

    async def look(self, source: NoticeSource) -> None:
        """Ask one source once, and post the differences from its previous report."""
        try:
            found = await source.look()
        except (OSError, ProtocolError) as error:
            reason = str(error)[:500]
            if self._failures.get(source.name) != reason:
                self._failures[source.name] = reason
                self._journal.append("notice_source_failed", {"source": source.name, "error": reason})
            return
        self._failures.pop(source.name, None)
        self._tell(source.name, found)

    def _tell(self, name: str, found: Sequence[Foreseen]) -> None:
        now_s = time.monotonic()
        before = self._standing.get(name, {})
        now: dict[str, tuple[Foreseen, float]] = {}
        for notice in found:
            known = before.get(notice.source)
            due_s = notice.left_s if notice.left_s == NO_DEADLINE else now_s + notice.left_s
            if known is not None and (known[1] == due_s or abs(known[1] - due_s) < 1.0):
                now[notice.source] = known
            else:
                now[notice.source] = (notice, due_s)
                self._post(self._notice(notice))
        for source in before.keys() - now.keys():
            self._post(self._notice(before[source][0], withdrawn=True))
        self._standing[name] = now

    def _notice(self, foreseen: Foreseen, *, withdrawn: bool = False) -> Notice:
        return Notice(
            node_id=NodeId("") if foreseen.whole_job else self._node_id,
            source=foreseen.source,
            left_s=foreseen.left_s,
            withdrawn=withdrawn,
        )


def sources_of(settings: RunSettings, run_dir: Path, environment: Mapping[str, str]) -> list[NoticeSource]:
    """Return the sources of notices that the agent of this node asks.

    The built-in health checks are included only in a job of several nodes, because only there can ranks move to another
    node.

    Raises:
        UsageError: ``--notices`` names an unknown source, or a source that cannot work here.
    """
    if settings.library:
        return []
    found = read_sources(settings.notices, environment)
    if settings.health:
        found.append(HealthCommand(settings.health, settings.health_every_s))
    if settings.several:
        found.append(BuiltIn((run_dir,), KernelLog()))
    return found
