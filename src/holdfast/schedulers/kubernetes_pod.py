"""The number of a node, read from the environment of its pod."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import UsageError

MARK, MARKED = "HOLDFAST_SCHEDULER", "kubernetes"  # a manifest of `holdfast submit k8s` sets it
INDEX = "JOB_COMPLETION_INDEX"


def node_rank(env: Mapping[str, str]) -> int | None:
    """Return the number of this node, which is the index of its pod; None without a manifest of Holdfast.

    An index alone is not enough: each task of an Indexed Job may be a separate job.

    Raises:
        UsageError: the pod is from such a manifest, but has no index.
    """
    if env.get(MARK) != MARKED:
        return None
    text = env.get(INDEX, "")
    if not (text.isascii() and text.isdecimal()):
        raise UsageError(
            f"{MARK}={MARKED} is set, and {INDEX}={text!r} is no number of a pod",
            hint="the Job needs completionMode: Indexed; or give --node-rank",
        )
    return int(text)
