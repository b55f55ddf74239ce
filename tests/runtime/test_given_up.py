"""A worker that was killed and does not end: its agent reports the contents of its status page."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.protocol.messages import KillMember, MemberExited
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.agent.agentd import AgentDaemon
from holdfast.runtime.node.status_page import Page
from tests.runtime.runs import Run

MEMBER = MemberId(3)


@pytest.mark.processes
def test_what_the_page_says_is_told_while_the_process_is_still_there(tmp_path: Path) -> None:
    run = Run(tmp_path).dir
    heard: list[MemberExited] = []

    async def give_up() -> None:
        daemon = AgentDaemon.open(run)
        daemon._driver.post = lambda event: heard.extend([event] if isinstance(event, MemberExited) else [])  # type: ignore[method-assign]
        page = Page.create(run.page_path(MEMBER), member=MEMBER, generation=Generation(1, 2).pack(), rank=1)
        page.place(7, Phase.UPDATE)
        page.write_local(7, b'{"at": 7}')
        page.close()
        daemon._procs.adopt(MEMBER, process.pid)
        order = KillMember(member_id=MEMBER, node_id=NodeId("node0"), reason="a test", given_up=True)
        daemon._act(order)
        daemon._journal.close()
        daemon._council._mirror.close()

    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        asyncio.run(give_up())
        assert process.poll() is None
    finally:
        process.kill()
        process.communicate()
    (event,) = heard
    assert (event.state, event.step, event.detail, event.locals) == (
        "updating",
        7,
        "update",
        {7: b'{"at": 7}'},
    )
    assert event.signal == 9 and os.path.exists(run.page_path(MEMBER))
