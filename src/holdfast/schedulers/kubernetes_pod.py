"""The number of a node, read from the environment of its pod."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import UsageError

MARK, MARKED = "HOLDFAST_SCHEDULER", "kubernetes"  # variable that a manifest of `holdfast submit k8s` sets
INDEX = "JOB_COMPLETION_INDEX"


def node_rank(env: Mapping[str, str]) -> int | None:
    """Return the number of this node, which is the index of its pod; None if the pod is from no manifest of Holdfast.

    An index alone is not enough, because each task of an Indexed Job may be a separate training job.

    Args:
        env: environment of the process.

    Raises:
        UsageError: the pod is from a manifest of Holdfast, but has no index.
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
