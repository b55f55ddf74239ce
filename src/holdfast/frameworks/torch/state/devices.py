"""The devices of the state: what is in flight on them, and their errors.

A process queues work on the streams of its devices and continues. The current stream is a property of a thread, so a
thread that reads the state has to wait for streams that it does not know: it waits for all of each device. The same
holds for the thread that trains, when the script has trained on a stream of its choice and has left it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from holdfast.errors import StateError


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """The accelerators that ``tensors`` lie on."""
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def await_devices(devices: Iterable[torch.device]) -> None:
    """Return when everything that any thread has queued on any stream of ``devices`` has run.

    Raises:
        RuntimeError: torch's error of work on a device that has failed.
    """
    for device in sorted(devices, key=str):
        torch.get_device_module(device).synchronize(device)


class StateDevices:
    """The devices that one state lies on, and the streams that its training is queued on."""

    def __init__(self, found: Iterable[torch.device]) -> None:
        self._found = set(found)
        self._trained: list[object] | None = None  # streams; None: not known yet

    def add(self, found: Iterable[torch.device]) -> bool:
        """The state lies on these too. True when one of them was not known."""
        known = len(self._found)
        self._found.update(found)
        return len(self._found) > known

    def wait(self) -> None:
        """Return when everything that is queued has run. Raises: RuntimeError, as :func:`await_devices`."""
        await_devices(self._found)

    def note_streams(self) -> None:
        """The current streams of this thread are those of the training."""
        self._trained = self._streams()

    def order(self) -> None:
        """Before this thread reads or writes state between the training's kernels: wait, if it is on other streams."""
        if self._found and self._streams() != self._trained:
            self.wait()

    def _streams(self) -> list[object]:
        found = sorted(self._found, key=str)
        return [torch.get_device_module(device).current_stream(device) for device in found]


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Errors of torch and of its devices inside are a StateError: this rank cannot give its state, and lives.

    Args:
        what: was not possible, as the beginning of the message.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        hint = ""
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            hint = "leave more memory free: reading the state needs up to 100 MiB beside it"
        elif isinstance(error, torch.AcceleratorError):
            hint = "the device may be broken: dmesg and `nvidia-smi -q` may say more"
        raise StateError(f"{what}: {reason}", hint=hint) from error
