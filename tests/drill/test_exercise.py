"""Real runs on the tiny model: faults that cover all pairs, compared with plain torch bit for bit."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, groupby, product
from pathlib import Path

import pytest

from holdfast.cli.commands.drill import show
from holdfast.cli.main import answer
from holdfast.core.job.fault import SEEN
from holdfast.drill import train
from holdfast.drill.digest import COMPARED, STATE, digest_of_checkpoint, digest_of_results
from holdfast.drill.exercise import CHANGED, NOT_REPEATED, Drill, DrillVerdict, Exercise, require_torch
from holdfast.drill.fault_spec import DEATHS, UNVOTED, InjectedFault
from holdfast.drill.runner import Runner
from holdfast.errors import UnsupportedError, UserError
from holdfast.runtime.node.run_settings import RunSettings
from tests.ranks import statuses
from tests.soak.matrix import NPROC, PAIRED, PHASES, SPACING, VICTIMS, drill_for, pairwise

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.timeout(400)]
SEED = 3
PIDS = """
import os
from pathlib import Path

def note(step):
    if step == 0:
        Path(f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))

def scale_now():
    return 1.0 if Path(f"pid-{os.environ['RANK']}").read_text() == str(os.getpid()) else 0.5
"""
EPOCHS = """
import types
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import holdfast

dist.init_process_group("gloo")
torch.manual_seed(7)
model = DistributedDataParallel(nn.Linear(6, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(1)))
sampler = torch.utils.data.DistributedSampler(data)
loader = torch.utils.data.DataLoader(data, 4, sampler=sampler)
scale, name = types.SimpleNamespace(value=1.0), "value"
with holdfast.session(model=model, optimizer=optimizer, scheduler=schedule, checkpoint="ckpt") as s:
    for epoch in s.epochs(8):
        for step in s.steps(loader):
            with step as (x,):
                optimizer.zero_grad()
                (model(x * scale.value) ** 2).mean().backward()
                optimizer.step()
            # next block
        schedule.step()
        with s.section("evaluation"):
            total = (model.module.weight ** 2).sum().detach()
            dist.all_reduce(total)
dist.destroy_process_group()
"""


def bare_digest(directory: Path, layout: str, steps: int, compared: Sequence[str] = COMPARED) -> str:
    """Return the final digest of the drill without Holdfast, with four ranks."""
    twin = ("-m", "holdfast.drill.bare", "--size", "tiny", "--layout", layout, "--steps", str(steps))
    assert statuses(NPROC, *twin, "--result", str(directory)) == [0] * NPROC
    return digest_of_results(directory, NPROC, compared)


def prove(base: Path, layout: str, faults: list[InjectedFault]) -> DrillVerdict:
    """Inject ``faults`` and check everything that the drill promises."""
    steps = SPACING * (len(faults) + 2)  # the last fault may come one spacing late
    drill = drill_for(base, layout, steps, SEED)
    verdict = drill.disturbed("disturbed", faults)
    show(verdict)
    assert verdict.passed, verdict
    assert [(f.kind, f.rank) for f in verdict.faults] == [(f.kind, f.ranks[0]) for f in faults]
    for fault in verdict.faults:
        times = [
            fault.detected_s,
            fault.fenced_s,
            fault.quiesced_s,
            fault.planned_s,
            fault.restored_s,
            fault.resumed_s,
        ]
        assert None not in times and times == sorted(times, key=lambda s: s or 0.0), fault
    assert verdict.digest == bare_digest(base / "bare", layout, verdict.steps)
    return verdict


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.more)])
def test_ddp_loses_nothing(tmp_path: Path, each: int) -> None:
    """The faults are one of every ``each`` pairs, a loss of two ranks at once, and one at a random moment."""
    pairs = [replace(fault, step=SPACING * number) for number, fault in enumerate(pairwise("ddp")[::each], 1)]
    more = SPACING * (len(pairs) + 1)
    at_once, moment = (
        InjectedFault("kill", (0, 3), more, "backward"),
        InjectedFault("kill", (1,), more + SPACING, "moment"),
    )
    verdict = prove(tmp_path, "ddp", [*pairs, at_once, moment])
    asked = [fault.phase for fault in (*pairs, at_once)]
    assert [fault.phase for fault in verdict.faults[: len(asked)]] == asked
    runs = tmp_path / "ddp"
    digests = {
        digest_of_checkpoint(
            runs / name / "checkpoints", RunSettings.load(runs / name).saves_as, verdict.steps
        )
        for name in ("undisturbed", "disturbed")
    }
    assert len(digests) == 1


def test_a_rank_that_is_lost_in_the_vote_leaves_the_others_in_doubt(tmp_path: Path) -> None:
    """Regression: a phase before the block had the name of the vote, so no kill of the drill came in the vote."""
    verdict = prove(tmp_path, "ddp", [InjectedFault("kill", (1,), SPACING, UNVOTED)])
    assert verdict.decisions_back == 1 and verdict.faults[0].phase == "vote"


@pytest.mark.more
def test_hsdp_loses_nothing(tmp_path: Path) -> None:
    prove(tmp_path, "hsdp", pairwise("hsdp"))


@pytest.mark.parametrize(
    ("layout", "faults", "rungs"),
    [
        pytest.param("tp", [InjectedFault("kill", (1,), 6, "backward")], ["replace"], marks=pytest.mark.more),
        # Stage 1 loses one of its copies. Later both stages lose all copies, and all state comes from disk.
        (
            "pp",
            [InjectedFault("kill", (2,), 6, "vote"), InjectedFault("kill", (0, 1, 2, 3), 14, "forward")],
            ["replace", "restart_checkpoint"],
        ),
    ],
)
def test_a_model_in_parts_is_the_same_after_a_loss(
    tmp_path: Path, layout: str, faults: list[InjectedFault], rungs: list[str]
) -> None:
    """Tensor parallel and pipeline, with two copies each: the second copy gives the state of the lost part."""
    steps = 24
    exercise = Exercise.builtin(nproc=NPROC, size="tiny", layout=layout, steps=steps, save_every=4)
    runner = Runner(tmp_path, NPROC, exercise.command, lambda _name, _step, _done: None)
    results = tmp_path / "results"
    outcome = runner.run("disturbed", ("--result", str(results)), faults, SEED)
    assert outcome.code == 0 and len(outcome.injected) == len(faults), outcome.log.read_text()
    actions = [event.data["action"] for event in outcome.events if event.kind == "verdict"]
    # When several ranks are killed together, the death of one may be known one decision earlier.
    assert [action for action, _ in groupby(actions)] == rungs
    assert digest_of_results(results, NPROC, STATE) == bare_digest(tmp_path / "bare", layout, steps, STATE)


@pytest.mark.more
def test_when_all_die_before_anything_was_saved_all_of_it_is_computed_again(tmp_path: Path) -> None:
    steps = 12
    exercise = Exercise.builtin(nproc=2, size="tiny", layout="ddp", steps=steps, save_every=50)
    runner = Runner(tmp_path, 2, exercise.command, lambda _name, _step, _done: None)
    results = tmp_path / "results"
    outcome = runner.run(
        "disturbed", ("--result", str(results)), [InjectedFault("kill", (0, 1), 6, "backward")], SEED
    )
    assert outcome.code == 0 and len(outcome.injected) == 1, outcome.log.read_text()
    verdicts = [event.data for event in outcome.events if event.kind == "verdict"]
    assert (verdicts[-1]["rung"], verdicts[-1]["action"]) == ("recompute", "restart_fresh")
    recovered = [event.data for event in outcome.events if event.kind == "recovered"]
    assert max(int(str(each["steps_lost"])) for each in recovered) == 6
    assert "restart fresh, 6 steps lost, training continues after" in outcome.log.read_text()
    calm = runner.run("undisturbed", ("--result", str(tmp_path / "calm")), [], SEED)
    assert calm.code == 0
    assert digest_of_results(results, 2, STATE) == digest_of_results(tmp_path / "calm", 2, STATE) != ""


def test_a_rank_that_dies_in_the_last_save_is_replaced_and_all_save_again(tmp_path: Path) -> None:
    steps = 12
    exercise = Exercise.builtin(nproc=2, size="tiny", layout="ddp", steps=steps, save_every=5)
    runner = Runner(tmp_path, 2, exercise.command, lambda _name, _step, _done: None)
    outcome = runner.run("disturbed", (), [InjectedFault("kill", (1,), steps, "save")], SEED)
    assert outcome.code == 0 and len(outcome.injected) == 1, outcome.log.read_text()
    finals = [e.data for e in outcome.events if e.kind == "sealed" and e.data["save_kind"] == "final"]
    assert [final["step"] for final in finals] == [steps]
    assert outcome.log.read_text().count(f" saved step {steps} (final) in ") == 1
    assert not [e for e in outcome.events if e.kind == "stalled"]


@pytest.mark.more
def test_a_shard_whose_update_raised_comes_from_the_log(tmp_path: Path) -> None:
    """The exception leaves the script's loop in that process only. The other ranks need not leave their loops."""
    flags = ("--memory-every", "3")
    exercise = Exercise.builtin(nproc=2, size="tiny", layout="fsdp", steps=14, save_every=50, flags=flags)
    runner = Runner(tmp_path, 2, exercise.command, lambda _name, _step, _done: None)
    outcome = runner.run("disturbed", (), [InjectedFault("exception", (1,), 7, "update")], SEED)
    assert outcome.code == 0 and len(outcome.injected) == 1, outcome.log.read_text()
    actions = [event.data["action"] for event in outcome.events if event.kind == "verdict"]
    assert actions == ["replace_from_memory"]
    assert [event.data["steps_lost"] for event in outcome.events if event.kind == "restored"] == [0, 0]


@pytest.mark.more
def test_a_rank_that_came_after_the_last_step_has_the_same_state(tmp_path: Path) -> None:
    """The newcomer computed no loss. The comparison must not use the loss of the rank that it replaces."""
    exercise = Exercise.builtin(nproc=2, size="tiny", layout="ddp", steps=8)
    drill = Drill(tmp_path, exercise, SEED, lambda *_: None)
    verdict = drill.disturbed("disturbed", [InjectedFault("kill", (0,), 3, "save")])
    assert verdict.passed and [fault.phase for fault in verdict.faults] == ["save"], verdict


@pytest.mark.more
def test_a_shard_that_was_made_again_is_no_wrong_copy(tmp_path: Path) -> None:
    """The new optimizer has other tensors than the lost one. The comparison must use the new ones."""
    flags = ("--memory-every", "3", "--verify-every", "2")
    exercise = Exercise.builtin(nproc=NPROC, size="tiny", layout="fsdp", steps=24, save_every=50, flags=flags)
    runner = Runner(tmp_path, NPROC, exercise.command, lambda _name, _step, _done: None)
    faults = [InjectedFault("kill", (3,), 7, "backward"), InjectedFault("kill", (1,), 14, "backward")]
    outcome = runner.run("disturbed", (), faults, SEED)
    assert outcome.code == 0 and len(outcome.injected) == len(faults), outcome.log.read_text()
    actions = [event.data["action"] for event in outcome.events if event.kind == "verdict"]
    assert actions == ["replace_from_memory"] * 2 and not [e for e in outcome.events if e.kind == "corrupted"]
    assert [event.data["steps_lost"] for event in outcome.events if event.kind == "restored"] == [0, 0, 0]


def test_every_pair_of_values_is_covered() -> None:
    rows = {(layout, f.kind, f.phase, f.ranks[0]) for layout in PAIRED for f in pairwise(layout)}
    dimensions = (PAIRED, DEATHS, PHASES, VICTIMS)
    for i, j in combinations(range(4), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(dimensions[i], dimensions[j]))


def test_a_script_of_the_user(tmp_path: Path) -> None:
    """Any script with a session works. The drill does not touch the script's own checkpoint directory."""
    script = tmp_path / "mine.py"
    text = Path(train.__file__).read_text()
    assert "checkpoint=settings.checkpoint" in text
    script.write_text(
        text.replace("checkpoint=settings.checkpoint", f"checkpoint={str(tmp_path / 'ckpts')!r}")
    )
    exercise = Exercise((str(script), "--steps", "30"), 2, results=False)
    drill = Drill(tmp_path / "drill", exercise, SEED, lambda _name, _step, _done: None)
    verdict = drill.disturbed("disturbed", drill.plan([]))
    assert verdict.passed and len(verdict.faults) == 2, verdict
    assert not (tmp_path / "ckpts").exists()


def test_a_script_is_hit_outside_of_its_blocks(tmp_path: Path) -> None:
    """A fault can come after a block, at the draw of a batch, in a section, and after an epoch."""
    script = tmp_path / "mine.py"
    script.write_text(EPOCHS)
    drill = Drill(tmp_path / "drill", Exercise((str(script),), 2, results=False), SEED, lambda *_: None)
    places = [(2, "ready"), (7, "loading"), (12, "section"), (17, "epoch")]
    kills = [InjectedFault("kill", (n % 2,), step, phase) for n, (step, phase) in enumerate(places)]
    exits = [InjectedFault("exit", (1,), 22, "epoch"), InjectedFault("exception", (0,), 27, "ready")]
    verdict = drill.disturbed("disturbed", [*kills, *exits])
    assert verdict.passed, verdict
    assert [fault.phase for fault in verdict.faults] == [
        "ready",
        "loading",
        "section",
        "ready",
        "epoch",
        "ready",
    ]
    assert [fault.step for fault in verdict.faults] == [2, 7, 12, 20, 24, 27]


def test_a_drill_fails_if_state_begins_again(tmp_path: Path) -> None:
    """The name of the attribute is in a variable, and the script changes it after some steps only."""
    script = tmp_path / "mine.py"
    change = "if step.number > 4: setattr(scale, name, getattr(scale, name) * 0.9)"
    changed = EPOCHS.replace("# next block", change)
    assert changed != EPOCHS
    script.write_text(changed)
    drill = Drill(tmp_path / "drill", Exercise((str(script),), 2, results=False), SEED, lambda *_: None)
    verdict = drill.disturbed("disturbed", drill.plan([]))
    assert drill.undisturbed().code == 0 and len(verdict.faults) >= 1 and not verdict.passed, verdict


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        # Another model in each run.
        ({"torch.manual_seed(7)": "torch.manual_seed(__import__('time').time_ns())"}, NOT_REPEATED),
        # The loss depends on a file that only the first process of a rank writes. No search of the source finds it.
        (
            {"x * scale.value": "x * scale_now()", "    for epoch in": "    note(s.step)\n    for epoch in"},
            CHANGED,
        ),
    ],
    ids=["not seeded", "a file"],
)
def test_a_drill_tells_a_script_that_does_not_repeat_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], reason: str
) -> None:
    """Regression: the drill of a script without seeds failed without a word, as if a fault had changed the weights."""
    script = tmp_path / "mine.py"
    text = EPOCHS
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    script.write_text(PIDS + text)
    monkeypatch.chdir(tmp_path)
    drill = Drill(tmp_path / "drill", Exercise((str(script),), 2, results=False), SEED, lambda *_: None)
    verdict = drill.disturbed("disturbed", [InjectedFault("kill", (1,), 12, "forward")])
    assert verdict.code == 0 and not verdict.passed and verdict.reason == reason, verdict


@pytest.mark.parametrize(
    ("text", "part"), [("raise RuntimeError('no data')", "no data"), ("print('hi')", "no holdfast.session")]
)
def test_a_script_that_proves_nothing(tmp_path: Path, text: str, part: str) -> None:
    script = tmp_path / "bad.py"
    script.write_text(text)
    drill = Drill(tmp_path / "drill", Exercise((str(script),), 2, results=False), SEED, lambda *_: None)
    with pytest.raises(UserError, match=part):
        drill.undisturbed()


def test_without_torch_one_line_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match="torch is not installed") as caught:
        require_torch()
    assert caught.value.hint == "pip install 'holdfast[torch]'"
    assert "\n" not in caught.value.message


@pytest.mark.more
def test_the_command_writes_its_verdict_as_data(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "verdict.json"
    flags = [
        "--size",
        "tiny",
        "--nproc",
        "2",
        "--steps",
        "24",
        "--seed",
        "1",
        "--run-dir",
        str(tmp_path / "runs"),
    ]
    assert answer(["drill", *flags, "--json", str(file)]) == 0
    verdict = json.loads(file.read_text())
    assert (verdict["identical"], verdict["steps_lost"]) == (True, 0) and verdict["digest"]
    (fault,) = verdict["faults"]
    assert fault["kind"] == "kill" and fault["rank"] in (0, 1) and fault["phase"] and fault["step"] >= 6
    times = [fault[f"{phase}_s"] for phase in SEEN]
    assert times == sorted(times) and times[0] > 0
    shown = capfd.readouterr().out
    assert "PASSED" in shown and all(len(line) <= 80 for line in shown.splitlines())
