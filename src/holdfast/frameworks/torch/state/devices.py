"""Waits for the work that is queued on the devices of the state, and the handling of device errors.

A process queues work on the streams of its devices and continues. Each thread has its own current stream. So a thread
that reads the state waits for all streams of each device, because it does not know which streams trained. The training
thread waits in the same way if the script has trained on a stream of its choice and has left that stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from holdfast.errors import StateError


def devices_of(tensors: Iterable[torch.Tensor]) -> set[torch.device]:
    """Return the accelerators that hold ``tensors``."""
    return {tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")}


def await_devices(devices: Iterable[torch.device]) -> None:
    """Wait until everything that any thread has queued on any stream of ``devices`` has run.

    Raises:
        RuntimeError: torch's error of work that failed on a device.
    """
    for device in sorted(devices, key=str):
        torch.get_device_module(device).synchronize(device)


class StateDevices:
    """The devices that hold the state of one session, and the streams on which it trains."""

    def __init__(self, found: Iterable[torch.device]) -> None:
        self._found = set(found)
        self._trained: list[object] | None = None  # streams; None: not known yet

    def add(self, found: Iterable[torch.device]) -> bool:
        """Add devices of the state; return True if one of them is new."""
        known = len(self._found)
        self._found.update(found)
        return len(self._found) > known

    def wait(self) -> None:
        """Wait until all queued work on these devices has run. Raises: RuntimeError: the error of failed work."""
        await_devices(self._found)

    def note_streams(self) -> None:
        """Record the current streams of this thread as the streams of the training."""
        self._trained = self._streams()

    def order(self) -> None:
        """Wait for the devices if the current streams of this thread differ from the streams of the training.

        Call it before state is read or written.
        """
        if self._found and self._streams() != self._trained:
            self.wait()

    def _streams(self) -> list[object]:
        found = sorted(self._found, key=str)
        return [torch.get_device_module(device).current_stream(device) for device in found]


@contextlib.contextmanager
def named_errors(what: str) -> Iterator[None]:
    """Turn errors of torch and its devices inside the ``with`` block into a StateError.

    The rank then cannot save its state, but its process continues.

    Args:
        what: the beginning of the message, for example "weight cannot be read".
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
