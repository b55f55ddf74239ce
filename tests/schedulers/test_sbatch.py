"""The batch script of ``holdfast submit slurm``: its text, and its effect in bash."""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import UsageError
from holdfast.schedulers.sbatch import Batch, read_time, render
from tests.cli.command import clean_environment
from tests.schedulers.tools import submitted

GOLDEN = Path(__file__).parent / "golden"
PLAIN = Batch(
    nodes=4,
    spares=1,
    name="train",
    output="runs/slurm-%j.out",
    done="runs/.done",
    grace_s=120.0,
    command=("train.py", "--lr", "1e-3"),
    flags=("--nproc-per-node", "8", "--root", "ckpts"),
    options={"partition": "gpu", "time": "8:00:00", "gres": "gpu:8", "exclusive": None},
)
FULL = dataclasses.replace(
    PLAIN,
    spares=0,
    name="my run #2",
    run_id="bert",
    max_starts=3,
    srun={"container-image": "docker://nvcr.io#nvidia/pytorch:26.10-py3", "container-mounts": "/data:/data"},
    setup=("module load cuda", "export NCCL_DEBUG=WARN"),
    command=("a script.py", "it's", "$(id)", "`id`", ""),
)
SRUN = """#!/bin/bash
while [ "$1" != bash ]; do echo "srun $1" >> calls; shift; done
exec "$@"
"""
LAUNCHER = """#!/bin/bash
printf '%s\\n' "$@" > words
if [ "$CODE" = 0done ]; then : > runs/.done-7; exit 75; fi
exit "$CODE"
"""


@pytest.mark.parametrize(("name", "batch"), [("plain", PLAIN), ("full", FULL)])
def test_golden(name: str, batch: Batch) -> None:
    """To write the files again, set HOLDFAST_GOLDEN=1, then read the difference."""
    path = GOLDEN / f"{name}.sbatch"
    if os.environ.get("HOLDFAST_GOLDEN"):
        path.write_text(render(batch))
    assert render(batch) == path.read_text()
    subprocess.run(["bash", "-n", str(path)], check=True, timeout=60)


def ran(batch: Batch, tmp_path: Path, code: str = "0", **env: str) -> tuple[int, list[str], list[str]]:
    """Run the script with fake srun, scontrol and holdfast. Return code, Holdfast's arguments and Slurm's calls."""
    for name, text in {"srun": SRUN, "hf": LAUNCHER, "scontrol": '#!/bin/bash\necho "$*" >> calls\n'}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "runs").mkdir(exist_ok=True)
    (tmp_path / "calls").write_text("")
    script = tmp_path / "job.sbatch"
    script.write_text(render(dataclasses.replace(batch, launcher=("hf",), setup=())))
    paths = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "CODE": code}
    done = subprocess.run(["bash", str(script)], cwd=tmp_path, env=clean_environment(paths | env),
                          capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert not (tmp_path / "runs" / ".done-7").exists()
    calls = (tmp_path / "calls").read_text().splitlines()
    return done.returncode, (tmp_path / "words").read_text().split("\n")[:-1], calls


def test_words_reach_holdfast_as_they_are(tmp_path: Path) -> None:
    code, words, calls = ran(FULL, tmp_path)
    assert code == 0
    assert words == [
        "run",
        *FULL.flags,
        "--nnodes",
        "4",
        "--grace-s",
        "120",
        "--run-id",
        "bert",
        *FULL.command,
    ]
    assert calls == [
        "srun --no-kill", "srun --wait=0", "srun --kill-on-bad-exit=0",
        "srun --container-image=docker://nvcr.io#nvidia/pytorch:26.10-py3", "srun --container-mounts=/data:/data",
    ]  # fmt: skip
    _, words, _ = ran(PLAIN, tmp_path)
    assert words[words.index("--nnodes") + 1] == "4:5" and words[words.index("--run-id") + 1] == "slurm-7"


@pytest.mark.parametrize(
    ("code", "again", "ends"),
    [("0", False, 0), ("1", False, 1), ("2", False, 2), ("3", False, 3), ("70", False, 70), ("74", False, 74),
     ("75", True, 75), ("76", True, 76), ("69", True, 69), ("137", True, 137), ("143", True, 143),
     ("130", False, 130), ("0done", False, 0)],
)  # fmt: skip
def test_codes_that_queue_the_job_again(tmp_path: Path, code: str, again: bool, ends: int) -> None:
    found, _, calls = ran(PLAIN, tmp_path, code)
    assert found == ends
    assert ("requeue 7" in calls) == again


def test_one_job_of_an_array_is_queued_again_and_not_the_whole_array(tmp_path: Path) -> None:
    """Regression: the last task has the number of its array, and its requeue killed and requeued all other tasks."""
    calls = ran(PLAIN, tmp_path, "75", SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="1")[2]
    assert "requeue 7_1" in calls and "requeue 7" not in calls


def test_a_job_that_ends_at_once_again_and_again_is_not_queued_for_ever(tmp_path: Path) -> None:
    assert "requeue 7" in ran(PLAIN, tmp_path, "69", SLURM_RESTART_COUNT="3")[2]
    assert "requeue 7" not in ran(PLAIN, tmp_path, "69", SLURM_RESTART_COUNT="4")[2]
    assert "requeue 7" in ran(PLAIN, tmp_path, "75", SLURM_RESTART_COUNT="98")[2]
    assert "requeue 7" not in ran(PLAIN, tmp_path, "75", SLURM_RESTART_COUNT="99")[2]


WORD = st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
VALUE = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)


@settings(max_examples=100, deadline=None)
@given(st.lists(WORD, min_size=1, max_size=4), st.lists(WORD, max_size=3))
def test_every_word_survives_a_shell(command: list[str], flags: list[str]) -> None:
    script = render(dataclasses.replace(PLAIN, command=tuple(command), flags=tuple(flags)))
    step = script[script.index("\nsrun ") : script.index("|| code=$?")]
    words = shlex.split(step)
    start = words.index("holdfast")
    # The command is on a continued line; shlex keeps that line break as a word.
    assert words[start:] == ["holdfast", "run", *flags, "--nnodes", "4:5", "--grace-s", "120", "--run-id",
                             "slurm-$SLURM_JOB_ID", "\n", *command]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(VALUE, VALUE, VALUE)
def test_no_value_leaves_its_line(name: str, value: str, mounts: str) -> None:
    batch = dataclasses.replace(
        PLAIN, name=name, options={"comment": value}, srun={"container-mounts": mounts}
    )
    try:
        script = render(batch)
    except UsageError as error:
        assert error.hint
        return
    plain = render(dataclasses.replace(PLAIN, options={"comment": "x"}, srun={"container-mounts": "y"}))
    assert len(script.split("\n")) == len(plain.split("\n")) and len(script.splitlines()) == len(
        plain.splitlines()
    )
    header = [line for line in script.split("\n") if line.startswith("#SBATCH")]
    assert shlex.split(header[0])[1:] == [f"--job-name={name}"]
    assert shlex.split(header[-1])[1:] == [f"--comment={value}"]
    assert f"--container-mounts={mounts}" in shlex.split(
        script[script.index("\nsrun ") : script.index("|| code=$?")]
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"nodes": 0}, "--nodes 0"),
        ({"spares": -1}, "--spares -1"),
        ({"spares": 5}, "more nodes would wait than train"),
        ({"max_starts": 0}, "--max-starts 0"),
        ({"options": {"time": "soon"}}, "--time soon is no time"),
        ({"options": {"time": "3"}}, "leaves no time to train"),
        ({"options": {"comment": "it's"}}, "can hold no"),
        ({"options": {"comment": "a\n#SBATCH --uid=0"}}, "can hold no"),
        ({"options": {"comment": ""}}, "can hold no"),
        ({"options": {"signal": "B:USR1"}}, "--signal is decided by this command"),
        ({"options": {"ntasks": "9"}}, "--ntasks is decided by this command"),
        ({"options": {"a b": "9"}}, "is no name of an option"),
        ({"srun": {"wait": "9"}}, "--wait is decided by this command"),
        ({"name": "a\nb"}, "can hold no"),
        ({"output": "a'b"}, "can hold no"),
        ({"run_id": "$(id)"}, "is no name of a run"),
        ({"run_id": "x", "options": {"array": "0-3"}}, "would be the same run"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as raised:
        render(dataclasses.replace(PLAIN, **changes))
    assert says in raised.value.message and raised.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 5400), ("1:30", 90), ("8:00:00", 28_800), ("1-12", 129_600), ("1-12:30", 131_400), ("2-0:0:1", 172_801),
     ("UNLIMITED", float("inf")), ("infinite", float("inf"))],
)  # fmt: skip
def test_times_of_slurm(text: str, seconds: float) -> None:
    assert read_time(text) == seconds


@pytest.mark.parametrize("text", ["", "8h", "1:2:3:4", "-1", "1-", "1.5", "٣"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(UsageError, match="is no time of Slurm's"):
        read_time(text)


SBATCH = """#!/bin/bash
cp "$2" submitted
echo "$1" > flags
echo "${ANSWER-41;cluster}"
echo "$WORDS" >&2
exit "${CODE-0}"
"""


def submit(tmp_path: Path, *args: str, sbatch: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``holdfast submit slurm`` with a fake sbatch, or without one."""
    (tmp_path / "train.py").touch()
    return submitted(tmp_path, "slurm", args, "sbatch", SBATCH if sbatch else None, env)


def test_submit_shows_what_it_submits(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--spares=1", "--time", "8:00:00", "--exclusive", "--gres=gpu:8", "--nproc-per-node", "8",
             "--sbatch", "licenses=a:1", "-m", "json.tool", "--nodes", "x y")  # fmt: skip
    dry = submit(tmp_path, "--dry-run", *words)
    assert dry.returncode == 0 and list((tmp_path / "bin").iterdir()) and not (tmp_path / "runs").exists()
    done = submit(tmp_path, *words)
    assert (done.returncode, done.stdout) == (0, "41\n"), done.stderr
    script = (tmp_path / "submitted").read_text()
    assert script == dry.stdout and script in done.stderr
    assert "submitted as job 41, run slurm-41; output: runs/slurm-41.out" in done.stderr
    for line in ("--nodes=3", "--exclusive", "--gres=gpu:8", "--licenses=a:1", "--time=8:00:00"):
        assert f"#SBATCH {line}\n" in script
    assert (
        "run --nproc-per-node 8 --module --nnodes 2:3 " in script
        and "    json.tool --nodes 'x y' ||" in script
    )
    assert (tmp_path / "runs" / "json.sbatch").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ((), "no training script given"),
        (("other.py",), "the training script other.py does not exist"),
        (("--partitoin", "x", "train.py"), "did you mean --partition?"),
        (("--requeue", "train.py"), "--requeue is decided by this command"),
        (("--spares", "2", "train.py"), "more nodes would wait than train"),
        (("--time", "8h", "train.py"), "--time 8h is no time of Slurm's"),
        (("--gres=a", "--sbatch", "gres=b", "train.py"), "--gres and --sbatch gres are both given"),
        (("--sbatch", "a=1", "--sbatch", "a=2", "train.py"), "--sbatch a is given twice"),
        (("--token-file", "none", "train.py"), "cannot read the token none"),
        (("--token-file", "train.py", "train.py"), "can be read by others"),
    ],
)  # fmt: skip
def test_bad_input_is_one_error(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    (tmp_path / "train.py").touch(0o644)
    done = submit(tmp_path, *args)
    assert (done.returncode, done.stdout) == (2, "") and says in done.stderr and "next: " in done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "runs").exists()


def test_no_sbatch_and_a_refusal(tmp_path: Path) -> None:
    none = submit(tmp_path, "train.py", sbatch=False)
    assert none.returncode == 2 and "there is no sbatch on PATH" in none.stderr
    refused = submit(tmp_path, "train.py", CODE="1", ANSWER="", WORDS="invalid partition")
    assert refused.returncode == 2 and "sbatch refused the script: invalid partition" in refused.stderr


def test_an_image_has_files_of_its_own(tmp_path: Path) -> None:
    done = submit(
        tmp_path, "--dry-run", "--container-image", "i.sqsh", "--container-writable", "/opt/train.py"
    )
    assert done.returncode == 0, done.stderr
    assert "--kill-on-bad-exit=0 --container-image=i.sqsh --container-writable \\" in done.stdout
    assert "    holdfast run --nnodes 1 " in done.stdout
