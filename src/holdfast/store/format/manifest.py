"""The JSON files of a checkpoint: names, structures, strict decoding.

Theory. Every JSON file is an envelope ``{"digest":"<32 hex digits>","body":<body>}`` and a newline. The digest is
xxh3-128 of the bytes of the body, so a flipped bit in a manifest is found like one in a tensor. Bodies are canonical
(keys in the order of the structures here, no white space). The decoder encodes the decoded structure again and compares
the bytes. This comparison refuses duplicate and unknown keys, and takes little time.

Invariants:
1. A body is decoded only if its digest matches and its size is below the limit.
2. A decoded structure contains no contradiction. ``validation.py`` checks whether the files agree with each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import msgspec
import xxhash

from holdfast.core.ids import RUN_ID_PATTERN, STEP_DIGITS_MAX, SaveId
from holdfast.errors import CheckpointInvalid, StateError
from holdfast.store.format.safetensors_codec import refuse
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, Box, Catalogue, Shape

FORMAT_VERSION = 1
EXTENT_SIZE_BYTES_MAX = 64 * 1024 * 1024
MANIFEST_SIZE_BYTES_MAX = 1024 * 1024 * 1024
CATALOGUE_NAME = "catalogue.json"
SEAL_NAME = "SEALED"
COPY_PREFIX = "copy-"
RANK_MAX = 99_999

_PREFIX = b'{"digest":"'
_MIDDLE = b'","body":'
_SUFFIX = b"}\n"
_BODY_START = len(_PREFIX) + 32 + len(_MIDDLE)
_RANK_NAME = re.compile(r"rank-r(\d{5})\.json")
_ATTEMPT_NAME = re.compile(
    rf"step-(\d{{8,{STEP_DIGITS_MAX}}})\.({RUN_ID_PATTERN})\.g(\d{{1,10}})\.(\d{{1,10}})\.a(\d{{1,10}})"
)
_HEX16 = re.compile(r"[0-9a-f]{16}")


class FileEntry(msgspec.Struct, frozen=True):
    """One shard file: its size, and the size and xxh3-64 digest of its header (length bytes and padding included)."""

    name: str
    size_bytes: int
    header_size_bytes: int
    header_digest: str


class BoxRecord(msgspec.Struct, frozen=True):
    """One stored box of a tensor, in the manifest's file ``files[file]`` from byte ``start`` on.

    ``digests`` has the xxh3-64 of each extent of the box.
    """

    fqn: str
    dtype: str
    shape: Shape
    offsets: Shape
    sizes: Shape
    file: int
    start: int
    digests: tuple[str, ...]

    @property
    def box(self) -> Box:
        """The box in the coordinates of the complete tensor."""
        return Box(self.offsets, self.sizes)

    @property
    def size_bytes(self) -> int:
        """Size of the box in bytes."""
        return math.prod(self.sizes) * DTYPE_SIZE_BYTES[self.dtype]


class RankManifest(msgspec.Struct, frozen=True):
    """The manifest of one rank: all that the rank wrote into a checkpoint. The rank's shard files are written first.

    Attributes:
        catalogue: digest of the catalogue.
        writers: all ranks that write a share of this save.
        copies: the number of ranks that write each box.
        values: the plain values common to all ranks, in the form of ``json_values.py``.
        locals: the plain values of single ranks, by rank (as text), in the same form.
    """

    version: int
    save_id: SaveId
    rank: int
    world: int
    catalogue: str
    writers: tuple[int, ...]
    copies: int
    extent_size_bytes: int
    files: tuple[FileEntry, ...]
    tensors: tuple[BoxRecord, ...]
    values: msgspec.Raw
    locals: dict[str, msgspec.Raw]


class SealRecord(msgspec.Struct, frozen=True):
    """The content of ``SEALED``: a cached proof that a checkpoint is valid, with the digests of its JSON files."""

    version: int
    save_id: SaveId
    catalogue: str
    manifests: dict[str, str]


class _VersionedFile(msgspec.Struct):
    version: int


def rank_name(rank: int) -> str:
    """Return the file name of a rank's manifest."""
    return f"rank-r{rank:05d}.json"


def rank_of_name(name: str) -> int | None:
    """Return the rank in the file name of a manifest; None for the name of another file."""
    match = _RANK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def copy_name(name: str) -> str:
    """Return the file name of the second copy of a JSON file. The copy exists if the save has ``copies`` > 1."""
    return COPY_PREFIX + name


def shard_name(rank: int, index: int) -> str:
    """Return the file name of shard number ``index`` (from 0) of a rank."""
    return f"shard-r{rank:05d}-{index:03d}.safetensors"


def attempt_key(name: str) -> tuple[int, int, int, int, str] | None:
    """Return (step, term and n of the generation, attempt number, run id) from an attempt's directory name, or None.

    The keys of newer attempts sort higher.
    """
    match = _ATTEMPT_NAME.fullmatch(name)
    return (int(match[1]), int(match[3]), int(match[4]), int(match[5]), match[2]) if match else None


def wrap(body: bytes) -> bytes:
    """Return the bytes of a JSON file: ``body`` in an envelope with its digest."""
    return _PREFIX + xxhash.xxh3_128_hexdigest(body).encode() + _MIDDLE + body + _SUFFIX


def unwrap(data: bytes, where: str) -> tuple[bytes, str]:
    """Return body and digest (hex) from the bytes of a JSON file; ``where`` is its path, for errors.

    Raises:
        CheckpointInvalid: the data is not an envelope, or the digest does not match.
    """
    if not (data.startswith(_PREFIX) and data[_BODY_START - len(_MIDDLE) : _BODY_START] == _MIDDLE):
        refuse(where, "not a Holdfast JSON file (truncated or foreign)")
    body, digest = data[_BODY_START : -len(_SUFFIX)], data[len(_PREFIX) : len(_PREFIX) + 32]
    if not data.endswith(_SUFFIX) or xxhash.xxh3_128_hexdigest(body).encode() != digest:
        refuse(where, "digest does not match its content (truncated or flipped)")
    return body, digest.decode()


def decode_catalogue(data: bytes, where: str) -> Catalogue:
    """Decode the catalogue from the bytes of its file; ``where`` is the path, for errors.

    Raises:
        CheckpointInvalid: the error names ``where`` and the broken rule.
    """
    body, _ = unwrap(data, where)
    try:
        return Catalogue.from_json(body)
    except StateError as error:
        raise CheckpointInvalid(f"{where}: {error.message}") from error


def decode_manifest(data: bytes, where: str) -> tuple[RankManifest, str]:
    """Decode a rank manifest from the bytes of its file, and check it. Return the manifest and its digest.

    Raises:
        CheckpointInvalid: the error names ``where`` (the path) and the broken rule.
    """
    body, digest = unwrap(data, where)
    manifest = _decode(body, where)
    _check_manifest(manifest, where)
    return manifest, digest


def _decode(body: bytes, where: str) -> RankManifest:
    try:
        version = msgspec.json.decode(body, type=_VersionedFile).version
        if version != FORMAT_VERSION:
            refuse(where, f"format version {version}; this reader knows {FORMAT_VERSION}")
        decoded = msgspec.json.decode(body, type=RankManifest)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise CheckpointInvalid(f"{where}: {error}") from error
    if msgspec.json.encode(decoded) != body:
        refuse(where, "not in canonical form (duplicate or unknown keys, or white space)")
    return decoded


def _check_manifest(manifest: RankManifest, where: str) -> None:
    """Raise an error if a manifest breaks a rule that needs no other file."""
    if not 0 <= manifest.rank < manifest.world <= RANK_MAX + 1:
        refuse(where, f"rank {manifest.rank} of {manifest.world}")
    if not 0 < manifest.extent_size_bytes <= EXTENT_SIZE_BYTES_MAX or manifest.extent_size_bytes % 4096:
        refuse(
            where,
            f"extents of {manifest.extent_size_bytes} bytes; allowed: 4096 n <= {EXTENT_SIZE_BYTES_MAX}",
        )
    if manifest.copies < 1 or manifest.rank not in manifest.writers:
        refuse(where, "its rank is not among the writers, or it promises no copy")
    for index, entry in enumerate(manifest.files):
        if entry.name != shard_name(manifest.rank, index):
            refuse(where, f"file {entry.name!r} in place of {shard_name(manifest.rank, index)}")
        if not 8 < entry.header_size_bytes <= entry.size_bytes or not _HEX16.fullmatch(entry.header_digest):
            refuse(where, f"file {entry.name}: impossible sizes or digest")
    ends = [entry.header_size_bytes for entry in manifest.files]
    for record in manifest.tensors:
        size_bytes = _check_record(record, manifest, where)
        if record.start != ends[record.file]:
            refuse(where, f"tensor {record.fqn!r} overlaps another one or leaves a hole")
        ends[record.file] += size_bytes
    for entry, end in zip(manifest.files, ends, strict=True):
        if end != entry.size_bytes:
            refuse(where, f"file {entry.name}: tensors end at byte {end}, the file at {entry.size_bytes}")


def _check_record(record: BoxRecord, manifest: RankManifest, where: str) -> int:
    """Raise an error if the record of a stored box breaks a rule. Return the size of the box in bytes."""
    size_bytes = DTYPE_SIZE_BYTES.get(record.dtype, 0)
    if not size_bytes:
        refuse(where, f"tensor {record.fqn!r}: unknown dtype {record.dtype!r}")
    if not len(record.offsets) == len(record.sizes) == len(record.shape):
        refuse(where, f"tensor {record.fqn!r}: offsets, sizes and shape differ in length")
    for offset, size, length in zip(record.offsets, record.sizes, record.shape, strict=True):
        if offset < 0 or size < 0 or offset + size > length:
            refuse(where, f"tensor {record.fqn!r}: part {record.box} is outside {list(record.shape)}")
        size_bytes *= size
    if not 0 <= record.file < len(manifest.files):
        refuse(where, f"tensor {record.fqn!r}: no file {record.file}")
    if len(record.digests) != -(-size_bytes // manifest.extent_size_bytes):
        refuse(where, f"tensor {record.fqn!r}: {len(record.digests)} digests for {size_bytes} bytes")
    if not all(map(_HEX16.fullmatch, record.digests)):
        refuse(where, f"tensor {record.fqn!r}: a digest is not 16 hex digits")
    return size_bytes


def encode_manifest(manifest: RankManifest) -> bytes:
    """Return the bytes of a manifest's file. For a decoded manifest they equal the file that was read."""
    return wrap(msgspec.json.encode(manifest))


def encode_seal(save_id: SaveId, catalogue: str, manifests: Mapping[str, str]) -> bytes:
    """Return the bytes of the seal file ``SEALED``, which follow completely from the save's other files.

    Args:
        save_id: identity of the save.
        catalogue: digest of the catalogue.
        manifests: digest of each manifest, by file name.
    """
    return wrap(
        msgspec.json.encode(SealRecord(FORMAT_VERSION, save_id, catalogue, dict(sorted(manifests.items()))))
    )
