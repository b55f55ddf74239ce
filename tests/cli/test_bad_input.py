"""Mistakes of a user on the command line: one clear error each, an exit code, a next step, and nothing started."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from holdfast.cli.main import answer
from holdfast.exit_codes import MEANING, Exit
from tests.cli.command import Run, clean_environment

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import pathlib; pathlib.Path('started').touch()\n")


def refused(holdfast: Run, tmp_path: Path, code: Exit, *args: str, says: str, then: str,
            env: dict[str, str] | None = None) -> None:  # fmt: skip
    """Check that the command fails with ``code`` before anything starts, and prints an error and a next step."""
    result = holdfast(*args, env=env)
    error = result.stderr.splitlines()
    assert result.returncode == code, result.stderr
    assert error[0].startswith("error: ") and says in error[0], result.stderr
    assert error[-1].startswith("  next: ") and then in error[-1], result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "started").exists() and not list(tmp_path.glob("runs/*"))


CASES = [
    (Exit.USAGE, ["run"], "no training script", "holdfast run train.py"),
    (Exit.USAGE, ["run", "--nproc-per-nod", "2", "train.py"], "did you mean --nproc-per-node", "--help"),
    (Exit.USAGE, ["run", "--nproc", "2", "train.py"], "did you mean --nproc-per-node", "--help"),
    (Exit.USAGE, ["ckpt"], "holdfast ckpt needs a command: ls, show, verify", "holdfast ckpt --help"),
    (Exit.USAGE, ["ranktable"], "holdfast ranktable needs a command: check", "--help"),
    (Exit.USAGE, ["run", "--max_restart", "2", "train.py"], "did you mean --max-restarts", "--help"),
    (Exit.USAGE, ["run", "--nproc-per-node", "0", "train.py"], "--nproc-per-node 0", "--help"),
    (Exit.USAGE, ["run", "--nproc-per-node", "two", "train.py"], "--nproc-per-node two", "--help"),
    (
        Exit.USAGE,
        ["run", "--nnodes", "2", "train.py"],
        "--token-file is missing",
        "openssl rand",
    ),
    (Exit.USAGE, ["run", "--nnodes", "4:1", "train.py"], "--nnodes 4:1", "--help"),
    (Exit.USAGE, ["run", "--nnodes", "2", "--node-rank", "2", "train.py"], "--node-rank 2", "one node"),
    (
        Exit.USAGE,
        ["run", "--nnodes", "2", "--rdzv-conf", "a=b,join_timeout=soon", "train.py"],
        "'soon' is no number of seconds",
        "join_timeout=600",
    ),
    (
        Exit.USAGE,
        ["run", "--nnodes", "2", "--rdzv-endpoint", "fd00::2:29500", "train.py"],
        "an IPv6 address stands in brackets",
        "--rdzv-endpoint '[fd00::2]:29500'",
    ),
    (
        Exit.USAGE,
        ["run", "--nnodes", "2", "--bind", "fe80::1%eth0", "train.py"],
        "a scope id",
        "scope global",
    ),
    (Exit.USAGE, ["run", "--nnodes", "2", "--bind", "fe80::1", "train.py"], "link-local", "scope global"),
    (Exit.USAGE, ["run", "--master-addr", "host0:29500", "train.py"], "neither a name nor", "without a port"),
    (Exit.USAGE, ["run", "--nnodes", "2", "--bind", "192.0.2.1", "train.py"], "192.0.2.1", "--bind ADDRESS"),
    (
        Exit.USAGE,
        ["run", "--nnodes", "2", "--token-file", "none", "train.py"],
        "token none",
        "check the path",
    ),
    (Exit.USAGE, ["run", "--nnodes", "many", "train.py"], "neither a number nor MIN:MAX", "--help"),
    (Exit.USAGE, ["run", "--node-rank", "1", "train.py"], "--node-rank 1", "leave --node-rank out"),
    (Exit.USAGE, ["run", "--master-port", "99999", "train.py"], "no port number", "free one"),
    (
        Exit.USAGE,
        ["run", "--master-addr", "192.0.2.1", "train.py"],
        "no address of this machine",
        "--master-addr",
    ),
    (Exit.USAGE, ["run", "--max-restarts", "-1", "train.py"], "--max-restarts -1", "--help"),
    (Exit.USAGE, ["run", "--max-restarts", "x", "train.py"], "not a valid integer", "--help"),
    (Exit.USAGE, ["run", "--grace-s", "0", "train.py"], "not positive", "--help"),
    (Exit.USAGE, ["run", "--grace-s", "nan", "train.py"], "not a finite number", "--help"),
    (Exit.USAGE, ["run", "--restart-window", "inf", "train.py"], "not a finite number", "--help"),
    (Exit.USAGE, ["run", "--root", "", "train.py"], "empty text", "write a directory"),
    (Exit.USAGE, ["sim", "--forecast", "--rank-hours", "0"], "rank-hours", "--help"),
    (Exit.USAGE, ["exit", "--grace-s", "nan"], "not a finite number", "--help"),
    (Exit.USAGE, ["run", "--run-id", "No Good", "train.py"], "no name of a run", "--run-id"),
    (Exit.USAGE, ["run", "--tee", "9", "train.py"], "--tee 9", "--help"),
    (Exit.USAGE, ["run", "--local-ranks-filter", "a", "train.py"], "--local-ranks-filter a", "--help"),
    (Exit.USAGE, ["run", "--signals-to-handle", "SIGNOPE", "train.py"], "SIGNOPE is no signal", "SIGTERM"),
    (Exit.USAGE, ["run", "--signals-to-handle", "SIGKILL", "train.py"], "cannot be handled", "SIGTERM"),
    (Exit.USAGE, ["run", "-m", "--no-python", "train"], "exclude each other", "leave one"),
    (Exit.USAGE, ["run", "--rdzv-backend", "etcd-v2", "train.py"], "--rdzv-backend etcd-v2", "leave"),
    (Exit.USAGE, ["run", "--numa-binding", "node", "train.py"], "--numa-binding is not supported", "leave"),
    (Exit.USAGE, ["run", "trian.py"], "trian.py does not exist", "did you mean train.py"),
    (Exit.USAGE, ["run", "."], "directory without __main__.py", ".py file"),
    (
        Exit.USAGE,
        ["run", "-m", "train.py"],
        "train.py is a file, and -m takes the name of a module",
        "-m train",
    ),
    (Exit.USAGE, ["run", "-m", "no_such_module_here"], "no module named no_such_module_here", "-m"),
    (Exit.USAGE, ["run", "--no-python", "no-such-program"], "no-such-program", "--no-python"),
    (Exit.USAGE, ["stats"], "did you mean status", "--help"),
    (Exit.USAGE, ["train.py"], "holdfast run train.py", "--help"),
    (Exit.USAGE, ["status"], "there is no run below", "holdfast run"),
    (Exit.USAGE, ["logs", "nothing"], "there is no run nothing", "holdfast run"),
    (Exit.USAGE, ["exit"], "there is no run below", "holdfast run"),
    (Exit.USAGE, ["ckpt", "prune", ".", "--keep", "0"], "keep=0: at least the newest", "keep 1 or more"),
    (Exit.USAGE, ["ckpt", "prune", ".", "--keep", "1", "--every", "-1"], "every=-1", "1000 keeps one"),
    (
        Exit.USAGE,
        ["run", "--spares", "1", "--on-fault", "restart", "train.py"],
        "--spares 1",
        "--on-fault replace",
    ),
]


@pytest.mark.parametrize(("code", "args", "says", "then"), CASES, ids=[" ".join(c[1]) for c in CASES])
def test_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    code: Exit, args: list[str], says: str, then: str,
) -> None:  # fmt: skip
    """The commands run in this process: nothing starts, and a process of each would be a third of a second more."""

    def holdfast(
        *args: str, env: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        for name in os.environ.keys() - clean_environment().keys():
            monkeypatch.delenv(name)
        monkeypatch.chdir(tmp_path)
        returned = answer(args)
        shown = capfd.readouterr()
        return subprocess.CompletedProcess(args, returned, shown.out, shown.err)

    refused(holdfast, tmp_path, code, *args, says=says, then=then)


def test_a_host_that_stays_unknown_is_asked_for_again(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    words = ["--nnodes", "2", "--rdzv-conf", "join_timeout=0.1", "--master-addr", "no.such.host.invalid"]
    result = holdfast("run", *words, "train.py")
    assert result.returncode == Exit.UNMET, result.stderr
    note, error, then = result.stderr.splitlines()
    assert note.startswith("note: the host no.such.host.invalid (--master-addr") and "asking again" in note
    assert "no.such.host.invalid is unknown after 0.1 s" in error and "--master-addr" in then


def test_variable_is_checked_like_the_flag(holdfast: Run, tmp_path: Path) -> None:
    env = {"PET_NNODES": "2"}
    refused(holdfast, tmp_path, Exit.USAGE, "run", "train.py", says="--token-file", then="openssl", env=env)


@pytest.mark.parametrize("command", [("ckpt", "ls"), ("doctor", "--checkpoint")])
def test_variable_of_a_bucket(holdfast: Run, tmp_path: Path, command: tuple[str, str]) -> None:
    args, env = (*command, "s3://bucket/prefix"), {"HOLDFAST_S3_RETRY_S": "abc"}
    refused(
        holdfast, tmp_path, Exit.USAGE, *args, says="HOLDFAST_S3_RETRY_S=abc", then="leave it out", env=env
    )


def test_busy_port(holdfast: Run, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        args = ("run", "--master-port", port, "train.py")
        refused(
            holdfast,
            tmp_path,
            Exit.USAGE,
            *args,
            says=f"port {port} (--master-port) is in use",
            then="ss -ltnp",
        )


def test_run_directory_that_cannot_be_made(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    args = ("run", "--run-dir", "file/runs", "train.py")
    refused(holdfast, tmp_path, Exit.USAGE, *args, says="cannot make the run directory", then="--run-dir")


def test_run_directory_where_nobody_may_write(holdfast: Run, tmp_path: Path) -> None:
    args = ("run", "--run-dir", "/proc/holdfast", "train.py")  # not even root may do this
    refused(holdfast, tmp_path, Exit.USAGE, *args, says="cannot make the run directory", then="--run-dir")


def test_logs_that_cannot_be_made(holdfast: Run, tmp_path: Path) -> None:
    args = ("run", "--log-dir", "train.py", "train.py")
    refused(
        holdfast, tmp_path, Exit.USAGE, *args, says="cannot make the directory of the logs", then="--log-dir"
    )


def test_run_directory_that_exists(holdfast: Run, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "mine").mkdir(parents=True)
    args = ("run", "--run-dir", "elsewhere", "--run-id", "mine", "train.py")
    refused(holdfast, tmp_path, Exit.USAGE, *args, says="exists already", then="--run-id")


def test_help_and_version(holdfast: Run) -> None:
    assert holdfast("--version").stdout == holdfast("-V").stdout
    assert holdfast("-V").stdout.startswith("holdfast ")
    bare, asked = holdfast(), holdfast("--help")
    assert bare.returncode == asked.returncode == 0
    assert bare.stdout == asked.stdout
    for word in ("run", "drill", "status", "logs", "exit", "ckpt"):
        assert f"\n  {word} " in asked.stdout


def test_exit_codes_are_documented() -> None:
    rows = [
        [cell.strip(" `") for cell in line.strip("|").split("|")[:3]]
        for line in (ROOT / "docs" / "exit-codes.md").read_text().splitlines()
        if line.startswith("| ") and line[2].isdigit()
    ]
    assert rows == [[str(int(code)), code.name, MEANING[code]] for code in Exit]
