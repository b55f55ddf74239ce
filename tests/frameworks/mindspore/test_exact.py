"""Typical trainings without a seed and with random operations: the right weights, or a refusal by name."""

from __future__ import annotations

import json
import os
import re
from itertools import chain
from pathlib import Path

import pytest

from tests.frameworks.launched import BOUND_S, Launched

pytestmark = pytest.mark.timeout(4 * BOUND_S)

JOB = str(Path(__file__).with_name("exact_job.py"))
RANDOM = ("crop", "shuffle", "names")


def flags(world: int, *more: str) -> tuple[str, ...]:
    return ("--framework", "mindspore", "--nproc-per-node", str(world), *more)


def digests(run: Launched, world: int = 2) -> set[str]:
    """Return the digests of all ranks. Fail if one is missing."""
    found = run.said(r"digest (\w+)")
    assert len(found) == world, run.output
    return set(found)


def samples(run: Launched) -> dict[int, list[int]]:
    """Return the samples that all ranks trained on, by step, from the last attempt that reached the step."""
    found: dict[tuple[int, str], list[int]] = {}
    for path in sorted(run.run.glob("attempt-*/rank-*.log")):
        for line in path.read_text().splitlines():
            if line.startswith("seen "):
                _, step, numbers = line.split(" ", 2)
                found[int(step), path.name] = json.loads(numbers)
    steps: dict[int, list[int]] = {}
    for (at, _), trained in sorted(found.items()):
        steps.setdefault(at, []).extend(trained)
    return steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the digest of a run without faults, which is equal on both ranks."""
    with Launched(tmp_path_factory.mktemp("undisturbed"), *flags(2), JOB, *RANDOM) as run:
        assert run.wait() == 0, run.output
        found = digests(run)
        each = samples(run)
    assert len(found) == 1
    assert [len(numbers) for numbers in each.values()] == [8] * 16
    assert sorted(chain(*(each[step] for step in range(1, 9)))) == list(range(64))
    return found


@pytest.mark.parametrize("more", [(), ("--on-fault", "restart")])
def test_random_augmentation_is_the_same_after_a_fault(
    tmp_path: Path, undisturbed: set[str], more: tuple[str, ...]
) -> None:
    with Launched(tmp_path, *flags(2, *more), JOB, *RANDOM, env={"JOB_DIE": "1@11"}) as run:
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed
        assert [e.data["action"] for e in run.events("verdict")] == [
            "restart_last_gasp" if more else "replace"
        ]


def test_and_in_the_next_run(tmp_path: Path, undisturbed: set[str]) -> None:
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts")}
    with Launched(tmp_path, *flags(2), JOB, *RANDOM, env={**env, "JOB_TERM": "0@11"}) as run:
        assert run.wait() == 75, run.output
    with Launched(tmp_path, *flags(2), JOB, *RANDOM, env=env, name="u") as run:
        assert run.wait() == 0, run.output
        assert "step 11\n" not in run.logs()
        assert digests(run) == undisturbed


def test_fewer_processors_in_the_next_run_are_named(tmp_path: Path) -> None:
    """As mpirun gives a rank one of them: MindSpore's kernels then round differently."""
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts")}
    allowed = os.sched_getaffinity(0)
    with Launched(tmp_path, *flags(2), JOB, env={**env, "JOB_TERM": "0@3"}) as run:
        assert run.wait() == 75, run.output
        assert "this rank may use" not in run.logs()
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with Launched(tmp_path, *flags(2), JOB, env=env, name="u") as run:
            assert run.wait() == 0, run.output
    finally:
        os.sched_setaffinity(0, allowed)
    expected = f"this rank may use 1 processor, and the rank that wrote the state {len(allowed)};"
    assert (expected in run.logs()) == (len(allowed) > 1)


def test_a_python_function_that_draws_is_refused_by_name(tmp_path: Path) -> None:
    with Launched(tmp_path, *flags(2), JOB, "draws") as run:
        assert run.wait() == 3, run.output
        assert "draws from the generators of `random` or `numpy.random`" in run.output
        assert "<lambda>" in run.output


def test_other_ranks_go_on_at_the_right_sample(tmp_path: Path) -> None:
    """4 ranks exit after 3 steps, and 2 ranks do the rest of the epoch."""
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts"), "JOB_BATCH": "2"}
    with Launched(tmp_path, *flags(4), JOB, "crop", "names", env={**env, "JOB_TERM": "0@3"}) as run:
        assert run.wait() == 75, run.output
        before = samples(run)
        left = max(before)
    with Launched(tmp_path, *flags(2), JOB, "crop", "names", env=env, name="u") as run:
        assert run.wait() == 0, run.output
        after = samples(run)
    rest = (64 - 8 * left) // 4
    first = [numbers for step, numbers in sorted(after.items()) if step <= left + rest]
    assert sorted(chain(*before.values(), *first)) == list(range(64))
    assert max(after) == left + rest + 16  # the second epoch
    second = [numbers for step, numbers in sorted(after.items()) if step > left + rest]
    assert sorted(chain(*second)) == list(range(64))


def test_other_ranks_are_refused_where_nothing_says_which_samples_are_left(tmp_path: Path) -> None:
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts")}
    with Launched(tmp_path, *flags(2), JOB, *RANDOM, env={**env, "JOB_TERM": "0@3"}) as run:
        assert run.wait() == 75, run.output
    with Launched(tmp_path, *flags(1), JOB, *RANDOM, env=env, name="u") as run:
        assert run.wait() == 3, run.output
        assert "ShuffleDataset" in run.output


def test_ranks_that_begin_different_are_refused(tmp_path: Path) -> None:
    with Launched(tmp_path, *flags(2), JOB, "random", "crop") as run:
        assert run.wait() == 3, run.output
        assert "ranks 0, 1 begin with different values of" in run.output
        assert "parameter_broadcast=True" in run.output


def test_or_made_equal_where_the_script_says_so(tmp_path: Path) -> None:
    with Launched(tmp_path, *flags(2), JOB, "random", "crop", "broadcast") as run:
        assert run.wait() == 0, run.output
        assert len(digests(run)) == 1


def test_a_copy_that_changes_alone_is_found(tmp_path: Path) -> None:
    """The copy changes at the same step in each attempt.

    The run ends, and no checkpoint holds either of the two values.
    """
    with Launched(tmp_path, *flags(2, "--verify-every", "2"), JOB, "differ") as run:
        assert run.wait() == 1, run.output
        assert "holds a wrong copy of the state: 1.weight" in run.output
        assert not run.events("sealed")


def test_denormal_numbers_are_flushed_in_the_thread_of_the_script_as_in_mindspores(tmp_path: Path) -> None:
    """Without that, the bits of a small moment depend on the thread in which MindSpore runs the graph."""
    with Launched(tmp_path, *flags(2), str(Path(JOB).with_name("denormals_job.py"))) as run:
        assert run.wait() == 0, run.output
        found = run.said(r"kept before (.*)\n")
    assert len(found) == 2
    assert all(re.fullmatch(r"[1-9]\d*, in the session 0", each) for each in found), found
