"""Jobs on a real Ray cluster of several nodes on this machine, with real losses. ``make ray``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from holdfast.exit_codes import Exit
from holdfast.integrations.ray.keeper import Owner
from tests.frameworks.ray.clusters import RayJob, RayNodes, ray_nodes
from tests.runtime.runs import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayNodes]:
    """Yield three nodes and a head. A test that loses a node adds another one."""
    with ray_nodes(3) as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(cluster: RayNodes, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the final weights of the same training without a fault."""
    with RayJob(cluster, tmp_path_factory.mktemp("undisturbed") / "job", spares=1) as job:
        (digest,) = job.digests()
        assert job.process.returncode == 0
        until("places are removed", lambda: not any(job.place(number).path.exists() for number in range(3)))
    return digest


def steps_lost(job: RayJob, number: int) -> set[int]:
    """Return the numbers of lost steps over all recoveries in a node's log."""
    return {event.data["steps_lost"] for event in job.events(number, "recovered")}


def joined(job: RayJob, number: int, *, log_of: int) -> int:
    """Return how often a node has joined, by the log of the node ``log_of``."""
    return sum(event.data["node"] == f"node{number}" for event in job.events(log_of, "agent_joined"))


def owner_of(job: RayJob, number: int) -> Owner:
    """Return the actor of a node."""
    owner = job.place(number).owner
    assert owner is not None
    return owner


def test_a_lost_node_is_replaced_by_the_spare_and_comes_back_as_one(
    cluster: RayNodes, tmp_path: Path, undisturbed: str
) -> None:
    with RayJob(cluster, tmp_path / "job", spares=1) as job:
        job.trains(10)
        lost = job.ray_node(0)
        cluster.lose(lost)  # rank 0, the first contact, and the controller that was elected there
        job.wait_event(1, "recovered")
        until("Ray has noticed", lambda: "node0: its actor is lost" in job.output, 60)
        cluster.add()
        until("node0 is on another node of the cluster", lambda: job.ray_node(0) != lost, 120)
        # In the log of another node: the log of node0 is still that of its lost agent at first.
        until("node0 has joined again", lambda: joined(job, 0, log_of=2) == 2, 120)
        recovered = len(job.events(2, "recovered"))
        cluster.lose(job.ray_node(1))
        job.wait_event(2, "recovered", recovered + 1)
        cluster.add()
        job.hurry.touch()
        digests = job.digests()
        assert steps_lost(job, 2) == {0}
        assert job.process.returncode == 0
    assert digests == {undisturbed}


def test_a_lost_node_without_a_spare_is_waited_for(cluster: RayNodes, tmp_path: Path) -> None:
    with RayJob(cluster, tmp_path / "job", num_nodes=3) as job:
        job.trains(10)
        with RayJob(cluster, tmp_path / "other", "other") as other:
            until("the other job waits", lambda: "in use by other jobs" in other.output, 60)
            other.process.kill()  # before the driver has any node
        cluster.lose(job.ray_node(1))
        until("Ray has noticed", lambda: "node1: its actor is lost" in job.output, 60)
        cluster.add()
        job.wait_event(0, "recovered")
        answer = job.ends()
        assert len({value["digest"] for value in answer["returned"].values()}) == 1
        assert steps_lost(job, 0) == {0}


def test_a_killed_actor_costs_nothing(cluster: RayNodes, tmp_path: Path, undisturbed: str) -> None:
    with RayJob(cluster, tmp_path / "job") as job:
        job.trains(10)
        before = {number: (owner_of(job, number).pid, job.workers(number)) for number in (0, 1)}
        os.kill(before[1][0], signal.SIGKILL)
        ray.kill(ray.get_actor("job-node0", namespace="holdfast"), no_restart=False)
        for number in (0, 1):
            said = f"node{number}: a new actor has taken over"
            until(said, lambda said=said: said in job.output, 120)  # type: ignore[misc]
            assert owner_of(job, number).pid != before[number][0]
        assert job.digests() == {undisturbed}
        for number in (0, 1):
            assert job.workers(number) == before[number][1]
            assert not job.events(number, "detected")


def test_a_killed_rank_is_replaced_alone(cluster: RayNodes, tmp_path: Path, undisturbed: str) -> None:
    with RayJob(cluster, tmp_path / "job") as job:
        job.trains(10)
        owners = [owner_of(job, number).pid for number in (0, 1)]
        (lost,) = [each for each in job.events(0, "member_started") if each.data["rank"] == 1]
        os.kill(int(lost.data["pid"]), signal.SIGKILL)
        job.wait_event(0, "recovered")
        assert [owner_of(job, number).pid for number in (0, 1)] == owners
        assert job.digests() == {undisturbed}
        assert [each.data["rank"] for each in job.events(0, "member_started")][2:] == [1]
        assert steps_lost(job, 0) == {0}


def test_an_actor_that_is_killed_with_all_it_holds_joins_again(cluster: RayNodes, tmp_path: Path) -> None:
    with RayJob(cluster, tmp_path / "job", num_nodes=3) as job:
        job.trains(10)
        job.kill_node(1, owner_of(job, 1).pid)
        job.wait_event(0, "recovered")
        assert len({value["digest"] for value in job.ends()["returned"].values()}) == 1
        assert steps_lost(job, 0) == {0}


def test_one_of_two_nodes_is_lost_and_the_job_continues_with_another(
    cluster: RayNodes, tmp_path: Path, undisturbed: str
) -> None:
    # no other node satisfies the request
    with RayJob(cluster, tmp_path / "job", resources={"last": 1}) as job:
        cluster.add(2, last=1)
        job.trains(10)
        cluster.lose(job.ray_node(1))
        until("the job has left", lambda: "the job left with code 75" in job.output, 120)
        (saved,) = {event.data["step"] for event in job.events(0, "sealed")}
        cluster.add(1, last=1)
        assert job.digests() == {undisturbed}
        assert {event.data["step"] for event in job.events(0, "session_opened")} == {saved}
    for node in cluster.nodes[-2:]:
        cluster.lose(node.node_id)


def test_a_driver_that_is_asked_to_stop_saves_and_the_same_call_continues(
    cluster: RayNodes, tmp_path: Path, undisturbed: str
) -> None:
    with RayJob(cluster, tmp_path / "job") as job:
        job.trains(10)
        job.process.send_signal(signal.SIGTERM)  # as `ray job stop` does
        answer = job.ended()
        assert answer["error"] == "JobSaved" and answer["code"] == Exit.REQUEUE == job.process.returncode
        (saved,) = {event.data["step"] for event in job.events(0, "sealed")}
    with RayJob(cluster, tmp_path / "job") as job:
        assert job.digests() == {undisturbed}
        assert {event.data["step"] for event in job.events(0, "session_opened")} == {saved}


def test_a_driver_that_is_killed_leaves_a_saved_job(
    cluster: RayNodes, tmp_path: Path, undisturbed: str
) -> None:
    with RayJob(cluster, tmp_path / "job") as job:
        job.trains(10)
        job.process.kill()
        job.wait_event(0, "run_ended")
        (ended,) = job.events(0, "run_ended")
        assert ended.data["code"] == Exit.REQUEUE
        (saved,) = {event.data["step"] for event in job.events(0, "sealed")}
        until("no process is left", lambda: not any(job.place(number).kept for number in (0, 1)), 60)
    with RayJob(cluster, tmp_path / "job") as job:
        assert job.digests() == {undisturbed}
        assert {event.data["step"] for event in job.events(0, "session_opened")} == {saved}


def test_a_job_starts_when_the_cluster_has_grown(cluster: RayNodes, tmp_path: Path, undisturbed: str) -> None:
    with RayJob(cluster, tmp_path / "job", spares=2) as job:
        until(
            "it waits", lambda: "4 nodes with CPU 1 each are wanted, and the cluster has 3" in job.output, 60
        )
        cluster.add()
        assert job.digests() == {undisturbed}
    cluster.lose(cluster.nodes[-1].node_id)


def test_a_job_that_has_shrunk_grows_when_the_cluster_does(cluster: RayNodes, tmp_path: Path) -> None:
    with RayJob(cluster, tmp_path / "job", num_nodes=3, shrink_to=1) as job:
        job.trains(10)
        cluster.lose(job.ray_node(2))
        job.wait_event(0, "resized")
        cluster.add()
        job.wait_event(0, "resized", 2)
        assert len(job.ends()["returned"]) == 3
        assert [event.data["ranks"] for event in job.events(0, "resized")][-1] == 3
        assert steps_lost(job, 0) == {0}


@pytest.mark.smoke  # short compared with the other frameworks; the losses are in make ray
def test_too_few_nodes_are_named_in_time(cluster: RayNodes, tmp_path: Path) -> None:
    with RayJob(
        cluster, tmp_path / "job", num_nodes=5, resources={"CPU": 1, "xpu": 2}, node_timeout_s=2
    ) as job:
        answer = job.ended()
        assert answer["error"] == "NotMet"
        assert (
            "within 2 s: 5 nodes with CPU 1, xpu 2 each are wanted, and the cluster has 0" in answer["text"]
        )
        assert "next: ray status" in answer["text"]


def test_two_jobs_of_one_name_are_refused(cluster: RayNodes, tmp_path: Path) -> None:
    with RayJob(cluster, tmp_path / "job") as job:
        job.trains(0)
        with RayJob(cluster, tmp_path / "second", num_nodes=1) as second:
            answer = second.ended()
            assert answer["error"] == "UsageError" and "a job of the name job runs" in answer["text"]
        job.process.kill()


def test_a_script_that_fails_ends_the_call_with_its_code(cluster: RayNodes, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nraise ValueError(' '.join(sys.argv[1:]))\n")
    with RayJob(cluster, tmp_path / "job", num_nodes=1, script=str(script), args=["--lr", "1"]) as job:
        answer = job.ended()
        assert answer["error"] == "JobError" and answer["code"] == Exit.FAILED
        assert "the training script failed" in answer["text"] and "ValueError: --lr 1" in job.output
