"""A loop that another library drives, simulated: the position of the script at each call of the library."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from holdfast.core.worker.position import ScriptPosition
from holdfast.integrations.session_in_loop import Replay
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch

P = ScriptPosition


def test_a_loop_of_another_library_gives_the_state_of_now_between_its_steps(tmp_path: Path) -> None:
    job = Job()
    batches = list(job.loader)
    replay = Replay(model=job.net, optimizer=job.optimizer, scheduler=job.scheduler, checkpoint=tmp_path)
    session = replay._session
    assert session is not None
    script = session._rank.script
    seen: list[tuple[ScriptPosition, str, bool]] = []

    def note() -> None:
        seen.append((script.position, script.gives(aborted=False), script.awaits(replaces=True)))

    note()
    for number, batch in enumerate(batches[:3]):
        replay.begin()
        note()
        replay.do(partial(job.update, batch))
        replay.commit({"number": number})
        note()
        with replay.section("evaluate"):
            assert script.away
        replay.amend({"number": number, "evaluated": True})
        note()
    replay.close(None)
    note()
    assert {(gives, awaits) for _, gives, awaits in seen} == {("now", False)}
    round_ = [P.IN_BLOCK, P.BEFORE_BLOCK, P.AT_STEP]
    assert [position for position, *_ in seen] == [P.AT_STEP, *round_, *round_, *round_, P.BOUNDARY]
    assert session.step == 3
