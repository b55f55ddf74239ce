"""A batch script for Slurm that runs a job with Holdfast, and queues it again depending on its exit code.

All functions are pure functions of a :class:`Batch`. Words of the user are quoted for the shell (``shlex.quote``).
Values of ``sbatch`` options are in single quotes, which sbatch's own parser also understands.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from holdfast.errors import UsageError
from holdfast.exit_codes import Exit

OPTIONS = frozenset(
    """account array bb bbf begin chdir cluster-constraint clusters comment constraint container container-id
    contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency
    distribution error exclude exclusive export export-file extra get-user-env gid gpu-bind gpu-freq gpus
    gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hold hint input job-name licenses mail-type mail-user
    mcs-label mem mem-bind mem-per-cpu mem-per-gpu mincpus network nice nodefile nodelist ntasks
    ntasks-per-core ntasks-per-node ntasks-per-socket output overcommit oversubscribe partition power prefer priority
    profile propagate qos reboot reservation resv-ports segment sockets-per-node spread-job switches thread-spec
    threads-per-core time time-min tmp tres-bind tres-per-task uid use-min-nodes wait-all-nodes wckey""".split()
)
"""Options of ``sbatch`` (22.05 to 25.11) that ``holdfast submit slurm`` passes on by their own name."""
PYXIS = frozenset(
    """container-entrypoint container-env container-image container-mount-home container-mounts container-name
    container-readonly container-remap-root container-save container-workdir container-writable
    no-container-entrypoint no-container-mount-home no-container-remap-root""".split()
)
"""Options that the plugin pyxis adds to ``srun``: the step runs in a container."""
SWITCHES = frozenset(
    """contiguous exclusive get-user-env hold no-kill no-requeue overcommit oversubscribe reboot requeue spread-job
    use-min-nodes container-entrypoint container-mount-home container-readonly container-remap-root
    container-writable no-container-entrypoint no-container-mount-home no-container-remap-root""".split()
)
"""Options of the two sets above that take no value. ``--sbatch exclusive=user`` gives one a value."""
OURS = {
    "nodes": "--nodes and --spares",
    "requeue": "it is always set",
    "no-requeue": "a job is queued again by its exit code: --max-starts 1 keeps it from that",
    "no-kill": "it is always set",
    "open-mode": "it is always append",
    "signal": "--grace-s sets it: the warning comes that much, and a margin, before the end",
    "ntasks": "one task per node starts the workers: --nproc-per-node",
    "ntasks-per-node": "one task per node starts the workers: --nproc-per-node",
    "wrap": "the script is written by this command",
}
"""Options that this command sets itself, with what to write instead."""
SRUN_OURS = dict.fromkeys(
    ("wait", "kill-on-bad-exit", "nodes", "ntasks"), "the other nodes continue without a lost one"
)
MARGIN_S = 60  # Slurm may warn up to this much earlier than requested, and checks the time every 30 s
SOON_S = 600  # a start that ends within this time has made little progress
SOON_STARTS = 5
AGAIN = (Exit.REQUEUE, Exit.UNSAVED, Exit.UNMET, Exit.ORPHANED)
KILLED = (137, 143)  # every task was killed: by the loss of its node, or at the end of the time
NO_LIMIT = ("unlimited", "infinite")


JOB = "${SLURM_ARRAY_TASK_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}"
"""The name of this job for ``scontrol``. The last task of an array has the same SLURM_JOB_ID as the whole array."""


TASK = """trap : TERM USR1 USR2; "$@"; code=$?; if [ "$code" -eq 0 ]; then : > "$0"; fi; exit "$code\""""
"""The shell program of a task.

A warning reaches both the shell and its child process. The shell ignores it, and waits for the end of the child.
"""


@dataclass(frozen=True)
class Batch:
    """The description of a job, from which the batch script is made.

    ``nodes`` nodes hold ranks; ``spares`` further nodes wait. ``launcher`` starts Holdfast (``("holdfast",)``).
    ``flags`` and ``command`` are those of ``holdfast run``. ``setup`` has shell lines of the user that run before the
    job.
    """

    nodes: int
    spares: int
    name: str
    output: str
    done: str  # start of the path of a file that marks the end of the job; the job's number follows
    grace_s: float
    command: tuple[str, ...]
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ("holdfast",)
    run_id: str = ""  # empty: slurm-<number of the job>
    max_starts: int = 100
    options: Mapping[str, str | None] = field(default_factory=dict)  # of sbatch; None: a switch
    srun: Mapping[str, str | None] = field(default_factory=dict)
    setup: tuple[str, ...] = ()


def read_time(text: str) -> float:
    """Return the seconds of a Slurm time: ``MM``, ``MM:SS``, ``HH:MM:SS``, ``D-HH``, ``D-HH:MM``, ``D-HH:MM:SS``.

    Returns:
        Seconds; infinite for ``UNLIMITED``.

    Raises:
        UsageError: the text has another form.

    Example:
        ``read_time("1-12") == 129_600.0``
    """
    if text.lower() in NO_LIMIT:
        return float("inf")
    match = re.fullmatch(r"(?:(\d{1,6})-)?(\d{1,8})(?::(\d{1,2}))?(?::(\d{1,2}))?", text, re.ASCII)
    if match is None:
        raise UsageError(f"--time {text} is no time of Slurm's",
                         hint="minutes (90), HH:MM:SS (8:00:00) or DAYS-HH:MM:SS (1-12:00:00)")  # fmt: skip
    days, *parts = match.groups()
    one, two, three = (int(part or 0) for part in parts)
    if days is not None:
        return float(int(days) * 86_400 + one * 3600 + two * 60 + three)
    if parts[2] is not None:
        return float(one * 3600 + two * 60 + three)
    return float(one * 60 + two)


def check(batch: Batch) -> None:
    """Refuse values that Slurm or the job cannot work with.

    Raises:
        UsageError: numbers do not fit together, an option is one that this command sets itself, or no ``#SBATCH``
            line can hold a value.
    """
    if batch.nodes < 1 or batch.spares < 0 or batch.max_starts < 1:
        raise UsageError(
            f"--nodes {batch.nodes} --spares {batch.spares} --max-starts {batch.max_starts}: 1, 0 and 1 are the least",
            hint="holdfast submit slurm --help",
        )
    if batch.spares > batch.nodes:
        raise UsageError(
            f"--spares {batch.spares} with --nodes {batch.nodes}: more nodes would wait than train",
            hint="--nodes counts those that hold ranks, --spares those beside them",
        )
    time_limit = batch.options.get("time")
    if time_limit is not None and read_time(time_limit) <= warning_s(batch):
        raise UsageError(
            f"--time {time_limit} leaves no time to train: the warning comes {warning_s(batch)} s before the end",
            hint="a longer --time, or a smaller --grace-s",
        )
    for key, value in batch.options.items():
        _check_option(key, value)
    for key, value in batch.srun.items():
        _check_option(key, value, SRUN_OURS)
    if batch.run_id and "array" in batch.options:
        raise UsageError(f"--run-id {batch.run_id} with --array: all jobs of the array would be the same run",
                         hint="leave --run-id out: each job has its own, slurm-<number of the job>")  # fmt: skip
    if batch.run_id and re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", batch.run_id) is None:
        raise UsageError(f"--run-id {batch.run_id!r} is no name of a run", hint="letters, digits, _ and -")
    _check_option("output", batch.output)
    _check_option("job-name", batch.name)


def _check_option(key: str, value: str | None, also_ours: Mapping[str, str] = MappingProxyType({})) -> None:
    if re.fullmatch(r"[a-z][a-z0-9-]*", key) is None:
        raise UsageError(
            f"{key!r} is no name of an option of Slurm's", hint="for example --sbatch gres=gpu:8"
        )
    if why := {**OURS, **also_ours}.get(key):
        raise UsageError(f"--{key} is decided by this command: {why}", hint=f"leave --{key} out")
    if value is not None and (not value or not value.isprintable() or re.search(r"['\\]", value)):
        raise UsageError(
            f"--{key}={value!a}: a #SBATCH line can hold no empty value, quote ', backslash or line break",
            hint="choose another value",
        )


def warning_s(batch: Batch) -> int:
    """Return the seconds before the end of the job's time at which Slurm warns the job."""
    return int(batch.grace_s) + MARGIN_S


def render(batch: Batch) -> str:
    """Return the text of the batch script.

    Raises:
        UsageError: see :func:`check`.

    Example:
        ``render(Batch(nodes=4, spares=1, name="train", output="runs/%j.out", done="runs/done", grace_s=120.0,
        command=("train.py",)))``
    """
    check(batch)
    total = batch.nodes + batch.spares
    fixed: dict[str, str | None] = {
        "job-name": batch.name,
        "nodes": str(total),
        "ntasks-per-node": "1",
        "output": batch.output,
        "open-mode": "append",
        "requeue": None,
        "no-kill": None,
        "signal": f"USR1@{warning_s(batch)}",
    }
    header = [f"#SBATCH {word}" for word in _words({**fixed, **batch.options})]
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {batch.nodes} nodes hold ranks, {batch.spares} wait as spares. Made by `holdfast submit slurm`.",
            *header,
            "",
            *batch.setup,
            *([""] if batch.setup else []),
            _step(batch),
            "",
            *_again(batch),
        ]
    )


def _words(options: Mapping[str, str | None]) -> Iterable[str]:
    for key, value in options.items():
        yield f"--{key}" if value is None else f"--{key}={quoted(value)}"


def quoted(value: str) -> str:
    """Return a value quoted for both a shell and the parser of ``#SBATCH`` lines."""
    return shlex.quote(value)


def _step(batch: Batch) -> str:
    """Return the lines that run the job with srun.

    Slurm's defaults would end all tasks 30 s after the first task ends, and at the first lost node. Each task runs in a
    separate shell, which makes a file if the job has run to its end in this task. srun's exit code cannot show such an
    end: it is the greatest code of all tasks, including the task of a lost node.
    """
    nnodes = f"{batch.nodes}:{batch.nodes + batch.spares}" if batch.spares else str(batch.nodes)
    flags = [*batch.flags, "--nnodes", nnodes, "--grace-s", f"{batch.grace_s:g}"]
    run = [*batch.launcher, "run", *flags, "--run-id"]
    run_id = shlex.quote(batch.run_id) if batch.run_id else '"slurm-$SLURM_JOB_ID"'
    options = ["--no-kill", "--wait=0", "--kill-on-bad-exit=0", *_words(batch.srun)]
    return "\n".join(
        [
            f'done={shlex.quote(batch.done)}-"$SLURM_JOB_ID"',
            'rm -f "$done"',
            "code=0",
            f"srun {' '.join(options)} \\",
            f'    bash -c {shlex.quote(TASK)} "$done" \\',
            f"    {shlex.join(run)} {run_id} \\",
            f"    {shlex.join(batch.command)} || code=$?",
        ]
    )


def _again(batch: Batch) -> list[str]:
    """Return the lines after srun: they end the script, or queue the job again."""
    again = "|".join(str(int(code)) for code in (*AGAIN, *KILLED))
    return [
        'if [ -e "$done" ]; then rm -f "$done"; exit 0; fi  # the job has ended, whatever became of other nodes',
        "starts=$((${SLURM_RESTART_COUNT:-0} + 1))",
        'case "$code" in',
        f"{again})",
        f'    if [ "$code" -ne {int(Exit.REQUEUE)} ] && [ "$SECONDS" -lt {SOON_S} ] \\',
        f'            && [ "$starts" -ge {SOON_STARTS} ]; then',
        '        echo "code $code after $SECONDS s, start $starts: not queued again" >&2',
        f'    elif [ "$starts" -ge {batch.max_starts} ]; then',
        '        echo "start $starts was the last one (--max-starts): not queued again" >&2',
        "    else",
        f'        scontrol requeue "{JOB}"',
        "    fi ;;",
        "esac",
        'exit "$code"',
        "",
    ]
