"""The settings of a run, made from flag values. A wrong value is reported here, before any process starts."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from holdfast.cli.start.flags import BY_KEY, FLAGS
from holdfast.cli.start.misplaced_flags import misplaced
from holdfast.cli.start.node_flags import (
    RUN_HELP,
    NodeFlags,
    encrypts,
    node_notes,
    read_counts,
    read_nodes,
    read_secret,
    shrink_to,
)
from holdfast.cli.start.rank_table_flags import place
from holdfast.cli.start.untested_torch import heed_torch
from holdfast.core.decide.ladder import Ladder
from holdfast.core.ids import is_run_id
from holdfast.core.worker.vote import WORLD_SIZE_MAX
from holdfast.errors import ScriptError, UnsupportedError, UsageError
from holdfast.runtime.net.addresses import read_host
from holdfast.runtime.node.framework_registry import FRAMEWORKS, FrameworkName
from holdfast.runtime.node.run_settings import RunSettings, TargetKind, new_launch
from holdfast.store.backends.location import ROOT_VARIABLE, absolute
from holdfast.text import closest

SCHEDULER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)  # warnings before a job's end: Slurm's --signal=USR1@60
_COUNT_DEVICES = {
    "auto": "torch.accelerator.device_count() if torch.accelerator.is_available() else -1",
    "gpu": "torch.cuda.device_count() if torch.cuda.is_available() else 0",
    "xpu": "torch.xpu.device_count() if torch.xpu.is_available() else 0",
}
_COUNT_TIMEOUT_S = 120
LINE_PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # torchrun also reads this one besides PET_*

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Request:
    """The checked content of the command line of ``holdfast run``."""

    settings: RunSettings
    run_dir: Path
    shown_local_ranks: frozenset[int]
    signals: tuple[signal.Signals, ...]
    notes: tuple[str, ...]
    token: bytes = b""  # secret of the job; empty: a new one is made
    line_prefix: str = ""  # value of --log-line-prefix-template


def resolve(values: Mapping[str, Any], given: frozenset[str], script: str, args: tuple[str, ...]) -> Request:
    """Check every flag of ``holdfast run`` and the script, and return the checked request.

    Args:
        values: the value of each flag, by :attr:`RunFlag.key`.
        given: keys of the flags that the user has set.
        script: path of a script, name of a module, or program.
        args: arguments of the script, which are passed on unchanged.

    Raises:
        UsageError: a flag has a value that cannot work.
        UnsupportedError: a flag is set that is refused by name.
        ScriptError: there is no such script, module or program.
    """
    notes = _refuse_and_note(values, given)
    values, given, rank_table, device_ids, told = place(values, given)
    nodes = read_nodes(values, given)
    kind = kind_of(values)
    _refuse_other_bytes((os.getcwd(), script, *args, *(str(value) for value in values.values())))
    target = find_target(kind, script)
    counts = worker_counts(str(values["nproc_per_node"]), nodes)
    nproc = workers_of(nodes, counts)
    run_id = _run_id(values["run_id"], kind, script) + (f"-{nodes.node}" if nodes.several else "")
    run_dir = Path(values["run_dir"]).absolute() / run_id
    settings = RunSettings(
        run_id=run_id,
        launch=new_launch() if values["run_id"] or nodes.several else "",
        kind=kind,
        target=target,
        typed=script,
        args=args,
        command=("holdfast", *sys.argv[1:]),
        created_at=time.time(),
        nproc=nproc,
        nprocs=counts if len(counts) > 1 else (),
        nnodes=nodes.least,
        nnodes_max=nodes.most,
        nnodes_min=shrink_to(values, nodes, counts),
        node=nodes.node,
        contacts=nodes.contacts,
        first_contacts=nodes.first_contacts,
        join_s=nodes.join_s,
        bind=nodes.bind,
        encrypts=encrypts(values, nodes),
        witness=str(absolute(values["witness"])) if values["witness"] is not None else "",
        master_addr=read_host(str(values["master_addr"]).strip(), "--master-addr"),
        master_port=0 if nodes.several else int(values["master_port"] or 0),
        role=str(values["role"]),
        rank_table=rank_table,
        device_ids=device_ids,
        **_answers(values),
        monitor_interval_s=_at_least(values, "monitor_interval", 0.001),
        grace_s=_grace_s(values, given),
        framework=_framework(str(values["framework"])),
        preload=_preload(str(values["preload"])),
        cwd=os.getcwd(),
        python=os.environ.get("PYTHON_EXEC", ""),
        env={ROOT_VARIABLE: str(absolute(values["root"]))} if values["root"] is not None else {},
        log_dir=str(Path(values["log_dir"]).absolute() / run_id) if values["log_dir"] else "",
        redirects=str(values["redirects"]),
        tee=str(values["tee"]),
    )
    _check_address(settings, given)
    notes += told + node_notes(nodes, settings) + tuple(filter(None, [misplaced(target, args)]))
    token = read_secret(values["token_file"], nodes)
    shown = shown_local_ranks(nproc, settings.tee, settings.redirects, str(values["local_ranks_filter"]))
    signals = _signals(str(values["signals_to_handle"]))
    prefix = values["log_line_prefix_template"] or os.environ.get(LINE_PREFIX_VARIABLE, "")
    settings, untested = heed_torch(settings)
    return Request(settings, run_dir, shown, signals, notes + untested, token, prefix)


def _refuse_and_note(values: Mapping[str, Any], given: frozenset[str]) -> tuple[str, ...]:
    notes = []
    for flag in FLAGS:
        if flag.key not in given or values[flag.key] in (None, False):
            continue
        if flag.use == "refused":
            raise UnsupportedError(
                f"{flag.name} is not supported: {flag.about}", hint=f"leave {flag.name} out"
            )
        if flag.use == "no effect":
            notes.append(f"{flag.name} has no effect: {flag.about}")
    backend = str(values["rdzv_backend"])
    if backend not in ("static", "c10d"):
        raise UnsupportedError(
            f"--rdzv-backend {backend} is not supported: workers meet through the agent, no other service is needed",
            hint="leave --rdzv-backend out",
        )
    if "rdzv_backend" in given:
        notes.append(f"--rdzv-backend has no effect: {BY_KEY['local_addr'].about}")
    if str(values["nnodes"]) in ("1", "1:1"):
        if "rdzv_endpoint" in given:
            notes.append("--rdzv-endpoint has no effect: one node has no other node to meet")
        if values["encrypt"]:
            notes.append("--encrypt has no effect: on one node nothing that Holdfast sends leaves the host")
    return tuple(notes)


def _refuse_other_bytes(words: Iterable[str]) -> None:
    """Refuse words that are not UTF-8, because settings and event log can store only UTF-8. Raises: UsageError."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise UsageError(
                f"{word!a} is not UTF-8", hint="rename it, or link to it by another name"
            ) from None


def kind_of(values: Mapping[str, Any]) -> TargetKind:
    """Return the kind of program that the flags ask for: script, module or executable. Raises: UsageError."""
    if values["module"] and values["no_python"]:
        raise UsageError("--module and --no-python exclude each other", hint="leave one of them out")
    if values["run_path"]:
        return "script"
    return "module" if values["module"] else "executable" if values["no_python"] else "script"


def _framework(asked: str) -> FrameworkName:
    name = next((each for each in FRAMEWORKS if each == asked), None)
    if name is None:
        raise UsageError(f"--framework {asked}: supported are {', '.join(FRAMEWORKS)}", hint=RUN_HELP)
    known = FRAMEWORKS[name]
    # Another interpreter (PYTHON_EXEC) has its own packages. Its workers report a missing package.
    if (
        name != "torch"
        and "PYTHON_EXEC" not in os.environ
        and importlib.util.find_spec(known.package) is None
    ):
        raise UsageError(f"--framework {name}: {known.package} is not installed for {sys.executable}",
                         hint=f"pip install {known.requirement}")  # fmt: skip
    return name


def _preload(names: str) -> tuple[str, ...]:
    modules = tuple(name for name in names.replace(" ", "").split(",") if name)
    for name in modules:
        package = name.partition(".")[0]
        if "PYTHON_EXEC" not in os.environ and (not package or importlib.util.find_spec(package) is None):
            raise UsageError(f"--preload {name}: {package or 'that'} is not installed for {sys.executable}",
                             hint="name modules as the script imports them, with commas")  # fmt: skip
    return modules


def find_target(kind: TargetKind, script: str) -> str:
    """Return the absolute path of the script or program ``script``, or the name of a module. Raises: ScriptError."""
    if kind == "executable":
        program = shutil.which(script)
        if program is None:
            raise ScriptError(f"the program {script} does not exist or is not executable (--no-python)",
                              hint="give its path, or leave --no-python out for a Python script")  # fmt: skip
        return os.path.abspath(program)
    if kind == "module":
        _check_module(script)
        return script
    path = Path(script).absolute()
    if not path.exists():
        raise ScriptError(f"the training script {script} does not exist (looked for {path})",
                          hint=_script_hint(path))  # fmt: skip
    if path.is_dir() and not (path / "__main__.py").is_file():
        raise ScriptError(f"the training script {path} is a directory without __main__.py",
                          hint="name the .py file")  # fmt: skip
    if not os.access(path, os.R_OK):
        raise ScriptError(f"the training script {path} cannot be read", hint=f"chmod u+r {path}")
    return str(path)


def _script_hint(path: Path) -> str:

    siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
    close = closest(path.name, siblings)
    return f"did you mean {close}?" if close else "check the path; for a module use -m"


def _check_module(name: str) -> None:
    path = Path(name)
    # For "train.py", Python would import the file train.py, to look for a submodule "py".
    if path.suffix == ".py" and path.is_file():
        raise ScriptError(
            f"-m {name}: {path.name} is a file, and -m takes the name of a module",
            hint=f"leave -m out, or write -m {name.removesuffix('.py').replace('/', '.')}",
        )
    top = name.partition(".")[0]
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        found = bool(top) and importlib.util.find_spec(top) is not None
    except (ImportError, ValueError):
        found = False
    finally:
        sys.path[:] = before
    # Another interpreter (PYTHON_EXEC) has its own packages. It reports a missing module itself.
    if not found and "PYTHON_EXEC" not in os.environ:
        raise ScriptError(f"no module named {name} (looked in {os.getcwd()} and the installed packages)",
                          hint="check the name; for a file leave -m out")  # fmt: skip


def worker_counts(asked: str, nodes: NodeFlags) -> tuple[int, ...]:
    """Return the numbers of workers per node that ``--nproc-per-node`` (``asked``) means.

    The result has one number for all nodes, or one number for each node in the order of ``--node-rank``.

    Raises:
        UsageError: the value has no known form or not one number per node, the host has no such device, or the job
            would have too many ranks.
    """
    counts = (_of_devices(asked),) if asked in ("cpu", *_COUNT_DEVICES) else read_counts(asked)
    if len(counts) not in (1, nodes.least):
        raise UsageError(
            f"--nproc-per-node {asked} is for {len(counts)} nodes, and ranks are on {nodes.least}",
            hint="a number for each node of --nnodes (of MIN in MIN:MAX), or one for all",
        )
    if len(counts) > 1 and nodes.number < 0:
        raise UsageError(
            f"--nproc-per-node {asked}: which of these is this host's?",
            hint="--node-rank K on each host, from 0",
        )
    if (sum(counts) if len(counts) > 1 else nodes.least * counts[0]) > WORLD_SIZE_MAX:
        raise UsageError(
            f"--nnodes {nodes.least} with --nproc-per-node {asked}: a job has at most {WORLD_SIZE_MAX} ranks",
            hint="start fewer nodes, or fewer workers on each",
        )
    return counts if len(set(counts)) > 1 else counts[:1]


def workers_of(nodes: NodeFlags, counts: Sequence[int]) -> int:
    """Return the number of workers of this node.

    A spare node has the largest number of ``counts``, because it can replace any node.
    """
    if len(counts) == 1:
        return counts[0]
    return counts[nodes.number] if nodes.number < nodes.least else max(counts)


def _of_devices(asked: str) -> int:
    """Return the number of workers that ``auto``, ``cpu``, ``gpu`` or ``xpu`` means on this host, as in torchrun.

    Raises:
        UsageError: the host has no such device.
    """
    count = _count_devices(asked) if asked in _COUNT_DEVICES else 0
    if count > 0:
        return count
    if asked in ("auto", "cpu"):
        return len(os.sched_getaffinity(0))
    raise UsageError(
        f"--nproc-per-node {asked}: torch sees no such device here", hint="use auto, cpu or a number"
    )


def _count_devices(kind: str) -> int:
    # A separate process counts the devices, so that the launcher neither imports torch nor initialises a device.
    code = f"import torch; print({_COUNT_DEVICES[kind]})"
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    try:
        result = subprocess.run(
            [python, "-c", code], capture_output=True, text=True, timeout=_COUNT_TIMEOUT_S, check=False
        )
        return int(result.stdout) if result.returncode == 0 else 0
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        raise UsageError(f"--nproc-per-node {kind}: {python} could not count devices: {error}",
                         hint="give a number") from error  # fmt: skip


def _run_id(asked: str | None, kind: str, script: str) -> str:
    if asked is None:
        name = script.rpartition(".")[2] if kind == "module" else Path(script).stem
        slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:24] or "run"
        return f"{time.strftime('%Y%m%d-%H%M%S')}-{slug}-{secrets.token_hex(2)}"
    if not is_run_id(asked):
        raise UsageError(
            f"--run-id {asked!r} is no name of a run: letters, digits, _ and -, at most 64, not first a _ or -",
            hint="for example --run-id bert-large-2",
        )
    return asked


def _at_least(values: Mapping[str, Any], key: str, least: Number) -> Number:
    value: Number = values[key]
    if not value >= least:
        raise UsageError(f"{BY_KEY[key].name} {value} is less than {least}", hint=RUN_HELP)
    return value


class Answers(TypedDict):
    """The settings that define what counts as a fault, and how a fault is answered."""

    max_restarts: int
    restart_window_s: float
    node_faults_max: int
    node_window_s: float
    on_fault: str
    spares: int
    hang_factor: float
    hang_floor_s: float
    hang_start_s: float
    verify_every: int
    replace_slower_than: float
    memory_every: int
    notices: str
    health: str
    health_every_s: float


def _answers(values: Mapping[str, Any]) -> Answers:
    return {
        "max_restarts": _at_least(values, "max_restarts", 0),
        "restart_window_s": _at_least(values, "restart_window", 1.0),
        "node_faults_max": _at_least(values, "node_faults", 0),
        "node_window_s": _at_least(values, "node_window", 1.0),
        "on_fault": _on_fault(values),
        "spares": _spares(values),
        "hang_factor": _at_least(values, "hang_factor", 0.0),
        "hang_floor_s": _at_least(values, "hang_floor", 0.1),
        "hang_start_s": _at_least(values, "hang_start", 1.0),
        "verify_every": _at_least(values, "verify_every", 0),
        "replace_slower_than": _at_least(values, "replace_slower_than", 0.0),
        "memory_every": _memory_every(str(values["memory_every"])),
        "notices": _notices(str(values["notices"])),
        "health": _health(str(values["health"])),
        "health_every_s": _at_least(values, "health_every", 1.0),
    }


def _notices(spec: str) -> str:
    if spec != "auto":
        # Here, since the import takes a tenth of the start of a run.
        from holdfast.runtime.node.notice_sources import read_sources

        read_sources(spec, os.environ)  # raises for an unknown source
    return spec


def _health(command: str) -> str:
    try:
        shlex.split(command)
    except ValueError as error:
        raise UsageError(f"--health {command}: {error}", hint="quote it as in a shell") from error
    return command


def _spares(values: Mapping[str, Any]) -> int:
    count = _at_least(values, "spares", 0)
    if count and (values["framework"] != "torch" or values["no_python"]):
        raise UsageError(
            f"--spares {count}: only a torch script can be built beforehand",
            hint="leave --spares out: a lost worker is forked from the zygote",
        )
    if count and not Ladder.parse(str(values["on_fault"])).tries("replace", "memory"):
        raise UsageError(
            f"--spares {count} with --on-fault {values['on_fault']}: no spare would ever be used",
            hint="leave --spares out, or name the answer that uses them: --on-fault replace",
        )
    return count


def _memory_every(text: str) -> int:
    if text == "auto":
        return -1
    if not text.isdecimal():
        raise UsageError(f"--memory-every {text} is neither auto nor a number of steps", hint=RUN_HELP)
    return int(text)


def _on_fault(values: Mapping[str, Any]) -> str:
    """Check the value of ``--on-fault`` and return it. Raises: UsageError."""
    spec = str(values["on_fault"])
    Ladder.parse(spec)
    return spec


def _grace_s(values: Mapping[str, Any], given: frozenset[str]) -> float:
    same = "shutdown_timeout" in given and "grace_s" not in given
    grace_s = float(values["shutdown_timeout" if same else "grace_s"])
    if not grace_s > 0:
        raise UsageError(f"--grace-s {grace_s} is not positive", hint=RUN_HELP)
    return grace_s


def _check_address(settings: RunSettings, given: frozenset[str]) -> None:
    if settings.several:  # the address is then the first contact of the agents, on some host
        return
    port = settings.master_port
    if not 0 <= port <= 65535:
        raise UsageError(f"--master-port {port} is no port number", hint="leave it out: a free one is chosen")
    if not given & {"master_port", "master_addr"}:
        return
    host = settings.master_addr
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} (--master-port) is in use by another process",
                hint="leave --master-port out (a free port is chosen), or find the process that uses this one: "
                f"ss -ltnp sport = :{port}",
            ) from error
        if error.errno == errno.EACCES:
            raise UsageError(f"port {port} (--master-port) needs privileges: {error.strerror}",
                             hint="leave --master-port out") from error  # fmt: skip
        raise UsageError(
            f"--master-addr {host} is no address of this machine: {error.strerror or error}",
            hint="leave --master-addr out: one node needs none",
        ) from error


def _signals(names: str) -> tuple[signal.Signals, ...]:
    found = []
    for name in filter(None, (n.strip() for n in names.split(","))):
        try:
            number = signal.Signals[name]
        except KeyError:
            raise UsageError(
                f"--signals-to-handle: {name} is no signal", hint="for example SIGTERM,SIGUSR1"
            ) from None
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise UsageError(f"--signals-to-handle: {name} cannot be handled by any process",
                             hint="for example SIGTERM,SIGUSR1")  # fmt: skip
        found.append(number)
    return tuple(dict.fromkeys((*found, *SCHEDULER_SIGNALS)))


def shown_local_ranks(nproc: int, tee: str, redirects: str, only: str) -> frozenset[int]:
    """Return the local ranks whose output goes to this node's console, by torchrun's rules.

    The output of every rank also goes to its log.

    Args:
        nproc: number of workers of this node.
        tee: value of torchrun's ``-t``; ``0`` shows local rank 0.
        redirects: value of torchrun's ``-r``; a rank in it that is not in ``tee`` is silent.
        only: value of torchrun's ``--local-ranks-filter``; empty without a filter.

    Raises:
        UsageError: a flag does not have the documented form.
    """
    teed = _streams("--tee", tee, nproc)
    silent = _streams("--redirects", redirects, nproc) - teed
    if only:
        if re.fullmatch(r"\d+(,\d+)*", only) is None:
            raise UsageError(f"--local-ranks-filter {only} is not of the form 0,1,2", hint=RUN_HELP)
        base = {int(rank) for rank in only.split(",")}
    else:
        base = teed or {0}
    return frozenset(rank for rank in base - silent if rank < nproc)


def _streams(name: str, value: str, nproc: int) -> set[int]:
    if re.fullmatch(r"[0-3]", value):
        return set(range(nproc)) if value != "0" else set()
    if re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", value):
        pairs = (item.split(":") for item in value.split(","))
        return {int(rank) for rank, streams in pairs if streams != "0"}
    raise UsageError(f"{name} {value} is neither 0 to 3 nor of the form 0:3,1:1", hint=RUN_HELP)
