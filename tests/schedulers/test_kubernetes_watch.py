"""The watches of Node and Pod and the published status: the real client against a fake API server on loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import ProtocolError, UsageError
from holdfast.runtime.node import kubernetes_status, kubernetes_watch
from holdfast.runtime.node.kubernetes_status import StatusPublisher, status_places
from holdfast.runtime.node.kubernetes_watch import (
    ApiFailure,
    KubernetesNode,
    KubernetesPod,
    Watched,
    kubernetes_sources,
)
from holdfast.runtime.node.node_status import NodeStatus
from holdfast.runtime.node.notice_forms import Foreseen
from holdfast.runtime.node.notice_sources import NoticeSource, read_sources
from tests.runtime.runs import until
from tests.schedulers.fake_api_server import ApiServer

pytest.importorskip("kubernetes")
CORDON, NO_CORDON = {"spec": {"unschedulable": True}}, {"spec": {"unschedulable": None}}
CORDONED = [Foreseen("Kubernetes: cordoned")]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    """Yield a server with one node and one pod. Pauses are short."""
    monkeypatch.setattr(kubernetes_watch, "PAUSE_S", 0.05)
    monkeypatch.setattr(kubernetes_watch, "PAUSE_S_MAX", 0.2)
    with ApiServer(tmp_path / "account") as server:
        server.put("nodes", "gpu-1", {"spec": {}, "status": {"conditions": []}})
        server.put("pods", "bert-0", {"spec": {"nodeName": "gpu-1"}, "status": {"phase": "Running"}})
        yield server
        # The threads of the watches end as in production: by the loss of their rights.
        monkeypatch.setattr(kubernetes_watch, "failure_of", lambda error: ApiFailure(403, "the test is over"))
        server.failing = 500
        server.close_streams()
        until(
            "no watch is left",
            lambda: not [t for t in threading.enumerate() if t.name.startswith("kubernetes")],
        )


@pytest.fixture
def sources(api: ApiServer) -> tuple[KubernetesNode, KubernetesPod]:
    """Return both sources of that pod."""
    node, pod = kubernetes_sources(api.environment("gpu-1", "bert-0"))
    assert isinstance(node, KubernetesNode) and isinstance(pod, KubernetesPod)
    return node, pod


def look(source: NoticeSource) -> list[Foreseen]:
    """Query a source once."""
    return asyncio.run(source.look())


def streams(api: ApiServer, resource: str, count: int = 1) -> None:
    """Wait until so many streams of a resource were opened."""
    until(f"stream {count} of {resource}", lambda: api.count(f"{resource} watch") >= count)


def failed(source: NoticeSource) -> str:
    """Query a source once, and return the message of its failure; empty: there is none."""
    try:
        look(source)
    except ProtocolError as error:
        return error.message
    return ""


def test_a_taint_is_a_notice_until_it_is_removed(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    assert look(node) == []
    streams(api, "nodes")
    api.put(
        "nodes", "gpu-1", {"spec": {"taints": [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]}}
    )
    until("the notice", lambda: look(node) == [Foreseen("Kubernetes: taint karpenter.sh/disrupted")])
    api.put("nodes", "gpu-1", {"spec": {"taints": []}})
    until("its withdrawal", lambda: look(node) == [])
    assert api.count("/nodes ") == 2, api.asked  # a list and one stream


def test_the_deletion_of_the_pod_has_the_end_of_its_grace(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    _, pod = sources
    look(pod)
    streams(api, "pods")
    end = (datetime.now(UTC) + timedelta(seconds=150)).isoformat(timespec="seconds").replace("+00:00", "Z")
    api.put("pods", "bert-0", {"metadata": {"deletionTimestamp": end}})
    until("the notice", lambda: look(pod))
    (found,) = look(pod)
    assert found.source == "Kubernetes: the pod is being deleted" and 60 < found.left_s <= 151
    api.delete("pods", "bert-0")
    until("it is gone", lambda: look(pod) == [Foreseen("Kubernetes: the pod was deleted", 0.0)])
    api.put("pods", "bert-0", {"metadata": {"uid": "another"}})
    version = api.bookmark("pods")
    api.close_streams()
    until("the watch knows it", lambda: f"watch {version}" in api.asked[-1])
    assert look(pod) == [Foreseen("Kubernetes: the pod was deleted", 0.0)]


def test_a_node_that_was_deleted_and_registered_again_stays(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    look(node)
    streams(api, "nodes")
    api.delete("nodes", "gpu-1")
    until("it is gone", lambda: look(node) == [Foreseen("Kubernetes: the node was deleted")])
    api.put("nodes", "gpu-1", {"metadata": {"uid": "another"}})
    until("it is back", lambda: look(node) == [])


def test_a_condition_that_came_with_the_pod_is_no_notice_and_a_later_one_is(api: ApiServer) -> None:
    api.put(
        "nodes", "gpu-1", {"status": {"conditions": [{"type": "DiskPressure", "status": "True"}]}, **CORDON}
    )
    node = kubernetes_sources(api.environment("gpu-1", "bert-0"))[0]
    until("the cordon is seen", lambda: look(node) == CORDONED)
    late = [{"type": "MemoryPressure", "status": "True"}, {"type": "DiskPressure", "status": "True"}]
    api.put("nodes", "gpu-1", {"status": {"conditions": late}, **NO_CORDON})
    until("the later one", lambda: look(node) == [Foreseen("health: Kubernetes: MemoryPressure")])


def test_a_stream_that_the_server_closes_is_continued_at_its_version(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    look(node)
    streams(api, "nodes")
    version = api.bookmark("nodes")
    api.close_streams()
    streams(api, "nodes", 2)
    assert [line for line in api.asked if "nodes watch" in line][1].endswith(f" {version}")
    api.put("nodes", "gpu-1", CORDON)
    until("the notice", lambda: look(node) == CORDONED)
    assert sum("/nodes" in line and "watch" not in line for line in api.asked) == 1, "it is not listed again"


def test_a_version_that_the_server_has_forgotten_is_listed_again(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    look(node)
    streams(api, "nodes")
    with api.changed:  # no stream sees the change
        api.forget()
        api.put("nodes", "gpu-1", CORDON)
        api.forget()
    until("the notice", lambda: look(node) == CORDONED)
    assert not failed(node)
    lists = [line for line in api.asked if "/nodes" in line and "watch" not in line]
    assert len(lists) == 2, api.asked


def test_a_token_that_was_replaced_is_read_again(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    look(node)
    streams(api, "nodes")
    api.new_token("second")
    api.put("nodes", "gpu-1", CORDON)
    until("the notice", lambda: look(node) == CORDONED)


def test_an_outage_withdraws_nothing_and_ends(
    api: ApiServer, sources: tuple[KubernetesNode, KubernetesPod]
) -> None:
    node, _ = sources
    look(node)
    streams(api, "nodes")
    api.failing = 503
    api.close_streams()
    until("the failure", lambda: failed(node))
    assert "does not show the node gpu-1: status 503" in failed(node)
    with pytest.raises(ProtocolError):
        look(node)
    api.put("nodes", "gpu-1", CORDON)
    api.failing = 0
    until("the notice", lambda: not failed(node) and look(node) == CORDONED)


@pytest.mark.parametrize("kind", ["node", "pod"])
def test_without_the_right_to_watch_there_is_one_message_and_no_further_request(
    api: ApiServer, kind: Watched
) -> None:
    api.forbidden = {"nodes" if kind == "node" else "pods"}
    node, pod = kubernetes_sources(api.environment("gpu-1", "bert-0"))
    refused, other = (node, pod) if kind == "node" else (pod, node)
    until("the refusal", lambda: failed(refused))
    assert f"no permission to watch the {kind}" in failed(refused) and "403" in failed(refused)
    asked = api.count(f"{kind}s")
    look(other)
    streams(api, "pods" if kind == "node" else "nodes")
    for _ in range(3):
        api.close_streams()
        api.put("nodes", "gpu-1", CORDON)
    if kind == "pod":
        until("the other source works", lambda: look(other) == CORDONED)
    assert api.count(f"{kind}s") == asked == 1


def test_a_node_that_the_cluster_does_not_have_is_named(api: ApiServer) -> None:
    node = kubernetes_sources(api.environment("gpu-9", "bert-0"))[0]
    until("the failure", lambda: "the cluster has no node gpu-9" in failed(node))


def test_no_server_is_one_reason_without_anything_that_changes(api: ApiServer) -> None:
    environment = {**api.environment("gpu-1", "bert-0"), "KUBERNETES_SERVICE_PORT": "1"}
    node = kubernetes_sources(environment)[0]
    until("the failure", lambda: failed(node))
    assert failed(node) == "the API server does not show the node gpu-1: no answer (NewConnectionError)"


def test_a_certificate_that_is_not_the_clusters_is_refused(api: ApiServer, tmp_path: Path) -> None:
    with ApiServer(tmp_path / "other"):
        account = {"HOLDFAST_SERVICE_ACCOUNT": str(tmp_path / "other")}
        node = kubernetes_sources({**api.environment("gpu-1", "bert-0"), **account})[0]
        until("the failure", lambda: failed(node))
        assert "no answer (SSLError)" in failed(node)
    assert not api.asked


def test_it_is_a_source_in_a_pod_and_refused_by_name_elsewhere(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = api.environment("gpu-1", "bert-0")
    names = ["kubernetes node", "kubernetes pod"]
    assert [source.name for source in read_sources("auto", inside)] == names
    assert [source.name for source in read_sources("kubernetes", inside)] == names
    assert read_sources("none", inside) == read_sources("auto", {}) == []
    for name in ("NODE_NAME", "POD_NAME", "KUBERNETES_SERVICE_HOST"):
        without = {key: value for key, value in inside.items() if key != name}
        assert read_sources("auto", without) == []
        with pytest.raises(UsageError, match=name):
            read_sources("kubernetes", without)
    (api.account / "token").unlink()
    with pytest.raises(UsageError, match="there is no token"):
        read_sources("kubernetes", inside)


def test_without_the_client_there_is_one_message(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes_watch, "is_installed", lambda: False)
    inside = api.environment("gpu-1", "bert-0")
    with pytest.raises(UsageError, match="not installed") as raised:
        read_sources("kubernetes", inside)
    assert "holdfast[kubernetes]" in (raised.value.hint or "")
    (only,) = read_sources("auto", inside)
    until("the failure", lambda: "holdfast[kubernetes]" in failed(only))


# ---------------------------------------------------------------- status


class Journal:
    """The events of a publisher."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def append(self, kind: str, data: Any, *, durable: bool = False) -> None:
        """Keep an event."""
        self.events.append((kind, data))


def publish(
    api: ApiServer,
    monkeypatch: pytest.MonkeyPatch,
    *turns: NodeStatus,
    again_s: float = 0.0,
    end: bool = False,
) -> Journal:
    """Run a publisher of that pod for these turns."""
    monkeypatch.setattr(kubernetes_status, "AGAIN_S", again_s)
    environment = {**api.environment("gpu-1", "bert-0"), **api.trainjob()}
    places = status_places("auto", environment)
    for place in places:
        monkeypatch.setattr(type(place), "gap_s", 0.0)
    journal = Journal()
    publisher = StatusPublisher(places, lambda: turns[-1], journal)

    async def run() -> None:
        for status in turns:
            await publisher.turn(status)
        if end:
            await publisher.end()

    asyncio.run(run())
    return journal


def test_a_pod_shows_its_state_and_rank_0_that_of_the_trainjob(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = (
        NodeStatus("starting", 0, True),
        NodeStatus("training", 7, True),
        NodeStatus("training", 7, True),
    )
    journal = publish(api, monkeypatch, *turns, end=True)
    assert api.patches == [
        {"holdfast.io/step": "0", "holdfast.io/state": "starting"},
        {"holdfast.io/step": "7", "holdfast.io/state": "training"},
        {"holdfast.io/step": "7", "holdfast.io/state": "ended"},
    ]
    shown = [{m["name"]: m["value"] for m in body["trainerStatus"]["metrics"]} for body in api.posted]
    assert shown == [{"holdfast_step": "7", "holdfast_state": state} for state in ("training", "ended")]
    at = datetime.fromisoformat(api.posted[0]["trainerStatus"]["lastUpdatedTime"])
    assert abs((datetime.now(UTC) - at).total_seconds()) < 3600 and not journal.events
    assert api.count("strategic-merge-patch+json") == 3


def test_a_step_waits_for_its_turn_and_a_state_does_not(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = (
        NodeStatus("training", 1, False), NodeStatus("training", 2, False), NodeStatus("recovering", 2, False)
    )  # fmt: skip
    publish(api, monkeypatch, *turns, again_s=1000.0)
    assert [shown["holdfast.io/state"] for shown in api.patches] == ["training", "recovering"]
    assert not api.posted, "another node has rank 0"


def test_what_is_refused_is_logged_once_and_given_up(api: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    api.forbidden = {"patch"}
    api.has_trainjobs = False
    turns = [NodeStatus("training", step, True) for step in range(1, 5)]
    journal = publish(api, monkeypatch, *turns, end=True)
    assert sorted((kind, data["place"], data["given_up"]) for kind, data in journal.events) == [
        ("status_not_sent", "TrainJob status", True),
        ("status_not_sent", "pod train/bert-0", True),
    ]
    assert api.count("PATCH") == api.count("POST") == 1 and api.patches == api.posted == []


def test_a_failure_is_logged_once_and_the_next_turn_sends(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    api.failing = 500
    statuses = [NodeStatus("training", step, False) for step in range(1, 4)]
    journal = publish(api, monkeypatch, *statuses)
    assert [data["error"].split(" (")[0] for _, data in journal.events] == ["status 500"]
    api.failing = 0
    monkeypatch.setattr(api, "token", "stale")
    environment = api.environment("gpu-1", "bert-0")
    publisher = StatusPublisher(status_places("auto", environment), lambda: statuses[0], journal)

    async def run() -> None:
        await publisher.turn(statuses[0])
        api.new_token("fresh")
        await publisher.turn(statuses[1])

    asyncio.run(run())
    assert [shown["holdfast.io/step"] for shown in api.patches] == ["2"]


def test_nothing_is_published_outside_of_a_pod_or_when_it_is_off(api: ApiServer) -> None:
    inside = {**api.environment("gpu-1", "bert-0"), **api.trainjob()}
    assert (
        status_places("auto", {}) == status_places("none", inside) == status_places("file=/x", inside) == []
    )
    assert [place.name for place in status_places("kubernetes,file=/x", inside)] == [
        "pod train/bert-0",
        "TrainJob status",
    ]
    off = {**inside, "HOLDFAST_TRAINJOB_STATUS": "0"}
    assert [place.name for place in status_places("auto", off)] == ["pod train/bert-0"]
    assert not api.asked
