"""Export to and import from torch.save files, torch DCP directories and Hugging Face files; no hostile code runs."""

from __future__ import annotations

import contextlib
import json
import pickle
import resource
import zipfile
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict import get_state_dict, set_optimizer_state_dict

import holdfast
from holdfast.cli.main import answer
from holdfast.core.ids import Generation, SaveId
from holdfast.errors import CheckpointInvalid, StoreWriteError, UsageError
from holdfast.frameworks.common.weight_selection import weights_of
from holdfast.frameworks.torch.files import dcp_reader, pickle_records
from holdfast.frameworks.torch.files.exports import Form, export_checkpoint
from holdfast.frameworks.torch.files.imports import import_checkpoint
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.store.backends.location import Place
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.save_plan import plan
from holdfast.store.read.load import load_catalogue, load_values
from holdfast.store.read.validation import inspect
from holdfast.store.write.writer import write_share
from tests.adapters.test_state import Net, step

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]
SESSION = {"step": 3, "seed": 0, "world": 1, "place": {"loop": -1}}


class Job:
    """A small training: two parameter groups, tied weights, a transient buffer, a scheduler, unusual plain state."""

    def __init__(self, seed: int, updates: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        bias = [p for n, p in self.net.named_parameters() if n.endswith("bias")]
        other = [p for n, p in self.net.named_parameters() if not n.endswith("bias")]
        groups: list[dict[str, Any]] = [{"params": bias, "weight_decay": 0.0}, {"params": other}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.extras: dict[str, Any] = {"seen": deque([1, 2], maxlen=9), "table": np.arange(4.0), "epoch": 7}
        for _ in range(updates):
            step(self.net, self.optimizer)
            self.scheduler.step()

    def state(self) -> TorchState:
        """Return the state that a session saves."""
        return TorchState(self.net, {"default": self.optimizer}, self.scheduler, None, self.extras)

    def save(self, root: Path) -> Path:
        """Save one checkpoint of one rank."""
        collected = self.state().collect()
        catalogue = Catalogue.from_layouts({0: collected.layout(0, 1)})
        identity = SaveId("run", Generation(1, 1), 3, 0, "periodic")
        values = {**collected.values, "session": SESSION}
        write_share(root, identity, catalogue, plan(catalogue, frozenset({0})), 0, collected, values, {0: {}})
        return root / identity.directory()

    def load(self, path: Place) -> None:
        """Load a checkpoint as a session resumes."""
        from holdfast.store.read.load import LoadTarget, load_into

        restore = self.state().restore(load_catalogue(path), load_values(path))
        targets = [LoadTarget(m.fqn, m.box, m.dtype, d, m.shape) for m, d in restore.buffers()]
        load_into(path, targets, known=load_catalogue(path).by_fqn, optional=["mask"])
        restore.finish()

    def check_same(self, other: Job) -> None:
        """Check that weights, optimizer state and hyperparameters are equal bit for bit."""
        same(self.net.state_dict(), other.net.state_dict())
        same(self.optimizer.state_dict(), other.optimizer.state_dict())
        same(self.scheduler.state_dict(), other.scheduler.state_dict())


def same(a: Any, b: Any) -> None:
    """Check that two trees are equal, tensors bit for bit."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert a.contiguous().flatten().view(torch.uint8).equal(b.contiguous().flatten().view(torch.uint8))
    else:
        assert a == b


def read_dcp_by_torch(folder: Path) -> dict[str, Any]:
    """Return the model as torch reads it."""
    state = {"model": {k: torch.zeros_like(v) for k, v in Net().state_dict().items()}}
    state_dict_loader.load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    return state["model"]


def test_torch_reads_what_we_export(tmp_path: Path) -> None:
    job = Job(1, 3)
    path = job.save(tmp_path / "root")
    done: list[int] = []
    assert export_checkpoint(path, tmp_path / "all.pt", "torch", progress=done.append) == (
        str(tmp_path / "all.pt"),
    )
    assert sum(done) == load_catalogue(path).size_bytes
    read = torch.load(tmp_path / "all.pt", weights_only=True)
    same(read["model"], dict(job.net.state_dict()))
    assert read["model"]["a.weight"].data_ptr() == read["model"]["b.weight"].data_ptr()
    assert read["step"] == 3 and read["state"]["epoch"] == 7 and read["state"]["seen"] == [1, 2]
    assert read["state"]["table"].tolist() == [0, 1, 2, 3]
    other = Job(2, 1)
    other.net.load_state_dict(read["model"])
    set_optimizer_state_dict(other.net, other.optimizer, read["optimizer"])
    other.scheduler.load_state_dict(read["scheduler"])
    job.check_same(other)

    export_checkpoint(path, tmp_path / "dcp", "dcp")
    same(read_dcp_by_torch(tmp_path / "dcp"), dict(job.net.state_dict()))


def test_hugging_face_files_hold_the_model_alone(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    job = Job(1, 2)
    path = job.save(tmp_path / "root")
    expected = {fqn: t for fqn, t in job.net.state_dict().items() if fqn != "b.weight"}
    assert set(weights_of(path)) == set(expected)
    export_checkpoint(path, tmp_path / "one", "hf")
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    same(load_file(tmp_path / "one" / "model.safetensors"), {k: expected[k] for k in expected})
    export_checkpoint(path, tmp_path / "cut", "hf", file_size_bytes_max=100)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(expected) and len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    found = {fqn: torch.zeros_like(t) for fqn, t in expected.items()}
    state_dict_loader.load(
        found, storage_reader=HuggingFaceStorageReader(str(tmp_path / "cut")), no_dist=True
    )
    same(found, expected)


@pytest.mark.parametrize("to", ["torch", "dcp"])
def test_export_then_import_gives_the_same_training(tmp_path: Path, to: Form) -> None:
    job = Job(1, 3)
    path = job.save(tmp_path / "root")
    export_checkpoint(path, tmp_path / "out", to)
    sizes: list[int] = []
    made = import_checkpoint(tmp_path / "out", tmp_path / "new", progress=lambda total: sizes.append)
    assert inspect(made, deep=True).valid and inspect(made).step == 3
    ours, theirs = load_catalogue(path), load_catalogue(made)
    assert {t.fqn: (t.dtype, t.shape) for t in theirs.tensors} == {
        t.fqn: (t.dtype, t.shape) for t in ours.tensors if t.fqn != "mask"
    }
    assert sum(sizes) == theirs.size_bytes
    other = Job(2, 1)
    other.load(made)
    job.check_same(other)
    assert [p.name for p in (tmp_path / "new").iterdir()] == [made.name], "no scratch is left"
    with pytest.raises(UsageError, match="exists"):
        import_checkpoint(tmp_path / "out", tmp_path / "new")


def test_import_of_what_people_save(tmp_path: Path) -> None:
    """The forms are optimizers with numbered parameters, named parameters, a bare state dict, and DCP's own form."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    plain = torch.optim.Adam(net.parameters())
    net(torch.randn(5, 3)).sum().backward()
    plain.step()
    torch.save({"model_state_dict": net.state_dict(), "optimizer_state_dict": plain.state_dict(), "epoch": 4},
               tmp_path / "a.pt")  # fmt: skip
    with pytest.raises(UsageError, match="does not say its step"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    made = import_checkpoint(tmp_path / "a.pt", tmp_path / "a", step=9)
    values = load_values(made)
    assert values["state"] == {"epoch": 4}
    names = {t.fqn for t in load_catalogue(made).tensors}
    assert {"optimizer.default.1.bias.exp_avg", "0.weight"} <= names and "state" not in names
    fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    holdfast.load(made, fresh)
    same(fresh.state_dict(), net.state_dict())

    model, optimizer = get_state_dict(net, plain)
    tree = {"model": model, "optim": optimizer, "step": 5}
    state_dict_saver.save(tree, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True)
    again = import_checkpoint(tmp_path / "d", tmp_path / "b")
    assert {t.fqn for t in load_catalogue(again).tensors} == names and inspect(again).step == 5

    torch.save(net.state_dict(), tmp_path / "w.pt")
    holdfast.load(import_checkpoint(tmp_path / "w.pt", tmp_path / "c"), fresh)
    same(fresh.state_dict(), net.state_dict())


def test_optimizer_state_that_cannot_be_mapped_is_refused(tmp_path: Path) -> None:
    net = Net()
    # found by its name, as a parameter is: positions say nothing about it
    net.register_buffer("table", torch.ones(4))
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer)
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="cannot be matched"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "a")
    named = torch.optim.Adam(net.named_parameters())
    step(net, named)
    torch.save({"model": net.state_dict(), "optimizer": named.state_dict(), "step": 1}, tmp_path / "b.pt")
    made = import_checkpoint(tmp_path / "b.pt", tmp_path / "b")
    assert "optimizer.default.a.weight.exp_avg" in load_catalogue(made).by_fqn


def test_sharded_dcp_is_read_whole(tmp_path: Path) -> None:
    """The metadata has chunks of several ranks, as DCP writes them for a sharded tensor."""
    world = torch.arange(60.0).reshape(6, 10)
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

    state_dict_saver.save({"w": world}, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True)
    metadata = pickle.loads((tmp_path / "d" / ".metadata").read_bytes())
    index, place = next(iter(metadata.storage_data.items()))
    parts = {}
    chunks = []
    with (tmp_path / "d" / "__1_0.distcp").open("wb") as file:
        for row, column, rows, columns in ((0, 0, 4, 6), (0, 6, 4, 4), (4, 0, 2, 10)):
            start = file.tell()
            torch.save(world[row : row + rows, column : column + columns].clone(), file)
            chunks.append(ChunkStorageMetadata(torch.Size((row, column)), torch.Size((rows, columns))))
            parts[type(index)("w", (row, column))] = type(place)("__1_0.distcp", start, file.tell() - start)
    metadata.storage_data = parts
    described = metadata.state_dict_metadata["w"]
    for chosen, rule in ((chunks, ""), (chunks[:2], "no chunk holds"), ([*chunks, chunks[0]], "overlap")):
        metadata.state_dict_metadata["w"] = TensorStorageMetadata(
            described.properties, described.size, chosen
        )
        (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(metadata))
        if rule:
            with pytest.raises(CheckpointInvalid, match=rule):
                dcp_reader.read_dcp(tmp_path / "d", tmp_path)
        else:
            same(dcp_reader.read_dcp(tmp_path / "d", tmp_path), {"w": world})


class Bomb:
    """An object that would create a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self.path), "w"))


def test_nothing_that_is_read_is_executed(tmp_path: Path) -> None:
    evil = tmp_path / "executed"
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True)
    (tmp_path / "d" / ".metadata").write_bytes(pickle.dumps(Bomb(evil)))
    with pytest.raises(CheckpointInvalid, match=r"io\.open"):
        import_checkpoint(tmp_path / "d", tmp_path / "x")
    torch.save({"model": {"w": torch.ones(2)}, "rest": Bomb(evil)}, tmp_path / "a.pt")
    with pytest.raises(CheckpointInvalid, match="open"):
        import_checkpoint(tmp_path / "a.pt", tmp_path / "x")
    state_dict_saver.save({"w": torch.ones(3), "v": Bomb(evil)},
                          storage_writer=FileSystemWriter(tmp_path / "e"), no_dist=True)  # fmt: skip
    with pytest.raises(CheckpointInvalid, match="v"):
        import_checkpoint(tmp_path / "e", tmp_path / "x")
    assert not evil.exists() and not list((tmp_path / "x").iterdir())


def test_hostile_metadata_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    state_dict_saver.save({"w": torch.ones(3)}, storage_writer=FileSystemWriter(folder), no_dist=True)
    good = (folder / ".metadata").read_bytes()

    def refuse(data: bytes) -> None:
        (folder / ".metadata").write_bytes(data)
        with pytest.raises(CheckpointInvalid):
            dcp_reader.read_dcp(folder, tmp_path)

    for stop in range(0, len(good), 7):
        refuse(good[:stop])
    refuse(b"\x80\x04r\xff\xff\xff\x7f.")  # a memo index of two billion
    refuse(b"\x80\x04\x96" + b"\xff" * 8 + b".")  # a bytearray of 2^64 bytes
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    refuse(name + b"}b.")  # the state of a class
    # a key that is nested 200,000 levels deep
    refuse(b"\x80\x02}" + b"(" * 200_000 + b"t" * 200_000 + b"Ns.")
    refuse(name + b").")  # two values
    refuse(name + name + b"R.")  # arguments that are not a tuple
    metadata = pickle.loads(good)
    index, place = next(iter(metadata.storage_data.items()))
    for stored_in, start, length in (("../d/__0_0.distcp", 0, 9), ("/etc/passwd", 0, 9), ("__0_0.distcp", 0, 2**40),
                                     ("__0_0.distcp", -5, 9), ("none.distcp", 0, 9)):  # fmt: skip
        metadata.storage_data = {index: type(place)(stored_in, start, length)}
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(holdfast.StoreError):
            dcp_reader.read_dcp(folder, tmp_path)
    (folder / "link.distcp").symlink_to(folder / "__0_0.distcp")
    metadata.storage_data = {index: type(place)("link.distcp", place.offset, place.length)}
    refuse(pickle.dumps(metadata))


def test_every_flipped_bit_of_data_is_noticed(tmp_path: Path) -> None:
    """torch reads all of these damaged files without an error."""
    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    state_dict_saver.save(
        {"w": torch.zeros(1000)}, storage_writer=FileSystemWriter(tmp_path / "d"), no_dist=True
    )
    for file, source in (
        (tmp_path / "a.pt", tmp_path / "a.pt"),
        (tmp_path / "d" / "__0_0.distcp", tmp_path / "d"),
    ):
        data = bytearray(file.read_bytes())
        data[data.index(b"\0" * 2000) + 1000] ^= 4
        file.write_bytes(data)
        with pytest.raises(CheckpointInvalid, match="checksum"):
            import_checkpoint(source, tmp_path / "x")


def test_a_compressed_record_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w", 8) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry))
    with pytest.raises(CheckpointInvalid, match="compressed"):
        import_checkpoint(tmp_path / "b.pt", tmp_path / "x")


def test_bad_input_gives_one_typed_error(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    torch.save([1], tmp_path / "list.pt")
    torch.save({"epoch": 3}, tmp_path / "no.pt")
    torch.save({"model": {}}, tmp_path / "none.pt")
    for name, kind, why in (
        ("nowhere", UsageError, "does not exist"), ("empty", UsageError, "not a torch DCP"),
        ("text", UsageError, "no torch.save file"), ("list.pt", UsageError, "holds a list"),
        ("no.pt", UsageError, "epoch of the model is a int"), ("none.pt", UsageError, "no weights"),
    ):  # fmt: skip
        with pytest.raises(kind, match=why):
            import_checkpoint(tmp_path / name, tmp_path / "x")
    path = Job(1, 1).save(tmp_path / "root")
    with pytest.raises(UsageError, match="exists"):
        export_checkpoint(path, tmp_path / "text", "torch")
    shard = next(path.glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[4096] ^= 1  # part of norm.num_batches_tracked, which all three forms hold
    shard.write_bytes(data)
    before = sorted(p.name for p in tmp_path.iterdir())
    for to in ("torch", "dcp", "hf"):
        with pytest.raises(CheckpointInvalid, match=shard.name):
            export_checkpoint(path, tmp_path / "out", to)
    assert sorted(p.name for p in tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", ["torch", "dcp", "hf"])
def test_a_file_size_limit_leaves_nothing(tmp_path: Path, to: Form) -> None:
    net = nn.Linear(300, 300)
    torch.save(net.state_dict(), tmp_path / "w.pt")
    path = import_checkpoint(tmp_path / "w.pt", tmp_path / "root")
    before = sorted(p.name for p in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreWriteError):
            export_checkpoint(path, tmp_path / "out", to)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Job(1, 2).save(tmp_path / "root")
    assert answer(["ckpt", "export", str(path), str(tmp_path / "a.pt"), "--to", "torch", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [str(tmp_path / "a.pt")]
    assert answer(["ckpt", "import", str(tmp_path / "a.pt"), str(tmp_path / "new")]) == 0
    made = Path(capsys.readouterr().out.strip())
    assert inspect(made, deep=True).valid
    arguments = ["ckpt", "merge", str(made), str(tmp_path / "cut"), "--max-shard-size", "100B"]
    assert answer(arguments) == 0 and "index.json" in capsys.readouterr().out
    for wrong in (["export", str(path), "x"], ["merge", str(path), "x", "--max-shard-size", "much"],
                  ["export", str(path), str(tmp_path / "root"), "--to", "hf"]):  # fmt: skip
        assert answer(["ckpt", *wrong]) == 2
    assert "exists" in capsys.readouterr().err


def test_records_are_inert() -> None:
    """A record stores what the class would have been called with, and calls nothing."""
    data = pickle.dumps([Bomb(Path("x")), {"a": (1, 2.5, None, True, b"b")}])
    bomb, plain = pickle_records.read_records(data, {"_io.open", "io.open"}, "x")
    assert (
        isinstance(bomb, pickle_records.PickleRecord)
        and bomb.args == ("x", "w")
        and bomb.name.endswith("io.open")
    )
    assert plain == {"a": (1, 2.5, None, True, b"b")}


@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_refused(data: bytes) -> None:
    with contextlib.suppress(CheckpointInvalid):
        assert pickle_records.read_records(data + b".", {"torch.Size"}, "x") is not Ellipsis
