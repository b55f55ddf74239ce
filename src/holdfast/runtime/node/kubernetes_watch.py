"""Watches of this node's Node and Pod through the API of Kubernetes, and the two notice sources that use them.

Theory. Each of the two objects is listed once, then watched from the version of the list. A stream that ends is opened
again at the last version that it has shown, at most once a second. If the server no longer has that version (410), the
object is listed again. After an error the pause doubles, up to a minute. If the token is refused (401), it is read
again from its file, which the kubelet replaces. A missing permission (403) ends the watch. From the second error in a
row on, the object is listed again after the pause. If that list fails as well, the source fails, and the object that
was last seen stays valid.

A watch blocks in the official client, so each watch has one thread. The thread is a daemon, so that the end of the
process does not wait for the server.
"""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import msgspec

from holdfast.errors import ProtocolError, UsageError
from holdfast.runtime.node.kubernetes_notices import HEALTH, news, node_notices, pod_notices
from holdfast.runtime.node.notice_forms import Foreseen

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
ACCOUNT_VARIABLE = "HOLDFAST_SERVICE_ACCOUNT"
DOWNWARD = {"NODE_NAME": "spec.nodeName", "POD_NAME": "metadata.name", "POD_NAMESPACE": "metadata.namespace"}
"""Variables that the manifests of ``holdfast submit k8s`` set from fields of the pod, through the downward API."""
SERVER = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
INSTALL = "pip install 'holdfast[kubernetes]' in the image"
CONNECT_S, ANSWER_S = 5.0, 10.0
STREAM_S = 120  # the server is asked to close a stream after this time
SILENCE_S = STREAM_S + 30.0
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
FAILURES_TO_REPORT = 2
GONE, UNAUTHORIZED, FORBIDDEN = 410, 401, 403

Watched = Literal["node", "pod"]


class PodPlace(NamedTuple):
    """The names of this process's node, pod and namespace, and the directory with the token of its service account."""

    node: str
    pod: str
    namespace: str
    account: Path

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """Return the values that ``environment`` describes. Return None outside of a pod, or if there is no token."""
        if missing_in(environment):
            return None
        node, pod, namespace = (environment[name] for name in DOWNWARD)
        return cls(node, pod, namespace, _account(environment))


def _account(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(ACCOUNT_VARIABLE) or ACCOUNT)


def missing_in(environment: Mapping[str, str]) -> str:
    """Return what this process lacks to send requests to the API server, in words; empty if it lacks nothing."""
    for name in (*SERVER, *DOWNWARD):
        if not environment.get(name):
            return f"the variable {name} is not set"
    token = _account(environment) / "token"
    return "" if token.is_file() else f"there is no token of a service account at {token}"


def require(environment: Mapping[str, str]) -> None:
    """Raise an error if ``--notices kubernetes`` cannot work in this process.

    Raises:
        UsageError: the process is not in a pod, a variable or the token is missing, or the client is not installed.
    """
    if missing := missing_in(environment):
        raise UsageError(
            f"--notices kubernetes: {missing}",
            hint="holdfast submit k8s sets the variables and mounts the token; outside of a pod leave it out",
        )
    if not is_installed():
        raise UsageError("--notices kubernetes: the Kubernetes client is not installed", hint=INSTALL)


def is_installed() -> bool:
    """Return True if the official Kubernetes client can be imported."""
    return importlib.util.find_spec("kubernetes") is not None


def open_api(place: PodPlace, environment: Mapping[str, str]) -> Any:
    """Return the Kubernetes client (``CoreV1Api``), with the token that is in its file now. The import takes a second.

    Raises:
        ProtocolError: the client is not installed, or the files of the service account are missing or empty.
    """
    if not is_installed():
        raise ProtocolError(f"the Kubernetes client is not installed: {INSTALL}")
    try:
        from kubernetes import client
        from kubernetes.config.config_exception import ConfigException
        from kubernetes.config.incluster_config import InClusterConfigLoader
    except ImportError as error:
        raise ProtocolError(f"the Kubernetes client cannot be imported: {error}") from error
    configuration = client.Configuration()
    configuration.retries = False  # the watch itself repeats, with its own pauses
    files = (str(place.account / "token"), str(place.account / "ca.crt"))
    try:
        InClusterConfigLoader(*files, environ=environment).load_and_set(configuration)
    except (ConfigException, OSError) as error:
        raise ProtocolError(f"the service account at {place.account}: {error}") from error
    return client.CoreV1Api(client.ApiClient(configuration))


class ApiFailure(NamedTuple):
    """An error of a request to the API server.

    ``status``: the HTTP status of the answer; 0 if no answer came. ``text``: the cause in words, equal for all errors
    of one cause.
    """

    status: int
    text: str


def failure_of(error: Exception) -> ApiFailure:
    """Convert an exception of the Kubernetes client to an ``ApiFailure``."""
    if isinstance(error, ProtocolError):
        return ApiFailure(0, error.message)
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    # After a TLS error the client raises while it handles its own ApiException, because that exception has no body.
    cause = error.__context__ if isinstance(error.__context__, ApiException) else error
    if isinstance(cause, ApiException):
        status, reason = int(cause.status or 0), (str(cause.reason).splitlines() or [""])[0]
        return ApiFailure(status, f"status {status} ({reason})" if status else f"no answer ({reason})")
    if isinstance(error, HTTPError | OSError):
        return ApiFailure(0, f"no answer ({type(error).__name__})")
    return ApiFailure(0, f"{type(error).__name__}: {error}"[:200])


class Sight(NamedTuple):
    """The result of a watch so far.

    ``raw``: the newest object, as decoded JSON; None if no object was seen yet. ``gone``: True if the object was
    deleted.
    ``failure``: why the watch fails; empty if it does not fail.
    """

    raw: dict[str, Any] | None = None
    gone: bool = False
    failure: str = ""


class ObjectWatch:
    """The watch of one Kubernetes object, in a thread that starts at the first ``look``.

    Args:
        kind: the object to watch: the Node or the Pod of this process.
        place: the names of this process's node and pod, and the directory of its token.
        environment: the environment of this process, which has the address of the API server.
    """

    def __init__(self, kind: Watched, place: PodPlace, environment: Mapping[str, str]) -> None:
        self._kind = kind
        self._place = place
        self._environment = environment
        self._api: Any = None
        self._sight = Sight()
        self._version = ""  # empty: list first
        self._failed = 0  # failures in a row
        self._thread: threading.Thread | None = None

    def look(self) -> Sight:
        """Return the result of the watch so far. The first call starts the watch."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"kubernetes {self._kind}", daemon=True)
            self._thread.start()
        return self._sight

    @property
    def what(self) -> str:
        """The watched object in words, such as ``pod NAMESPACE/NAME``."""
        place = self._place
        return f"node {place.node}" if self._kind == "node" else f"pod {place.namespace}/{place.pod}"

    def _run(self) -> None:
        while True:
            try:
                self._once()
                self._failed, pause_s = 0, PAUSE_S
            except Exception as error:
                failure = failure_of(error)
                if failure.status == FORBIDDEN:
                    text = f"no permission to watch the {self.what}: {failure.text}; it is not watched"
                    self._sight = self._sight._replace(failure=text)
                    return
                pause_s = self._failed_with(failure)
            time.sleep(pause_s * random.uniform(0.5, 1.0))

    def _once(self) -> None:
        """Follow one stream of changes to its end. If no version of the object is known, list the object first."""
        if self._api is None:
            self._api = open_api(self._place, self._environment)
        if not self._version:
            self._list()
        for event in self._stream():
            self._failed = 0
            # Also the version of a bookmark event, which older clients do not keep.
            self._version = str(event["raw_object"]["metadata"]["resourceVersion"])
            if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                self._saw(event["raw_object"], deleted=event["type"] == "DELETED")

    def _failed_with(self, failure: ApiFailure) -> float:
        """Record a failure, and return the pause after it in seconds."""
        if failure.status == GONE:  # no failure: the server no longer has the version
            self._version = ""
            return PAUSE_S
        if failure.status == UNAUTHORIZED:
            self._api = None
        self._failed += 1
        if self._failed >= FAILURES_TO_REPORT:
            if not self._version:
                text = f"the API server does not show the {self.what}: {failure.text}"
                self._sight = self._sight._replace(failure=text)
            self._version = ""
        return min(PAUSE_S_MAX, PAUSE_S * float(2 ** min(self._failed - 1, 10)))

    def _arguments(self) -> tuple[Any, tuple[str, ...], dict[str, str]]:
        if self._kind == "node":
            return self._api.list_node, (), {"field_selector": f"metadata.name={self._place.node}"}
        only = {"field_selector": f"metadata.name={self._place.pod}"}
        return self._api.list_namespaced_pod, (self._place.namespace,), only

    def _list(self) -> None:
        call, words, only = self._arguments()
        answer = call(*words, **only, _preload_content=False, _request_timeout=(CONNECT_S, ANSWER_S))
        with answer:
            listed = msgspec.json.decode(answer.data)
        if items := listed["items"]:
            self._saw(items[0], deleted=False)
        elif self._sight.raw is not None:
            self._sight = Sight(self._sight.raw, gone=True)
        else:
            raise ProtocolError(f"the cluster has no {self.what}")
        self._version = str(listed["metadata"]["resourceVersion"])

    def _stream(self) -> Iterator[dict[str, Any]]:
        from kubernetes.watch import Watch

        call, words, only = self._arguments()
        yield from Watch(return_type="object").stream(
            call, *words, **only, resource_version=self._version, allow_watch_bookmarks=True,
            timeout_seconds=STREAM_S, _request_timeout=(CONNECT_S, SILENCE_S),
        )  # fmt: skip

    def _saw(self, raw: dict[str, Any], *, deleted: bool) -> None:
        """Keep ``raw`` as the newest object.

        If a pod with another uid now has the name of this process's pod, the pod of this process is gone. A node with
        another uid is still this host, registered again.
        """
        before, is_pod = self._sight, self._kind == "pod"
        if is_pod and before.raw is not None and _uid(before.raw) != _uid(raw):
            self._sight = Sight(before.raw, gone=True)
        else:
            self._sight = Sight(raw, gone=deleted or (is_pod and before.gone))


class KubernetesNode:
    """The notices about the Kubernetes Node of this process: taints, a cordon, its deletion, and bad conditions."""

    name, period_s = "kubernetes node", 1.0

    def __init__(self, node: ObjectWatch, pod: ObjectWatch) -> None:
        self._node = node
        self._pod = pod  # its tolerations count
        self._known: set[str] | None = None

    async def look(self) -> list[Foreseen]:
        """Return the notices in the newest Node object (see ``NoticeSource``)."""
        node, pod = self._node.look(), self._pod.look()
        _raise(node)
        if node.raw is None or not (pod.raw or pod.failure):
            return []
        found = node_notices(node.raw, pod.raw)
        if self._known is None:
            self._known = {one.source for one in found if one.source.startswith(HEALTH)}
        if node.gone:
            found = [Foreseen("Kubernetes: the node was deleted")]
        return news(found, self._known)


class KubernetesPod:
    """The notices about the Pod of this process: its deletion, with a deadline, and its disruption."""

    name, period_s = "kubernetes pod", 1.0

    def __init__(self, pod: ObjectWatch) -> None:
        self._pod = pod

    async def look(self) -> list[Foreseen]:
        """Return the notices in the newest Pod object (see ``NoticeSource``)."""
        pod = self._pod.look()
        _raise(pod)
        if pod.gone:
            return [Foreseen("Kubernetes: the pod was deleted", 0.0)]
        return [] if pod.raw is None else pod_notices(pod.raw, time.time())


def kubernetes_sources(environment: Mapping[str, str]) -> list[KubernetesNode | KubernetesPod]:
    """Return the notice sources for the Node and the Pod of this process; empty outside of a pod.

    Both sources share one watch of the Pod.
    """
    place = PodPlace.of(environment)
    if place is None:
        return []
    pod = ObjectWatch("pod", place, environment)
    if not is_installed():
        return [KubernetesPod(pod)]  # one source reports it
    return [KubernetesNode(ObjectWatch("node", place, environment), pod), KubernetesPod(pod)]


def _raise(sight: Sight) -> None:
    if sight.failure:
        raise ProtocolError(sight.failure)


def _uid(raw: Mapping[str, Any]) -> object:
    return raw["metadata"].get("uid")
