"""A fork server for scenarios of several ranks: torch is imported once, a world of 4 then starts in milliseconds.

``python -m tests.adapters.worlds`` reads one JSON request per line on stdin, forks the ranks of that world, serves
their key-value store, and prints one JSON line with what each rank returned. ``Worlds`` is the side of the tests. The
server is single-threaded and does no tensor maths, so its forks are sound; ``install()`` ran before them.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import msgspec

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import KvReply, KvRequest
from holdfast.runtime.agent.kv_server import KvServer, Replies
from holdfast.runtime.node.flight_recorder import Flight
from holdfast.runtime.worker.worker_client import WorkerClient

ROOT = Path(__file__).resolve().parents[2]
FIRST = Generation(1, 1)
_HEADER_BYTES = 4


class Order(msgspec.Struct, tag=True, frozen=True):
    """Server -> rank: a message of the control plane. ``kind`` is ``fence`` (poison now) or a word of the scenario."""

    kind: str
    generation: Generation
    number: int = 0


class Say(msgspec.Struct, tag=True, frozen=True):
    """Rank -> server: a message for every other rank (``to_all``) or for the server."""

    kind: str
    number: int = 0


class Result(msgspec.Struct, tag=True, frozen=True):
    """Rank -> server: the result of the scenario as JSON, or its error."""

    value: str = "null"
    error: str = ""


Frame = Order | Say | Result | KvRequest | KvReply
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Frame)


def send(sock: socket.socket, frame: Frame) -> None:
    """Send one length-prefixed frame."""
    data = _ENCODER.encode(frame)
    sock.sendall(len(data).to_bytes(_HEADER_BYTES, "big") + data)


def receive(sock: socket.socket) -> Frame | None:
    """Return the next frame, or None at the end."""
    header = sock.recv(_HEADER_BYTES, socket.MSG_WAITALL)
    if len(header) < _HEADER_BYTES:
        return None
    data = sock.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    frame: Frame = _DECODER.decode(data)  # before msgspec 0.23 of type Any
    return frame


class Line:
    """A rank's connection to the server: the key-value part of ``WorkerClient``, and orders."""

    def __init__(self, sock: socket.socket, rank: int, world_size: int, generation: Generation) -> None:
        self.rank = self.local_rank = rank
        self.world_size = world_size
        self.generation = generation
        self.joining = False
        self.shared: Path | None = None  # if a scenario sets this, votes use a board in shared memory
        self.directory: Path | None = None
        self.several_nodes = False
        self.flight: Flight | None = None
        self.orders: dict[str, Callable[[Order], None]] = {}
        self._sock = sock
        self._lock = threading.Lock()
        self._next = 0
        self._replies: dict[int, KvReply] = {}
        self._arrived = threading.Condition()

    def start(self) -> None:
        """Start the receiving thread, and become the client of this process."""
        threading.Thread(target=self._listen, daemon=True).start()
        WorkerClient._current = cast(WorkerClient, self)

    def _listen(self) -> None:
        while (frame := receive(self._sock)) is not None:
            if isinstance(frame, KvReply):
                with self._arrived:
                    self._replies[frame.request_id] = frame
                    self._arrived.notify_all()
            elif isinstance(frame, Order) and frame.kind in self.orders:
                self.orders[frame.kind](frame)

    def say(self, frame: Frame) -> None:
        """Send a frame from any thread."""
        with self._lock:
            send(self._sock, frame)

    def kv(
        self,
        op: Any,
        keys: tuple[str, ...] = (),
        value: bytes = b"",
        expected: bytes = b"",
        amount: int = 0,
        timeout_s: float = 300.0,
    ) -> KvReply:
        """Send a request as :meth:`holdfast.runtime.worker.worker_client.WorkerClient.kv` does."""
        with self._arrived:
            self._next += 1
            number = self._next
        self.say(KvRequest(number, op, keys, value, expected, amount, timeout_s))
        with self._arrived:
            self._arrived.wait_for(lambda: number in self._replies, timeout_s + 5.0)
            return self._replies.pop(number, KvReply(request_id=number, ok=False, error="timeout"))


@dataclass
class _World:
    """One running scenario, as the server sees it."""

    request: dict[str, Any]
    kv: KvServer
    socks: dict[int, socket.socket] = field(default_factory=dict)  # by rank
    pids: dict[int, int] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)
    generation: Generation = FIRST
    stopped: set[int] = field(default_factory=set)

    def start(self, rank: int) -> None:
        """Fork one rank of the current generation."""
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for sock in self.socks.values():
                sock.close()
            _be_rank(theirs, rank, self.request, self.generation)
        theirs.close()
        self.socks[rank] = ours
        self.pids[rank] = pid

    def deliver(self, replies: Replies) -> None:
        """Send replies to ranks that still live. The id of a process serves as its member id."""
        for member, reply in replies:
            for rank, pid in self.pids.items():
                if pid == member:
                    self.tell(rank, reply)

    def tell(self, rank: int, frame: Frame) -> None:
        """Send a frame to a rank, if it lives."""
        sock = self.socks.get(rank)
        if sock is None:
            return
        try:
            send(sock, frame)
        except OSError:  # the rank has died; the end of its connection will be read later
            return

    def gone(self, rank: int) -> None:
        """Reap a rank that ended. Announce a killed rank to the others and, if requested, replace it."""
        self.socks.pop(rank).close()
        pid = self.pids.pop(rank)
        self.kv.forget(MemberId(pid))
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status):
            return
        self.results.append({"rank": rank, "signal": os.WTERMSIG(status)})
        self.generation = self.generation.next()
        if self.request["push"]:
            for other in list(self.socks):
                self.tell(other, Order("fence", self.generation, rank))
        if self.request["replace"]:
            self.start(rank)

    def handle(self, rank: int, frame: Frame) -> None:
        """Handle one frame of a rank."""
        if isinstance(frame, KvRequest):
            self.deliver(self.kv.request(time.monotonic(), MemberId(self.pids[rank]), frame))
        elif isinstance(frame, Result):
            entry: dict[str, Any] = {"rank": rank, "value": json.loads(frame.value)}
            if frame.error:
                entry["error"] = frame.error
            self.results.append(entry)
        elif isinstance(frame, Say) and frame.kind == "stop-me":
            os.kill(self.pids[rank], signal.SIGSTOP)
            self.stopped.add(rank)
            for other in list(self.socks):
                if other != rank:
                    self.tell(other, Order("stopped", self.generation, rank))
        elif isinstance(frame, Say) and frame.kind == "kill-me":
            os.kill(self.pids[rank], signal.SIGKILL)
        elif isinstance(frame, Say):
            for other in list(self.socks):
                self.tell(other, Order(frame.kind, self.generation, frame.number))

    def run(self) -> list[dict[str, Any]]:
        """Fork the ranks, serve until all have ended or the time is over, then kill the others."""
        for rank in range(self.request["world"]):
            self.start(rank)
        deadline = time.monotonic() + self.request["bound_s"]
        while set(self.socks) - self.stopped and time.monotonic() < deadline:
            ready, _, _ = select.select(list(self.socks.values()), [], [], 0.02)
            self.deliver(self.kv.expire(time.monotonic()))
            for sock in ready:
                rank = next(r for r, s in self.socks.items() if s is sock)
                try:
                    frame = receive(sock)
                except ConnectionError:
                    frame = None
                if frame is None:
                    self.gone(rank)
                else:
                    self.handle(rank, frame)
        for rank, pid in self.pids.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if rank not in self.stopped and not any(r["rank"] == rank and "value" in r for r in self.results):
                self.results.append({"rank": rank, "hung": True})
        return sorted(self.results, key=lambda r: (r["rank"], "value" in r))


def _be_rank(sock: socket.socket, rank: int, request: dict[str, Any], generation: Generation) -> None:
    """Run the scenario as one rank. Never return."""
    try:
        line = Line(sock, rank, request["world"], generation)
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(request["world"]), LOCAL_RANK=str(rank))
        line.start()
        try:
            scenario = getattr(import_module(request["module"]), request["name"])
            result = Result(json.dumps(scenario(line, **request["args"])))
        except BaseException as error:
            result = Result(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        line.say(result)
    finally:
        os._exit(0)


def main() -> None:
    """Serve requests until stdin ends."""
    import torch

    from holdfast.frameworks.torch.comm.backend import install

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
    if os.environ.get("WORLDS_PLAIN") != "1":
        install()
    for name in sys.argv[1:]:
        import_module(name)
    out = os.dup(1)
    os.dup2(2, 1)  # output of the ranks must not mix with the answers
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            answer = _World(json.loads(line), KvServer.open(Path(folder) / "kv.log")).run()
        os.write(out, json.dumps(answer).encode() + b"\n")


class Worlds:
    """The fork server, as a test uses it."""

    def __init__(self, *modules: str, plain: bool = False) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        if plain:
            env["WORLDS_PLAIN"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.adapters.worlds", *modules],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if os.environ.get("WORLDS_QUIET", "1") == "1" else None,
        )

    def run(
        self,
        scenario: Callable[..., Any],
        world: int = 2,
        *,
        push: bool = False,
        replace: bool = False,
        bound_s: float = 40.0,
        **args: Any,
    ) -> list[dict[str, Any]]:
        """Run ``scenario(line, **args)`` on every rank.

        Args:
            push: send the survivors of a killed rank the order ``fence`` at once.
            replace: start a killed rank again, in the next generation.

        Returns: one entry per ended process: rank with ``value`` (and ``error``), ``signal`` or ``hung``.
        """
        request = {
            "module": scenario.__module__,
            "name": scenario.__name__,
            "world": world,
            "push": push,
            "replace": replace,
            "bound_s": bound_s,
            "args": args,
        }
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        answer: list[dict[str, Any]] = json.loads(self._process.stdout.readline())
        return answer

    def values(self, scenario: Callable[..., Any], world: int = 2, **more: Any) -> list[Any]:
        """Return the values of all ranks. Fail the test when a rank failed."""
        results = self.run(scenario, world, **more)
        failed = [r for r in results if "error" in r or "hung" in r]
        assert not failed, "\n".join(str(r.get("error", r)) for r in failed)
        return [r["value"] for r in results if "value" in r]

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)


if __name__ == "__main__":
    main()
