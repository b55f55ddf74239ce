"""The driver of a job on Ray: it lets Ray place the nodes, makes their actors, and removes the actors at the end."""

from __future__ import annotations

import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from holdfast.errors import NotMet, UsageError
from holdfast.integrations.ray.node import HoldfastNode, NodeOrder
from holdfast.integrations.ray.supervisor import JobNode, Supervisor, say
from holdfast.schedulers.placement_bundles import ClusterNode, shortage

NAMESPACE = "holdfast"
STATUS_S = 40.0
LAUNCH_SIZE_BYTES = 8

SAY_S = 10.0


@dataclass(frozen=True)
class JobPlan:
    """The checked description of a job."""

    name: str
    num_nodes: int
    bundles: list[dict[str, float]]
    strategy: str
    run_dir: str
    order: NodeOrder
    node_timeout_s: float


def drive(plan: JobPlan) -> dict[int, Any]:
    """Run the job to its end. Return the values that the ranks returned, by rank.

    Raises:
        Errors: see :func:`holdfast.integrations.ray.run`.
    """
    if not ray.is_initialized():
        ray.init()
    if _actors_of(plan.name):
        raise _taken(plan.name)
    group, launch = _placed(plan), secrets.token_hex(LAUNCH_SIZE_BYTES)
    nodes: list[JobNode] = []
    try:
        for number, bundle in enumerate(plan.bundles):
            nodes.append(JobNode(number, _actor(plan, group, launch, number, bundle)))
        job = Supervisor(plan.name, plan.order, nodes, plan.num_nodes, plan.node_timeout_s)
        with _signals(job):
            job.run()
        return job.close()
    finally:
        for node in nodes:
            ray.kill(node.actor)
        remove_placement_group(group)


def status(name: str) -> dict[str, Any]:
    """Return the output of ``holdfast status --json`` for the running job ``name``."""
    if not ray.is_initialized():
        ray.init()
    for actor_name in _actors_of(name):
        try:
            actor = ray.get_actor(actor_name, namespace=NAMESPACE)
            if said := ray.get(actor.status.remote(), timeout=STATUS_S):
                answer: dict[str, Any] = said
                return answer
        except (RayError, ValueError):  # the actor is lost: ask another node
            continue
    raise UsageError(
        f"no job of the name {name} answers", hint="ray list actors; the name is that given to run()"
    )


def _actors_of(name: str) -> list[str]:
    named = ray.util.list_named_actors(all_namespaces=True)
    ours = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return sorted(each for each in ours if each.rpartition("-node")[0] == name)


def _taken(name: str) -> UsageError:
    return UsageError(
        f"a job of the name {name} runs on this cluster",
        hint="wait for its end, or give another name: name=...",
    )


def _placed(plan: JobPlan) -> PlacementGroup:
    """Return a placement group with reserved nodes. Raises: NotMet: the nodes were not free in time."""
    group = placement_group(plan.bundles, strategy=plan.strategy, name=f"holdfast-{plan.name}")
    until_s, said = time.monotonic() + plan.node_timeout_s, False
    try:
        while not group.wait(max(0.1, min(SAY_S, until_s - time.monotonic()))):
            nodes = [
                ClusterNode(each["NodeManagerAddress"], each["Resources"])
                for each in ray.nodes()
                if each["Alive"]
            ]
            why = shortage(nodes, plan.bundles[0], len(plan.bundles), plan.strategy)
            if time.monotonic() >= until_s:
                raise NotMet(
                    f"the cluster did not have the nodes within {plan.node_timeout_s:g} s: {why}",
                    hint="ray status; add nodes, ask for fewer (num_nodes, spares) or less (resources), or wait longer "
                    '(node_timeout_s); placement_strategy="SPREAD" puts several on one node of the cluster',
                )
            if not said:
                said = True
                say(f"waiting for nodes, at most {plan.node_timeout_s:g} s: {why}")
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _actor(
    plan: JobPlan, group: PlacementGroup, launch: str, number: int, bundle: Mapping[str, float]
) -> Any:
    """Make the actor of node ``number``. Raises: UsageError: the actor's name is taken."""
    others = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU", "memory")}
    options: dict[str, Any] = {"memory": bundle["memory"]} if "memory" in bundle else {}
    made = ray.remote(HoldfastNode).options(
        name=f"{plan.name}-node{number}", namespace=NAMESPACE,
        num_cpus=bundle.get("CPU", 0), num_gpus=bundle.get("GPU", 0), resources=others,
        max_restarts=-1, max_task_retries=0, max_concurrency=8,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number), **options,
    )  # fmt: skip
    try:
        return made.remote(plan.name, number, launch, plan.run_dir)
    except ValueError as error:  # another driver has taken the name meanwhile
        raise _taken(plan.name) from error


@contextmanager
def _signals(job: Supervisor) -> Iterator[None]:
    """Translate signals to the driver into requests to the job while the ``with`` body runs.

    SIGTERM (``ray job stop``) or Ctrl-C asks the job to save and leave. A second signal asks it to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def asked(number: int, _frame: FrameType | None) -> None:
        job.asked.append(signal.Signals(number).name)

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
