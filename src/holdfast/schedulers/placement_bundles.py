"""The resources that a job requests from a cluster (Ray) in bundles, one bundle per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from holdfast.errors import UsageError
from holdfast.text import plural

STRATEGIES = ("STRICT_SPREAD", "SPREAD")
LISTED_MAX = 8


class ClusterNode(NamedTuple):
    """A node of the cluster, with its resources."""

    address: str
    resources: Mapping[str, float]  # all resources of the node, in use or not


def bundle_of(workers: int, *, use_gpu: bool, resources: Mapping[str, float]) -> dict[str, float]:
    """Return the resources of one node of the job: a CPU per worker, with ``use_gpu`` also a GPU, and ``resources``.

    An entry of ``resources`` replaces these numbers. A resource of 0 is left out.

    Raises:
        UsageError: a resource is negative or not a number, no resource is left, or ``use_gpu`` is set and
            ``resources`` sets GPU to 0.

    Example:
        ``bundle_of(8, use_gpu=True, resources={"CPU": 32})`` is ``{"CPU": 32.0, "GPU": 8.0}``.
    """
    for name, count in resources.items():
        if isinstance(count, bool) or not isinstance(count, int | float) or not 0 <= count < float("inf"):
            raise UsageError(
                f"resources: {name} is {count!r}", hint="a number, 0 or greater: {'CPU': 8, 'GPU': 4}"
            )
    wanted: dict[str, float] = {"CPU": workers, **({"GPU": workers} if use_gpu else {}), **resources}
    if use_gpu and not wanted["GPU"]:
        raise UsageError("use_gpu=True, and resources leaves GPU out", hint="give one of the two")
    bundle = {name: float(count) for name, count in wanted.items() if count}
    if not bundle:
        raise UsageError("resources leaves nothing to ask of a node", hint="resources={'CPU': 1}")
    return bundle


def shortage(nodes: Sequence[ClusterNode], bundle: Mapping[str, float], count: int, strategy: str) -> str:
    """Return in one sentence why the cluster has no room for ``count`` bundles.

    Args:
        nodes: the living nodes of the cluster.
        bundle: resources of one node of the job.
        count: number of bundles.
        strategy: Ray's placement strategy of the bundles, one of ``STRATEGIES``.
    """
    fit = [node for node in nodes if all(node.resources.get(r, 0.0) >= n for r, n in bundle.items())]
    wanted = _shown(bundle)
    if len(fit) >= count or (fit and strategy != "STRICT_SPREAD"):
        return (
            f"{plural(count, 'node')} with {wanted} each are wanted, {len(fit)} in the cluster have so much, "
            "and a part of it is in use by other jobs"
        )
    others = [node for node in nodes if node not in fit and any(r in node.resources for r in bundle)]
    have = "; ".join(
        f"{node.address} has {_shown({r: node.resources.get(r, 0.0) for r in bundle})}"
        for node in others[:LISTED_MAX]
    )
    more = f" and {len(others) - LISTED_MAX} more" if len(others) > LISTED_MAX else ""
    return (
        f"{plural(count, 'node')} with {wanted} each are wanted, and the cluster has {len(fit)} of them"
        + (f" ({have}{more})" if have else "")
    )


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:g}" for name, count in resources.items())
