"""Pods as process trees in network namespaces: the real client watches their Node and Pod at a fake API server."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.nodes.cables import Network, inside, why_not
from tests.nodes.jobs import TRAIN, Hosts
from tests.runtime.runs import until
from tests.schedulers.fake_api_server import ApiServer

pytest.importorskip("kubernetes")
WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no network of several hosts here: {WHY_NOT}"),
]
PODS = 3
TAINT = {"spec": {"taints": [{"key": "ToBeDeletedByClusterAutoscaler", "effect": "NoSchedule"}]}}


@pytest.fixture(scope="module")
def net() -> Iterator[Network]:
    """Three hosts."""
    with Network(PODS) as network:
        yield network


class Pods(Hosts):
    """Pods of an Indexed Job: ``holdfast run`` with the variables that the manifests set, one pod per host.

    A pod reaches the API server only on the host of the server, at 127.0.0.1.
    """

    def of_pod(self, index: int, api: ApiServer, name: str) -> dict[str, str]:
        """The environment of one pod."""
        return {
            **api.environment(f"gpu-{index}", name),
            "HOLDFAST_SCHEDULER": "kubernetes",
            "JOB_COMPLETION_INDEX": str(index),
        }

    def place(self, index: int) -> list[str]:
        """As on any host, but a pod knows its number from its index."""
        words = super().place(index)
        at = words.index("--node-rank") if "JOB_COMPLETION_INDEX" in self.env else len(words)
        return words[:at] + words[at + 2 :]

    def create(self, index: int, api: ApiServer, name: str = "") -> None:
        """Make the pod of an index and start it; ``name``: of a later one of the same index."""
        name = name or f"bert-{index}"
        api.put("nodes", f"gpu-{index}", {"spec": {}})
        api.put("pods", name, {"spec": {"nodeName": f"gpu-{index}"}})
        before = self.env
        self.env = {**before, **self.of_pod(index, api, name)}
        self.start(index)
        self.env = before


@pytest.fixture
def api(net: Network, tmp_path: Path) -> Iterator[ApiServer]:
    """Yield the API server that the pod of index 1 reaches."""
    with inside(net.names[1]):
        server = ApiServer(tmp_path / "account").__enter__()
    try:
        yield server
    finally:
        server.__exit__()


def state(api: ApiServer) -> str:
    """Return the state that the pods have shown last."""
    return api.patches[-1]["holdfast.io/state"] if api.patches else ""


def tainted_for_a_while(pods: Pods, api: ApiServer) -> None:
    """Start two pods, taint the node of the second one, and take the taint back: nothing may change."""
    pods.start(0)
    pods.create(1, api)
    pods.wait_step(0, 3)
    api.put("nodes", "gpu-1", TAINT)
    pods.wait_event(0, "node_leaves")
    until("the pod shows that it leaves", lambda: state(api) == "leaving")
    api.put("nodes", "gpu-1", {"spec": {"taints": []}})
    pods.wait_event(0, "node_stays")
    assert not {"fenced", "exit_requested", "node_left"} & {event.kind for event in pods.events(0)}


@pytest.mark.torch
def test_a_taint_moves_the_ranks_to_the_pod_that_waits(net: Network, api: ApiServer, tmp_path: Path) -> None:
    with Pods(net, tmp_path, "2:3", TRAIN, ("120", "0.17", str(tmp_path / "out")), torch=True) as pods:
        pods.start(0)
        pods.create(1, api)
        pods.wait_event(0, "generation_started")
        pods.start(2)
        until("pod 2 has a vote", lambda: "node2" in pods.events(0, "electorate")[-1].data["voters"])
        pods.wait_step(0, 3)
        until("the pod shows its state", lambda: state(api) == "training")
        api.put("nodes", "gpu-1", TAINT)
        assert pods.wait(1) == Exit.REQUEUE, pods.output(1)
        leaves = pods.wait_event(0, "node_leaves")
        assert leaves.data["source"] == "Kubernetes: taint ToBeDeletedByClusterAutoscaler"
        assert pods.wait_event(0, "recovered").data["kind"] == "leave"
        assert [e.data["steps_lost"] for e in pods.events(0, "restored")] == [0, 0]
        # A move may be over before the pod shows that it leaves.
        assert api.patches[-1]["holdfast.io/state"] == "ended"
        pods.let_end()
        assert [pods.wait(0), pods.wait(2)] == [0, 0], pods.output(0)
    assert (tmp_path / "out-0").read_text() == (tmp_path / "out-1").read_text()


@pytest.mark.more
@pytest.mark.torch
def test_a_taint_without_a_spare_is_shown_and_ends_when_it_is_taken_back(
    net: Network, api: ApiServer, tmp_path: Path
) -> None:
    with Pods(net, tmp_path, "2", TRAIN, ("100000", "0.05", str(tmp_path / "out")), torch=True) as pods:
        tainted_for_a_while(pods, api)


@pytest.mark.more
@pytest.mark.torch
def test_a_pod_that_is_deleted_without_a_spare_saves_the_job_before_its_grace_ends(
    net: Network, api: ApiServer, tmp_path: Path
) -> None:
    with Pods(net, tmp_path, "2", TRAIN, ("100000", "0.05", str(tmp_path / "out")), torch=True) as pods:
        tainted_for_a_while(pods, api)
        end = (datetime.now(UTC) + timedelta(seconds=30)).isoformat(timespec="seconds").replace("+00:00", "Z")
        api.put("pods", "bert-1", {"metadata": {"deletionTimestamp": end}})
        leaves = pods.wait_event(0, "node_leaves", 2)
        assert leaves.data["source"] == "Kubernetes: the pod is being deleted"
        assert 0 < leaves.data["left_s"] <= 31
        assert [pods.wait(0), pods.wait(1)] == [Exit.REQUEUE] * 2, pods.output(0)
        assert pods.events(0, "sealed")[-1].data["save_kind"] == "exit"


@pytest.mark.torch
def test_a_lost_process_is_replaced_alone_and_new_pods_continue_at_the_step_after_the_save(
    net: Network, api: ApiServer, tmp_path: Path
) -> None:
    """Both pods leave with 75, for which the manifest has the Job make new ones, with empty run directories."""
    script = TRAIN.replace(
        "            optimizer.zero_grad()\n",
        "            optimizer.zero_grad()\n"
        "        if step.committed:\n"
        "            open(f'{result}-steps-{rank}', 'a').write(f'{s.step}\\n')\n",
    )
    with Pods(net, tmp_path, "2", script, ("200", "0.05", str(tmp_path / "out")), torch=True) as pods:
        pods.start(0)
        pods.create(1, api)
        pods.wait_step(0, 3)
        (lost,) = [e for e in pods.events(0, "member_started") if e.data["rank"] == 1]
        os.kill(int(lost.data["pid"]), signal.SIGKILL)
        assert pods.wait_event(0, "recovered").data["steps_lost"] == 0
        assert [e.data["rank"] for e in pods.events(0, "member_started")][2:] == [1], (
            "rank 0 kept its process"
        )
        end = (datetime.now(UTC) + timedelta(seconds=5)).isoformat(timespec="seconds").replace("+00:00", "Z")
        api.put("pods", "bert-1", {"metadata": {"deletionTimestamp": end}})
        assert [pods.wait(0), pods.wait(1)] == [Exit.REQUEUE] * 2, pods.output(0)
        saved = pods.events(0, "sealed")[-1].data["step"]
        api.delete("pods", "bert-1")
        pods.start(0)
        pods.create(1, api, "bert-1-again")
        pods.let_end()
        assert [pods.wait(0), pods.wait(1)] == [0, 0], pods.output(0)
        assert f"resumed at step {saved} " in pods.output(0)
    for rank in (0, 1):
        steps = [int(line) for line in (tmp_path / f"out-steps-{rank}").read_text().split()]
        missing = set(range(1, 201)) - set(steps)
        assert len(steps) == len(set(steps)), "no step twice"
        # The kill may come after the commit of a step, before the script writes its line.
        assert len(missing) <= rank, missing


def test_a_pod_without_rights_is_noted_once_and_its_job_runs_to_its_end(
    net: Network, api: ApiServer, tmp_path: Path
) -> None:
    api.forbidden = {"nodes", "patch"}
    with Pods(net, tmp_path, "2", args=("100000",)) as pods:
        pods.start(0)
        pods.create(1, api)
        failed = pods.wait_event(1, "notice_source_failed")
        assert failed.data["source"] == "kubernetes node" and "no permission" in failed.data["error"]
        assert pods.wait_event(1, "status_not_sent").data["given_up"] is True
        until("all ranks run", lambda: len(pods.events(0, "member_started")) == 2)
        asked = api.count("/nodes") + api.count("PATCH")
        pods.let_end()
        assert [pods.wait(0), pods.wait(1)] == [0, 0], pods.output(1)
        assert api.count("/nodes") + api.count("PATCH") == asked == 2
        assert len(pods.events(1, "notice_source_failed")) == len(pods.events(1, "status_not_sent")) == 1


def test_a_pod_that_is_replaced_joins_under_its_index(net: Network, api: ApiServer, tmp_path: Path) -> None:
    """The first one is lost with all its processes; a process tree with the same index takes its place."""
    with Pods(net, tmp_path, "2:3", args=("100000",)) as pods:
        pods.start(0)
        pods.create(1, api)
        pods.wait_event(0, "generation_started")
        pods.start(2)
        until("pod 2 has a vote", lambda: "node2" in pods.events(0, "electorate")[-1].data["voters"])
        until("all ranks run", lambda: len(pods.events(0, "member_started")) == 2)
        pods.kill(1)
        pods.wait(1)
        lost = pods.wait_event(0, "node_lost")
        assert lost.data["node"] == "node1"
        assert pods.wait_event(0, "generation_started", 2).data["nodes"] == ["node0", "node2"]
        api.delete("pods", "bert-1")
        pods.create(1, api, "bert-1-again")
        until(
            "it has joined under its index",
            lambda: [
                e for e in pods.events(0, "agent_joined") if e.seq > lost.seq and e.data["node"] == "node1"
            ],
        )
        until("it waits as the spare", lambda: state(api) == "waiting")
        assert not pods.events(1, "notice_source_failed")
        pods.let_end()
        assert [pods.wait(index) for index in range(PODS)] == [0, 0, 0], pods.output(0)


@pytest.mark.more
def test_a_pod_that_is_deleted_by_force_makes_room_for_the_next_of_its_index(
    net: Network, api: ApiServer, tmp_path: Path
) -> None:
    """Its processes still run, as on a node whose kubelet is not reached, when the next pod is made."""
    with Pods(net, tmp_path, "2:3", args=("100000",)) as pods:
        pods.start(0)
        pods.create(1, api)
        pods.wait_event(0, "generation_started")
        pods.start(2)
        until("pod 2 has a vote", lambda: "node2" in pods.events(0, "electorate")[-1].data["voters"])
        until("all ranks run", lambda: len(pods.events(0, "member_started")) == 2)
        first = pods.commands[1]
        api.delete("pods", "bert-1")
        pods.create(1, api, "bert-1-again")
        assert first.wait(60) == Exit.REQUEUE, pods.output(1)
        left = pods.wait_event(0, "node_left")
        assert left.data["node"] == "node1"
        until(
            "the next one has joined under its index",
            lambda: [
                e for e in pods.events(0, "agent_joined") if e.seq > left.seq and e.data["node"] == "node1"
            ],
        )
        pods.let_end()
        assert [pods.wait(index) for index in range(PODS)] == [0, 0, 0], pods.output(0)


@pytest.mark.more
@pytest.mark.torch
def test_a_job_that_is_deleted_saves_once(net: Network, api: ApiServer, tmp_path: Path) -> None:
    """The notice of a deleted pod comes beside the signals to all launchers."""
    with Pods(net, tmp_path, "2:3", TRAIN, ("100000", "0.05", str(tmp_path / "out")), torch=True) as pods:
        pods.start(0)
        pods.create(1, api)
        pods.wait_event(0, "generation_started")
        pods.start(2)
        until("pod 2 has a vote", lambda: "node2" in pods.events(0, "electorate")[-1].data["voters"])
        pods.wait_step(0, 3)
        end = (datetime.now(UTC) + timedelta(seconds=50)).isoformat(timespec="seconds").replace("+00:00", "Z")
        api.put("pods", "bert-1", {"metadata": {"deletionTimestamp": end}})
        pods.wait_event(0, "node_leaves")
        for index in range(PODS):
            pods.commands[index].send_signal(signal.SIGTERM)
        assert [pods.wait(index) for index in range(PODS)] == [Exit.REQUEUE] * PODS, pods.output(0)
        (sealed,) = [e for e in pods.events(0, "sealed") if e.data["save_kind"] == "exit"]
        assert sealed.data["step"] > 3
