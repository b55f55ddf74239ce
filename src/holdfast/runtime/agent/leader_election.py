"""The agent's part in the choice of the controller: the election among the agents, and the link to the controller.

With one node the election has one voter. Several agents first connect to each other (``runtime/agent/peers.py``). The
agent at the first contact (the address that all agents dial first) names the first voters as soon as enough nodes are
connected. After that it has no special role.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from holdfast import event_log as event_log
from holdfast.core.election import Election, ElectionConfig, HardState
from holdfast.core.ids import NodeId
from holdfast.core.job.log_replay import NO_PLACE, SNAPSHOT, LinePlace, place_of_text, text_of_place
from holdfast.core.job.membership import node_order
from holdfast.core.protocol.messages import (
    Command,
    ControllerHere,
    Message,
    Mirror,
    MirrorFrom,
    Rolled,
    Send,
    VotersAre,
)
from holdfast.core.protocol.peer_messages import (
    Claim,
    ControllerUp,
    Follow,
    Founded,
    GiveUp,
    KvBack,
    KvForward,
    LeaderLost,
    LogHeld,
    PeerHere,
    PeerMessage,
    PersistHardState,
    RequestVote,
    StartController,
    StepDown,
    WitnessReply,
)
from holdfast.errors import InternalError, StoreError, UsageError
from holdfast.event_log import EventSink
from holdfast.exit_codes import Exit
from holdfast.runtime.agent.agent_events import (
    ElectionEvent,
    FromPeer,
    JobNamed,
    KvReceived,
    LinkEvent,
    NotJoined,
    PartFailed,
    PeersEvent,
    TurnedAway,
)
from holdfast.runtime.agent.controller_link import ControllerLink, controller_up
from holdfast.runtime.agent.peers import Peers
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.driver import Driver, watched
from holdfast.runtime.node.event_log_writer import EventLogWriter
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.store.backends.location import Place, Url, place_of
from holdfast.store.backends.registry import open_store

SILENT_ALONE_S = 15.0  # on one host a silent controller is most often only busy
SILENT_S = 2.0
POLL_S = 0.05
CLAIM_SIZE_BYTES_MAX = 1 << 20


def load_kept(run: RunDir) -> HardState:
    """Return the term and vote that this node has saved in elections, or a new ``HardState`` if nothing is saved.

    Raises:
        UsageError: the file is damaged.
    """
    try:
        return msgspec.json.decode(run.ballot.read_bytes(), type=HardState)
    except FileNotFoundError:
        return HardState()
    except msgspec.MsgspecError as error:
        raise UsageError(f"{run.ballot} is damaged: {error}", hint="start the run again") from error


def last_line(run: RunDir) -> LinePlace:
    """Return (term, number) of the newest line that a controller wrote in this node's event log; (0, 0) without one."""
    lines = (line_of(event) for event in event_log.read_since(run.journal, SNAPSHOT))
    return max(lines, default=NO_PLACE)


def line_of(event: event_log.Event) -> LinePlace:
    """Return (term, number) of a line that a controller wrote; (0, 0) for any other line."""
    return place_of_text(str(event.data.get("line", text_of_place(NO_PLACE))))


class LeaderElection:
    """The driver of one agent's election (``core.election.Election``), and of its connection to the controller.

    Args:
        kept: the term and vote that this node has saved in elections.
        mirror: the event log writer for the lines that the controller sends.
        post: receives the messages of the controller and of other agents, and the events that the controller is
            connected (ControllerHere) or no longer connected (ControllerGone).
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        kept: HardState,
        journal: EventSink,
        mirror: EventLogWriter,
        post: Callable[[ElectionEvent], None],
    ) -> None:
        self._run = run
        self._settings = settings
        self._journal = journal
        self._post = post
        self._me = NodeId(settings.node)
        self._kept = kept
        self._mirrored = NO_PLACE
        self._heard_job = ""  # the job of the last message about an election
        self._mirror = mirror
        config = ElectionConfig(node_id=self._me)
        self._election = Election(config, self._kept)
        self._driver = Driver(self._election, journal, self._execute)
        silent_s = SILENT_S if settings.several else SILENT_ALONE_S
        self._link = ControllerLink(run, settings, journal, self._take, silent_s=silent_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self.peers: Peers | None = None
        if settings.several:
            # An agent without an electorate belongs to no job, even if an earlier agent of this node had followed a
            # leader.
            job = settings.job if kept.electorate is not None else ""
            self.peers = Peers(run, settings, journal, self._take, job)

    @property
    def failure(self) -> asyncio.Future[None]:
        """A future that fails with the exception that ends the election."""
        return self._driver.failure

    def begin(self) -> None:
        """Start to find or elect the controller. The agent at the first contact also names the first voters."""
        if self._settings.several:
            self._look_at_log()
        self._spawn(self._begin())

    def restart(self) -> None:
        """Report to the election that the controller is gone."""
        if self._settings.several:
            self._look_at_log()
        self._driver.post(LeaderLost())

    def _look_at_log(self) -> tuple[int, int]:
        """Post (term, number) of the newest controller line in this node's event log, and return the pair.

        The log is read, because a controller on this node writes its lines into the log itself. Only the lines of a
        controller on another node pass through this object.
        """
        term, number = self._mirrored = max(self._mirrored, last_line(self._run))
        self._driver.post(LogHeld(term=term, number=number))
        return self._mirrored

    def send(self, message: Message) -> bool:
        """Send a message to the controller. Return False if there is no connection."""
        return self._link.send(message)

    async def end(self) -> None:
        """Close all connections, and end the controller of this node."""
        self._driver.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._link.end()
        if self.peers is not None:
            await self.peers.end()
        self._mirror.close()

    # ---------------------------------------------------------------- beginning

    async def _begin(self) -> None:
        peers = self.peers
        if peers is not None:
            try:
                await peers.listen()
            except UsageError as error:
                self._post(NotJoined(Exit.USAGE, str(error)))
                return
            peers.begin()
        endpoint = await self._link.join_local()
        if endpoint is not None:
            self._driver.post(controller_up(endpoint))  # this agent is the successor of one that was elected
            if self._election.role == "leader":
                self._post(ControllerHere())
                return
            self._link.kill_local()
        if self._kept.electorate is not None:
            self._driver.start()
        elif peers is None:
            self._driver.post(Founded(voters=(self._me,), witness=False))
        else:
            await self._form(peers)

    async def _form(self, peers: Peers) -> None:
        """Wait until this agent belongs to a job.

        The agent at the first contact (the address that all agents dial first) founds the job when enough agents are
        connected: it names the first voters. An agent belongs to a job as soon as it has an electorate. If this agent
        has no electorate within ``join_s`` seconds, post ``NotJoined``: too few agents have met, or the job of the
        other agents has no leader.
        """
        settings, meeting = self._settings, peers.meeting
        elsewhere, until_s = "", time.monotonic() + settings.join_s
        while not peers.job and self._election.role != "alone":
            now_s = time.monotonic()
            if self._election.lead is not None or meeting.elsewhere not in ("", elsewhere):
                until_s = now_s + settings.join_s
            elsewhere = meeting.elsewhere
            if peers.founds() and meeting.may_found(now_s, len(peers.here)):
                self._found(peers)
            elif now_s > until_s:
                self._post(self._without_leader(peers) if elsewhere else self._not_met(peers))
                return
            else:
                await asyncio.sleep(POLL_S)

    def _found(self, peers: Peers) -> None:
        voters = tuple(sorted(peers.here))
        self._journal.append("founded", {"voters": [str(n) for n in voters]})
        peers.join(self._settings.saves_as)
        self._post(JobNamed(peers.job))
        self._driver.post(Founded(voters=voters, witness=bool(self._settings.witness)))

    def _without_leader(self, peers: Peers) -> NotJoined:
        """Return the event ``NotJoined`` with this reason: the job of the other agents has no known leader."""
        reason = (
            f"the job {peers.meeting.elsewhere} has no leader: {self._me} met its agents {self._settings.join_s:g} s "
            f"ago and has heard of none; other agents here: {len(peers.here) - 1}\n"
            "  next: start the run again on every host"
        )
        return NotJoined(Exit.UNMET, reason)

    def _not_met(self, peers: Peers) -> NotJoined:
        """Return the event ``NotJoined`` with the reason why the agents have not formed a job in time."""
        settings, here = self._settings, peers.here
        first = ", ".join(settings.contacts[: settings.first_contacts])
        where = f"{settings.node} is at {settings.bind}, first contact {first}{peers.trouble}"
        if len(here) >= settings.nnodes:
            return NotJoined(
                Exit.USAGE,
                f"{len(here)} agents met, but none of them listens at the first contact: {where}\n"
                "  next: on the host of the first contact --bind the address that the others know it by",
            )
        met = f" ({', '.join(map(str, sorted(here, key=node_order)))})" if len(here) > 1 else ""
        return NotJoined(
            Exit.UNMET,
            f"{len(here)} of {settings.nnodes} agents met within {settings.join_s:g} s{met}: {where}\n"
            "  next: the same command on every host, within that time; is the port open between them?",
        )

    # ---------------------------------------------------------------- in

    def _take(self, event: PeersEvent | LinkEvent) -> None:
        """Handle an event that a component of this election posts. The event is handled when the call returns."""
        match event:
            case FromPeer(node_id, message):
                if isinstance(message, KvForward | KvBack):
                    self._post(KvReceived(node_id, message))
                elif job := self._job_of_others():  # dropped otherwise; its sender repeats it
                    self._heard_job = job
                    if isinstance(message, RequestVote) and self._election.role != "leader":
                        self._look_at_log()  # lines were written since the election has heard of the log
                    self._driver.post(message)
            case PeerHere():
                self._driver.post(event)
                self._post(event)
            case TurnedAway():
                self._post(NotJoined(Exit.USAGE, event.reason))
            case PartFailed():
                self._driver.fail(event.error)
            case Mirror():
                self._mirror.append(event.kind, msgspec.json.decode(event.data, type=dict[str, Any]))
                self._mirrored = (event.term, event.number)
            case Rolled() | ControllerUp():
                self._driver.post(event)
            case _:
                if isinstance(event, ControllerHere) and self._settings.several:
                    term, number = self._look_at_log()
                    self._link.send(MirrorFrom(node_id=self._me, term=term, number=number))
                self._post(event)

    def _job_of_others(self) -> str:
        """Return the name of the job in which the other agents hold elections; empty if unknown yet."""
        return "" if self.peers is None else self.peers.job or self.peers.meeting.elsewhere

    # ---------------------------------------------------------------- out

    def _execute(self, command: Command) -> None:
        if isinstance(command, PersistHardState):
            self._keep(command)
        elif isinstance(command, Send):
            self._send(command)
        elif isinstance(command, StartController):
            self._journal.append("elected", {"term": command.term, "node": self._me}, durable=True)
            self._mirror.flush()  # the new controller reads this node's part of the log
            self._link.start(command.term)
        elif isinstance(command, Follow):
            if self.peers is not None and not self.peers.job:
                self._post(JobNamed(self._heard_job))  # the leader may order starts of ranks here
            self._link.follow(Address(command.lead.host, command.lead.port), command.lead.term)
        elif isinstance(command, StepDown):
            self._journal.append("stood_down", {"node": self._me, "reason": command.reason})
            self._link.kill_local()
        elif isinstance(command, GiveUp):
            self._journal.append("no_majority", {"node": self._me, "reason": command.reason}, durable=True)
            self._mirror.flush()
            if self.peers is not None:  # agents that start from now on found a job without this one
                self._spawn(self.peers.end())
            self._link.start(self._kept.term, alone=True)
        elif isinstance(command, Claim):
            self._spawn(self._claim(command))
        else:
            raise InternalError(f"an election cannot order {type(command).__name__}")

    def _keep(self, keep: PersistHardState) -> None:
        voters = self._kept.electorate.voters if self._kept.electorate is not None else ()
        self._kept = HardState(
            term=keep.term, voted_for=keep.voted_for, electorate=keep.electorate, committed=keep.committed
        )
        write_private(self._run.ballot, msgspec.json.encode(self._kept), durable=True)
        if keep.electorate is not None and self.peers is not None and not self.peers.job:
            self.peers.join(self._heard_job)
            self._post(JobNamed(self.peers.job))
        if keep.electorate is not None and keep.electorate.voters != voters:
            self._journal.append("electorate", {"voters": [str(v) for v in keep.electorate.voters]})
            if self._election.role == "leader":
                self._link.send(VotersAre(voters=keep.electorate.voters))

    def _send(self, command: Send) -> None:
        if self.peers is None:
            return
        node_id = NodeId(command.to.removeprefix("node:"))
        message: PeerMessage = command.message  # type: ignore[assignment]  # an election sends these only
        if node_id == "*":
            self.peers.broadcast(message)
        else:
            self.peers.send(node_id, message)

    async def _claim(self, claim: Claim) -> None:
        assert self.peers is not None, "one node claims nothing"
        witness = place_of(self._settings.witness)
        voters = await asyncio.to_thread(claim_once, witness, self.peers.job, claim)
        self._journal.append("witness_said", {"number": claim.number, "voters": [str(v) for v in voters]})
        self._driver.post(WitnessReply(number=claim.number, voters=voters))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = watched(work, self._driver.fail)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def claim_once(root: Place, job: str, claim: Claim) -> tuple[NodeId, ...]:
    """Claim a change of the electorate (the voters) at the witness ``root``.

    Each change has a number. For each number the witness keeps only the first claim. So it decides which of two nodes
    may continue.

    Returns:
        The voters that the first claim with the number of ``claim`` names. That is ``claim`` itself, or an earlier
        claim of another node. The tuple is empty if the witness cannot be used.
    """
    if isinstance(root, Url):
        return _claim_in_bucket(root, job, claim)
    directory = root / f".holdfast-witness-{job}"
    target = directory / f"electorate-{claim.number:06d}.json"
    draft = directory / f".{claim.number}.{os.getpid()}.{time.monotonic_ns()}"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(draft, msgspec.json.encode(claim.voters), durable=True)
        try:
            os.link(draft, target)
        except FileExistsError:
            pass  # taken: the node of the earlier claim continues
        finally:
            draft.unlink(missing_ok=True)
        return tuple(NodeId(v) for v in msgspec.json.decode(target.read_bytes(), type=list[str]))
    except (OSError, msgspec.MsgspecError):
        return ()


def _claim_in_bucket(root: Url, job: str, claim: Claim) -> tuple[NodeId, ...]:
    """Claim a change of the electorate as :func:`claim_once` does, with a bucket as the witness.

    The first node that creates the object for this change in the bucket may continue.
    """
    name = f"electorate-{claim.number:06d}.json"
    store = open_store(root)
    try:
        store.probe()  # on a server that ignores write conditions both nodes would succeed
        with store.create(f".holdfast-witness-{job}") as directory:
            directory.create(name, msgspec.json.encode(claim.voters), "")
            said = directory.read(name, CLAIM_SIZE_BYTES_MAX)
        return tuple(NodeId(v) for v in msgspec.json.decode(said, type=list[str]))
    except (StoreError, msgspec.MsgspecError):
        return ()
