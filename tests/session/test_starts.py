"""Scripts that neither ``holdfast run`` nor torchrun has started: mpirun's variables, and starts that are refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.runtime.node.spawn import free_port
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import BOUND_S, ROOT, TORCHRUN
from tests.session.test_jobs import STEPS, Result

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("mpi_job.py"))
ON_TWO_NODES = str(Path(__file__).with_name("job.py"))
MPIRUN = shutil.which("mpirun")
RANKS = 2
ALONE = """\
import torch, holdfast
model = torch.nn.Linear(2, 2)
with holdfast.session(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), checkpoint="ckpts") as s:
    print("trains")
"""


def variables() -> dict[str, str]:
    """Return the common variables of all ranks of one start."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port())}  # fmt: skip


def mpi(rank: int, size: int) -> dict[str, str]:
    """Return the variables that mpirun sets for one rank of one node."""
    names = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"OMPI_COMM_WORLD_{name}": str(number) for name, number in names.items()}


def start(where: Path, *arguments: str) -> list[tuple[int, str]]:
    """Start both ranks with mpirun's variables set by hand. Return exit code and output of each."""
    env = variables()
    command = [sys.executable, JOB, "--steps", str(STEPS), "--result", str(where / "result"), *arguments]
    outputs = [where / f"out-{rank}.log" for rank in range(RANKS)]
    with ExitStack() as stack:
        files = [stack.enter_context(path.open("wb")) for path in outputs]
        ranks = [
            subprocess.Popen(
                command, env={**env, **mpi(rank, RANKS)}, cwd=where, stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank, file in enumerate(files)
        ]  # fmt: skip
        try:
            return [(rank.wait(BOUND_S), out.read_text()) for rank, out in zip(ranks, outputs, strict=True)]
        finally:
            for one in ranks:
                one.kill()
                one.wait()


@pytest.mark.more
def test_ranks_of_mpirun_save_when_one_dies_and_the_next_start_resumes(
    tmp_path: Path, bare: Callable[..., Result]
) -> None:
    arguments = ("--layout", "ddp", "--checkpoint", str(tmp_path / "ckpts"), "--die", "0@5")
    first = start(tmp_path, *arguments)
    assert first[0][0] == -9 and first[1][0] > 0, first
    (saved,) = Root(tmp_path / "ckpts").list()
    assert saved.valid and saved.step == 5, first
    second = start(tmp_path, *arguments)
    assert [code for code, _ in second] == [0, 0], second
    assert "resumed at step 5" in second[0][1]
    assert Result(0, "", tmp_path / "result").digests == bare("ddp", RANKS).digests


@pytest.mark.more
@pytest.mark.skipif(MPIRUN is None, reason="needs mpirun")
def test_mpirun_itself(tmp_path: Path, bare: Callable[..., Result]) -> None:
    assert MPIRUN is not None
    words = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    done = subprocess.run(
        [MPIRUN, *words, "-n", str(RANKS), sys.executable, JOB, "--layout", "ddp", "--steps", str(STEPS),
         "--checkpoint", str(tmp_path / "ckpts"), "--result", str(tmp_path / "result")],
        env=variables(), cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BOUND_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert Result(0, "", tmp_path / "result").digests == bare("ddp", RANKS).digests


def start_two_nodes(where: Path, *arguments: str) -> tuple[list[int], str]:
    """Start two torchruns, one per node of two ranks, on this machine.

    Return their exit codes and the ranks' output.
    """
    port, path = free_port(), where / "torchrun.log"
    with path.open("wb") as file:
        nodes = [
            subprocess.Popen(
                [TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "2", "--master-addr",
                 "127.0.0.1", "--master-port", str(port), "--max-restarts", "0", ON_TWO_NODES, "--steps", str(STEPS),
                 "--result", str(where / "result"), *arguments],
                env=variables(), cwd=where, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
            )
            for node in range(2)
        ]  # fmt: skip
        try:
            codes = [node.wait(BOUND_S) for node in nodes]
        finally:
            for one in nodes:
                one.terminate()
                one.wait()
    return codes, path.read_text(errors="replace")


@pytest.mark.more
def test_torchrun_over_two_nodes_saves_when_a_rank_dies_and_the_next_start_resumes(
    tmp_path: Path, bare: Callable[..., Result]
) -> None:
    arguments = ("--layout", "ddp", "--checkpoint", str(tmp_path / "ckpts"), "--die", "3@5")
    codes, said = start_two_nodes(tmp_path, *arguments)
    assert 0 not in codes, said
    (saved,) = Root(tmp_path / "ckpts").list()
    assert saved.valid and saved.step == 5, said
    assert saved.save_id is not None and saved.save_id.kind == "last-gasp"
    codes, said = start_two_nodes(tmp_path, *arguments)
    assert codes == [0, 0] and "resumed at step 5" in said, said
    assert Result(0, "", tmp_path / "result").digests == bare("ddp", 4).digests


@pytest.mark.parametrize(
    ("env", "words"),
    [
        pytest.param(
            mpi(5, 8),
            ("UsageError: 8 processes were started (OMPI_COMM_WORLD_RANK=5, OMPI_COMM_WORLD_SIZE=8)",),
            id="mpirun",
        ),
        pytest.param(
            {"RANK_ID": "5", "RANK_SIZE": "8"},
            ("RANK_ID=5, RANK_SIZE=8", "holdfast run"),
            id="run.sh",
            marks=pytest.mark.more,
        ),
        pytest.param(
            {"RANK_ID": "5"},
            ("UsageError: RANK_ID=5", "RANK_SIZE is not set"),
            id="half",
            marks=pytest.mark.more,
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1", **mpi(0, 8)},
            ("WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=8"),
            id="contradiction",
            marks=pytest.mark.more,
        ),
    ],
)
def test_one_of_eight_never_trains_alone(tmp_path: Path, env: dict[str, str], words: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE], env={**variables(), **env}, cwd=tmp_path, capture_output=True, text=True,
        timeout=BOUND_S, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "trains" not in done.stdout
    assert all(word in done.stderr for word in words), done.stderr
