"""The status page of a dead rank is evidence: it is read, even if the first attempt fails."""

from __future__ import annotations

import asyncio
import errno
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.agent.agent_events import DeathRead
from holdfast.runtime.agent.exit_report import read_death, read_in_time, without_page
from holdfast.runtime.node.status_page import Page

END = (MemberId(3), NodeId("node0"), None, 9, 1)


def read(path: Path, wait_s: float) -> DeathRead:
    """Return the event, with the error of a page that stays unreadable."""

    async def wait() -> DeathRead:
        loop = asyncio.get_running_loop()
        event: asyncio.Future[DeathRead] = loop.create_future()
        death = partial(read_death, path, path.parent, *END)
        read_in_time(death, without_page(*END), event.set_result, loop.time() + wait_s)
        return await event

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
    death = read(path, 60)
    event = death.exited
    assert (event.state, event.step, event.locals) == ("updating", 41, {41: b"position"}) and not death.error


def test_a_page_that_stays_unreadable_is_no_page_of_a_rank_that_never_began(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"of another version")
    death = read(path, 0)
    assert (death.exited.detail, death.exited.signal) == (NO_PAGE, 9) and death.error


def test_a_rank_without_a_page_never_began(tmp_path: Path) -> None:
    death = read(tmp_path / "page", 60)
    assert (death.exited.state, death.exited.detail, death.error) == ("starting", "starting", "")
