"""MindSpore without ``holdfast run`` and without msrun: the shell loop with RANK_ID, and mpirun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.runtime.node.spawn import free_port
from holdfast.store.manage.checkpoint_root import Root
from tests.frameworks.launched import BOUND_S

JOB = str(Path(__file__).with_name("job.py"))
MPIRUN = shutil.which("mpirun")
WORLD = 2


def run_sh(rank: int) -> dict[str, str]:
    """Return the variables that the loop of a ``run.sh`` sets for one rank."""
    return {"RANK_ID": str(rank), "RANK_SIZE": str(WORLD), "DEVICE_ID": str(rank)}


def mpi(rank: int) -> dict[str, str]:
    """Return the variables that mpirun sets for one rank."""
    names = {"RANK": rank, "SIZE": WORLD, "LOCAL_RANK": rank, "LOCAL_SIZE": WORLD}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()}


def variables(root: Path, die: str) -> dict[str, str]:
    """Return the common variables of all ranks of one start.

    Its own port distinguishes it from other jobs of this user.
    """
    return {**os.environ, "JOB_CHECKPOINT": str(root), "JOB_DIE": die, "MASTER_PORT": str(free_port())}


def start(where: Path, kind: str, die: str = "", root: Path | None = None) -> list[tuple[int, str]]:
    """Start all ranks, each in its own directory, as such a loop does. Return exit code and output of each."""
    env = variables(root or where / "ckpts", die)
    with ExitStack() as stack:
        ranks, outputs = [], []
        for rank in range(WORLD):
            folder = where / f"device{rank}"
            folder.mkdir(parents=True, exist_ok=True)
            outputs.append(folder / "out.log")
            file = stack.enter_context(outputs[-1].open("wb"))
            own = {"run.sh": run_sh, "mpirun": mpi}[kind](rank)
            command = [sys.executable, JOB]
            ranks.append(
                subprocess.Popen(
                    command, env={**env, **own}, cwd=folder, stdout=file, stderr=subprocess.STDOUT
                )
            )
        try:
            return [(rank.wait(BOUND_S), out.read_text()) for rank, out in zip(ranks, outputs, strict=True)]
        finally:
            for one in ranks:
                one.kill()
                one.wait()


def digests(said: list[str]) -> set[str]:
    """Return the digests of all ranks.

    Ranks have different samples, so a single value shows that they trained together.
    """
    found = [match for text in said for match in re.findall(r"digest (\w+)", text)]
    assert len(found) == WORLD, said
    return set(found)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the digest of a loop without faults."""
    ended = start(tmp_path_factory.mktemp("undisturbed"), "run.sh")
    assert [code for code, _ in ended] == [0, 0], ended
    found = digests([text for _, text in ended])
    assert len(found) == 1
    return found


@pytest.mark.smoke
def test_a_loop_saves_when_a_rank_dies_and_the_next_one_resumes(
    tmp_path: Path, undisturbed: set[str]
) -> None:
    first = start(tmp_path, "run.sh", die="0@9")
    assert first[0][0] == -9 and first[1][0] > 0, first
    assert Root(tmp_path / "ckpts").newest_valid().require().step == 9
    second = start(tmp_path, "run.sh")
    assert [code for code, _ in second] == [0, 0], second
    assert "step 9\n" not in second[0][1] and "step 10\n" in second[0][1]
    assert digests([text for _, text in second]) == undisturbed


def test_ranks_with_the_variables_of_mpirun_train_together(tmp_path: Path, undisturbed: set[str]) -> None:
    ended = start(tmp_path, "mpirun")
    assert [code for code, _ in ended] == [0, 0], ended
    assert digests([text for _, text in ended]) == undisturbed


@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_mpirun_itself(tmp_path: Path, undisturbed: set[str]) -> None:
    assert MPIRUN is not None
    env = variables(tmp_path / "ckpts", "")
    env.pop("MASTER_PORT")
    words = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    done = subprocess.run(
        [MPIRUN, *words, "-n", str(WORLD), sys.executable, JOB], env=env, cwd=tmp_path, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert digests([done.stdout]) == undisturbed


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK_ID": "0"}, ("UsageError: RANK_ID=0", "RANK_SIZE is not set")),
        ({"RANK": "0", "WORLD_SIZE": "1", **run_sh(0)}, ("WORLD_SIZE=1", "RANK_SIZE=2")),
    ],
    ids=["half", "contradiction"],
)
def test_one_of_several_never_trains_alone(
    tmp_path: Path, env: dict[str, str], words: tuple[str, ...]
) -> None:
    done = subprocess.run(
        [sys.executable, JOB], env={**variables(tmp_path / "ckpts", ""), **env}, cwd=tmp_path, capture_output=True,
        text=True, timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "step 1\n" not in done.stdout
    assert all(word in done.stderr for word in words), done.stderr


def test_ranks_that_would_save_to_different_places_are_refused(tmp_path: Path) -> None:
    """A relative path is a different place in each directory of the loop."""
    ended = start(tmp_path, "run.sh", root=Path("ckpts"))
    assert all(code != 0 for code, _ in ended), ended
    assert any("no checkpoint would be complete" in text for _, text in ended), ended
