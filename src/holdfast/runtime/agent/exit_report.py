"""The report of a worker's end, made from the status page that the worker left.

Theory. If the page does not exist, the process never began. A page that exists may be unreadable for a moment,
because of an I/O error or a lack of file descriptors. A decision needs the page as evidence, so an unreadable page is
read again for up to ``READ_WAIT_S`` seconds. If all reads fail, the report says that the page was unreadable, and
gives no step and no phase. The report of a process that never began does not mention an unreadable page.
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
from holdfast.runtime.agent.agent_events import DeathRead
from holdfast.runtime.node.oom_events import OomKills, memory_events
from holdfast.runtime.node.status_page import Page
from holdfast.store.shared_memory.memory_slots import kept_steps
from holdfast.store.shared_memory.update_log import reachable

READ_WAIT_S, READ_AGAIN_S = 5.0, 0.05
"""Seconds for which an unreadable page is read again, and seconds between two reads."""

STATE_OF_PHASE: dict[Phase, RankState] = {
    Phase.STARTING: "starting",
    Phase.READY: "ready",
    Phase.MEET: "compute",
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
    """Return the report of a member's end, made from its status page at ``path``.

    Args:
        logs: the directory that has the worker logs in ``attempt-NNN/`` directories.
        code: the exit code; None if it is not known or a signal ended the process.
        several: True for a job of several nodes. Then the report lists only whole kept states: states in shared
            memory that the script no longer changes.

    Raises:
        OSError: the page exists, but cannot be read now.
        ProtocolError: the file is not a status page of this version.
    """
    generation, step, phase, staged = Generation(0, 0), 0, Phase.STARTING, 0
    kept: tuple[int, ...] = ()
    replays: tuple[int, ...] = ()
    locals_: dict[int, bytes] = {}
    log_size_bytes = 0
    outside = None
    try:
        page = Page.open(path)
    except FileNotFoundError:
        page = None  # the process never began
    if page is not None:
        generation = Generation.unpack(page[Word.GENERATION])
        step, phase = page.state()
        locals_ = page.read_locals()
        staged = page[Word.STAGED]
        outside = page.outside()
        kept = kept_steps(path.parent, page[Word.RANK], whole=several)
        replays = reachable(path.parent, page[Word.RANK], kept)
        log_size_bytes = _log_size_bytes(logs, page[Word.RANK])
        page.close()
    if code is None and killed_by is None and phase is Phase.LEFT:
        code = 0  # its exit status is unknown, but its page says that it ended in order
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
        outside=outside,
    )


def read_in_time(
    read: Callable[[], MemberExited],
    unread: MemberExited,
    post: Callable[[DeathRead], None],
    until_s: float,
) -> None:
    """Post the report of a member's end. Read again if its page is unreadable, without blocking the event loop.

    Args:
        read: a function that calls ``read_death`` for the member.
        unread: the report to post if the page is still unreadable at ``until_s``.
        post: receives the report. If the report is ``unread``, it also receives the reason.
        until_s: time limit, on the clock of the running event loop.
    """
    loop = asyncio.get_running_loop()
    try:
        death = DeathRead(read())
    except (OSError, ProtocolError) as error:
        if loop.time() < until_s:
            loop.call_later(READ_AGAIN_S, read_in_time, read, unread, post, until_s)
            return
        death = DeathRead(unread, str(error))
    post(death)


def without_page(
    member_id: MemberId, node_id: NodeId, code: int | None, killed_by: int | None, died_ns: int
) -> MemberExited:
    """Return the report of a member's end when its page cannot be read. The report gives no step and no phase."""
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
    """Return the size in bytes of a rank's newest log; 0 if it cannot be read.

    It is the log of the dead member, because the member's replacement has not begun to write.
    """
    found = Path(logs).glob(f"attempt-*/rank-{rank:05d}.log")
    newest = max(found, key=lambda path: (len(path.parent.name), path.parent.name), default=None)
    try:
        return newest.stat().st_size if newest is not None else 0
    except OSError:  # the size is only additional information
        return 0
