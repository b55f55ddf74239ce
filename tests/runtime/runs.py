"""Real runs of tiny scripts without torch: an agent process, its controller, zygote and workers."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast import event_log
from holdfast.core.protocol.messages import StopRun
from holdfast.errors import FaultError
from holdfast.event_log import Event
from holdfast.runtime.node.agent_client import AgentLink, start_agent
from holdfast.runtime.node.run_processes import sweep
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir

BOUND_S = 60.0
SOURCE = Path(__file__).parents[2] / "src"
"""The tests run the code beside them, wherever another copy is installed."""

LOOP = """
import sys, time
from pathlib import Path
from holdfast.core.protocol.status_page import Phase
from holdfast.runtime.worker.worker_client import WorkerClient
client = WorkerClient.current()
enough = Path(sys.argv[0]).with_name("enough")
print("rank", client.rank, "member", client.member_id, flush=True)
for step in range(int(sys.argv[1])):
    client.page.enter(Phase.FORWARD, step)
    key = f"{client.generation}/{step}"
    if client.kv("add", (key,), amount=1).number == client.world_size:
        client.kv("set", (key + "/all",), b"last" if enough.exists() else b"on")
    reply = client.kv("wait", (key + "/all",), timeout_s=60)
    while reply.error == "fenced":
        time.sleep(0.05)
    client.page.enter(Phase.READY, step + 1)
    client.page.write_local(step + 1, b"at %d" % (step + 1))
    if client.kv("get", (key + "/all",)).value == b"last":
        break
    time.sleep(0.02)
print("done", flush=True)
"""
"""A script in which each step is a barrier over the key-value store. It ends after the file ``enough`` exists. A fenced
rank waits for the order to leave."""


def without_torch(base: Path) -> dict[str, str]:
    """Return the environment of a run in which torch is not installed: its zygote starts in a tenth of the time."""
    stub = base / "stub" / "torch"
    stub.mkdir(parents=True)
    (stub / "__init__.py").write_text("raise ModuleNotFoundError('no torch in this test', name='torch')\n")
    places = [str(stub.parent), str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places)}


def until(what: str, condition: Callable[[], Any], bound_s: float = BOUND_S) -> Any:
    """Poll until ``condition()`` is true. Returns its value."""
    deadline = time.monotonic() + bound_s
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"{what}: not within {bound_s:g} s")


@contextmanager
def no_file_beyond(size_bytes: int) -> Iterator[None]:
    """Limit the files of this process to that size. As on a full disk, the part of a write that fits is written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def no_descriptor() -> Iterator[None]:
    """Leave this process no free file descriptor."""
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def kill_at_once(pids: Collection[int]) -> None:
    """Kill processes as a loss of power does: all of them stop first, so that none acts on the end of another."""
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def exists(pid: int) -> bool:
    """Return True when ``pid`` is a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Run:
    """One run below ``tmp_path``; a context manager that leaves nothing behind."""

    def __init__(self, tmp_path: Path, script: str = LOOP, **settings: Any) -> None:
        self.dir = RunDir(tmp_path / "run")
        self.dir.create()
        self.script = tmp_path / "train.py"
        self.script.write_text(script)
        settings["env"] = {**without_torch(tmp_path), **settings.get("env", {})}
        settings.setdefault("target", str(self.script))
        settings.setdefault("nproc", 4)
        self.settings = RunSettings(run_id="t", **settings)
        self.settings.save(self.dir.path)
        self.agents: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *error: object) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()
        for event in self.events("controller_started"):
            if exists(int(event.data["pid"])):
                os.kill(int(event.data["pid"]), signal.SIGKILL)
        sweep(self.dir)
        self.dir.remove_pages()

    def start(self) -> subprocess.Popen[bytes]:
        """Start the agent (or its successor)."""
        self.agents.append(start_agent(self.dir.path))
        return self.agents[-1]

    def let_end(self) -> None:
        """Tell the loop of the script to end."""
        self.script.with_name("enough").touch()

    def wait(self) -> int:
        """Wait for the end of the run. Return its exit code."""
        return self.agents[-1].wait(BOUND_S)

    def events(self, kind: str = "") -> list[Event]:
        """Return the events so far, of one kind or of all kinds."""
        return [e for e in event_log.read(self.dir.journal).events if kind in ("", e.kind)]

    def wait_event(self, kind: str, count: int = 1) -> Event:
        """Wait for the ``count``-th event of a kind, and return it."""
        event: Event = until(kind, lambda: next(iter(self.events(kind)[count - 1 :]), None))
        return event

    def pids(self, attempt: int = 0) -> dict[int, int]:
        """Return the process ids by rank of one attempt, once all have started."""
        nproc = self.settings.nproc
        self.wait_event("member_started", nproc * (attempt + 1))
        started = self.events("member_started")[nproc * attempt : nproc * (attempt + 1)]
        return {int(e.data["rank"]): int(e.data["pid"]) for e in started}

    def log(self, rank: int, attempt: int = 0) -> str:
        """Return the output of one rank."""
        path = self.dir.path / f"attempt-{attempt:03d}" / f"rank-{rank:05d}.log"
        return path.read_text() if path.exists() else ""

    def wait_log(self, text: str, rank: int = 0, attempt: int = 0) -> None:
        """Wait until one rank has printed ``text``."""
        until(f"{text!r} of rank {rank}", lambda: text in self.log(rank, attempt))

    def logs(self) -> str:
        """Return the output of all ranks. The rank that failed first has the last words; the others were killed."""
        return "".join(path.read_text() for path in sorted(self.dir.path.glob("attempt-*/rank-*.log")))

    def error_files(self) -> list[Any]:
        """Return the contents of all error files."""
        return [
            msgspec.json.decode(path.read_bytes()) for path in self.dir.path.glob("attempt-*/*.error.json")
        ]

    def left(self) -> list[int]:
        """Return the processes that have this run in their environment or on their command line."""
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or not exists(int(entry)):
                continue
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
                cmdline = Path(f"/proc/{entry}/cmdline").read_bytes()
            except OSError:
                continue
            needle = str(self.dir.path).encode()
            if b"HOLDFAST_RUN_DIR=" + needle in environ or needle in cmdline.split(b"\0"):
                found.append(int(entry))
        return found

    def stop(self) -> None:
        """Stop the run at once."""
        try:
            AgentLink(self.dir.path).request(StopRun(reason="test"), timeout_s=1.0)
        except FaultError:
            return

    def nothing_left(self) -> bool:
        """Return whether no process, page or endpoint of the run remains."""
        files = {path.name for path in self.dir.path.iterdir()}
        rest = [*self.left(), *files & {"agent.json", "controller.json", "zygote.json", "pages"}]
        if rest:
            print("left:", rest)
        return not rest
