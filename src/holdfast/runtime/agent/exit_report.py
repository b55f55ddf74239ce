"""What a dead worker left on its status page, as the event that reports its end.

Theory. A page that does not exist is that of a process that never began. One that exists and cannot be read now (no
descriptor is left, an error of I/O) is evidence that a decision needs: it is read again. After a bound the event says
that nothing is known, which is not the same as that nothing was begun.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import MemberExited, RankState
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.errors import ProtocolError
from holdfast.runtime.node.oom_events import OomKills, memory_events
from holdfast.runtime.node.status_page import Page
from holdfast.store.shared_memory.memory_slots import kept_steps
from holdfast.store.shared_memory.update_log import reachable

READ_WAIT_S, READ_AGAIN_S = 5.0, 0.05
"""How long a page that exists is tried, and how often."""

STATE_OF_PHASE: dict[Phase, RankState] = {
    Phase.STARTING: "starting",
    Phase.READY: "ready",
    Phase.FORWARD: "compute",
    Phase.BACKWARD: "compute",
    Phase.VOTE: "voting",
    Phase.UPDATE: "updating",
    Phase.COMMIT: "updating",
    Phase.SAVE: "ready",
    Phase.ABORTED: "aborted",
    Phase.IN_DOUBT: "in_doubt",
    Phase.TORN: "torn",
    Phase.FINISHED: "finished",
    Phase.LEFT: "finished",
    Phase.LOADING: "ready",
    Phase.SECTION: "ready",
    Phase.SPARE: "starting",
    Phase.AFTER: "finished",
}


_oom_kills = OomKills(memory_events())


def read_death(
    path: Path,
    logs: Path | str,
    member_id: MemberId,
    node_id: NodeId,
    code: int | None,
    killed_by: int | None,
    died_ns: int,
    *,
    several: bool = False,
) -> MemberExited:
    """What a dead member left on its status page, as the event that reports its end.

    Args:
        logs: where the ``attempt-NNN/`` directories are.
        several: nodes; then only whole states in memory count.

    Raises:
        OSError: the page exists, and cannot be read now.
        ProtocolError: the file is no page of this version.
    """
    generation, step, phase, staged = Generation(0, 0), 0, Phase.STARTING, 0
    kept: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()
    locals_: dict[int, bytes] = {}
    log_size_bytes = 0
    try:
        page = Page.open(path)
    except FileNotFoundError:
        page = None  # it never began
    if page is not None:
        generation = Generation.unpack(page[Word.GENERATION])
        step, phase = page.state()
        locals_ = page.read_locals()
        staged = page[Word.STAGED]
        kept = kept_steps(path.parent, page[Word.RANK], whole=several)
        replays = reachable(path.parent, page[Word.RANK], kept)
        log_size_bytes = _log_size_bytes(logs, page[Word.RANK])
        page.close()
    if code is None and killed_by is None and phase is Phase.LEFT:
        code = 0  # nobody could wait for it, but it said that it ended in order
    return MemberExited(
        member_id=member_id,
        node_id=node_id,
        generation=generation,
        code=code,
        signal=killed_by,
        state=STATE_OF_PHASE[phase],
        step=step,
        detail=phase.name.lower(),
        locals=locals_,
        died_ns=died_ns,
        staged_step=staged,
        kept=kept,
        replays=replays,
        log_size_bytes=log_size_bytes,
        oom_kills=_oom_kills.rose_by() if killed_by == signal.SIGKILL else 0,
    )


def read_in_time(
    read: Callable[[], MemberExited],
    unread: MemberExited,
    then: Callable[[MemberExited], None],
    tell: Callable[[str], None],
    until_s: float,
) -> None:
    """Read a death, again and again while its page cannot be read. The event loop is not blocked.

    Args:
        read: see ``read_death``.
        unread: the event, where the page cannot be read until ``until_s``.
        then: gets the event.
        tell: gets the reason for ``unread``.
        until_s: in the time of the running loop.
    """
    loop = asyncio.get_running_loop()
    try:
        event = read()
    except (OSError, ProtocolError) as error:
        if loop.time() < until_s:
            loop.call_later(READ_AGAIN_S, read_in_time, read, unread, then, tell, until_s)
            return
        tell(str(error))
        event = unread
    then(event)


def without_page(
    member_id: MemberId, node_id: NodeId, code: int | None, killed_by: int | None, died_ns: int
) -> MemberExited:
    """The end of a member whose page cannot be read: nothing is known about where it was."""
    return MemberExited(
        member_id=member_id,
        node_id=node_id,
        generation=Generation(0, 0),
        code=code,
        signal=killed_by,
        state="starting",
        step=0,
        detail=NO_PAGE,
        died_ns=died_ns,
    )


def _log_size_bytes(logs: Path | str, rank: int) -> int:
    """Of the newest log of a rank: a successor has not begun to write."""
    found = Path(logs).glob(f"attempt-*/rank-{rank:05d}.log")
    newest = max(found, key=lambda path: (len(path.parent.name), path.parent.name), default=None)
    try:
        return newest.stat().st_size if newest is not None else 0
    except OSError:  # it tells something about the end, it is not part of it
        return 0
