"""Encryption of one direction of a connection, without I/O: AES-256-GCM of the ``cryptography`` package.

Theory. The key of a direction belongs to one connection (``sealing.py``). The nonce is the number of the frame or
batch, which both ends count. So no nonce is used twice with a key, and a frame is valid only at its position. GCM's tag
authenticates in place of HMAC. A batch (raw bytes after a frame) is encrypted as a stream, and one tag follows it.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from holdfast.errors import ProtocolError, UsageError
from holdfast.sealing import NOT_SENT, DirectionSeal, FrameSeal

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers import AEADDecryptionContext, AEADEncryptionContext, Cipher
    from cryptography.hazmat.primitives.ciphers.modes import GCM

PACKAGE = "cryptography"
MAJOR_MIN = 44  # older versions cannot decrypt in place
PRELOADS = ("cryptography.exceptions", "cryptography.hazmat.primitives.ciphers.aead")
"""Modules that the first encrypted frame imports."""
INSTALL = "pip install 'holdfast[encrypt]'"
_FRAME, _BATCH = b"fram", b"btch"
_COUNT_SIZE_BYTES = 8


def missing() -> str:
    """Return the reason why this interpreter cannot encrypt; empty if it can."""
    needed = f"encryption needs the package {PACKAGE}, version {MAJOR_MIN} or newer, and"
    if importlib.util.find_spec(PACKAGE) is None:
        return f"{needed} it is not installed"
    from importlib.metadata import version  # slow to import, and most runs do not encrypt

    found = version(PACKAGE)
    return "" if int(found.partition(".")[0]) >= MAJOR_MIN else f"{needed} {found} is installed"


def require_encryption() -> None:
    """Check that the package ``cryptography`` is installed. Raises: UsageError: it is missing or too old."""
    if why := missing():
        raise UsageError(why, hint=INSTALL)


def direction(key: bytes, *, encrypts: bool) -> DirectionSeal:
    """Return the seal of one direction of a connection.

    Args:
        key: key of this direction, ``KEY_SIZE_BYTES`` bytes.
        encrypts: True for a seal that also encrypts, False for one that only authenticates.
    """
    return EncryptedFrames(key) if encrypts else FrameSeal(key)


class EncryptedFrames:
    """A ``DirectionSeal`` that encrypts and authenticates.

    Args:
        key: key of this direction, 32 bytes. Call :func:`require_encryption` before: the package must be installed.
    """

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._key = key
        self._frames = AESGCM(key)
        self._count = 0

    def sealed(self, payload: bytes) -> bytes:
        """Return the next frame, encrypted and with its tag."""
        return self._frames.encrypt(self._nonce(_FRAME), payload, None)

    def unsealed(self, data: bytes) -> bytes:
        """Return the decrypted payload of the next frame. Raises: ProtocolError: the other end did not send it."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._frames.decrypt(self._nonce(_FRAME), data, None)
        except InvalidTag:
            raise ProtocolError(NOT_SENT) from None

    def seal_batch(self, *, local: bool) -> EncryptedBatch:
        """Return the object that encrypts the next batch.

        ``local`` has no effect: data within one host is also encrypted.
        """
        return EncryptedBatch(self._cipher().encryptor())

    def open_batch(self, *, local: bool) -> DecryptedBatch:
        """Return the object that decrypts the next batch.

        ``local`` has no effect: data within one host is also encrypted.
        """
        return DecryptedBatch(self._cipher().decryptor())

    def _cipher(self) -> Cipher[GCM]:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import AES256
        from cryptography.hazmat.primitives.ciphers.modes import GCM

        return Cipher(AES256(self._key), GCM(self._nonce(_BATCH)))

    def _nonce(self, kind: bytes) -> bytes:
        count = self._count.to_bytes(_COUNT_SIZE_BYTES, "big")
        self._count += 1
        return kind + count


class EncryptedBatch:
    """A ``SealedBatch`` that encrypts the bytes."""

    def __init__(self, stream: AEADEncryptionContext) -> None:
        self._stream = stream

    def seal(self, part: memoryview) -> bytes:
        """Return the next bytes of the batch, encrypted."""
        return self._stream.update(part)

    def tag(self) -> bytes:
        """Return the tag of the whole batch. Call this method after the last bytes."""
        self._stream.finalize()
        return self._stream.tag


class DecryptedBatch:
    """An ``OpenedBatch`` that decrypts the bytes."""

    def __init__(self, stream: AEADDecryptionContext) -> None:
        self._stream = stream

    def open(self, part: memoryview) -> None:
        """Decrypt the next bytes of the batch in place."""
        self._stream.update_into(part, part)

    def fits(self, tag: bytes) -> bool:
        """Return True if ``tag`` proves that the other end sent these bytes. Call this method after the last bytes."""
        from cryptography.exceptions import InvalidTag

        try:
            self._stream.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True
