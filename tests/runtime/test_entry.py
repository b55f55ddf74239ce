"""The environment of a script inside a worker, and the reports of its failures."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import msgspec
import pytest

from holdfast.runtime.node.env_record import Started
from tests.runtime.runs import SOURCE, Run

pytestmark = pytest.mark.processes

LOOK = """
import json, os, sys
import helper
if os.environ["RANK"] == "1":
    names = [n for n in os.environ if n.startswith(("TORCHELASTIC", "HOLDFAST", "GROUP", "ROLE", "MASTER"))]
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "main": __name__, "file": __file__,
        "same": sys.modules["__main__"].LOOKED, "helper": helper.VALUE, "sid": os.getsid(0) == os.getpid(),
        "env": {n: os.environ[n] for n in [*names, "RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "X"]}}))
"""


@pytest.mark.parametrize("zygote", [True, False])
def test_a_script_sees_what_python_and_torchrun_would_show(tmp_path: Path, zygote: bool) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 7\n")
    stub = f"{tmp_path / 'stub'}:{SOURCE}"
    with Run(
        tmp_path,
        "LOOKED = 5\n" + LOOK,
        nproc=2,
        args=("--a", "b c"),
        zygote=zygote,
        env={"X": "y", "PYTHONPATH": stub},
    ) as run:
        run.start()
        assert run.wait() == 0
        seen = json.loads(run.log(1))
    assert seen["argv"] == [str(run.script), "--a", "b c"] and seen["path"] == str(tmp_path)
    assert (seen["main"], seen["file"], seen["same"], seen["helper"]) == ("__main__", str(run.script), 5, 7)
    env = seen["env"]
    assert seen["sid"] and env["X"] == "y" and env["OMP_NUM_THREADS"] == "1"
    assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"], env["TORCHELASTIC_RUN_ID"]) == (
        "1",
        "1",
        "2",
        "t",
    )
    assert env["MASTER_ADDR"] == "127.0.0.1" and int(env["MASTER_PORT"]) > 0
    assert env["TORCHELASTIC_RESTART_COUNT"] == "0" and env["TORCHELASTIC_MAX_RESTARTS"] == "16"


def test_a_module_runs_as_main(tmp_path: Path) -> None:
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "pack" / "go.py").write_text("import sys\nprint(__name__, sys.argv[1:], __spec__.name)\n")
    with Run(tmp_path, nproc=1, kind="module", target="pack.go", args=("x",), cwd=str(tmp_path)) as run:
        run.start()
        assert run.wait() == 0
        assert run.log(0) == "__main__ ['x'] pack.go\n"


def test_an_executable_runs_as_it_is(tmp_path: Path) -> None:
    with Run(
        tmp_path, nproc=2, kind="executable", target="/bin/sh", args=("-c", "echo rank $RANK of $WORLD_SIZE")
    ) as run:
        run.start()
        assert run.wait() == 0
        assert [run.log(0), run.log(1)] == ["rank 0 of 2\n", "rank 1 of 2\n"]


def test_a_script_that_raises_at_import_is_told_and_not_repeated_for_ever(tmp_path: Path) -> None:
    with Run(tmp_path, "def f():\n    raise ValueError('no such thing')\nf()\n", nproc=2) as run:
        run.start()
        assert run.wait() == 1
        text = run.logs()
        assert "ValueError: no such thing" in text and "in f" in text and "worker.py" not in text
        message = run.error_files()[0]["message"]
        assert message["message"] == "ValueError: no such thing"
        assert "Traceback" in message["extraInfo"]["py_callstack"]
        assert run.nothing_left()


def test_a_typed_user_error_ends_the_run_with_bad_input(tmp_path: Path) -> None:
    script = "from holdfast.errors import StateError\nraise StateError('cannot save X', hint='remove X')\n"
    with Run(tmp_path, script, nproc=2) as run:
        run.start()
        assert run.wait() == 3
        assert len(run.events("generation_started")) == 1
        assert "next: remove X" in run.logs()


def test_a_missing_script_is_bad_input(tmp_path: Path) -> None:
    with Run(tmp_path, nproc=2, target=str(tmp_path / "absent.py")) as run:
        run.start()
        assert run.wait() == 3
        assert "cannot read the training script" in run.logs()


def test_the_codes_of_sys_exit_are_kept(tmp_path: Path) -> None:
    script = "import os, sys\nsys.exit([0, 7][int(os.environ['RANK'])])\n"
    with Run(tmp_path, script, nproc=2, max_restarts=0) as run:
        run.start()
        assert run.wait() != 0
        codes = {int(e.data["rank"]): e.data["code"] for e in run.events("member_exited")}
        assert codes[1] == 7


def test_a_death_in_c_is_told_by_its_signal(tmp_path: Path) -> None:
    with Run(
        tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", nproc=1, max_restarts=1
    ) as run:
        run.start()
        assert run.wait() != 0
        assert {e.data["signal"] for e in run.events("member_exited")} == {int(signal.SIGSEGV)}


def test_each_worker_writes_its_environment_and_versions_and_no_secret(tmp_path: Path) -> None:
    secrets = {"NCCL_SOCKET_IFNAME": "lo", "MS_API_KEY": "no1", "HOLDFAST_TOKEN": "no2", "AWS_SECRET_ACCESS_KEY": "no3",
               "TF_PROXY": "http://me:no4@host", "PASSWORD": "no5"}  # fmt: skip
    script = "import os\nif os.environ['HOLDFAST_GENERATION'] == '1.1':\n    os.kill(os.getpid(), 9)\n"
    with Run(
        tmp_path, script, nproc=1, env={**secrets, "PYTHONPATH": f"{tmp_path / 'stub'}:{SOURCE}"}
    ) as run:
        run.start()
        assert run.wait() == 0
        lines = [line for path in sorted(run.dir.path.glob("attempt-*/rank-00000.env.jsonl"))
                 for line in path.read_text().splitlines()]  # fmt: skip
        starts = [msgspec.json.decode(line, type=Started) for line in lines]
        assert len(starts) == 2 and len({start.pid for start in starts}) == 2
        assert starts[0].versions["python"] in sys.version and "holdfast" in starts[0].versions
        shown = starts[0].environment
        assert (shown["NCCL_SOCKET_IFNAME"], shown["RANK"], shown["HOLDFAST_GENERATION"]) == (
            "lo",
            "0",
            "1.1",
        )
        assert not any(f"no{k}" in line for k in range(1, 6) for line in lines) and starts[0].withheld >= 5
        assert all(path.stat().st_mode & 0o077 == 0 for path in run.dir.path.glob("attempt-*/*.env.jsonl"))


ODD = """
class Mute(Exception):
    def __str__(self):
        raise KeyError("no text")
raise {}
"""


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (r"FileNotFoundError('/data/\udce9')", r"FileNotFoundError: /data/\udce9"),
        ("Mute()", "Mute: (its text cannot be read: KeyError)"),
    ],
)
def test_an_exception_with_an_odd_text_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: str, told: str
) -> None:
    monkeypatch.setenv("NCCL_ODD", os.fsdecode(b"\xe9"))
    with Run(tmp_path, ODD.format(raised), nproc=1) as run:
        run.start()
        assert run.wait() == 1
        assert run.error_files()[0]["message"]["message"] == told
        assert {event.data["what"] for event in run.events("detected")} == {told}


@pytest.mark.parametrize("zygote", [True, False])
def test_what_is_printed_is_in_the_log_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zygote: bool
) -> None:
    """Output is unbuffered as in torchrun's ``python -u``, because the last words of a killed worker matter."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    script = "import os\nprint('last', 'words')\nos.kill(os.getpid(), 9)\n"
    with Run(tmp_path, script, nproc=1, max_restarts=0, zygote=zygote) as run:
        run.start()
        run.wait()
        assert run.log(0) == "last words\n"


def test_a_log_for_which_there_is_no_room_ends_no_training(tiny_disk: Path) -> None:
    script = (
        "import os, sys\n"
        "log = os.readlink('/proc/self/fd/1')\n"
        "for n in range(4000):\n"
        "    print('x' * 500)\n"
        "print('lost, too', file=sys.stderr)\n"
        "os.truncate(log, 0)\n"
        "print('room again')\n"
    )
    with Run(tiny_disk, script, nproc=1) as run:
        run.start()
        assert run.wait() == 0
        assert run.log(0) == "room again\n"
