"""The command ``holdfast submit``, which makes the batch script or the manifests that start a job on a cluster."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from holdfast.cli.commands.submit_flags import flags_of, named, pairs, passes_flags, passes_options
from holdfast.cli.screen.completers import files
from holdfast.cli.screen.error_output import say
from holdfast.cli.screen.escaping import echo
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.cli.start.run_config import find_target, kind_of
from holdfast.errors import AuthError, UsageError, UserError
from holdfast.runtime.node.rundir import TOKEN_SIZE_BYTES, read_token, write_private
from holdfast.schedulers.manifests import KINDS, Object, Pods, objects, rights, secret
from holdfast.schedulers.sbatch import OPTIONS, OURS, PYXIS, Batch, render
from holdfast.schedulers.yaml_output import documents

# The first positional argument ends the options of Holdfast: all words after it belong to the script.
SETTINGS = {"allow_interspersed_args": False, "help_option_names": ["-h", "--help"]}
SUBMIT_S = 120.0


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def submit() -> None:
    """Start a script on a cluster, with the scheduler set up for Holdfast."""


@passes_flags
@passes_options
@submit.command(context_settings=SETTINGS)
@click.option("--nodes", type=int, default=1, show_default=True, help="Nodes that hold ranks.")
@click.option(
    "--spares", type=int, default=0, show_default=True, help="Nodes beside them that wait for a loss."
)
@click.option(
    "--grace-s",
    type=FiniteNumber(min=1),
    default=120,
    show_default=True,
    help="Seconds that the last save may take; Slurm warns the job that long, and 60 s, before its end.",
)
@click.option("--run-id", default="", help="Name of the run; by default slurm-<number of the job>.")
@click.option("--max-starts", type=int, default=100, show_default=True, help="Starts of the job in all.")
@click.option(
    "--sbatch", multiple=True, metavar="KEY=VALUE", help="Any option of sbatch (KEY alone: a switch)."
)
@click.option("--srun", multiple=True, metavar="KEY=VALUE", help="Any option of srun.")
@click.option(
    "--setup", multiple=True, metavar="LINE", help="A line of shell before the step: module load, source."
)
@click.option("--dry-run", is_flag=True, help="Print the script and submit nothing.")
@click.argument("script", required=False, metavar="SCRIPT", shell_complete=files)
@click.argument("args", nargs=-1, metavar="[ARGS]...", type=click.UNPROCESSED)
@click.pass_context
def slurm(
    ctx: click.Context, /, script: str | None, args: tuple[str, ...], dry_run: bool, **values: Any
) -> int:
    """Write a batch script for SCRIPT, show it, and submit it.

    Options of sbatch keep their long names (--time 8:00:00 --partition gpu --gres gpu:8). Options --container-* are
    those of srun with pyxis. Flags of holdfast run (--nproc-per-node, --root, ...) are passed on to it.
    """  # fmt: skip
    if script is None:
        raise UsageError(
            "no training script given", hint="holdfast submit slurm --nodes 2 --time 8:00:00 train.py"
        )
    try:
        batch = _batch(ctx, script, args, values)
        text = render(batch)
        if values["token_file"]:
            read_token(Path(values["token_file"]))
    except (UserError, AuthError) as error:  # of any kind: nothing was submitted
        raise UsageError(error.message, hint=error.hint) from error
    if dry_run:
        echo(text, nl=False)
        return 0
    echo(text, err=True)
    number = _sbatch(text, batch, Path(values["run_dir"] or "runs"))
    output = batch.output.replace("%j", number)
    run_id = batch.run_id or f"slurm-{number}"
    echo(
        f"submitted as job {number}, run {run_id}; output: {output}; to save and end it: scancel {number}",
        err=True,
    )
    echo(number)
    return 0


def _batch(ctx: click.Context, script: str, args: tuple[str, ...], values: dict[str, Any]) -> Batch:
    """Check the command line, and return the content of the batch script. Raises: UsageError, ScriptError."""
    container = named(values, PYXIS)
    options = named(values, (*OPTIONS, *OURS))
    added = pairs("--sbatch", values["sbatch"])
    if twice := sorted(options.keys() & added):
        raise UsageError(f"--{twice[0]} and --sbatch {twice[0]} are both given", hint="leave one of them out")
    options |= added
    if not container:
        find_target(kind_of(values), script)  # an image has its own files
    directory = values["run_dir"] or "runs"
    return Batch(
        nodes=values["nodes"],
        spares=values["spares"],
        name=options.pop("job-name", None) or Path(script).stem,
        output=options.pop("output", None) or f"{directory}/slurm-%j.out",
        done=f"{directory}/.done",
        grace_s=values["grace_s"],
        command=(script, *args),
        flags=flags_of(ctx, values),
        launcher=("holdfast",) if container else _launcher(),
        run_id=values["run_id"],
        max_starts=values["max_starts"],
        options=options,
        srun={**container, **pairs("--srun", values["srun"])},
        setup=tuple(values["setup"]),
    )


def _launcher() -> tuple[str, ...]:
    """Return the words that start Holdfast on another host, which has the same files but perhaps another PATH."""
    found = shutil.which("holdfast")
    here = Path(sys.executable).parent
    return ("holdfast",) if found and Path(found).parent == here else (sys.executable, "-m", "holdfast")


def _sbatch(script: str, batch: Batch, directory: Path) -> str:
    """Submit a batch script to Slurm, and return the number of the job. Raises: UsageError.

    The script is written to a file in ``directory``.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise UsageError(
            "there is no sbatch on PATH: this host submits no Slurm jobs",
            hint="run this on a login node; --dry-run prints the script",
        )
    path = directory / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', batch.name).lstrip('.-') or 'job'}.sbatch"
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_private(path, script.encode())
        done = subprocess.run([program, "--parsable", str(path)], capture_output=True, text=True,
                              timeout=SUBMIT_S, check=False)  # fmt: skip
    except subprocess.TimeoutExpired:
        raise UsageError(f"sbatch has not answered for {SUBMIT_S:g} s; the job may have been taken or not",
                         hint="squeue --me shows it") from None  # fmt: skip
    except OSError as error:
        raise UsageError(f"cannot submit {path}: {error.strerror}", hint="check --run-dir") from error
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdecimal():
        said = done.stderr.strip() or done.stdout.strip() or f"code {done.returncode}"
        raise UsageError(f"sbatch refused the script: {said}", hint=f"the script is {path}")
    return number


@passes_flags
@submit.command(context_settings=SETTINGS)
@click.option(
    "--kind",
    type=click.Choice(KINDS),
    default="job",
    show_default=True,
    help="A Job, a JobSet (jobset.x-k8s.io), or a TrainJob with its runtime (trainer.kubeflow.org).",
)
@click.option("--name", required=True, help="Name of the job, and of the run.")
@click.option("--image", required=True, help="Image that has Holdfast and the script.")
@click.option("--nodes", type=int, default=1, show_default=True, help="Pods that hold ranks.")
@click.option(
    "--spares", "spare_nodes", type=int, default=0, show_default=True, help="Pods that wait for a loss."
)
@click.option(
    "--grace-s",
    type=FiniteNumber(min=1),
    default=120,
    show_default=True,
    help="Seconds that the last save may take; a pod is given that long, and 30 s, to end.",
)
@click.option(
    "--pvc", default="", help="PersistentVolumeClaim for the checkpoints; all pods have to mount it."
)
@click.option("--mount", default="/checkpoints", show_default=True, help="Where it is mounted.")
@click.option(
    "--shm-size", default="", help="Limit of /dev/shm, for example 16Gi; by default that of the memory."
)
@click.option(
    "--resource", multiple=True, metavar="KEY=QUANTITY", help="A limit: nvidia.com/gpu=8, memory=64Gi."
)
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="A variable of the containers.")
@click.option("--namespace", default="", help="Namespace of all objects.")
@click.option(
    "--watch/--no-watch",
    "watches",
    default=True,
    show_default=True,
    help="Let pods watch their node and pod and annotate their pod: a ServiceAccount, a Role, a ClusterRole.",
)
@click.option("--show-secret", is_flag=True, help="Make a token and print its Secret, too.")
@click.option("--apply", "applies", is_flag=True, help="Give the objects to kubectl apply.")
@click.argument("script", required=False, metavar="SCRIPT")
@click.argument("args", nargs=-1, metavar="[ARGS]...", type=click.UNPROCESSED)
@click.pass_context
def k8s(ctx: click.Context, /, script: str | None, args: tuple[str, ...], **values: Any) -> int:
    """Print the Kubernetes objects that run SCRIPT, a path in the image.

    Flags of holdfast run (--nproc-per-node, --root, ...) are passed on to it. A job of several nodes needs a Secret,
    which is not printed. --apply makes it if there is none, and --show-secret prints a new one.
    """  # fmt: skip
    if script is None:
        raise UsageError("no training script given",
                         hint="holdfast submit k8s --name bert --image IMAGE /app/train.py")  # fmt: skip
    if values["token_file"]:
        raise UsageError("--token-file is a file of this host; a pod gets its token from a Secret",
                         hint="leave it out: --apply makes the Secret")  # fmt: skip
    pods = Pods(
        name=values["name"],
        image=values["image"],
        nodes=values["nodes"],
        spares=values["spare_nodes"],
        grace_s=values["grace_s"],
        command=(script, *args),
        flags=flags_of(ctx, values),
        claim=values["pvc"],
        mount=values["mount"],
        shm=values["shm_size"],
        namespace=values["namespace"],
        watches=values["watches"],
        resources=_texts("--resource", values["resource"]),
        env=_texts("--env", values["env"]),
    )
    made = objects(pods, values["kind"])
    fresh = secret(pods, secrets.token_hex(TOKEN_SIZE_BYTES))
    if pods.watches and not pods.namespace:
        say("note: without --namespace the pods get no right to read their node; --no-watch asks for none")
    if values["applies"]:
        _apply(pods, made, fresh)
        return 0
    made = [*rights(pods), *made]
    echo(documents([fresh, *made] if values["show_secret"] and pods.total > 1 else made), nl=False)
    if pods.total > 1 and not values["show_secret"]:
        place = f" --namespace {pods.namespace}" if pods.namespace else ""
        say(
            f"note: the Secret {pods.secret} is not printed; --apply makes it, --show-secret prints one, or: "
            f"openssl rand -hex 32 | kubectl create secret generic {pods.secret}{place} --from-file=token=/dev/stdin"
        )
    return 0


def _texts(flag: str, texts: tuple[str, ...]) -> dict[str, str]:
    """Parse the ``KEY=VALUE`` texts of a flag, and return the value of each key. Raises: UsageError."""
    found = {key: value for key, value in pairs(flag, texts).items() if value is not None}
    if len(found) < len(texts):
        raise UsageError(f"{flag} needs KEY=VALUE", hint="holdfast submit k8s --help")
    return found


def _apply(pods: Pods, made: list[Object], fresh: Object) -> None:
    """Pass the objects of a job to ``kubectl apply``. Raises: UsageError.

    An existing Secret is kept, because pods of the job may have read it. Otherwise ``fresh``, a new Secret, is applied.
    """
    program = shutil.which("kubectl")
    if program is None:
        raise UsageError("there is no kubectl on PATH", hint="leave --apply out: the objects are printed")
    place = ["--namespace", pods.namespace] if pods.namespace else []
    there = "secret/"
    if pods.total > 1:
        there = _kubectl(
            [program, *place, "get", "secret", pods.secret, "--ignore-not-found", "--output=name"]
        )
    if pods.watches:
        _apply_rights([program, *place], pods)
    wanted = made if there.startswith("secret") else [fresh, *made]
    echo(_kubectl([program, *place, "apply", "--filename=-"], documents(wanted)), nl=False)


def _apply_rights(kubectl: list[str], pods: Pods) -> None:
    """Apply the objects that give the pods their rights. If kubectl fails, only warn: the job works without them."""
    try:
        echo(_kubectl([*kubectl, "apply", "--filename=-"], documents(rights(pods))), nl=False)
    except UsageError as error:
        say(
            f"warning: {error.message}; the pods run, and do not watch their node; an administrator can apply these:"
        )
        echo(documents(rights(pods)), nl=False, err=True)


def _kubectl(command: list[str], given: str = "") -> str:
    """Run kubectl with ``given`` as its input, and return its output. Raises: UsageError."""
    try:
        done = subprocess.run(
            command, input=given, capture_output=True, text=True, timeout=SUBMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"kubectl cannot be asked: {error}", hint="kubectl cluster-info") from error
    if done.returncode:
        raise UsageError(f"kubectl refused: {done.stderr.strip() or done.returncode}",
                         hint="leave --apply out: the objects are printed")  # fmt: skip
    return done.stdout
