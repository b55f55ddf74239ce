"""Copies from a device, waits for it, and errors of a device; fakes stand for the devices."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import StateError
from holdfast.frameworks.common.adapter import Hooks
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.frameworks.torch.state import boxes
from holdfast.frameworks.torch.state import state as states
from holdfast.frameworks.torch.state.boxes import byte_view, stretch
from holdfast.frameworks.torch.state.devices import await_devices, named_errors
from holdfast.frameworks.torch.state.state import TorchCollected
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Box, Catalogue
from tests.adapters.allocations import Allocations

pytestmark = pytest.mark.torch
GPUS = [torch.device("cuda:0"), torch.device("cuda:1")]


class FakeModule:
    """A fake ``torch.cuda`` that records waits."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.stream = "default"  # the current stream of this thread

    def current_stream(self, device: torch.device) -> str:
        """Return a value that is equal for the same stream, as torch's streams are."""
        return f"{self.stream} of {device}"

    def synchronize(self, device: torch.device) -> None:
        """Record a wait for all streams of a device."""
        self.waits.append(str(device))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeModule:
    """Make every parameter appear to be on two devices."""
    fake = FakeModule()

    def found(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
        return set(GPUS) if any(isinstance(tensor, nn.Parameter) for tensor in tensors) else set()

    monkeypatch.setattr(states, "devices_of", found)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    return fake


def make_adapter() -> TorchAdapter:
    """Return the adapter of one process, with a weight whose memory is not in C order."""
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    return TorchAdapter(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, {}, 0)


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=0, max_size=4), st.data())
def test_a_stretch_is_a_part_of_the_bytes_in_c_order(shape: list[int], draw: st.DataObject) -> None:
    order = draw.draw(st.permutations(range(len(shape))))
    tensor = torch.randn([shape[dim] for dim in order], dtype=torch.float32)
    tensor = tensor.permute([order.index(dim) for dim in range(len(shape))])
    assert list(tensor.shape) == shape
    size = 4 * math.prod(shape)
    start = draw.draw(st.integers(0, size))
    stop = draw.draw(st.integers(start, size))
    found = b"".join(bytes(part.numpy()) for part in stretch(tensor, start, stop))
    assert found == bytes(byte_view(tensor))[start:stop]


def test_what_pieces_of_a_box_cost_does_not_grow_with_the_box() -> None:
    """Regression: each piece that a newcomer asked for copied the whole box from the device."""
    state = TorchCollected()
    state.add(torch.rand(300, 500).t(), "w")
    box, piece = Box.whole((500, 300)), 10_000
    whole = bytes(state.view("w", box))
    with Allocations() as used:
        pieces = [bytes(state.piece("w", box, at, at + piece)) for at in range(0, len(whole), piece)]
    assert b"".join(pieces) == whole
    assert used.total <= 2 * len(whole), "copied once, and not once for each piece"
    assert bytes(state.piece("w", box, len(whole) - 3, len(whole) + 7)) == whole[-3:]


def test_all_streams_of_all_devices_are_awaited_where_state_is_read_or_put_back(cuda: FakeModule) -> None:
    """The current stream is a property of a thread. The training thread may have chosen another one."""
    adapter = make_adapter()
    adapter._devices.note_streams()
    every = [str(device) for device in GPUS]
    adapter.begin(1)
    assert cuda.waits == []
    adapter.prepare_vote()
    assert cuda.waits == every
    adapter.collect(frozen=True)
    assert cuda.waits == 2 * every
    adapter.abort()
    assert cuda.waits == 4 * every, "before the state is put back, and before the block that follows"


def test_copies_are_ordered_with_training_on_a_stream_of_the_script(cuda: FakeModule) -> None:
    """Regression: a scale or an average was copied at the start of a block while the last update still wrote to it."""
    adapter = make_adapter()
    nothing = Hooks(lambda: None, lambda name: None, lambda name: None)
    adapter.attach(nothing, lambda reason: None, lambda count, what, joint: None)
    every = [str(device) for device in GPUS]
    try:
        adapter.begin(1)
        assert cuda.waits == 2 * every, "before the first update it is not known where the script trains"
        optimizer = adapter.state.optimizers["default"].optimizer
        cuda.stream, cuda.waits = "side", []
        optimizer.step()
        for act in (adapter.end, lambda: adapter.remember(2), lambda: adapter.begin(2)):
            act()
            assert cuda.waits == [], "the stream of the training orders it"
        optimizer.step()
        cuda.stream = "default"
        for act in (adapter.end, lambda: adapter.remember(2), lambda: adapter.begin(2)):
            act()
            assert cuda.waits[:2] == every, "on another stream it waits"
            cuda.waits = []
    finally:
        adapter.detach()


def test_a_device_that_the_weights_do_not_lie_on_is_awaited_too(
    cuda: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter()
    third = torch.device("cuda:2")
    monkeypatch.setattr(states, "devices_of", lambda tensors: {*GPUS, third})
    adapter.collect()
    assert cuda.waits[-3:] == ["cuda:0", "cuda:1", "cuda:2"], "what was read before is read again"
    cuda.waits = []
    adapter.prepare_vote()
    assert "cuda:2" in cuda.waits


def test_a_load_is_over_before_the_script_trains_on_another_stream(cuda: FakeModule) -> None:
    adapter = make_adapter()
    collected = adapter.collect()
    catalogue = Catalogue.from_layouts({0: collected.layout(0, 1)})
    restore = adapter.restore(catalogue, collected.values)
    restore.buffers()
    cuda.waits = []
    restore.finish()
    assert cuda.waits == [str(device) for device in GPUS]


def test_copies_wait_for_their_streams_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waits.append(str(self.device))

    class Module:
        current_stream = Stream

    monkeypatch.setattr(
        "holdfast.frameworks.torch.state.state.devices_of", lambda tensors: {GPUS[len(waits)]}
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    state = TorchCollected()
    state.add(torch.rand(3, 5).t(), "w")
    for device in GPUS:
        state.piece("w", Box.whole((5, 3)), 0, 8)
        assert waits[-1] == str(device)
    state.finish_copies()
    assert len(waits) == 2, "nothing was begun since"


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "memory free"),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), "nvidia-smi"),
        (MemoryError(), "memory free"),
    ],
)
def test_an_error_of_the_device_is_a_refusal_of_this_rank(
    error: Exception, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise error

    adapter = make_adapter()
    collected = adapter.collect()
    monkeypatch.setattr(boxes, "flat_bytes", fail)
    box = Box.whole((4, 4))
    reads: list[Any] = [
        lambda: collected.view("weight", box),
        lambda: collected.piece("weight", box, 0, 8),
        lambda: collected.copy_to("weight", box, 0, 8, memoryview(bytearray(8))),
        lambda: adapter.digest(collected, [Extent("weight", box, 0, 64)]),
    ]
    for read in reads:
        with pytest.raises(StateError, match="cannot be") as caught:
            read()
        assert hint in caught.value.hint and "\n" not in caught.value.message


def test_a_device_that_has_failed_ends_the_collection_and_not_the_process(
    cuda: FakeModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = make_adapter()

    def fail(device: torch.device) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(cuda, "synchronize", fail)
    with pytest.raises(StateError, match="device-side assert"):
        adapter.collect()
    with pytest.raises(torch.AcceleratorError):
        adapter.prepare_vote()  # inside the block, the script's own error is not converted
    with pytest.raises(torch.AcceleratorError):
        await_devices(GPUS)


def test_errors_of_ours_keep_their_type() -> None:
    with pytest.raises(KeyError), named_errors("nothing"):
        raise KeyError("w")
