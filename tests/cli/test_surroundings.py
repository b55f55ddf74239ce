"""The environment of a command: closed streams, unusual names, a terminal that disappears, a machine that refuses."""

from __future__ import annotations

import errno
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.screen.error_output import of_the_machine
from holdfast.cli.screen.run_lookup import name_of
from holdfast.exit_codes import Exit
from holdfast.runtime.node.rundir import RunDir
from tests.cli.command import HOLDFAST, Run, clean_environment, on_terminal, working_in
from tests.cli.test_run import BOUND_S, script
from tests.cli.test_status import Made, swept
from tests.runtime.runs import until

__all__ = ["script", "swept"]

pytestmark = pytest.mark.usefixtures("swept")


def shell(tmp_path: Path, line: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash. ``$H`` is the command."""
    environment = clean_environment({"H": HOLDFAST})
    return subprocess.run(["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True,
                          timeout=BOUND_S, check=False)  # fmt: skip


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_run_without_streams(tmp_path: Path, closed: str) -> None:
    assert shell(tmp_path, f"$H run --run-id mine train.py {closed}").returncode == 0
    log = (tmp_path / "runs/mine/attempt-000/rank-00000.log").read_text()
    assert log == "rank 0 says []\n", "no other file took the number of a stream"


def test_what_the_terminal_has_no_character_for(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("import sys; sys.stdout.buffer.write('schön █\\n'.encode())\n")
    ended = shell(tmp_path, "PYTHONIOENCODING=latin-1 $H run odd.py")
    assert (ended.returncode, ended.stdout) == (0, b"sch\xf6n \\u2588\n"), ended.stderr


def test_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    """Python inherits the ignored SIGHUP at its start."""
    process = subprocess.Popen(
        ["nohup", HOLDFAST, "run", "--run-id", "mine", "train.py", "wait"],
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until("up", (tmp_path / "up-0").exists)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=BOUND_S)
    assert "SIGTERM: leaving" in error and "SIGHUP" not in error
    assert working_in(tmp_path) == {}


def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    ended = shell(
        tmp_path,
        r"$H run train.py $'arg\xe9'; code=$?; mkdir $'d\xe9'; cd $'d\xe9'; $H run ../train.py; exit $code",
    )
    assert ended.returncode == Exit.USAGE
    said = ended.stderr.decode().splitlines()
    assert said[0] == r"error: 'arg\udce9' is not UTF-8" and said[2].endswith(r"d\udce9' is not UTF-8")


def test_no_working_directory(tmp_path: Path) -> None:
    ended = shell(tmp_path, "mkdir gone; cd gone; rmdir ../gone; $H status")
    assert ended.returncode == Exit.USAGE and b"the working directory cannot be used" in ended.stderr


def test_the_next_step_works_where_it_is_shown(
    holdfast: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Made(tmp_path / "a b", "it")
    made.start(0, 1)
    made.end(0, "")
    shown = holdfast("status", "it", "--run-dir", "a b/runs").stdout.splitlines()[-1]
    command = shlex.split(shown.removeprefix("next: "))
    assert command == ["holdfast", "logs", str(made.directory.path)]
    assert holdfast(*command[1:]).returncode == 0
    monkeypatch.chdir(tmp_path / "a b")
    assert name_of(made.directory.path) == "it"


def test_shared_memory_that_is_full_is_named_and_nothing_stays(tmp_path: Path) -> None:
    """The test stands for full shared memory: a limit on file sizes lets no file grow."""
    run = RunDir(tmp_path / "run")
    memory = tmp_path / "shm"  # a directory of this test only: other tests start runs at the same time
    memory.mkdir()
    code = (
        "import resource, signal, sys; from holdfast.runtime.node.rundir import RunDir, write_private\n"
        "from holdfast.runtime.node import rundir\n"
        "def only_here(path, data, **more):\n"
        "    if path.name == rundir.OWNER:\n"
        "        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "    return write_private(path, data, **more)\n"
        "rundir.write_private = only_here\n"
        "rundir.SHARED_MEMORY = rundir.Path(sys.argv[2])\n"
        "RunDir(sys.argv[1]).create()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(run.path), str(memory)],
        capture_output=True,
        text=True,
        check=False,
        timeout=BOUND_S,
    )
    assert f"no room for status pages in {memory}: File too large" in ended.stderr
    assert not run.path.exists() and not list(memory.iterdir())


def test_what_the_machine_refuses_is_no_defect() -> None:
    for number in (errno.EACCES, errno.ENOSPC, errno.EMFILE, errno.ENOMEM, errno.EROFS):
        error = of_the_machine(OSError(number, os.strerror(number), "a/file"))
        assert error is not None and error.message == f"a/file: {os.strerror(number)}" and error.hint
    assert of_the_machine(OSError(errno.EBADF, "")) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace of its own")
def test_the_first_process_of_a_container_leaves_no_zombies(tmp_path: Path) -> None:
    """The process that the script starts becomes an orphan when the script's shell ends."""
    (tmp_path / "orphans.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "subprocess.run(['bash', '-c', 'setsid bash -c \"echo \\$\\$ > made; mv made orphan\" & true'])\n"
        "while not os.path.exists('orphan'): time.sleep(0.05)\n"
        "place = f\"/proc/{pathlib.Path('orphan').read_text().strip()}\"\n"
        "while os.path.exists(place): time.sleep(0.05)\n"
    )
    line = ["unshare", "--pid", "--kill-child", "--mount-proc", HOLDFAST, "run", "orphans.py"]
    ended = subprocess.run(line, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True,
                           timeout=BOUND_S, check=False)  # fmt: skip
    assert ended.returncode == 0, ended.stderr


def test_a_run_on_a_terminal(tmp_path: Path) -> None:
    """The last lines have colours on a terminal."""
    code, shown = on_terminal("run", "train.py", cwd=tmp_path)
    assert code == 0 and "rank 0 says" in shown and "the job ran to its end" in shown
    code, shown = on_terminal("run", "train.py", "raise", cwd=tmp_path)
    assert code == 1 and "\x1b[31m\x1b[1merror: " in shown and "log: " in shown and "next: " in shown
    code, shown = on_terminal("status", "none", cwd=tmp_path)
    assert code == Exit.USAGE and "no run none" in shown and "next: " in shown and "Traceback" not in shown


def test_a_progress_bar_moves_on_a_terminal(tmp_path: Path) -> None:
    """Regression: a bar was shown when its line ended, or after 30 s."""
    (tmp_path / "bar.py").write_text(
        "import sys, time\n"
        "sys.stderr.write('\\r 10 percent'); sys.stderr.flush(); time.sleep(2)\n"
        "sys.stderr.write('\\r 20 percent\\n')\n"
    )
    code, shown = on_terminal("run", "bar.py", cwd=tmp_path)
    assert code == 0 and shown.index("10 percent") < shown.index("20 percent"), shown


@pytest.mark.parametrize("command", [["status", "none"], ["status"], ["doctor"], ["--help"]], ids=" ".join)
def test_no_colours(tmp_path: Path, command: list[str]) -> None:
    made = Made(tmp_path, "it")
    made.end(0, "")
    _, shown = on_terminal(*command, cwd=tmp_path, env={"NO_COLOR": "1"})
    assert "\x1b[3" not in shown and shown


def test_a_full_file_for_the_output_ends_no_job(tmp_path: Path) -> None:
    ended = shell(tmp_path, "$H run train.py > /dev/full 2>&1")
    assert ended.returncode == 0
