"""A disk under the run directory that stays full: reserved room holds the decisions and the end of the run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.runtime.runs import Run, until

pytestmark = pytest.mark.processes

FILLS = """
import os, sys, time
from pathlib import Path
if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    for n in range(4000):
        print("x" * 500)
    Path(sys.argv[0]).with_name("full").mkdir()
"""
STAYS = FILLS + "time.sleep(3600)\n"
DIES = FILLS + "    os.kill(os.getpid(), 9)\n"


@pytest.mark.parametrize(("script", "faults"), [(FILLS, 0), (DIES, 1)], ids=["ends", "dies"])
def test_a_run_on_a_full_disk_ends_with_its_code(tiny_disk: Path, script: str, faults: int) -> None:
    """Regression: the run waited two minutes for each line of its log, then ended as an error."""
    with Run(tiny_disk, script, nproc=2) as run:
        run.start()
        assert run.wait() == Exit.OK
        assert len(run.events("detected")) == faults and run.events("run_ended")


def test_a_request_to_leave_is_answered_on_a_full_disk(tiny_disk: Path) -> None:
    with Run(tiny_disk, STAYS, nproc=2) as run:
        agent = run.start()
        until("the disk is full", (tiny_disk / "full").exists)
        agent.send_signal(signal.SIGTERM)
        assert run.wait() == Exit.UNSAVED
        assert run.events("exit_requested") and run.events("agent_ended")
