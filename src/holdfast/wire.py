"""Frames, codec and handshake of the control plane, without I/O (``runtime/channel.py`` moves the bytes).

A frame is a 4-byte big-endian length and that many bytes of msgpack. Before both sides have proved that they know the
run's token, a frame may be at most ``GREETING_SIZE_BYTES_MAX`` long and only :data:`Greeting` is decoded.

Handshake (mutual, HMAC-SHA256 with labels, so that no side's proof can be replayed as the other's)::

    server -> client   Challenge(version, nonce_s)
    client -> server   Answer(version, role, nonce_c, HMAC(token, "client" | role | nonce_s | nonce_c))
    server -> client   Welcome(HMAC(token, "server" | role | nonce_s | nonce_c))   or Refused(reason)

The token itself never travels.
"""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from typing import Generic, TypeVar

import msgspec

from holdfast.core import messages as m
from holdfast.core import sightings as o
from holdfast.core import spares
from holdfast.core.messages import FRAME_SIZE_BYTES_MAX, PROTOCOL_VERSION
from holdfast.errors import AuthError, ProtocolError

WireMessage = (
    m.WorkerHello
    | m.SessionOpened
    | m.LayoutPublished
    | m.FaultSeen
    | o.CopiesDiffer
    | o.Vouched
    | m.WorkerFailed
    | m.Settled
    | m.SaveReported
    | m.StateOffered
    | m.StateRefused
    | m.JoinAsked
    | m.Joined
    | m.StepReached
    | m.ExitAsked
    | m.ExitAgreed
    | m.OnceAsked
    | m.OnceTold
    | m.Finished
    | m.Fence
    | m.Settle
    | m.Receive
    | m.Resume
    | m.Leave
    | m.Release
    | m.ExitOrder
    | m.Catalogued
    | m.AgentHello
    | m.AgentBeat
    | m.Held
    | m.MemberStarted
    | m.MemberExited
    | m.StartMembers
    | m.KillMember
    | o.Stalled
    | o.Late
    | o.Moved
    | o.Active
    | o.Gather
    | o.ShowRecords
    | o.Evidence
    | o.Paced
    | m.EndRun
    | m.ExitRun
    | m.ExitCancelled
    | m.StopRun
    | m.Ack
    | m.KvRequest
    | m.KvReply
    | m.ControllerBeat
    | m.MirrorFrom
    | m.Mirror
    | m.Rolled
    | m.VotersAre
    | spares.SpareWaits
    | spares.Called
)
"""All that may travel; the decoder accepts nothing else."""

GREETING_SIZE_BYTES_MAX = 1024
NONCE_SIZE_BYTES = 32
PREFIX_SIZE_BYTES = 4
ROLES = frozenset({"worker", "cli", "agent", "peer"})

M = TypeVar("M")


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """First frame of a server."""

    version: int
    nonce: bytes


class Answer(msgspec.Struct, frozen=True, tag=True):
    """A client's proof, and what it is."""

    version: int
    role: str
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """A server's proof; the link is open."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server closes: ``version`` or ``token``."""

    reason: str


_SAME_TOKEN = "use the one token file of this run, the same on every host: --token-file"
SAME_VERSION = "install the same version of holdfast on every host"
Greeting = Challenge | Answer | Welcome | Refused


class Codec(Generic[M]):
    """msgpack of one closed union of structs.

    Args:
        kind: the union; nothing else is decoded.
    """

    def __init__(self, kind: type[M]) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: M) -> bytes:
        """One message as msgpack."""
        return self._encoder.encode(message)

    def decode(self, payload: bytes) -> M:
        """Inverse of :meth:`encode`.

        Raises:
            ProtocolError: not one of the union, with the path of the first wrong field.
        """
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame of {len(payload)} bytes is no known message: {error}") from error


MESSAGES: Codec[WireMessage] = Codec(WireMessage)  # type: ignore[arg-type]  # mypy: a union is no type[M]
_GREETINGS: Codec[Greeting] = Codec(Greeting)  # type: ignore[arg-type]


def frame(payload: bytes) -> bytes:
    """``payload`` with its length in front.

    Raises:
        ProtocolError: longer than ``FRAME_SIZE_BYTES_MAX``.
    """
    if len(payload) > FRAME_SIZE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_SIZE_BYTES_MAX}")
    return len(payload).to_bytes(PREFIX_SIZE_BYTES, "big") + payload


class FrameReader:
    """Cuts a byte stream into frames.

    Args:
        limit_bytes: longest payload; set it higher once the peer is trusted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Take in what was received."""
        self._buffer += data

    @property
    def partial(self) -> bool:
        """Bytes are here that are no whole frame yet."""
        return bool(self._buffer)

    def next(self) -> bytes | None:
        """The next complete payload, or None.

        Raises:
            ProtocolError: the peer announces more than the limit.
        """
        if len(self._buffer) < PREFIX_SIZE_BYTES:
            return None
        length = int.from_bytes(self._buffer[:PREFIX_SIZE_BYTES], "big")
        if length > self.limit_bytes:
            raise ProtocolError(f"a frame of {length} bytes exceeds the limit of {self.limit_bytes}")
        end = PREFIX_SIZE_BYTES + length
        if len(self._buffer) < end:
            return None
        payload = bytes(self._buffer[PREFIX_SIZE_BYTES:end])
        del self._buffer[:end]
        return payload


class Link(Generic[M]):
    """One side of one connection: feed it bytes, send what :meth:`take_output` gives.

    Args:
        codec: what travels after the handshake.
        token: secret of the run.
        nonce: ``NONCE_SIZE_BYTES`` fresh random bytes (the shell's duty).
        role: what this client is; None for the server's side.
        refused: counts refused frames by reason; shared by all links of a process.
    """

    def __init__(
        self, codec: Codec[M], token: bytes, nonce: bytes, *, role: str | None, refused: Counter[str]
    ) -> None:
        self.open = False
        self.peer_role = ""
        self._codec = codec
        self._token = token
        self._nonce = nonce
        self._role = role
        self._refused = refused
        self._reader = FrameReader(GREETING_SIZE_BYTES_MAX)
        self._output = bytearray()
        self._peer_nonce = b""
        if role is None:
            self._greet(Challenge(PROTOCOL_VERSION, nonce))

    def take_output(self) -> bytes:
        """Bytes to send now; empty when there are none."""
        data = bytes(self._output)
        self._output.clear()
        return data

    def send(self, message: M) -> None:
        """Queue one message.

        Raises:
            ProtocolError: the handshake is not done, or the message is too long.
        """
        if not self.open:
            raise ProtocolError("a message was sent before the handshake was done")
        self._output += frame(self._codec.encode(message))

    @property
    def partial(self) -> bool:
        """The beginning of a message has come, the rest has not."""
        return self._reader.partial

    def receive(self, data: bytes) -> list[M]:
        """Take in bytes and return the complete messages. After an error the connection must be closed.

        Raises:
            AuthError: the peer does not know the token, or speaks another version.
            ProtocolError: a frame that is too long, out of place or not a message.
        """
        self._reader.feed(data)
        messages: list[M] = []
        try:
            while (payload := self._reader.next()) is not None:
                if self.open:
                    messages.append(self._codec.decode(payload))
                else:
                    self._handshake(_GREETINGS.decode(payload))
        except AuthError:
            self._refused["token"] += 1
            raise
        except ProtocolError:
            self._refused["frame" if self.open else "greeting"] += 1
            raise
        return messages

    def _greet(self, greeting: Greeting) -> None:
        self._output += frame(_GREETINGS.encode(greeting))

    def _proof(self, label: str, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
        text = b"\0".join((b"holdfast", label.encode(), role.encode())) + server_nonce + client_nonce
        return hmac.digest(self._token, text, hashlib.sha256)

    def _handshake(self, greeting: Greeting) -> None:
        if isinstance(greeting, Refused) and self._role is not None:
            raise AuthError(
                f"the server refused this {self._role}: wrong {greeting.reason}",
                hint=SAME_VERSION if greeting.reason == "version" else _SAME_TOKEN,
            )
        if isinstance(greeting, Challenge) and self._role is not None and not self._peer_nonce:
            self._answer(greeting, self._role)
        elif isinstance(greeting, Welcome) and self._role is not None and self._peer_nonce:
            expected = self._proof("server", self._role, self._peer_nonce, self._nonce)
            if not hmac.compare_digest(expected, greeting.proof):
                raise AuthError("the server does not know the token of this run", hint=_SAME_TOKEN)
            self._opened()
        elif isinstance(greeting, Answer) and self._role is None:
            self._judge(greeting)
        else:
            raise ProtocolError(f"{type(greeting).__name__} is out of place in the handshake")

    def _answer(self, challenge: Challenge, role: str) -> None:
        _check_nonce(challenge.nonce)
        if challenge.version != PROTOCOL_VERSION:
            raise AuthError(
                f"the server speaks protocol version {challenge.version}, this process {PROTOCOL_VERSION}",
                hint=SAME_VERSION,
            )
        self._peer_nonce = challenge.nonce
        proof = self._proof("client", role, challenge.nonce, self._nonce)
        self._greet(Answer(PROTOCOL_VERSION, role, self._nonce, proof))

    def _judge(self, answer: Answer) -> None:
        _check_nonce(answer.nonce)
        expected = self._proof("client", answer.role, self._nonce, answer.nonce)
        if answer.version != PROTOCOL_VERSION:
            self._greet(Refused("version"))
            raise AuthError(f"a client speaks protocol version {answer.version}, not {PROTOCOL_VERSION}")
        if answer.role not in ROLES or not hmac.compare_digest(expected, answer.proof):
            self._greet(Refused("token"))
            raise AuthError("a client does not know the token of this run")
        self.peer_role = answer.role
        self._greet(Welcome(self._proof("server", answer.role, self._nonce, answer.nonce)))
        self._opened()

    def _opened(self) -> None:
        self.open = True
        self._reader.limit_bytes = FRAME_SIZE_BYTES_MAX


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_SIZE_BYTES:
        raise ProtocolError(f"a nonce of {len(nonce)} bytes, not {NONCE_SIZE_BYTES}")
