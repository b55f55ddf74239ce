"""Digests of the state: every changed bit changes them, on the host and with the sums that a device computes."""

from __future__ import annotations

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.frameworks.torch.state import tensor_digest
from holdfast.frameworks.torch.state.boxes import byte_view
from holdfast.frameworks.torch.state.state import TorchCollected
from holdfast.frameworks.torch.state.tensor_digest import digest_of, sums
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box
from tests.adapters.allocations import Allocations

pytestmark = pytest.mark.torch
BOX = Box.whole((6, 10))


def collected(direct: bool) -> TorchCollected:
    """Return a state of one tensor, readable in place or not."""
    tensor = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = TorchCollected()
    state.add(tensor if direct else tensor.t().contiguous().t(), "w")
    return state


@pytest.mark.parametrize("direct", [True, False])
def test_one_bit_anywhere_changes_the_digest_of_its_part_only(direct: bool) -> None:
    state = collected(direct)
    assert state.region("w", BOX).is_contiguous() == direct
    whole = [Extent("w", BOX, 0, 240)]
    parts = [[Extent("w", BOX, 0, 64)], [Extent("w", BOX, 64, 131)], [Extent("w", BOX, 131, 240)]]
    before = [digest_of(state, part) for part in (whole, *parts)]
    assert len(set(before)) == 4
    state.tensors["w"].view(torch.int32)[2, 3] ^= 1  # bytes 92 to 95
    after = [digest_of(state, part) for part in (whole, *parts)]
    assert [a != b for a, b in zip(before, after, strict=True)] == [True, False, True, False]
    state.tensors["w"].view(torch.int32)[2, 3] ^= 1
    assert [digest_of(state, part) for part in (whole, *parts)] == before


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_a_changed_byte_changes_the_sums(data: bytes, draw: st.DataObject) -> None:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    cut = draw.draw(st.integers(0, len(data)))
    before = sums([tensor[:cut], tensor[cut:]])
    assert before == sums([tensor]), "where it was cut does not matter"
    at, bit = draw.draw(st.integers(0, len(data) - 1)), draw.draw(st.integers(0, 7))
    tensor[at] ^= 1 << bit
    assert sums([tensor]) != before


@pytest.mark.parametrize("direct", [True, False])
def test_a_device_needs_room_for_four_chunks_however_large_the_state_is(
    direct: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_digest, "CHUNK_WORDS", 4096)
    state = TorchCollected()
    for name in ("a", "b", "c"):
        tensor = torch.rand(401, 301)
        state.add(tensor if direct else tensor.t(), name)
    boxes = {name: Box.whole(tuple(tensor.shape)) for name, tensor in state.tensors.items()}
    monkeypatch.setattr(state, "own", lambda fqn, box: None)  # as on a device
    parts = [Extent(name, box, 3, 4 * 401 * 301) for name, box in boxes.items()]
    with Allocations() as used:
        digest = digest_of(state, parts)
    assert used.peak < 4 * 4096 * 8 < used.total
    monkeypatch.undo()
    laid = b"".join(bytes(byte_view(state.region(part.fqn, part.box)))[3:] for part in parts)
    whole = xxhash.xxh3_64(sums([torch.frombuffer(bytearray(laid), dtype=torch.uint8)]))
    assert digest == whole.intdigest(), "how it is cut does not matter"


def test_exchanged_words_and_chunks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(40, dtype=torch.int64)
    whole = sums([words.view(torch.uint8)])
    monkeypatch.setattr(tensor_digest, "CHUNK_WORDS", 7)
    assert sums([words.view(torch.uint8)]) == whole
    words[[3, 30]] = words[[30, 3]]
    assert sums([words.view(torch.uint8)]) != whole
