"""The start of a zygote as a fork of the server of tests, in an agent that a test has started.

The directory of this file is the last one of the PYTHONPATH in a test of processes, so each process of Python imports
the file at its start. It does nothing in a process other than an agent. In an agent it replaces ``subprocess.Popen`` by
a subclass, which asks the server (``tests/zygotes/server.py``) for the zygote. If the server refuses, the zygote is
executed as usual.
"""

from __future__ import annotations

import os
import sys
from typing import Any

AGENT = "holdfast.runtime.agent.agentd"
ZYGOTE = "holdfast.runtime.agent.zygote"
SERVER = "TEST_ZYGOTES"
"""An environment variable: the socket of the server."""
REQUEST_SIZE_MAX_BYTES = 65_536
ENTERED = ("net", "mnt")
"""The namespaces of a host of the tests (``ip netns exec``): a fork enters those of its agent."""
_FILES = ("cgroup", "coredump_filter", "limits", "oom_score_adj", "personality", "timerslack_ns")
_STATUS = (
    "Cap",
    "Cpus_allowed",
    "Gid",
    "Groups",
    "Mems_allowed",
    "NoNewPrivs",
    "Seccomp",
    "SigBlk",
    "Uid",
    "Umask",
)


def surroundings() -> dict[str, str]:
    """Return what a process inherits and a fork of the server cannot take over."""
    namespaces = set(os.listdir("/proc/self/ns")) - set(ENTERED)
    found = {name: os.readlink(f"/proc/self/ns/{name}") for name in namespaces}
    found["root"] = os.readlink("/proc/self/root")
    for name in _FILES:
        try:
            with open(f"/proc/self/{name}") as file:
                found[name] = file.read()
        except OSError:  # not in this kernel, or not readable here
            continue
    with open("/proc/self/status") as file:
        found["status"] = "".join(line for line in file if line.startswith(_STATUS))
    found["priority"] = f"{os.nice(0)} {os.sched_getscheduler(0)}"
    return found


def ask_for_forks() -> None:
    """Let this process ask the server for its zygotes."""
    import json
    import select
    import signal
    import socket
    import subprocess

    def ask(argv: list[str], cwd: str | None, env: dict[str, str], log: int) -> tuple[Any, int, int] | None:
        """Return the connection to the server, the pid and a pidfd of the zygote; None: it is refused."""
        request = {
            "agent": os.getpid(),
            "argv": argv,
            "cwd": cwd or os.getcwd(),
            "env": env,
            "ignored": [n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN],
            "surroundings": surroundings(),
        }
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(os.environ[SERVER])
            socket.send_fds(connection, [json.dumps(request).encode()], [log])
            pid, pidfds, _, _ = socket.recv_fds(connection, REQUEST_SIZE_MAX_BYTES, 1)
        except OSError:  # the server has ended, or is another user's
            pid, pidfds = b"", []
        if not pidfds:
            connection.close()
            return None
        return connection, int(pid), pidfds[0]

    class Popen(subprocess.Popen[Any]):
        """A process. A zygote is a fork of the server. The server reaps the zygote, then sends its exit status."""

        _connection: Any = None
        _pidfd = -1

        def __init__(self, args: Any, **options: Any) -> None:
            if args[1:3] == ["-m", ZYGOTE]:
                answer = ask(args, options["cwd"], options["env"], options["stdout"].fileno())
                if answer is not None:
                    self.args, self.returncode = args, None
                    self._connection, self.pid, self._pidfd = answer
                    return
            super().__init__(args, **options)

        def poll(self) -> int | None:
            if self._connection is None:
                return super().poll()
            if self.returncode is None and select.select([self._pidfd], (), (), 0)[0]:
                self.returncode = int(self._connection.recv(REQUEST_SIZE_MAX_BYTES) or -signal.SIGKILL)
            return self.returncode

        def kill(self) -> None:
            if self._connection is None:
                super().kill()
            elif self.poll() is None:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    subprocess.Popen = Popen  # type: ignore[assignment, misc]


if AGENT in sys.orig_argv and SERVER in os.environ:
    ask_for_forks()
