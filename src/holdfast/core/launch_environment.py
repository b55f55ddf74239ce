"""The place of a process in its job (rank, world size, node), read from the environment variables of its launcher.

Theory. Each launcher is a row of ``LAUNCHERS``: the names of its variables. A row whose variables are set is a *claim*
about the place of the process. All claims of one process must agree: a process that followed a wrong claim would train
another job than the user has started. Two kinds of claims may differ from the others: the claim of a process manager
(mpirun, srun) that started one launcher per node, and the claim of a manager that started a single task. A process
without a claim is the only one of its job.

Slurm sets its variables also for batch scripts and interactive shells. Only a job step of several tasks is a claim.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from holdfast.errors import UsageError

RANK_TABLE = "RANK_TABLE_FILE"
TF_CONFIG = "TF_CONFIG"
TF_RANKS = ("chief", "master", "worker")
"""Task types of ``TF_CONFIG`` that train, in the order of their ranks."""
REMEDY = "start the script with `holdfast run --nproc-per-node N`"
SLURM_SPECIAL_STEPS = 0xFFFF_FFF0
"""First of the step numbers that Slurm uses for batch scripts and interactive shells."""
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")


class ProcessPlace(NamedTuple):
    """The place of one process in its job.

    Attributes:
        rank, world_size: rank in the job, and number of ranks of the job.
        local_rank, local_world_size: rank on this node, and number of ranks on this node; 0 if unknown.
        node: number of this node; -1 if unknown.
        master: address of the node of rank 0; empty if unknown.
        said: the variables that were used, with their values, as text for users.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int = -1
    master: str = ""
    said: str = ""

    @property
    def one_node(self) -> bool:
        """True if all ranks of the job are on this node."""
        return self.local_world_size == self.world_size


class Fact(NamedTuple):
    """One environment variable and its value."""

    name: str
    value: int

    def __str__(self) -> str:
        return f"{self.name}={self.value}"


class LauncherVariables(NamedTuple):
    """Names of the variables of one launcher; empty if the launcher has no such variable.

    ``manager``: the launcher starts processes that may be launchers themselves (mpirun, srun).
    """

    name: str
    rank: str
    size: str
    local_rank: str = ""
    local_size: str = ""
    node: str = ""
    nodes: str = ""
    manager: bool = False


LAUNCHERS = (
    LauncherVariables(
        "torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"
    ),
    LauncherVariables("run.sh", "RANK_ID", "RANK_SIZE"),
    LauncherVariables("msrun", "MS_NODE_ID", "MS_WORKER_NUM"),
    LauncherVariables(
        "Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", manager=True,
    ),
    LauncherVariables(
        "MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE", manager=True,
    ),
    LauncherVariables("PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", manager=True),
    LauncherVariables("PMIx", "PMIX_RANK", "PMIX_SIZE", "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", manager=True),
)  # fmt: skip
SLURM = LauncherVariables(
    "Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "", "SLURM_NODEID", "SLURM_STEP_NUM_NODES",
    manager=True,
)  # fmt: skip
SLURM_SIZE_OF_JOB = "SLURM_NTASKS"
FRAMEWORK = LauncherVariables("framework", "rank of its group", "size of its group")


class LaunchClaim(NamedTuple):
    """The values that one launcher has set for this process.

    Attributes:
        launcher: the variables of the launcher.
        facts: the values that are set, by the name of the field of :class:`LauncherVariables`.
        inside: True if a variable shows that this launcher runs inside a process manager.
    """

    launcher: LauncherVariables
    facts: Mapping[str, Fact] = {}
    inside: bool = False

    def value(self, what: str) -> int | None:
        """Return the value of the field ``what``, for example ``rank``; None if the launcher does not set it."""
        fact = self.facts.get(what)
        return None if fact is None else fact.value

    @property
    def full(self) -> bool:
        """True if the launcher has set both rank and size."""
        return "rank" in self.facts and "size" in self.facts

    @property
    def nodes(self) -> int:
        """Number of nodes of the job according to this launcher; 0 if unknown."""
        size, local = self.value("size") or 0, self.value("local_size") or 0
        return self.value("nodes") or (size // local if local else 0)


def seat_of(
    env: Mapping[str, str],
    *,
    known: tuple[int, int] | None = None,
    hosts: Sequence[Sequence[int]] = (),
) -> ProcessPlace:
    """Return the place of the process with the environment ``env``.

    Args:
        env: the environment variables.
        known: rank and size of the framework's own process group, if it has one already.
        hosts: for each host, the ranks that the rank table of the environment lists; empty if no table was read.

    Raises:
        UsageError: a value is not a number, a rank has no size or the reverse, a rank is not below the size, or two
            launchers contradict each other. The message names the variables and their values.

    Example:
        ``seat_of({"RANK_ID": "5", "RANK_SIZE": "8"}).rank == 5``
    """
    claims = [claim for claim in _claims(env, known, hosts) if claim.facts]
    for claim in claims:
        _check(claim)
    full = [claim for claim in claims if claim.full]
    followed = next((claim for claim in full if (claim.value("size") or 0) > 1), full[0] if full else None)
    if followed is None:
        for claim in claims:
            _refuse_partial(claim)
        return ProcessPlace()
    for claim in claims:
        if claim is not followed and not _surrounds(claim, followed):
            _compare(followed, claim)
    around = [claim for claim in claims if _surrounds(claim, followed)]
    nodes = max((claim.value("size") or 0 for claim in around), default=0)
    return _seated(env, followed, [claim for claim in claims if claim not in around], nodes)


def is_told_of_others(env: Mapping[str, str]) -> bool:
    """Return True if a variable shows that this process is one of several. Never raise."""
    try:
        return seat_of(env).world_size > 1
    except UsageError:
        return True  # a variable is wrong: the session reports that


# ---------------------------------------------------------------- claims


def _claims(
    env: Mapping[str, str], known: tuple[int, int] | None, hosts: Sequence[Sequence[int]]
) -> Iterator[LaunchClaim]:
    if known is not None:
        names = ("rank", FRAMEWORK.rank), ("size", FRAMEWORK.size)
        yield LaunchClaim(
            FRAMEWORK, {k: Fact(n, v) for (k, n), v in zip(names, known, strict=True)}, inside=True
        )
    torchrun, run_sh, msrun, *managers = LAUNCHERS
    yield LaunchClaim(torchrun, _facts(env, torchrun), inside="TORCHELASTIC_RUN_ID" in env)
    yield _tensorflow(env.get(TF_CONFIG, ""))
    yield _with_table(LaunchClaim(run_sh, _facts(env, run_sh)), hosts)
    if env.get("MS_ROLE", "MS_WORKER") == "MS_WORKER":
        named = {k: v for k, v in env.items() if k != msrun.rank or v.isdecimal()}  # MS_NODE_ID may be a word
        facts = _facts(named, msrun)
        if "size" in facts and "rank" not in facts and "RANK_ID" in env:
            facts["rank"] = _fact(env, "RANK_ID")
        yield LaunchClaim(msrun, facts if "size" in facts else {}, inside="MS_ROLE" in env)
    several = False
    for launcher in managers:
        claim = LaunchClaim(launcher, _facts(env, launcher))
        several = several or (claim.value("size") or 0) > 1
        yield claim
    if not several:  # otherwise Slurm has started the daemons of mpirun
        yield _slurm(env)


def _fact(env: Mapping[str, str], name: str) -> Fact:
    text = env[name].strip()
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{name}={env[name]} is no number of 0 or more", hint=f"set it right, or unset {name}"
        )
    return Fact(name, int(text))


def _facts(env: Mapping[str, str], launcher: LauncherVariables) -> dict[str, Fact]:
    """Return the values that one launcher has set, by the name of the field of :class:`LauncherVariables`.

    Without rank or size the result is empty: many programs set a local rank for their own use.
    """
    names = {k: name for k, name in launcher._asdict().items() if k not in ("name", "manager") and name}
    if not any(env.get(names[key]) for key in ("rank", "size")):
        return {}
    return {key: _fact(env, name) for key, name in names.items() if env.get(name)}


def _slurm(env: Mapping[str, str]) -> LaunchClaim:
    """Return the claim of Slurm about this process. The claim is empty if the process belongs to no usual job step.

    A batch script has task number 0 and no job step. An interactive shell is a task in a special job step.
    """
    if not env.get(SLURM.rank):
        return LaunchClaim(SLURM)
    facts = _facts(env, SLURM)
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "")
    in_step = step.isdecimal() and int(step) < SLURM_SPECIAL_STEPS
    if not in_step and facts["rank"].value == 0:
        return LaunchClaim(SLURM)
    if "size" not in facts and env.get(SLURM_SIZE_OF_JOB):
        facts["size"] = _fact(env, SLURM_SIZE_OF_JOB)
    tasks, node = env.get("SLURM_STEP_TASKS_PER_NODE", ""), facts.get("node")
    counts = [int(n) for count, times in _TASKS.findall(tasks) for n in [count] * int(times or 1)]
    if node is not None and node.value < len(counts):
        facts["local_size"] = Fact("SLURM_STEP_TASKS_PER_NODE", counts[node.value])
    return LaunchClaim(SLURM, facts)


def _tensorflow(text: str) -> LaunchClaim:
    """Return the claim of ``TF_CONFIG``: the chief is rank 0, and the workers follow."""
    launcher = LauncherVariables(TF_CONFIG, "task of TF_CONFIG", "cluster of TF_CONFIG")
    if not text.strip():
        return LaunchClaim(launcher)
    try:
        said: dict[str, Any] = json.loads(text)
        cluster: dict[str, list[str]] = said.get("cluster", {})
        places = [place for kind in TF_RANKS for place in cluster.get(kind, [])]
        if len(places) < 2:
            return LaunchClaim(launcher)
        kind, index = str(said["task"]["type"]), int(said["task"]["index"])
        if kind not in TF_RANKS:
            raise UsageError(
                f"{TF_CONFIG}: this process is a {kind} beside {len(places)} workers: it is no rank of the job",
                hint=f"open the session in processes of the types {', '.join(TF_RANKS)} alone",
            )
        before = sum(len(cluster.get(each, [])) for each in TF_RANKS[: TF_RANKS.index(kind)])
        own = str(cluster[kind][index])
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(
            f"{TF_CONFIG} is no cluster with a task ({type(error).__name__}: {error}): {text[:200]}",
            hint='{"cluster": {"worker": ["HOST:PORT", ...]}, "task": {"type": "worker", "index": 0}}',
        ) from error
    rank, hosts = before + index, [str(place).rpartition(":")[0] for place in places]
    here = [other for other, host in enumerate(hosts) if host == own.rpartition(":")[0]]
    numbers = {"rank": rank, "size": len(places), "local_rank": here.index(rank), "local_size": len(here)}
    names = {"rank": launcher.rank, "size": launcher.size}
    return LaunchClaim(launcher, {k: Fact(names.get(k, TF_CONFIG), number) for k, number in numbers.items()})


def _with_table(claim: LaunchClaim, hosts: Sequence[Sequence[int]]) -> LaunchClaim:
    """Add the facts of the rank table to the claim of the launcher that sets ``RANK_ID``: the size, and the ranks on
    this host.
    """
    if not hosts:
        return claim
    facts = dict(claim.facts)
    size = Fact(f"ranks of {RANK_TABLE}", sum(map(len, hosts)))
    said = facts.setdefault("size", size)
    if said.value != size.value:
        _contradict(said, size)
    rank = facts.get("rank")
    for number, ranks in enumerate(hosts):
        if rank is not None and rank.value in ranks:
            numbers = {
                "local_rank": sorted(ranks).index(rank.value),
                "local_size": len(ranks),
                "node": number,
            }
            facts |= {key: Fact(RANK_TABLE, value) for key, value in numbers.items()}
    return LaunchClaim(claim.launcher, facts)


# ---------------------------------------------------------------- judging


def _check(claim: LaunchClaim) -> None:
    """Check that the numbers of one launcher are possible.

    Raises:
        UsageError: a rank is not below its size, or the local size is above the size.
    """
    for low, high in (("rank", "size"), ("local_rank", "local_size")):
        if low in claim.facts and high in claim.facts:
            one, of = claim.facts[low], claim.facts[high]
            if one.value >= of.value:
                raise UsageError(
                    f"{one}, but {of}: ranks go from 0 to {max(0, of.value - 1)}",
                    hint=f"set both right, or {REMEDY}",
                )
    size, local = claim.facts.get("size"), claim.facts.get("local_size")
    if size is not None and local is not None and local.value > size.value:
        _contradict(local, size)


def _refuse_partial(claim: LaunchClaim) -> None:
    rank, size, names = claim.facts.get("rank"), claim.facts.get("size"), claim.launcher
    if rank is not None:
        raise UsageError(
            f"{rank} says that this process is one of several, and {names.size} is not set: of how many?",
            hint=f"set {names.size}, or unset {names.rank} where the process is alone, or {REMEDY}",
        )
    if size is not None and size.value > 1:
        raise UsageError(
            f"{size} says that this process is one of {size.value}, and {names.rank} is not set: which one?",
            hint=f"set {names.rank}, or unset {size.name} where the process is alone, or {REMEDY}",
        )


def _surrounds(outer: LaunchClaim, inner: LaunchClaim) -> bool:
    """Return True if ``outer`` is a process manager that may have started the launcher of ``inner``.

    The manager starts that launcher once per node, or only once. Then the numbers of the two claims may differ.
    """
    if not outer.launcher.manager or inner.launcher.manager:
        return False
    outer_size, size = outer.value("size"), inner.value("size") or 1
    if outer_size is None:
        return inner.inside
    if outer_size == 1 or (size > 1 and outer_size == inner.nodes):
        return True
    return inner.inside and size > 1 and (inner.launcher.name == "torchrun" or outer_size < size)


def _compare(followed: LaunchClaim, other: LaunchClaim) -> None:
    """Check that rank and size of two claims are equal.

    Raises:
        UsageError: the claims contradict each other.
    """
    for what in ("size", "rank"):
        one, two = followed.facts[what], other.facts.get(what)
        if two is not None and one.value != two.value:
            _contradict(one, two)


def _contradict(one: Fact, two: Fact) -> NoReturn:
    raise UsageError(
        f"{one}, but {two}: they contradict each other, and this process could be in either job",
        hint=f"unset those of the launcher that is not meant (env -u NAME ...), or {REMEDY}",
    )


def _seated(
    env: Mapping[str, str], followed: LaunchClaim, claims: Sequence[LaunchClaim], started_on: int
) -> ProcessPlace:
    """Return the place of this process in its job, from claims that agree.

    ``started_on``: number of nodes on which a process manager started the launcher.
    """

    def first(what: str) -> int | None:
        found = (claim.value(what) for claim in (followed, *claims))
        return next((number for number in found if number is not None), None)

    rank, size = followed.facts["rank"], followed.facts["size"]
    local_rank, local_size, nodes = first("local_rank"), first("local_size"), first("nodes") or started_on
    if local_size is None and nodes and size.value % nodes == 0:
        local_size = size.value // nodes
    if local_size is None and (local_rank is None or local_rank == rank.value):
        local_size = size.value  # no variable shows another node
    if local_rank is None:
        local_rank = rank.value % local_size if local_size else 0
    node = first("node")
    return ProcessPlace(
        rank=rank.value,
        world_size=size.value,
        local_rank=local_rank,
        local_world_size=local_size or 0,
        node=-1 if node is None else node,
        master=env.get("MASTER_ADDR") or env.get("MS_SCHED_HOST", ""),
        said=f"{rank}, {size}",
    )
