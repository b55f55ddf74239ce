"""Lines between agents: nothing that ends the dialling goes unseen."""

from __future__ import annotations

import asyncio
from pathlib import Path

from holdfast.journal import Journal
from holdfast.runtime.peers import Peers
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.settings import RunSettings
from tests.runtime.runs import BOUND_S


def test_a_contact_that_cannot_even_be_looked_up_is_told(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    settings = RunSettings(run_id="t", target="x", nnodes=2, bind="127.0.0.1", contacts=("a..b:0",))

    async def scenario() -> BaseException:
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        log = Journal.open(run.journal, "test")
        peers = Peers(
            run, settings, log,
            on_message=lambda node_id, message: None,
            on_here=lambda node_id: None,
            on_refused=lambda reason: None,
            fail=failed.set_result,
        )  # fmt: skip
        await peers.listen()
        peers.begin()
        try:
            return await asyncio.wait_for(failed, BOUND_S)
        finally:
            await peers.end()
            log.close()
            run.remove_pages()

    assert isinstance(asyncio.run(scenario()), UnicodeError)
