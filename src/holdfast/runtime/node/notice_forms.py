"""The parsers of the answers of notice sources: clouds, Slurm, a file or a command of the user. Pure code.

Theory. A notice announces that a node will leave. Each source has its own form of answers and of times. Each answer is
converted to two values: whether the node leaves, and by when. An answer in an unknown form is an error of the source.
It is neither a notice nor the withdrawal of one. ``now`` is Unix time in seconds.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TypeVar

import msgspec

from holdfast.core.protocol.notices import NO_DEADLINE
from holdfast.errors import ProtocolError

GCP_LEAD_S, GCP_MAINTENANCE_LEAD_S = 30.0, 60.0
SLURM_END = "Slurm: end of the time"
AZURE_LEAVES = frozenset({"Preempt", "Terminate", "Reboot", "Redeploy"})
"""Kinds of scheduled events that end or restart the machine. The kind ``Freeze`` only pauses it for seconds."""
_SPAN = re.compile(r"\+?(\d+(?:\.\d+)?)\s*s?")
_EPOCH_S_LEAST = 1e9


class Foreseen(msgspec.Struct, frozen=True):
    """One notice that is valid now. ``left_s``: seconds until the node leaves; NO_DEADLINE if that time is not known.

    ``source`` names the source and the cause. ``whole_job``: True if the whole job ends, and not only this node.
    """

    source: str
    left_s: float = NO_DEADLINE
    whole_job: bool = False


T = TypeVar("T")


class _AwsAction(msgspec.Struct):
    action: str
    time: datetime


class _AzureEvent(msgspec.Struct, rename="pascal"):
    event_type: str
    resources: list[str] = []
    not_before: str = ""


class _AzureEvents(msgspec.Struct, rename="pascal"):
    events: list[_AzureEvent] = []


def _left_s(then: datetime, now: float) -> float:
    zoned = then if then.tzinfo else then.replace(tzinfo=UTC)
    return max(0.0, zoned.timestamp() - now)


def aws_action(body: bytes, now: float) -> Foreseen:
    """Return the notice in the answer ``spot/instance-action``, which exists only if AWS will take the instance away.

    Raises:
        ProtocolError: the answer has another form.
    """
    action = _decoded(body, _AwsAction, "spot/instance-action")
    return Foreseen(f"AWS spot: {action.action}", _left_s(action.time, now))


def gcp_preempted(body: bytes) -> Foreseen | None:
    """Return the notice in the answer ``instance/preempted``, which is TRUE 30 s before the end; None for FALSE.

    Raises:
        ProtocolError: the answer has another form.
    """
    word = body.strip().upper()
    if word not in (b"TRUE", b"FALSE"):
        raise ProtocolError(f"instance/preempted says {body[:80]!r}, neither TRUE nor FALSE")
    return Foreseen("GCP: preempted", GCP_LEAD_S) if word == b"TRUE" else None


def gcp_maintenance(body: bytes) -> Foreseen | None:
    """Return the notice in the answer ``instance/maintenance-event``; None for a live migration."""
    word = body.strip()
    if word == b"TERMINATE_ON_HOST_MAINTENANCE":
        return Foreseen("GCP: host maintenance", GCP_MAINTENANCE_LEAD_S)
    return None


def azure_events(body: bytes, name: str, now: float) -> list[Foreseen]:
    """Return the notices of the scheduled events that end or restart the machine ``name``.

    Raises:
        ProtocolError: the answer has another form.
    """
    from email.utils import parsedate_to_datetime  # here: an agent outside of Azure need not import it

    found = []
    for event in _decoded(body, _AzureEvents, "scheduledevents").events:
        if event.event_type not in AZURE_LEAVES or (event.resources and name not in event.resources):
            continue
        left_s = 0.0  # an event without a time has begun
        if event.not_before:
            try:
                left_s = _left_s(parsedate_to_datetime(event.not_before), now)
            except ValueError as error:
                raise ProtocolError(f"scheduledevents: NotBefore {event.not_before[:80]!r}") from error
        found.append(Foreseen(f"Azure: {event.event_type}", left_s))
    return found


def slurm_end(variable: str, now: float) -> Foreseen | None:
    """Return the notice in the variable ``SLURM_JOB_END_TIME`` (Unix time); None for 0 or empty (no limit).

    Raises:
        ProtocolError: the value has another form.
    """
    if not variable.strip() or variable.strip() == "0":
        return None
    if not variable.strip().isdecimal():
        raise ProtocolError(f"SLURM_JOB_END_TIME is {variable[:80]!r}, no Unix time")
    return Foreseen(SLURM_END, max(0.0, int(variable) - now), whole_job=True)


def slurm_job(line: str, now: float) -> Foreseen | None:
    """Return the notice of a job's end in a line of ``scontrol --oneliner show job``; None without a time limit.

    The times in the line are in the time zone of this process.

    Raises:
        ProtocolError: the line has no end of a job.
    """
    end = re.search(r"\bEndTime=(\S+)", line)
    if end is None:
        raise ProtocolError(f"scontrol shows no end of the job: {line[:80]!r}")
    if end[1] in ("Unknown", "None", "NONE") or re.search(r"\bTimeLimit=(UNLIMITED|INFINITE)\b", line):
        return None
    try:
        end_s = datetime.fromisoformat(end[1]).timestamp()
    except ValueError:
        raise ProtocolError(
            f"scontrol shows {end[1][:80]!r} as the end of the job, no date with a time"
        ) from None
    return Foreseen(SLURM_END, max(0.0, end_s - now), whole_job=True)


def slurm_node(line: str) -> Foreseen | None:
    """Return the notice in a line of ``scontrol --oneliner show node`` if the node is drained; otherwise None.

    Raises:
        ProtocolError: the line has no state of a node.
    """
    state = re.search(r"\bState=(\S+)", line)
    if state is None:
        raise ProtocolError(f"scontrol shows no state of the node: {line[:80]!r}")
    words = set(state[1].upper().replace("*", "").split("+"))
    if not words & {"DRAIN", "DRAINING", "DRAINED"}:
        return None
    reason = re.search(r"\bReason=(.*?)(?: \[|$)", line)
    return Foreseen(f"Slurm: drained{f' ({reason[1].strip()[:80]})' if reason else ''}")


def users_word(text: str, source: str, now: float, said_at: float) -> Foreseen:
    """Return the notice in the text of a user's file or command.

    Args:
        text: "leave" or an empty text means no deadline. Any other text is the deadline: seconds from ``said_at``, a
            Unix time, or a date and time (by default in UTC).
        source: the name of the file or command.
        now: the Unix time of the read.
        said_at: the Unix time from which the seconds in ``text`` count.

    Raises:
        ProtocolError: the text has another form.
    """
    word = text.strip().split("\n", 1)[0].strip()
    if not word or word.lower() == "leave":
        return Foreseen(source)
    if span := _SPAN.fullmatch(word):
        number = float(span[1])
        then_s = number if number >= _EPOCH_S_LEAST else said_at + number
        return Foreseen(source, max(0.0, then_s - now))
    try:
        return Foreseen(source, _left_s(datetime.fromisoformat(word), now))
    except ValueError:
        raise ProtocolError(
            f"{source} says {word[:80]!r}: neither empty, nor seconds, nor a date with a time (UTC)"
        ) from None


def _decoded(body: bytes, kind: type[T], what: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{what}: {error}") from error
