"""One bucket of an S3-compatible server: the requests that a store needs, with Holdfast's errors.

Theory. The server shows an object whole or not at all, and a listing shows every object whose write was acknowledged
(true of AWS since 2020, and of compatible servers). Creating an object that must not exist yet is one conditional
request (``If-None-Match: *``). After lost connections, timeouts and 5xx answers the client library repeats a request,
for at most 60 seconds (or ``HOLDFAST_S3_RETRY_S``). Then an error is raised.

Invariants:
1. Credentials come from the environment (AWS_*) or from the role of a container or machine, never from an argument. No
   error message contains credentials.
2. "Not found" and "unreachable" are different errors: a server that cannot be reached never makes a checkpoint invalid.
3. An upload is sent in parts, and takes memory for ``UPLOADS`` + 1 parts.
4. A connection without TLS is made to loopback only, unless AWS_ALLOW_HTTP permits others.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from holdfast.errors import CheckpointInvalid, StoreUnreachable, StoreWriteError, UsageError
from holdfast.store.backends.interfaces import Put
from holdfast.store.backends.location import Url

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

RETRY_S = 60.0
RETRY_S_MAX = 86_400.0
RETRY_VARIABLE = "HOLDFAST_S3_RETRY_S"
REQUEST_TIMEOUT_S = 60.0
CONNECT_TIMEOUT_S = 5.0
BACKOFF_MAX_S = 5.0
PART_SIZE_BYTES = 8 * 1024 * 1024
PARTS_MAX = 10_000
UPLOADS = 4
REASON_LENGTH_MAX = 300
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class S3Object(NamedTuple):
    """One object of a listing: its key below the listed prefix, its size, and its write time (server's clock)."""

    key: str
    size_bytes: int
    modified: datetime


class Bucket:
    """The objects below one S3 URL. A key is one or more names joined by slashes, relative to that URL."""

    def __init__(self, place: Url) -> None:
        self.place = place
        self._objects = _client(place.parts[0], "/".join(place.parts[1:]), _configuration())

    def exists(self, key: str) -> bool:
        """Return True if an object with this key exists.

        Raises:
            StoreUnreachable: the server could not be reached, or refused the request.
        """
        return self.size_bytes(key) is not None

    def size_bytes(self, key: str) -> int | None:
        """Return the size of an object in bytes; None if it does not exist.

        Raises:
            StoreUnreachable: the server could not be reached, or refused the request.
        """
        import obstore

        try:
            with self._asking(key):
                return obstore.head(self._objects, key)["size"]
        except CheckpointInvalid:
            return None

    def get(self, key: str, start: int = 0, size_bytes: int | None = None) -> memoryview:
        """Return the content of an object, or a range of its bytes.

        If ``size_bytes`` is None, the result is the complete object. Otherwise it is the ``size_bytes`` bytes from
        ``start`` on.

        Raises:
            CheckpointInvalid: the object does not exist.
            StoreUnreachable: the server could not be reached, or refused the request.
        """
        import obstore

        with self._asking(key):
            if size_bytes is None:
                return memoryview(obstore.get(self._objects, key).bytes())
            return memoryview(obstore.get_range(self._objects, key, start=start, length=size_bytes))

    def put(self, key: str, data: bytes) -> None:
        """Write an object. An existing object with this key is replaced.

        Raises:
            StoreWriteError: the object cannot be written.
        """
        import obstore

        with self._telling(key):
            obstore.put(self._objects, key, data, chunk_size=PART_SIZE_BYTES, max_concurrency=UPLOADS)

    def announce(self, key: str) -> bool:
        """Write an empty object. Return False if the credentials permit only reads.

        Raises:
            StoreWriteError: the object cannot be written.
        """
        import obstore
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        with self._telling(key):
            try:
                obstore.put(self._objects, key, b"")
            except (PermissionDeniedError, UnauthenticatedError):
                return False
        return True

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless one with this key exists. Return False if it exists.

        Raises:
            StoreWriteError: the object cannot be written.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError

        with self._telling(key):
            try:
                obstore.put(self._objects, key, data, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    @contextlib.contextmanager
    def upload(self, key: str, size_bytes: int) -> Iterator[Put]:
        """Yield a function that writes an object piece by piece, in the order of the offsets.

        The object becomes visible when the body of the ``with`` statement ends without an error.

        Raises:
            StoreWriteError: the object cannot be written; nothing visible has changed.
        """
        import obstore

        part_size_bytes = max(PART_SIZE_BYTES, -(-size_bytes // PARTS_MAX))
        done = 0
        with self._telling(key):
            writer = obstore.open_writer(
                self._objects, key, buffer_size=part_size_bytes, max_concurrency=UPLOADS
            )

        def put(offset: int, data: memoryview) -> None:
            nonlocal done
            if offset != done:
                raise StoreWriteError(f"{self.place}/{key}: {offset} does not follow {done}")
            done += len(data)
            with self._telling(key):
                writer.write(data)

        try:
            yield put
        except BaseException as error:
            with contextlib.suppress(Exception):  # drops the parts; the error in progress matters more
                writer.__exit__(type(error), error, error.__traceback__)
            raise
        with self._telling(key):
            writer.close()

    def entries(self, prefix: str) -> list[S3Object]:
        """Return all objects below ``prefix``, with keys relative to ``prefix``.

        Raises:
            StoreUnreachable: the server could not be reached, or refused the request.
        """
        import obstore

        found: list[S3Object] = []
        with self._asking(prefix, listing=True):
            for chunk in obstore.list(self._objects, prefix):
                found += [
                    S3Object(o["path"].removeprefix(f"{prefix}/"), o["size"], o["last_modified"])
                    for o in chunk
                ]
        return found

    def folders(self) -> list[str]:
        """Return the first component of each key that has a slash, without duplicates.

        Raises:
            StoreUnreachable: the server could not be reached, or refused the request.
        """
        import obstore

        with self._asking("", listing=True):
            found = obstore.list_with_delimiter(self._objects)["common_prefixes"]
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def delete(self, keys: list[str]) -> None:
        """Remove the objects with these keys. A missing object is not an error.

        Raises:
            StoreWriteError: an object cannot be removed.
        """
        import obstore

        with self._telling(keys[0] if keys else ""), contextlib.suppress(FileNotFoundError):
            obstore.delete(self._objects, keys)

    @contextlib.contextmanager
    def _asking(self, key: str, *, listing: bool = False) -> Iterator[None]:
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError) as error:  # not chained: its text may contain parts of the request
            if isinstance(error, FileNotFoundError) and not listing:
                raise CheckpointInvalid(f"{self.place}/{key}: does not exist") from None
            why, hint = reason_of(error)
            raise StoreUnreachable(f"cannot read {self.place}/{key}: {why}", hint=hint) from None

    @contextlib.contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            yield
        except AlreadyExistsError:
            raise
        except (BaseError, OSError) as error:
            why, hint = reason_of(error)
            raise StoreWriteError(f"cannot write {self.place}/{key}: {why}", hint=hint) from None


def reason_of(error: Exception) -> tuple[str, str]:
    """Return the reason of an error of the S3 client as one short line without secrets, and a hint for the user."""
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = " ".join(text.split("<?xml")[0].split("Debug source")[0].split())
    retries = re.search(r"after (\d+) retries", line)
    line = (line.rpartition(" - ")[2] or line).rstrip(": ")
    if code:
        line += f" ({code[1]})"
    if retries:
        line += f", after {retries[1]} {'retry' if retries[1] == '1' else 'retries'}"
    for name in _SECRETS:
        secret = os.environ.get(name)
        if secret:
            line = line.replace(secret, "***")
    if code and code[1] == "NoSuchBucket":
        hint = "make the bucket first, or correct its name"
    elif re.search(r"\b40[13]\b", line):
        hint = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and the rights on this bucket"
    else:
        hint = "check AWS_ENDPOINT_URL, AWS_REGION, the credentials (AWS_*) and the network"
    return line[:REASON_LENGTH_MAX], hint


def _configuration() -> tuple[tuple[str, str], ...]:
    """Return the environment variables that configure a client. A client is reused until one of them changes."""
    return tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_") or k == RETRY_VARIABLE))


def _retry_s(text: str) -> float:
    """Return the time limit of retries in seconds, from the text of its environment variable.

    Raises:
        UsageError: the text is not a number, or the number is out of range.
    """
    try:
        retry_s = float(text or RETRY_S)
    except ValueError:
        retry_s = -1.0
    if not 0 <= retry_s <= RETRY_S_MAX:  # also excludes NaN
        raise UsageError(
            f"{RETRY_VARIABLE}={text} is no number of seconds from 0 to {RETRY_S_MAX:g}",
            hint=f"for example {RETRY_VARIABLE}={RETRY_S:g}, or leave it out",
        )
    return retry_s


def _endpoint(said: Mapping[str, str]) -> str:
    """Return the server's URL from ``said`` (the environment variables); empty if no variable has a URL.

    Raises:
        UsageError: the URL is not valid (the client library panics over some invalid URLs).
    """
    name = next((each for each in _ENDPOINTS if said.get(each)), "")
    if not name:
        return ""
    try:
        parts = urlsplit(said[name])
        host = parts.hostname or ""
        sound = parts.scheme in ("http", "https") and bool(host) and parts.port != 0
        if "[" in parts.netloc:
            sound = sound and ipaddress.IPv6Address(host).scope_id is None
    except ValueError:
        sound = False
    if not sound:
        raise UsageError(
            f"{name}={said[name]} is no URL of a server",
            hint="for example http://10.0.0.1:9000 or http://[fd00::2]:9000: an IPv6 address stands in brackets, "
            "without a scope id",
        )
    return said[name]


@functools.lru_cache(maxsize=8)
def _client(bucket: str, prefix: str, configuration: tuple[tuple[str, str], ...]) -> S3Store:
    try:
        from obstore.store import S3Store
    except ImportError as error:
        raise UsageError(
            "obstore is not installed; s3:// needs it", hint="pip install 'holdfast[s3]'"
        ) from error
    said = dict(configuration)
    endpoint = _endpoint(said)
    retry_s = _retry_s(said.get(RETRY_VARIABLE, ""))
    client: ClientConfig = {
        "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
        "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
    }
    if endpoint and urlsplit(endpoint).hostname in _LOOPBACK:
        client["allow_http"] = True
    return S3Store(
        bucket,
        prefix=prefix or None,
        config={"endpoint": endpoint} if endpoint else {},
        client_options=client,
        retry_config={
            "max_retries": 1000,  # the time limit ends the retries
            "retry_timeout": timedelta(seconds=retry_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=BACKOFF_MAX_S),
                "base": 2,
            },
        },
    )
