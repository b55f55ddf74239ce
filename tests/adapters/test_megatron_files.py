"""Megatron's classic checkpoints: the parts are joined, no code in them runs, and damage gives one clear error."""

from __future__ import annotations

import argparse
import enum
import os
import random
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.errors import CheckpointInvalid, HoldfastError, UsageError
from holdfast.store.manage.checkpoint_root import Root

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

LAYER = "decoder.layers.{}."
EMBEDDING = "embedding.word_embeddings.weight"


class Backend(enum.Enum):
    """An enum, because Megatron's arguments hold its own enums."""

    LOCAL = 1


class Trap:
    """An object that would run code when it is unpickled."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch trapped",))


def whole(layers: int) -> dict[str, Any]:
    """Return a small GPT as one process holds it."""
    torch.manual_seed(5)
    made = {EMBEDDING: torch.randn(8, 4), "decoder.final_layernorm.weight": torch.randn(4)}
    for number in range(layers):
        prefix = LAYER.format(number)
        made |= {
            f"{prefix}self_attention.linear_qkv.weight": torch.randn(12, 4),
            f"{prefix}self_attention.linear_qkv.bias": torch.randn(12),
            f"{prefix}self_attention.linear_proj.weight": torch.randn(4, 4),
            f"{prefix}mlp.linear_fc1.weight": torch.randn(16, 4),
            f"{prefix}mlp.linear_fc2.weight": torch.randn(4, 8),
            f"{prefix}input_layernorm.weight": torch.randn(4),
        }
    return made


def cut(name: str, tensor: Any, rank: int, ranks: int) -> Any:
    """Return the part that Megatron gives a tensor-parallel rank. The first projection of the MLP is gated."""
    if "linear_fc1" in name:
        return torch.cat([half.chunk(ranks)[rank] for half in tensor.chunk(2)])
    if "linear_proj" in name or "linear_fc2" in name:
        return tensor.chunk(ranks, 1)[rank].contiguous()
    return tensor.chunk(ranks)[rank] if "layernorm" not in name else tensor


def write(folder: Path, model: dict[str, Any], tensors: int = 1, stages: int = 1, **more: Any) -> Path:
    """Write files in the layout of Megatron's ``save_checkpoint``. Return the directory of the iteration."""
    arguments = argparse.Namespace(
        tensor_model_parallel_size=tensors, pipeline_model_parallel_size=stages, swiglu=True,
        params_dtype=torch.bfloat16, attention_backend=Backend.LOCAL,
    )  # fmt: skip
    layers = 2 // stages
    for stage in range(stages):
        for rank in range(tensors):
            state: dict[str, Any] = OrderedDict()
            for name, tensor in model.items():
                part, layer = name, name.split(".")[2] if "layers" in name else ""
                if layer and int(layer) // layers != stage:
                    continue
                if (name == EMBEDDING and stage > 0) or ("final" in name and stage < stages - 1):
                    continue
                if layer:
                    part = name.replace(LAYER.format(layer), LAYER.format(int(layer) - stage * layers))
                state[part] = cut(name, tensor, rank, tensors)
            state["decoder.layers.0.mlp.linear_fc1._extra_state"] = None
            where = (
                folder / "iter_0000007" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else ""))
            )
            where.mkdir(parents=True)
            generators = {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state()}
            tree = {"args": arguments, "iteration": 7, "checkpoint_version": 3.0, "model": state,
                    "opt_param_scheduler": {"max_lr": 0.5, "num_steps": 56}, "rng_state": [generators]}  # fmt: skip
            torch.save(tree | more, where / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder / "iter_0000007"


def taken(source: Path, root: Path) -> tuple[dict[str, Any], list[str]]:
    """Import and export a checkpoint. Return its weights by name, and the notes of the import."""
    from holdfast.frameworks.torch.files.exports import export_checkpoint
    from holdfast.frameworks.torch.files.imports import import_checkpoint

    told: list[str] = []
    made = import_checkpoint(source, root, note=lambda line: told.append(str(line)))
    export_checkpoint(str(made), root / "back.pt", "torch")
    return torch.load(root / "back.pt", weights_only=True), told


@pytest.mark.parametrize(("tensors", "stages"), [(1, 1), (2, 1), (1, 2), (4, 2)])
def test_the_parts_of_all_ranks_are_the_whole_model(tmp_path: Path, tensors: int, stages: int) -> None:
    model = whole(2)
    write(tmp_path / "run", model, tensors, stages)
    tree, told = taken(tmp_path / "run", tmp_path / "root")
    assert tree["step"] == 7 and tree["scheduler"] == {"max_lr": 0.5, "num_steps": 56}
    assert tree["model"].keys() == model.keys() and not told
    assert all(torch.equal(tree["model"][name], tensor) for name, tensor in model.items())


def test_the_optimizer_of_one_process_comes_along(tmp_path: Path) -> None:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    folder = write(tmp_path / "run", dict(net.state_dict()), optimizer=optimizer.state_dict())
    tree, told = taken(folder, tmp_path / "root")
    ((_, saved),) = (
        tree["optimizer"].items() if "default" in tree["optimizer"] else (("", tree["optimizer"]),)
    )
    moments = saved["state"]["weight"]["exp_avg"]
    assert torch.equal(moments, optimizer.state[net.weight]["exp_avg"]) and not told


def test_an_optimizer_of_32_bit_copies_is_left_out_and_told(tmp_path: Path) -> None:
    saved = {"optimizer": {"param_groups": [], "state": {}}, "fp32_from_fp16_params": [[torch.ones(2)]]}
    folder = write(tmp_path / "run", whole(2), optimizer=saved)
    tree, told = taken(folder, tmp_path / "root")
    assert not tree.get("optimizer")
    (line,) = told
    assert line.startswith("the optimizer's state is not of the weights themselves: it is left out")


def refused(source: Path, root: Path, kind: type[HoldfastError], message: str) -> None:
    """Check that an import fails with one error and leaves nothing."""
    from holdfast.frameworks.torch.files.imports import import_checkpoint

    with pytest.raises(kind, match=message):
        import_checkpoint(source, root)
    assert not Root(root).names()


def test_what_is_wrong_is_one_error_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, root = write(tmp_path / "run", whole(2), 2), tmp_path / "root"
    second = folder / "mp_rank_01" / "model_optim_rng.pt"
    data = second.read_bytes()
    for size in (0, 100, len(data) // 2, len(data) - 30):
        second.write_bytes(data[:size])
        refused(folder, root, CheckpointInvalid, "mp_rank_01/model_optim_rng.pt")
    at = data.index(whole(2)[EMBEDDING][4:].numpy().tobytes()[:16])
    second.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    refused(folder, root, CheckpointInvalid, "does not match its checksum")
    second.unlink()
    refused(folder, root, UsageError, "mp_rank_01/model_optim_rng.pt does not exist")
    second.parent.rmdir()
    refused(folder, root, UsageError, "lacks mp_rank_01: the weights are in 2 parts, of which 1 are there")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("9")
    refused(tmp_path / "run", root, UsageError, "says '9', and there is no such iteration")


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    folder = write(tmp_path / "run", whole(2), 2)
    second = folder / "mp_rank_01" / "model_optim_rng.pt"
    tree = torch.load(second, weights_only=False)
    torch.save(tree | {"iteration": 8}, second)
    refused(folder, root, CheckpointInvalid, "is of iteration 8, .* of 7")
    tree["model"]["decoder.final_layernorm.weight"] += 1
    torch.save(tree, second)
    refused(folder, root, UsageError, "final_layernorm.weight differs .* dimension")
    del tree["model"]["decoder.final_layernorm.weight"]
    torch.save(tree, second)
    refused(folder, root, CheckpointInvalid, "lacks decoder.final_layernorm.weight")


def test_nothing_in_the_file_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "run", whole(2), rng_state=[Trap()])
    taken(folder, tmp_path / "root")
    trapped = write(tmp_path / "other", whole(2), opt_param_scheduler={"max_lr": Trap()})
    refused(
        trapped,
        tmp_path / "second",
        UsageError,
        "opt_param_scheduler.max_lr is a posix.system, neither a tensor",
    )
    assert not (tmp_path / "trapped").exists()


def write_distributed(folder: Path, model: dict[str, Any], **arguments: Any) -> Path:
    """Write files as Megatron's ``--ckpt-format torch_dist`` does. Return the directory of the iteration."""
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    stored: dict[str, Any] = {}
    for name, tensor in model.items():
        if ".layers." not in name:
            stored[name] = tensor
        if ".layers.0." not in name:
            continue
        layers = [tensor, model[name.replace(".layers.0.", ".layers.1.")]]
        fused = name.replace(".0.input_layernorm.", ".0.self_attention.linear_qkv.layer_norm_")
        stored[fused.replace(".layers.0.", ".layers.")] = torch.stack(layers)
    moments = {f"optimizer.state.exp_avg.{name}": torch.ones_like(tensor) for name, tensor in stored.items()}
    where = folder / "iter_0000007"
    where.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it saves in a single process
        tree = stored | moments | {"rng_state/shard_0_1": [1, 2]}
        state_dict_saver.save(tree, storage_writer=FileSystemWriter(where), no_dist=True)
    arguments_of = argparse.Namespace(
        params_dtype=torch.bfloat16, attention_backend=Backend.LOCAL, **arguments
    )
    torch.save(
        {
            "args": arguments_of,
            "checkpoint_version": 3.0,
            "iteration": 7,
            "opt_param_scheduler": {"max_lr": 0.5},
        },
        where / "common.pt",
    )
    (where / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    return where


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_the_distributed_format_gives_the_whole_model(tmp_path: Path, implementation: str) -> None:
    model = whole(2)
    folder = write_distributed(tmp_path / "run", model, transformer_impl=implementation)
    tree, told = taken(folder, tmp_path / "root")
    assert tree["step"] == 7 and tree["scheduler"] == {"max_lr": 0.5}
    if implementation != "local":
        model = {name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"): tensor
                 for name, tensor in model.items()}  # fmt: skip
    assert tree["model"].keys() == model.keys() and not tree.get("optimizer")
    assert all(torch.equal(tree["model"][name], tensor) for name, tensor in model.items())
    (line,) = told
    assert line.startswith("the optimizer's state is that of Megatron's distributed format: it is left out")


def test_a_distributed_checkpoint_without_its_metadata_is_refused(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path / "run", whole(2))
    (folder / ".metadata").unlink()
    refused(folder, tmp_path / "root", UsageError, "has no .metadata")


def test_a_damaged_chunk_of_the_distributed_format_is_refused(tmp_path: Path) -> None:
    model = whole(2)
    folder = write_distributed(tmp_path / "run", model)
    (chunk,) = folder.glob("*.distcp")
    data = bytearray(chunk.read_bytes())
    data[data.index(model[EMBEDDING].numpy().tobytes())] ^= 1
    chunk.write_bytes(data)
    refused(folder, tmp_path / "root", CheckpointInvalid, "does not match its checksum")


def test_chunks_of_an_interleaved_pipeline_are_refused_by_name(tmp_path: Path) -> None:
    folder = write_distributed(tmp_path / "run", {"model0.output_layer.weight": torch.ones(2, 2)})
    refused(folder, tmp_path / "root", UsageError, "model0.output_layer.weight is no weight of one model")
