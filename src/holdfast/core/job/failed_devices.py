"""Which devices have failed: errors of a device told from those of the script, and slots that are left out.

Theory. The commonest fault of a large job is one device on a host that lives: whatever process sits there raises the
same error again. By type and text an error is of the script, of the device for certain (ECC, a lost GPU), or of either
(an illegal access may be a kernel's bug or bad memory). A device is a slot: a node and a local rank. Which it was is
told by moving: what follows the rank to another slot is the script's, what stays is the device's.

Invariants:
1. An error that is of the device for certain never ends the run as a bug of the script.
2. An error that may be either, at one step on several slots, is the script's, and counts against none of them.
3. A slot with ``FAILURES_MAX`` failures is left out; for an uncertain error only while there is another one to try.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import msgspec

from holdfast.core.ids import NodeId

FAILURES_MAX = 2

Certainty = Literal["", "likely", "certain"]

_BROKEN = re.compile(
    r"uncorrectable (ecc|nvlink|memory|hbm|page|error)|\becc error|double[- ]bit ecc|hardware stack error|\bxid\b"
    r"|gpu is lost|device (is )?lost|fallen off the bus|unable to determine the device handle"
    r"|no cuda-capable device|cuda-capable device\(s\) is/are busy|no hip gpus|unhandled cuda error"
    r"|cudaerror(eccuncorrectable|nvlinkuncorrectable)|aicore exception|hbm multi-?bit"
)
_SUSPICIOUS = (
    "cuda error",
    "cuda driver error",
    "hip error",
    "cublas_status_execution_failed",
    "cublas_status_internal_error",
    "cudnn_status_execution_failed",
    "cudnn_status_internal_error",
    "nccl error",
    "acl error",
)
_OF_THE_SCRIPT = (
    "out of memory",
    "device-side assert",
    "invalid device ordinal",
    "invalid argument",
    "invalid configuration argument",
    "invalid device function",
    "no kernel image",
    "invalid resource handle",
    "operation not permitted when stream is capturing",
    "nccl error: invalid",
)
_OF_A_PEER = ("remote process exited", "ncclremoteerror", "connection closed by remote", "socket timeout")
_TYPES = frozenset({"AcceleratorError", "CUDARuntimeError", "CudaError"})


def certainty(kind: str, what: str) -> Certainty:
    """How sure it is that an exception of this type and text comes from a device; empty: it does not."""
    text = what.lower()
    if any(word in text for word in (*_OF_THE_SCRIPT, *_OF_A_PEER)):
        return ""
    if kind == "ComputeError" or _BROKEN.search(text):
        return "certain"
    return "likely" if any(word in text for word in _SUSPICIOUS) or kind in _TYPES else ""


class DeviceFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One error of a device, where it was seen."""

    node_id: NodeId
    local_rank: int
    step: int
    digest: str
    certain: bool
    occurrence: int = 0  # the generation, packed: a successor hears of it again

    @property
    def slot(self) -> tuple[NodeId, int]:
        """The device."""
        return self.node_id, self.local_rank


class FailedDevices:
    """All failures of devices of a run.

    Args:
        failures: what an earlier controller has noted.
    """

    def __init__(self, failures: Iterable[DeviceFailure] = ()) -> None:
        self._failures: list[DeviceFailure] = list(dict.fromkeys(failures))

    def note(self, failure: DeviceFailure) -> bool:
        """One more; False when it is known."""
        if failure in self._failures:
            return False
        self._failures.append(failure)
        return True

    def is_of_script(self, failure: DeviceFailure) -> bool:
        """It may be the script, and was seen on another slot as well, at the same step."""
        return not failure.certain and any(
            other.slot != failure.slot and (other.digest, other.step) == (failure.digest, failure.step)
            for other in self._failures
        )

    def count(self, node_id: NodeId, local_rank: int, *, certain: bool = False) -> int:
        """Failures of one slot; ``certain``: without those that may be the script's."""
        return sum(
            failure.slot == (node_id, local_rank)
            and (failure.certain if certain else not self.is_of_script(failure))
            for failure in self._failures
        )

    def usable(self, node_id: NodeId, slots: int) -> list[int]:
        """Local ranks of a node that may be seated: devices that are not broken for certain."""
        return [n for n in range(slots) if self.count(node_id, n, certain=True) < FAILURES_MAX]

    def trusted(self, node_id: NodeId, slots: int) -> list[int]:
        """Those of them on which nothing has failed too often: what is taken first."""
        return [n for n in self.usable(node_id, slots) if self.count(node_id, n) < FAILURES_MAX]
