"""The settings of a run (``run.json``): written by the launcher, read by agent, controller and workers."""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.core.ids import RUN_ID_LENGTH_MAX
from holdfast.core.watch.stall_detector import Limits
from holdfast.errors import UsageError
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.node.framework_registry import FrameworkName
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.runtime.node.secret_masking import masked
from holdfast.sealing import Secret
from holdfast.text import plural

SETTINGS_FILE = "run.json"
ARGUMENTS_FILE = "arguments.json"
"""The file with the script's unmasked arguments. It exists only if ``run.json`` has some of them masked."""
JOIN_S = 120.0

TargetKind = Literal["script", "module", "executable"]


def new_launch() -> str:
    """Return a new random id of one start of a run, for ``RunSettings.launch``."""
    return f"s{secrets.token_hex(3)}"


def without_launch(name: str) -> str:
    """Return ``name``, a value of ``RunSettings.saves_as``, without the id of the start (``RunSettings.launch``)."""
    return re.sub(r"-s[0-9a-f]{6}$", "", name)


def shape(nodes: int, counts: Sequence[int]) -> str:
    """Return the size of a job in words: ``2 nodes of 8 workers``, ``2 nodes of 8 and 4 workers``."""
    *first, last = map(str, counts)
    workers = f"{', '.join(first)} and {last} workers" if first else plural(counts[0], "worker")
    return f"{plural(nodes, 'node')} of {workers}"


class RunSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one run. Times are in seconds, paths are absolute.

    ``kind`` is the way in which ``target`` is started: ``script`` (path), ``module`` (``python -m``) or ``executable``
    (``--no-python``: any program, started directly). ``redirects`` and ``tee`` have torchrun's values (``0`` none,
    ``1`` stdout, ``2`` stderr, ``3`` both, or ``rank:n,...``). The log file always gets both streams. These two
    settings only choose the streams that the launcher shows.
    """

    run_id: str
    launch: str = ""  # distinguishes this start of the run from every other one with the same ``run_id``
    kind: TargetKind = "script"
    target: str = ""
    typed: str = ""  # the target as typed: a script's ``sys.argv[0]``; empty: ``target``
    args: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # the command line as typed, for reports
    created_at: float = 0.0  # Unix time
    root_before: str = ""  # where an earlier start of this run has saved; empty: a place to take is not known

    nproc: int = 1  # workers of this node
    # Workers of each node that has ranks, by node number; empty: ``nproc`` on all.
    nprocs: tuple[int, ...] = ()
    nnodes: int = 1  # nodes that have ranks
    nnodes_max: int = 1  # including nodes that wait as spares
    nnodes_min: int = 0  # the fewest nodes to continue with after a loss; 0: never fewer than ``nnodes``
    node: str = "node0"  # name of this node, the same for a successor agent
    job: str = ""  # name of the job that several nodes share; empty: ``run_id``
    # "host:port" of agents to dial first; the agent at the first contact names the first voters.
    contacts: tuple[str, ...] = ()
    first_contacts: int = 1  # how many of ``contacts``, from the first on, are addresses of the first contact
    join_s: float = JOIN_S  # time limit for the nodes to meet
    bind: str = "127.0.0.1"  # address at which this node listens for others
    encrypts: bool = False  # True if what Holdfast sends to other nodes is encrypted
    notices: str = "auto"  # sources of notices that this node will leave, see ``notice_sources``
    health: str = ""  # command that tests whether this node is fit to train
    health_every_s: float = 300.0
    witness: str = ""  # place on shared storage that decides which of two nodes may continue
    master_addr: str = "127.0.0.1"
    master_port: int = 0  # 0: the agent picks a free one per attempt
    role: str = "default"
    rank_table: str = ""  # path of the user's rank table; empty: none
    device_ids: tuple[int, ...] = ()  # devices of this host in the table, by local rank

    max_restarts: int = 16
    restart_window_s: float = 3600.0
    # A node with this many faults of its host within ``node_window_s`` is left out; 0: never.
    node_faults_max: int = 3
    node_window_s: float = 3600.0
    on_fault: str = "auto"  # see ``core.decide.ladder``
    monitor_interval_s: float = 0.1
    grace_s: float = 300.0
    quiesce_s: float = 5.0
    orphan_s: float = 30.0
    spares: int = 0  # processes per node that are built before they are needed
    hang_factor: float = 10.0  # limit on time without progress, in median step times; 0: no limit
    hang_floor_s: float = 1.5
    hang_start_s: float = 1800.0
    verify_every: int = 50  # all copies of the state are compared within this many steps; 0: never
    replace_slower_than: float = 0.0  # 0: stragglers are reported only
    # Steps between two states of a rank kept in memory; 0: none, -1: as often as it is cheap.
    memory_every: int = -1

    framework: FrameworkName = "torch"  # the framework that workers and zygote are prepared for
    preload: tuple[str, ...] = ()  # further modules that the zygote imports
    cwd: str = ""  # working directory of the workers; empty: the agent's
    python: str = ""  # interpreter of the workers; empty: the agent's
    env: dict[str, str] = {}  # variables of every worker, which override the agent's environment
    log_dir: str = ""  # directory of the attempt-NNN/ directories; empty: the run directory
    redirects: str = "0"
    tee: str = "0"
    zygote: bool = True  # fork workers from a preloaded process; false: always spawn
    library: bool = False  # the workers were started by another launcher (torchrun, srun, mpirun)

    def limits(self) -> Limits:
        """Return the limits on the time for which a worker may make no progress."""
        return Limits(
            factor=self.hang_factor,
            floor_s=self.hang_floor_s,
            start_s=self.hang_start_s,
            idle_s=self.hang_start_s / 3,
            section_s=2 * self.hang_start_s,
            look_s=min(max(self.monitor_interval_s, 0.02), 1.0),
        )

    @property
    def job_id(self) -> str:
        """The name of the job: the same on all nodes."""
        return self.job or self.run_id

    @property
    def saves_as(self) -> str:
        """The name of the job in its checkpoints: the same on all nodes, and different for each start of the run."""
        if self.job or not self.launch:
            return self.job_id
        return f"{self.run_id[: RUN_ID_LENGTH_MAX - len(self.launch) - 1]}-{self.launch}"

    @property
    def argv(self) -> list[str]:
        """The ``sys.argv`` of the script."""
        return [self.typed or self.target, *self.args]

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of workers of each node, by node number. A tuple of one number holds for all nodes."""
        return self.nprocs or (self.nproc,)

    @property
    def workers(self) -> int:
        """The number of ranks of the job with all its nodes."""
        return sum(self.nprocs) or self.nproc * self.nnodes

    def group(self, rank: int) -> tuple[int, int]:
        """Return the number of the node that ``rank`` runs on at the start, and the number of workers of that node."""
        if not self.nprocs:
            return rank // self.nproc, self.nproc
        ends = list(accumulate(self.nprocs))
        number = bisect_right(ends, rank)
        return number, self.nprocs[number]

    @property
    def several(self) -> bool:
        """True if more than one node may take part in the job."""
        return self.nnodes_max > 1

    def address_of(self, run: RunDir, name: str) -> Address:
        """Return the address at which a process of this node, named ``name``, listens for all nodes of the job.

        It is a network address only if the job has several nodes; otherwise it is a Unix socket.
        """
        return Address(self.bind) if self.several else run.socket_of(name)

    def secret_of(self, run: RunDir) -> Secret:
        """Return the secret that the processes of all nodes share, and whether connections between nodes are encrypted.

        Raises:
            AuthError: the token is missing, readable by others, or too short.
        """
        return run.secret()._replace(encrypts=self.encrypts)

    @property
    def node_of_several(self) -> str:
        """The name of this node; empty in a job of one node."""
        return self.node if self.several else ""

    def save(self, run_dir: Path) -> None:
        """Write ``run.json`` (mode 0600), with the secrets in command lines masked.

        If the script's arguments contain a secret, they are also written unmasked to a second private file.
        """
        written = msgspec.structs.replace(self, args=masked(self.args), command=masked(self.command))
        if written.args != self.args:
            write_private(run_dir / ARGUMENTS_FILE, msgspec.json.encode(self.args))
        write_private(run_dir / SETTINGS_FILE, msgspec.json.format(msgspec.json.encode(written), indent=2))

    @staticmethod
    def load(run_dir: Path) -> RunSettings:
        """Return the settings in ``run.json`` of ``run_dir``, with the script's unmasked arguments.

        Raises:
            UsageError: the file is missing, or does not have the settings of a run.
        """
        path = run_dir / SETTINGS_FILE
        try:
            settings = msgspec.json.decode(path.read_bytes(), type=RunSettings)
            if (run_dir / ARGUMENTS_FILE).exists():
                path = run_dir / ARGUMENTS_FILE
                args = msgspec.json.decode(path.read_bytes(), type=tuple[str, ...])
                settings = msgspec.structs.replace(settings, args=args)
            return settings
        except FileNotFoundError as error:
            raise UsageError(
                f"{run_dir} is no run directory: it has no {SETTINGS_FILE}",
                hint="give the directory that holdfast run printed when it started, by default runs/ID",
            ) from error
        except (msgspec.MsgspecError, RecursionError) as error:
            raise UsageError(f"{path} is damaged: {error}", hint="start the run again") from error
