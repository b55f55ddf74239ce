"""The report of a node's status to Kubernetes: annotations of its pod, and the status endpoint of a Kubeflow TrainJob.

Theory. Each agent annotates its own pod. So an agent needs no rights for another pod, a spare pod also has a state, and
the controller may run on any node. The status of a TrainJob is one value of the whole job, which the node with rank 0
sends. Both are sent when the state changes, and otherwise every 30 s if the step has changed. After a refusal nothing
more is sent to that target. A failure is logged once for each reason. Training never waits for a send.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from holdfast.event_log import EventSink
from holdfast.runtime.node.kubernetes_watch import (
    FORBIDDEN,
    ApiFailure,
    PodPlace,
    failure_of,
    open_api,
)
from holdfast.runtime.node.node_status import NodeStatus

STEP, STATE = "holdfast.io/step", "holdfast.io/state"
TRAINJOB = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
"""Variables of Kubeflow Trainer: the address of the endpoint, and the paths of a certificate and a token."""
TRAINJOB_OFF = "HOLDFAST_TRAINJOB_STATUS"
LOOK_S, AGAIN_S = 1.0, 30.0
CONNECT_S, ANSWER_S = 2.0, 3.0  # an agent that ends may wait for one send
NOT_FOUND, INVALID = 404, 422
REFUSALS = frozenset({FORBIDDEN, NOT_FOUND, INVALID})


class StatusPlace(Protocol):
    """A target to which the status of a node is sent. ``gap_s``: the shortest time between two sends, in seconds.

    ``send`` blocks for a few seconds at most. It may raise any exception of the HTTP or Kubernetes client.
    """

    name: str
    gap_s: float

    def wants(self, status: NodeStatus) -> bool:
        """Return True if this node has to send its status to this target."""
        ...

    def send(self, status: NodeStatus) -> None:
        """Send ``status`` once."""
        ...


class PodAnnotations:
    """The target for annotations: ``holdfast.io/step`` and ``holdfast.io/state`` of the pod of this process."""

    gap_s = LOOK_S

    def __init__(self, place: PodPlace, environment: Mapping[str, str]) -> None:
        self.name = f"pod {place.namespace}/{place.pod}"
        self._place = place
        self._environment = environment
        self._api: Any = None

    def wants(self, status: NodeStatus) -> bool:
        """Return True always, because each pod annotates itself."""
        return True

    def send(self, status: NodeStatus) -> None:
        """Write the status into the pod's annotations.

        After an error, the next call reads the service account's token again.
        """
        api = self._api if self._api is not None else open_api(self._place, self._environment)
        self._api = None
        body = {"metadata": {"annotations": {STEP: str(status.step), STATE: status.state}}}
        with api.patch_namespaced_pod(
            self._place.pod, self._place.namespace, body, _preload_content=False,
            _request_timeout=(CONNECT_S, ANSWER_S),
        ) as answer:  # fmt: skip
            answer.read()
        self._api = api


class TrainJobEndpoint:
    """The status endpoint of Kubeflow Trainer (2.2 and newer, feature gate ``TrainJobStatus``)."""

    name, gap_s = "TrainJob status", 5.0

    def __init__(self, url: str, certificate: str, token: str) -> None:
        self._url = url
        self._certificate = certificate
        self._token = Path(token)

    def wants(self, status: NodeStatus) -> bool:
        """Return True on the node with rank 0, after its first step."""
        return status.first and status.step > 0

    def send(self, status: NodeStatus) -> None:
        """Send the status to the endpoint. The token is read from its file each time, because the file changes."""
        metrics = [
            {"name": "holdfast_step", "value": str(status.step)},
            {"name": "holdfast_state", "value": status.state},
        ]
        now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        body = msgspec.json.encode({"trainerStatus": {"metrics": metrics, "lastUpdatedTime": now}})
        headers = {
            "Authorization": f"Bearer {self._token.read_text().strip()}",
            "Content-Type": "application/json",
        }
        from urllib.request import Request, urlopen  # slow to import: not at the start of each agent

        request = Request(self._url, body, headers, method="POST")
        context = ssl.create_default_context(cafile=self._certificate)
        with urlopen(request, timeout=CONNECT_S, context=context) as answer:
            answer.read()


class _Sent:
    """The sends to one target: the last status that arrived, the time of the last try and its failure."""

    def __init__(self, place: StatusPlace) -> None:
        self.place = place
        self.status: NodeStatus | None = None
        self.at_s = float("-inf")
        self.failure = ""

    def is_due(self, status: NodeStatus, now_s: float) -> bool:
        since_s = now_s - self.at_s
        if not self.place.wants(status) or since_s < self.place.gap_s:
            return False
        if self.status is None or self.failure:
            return since_s >= AGAIN_S  # the first one is due at once
        return status.state != self.status.state or (since_s >= AGAIN_S and status.step != self.status.step)


class StatusPublisher:
    """The sender of this node's status to its targets in Kubernetes: the pod's annotations and the TrainJob.

    Args:
        places: the targets; if empty, nothing is sent.
        read: returns the present status.
        journal: the event log of this node.
    """

    def __init__(
        self, places: Sequence[StatusPlace], read: Callable[[], NodeStatus], journal: EventSink
    ) -> None:
        self._sent = [_Sent(place) for place in places]
        self._read = read
        self._journal = journal

    @classmethod
    def of(
        cls,
        notices: str,
        environment: Mapping[str, str],
        read: Callable[[], NodeStatus],
        journal: EventSink,
    ) -> Self:
        """Return the publisher of this process.

        It has targets only in a pod, and only if ``--notices`` is ``auto`` or names ``kubernetes``.
        """
        return cls(status_places(notices, environment), read, journal)

    async def watch(self) -> None:
        """Send the status to each target whenever it is due, until cancelled."""
        while self._sent:
            await self.turn(self._read())
            await asyncio.sleep(LOOK_S)

    async def end(self) -> None:
        """Send the state ``ended`` to each target at which an earlier status has arrived."""
        ended = self._read()._replace(state="ended")
        await asyncio.gather(
            *(self._send(one, ended) for one in self._sent if one.status and not one.failure)
        )

    async def turn(self, status: NodeStatus) -> None:
        """Send ``status`` to each target for which it is due now."""
        now_s = time.monotonic()
        await asyncio.gather(*(self._send(one, status) for one in self._sent if one.is_due(status, now_s)))

    async def _send(self, one: _Sent, status: NodeStatus) -> None:
        one.at_s = time.monotonic()
        try:
            await asyncio.to_thread(one.place.send, status)
            one.status, one.failure = status, ""
        except Exception as error:
            failure = _failure_of(error)
            if failure.text != one.failure:
                one.failure = failure.text
                over = failure.status in REFUSALS
                self._journal.append(
                    "status_not_sent", {"place": one.place.name, "error": failure.text, "given_up": over}
                )
            if failure.status in REFUSALS:
                self._sent.remove(one)


def status_places(notices: str, environment: Mapping[str, str]) -> list[StatusPlace]:
    """Return the targets of this process: its pod, and its TrainJob if that offers an endpoint."""
    place = PodPlace.of(environment)
    if place is None or not {"auto", "kubernetes"} & {word.strip() for word in notices.split(",")}:
        return []
    found: list[StatusPlace] = [PodAnnotations(place, environment)]
    trainjob = [environment.get(name, "") for name in TRAINJOB]
    if all(trainjob) and environment.get(TRAINJOB_OFF) != "0":
        found.append(TrainJobEndpoint(*trainjob))
    return found


def _failure_of(error: Exception) -> ApiFailure:
    from urllib.error import HTTPError, URLError

    if isinstance(error, HTTPError):
        return ApiFailure(error.code, f"status {error.code} ({error.reason})")
    if isinstance(error, URLError):
        return ApiFailure(0, f"no answer ({type(error.reason).__name__})")
    return failure_of(error)
