"""Notices of the end of this node, derived from its Kubernetes objects Node and Pod. Pure code.

Theory. The API server sends the whole object at each change. So a notice is a function of the newest object, and it is
withdrawn when its cause is gone from the object. Only the deletion of the pod has a deadline: the timestamp of the
deletion is the end of the grace period. A cause in the Node has no deadline. It leads to a later deletion of the pod,
and that deletion has a deadline. So a job without a spare node does not save and leave before it has to.

A condition of the node is a finding about its health (docs/design/0036-leaving.md): the ranks move if another node has
room. The taints and conditions here are those of docs/design/0045-kubernetes-watch.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from holdfast.errors import ProtocolError
from holdfast.runtime.node.notice_forms import Foreseen

HEALTH = "health: Kubernetes: "
LEAVING_TAINTS = frozenset({
    "ToBeDeletedByClusterAutoscaler",  # the cluster autoscaler drains the node, then deletes it
    "karpenter.sh/disrupted",
    "karpenter.sh/disruption",  # Karpenter before 1.0
    "node.kubernetes.io/out-of-service",
    "node.cloudprovider.kubernetes.io/shutdown",
    "cloud.google.com/impending-node-termination",
    "aws-node-termination-handler/spot-itn",
})  # fmt: skip
"""Taints that announce the end of the node, with any effect."""
CORDON = "node.kubernetes.io/unschedulable"
UNREACHED = frozenset({"node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints that Kubernetes derives from the condition ``Ready``. The condition is read instead of them."""
PRESSURES = frozenset({"MemoryPressure", "DiskPressure", "PIDPressure"})
DISRUPTION = "DisruptionTarget"

T = TypeVar("T")


class _Meta(msgspec.Struct, rename="camel"):
    deletion_timestamp: datetime | None = None


class _Taint(msgspec.Struct):
    key: str
    effect: str = ""
    value: str | None = None


class _Toleration(msgspec.Struct):
    key: str | None = None
    operator: str | None = None
    value: str | None = None
    effect: str | None = None
    limit_s: int | None = msgspec.field(default=None, name="tolerationSeconds")


class _Condition(msgspec.Struct):
    type: str
    status: str
    reason: str | None = None


class _Status(msgspec.Struct):
    conditions: list[_Condition] | None = None


class _NodeSpec(msgspec.Struct):
    unschedulable: bool | None = None
    taints: list[_Taint] | None = None


class _PodSpec(msgspec.Struct):
    tolerations: list[_Toleration] | None = None


class _NodeObject(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _NodeSpec = msgspec.field(default_factory=_NodeSpec)
    status: _Status = msgspec.field(default_factory=_Status)


class _PodObject(msgspec.Struct):
    metadata: _Meta = msgspec.field(default_factory=_Meta)
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _Status = msgspec.field(default_factory=_Status)


def node_notices(node: Mapping[str, Any], pod: Mapping[str, Any] | None = None) -> list[Foreseen]:
    """Return the notices in a Node object.

    Args:
        node: the Node of this process, as decoded JSON.
        pod: the Pod of this process, whose tolerations count. If it is None, because the Pod cannot be read, it is
            assumed to tolerate every taint: Kubernetes has not removed it.

    Raises:
        ProtocolError: an object has another form.

    Example:
        ``node_notices({"spec": {"unschedulable": True}})`` has one notice, ``Kubernetes: cordoned``.
    """
    read = _converted(node, _NodeObject, "Node")
    tolerations = [_Toleration(operator="Exists")]
    if pod is not None:
        tolerations = _converted(pod, _PodObject, "Pod").spec.tolerations or []
    taints = read.spec.taints or []
    found = []
    if read.metadata.deletion_timestamp is not None:
        found.append("Kubernetes: the node is being deleted")
    if read.spec.unschedulable or any(taint.key == CORDON for taint in taints):
        found.append("Kubernetes: cordoned")
    # Two effects of one key are one notice.
    ends = {taint.key: None for taint in taints if _ends_the_pod(taint, tolerations)}
    found += [f"Kubernetes: taint {key}" for key in ends]
    for condition in read.status.conditions or []:
        if condition.type == "Ready" and condition.status in ("False", "Unknown"):
            found.append(f"{HEALTH}{'not ready' if condition.status == 'False' else 'not reachable'}")
        elif condition.type in PRESSURES and condition.status == "True":
            found.append(f"{HEALTH}{condition.type}")
    return [Foreseen(source) for source in found]


def pod_notices(pod: Mapping[str, Any], now: float) -> list[Foreseen]:
    """Return the notices in the Pod object of this process.

    Args:
        pod: the Pod, as decoded JSON.
        now: Unix time in seconds.

    Raises:
        ProtocolError: the object has another form.
    """
    read = _converted(pod, _PodObject, "Pod")
    if (end := read.metadata.deletion_timestamp) is not None:
        return [Foreseen("Kubernetes: the pod is being deleted", max(0.0, end.timestamp() - now))]
    return [
        Foreseen(f"Kubernetes: the pod is disrupted{f' ({condition.reason})' if condition.reason else ''}")
        for condition in read.status.conditions or []
        if condition.type == DISRUPTION and condition.status == "True"
    ]


def news(found: Sequence[Foreseen], known: set[str]) -> list[Foreseen]:
    """Return the notices of ``found`` whose source is not in ``known``.

    ``known`` contains the health findings that existed when the pod started. The pod was placed on the node in spite of
    them, so its successor would be placed there again. A finding that is over is removed from ``known``.
    """
    known &= {one.source for one in found}
    return [one for one in found if one.source not in known]


def _ends_the_pod(taint: _Taint, tolerations: Sequence[_Toleration]) -> bool:
    if taint.key in LEAVING_TAINTS:
        return True
    if taint.effect != "NoExecute" or taint.key in UNREACHED:
        return False
    return not any(_tolerates(one, taint) and one.limit_s is None for one in tolerations)


def _tolerates(toleration: _Toleration, taint: _Taint) -> bool:
    if toleration.effect and toleration.effect != taint.effect:
        return False
    exists = toleration.operator == "Exists"
    if not toleration.key:
        return exists
    return toleration.key == taint.key and (exists or (toleration.value or "") == (taint.value or ""))


def _converted(raw: Mapping[str, Any], kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(raw, type=kind)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"the API server has sent a {what} of an unknown form: {error}") from error
