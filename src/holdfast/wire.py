"""Frames, codec and handshake of the control plane, without I/O (``runtime/net/channel.py`` moves the bytes).

A frame is a 4-byte big-endian length and that many bytes: a message as msgpack, after the handshake with a tag. Before
both sides have proved that they know the run's token, a frame may be at most ``GREETING_SIZE_BYTES_MAX`` long and only
:data:`Greeting` (a message of the handshake) is decoded.

Handshake (mutual; ``sealing.py`` derives proofs and keys from token, both nonces, version, service and role)::

    server -> client   ServerChallenge(version, nonce_s)
    client -> server   ClientProof(version, role, nonce_c, client_proof, service, sealing)
    server -> client   Welcome(server_proof)   or Refused(reason)

The token itself never travels. The tag of each later frame proves that the other end has sent this frame, on this
connection, at this position.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Generic, TypeVar

import msgspec

from holdfast.core.job import spares
from holdfast.core.protocol import health_messages as o
from holdfast.core.protocol import messages as m
from holdfast.core.protocol import notices as n
from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX, PROTOCOL_VERSION
from holdfast.errors import AuthError, ProtocolError
from holdfast.frame_encryption import direction
from holdfast.sealing import (
    TAG_SIZE_BYTES,
    ConnectionKeys,
    DirectionSeal,
    OpenedBatch,
    SealedBatch,
    Secret,
    same,
)

WireMessage = (
    m.WorkerHello
    | m.SessionOpened
    | m.LayoutPublished
    | m.FaultSeen
    | o.CopiesDiffer
    | o.StateDigests
    | m.WorkerFailed
    | m.LoopEnded
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
    | m.ResumeInPlace
    | m.Leave
    | m.Release
    | m.LoopEndSeen
    | m.ExitOrder
    | m.Catalogued
    | m.AgentHello
    | m.AgentBeat
    | m.HeldStates
    | m.MemberStarted
    | m.MemberExited
    | m.StartMembers
    | m.KillMember
    | o.Stalled
    | o.Late
    | o.ProgressResumed
    | o.Active
    | o.CollectEvidence
    | o.ShowRecords
    | o.Evidence
    | o.StepTimes
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
    | n.Notice
    | n.NoticeOver
    | n.DrainNode
    | n.PrepareSeats
    | n.SeatsPrepared
    | n.HoldOrder
    | n.HoldReached
    | n.HoldOver
    | spares.SpareWaits
    | spares.Called
)
"""The union of all messages of the control plane. The decoder accepts nothing else."""

GREETING_SIZE_BYTES_MAX = 1024
NONCE_SIZE_BYTES = 32
PREFIX_SIZE_BYTES = 4
ROLES = frozenset({"worker", "cli", "agent", "peer"})

M = TypeVar("M")


class ServerChallenge(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a server: its protocol version and its nonce."""

    version: int
    nonce: bytes


class ClientProof(msgspec.Struct, frozen=True, tag=True):
    """The client's proof, its role, and the service that it expects."""

    version: int
    role: str
    nonce: bytes
    proof: bytes
    service: str = ""
    sealing: str = ""  # name of the method that seals frames after the handshake, see ``Secret.sealing``


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The last frame of the handshake: it proves that the server knows the token. After it both sides send messages."""

    proof: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The server's refusal, before it closes the connection.

    ``reason`` is ``version``, ``service``, ``encryption`` or ``token``: the part of the client's proof that is wrong.
    """

    reason: str


_SAME_TOKEN = (
    "use the one token file of this run, the same on every host: --token-file; "
    "if another run has this port: another --master-port, the same on every host"
)
_SAME_ENCRYPTION = "--encrypt on every host, or on none"
SAME_VERSION = "install the same version of holdfast on every host"
Greeting = ServerChallenge | ClientProof | Welcome | Refused


class Codec(Generic[M]):
    """The msgpack codec of one closed union of structs.

    Args:
        kind: the union. Bytes of any other type are refused.
    """

    def __init__(self, kind: type[M]) -> None:
        self._kind = kind
        self._encoder = msgspec.msgpack.Encoder()

    @cached_property
    def _decoder(self) -> msgspec.msgpack.Decoder[M]:
        """The decoder. It is made at first use, because to make one for a large union of messages takes long."""
        return msgspec.msgpack.Decoder(self._kind)

    def encode(self, message: M) -> bytes:
        """Return the message as msgpack."""
        return self._encoder.encode(message)

    def decode(self, payload: bytes | memoryview) -> M:
        """Return the message of bytes that :meth:`encode` made.

        Raises:
            ProtocolError: the bytes are not a message of the union. The error names the path of the first wrong
                field.
        """
        try:
            return self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"a frame of {len(payload)} bytes is no known message: {error}") from error


MESSAGES: Codec[WireMessage] = Codec(WireMessage)  # type: ignore[arg-type]  # mypy: a union is no type[M]
_GREETINGS: Codec[Greeting] = Codec(Greeting)  # type: ignore[arg-type]


def frame(payload: bytes) -> bytes:
    """Return ``payload`` with its length before it, as a frame.

    Raises:
        ProtocolError: the payload is longer than ``FRAME_SIZE_BYTES_MAX``.
    """
    return _prefix(payload) + payload


def _prefix(payload: bytes, more_bytes: int = 0) -> bytes:
    if len(payload) > FRAME_SIZE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(payload)} bytes exceeds the limit of {FRAME_SIZE_BYTES_MAX}")
    return (len(payload) + more_bytes).to_bytes(PREFIX_SIZE_BYTES, "big")


class FrameReader:
    """A reader that cuts a byte stream into frames.

    Args:
        limit_bytes: size of the longest accepted payload. Set this attribute higher once the peer is trusted.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes to the buffer."""
        self._buffer += data

    @property
    def partial(self) -> bool:
        """True if the buffer holds bytes of a frame that is not complete."""
        return bool(self._buffer)

    def next(self) -> bytes | None:
        """Return the payload of the next complete frame; None if no frame is complete.

        Raises:
            ProtocolError: the peer announces a payload that is longer than the limit.
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
    """One side of one connection, without I/O: feed it received bytes, and send the bytes of :meth:`take_output`.

    Args:
        codec: codec of the messages after the handshake.
        secret: secret of the run.
        nonce: ``NONCE_SIZE_BYTES`` fresh random bytes. The caller must draw them.
        service: name of the service that listens, see ``runtime/net/service_names.py``.
        role: role of this client; None on the server's side.
        refused: counts of refused frames by reason, shared by all links of a process.
    """

    def __init__(
        self,
        codec: Codec[M],
        secret: Secret,
        nonce: bytes,
        *,
        service: str,
        role: str | None,
        refused: Counter[str],
    ) -> None:
        self.peer_role = ""
        self._codec = codec
        self._secret = secret
        self._nonce = nonce
        self._service = service
        self._role = role
        self._refused = refused
        self._reader = FrameReader(GREETING_SIZE_BYTES_MAX)
        self._output = bytearray()
        self._keys: ConnectionKeys | None = None  # keys of a client that waits for the Welcome frame
        self._seals: tuple[DirectionSeal, DirectionSeal] | None = None  # seals of sent and of received frames
        self._doing = "greeting"
        self._broken = False
        if role is None:
            self._greet(ServerChallenge(PROTOCOL_VERSION, nonce))

    @property
    def open(self) -> bool:
        """True if both sides have proved that they know the token."""
        return self._seals is not None

    def take_output(self) -> bytes:
        """Return the bytes to send now, and remove them from the link; empty if there are none."""
        data = bytes(self._output)
        self._output.clear()
        return data

    def send(self, message: M) -> None:
        """Queue one message for sending.

        Raises:
            ProtocolError: the handshake is not done, or the message is too long.
        """
        seal = self._both()[0]
        payload = self._codec.encode(message)
        self._output += _prefix(payload, TAG_SIZE_BYTES)
        self._output += seal.sealed(payload)

    def seal_batch(self, *, local: bool) -> SealedBatch:
        """Begin a batch: raw bytes that are sent after the last message. The tag of the batch follows them.

        Args:
            local: True if both ends are on this host.

        Returns:
            The object that seals the bytes.

        Raises:
            ProtocolError: the handshake is not done.
        """
        return self._both()[0].seal_batch(local=local)

    def open_batch(self, *, local: bool) -> OpenedBatch:
        """Begin a received batch, which the other end sent with :meth:`seal_batch`.

        Return the object that checks the batch.
        """
        return self._both()[1].open_batch(local=local)

    @property
    def partial(self) -> bool:
        """True if the link has received only a part of a message."""
        return self._reader.partial

    def receive(self, data: bytes) -> list[M]:
        """Add received bytes, and return the messages that are now complete. After an error, close the connection.

        Raises:
            AuthError: the peer does not know the token or uses another version of the protocol, or only one end
                encrypts.
            ProtocolError: the peer expects another service, or a frame is too long, out of place, not from the other
                end, or not a message.
        """
        if self._broken:
            raise ProtocolError("nothing is taken after a refused frame")
        self._reader.feed(data)
        messages: list[M] = []
        try:
            while (payload := self._reader.next()) is not None:
                if self._seals is None:
                    self._handshake(_GREETINGS.decode(payload))
                else:
                    self._doing = "seal"
                    unsealed = self._seals[1].unsealed(payload)
                    self._doing = "frame"
                    messages.append(self._codec.decode(unsealed))
        except ProtocolError as error:
            self._broken = True
            self._refused["token" if isinstance(error, AuthError) else self._doing] += 1
            raise
        return messages

    def _both(self) -> tuple[DirectionSeal, DirectionSeal]:
        if self._seals is None:
            raise ProtocolError("a message was sent before the handshake was done")
        return self._seals

    def _greet(self, greeting: Greeting) -> None:
        self._output += frame(_GREETINGS.encode(greeting))

    def _derive(self, role: str, server_nonce: bytes, client_nonce: bytes) -> ConnectionKeys:
        context = (str(PROTOCOL_VERSION), self._service, role, self._secret.sealing)
        return ConnectionKeys.of(self._secret.token, server_nonce + client_nonce, *context)

    def _handshake(self, greeting: Greeting) -> None:
        if isinstance(greeting, Refused) and greeting.reason == "service":
            raise ProtocolError(f"the {self._service} does not listen there, another service does")
        if isinstance(greeting, Refused) and greeting.reason == "encryption":
            here, there = ("encrypts", "does not") if self._secret.encrypts else ("does not encrypt", "does")
            raise AuthError(
                f"this process {here}, the other end ({self._service}) {there}", hint=_SAME_ENCRYPTION
            )
        if isinstance(greeting, Refused) and self._role is not None:
            raise AuthError(
                f"the server refused this {self._role}: wrong {greeting.reason}",
                hint=SAME_VERSION if greeting.reason == "version" else _SAME_TOKEN,
            )
        if isinstance(greeting, ServerChallenge) and self._role is not None and self._keys is None:
            self._answer(greeting, self._role)
        elif isinstance(greeting, Welcome) and self._keys is not None:
            if not same(self._keys.server_proof, greeting.proof):
                raise AuthError("the server does not know the token of this run", hint=_SAME_TOKEN)
            self._opened(self._keys.from_client, self._keys.from_server)
        elif isinstance(greeting, ClientProof) and self._role is None:
            self._judge(greeting)
        else:
            raise ProtocolError(f"{type(greeting).__name__} is out of place in the handshake")

    def _answer(self, challenge: ServerChallenge, role: str) -> None:
        _check_nonce(challenge.nonce)
        if challenge.version != PROTOCOL_VERSION:
            raise AuthError(
                f"the server speaks protocol version {challenge.version}, this process {PROTOCOL_VERSION}",
                hint=SAME_VERSION,
            )
        self._keys = self._derive(role, challenge.nonce, self._nonce)
        proof = self._keys.client_proof
        self._greet(
            ClientProof(PROTOCOL_VERSION, role, self._nonce, proof, self._service, self._secret.sealing)
        )

    def _judge(self, answer: ClientProof) -> None:
        _check_nonce(answer.nonce)
        if answer.version != PROTOCOL_VERSION:
            self._greet(Refused("version"))
            raise AuthError(f"a client speaks protocol version {answer.version}, not {PROTOCOL_VERSION}")
        if answer.service != self._service:
            self._doing = "service"
            self._greet(Refused("service"))
            raise ProtocolError(f"a client has come for {answer.service[:80]!r}, this is {self._service!r}")
        if answer.sealing != self._secret.sealing:
            self._doing = "encryption"
            self._greet(Refused("encryption"))
            raise ProtocolError(f"a client and the {self._service} do not both encrypt")
        keys = self._derive(answer.role, self._nonce, answer.nonce)
        if answer.role not in ROLES or not same(keys.client_proof, answer.proof):
            self._greet(Refused("token"))
            raise AuthError("a client does not know the token of this run")
        self.peer_role = answer.role
        self._greet(Welcome(keys.server_proof))
        self._opened(keys.from_server, keys.from_client)

    def _opened(self, outgoing: bytes, incoming: bytes) -> None:
        encrypts = self._secret.encrypts
        self._seals = direction(outgoing, encrypts=encrypts), direction(incoming, encrypts=encrypts)
        self._keys = None
        self._doing = "frame"
        self._reader.limit_bytes = FRAME_SIZE_BYTES_MAX + TAG_SIZE_BYTES


def _check_nonce(nonce: bytes) -> None:
    if len(nonce) != NONCE_SIZE_BYTES:
        raise ProtocolError(f"a nonce of {len(nonce)} bytes, not {NONCE_SIZE_BYTES}")
