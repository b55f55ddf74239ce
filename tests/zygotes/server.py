"""A server that forks the zygotes of test jobs: torch is imported once per process of pytest, not once per job.

The import takes 4 s of processor time, which was a third of that of all tests. The agent of a test asks this server for
its zygote (``hook/sitecustomize.py``). The zygote is then a fork of the server, with command line and environment (also
those that ``/proc`` shows), directory, output, process session and ``__main__`` of the process that the agent would
have executed. The zygote's own code runs from its first line; only the modules are loaded already. All else that a
process inherits must be that of the server, and so must the variables that an import may read. Otherwise the server
refuses, and the agent executes the zygote. What remains: the parent of the zygote is the server, and zygotes of one
server have one seed for hashes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import msgspec

from holdfast.runtime.agent.zygote import preload
from holdfast.runtime.net.connection_limits import raise_limit
from holdfast.runtime.node.process_info import words_at
from holdfast.runtime.node.process_title import ROOM
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.spawn import FORKS, QUIET_DEVICES
from tests.zygotes.hook.sitecustomize import ENTERED, REQUEST_SIZE_MAX_BYTES, SERVER, ZYGOTE, surroundings

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).parent / "hook"
PLACEHOLDER = "TEST_ZYGOTES_ROOM"
"""A variable that makes room for the environment of a zygote, which may be larger than that of the server."""
ENVIRONMENT_ROOM_BYTES = 16_384
COMMAND_ROOM_BYTES = 1024
FREE_PREFIXES = ("AWS_", "HOLDFAST_", "JOB_", "KUBERNETES_", "POD_", "PYTEST_")
FREE = frozenset(
    "GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NODE_NAME OLDPWD PWD PYTHONPATH SHLVL TERM _".split()
) | {"KILL", "KILL_INSIDE", "STOP", "TEST_MARK", "UNTIL", "WRONG_FROM", SERVER, PLACEHOLDER}
"""Variables that no import reads, some of them for scripts of tests. The effect of ``PYTHONPATH`` is repeated."""


# ------------------------------------------------------------ in the process of pytest


@contextmanager
def forked_zygotes() -> Iterator[None]:
    """Let the agents that are started in this context ask the server for their zygotes."""
    told = _started()
    before = {name: os.environ.get(name) for name in told}
    os.environ |= told
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@cache
def _started() -> dict[str, str]:
    """Start the server, once. Return the variables by which agents find it."""
    place = tempfile.TemporaryDirectory(prefix="zygotes-")
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HOOK)]))
    told = {SERVER: f"{place.name}/socket", "PYTHONPATH": path}
    env = {
        **QUIET_DEVICES,
        **os.environ,
        **told,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{path}",
        "OMP_NUM_THREADS": "1",
        FORKS: "1",
        PLACEHOLDER: " " * ENVIRONMENT_ROOM_BYTES,
    }
    python = Path(sys.executable).parent.resolve() / "python"
    server = subprocess.Popen(
        [str(python), "-m", "tests.zygotes.server", ROOM + " " * COMMAND_ROOM_BYTES],
        cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip

    @atexit.register
    def end() -> None:
        server.communicate()
        place.cleanup()

    assert server.stdout is not None
    assert server.stdout.readline() == "ready\n", "the server of zygotes has not started"
    return told


# ------------------------------------------------------------ in the server


class Server:
    """The loop of the server. Its import of torch is done.

    Args:
        environment: the environment before the import.
    """

    def __init__(self, listener: socket.socket, environment: Mapping[str, str]) -> None:
        self._listener = listener
        self._living: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        self._surroundings = surroundings()
        self._environment = _read_by_imports(os.environ)
        self._added = {name: os.environ[name] for name in os.environ.keys() - environment.keys()}
        own = set(environment["PYTHONPATH"].split(os.pathsep)) | {sys.path[0]}
        self._own = own
        self._rest_of_path = [place for place in sys.path if place not in own]
        self._origins = {name: sys.modules[name].__file__ for name in ("holdfast", "numpy", "torch")}
        self._loaded = {name.partition(".")[0] for name in sys.modules}

    def serve(self) -> dict[str, Any] | None:
        """Fork on request. Return the request in a fork, None at the end of the standard input."""
        while True:
            poller = select.poll()
            for fd in (0, self._listener.fileno(), *self._living):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll()}
            for fd in ready & self._living.keys():
                self._reap(fd)
            if self._listener.fileno() in ready and (request := self._answer()) is not None:
                return request
            if 0 in ready:
                return None

    def _reap(self, pidfd: int) -> None:
        """Reap a zygote, then tell its agent the exit status."""
        pid, connection = self._living.pop(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, suppress(OSError):  # the agent has ended
            connection.send(str(status).encode())
        os.close(pidfd)

    def _answer(self) -> dict[str, Any] | None:
        """Fork for one request, or refuse it. Return the request in the fork."""
        connection, _ = self._listener.accept()
        data, logs, _, _ = socket.recv_fds(connection, REQUEST_SIZE_MAX_BYTES, 1)
        if not logs:  # the agent has ended
            connection.close()
            return None
        request: dict[str, Any] = json.loads(data)
        if self._refuses(request):
            os.close(logs[0])
            connection.close()
            return None
        became, become = os.pipe()
        pid = os.fork()
        if pid == 0:
            return {**request, "log": logs[0], "become": become}
        os.close(logs[0])
        os.close(become)
        os.read(became, 1)  # at the end of the pipe the fork is what was asked for, or dead
        os.close(became)
        pidfd = os.pidfd_open(pid)
        self._living[pidfd] = pid, connection
        with suppress(OSError):  # the agent has ended
            socket.send_fds(connection, [str(pid).encode()], [pidfd])
        return None

    def _refuses(self, request: dict[str, Any]) -> bool:
        """Return True if a fork would not be what the agent would execute; otherwise add the fork's ``sys.path``."""
        (python, _, module, run_dir, *_), cwd = request["argv"], os.path.realpath(request["cwd"])
        env = {**self._added, **request["env"]}
        told = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
        places = [cwd, *dict.fromkeys(os.path.normpath(os.path.join(cwd, place)) for place in told)]
        request["added"], request["path"] = self._added, [*places, *self._rest_of_path]
        return (
            module != ZYGOTE
            or Path(python).parent.resolve() != Path(sys.executable).parent.resolve()
            or request["surroundings"] != self._surroundings
            or _read_by_imports(env) != self._environment
            or sum(len(word) + 1 for word in request["argv"]) > COMMAND_ROOM_BYTES + len(ROOM)
            or sum(len(name) + len(env[name]) + 2 for name in env) > ENVIRONMENT_ROOM_BYTES
            or not _is_for_torch(run_dir)
            or any(self._hides_modules(place) for place in places if place not in self._own)
            or any(_origin(name, request["path"]) != origin for name, origin in self._origins.items())
        )

    def _hides_modules(self, place: str) -> bool:
        """Return True if a loaded module might be another one with this directory in ``sys.path``."""
        with suppress(OSError), os.scandir(place) as entries:
            return any(
                entry.name.partition(".")[0] in self._loaded and ("." in entry.name or entry.is_dir())
                for entry in entries
            )
        return False


def _read_by_imports(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an import may read."""
    return {k: v for k, v in environment.items() if k not in FREE and not k.startswith(FREE_PREFIXES)}


def _is_for_torch(run_dir: str) -> bool:
    try:
        return RunSettings.load(Path(run_dir)).framework == "torch"
    except (OSError, msgspec.MsgspecError):
        return False


def _origin(name: str, path: list[str]) -> str | None:
    """Return the file that an import of ``name`` would load."""
    spec = PathFinder.find_spec(name, path)
    return None if spec is None else spec.origin


# ------------------------------------------------------------ in the fork


def become_zygote(request: dict[str, Any]) -> None:
    """Become what the agent would have executed, tell the server, and run the zygote."""
    argv, env = request["argv"], request["env"]
    os.setsid()
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(request["log"], 1)
    os.dup2(request["log"], 2)
    _enter_host(request["agent"])
    become = os.dup2(request["become"], 3, inheritable=False)
    os.closerange(become + 1, os.sysconf("SC_OPEN_MAX"))
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ |= {**request["added"], **env}
    _show(argv, env)
    _forget()
    _take_signals(request["ignored"])
    sys.argv = ["-m", *argv[3:]]
    sys.orig_argv[:] = argv
    sys.executable = argv[0]
    sys.path[:] = request["path"]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    random.seed()
    os.close(become)
    try:
        runpy._run_module_as_main(ZYGOTE)  # type: ignore[attr-defined]  # what `python -m` does
    except SystemExit as error:  # of the zygote, or of a worker, which is its fork
        _end(error)


def _end(error: SystemExit) -> None:
    """End this process as Python would, but without the destruction of all modules: 0.4 s of processor time each."""
    code = 1
    if error.code is None or isinstance(error.code, int):
        code = error.code or 0
    else:
        print(error.code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    for opened in gc.get_objects():
        if isinstance(opened, io.IOBase):
            with suppress(OSError, ValueError):  # closed, or read only
                opened.flush()
    os._exit(code)


def _enter_host(agent: int) -> None:
    """Enter the namespaces of the agent, which waits for the answer and so exists."""
    for name in ENTERED:
        place = f"/proc/{agent}/ns/{name}"
        if os.readlink(place) != os.readlink(f"/proc/self/ns/{name}"):
            with open(place) as namespace:
                entered = ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0)
                assert entered == 0, os.strerror(ctypes.get_errno())


def _show(argv: list[str], env: dict[str, str]) -> None:
    """Write command line and environment where ``/proc`` reads them."""
    start, end = words_at(os.getpid())
    words = b"\0".join(map(os.fsencode, argv))
    _write(start, end, words.ljust(end - start - 1))  # the last word is blanks: room for a title
    Path("/proc/self/comm").write_text(os.path.basename(argv[0]))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    _write(
        int(fields[47]), int(fields[48]), b"".join(os.fsencode(f"{k}={v}") + b"\0" for k, v in env.items())
    )


def _write(start: int, end: int, data: bytes) -> None:
    assert len(data) < end - start
    ctypes.memset(start, 0, end - start)
    ctypes.memmove(start, data, len(data))


def _take_signals(ignored: list[int]) -> None:
    """Ignore these signals and no others, apart from those that Python ignores."""
    fixed = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - fixed:
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    if signal.SIGINT not in ignored:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _forget() -> None:
    """Remove the modules that this server has imported under another name, or for itself."""
    for name in [name for name in sys.modules if name == ZYGOTE or name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    package, _, name = ZYGOTE.rpartition(".")
    delattr(sys.modules[package], name)
    sys.modules["__main__"] = types.ModuleType("__main__")


def main() -> None:
    """Serve until the standard input ends; in a fork, run the zygote."""
    environment = dict(os.environ)
    # From here on no variable is where the kernel has put it and /proc reads it: a fork writes over that.
    os.environ.clear()
    os.environ |= environment
    raise_limit()  # as in an agent
    preloaded = preload("torch", ())
    assert not preloaded.missing and not preloaded.unfit, preloaded
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(environment[SERVER])
    listener.listen()
    print("ready", flush=True)
    request = Server(listener, environment).serve()
    if request is not None:
        become_zygote(request)


if __name__ == "__main__":
    main()
