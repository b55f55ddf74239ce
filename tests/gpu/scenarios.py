"""Work of one process with a GPU, for ``test_one_process.py``."""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from holdfast.core.ids import Generation
from holdfast.frameworks.common.adapter import Hooks
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.state.boxes import byte_view
from holdfast.frameworks.torch.state.rng import Draws, reseed
from holdfast.frameworks.torch.state.state import TorchCollected
from holdfast.store.layouts.box import Extent
from tests.adapters.worlds import Line

DEVICE = torch.device("cuda", 0)
LIMIT = timedelta(seconds=300)
BEHIND_CYCLES = 1_000_000_000
"""So long a stream is busy before it does what is asked: half a second and more."""


def _device_bytes() -> int:
    """Return the bytes in use on the device, after this process has emptied its cache."""
    gc.collect()
    torch.cuda.synchronize(DEVICE)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(DEVICE)
    return int(total - free)


def _held() -> dict[str, int]:
    """Return the device memory, descriptors and threads of this process."""
    descriptors, threads = (len(os.listdir(f"/proc/self/{what}")) for what in ("fd", "task"))
    return {"device_bytes": _device_bytes(), "descriptors": descriptors, "threads": threads}


def rebuilt(line: Line, generations: int, first: int, older: bool) -> list[dict[str, int]]:
    """Abort and rebuild NCCL groups of one rank. In every second generation, a collective is running at the abort.

    Returns: what is held in generation ``first``, and in the last generation as soon as it holds no more than that, or
        after 10 s. An aborted group ends in another thread, so some of the first measure may belong to earlier groups.
    """
    if older:
        os.environ["TORCH_DIST_USE_NCCL2"] = "0"
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl", timeout=LIMIT)
    state = fabric()
    found = []
    for number in range(1, generations + 1):
        state.shield(True)
        sum_ = torch.full((1 << 20,), float(number), device=DEVICE)
        dist.all_reduce(sum_)
        torch.cuda.synchronize(DEVICE)
        assert float(sum_[-1]) == number, "of one rank the sum is its own"
        if number == first:
            found.append(_held())
        if number == generations:
            break
        works = []
        if number % 2:
            torch.cuda._sleep(BEHIND_CYCLES // 100)  # type: ignore[no-untyped-call]
            works.append(dist.all_reduce(sum_, async_op=True))
        state.poison("a test")
        for work in works:
            assert work is not None
            work.wait()
        del works, sum_
        state.shield(False)
        state.reconfigure(Generation(1, number + 1))
    until_s = time.monotonic() + 10.0
    last = _held()
    while any(last[what] > found[0][what] for what in last) and time.monotonic() < until_s:
        time.sleep(0.1)
        last = _held()
    return [*found, last]


def _adapter(numel: int, **extras: Any) -> tuple[TorchAdapter, nn.Module]:
    """Return the adapter and the model, with a weight whose memory is not in C order."""
    reseed(7, Draws.same(0), 0)
    model = nn.Linear(numel // 512, 512).to(DEVICE)
    model.weight = nn.Parameter(model.weight.detach().t().contiguous().t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return TorchAdapter(model, optimizer, None, None, extras, 7), model


def pinned_copies(line: Line) -> dict[str, Any]:
    """Copy the state into locked pages of shared memory, in pieces, as a save does, and as a whole."""
    adapter, _ = _adapter(1 << 24)
    collected = adapter.collect()
    size = sum(tensor.numel() * tensor.element_size() for tensor in collected.tensors.values())
    area = memoryview(mmap.mmap(-1, size))
    unpin = adapter.pin(area)
    pinned = torch.frombuffer(area, dtype=torch.uint8).is_pinned()
    at, piece, same = 0, 1_000_003, True
    for fqn, tensor in collected.tensors.items():
        (box,) = collected.parts(fqn)
        length = tensor.numel() * tensor.element_size()
        for start in range(0, length, piece):
            stop = min(start + piece, length)
            collected.copy_to(fqn, box, start, stop, area[at + start : at + stop])
        collected.finish_copies()
        due = bytes(byte_view(tensor.detach().cpu()))
        same = same and due == bytes(area[at : at + length]) == bytes(collected.view(fqn, box))
        at += length
    unpin()
    after = torch.frombuffer(area, dtype=torch.uint8).is_pinned()
    return {"pinned": pinned, "same": same, "after": after}


def compared(line: Line, numel: int) -> dict[str, Any]:
    """Compare copies of the state on the device, with less memory than the state takes."""
    adapter, model = _adapter(numel)
    collected = adapter.collect()
    twin = TorchCollected()
    for fqn, tensor in collected.tensors.items():
        twin.add(tensor.detach().clone(), fqn)
    parts = [Extent(fqn, box, 0, tensor.numel() * 4) for fqn, tensor in collected.tensors.items()
             for box in collected.parts(fqn)]  # fmt: skip
    torch.cuda.synchronize(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    digest = adapter.digest(collected, parts)
    peak = torch.cuda.max_memory_allocated(DEVICE) - before
    same = digest == adapter.digest(twin, parts)
    with torch.no_grad():
        model.get_parameter("weight")[-1, -1] += 1.0
    return {"same": same, "differs": digest != adapter.digest(collected, parts), "peak_bytes": peak}


def checked(line: Line) -> list[str]:
    """Return the first weight with inf or nan: for finite gradients, and for one bad number in each dtype."""
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(100))).to(DEVICE, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        adapter = TorchAdapter(model, optimizer, None, None, {}, 7)
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        found.append(adapter.gradients.begin_check("default")())
        weight = model.get_parameter("50.weight").grad
        assert weight is not None
        weight[3, 5] = float("nan")
        found.append(adapter.gradients.begin_check("default")())
    return found


@contextmanager
def _late_stream() -> Iterator[None]:
    """Make a stream current that is far behind its host."""
    stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(BEHIND_CYCLES)  # type: ignore[no-untyped-call]
        yield


def collected_late(line: Line) -> dict[str, Any]:
    """Read the state in another thread while a stream of the script is still to change it."""
    adapter, model = _adapter(1 << 18)
    before = model.get_parameter("bias").detach().clone()
    with _late_stream(), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    read: list[bytes] = []

    def give() -> None:
        collected = adapter.collect()
        (box,) = collected.parts("bias")
        read.append(bytes(collected.view("bias", box)))

    giver = threading.Thread(target=give)
    giver.start()
    giver.join()
    return {"same": read == [bytes(byte_view((before + 1.0).cpu()))]}


def put_back_late(line: Line) -> list[float]:
    """Abort a block on a stream of the script. The state to restore was written earlier by the same stream.

    Returns: the average after the aborted block, which is the second one, and after the third block.
    """
    average = torch.zeros(1 << 18, device=DEVICE)
    adapter, _ = _adapter(1 << 18, average=average)
    adapter.attach(
        Hooks(lambda: None, lambda name: None, lambda name: None),
        lambda reason: None,
        lambda count, what, joint: None,
    )
    found = []
    for step in range(3):
        adapter.begin(step)
        with _late_stream():
            adapter.state.optimizers["default"].optimizer.step()
            average.add_(1.0)
        if step == 1:
            adapter.abort()
        else:
            adapter.prepare_vote()
            adapter.end()
        if step:
            with _late_stream():
                found.append(float(average[-1]))
    adapter.detach()
    return found
