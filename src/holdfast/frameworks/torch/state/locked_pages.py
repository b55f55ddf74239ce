"""Copies of device tensors to the host, through a small area of locked pages.

Theory. A GPU can write to the host only where the pages of the host cannot move: in *locked* (pinned) memory. For a
copy to other memory, the driver copies piece by piece and waits for each piece; that took 1 s per GB on an H200. To
lock the destination of every copy would cost more than the copy, and locked memory is scarce. So the bytes go through
two areas of ``AREA_SIZE_BYTES``: the device fills one while the host empties the other.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import torch

from holdfast.frameworks.torch.state.boxes import byte_view, copy_bytes

AREA_SIZE_BYTES = 16 * 1024 * 1024

Areas = tuple[memoryview, memoryview]
"""Two areas of host memory, of the same size."""


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a local tensor in C order: its own memory if possible, otherwise a copy on the host.

    Raises:
        RuntimeError: torch's error of a device that has failed, or of a host without memory.
    """
    if tensor.device.type != "cuda":
        return byte_view(tensor)
    found, at = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8), 0
    for piece in host_pieces(tensor):
        found[at : at + len(piece)].copy_(torch.frombuffer(piece, dtype=torch.uint8))
        at += len(piece)
    return found.numpy().data


def host_pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a local tensor in C order, piece after piece. Each is valid until the next one is requested.

    Raises:
        RuntimeError: torch's error of a device that has failed, or of a host without memory.
    """
    if tensor.device.type != "cuda":
        yield byte_view(tensor)
        return

    def mark() -> Callable[[], None]:
        return torch.cuda.current_stream(tensor.device).record_event().synchronize  # type: ignore[no-any-return]

    areas, lock = _areas()
    with lock:
        yield from arriving(areas, tensor, mark)


def arriving(
    areas: Areas, tensor: torch.Tensor, mark: Callable[[], Callable[[], None]]
) -> Iterator[memoryview]:
    """Yield the bytes of ``tensor`` in C order, piece after piece, as they arrive in the two ``areas`` in turn.

    Args:
        areas: the memory of the yielded pieces.
        tensor: a local tensor on any device.
        mark: called after the copies into an area have begun; returns a function that waits for their end.
    """
    size_bytes = tensor.numel() * tensor.element_size()
    piece_bytes = len(areas[0])

    def begin(start: int) -> tuple[memoryview, Callable[[], None]]:
        stop = min(start + piece_bytes, size_bytes)
        area = areas[start // piece_bytes % 2][: stop - start]
        copy_bytes(tensor, start, stop, area)
        return area, mark()

    begun = map(begin, range(0, size_bytes, piece_bytes))
    coming = next(begun, None)
    while coming is not None:
        area, arrived = coming
        arrived()
        coming = next(begun, None)
        yield area


@functools.cache
def _areas() -> tuple[Areas, threading.Lock]:
    """Return the two areas of locked pages, made at the first call, and the lock that their user must hold."""
    first, second = (
        torch.empty(AREA_SIZE_BYTES, dtype=torch.uint8, pin_memory=True).numpy().data for _ in range(2)
    )
    return (first, second), threading.Lock()
