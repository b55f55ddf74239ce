"""Keys and seals of one connection, without I/O: the only module that derives keys and authenticates frames.

Theory. Both ends of a connection know a secret, and each end has sent a fresh random nonce. From these, HKDF (RFC 5869,
over HMAC-SHA256) derives a proof and a key for each direction. The name of the service is an input, so a connection
that is redirected to another service of the same run has other keys and fails. Each later frame carries a tag:
HMAC-SHA256, with the key of its direction, over the number of the frame and its bytes, cut to 16 bytes. Both ends count
the frames, so the number is never sent. Raw bytes after a frame (a *batch*) have one separate tag. If the secret
requires it, frames and batches are also encrypted (``frame_encryption.py``).

Invariants:
1. A frame is accepted only on the connection, in the direction and at the position in which it was sent.
2. No key is used for two connections or two directions.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple, Protocol

import xxhash

from holdfast.errors import ProtocolError


class Secret(NamedTuple):
    """The secret that both ends of a connection know.

    Args:
        token: token of the run.
        encrypts: True if all bytes after the handshake are encrypted.
    """

    token: bytes
    encrypts: bool = False

    @property
    def sealing(self) -> str:
        """The name of the method that seals frames, as used in the handshake."""
        return "aes-256-gcm" if self.encrypts else "hmac-sha256"


TAG_SIZE_BYTES = 16
KEY_SIZE_BYTES = 32
_HASH = "sha256"
_FRAME, _BATCH = b"frame", b"batch"
NOT_SENT = "a frame has come that the other end has not sent in this place"
_COUNT_SIZE_BYTES = 8


def derive(secret: bytes, salt: bytes, info: bytes, size_bytes: int) -> bytes:
    """Return ``size_bytes`` bytes derived by HKDF (RFC 5869) with HMAC-SHA256."""
    key = hmac.digest(salt, secret, _HASH)
    block, output = b"", b""
    for number in range(1, 2 + (size_bytes - 1) // KEY_SIZE_BYTES):
        block = hmac.digest(key, block + info + bytes((number,)), _HASH)
        output += block
    return output[:size_bytes]


class ConnectionKeys(NamedTuple):
    """The proofs and the direction keys that both ends of one connection derive."""

    client_proof: bytes
    server_proof: bytes
    from_client: bytes
    from_server: bytes

    @classmethod
    def of(cls, secret: bytes, nonces: bytes, *context: str) -> ConnectionKeys:
        """Return the keys of one connection.

        Args:
            secret: bytes that both ends know, such as the token of the run.
            nonces: nonces of both ends, the server's first. Each has a fixed length.
            context: values that must be equal on both ends: version, service, role.
        """
        info = b"\0".join(text.encode() for text in ("holdfast", *context))
        output = derive(secret, nonces, info, len(cls._fields) * KEY_SIZE_BYTES)
        return cls(
            *(output[start : start + KEY_SIZE_BYTES] for start in range(0, len(output), KEY_SIZE_BYTES))
        )


class Digest(Protocol):
    """An incremental digest, from which a tag is cut."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Add bytes to the digest."""

    def digest(self) -> bytes:
        """Return the digest of all added bytes, at least ``TAG_SIZE_BYTES`` bytes long."""


def same(one: bytes, other: bytes) -> bool:
    """Return True if two byte strings are equal. The comparison takes constant time."""
    return hmac.compare_digest(one, other)


class SealedBatch(Protocol):
    """The sender's object for one batch of raw bytes. It seals the bytes in order, and computes the batch's tag."""

    def seal(self, part: memoryview) -> bytes | memoryview:
        """Return the next bytes of the batch in the form in which they are sent."""

    def tag(self) -> bytes:
        """Return the tag of the whole batch. Call this method after the last bytes."""


class OpenedBatch(Protocol):
    """The receiver's object for one batch of raw bytes. It opens the bytes in order, and checks the batch's tag."""

    def open(self, part: memoryview) -> None:
        """Convert the next received bytes back into the bytes that the other end sealed, in place."""

    def fits(self, tag: bytes) -> bool:
        """Return True if ``tag`` proves that the other end sent these bytes. Call this method after the last bytes."""


class DirectionSeal(Protocol):
    """The seal of one direction of one connection. Both ends have equal seals, and use them in the same order."""

    def sealed(self, payload: bytes) -> bytes:
        """Return the next frame in the form in which it is sent: ``TAG_SIZE_BYTES`` longer than ``payload``."""

    def unsealed(self, data: bytes) -> bytes | memoryview:
        """Return the payload of the next frame.

        Raises:
            ProtocolError: the other end did not send this frame, or sent it at another position.
        """

    def seal_batch(self, *, local: bool) -> SealedBatch:
        """Return the object that encrypts or tags the bytes of the next batch.

        Args:
            local: True if both ends are on this host. Only a process with full rights could change the bytes there, so
                a cheaper protection is enough.
        """

    def open_batch(self, *, local: bool) -> OpenedBatch:
        """Return the object that checks the next batch, which the other end sealed with :meth:`seal_batch`."""


class FrameSeal:
    """A :class:`DirectionSeal` that authenticates, without encryption.

    Args:
        key: key of this direction.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._count = 0

    def seal_batch(self, *, local: bool) -> BatchTag:
        """Return the object that computes the tag of the next batch.

        On one host (``local``) the tag is a plain digest, which takes a fortieth of the time of an HMAC.
        """
        return BatchTag(xxhash.xxh3_128() if local else self._begin(_BATCH))

    open_batch = seal_batch

    def sealed(self, payload: bytes) -> bytes:
        """Return the next frame: ``payload`` and its tag."""
        return payload + self._tag(payload)

    def unsealed(self, data: bytes) -> memoryview:
        """Return the payload of the next frame. Raises: ProtocolError: its tag is wrong."""
        payload, tag = memoryview(data)[:-TAG_SIZE_BYTES], data[-TAG_SIZE_BYTES:]
        if not same(self._tag(payload), tag):
            raise ProtocolError(NOT_SENT)
        return payload

    def _tag(self, payload: bytes | memoryview) -> bytes:
        seal = self._begin(_FRAME)
        seal.update(payload)
        return seal.digest()[:TAG_SIZE_BYTES]

    def _begin(self, kind: bytes) -> hmac.HMAC:
        count = self._count.to_bytes(_COUNT_SIZE_BYTES, "big")
        self._count += 1
        return hmac.new(self._key, kind + count, _HASH)


class BatchTag:
    """A :class:`SealedBatch` and :class:`OpenedBatch` that does not change the bytes, and computes a tag."""

    def __init__(self, digest: Digest) -> None:
        self._digest = digest

    def seal(self, part: memoryview) -> memoryview:
        """Add the next bytes to the tag, and return them unchanged."""
        self._digest.update(part)
        return part

    def open(self, part: memoryview) -> None:
        """Add the next received bytes to the tag, and leave them unchanged."""
        self._digest.update(part)

    def tag(self) -> bytes:
        """Return the tag of all added bytes."""
        return self._digest.digest()[:TAG_SIZE_BYTES]

    def fits(self, tag: bytes) -> bool:
        """Return True if ``tag`` is the tag of all added bytes."""
        return same(self.tag(), tag)
