"""A fake API server of Kubernetes over TLS, for the real client: lists, watch streams in chunks, patches of pods.

It keeps objects as JSON with resource versions, and can be ordered to close its streams, to forget old versions (410),
to change its token (401), to refuse rights (403) and to fail (any other status). It also has the status endpoint of
Kubeflow Trainer.
"""

from __future__ import annotations

import copy
import json
import ssl
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Object = dict[str, Any]
TRAINJOB_PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/train/trainjobs/bert/status"


def write_certificate(directory: Path) -> None:
    """Write ``ca.crt`` and ``key.pem``: a certificate for 127.0.0.1 that is its own authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake API server")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(IPv4Address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (directory / "ca.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


class ApiServer:
    """The server and its objects; use it as a context manager.

    Args:
        directory: gets the files of a service account: ``token``, ``ca.crt``.

    Attributes:
        asked: ``METHOD path`` of each request, with ``watch`` for a stream.
        patches: the annotations of each patch, in order.
        posted: the bodies that came to the status endpoint of the TrainJob.
        forbidden: ``nodes``, ``pods`` or ``patch``, which are answered with 403.
        failing: the status of every answer; 0: none.
        has_trainjobs: false, the endpoint answers 404.
    """

    def __init__(self, directory: Path) -> None:
        self.account = directory
        self.asked: list[str] = []
        self.patches: list[dict[str, str]] = []
        self.posted: list[Object] = []
        self.forbidden: set[str] = set()
        self.failing = 0
        self.has_trainjobs = True
        self.changed = threading.Condition()
        self._objects: dict[tuple[str, str], Object] = {}
        self._events: list[tuple[int, str, str, Object]] = []  # version, resource, type, object
        self._version = 100
        self._oldest = 0  # versions before it are forgotten
        self._closings = 0
        directory.mkdir(exist_ok=True)
        write_certificate(directory)
        self.new_token("first")

    def __enter__(self) -> ApiServer:
        fake = self

        class Bound(Answers):
            api = fake

        self._server = QuietServer(("127.0.0.1", 0), Bound)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.account / "ca.crt", self.account / "key.pem")
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close_streams()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def environment(self, node: str, pod: str) -> dict[str, str]:
        """The variables of a pod whose API server this is."""
        return {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_address[1]),
            "HOLDFAST_SERVICE_ACCOUNT": str(self.account),
            "NODE_NAME": node,
            "POD_NAME": pod,
            "POD_NAMESPACE": "train",
        }

    def trainjob(self) -> dict[str, str]:
        """The variables that Kubeflow Trainer sets."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self._server.server_address[1]}{TRAINJOB_PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.account / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.account / "token"),
        }

    # ------------------------------------------------------------ orders of a test

    def put(self, resource: str, name: str, change: Mapping[str, Any] | None = None) -> None:
        """Make an object, or merge a change into it. ``resource``: ``nodes`` or ``pods``."""
        with self.changed:
            known = self._objects.get((resource, name))
            made = copy.deepcopy(known) if known else {"metadata": {"name": name, "uid": f"uid-{name}"}}
            merge(made, change or {})
            self._store(resource, name, made, "MODIFIED" if known else "ADDED")

    def delete(self, resource: str, name: str) -> None:
        """Remove an object."""
        with self.changed:
            self._store(resource, name, self._objects.pop((resource, name)), "DELETED")

    def bookmark(self, resource: str) -> int:
        """Send a bookmark with a new version to every stream, and return the version."""
        with self.changed:
            self._version += 1
            made = {"metadata": {"resourceVersion": str(self._version)}}
            self._events.append((self._version, resource, "BOOKMARK", made))
            self.changed.notify_all()
            return self._version

    def close_streams(self) -> None:
        """End all streams, as the server does every few minutes."""
        with self.changed:
            self._closings += 1
            self.changed.notify_all()

    def forget(self) -> None:
        """Answer 410 to all versions so far; open streams end."""
        with self.changed:
            self._version += 1
            self._oldest = self._version
        self.close_streams()

    def new_token(self, token: str) -> None:
        """Replace the token in the file; the former one is refused from now on, and open streams end."""
        self.token = token
        (self.account / "token").write_text(token)
        self.close_streams()

    def count(self, word: str) -> int:
        """How many requests contain ``word``."""
        return sum(word in line for line in list(self.asked))

    # ------------------------------------------------------------ answers

    def _store(self, resource: str, name: str, made: Object, kind: str) -> None:
        self._version += 1
        made["metadata"]["resourceVersion"] = str(self._version)
        if kind != "DELETED":
            self._objects[resource, name] = made
        self._events.append((self._version, resource, kind, copy.deepcopy(made)))
        self.changed.notify_all()

    def patch(self, name: str, body: Object) -> Object | None:
        """Merge the body into a pod, and return the pod; None: there is none."""
        with self.changed:
            if ("pods", name) not in self._objects:
                return None
        self.put("pods", name, body)
        self.patches.append(body["metadata"]["annotations"])
        with self.changed:
            return copy.deepcopy(self._objects["pods", name])

    def listed(self, resource: str, name: str) -> Object:
        """Return a list with this object, or an empty one."""
        with self.changed:
            found = self._objects.get((resource, name))
            items = [copy.deepcopy(found)] if found else []
            return {"kind": "List", "metadata": {"resourceVersion": str(self._version)}, "items": items}

    def since(self, resource: str, name: str, version: int) -> list[tuple[int, str, Object]] | None:
        """Return the events after a version; None: they are forgotten."""
        if version < self._oldest:
            return None
        return [
            (at, kind, made)
            for at, where, kind, made in self._events
            if at > version and where == resource and (kind == "BOOKMARK" or made["metadata"]["name"] == name)
        ]

    @property
    def closings(self) -> int:
        """How often the streams were ended."""
        return self._closings


class QuietServer(ThreadingHTTPServer):
    """A server that does not print that a client has closed its connection."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        return


class Answers(BaseHTTPRequestHandler):
    """The requests of one connection."""

    protocol_version = "HTTP/1.1"
    api: ApiServer

    def do_GET(self) -> None:
        place = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(place.query).items()}
        resource = place.path.rsplit("/", 1)[-1]
        name = query["fieldSelector"].removeprefix("metadata.name=")
        streams = query.get("watch", "").lower() == "true"
        self.api.asked.append(
            f"GET {place.path}{' watch' if streams else ''} {query.get('resourceVersion', '')}"
        )
        if self._refused(resource):
            return
        if streams:
            self._stream(resource, name, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
        else:
            self._send(200, self.api.listed(resource, name))

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.api.asked.append(f"PATCH {self.path} {self.headers['Content-Type']}")
        if self._refused("patch"):
            return
        pod = self.api.patch(self.path.rsplit("/", 1)[-1], body)
        self._send(200 if pod else 404, pod or {"message": "not found"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.api.asked.append(f"POST {self.path}")
        if self._refused("trainjobs"):
            return
        if self.path != TRAINJOB_PATH or not self.api.has_trainjobs:
            self._send(404, {"message": "Train job not found"})
            return
        self.api.posted.append(body)
        self._send(200, body)

    def log_message(self, *words: Any) -> None:
        return

    def _refused(self, resource: str) -> bool:
        status = self.api.failing or (403 if resource in self.api.forbidden else 0)
        if self.headers.get("Authorization", "").split(" ")[-1] != self.api.token:
            status = 401
        if status:
            self._send(status, {"kind": "Status", "status": "Failure", "code": status, "reason": "Refused"})
        return bool(status)

    def _send(self, status: int, body: Object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, resource: str, name: str, version: int, limit_s: float) -> None:
        api, until_s = self.api, time.monotonic() + limit_s
        closings = api.closings
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while time.monotonic() < until_s:
            with api.changed:
                events = api.since(resource, name, version)
                if events == [] and api.closings == closings:
                    api.changed.wait(0.5)
                    continue
            if not events:
                if events is None:
                    gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                    self._chunk({"type": "ERROR", "object": gone})
                break
            for version, kind, made in events:  # noqa: B007 (the last version is that of the next turn)
                self._chunk({"type": kind, "object": made})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, event: Object) -> None:
        data = json.dumps(event).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()


def merge(into: Object, change: Mapping[str, Any]) -> None:
    """Merge a change into an object, as a JSON merge patch: None removes a key."""
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(into.get(key), dict):
            merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)
