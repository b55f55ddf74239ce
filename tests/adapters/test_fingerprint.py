"""Digests of the state: any changed bit changes them, on the host and by the sums that a device would take."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.adapters.torch import fingerprint
from holdfast.adapters.torch.fingerprint import digest_of, sums
from holdfast.adapters.torch.state import Collected
from holdfast.store.copies import Extent
from holdfast.store.layout import Box

pytestmark = pytest.mark.torch
BOX = Box.whole((6, 10))


def collected(direct: bool) -> Collected:
    """One tensor, readable in place or not."""
    tensor = torch.arange(60, dtype=torch.float32).reshape(6, 10)
    state = Collected()
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


def test_exchanged_words_and_chunks_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = torch.arange(40, dtype=torch.int64)
    whole = sums([words.view(torch.uint8)])
    monkeypatch.setattr(fingerprint, "CHUNK_WORDS", 7)
    assert sums([words.view(torch.uint8)]) == whole
    words[[3, 30]] = words[[30, 3]]
    assert sums([words.view(torch.uint8)]) != whole
