"""Other programs read Holdfast's shard files, and silent failures of other tools do not happen with Holdfast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from holdfast.store.format.safetensors_codec import decode_header, encode_header
from holdfast.store.read.validation import inspect
from tests.store.worlds import World, grid, random_array, save, save_id

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.torch


def mesh_world() -> World:
    """Return a job with a matrix on a 2 x 2 grid, uneven rows, a strided tensor, a scalar and a replica."""
    arrays = {
        "grid": random_array((8, 6), "float32", 1),
        "rows": random_array((7, 3), "int64", 2),
        "strided": random_array((8, 5), "float64", 3),
        "scalar": np.array(5, np.int64),
        "same": random_array((33,), "int16", 4),
    }
    world = World(4, dict(arrays), [[] for _ in range(4)])
    strided = grid((8, 5), {0: 8})
    for rank in range(4):
        world.held[rank] = [
            ("grid", grid((8, 6), {0: 2, 1: 2})[rank]),
            ("rows", grid((7, 3), {0: 4})[rank]),
            ("strided", strided[rank]),
            ("strided", strided[rank + 4]),
            ("scalar", grid((), {})[0]),
            ("same", grid((33,), {})[0]),
        ]
    return world


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_torch_dcp_reads_and_reshards_our_directory(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    world = mesh_world()
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    assert len(list(path.glob("shard-*-001.safetensors"))) == 4, (
        "a second box of a tensor goes to a second file"
    )
    state = {f: torch.zeros(a.shape, dtype=torch.from_numpy(a.copy()).dtype) for f, a in world.arrays.items()}
    load(state, storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    for fqn, array in world.arrays.items():
        assert state[fqn].numpy().tobytes() == array.tobytes(), fqn


def test_safetensors_reads_our_shards(tmp_path: Path) -> None:
    world = mesh_world()
    save(tmp_path, world, save_id())
    seen: dict[str, int] = {}
    for shard in sorted((tmp_path / save_id().directory()).glob("shard-*")):
        for fqn, tensor in safetensors_torch.load_file(shard).items():
            seen[fqn] = seen.get(fqn, 0) + tensor.numel()
    assert seen == {fqn: array.size for fqn, array in world.arrays.items()}


def test_we_read_the_header_of_a_foreign_safetensors_file(tmp_path: Path) -> None:
    tensors = {"b": torch.ones(3, dtype=torch.bfloat16), "a": torch.zeros(2, 2), "e": torch.zeros(0, 3)}
    safetensors_torch.save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "x.safetensors").read_bytes()
    header = decode_header(data, len(data), "x")
    assert {t.fqn: (t.dtype, t.shape) for t in header.tensors} == {
        "a": ("F32", (2, 2)), "b": ("BF16", (3,)), "e": ("F32", (0, 3)),
    }  # fmt: skip


def test_our_header_is_aligned_and_decodes_to_what_was_encoded() -> None:
    data, header = encode_header([("w", "F32", (3, 2)), ("é\n", "BF16", ()), ("e", "I8", (0,))], {"k": "v"})
    assert len(data) % 4096 == 0 and header.data_start == len(data)
    assert decode_header(data, header.tensors[-1].stop, "x") == header


def test_two_saves_of_one_step_never_overwrite_each_other(tmp_path: Path) -> None:
    """In DCP, the second save replaces the first one, and a death in the middle destroys the committed save."""
    world = mesh_world()
    save(tmp_path, world, save_id())
    before = {p: p.read_bytes() for p in (tmp_path / save_id().directory()).iterdir()}
    save(tmp_path, world, save_id(attempt=1))
    assert {p: p.read_bytes() for p in before} == before
    assert inspect(tmp_path / save_id(attempt=1).directory(), deep=True).valid


def test_a_missing_middle_shard_is_noticed(tmp_path: Path) -> None:
    """DCP's Hugging Face reader silently leaves the old values in the target."""
    world = mesh_world()
    save(tmp_path, world, save_id())
    path = tmp_path / save_id().directory()
    (path / "shard-r00001-000.safetensors").unlink()
    found = inspect(path)
    assert not found.valid and "shard-r00001-000.safetensors" in found.reason
