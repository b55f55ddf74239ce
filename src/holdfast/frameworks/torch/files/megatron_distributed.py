"""The reading of Megatron's checkpoints in its distributed format (``torch_dist``): a DCP directory and ``common.pt``.

Theory. Each weight is stored whole, as one chunk from each rank that wrote a part, so the layout of the ranks does not
matter. The layers of one kind are one tensor, whose first dimension is the number of the layer. Transformer Engine
fuses a layer norm with the projection after it. The file uses the name of the fused module, even if the model has a
separate layer norm (``transformer_impl`` in Megatron's arguments). ``common.pt`` holds the arguments, the iteration and
the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.common.weight_selection import EXTRA_STATE
from holdfast.frameworks.torch.files.dcp_reader import METADATA_NAME, Item, read_dcp
from holdfast.frameworks.torch.files.pickle_records import PickleRecord
from holdfast.frameworks.torch.files.torch_archive import read_archive
from holdfast.store.backends.durable_files import make_root, writing

COMMON = "common.pt"
_STACKED = re.compile(r"(?P<before>(?:^|.*\.)layers\.)(?P<after>(?!\d+\.).+)")
_OPTIMIZER = "optimizer."
_CHUNK = re.compile(r"model\d+\.")
_FUSED_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
"""Pairs: part of the name of a layer norm in the file, and in a model without Transformer Engine."""


def read_distributed(folder: Path, scratch: Path, note: Callable[[str], object]) -> dict[str, Any]:
    """Return the tree of one iteration: ``model``, and ``iteration`` and ``opt_param_scheduler`` from ``common.pt``.

    Args:
        folder: directory of an iteration.
        scratch: directory for a temporary file as large as the weights; it is made if it is missing.
        note: called with a line for the user if the optimizer's state is left out.

    Raises:
        UsageError: the files have another form of the distributed format, or no weights.
        CheckpointInvalid: a file is damaged, or two weights get the same name.
    """
    if not (folder / METADATA_NAME).is_file():
        raise UsageError(
            f"{folder} is in Megatron's distributed format, and has no {METADATA_NAME}: only torch_dist is read",
            hint="write it with --ckpt-format torch_dist, or copy the directory again",
        )
    common = read_archive(folder / COMMON)
    left_out: list[str] = []

    def is_weight(name: str, item: Item) -> bool:
        if name.startswith(_OPTIMIZER):
            left_out.append(name)
            return False
        return item.dtype is not None

    with writing(scratch):
        make_root(scratch)
    stored = read_dcp(folder, scratch, is_weight)
    if left_out:
        note(
            "the optimizer's state is that of Megatron's distributed format: it is left out; "
            "holdfast.load(path, model) takes the weights"
        )
    apart = _argument(common, "transformer_impl") == "local"
    model: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if not isinstance(tensor, torch.Tensor) or EXTRA_STATE in name or _CHUNK.match(name):
            raise UsageError(
                f"{folder}: {name} is no weight of one model",
                hint="one chunk for each stage: Megatron without --num-layers-per-virtual-pipeline-stage",
            )
        for full, layer in _layers(name, tensor, folder):
            named = _with_own_norms(full) if apart else full
            if named in model:
                raise CheckpointInvalid(f"{folder}: two weights are called {named}")
            model[named] = layer
    return {**common, "model": model}


def _argument(common: dict[str, Any], name: str) -> Any:
    """Return one of Megatron's arguments as saved in ``common.pt``; None if it is missing."""
    arguments = common.get("args")
    state = arguments.state if isinstance(arguments, PickleRecord) else None
    return state.get(name) if isinstance(state, dict) else None


def _layers(name: str, tensor: torch.Tensor, folder: Path) -> list[tuple[str, torch.Tensor]]:
    """Return the weights in one stored tensor, by their names in the whole model. Raises: CheckpointInvalid."""
    match = _STACKED.fullmatch(name)
    if match is None:
        return [(name, tensor)]
    if tensor.ndim == 0:
        raise CheckpointInvalid(f"{folder}: {name} is a number, not one tensor for all layers")
    return [(f"{match['before']}{number}.{match['after']}", layer) for number, layer in enumerate(tensor)]


def _with_own_norms(name: str) -> str:
    """Return the name of a weight in a model whose layer norms are separate modules, not fused."""
    for fused, own in _FUSED_NORMS:
        name = name.replace(fused, own)
    return name
