"""MindSpore's ``.ckpt`` files, read without MindSpore and without a protobuf library.

Theory. A file is a sequence of ``Checkpoint`` messages. Each has one ``value`` with a name, and a tensor with its
dimensions, type and bytes. A tensor of more than half a gigabyte is stored as several values of the same name, one
after the other. With ``crc_check=True`` the file ends with the word ``crc_num`` and a checksum of all bytes before it.
A scalar has the dimensions [0]. Tensors stay in the mapped file until they are read.

Invariants:
1. Every tensor has exactly the bytes that its dimensions and type need. A truncated file is refused, unless it ends
   exactly at the end of a value. Such a file lacks whole tensors, which the comparison with the strategy file detects.
2. A checksum in the file is verified. The lengths of names and the numbers of dimensions and values are limited.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from holdfast.errors import CheckpointInvalid
from holdfast.store.backends.durable_files import reading
from holdfast.store.layouts.box import DIMENSIONS_MAX, Shape, is_shape
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, FQN_LENGTH_MAX
from holdfast.store.mindspore.protobuf import fields, integer, message, repeated, text

TYPES = {
    "Bool": "BOOL", "Int8": "I8", "UInt8": "U8", "Int16": "I16", "UInt16": "U16", "Int32": "I32", "UInt32": "U32",
    "Int64": "I64", "UInt64": "U64", "Float16": "F16", "BFloat16": "BF16", "Float32": "F32", "Float64": "F64",
}  # fmt: skip
"""Safetensors dtype name of each tensor type name of MindSpore."""
TEXT_TYPE = "str"
VALUES_MAX = 2**20
_CRC_MARK, _CRC_SIZE_BYTES = b"crc_num", 10
_CRC_PIECE_SIZE_BYTES = 2**24


class SliceTensor(NamedTuple):
    """A tensor in a ``.ckpt`` file. The ``pieces``, one after the other, are its bytes in C order."""

    dtype: str
    shape: Shape
    pieces: tuple[memoryview, ...]

    @property
    def size_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * DTYPE_SIZE_BYTES[self.dtype]

    def array(self) -> NDArray[np.generic]:
        """Return the tensor as an array of unsigned integers with the same bits and the same element size."""
        data = self.pieces[0] if len(self.pieces) == 1 else b"".join(self.pieces)
        return np.frombuffer(data, bits_of(self.dtype)).reshape(self.shape)


class SliceFile(NamedTuple):
    """The content of one ``.ckpt`` file: its tensors by name, and the names of its text values (not state)."""

    path: Path
    tensors: dict[str, SliceTensor]
    texts: tuple[str, ...]


def bits_of(dtype: str) -> np.dtype[np.generic]:
    """Return NumPy's unsigned integer type with the element size of ``dtype``.

    The merge of slices copies bits, and so can merge types that NumPy does not know.
    """
    return np.dtype(f"u{DTYPE_SIZE_BYTES[dtype]}")


def read_slice_file(path: Path) -> SliceFile:
    """Return the content of a ``.ckpt`` file. The file stays mapped as long as its tensors are used.

    Raises:
        CheckpointInvalid: the file cannot be read, is truncated or damaged, or holds a value of an unknown kind.
    """
    with reading(path):
        data = _mapped(path)
    try:
        return SliceFile(path, *_tensors(_without_checksum(data)))
    except ValueError as error:
        raise CheckpointInvalid(
            f"{path}: truncated, damaged, encrypted or no .ckpt file of MindSpore's: {error}",
            hint="copy or save it again",
        ) from error


def _mapped(path: Path) -> memoryview:
    """Return the bytes of a file as a read-only mapping.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise OSError("it is no regular file")
        return memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if about.st_size else b"")
    finally:
        os.close(fd)


def _without_checksum(data: memoryview) -> memoryview:
    """Return the bytes of a file without the checksum at its end, which is verified if it exists.

    Raises:
        ValueError: the checksum is wrong.
    """
    end = len(data) - _CRC_SIZE_BYTES
    start = end - len(_CRC_MARK)
    if start < 0 or data[start:end] != _CRC_MARK:
        return data
    found = 0
    for at in range(0, start, _CRC_PIECE_SIZE_BYTES):
        found = zlib.crc32(data[at : min(at + _CRC_PIECE_SIZE_BYTES, start)], found)
    if found != int.from_bytes(data[end:], "big"):
        raise ValueError("its checksum is that of other bytes")
    return data[:start]


def _tensors(data: memoryview) -> tuple[dict[str, SliceTensor], tuple[str, ...]]:
    tensors: dict[str, SliceTensor] = {}
    texts: list[str] = []
    last = ""
    for count, (number, value) in enumerate(fields(data)):
        if count >= VALUES_MAX:
            raise ValueError(f"more than {VALUES_MAX} values")
        if number != 1:
            raise ValueError(f"a field {number} where a value belongs")
        name, kind, stored = _value(message(value))
        if kind == TEXT_TYPE:
            texts.append(name)
        elif name in tensors:
            before = tensors[name]
            if name != last or stored[:2] != before[:2]:
                raise ValueError(f"{name} is there twice")
            tensors[name] = before._replace(pieces=before.pieces + stored.pieces)
        else:
            tensors[name] = stored
        last = name
    if not tensors:
        raise ValueError("it holds no tensor")
    return {name: _complete(name, stored) for name, stored in tensors.items()}, tuple(dict.fromkeys(texts))


def _value(data: memoryview) -> tuple[str, str, SliceTensor]:
    """Return name, type name and tensor of one ``value`` message."""
    name, tensor = "", None
    for number, value in fields(data):
        if number == 1:
            name = text(value)
        elif number == 2:
            tensor = message(value)
    if not name or len(name) > FQN_LENGTH_MAX:
        raise ValueError(f"a name of {len(name)} characters")
    if tensor is None:
        raise ValueError(f"{name} is no tensor (a table of keys and values cannot be read)")
    dimensions: list[int] = []
    kind, content = "", memoryview(b"")
    for number, value in fields(tensor):
        if number == 1:
            for one in repeated(value):
                dimensions.append(integer(one))
                if len(dimensions) > DIMENSIONS_MAX:
                    raise ValueError(f"{name} has more than {DIMENSIONS_MAX} dimensions")
        elif number == 2:
            kind = text(value)
        elif number == 3:
            content = message(value)
    if kind != TEXT_TYPE and kind not in TYPES:
        raise ValueError(f"{name} is of type {kind[:40]!r}, which cannot be read")
    shape = () if dimensions == [0] and len(content) else tuple(dimensions)
    if not is_shape(shape):
        raise ValueError(f"{name} has the dimensions {dimensions}")
    return name, kind, SliceTensor(TYPES.get(kind, "U8"), shape, (content,))


def _complete(name: str, stored: SliceTensor) -> SliceTensor:
    """Check that a tensor has all its bytes. Return the tensor."""
    there = sum(len(piece) for piece in stored.pieces)
    if there != stored.size_bytes:
        raise ValueError(f"{name} has {there} bytes of {stored.size_bytes}")
    return stored
