"""Hugging Face's Trainer: unchanged without faults, and the same bits when ranks die or connections break."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from holdfast.errors import UnsupportedError, UsageError
from holdfast.exit_codes import Exit
from holdfast.integrations.huggingface import protect
from holdfast.integrations.huggingface.counted import KEPT_BYTES_MAX, CountedValues
from holdfast.store.manage.checkpoint_root import Root
from tests.frameworks.faces.running import BOUND_S, EXAMPLES, drill, run

pytestmark = pytest.mark.timeout(4 * BOUND_S)  # each run has its own bound

JOB = Path(__file__).with_name("hf_job.py")
STEPS = 9
CALLS_A_STEP = 2


def results(where: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the weights that the Trainer saved, and its record of its progress."""
    seen: dict[str, Any] = json.loads((where / "out" / "seen.json").read_text())
    return (where / "out" / "model.safetensors").read_bytes(), seen


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, Any]]:
    """Run the stock Trainer under torchrun. Return its results."""
    where = tmp_path_factory.mktemp("plain")
    code, output = run(where, ["torchrun"], JOB, "--output", "out", "--plain")
    assert code == 0, output
    return results(where)


@pytest.mark.smoke
def test_example_survives_a_kill(tmp_path: Path) -> None:
    code, output = drill(tmp_path, "kill:rank=0@step=5", EXAMPLES / "hf_trainer.py", "--steps", "8")
    assert code == 0, output
    assert "PASSED: no committed step lost, the same bits at the end" in output


def test_protected_trainer_computes_what_the_stock_one_does(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]]
) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out")
    assert code == 0, output
    compare(tmp_path, plain)
    assert plain[1]["calls"] == STEPS * CALLS_A_STEP


def compare(where: Path, plain: tuple[bytes, dict[str, Any]]) -> None:
    """Check that weights, progress and all logged values are those of the stock Trainer."""
    weights, seen = results(where)
    assert weights == plain[0]
    assert {**seen, "calls": 0} == {**plain[1], "calls": 0}


@pytest.mark.parametrize("kill", ["0@10", "0@13"])  # between two log lines, and after one
def test_a_killed_rank_costs_no_step_and_no_loss(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]], kill: str
) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--kill", kill)
    assert code == 0, output
    compare(tmp_path, plain)
    assert "1 fault, 0 steps lost" in output


def test_an_average_of_a_callback_is_exact_with_the_session_and_refused_without_it(tmp_path: Path) -> None:
    """Regression: the average of a replacement began with its first weights, with exit code 0."""
    given = ("--output", "out", "--average")
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "own", "--plain", ranks=2)
    assert code == 0, output
    code, output = run(tmp_path / "own", ["holdfast", "run"], JOB, *given, "own", "--kill", "0@13", ranks=2)
    assert code == Exit.BAD_INPUT, output
    assert ".weights['transformer.wte.weight'] (and " in output and "changes from step to step" in output
    code, output = run(
        tmp_path / "session", ["holdfast", "run"], JOB, *given, "session", "--kill", "0@13", ranks=2
    )
    assert code == 0 and "1 fault, 0 steps lost" in output, output
    compare(tmp_path / "session", results(tmp_path / "plain"))


def test_an_attribute_of_a_module_that_each_pass_changes_is_refused_by_its_name(tmp_path: Path) -> None:
    """Regression: a replacement began with the first value, and the weights differed with exit code 0."""
    code, said = run(
        tmp_path, ["holdfast", "run"], JOB, "--output", str(tmp_path / "out"), "--cooling", ranks=2
    )
    # Rank 0 also warns of it, unless rank 1 has raised before.
    assert code == 3 and "ImpureBlockError" in said and ".transformer.wpe.passes (was " in said, said


@pytest.mark.parametrize(("evaluate", "kill"), [("steps", "0@7"), ("epoch", "1@9")])
def test_killed_in_the_first_step_after_an_evaluation(tmp_path: Path, evaluate: str, kill: str) -> None:
    given = ("--output", "out", "--evaluate", evaluate)
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "--plain")
    assert code == 0, output
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--kill", kill)
    assert code == 0, output
    compare(tmp_path, results(tmp_path / "plain"))
    assert "1 fault, 0 steps lost" in output and "replace, training continues" in output


@pytest.mark.parametrize(("evaluate", "kill"), [("steps", "2@4"), ("epoch", "0@5")])
def test_an_evaluation_that_a_kill_cuts_off_is_done_after_the_restart(
    tmp_path: Path, evaluate: str, kill: str
) -> None:
    given = ("--output", "out", "--evaluate", evaluate)
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "--plain")
    assert code == 0, output
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--kill-in", "evaluation", "--kill", kill)
    assert code == 0, output
    compare(tmp_path, results(tmp_path / "plain"))
    assert "1 fault, 0 steps lost" in output


def test_a_save_that_a_kill_cuts_off_is_done_again(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]]
) -> None:
    given = ("--output", "out", "--save", "--kill-in", "save", "--kill", "0@1")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given)
    assert code == 0, output
    compare(tmp_path, plain)
    assert "1 fault, 0 steps lost" in output
    saved = [{path.name for path in (tmp_path / "out" / f"checkpoint-{step}").iterdir()} for step in (3, 6)]
    assert saved[0] == saved[1]


@pytest.mark.parametrize(("where", "kill"), [("save", "0@1"), ("step", "0@7")])
def test_a_score_that_decides_on_the_learning_rate_counts_once(tmp_path: Path, where: str, kill: str) -> None:
    """The kill comes after the decision, before or after the evaluation is recorded as done."""
    given = ("--output", "out", "--evaluate", "steps", "--save", "--plateau")
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "--plain", ranks=2)
    assert code == 0, output
    launcher, fault = ["holdfast", "run", "--on-fault", "restart"], ("--kill-in", where, "--kill", kill)
    code, output = run(tmp_path, launcher, JOB, *given, *fault, ranks=2)
    assert code == 0, output
    compare(tmp_path, results(tmp_path / "plain"))
    assert "restart last gasp" in output and "is not the same on all ranks" not in output


def test_a_checkpoint_of_the_trainers_own_is_gone_on_from(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]]
) -> None:
    given = ("--output", "out", "--save")
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, *given, "--plain")
    assert code == 0, output
    theirs = tmp_path / "plain" / "out" / "checkpoint-6"  # in the second epoch
    more = ("--resume", str(theirs), "--kill", "1@3")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, *more)
    assert code == 0, output
    assert results(tmp_path)[0] == plain[0]
    assert results(tmp_path)[1]["step"] == STEPS


def test_a_single_worker_restarts_from_memory(tmp_path: Path) -> None:
    code, output = run(tmp_path / "plain", ["torchrun"], JOB, "--output", "out", "--plain", ranks=1)
    assert code == 0, output
    launcher = ["holdfast", "run", "--memory-every", "1"]
    code, output = run(tmp_path, launcher, JOB, "--output", "out", "--kill", "0@10", ranks=1)
    assert code == 0, output
    assert "resumed at step 4 from /dev/shm" in output
    compare(tmp_path, results(tmp_path / "plain"))


@pytest.mark.parametrize("call", [7, 8])  # the first and the last micro-batch of a step
def test_cut_connections_are_answered_with_the_same_batches(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]], call: int
) -> None:
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--cut", f"0@{call}")
    assert code == 0, output
    compare(tmp_path, plain)
    seen = results(tmp_path)[1]
    assert "retry in place" in output
    assert seen["calls"] > plain[1]["calls"]  # micro-batches ran again in the same processes
    assert len(list(tmp_path.glob("runs/*/attempt-*"))) == 1


def test_graceful_exit_and_the_next_run(
    tmp_path: Path, plain: tuple[bytes, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT", str(tmp_path / "kept"))
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out", "--leave", "2@11")
    assert code == Exit.REQUEUE, output
    assert not (tmp_path / "out" / "seen.json").exists()
    (left,) = Root(tmp_path / "kept").list()
    assert left.valid and left.step in (6, 7)  # in the second epoch
    code, output = run(tmp_path, ["holdfast", "run"], JOB, "--output", "out")
    assert code == 0, output
    weights, seen = results(tmp_path)
    assert weights == plain[0]
    # The first step is repeated to prove the block.
    repeated = seen["calls"] - (STEPS - left.step) * CALLS_A_STEP
    assert 0 < repeated <= 4 * CALLS_A_STEP and repeated % CALLS_A_STEP == 0
    # Values are logged after the end of their step. The step before the exit has logged none.
    logged = [[line["step"] for line in lines] for lines in (plain[1]["logged"], seen["logged"])]
    assert set(logged[0]) - set(logged[1]) <= {left.step}
    assert seen["trained"] == pytest.approx(plain[1]["trained"])  # the run adds one sum more or less
    assert all(seen[key] == plain[1][key] for key in ("step", "epoch", "rate"))


def test_a_replacement_with_other_data_ends_the_run(tmp_path: Path) -> None:
    """Regression: the job continued with other weights, and ended with exit code 0."""
    given = ("--output", "out", "--other-data", "--kill", "1@10")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == Exit.BAD_INPUT, output
    assert "rank 1: the " in output and "gives another batch for batch " in output, output


def test_a_resume_with_other_data_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_CHECKPOINT", str(tmp_path / "kept"))
    given = ("--output", "out", "--other-data")
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, "--leave", "1@10", ranks=2)
    assert code == Exit.REQUEUE, output
    (tmp_path / "out" / "other").touch()
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == Exit.BAD_INPUT, output
    assert "gives another batch for batch " in output, output
    (tmp_path / "out" / "other").unlink()
    code, output = run(tmp_path, ["holdfast", "run"], JOB, *given, ranks=2)
    assert code == 0, output


def test_what_is_not_supported_is_refused_by_name(tmp_path: Path) -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            yield {}

    model: Any = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8))
    with pytest.raises(UnsupportedError, match="a GPT2LMHeadModel is no "):
        protect(model)
    args = TrainingArguments(output_dir=str(tmp_path), max_steps=1, report_to=[], use_cpu=True)
    with pytest.raises(UnsupportedError, match="iterable dataset"):
        protect(Trainer(model=model, args=args, train_dataset=Endless()))
    trainer = protect(Trainer(model=model, args=args, train_dataset=[]))
    with pytest.raises(UsageError, match="already"):
        protect(trainer)


class SyncRefModelCallback(TrainerCallback):  # type: ignore[misc]
    """A callback with the name of TRL's, which moves a second model towards the trained one."""


class Followed(SyncRefModelCallback):
    """A subclass of it."""


class Generating(Trainer):  # type: ignore[misc]
    """A Trainer that keeps completions for several micro-batches, as TRL's do."""

    _buffered_inputs = None


@pytest.mark.parametrize("callback", [SyncRefModelCallback, Followed])
def test_weights_that_a_callback_changes_are_refused(tmp_path: Path, callback: type[TrainerCallback]) -> None:
    trainer = Trainer(model=small(), args=arguments(tmp_path), train_dataset=[], callbacks=[callback()])
    with pytest.raises(UnsupportedError, match=f"{callback.__name__}: it changes other weights"):
        protect(trainer)


@pytest.mark.parametrize(
    ("accumulated", "uses", "iterations", "allowed"),
    [(2, 2, 1, True), (4, 2, 2, True), (2, 2, 2, False), (2, 4, 1, False), (3, 2, 1, False)],
)
def test_completions_that_several_steps_use_are_refused(
    tmp_path: Path, accumulated: int, uses: int, iterations: int, allowed: bool
) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=accumulated)
    args.steps_per_generation, args.num_iterations = uses, iterations
    trainer = Generating(model=small(), args=args, train_dataset=[])
    with nullcontext() if allowed else pytest.raises(UnsupportedError, match="completions in several steps"):
        protect(trainer)


def test_counted_values_go_on_in_another_process(caplog: pytest.LogCaptureFixture) -> None:
    """What a step has changed is kept, in the containers of the newcomer; other and large values are not."""
    first = SimpleNamespace(rows=1, last=deque([1], 2), sums={"a": defaultdict(list)}, other=7, tensors=[])
    counted = CountedValues(first)
    counted.begin()
    for _ in range(2):  # the second run of the block begins where the first one began
        counted.put_back()
        assert (first.rows, list(first.last), first.sums["a"]) == (1, [1], {})
        with counted.watched():
            first.rows += 2
            first.last.append(5)
            first.sums["a"]["x"].append(0.5)
            first.tensors.append(torch.zeros(1))
    kept = counted.own()
    assert kept == {"rows": 3, "last": [1, 5], "sums": {"a": {"x": [0.5]}}}
    second = SimpleNamespace(rows=0, last=deque[int]([], 2), sums={"a": defaultdict(list)}, other=8)
    CountedValues(second).go_on(kept)
    assert (second.rows, second.other, second.last.maxlen) == (3, 8, 2)
    second.sums["a"]["y"].append(1.0)
    assert second.sums == {"a": {"x": [0.5], "y": [1.0]}}
    with counted.watched():
        first.sums["a"]["x"] = [0.125] * KEPT_BYTES_MAX
    assert "sums" in kept and "sums" not in counted.own()
    with counted.watched():
        first.sums["a"]["x"] = ["x" * KEPT_BYTES_MAX]
    assert counted.own() == {"rows": 3, "last": [1, 5]}
    assert "SimpleNamespace.sums takes" in caplog.text


def small() -> Any:
    """Return a model that is not trained."""
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8))


def arguments(where: Path, **given: Any) -> TrainingArguments:
    """Return arguments of a Trainer for one step."""
    return TrainingArguments(output_dir=str(where), max_steps=1, report_to=[], use_cpu=True, **given)


def test_a_second_train_is_refused(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, n_positions=4, vocab_size=8))
    args = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
    )
    tokens = torch.arange(4)
    data: Any = [{"input_ids": tokens, "labels": tokens}] * 4
    trainer = protect(Trainer(model=model, args=args, train_dataset=data), checkpoint=tmp_path / "kept")
    assert trainer.train().global_step == 1
    with pytest.raises(UsageError, match="called before"):
        trainer.train()
