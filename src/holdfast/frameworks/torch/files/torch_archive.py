"""The reading of ``torch.save`` files with more than plain data, without executing their content.

Theory. Such a file is a zip with a pickle and the bytes of each storage. The pickle is read as inert records
(``pickle_records.py``), so names of classes that are not installed do no harm: they remain names. A tensor is built
from the record that describes it, over the mapped bytes of its storage. Callers take only the keys that they know, and
refuse records under these keys.

Invariants:
1. No name in the file is looked up, except the dtypes in :data:`STORAGES`.
2. Checksums are verified, and no tensor reaches beyond its storage.
"""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.torch.files.dcp_reader import check_zip
from holdfast.frameworks.torch.files.pickle_records import Name, PickleRecord, read_records
from holdfast.store.backends.durable_files import reading

STORAGES = {
    f"torch.{kind}Storage": dtype
    for kind, dtype in {
        "Double": torch.float64, "Float": torch.float32, "Half": torch.float16, "BFloat16": torch.bfloat16,
        "Long": torch.int64, "Int": torch.int32, "Short": torch.int16, "Char": torch.int8, "Byte": torch.uint8,
        "Bool": torch.bool,
    }.items()
}  # fmt: skip
_PICKLE = "data.pkl"
_LOCAL_HEADER_SIZE_BYTES = 30  # of a zip entry; its name and an extra field follow


class _Anything:
    """The set of all names: it admits each class name in a pickle, because the name is not looked up."""

    def __contains__(self, name: object) -> bool:
        return True


def read_archive(path: Path) -> dict[str, Any]:
    """Return the tree in a ``torch.save`` file: tensors over the mapped file, plain values, records of other objects.

    Raises:
        UsageError: the file does not exist.
        CheckpointInvalid: the file is damaged, or holds no dict.
    """
    if not path.is_file():
        raise UsageError(f"{path} does not exist", hint="copy the whole directory of the checkpoint")
    where = str(path)
    with reading(path), path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise CheckpointInvalid(
                f"{where} is truncated, or no torch.save file", hint="copy or save it again"
            )
        check_zip(file, path.stat().st_size, where)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if _PICKLE not in entries:
                raise CheckpointInvalid(f"{where}: it holds no {_PICKLE}")
            data = archive.read(entries[_PICKLE])
    tree = _Tree(mapped, entries, where).value(read_records(data, _Anything(), where))
    if not isinstance(tree, dict):
        raise CheckpointInvalid(f"{where} holds a {type(tree).__name__}, not a dict")
    return tree


class _Tree:
    """The tensors of one file, built from the records in its pickle."""

    def __init__(self, mapped: mmap.mmap, entries: dict[str, zipfile.ZipInfo], where: str) -> None:
        self._mapped = mapped
        self._entries = entries
        self._where = where
        self._storages: dict[str, torch.Tensor] = {}

    def value(self, item: Any) -> Any:
        """Return ``item`` with tensors in place of their records; other records stay."""
        if isinstance(item, dict):
            return {key: self.value(each) for key, each in item.items()}
        if type(item) in (list, tuple):
            return type(item)(self.value(each) for each in item)
        if isinstance(item, PickleRecord):
            try:
                return self._record(item)
            except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
                raise CheckpointInvalid(f"{self._where}: an impossible tensor: {error}") from error
        return item

    def _record(self, item: PickleRecord) -> Any:
        match item.name:
            case "torch._utils._rebuild_tensor_v2":
                storage, offset, sizes, strides = item.args[:4]
                return self._tensor(storage, offset, tuple(sizes), tuple(strides))
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state":
                return self.value(item.args[0])
            case "torch.Size":
                return tuple(item.args[0])
        return item

    def _tensor(
        self, storage: PickleRecord, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]
    ) -> torch.Tensor:
        ((_, kind, key, _, numel),) = storage.args
        if type(kind) is not Name or kind not in STORAGES:
            raise ValueError(f"a storage of {kind}")
        if any(type(n) is not int or n < 0 for n in (offset, numel, *sizes, *strides)):
            raise ValueError("a size that is no number of elements")
        end = offset + 1 + sum((n - 1) * step for n, step in zip(sizes, strides, strict=True))
        if 0 not in sizes and end > numel:
            raise ValueError(f"it reaches to element {end} of {numel}")
        return self._storage(key, STORAGES[kind], numel).as_strided(sizes, strides, offset)

    def _storage(self, key: str, dtype: torch.dtype, numel: int) -> torch.Tensor:
        if key not in self._storages:
            entry = self._entries[f"data/{key}"]
            at = entry.header_offset
            name_size, extra_size = (
                int.from_bytes(self._mapped[at + n : at + n + 2], "little") for n in (26, 28)
            )
            start = at + _LOCAL_HEADER_SIZE_BYTES + name_size + extra_size
            if numel * dtype.itemsize > entry.file_size:
                raise ValueError(f"storage {key} has {entry.file_size} bytes")
            self._storages[key] = (
                torch.frombuffer(self._mapped, dtype=torch.uint8, count=entry.file_size, offset=start)
                if entry.file_size
                else torch.zeros(0, dtype=torch.uint8)
            )
        flat = self._storages[key][: numel * dtype.itemsize]
        return (flat if flat.data_ptr() % dtype.itemsize == 0 else flat.clone()).view(dtype)
