"""The MindSpore examples run as their first lines say."""

from __future__ import annotations

import re
from pathlib import Path

from tests.frameworks.launched import Launched

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
RUN = ("--framework", "mindspore", "--nproc-per-node", "4")


def test_a_lost_worker_costs_no_step(tmp_path: Path) -> None:
    with Launched(tmp_path, *RUN, str(EXAMPLES / "mindspore_last_gasp.py"), "--lose", "2@20") as run:
        assert run.wait() == 0, run.output
        assert "1 fault, 0 steps lost" in run.output
        assert run.events("planned")[-1].data["step"] == 19
        losses = [float(found) for found in re.findall(r"loss is ([\d.]+)", run.log(0) + run.log(0, 1))]
        assert losses[-1] < losses[0] / 2


def test_graceful_exit_is_asked_by_one_and_gone_on_from(tmp_path: Path) -> None:
    example = str(EXAMPLES / "mindspore_graceful_exit.py")
    with Launched(tmp_path, *RUN, example, "--ask", "1@6") as run:
        assert run.wait() == 75, run.output
        left_at = run.events("run_ended")[-1].data["step"]
    assert sorted(path.name for path in tmp_path.glob("rank_*")) == [f"rank_{rank}" for rank in range(4)]
    for kind in ("ckpt", "mindir"):
        assert len(list(tmp_path.glob(f"rank_*/LeNet_train.{kind}"))) == 4
    with Launched(tmp_path, *RUN, example, name="u") as run:
        assert run.wait() == 0, run.output
        assert f"resumed at step {left_at} " in run.logs()
