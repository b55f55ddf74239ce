"""Sources of notices that a node will leave, each asked periodically. ``--notices`` names the sources.

Theory. If a source cannot be asked, its last answer stays valid. Each source has its own period, which is a small
fraction of the warning time that it gives.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from holdfast.errors import ProtocolError, UsageError
from holdfast.runtime.node.kubernetes_watch import kubernetes_sources, require
from holdfast.runtime.node.notice_forms import (
    Foreseen,
    aws_action,
    azure_events,
    gcp_maintenance,
    gcp_preempted,
    slurm_end,
    slurm_job,
    slurm_node,
    users_word,
)

METADATA = "http://169.254.169.254"
HTTP_TIMEOUT_S, BODY_SIZE_BYTES_MAX = 2.0, 1 << 20
COMMAND_TIMEOUT_S = 60.0
GOOGLE, AZURE = {"Metadata-Flavor": "Google"}, {"Metadata": "true"}
OUTPUT_SIZE_BYTES_MAX = 4096
AWS_TOKEN_S, AWS_TOKEN_AGAIN_S = 21600, 20000.0
ABSENT = 404
KINDS = ("aws", "gcp", "azure", "slurm", "kubernetes", "file=PATH", "command=PATH")
WAYS = f"a comma-separated list of {', '.join(KINDS)}; aws, gcp and azure take =http://HOST:PORT; none"


class NoticeSource(Protocol):
    """A source of notices, which the agent asks every ``period_s`` seconds.

    Raises (``look``):
        OSError, ProtocolError: the source cannot be asked, or its answer is not understood.
    """

    name: str
    period_s: float

    async def look(self) -> list[Foreseen]:
        """Ask the source, and return the notices that are valid now."""


def _request(base: str, method: str, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
    from http.client import HTTPConnection, HTTPException  # slow to import: not at the start of each agent

    host = urlsplit(base)
    connection = HTTPConnection(host.hostname or "", host.port or 80, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request(method, host.path.rstrip("/") + path, headers=dict(headers))
        answer = connection.getresponse()
        return answer.status, answer.read(BODY_SIZE_BYTES_MAX)
    except HTTPException as error:
        raise ProtocolError(f"{base}{path}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


async def ask(base: str, path: str, headers: Mapping[str, str], method: str = "GET") -> bytes | None:
    """Return the body of the answer to a request for metadata; None if the path does not exist (404).

    Raises:
        OSError: the server does not answer.
        ProtocolError: the answer has an error status other than 404.
    """
    status, body = await asyncio.to_thread(_request, base, method, path, headers)
    if status == ABSENT:
        return None
    if status != 200:
        raise ProtocolError(f"{base}{path}: status {status}")
    return body


class Aws:
    """The notices about a spot instance of EC2, two minutes before its end. Requests use session tokens (IMDSv2)."""

    name, period_s = "aws", 5.0

    def __init__(self, base: str) -> None:
        self._base = base
        self._token, self._since_s = "", 0.0

    async def look(self) -> list[Foreseen]:
        """Return the notice in the instance metadata; empty without one."""
        if not self._token or time.monotonic() - self._since_s > AWS_TOKEN_AGAIN_S:
            ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(AWS_TOKEN_S)}
            token = await ask(self._base, "/latest/api/token", ttl, "PUT")
            self._token, self._since_s = (token or b"").decode("ascii", "replace"), time.monotonic()
        headers = {"X-aws-ec2-metadata-token": self._token} if self._token else {}
        try:
            body = await ask(self._base, "/latest/meta-data/spot/instance-action", headers)
        except ProtocolError:
            self._token = ""  # the token may have expired
            raise
        return [] if body is None else [aws_action(body, time.time())]


class Gcp:
    """The notices about a spot or preemptible machine of Google Cloud, and about maintenance that ends a machine.

    The warning time is 30 s, or 60 s before maintenance.
    """

    name, period_s = "gcp", 2.0

    def __init__(self, base: str) -> None:
        self._base = f"{base.rstrip('/')}/computeMetadata/v1/instance"
        self._since: dict[str, float] = {}

    async def look(self) -> list[Foreseen]:
        """Return the notices in the instance metadata.

        The warning time of a notice counts from its first appearance.
        """
        preempted = await ask(self._base, "/preempted", GOOGLE)
        maintenance = await ask(self._base, "/maintenance-event", GOOGLE)
        found = [
            notice
            for notice in (
                None if preempted is None else gcp_preempted(preempted),
                None if maintenance is None else gcp_maintenance(maintenance),
            )
            if notice is not None
        ]
        now_s = time.monotonic()
        self._since = {one.source: self._since.get(one.source, now_s) for one in found}
        return [
            Foreseen(one.source, max(0.0, one.left_s - (now_s - self._since[one.source]))) for one in found
        ]


class Azure:
    """The notices about scheduled events of Azure: 30 s before the end of a spot machine, minutes before other ends."""

    name, period_s = "azure", 2.0

    def __init__(self, base: str) -> None:
        self._base = f"{base.rstrip('/')}/metadata"
        self._machine = ""

    async def look(self) -> list[Foreseen]:
        """Return the notices for the scheduled events of this machine."""
        if not self._machine:
            path = "/instance/compute/name?api-version=2021-02-01&format=text"
            self._machine = (await ask(self._base, path, AZURE) or b"").decode("utf-8", "replace").strip()
        body = await ask(self._base, "/scheduledevents?api-version=2020-07-01", AZURE)
        return [] if body is None else azure_events(body, self._machine, time.time())


class SlurmEnd:
    """The notice about the end of a Slurm job's time limit. slurmctld is asked only twice a minute.

    The answer of slurmctld has precedence over ``SLURM_JOB_END_TIME``: not every version of Slurm sets this variable,
    and a time limit may be extended.
    """

    name, period_s = "slurm: end of the time", 30.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._job = environment.get("SLURM_JOB_ID", "")
        if task := environment.get(
            "SLURM_ARRAY_TASK_ID"
        ):  # SLURM_JOB_ID of one task is also the id of the whole array
            self._job = f"{environment.get('SLURM_ARRAY_JOB_ID', '')}_{task}"
        self._end = environment.get("SLURM_JOB_END_TIME", "")

    async def look(self) -> list[Foreseen]:
        """Return the notice for the job's end time; empty without a time limit."""
        if self._job:
            try:
                said = await scontrol("job", self._job)
                end = slurm_job(said, time.time())
            except (OSError, ProtocolError):
                if not self._end:
                    raise
                end = slurm_end(self._end, time.time())
        else:
            end = slurm_end(self._end, time.time())
        return [end] if end is not None else []


class Slurm:
    """The notice that Slurm drains this node. slurmctld is asked only twice a minute."""

    name, period_s = "slurm", 30.0

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._node = environment.get("SLURMD_NODENAME", "")

    async def look(self) -> list[Foreseen]:
        """Return the notice if Slurm drains this node; otherwise empty."""
        if not self._node:
            return []
        node = slurm_node(await scontrol("node", self._node))
        return [node] if node is not None else []


async def scontrol(kind: str, name: str) -> str:
    """Return the line that ``scontrol show`` prints about a job or a node, with times in Slurm's standard form.

    Raises:
        OSError: there is no scontrol.
        ProtocolError: scontrol fails or takes too long.
    """
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    code, said = await output_of(("scontrol", "--oneliner", "show", kind, name), environment=environment)
    if code != 0:
        raise ProtocolError(f"scontrol show {kind} {name}: code {code}: {said[:200]}")
    return said


class File:
    """The notice in a file that the user makes when the node is to leave. ``users_word`` describes its content."""

    period_s = 1.0

    def __init__(self, path: str) -> None:
        self.name = f"file {path}"
        self._path = Path(path)

    async def look(self) -> list[Foreseen]:
        """Return the notice in the file; empty if the file does not exist."""
        try:
            said_at = self._path.stat().st_mtime
            with self._path.open("rb") as file:
                text = file.read(OUTPUT_SIZE_BYTES_MAX).decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        return [users_word(text, f"file {self._path}", time.time(), said_at)]


class CommandNotices:
    """The notice that a command of the user prints: ``leave`` or a deadline. No output means that the node stays."""

    period_s = 10.0

    def __init__(self, command: str) -> None:
        self.name = f"command {command}"
        self._words = tuple(shlex.split(command))

    async def look(self) -> list[Foreseen]:
        """Run the command, and return the notice that it prints; empty without output."""
        code, said = await output_of(self._words)
        if code != 0:
            raise ProtocolError(f"{self._words[0]}: code {code}: {said[:200]}")
        return (
            [users_word(said, f"command {self._words[0]}", time.time(), time.time())] if said.strip() else []
        )


async def output_of(
    words: tuple[str, ...],
    timeout_s: float = COMMAND_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command, and return its exit code and the beginning of its output (stdout and stderr).

    A command that takes too long is killed with its process group. ``environment``: the variables of the command; None
    means the variables of this process.

    Raises:
        OSError: the command cannot be started.
        ProtocolError: the command takes too long.
    """
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env=environment,
    )  # fmt: skip
    try:
        said, _ = await asyncio.wait_for(process.communicate(), timeout_s)
        return process.returncode or 0, said[:OUTPUT_SIZE_BYTES_MAX].decode("utf-8", "replace").strip()
    except TimeoutError:
        raise ProtocolError(f"{words[0]} takes longer than {timeout_s:g} s") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def read_sources(spec: str, environment: Mapping[str, str]) -> list[NoticeSource]:
    """Return the notice sources that ``spec``, the value of ``--notices``, names.

    ``auto`` means Slurm in a Slurm job, and Kubernetes in a pod that can send requests to the API server.

    Raises:
        UsageError: ``spec`` names an unknown source, or one that cannot work here.
    """
    if spec == "auto":
        ours: list[NoticeSource] = [SlurmEnd(environment), Slurm(environment)]
        return [*(ours if environment.get("SLURM_JOB_ID") else ()), *kubernetes_sources(environment)]
    found: list[NoticeSource] = []
    for item in filter(None, (part.strip() for part in spec.split(","))):
        kind, _, place = item.partition("=")
        clouds: dict[str, Callable[[str], NoticeSource]] = {"aws": Aws, "gcp": Gcp, "azure": Azure}
        if kind in clouds and (not place or urlsplit(place).scheme == "http"):
            found.append(clouds[kind](place or METADATA))
        elif kind == "slurm" and not place:
            found += [SlurmEnd(environment), Slurm(environment)]
        elif kind == "kubernetes" and not place:
            require(environment)
            found.extend(kubernetes_sources(environment))
        elif kind == "file" and place:
            found.append(File(place))
        elif kind == "command" and place.strip():
            found.append(CommandNotices(place))
        elif item != "none":
            raise UsageError(f"--notices {item}: no such source of notices", hint=WAYS)
    return found
