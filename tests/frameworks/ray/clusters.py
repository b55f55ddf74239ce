"""A real Ray cluster on this machine: a head without CPUs, and nodes of one CPU each that can be lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.cluster_utils import Cluster

from holdfast import event_log
from holdfast.event_log import Event
from holdfast.integrations.ray.keeper import KeptPlace
from holdfast.runtime.node.run_processes import processes, sweep
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.spawn import free_port
from tests.cli.command import clean_environment
from tests.runtime.runs import kill_at_once, until

BOUND_S = 240.0
OBJECTS_SIZE_BYTES = 80 << 20
DRIVER = Path(__file__).with_name("driver.py")


def pids_with(variable: str) -> set[int]:
    """Return all processes that were started with ``NAME=VALUE`` in their environment."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended
            if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.add(int(entry.name))
    return found


def family_of(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    found = {pid}
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended
            found |= {each for child in children.read_text().split() for each in family_of(int(child))}
    return found


class RayNodes:
    """A cluster. ``nodes`` are those that may hold a node of a job."""

    def __init__(self, dashboard: bool = False) -> None:
        head = {"num_cpus": 0, "object_store_memory": OBJECTS_SIZE_BYTES, "include_dashboard": dashboard,
                "dashboard_port": free_port()}  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes: list[Any] = []
        self.dashboard = str(self.cluster.head_node.webui_url)

    def add(self, count: int = 1, **resources: int) -> None:
        """Add nodes."""
        self.nodes += [
            self.cluster.add_node(num_cpus=1, object_store_memory=OBJECTS_SIZE_BYTES, resources=resources)
            for _ in range(count)
        ]
        self.cluster.wait_for_nodes()

    def lose(self, ray_node: str) -> None:
        """Kill the raylet of a node and all processes that it has started by any way, as a loss of power would."""
        node = next(each for each in self.nodes if each.node_id == ray_node)
        self.nodes.remove(node)
        (raylet,) = (each.process.pid for each in node.all_processes["raylet"])
        kill_at_once({raylet, *pids_with(f"RAY_RAYLET_PID={raylet}")})
        self.cluster.remove_node(node, allow_graceful=False)

    def stop(self) -> None:
        """Stop the cluster."""
        self.cluster.shutdown()


@contextmanager
def ray_nodes(count: int, dashboard: bool = False) -> Iterator[RayNodes]:
    """Yield a cluster with ``count`` nodes and a head."""
    made = RayNodes(dashboard)
    try:
        made.add(count)
        ray.init(address=made.cluster.address, log_to_driver=False)
        yield made
    finally:
        ray.shutdown()
        made.stop()


class SubmittedJob:
    """A job as its files show it. Another process started its driver."""

    def __init__(self, cluster: RayNodes, base: Path, name: str = "job", **settings: Any) -> None:
        self.cluster = cluster
        self.name = name
        self.base = base
        self.run_dir = base / "runs"
        self.hurry = base / "hurry"
        base.mkdir(exist_ok=True)
        config = {"steps": 1500, "pause_s": 0.2, "hurry": str(self.hurry), **settings.pop("config", {})}
        function = {} if "script" in settings else {"train_loop_config": config}
        self.settings = {
            "num_nodes": 2, "storage_path": str(base / "store"), "run_dir": str(self.run_dir), "node_timeout_s": 120,
            **function, **settings,
        }  # fmt: skip

    def kill_node(self, number: int, *pids: int) -> None:
        """Kill all processes that the actor of a node has started, and ``pids``."""
        place, found = self.place(number), set(pids)
        if place.path.exists() and place.kept:
            found |= family_of(int((place.path / "keeper").read_text()))
        kill_at_once({*found, *processes(self.run(number))})
        sweep(self.run(number))

    def run(self, number: int) -> RunDir:
        """Return the run directory of a node of the job."""
        return RunDir(self.run_dir / f"{self.name}-node{number}")

    def place(self, number: int) -> KeptPlace:
        """Return the place where the actor and the keeper of a node meet."""
        return KeptPlace(self.run_dir / f"{self.name}-node{number}.ray")

    def events(self, number: int, kind: str) -> list[Event]:
        """Return the events of a kind in the log of a node, for its present start."""
        log = self.run(number).journal
        return [each for each in event_log.read(log).events if each.kind == kind] if log.exists() else []

    def wait_event(self, number: int, kind: str, count: int = 1) -> None:
        """Wait until there are ``count`` events of a kind."""
        until(f"{kind} on node{number}", lambda: len(self.events(number, kind)) >= count, BOUND_S)

    def ray_node(self, number: int) -> str:
        """Return the node of the cluster on which a node of the job runs."""
        owner = self.place(number).owner
        assert owner is not None
        return owner.ray_node

    def workers(self, number: int) -> set[int]:
        """Return the processes of all ranks that a node has started."""
        return {int(event.data["pid"]) for event in self.events(number, "member_started")}


class RayJob(SubmittedJob):
    """A job and the process of its driver; a context manager that leaves nothing behind."""

    def __init__(self, cluster: RayNodes, base: Path, name: str = "job", **settings: Any) -> None:
        super().__init__(cluster, base, name, **settings)
        self._log = base / f"driver-{len(list(base.glob('driver-*')))}"
        env = clean_environment({"RAY_ADDRESS": cluster.cluster.address, "RAY_DEDUP_LOGS": "0"})
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), name, json.dumps(self.settings)],
                cwd=base,
                env=env,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> RayJob:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for number in range(8):
            self.kill_node(number)

    @property
    def output(self) -> str:
        """The whole output of the driver."""
        return self._log.read_text(errors="replace")

    def trains(self, step: int) -> None:
        """Wait until the job has passed a step."""

        def reached() -> bool:
            return any(int(number) >= step for number in re.findall(r"at step (\d+)", self.output))

        until(f"step {step}", reached, BOUND_S)

    def ends(self) -> dict[str, Any]:
        """Tell the job to finish quickly, and return the driver's last line."""
        self.hurry.touch()
        return self.ended()

    def ended(self) -> dict[str, Any]:
        """Wait for the driver's end and return its last line."""
        until("the driver ends", lambda: self.process.poll() is not None, BOUND_S)
        line = next(line for line in reversed(self.output.splitlines()) if line.startswith("{"))
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def digests(self) -> set[str]:
        """Return the digests that the ranks return at the end."""
        answer = self.ends()
        assert "returned" in answer, self.output
        assert sorted(answer["returned"]) == ["0", "1"], answer
        return {value["digest"] for value in answer["returned"].values()}
