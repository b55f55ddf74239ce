"""The same run started again: what it saves never falls together with what an earlier start left behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.core.ids import RUN_ID_LENGTH_MAX
from holdfast.runtime.settings import RunSettings, new_launch, without_launch
from holdfast.store.manifest import attempt_key
from holdfast.store.root import Root
from tests.store.test_damage import flip
from tests.store.worlds import save_id

HOLDFAST = str(Path(sys.executable).parent / "holdfast")
SCRIPT = """
import sys, torch, holdfast

torch.manual_seed(0)
net = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
with holdfast.session(model=net, optimizer=optimizer, checkpoint=sys.argv[1], save_every_steps=2, keep=9) as s:
    for step in s.steps([torch.ones(2, 64)], until=4):
        with step as batch:
            net(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.torch
@pytest.mark.processes
def test_a_damaged_save_of_the_same_run_id_is_saved_anew(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    root = tmp_path / "ckpts"

    def run(number: int) -> str:
        done = subprocess.run(
            [HOLDFAST, "run", "--run-id", "same", "--run-dir", f"runs-{number}", "train.py", str(root)],
            cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(1)
    damaged = next(v for v in Root(root).list() if v.step == 4)
    shard = next(Path(damaged.path).glob("shard-*"))
    flip(shard, shard.stat().st_size - 3)
    assert f"rejected checkpoint {shard.parent.name}" in run(2)
    found = [v for v in Root(root).list(deep=True) if v.step == 4]
    assert [v.valid for v in found].count(True) == 1 and len(found) == 2
    settings = [RunSettings.load(tmp_path / f"runs-{n}" / "same") for n in (1, 2)]
    names = {v.path.split(".")[-4] for v in found}
    assert names == {each.saves_as for each in settings}


def test_names_of_saves() -> None:
    launch = new_launch()
    for run_id in ("mine", "m" * RUN_ID_LENGTH_MAX):
        settings = RunSettings(run_id=run_id, launch=launch)
        assert settings.job_id == run_id and settings.saves_as.endswith(launch)
        assert attempt_key(save_id(run=settings.saves_as).directory()) is not None
        assert run_id.startswith(without_launch(settings.saves_as))
    assert RunSettings(run_id="20260101-train").saves_as == "20260101-train"
    shared = RunSettings(run_id="mine-node1", launch=launch, job="mine-node0-s012345")
    assert shared.saves_as == shared.job_id == "mine-node0-s012345"
    assert without_launch(shared.saves_as) == "mine-node0" and without_launch("mine") == "mine"
