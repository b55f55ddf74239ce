"""The results of collectives that a script makes before its first step, kept for replacements.

Theory. A replacement runs the script from its top, and no other rank makes the collectives there with it. If they
completed on local data, the replacement would get other values than the lost process: for example another seed that
rank 0 has drawn and broadcast, another configuration object, or another minimum over the ranks. So each process
writes the result of such a collective to a file in the shared memory of its run. A replacement of its rank reads the
files and gets the same results.

Only collectives that the script, or a library other than torch, calls by a function of ``torch.distributed`` are
kept. Wrappers of torch (DDP) send weights when they are made, and a replacement gets the weights from its peers. A
result of more than ``BYTES_MAX`` bytes also counts as weights.

A file holds one line of JSON (collective, group, dtype and shape of each tensor), and then the elements.

In a job of several nodes the replacement may start on a node that has no such files. So small results are also kept in
the key-value store of the job.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from holdfast.frameworks.torch.comm.control_store import ControlClient
from holdfast.frameworks.torch.nested_tensors import tensors_in
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.worker.script_frames import LIBRARIES, OURS, place_of

BYTES_MAX = 16 << 20
BYTES_IN_ALL_MAX = 64 << 20
STORED_BYTES_MAX = 64 << 10
STORED_BYTES_IN_ALL_MAX = 1 << 20
RESULTS_MAX = 256
_TORCH = os.path.dirname(torch.__file__) + os.sep
_CALLS = tuple(
    os.path.join(_TORCH, *parts)
    for parts in (
        ("distributed", "distributed_c10d.py"),
        ("distributed", "c10d_logger.py"),  # wraps these functions
        ("_dynamo", "eval_frame.py"),  # wraps the methods of a group
    )
)
_HERE = os.path.dirname(__file__) + os.sep


class SetupCall(NamedTuple):
    """The description of one collective, by which a replacement of this process finds the kept result.

    A process and its replacement run the same code, so they make collectives with the same descriptions. One of them
    may leave out a collective, for example if a file exists already. The descriptions of collectives in other places of
    the script do not depend on this one.

    Attributes:
        what: kind of the collective.
        group: process group of the collective.
        rank: rank of this process in the group.
        place: identifies the lines of the script and its libraries from which the collective is made.
        number: number of earlier collectives of this group in this place.
    """

    what: str
    group: str
    rank: int
    place: int
    number: int


class SetupRecord:
    """The results of the collectives before the first step of this process or of its predecessor.

    Args:
        directory: directory in shared memory for the workers of this run on this node.
        store: key-value store of the job, if the job has several nodes; otherwise None.
    """

    def __init__(self, directory: Path, store: ControlClient | None = None) -> None:
        self._directory = directory
        self._store = store
        self._counts: Counter[tuple[str, int]] = Counter()
        self._bytes = self._stored_bytes = 0

    def call(self, what: str, group: str, rank: int) -> SetupCall | None:
        """Return the call of the collective that begins now.

        The result is None if the script does not make it, or if it is not kept.
        """
        place = _place(sys._getframe(1))
        if place is None or self._counts.total() >= RESULTS_MAX:
            return None
        self._counts[group, place] += 1
        return SetupCall(what, group, rank, place, self._counts[group, place] - 1)

    def keep(self, call: SetupCall, outputs: Any) -> None:
        """Write the result of a collective, unless it is too large. Waits for the device."""
        tensors = list(tensors_in(outputs))
        size = sum(tensor.nbytes for tensor in tensors)
        if size > BYTES_MAX or self._bytes + size > BYTES_IN_ALL_MAX:
            return
        self._bytes += size
        flat = (tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
        data = b"".join(tensor.numpy().tobytes() for tensor in flat)
        content = _head(call, tensors) + b"\n" + data
        write_private(self._path(call), content)
        fits = size <= STORED_BYTES_MAX and self._stored_bytes + size <= STORED_BYTES_IN_ALL_MAX
        if self._store is not None and fits:
            self._stored_bytes += size
            self._store.kv("set", (f"holdfast/{_name(call)}",), content)

    def put_back(self, call: SetupCall, outputs: Any) -> bool:
        """Fill ``outputs`` with the result that the lost process got from ``call``. Return False if it is not kept."""
        tensors = list(tensors_in(outputs))
        head, _, data = self._kept(call).partition(b"\n")
        if head != _head(call, tensors):
            return False
        begin = 0
        for tensor in tensors:
            part = bytearray(data[begin : begin + tensor.nbytes])
            begin += tensor.nbytes
            if part:
                values = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype)
                tensor.detach().copy_(values.reshape(tensor.shape))
        return True

    def _kept(self, call: SetupCall) -> bytes:
        """Return the content of the file of a call; empty if the result is not kept."""
        try:
            return self._path(call).read_bytes()
        except FileNotFoundError:
            return b"" if self._store is None else self._store.kv("get", (f"holdfast/{_name(call)}",)).value

    def _path(self, call: SetupCall) -> Path:
        return self._directory / _name(call)


def _name(call: SetupCall) -> str:
    """Return the name of the file, and of the key, of a call."""
    return f"setup-{call.rank}-{call.place:08x}-{call.number}-{call.group}"


def _head(call: SetupCall, tensors: list[torch.Tensor]) -> bytes:
    kinds = [[str(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    return json.dumps([call.what, call.group, kinds]).encode()


def place_in_script_of_call(*, by_function: bool) -> str:
    """Return the line of the script that makes the present collective, by a function of ``torch.distributed``.

    The result is empty if the script does not make the collective itself.

    Args:
        by_function: treat the function that calls this one as a function of ``torch.distributed``.
    """
    frame = _caller(sys._getframe(1), by_function=by_function)
    return "" if frame is None or frame.f_code.co_filename.startswith(LIBRARIES) else place_of(frame)


def _caller(frame: FrameType | None, *, by_function: bool = False) -> FrameType | None:
    """Return the frame outside of torch that calls a function of ``torch.distributed``; None if there is none."""
    while frame is not None and (file := frame.f_code.co_filename).startswith((*_CALLS, _HERE)):
        by_function = by_function or file.startswith(_CALLS)
        frame = frame.f_back
    if frame is None or not by_function or frame.f_code.co_filename.startswith((_TORCH, OURS)):
        return None
    return frame


def _place(inner: FrameType | None) -> int | None:
    """Return a number that identifies the place from which the present collective is made.

    The place is the stack of lines, of the script and its libraries, that leads to a call of a function of
    ``torch.distributed``. None if torch itself makes the collective.
    """
    frame = _caller(inner)
    if frame is None:
        return None
    found = 0
    while frame is not None:
        file = frame.f_code.co_filename
        # A replacement may be started otherwise, so the frames of the start are left out.
        if not file.startswith((OURS, "<")) and os.path.basename(file) != "runpy.py":
            line = f"{os.path.basename(file)}:{frame.f_lineno}"
            found = zlib.crc32(line.encode(), found)
        frame = frame.f_back
    return found


_RECORD: list[SetupRecord] = []


def begin_setup(directory: Path, store: ControlClient | None) -> None:
    """Begin to keep results, in a process that a launcher can replace. For the arguments see :class:`SetupRecord`."""
    _RECORD[:] = [SetupRecord(directory, store)]


def end_setup() -> None:
    """Keep no more results: the first step begins."""
    _RECORD.clear()


def setup_record() -> SetupRecord | None:
    """Return the record of this process until its first step begins; otherwise None."""
    return _RECORD[0] if _RECORD else None
