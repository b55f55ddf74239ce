"""The safetensors container: header encoder and a strict decoder.

Theory. A safetensors file is 8 bytes (header length, little endian), a JSON header, and the bytes of the tensors
without gaps. The encoder pads the header with spaces (legal white space of JSON), so that the first tensor starts at
a multiple of 4096 bytes. The header of a shard file describes each stored box in ``__metadata__``, in the form that
torch DCP's Hugging Face reader expects. So other programs can read the shard without Holdfast.

Invariants (of encoder and decoder):
1. ``8 + header length`` is at most ``HEADER_SIZE_BYTES_MAX``. A written header ends at a multiple of 4096 bytes.
2. Tensors fill the data part exactly: no gap, no overlap, no trailing byte. A tensor takes its number of elements times
   the element size.
3. Names are unique.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from holdfast.errors import CheckpointInvalid
from holdfast.store.layouts.box import is_shape
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Shape

HEADER_SIZE_BYTES_MAX = 100_000_000
DATA_ALIGNMENT = 4096
METADATA_KEY = "__metadata__"


class StoredTensor(msgspec.Struct, frozen=True):
    """One tensor of a file. The file's bytes [``start``, ``stop``) hold its elements in C order, little endian."""

    fqn: str
    dtype: str
    shape: Shape
    start: int
    stop: int


class Header(msgspec.Struct, frozen=True):
    """A decoded header: tensors in file order. ``data_start`` is the file offset of the first tensor."""

    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    data_start: int

    @property
    def size_bytes(self) -> int:
        """Size of the complete file in bytes."""
        return self.tensors[-1].stop if self.tensors else self.data_start


def encode_header(
    tensors: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str]
) -> tuple[bytes, Header]:
    """Return the header bytes of a new file, and the same header decoded.

    Args:
        tensors: (name, dtype, shape) of each tensor, in the order of the file.
        metadata: content of ``__metadata__``.
    """
    entries: dict[str, object] = {METADATA_KEY: dict(metadata)}
    places: list[tuple[str, str, Shape, int, int]] = []
    offset = 0
    for fqn, dtype, shape in tensors:
        stop = offset + math.prod(shape) * DTYPE_SIZE_BYTES[dtype]
        entries[fqn] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, stop]}
        places.append((fqn, dtype, shape, offset, stop))
        offset = stop
    text = msgspec.json.encode(entries)
    size_bytes = -(-(8 + len(text)) // DATA_ALIGNMENT) * DATA_ALIGNMENT
    data = struct.pack("<Q", size_bytes - 8) + text.ljust(size_bytes - 8, b" ")
    stored = tuple(StoredTensor(f, d, s, size_bytes + a, size_bytes + b) for f, d, s, a, b in places)
    return data, Header(stored, dict(metadata), size_bytes)


def dcp_metadata(boxes: Mapping[str, Box], save_name: str) -> dict[str, str]:
    """Return ``__metadata__`` of a shard's header: the boxes as torch DCP's reader expects them, and ``save_name``."""
    sharding = {fqn: {"saved_offsets": box.offsets} for fqn, box in boxes.items()}
    return {
        "format": "pt",
        "DCP_VERSION": "1.0",
        "DCP_SHARDING_INFO": msgspec.json.encode(sharding).decode(),
        "holdfast": save_name,
    }


def header_size_bytes(prefix: bytes, file_size_bytes: int, where: str) -> int:
    """Return the file offset at which the tensors begin, from the first 8 bytes of a file.

    Raises:
        CheckpointInvalid: the header length is impossible.
    """
    if len(prefix) < 8:
        refuse(where, "shorter than 8 bytes")
    size_bytes = 8 + int(struct.unpack("<Q", prefix[:8])[0])
    if size_bytes > HEADER_SIZE_BYTES_MAX:
        refuse(where, f"header of {size_bytes} bytes, the limit is {HEADER_SIZE_BYTES_MAX}")
    if size_bytes > file_size_bytes:
        refuse(where, f"header of {size_bytes} bytes in a file of {file_size_bytes}")
    return size_bytes


def decode_header(data: bytes, file_size_bytes: int, where: str) -> Header:
    """Decode and check the header of a file.

    Args:
        data: the complete header, with its 8 length bytes.
        file_size_bytes: size of the file.
        where: path of the file, for errors.

    Raises:
        CheckpointInvalid: the error names ``where`` and the broken rule.
    """
    data_start = header_size_bytes(data, file_size_bytes, where)
    if len(data) < data_start:
        refuse(where, "truncated header")
    try:
        entries = json.loads(data[8:data_start].decode(), object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        refuse(where, f"header is not JSON with unique keys: {error}")
    if not isinstance(entries, dict):
        refuse(where, "header is not an object")
    metadata = entries.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        refuse(where, f"{METADATA_KEY} is not a map of text to text")
    tensors = [_decode_entry(fqn, entry, data_start, where) for fqn, entry in entries.items()]
    tensors.sort(key=lambda t: (t.start, t.stop))
    end = data_start
    for tensor in tensors:
        if tensor.start != end:
            rule = "overlaps the one before" if tensor.start < end else "leaves a hole before it"
            refuse(where, f"tensor {tensor.fqn!r} {rule}")
        end = tensor.stop
    if end != file_size_bytes:
        refuse(where, f"tensors end at byte {end}, the file at {file_size_bytes}")
    return Header(tuple(tensors), metadata, data_start)


class _HeaderEntry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def _decode_entry(fqn: str, entry: object, data_start: int, where: str) -> StoredTensor:
    try:
        parsed = msgspec.convert(entry, _HeaderEntry)
    except msgspec.ValidationError as error:
        refuse(where, f"tensor {fqn!r}: {error}")
    if parsed.dtype not in DTYPE_SIZE_BYTES:
        refuse(where, f"tensor {fqn!r}: unknown dtype {parsed.dtype!r}")
    if not is_shape(parsed.shape):
        refuse(where, f"tensor {fqn!r}: impossible shape")
    start, stop = parsed.data_offsets
    if start < 0 or stop - start != math.prod(parsed.shape) * DTYPE_SIZE_BYTES[parsed.dtype]:
        refuse(where, f"tensor {fqn!r}: {stop - start} bytes do not fit {parsed.dtype} {list(parsed.shape)}")
    return StoredTensor(fqn, parsed.dtype, parsed.shape, data_start + start, data_start + stop)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("duplicate key")
    return result


def refuse(where: str, rule: str) -> NoReturn:
    """Raise the error for a file that breaks a rule.

    Raises:
        CheckpointInvalid: the file at ``where`` breaks ``rule``.
    """
    raise CheckpointInvalid(f"{where}: {rule}")
