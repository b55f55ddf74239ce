"""A Slurm step as flags of ``holdfast run``."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.cli.start import scheduler_flags as module
from holdfast.cli.start.flag_files import COMMAND_LINE, DEFAULT, FlagValues
from holdfast.cli.start.flags import FLAGS
from holdfast.cli.start.scheduler_flags import POD, SLURM, scheduled, share_token
from holdfast.errors import AuthError, NotMet, UsageError
from holdfast.runtime.node.rundir import read_token
from holdfast.schedulers.job_secret import job_token
from holdfast.schedulers.slurm_step import (
    PORT_COUNT,
    PORT_FIRST,
    SlurmStep,
    first_host,
    most_tasks,
    read_step,
)
from tests.cli.command import HOLDFAST, clean_environment

STEP = {  # as Slurm 22.05 sets them in the second of three tasks
    "SLURM_JOB_ID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}


def settled(**given: Any) -> FlagValues:
    """Return the defaults with the values of the command line."""
    values = {flag.key: flag.default for flag in FLAGS} | given
    return FlagValues(values, {key: COMMAND_LINE if key in given else DEFAULT for key in values})


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_address", lambda host: host)


def test_a_step_says_everything(tmp_path: Path) -> None:
    found = scheduled(settled(run_dir=str(tmp_path)), STEP)
    assert (
        found.values
        | {
            "nnodes": "3",
            "node_rank": 1,
            "master_addr": "n1",
            "master_port": 20_008,
            "run_id": "slurm-1",
            "token_file": str(tmp_path / "slurm-1.token"),
        }
        == found.values
    )
    assert {key for key, source in found.sources.items() if source == SLURM} == {
        "nnodes", "node_rank", "master_addr", "master_port", "run_id", "token_file",
    }  # fmt: skip


def test_flags_that_are_given_win() -> None:
    mine = {"nnodes": "2:3", "master_addr": "h", "master_port": 7, "run_id": "x", "token_file": "t"}
    found = scheduled(settled(**mine), STEP)
    assert found.values | mine | {"node_rank": 1} == found.values
    contacts = scheduled(settled(rdzv_endpoint="h:7"), STEP)
    assert (contacts.values["master_addr"], contacts.sources["master_port"]) == ("127.0.0.1", DEFAULT)
    # A command line with all of these values describes another job than the step.
    other = scheduled(settled(nnodes="2", node_rank=0, master_addr="h"), STEP)
    assert (other.values["nnodes"], other.values["node_rank"]) == ("2", 0)


@pytest.mark.parametrize(
    ("given", "env"),
    [
        ({}, {}),
        ({}, {key: value for key, value in STEP.items() if "STEP" not in key}),  # a batch script
        ({}, STEP | {"SLURM_STEP_ID": str(0xFFFFFFFA)}),  # salloc's own shell
        ({}, STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}),
        ({"nnodes": "1"}, STEP),
        ({"standalone": True}, STEP),
        ({"rank_table": "t.json"}, STEP),
    ],
)  # fmt: skip
def test_nothing_is_taken_from(given: dict[str, Any], env: dict[str, str]) -> None:
    assert scheduled(settled(**given), env).values == settled(**given).values


@pytest.mark.parametrize(
    ("given", "env", "says"),
    [
        ({"nnodes": "4"}, {}, "--nnodes 4, but this Slurm step has 3 nodes"),
        ({"nnodes": "2"}, {}, "--nnodes 2, but this Slurm step has 3 nodes"),
        ({"node_rank": 0}, {}, "--node-rank 0, but this is node 1 of the Slurm step"),
        ({}, {"SLURM_STEP_TASKS_PER_NODE": "8(x3)"}, "8 tasks on a host"),
        ({}, {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "4"}, "4 tasks"),
        ({}, {"SLURM_NODEID": "3"}, "SLURM_NODEID=3 with SLURM_STEP_NUM_NODES=3"),
        ({}, {"SLURM_NODEID": "one"}, "SLURM_NODEID='one' is no number"),
        ({}, {"SLURM_JOB_ID": ""}, "SLURM_JOB_ID='' is no number"),
        ({}, {"SLURM_STEP_NODELIST": "$(id)"}, "is no list of hosts"),
        ({}, {"SLURM_HET_SIZE": "2"}, "heterogeneous"),
    ],
)  # fmt: skip
def test_a_contradiction_is_one_error(given: dict[str, Any], env: dict[str, str], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        scheduled(settled(**given), STEP | env)
    assert says in raised.value.message and raised.value.hint


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("n1", "n1"),
        ("n[1-4,7],m2", "n1"),
        ("n[07,9]", "n07"),
        ("rack[2-3]n[05-08],x", "rack2n05"),
        ("gpu-a.example.org,gpu-b", "gpu-a.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize("nodelist", ["", ",n1", "n[", "n]", "-oProxy", "n1;id", "n 1", "[", "n[-2]-"])
def test_what_is_no_list_is_refused(nodelist: str) -> None:
    with pytest.raises(UsageError, match="is no list of hosts"):
        first_host(nodelist)


@settings(deadline=None)
@given(st.text(alphabet="n1[]-,. ;$", max_size=12))
def test_a_host_never_begins_with_a_dash_and_has_no_sign_of_a_shell(nodelist: str) -> None:
    try:
        host = first_host(nodelist)
    except UsageError:
        return
    assert host[0] != "-" and not set(host) & set(" ;$[],")


def test_counts_of_tasks() -> None:
    assert [most_tasks(text) for text in ("1(x3)", "2(x3),1", "1,8(x2)", "12", "")] == [1, 2, 8, 12, 1]


@settings(deadline=None)
@given(st.integers(1, 2**31), st.integers(0, 7))
def test_the_port_is_in_its_range_and_differs_between_steps(job: int, step: int) -> None:
    ports = {SlurmStep(job, other, 2, 0, 1, "n1").port for other in range(8)}
    assert len(ports) == 8
    assert PORT_FIRST <= SlurmStep(job, step, 2, 0, 1, "n1").port < PORT_FIRST + PORT_COUNT < 32_768


def test_steps_have_names_of_their_own() -> None:
    first, later = read_step(STEP), read_step(STEP | {"SLURM_STEP_ID": "2"})
    assert first is not None and later is not None
    assert (first.name, later.name) == ("slurm-1", "slurm-1-2")


def test_a_pod_has_its_index_where_the_manifest_says_so() -> None:
    ours = {"HOLDFAST_SCHEDULER": "kubernetes", "JOB_COMPLETION_INDEX": "3"}
    found = scheduled(settled(nnodes="4"), ours)
    assert (found.values["node_rank"], found.sources["node_rank"]) == (3, POD)
    assert scheduled(settled(node_rank=1), ours).values["node_rank"] == 1
    assert scheduled(settled(), {"JOB_COMPLETION_INDEX": "3"}).sources["node_rank"] == DEFAULT
    with pytest.raises(UsageError, match="is no number of a pod"):
        scheduled(settled(), {"HOLDFAST_SCHEDULER": "kubernetes"})


def test_the_first_node_makes_the_secret_and_the_others_read_it(tmp_path: Path) -> None:
    def node(number: int) -> FlagValues:
        return scheduled(settled(run_dir=str(tmp_path / "runs")), STEP | {"SLURM_NODEID": str(number)})

    waiting = threading.Thread(target=share_token, args=(node(2),))
    waiting.start()
    share_token(node(0))
    waiting.join(60)
    path = tmp_path / "runs" / "slurm-1.token"
    assert not waiting.is_alive() and stat.S_IMODE(path.stat().st_mode) == 0o600
    token = read_token(path)
    share_token(node(0))  # the job is queued again
    assert read_token(path) == token and [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_secret_that_never_comes_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotMet, match="node 0 makes it there"):
        job_token(tmp_path / "t", makes=False, wait_s=0.0)


def test_a_secret_that_another_one_put_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "folder").mkdir()
    for name in ("link", "folder"):
        with pytest.raises(AuthError, match="is not a plain file of this user"):
            job_token(tmp_path / name, makes=True, wait_s=0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="root alone can give a file to another user")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("x" * 64)
    os.chown(tmp_path / "t", 65534, 65534)
    with pytest.raises(AuthError, match="uid 65534"):
        job_token(tmp_path / "t", makes=False, wait_s=0.0)


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the secret of the job"):
        job_token(tmp_path / "file" / "t", makes=True, wait_s=0.0)


def test_the_address_of_slurm_where_the_name_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\n[ "$5" = x.invalid ] || exit 1\necho "NodeName=$5 NodeAddr=10.1.2.3 Port=1"\n'
    )
    scontrol.write_text(scontrol.read_text().replace("$5", "$4"))
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module._address("x.invalid") == "10.1.2.3"
    assert module._address("y.invalid") == "y.invalid"
    assert module._address("localhost") == "localhost"


def test_explain_says_what_comes_from_the_step(tmp_path: Path) -> None:
    shown = subprocess.run(
        [HOLDFAST, "run", "--explain"],
        cwd=tmp_path, env=clean_environment(STEP | {"SLURM_STEP_NODELIST": "localhost,n[2-3]"}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    assert [line.split(maxsplit=2)[1:] for line in shown.stdout.splitlines() if "--node-rank" in line] == [
        ["1", SLURM]
    ]
    assert list(tmp_path.iterdir()) == []
