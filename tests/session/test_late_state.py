"""Tensors that appear in the user's state while the job trains."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

SCRIPT = """\
import os, pathlib, signal, sys
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

class Stopper:
    best = None

    def state_dict(self):
        return {"best": self.best}

    def load_state_dict(self, state):
        self.best = state["best"]

stopper, seen = Stopper(), {"losses": []}
with holdfast.session(model=model, optimizer=optimizer, state={"stopper": stopper, "seen": seen}) as s:
    for step in s.steps(until=12):
        with step:
            if str(step.number) in sys.argv[1:] and dist.get_rank() == 1 and not os.path.exists("struck"):
                pathlib.Path("struck").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(torch.full((4, 2), 1.0 + step.number)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if step.committed and step.number in (4, 5):
            stopper.best = loss.detach().clone()
            seen["losses"].append(loss.detach().clone())
values = [*model.parameters(), stopper.best, *seen["losses"]]
end = torch.cat([value.detach().reshape(-1) for value in values]).tolist()
pathlib.Path(f"end-{dist.get_rank()}").write_text(str(end))
"""


def ends(where: Path, *arguments: str, ranks: int = 2, flags: tuple[str, ...] = ()) -> list[str]:
    """Run the job. Return what each rank holds at the end."""
    where.mkdir()
    (where / "train.py").write_text(SCRIPT)
    done = run_job(where, ranks, *flags, "train.py", *arguments)
    assert done.returncode == 0, done.stdout
    return [path.read_text() for path in sorted(where.glob("end-*"))]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[str]]:
    """Return the ends of an undisturbed run of that many ranks."""

    @functools.cache
    def told(ranks: int) -> list[str]:
        found = ends(tmp_path_factory.mktemp("calm") / "job", ranks=ranks)
        assert len(found) == ranks
        return found

    return told


@pytest.mark.more
def test_a_newcomer_gets_what_has_come_since_the_start(
    tmp_path: Path, calm: Callable[[int], list[str]]
) -> None:
    for step in ("5", "7"):  # in the next step, and later
        assert ends(tmp_path / step, step) == calm(2)
        assert (tmp_path / step / "struck").exists()


@pytest.mark.parametrize("verify", [pytest.param("50", marks=pytest.mark.more), "0"])
def test_a_last_gasp_has_what_has_come_since_the_last_step(
    tmp_path: Path, calm: Callable[[int], list[str]], verify: str
) -> None:
    """Two ranks write the checkpoint, and the plan of each has to know what the other holds."""
    struck = tmp_path / "struck"
    assert ends(struck, "5", ranks=3, flags=("--on-fault", "restart", "--verify-every", verify)) == calm(3)
    (log,) = struck.glob("runs/*/events.jsonl")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    assert [e["data"]["action"] for e in events if e["kind"] == "verdict"] == ["restart_last_gasp"]
    saved = [e["data"]["error"] for e in events if e["kind"] == "saved" and e["data"]["step"] == 5]
    assert set(saved) == {""}, (
        "with the last share it is sealed, and all leave: the word of one may come too late"
    )
    assert next(e["data"]["step"] for e in events if e["kind"] == "sealed") == 5
