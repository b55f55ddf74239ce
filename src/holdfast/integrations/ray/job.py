"""A job on a Ray cluster: ``run(train, num_nodes=..., spares=...)``, in a driver that ``ray job submit`` has started.

Theory. One Ray actor per node does the work of ``holdfast run`` on a host. The ranks are processes of this actor, not
Ray tasks. A lost rank is therefore replaced as in every other job, and the other ranks keep their processes and
weights. Only Ray knows where a node is available. When the node of an actor is lost, Ray places the actor again, and
its new node joins the job as a spare.
"""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.core.ids import RUN_ID_LENGTH_MAX, is_run_id
from holdfast.errors import FrameworkError, StateError, UsageError
from holdfast.integrations.ray.rank import IN_RANK
from holdfast.integrations.ray.shipped_function import TrainFunction, name_function
from holdfast.runtime.node.rundir import TOKEN_SIZE_BYTES
from holdfast.schedulers.placement_bundles import STRATEGIES, bundle_of
from holdfast.store.format.json_values import encode_values

if TYPE_CHECKING:
    from holdfast.integrations.ray.driver import JobPlan

OURS = {
    "--run-id": "name",
    "--run-dir": "run_dir",
    "--nnodes": "num_nodes and spares",
    "--nproc-per-node": "workers_per_node",
    "--root": "storage_path",
    "--shrink-to": "shrink_to",
    **dict.fromkeys(
        ("-m", "--module", "--no-python", "--rank-table", "--standalone"), "a function or a script"
    ),
    **dict.fromkeys(
        ("--node-rank", "--rdzv-endpoint", "--master-addr", "--master-port", "--token-file", "--bind"), ""
    ),
}
"""Flags of ``holdfast run`` that this module sets, and the arguments of :func:`run` that replace them."""


@dataclass(frozen=True)
class JobResult:
    """The result of a job that ran to its end.

    Args:
        name: name of the job.
        returned: the values that the training function has returned, by rank; empty for a script. A rank whose value
            was not plain (numbers, texts, lists, tuples, dicts of these, None) is missing, and its log has a warning.
    """

    name: str
    returned: dict[int, Any]


def run(
    train: Callable[..., Any] | str | Path,
    *,
    name: str,
    num_nodes: int,
    workers_per_node: int = 1,
    spares: int = 0,
    shrink_to: int = 0,
    use_gpu: bool = False,
    resources: Mapping[str, float] | None = None,
    placement_strategy: str = "STRICT_SPREAD",
    train_loop_config: Mapping[str, Any] | None = None,
    args: Sequence[str] = (),
    storage_path: str | Path | None = None,
    run_dir: str | Path | None = None,
    flags: Sequence[str] = (),
    node_timeout_s: float = 300.0,
) -> JobResult:
    """Run a training on the nodes of a Ray cluster to its end, and return the values of its ranks.

    Args:
        train: a function at the top level of a module, or the path of a script. It uses :func:`holdfast.session`, as
            under ``holdfast run``. Each rank calls the function, with ``train_loop_config`` if that is given.
        name: name of the job. A call with the same name continues where an earlier call has saved.
        num_nodes: number of nodes that hold ranks.
        workers_per_node: number of ranks on each of these nodes.
        spares: number of spare nodes, which wait for the loss of a node.
        shrink_to: least number of nodes to train with if some are lost and no spare waits; with 0 the job waits.
        use_gpu: True reserves a GPU per worker.
        resources: resources of a node, which replace or complete a CPU (and GPU) per worker: ``{"CPU": 32, "GPU": 8}``.
        placement_strategy: ``STRICT_SPREAD``, or ``SPREAD``, with which nodes may share a host and be lost together.
        train_loop_config: plain values for the function.
        args: arguments of the script.
        storage_path: directory that all nodes share, or ``s3://bucket/prefix``. Checkpoints go to ``NAME`` below it,
            unless the script sets a place.
        run_dir: directory on each node for logs and events; None means a directory of this user in the temporary one.
        flags: further flags of ``holdfast run``, as ``("--memory-every", "1")``.
        node_timeout_s: limit of the wait for the nodes, at the start, and again if all of them are lost.

    Raises:
        FrameworkError: Ray is not installed.
        UsageError: an argument cannot work, other processes cannot find the function, or a job of this name runs.
        NotMet: the cluster did not have the nodes in time; the message names the missing resources.
        JobSaved: the job has saved and ended (code 75). A second call with the same ``name`` continues the job.
        JobError: the training ended with another code than 0.

    Example:
        ``run(train, name="bert", num_nodes=4, spares=1, workers_per_node=8, use_gpu=True, storage_path="/mnt/ckpts")``
    """
    _check_counts(num_nodes, workers_per_node, spares)
    _check_job(name, placement_strategy, node_timeout_s)
    target, config = _target(train, train_loop_config, args)
    bundle = bundle_of(workers_per_node, use_gpu=use_gpu, resources=resources or {})
    given = [f"--nnodes={num_nodes}:{num_nodes + spares}", f"--nproc-per-node={workers_per_node}"]
    given += [f"--root={_root(storage_path)}/{name}"] if storage_path is not None else []
    given += [*([f"--shrink-to={shrink_to}"] if shrink_to else []), *_passed_on(flags)]
    driver = _driver()
    plan: JobPlan = driver.JobPlan(
        name=name,
        num_nodes=num_nodes,
        bundles=[bundle] * (num_nodes + spares),
        strategy=placement_strategy,
        run_dir=str(run_dir or os.path.join(tempfile.gettempdir(), f"holdfast-ray-{os.getuid()}")),
        order=driver.NodeOrder(
            flags=tuple(given), train=target, args=tuple(map(str, args)), directory=os.getcwd(), config=config,
            contacts=(), token=secrets.token_hex(TOKEN_SIZE_BYTES),
        ),
        node_timeout_s=node_timeout_s,
    )  # fmt: skip
    return JobResult(name, driver.drive(plan))


def _check_counts(num_nodes: int, workers_per_node: int, spares: int) -> None:
    """Check the numbers of nodes, workers and spares. Raises: UsageError."""
    counts = {"num_nodes": (num_nodes, 1), "workers_per_node": (workers_per_node, 1), "spares": (spares, 0)}
    for argument, (count, least) in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise UsageError(f"{argument}={count!r}", hint=f"a whole number, {least} or greater")


def _check_job(name: str, placement_strategy: str, node_timeout_s: float) -> None:
    """Check name, placement strategy and time limit of the job. Raises: UsageError."""
    if IN_RANK in os.environ:
        raise UsageError(
            "run() is called while a rank imports this script",
            hint='put the call below if __name__ == "__main__":',
        )
    if not is_run_id(name):
        raise UsageError(
            f"name={name!r} is no name of a job",
            hint=f"letters, digits, _ and -, at most {RUN_ID_LENGTH_MAX}, the first no sign",
        )
    if placement_strategy not in STRATEGIES:
        raise UsageError(f"placement_strategy={placement_strategy!r}", hint=f"one of {', '.join(STRATEGIES)}")
    if not 0 < node_timeout_s < float("inf"):
        raise UsageError(f"node_timeout_s={node_timeout_s!r}", hint="a number of seconds above 0")


def status(name: str) -> dict[str, Any]:
    """Return the output of ``holdfast status --json`` for a running job, from any process of the cluster.

    Raises:
        UsageError: no job of this name runs.
    """
    said: dict[str, Any] = _driver().status(name)
    return said


def _driver() -> Any:
    try:
        import ray  # noqa: F401
    except ImportError as error:
        raise FrameworkError(
            f"Ray cannot be imported: {error}", hint="pip install 'holdfast[ray]'"
        ) from error
    from holdfast.integrations.ray import driver

    return driver


def _target(
    train: Callable[..., Any] | str | Path, config: Mapping[str, Any] | None, args: Sequence[str]
) -> tuple[TrainFunction | str, bytes | None]:
    """Return the function or script to run, and the encoded argument of a function (None without one).

    Raises:
        UsageError: the script does not exist, another process cannot find the function, or an argument is wrong.
    """
    if callable(train):
        if args:
            raise UsageError("args is for a script; train is a function", hint="give train_loop_config")
        try:
            encoded = None if config is None else encode_values(dict(config), "train_loop_config")
        except StateError as error:
            raise UsageError(
                error.message, hint="plain values only: build the rest in the function"
            ) from error
        return name_function(train), encoded
    if config is not None:
        raise UsageError("train_loop_config is for a function; train is a script", hint="give args")
    path = str(train)
    if not os.path.isfile(path):
        raise UsageError(
            f"there is no script {path} in {os.getcwd()}", hint="give the path of a file, or a function"
        )
    return path, None


def _passed_on(flags: Sequence[str]) -> list[str]:
    """Return the user's flags for ``holdfast run``. Raises: UsageError: this module sets one of the flags itself."""
    if isinstance(flags, str):
        raise UsageError(f"flags={flags!r} is one text", hint="a list of words: ('--grace-s', '60')")
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in OURS:
            instead = f"give {OURS[name]}" if OURS[name] else "leave it out"
            raise UsageError(
                f"{flag} in flags: the nodes of a job on Ray are described by it already", hint=instead
            )
    return list(flags)


def _root(storage_path: str | Path) -> str:
    """Return ``storage_path`` without a slash at its end. Raises: UsageError: it is a relative path."""
    path = str(storage_path)
    if "://" not in path and not os.path.isabs(path):
        raise UsageError(
            f"storage_path={path!r} is relative: each node has a working directory of its own",
            hint="an absolute path on storage that all nodes share, or s3://bucket/prefix",
        )
    return path.rstrip("/")
