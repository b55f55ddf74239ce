"""A table of launchers: the variables that each sets, and the resulting seat, or an error that names the variables."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from holdfast.core.launch_environment import (
    LAUNCHERS,
    LauncherVariables,
    ProcessPlace,
    is_told_of_others,
    seat_of,
)
from holdfast.errors import UsageError

Env = Mapping[str, str]


def mpi(rank: int, size: int, local_rank: int | None = None, local_size: int | None = None) -> dict[str, str]:
    """Return the variables of Open MPI's mpirun."""
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(size),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size if local_size is None else local_size),
        "PMIX_RANK": str(rank),
    }


def step(rank: int, tasks: int, local: int, node: int, per_node: str) -> dict[str, str]:
    """Return the variables that srun sets for a task of a step."""
    return {
        "SLURM_JOB_ID": "71", "SLURM_STEP_ID": "0", "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(tasks),
        "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_LOCALID": str(local), "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
    }  # fmt: skip


def torchrun(rank: int, size: int, local_rank: int, local_size: int, group: int = 0) -> dict[str, str]:
    """Return the variables of torchrun."""
    return {
        "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size),
        "GROUP_RANK": str(group), "GROUP_WORLD_SIZE": str(size // local_size), "TORCHELASTIC_RUN_ID": "none",
        "MASTER_ADDR": "host0", "MASTER_PORT": "29500",
    }  # fmt: skip


def cluster(kind: str, index: int, **places: list[str]) -> dict[str, str]:
    """Return the variable of TensorFlow."""
    return {"TF_CONFIG": json.dumps({"cluster": places, "task": {"type": kind, "index": index}})}


BATCH = {"SLURM_JOB_ID": "71", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "8",
         "SLURM_NNODES": "2"}  # fmt: skip
WORKERS = ["h0:1", "h0:2", "h1:1"]

PLACES: dict[str, tuple[Env, tuple[int, int, int, int]]] = {
    "nothing": ({}, (0, 1, 0, 1)),
    "empty words": ({"RANK": "", "WORLD_SIZE": ""}, (0, 1, 0, 1)),
    "torchrun, one node": (torchrun(3, 4, 3, 4), (3, 4, 3, 4)),
    "torchrun, two nodes": (torchrun(5, 8, 1, 4, group=1), (5, 8, 1, 4)),
    "env:// by hand": ({"RANK": "1", "WORLD_SIZE": "2"}, (1, 2, 1, 2)),
    "a size of one alone": ({"WORLD_SIZE": "1"}, (0, 1, 0, 1)),
    "local numbers alone": ({"LOCAL_RANK": "1", "DEVICE_ID": "3", "LOCAL_WORLD_SIZE": "4"}, (0, 1, 0, 1)),
    "run.sh": ({"RANK_ID": "5", "RANK_SIZE": "8", "DEVICE_ID": "5"}, (5, 8, 5, 8)),
    "msrun": (
        {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "MS_NODE_ID": "1", "RANK_ID": "1", "RANK_SIZE": "2"},
        (1, 2, 1, 2),
    ),
    "msrun without RANK_SIZE": ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "2", "RANK_ID": "1"}, (1, 2, 1, 2)),
    "msrun, nodes with names": ({"MS_WORKER_NUM": "2", "MS_NODE_ID": "red", "RANK_ID": "1"}, (1, 2, 1, 2)),
    "mpirun": (mpi(1, 2), (1, 2, 1, 2)),
    "mpirun, two nodes": (mpi(5, 8, 1, 4), (5, 8, 1, 4)),
    "mpirun -n 1": (mpi(0, 1), (0, 1, 0, 1)),
    "mpirun, RANK from it": (mpi(5, 8, 1, 4) | {"RANK": "5", "WORLD_SIZE": "8"}, (5, 8, 1, 4)),
    "MVAPICH": ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, 2, 1, 2)),
    "Hydra": ({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, (1, 4, 1, 2)),
    "PMIx with a size": ({"PMIX_RANK": "1", "PMIX_SIZE": "2"}, (1, 2, 1, 2)),
    "srun": (step(1, 2, 1, 0, "2"), (1, 2, 1, 2)),
    "srun, two nodes": (step(5, 8, 1, 1, "4(x2)"), (5, 8, 1, 4)),
    "srun, nodes of two sizes": (step(6, 7, 0, 2, "3(x2),1"), (6, 7, 0, 1)),
    "srun with PMI": (step(1, 2, 1, 0, "2") | {"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 1, 2)),
    "srun with PMIx": (step(1, 2, 1, 0, "2") | {"PMIX_RANK": "1"}, (1, 2, 1, 2)),
    "srun without the variables of the step": ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8"}, (3, 8, 3, 8)),
    "srun -n 1 in an allocation of 8": (step(0, 1, 0, 0, "1"), (0, 1, 0, 1)),
    "a batch script of 8 tasks": (BATCH, (0, 1, 0, 1)),
    "an interactive shell": (step(0, 8, 0, 0, "8") | {"SLURM_STEP_ID": "4294967290"}, (0, 1, 0, 1)),
    "torchrun in a batch script": (BATCH | torchrun(1, 2, 1, 2), (1, 2, 1, 2)),
    "torchrun, one per node by srun": (
        step(1, 2, 0, 1, "1(x2)") | torchrun(4, 8, 0, 4, group=1),
        (4, 8, 0, 4),
    ),
    "torchrun, one per node by mpirun": (mpi(0, 2, 0, 1) | torchrun(4, 8, 0, 4, group=1), (4, 8, 0, 4)),
    "torchrun with fewer nodes than tasks": (
        step(2, 4, 0, 2, "1(x4)") | torchrun(8, 12, 0, 4, group=2),
        (8, 12, 0, 4),
    ),
    "several torchruns side by side": (step(3, 8, 3, 0, "8") | torchrun(1, 2, 1, 2), (1, 2, 1, 2)),
    "msrun, one per node by srun": (
        step(1, 2, 0, 1, "1(x2)") | {"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "2"},
        (2, 4, 0, 2),
    ),
    "mpirun, its daemons by srun": (step(0, 1, 0, 0, "1") | mpi(5, 8, 1, 4), (5, 8, 1, 4)),
    "mpirun, its daemons by srun on two nodes": (step(1, 2, 0, 1, "1(x2)") | mpi(5, 8, 1, 4), (5, 8, 1, 4)),
    "a loop in a task of srun": (step(0, 1, 0, 0, "1") | {"RANK_ID": "1", "RANK_SIZE": "2"}, (1, 2, 1, 2)),
    "workers": (cluster("worker", 1, worker=WORKERS), (1, 3, 1, 2)),
    "a chief": (cluster("worker", 0, chief=["h0:1"], worker=["h0:2"]), (1, 2, 1, 2)),
    "one worker": (cluster("worker", 0, worker=["h0:1"]), (0, 1, 0, 1)),
    "a cluster and torchrun's variables": (cluster("worker", 1, worker=WORKERS) | torchrun(1, 3, 1, 2), (1, 3, 1, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_the_place_that_a_launcher_gives(name: str) -> None:
    env, place = PLACES[name]
    seat = seat_of(env)
    assert seat[:4] == place
    assert is_told_of_others(env) == (seat.world_size > 1)


REFUSED: dict[str, tuple[Env, tuple[str, ...]]] = {
    "no number": ({"RANK": "one", "WORLD_SIZE": "2"}, ("RANK=one",)),
    "a negative one": ({"RANK": "-1", "WORLD_SIZE": "2"}, ("RANK=-1",)),
    "other digits": ({"RANK": "\u0663", "WORLD_SIZE": "8"}, ("RANK=\u0663",)),
    "a size that is no number": ({"RANK_ID": "1", "RANK_SIZE": "8.0"}, ("RANK_SIZE=8.0",)),
    "a size of 0": ({"RANK": "0", "WORLD_SIZE": "0"}, ("RANK=0", "WORLD_SIZE=0")),
    "a rank without a size": ({"RANK_ID": "5"}, ("RANK_ID=5", "RANK_SIZE")),
    "RANK without a size": ({"RANK": "0"}, ("RANK=0", "WORLD_SIZE")),
    "PMIx without a size": ({"PMIX_RANK": "0"}, ("PMIX_RANK=0", "PMIX_SIZE")),
    "a size without a rank": ({"RANK_SIZE": "8"}, ("RANK_SIZE=8", "RANK_ID")),
    "msrun without a rank": ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "8"}, ("MS_WORKER_NUM=8", "MS_NODE_ID")),
    "a rank beyond the size": ({"RANK": "8", "WORLD_SIZE": "8"}, ("RANK=8", "WORLD_SIZE=8")),
    "a rank of mpirun beyond it": (mpi(2, 2), ("OMPI_COMM_WORLD_RANK=2", "OMPI_COMM_WORLD_SIZE=2")),
    "a local rank beyond the node": (torchrun(1, 8, 4, 4), ("LOCAL_RANK=4", "LOCAL_WORLD_SIZE=4")),
    "more on the node than in the job": (
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"},
        ("LOCAL_WORLD_SIZE=4", "WORLD_SIZE=2"),
    ),
    "two ranks": ({"RANK": "1", "WORLD_SIZE": "8"} | mpi(5, 8), ("RANK=1", "OMPI_COMM_WORLD_RANK=5")),
    "two sizes": ({"RANK": "1", "WORLD_SIZE": "4"} | mpi(1, 8), ("WORLD_SIZE=4", "OMPI_COMM_WORLD_SIZE=8")),
    "alone and one of eight": (
        {"RANK": "0", "WORLD_SIZE": "1"} | mpi(0, 8), ("WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=8"),
    ),
    "one of two and one of eight": (
        {"RANK_ID": "1", "RANK_SIZE": "8", "RANK": "1", "WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "RANK_SIZE=8"),
    ),
    "alone under torchrun, one of eight tasks": (
        step(3, 8, 3, 0, "8") | torchrun(0, 1, 0, 1), ("SLURM_STEP_NUM_TASKS=8", "WORLD_SIZE=1"),
    ),
    "alone under mpirun, one of eight tasks": (
        step(3, 8, 3, 0, "8") | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        ("SLURM_STEP_NUM_TASKS=8", "OMPI_COMM_WORLD_SIZE=1"),
    ),
    "no JSON": ({"TF_CONFIG": "{"}, ("TF_CONFIG",)),
    "no task": ({"TF_CONFIG": json.dumps({"cluster": {"worker": WORKERS}})}, ("TF_CONFIG",)),
    "a task beyond the cluster": (cluster("worker", 3, worker=WORKERS), ("TF_CONFIG",)),
    "a parameter server": (cluster("ps", 0, worker=WORKERS, ps=["h2:1"]), ("TF_CONFIG", "ps")),
    "a cluster of another size": (
        cluster("worker", 1, worker=WORKERS) | {"RANK": "1", "WORLD_SIZE": "2"}, ("WORLD_SIZE=2", "TF_CONFIG=3"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_with_the_variables_and_their_values(name: str) -> None:
    env, words = REFUSED[name]
    with pytest.raises(UsageError) as caught:
        seat_of(env)
    assert all(word in caught.value.message for word in words), caught.value.message
    assert caught.value.hint
    assert is_told_of_others(env)


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda each: each.name)
def test_no_launcher_leaves_one_of_eight_alone(launcher: LauncherVariables) -> None:
    """One pair of variables says "one of eight". If a second pair says "alone", the start is refused."""
    assert seat_of({launcher.rank: "5", launcher.size: "8"})[:2] == (5, 8)
    other = LAUNCHERS[0] if launcher is not LAUNCHERS[0] else LAUNCHERS[1]
    with pytest.raises(UsageError, match=f"{launcher.size}=8"):
        seat_of({launcher.rank: "0", launcher.size: "8", other.rank: "0", other.size: "1"})


def test_the_group_of_the_framework_decides_where_it_is_the_larger_one() -> None:
    assert seat_of({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, known=(1, 2))[:4] == (1, 2, 1, 2)
    assert seat_of(step(1, 2, 0, 1, "1(x2)"), known=(5, 8))[:2] == (5, 8)
    assert seat_of(mpi(3, 8, 3, 4), known=(3, 8))[:4] == (3, 8, 3, 4)
    assert seat_of({}, known=(1, 2))[:4] == (1, 2, 1, 2)


@pytest.mark.parametrize("env", [mpi(0, 8), torchrun(0, 8, 0, 8), {"RANK_ID": "0", "RANK_SIZE": "8"}])
def test_a_group_of_one_in_a_job_of_eight_is_refused(env: Env) -> None:
    with pytest.raises(UsageError, match="group"):
        seat_of(env, known=(0, 1))


def test_a_group_with_another_rank_than_the_launcher_said_is_refused() -> None:
    with pytest.raises(UsageError, match="OMPI_COMM_WORLD_RANK=1"):
        seat_of(mpi(1, 2), known=(0, 2))


HOSTS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_rank_table_gives_size_node_and_local_rank() -> None:
    seat = seat_of({"RANK_ID": "5"}, hosts=HOSTS)
    assert seat[:5] == (5, 8, 1, 4, 1) and not seat.one_node
    assert seat_of({"RANK_ID": "5", "RANK_SIZE": "8"}, hosts=HOSTS)[:2] == (5, 8)


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK_ID": "1", "RANK_SIZE": "2"}, ("RANK_SIZE=2", "RANK_TABLE_FILE=8")),
        ({"RANK_ID": "8"}, ("RANK_ID=8", "RANK_TABLE_FILE=8")),
        ({}, ("RANK_TABLE_FILE=8", "RANK_ID")),
    ],
)
def test_a_rank_table_that_does_not_fit_is_refused(env: Env, words: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as caught:
        seat_of(env, hosts=HOSTS)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_where_nothing_says_how_many_ranks_are_here_the_place_says_so() -> None:
    seat = seat_of({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert seat == ProcessPlace(5, 8, 1, 0, said="RANK=5, WORLD_SIZE=8") and not seat.one_node
