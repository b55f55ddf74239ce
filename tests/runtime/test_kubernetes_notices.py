"""Notices in the objects of Kubernetes, by table."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.protocol.notices import NO_DEADLINE
from holdfast.errors import ProtocolError
from holdfast.runtime.node.kubernetes_notices import news, node_notices, pod_notices
from holdfast.runtime.node.notice_forms import Foreseen

NOW = 1_790_000_000.0  # 2026-09-21T14:13:20Z
POD: dict[str, Any] = {
    "spec": {
        "tolerations": [
            {"key": "nvidia.com/gpu", "operator": "Exists"},
            {"key": "dedicated", "operator": "Equal", "value": "training", "effect": "NoExecute"},
            {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "effect": "NoExecute",
             "tolerationSeconds": 300},
            {"key": "sick", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        ]
    }
}  # fmt: skip


def taint(key: str, effect: str, value: str = "") -> dict[str, Any]:
    """Return a Node with one taint."""
    return {"spec": {"taints": [{"key": key, "effect": effect, **({"value": value} if value else {})}]}}


def condition(kind: str, status: str) -> dict[str, Any]:
    """Return a Node, or a Pod, with one condition."""
    return {"status": {"conditions": [{"type": kind, "status": status, "reason": "Why", "message": "m"}]}}


@pytest.mark.parametrize(
    ("node", "sources"),
    [
        ({}, []),
        ({"metadata": {"name": "gpu-1", "deletionTimestamp": None}, "spec": {"taints": None}}, []),
        ({"spec": {"unschedulable": True}}, ["Kubernetes: cordoned"]),
        ({"spec": {"unschedulable": False}}, []),
        (taint("node.kubernetes.io/unschedulable", "NoSchedule"), ["Kubernetes: cordoned"]),
        (
            {
                "spec": {
                    "unschedulable": True,
                    **taint("node.kubernetes.io/unschedulable", "NoSchedule")["spec"],
                }
            },
            ["Kubernetes: cordoned"],
        ),
        (
            {"metadata": {"deletionTimestamp": "2026-09-21T14:13:00Z"}},
            ["Kubernetes: the node is being deleted"],
        ),
        (
            taint("ToBeDeletedByClusterAutoscaler", "NoSchedule", "1790000000"),
            ["Kubernetes: taint ToBeDeletedByClusterAutoscaler"],
        ),
        (taint("DeletionCandidateOfClusterAutoscaler", "PreferNoSchedule", "1790000000"), []),
        (taint("karpenter.sh/disrupted", "NoSchedule"), ["Kubernetes: taint karpenter.sh/disrupted"]),
        (
            taint("karpenter.sh/disruption", "NoSchedule", "disrupting"),
            ["Kubernetes: taint karpenter.sh/disruption"],
        ),
        (
            taint("node.kubernetes.io/out-of-service", "NoExecute", "nodeshutdown"),
            ["Kubernetes: taint node.kubernetes.io/out-of-service"],
        ),
        (
            taint("node.cloudprovider.kubernetes.io/shutdown", "NoSchedule"),
            ["Kubernetes: taint node.cloudprovider.kubernetes.io/shutdown"],
        ),
        (taint("node.kubernetes.io/not-ready", "NoExecute"), []),
        (taint("node.kubernetes.io/unreachable", "NoExecute"), []),
        (taint("node.kubernetes.io/memory-pressure", "NoSchedule"), []),
        (taint("nvidia.com/gpu", "NoExecute", "present"), []),
        (taint("dedicated", "NoExecute", "training"), []),
        (taint("dedicated", "NoExecute", "inference"), ["Kubernetes: taint dedicated"]),
        (taint("dedicated", "NoSchedule", "inference"), []),
        (taint("sick", "NoExecute"), ["Kubernetes: taint sick"]),
        (condition("Ready", "True"), []),
        (condition("Ready", "False"), ["health: Kubernetes: not ready"]),
        (condition("Ready", "Unknown"), ["health: Kubernetes: not reachable"]),
        (condition("MemoryPressure", "True"), ["health: Kubernetes: MemoryPressure"]),
        (condition("DiskPressure", "True"), ["health: Kubernetes: DiskPressure"]),
        (condition("DiskPressure", "Unknown"), []),
        (condition("KernelDeadlock", "True"), []),
    ],
)
def test_a_node_leaves_by_this_table(node: dict[str, Any], sources: list[str]) -> None:
    assert node_notices(node, POD) == [Foreseen(source, NO_DEADLINE) for source in sources]


def test_a_taint_with_two_effects_is_one_notice() -> None:
    both = [{"key": "sick", "effect": "NoSchedule"}, {"key": "sick", "effect": "NoExecute"}]
    karpenter = [
        {"key": "karpenter.sh/disrupted", "effect": effect} for effect in ("NoSchedule", "NoExecute")
    ]
    found = node_notices({"spec": {"taints": both + karpenter}}, POD)
    assert [one.source for one in found] == [
        "Kubernetes: taint sick",
        "Kubernetes: taint karpenter.sh/disrupted",
    ]


def test_a_pod_that_cannot_be_read_tolerates_what_has_not_removed_it() -> None:
    assert node_notices(taint("dedicated", "NoExecute", "inference"), None) == []
    assert node_notices(taint("karpenter.sh/disrupted", "NoSchedule"), None) != []
    everything = {"spec": {"tolerations": [{"operator": "Exists"}]}}
    assert node_notices(taint("sick", "NoExecute"), everything) == []


@pytest.mark.parametrize(
    ("pod", "found"),
    [
        (POD, []),
        (
            {"metadata": {"deletionTimestamp": "2026-09-21T14:15:50Z", "deletionGracePeriodSeconds": 150}},
            [Foreseen("Kubernetes: the pod is being deleted", 150.0)],
        ),
        (
            {"metadata": {"deletionTimestamp": "2026-09-21T14:13:00Z"}},
            [Foreseen("Kubernetes: the pod is being deleted", 0.0)],
        ),
        (
            {
                "metadata": {"deletionTimestamp": "2026-09-21T14:13:50Z"},
                **condition("DisruptionTarget", "True"),
            },
            [Foreseen("Kubernetes: the pod is being deleted", 30.0)],
        ),
        (condition("DisruptionTarget", "True"), [Foreseen("Kubernetes: the pod is disrupted (Why)")]),
        (condition("DisruptionTarget", "False"), []),
        (condition("Ready", "False"), []),
    ],
)
def test_a_pod_leaves_by_this_table(pod: dict[str, Any], found: list[Foreseen]) -> None:
    assert pod_notices(pod, NOW) == found


@pytest.mark.parametrize(
    "wrong",
    [
        {"spec": {"taints": [{"effect": "NoExecute"}]}},
        {"metadata": {"deletionTimestamp": "soon"}},
        {"status": {"conditions": {}}},
        {"spec": []},
    ],
)
def test_an_object_of_another_form_is_neither_a_notice_nor_its_withdrawal(wrong: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="unknown form"):
        node_notices(wrong)


def test_a_finding_as_old_as_the_pod_is_no_news_until_it_was_over() -> None:
    pressure, cordon = Foreseen("health: Kubernetes: DiskPressure"), Foreseen("Kubernetes: cordoned")
    known = {pressure.source}
    assert news([pressure, cordon], known) == [cordon]
    assert news([cordon], known) == [cordon]
    assert news([pressure], known) == [pressure]
