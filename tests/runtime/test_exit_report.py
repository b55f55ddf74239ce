"""The status page of a dead rank is evidence: it is read, even if the first attempt fails."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import MemberExited
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.agent.exit_report import read_death, read_in_time, without_page
from holdfast.runtime.node.status_page import Page

END = (MemberId(3), NodeId("node0"), None, 9, 1)


def read(path: Path, wait_s: float) -> tuple[MemberExited, list[str]]:
    """Return the event, and the reported lines."""

    async def wait() -> tuple[MemberExited, list[str]]:
        loop, told = asyncio.get_running_loop(), list[str]()
        event: asyncio.Future[MemberExited] = loop.create_future()
        death = partial(read_death, path, path.parent, *END)
        read_in_time(death, without_page(*END), event.set_result, told.append, loop.time() + wait_s)
        return await event, told

    return asyncio.run(wait())


def died_in_its_update(path: Path) -> None:
    page = Page.create(path, member=3, rank=2)
    page.enter(Phase.UPDATE, 41)
    page.write_local(41, b"position")
    page.close()


def test_a_page_that_cannot_be_opened_for_a_moment_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: without a free descriptor, the page counted as that of a rank that never began."""
    path, opened = tmp_path / "page", Page.open
    died_in_its_update(path)
    failures = iter([errno.EMFILE, errno.ENFILE, errno.EIO])

    def fails(at: Path | str) -> Page:
        if (number := next(failures, None)) is not None:
            raise OSError(number, "not now")
        return opened(at)

    monkeypatch.setattr(Page, "open", staticmethod(fails))
    event, told = read(path, 60)
    assert (event.state, event.step, event.locals, told) == ("updating", 41, {41: b"position"}, [])


def test_a_page_that_stays_unreadable_is_no_page_of_a_rank_that_never_began(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"of another version")
    event, told = read(path, 0)
    assert (event.detail, event.signal, len(told)) == (NO_PAGE, 9, 1)


def test_a_rank_without_a_page_never_began(tmp_path: Path) -> None:
    event, told = read(tmp_path / "page", 60)
    assert (event.state, event.detail, told) == ("starting", "starting", [])
