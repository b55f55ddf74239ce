"""The controller process: ``core.controller.Controller`` behind a driver, agents connect to it.

``python -m holdfast.runtime.controllerd RUNDIR TERM``. It outlives an agent (a successor connects again); when it dies
itself, an agent starts the controller of the next term, which reads the past from the event log.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from holdfast import journal as event_log
from holdfast.core.config import Config
from holdfast.core.controller import Controller
from holdfast.core.history import Past
from holdfast.core.ids import MemberId, NodeId
from holdfast.core.messages import (
    AgentGone,
    AgentHello,
    Command,
    Finish,
    Record,
    Send,
    StartMembers,
    WireMessage,
)
from holdfast.errors import InternalError, StateError
from holdfast.exits import Exit
from holdfast.journal import Journal
from holdfast.runtime.channel import Channel, Hub
from holdfast.runtime.driver import Driver
from holdfast.runtime.rundir import RunDir
from holdfast.runtime.settings import RunSettings
from holdfast.store.complete import complete_layouts
from holdfast.store.layout import Catalogue, RankLayout
from holdfast.store.plan import plan
from holdfast.wire import MESSAGES

LONELY_S = 60.0  # without any agent for so long, the run has no node any more: nobody would read a decision
LINGER_S = 2.0  # after the end: time for the agents to read the last messages


def uncovered(layouts: dict[str, bytes], sources: tuple[int, ...]) -> str:
    """Why ``sources`` cannot write a complete checkpoint of ``layouts`` (by rank as text), or an empty string."""
    try:
        known = {int(rank): RankLayout.from_json(layout) for rank, layout in layouts.items()}
        catalogue = Catalogue.from_layouts(complete_layouts(known))
        return plan(catalogue, frozenset(sources)).why_incomplete()
    except StateError as error:
        return error.message


def config_of(settings: RunSettings, term: int) -> Config:
    """The controller's settings for this run."""
    return Config(
        run_id=settings.run_id,
        world_size=settings.nproc * settings.nnodes,
        nnodes=settings.nnodes,
        term=term,
        library=settings.library,
        max_restarts=settings.max_restarts,
        restart_window_s=settings.restart_window_s,
        quiesce_s=settings.quiesce_s,
        grace_s=settings.grace_s,
        patience_s=settings.hang_start_s / 3,
        replace_slower_than=settings.replace_slower_than,
    )


class ControllerDaemon:
    """One controller and the connections of its agents."""

    def __init__(self, run: RunDir, term: int) -> None:
        self._run = run
        self._term = term
        self._nodes: dict[NodeId, Channel[WireMessage]] = {}
        self._homes: dict[MemberId, NodeId] = {}
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._driver: Driver | None = None

    async def serve(self) -> None:
        """Run until the machine ends the run.

        Raises:
            HoldfastError: the machine, the journal or the store broke; the agent starts another term.
        """
        settings = RunSettings.load(self._run.path)
        past = Past.read(
            Record(kind=event.kind, data=event.data)
            for event in event_log.read(self._run.journal).events
            if event.who == "controller"
        )
        log = Journal.open(self._run.journal, "controller")
        log.append("controller_started", {"term": self._term, "pid": os.getpid()}, durable=True)
        self._driver = Driver(
            Controller(config_of(settings, self._term), past, uncovered), log, self._execute
        )
        hub: Hub[WireMessage] = Hub(
            MESSAGES,
            self._run.token(),
            on_open=lambda channel: None,
            on_message=self._heard,
            on_close=self._closed,
        )
        self._driver.guard_loop()
        self._driver.start()
        server, port = await hub.listen()
        self._run.write_endpoint("controller", "127.0.0.1", port)
        alone = asyncio.create_task(self._left_alone())
        await asyncio.wait({self._ended, self._driver.failure, alone}, return_when=asyncio.FIRST_COMPLETED)
        if alone.done():
            log.append("controller_left", {"reason": f"no agent for {LONELY_S:g} s"}, durable=True)
        alone.cancel()
        if self._driver.failure.done():
            error = self._driver.failure.exception()
            log.append(
                "controller_broken", {"error": f"{type(error).__name__}: {error}"[:2000]}, durable=True
            )
            self._driver.failure.result()
        self._driver.close()
        server.close()
        await hub.close(LINGER_S)
        self._run.remove_endpoint("controller")
        log.close()

    async def _left_alone(self) -> None:
        """Return when no agent has been connected for ``LONELY_S``."""
        since_s = time.monotonic()
        while time.monotonic() - since_s < LONELY_S:
            await asyncio.sleep(1.0)
            if self._nodes:
                since_s = time.monotonic()

    def _heard(self, channel: Channel[WireMessage], message: WireMessage) -> None:
        if channel.peer_role != "agent" or self._driver is None:
            return
        if isinstance(message, AgentHello):
            self._nodes[message.node_id] = channel
            for seen in message.members:
                self._homes[seen.member_id] = message.node_id
        elif (member_id := getattr(message, "member_id", None)) is not None:
            self._homes[member_id] = self._node_of(channel)
        self._driver.post(message)

    def _node_of(self, channel: Channel[WireMessage]) -> NodeId:
        return next((node for node, current in self._nodes.items() if current is channel), NodeId(""))

    def _closed(self, channel: Channel[WireMessage]) -> None:
        for node_id, current in list(self._nodes.items()):
            if current is channel and self._driver is not None:
                del self._nodes[node_id]
                self._driver.post(AgentGone(node_id=node_id))

    def _execute(self, command: Command) -> None:
        if isinstance(command, Finish):
            self._ended.set_result(None)
        elif isinstance(command, Send):
            self._send(command)
        else:
            raise InternalError(f"the controller cannot carry out {type(command).__name__}")

    def _send(self, command: Send) -> None:
        message = command.message
        kind, _, name = command.to.partition(":")
        if kind == "agent":
            node_id: NodeId | None = NodeId(name)
            if isinstance(message, StartMembers):
                for assignment in message.members:
                    self._homes[assignment.member_id] = message.node_id
        elif kind == "member":
            node_id = self._homes.get(MemberId(int(name)))
        else:
            raise InternalError(f"the controller cannot send to {command.to}")
        channel = self._nodes.get(node_id) if node_id is not None else None
        if channel is not None:  # a lost message is answered by what its node says in its next hello
            channel.send(message)  # type: ignore[arg-type]  # the machine sends wire messages only


def main(run_dir: str, term: str) -> int:
    """Run one controller."""

    async def serve() -> None:
        await ControllerDaemon(RunDir(Path(run_dir)), int(term)).serve()

    asyncio.run(serve())
    return int(Exit.OK)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
