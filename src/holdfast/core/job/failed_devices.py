"""Failed devices: errors of devices as distinct from errors of the script, and the slots (node and local rank) that are
left out.

Theory. The most common fault of a large job is one broken device on a living host: each process that uses it raises the
same error. Type and text of an error show one of three causes: the script, certainly the device (ECC, a lost GPU), or
either of them (an illegal access may come from a kernel's bug or from bad memory). A device is identified by its slot:
a node and a local rank. A move of the rank decides the third case. An error that follows the rank to another slot is
the script's. An error that stays with the slot is the device's.

Invariants:
1. An error that is certainly the device's never ends the run as a bug of the script.
2. An uncertain error that occurs at one step on several slots is the script's, and counts against no slot.
3. A slot with ``FAILURES_MAX`` certain failures is left out. A slot with as many failures, some of them uncertain, is
   left out only while another slot can be tried.
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
    """Return how certain it is that a device caused an exception of this type and text; empty if no device did."""
    text = what.lower()
    if any(word in text for word in (*_OF_THE_SCRIPT, *_OF_A_PEER)):
        return ""
    if kind == "ComputeError" or _BROKEN.search(text):
        return "certain"
    return "likely" if any(word in text for word in _SUSPICIOUS) or kind in _TYPES else ""


class DeviceFailure(msgspec.Struct, frozen=True, kw_only=True):
    """One error of a device, with the slot of the device and the step."""

    node_id: NodeId
    local_rank: int
    step: int
    digest: str
    certain: bool
    occurrence: int = 0  # packed generation of the error: a new controller may receive the same error again

    @property
    def slot(self) -> tuple[NodeId, int]:
        """The slot that identifies the device: node and local rank."""
        return self.node_id, self.local_rank


class FailedDevices:
    """All device failures of a run.

    Args:
        failures: the failures that earlier controllers have recorded.
    """

    def __init__(self, failures: Iterable[DeviceFailure] = ()) -> None:
        self._failures: list[DeviceFailure] = list(dict.fromkeys(failures))

    def note(self, failure: DeviceFailure) -> bool:
        """Add a failure. Return False if the failure is known already."""
        if failure in self._failures:
            return False
        self._failures.append(failure)
        return True

    def is_of_script(self, failure: DeviceFailure) -> bool:
        """Return True if the script caused an uncertain failure: the same failure occurred on another slot at the same
        step.
        """
        return not failure.certain and any(
            other.slot != failure.slot and (other.digest, other.step) == (failure.digest, failure.step)
            for other in self._failures
        )

    def count(self, node_id: NodeId, local_rank: int, *, certain: bool = False) -> int:
        """Return the number of failures of one slot. With ``certain``, uncertain failures are left out."""
        return sum(
            failure.slot == (node_id, local_rank)
            and (failure.certain if certain else not self.is_of_script(failure))
            for failure in self._failures
        )

    def usable(self, node_id: NodeId, slots: int) -> list[int]:
        """Return the local ranks (of 0 to ``slots`` - 1) of a node whose devices are not certainly broken."""
        return [n for n in range(slots) if self.count(node_id, n, certain=True) < FAILURES_MAX]

    def trusted(self, node_id: NodeId, slots: int) -> list[int]:
        """Return the usable local ranks with fewer than ``FAILURES_MAX`` failures of any kind.

        Ranks are placed on these first.
        """
        return [n for n in self.usable(node_id, slots) if self.count(node_id, n) < FAILURES_MAX]
