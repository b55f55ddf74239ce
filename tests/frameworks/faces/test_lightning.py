"""Lightning: unchanged without faults, and the same bits when ranks die or connections break."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader, TensorDataset

from holdfast.errors import UnsupportedError, UsageError
from holdfast.exit_codes import Exit
from holdfast.integrations.lightning import Holdfast
from holdfast.store.manage.checkpoint_root import Root
from tests.frameworks.faces.running import BOUND_S, EXAMPLES, drill, run

pytestmark = pytest.mark.timeout(4 * BOUND_S)  # each run has its own bound

JOB = Path(__file__).with_name("lightning_job.py")
SLICES = Path(__file__).with_name("lightning_slices_job.py")
AFTER = Path(__file__).with_name("lightning_after_job.py")
LOADERS = Path(__file__).with_name("loaders_job.py")
BATCHES = 5
STEPS = 9


def results(where: Path) -> dict[str, Any]:
    """Return what rank 0 recorded at the end."""
    seen: dict[str, Any] = json.loads((where / "out" / "seen.json").read_text())
    return seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run stock Lightning under torchrun. Return its results."""
    where = tmp_path_factory.mktemp("plain")
    code, output = run(where, ["torchrun"], JOB, "--output", "out", "--plain")
    assert code == 0, output
    return results(where)


def validated(
    where: Path, plain: dict[str, Any], check: int, *more: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return the arguments of a job that validates every ``check`` batches, and its results without Holdfast.

    ``check`` 0: after each epoch.
    """
    given = ("--output", "out", *(("--check", str(check)) if check else ()), *more)
    if check or more:
        code, output = run(where / "plain", ["torchrun"], JOB, *given, "--plain")
        assert code == 0, output
        plain = results(where / "plain")
    return given, plain


@pytest.mark.smoke
def test_example_survives_a_kill(tmp_path: Path) -> None:
    code, output = drill(tmp_path, "kill:rank=1@step=13", EXAMPLES / "lightning_module.py", "--epochs", "2")
    assert code == 0, output
    assert "PASSED: no committed step lost, the same bits at the end" in output


def test_protected_training_computes_what_the_stock_one_does(tmp_path: Path, plain: dict[str, Any]) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out")
    assert code == 0, output
    assert {**results(tmp_path), "calls": plain["calls"]} == plain
    assert "is not the same on all ranks" not in output, "a metric that each rank has of its own"
    assert (plain["step"], plain["epoch"], plain["calls"]) == (STEPS, 3, 3 * BATCHES)


def test_ranks_that_take_slices_of_one_batch_draw_the_same_batch(tmp_path: Path) -> None:
    """Regression: each rank drew a separate order, so that the slices came from different batches."""
    code, output = run(tmp_path, ["holdfast", "run"], SLICES, ranks=2)
    assert code == 0, output
    # The replaced process of rank 1 knows the batches since the fifth.
    drawn = {path.name: path.read_text() for path in tmp_path.glob("drawn-*")}
    both = [number for number in range(1, 9) if f"drawn-1-{number}" in drawn]
    assert both[-4:] == [5, 6, 7, 8], drawn
    assert [drawn[f"drawn-0-{n}"] for n in both] == [drawn[f"drawn-1-{n}"] for n in both]


def test_what_follows_the_fit_runs_and_a_replaced_rank_logs_where_the_lost_one_did(tmp_path: Path) -> None:
    scores = []
    for victim in ("none", "0", "1"):
        where = tmp_path / victim
        code, output = run(where, ["holdfast", "run"], AFTER, victim, ranks=2)
        assert code == 0, output
        assert ("replace, training continues" in output) == (victim != "none")
        scores.append(json.loads((where / "scores.json").read_text()))
        files = {str(path.relative_to(where / "logs")) for path in where.glob("logs/**/*") if path.is_file()}
        version = "lightning_logs/version_0"
        checkpoint = f"{version}/checkpoints/epoch=1-step=10.ckpt"
        assert files == {f"{version}/metrics.csv", f"{version}/config.yaml", checkpoint}
        metrics = (where / "logs" / version / "metrics.csv").read_text().splitlines()
        assert len(metrics) == 1 + 10 + 2 + 2, "header, steps, validations of the fit, test and validation"
    assert scores[0] == scores[1] == scores[2]


@pytest.mark.parametrize(
    ("ranks", "kill"),
    [(2, "1@8"), (1, "0@9")],  # in the second micro-batch of a step; from memory
)
def test_dropout_in_the_micro_batches_of_a_killed_step(tmp_path: Path, ranks: int, kill: str) -> None:
    launcher = ["holdfast", "run", "--memory-every", "1"]
    given = ("--output", "out", "--dropout", "0.3")
    code, output = run(tmp_path / "undisturbed", launcher, JOB, *given, ranks=ranks)
    assert code == 0, output
    code, output = run(tmp_path, launcher, JOB, *given, "--kill", kill, ranks=ranks)
    assert code == 0, output
    undisturbed = results(tmp_path / "undisturbed")
    assert {**results(tmp_path), "calls": 0} == {**undisturbed, "calls": 0}
    assert ranks > 1 or "resumed at step 4 from /dev/shm" in output


@pytest.mark.parametrize("call", [6, 7])  # the first and the last micro-batch of a step
def test_cut_connections_are_answered_with_the_same_batches(
    tmp_path: Path, plain: dict[str, Any], call: int
) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--cut", f"0@{call}")
    assert code == 0, output
    seen = results(tmp_path)
    assert {**seen, "calls": 0} == {**plain, "calls": 0}
    assert "retry in place" in output
    assert seen["calls"] > plain["calls"]  # micro-batches ran again in the same processes
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == 1


@pytest.mark.parametrize(
    ("check", "kill", "flags"),
    [
        (0, "1@6", ()),  # at the end of an epoch, where rank 0 writes the checkpoint of ModelCheckpoint
        (0, "0@11", ("--on-fault", "restart")),
        (2, "0@3", ()),  # every two batches
        (2, "2@10", ()),
    ],
)
def test_killed_in_the_first_step_after_a_validation(
    tmp_path: Path, plain: dict[str, Any], check: int, kill: str, flags: tuple[str, ...]
) -> None:
    """A newcomer begins after the validation, with the results of the callbacks."""
    given, plain = validated(tmp_path, plain, check)
    code, output = run(tmp_path, ["holdfast", "run", *flags], JOB, *given, "--kill", kill)
    assert code == 0, output
    assert {**results(tmp_path), "calls": 0} == {**plain, "calls": 0}
    assert ("replace, training continues" in output) == (not flags)


@pytest.mark.parametrize(
    ("check", "kill"),
    [
        (0, "1@3"),  # at the end of the first epoch, and after the last step of all
        (0, "0@9"),
        (2, "2@6"),
    ],
)
def test_a_validation_that_a_kill_cuts_off_is_done_after_the_restart(
    tmp_path: Path, plain: dict[str, Any], check: int, kill: str
) -> None:
    given, plain = validated(tmp_path, plain, check)
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--kill-in", "validation", "--kill", kill)
    assert code == 0, output
    assert {**results(tmp_path), "calls": 0} == {**plain, "calls": 0}
    assert "1 fault, 0 steps lost" in output


def test_a_score_that_decides_on_the_learning_rate_counts_once(tmp_path: Path, plain: dict[str, Any]) -> None:
    """The kill comes after the decision, before the next step."""
    given, plain = validated(tmp_path, plain, 0, "--plateau")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--kill-in", "epoch", "--kill", "1@3")
    assert code == 0, output
    # The checkpoint of that epoch is saved again under another name.
    ended = {"calls": 0, "files": []}
    assert {**results(tmp_path), **ended} == {**plain, **ended}
    assert "restart last gasp" in output


@pytest.mark.parametrize("call", [8, 10])  # in the middle of the second epoch, and at its end
def test_graceful_exit_and_the_next_run(
    tmp_path: Path, plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT", str(tmp_path / "kept"))
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--leave", f"2@{call}")
    assert code == Exit.REQUEUE, output
    (left,) = Root(tmp_path / "kept").list()
    assert left.valid and 4 <= left.step < STEPS
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out")
    assert code == 0, output
    seen = results(tmp_path)
    assert {**seen, "calls": 0} == {**plain, "calls": 0}
    epoch, steps = divmod(left.step, 3)
    left_to_do = 3 * BATCHES - epoch * BATCHES - 2 * steps
    rehearsed = seen["calls"] - left_to_do  # the first step, without effect, to prove the block
    calls = 1 if steps == 2 else 2  # calls of that step: the last step of an epoch has a single batch
    assert 0 < rehearsed <= 3 * calls and rehearsed % calls == 0


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return Lightning's own checkpoints, one of each epoch."""
    where = tmp_path_factory.mktemp("saved")
    code, output = run(where, ["torchrun"], JOB, "--output", "out", "--plain", "--all")
    assert code == 0, output
    return sorted((where / "out" / "best").iterdir())


def test_an_attribute_of_the_module_that_each_step_changes_is_refused_by_its_name(tmp_path: Path) -> None:
    """Regression: a replacement began with the first value, and the weights differed with exit code 0."""
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--cooling", ranks=2)
    # Rank 0 also warns of it, unless rank 1 has raised before.
    assert code == Exit.BAD_INPUT and "ImpureBlockError" in output and ".passes (was " in output, output


def test_a_replacement_with_other_data_ends_the_run(tmp_path: Path) -> None:
    """Regression: the job continued with other weights, and ended with exit code 0."""
    given = ("--output", "out", "--other-data", "--kill", "1@8")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == Exit.BAD_INPUT, output
    assert "rank 1: the " in output and "gives another batch for batch " in output, output


def test_a_resume_with_other_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT", str(tmp_path / "kept"))
    given = ("--output", "out", "--other-data")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--leave", "1@8", ranks=2)
    assert code == Exit.REQUEUE, output
    (tmp_path / "out" / "other").touch()
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == Exit.BAD_INPUT, output
    assert "gives another batch for batch " in output, output
    (tmp_path / "out" / "other").unlink()
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == 0, output


@pytest.mark.parametrize(("rung", "kill"), [("auto", "1@4"), ("restart", "2@8")])
def test_a_checkpoint_of_lightnings_own_is_gone_on_from(
    tmp_path: Path, saved: list[Path], rung: str, kill: str
) -> None:
    """The file is read once. A newcomer, or a later start, has the optimizer and the position of the job."""
    given = ("--output", "out", "--resume", str(saved[0]))
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "--plain")
    assert code == 0, output
    plain = results(tmp_path / "plain")
    assert plain["updates"] == [STEPS]
    code, output = run(tmp_path, ["holdfast", "run", "--on-fault", rung], JOB, *given, "--kill", kill)
    assert code == 0, output
    assert {**results(tmp_path), "calls": 0} == {**plain, "calls": 0}
    assert "F001: replace" in output if rung == "auto" else "F001: restart last gasp" in output


def test_a_checkpoint_of_lightnings_own_with_nothing_left_to_train(tmp_path: Path, saved: list[Path]) -> None:
    given = ("--output", str(saved[-1].parents[1]), "--resume", str(saved[-1]))
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given)
    assert code == 0, output
    assert "F001" not in output
    assert results(saved[-1].parents[2])["calls"] == 0


def batches(where: Path, mode: str, steps: int) -> list[str]:
    """Train one process over two loaders. Return the batches that it was given until ``steps``."""
    command = [sys.executable, str(LOADERS), mode, str(steps)]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=BOUND_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if line.startswith("batch ")]


@pytest.mark.parametrize(
    ("mode", "short"),
    [("max_size_cycle", ["100", "102", "100", "102", "100"]), ("max_size", ["100", "102", *["None"] * 3])],
)
def test_the_shorter_of_two_loaders_ends_within_an_epoch(tmp_path: Path, mode: str, short: list[str]) -> None:
    """Holdfast agrees with Lightning in one run (second epoch) and after a restart beyond that end (first epoch)."""
    given = batches(tmp_path, mode, 3) + batches(tmp_path, mode, -1)
    # The first step of a process is repeated to prove its block.
    assert [line for line, _ in groupby(given)] == [
        f"batch {step} {step % 5 * 2} {short[step % 5]}" for step in range(10)
    ]


def test_a_second_fit_is_refused(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        callbacks=[Holdfast()],
    )
    trainer.fit(BoringModel())
    with pytest.raises(UsageError, match="fit\\(\\) was called before"):
        trainer.fit(BoringModel())


def test_manual_optimization_is_refused_by_name(tmp_path: Path) -> None:
    class Manual(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
            self.automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            raise AssertionError("never reached")

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=1,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[Holdfast()],
    )
    with pytest.raises(UnsupportedError, match="automatic_optimization=False"):
        trainer.fit(Manual(), DataLoader(TensorDataset(torch.zeros(4, 1))))


@pytest.mark.parametrize(
    "averaging",
    [pl.callbacks.StochasticWeightAveraging(swa_lrs=0.1), pl.callbacks.EMAWeightAveraging()],
    ids=lambda callback: type(callback).__name__,
)
def test_averages_that_lightning_exchanges_between_steps_are_refused(
    tmp_path: Path, averaging: pl.Callback
) -> None:
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=2,
        logger=False,
        default_root_dir=tmp_path,
        callbacks=[Holdfast(), averaging],
    )
    with pytest.raises(UnsupportedError, match=type(averaging).__name__):
        trainer.fit(BoringModel())
