"""Copies through small areas: the bytes of any tensor in C order, whatever the sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.frameworks.torch.state.boxes import byte_view
from holdfast.frameworks.torch.state.locked_pages import arriving, host_bytes, host_pieces

pytestmark = pytest.mark.torch

TENSORS = {
    "empty": torch.zeros(0),
    "one": torch.tensor(3.5),
    "exact": torch.arange(64, dtype=torch.uint8),
    "two areas": torch.arange(32, dtype=torch.float32),
    "many": torch.randn(37, 11, generator=torch.Generator().manual_seed(1)),
    "transposed": torch.arange(60.0).reshape(12, 5).t(),
    "wide": torch.arange(40.0).to(torch.complex128),
}


@pytest.mark.parametrize("name", TENSORS)
def test_bytes_are_those_of_the_tensor(name: str) -> None:
    """An area is filled only after the host has emptied it, so at most two copies have begun."""
    areas = memoryview(bytearray(64)), memoryview(bytearray(64))
    begun, ended = 0, 0

    def mark() -> Callable[[], None]:
        nonlocal begun
        begun += 1
        assert begun - ended <= 2, "two areas"
        return wait

    def wait() -> None:
        nonlocal ended
        ended += 1

    tensor = TENSORS[name]
    due = bytes(byte_view(tensor))
    assert b"".join(bytes(piece) for piece in arriving(areas, tensor, mark)) == due
    assert bytes(host_bytes(tensor)) == due == b"".join(map(bytes, host_pieces(tensor)))
