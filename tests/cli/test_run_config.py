"""From flags to settings: a script gets the values that torchrun would have given it."""

from __future__ import annotations

import importlib.metadata
import os
import secrets
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.start.flags import FLAGS
from holdfast.cli.start.node_flags import ENCRYPTED, NodeFlags
from holdfast.cli.start.run_config import Request, resolve, shown_local_ranks, worker_counts
from holdfast.core.ids import RUN_ID_LENGTH_MAX
from holdfast.errors import UnsupportedError, UsageError
from holdfast.runtime.node.run_settings import RunSettings, new_launch, without_launch
from holdfast.runtime.node.spawn import thread_count
from holdfast.store.format.manifest import attempt_key
from tests.store.worlds import save_id


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "train.py").touch()


def asked(*args: str, script: str = "train.py", **values: Any) -> Request:
    """Return the request of a command with the defaults and the user's ``values``."""
    filled = {flag.key: flag.default for flag in FLAGS} | values
    return resolve(filled, frozenset(values), script, args)


def test_script_and_arguments_pass_untouched(tmp_path: Path) -> None:
    settings = asked("--nnodes", "4", "--", "-m", "x y").settings
    assert settings.args == ("--nnodes", "4", "--", "-m", "x y")
    assert (settings.kind, settings.target) == ("script", str(tmp_path / "train.py"))
    assert settings.cwd == str(tmp_path)


def test_flags_of_ours_behind_a_script_that_has_none_of_that_name_are_noted(tmp_path: Path) -> None:
    assert asked("--lr", "1", "--", "--nnodes=2").notes == ()
    (note,) = asked("--nproc-per-node", "4", "--lr", "1", "--node_rank=0").notes
    assert note == (
        "--nproc-per-node, --node-rank stand behind the script, so the script gets it: flags of holdfast run come "
        "before it"
    )
    (tmp_path / "train.py").write_text('parser.add_argument("--nproc_per_node")')
    assert asked("--nproc-per-node", "4").notes == ()


def test_encryption_is_for_several_nodes_and_needs_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    several = {"nnodes": "2", "token_file": str(token), "master_addr": "127.0.0.1"}
    assert not asked(**several).settings.encrypts
    found = asked(**several, encrypt=True)
    assert found.settings.encrypts and ENCRYPTED in found.notes
    alone = asked(encrypt=True)
    assert not alone.settings.encrypts and alone.notes == (
        "--encrypt has no effect: on one node nothing that Holdfast sends leaves the host",
    )
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "43.0.3")
    with pytest.raises(UsageError, match=r"cryptography, version 44 or newer, and 43\.0\.3 is installed"):
        asked(**several, encrypt=True)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(
        UsageError, match=r"needs the package cryptography.* and it is not installed"
    ) as refused:
        asked(**several, encrypt=True)
    assert refused.value.hint == "pip install 'holdfast[encrypt]'"
    assert asked(encrypt=True).notes == alone.notes, "nothing is needed on one node"


def test_a_name_that_means_loopback_is_this_host_and_needs_an_address(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    several = {"nnodes": "2", "token_file": str(token)}
    with pytest.raises(UsageError, match=r"the host 127\.1 is 127\.0\.0\.1 here"):
        asked(**several, master_addr="127.1")
    with pytest.raises(UsageError, match=r"the host 127\.1 is 127\.0\.0\.1 here"):
        asked(**several, rdzv_endpoint="127.1:1,10.0.0.1:1")
    bound = asked(**several, rdzv_endpoint="127.1:29,10.0.0.1:1", bind="127.0.0.9").settings
    assert bound.contacts == ("127.0.0.9:29", "10.0.0.1:1")
    trial = asked(**several, master_addr="127.0.0.1")
    assert trial.settings.contacts == ("127.0.0.1:29500",)
    assert any("this machine only" in note for note in trial.notes)


def test_ipv6_addresses_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address has brackets before a port, and may have them elsewhere.

    A name with both kinds of address means IPv4.
    """
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))
    several = {"nnodes": "2", "token_file": str(token), "bind": "::1"}
    for place in ({"rdzv_endpoint": "[::1]:29"}, {"master_addr": "::1", "master_port": 29},
                  {"master_addr": "[::1]", "master_port": 29}):  # fmt: skip
        made = asked(**several, **place)
        assert (made.settings.contacts, made.settings.bind) == (("[::1]:29",), "::1")
        assert any("this machine only" in note for note in made.notes)
    assert asked(**several, rdzv_endpoint="[0::1],127.0.0.1:1").settings.contacts == (
        "[::1]:29500",
        "127.0.0.1:1",
    )
    assert asked(master_addr="[::1]").settings.master_addr == "::1", "what a worker reads has no brackets"
    both = [(socket.AF_INET6, 1, 6, "", (address, 0, 0, 0)) for address in ("fe80::2%eth0", "fd00::2")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **more: both)
    assert asked(**several, master_addr="host0").settings.contacts == ("[fd00::2]:29500",)
    both.append((socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)))  # type: ignore[arg-type]
    assert asked(**{**several, "bind": "127.0.0.1"}, rdzv_endpoint="[fd00::1]").settings.contacts == (
        "127.0.0.1:29500",
    )


def test_module_and_program(monkeypatch: pytest.MonkeyPatch) -> None:
    module = asked(script="json.tool", module=True).settings
    assert module.kind == "module" and "-tool-" in module.run_id
    program = asked(script="sh", no_python=True).settings
    assert program.kind == "executable" and os.access(program.target, os.X_OK)
    monkeypatch.setenv("PYTHON_EXEC", "/opt/other/python")
    other = asked(script="only_known_there", module=True).settings
    assert (other.target, other.python) == ("only_known_there", "/opt/other/python")


def test_run_id_and_directories(tmp_path: Path) -> None:
    made = asked()
    assert made.run_dir == tmp_path / "runs" / made.settings.run_id
    assert "train" in made.settings.run_id and made.settings.log_dir == ""
    named = asked(run_id="mine", run_dir="there", log_dir="logs")
    assert named.run_dir == tmp_path / "there" / "mine"
    assert named.settings.log_dir == str(tmp_path / "logs" / "mine")
    assert asked().settings.run_id != asked().settings.run_id


def test_two_spellings_of_the_same_patience() -> None:
    assert asked(shutdown_timeout=7).settings.grace_s == 7
    assert asked(shutdown_timeout=7, grace_s=9.0).settings.grace_s == 9
    assert asked().settings.grace_s == 300


def test_threads_as_torchrun_sets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert thread_count(asked().settings) == len(os.sched_getaffinity(0))
    assert thread_count(asked(nproc_per_node="2").settings) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert thread_count(asked(nproc_per_node="2").settings) == thread_count(asked().settings) == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    assert thread_count(asked(nproc_per_node="2").settings) == 1


def test_flags_without_effect_say_why() -> None:
    notes = asked(standalone=True, rdzv_endpoint="localhost:29400", rdzv_backend="c10d").notes
    assert len(notes) == 3 and all("has no effect: " in note for note in notes)
    assert asked().notes == ()
    assert asked(standalone=False).notes == ()


def test_signals() -> None:
    assert asked(signals_to_handle="SIGTERM").signals == (
        signal.SIGTERM,
        signal.SIGUSR1,
        signal.SIGUSR2,
    )
    assert signal.SIGINT in asked().signals


ONE_NODE = NodeFlags(1, 1, 0, "node0", (), 1, "127.0.0.1", 1.0)


def test_worker_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert worker_counts("3", ONE_NODE) == (3,)
    assert worker_counts("cpu", ONE_NODE) == (len(os.sched_getaffinity(0)),)
    for bad in ("0", "-1", "4097", "1.5", "", "2,", "2,auto", "2,1"):
        with pytest.raises(UsageError, match="nproc-per-node"):
            worker_counts(bad, ONE_NODE)
    monkeypatch.setenv("PYTHON_EXEC", "/nonexistent/python")
    with pytest.raises(UsageError, match="could not count devices"):
        worker_counts("gpu", ONE_NODE)


def test_nodes_of_two_sizes(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text(secrets.token_hex(32))

    def nodes(counts: str, **values: Any) -> RunSettings:
        return asked(**{"nnodes": "2:3", "master_addr": "127.0.0.1", "token_file": str(token),
                        "nproc_per_node": counts} | values).settings  # fmt: skip

    several = [nodes("2,5", node_rank=number) for number in range(3)]
    assert [each.nproc for each in several] == [2, 5, 5], "the spare has room for the larger"
    assert {(each.nprocs, each.workers) for each in several} == {((2, 5), 7)}
    assert [several[0].group(rank) for rank in (0, 1, 2, 6)] == [(0, 2), (0, 2), (1, 5), (1, 5)]
    equal = nodes("2,2")
    assert (equal.nproc, equal.nprocs, equal.workers, equal.group(3)) == (2, (), 4, (1, 2))
    with pytest.raises(UsageError, match="is for 3 nodes, and ranks are on 2"):
        nodes("2,5,5")
    with pytest.raises(UsageError, match="which of these is this host's"):
        nodes("2,5", rdzv_endpoint="127.0.0.1:29")
    with pytest.raises(UnsupportedError, match="2 nodes of 2 and 5 workers: steps are run in equal parts"):
        nodes("2,5", node_rank=0, shrink_to=1)
    with pytest.raises(UsageError, match="a job has at most"):
        nodes(",".join(["4096", "1"] * 1024), nnodes="2048")


def test_worker_counts_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without torch in the interpreter, auto counts CPUs and gpu is refused."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o700)
    monkeypatch.setenv("PYTHON_EXEC", str(bare))
    assert worker_counts("auto", ONE_NODE) == (len(os.sched_getaffinity(0)),)
    with pytest.raises(UsageError, match="no such device"):
        worker_counts("gpu", ONE_NODE)


@pytest.mark.parametrize(
    ("tee", "redirects", "only", "shown"),
    [
        ("0", "0", "", {0}),
        ("3", "0", "", {0, 1, 2, 3}),
        ("0:3,2:1", "0", "", {0, 2}),
        ("0", "3", "", set()),
        ("1", "3", "", {0, 1, 2, 3}),
        ("0", "0", "1,3", {1, 3}),
        ("0", "0", "1,9", {1}),
        ("0", "1:3", "0,1", {0}),
        ("1:0", "0", "", {0}),
    ],
)
def test_ranks_on_the_console(tee: str, redirects: str, only: str, shown: set[int]) -> None:
    assert shown_local_ranks(4, tee, redirects, only) == shown


def test_modules_to_preload() -> None:
    assert asked().settings.preload == ()
    assert asked(preload="wave, json.tool,").settings.preload == ("wave", "json.tool")
    with pytest.raises(UsageError, match="nothing is not installed"):
        asked(preload="wave,nothing.like.this")


def test_each_start_saves_under_a_name_of_its_own() -> None:
    """A damaged save of an earlier start under the same run id must never count as the new one."""
    first, second = (asked(run_id="mine").settings.saves_as for _ in range(2))
    assert first != second and without_launch(first) == without_launch(second) == "mine"
    unnamed = asked().settings
    assert unnamed.saves_as == unnamed.run_id


def test_names_of_saves() -> None:
    launch = new_launch()
    for run_id in ("mine", "m" * RUN_ID_LENGTH_MAX):
        settings = RunSettings(run_id=run_id, launch=launch)
        assert settings.job_id == run_id and settings.saves_as.endswith(launch)
        assert attempt_key(save_id(run=settings.saves_as).directory()) is not None
        assert run_id.startswith(without_launch(settings.saves_as))
    assert RunSettings(run_id="20260101-train").saves_as == "20260101-train"
    shared = RunSettings(run_id="mine-node1", launch=launch, job="mine-node0-s012345")
    assert shared.saves_as == shared.job_id == "mine-node0-s012345"
    assert without_launch(shared.saves_as) == "mine-node0" and without_launch("mine") == "mine"


def test_spares_are_for_every_rung_that_replaces_a_rank_on_its_node() -> None:
    for ladder in ("auto", "replace", "memory"):
        assert asked(spares=1, on_fault=ladder).settings.spares == 1
    for ladder in ("restart", "node", "disk"):
        with pytest.raises(UsageError, match="no spare would ever be used"):
            asked(spares=1, on_fault=ladder)


def test_more_ranks_than_votes_can_be_counted_for_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 4194304 ranks") as refused:
        asked(nnodes="1025", node_rank=0, master_addr="127.0.0.1", nproc_per_node="4096")
    assert "fewer nodes" in refused.value.hint
