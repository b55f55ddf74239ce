"""What the environment of a pod says about a job of several nodes."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.errors import UsageError

MARK, MARKED = "HOLDFAST_SCHEDULER", "kubernetes"  # a manifest of `holdfast submit k8s` sets it
INDEX = "JOB_COMPLETION_INDEX"


def node_rank(env: Mapping[str, str]) -> int | None:
    """The number of this node, which is the index of its pod; None where no manifest of Holdfast's says so.

    An index alone says nothing: the tasks of an Indexed Job may also be jobs of their own.

    Raises:
        UsageError: the manifest says so, and there is no index.
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
