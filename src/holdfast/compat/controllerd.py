"""The controller process of ``mindio_ttp``. Rank 0 starts this process, which ends only after the last rank."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from holdfast.compat.dying_checkpoint import (
    After,
    DyingCheckpoint,
    Event,
    FromRank,
    Here,
    Lost,
    Over,
    SendToRank,
    Timer,
    WriteLog,
)
from holdfast.compat.endpoint import LINES, Message, drop_token
from holdfast.event_log import EventLog
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.connection_limits import raise_limit
from holdfast.runtime.net.service_names import TTP
from holdfast.runtime.node.rundir import read_token
from holdfast.sealing import Secret

EMPTY_S = 300.0  # limit of the wait for the first rank
BIND_S = 10.0  # limit of the wait for the port, which the controller of an earlier job may still hold
RETRY_S = 0.1
CLOSE_S = 2.0


class TtpServer:
    """The driver of :class:`DyingCheckpoint`: sockets, timers and the log around the state machine."""

    def __init__(self, controller: DyingCheckpoint, journal: EventLog, secret: Secret) -> None:
        self._controller = controller
        self._journal = journal
        self._lines: dict[int, Channel[Message]] = {}
        self._begun = asyncio.Event()
        self._over = asyncio.Event()
        self.hub: Hub[Message] = Hub(
            LINES, secret, on_open=lambda channel: None, on_message=self._heard, on_close=self._closed
        )

    async def run(self) -> None:
        """Serve the ranks until the last rank has gone, or until no rank has connected within ``EMPTY_S`` seconds."""
        try:
            await asyncio.wait_for(self._begun.wait(), EMPTY_S)
            await self._over.wait()
        except TimeoutError:
            self._journal.append("nobody_came", {})
        await self.hub.close(CLOSE_S)

    def _heard(self, channel: Channel[Message], message: Message) -> None:
        if isinstance(message, Here):
            self._lines[message.rank] = channel
            self._begun.set()
        if isinstance(message, FromRank) and self._lines.get(message.rank) is channel:
            self._take(message)

    def _closed(self, channel: Channel[Message]) -> None:
        for rank, line in list(self._lines.items()):
            if line is channel:
                del self._lines[rank]
                self._take(Lost(rank=rank, what="its process ended"))

    def _take(self, event: Event) -> None:
        for command in self._controller.handle(event):
            match command:
                case WriteLog(kind, data):
                    self._journal.append(kind, data)
                case SendToRank(rank, message):
                    line = self._lines.get(rank)
                    if line is not None:
                        line.send(message)  # type: ignore[arg-type]  # a union of its subclasses
                case After(number, delay_s):
                    loop = asyncio.get_running_loop()
                    loop.call_later(delay_s, self._take, Timer(number=number))
                case Over():
                    self._over.set()


async def serve(host: str, port: int, world_size: int, secret: Secret, log: Path) -> int:
    """Listen at ``host:port`` and serve the ranks of one job. Return 1 if the port stays taken, otherwise 0."""
    journal = EventLog.open(log, "ttp")
    server = TtpServer(DyingCheckpoint(world_size), journal, secret)
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + BIND_S
    while True:
        try:
            listener, _ = await server.hub.listen(TTP, Address(host, port))
            break
        except OSError as error:
            if loop.time() > deadline_s:
                journal.append("no_port", {"host": host, "port": port, "what": str(error)})
                return 1
            await asyncio.sleep(RETRY_S)
    journal.append("listens", {"host": host, "port": port, "world_size": world_size})
    await server.run()
    listener.close()
    journal.append("gone", {"phase": server._controller.phase})
    journal.close()
    return 0


def main(host: str, port: str, world_size: str, token_file: str, log: str) -> int:
    """Run the controller with its command-line arguments, all given as text. Return the exit code."""
    raise_limit()
    path = Path(token_file)
    secret = read_token(path)
    try:
        return asyncio.run(serve(host, int(port), int(world_size), Secret(secret), Path(log)))
    finally:
        drop_token(path, secret)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
