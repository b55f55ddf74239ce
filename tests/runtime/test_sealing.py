"""Authenticated frames of a connection: an attacker in the middle cannot change anything without detection."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.ids import MemberId, NodeId
from holdfast.core.protocol.messages import AgentHello, StopRun
from holdfast.errors import AuthError, ProtocolError
from holdfast.frame_encryption import EncryptedFrames
from holdfast.runtime.net.addresses import LOOPBACK, Address
from holdfast.runtime.net.blocking_channel import BlockingChannel
from holdfast.runtime.net.channel import Channel, Hub
from holdfast.runtime.net.service_names import agent_of, controller_of, zygote_of
from holdfast.runtime.node.spawn import ZYGOTE_MESSAGES, Exited, Spawn, ZygoteMessage
from holdfast.sealing import KEY_SIZE_BYTES, Secret, derive
from holdfast.wire import MESSAGES, Link, WireMessage, frame
from tests.runtime.runs import BOUND_S

SECRET = Secret(b"t" * 32)
BOTH = pytest.mark.parametrize("secret", [SECRET, SECRET._replace(encrypts=True)], ids=["plain", "encrypted"])
AGENT, CONTROLLER, ZYGOTE = agent_of("node0"), controller_of(1), zygote_of("node0")
PACK = msgspec.msgpack.Encoder().encode


@pytest.mark.parametrize(
    ("secret", "salt", "info", "expected"),
    [
        (
            b"\x0b" * 22,
            bytes(range(13)),
            bytes(range(0xF0, 0xFA)),
            "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
        ),
        (
            b"\x0b" * 22,
            b"",
            b"",
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
        ),
    ],
    ids=["A.1", "A.3"],
)
def test_keys_are_derived_as_in_rfc_5869(secret: bytes, salt: bytes, info: bytes, expected: str) -> None:
    assert derive(secret, salt, info, 42).hex() == expected


# ---------------------------------------------------------------- an attacker that forwards the handshake


async def one(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame, without its length."""
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))


class Ends:
    """A listener of a run, and the messages that it received."""

    def __init__(self) -> None:
        self.heard: list[WireMessage] = []
        self.hub: Hub[WireMessage] = Hub(
            MESSAGES,
            SECRET,
            on_open=lambda channel: None,
            on_message=lambda channel, message: self.heard.append(message),
            on_close=lambda channel: None,
        )


def test_a_relay_of_the_handshake_cannot_speak_for_the_client() -> None:
    """Regression: frames after the greetings were trusted, so the server executed the attacker's StopRun."""
    ends, closed = Ends(), asyncio.Event()

    async def scenario() -> None:
        server, listens = await ends.hub.listen(AGENT, LOOPBACK)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_connection(*listens)
            writer.write(frame(await one(inner)))
            outer.write(frame(await one(reader)))
            writer.write(frame(await one(inner)))  # both ends accept the handshake
            evil = PACK(StopRun(reason="injected"))
            outer.write(frame(evil + bytes(16)))
            await inner.read()  # the server closes
            outer.close()
            writer.close()
            closed.set()

        middle = await asyncio.start_server(relay, "127.0.0.1", 0)
        at = Address(*middle.sockets[0].getsockname())
        line = await asyncio.to_thread(lambda: BlockingChannel.connect(MESSAGES, at, SECRET, AGENT, "cli"))
        await asyncio.wait_for(closed.wait(), BOUND_S)
        line.close()
        middle.close()
        server.close()
        await ends.hub.close(1.0)

    asyncio.run(scenario())
    assert ends.heard == [] and ends.hub.refused == {"seal": 1}


@pytest.mark.parametrize("renamed", [False, True], ids=["as it is", "renamed"])
def test_a_connection_for_one_service_cannot_be_led_to_another(renamed: bool) -> None:
    """Regression: an agent that connected to the port of its dead zygote was accepted by the controller as an agent."""
    ends, told = Ends(), list[ZygoteMessage]()

    async def scenario() -> None:
        server, listens = await ends.hub.listen(CONTROLLER, LOOPBACK)

        async def freed_port(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner, outer = await asyncio.open_connection(*listens)
            writer.write(frame(await one(inner)))
            answer = msgspec.msgpack.decode(await one(reader))
            if renamed:
                answer["service"] = CONTROLLER
            outer.write(frame(PACK(answer)))
            writer.write(frame(await one(inner)))
            outer.write(
                frame(PACK(AgentHello(node_id=NodeId("node0"), slots=8, pid=1, members=())) + bytes(16))
            )
            writer.write(frame(PACK(Exited(MemberId(3), 4711, 0, None)) + bytes(16)))
            outer.close()
            writer.close()

        def say(channel: Channel[ZygoteMessage]) -> None:
            channel.send(Spawn(MemberId(3), {"KEY": "of the user"}, "/x.log"))

        fake = await asyncio.start_server(freed_port, "127.0.0.1", 0)
        agent: Hub[ZygoteMessage] = Hub(
            ZYGOTE_MESSAGES,
            SECRET,
            on_open=say,
            on_message=lambda channel, message: told.append(message),
            on_close=lambda channel: None,
        )
        with pytest.raises(ProtocolError, match="wrong token" if renamed else "another service does"):
            await agent.connect(Address(*fake.sockets[0].getsockname()), ZYGOTE, "agent")
        fake.close()
        server.close()
        await ends.hub.close(1.0)

    asyncio.run(scenario())
    assert not ends.heard and not told and not ends.hub.channels
    assert ends.hub.refused["token" if renamed else "service"] == 1


# ---------------------------------------------------------------- a recorded session, changed


class Session:
    """Both ends of one connection after the handshake. Equal arguments give equal connections."""

    def __init__(self, secret: Secret, number: int = 0, service: str = AGENT) -> None:
        self.refused: Counter[str] = Counter()
        nonces = [bytes((number, end)) * 16 for end in range(2)]
        self.server: Link[WireMessage] = Link(
            MESSAGES, secret, nonces[0], service=service, role=None, refused=self.refused
        )
        self.client: Link[WireMessage] = Link(
            MESSAGES, secret, nonces[1], service=service, role="worker", refused=self.refused
        )
        self.client.receive(self.server.take_output())
        self.server.receive(self.client.take_output())
        self.client.receive(self.server.take_output())
        assert self.server.open and self.client.open


def sent(way: str, count: int = 6) -> list[WireMessage]:
    """Return the messages of one end: several lengths, and one message twice."""
    return [StopRun(reason=f"{way} {number // 2} " + "x" * (7 * number // 2)) for number in range(count)]


def recorded(secret: Secret, way: str, number: int = 0, service: str = AGENT) -> list[bytes]:
    """Return the frames of one direction of a session: ``up`` to the server or ``down`` to the client."""
    session = Session(secret, number, service)
    link = session.client if way == "up" else session.server
    frames = []
    for message in sent(way):
        link.send(message)
        frames.append(link.take_output())
    return frames


FOREIGN = {
    "connection": lambda secret, way: recorded(secret, way, number=1),
    "direction": lambda secret, way: recorded(secret, {"up": "down", "down": "up"}[way]),
    "service": lambda secret, way: recorded(secret, way, service=ZYGOTE),
    "other kind": lambda secret, way: recorded(secret._replace(encrypts=not secret.encrypts), way),
}
CHANGES: list[str] = ["flip", "drop", "twice", "swap", "cut", *FOREIGN]


def changed(draw: st.DataObject, secret: Secret, way: str, frames: list[bytes]) -> list[bytes]:
    """Draw one change of a recorded direction."""
    kind = draw.draw(st.sampled_from(CHANGES))
    at = draw.draw(st.integers(0, len(frames) - 1))
    other = draw.draw(st.integers(0, len(frames) - 1))
    frames = list(frames)
    if kind == "flip":
        bit = draw.draw(st.integers(0, 8 * len(frames[at]) - 1))
        data = bytearray(frames[at])
        data[bit // 8] ^= 1 << bit % 8
        frames[at] = bytes(data)
    elif kind == "drop":
        del frames[at]
    elif kind == "twice":
        frames.insert(other, frames[at])
    elif kind == "swap":
        frames[at], frames[other] = frames[other], frames[at]
    elif kind == "cut":
        keep = draw.draw(st.integers(1, len(frames[at])))
        frames[at] = frames[at][:keep]
    else:
        foreign: list[bytes] = FOREIGN[kind](secret, way)
        frames[at : at + draw.draw(st.integers(0, 1))] = [foreign[other % len(foreign)]]
    return frames


@BOTH
@settings(deadline=None)
@given(st.data(), st.sampled_from(["up", "down"]), st.integers(1, 3), st.integers(1, 200))
def test_no_changed_stream_yields_a_message_that_was_not_sent_in_that_place(
    secret: Secret, draw: st.DataObject, way: str, changes: int, piece_bytes: int
) -> None:
    frames = honest = recorded(secret, way)
    for _ in range(changes):
        frames = changed(draw, secret, way, frames) if frames else frames
    stream, was = b"".join(frames), b"".join(honest)
    same_bytes = next((n for n, (a, b) in enumerate(zip(stream, was, strict=False)) if a != b), len(was))
    intact, end = 0, 0
    for each in honest:
        end += len(each)
        intact += end <= min(same_bytes, len(stream))
    session = Session(secret)
    link = session.server if way == "up" else session.client
    got: list[WireMessage] = []
    refused = False
    for start in range(0, len(stream), piece_bytes):
        try:
            got += link.receive(stream[start : start + piece_bytes])
        except ProtocolError:
            refused = True  # and every later frame is refused again
    assert got == sent(way)[: len(got)] and len(got) <= intact
    assert refused == (sum(session.refused.values()) == 1)
    assert refused or len(got) == intact, "what is whole is taken, the rest waits for more"


@BOTH
def test_an_unchanged_stream_yields_all(secret: Secret) -> None:
    for way in ("up", "down"):
        session = Session(secret)
        link = session.server if way == "up" else session.client
        assert link.receive(b"".join(recorded(secret, way))) == sent(way)
        link.send(StopRun(reason="back"))


@BOTH
def test_no_changed_bit_of_the_handshake_opens_a_server(secret: Secret) -> None:
    def links() -> tuple[Link[WireMessage], Link[WireMessage]]:
        nonces = (b"s" * 32, b"c" * 32)
        server: Link[WireMessage] = Link(
            MESSAGES, secret, nonces[0], service=AGENT, role=None, refused=Counter()
        )
        client: Link[WireMessage] = Link(
            MESSAGES, secret, nonces[1], service=AGENT, role="worker", refused=Counter()
        )
        return server, client

    def opened(change: Callable[[int, bytes], bytes]) -> tuple[bool, bool]:
        server, client = links()
        try:
            client.receive(change(0, server.take_output()))
            server.receive(change(1, client.take_output()))
            client.receive(change(2, server.take_output()))
        except ProtocolError:
            pass
        return server.open, client.open

    sizes: dict[int, int] = {}

    def measured(turn: int, data: bytes) -> bytes:
        sizes[turn] = len(data)
        return data

    assert opened(measured) == (True, True)
    for turn, size_bytes in sizes.items():
        for bit in range(8 * size_bytes):

            def flip(now: int, data: bytes, turn: int = turn, bit: int = bit) -> bytes:
                if now != turn:
                    return data
                flipped = bytearray(data)
                flipped[bit // 8] ^= 1 << bit % 8
                return bytes(flipped)

            assert opened(flip) == (turn == 2, False), f"bit {bit} of greeting {turn}"


# ---------------------------------------------------------------- encryption


def test_what_is_said_is_not_seen_in_an_encrypted_stream() -> None:
    """Each repeated message looks like another one, too."""
    encrypted = SECRET._replace(encrypts=True)
    for secret, seen in ((SECRET, True), (encrypted, False)):
        frames = recorded(secret, "up")
        assert (b"up 0" in frames[0]) is seen and (b"xxxx" in b"".join(frames)) is seen
    assert len(set(recorded(encrypted, "up"))) == len(sent("up"))


@pytest.mark.parametrize("server_encrypts", [False, True])
def test_one_end_that_encrypts_is_refused_by_name(server_encrypts: bool) -> None:
    refused: Counter[str] = Counter()
    secrets = [SECRET._replace(encrypts=server_encrypts is (end == 0)) for end in range(2)]
    server: Link[WireMessage] = Link(
        MESSAGES, secrets[0], b"s" * 32, service=AGENT, role=None, refused=refused
    )
    client: Link[WireMessage] = Link(
        MESSAGES, secrets[1], b"c" * 32, service=AGENT, role="worker", refused=Counter()
    )
    client.receive(server.take_output())
    with pytest.raises(ProtocolError, match="do not both encrypt"):
        server.receive(client.take_output())
    here = "does not encrypt" if server_encrypts else "encrypts"
    with pytest.raises(AuthError, match=rf"this process {here}, the other end \({AGENT}\) does") as caught:
        client.receive(server.take_output())
    assert caught.value.hint == "--encrypt on every host, or on none"
    assert refused == {"encryption": 1} and not server.open and not client.open


def sealed_batches(seal: EncryptedFrames, batches: list[list[bytes]]) -> list[tuple[list[bytes], bytes]]:
    """Parts as they are sent, and the tag of each batch."""
    made = []
    for parts in batches:
        batch = seal.seal_batch(local=True)
        made.append(([bytes(batch.seal(memoryview(part))) for part in parts], batch.tag()))
    return made


@settings(deadline=None)
@given(st.lists(st.binary(max_size=200), min_size=1, max_size=4), st.integers(1, 70), st.data())
def test_a_batch_is_taken_as_it_was_sealed_or_not_at_all(
    parts: list[bytes], piece_bytes: int, draw: st.DataObject
) -> None:
    """In pieces of any size; with one bit of it or of its tag changed; in another place."""
    key, whole = bytes(range(KEY_SIZE_BYTES)), b"".join(parts)
    ((pieces, tag), (others, other_tag)) = sealed_batches(EncryptedFrames(key), [parts, parts])
    ciphertext = b"".join(pieces)
    assert len(ciphertext) == len(whole) and (len(whole) < 8 or ciphertext not in (whole, b"".join(others)))

    def taken(data: bytes, tag: bytes) -> bool:
        buffer = bytearray(data)
        batch = EncryptedFrames(key).open_batch(local=True)
        for start in range(0, len(buffer), piece_bytes):
            batch.open(memoryview(buffer)[start : start + piece_bytes])
        return batch.fits(tag) and buffer == whole

    assert taken(ciphertext, tag)
    assert not taken(b"".join(others), other_tag), "it was the second one"
    bit = draw.draw(st.integers(0, 8 * (len(ciphertext) + len(tag)) - 1))
    data = bytearray(ciphertext + tag)
    data[bit // 8] ^= 1 << bit % 8
    assert not taken(bytes(data[: len(ciphertext)]), bytes(data[len(ciphertext) :]))
    if ciphertext:
        assert not taken(ciphertext[:-1], tag)
