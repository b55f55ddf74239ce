"""The agent process of one node: it runs the state machine ``core.agent.Agent`` and executes its commands.

Command: ``python -m holdfast.runtime.agent.agentd RUNDIR``. The agent serves the workers and the command line, restarts
a dead controller, and owns the status pages. The successor of a dead agent adopts the processes of that agent. The
successor finds the workers by their status pages, and the zygote and the controller by their endpoint files.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec

from holdfast.core.agent import Agent
from holdfast.core.config import AgentConfig
from holdfast.core.election import HardState
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.job.spares import BuildSpare, Called, CallSpare, is_spare
from holdfast.core.protocol.health_messages import CollectEvidence, ShowRecords
from holdfast.core.protocol.messages import (
    Ack,
    Command,
    ExitRun,
    Finish,
    KillMember,
    KvRequest,
    LauncherGone,
    MemberExited,
    MemberStarted,
    RestartController,
    ResumeInPlace,
    Send,
    SessionOpened,
    StartMembers,
    StopRun,
    WorkerHello,
)
from holdfast.core.protocol.notices import DrainNode
from holdfast.core.protocol.peer_messages import JobFormed, KvBack, KvForward, PeerHere
from holdfast.core.watch.hang_attribution import STOPPED
from holdfast.errors import InternalError, ProtocolError
from holdfast.event_log import ROOM_WAIT_S, EventLog
from holdfast.exit_codes import Exit
from holdfast.runtime.agent.agent_events import (
    AgentEvent,
    DeathRead,
    JobNamed,
    KvAnswered,
    KvForwarded,
    KvReceived,
    LookedLast,
    NotJoined,
    PartFailed,
    ProcessGone,
    RecordsWanted,
)
from holdfast.runtime.agent.exit_report import READ_WAIT_S, read_death, read_in_time, without_page
from holdfast.runtime.agent.kv_router import KvRouter
from holdfast.runtime.agent.kv_server import KvServer
from holdfast.runtime.agent.leader_election import LeaderElection, load_kept
from holdfast.runtime.agent.notice_watch import NoticeWatch
from holdfast.runtime.agent.peer_replication import PeerReplication
from holdfast.runtime.agent.progress_watcher import Watcher
from holdfast.runtime.agent.shared_root import leave_probe, share_checkpoints
from holdfast.runtime.agent.shm_cleanup import ShmCleanup
from holdfast.runtime.agent.worker_processes import Processes, dismiss_spares, wait_gone, wait_written
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.connection_limits import raise_limit
from holdfast.runtime.net.driver import Driver, watched
from holdfast.runtime.net.service_names import agent_of
from holdfast.runtime.node.event_log_writer import EventLogWriter
from holdfast.runtime.node.hang_evidence import sample
from holdfast.runtime.node.interfaces import with_interfaces
from holdfast.runtime.node.kubernetes_status import StatusPublisher
from holdfast.runtime.node.node_status import node_status
from holdfast.runtime.node.run_processes import belongs, recorded_members, sweep, writers
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import PAGE, RunDir, try_lock
from holdfast.runtime.node.spawn import SpawnOrder, free_port, log_root, spare_order, worker_env, worker_log
from holdfast.runtime.node.status_page import committed_step, each_page
from holdfast.runtime.rank_table.rewriting import table_of
from holdfast.wire import MESSAGES, WireMessage

LOCK_WAIT_S = 5.0
LINGER_S = 1.0
LAST_WORDS_S, WORD_S = 0.2, 0.001
LIBRARY_LINGER_S = 10.0
WRITERS_WAIT_S = 60.0
FIRST_NODE = NodeId("node0")  # the node of rank 0 in library mode (without `holdfast run`)
NODE_BEAT_S = 0.5  # period of the agent's heartbeat in a job of several nodes


class AgentDaemon:
    """The agent of one node, created by :meth:`open`.

    Args:
        kept: the term and vote that this node has saved in elections.
        kv: the key-value store, with the keys that an earlier agent left.
        journal: the event log writer for the lines of this agent.
        mirror: the event log writer for the lines of the controller.
    """

    def __init__(
        self,
        run: RunDir,
        settings: RunSettings,
        kept: HardState,
        kv: KvServer,
        journal: EventLogWriter,
        mirror: EventLogWriter,
    ) -> None:
        self._run = run
        self._settings = settings
        self._node_id = NodeId(settings.node)
        self._journal = journal
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._workers: dict[MemberId, Channel[WireMessage]] = {}
        self._member_of: dict[Channel[WireMessage], MemberId] = {}
        self._askers: deque[Channel[WireMessage]] = deque()  # `holdfast` commands that wait for an Ack
        self._exited: set[MemberId] = set()
        self._dying: dict[MemberId, MemberExited] = {}  # exited; their sockets may hold unread messages
        self._remains = ShmCleanup(run)
        self._waiting: asyncio.Task[None] | None = None
        self._buddies: PeerReplication | None = None
        self._keys = KvRouter(self._node_id, kv, self._post)
        self._driver = Driver(Agent(agent_config(settings)), self._journal, self._execute)
        journal.fail = mirror.fail = self._driver.fail
        self._procs = Processes(run, self._settings, self._journal, self._post)
        limits, living = settings.limits(), self._procs.living
        self._watcher = Watcher(run, self._node_id, limits, living, self._workers, self._post)
        self._council = LeaderElection(run, self._settings, kept, self._journal, mirror, self._post)
        self._hub: Hub[WireMessage] = Hub(
            MESSAGES,
            run.secret(),
            on_open=lambda channel: None,
            on_message=self._heard,
            on_close=self._closed,
        )

    @classmethod
    def open(cls, run: RunDir) -> Self:
        """Return the agent of run directory ``run``.

        It continues with the election vote, the key-value store and the event log that an earlier agent has left.

        Raises:
            UserError: a file of the run is missing or damaged.
            OSError: the directory cannot be written.
        """
        settings = with_interfaces(RunSettings.load(run.path))
        writers = (f"agent {settings.node}", "controller")
        logs = [EventLogWriter(EventLog.open(run.journal, who, room_wait_s=ROOM_WAIT_S)) for who in writers]
        return cls(run, settings, load_kept(run), KvServer.open(run.pages() / "kv.log"), *logs)

    async def serve(self) -> int:
        """Serve until the run is over, and return the exit code of the run.

        Raises:
            HoldfastError: the agent or its environment failed; the launcher starts a successor.
        """
        server, at = await self._hub.listen(agent_of(self._settings.node), self._run.socket_of("agent"))
        self._run.write_endpoint("agent", at, node=self._settings.node)
        self._journal.append("agent_started", {"pid": os.getpid(), "at": str(at)})
        self._driver.guard_loop()
        self._driver.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, self._signalled, number)
        self._procs.want_zygote()
        self._adopt()
        if self._settings.job:
            self._driver.post(JobFormed())
        self._watch_launcher()  # after the adoption, because an agent without launcher and workers leaves
        self._begin_memory()
        self._council.begin()
        notices = NoticeWatch.of(self._settings, self._run.path, self._post, self._journal)
        published = StatusPublisher.of(
            self._settings.notices,
            os.environ,
            lambda: node_status(self._run, leaving=notices.leaving),
            self._journal,
        )
        works = (self._watcher, notices, published)
        watching = [watched(work.watch(), self._driver.fail) for work in works]
        ends: set[asyncio.Future[Any]] = {self._over, self._driver.failure, self._council.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for failure in (self._driver.failure, self._council.failure):
            if failure.done():
                error = failure.exception()
                what = {"error": f"{type(error).__name__}: {error}"[:2000]}
                self._journal.append("agent_broken", what, durable=True)
                self._journal.flush()
                failure.result()
        for task in watching:
            task.cancel()
        if self._buddies is not None:
            self._buddies.close()
        await published.end()
        await self._end(server)
        return self._over.result()

    def _begin_memory(self) -> None:
        """Start to copy the in-memory states of this node's ranks to another node. Do nothing in a job of one node."""
        peers = self._council.peers
        if peers is None:
            return
        self._buddies = PeerReplication(
            self._run, self._settings, self._procs.living, peers.connected, self._post
        )
        peers.memory_port = self._buddies.begin()

    async def _end(self, server: asyncio.Server) -> None:
        """End the run's processes on this node, and remove its status pages and endpoint files.

        In library mode the workers are not ended.
        """
        self._driver.close()
        if self._waiting is not None:
            self._waiting.cancel()
        await self._procs.end(kill=not self._settings.library)
        await self._council.end()
        server.close()
        await self._hub.close(LINGER_S)
        if self._hub.refused:
            counts = [f"{reason}: {count}" for reason, count in sorted(self._hub.refused.items())]
            self._journal.append("frames_refused", {"counts": counts})
        if not self._settings.library:
            if self._over.result() != Exit.INTERRUPTED:
                await wait_written(self._run, WRITERS_WAIT_S)
            left = sweep(self._run)
            if left:
                self._journal.append("leftovers_killed", {"pids": left})
                await asyncio.gather(*(wait_gone(pid, LINGER_S) for pid in left))
        # The controller is not informed of every step: only the status pages have the last committed step.
        step = committed_step(each_page(self._run.pages_link, PAGE))
        self._run.remove_pages()
        self._run.remove_endpoint("agent")
        self._journal.append("agent_ended", {"code": self._over.result(), "step": step})
        self._journal.close(over=True)

    # ------------------------------------------------------------ beginnings

    def _watch_launcher(self) -> None:
        parent = os.getppid()
        if self._settings.library:
            return
        if self._run.launcher_is_gone():  # it ended before this agent, a successor, could watch it
            self._driver.post(LauncherGone())
            return
        if parent == 1 and not self._run.launcher_lock.exists():
            return
        try:
            pidfd = os.pidfd_open(parent)
        except ProcessLookupError:
            self._driver.post(LauncherGone())
            return
        loop = asyncio.get_running_loop()

        def gone() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._driver.post(LauncherGone())

        loop.add_reader(pidfd, gone)

    def _adopt(self) -> None:
        """Adopt the living workers of a dead agent.

        Report each worker that is no longer alive to the state machine, with the facts from the worker's status page.
        """
        dismiss_spares(self._run)
        for member_id, pid in recorded_members(self._run):
            if pid and (self._settings.library or belongs(pid, self._run)):
                self._procs.adopt(member_id, pid)
            else:
                self._gone(ProcessGone(member_id, pid, None, None, time.monotonic_ns()))

    def _signalled(self, number: signal.Signals) -> None:
        source = f"{number.name} to the agent (pid {os.getpid()})"
        own = self._settings.node_of_several
        self._driver.post(ExitRun(grace_s=self._settings.grace_s, source=source, node_id=own))

    # ------------------------------------------------------------ in

    def _post(self, event: AgentEvent) -> None:
        """Handle an event that a component of this agent posts. The event is handled when the call returns."""
        match event:
            case ProcessGone():
                self._gone(event)
            case DeathRead():
                self._died(event)
            case RecordsWanted():
                self._workers[event.member_id].send(ShowRecords(member_id=event.member_id))
            case LookedLast():
                self._procs.kill(event.member_id, event.grace_s)
            case KvReceived():
                self._keys.heard(event.node_id, event.message)
            case KvForwarded():
                self._send_peer(event.node_id, event.request)
            case KvAnswered():
                self._answer(event)
            case PeerHere():
                self._keys.line_is_up(event.node_id)
            case JobNamed():
                self._join_job(event.job)
            case NotJoined():
                self._without_job(event.code, event.reason)
            case PartFailed():
                self._driver.fail(event.error)
            case _:
                self._driver.post(event)

    def _heard(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        if channel.peer_role == "worker":
            self._heard_worker(channel, message)
        elif channel.peer_role == "cli" and isinstance(message, ExitRun | StopRun | DrainNode):
            self._askers.append(channel)
            self._driver.post(message)
        else:
            self._refuse(channel)

    def _heard_worker(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        if isinstance(message, WorkerHello) and channel not in self._member_of:
            self._welcome(channel, message)
            return
        member_id = self._member_of.get(channel)
        if member_id is None or getattr(message, "member_id", member_id) != member_id:
            self._refuse(channel)
        elif isinstance(message, KvRequest):
            self._keys.request(member_id, message)
        else:
            if isinstance(message, SessionOpened) and self._settings.several:
                leave_probe(message.root, self._settings)
            self._driver.post(message)

    # ------------------------------------------------------------ job of several nodes

    def _join_job(self, job: str) -> None:
        """Save the name of the job in the settings of the run, and report to the state machine that the job is formed.

        Checkpoints carry the name of the job. The default checkpoint directory, which all nodes share, also has this
        name.
        """
        self._settings = msgspec.structs.replace(self._settings, job=job)
        self._settings.save(self._run.path)
        self._procs.use(self._settings)
        if self._settings.library:
            self._keys.live_at(FIRST_NODE)  # no StartMembers order names it in library mode
        else:
            share_checkpoints(self._run, job)
        self._driver.post(JobFormed())

    def _without_job(self, code: Exit, reason: str) -> None:
        self._journal.append("run_ended", {"code": int(code), "cause": code.name, "reason": reason})
        self._finish(int(code))

    def _welcome(self, channel: Channel[WireMessage], hello: WorkerHello) -> None:
        member_id = hello.member_id
        if member_id in self._exited or not self._run.page_path(member_id).exists():
            self._procs.refuse(member_id, hello.pid)  # its start was given up when the zygote was lost
            self._refuse(channel)
            return
        self._member_of[channel] = member_id
        self._workers[member_id] = channel
        self._procs.adopt(member_id, hello.pid)
        self._procs.listen(member_id)
        self._driver.post(hello)

    def _refuse(self, channel: Channel[WireMessage]) -> None:
        self._hub.refused["out of place"] += 1
        channel.close()

    def _closed(self, channel: Channel[WireMessage]) -> None:
        member_id = self._member_of.pop(channel, None)
        if member_id is not None and self._workers.get(member_id) is channel:
            del self._workers[member_id]
            self._keys.forget(member_id)
            self._bury(member_id)

    def _answer(self, answer: KvAnswered) -> None:
        """Send a key-value reply to the worker that made the request.

        If that worker is not connected to this agent, send the reply to the agent that forwarded the request.
        """
        channel = self._workers.get(answer.member_id)
        if channel is not None:
            channel.send(answer.reply)
        elif answer.node_id:
            self._send_peer(answer.node_id, KvBack(member_id=answer.member_id, reply=answer.reply))

    def _send_peer(self, node_id: NodeId, message: KvForward | KvBack) -> None:
        assert self._council.peers is not None, "one node has no peers"
        self._council.peers.send(node_id, message)

    def _gone(self, gone: ProcessGone) -> None:
        if gone.member_id in self._exited or self._over.done():
            return
        self._exited.add(gone.member_id)
        page, logs = self._run.page_path(gone.member_id), log_root(self._run, self._settings)
        end = (gone.member_id, self._node_id, gone.code, gone.killed_by, gone.died_ns)
        read = partial(read_death, page, logs, *end, several=self._settings.several)
        until_s = asyncio.get_running_loop().time() + READ_WAIT_S
        read_in_time(read, without_page(*end), self._post, until_s)

    def _died(self, death: DeathRead) -> None:
        member_id = death.exited.member_id
        if death.error:
            self._journal.append("page_unreadable", {"member": member_id, "error": death.error})
        self._dying[member_id] = death.exited
        self._let_speak(member_id, asyncio.get_running_loop().time() + LAST_WORDS_S)

    def _let_speak(self, member_id: MemberId, until_s: float) -> None:
        """Report a dead member as soon as all messages in its socket are read, but at the latest at ``until_s``.

        The messages may show the cause of the death. ``until_s`` is a time on the clock of the event loop.
        """
        loop, channel = asyncio.get_running_loop(), self._workers.get(member_id)
        if channel is not None and channel.unread and loop.time() < until_s:
            loop.call_later(WORD_S, self._let_speak, member_id, until_s)
        else:
            self._bury(member_id)

    def _bury(self, member_id: MemberId) -> None:
        event = self._dying.pop(member_id, None)
        if event is None:
            return
        if is_spare(member_id):
            self._run.page_path(member_id).unlink(missing_ok=True)
        else:
            self._remains.add(member_id)
        self._driver.post(event)
        if self._settings.library and not self._procs.living:
            asyncio.get_running_loop().call_later(LIBRARY_LINGER_S, self._finish_library)

    def _finish_library(self) -> None:
        if not self._procs.living:
            self._finish(int(Exit.OK))

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    # ------------------------------------------------------------ out

    def _execute(self, command: Command) -> None:
        if isinstance(command, Send):
            self._send(command)
        elif isinstance(command, RestartController):
            self._council.restart()
        elif isinstance(command, Finish):
            self._finish(command.code)
        else:
            raise InternalError(f"the agent cannot carry out {type(command).__name__}")

    def _send(self, command: Send) -> None:
        message = command.message
        if command.to == "shell":
            self._act(message)
        elif command.to == "controller":
            self._council.send(message)
        elif command.to == "launcher":
            if isinstance(message, Ack) and self._askers:
                self._askers.popleft().send(message)
        else:
            if isinstance(message, ResumeInPlace):
                self._keys.live_at(message.kv_node)
                self._remains.clear(message.generation)
            channel = self._workers.get(MemberId(int(command.to.removeprefix("member:"))))
            if channel is not None:
                # A worker that reconnects sends its position; the state machine then sends the message again.
                channel.send(message)  # type: ignore[arg-type]

    def _act(self, message: object) -> None:
        if isinstance(message, BuildSpare):
            self._procs.start(spare_order(message, self._settings))
        elif isinstance(message, CallSpare):
            self._call(message)
        elif isinstance(message, StartMembers):
            if message.resume or message.join or not writers(self._run):
                self._start(message)
            else:
                self._waiting = watched(self._start_when_written(message), self._driver.fail)
        elif isinstance(message, KillMember):
            if message.given_up:
                self._gone(ProcessGone(message.member_id, 0, None, signal.SIGKILL, time.monotonic_ns()))
            elif message.silent:
                self._watcher.look_last(message)
            else:
                self._procs.kill(message.member_id, message.grace_s)
        elif isinstance(message, CollectEvidence):
            self._watcher.gather(message)
        else:
            raise InternalError(f"the agent cannot act on {type(message).__name__}")

    async def _start_when_written(self, order: StartMembers) -> None:
        """Start members after the writers of dead workers have ended: a writer may still save the newest state."""
        since, pids = time.monotonic(), writers(self._run)
        left = await wait_written(self._run, WRITERS_WAIT_S)
        waited_s = round(time.monotonic() - since, 3)
        self._journal.append("writers_awaited", {"pids": pids, "left": left, "waited_s": waited_s})
        if not self._over.done():
            self._start(order)

    def _start(self, order: StartMembers) -> None:
        """Start the members that ``order`` names. All belong to one generation."""
        self._keys.live_at(order.kv_node)
        self._keys.begin(order.attempt)
        if not order.join:  # with `join`, the job resumes only when the new members are ready
            self._remains.clear(order.generation)
        for single in self._orders(order):
            if single.assignment.member_id not in self._exited:  # killed during the wait for writers
                self._procs.start(single)

    def _orders(self, order: StartMembers) -> list[SpawnOrder]:
        port = order.master_port or self._settings.master_port or free_port()
        table = table_of(self._run, self._settings, order)
        if table != (self._settings.rank_table, ""):
            self._journal.append("rank_table", table._asdict())
        return [
            SpawnOrder(
                assignment,
                order.generation,
                order.world_size,
                order.attempt,
                order.restart_count,
                order.resume,
                order.join,
                order.master_host,
                port,
                rank_table=table.path,
                root=order.root,
            )
            for assignment in order.members
        ]

    def _call(self, call: CallSpare) -> None:
        """Make a spare process a member.

        If the spare is gone or stopped, start a new process for the member instead.
        """
        channel, life = self._workers.pop(call.spare, None), self._procs.living.get(call.spare)
        if channel is None or life is None or sample(life.pid).process in STOPPED:
            self._procs.kill(call.spare)
            self._start(call.order)
            return
        self._keys.live_at(call.order.kv_node)
        self._keys.begin(call.order.attempt)
        (order,) = self._orders(call.order)
        self._procs.call(call.spare, order)
        seat = order.assignment
        self._member_of[channel] = seat.member_id
        self._workers[seat.member_id] = channel
        channel.send(
            Called(
                member_id=seat.member_id,
                generation=order.generation,
                rank=seat.rank,
                local_rank=seat.local_rank,
                world_size=order.world_size,
                env=worker_env(self._run, self._settings, order),
                log=worker_log(self._run, self._settings, order),
                ending=self._procs.fading.pids,
            )
        )
        self._driver.post(MemberStarted(member_id=seat.member_id, node_id=self._node_id, pid=life.pid))


def agent_config(settings: RunSettings) -> AgentConfig:
    """Return the configuration of the agent's state machine for this node."""
    host = settings.bind if settings.several else ""
    return AgentConfig(
        node_id=settings.node,
        slots=settings.nproc,
        pid=os.getpid(),
        beat_s=NODE_BEAT_S if settings.several else 1.0,
        host=host,
        port=free_port(host) if host else 0,
        grace_s=settings.grace_s,
        spares=0 if settings.library else settings.spares,
        world_size=settings.workers,
    )


def lock_agent(run: RunDir) -> int:
    """Take the lock that allows only one agent per run directory, and return its file descriptor.

    Raises:
        ProtocolError: another agent holds the lock.
    """
    deadline = time.monotonic() + LOCK_WAIT_S
    while (fd := try_lock(run.agent_lock)) is None:
        if time.monotonic() > deadline:
            raise ProtocolError(f"another agent holds {run.path}")
        time.sleep(0.02)
    return fd


def main(run_dir: str) -> int:
    """Run the agent of run directory ``run_dir``, and return the exit code of the run."""

    async def serve() -> int:
        return await AgentDaemon.open(run).serve()

    raise_limit()
    run = RunDir(Path(run_dir))
    lock_agent(run)
    run.hold_pages()
    return asyncio.run(serve())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
