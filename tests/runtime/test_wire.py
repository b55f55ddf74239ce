"""Frames, codec, handshake: accepted input, and the refusal and count of all other input."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.ids import Generation, MemberId
from holdfast.core.protocol.messages import FRAME_SIZE_BYTES_MAX, Ack, Fence
from holdfast.errors import AuthError, ProtocolError
from holdfast.sealing import TAG_SIZE_BYTES, Secret
from holdfast.wire import GREETING_SIZE_BYTES_MAX, MESSAGES, FrameReader, Link, WireMessage, frame

SECRET = Secret(b"t" * 32)
FENCE = Fence(member_id=MemberId(3), generation=Generation(1, 2), reason="why")


def pair(
    client_secret: Secret = SECRET, role: str = "worker"
) -> tuple[Link[WireMessage], Link[WireMessage], Counter[str]]:
    refused: Counter[str] = Counter()
    server = Link(MESSAGES, SECRET, b"s" * 32, service="desk", role=None, refused=refused)
    client = Link(MESSAGES, client_secret, b"c" * 32, service="desk", role=role, refused=Counter())
    return server, client, refused


def shake(server: Link[WireMessage], client: Link[WireMessage]) -> None:
    client.receive(server.take_output())
    server.receive(client.take_output())
    client.receive(server.take_output())


def test_handshake_then_messages_both_ways() -> None:
    server, client, refused = pair()
    shake(server, client)
    assert server.open and client.open and server.peer_role == "worker"
    client.send(FENCE)
    server.send(Ack(ok=True))
    data = client.take_output()
    assert server.receive(data[:7]) == []
    assert server.receive(data[7:]) == [FENCE]
    assert client.receive(server.take_output()) == [Ack(ok=True)]
    assert not refused


def test_wrong_token_is_refused_on_both_sides_and_counted() -> None:
    server, client, refused = pair(client_secret=Secret(b"x" * 32))
    client.receive(server.take_output())
    with pytest.raises(AuthError, match="does not know the token"):
        server.receive(client.take_output())
    assert not server.open and refused["token"] == 1
    with pytest.raises(AuthError, match="wrong token"):
        client.receive(server.take_output())


def test_a_server_without_the_token_is_refused() -> None:
    server, client, _ = pair()
    client.receive(server.take_output())
    client.take_output()
    from holdfast.wire import _GREETINGS, Welcome

    with pytest.raises(AuthError, match="server does not know"):
        client.receive(frame(_GREETINGS.encode(Welcome(b"p" * 32))))
    assert not client.open


def test_unknown_role_and_reflected_proof_are_refused() -> None:
    server, client, _ = pair(role="root")
    client.receive(server.take_output())
    with pytest.raises(AuthError):
        server.receive(client.take_output())
    server, client, refused = pair()
    challenge = server.take_output()
    with pytest.raises(ProtocolError, match="out of place"):
        server.receive(challenge)
    assert refused["greeting"] == 1


def test_before_the_handshake_frames_are_short_and_nothing_may_be_sent() -> None:
    server, client, refused = pair()
    with pytest.raises(ProtocolError, match=f"limit of {GREETING_SIZE_BYTES_MAX}"):
        server.receive((GREETING_SIZE_BYTES_MAX + 1).to_bytes(4, "big"))
    assert refused["greeting"] == 1
    with pytest.raises(ProtocolError, match="before the handshake"):
        client.send(FENCE)


def test_oversized_and_unknown_frames_are_refused_after_the_handshake() -> None:
    server, client, refused = pair()
    shake(server, client)
    with pytest.raises(ProtocolError, match=f"limit of {FRAME_SIZE_BYTES_MAX + TAG_SIZE_BYTES}"):
        server.receive((FRAME_SIZE_BYTES_MAX + TAG_SIZE_BYTES + 1).to_bytes(4, "big"))
    for payload in (b"\x81\xa4type\xa3Hax", MESSAGES.encode(FENCE)[:-3]):
        server, client, refused = pair()
        shake(server, client)
        assert client._seals is not None
        with pytest.raises(ProtocolError, match="no known message"):
            server.receive(frame(client._seals[0].sealed(payload)))
        assert refused == {"frame": 1}
    with pytest.raises(ProtocolError, match="exceeds"):
        frame(bytes(FRAME_SIZE_BYTES_MAX + 1))


@given(st.binary(max_size=300))
def test_any_bytes_give_messages_or_protocol_errors(data: bytes) -> None:
    server, client, _ = pair()
    shake(server, client)
    try:
        assert server.receive(data) == []
    except ProtocolError:
        pass
    stranger, _, _ = pair()
    try:
        stranger.receive(data)
    except ProtocolError:
        pass
    assert not stranger.open


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 40))
def test_frames_survive_any_cut(payloads: list[bytes], cut: int) -> None:
    stream = b"".join(frame(payload) for payload in payloads)
    reader = FrameReader(100)
    seen = []
    for start in range(0, len(stream), cut):
        reader.feed(stream[start : start + cut])
        while (payload := reader.next()) is not None:
            seen.append(payload)
    assert seen == payloads


@pytest.mark.parametrize("depth", [100, 1_000, 100_000])
def test_a_frame_that_is_nested_deeply_is_no_message(depth: int) -> None:
    """Regression: an unknown field of nested lists raised RecursionError, which ended agent and zygote."""
    body = b"\x81\xa2zz" + b"\x91" * depth + b"\xc0"
    with pytest.raises(ProtocolError, match="no known message"):
        MESSAGES.decode(body)
    if len(body) <= GREETING_SIZE_BYTES_MAX:
        server = Link(MESSAGES, SECRET, bytes(32), service="desk", role=None, refused=Counter())
        with pytest.raises(ProtocolError):
            server.receive(frame(body))
