"""The supervisor of a job on Ray: it starts a launcher on each node, also on the new node of a lost actor.

Theory. The job needs no process outside its nodes: its agents have elected a controller, which replaces lost ranks. But
no agent can know whether and where Ray has placed a lost actor again. The supervisor sends that node the addresses of
the other agents, and the node joins the job. The job ends when its launchers end.

After a loss that the job cannot survive (no majority, no node in time), its launchers save and end with code 75. The
driver did not request that end. So all launchers are started again as soon as there are enough nodes, and training
continues at the saved step.

A node is ``lost`` (its actor is asked whether it is up), ``ready`` (it is up without a launcher), ``starts``,
``runs``, ``ended`` (its launcher has ended), or ``out`` (permanently left out).

Invariants:
1. A launcher is started only where the actor is known to have none.
2. A node that comes to a running job does not get its own address as a contact, because it could found a second job.
3. The first launcher that ends with code 0 ends the job, because all nodes reach the end of the training together.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RuntimeEnvSetupError

from holdfast.errors import JobError, JobSaved, NotMet, UserError
from holdfast.exit_codes import Exit
from holdfast.integrations.ray.node import NodeHere, NodeOrder
from holdfast.schedulers.job_ends import ending_of, meaning_of
from holdfast.schedulers.manifests import ENDS
from holdfast.store.format.json_values import decode_values
from holdfast.text import plural

POLL_S = 0.2
RETURN_S = 0.5  # pause between two requests to an actor that is not up
GATHER_S = 10.0  # wait for further nodes when there are enough
AGAIN_S = 10.0  # wait before a launcher that has left is started again, in which a whole job can leave
DEPARTURES_MAX = 5  # limit of the unrequested ends of a launcher while other launchers run
SETTLE_S = 5.0
LINGER_S = 30.0
ANSWER_S = 10.0
AGAIN = "call run() again with the same name and storage_path"
Phase = Literal["lost", "ready", "starts", "runs", "ended", "out"]


@dataclass
class JobNode:
    """The supervisor's record of one node of the job."""

    number: int
    actor: Any
    phase: Phase = "lost"
    call: Any = None  # call in flight: here() in phase lost, start() in phase starts, wait() in phase runs
    here: NodeHere | None = None
    code: int | None = None  # exit code of its last launcher
    starts: int = 0
    departures: int = 0  # ends of its launcher that were not the end of the job
    next_s: float = 0.0  # earliest time of the next request

    @property
    def active(self) -> bool:
        """True if the node has a launcher, or is about to start one."""
        return self.phase in ("starts", "runs")


def say(text: str) -> None:
    """Print a line of the driver to stderr."""
    sys.stderr.write(f"holdfast: {text}\n")


class Supervisor:
    """The supervisor of one job: it watches and restarts the launchers.

    Args:
        name: name of the job.
        order: the order to the nodes; the supervisor fills in its contacts.
        nodes: the nodes, one per actor, in the order of their numbers.
        num_nodes: number of nodes that hold ranks.
        node_timeout_s: time limit for the start, and for a time without any node.
    """

    def __init__(
        self, name: str, order: NodeOrder, nodes: list[JobNode], num_nodes: int, node_timeout_s: float
    ) -> None:
        self.name = name
        self.asked: list[str] = []  # signals to the driver
        self._order = order
        self._nodes = nodes
        self._num_nodes = num_nodes
        self._node_timeout_s = node_timeout_s
        self._passed_on = 0
        self._active_s = self._enough_s = self._ended_s = time.monotonic()
        self._first: tuple[str, ...] = ()  # contacts of agents that start together
        self._begun = self._saved = self._settled = False
        self._failed = ""  # the node whose launcher failed

    def run(self) -> None:
        """Watch the job, and return when the job is over.

        Raises:
            NotMet: not enough actors came up at the start.
            JobSaved, JobError: not enough actors came up after all were lost.
            UserError: a node cannot start its launcher.
        """
        try:
            self._watch()
        except BaseException:
            ray.wait(self._leave(), timeout=SETTLE_S)
            raise

    def _watch(self) -> None:
        while not self._over():
            calls = {node.call: node for node in self._nodes if node.call is not None}
            if calls:
                for call in ray.wait(list(calls), num_returns=1, timeout=POLL_S)[0]:
                    self._answered(calls[call])
            else:
                time.sleep(POLL_S)
            self._pass_on_signals()
            self._ask_lost()
            self._start_ready()
            self._heed_time()

    def close(self) -> dict[int, Any]:
        """Clean up the nodes, and return the values of the ranks, by rank.

        Raises:
            JobSaved: the job has saved and left.
            JobError: the job ended with another code than 0.
        """
        self._leave()  # for a node that started too late to leave with the others
        ended = [node for node in self._nodes if node.phase in ("ended", "out") and node.here is not None]
        # No code: the driver was asked to stop before any launcher was started.
        code = ending_of(self._codes) if self._codes else int(Exit.INTERRUPTED)
        returned = self._returned(ended) if code == Exit.OK else {}
        for node in ended:
            self._ask(node.actor.clear.remote())
        if code == Exit.OK:
            return returned
        shown = f"the job {self.name} ended with code {code}: {meaning_of(code)}"
        if code == Exit.REQUEUE:
            raise JobSaved(shown, code=code, hint=AGAIN)
        raise JobError(shown, code=code, hint="read the output of its nodes above; ray logs")

    def _returned(self, nodes: list[JobNode]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for node in nodes:
            if node.code != Exit.OK:
                continue
            values = self._ask(node.actor.returned.remote())
            if values is None:
                say(f"warning: node{node.number} was lost after the end: the values of its ranks are missing")
            found |= {rank: decode_values(data) for rank, data in (values or {}).items()}
        return dict(sorted(found.items()))

    # ---------------------------------------------------------------- answers of the nodes

    def _answered(self, node: JobNode) -> None:
        call, node.call = node.call, None
        try:
            answer = ray.get(call)
        except (RayActorError, RuntimeEnvSetupError) as error:
            self._lost(node, error)
            return
        if node.phase == "lost":
            node.here = answer
            node.phase = "runs" if answer.runs else "ready"
            if answer.runs:
                say(f"node{node.number}: a new actor has taken over, nothing was lost")
        elif node.phase == "starts":
            if answer:
                self._refused(node, answer)
                return
            node.phase = "runs"
        else:
            self._ended(node, answer)
        if node.phase == "runs":
            node.call = node.actor.wait.remote()

    def _lost(self, node: JobNode, error: RayError) -> None:
        was, node.phase = node.phase, "lost"
        node.next_s = time.monotonic() + RETURN_S
        if was != "lost":
            say(f"node{node.number}: its actor is lost; Ray places it again")
        elif not isinstance(error, ActorUnavailableError):
            if not self._begun:
                raise UserError(
                    f"the actor of node{node.number} cannot start: {error}",
                    hint="holdfast has to be installed on every node of the cluster",
                ) from error
            say(f"node{node.number} is left out: Ray does not place its actor again")
            node.phase = "out"

    def _refused(self, node: JobNode, why: str) -> None:
        """Leave out a node that cannot start its launcher. If the node was in the job from the start, end the job."""
        if self._began_with(node):
            raise UserError(
                f"node{node.number} ({self._address(node)}): {why}",
                hint="every node needs the files of the job: ray job submit --working-dir ..., or shared storage",
            )
        say(f"node{node.number} is left out: {why}")
        node.phase = "out"

    def _ended(self, node: JobNode, code: int) -> None:
        node.code, node.phase = code, "ended"
        self._ended_s = time.monotonic()
        node.next_s = self._ended_s + AGAIN_S
        if code in ENDS and self._began_with(node):
            self._failed = f"node{node.number}"
        elif code in ENDS or node.departures >= DEPARTURES_MAX:
            node.phase = "out"
            if any(other.active for other in self._nodes):
                say(f"node{node.number} is left out: its launcher ended with code {code}")

    def _began_with(self, node: JobNode) -> bool:
        """Return True if the node was started only once, so that it belongs to the job from the start."""
        return node.starts == 1

    # ---------------------------------------------------------------- orders

    def _pass_on_signals(self) -> None:
        while self._passed_on < len(self.asked):
            number = self.asked[self._passed_on]
            self._passed_on += 1
            say(
                f"{number}: the job is asked to {'save and leave' if self._passed_on == 1 else 'end at once'}"
            )
            self._leave()

    def _leave(self) -> list[Any]:
        """Ask all launchers to leave. Return the Ray calls, which are still in progress."""
        return [node.actor.leave.remote() for node in self._nodes if node.active]

    def _ask_lost(self) -> None:
        now_s = time.monotonic()
        others = any(node.active for node in self._nodes)
        if self._interrupted:
            self._saved = self._saved or Exit.REQUEUE in self._codes
            say(
                f"the job left with code {ending_of(self._codes)}; it continues when {self._num_nodes} nodes are there"
            )
            for node in self._nodes:
                if node.phase == "ended":
                    node.phase, node.code = "lost", None
        for node in self._nodes:
            if node.phase == "ended" and others and not self._leaving and now_s >= node.next_s:
                say(f"node{node.number} left with code {node.code} while others run: it is started again")
                node.phase, node.code = "lost", None
                node.departures += 1
            if node.phase == "lost" and node.call is None and now_s >= node.next_s:
                node.call = node.actor.here.remote()

    @property
    def _codes(self) -> list[int]:
        return [node.code for node in self._nodes if node.code is not None]

    @property
    def _leaving(self) -> bool:
        return bool(self.asked or self._failed) or Exit.OK in self._codes

    @property
    def _interrupted(self) -> bool:
        """True if all launchers have left because a node was lost, although no process has requested the end."""
        if self._leaving or not self._codes or any(node.active for node in self._nodes):
            return False
        return not set(self._codes) & set(ENDS) and any(
            node.phase in ("lost", "ready") for node in self._nodes
        )

    def _start_ready(self) -> None:
        ready = [node for node in self._nodes if node.phase == "ready"]
        running = [node for node in self._nodes if node.phase == "runs"]
        if not ready or self._leaving:
            return
        now_s = time.monotonic()
        if running:
            for node in ready:
                if contacts := self._contacts(running, node):
                    self._start(node, contacts)
            return
        if len(ready) < self._num_nodes or any(node.active for node in self._nodes):
            self._enough_s = now_s
        elif len(ready) == len(self._nodes) or now_s - self._enough_s > GATHER_S:
            first = ready[0].here
            assert first is not None
            self._first = (first.contact,)
            for node in ready:
                self._start(node, self._first)

    def _contacts(self, running: list[JobNode], asks: JobNode) -> tuple[str, ...]:
        for node in running:
            if found := self._ask(node.actor.contacts.remote(asks.number)):
                answer: tuple[str, ...] = found
                return answer
        return () if asks.here is not None and asks.here.contact in self._first else self._first

    def _start(self, node: JobNode, contacts: tuple[str, ...]) -> None:
        node.phase, node.code = "starts", None
        node.starts += 1
        node.call = node.actor.start.remote(replace(self._order, contacts=contacts))

    # ---------------------------------------------------------------- time

    def _heed_time(self) -> None:
        now_s = time.monotonic()
        if any(node.active for node in self._nodes):
            self._active_s, self._begun = now_s, True
            if self._failed and not self._settled and now_s - self._ended_s > SETTLE_S:
                self._settled = True
                say(f"{self._failed} has failed: the others are asked to leave")
                self._leave()
        elif now_s - self._active_s > self._node_timeout_s and not self._over():
            here = sum(node.phase == "ready" for node in self._nodes)
            why = (
                f"{plural(here, 'actor')} of the {self._num_nodes} that the job {self.name} needs came up within "
                f"{self._node_timeout_s:g} s"
            )
            if self._saved:
                raise JobSaved(f"the job has saved and left, and then {why}", code=Exit.REQUEUE, hint=AGAIN)
            if self._begun:
                raise JobError(f"all nodes were lost, and {why}", code=Exit.UNSAVED, hint=AGAIN)
            raise NotMet(why, hint=f"ray list actors; {AGAIN}")

    def _over(self) -> bool:
        active = any(node.active for node in self._nodes)
        if Exit.OK in self._codes:
            return not active or time.monotonic() - self._ended_s > LINGER_S
        if active:
            return False
        if self._interrupted:
            return False
        return bool(self._codes or self.asked) or all(node.phase == "out" for node in self._nodes)

    def _ask(self, call: Any) -> Any:
        """Return the answer of a call to an actor; None if there is no answer, because the node is lost."""
        try:
            return ray.get(call, timeout=ANSWER_S)
        except RayError:
            return None

    def _address(self, node: JobNode) -> str:
        return node.here.address if node.here is not None else "unknown"
