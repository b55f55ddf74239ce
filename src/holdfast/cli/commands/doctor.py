"""The command ``holdfast doctor``, which tests a machine before a run, and computes the cost of a lost rank."""

from __future__ import annotations

import importlib
import os
import platform
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import click
import msgspec

from holdfast import event_log
from holdfast.cli.screen.completers import run_names
from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.screen.run_lookup import find_run
from holdfast.cli.start.preflight import no_processes_for
from holdfast.core.protocol.status_page import FILE_SIZE_BYTES
from holdfast.errors import HoldfastError, StoreError
from holdfast.exit_codes import Exit
from holdfast.history.run_history import RunHistory
from holdfast.runtime.net.connection_limits import LIMIT_MAX
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import SHARED_MEMORY
from holdfast.runtime.node.torch_build import TESTED, all_restart, cannot_load, torch_build
from holdfast.session.checkpoints.memory_tier import cost_of_a_loss
from holdfast.store.backends.location import Place, place_of
from holdfast.store.backends.registry import open_store
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.checkpoint_tools import holdings
from holdfast.text import plural

PYTHON_LEAST = (3, 11)
FILES_LEAST = 4096
SHARED_LEAST_BYTES = 64 << 20
PROBE_SIZE_BYTES = 16 << 20
TEMPORARY_LENGTH_MAX = 107 - len("/pymp-12345678/listener-12345678")  # a path of a Unix socket has 107 bytes
SLOW_BYTES_PER_S = 50e6
WORKSPACES = (":4096:8", ":16:8")  # settings of the workspace with which cuBLAS is deterministic
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": WORKSPACES[0], "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
"""Environment variables with which all processes compute equal bits, each with a sufficient value.

The algorithm of NCCL decides the order in which it adds.
"""
SIGNS = {"good": ("ok", "green"), "poor": ("??", "yellow"), "bad": ("NO", "red")}

Grade = Literal["good", "poor", "bad"]


class DoctorFinding(msgspec.Struct, frozen=True):
    """The result of one test of the doctor. ``advice``: what the user should change; empty if nothing."""

    what: str
    grade: Grade
    found: str
    advice: str = ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("run", required=False, metavar="[RUN]", shell_complete=run_names)
@click.option(
    "--run-dir", "--run_dir", default="runs", help="Directory that holds the runs.", show_default=True
)
@click.option("--checkpoint", help="A place for checkpoints to try out: a directory, or s3://bucket/prefix.")
@click.option("--json", "as_json", is_flag=True, help="A list of JSON objects.")
def doctor(run: str | None, run_dir: str, checkpoint: str | None, as_json: bool) -> int:
    """Test Python, torch, shared memory, limits and the checkpoint directory.

    With RUN (an id or a path), also show how many steps the loss of one rank of this run would cost. The newest
    checkpoint of RUN shows that. The exit code is 3 if a test has found that a run would fail.
    """
    findings = list(examine(checkpoint))
    if run is not None:
        directory, _ = find_run(run, run_dir)
        findings += _losses(directory.journal)
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(findings), indent=2))
    else:
        for each in findings:
            sign, colour = SIGNS[each.grade]
            echo(f"  {each.what:16}  {each.found}", lead=click.style(sign, fg=colour))
            if each.advice:
                echo(f"    next: {each.advice}")
    return Exit.BAD_INPUT if any(each.grade == "bad" for each in findings) else Exit.OK


def examine(checkpoint: str | None) -> Iterator[DoctorFinding]:
    """Yield the results of all tests of this machine. ``checkpoint``: a place of checkpoints to test, or None."""
    looks: list[Callable[[], DoctorFinding]] = [
        _python,
        _torch,
        _groups,
        _shared_memory,
        _files,
        _processes,
        _temporary,
    ]
    for look in looks:
        yield look()
    yield from _names()
    yield from _same_bits()
    if checkpoint is not None:
        yield _checkpoints(place_of(checkpoint))


def _python() -> DoctorFinding:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info < PYTHON_LEAST:
        return DoctorFinding("python", "bad", found, f"use {'.'.join(map(str, PYTHON_LEAST))} or newer")
    return DoctorFinding("python", "good", found)


def _torch() -> DoctorFinding:
    try:
        if torch_build() is None:
            return DoctorFinding(
                "torch", "poor", "not there", "pip install 'holdfast[torch]' (for PyTorch jobs)"
            )
        torch = importlib.import_module("torch")
    except HoldfastError as error:
        return DoctorFinding("torch", "bad", error.message, error.hint)
    except (ImportError, OSError) as error:
        known = cannot_load(error)
        return DoctorFinding("torch", "bad", known.message, known.hint)
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        return DoctorFinding(
            "torch", "bad", f"{torch.__version__} without torch.distributed", "install another build"
        )
    backends = [name for name in ("gloo", "nccl") if getattr(distributed, f"is_{name}_available")()]
    devices = plural(torch.cuda.device_count(), "GPU") if torch.cuda.is_available() else "CPU only"
    return DoctorFinding("torch", "good", f"{torch.__version__}, {' and '.join(backends)}, {devices}")


def _groups() -> DoctorFinding:
    try:
        groups = importlib.import_module("holdfast.frameworks.torch.comm.backend")
        groups.install()
    except ImportError:
        return DoctorFinding("process groups", "poor", "no torch: nothing to survive in")
    except (HoldfastError, OSError) as error:
        return DoctorFinding("process groups", "bad", str(error))
    if reason := groups.untouched():
        found = all_restart(sys.modules["torch"].__version__, reason)
        return DoctorFinding("process groups", "poor", found, f"use torch {TESTED}")
    return DoctorFinding("process groups", "good", "broken collectives can be left, groups rebuilt")


def _names() -> Iterator[DoctorFinding]:
    """Yield the result of the tests of torch's private names: one result if all pass, otherwise one per failure."""
    try:
        private = importlib.import_module("holdfast.frameworks.torch.private_api")
    except ImportError:
        return
    passed, failed = private.probed()
    for wrong, lost in failed:
        advice = f"use torch {TESTED}, or start again after a fault: --on-fault restart"
        yield DoctorFinding("torch's names", "poor", f"{wrong}: without it, no {lost}", advice)
    if not failed:
        found = f"{plural(passed, 'probe')} of private names passed (tested: torch {TESTED})"
        yield DoctorFinding("torch's names", "good", found)


def _same_bits() -> Iterator[DoctorFinding]:
    """If a GPU is present, test the settings for equal bits, and yield the result.

    With these settings a process computes the same bits as another process would.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return
    settings = {name: os.environ.get(name, "") for name in DETERMINISTIC}
    if settings["CUBLAS_WORKSPACE_CONFIG"] not in WORKSPACES:
        settings["CUBLAS_WORKSPACE_CONFIG"] = ""
    lacking = [f"{name}={DETERMINISTIC[name]}" for name, value in settings.items() if not value]
    script = "torch.use_deterministic_algorithms(True)"
    if not lacking and not torch.backends.cudnn.benchmark:
        found = f"a replaced rank computes the same bits, where the script says {script}"
        yield DoctorFinding("same bits", "good", found)
        return
    chosen = "cuDNN chooses by speed" if not lacking else "cuBLAS and NCCL choose their algorithms"
    found = f"a replaced rank may compute other last bits: {chosen} in each process"
    export = f"export {' '.join(lacking)}; " if lacking else ""
    advice = f"{export}in the script {script} and torch.backends.cudnn.benchmark = False"
    yield DoctorFinding("same bits", "poor", found, advice)


def _shared_memory() -> DoctorFinding:
    if not os.access(SHARED_MEMORY, os.W_OK | os.X_OK):
        return DoctorFinding(
            "shared memory", "poor", f"{SHARED_MEMORY} cannot be written: pages go to the run directory"
        )
    usage = shutil.disk_usage(SHARED_MEMORY)
    found = f"{usage.free >> 20} of {usage.total >> 20} MiB free in {SHARED_MEMORY}"
    if usage.free < SHARED_LEAST_BYTES:
        need = (
            f"{FILE_SIZE_BYTES >> 10} KiB per worker, and a copy of its part of the state while it is saved"
        )
        return DoctorFinding("shared memory", "bad", found, f"make room ({need}); in a container: --shm-size")
    return DoctorFinding("shared memory", "good", found)


def _files() -> DoctorFinding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = LIMIT_MAX if hard == resource.RLIM_INFINITY else hard
    found = f"{most} open files per process of a run ({soft} here)"
    if most < FILES_LEAST:
        return DoctorFinding(
            "file limit", "poor", found, f"raise the hard limit (ulimit -Hn) to {FILES_LEAST}"
        )
    return DoctorFinding("file limit", "good", found)


def _processes() -> DoctorFinding:
    if why := no_processes_for(1):
        return DoctorFinding("process limit", "bad", why, "ulimit -u; in a container: --pids-limit")
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    most = "no limit" if soft == resource.RLIM_INFINITY else f"{soft} for this user"
    return DoctorFinding("process limit", "good", most)


def _temporary() -> DoctorFinding:
    """Test the directory of temporary files.

    The worker processes of a data loader connect through sockets in this directory. If they cannot, they wait forever.
    """
    try:
        place = tempfile.gettempdir()
    except OSError as error:
        return DoctorFinding("temporary files", "bad", str(error), "TMPDIR=/a/writable/directory")
    found = f"in {place}"
    if len(os.fsencode(place)) > TEMPORARY_LENGTH_MAX:
        advice = f"TMPDIR of at most {TEMPORARY_LENGTH_MAX} bytes: data loaders with workers can stand still"
        return DoctorFinding("temporary files", "poor", f"{found}: too long for a socket below it", advice)
    return DoctorFinding("temporary files", "good", found)


def _checkpoints(place: Place) -> DoctorFinding:
    if isinstance(place, Path):
        return _directory(place)
    try:
        open_store(place).probe()
    except StoreError as error:
        return DoctorFinding("checkpoints", "bad", error.message, error.hint)
    return DoctorFinding("checkpoints", "good", f"{place}: writable, with conditional writes")


def _directory(path: Path) -> DoctorFinding:
    """Test whether a directory is writable, and how fast a file in it is written and synced.

    A missing directory is not created: its first existing parent is tested.
    """
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            began_s = time.monotonic()
            probe.write(bytes(PROBE_SIZE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
            took_s = time.monotonic() - began_s
    except OSError as error:
        return DoctorFinding(
            "checkpoints", "bad", f"{path}: {error.strerror}", "session(checkpoint=...): another place"
        )
    speed = PROBE_SIZE_BYTES / took_s
    found = f"{path}: {speed / 1e6:.0f} MB/s to the disk, {shutil.disk_usage(there).free >> 30} GiB free"
    if speed < SLOW_BYTES_PER_S:
        return DoctorFinding(
            "checkpoints", "poor", found, "saves take long here: save_every_s instead of every few steps"
        )
    return DoctorFinding("checkpoints", "good", found)


def _losses(log: Path) -> list[DoctorFinding]:
    """Return results about how many steps a run would lose if it lost one rank.

    They are computed from the newest valid checkpoint of the run. ``log`` is the event log of the run.
    """
    root = RunHistory.read(event_log.read(log).events).root
    if not root:
        return [
            DoctorFinding("a lost rank", "poor", "costs everything: no session has reported where it saves")
        ]
    findings = [_checkpoints(place_of(root))]
    try:
        newest = Root(root).newest_valid().require()
        found = holdings(place_of(newest.path))
    except HoldfastError as error:
        what = f"not known before the first checkpoint: {error.message}"
        return [*findings, DoctorFinding("a lost rank", "poor", what)]
    alone: dict[int, int] = {}
    least = 0
    for one in found:
        least = min(least or len(one.ranks), len(one.ranks))
        if len(one.ranks) == 1:
            size_bytes = one.box.numel * DTYPE_SIZE_BYTES[one.dtype]
            alone[one.ranks[0]] = alone.get(one.ranks[0], 0) + size_bytes
    if not alone:
        text = f"costs 0 steps: every part of the state is on {least} ranks or more (step {newest.step})"
        return [*findings, DoctorFinding("a lost rank", "good", text)]
    every = RunSettings.load(log.parent).memory_every
    text = cost_of_a_loss(True, max(alone.values()), every)
    if every != 0:
        return [*findings, DoctorFinding("a lost rank", "good", text)]
    return [
        *findings,
        DoctorFinding("a lost rank", "poor", text, "start with --memory-every auto, or replicate (HSDP)"),
    ]
