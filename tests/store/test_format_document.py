"""docs/format.md and its schema describe the files: a small reader that follows only the document checks them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from holdfast.store.format import manifest as form
from holdfast.store.format.json_values import VALUES_SIZE_BYTES_MAX
from holdfast.store.layouts.layout import DTYPE_SIZE_BYTES, FQN_LENGTH_MAX
from tests.store.worlds import World, grid, random_array, save, save_id

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "format.schema.json").read_text())
DOCUMENT = (DOCS / "format.md").read_text()


def world() -> World:
    """Return a job of two ranks: a tensor by rows, one by columns, an empty one, and a scalar that both hold."""
    arrays = {
        "rows": random_array((5, 4), "float32", 1),
        "columns": random_array((3, 6), "int16", 2),
        "scalar": np.array(2.5),
        "empty": np.zeros((0, 2), np.int64),
    }
    made = World(2, arrays, [[], []])
    for rank in range(2):
        made.held[rank] = [
            ("rows", grid((5, 4), {0: 2})[rank]),
            ("columns", grid((3, 6), {1: 2})[rank]),
            ("scalar", grid((), {})[0]),
            ("empty", grid((0, 2), {})[0]),
        ]
    return made


def body_of(path: Path) -> Any:
    """Return the body of a JSON file, by the document's byte positions."""
    data = path.read_bytes()
    envelope = json.loads(data)
    assert list(envelope) == ["digest", "body"]
    assert xxhash.xxh3_128_hexdigest(data[52:-2]) == envelope["digest"]
    assert json.loads(data[52:-2]) == envelope["body"]
    return envelope["body"]


def conforms(value: Any, schema: dict[str, Any], where: str = "$") -> None:
    """Check a value against the part of JSON Schema that the schema file uses. Key order also counts."""
    if "$ref" in schema:
        return conforms(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "const" in schema:
        assert value == schema["const"], where
    if "enum" in schema:
        assert value in schema["enum"], where
    kinds = {"object": dict, "array": list, "string": str, "integer": int}
    if "type" in schema:
        assert isinstance(value, kinds[schema["type"]]), where
    if "pattern" in schema:
        assert re.search(schema["pattern"], value), where
    assert value >= schema["minimum"] if "minimum" in schema else True, where
    if isinstance(value, dict) and "properties" in schema:
        assert list(value) == schema["required"] == list(schema["properties"]), where
        for key, inner in schema["properties"].items():
            conforms(value[key], inner, f"{where}.{key}")
    for key, inner in schema.get("patternProperties", {}).items():
        assert all(re.search(key, name) for name in value), where
        for name, item in value.items():
            conforms(item, inner, f"{where}.{name}")
    if isinstance(value, list):
        assert schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)), where
        inners = schema.get("prefixItems", [schema.get("items", {})] * len(value))
        for index, (item, inner) in enumerate(zip(value, inners, strict=True)):
            conforms(item, inner, f"{where}[{index}]")


def test_written_files_conform_to_the_schema(tmp_path: Path) -> None:
    save(tmp_path, world(), save_id())
    path = tmp_path / save_id().directory()
    kinds = {"catalogue.json": "catalogue", "SEALED": "seal"}
    for file in path.iterdir():
        if file.suffix != ".safetensors":
            conforms(body_of(file), SCHEMA["$defs"][kinds.get(file.name, "rank_manifest")], file.name)


def test_a_reader_that_knows_only_the_document_gets_the_tensors(tmp_path: Path) -> None:
    made = world()
    save(tmp_path, made, save_id())
    path = tmp_path / save_id().directory()
    types = {"F32": "<f4", "I16": "<i2", "F64": "<f8", "I64": "<i8"}
    catalogue = body_of(path / "catalogue.json")
    found = {t["fqn"]: np.zeros(t["shape"], types[t["dtype"]]) for t in catalogue["tensors"]}
    covered = {name: np.zeros(array.shape, int) for name, array in found.items()}
    for file in path.glob("rank-r*.json"):
        manifest = body_of(file)
        for entry in manifest["files"]:
            data = (path / entry["name"]).read_bytes()
            assert len(data) == entry["size_bytes"] and entry["header_size_bytes"] % 4096 == 0
            assert xxhash.xxh3_64_hexdigest(data[: entry["header_size_bytes"]]) == entry["header_digest"]
        for tensor in manifest["tensors"]:
            data = (path / manifest["files"][tensor["file"]]["name"]).read_bytes()
            cut = tuple(slice(o, o + n) for o, n in zip(tensor["offsets"], tensor["sizes"], strict=True))
            array = found[tensor["fqn"]]
            size_bytes = int(np.prod(tensor["sizes"], dtype=int)) * array.itemsize
            piece = data[tensor["start"] : tensor["start"] + size_bytes]
            size = manifest["extent_size_bytes"]
            extents = [piece[i : i + size] for i in range(0, len(piece), size)]
            assert [xxhash.xxh3_64_hexdigest(extent) for extent in extents] == tensor["digests"]
            array[cut] = np.frombuffer(piece, array.dtype).reshape(tensor["sizes"])
            covered[tensor["fqn"]][cut] += 1
    for name, array in made.arrays.items():
        assert found[name].tobytes() == array.tobytes() and (covered[name] == 1).all()


def test_the_document_names_every_key_dtype_and_limit() -> None:
    for definition in ("catalogue", "rank_manifest", "seal", "save_id"):
        for key in SCHEMA["$defs"][definition]["required"]:
            assert f"`{key}`" in DOCUMENT, key
    assert SCHEMA["$defs"]["dtype"]["enum"] == list(DTYPE_SIZE_BYTES)
    assert all(dtype in DOCUMENT for dtype in DTYPE_SIZE_BYTES)
    assert f"version {form.FORMAT_VERSION}" in DOCUMENT
    assert form.MANIFEST_SIZE_BYTES_MAX == 2**30 and "JSON files 1 GiB" in DOCUMENT
    assert VALUES_SIZE_BYTES_MAX == 16 * 2**20 and "together 16 MiB" in DOCUMENT
    assert f"1 to {FQN_LENGTH_MAX} characters" in DOCUMENT
    assert (
        form.EXTENT_SIZE_BYTES_MAX
        == SCHEMA["$defs"]["rank_manifest"]["properties"]["extent_size_bytes"]["maximum"]
    )
