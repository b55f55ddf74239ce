"""Every flag of ``holdfast run``, as data: all flags of torchrun, and the flags that only Holdfast has.

Each flag of torchrun is *used*, accepted *without effect* (a note then gives the reason), or *refused* by name with the
reason. ``docs/run-flags.md`` has the same table. Tests compare both tables with torchrun's own parser.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "whole", "number", "switch"]
Use = Literal["used", "no effect", "refused"]

_ONE_NODE = "the workers meet through the agents"


@dataclass(frozen=True)
class RunFlag:
    """One flag of ``holdfast run``. ``about``: its help text, or the reason why it has no effect or is refused."""

    name: str  # spelling with dashes; the spelling with underscores is also accepted
    kind: Kind
    use: Use
    about: str
    short: str = ""
    default: str | int | float | bool | None = None
    env: bool = True  # the variable PET_<NAME> sets the flag, as in torchrun
    ours: bool = False  # torchrun has no such flag
    own_variable: str = ""  # environment variable of a flag that torchrun does not have; empty: none

    @property
    def key(self) -> str:
        """The name of the flag's value in Python: without leading dashes, with underscores."""
        return self.name.removeprefix("--").replace("-", "_")

    @property
    def spellings(self) -> tuple[str, ...]:
        """All accepted spellings of the flag, with leading dashes."""
        long = tuple(dict.fromkeys((self.name, f"--{self.key}")))
        return (self.short, *long) if self.short else long

    @property
    def variable(self) -> str | None:
        """The environment variable that sets the flag; None if there is none."""
        return f"PET_{self.key.upper()}" if self.env and not self.ours else self.own_variable or None

    def row(self) -> str:
        """Return the row of the flag in the Markdown table of ``docs/run-flags.md``."""
        names = ", ".join(f"`{s}`" for s in ((self.short, self.name) if self.short else (self.name,)))
        variable = f"`{self.variable}`" if self.variable else ""
        return f"| {names} | {variable} | {self.use} | {self.about} |"


def _used(name: str, kind: Kind, about: str, default: str | int | float | bool | None = None,
          short: str = "") -> RunFlag:  # fmt: skip
    return RunFlag(name, kind, "used", about, short, default)


def _idle(name: str, kind: Kind, about: str) -> RunFlag:
    return RunFlag(name, kind, "no effect", about)


def _refused(name: str, kind: Kind, about: str, *, env: bool = True) -> RunFlag:
    return RunFlag(name, kind, "refused", about, env=env)


def _own(name: str, kind: Kind, about: str, default: str | int | float | bool | None = None, *,
         variable: str = "") -> RunFlag:  # fmt: skip
    return RunFlag(name, kind, "used", about, default=default, ours=True, own_variable=variable)


FLAGS: tuple[RunFlag, ...] = (
    _used("--nproc-per-node", "text", "workers to start: a number (8,4: for each node), auto, cpu, gpu or xpu", "1"),
    _used("--nnodes", "text", "nodes that hold ranks, or MIN:MAX: those beyond MIN wait as spares", "1:1"),
    _own("--shrink-to", "whole", "when nodes are lost and no spare waits, continue with at least this many "
         "nodes: the same batch per step, taken in parts; grows back when a node comes; 0: wait for a node", 0),
    _used("--node-rank", "whole", "number of this node, from 0; a number of its own for each host", 0),
    _used("--master-addr", "text", "first contact of the agents, an address of node 0; on one node MASTER_ADDR of the "
          "workers", "127.0.0.1"),
    _used("--master-port", "whole", "port of the first contact, 29500 by default; on one node MASTER_PORT of the "
          "workers, by default a free one"),
    _used("--rdzv-backend", "text", f"static or c10d, without effect: {_ONE_NODE}; etcd is refused", "static"),
    _used("--rdzv-endpoint", "text", "HOST:PORT, or several with commas: contacts instead of --master-addr"),
    _idle("--rdzv-id", "text", "the run is named by --run-id"),
    _used("--rdzv-conf", "text", "join_timeout=S (or timeout=S): seconds within which the nodes have to meet, 120 by "
          "default; other keys have no effect"),
    _idle("--standalone", "switch", "one node is always standalone here"),
    _used("--max-restarts", "whole", "faults allowed within --restart-window before the run ends", 16),
    _used("--monitor-interval", "number", "seconds between two looks at the workers' progress; exits are seen at "
          "once whatever it is", 0.1),
    _idle("--start-method", "text", "workers are forked from a preloaded process, or spawned where that is unsafe"),
    _idle("--event-log-handler", "text", "every event is in events.jsonl of the run directory"),
    _used("--role", "text", "role name of the workers (ROLE_NAME in their environment)", "default"),
    _used("--module", "switch", "run the script as `python -m` does", False, "-m"),
    _used("--no-python", "switch", "start the program itself instead of `python program`", False),
    _used("--run-path", "switch", "accepted: a script always runs with runpy in the worker's interpreter", False),
    _used("--log-dir", "text", "base directory of the logs; a directory per run is made in it (default: --run-dir)"),
    _used("--redirects", "text", "local ranks that stay silent on the console (3, or 0:3,1:3); logs are always written",
          "0", "-r"),
    _used("--tee", "text", "local ranks whose output is shown on the console of their node (3: all; 0:3,1:3: these; "
          "default: local rank 0)", "0", "-t"),
    _used("--log-line-prefix-template", "text", "what stands before each console line of a rank, with ${role_name}, "
          "${local_rank}, ${rank}, ${hostname} (or TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE); torchrun's from 2.14", ""),
    _used("--local-ranks-filter", "text", "only these local ranks are shown on the console, for example 0,1", ""),
    _refused("--duplicate-stdout-filters", "text", "use `holdfast logs -f | grep ...`: logs are plain files"),
    _refused("--duplicate-stderr-filters", "text", "use `holdfast logs -f | grep ...`: logs are plain files"),
    _idle("--local-addr", "text", _ONE_NODE),
    _refused("--logs-specs", "text", "it names a Python object of torchelastic's agent, which is not running here; "
             "--log-dir, --tee and --redirects work", env=False),
    _refused("--numa-binding", "text", "workers are not bound to CPUs by this version; start the script with "
             "--no-python numactl ...", env=False),
    _used("--signals-to-handle", "text", "signals that end the run gracefully", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    _used("--shutdown-timeout", "whole", "the same as --grace-s, in whole seconds"),
    _refused("--virtual-local-rank", "switch", "LOCAL_RANK is also the worker's place in the job; use "
             "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))"),
    RunFlag("--print-completion", "text", "used", "print what this shell (bash, zsh, fish, tcsh) reads to complete the "
         "command, and leave; torchrun's from 2.14 on", env=False),
    _own("--framework", "text", "framework of the script: torch, mindspore or tensorflow", "torch"),
    _own("--preload", "text", "further modules that are slow to import (lightning.pytorch): imported once per node, "
         "before workers are forked, like the imports at the head of the script", ""),
    _own("--rank-table", "text", "JSON file that names the hosts and their devices (docs/rank-tables.md): gives "
         "--nnodes, --nproc-per-node, --node-rank, --master-addr and --bind", variable="RANK_TABLE_FILE"),
    _own("--token-file", "text", "secret of the job, the same on every host (mode 0600); needed for several nodes"),
    _own("--encrypt", "switch", "encrypt what Holdfast sends between hosts, the same on every host (needs "
         "holdfast[encrypt]); gloo and NCCL encrypt nothing", False),
    _own("--bind", "text", "address of this host that the others reach (default: the one towards the first contact)"),
    _own("--witness", "text", "directory on shared storage, or s3://bucket/prefix: of two nodes, the one that claims "
         "it first continues alone"),
    _own("--notices", "text", "what says that this node will leave: aws, gcp, azure (=http://HOST:PORT), slurm, "
         "kubernetes, file=PATH, command=CMD, comma-separated; auto: slurm in a job of Slurm, kubernetes in a "
         "pod; none", "auto"),
    _own("--health", "text", "command that is run at the start and every --health-every seconds: another code than 0 "
         "says that this node is sick, and its ranks move where another node has room", ""),
    _own("--health-every", "number", "seconds between two runs of --health", 300.0),
    _own("--run-id", "text", "name of the run: letters, digits, _ and -, at most 64 (default: date, time and script)"),
    _own("--root", "text", "where checkpoints go, over the script's own word: a directory, or s3://bucket/prefix "
         "(docs/run-flags.md)", variable="HOLDFAST_CHECKPOINT"),
    _own("--run-dir", "text", "directory in which the run's directory is made", "runs"),
    _own("--restart-window", "number", "seconds over which --max-restarts counts", 3600.0),
    _own("--node-faults", "whole", "a node with so many faults of the machine within --node-window is left out: its "
         "ranks move to nodes with room; without room it is kept; 0: never left out", 3),
    _own("--node-window", "number", "seconds over which --node-faults counts, and for which a node is left out",
         3600.0),
    _own("--on-fault", "text", "auto: replace only the lost ranks where that works; restart: restart all workers; or "
         "answers in the order in which they are tried, or cause:answer (docs/ladder.md)", "auto"),
    _own("--spares", "whole", "processes per node that are built beforehand and take the place of a lost worker; as "
         "many as workers: one for each, whatever the script asks before its session", 0),
    _own("--hang-factor", "number", "a job that shows no progress for so many of its median steps hangs; 0: not "
         "looked for", 10.0),
    _own("--hang-floor", "number", "seconds without progress that are never a hang", 1.5),
    _own("--hang-start", "number", "seconds without progress that are a hang before the first step; what announces "
         "nothing between steps gets a third, a new section twice as much", 1800.0),
    _own("--verify-every", "whole", "steps within which all copies of the state are compared between ranks; 0: never",
         50),
    _own("--replace-slower-than", "number", "replace a rank whose steps take this many times as long as those of "
         "the others (waiting left out); 0: only report it", 0.0),
    _own("--memory-every", "text", "every so many steps each rank keeps its state in shared memory that outlives it, "
         "with the gradients since; auto: where one rank alone holds a part of the state, as often as 0.5 % of the "
         "time allows (the gradients: 1 %); 0: never", "auto"),
    _own("--explain", "switch", "show the value of each flag and where it comes from, and start nothing", False),
    _own("--grace-s", "number", "seconds that a graceful exit may take before the workers are killed", 300.0),
)  # fmt: skip

BY_KEY: dict[str, RunFlag] = {flag.key: flag for flag in FLAGS}
