"""The zygote: a single-threaded process with all imports done, which forks workers on request.

It forks only while it has exactly one thread. An OpenMP region before a fork would make every child hang, so the zygote
computes nothing with tensors and has one OpenMP thread. It outlives its agent. A successor agent finds the zygote's
endpoint in the run directory, connects, and receives the list of living workers and of ended workers.

The zygote ends on the message ``Quit``, or after ``LONELY_S`` seconds without an agent and without a living child.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec

from holdfast.errors import HoldfastError, ProtocolError
from holdfast.exit_codes import Exit
from holdfast.frame_encryption import PRELOADS
from holdfast.runtime.net.blocking_channel import RECEIVE_SIZE_BYTES, SEND_TIMEOUT_S
from holdfast.runtime.net.connection_limits import (
    ACCEPT_AGAIN_S,
    BURST,
    HANDSHAKE_TIMEOUT_S,
    ConnectionLimits,
    raise_limit,
)
from holdfast.runtime.net.service_names import zygote_of
from holdfast.runtime.net.stream_sockets import listen, tune
from holdfast.runtime.node.early_variables import early_variable, sources
from holdfast.runtime.node.env_record import versions
from holdfast.runtime.node.framework_registry import (
    COMMON_PRELOADS,
    FRAMEWORKS,
    SESSION_PRELOADS,
    FrameworkName,
    install_framework,
    note_broken,
)
from holdfast.runtime.node.process_info import heed_warnings, ignore_warnings
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.script_imports import HeadImport, head_of, watching
from holdfast.runtime.node.spawn import (
    FORKS,
    ZYGOTE_MESSAGES,
    Exited,
    Preloaded,
    Quit,
    Spawn,
    Spawned,
    ZygoteMessage,
    differing,
    thread_count,
    zygote_command,
)
from holdfast.sealing import Secret
from holdfast.text import plural
from holdfast.wire import NONCE_SIZE_BYTES, Link

HEAD = "HOLDFAST_HEAD"
"""Environment variable of a restarted zygote: how many of the script's first imports to make, and the reason."""
LONELY_S = 60.0
ENDED_KEPT_MAX = 10_000
DRIVERS = ("/dev/nvidia-uvm", "/dev/kfd", "/dev/davinci")
"""Files that the initialisation of CUDA, ROCm or Ascend opens. A mere query through NVML opens other files."""


class _AgentPeer:
    """One connection to the zygote. Only an authenticated agent gets answers."""

    def __init__(self, sock: socket.socket, secret: Secret, service: str, refused: Counter[str]) -> None:
        self.sock = sock
        self.deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        self.link: Link[ZygoteMessage] = Link(
            ZYGOTE_MESSAGES,
            secret,
            os.urandom(NONCE_SIZE_BYTES),
            service=service,
            role=None,
            refused=refused,
        )

    def read(self) -> list[ZygoteMessage]:
        data = self.sock.recv(RECEIVE_SIZE_BYTES)
        if not data:
            raise ConnectionResetError("the agent closed the connection")
        try:
            return self.link.receive(data)
        finally:
            self.flush()

    def send(self, message: ZygoteMessage) -> None:
        self.link.send(message)
        self.flush()

    def flush(self) -> None:
        if output := self.link.take_output():
            self.sock.sendall(output)


class Zygote:
    """The server loop of the zygote. :meth:`serve` returns a :class:`Spawn` in a forked child, and None at the end."""

    def __init__(self, run: RunDir, secret: Secret, preloaded: Preloaded, node: str) -> None:
        self._run = run
        self._service = zygote_of(node)
        self._secret = secret
        self._preloaded = preloaded
        self._listener, _ = listen(run.socket_of("zygote"))
        self._peers: dict[int, _AgentPeer] = {}
        self._strangers: ConnectionLimits[_AgentPeer] = ConnectionLimits()
        self._accepts_at_s = 0.0
        self._agent: _AgentPeer | None = None
        self._living: dict[int, Spawned] = {}  # by pid
        self._ended: list[Exited] = []
        self._refused: Counter[str] = Counter()
        self._lonely_since = time.monotonic()
        self._wake, self._wake_write = -1, -1
        self._quit = False

    def serve(self) -> Spawn | None:
        """Serve connections and fork on request.

        Return the Spawn order in a forked child, and None in the zygote at its end.
        """
        self._wake, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda signum, frame: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ignore_warnings()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._listener.setblocking(False)
        self._run.write_endpoint("zygote", self._run.socket_of("zygote"))
        while not self._over():
            deaf = time.monotonic() < self._accepts_at_s
            poller = select.poll()
            for fd in (*(() if deaf else (self._listener.fileno(),)), self._wake, *self._peers):
                poller.register(fd, select.POLLIN)
            found = [fd for fd, _ in poller.poll(1000 * ACCEPT_AGAIN_S if deaf else 1000)]
            # Read before any peer is dropped: a new connection may get the fd number of a dropped one.
            for peer in [self._peers[fd] for fd in found if fd in self._peers]:
                if peer.sock.fileno() >= 0 and (spawn := self._read(peer)) is not None:
                    return spawn
            if self._wake in found:
                self._drain()
            if self._listener.fileno() in found:
                self._accept()
            self._cut_slow()
            self._reap()
        self._run.remove_endpoint("zygote")
        return None

    def _over(self) -> bool:
        if self._agent is not None or self._living:
            self._lonely_since = time.monotonic()
        return self._quit or time.monotonic() - self._lonely_since > LONELY_S

    def _accept(self) -> None:
        """Accept waiting connections, a few at a time, so that agents are served between them."""
        try:
            for _ in range(BURST):
                self._greet(self._listener.accept()[0])
                self._strangers.accepted()
        except BlockingIOError:
            return
        except OSError as error:  # no file descriptor is left, or the network refuses
            self._accepts_at_s = time.monotonic() + ACCEPT_AGAIN_S
            for stranger in self._strangers.refused(error):
                self._drop(stranger)

    def _greet(self, sock: socket.socket) -> None:
        peer = _AgentPeer(sock, self._secret, self._service, self._refused)
        self._peers[sock.fileno()] = peer
        for stranger in self._strangers.admit(peer, sock.fileno()):
            self._drop(stranger)
        if peer in self._peers.values():
            sock.settimeout(SEND_TIMEOUT_S)
            self._try(peer, lambda: tune(sock))
            self._try(peer, peer.flush)

    def _cut_slow(self) -> None:
        """Close connections that exceed the time limit of the handshake, even if single bytes still arrive."""
        now_s = time.monotonic()
        for peer in [peer for peer in self._peers.values() if not peer.link.open and peer.deadline_s < now_s]:
            self._refused["slow greeting"] += 1
            self._drop(peer)

    def _drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._wake, 4096):
                pass

    def _try(self, peer: _AgentPeer, action: Callable[[], None]) -> None:
        try:
            action()
        except (OSError, ProtocolError):
            self._drop(peer)

    def _drop(self, peer: _AgentPeer) -> None:
        self._peers.pop(peer.sock.fileno(), None)
        self._strangers.release(peer)
        peer.sock.close()
        if self._agent is peer:
            self._agent = None

    def _read(self, peer: _AgentPeer) -> Spawn | None:
        """Handle the messages of a peer. Return the Spawn order in a forked child, and None in the zygote."""
        was_open = peer.link.open
        try:
            messages = peer.read()
        except (OSError, ProtocolError):
            self._drop(peer)
            return None
        if peer.link.open and not was_open:
            self._strangers.release(peer)
            self._welcome(peer)
        for message in messages:
            if isinstance(message, Quit):
                self._quit = True
            elif isinstance(message, Spawn) and self._fork(message):
                return message
        return None

    def _welcome(self, peer: _AgentPeer) -> None:
        """Make ``peer`` the current agent. Report to it the imports, and all living and ended workers."""
        self._agent = peer
        self._tell(self._preloaded)
        for spawned in self._living.values():
            self._tell(spawned)
        for ended in self._ended:
            self._tell(ended)

    def _tell(self, message: ZygoteMessage) -> None:
        if self._agent is not None:
            agent = self._agent
            self._try(agent, lambda: agent.send(message))

    def _fork(self, spawn: Spawn) -> bool:
        """Fork one worker. Return True in the child, False in the zygote."""
        threads = thread_total()
        if threads != 1:
            self._tell(Spawned(spawn.member_id, 0, f"the zygote has {threads} threads, a fork could hang"))
            return False
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(Spawned(spawn.member_id, 0, f"cannot fork: {error.strerror}"))
            return False
        if pid == 0:
            self._become_child()
            return True
        self._living[pid] = Spawned(spawn.member_id, pid)
        self._tell(self._living[pid])
        return False

    def _become_child(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        heed_warnings()
        for peer in self._peers.values():
            peer.sock.close()
        self._listener.close()
        os.close(self._wake)
        os.close(self._wake_write)

    def _reap(self) -> None:
        for pid in list(self._living):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done == 0:
                continue
            code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
            killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
            ended = Exited(self._living.pop(pid).member_id, pid, code, killed)
            self._ended = [*self._ended[-ENDED_KEPT_MAX:], ended]
            self._tell(ended)


FORK_SAFE = frozenset({"jemalloc_bg_thd"})
"""Names of threads that are harmless at a fork. jemalloc, whose thread starts at the import of pyarrow, holds its own
locks around each fork. It works without the thread in the child.
"""


def thread_total(tasks: Path = Path("/proc/self/task")) -> int:
    """Return the number of threads of this process, without threads that are harmless at a fork (``FORK_SAFE``).

    A fork is safe if the number is 1.
    """
    total = 0
    for task in tasks.iterdir():
        try:
            total += (task / "comm").read_text().strip() not in FORK_SAFE
        except FileNotFoundError:  # the thread has ended
            continue
    return total


def device_in_use(files: Path = Path("/proc/self/fd")) -> str:
    """Return why a forked process could not use the devices; empty if it could.

    The cause is an import that initialised a driver.

    Args:
        files: the directory of links to this process's open files.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "a preloaded module has initialised CUDA: a fork could not use it"
    for link in files.iterdir():
        try:
            place = os.readlink(link)
        except OSError:  # the descriptor of this listing itself is closed by now
            continue
        if place.startswith(DRIVERS):
            return f"a preloaded module has opened {place}: a fork could not use the device"
    return ""


def preload(framework: FrameworkName, further: Sequence[str]) -> Preloaded:
    """Import the modules that workers need, including the modules that torch imports for its first optimizer.

    Return a report of the imports.

    Args:
        further: more modules to import, for example those that the user has named.
    """
    imports_s: dict[str, float] = {}
    missing: dict[str, str] = {}
    starts_threads = ""

    def bring(names: Sequence[str]) -> None:
        nonlocal starts_threads
        for name in names:
            began = time.monotonic()
            try:
                importlib.import_module(name)
            except Exception as error:  # a worker that needs it fails with the same error, in its own log
                missing[name] = f"{type(error).__name__}: {error}"[:200]
                if name == "torch":
                    note_broken(error)
            imports_s[name] = round(time.monotonic() - began, 3)
            if not starts_threads and thread_total() != 1:
                starts_threads = name

    # These imports make a million objects and little garbage: without collections they take a quarter less time.
    gc.disable()
    first, *others = FRAMEWORKS[framework].preloads
    bring((first,))
    if framework not in missing:  # without it no script has a session
        bring((*others, *SESSION_PRELOADS))
    bring(COMMON_PRELOADS)
    gc.freeze()
    gc.enable()
    if further and framework not in missing:
        _install(framework)
    bring(further)
    if framework == "torch" and "torch" not in missing:
        began = time.monotonic()
        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])
        imports_s["torch.optim.AdamW()"] = round(time.monotonic() - began, 3)
    versions()  # cached for the workers
    gc.freeze()  # children share these pages: a collection in a child must not write to them
    unfit = device_in_use()
    if not unfit and (threads := thread_total()) != 1:
        unfit = (
            f"{starts_threads or 'a preloaded module'} starts {plural(threads - 1, 'thread')} at its import: a fork "
            "could hang"
        )
    return Preloaded(imports_s, missing, thread_total(), unfit)


def make_head(run: RunDir, settings: RunSettings, preloaded: Preloaded) -> Preloaded:
    """Execute the first imports of the script, and return the report of all imports so far.

    If an import is unsafe before a fork, the zygote process starts again, and makes only the imports before it.
    """
    length, _, why = os.environ.pop(HEAD, "").partition(" ")
    imports_s = dict(preloaded.imports_s)
    with _as_script(settings):
        head = head_of(settings.kind, settings.target, Path(settings.cwd or "."))
        head = head[: int(length)] if length else head
        if head:
            _install(settings.framework)
        watched = differing(run, settings)
        for number, statement in enumerate(head):
            began = time.monotonic()
            wrong = _make(statement, watched)
            if wrong:
                _start_again(run, settings, f"{number} `{statement.text}`: {wrong}")
            imports_s[statement.text] = round(time.monotonic() - began, 3)
    gc.freeze()
    return msgspec.structs.replace(preloaded, imports_s=imports_s, head=why)


def _make(statement: HeadImport, watched: Collection[str]) -> str:
    """Execute an import of the script, and return why it is unsafe in the zygote; empty if it is safe."""
    with watching(watched) as looked_at:
        failed = statement.make()
    if variable := looked_at():
        return f"reads {variable}"
    return failed or device_in_use() or ("starts a thread" if thread_total() != 1 else "")


@contextlib.contextmanager
def _as_script(settings: RunSettings) -> Iterator[None]:
    """Set ``sys.argv`` and ``sys.path[0]`` to those of the script, as in a worker."""
    argv, first = sys.argv, sys.path[0]
    sys.argv = settings.argv
    if settings.kind == "script" and not sys.flags.safe_path:
        target = Path(settings.target).resolve()
        sys.path[0] = str(target if target.is_dir() else target.parent)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = argv, first


def _install(framework: FrameworkName) -> None:
    """Install Holdfast's changes to the framework before further imports.

    A library that copies a function of torch at its import then gets the changed function, as in a worker.
    """
    with contextlib.suppress(HoldfastError):  # each worker reports it
        install_framework(framework)


def _start_again(run: RunDir, settings: RunSettings, head: str) -> NoReturn:
    """Replace this process by a new zygote that makes fewer imports of the script.

    ``head``: how many of the script's first imports to make, and why no more. It is passed in an environment variable.
    """
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # also the files of a device's driver
    command = zygote_command(run, settings)
    os.execve(command[0], command, {**os.environ, HEAD: head})


def become_worker(spawn: Spawn) -> int:
    """Take over the identity of a worker in a forked child, and run the worker. Return its exit code."""
    del os.environ[FORKS]
    os.environ.update(spawn.env)
    from holdfast.runtime.worker import entry

    entry.redirect(spawn.log)
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
        torch.set_num_threads(int(spawn.env["OMP_NUM_THREADS"]))
    return entry.main()


def _early(settings: RunSettings) -> str:
    """Return why workers of this script cannot be forked; empty if they can be.

    They cannot be forked if the script sets environment variables that the import of torch reads.
    """
    if settings.framework != "torch" or settings.kind == "executable":
        return ""
    env = {**os.environ, "OMP_NUM_THREADS": str(thread_count(settings)), **settings.env}
    files, root = sources(settings.kind, settings.target, Path(settings.cwd or "."))
    found = early_variable(files, root, env)
    return f"{found} is set before torch is imported (set it for the command instead)" if found else ""


def main(run_dir: str) -> int:
    """Run the zygote of ``run_dir``. In a forked child, run the worker of that child. Return the exit code."""
    raise_limit()
    run = RunDir(Path(run_dir))
    settings = RunSettings.load(run.path)
    early = _early(settings)
    further = (*settings.preload, *(PRELOADS if settings.encrypts else ()))
    preloaded = Preloaded({}, {}, 1, early) if early else preload(settings.framework, further)
    if settings.framework == "torch" and not (preloaded.unfit or "torch" in preloaded.missing):
        preloaded = make_head(run, settings, preloaded)
    spawn = Zygote(run, run.secret(), preloaded, settings.node).serve()
    if spawn is None:
        atexit._run_exitfuncs()  # exit handlers of modules that the user has preloaded
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # quicker: the end of the run would wait 0.3 s for the destruction of all modules
    try:
        return become_worker(spawn)
    except Exception:
        traceback.print_exc()
        return int(Exit.INTERNAL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
