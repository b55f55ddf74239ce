"""Scripts in other authors' styles: unmodified as under torchrun; adapted exact after faults, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import ROOT, run_job, run_torchrun

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HERE = Path(__file__).parent
TABLE = ROOT / "docs" / "coming-from.md"
REFUSED = {
    "prefetch": r"step 0: .*prefetch.py:\d+ uses the int64 \[4, 8\] that prefetch.py:\d+ made in the run before",
    "tensor_parallel": "step 0 leaves the gradients of its update, to which the next step adds",
}
AGAIN = dict.fromkeys(
    ("owned", "sharded_optimizer", "zero_redundancy"), r"\d+ steps?"
)  # one rank holds each part
NAMES = sorted(path.stem for path in (HERE / "plain").glob("*.py"))


def listed(names: list[str]) -> list[object]:
    """Return the names as test parameters. All but one are for machines with many cores."""
    return [name if name == "get_batch" else pytest.param(name, marks=pytest.mark.more) for name in names]


def run(
    where: Path,
    kind: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    code: int = 0,
    ranks: int = 2,
    **variables: str,
) -> tuple[str, Mapping[str, str]]:
    """Run a script on two workers, or on as many as ``ranks``.

    Return the output, and the results of each rank. ``variables``: those of ``beat.py``.
    """
    where.mkdir(exist_ok=True)
    for variable in ("KILL", "KILL_INSIDE", "STOP", "WRONG_FROM"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    start = run_torchrun if kind == "torchrun" else run_job
    form = "plain" if kind == "torchrun" else kind
    done = start(where, ranks, str(HERE / form / f"{name}.py"))
    assert done.returncode == code, done.stdout
    return done.stdout, {path.name: path.read_text() for path in where.glob("ended-*")}


def refused_after(
    fault: str,
    where: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    *,
    kill: str,
    stop: str,
) -> tuple[str, Mapping[str, str]]:
    """Run a naive script that is refused after a fault: a kill, or a stop after which the same command runs again.

    Return the output of the refused run, and the results of each rank, as :func:`run` does. ``kill``, ``stop``: the
    variables of ``beat.py`` for the faults of these names.
    """
    if fault == "stop":
        run(where, "naive", name, monkeypatch, code=Exit.REQUEUE, STOP=stop)
        kill = ""
    return run(where, "naive", name, monkeypatch, code=Exit.BAD_INPUT, KILL=kill)


@pytest.mark.parametrize("name", listed(NAMES))
def test_unmodified_is_what_torchrun_does(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, here = run(tmp_path / "here", "plain", name, monkeypatch)
    _, there = run(tmp_path / "there", "torchrun", name, monkeypatch)
    assert len(here) == 2 and here == there


@pytest.mark.parametrize("name", listed([name for name in NAMES if name not in REFUSED]))
def test_adapted_ends_with_the_bits_of_the_undisturbed_run(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The faults are two kills, then a stop, after which the same command runs with a kill."""
    _, calm = run(tmp_path / "calm", "adapted", name, monkeypatch)
    assert len(calm) == 2
    output, killed = run(tmp_path / "killed", "adapted", name, monkeypatch, KILL="1:2,0:4")
    assert re.search(f"2 faults, {AGAIN.get(name, '0 steps')} lost", output) and killed == calm, output
    alarms = ("depend on", "depends on", "begin again in this process", "begins again in this process")
    assert not any(each in output for each in alarms), "a false alarm"
    output, _ = run(tmp_path / "stopped", "adapted", name, monkeypatch, code=Exit.REQUEUE, STOP="3")
    output, resumed = run(tmp_path / "stopped", "adapted", name, monkeypatch, KILL="0:6")
    assert re.search(r"resumed at step ([4-9]|1\d) ", output) and resumed == calm, output


def test_stages_of_a_pipeline_by_hand_read_the_same_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script compares the samples of its two ranks. Regression: each rank drew a separate order, silently."""
    output, ended = run(tmp_path, "adapted", "staged", monkeypatch, KILL="1:2,0:4")
    assert "2 faults, 0 steps lost" in output and len(ended) == 2, output


@pytest.mark.parametrize("rank", [0, 1])
def test_an_object_that_ranks_exchange_after_an_epoch_is_that_of_its_sender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Regression: a replacement ran this code alone and got its own object, so the run ended with code 1."""
    _, calm = run(tmp_path / "calm", "adapted", "announced", monkeypatch)
    output, killed = run(tmp_path / "killed", "adapted", "announced", monkeypatch, KILL_INSIDE=f"{rank}:1")
    assert "1 fault, 0 steps lost" in output and len(calm) == 2 and killed == calm, output


def test_parts_of_a_model_with_the_same_names_end_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No save could hold both. Regression: the run ended at its last save, and all its steps were lost."""
    output, ended = run(tmp_path, "naive", "staged", monkeypatch, code=Exit.BAD_INPUT)
    said = r"StateError: step \d: no rank could save this state, .*'0.weight': rank 0 declares F32 \[16, 6\], rank 1"
    assert re.search(said, output) and "names, those of the whole model" in output and not ended, output


@pytest.mark.more
@pytest.mark.parametrize("name", ["asserted", "branches"])
def test_three_ranks_sum_in_the_order_of_the_undisturbed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The sum of two numbers has no order; the sum of three does.

    The first kill is before DDP has summed with its final buckets, and the resumed ranks cannot rehearse their block.
    """
    _, calm = run(tmp_path / "calm", "adapted", name, monkeypatch, ranks=3)
    output, killed = run(tmp_path / "killed", "adapted", name, monkeypatch, ranks=3, KILL="1:1,0:4")
    assert "2 faults, 0 steps lost" in output and killed == calm, output
    run(tmp_path / "stopped", "adapted", name, monkeypatch, code=Exit.REQUEUE, ranks=3, STOP="3")
    output, resumed = run(tmp_path / "stopped", "adapted", name, monkeypatch, ranks=3)
    assert len(calm) == 3 and resumed == calm and "last bits" not in output, output


def test_an_error_that_also_comes_with_peers_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is excused in the runs without peers of the replacement, and not in the run for the job."""
    output, ended = run(
        tmp_path, "adapted", "asserted", monkeypatch, code=Exit.FAILED, KILL="1:2", WRONG_FROM="4"
    )
    assert "AssertionError: a rank has another number of samples" in output and not ended, output
    assert "the same exception at step 4 twice" in output, output


def test_a_death_in_the_middle_of_an_update_that_communicates_undoes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank has updated its part and sends none of it. The other rank waits for this part."""
    _, calm = run(tmp_path / "calm", "adapted", "zero_redundancy", monkeypatch)
    output, killed = run(
        tmp_path / "killed", "adapted", "zero_redundancy", monkeypatch, KILL_INSIDE="1:3,0:7"
    )
    assert "2 faults" in output and killed == calm, output
    assert "communicates in step(): each step first copies its weights (0.0 MB)" in output


@pytest.mark.more
def test_a_death_between_two_updates_of_a_step_undoes_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ranks have made two of the four updates of an iteration, with the games of this iteration."""
    _, calm = run(tmp_path / "calm", "adapted", "rollouts", monkeypatch)
    output, killed = run(tmp_path / "killed", "adapted", "rollouts", monkeypatch, KILL_INSIDE="1:3,0:5")
    assert "2 faults, 0 steps lost" in output and killed == calm, output


@pytest.mark.more
@pytest.mark.parametrize(("name", "kills"), [("lazy", "1:4,0:6"), ("tuned", "1:7,0:11")])
def test_a_death_between_the_phases_of_a_gan_undoes_the_first_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kills: str
) -> None:
    """Both ranks have updated the generator, once or twice, with the gradients of this step.

    The scaler of the discriminator has unscaled its gradients. Regression: the survivor ended with a RuntimeError.
    """
    _, calm = run(tmp_path / "calm", "adapted", name, monkeypatch)
    output, killed = run(tmp_path / "killed", "adapted", name, monkeypatch, KILL_INSIDE=kills)
    assert "2 faults, 0 steps lost" in output and killed == calm, output


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_exact_is_refused_by_name(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script is refused before a fault, and before an update that could not be repeated."""
    output, ended = run(tmp_path, "adapted", name, monkeypatch, code=Exit.BAD_INPUT)
    assert re.search(REFUSED[name], output) and not ended, output


def test_a_counter_that_replacements_do_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replacement makes a collective after a block that the other rank does not make, and would be lost."""
    output, ended = run(tmp_path, "naive", "ticks", monkeypatch, code=Exit.BAD_INPUT, KILL="1:4")
    line = next(
        n
        for n, text in enumerate((HERE / "naive" / "ticks.py").read_text().splitlines(), 1)
        if "mean_of(l" in text
    )
    assert not ended and "3 faults" in output, output
    where = rf"between the blocks of steps 5 and 6, rank 1 makes all_reduce at .*, from ticks.py:{line},"
    assert re.search(
        f"UnmatchedCollectiveError: {where}" + r".*the script decides by tick, tick_start,", output
    ), output
    first = "warning: rank 1 at step 5: UnmatchedCollectiveError: .*; a second time in a row ends the run"
    assert re.search(first, output), output
    assert re.search(r"  next: keep what decides .* session\(state=\{...\}\).*: tick, tick_start", output), (
        output
    )


def test_a_block_that_raises_only_when_it_runs_again_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception of the script alone says nothing of its cause, a second run."""
    output, ended = run(tmp_path, "naive", "buckets", monkeypatch, code=Exit.BAD_INPUT)
    line = next(
        n
        for n, text in enumerate((HERE / "naive" / "buckets.py").read_text().splitlines(), 1)
        if "assert" in text
    )
    said = f"step 0: run again on the same batch, the block ends with AssertionError at buckets.py:{line}"
    assert f"ImpureBlockError: {said}: it uses what the run before has left" in output and not ended, output


@pytest.mark.parametrize(
    ("place", "step", "steps", "differs"),
    [
        ("behind", 5, "'fast' (lr 0.05), 'slow' (lr 0.05)", "rank 1 steps 'fast' (lr 0.05)"),
        pytest.param(
            "before", 5, "'slow' (lr 0.05)", "rank 1 steps 'fast' (lr 0.05)", marks=pytest.mark.more
        ),
        pytest.param(
            "rate",
            4,
            "'fast' (lr 0.02)",
            "lr of 'fast' is 0.02 here and 0.01 on rank 1",
            marks=pytest.mark.more,
        ),
        pytest.param(
            "momentum",
            4,
            "'fast' (lr 0.05)",
            "momentum of 'fast' is 0.8 here and 0.9 on rank 1",
            marks=pytest.mark.more,
        ),
        pytest.param(
            "named",
            4,
            "'first/fast' (lr 0.02)",
            "lr of 'first/fast' is 0.02 here and 0.01 on rank 1",
            marks=pytest.mark.more,
        ),
    ],
)
def test_an_update_that_only_one_rank_makes_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, step: int, steps: str, differs: str
) -> None:
    """One rank updates its shards and its peer does not, or it uses another learning rate.

    An update behind the vote is found at the next vote, and its state is not saved. The error names what differs.
    """
    output, ended = run(
        tmp_path, "naive", "delayed", monkeypatch, code=Exit.BAD_INPUT, KILL="1:4", PLACE=place
    )
    assert not ended
    rank_0 = f"{steps}, and not all ranks do the same ({differs}). The cause: another"
    # Both ranks find it, and the first report ends the run.
    rank_1 = r".*, and not all ranks do the same \(.*rank 0.*\)\. The cause: this process has replaced"
    said = rf"StepError: step {step}: this rank steps ({re.escape(rank_0)}|{rank_1})"
    assert re.search(said, output), output
    assert (f"saved step {step} (last-gasp)" in output) == (place != "behind"), output
    assert ("steps are not kept" in output) == (place == "behind"), output


def test_a_variable_in_the_loss_that_replacements_do_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are summed, so all copies of the weights would be equal and wrong."""
    output, ended = run(tmp_path, "naive", "annealed", monkeypatch, code=Exit.BAD_INPUT, KILL="1:4")
    assert not ended
    assert re.search(r"holdfast: the updates depend on seen \(annealed.py:\d+\), and a process that", output)
    said = r"step 4: the updates depend on variables of the script \(here seen = \d \(annealed.py:\d+\)\), and not all"
    assert re.search(
        f"StepError: {said} ranks have the same values. The cause: (another|this) process has", output
    ), output
    assert "saved step 4 (last-gasp)" in output, output


def test_a_count_of_one_rank_that_its_second_step_begins_again_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks have not differed yet, and the first update had the value of a start. Regression: exit code 0."""
    output, ended = run(
        tmp_path, "naive", "annealed", monkeypatch, code=Exit.BAD_INPUT, KILL="0:1", PLACE="alone"
    )
    said = "the updates depend on seen = 0, as at the first step of the job; at the step before: seen = 1."
    assert f"StepError: {said}" in output and not ended, output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    "place", ["iterator", *(pytest.param(each, marks=pytest.mark.more) for each in ("object", "cycle"))]
)
def test_an_iterator_that_a_new_process_begins_again_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: str
) -> None:
    """Regression: the iterator of a DataLoader had no value that was compared: other weights, exit code 0.

    The position of ``itertools.cycle`` is not known. The last item of it is compared.
    """
    monkeypatch.setenv("PLACE", place)
    output, ended = refused_after(fault, tmp_path, "unlabeled", monkeypatch, kill="1:6", stop="6")
    name = {"iterator": "others = 'a generator of batches, at", "object": "others.batches = 'a gen"}
    assert re.search(f"StepError: .*{name.get(place, 'drawn = ')}", output) and not ended, output
    assert place == "cycle" or "draw the batches of several loaders by s.steps(loader, second)" in output


def test_a_pool_of_each_rank_in_the_state_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The images reach the loss through a list. Regression: a replacement got the pool of another rank, exit code 0."""
    output, ended = run(tmp_path, "naive", "pooled", monkeypatch, code=Exit.BAD_INPUT, KILL="1:8")
    said = r"StepError: step 0: the updates depend on values in session\(state=.*pool.images = 'a tensor"
    assert re.search(said, output) and not ended, output
    assert "a tensor of one rank by holdfast.torch.declare()" in output, output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
@pytest.mark.parametrize("place", ["behind", pytest.param("before", marks=pytest.mark.more)])
def test_a_teacher_that_a_new_process_does_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, fault: str
) -> None:
    """Regression: an object had no value that was compared, so None was the newest one: other weights, exit code 0."""
    monkeypatch.setenv("PLACE", place)
    output, ended = refused_after(fault, tmp_path, "taught", monkeypatch, kill="1:6", stop="6")
    said = "the updates depend on teacher = 'None', as at the first step of the job; at the step before: teacher = 'an"
    assert f"StepError: {said}" in output and not ended, output


def test_a_rank_that_is_lost_ahead_of_the_loop_of_an_epoch_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank has opened the loop. Regression: refused, because the loop before had another epoch."""
    _, calm = run(tmp_path / "calm", "naive", "weighed", monkeypatch)
    output, killed = run(tmp_path / "killed", "naive", "weighed", monkeypatch, KILL_AHEAD="1")
    assert "1 fault, 0 steps lost" in output and len(calm) == 2 and killed == calm, output


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.more)])
def test_code_after_a_block_that_a_loss_cuts_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The other rank waits in the sum. Regression: nothing said that this code is not run again."""
    _, calm = run(tmp_path / "calm", "naive", "logged", monkeypatch)
    output, ended = run(tmp_path / "cut", "naive", "logged", monkeypatch, KILL=f"{rank}:5")
    assert "1 fault, 0 steps lost" in output and len(ended) == 2 and ended == calm, output
    assert re.search(r"code after the block of step 5 was cut off \(logged.py:30\) and is not run", output), (
        output
    )
    output, ended = run(tmp_path / "whole", "naive", "logged", monkeypatch, KILL=f"{rank}:4")
    assert "1 fault, 0 steps lost" in output and "cut off" not in output and ended == calm, output


def test_a_change_that_a_loss_would_cut_off_is_refused_in_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the next inputs had another size after a kill, with exit code 0 and a warning only."""
    output, ended = run(tmp_path, "naive", "resized", monkeypatch, code=Exit.BAD_INPUT)
    said = r"changes the training \(kept\['size'\]\) after a collective \(dist.broadcast\(\)"
    assert re.search(said, output) and not ended, output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
def test_a_generator_of_a_game_that_begins_again_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """It draws only where a game ends. Regression: the next game of a replacement was another one, exit code 0."""
    output, ended = refused_after(fault, tmp_path, "dealt", monkeypatch, kill="1:9", stop="6")
    said = (
        r"StepError: blocks draw from random generators that have begun again: games\['lines'\]\[0\].numbers"
    )
    assert re.search(said, output) and not ended, output


@pytest.mark.parametrize("form", ["kept", "replaced", pytest.param("shown", marks=pytest.mark.more)])
def test_a_generator_that_the_script_keeps_or_does_not_train_with_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A kill before any game has ended, and two later ones."""
    _, calm = run(tmp_path / "calm", "naive", "dealt", monkeypatch, FORM=form)
    output, killed = run(tmp_path / "killed", "naive", "dealt", monkeypatch, FORM=form, KILL="0:1,1:6,0:9")
    assert "3 faults, 0 steps lost" in output and len(calm) == 2 and killed == calm, output
    assert ("have begun again: games['lines'][0].numbers" in output) == (form == "shown"), output


@pytest.mark.parametrize("kill", ["1:2", pytest.param("0:7,1:7", marks=pytest.mark.more)])
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("weights", "the code before this loop over steps has run again and has changed prototypes.weight"),
        (
            "assigned",
            r"the updates depend on assigned, which the code before the loop .* sets \(clustered.py:",
        ),
    ],
)
def test_a_clustering_that_a_new_process_makes_with_other_weights_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str, kill: str
) -> None:
    """Regression: the run ended with other weights, exit code 0."""
    output, ended = run(
        tmp_path, "naive", "clustered", monkeypatch, code=Exit.BAD_INPUT, PLACE=place, KILL=kill
    )
    assert re.search(rf"StepError: step {kill[-1]}: .*{said}", output) and not ended, output


@pytest.mark.more
@pytest.mark.parametrize("kill", ["1:5,0:10", "0:5,1:5", "0:7,1:7"])
def test_a_clustering_at_the_begin_of_epochs_is_exact_after_any_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kill: str
) -> None:
    """The epochs begin at steps 0, 5 and 10."""
    _, calm = run(tmp_path / "calm", "adapted", "clustered", monkeypatch)
    output, killed = run(tmp_path / "killed", "adapted", "clustered", monkeypatch, KILL=kill)
    assert "2 faults, 0 steps lost" in output and killed == calm, output


def test_a_count_that_decides_about_evaluations_alone_may_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the search took the batch of the evaluation for that of the loss, and the run ended."""
    _, calm = run(tmp_path / "calm", "naive", "validated", monkeypatch)
    output, killed = run(tmp_path / "killed", "naive", "validated", monkeypatch, KILL="1:4")
    assert "1 fault, 0 steps lost" in output and len(calm) == 2 and killed == calm, output
    assert "depend on" not in output, "a false alarm"


def test_a_variable_in_the_loss_that_a_resumed_job_does_not_have_ends_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks begin with the same variables, so no comparison of ranks shows it. Regression: other weights."""
    run(tmp_path, "naive", "annealed", monkeypatch, code=Exit.REQUEUE, STOP="1")
    output, ended = run(tmp_path, "naive", "annealed", monkeypatch, code=Exit.BAD_INPUT)
    said = (
        r"the updates depend on seen = 0, as at the first step of the job; at the step before: seen = [12]\."
    )
    assert not ended and re.search(f"StepError: {said}", output), output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
def test_an_early_stop_that_a_new_process_counts_from_the_start_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Regression: the training took epochs more and had other weights, exit code 0."""
    output, ended = refused_after(fault, tmp_path, "patience", monkeypatch, kill="1:12", stop="12")
    said = {
        "kill": r"the updates depend on variables of the script \(here patience.best = [0-9.]*",
        "stop": r"the updates depend on patience.best = inf.*, as at the first step of the job; at the step before: ",
    }
    assert not ended and re.search(f"StepError: .*{said[fault]}", output), output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
def test_a_best_result_that_begins_as_none_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Regression: None counted as a value of the session's state, because a session without a scaler has it as well.

    The learning rate was halved at other epochs, exit code 0.
    """
    output, ended = refused_after(fault, tmp_path, "plateau", monkeypatch, kill="1:10", stop="10")
    said = {
        "kill": r"the updates depend on variables of the script \(here best = ",
        "stop": "the updates depend on best = 'None', as at the first step of the job; at the step before: best = ",
    }
    assert not ended and re.search(f"StepError: .*{said[fault]}", output), output


def test_a_variable_that_only_some_steps_set_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the search took a write in a branch for one of every step: other weights, exit code 0."""
    output, _ = run(tmp_path / "calm", "naive", "milestones", monkeypatch)
    assert "warning" not in output and "depend on" not in output, "the steps may set it by their number"
    output, ended = run(
        tmp_path / "killed", "naive", "milestones", monkeypatch, code=Exit.BAD_INPUT, KILL="1:5"
    )
    said = r"the updates depend on variables of the script \(here weight = (0.25|1.0) \(milestones.py:\d+\)\), and not"
    assert re.search(f"StepError: step 5: {said}", output) and not ended, output
    run(tmp_path / "stopped", "naive", "milestones", monkeypatch, code=Exit.REQUEUE, STOP="6")
    output, ended = run(tmp_path / "stopped", "naive", "milestones", monkeypatch, code=Exit.BAD_INPUT)
    said = "the updates depend on weight = 1.0, as at the first step of the job; at the step before: weight = 0.14"
    assert f"StepError: {said}" in output and not ended, output


def test_a_schedule_that_the_check_of_the_block_advances_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the rate was two steps ahead in the whole training, exit code 0."""
    output, ended = run(tmp_path, "naive", "scheduled", monkeypatch, code=Exit.BAD_INPUT, PLACE="block")
    said = r"schedule.count \(was 2.0, then 3.0\), .*\(lr of group 0 of optimizer 'default' differ\)"
    assert re.search(f"ImpureBlockError: step 0: .*{said}", output) and not ended, output


def test_a_schedule_that_the_session_does_not_have_is_refused_at_its_first_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a resumed job had the rates of a job that began there, exit code 0 and no word."""
    output, ended = run(tmp_path, "naive", "unscheduled", monkeypatch, code=Exit.BAD_INPUT)
    said = "step 5: the StepLR of optimizer 'default' has moved and is not part of the session"
    assert f"UsageError: {said}" in output and not ended, output
    assert "next: session(scheduler=...) on all ranks" in output, output


@pytest.mark.parametrize(
    ("place", "name", "first"),
    [
        pytest.param("behind", "schedule.count", "0.0", marks=pytest.mark.more),
        pytest.param("average", "momenta", "'a generator that has not begun'", marks=pytest.mark.more),
        ("closure", "calls of warmup()", "0.0"),
        pytest.param("module", "rates.count", "0.0", marks=pytest.mark.more),
    ],
)
def test_an_object_that_a_resumed_job_does_not_have_ends_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, first: str
) -> None:
    """Regression: the schedule, or the momentum of an average, began again without a word, exit code 0."""
    run(tmp_path, "naive", "scheduled", monkeypatch, code=Exit.REQUEUE, PLACE=place, STOP="3")
    output, ended = run(tmp_path, "naive", "scheduled", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    said = f"the updates depend on {name} = {first}, as at the first step of the job; at the step before: {name} = "
    assert f"StepError: {said}" in output and not ended, output


@pytest.mark.more
def test_a_count_in_an_attribute_of_an_optimizer_continues_in_a_resumed_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session keeps the plain attributes of its optimizers that have changed."""
    _, calm = run(tmp_path / "calm", "naive", "scheduled", monkeypatch, PLACE="optimizer")
    where = tmp_path / "stopped"
    run(where, "naive", "scheduled", monkeypatch, code=Exit.REQUEUE, PLACE="optimizer", STOP="3")
    output, resumed = run(where, "naive", "scheduled", monkeypatch, PLACE="optimizer", KILL="0:6")
    assert "resumed at step" in output and len(calm) == 2 and resumed == calm, output


def test_a_count_that_begins_at_an_epoch_of_the_scripts_own_file_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the count was neither at its first value nor at the right one: other weights, exit code 0."""
    run(tmp_path, "naive", "recounted", monkeypatch, code=Exit.REQUEUE, STOP="8")
    output, ended = run(tmp_path, "naive", "recounted", monkeypatch, code=Exit.BAD_INPUT)
    assert re.search(
        r"StepError: the updates depend on count = 5; at the step before: count = [78]\.", output
    ), output
    assert not ended


@pytest.mark.parametrize(
    "place", ["kept", *(pytest.param(each, marks=pytest.mark.more) for each in ("data", "copy", "sub"))]
)
def test_an_average_that_warms_up_with_a_count_of_its_own_ends_a_resumed_job_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Regression: the average moved as at the start of the job: other weights, exit code 0."""
    run(tmp_path, "naive", "averaged", monkeypatch, code=Exit.REQUEUE, PLACE=place, STOP="4")
    output, ended = run(tmp_path, "naive", "averaged", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    assert "StepError: the updates depend on average.updates = 0, as at the first step" in output, output
    assert not ended


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("list", "4 items with checksum"),
        pytest.param("arrays", "4 items with checksum", marks=pytest.mark.more),
        pytest.param("large", "a tensor with checksum", marks=pytest.mark.more),
    ],
)
def test_a_bank_that_is_not_read_at_each_update_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    """Regression: a replacement, and a resumed job, began with an empty bank without a word, exit code 0."""
    output, ended = run(
        tmp_path / "killed", "naive", "banked", monkeypatch, code=Exit.BAD_INPUT, PLACE=place, KILL="1:5"
    )
    assert output.count("the updates depend on bank (banked.py:") == 1 and not ended, output
    said = rf"StepError: the updates depend on bank = '{text} \w+', as at the first step of the job"
    assert re.search(said, output), output
    where = tmp_path / "stopped"
    run(where, "naive", "banked", monkeypatch, code=Exit.REQUEUE, PLACE=place, STOP="3")
    output, ended = run(where, "naive", "banked", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    assert re.search(said, output) and not ended, output


@pytest.mark.parametrize(
    ("place", "name", "step"),
    [
        ("late", 'kept["mean"]', 6),
        pytest.param("dict", 'kept["mean"]', 0, marks=pytest.mark.more),
        pytest.param("object", "mean.mean", 0, marks=pytest.mark.more),
        pytest.param("tensor", "moved", 0, marks=pytest.mark.more),
        pytest.param("entry", 's.state["entry"]', 0, marks=pytest.mark.more),
    ],
)
def test_a_value_of_one_rank_in_the_state_of_all_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, step: int
) -> None:
    """Regression: a replacement continued with the value of its peer, with one warning and exit code 0."""
    output, ended = run(tmp_path, "naive", "sloped", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    said = "the updates depend on values in session(state={...}) that are not the same on all ranks"
    assert re.search(f"StepError: step {step}: {re.escape(said)} .*{re.escape(name)} = ", output), output
    assert "keep a value of one rank in s.own" in output and not ended, output


@pytest.mark.parametrize(
    ("place", "name", "first"),
    [
        ("temperature", "raw.temperature", "1.0"),
        pytest.param("dropout", "raw.drop.p", "0.4", marks=pytest.mark.more),
    ],
)
def test_a_plain_attribute_of_a_module_that_a_new_process_does_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, name: str, first: str
) -> None:
    """Regression: the attribute began again without a word, exit code 0."""
    output, ended = run(
        tmp_path / "killed", "naive", "tempered", monkeypatch, code=Exit.BAD_INPUT, PLACE=place, KILL="1:5"
    )
    said = (
        rf"the updates depend on variables of the script \(here .*{name} = .* \(tempered.py:\d+\)\), and not"
    )
    assert re.search(f"StepError: step 5: {said}", output) and not ended, output
    where = tmp_path / "stopped"
    run(where, "naive", "tempered", monkeypatch, code=Exit.REQUEUE, PLACE=place, STOP="3")
    output, ended = run(where, "naive", "tempered", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    assert f"StepError: the updates depend on {name} = {first}, as at the first step of the job" in output, (
        output
    )
    assert not ended


def test_an_attribute_that_the_state_of_its_object_leaves_out_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: all attributes of an object in state= counted as kept: other weights, exit code 0."""
    output, ended = run(tmp_path / "killed", "naive", "partial", monkeypatch, code=Exit.BAD_INPUT, KILL="1:5")
    said = r"the updates depend on variables of the script \(here progress.weight = 1.0 "
    assert re.search(f"StepError: step 5: {said}", output) and not ended, output
    run(tmp_path / "stopped", "naive", "partial", monkeypatch, code=Exit.REQUEUE, STOP="3")
    output, ended = run(tmp_path / "stopped", "naive", "partial", monkeypatch, code=Exit.BAD_INPUT)
    assert "StepError: the updates depend on progress.weight = 1.0, as at the first" in output, output
    assert not ended


def test_an_attribute_that_the_state_of_its_object_has_is_no_other_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, calm = run(tmp_path / "calm", "naive", "partial", monkeypatch, PLACE="kept")
    output, killed = run(tmp_path / "killed", "naive", "partial", monkeypatch, PLACE="kept", KILL="1:5")
    assert "1 fault, 0 steps lost" in output and len(calm) == 2 and killed == calm, output
    assert "depend on" not in output, "a false alarm"


@pytest.mark.parametrize(
    ("name", "kill", "said"),
    [
        (
            "positioned",
            "1:5",
            r"tokens.position = \d+, .*, as at the first step of the job; .*: tokens.position = \d+, ",
        ),
        (
            "rolled",
            "1:6",
            "seen = 'a tensor of zeros', .*; at the step before: seen = 'a tensor with checksum ",
        ),
    ],
)
def test_a_variable_of_one_rank_that_a_new_process_does_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kill: str, said: str
) -> None:
    """Regression: the ranks differ in the variable, so nothing was refused: other weights, exit code 0."""
    output, ended = run(tmp_path / "killed", "naive", name, monkeypatch, code=Exit.BAD_INPUT, KILL=kill)
    assert re.search(f"StepError: the updates depend on {said}", output) and not ended, output
    run(tmp_path / "stopped", "naive", name, monkeypatch, code=Exit.REQUEUE, STOP="5")
    output, ended = run(tmp_path / "stopped", "naive", name, monkeypatch, code=Exit.BAD_INPUT)
    assert re.search(f"StepError: the updates depend on {said}", output) and not ended, output


@pytest.mark.parametrize("fault", ["kill", pytest.param("stop", marks=pytest.mark.more)])
def test_a_variable_that_code_before_a_block_begins_again_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Its value at the update is neither the first one nor the newest one. Regression: other weights, exit code 0."""
    output, ended = refused_after(fault, tmp_path, "played", monkeypatch, kill="1:8", stop="7")
    said = "StepError: the updates depend on place = 'a tensor .*; at the step before: place = 'a tensor "
    assert re.search(said, output) and not ended, output


def test_a_variable_that_an_earlier_step_sets_is_missing_in_a_replacement_which_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, ended = run(tmp_path, "naive", "played", monkeypatch, code=Exit.FAILED, KILL="1:9")
    assert "NameError: name 'seen' is not defined" in output and not ended, output
    assert "this process has joined or resumed at step 9, and has not run the earlier steps" in output, output


@pytest.mark.parametrize("place", ["tensor", pytest.param("objects", marks=pytest.mark.more)])
def test_a_sum_that_only_the_first_block_makes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Regression: the check of the block made the sum without peers, and the training used it: no word, exit code 0."""
    output, ended = run(tmp_path, "naive", "cached_sum", monkeypatch, code=Exit.BAD_INPUT, PLACE=place)
    said = r"ImpureBlockError: step 0: run again on the same batch, .* \(the collectives that the script makes differ\)"
    assert re.search(said, output) and not ended, output


def test_a_sum_of_each_block_that_the_first_one_keeps_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the check of the block kept the sum without peers, another one on each rank: exit code 0."""
    output, ended = run(tmp_path, "naive", "cached_sum", monkeypatch, code=Exit.BAD_INPUT, PLACE="each")
    said = "ImpureBlockError: step 0: the block sets criterion.divisor once, from a collective, and its check"
    assert said in output and not ended, output


def test_a_job_of_one_process_may_sum_in_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: one of the two runs that are compared has no peers, so its sums were taken for other sums."""
    output, ended = run(tmp_path, "naive", "cached_sum", monkeypatch, ranks=1, PLACE="tensor")
    assert len(ended) == 1, output


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("named", r'named\["position"\] = 16, .*; at the step before: .*named\["position"\] = \d+'),
        pytest.param(
            "pair",
            r"pair = '\(0, 16\)', .*; at the step before: .*pair = '\(0, \d+\)'",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_position_in_a_new_object_that_a_new_process_does_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, said: str
) -> None:
    """Regression: an element of a dict that each step makes, and a pair, were no variables: exit code 0."""
    output, ended = run(
        tmp_path, "naive", "rewound", monkeypatch, code=Exit.BAD_INPUT, KILL="1:5", PLACE=place
    )
    assert re.search(f"StepError: the updates depend on .*{said}", output) and not ended, output


def test_a_count_that_no_rank_has_any_more_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: other weights, exit code 0.

    The replacement makes other collectives in its block than its peer. gloo ends the peer for this, so no rank is
    left with which the replacement could be compared.
    """
    output, ended = run(tmp_path, "naive", "lazy", monkeypatch, code=Exit.BAD_INPUT, KILL="1:5")
    assert output.count("the updates depend on number (lazy.py") == 1 and not ended, output
    said = "the updates depend on number = 0, as at the first step of the job; at the step before: number = 4"
    assert f"StepError: {said}" in output, output


def test_a_variable_that_a_replacement_does_not_have_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the block found an empty list, made no backward pass, and both ranks waited for different things."""
    output, ended = run(tmp_path, "naive", "ahead", monkeypatch, code=Exit.BAD_INPUT, KILL="1:4")
    said = "StepError: the block uses 'batches', to which this process has not assigned a value"
    assert said in output and "saved step 4 (last-gasp)" in output and not ended, output


def test_what_a_block_leaves_is_named_under_fsdp2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the search for the cause ended the script with "Trying to resize storage that is not resizable"."""
    output, ended = run(tmp_path, "naive", "running", monkeypatch, code=Exit.BAD_INPUT)
    said = r"running.py:\d+ uses the float32 \[\] that running.py:\d+ wrote in the run before"
    assert re.search(f"ImpureBlockError: .*: {said}", output) and not ended, output


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ("", r"StepError: the updates depend on metric = 'a meter .*', as at the first step of the job"),
        ("state", r"UsageError: state=\{'metric': ...\}: the state_dict\(\) of this Metric is empty"),
        pytest.param(
            "kept",
            r"StepError: step 1: the updates depend on values in session\(state=\{...\}\) that are not the same",
            marks=pytest.mark.more,
        ),
    ],
)
def test_a_metric_of_a_library_on_which_a_learning_rate_depends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, said: str
) -> None:
    """Regression: the mean of an epoch lacked the steps of the lost rank: other weights, exit code 0."""
    output, ended = run(
        tmp_path, "naive", "metered", monkeypatch, code=Exit.BAD_INPUT, KILL="1:15", FORM=form
    )
    assert re.search(said, output) and not ended, output


def test_an_array_of_losses_that_decides_later_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a replacement drew other noise levels, because it had no losses: other weights, exit code 0."""
    output, ended = run(tmp_path, "naive", "resampled", monkeypatch, code=Exit.BAD_INPUT, KILL="1:5")
    said = r"step 0: run again on the same batch, the block .*levels.(losses|counts), levels.(losses|counts)"
    assert re.search(f"ImpureBlockError: {said}", output), output
    assert not ended


def test_a_helper_that_ends_the_loop_by_its_turns_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the check of the first block took two turns, and the last two steps were left out without a word."""
    output, ended = run(tmp_path, "naive", "log_every", monkeypatch, code=Exit.BAD_INPUT)
    said = (
        r"a generator around s.steps\(...\) has ended the loop at step 7, by i and iterations \(log_every.py:"
    )
    assert re.search(f"StepError: {said}", output) and not ended, output
    output, ended = run(tmp_path, "naive", "log_every", monkeypatch, code=Exit.BAD_INPUT, KILL="1:8")
    assert "resumed at step 7 " in output and not ended, output


@pytest.mark.parametrize(
    ("form", "said", "code"),
    [
        (
            "optimizer",
            r"UsageError: a SGD that the session does not know updates state.rows.weight",
            Exit.BAD_INPUT,
        ),
        (
            "state",
            r"holds a wrong copy of the state: state.rows.bias\[0:5\]: .* which need other names",
            Exit.FAILED,
        ),
        (
            "model",
            r"holds a wrong copy of the state: rows.bias\[0:5\]: .* which need other names",
            Exit.FAILED,
        ),
    ],
)
def test_rows_of_one_rank_are_never_given_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str, said: str, code: Exit
) -> None:
    """Regression: a replacement got the rows of its peer, and a resumed job lost the momenta: exit code 0."""
    monkeypatch.setenv("FORM", form)
    output, ended = run(tmp_path, "naive", "rows", monkeypatch, code=code, KILL="1:5")
    assert re.search(said, output) and not ended and "resumed" not in output, output
    assert " in forward of step 5" not in output, "the ranks differ from the first update on"


def test_a_flag_with_which_a_new_process_sets_weights_again_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a resumed job set trained weights from its first batch again: other weights, exit code 0."""
    monkeypatch.setenv("FORM", "attribute")
    run(tmp_path, "naive", "flagged", monkeypatch, code=Exit.REQUEUE, STOP="3")
    output, ended = run(tmp_path, "naive", "flagged", monkeypatch, code=Exit.BAD_INPUT)
    said = r"ImpureBlockError: step \d: this process continues the job, .* changed the trained weight 1.shift"
    assert re.search(said, output) and "in a buffer of the module" in output and not ended, output
    output, ended = run(tmp_path / "killed", "naive", "flagged", monkeypatch, code=Exit.BAD_INPUT, KILL="1:4")
    assert re.search(said, output) and not ended, output


def test_a_flag_in_a_buffer_lets_a_layer_set_its_weights_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORM", "buffer")
    _, calm = run(tmp_path / "calm", "naive", "flagged", monkeypatch)
    output, killed = run(tmp_path / "killed", "naive", "flagged", monkeypatch, KILL="0:0,1:4")
    assert "2 faults, 0 steps lost" in output and killed == calm and len(calm) == 2, output
    run(tmp_path / "stopped", "naive", "flagged", monkeypatch, code=Exit.REQUEUE, STOP="3")
    output, resumed = run(tmp_path / "stopped", "naive", "flagged", monkeypatch)
    assert re.search("resumed at step [45] ", output) and resumed == calm, output


def changed_lines(name: str) -> int:
    """Return how many lines of the adapted script differ from the plain one, without regard to indentation."""

    def lines(kind: str) -> list[str]:
        text = (HERE / kind / f"{name}.py").read_text().partition('"""\n')[2]
        return [line.strip() for line in text.splitlines() if line.strip() and "beat(" not in line]

    before = lines("plain")
    new = 0
    for line in lines("adapted"):
        if line in before:
            before.remove(line)
        else:
            new += 1
    return new


def test_the_manual_lists_them_all() -> None:
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\| (\d+) \|", TABLE.read_text(), re.MULTILINE)
    assert sorted((name, int(number)) for name, number in rows) == [(n, changed_lines(n)) for n in NAMES]


@pytest.mark.parametrize("form", ["function", "meter", "inline"])
def test_a_sum_over_an_epoch_that_moves_a_schedule_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """Regression: the loop over epochs sets the sum, so the search left it out: other learning rates, exit code 0."""
    monkeypatch.setenv("FORM", form)
    output, ended = run(tmp_path, "naive", "summed", monkeypatch, code=Exit.BAD_INPUT, KILL="1:8")
    name = {"function": r'sums\["loss"\]', "meter": "meter.sum", "inline": "total"}[form]
    assert re.search(f"StepError: the updates depend on {name} = .*, as at the first step", output), output
    assert not ended


def test_a_sum_over_an_epoch_that_is_attached_moves_a_schedule_as_without_a_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEPT", "1")
    output, calm = run(tmp_path / "calm", "naive", "summed", monkeypatch)
    assert "depend on" not in output, "a false alarm"
    output, killed = run(tmp_path / "killed", "naive", "summed", monkeypatch, KILL="1:8,0:17")
    assert "2 faults, 0 steps lost" in output and killed == calm and len(calm) == 2, output


def test_a_replacement_at_the_begin_of_an_epoch_has_the_sum_of_its_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epoch sets the sum to zero on all ranks, so nothing is refused."""
    _, calm = run(tmp_path / "calm", "naive", "summed", monkeypatch)
    output, killed = run(tmp_path / "killed", "naive", "summed", monkeypatch, KILL="1:10")
    assert "1 fault, 0 steps lost" in output and killed == calm and len(calm) == 2, output
