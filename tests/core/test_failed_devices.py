"""Errors of devices: distinguished from errors of scripts, and counted."""

from __future__ import annotations

import msgspec
import pytest

from holdfast.core.ids import NodeId
from holdfast.core.job.failed_devices import DeviceFailure, FailedDevices, certainty

NODE, OTHER = NodeId("n0"), NodeId("n1")
ONE = DeviceFailure(node_id=NODE, local_rank=1, step=5, digest="d", certain=True, occurrence=1)


@pytest.mark.parametrize(
    ("kind", "what", "sure"),
    [
        ("AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "certain"),
        ("RuntimeError", "CUDA error: uncorrectable NVLink error detected during the execution", "certain"),
        ("RuntimeError", "CUDA error: hardware stack error", "certain"),
        ("RuntimeError", "No CUDA-capable device is detected", "certain"),
        ("AcceleratorError", "HIP error: device is lost", "certain"),
        ("DistBackendError", "NCCL error in: x.cpp:1, unhandled cuda error (run with NCCL_DEBUG=INFO)", "certain"),
        ("NVMLError", "GPU is lost (Xid 79)", "certain"),
        ("AcceleratorError", "CUDA error: an illegal memory access was encountered", "likely"),
        ("RuntimeError", "CUDA error: unspecified launch failure", "likely"),
        ("RuntimeError", "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED", "likely"),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", ""),
        ("AcceleratorError", "CUDA error: device-side assert triggered", ""),
        ("RuntimeError", "CUDA error: invalid device ordinal", ""),
        ("RuntimeError", "CUDA error: no kernel image is available for execution on the device", ""),
        ("DistBackendError", "NCCL error: remote process exited or there was a network error", ""),
        ("ValueError", "a batch of rank 3 is not uncorrectably bad", ""),
        ("KeyError", "'labels'", ""),
        ("StopIteration", "uncorrectable", ""),
    ],
)  # fmt: skip
def test_what_an_exception_says_of_its_device(kind: str, what: str, sure: str) -> None:
    assert certainty(kind, what) == sure


def test_a_slot_is_left_out_after_its_second_certain_failure() -> None:
    devices = FailedDevices()
    assert devices.note(ONE) and not devices.note(ONE), "a successor hears of it again"
    assert devices.trusted(NODE, 3) == devices.usable(NODE, 3) == [0, 1, 2]
    devices.note(msgspec.structs.replace(ONE, occurrence=2, step=9))
    assert devices.trusted(NODE, 3) == devices.usable(NODE, 3) == [0, 2]
    assert devices.usable(OTHER, 2) == [0, 1]


def test_an_uncertain_failure_only_makes_others_first() -> None:
    unsure = msgspec.structs.replace(ONE, certain=False)
    devices = FailedDevices([unsure, msgspec.structs.replace(unsure, occurrence=2)])
    assert devices.trusted(NODE, 2) == [0] and devices.usable(NODE, 2) == [0, 1]
    elsewhere = msgspec.structs.replace(unsure, node_id=OTHER, occurrence=3)
    assert not devices.is_of_script(unsure)
    devices.note(elsewhere)
    assert devices.is_of_script(unsure) and devices.is_of_script(elsewhere)
    assert devices.trusted(NODE, 2) == [0, 1], "it followed its rank: nothing is wrong with the device"


def test_the_same_certain_error_on_two_devices_is_not_the_script() -> None:
    devices = FailedDevices([ONE])
    assert not devices.is_of_script(msgspec.structs.replace(ONE, local_rank=0))
