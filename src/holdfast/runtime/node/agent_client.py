"""The start of an agent, and requests to an agent, for a launcher or a command line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from holdfast.core.protocol.messages import Ack, ExitRun, StopRun
from holdfast.core.protocol.notices import DrainNode
from holdfast.errors import AuthError, FaultError, ProtocolError
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.service_names import agent_of
from holdfast.runtime.node.rundir import Endpoint, RunDir, open_log
from holdfast.sealing import Secret
from holdfast.wire import MESSAGES, WireMessage

RETRY_S = 0.05


def start_agent(run_dir: Path) -> subprocess.Popen[bytes]:
    """Start the agent of an existing run directory with saved settings, in a new process session.

    The exit code of the agent is the exit code of the run. The agent watches the process that calls this function. When
    that process dies, the agent lets the run save and leave.
    """
    with os.fdopen(open_log(run_dir / "agent.log"), "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "holdfast.runtime.agent.agentd", str(run_dir)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


class AgentLink:
    """The requests to the agent of a run.

    Each ``request`` opens a new connection, so it also reaches the successor of a dead agent.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run = RunDir(run_dir)

    def request(self, message: ExitRun | StopRun | DrainNode, *, timeout_s: float = 5.0) -> Ack:
        """Send a request to the agent, and return its answer.

        Raises:
            AuthError: the token in the run directory is not the agent's token, or cannot be read.
            FaultError: no agent answers: the run is over, or its agent just died.
        """
        secret = self._run.secret()
        deadline_s = time.monotonic() + timeout_s
        reason = "it never published where it listens"
        while time.monotonic() < deadline_s:
            endpoint = self._run.read_endpoint("agent")
            if endpoint is not None:
                try:
                    return self._ask(endpoint, secret, message, deadline_s)
                except AuthError:
                    raise
                except (OSError, ProtocolError) as error:
                    reason = str(error)
            time.sleep(RETRY_S)
        raise FaultError(
            f"no agent of {self._run.path} answers: {reason}",
            hint=f"holdfast status {shlex.quote(str(self._run.path))}",
        )

    def _ask(self, to: Endpoint, secret: Secret, message: WireMessage, deadline_s: float) -> Ack:
        left_s = max(RETRY_S, deadline_s - time.monotonic())
        channel = BlockingChannel.connect(MESSAGES, to.at, secret, agent_of(to.node), "cli", timeout_s=left_s)
        try:
            channel.send(message)
            while True:
                answer = channel.receive(max(0.0, deadline_s - time.monotonic()))
                if isinstance(answer, Ack):
                    return answer
        finally:
            channel.close()
