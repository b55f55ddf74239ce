"""Hostile checkpoint files: each is refused by the rule that it breaks, quickly, in bounded memory; no code runs."""

from __future__ import annotations

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import CheckpointInvalid
from holdfast.frameworks.common.numpy_state import NumpyState
from holdfast.store.format.manifest import decode_catalogue, decode_manifest, unwrap, wrap
from holdfast.store.format.safetensors_codec import decode_header, header_size_bytes
from holdfast.store.read.load import load_into
from holdfast.store.read.validation import inspect
from tests.store.worlds import replicated, save, save_id

ARRAYS = {"w": np.arange(60.0).reshape(6, 10)}
MANIFEST = "rank-r00000.json"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a valid checkpoint of one rank."""
    save(tmp_path, replicated(1, ARRAYS), save_id())
    return tmp_path / save_id().directory()


def refused(path: Path, rule: str) -> None:
    """Check that inspection and load both refuse for this reason, within a second and 32 MiB."""
    tracemalloc.start()
    started_s = time.perf_counter()
    found = inspect(path)
    state = NumpyState.whole({f: a * 0 for f, a in ARRAYS.items()})
    with pytest.raises(CheckpointInvalid):
        load_into(path, state.targets())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not found.valid and rule in found.reason, found.reason
    assert time.perf_counter() - started_s < 5 and peak < 32 * 2**20


def rewrite(path: Path, name: str, change: Callable[[Any], Any]) -> None:
    """Change the body of a JSON file and give it a matching digest, as an attacker would."""
    body, _ = unwrap((path / name).read_bytes(), name)
    changed = change(json.loads(body))
    text = changed if isinstance(changed, bytes) else json.dumps(changed, separators=(",", ":")).encode()
    (path / name).write_bytes(wrap(text))


def field(*keys: str | int, value: object) -> Callable[[Any], Any]:
    """Return a function that changes one place of a JSON tree."""

    def change(tree: Any) -> Any:
        place = tree
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value
        return tree

    return change


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (field("version", value=2), "format version 2"),
        (field("version", value="1"), "Expected `int`"),
        (field("rank", value=-1), "rank -1 of 1"),
        (field("rank", value=1), "rank 1 of 1"),
        (field("world", value=10**9), "rank 0 of 1000000000"),
        (field("writers", value=[0, 0]), "its writers are not ranks"),
        (field("writers", value=[0, 5]), "its writers are not ranks"),
        (field("writers", value=[]), "not among the writers"),
        (field("catalogue", value="0" * 32), "written for another catalogue"),
        (field("save_id", "step", value=13), "belongs to another save"),
        (field("save_id", "run", value="other"), "belongs to another save"),
        (field("extent_size_bytes", value=2**40), "extents of"),
        (field("extent_size_bytes", value=0), "extents of"),
        (field("extent_size_bytes", value=4097), "extents of"),
        (field("files", 0, "name", value="../../etc/passwd"), "in place of shard-r00000-000"),
        (field("files", 0, "name", value="/etc/passwd"), "in place of shard-r00000-000"),
        (field("files", 0, "size_bytes", value=2**62), "the file at"),
        (field("files", 0, "header_size_bytes", value=0), "impossible sizes"),
        (field("files", 0, "header_digest", value="zz"), "impossible sizes or digest"),
        (field("files", 0, "header_digest", value="0" * 16), "header does not match its digest"),
        (field("tensors", 0, "file", value=7), "no file 7"),
        (field("tensors", 0, "start", value=0), "overlaps another one"),
        (field("tensors", 0, "start", value=2**63), "overlaps another one"),
        (field("tensors", 0, "offsets", value=[1, 0]), "is outside"),
        (field("tensors", 0, "offsets", value=[0]), "differ in length"),
        (field("tensors", 0, "sizes", value=[-6, 10]), "is outside"),
        (field("tensors", 0, "shape", value=[2**40, 2**40]), "not that of the catalogue"),
        (field("tensors", 0, "dtype", value="F32"), "the file at"),
        (field("tensors", 0, "dtype", value="PICKLE"), "unknown dtype"),
        (field("tensors", 0, "fqn", value="v"), "not that of the catalogue"),
        (field("tensors", 0, "digests", value=[]), "0 digests for 480 bytes"),
        (field("tensors", 0, "digests", value=["x"]), "not 16 hex digits"),
        (field("tensors", value=[]), "tensors end at byte"),
        (field("unknown", value=1), "canonical form"),
        (lambda tree: json.dumps(tree).encode(), "canonical form"),
        (
            lambda tree: json.dumps(tree, separators=(",", ":")).encode()[:-1] + b',"rank":0}',
            "canonical form",
        ),
        (lambda _tree: b"[" * 100_000, MANIFEST),
        (lambda _tree: b"", MANIFEST),
        (lambda _tree: b"null", MANIFEST),
    ],
)
def test_manifest(path: Path, change: Callable[[Any], Any], rule: str) -> None:
    rewrite(path, MANIFEST, change)
    refused(path, rule)


def listed(*boxes: list[list[int]]) -> object:
    """Return a grid that lists boxes."""
    return {"cells": [], "boxes": list(boxes)}


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (field("version", value=9), "catalogue version 9"),
        (field("version", value=1), "catalogue version 1"),
        (field("world", value=0), "below the world"),
        (field("world", value=2), "another catalogue"),
        (field("absent", value=[0]), "absent rank holds something"),
        (field("absent", value=[0, 0]), "absent ranks are not ascending"),
        (field("grids", value=[]), "grid 0 is unknown"),
        (lambda tree: {**tree, "grids": tree["grids"] * 2}, "a grid has no tensor"),
        (field("grids", 0, "cells", 0, 1, value=[]), "not ascending numbers"),
        (field("grids", 0, "cells", 0, 1, value=[0, 1]), "not ascending numbers"),
        (field("grids", 0, "cells", 0, 1, value=[0, 0]), "not ascending numbers"),
        (field("grids", 0, "cells", value=[]), "needs cells or parts"),
        (field("grids", 0, "cells", value=[[[[]], [0]]]), "have not 2 dimensions"),
        (field("grids", 0, "cells", value=[[[[], []], [0]], [[[]], [0]]]), "not sorted and unique"),
        (field("grids", 0, "cells", value=[[[[]], [0]], [[[], []], [0]]]), "differ in their dimensions"),
        (field("grids", 0, "cells", value=[[[[[1, 0]], []], [0]]]), "part 0 of 1 is no cut"),
        (field("grids", 0, "cells", value=[[[[[2, 2]], []], [0]]]), "part 2 of 2 is no cut"),
        (field("grids", 0, "cells", value=[[[[[2**60, 2]], []], [0]]]), "is no cut"),
        (field("grids", 0, "cells", value=[[[[[2, 0]] * 9, []], [0]]]), "cut 9 times"),
        (field("grids", 0, "cells", value=[[[[[2, 0]], []], [0]]]), "another catalogue"),
        (field("grids", 0, "boxes", value=[[[0, 0], [6, 10], [0]]]), "cells or parts"),
        (field("grids", 0, value=listed([[0, 0], [7, 10], [0]])), "is outside"),
        (field("grids", 0, value=listed([[0, 0], [6], [0]])), "dimensions"),
        (field("grids", 0, value=listed([[0, 0], [0, 10], [0]])), "has no element"),
        (field("grids", 0, value=listed([[0, 0], [5, 10], [0]])), "another catalogue"),
        (field("tensors", 0, "grid", value=1), "grid 1 is unknown"),
        (field("tensors", 0, "grid", value=-1), "grid -1 is unknown"),
        (field("tensors", 0, "shape", value=[2**60, 2**60]), "impossible shape"),
        (field("tensors", 0, "shape", value=[1] * 40), "impossible shape"),
        (field("tensors", 0, "dtype", value="F99"), "unknown dtype"),
        (field("tensors", 0, "fqn", value="../w\0"), "control characters"),
        (field("tensors", 0, "fqn", value="x" * 5000), "5000 characters"),
        (field("tensors", value=[]), "a grid has no tensor"),
        (lambda tree: {**tree, "grids": [], "tensors": []}, "another catalogue"),
        (lambda tree: {**tree, "tensors": tree["tensors"] * 2}, "not sorted by unique names"),
        (
            lambda tree: json.dumps(tree, separators=(",", ":")).encode()[:-1] + b',"world":1}',
            "canonical form",
        ),
    ],
)
def test_catalogue(path: Path, change: Callable[[Any], Any], rule: str) -> None:
    rewrite(path, "catalogue.json", change)
    refused(path, rule)


def test_symbolic_links_are_never_followed(path: Path, tmp_path: Path) -> None:
    for name in ("catalogue.json", MANIFEST, "shard-r00000-000.safetensors"):
        pristine = tmp_path / f"outside-{name}"
        (path / name).rename(pristine)
        (path / name).symlink_to(pristine)
        refused(path, "symbolic link")
        (path / name).unlink()
        pristine.rename(path / name)
    (tmp_path / "link").symlink_to(path)
    refused(tmp_path / "link", "symbolic link")
    assert inspect(path, deep=True).valid


def test_pipes_and_directories_in_place_of_files_do_not_block(path: Path) -> None:
    for name in ("catalogue.json", MANIFEST, "shard-r00000-000.safetensors"):
        pristine = (path / name).read_bytes()
        (path / name).unlink()
        os.mkfifo(path / name)
        refused(path, "not a regular file")
        (path / name).unlink()
        (path / name).mkdir()
        refused(path, "not a regular file")
        (path / name).rmdir()
        (path / name).write_bytes(pristine)
    assert inspect(path, deep=True).valid


def test_a_huge_sparse_manifest_is_not_read(path: Path) -> None:
    os.truncate(path / MANIFEST, 2**40)
    refused(path, "the limit is")


def test_every_truncation_of_a_manifest_is_refused(path: Path) -> None:
    data = (path / MANIFEST).read_bytes()
    for size_bytes in range(0, len(data), 7):
        with pytest.raises(CheckpointInvalid):
            decode_manifest(data[:size_bytes], "m")


def header(entries: object, data_size_bytes: int = 0) -> tuple[bytes, int]:
    """Return header bytes with this JSON, and the size of a file with this much data."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, 8 + len(text) + data_size_bytes


def entry(start: int, stop: int, **other: object) -> dict[str, object]:
    """Return a header entry of bytes."""
    return {"dtype": "U8", "shape": [stop - start], "data_offsets": [start, stop], **other}


@pytest.mark.parametrize(
    ("made", "rule"),
    [
        ((b"", 0), "shorter than 8 bytes"),
        ((struct.pack("<Q", 2**63), 100), "the limit is"),
        ((struct.pack("<Q", 200_000_000), 300_000_000), "the limit is"),
        ((struct.pack("<Q", 50), 20), "in a file of 20"),
        ((struct.pack("<Q", 50) + b"{}", 100), "truncated header"),
        (header(b"not json"), "not JSON"),
        (header(b"[]"), "not an object"),
        (header(b"\xff\xfe"), "not JSON"),
        (header(b"[" * 100_000), "not JSON"),
        (header(b'{"a":{},"a":{}}'), "duplicate key"),
        (header({"__metadata__": {"k": 1}}), "text to text"),
        (header({"__metadata__": "x"}), "text to text"),
        (header({"a": entry(0, 4), "b": entry(2, 6)}, 6), "overlaps"),
        (header({"a": entry(0, 4), "b": entry(5, 6)}, 6), "hole"),
        (header({"a": entry(1, 4)}, 4), "hole"),
        (header({"a": entry(0, 4)}, 5), "the file at"),
        (header({"a": entry(0, 4)}, 3), "the file at"),
        (header({"a": entry(0, 4, shape=[3])}, 4), "do not fit"),
        (header({"a": entry(0, 4, shape=[-4])}, 4), "impossible shape"),
        (header({"a": entry(0, 4, shape=[2**50, 2**50])}, 4), "impossible shape"),
        (header({"a": entry(0, 4, shape=[1] * 33)}, 4), "impossible shape"),
        (header({"a": entry(0, 4, dtype="O")}, 4), "unknown dtype"),
        (header({"a": entry(0, 4, code="x")}, 4), "unknown field"),
        (header({"a": {"dtype": "U8"}}, 4), "missing required field"),
        (header({"a": entry(4, 0)}, 4), "impossible shape"),
        (header({"a": [0, 4]}, 4), "Expected `object`"),
    ],
)
def test_shard_header(made: tuple[bytes, int], rule: str) -> None:
    data, file_size_bytes = made
    with pytest.raises(CheckpointInvalid, match=rule):
        decode_header(data, file_size_bytes, "shard")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_random_bytes_are_refused_with_a_typed_error(data: bytes, file_size_bytes: int) -> None:
    for decode in (decode_manifest, decode_catalogue):
        for candidate in (data, wrap(data)):
            with pytest.raises(CheckpointInvalid):
                decode(candidate, "x")
    try:
        size_bytes = header_size_bytes(data, file_size_bytes, "x")
        decode_header(data, file_size_bytes, "x")
    except CheckpointInvalid:
        return
    assert size_bytes <= file_size_bytes


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**66) | st.text(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(tree: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return all paths of a JSON tree."""
    found = [prefix] if prefix else []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return found + [place for key, value in pairs for place in places(value, (*prefix, key))]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_other_value_anywhere_in_a_manifest_gives_a_typed_error_or_a_manifest(
    data: st.DataObject,
) -> None:
    body = {
        "version": 1,
        "save_id": {"run": "r", "generation": [1, 1], "step": 1, "attempt": 0, "kind": "exit"},
        "rank": 0, "world": 1, "catalogue": "0" * 32, "writers": [0], "copies": 1, "extent_size_bytes": 4096,
        "files": [{"name": "shard-r00000-000.safetensors", "size_bytes": 4100, "header_size_bytes": 4096,
                   "header_digest": "0" * 16}],
        "tensors": [{"fqn": "w", "dtype": "F32", "shape": [], "offsets": [], "sizes": [], "file": 0, "start": 4096,
                     "digests": ["0" * 16]}],
        "values": {}, "locals": {"0": {}},
    }  # fmt: skip
    decode_manifest(wrap(json.dumps(body, separators=(",", ":")).encode()), "m")
    changed = field(*data.draw(st.sampled_from(places(body))), value=data.draw(JSON))(body)
    try:
        manifest, _ = decode_manifest(wrap(json.dumps(changed, separators=(",", ":")).encode()), "m")
    except CheckpointInvalid as error:
        assert error.message.startswith("m: ")
        return
    assert manifest.rank in manifest.writers and len(manifest.tensors) <= 1


def test_thousands_of_scattered_boxes_do_not_take_the_square_of_time(tmp_path: Path) -> None:
    """Every second element of a tensor is stored as its own box.

    The checkpoint is refused in milliseconds, not in hours.
    """
    edge = 100
    world = replicated(1, {"w": np.zeros((edge, edge), np.uint8)})
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    shard = path / "shard-r00000-000.safetensors"
    places = [(i, j) for i in range(edge) for j in range(edge) if (i + j) % 2]
    random.Random(0).shuffle(places)

    def scatter(tree: Any) -> Any:
        (record,) = tree["tensors"]
        start, digest = record["start"], xxhash.xxh3_64_hexdigest(b"\0")
        tree["tensors"] = [
            {**record, "offsets": list(place), "sizes": [1, 1], "start": start + n, "digests": [digest]}
            for n, place in enumerate(places)
        ]
        tree["files"][0]["size_bytes"] = start + len(places)
        return tree

    rewrite(path, MANIFEST, scatter)
    os.truncate(shard, shard.stat().st_size - edge * edge + len(places))
    started_s = time.process_time()
    found = inspect(path)
    assert not found.valid and "no intact copy of w[0:1, 0:1]" in found.reason
    assert time.process_time() - started_s < 20
