"""The reading of Megatron's own periodic checkpoints: ``iter_NNNNNNN/mp_rank_XX[_YYY]/model_optim_rng.pt``.

Files of Megatron's distributed format are read by ``megatron_distributed.py``.

Theory. Each file is one tensor-parallel part (XX) of one pipeline stage (YYY). The parts of a weight are joined along
the dimension in which Megatron splits it; the weight's name determines that dimension. All other values must be equal
in all parts. The layers of a stage are numbered from 0; their numbers in the whole model follow from the previous
stages. A file also holds objects of Megatron's classes (arguments, random states). They are read as inert records
(``torch_archive.py``) and left out of the result.

The optimizer state is taken if the checkpoint is one file with a torch optimizer's state of the weights themselves.
Megatron's optimizers of 16-bit weights keep the state of 32-bit copies, and the distributed optimizer keeps its state
in another file. In these cases the user is informed, and the result holds weights, schedule and step. A session that
trains with an optimizer refuses to resume from such a result; ``holdfast.load(path, model)`` takes the weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.frameworks.common.weight_selection import EXTRA_STATE
from holdfast.frameworks.torch.files.megatron_distributed import COMMON, read_distributed
from holdfast.frameworks.torch.files.pickle_records import PickleRecord
from holdfast.frameworks.torch.files.torch_archive import read_archive
from holdfast.store.backends.durable_files import reading
from holdfast.text import plural

TRACKER = "latest_checkpointed_iteration.txt"
FILE = "model_optim_rng.pt"
_PART = re.compile(r"mp_rank_(\d{2,3})(?:_(\d{3}))?")
_ITERATION = re.compile(r"iter_(\d{7,})")
_LAYER = re.compile(r"(?P<before>(?:^|.*\.)layers\.)(?P<number>\d+)(?P<after>\..*)")
_OF_DISTRIBUTED = (COMMON, "metadata.json")
_CUTS = (
    (re.compile(r"(?:word_embeddings|output_layer|lm_head)\.weight"), 0),
    (re.compile(r"(?:linear_qkv|linear_q|linear_kv|linear_fc1|query_key_value|dense_h_to_4h)\.(?:weight|bias)"), 0),
    (re.compile(r"(?:linear_proj|linear_fc2|(?:self|cross)_attention\.dense|dense_4h_to_h)\.weight"), 1),
)  # fmt: skip
"""Ends of the names of weights that tensor parallelism splits, each with the dimension of the split."""
_GATED = re.compile(r"(?:linear_fc1|dense_h_to_4h)\.(?:weight|bias)")


class _CheckpointPart(NamedTuple):
    """One file of a checkpoint: its path, its weights by name, and its whole tree."""

    path: Path
    model: dict[str, torch.Tensor]
    tree: dict[str, Any]

    def argument(self, name: str, default: Any) -> Any:
        """Return one of Megatron's arguments as saved in the file, or ``default``."""
        arguments = self.tree.get("args")
        state = arguments.state if isinstance(arguments, PickleRecord) else None
        return state.get(name, default) if isinstance(state, dict) else default


def is_megatron(folder: Path) -> bool:
    """Return True for the directory of a run or of one iteration that Megatron has written."""
    named = _ITERATION.fullmatch(folder.name) is not None
    return (folder / TRACKER).is_file() or bool(_files(folder)) or (named and _is_distributed(folder))


def read_megatron(folder: Path, scratch: Path, note: Callable[[str], object]) -> dict[str, Any]:
    """Return the tree of one iteration: ``model``, ``step``, ``scheduler``, and ``optimizer`` if it can be taken.

    Args:
        folder: directory of a run (its newest iteration is read), or of an iteration.
        scratch: directory for a temporary file, see :func:`read_distributed`.
        note: called with a line for the user about content that is left out.

    Raises:
        UsageError: a part is missing, or its format is not supported.
        CheckpointInvalid: a file is damaged, or the files are of different checkpoints.
    """
    folder = _newest(folder) if (folder / TRACKER).is_file() else folder
    if _is_distributed(folder):
        common = read_distributed(folder, scratch, note)
        return _tree(common, common["model"], folder / COMMON)
    stages = _parts(folder)
    first = stages[0][0]
    tree = _tree(first.tree, _model(stages), first.path)
    saved = first.tree.get("optimizer")
    if _is_torch_s(saved) and len(stages) == len(stages[0]) == 1:
        tree["optimizer"] = _plain(saved, "optimizer", first.path)
    elif saved is not None:
        what = (
            "is that of one part of the weights" if _is_torch_s(saved) else "is not of the weights themselves"
        )
        note(f"the optimizer's state {what}: it is left out; holdfast.load(path, model) takes the weights")
    return tree


def _tree(said: Mapping[str, Any], model: dict[str, torch.Tensor], path: Path) -> dict[str, Any]:
    """Return weights, step and schedule from ``said``, the content of the file ``path``. Raises: CheckpointInvalid."""
    iteration = said.get("iteration")
    if type(iteration) is not int or iteration < 0:
        raise CheckpointInvalid(f"{path}: its iteration is {iteration!r}, no number of updates")
    tree: dict[str, Any] = {"model": model, "step": iteration}
    if isinstance(scheduler := said.get("opt_param_scheduler"), dict):
        tree["scheduler"] = _plain(scheduler, "opt_param_scheduler", path)
    return tree


def _newest(folder: Path) -> Path:
    with reading(folder / TRACKER):
        said = (folder / TRACKER).read_text(errors="replace").strip()
    name = said if said == "release" else f"iter_{int(said):07d}" if said.isdecimal() else ""
    if not name or not (folder / name).is_dir():
        raise UsageError(
            f"{folder / TRACKER} says {said[:40]!r}, and there is no such iteration",
            hint="name the directory of one: .../iter_0001000",
        )
    return folder / name


def _is_distributed(folder: Path) -> bool:
    return not _files(folder) and any((folder / name).is_file() for name in _OF_DISTRIBUTED)


def _files(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the directories of the parts by (tensor-parallel rank, pipeline stage)."""
    found = {}
    for path in folder.iterdir():
        match = _PART.fullmatch(path.name)
        if match is not None and path.is_dir():
            found[int(match[1]), int(match[2] or 0)] = path
    return found


def _parts(folder: Path) -> list[list[_CheckpointPart]]:
    """Return all files as lists: by stage, then by tensor-parallel rank. Raises: UsageError: one is missing."""
    paths = _files(folder)
    tensors, stages = (1 + max((place[n] for place in paths), default=-1) for n in (0, 1))
    read = {place: _read(path / FILE) for place, path in sorted(paths.items())}
    first = next(iter(read.values()))
    tensors = max(tensors, first.argument("tensor_model_parallel_size", 1))
    stages = max(stages, first.argument("pipeline_model_parallel_size", 1))
    for stage in range(stages):
        for tensor in range(tensors):
            if (tensor, stage) not in read:
                name = f"mp_rank_{tensor:02d}" + (f"_{stage:03d}" if stages > 1 else "")
                raise UsageError(
                    f"{folder} lacks {name}: the weights are in {plural(tensors * stages, 'part')}, "
                    f"of which {len(read)} are there",
                    hint="copy the directories of all ranks together",
                )
    made = [[read[tensor, stage] for tensor in range(tensors)] for stage in range(stages)]
    for part in read.values():
        if part.tree.get("iteration") != first.tree.get("iteration"):
            raise CheckpointInvalid(
                f"{part.path} is of iteration {part.tree.get('iteration')}, {first.path} of "
                f"{first.tree.get('iteration')}"
            )
    return made


def _read(path: Path) -> _CheckpointPart:
    tree = read_archive(path)
    if "model" not in tree:
        several = "model0" in tree
        raise UsageError(
            f"{path} holds " + ("several chunks of an interleaved pipeline" if several else "no model"),
            hint="one chunk for each stage: Megatron without --num-layers-per-virtual-pipeline-stage",
        )
    model: dict[str, torch.Tensor] = {}
    _flatten(tree["model"], "", model, path)
    return _CheckpointPart(path, model, tree)


def _flatten(tree: Any, prefix: str, model: dict[str, torch.Tensor], path: Path) -> None:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        name = f"{prefix}{key}"
        if isinstance(value, torch.Tensor):
            model[name] = value
        elif isinstance(value, dict):
            _flatten(value, f"{name}.", model, path)
        elif not name.endswith(EXTRA_STATE) or value is not None:
            raise UsageError(
                f"{path}: {name} of the model is a {_kind(value)}, not a tensor",
                hint="scales of FP8 are not read: save from a model in BF16",
            )


def _model(stages: Sequence[Sequence[_CheckpointPart]]) -> dict[str, torch.Tensor]:
    """Return the weights of the whole model by name, joined from all stages and parts."""
    whole: dict[str, torch.Tensor] = {}
    layers = 0
    for parts in stages:
        numbers = {int(m["number"]) for name in parts[0].model if (m := _LAYER.fullmatch(name))}
        for name in parts[0].model:
            lacking = next((part for part in parts if name not in part.model), None)
            if lacking is not None:
                raise CheckpointInvalid(f"{lacking.path} lacks {name}, which {parts[0].path} holds")
            match = _LAYER.fullmatch(name)
            full = f"{match['before']}{int(match['number']) + layers}{match['after']}" if match else name
            made = _join(name, parts)
            if full in whole and not torch.equal(whole[full], made):
                raise CheckpointInvalid(f"{parts[0].path}: {name} is another one than in the stages before")
            whole[full] = made
        layers += len(numbers)
    return whole


def _join(name: str, parts: Sequence[_CheckpointPart]) -> torch.Tensor:
    """Return one weight, joined from its tensor-parallel parts."""
    tensors = [part.model[name] for part in parts]
    if len(tensors) == 1:
        return tensors[0]
    dim = next((dim for pattern, dim in _CUTS if pattern.search(name)), None)
    if dim is None:
        for part in parts[1:]:
            if not torch.equal(tensors[0], part.model[name]):
                raise UsageError(
                    f"{part.path}: {name} differs from that of {parts[0].path}, and along which dimension Megatron "
                    "cuts it is not known",
                    hint="write it with one tensor-parallel rank: Megatron's tools/checkpoint/convert.py",
                )
        return tensors[0]
    if parts[0].argument("swiglu", False) and _GATED.search(name):
        gates, values = zip(*(tensor.chunk(2, 0) for tensor in tensors), strict=True)
        return torch.cat([*gates, *values], 0)
    return torch.cat(tensors, dim)


def _is_torch_s(saved: Any) -> bool:
    """Return True if ``saved`` is the state dict of a torch optimizer."""
    return isinstance(saved, dict) and isinstance(saved.get("param_groups"), list) and "state" in saved


def _plain(value: Any, where: str, path: Path) -> Any:
    """Return a copy of ``value``. Raises: UsageError: it contains the record of an object."""
    if isinstance(value, Mapping):
        return {key: _plain(item, f"{where}.{key}", path) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, f"{where}.{n}", path) for n, item in enumerate(value))
    if isinstance(value, PickleRecord):
        raise UsageError(
            f"{path}: {where} is a {_kind(value)}, neither a tensor nor a plain value",
            hint="without it: save the model's state dict alone, and import that",
        )
    return value


def _kind(value: Any) -> str:
    return str(value.name) if isinstance(value, PickleRecord) else type(value).__name__
