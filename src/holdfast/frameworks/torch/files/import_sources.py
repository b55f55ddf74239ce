"""The reading of the sources of ``ckpt import``: ``torch.save``, torch DCP, Megatron and ``.safetensors``.

Theory. Each source gives one tree of tensors and plain values. No code in a source is executed
(``torch.load(weights_only=True)``, ``dcp_reader.py``). The type of a file is recognised by its first bytes, because
torch's own messages about a file of another type are not helpful.

Invariants:
1. Checksums are verified if the format has any.
2. Memory stays small: a file is mapped, and the tensors of a directory are in a scratch file.
"""

from __future__ import annotations

import mmap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.torch.files.dcp_keys import restore_keys
from holdfast.frameworks.torch.files.dcp_reader import METADATA_NAME, check_zip, load_plain, read_dcp
from holdfast.frameworks.torch.files.megatron_files import is_megatron, read_megatron
from holdfast.frameworks.torch.state.boxes import TORCH_DTYPES
from holdfast.store.backends.durable_files import make_root, reading, writing
from holdfast.store.format.safetensors_codec import StoredTensor, decode_header, header_size_bytes
from holdfast.store.manage.checkpoint_tools import INDEX_NAME, WEIGHTS_NAME

KINDS = (
    "a torch.save file, a torch DCP directory, a Megatron directory (iter_N), or a .safetensors file (or a directory "
    "of them) of weights"
)
SAFETENSORS = ".safetensors"
OPTIMIZER_STATE = "optimizer."
"""Prefix of the names of an optimizer's tensors in a file that ``holdfast ckpt merge`` wrote."""
_ZIP = b"PK\x03\x04"
_BEFORE_ZIP = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""The number with which files of torch.save before 1.6 begin, after the two bytes of the pickle protocol."""


class _Index(msgspec.Struct):
    """The index of a directory of weights: tensor name -> name of the file that holds the tensor."""

    weight_map: dict[str, str]


def read_source(source: Path, scratch: Path, note: Callable[[str], object]) -> dict[str, Any]:
    """Return the tree of tensors and plain values in ``source``; a file of weights gives a tree with only ``model``.

    Args:
        source: the file or directory.
        scratch: directory for a temporary file as large as the tensors of ``source``; it is made if it is missing.
        note: called with a line for the user about content that is left out.

    Raises:
        UsageError: there is no such file, or it is of another kind.
        CheckpointInvalid: ``source`` is damaged, or holds more than tensors and plain values.
        StoreWriteError: ``scratch`` cannot be written.
    """
    if source.is_dir():
        return read_megatron(source, scratch, note) if is_megatron(source) else _directory(source, scratch)
    if not source.is_file():
        raise UsageError(f"{source} does not exist", hint=f"name {KINDS}")
    if source.suffix == SAFETENSORS:
        return {"model": _weights(source)}
    tree = load_plain(str(source), str(source), mapped=_is_zip(source))
    if not isinstance(tree, dict):
        raise UsageError(
            f"{source} holds a {type(tree).__name__}, not a state dict",
            hint="save one for it: torch.save(model.state_dict(), PATH)",
        )
    return tree


def _directory(source: Path, scratch: Path) -> dict[str, Any]:
    if not (source / METADATA_NAME).exists():
        return {"model": _weights_of_files(source)}
    with writing(scratch):
        make_root(scratch)
    return restore_keys(read_dcp(source, scratch), str(source))


def _weights_of_files(source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a directory in Hugging Face's format: of its only file, or of all files in its index.

    Raises:
        UsageError: the directory has another format, or more than weights.
        CheckpointInvalid: a file is damaged, or a file or tensor that the index names is missing.
    """
    index, one = source / INDEX_NAME, source / WEIGHTS_NAME
    if not index.exists():
        if not one.exists():
            raise UsageError(
                f"{source} holds no {METADATA_NAME}, {INDEX_NAME} or {WEIGHTS_NAME}: not a torch DCP checkpoint",
                hint=f"name {KINDS}",
            )
        return _weights(one)
    try:
        with reading(index):
            places = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointInvalid(f"{index}: no index of weights ({error})") from error
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise CheckpointInvalid(f"{index}: {name!r} is not a file beside it")
        found |= {fqn: tensor for fqn, tensor in _weights(source / name).items() if places.get(fqn) == name}
    lacking = sorted(places.keys() - found.keys())
    if lacking:
        raise CheckpointInvalid(
            f"{source / places[lacking[0]]} lacks {lacking[0]}, which {INDEX_NAME} says it holds",
            hint="copy the directory again",
        )
    return found


def _is_zip(source: Path) -> bool:
    """Return True for a torch.save file of 1.6 or later, after verifying its checksums; False for an older one.

    Raises:
        UsageError: the file is not a torch.save file.
        CheckpointInvalid: the file is damaged.
    """
    with reading(source), source.open("rb") as file:
        head = file.read(64)
        if zipfile.is_zipfile(file):
            check_zip(file, source.stat().st_size, str(source))
            return True
    if head.startswith(_ZIP):
        raise CheckpointInvalid(f"{source} is truncated: its end is missing", hint="copy or save it again")
    if head[2:].startswith(_BEFORE_ZIP):
        return False
    raise UsageError(f"{source} is no torch.save file", hint=f"name {KINDS}")


def _weights(source: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        UsageError: the file holds more than weights.
        CheckpointInvalid: the file is damaged.
    """
    with reading(source), source.open("rb") as file:
        size_bytes = source.stat().st_size
        start = header_size_bytes(file.read(8), size_bytes, str(source))
        file.seek(0)
        header = decode_header(file.read(start), size_bytes, str(source))
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    beside = [tensor.fqn for tensor in header.tensors if tensor.fqn.startswith(OPTIMIZER_STATE)]
    if beside:
        raise UsageError(
            f"{source} holds {beside[0]}: more than weights, and without the values that belong to it",
            hint="holdfast ckpt export CHECKPOINT TARGET --to torch writes all, --to hf the weights alone",
        )
    return {tensor.fqn: _tensor(mapped, tensor) for tensor in header.tensors}


def _tensor(mapped: mmap.mmap, stored: StoredTensor) -> torch.Tensor:
    """Return one tensor over the mapped memory of its file."""
    dtype = TORCH_DTYPES[stored.dtype]
    if stored.start == stored.stop:
        return torch.zeros(stored.shape, dtype=dtype)
    data = torch.frombuffer(mapped, dtype=torch.uint8, count=stored.stop - stored.start, offset=stored.start)
    if stored.start % dtype.itemsize:  # not aligned, which the format allows
        data = data.clone()
    return data.view(dtype).reshape(stored.shape)
