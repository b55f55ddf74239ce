"""``torch.save`` files and torch DCP directories as verified checkpoints, to load or to go on from.

Theory. Both give one tree of tensors and plain values; nothing in it is executed (``torch.load(weights_only=True)``,
``dcp.py``). Its parts are found by the names that people use: the model under ``model`` (or the whole tree is one), the
optimizers under ``optimizer``, and so on; other plain values go to the session's ``state``. Optimizer state is mapped
to parameter names: by the names that it carries, else by position when the weights leave no doubt, else it is refused.

Invariants:
1. What is written has the bits of what was read, under the names that the module gives them.
2. Memory stays small: a file is mapped, a directory goes through a scratch file in the target.
"""

from __future__ import annotations

import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.adapters.imported import Progress, import_id, write_imported
from holdfast.adapters.torch.dcp import METADATA_NAME, check_zip, load_plain, read_dcp
from holdfast.adapters.torch.state import Collected
from holdfast.adapters.values import Plain, split
from holdfast.errors import CheckpointInvalid, UsageError
from holdfast.store.files import writing
from holdfast.store.place import Place, place_of
from holdfast.store.root import Root

MODEL = ("model", "model_state_dict", "state_dict")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict")
SCALER = ("scaler", "scaler_state_dict")
STEP = ("step", "global_step")


def import_checkpoint(
    source: str | os.PathLike[str],
    root: Place | str | os.PathLike[str],
    *,
    step: int | None = None,
    progress: Callable[[int], Progress] = lambda size_bytes: int,
) -> Place:
    """Write a ``torch.save`` file or a DCP directory as a checkpoint below ``root``.

    Args:
        source: of a module's state dict, or of a dict with ``model``, ``optimizer``, ``scheduler``, ``scaler``.
        root: directory of checkpoints, as a session's ``checkpoint=``.
        step: updates done; by default what the file says (``step`` or ``global_step``), 0 for weights alone.
        progress: called with the total size in bytes of what is written; what it returns, with that of each part.

    Returns:
        The new checkpoint.

    Raises:
        UsageError: no such file, no weights in it, it does not say its step, or state that cannot be mapped.
        CheckpointInvalid: damaged, or it holds more than tensors and plain values.
        StateError: a value that a checkpoint cannot hold, named.
        StoreWriteError: ``root`` cannot be written.
    """
    found, target = Path(source), place_of(root)
    tree = _read(found, target if isinstance(target, Path) else Path(tempfile.gettempdir()))
    parts = _parts(tree, found)
    done = parts.step if step is None else step
    if done is None:
        if parts.optimizers:
            raise UsageError(f"{found} does not say its step", hint="holdfast ckpt import --step N")
        done = 0
    name = import_id(done).directory()
    if name in Root(target).names():
        raise UsageError(f"{target / name} exists", hint="name another directory or --step")
    collected = Collected()
    return write_imported(target, done, collected, parts.split(collected), progress)


def _read(source: Path, scratch: Path) -> dict[str, Any]:
    if source.is_dir():
        if not (source / METADATA_NAME).exists():
            raise UsageError(
                f"{source} holds no {METADATA_NAME}: not a torch DCP checkpoint",
                hint="name a directory that torch.distributed.checkpoint.save wrote, or a torch.save file",
            )
        with writing(scratch):
            scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
        return read_dcp(source, scratch)
    if not source.is_file():
        raise UsageError(f"{source} does not exist", hint="name a torch.save file or a torch DCP directory")
    mapped = zipfile.is_zipfile(source)
    if mapped:
        with source.open("rb") as file:
            check_zip(file, source.stat().st_size, str(source))
    tree = load_plain(str(source), str(source), mapped=mapped)
    if not isinstance(tree, dict):
        raise UsageError(
            f"{source} holds a {type(tree).__name__}, not a state dict",
            hint="save one for it: torch.save(model.state_dict(), PATH)",
        )
    return tree


class _Parts:
    """The tree by what it is for: tensors of the model by name, state dicts by name, other values."""

    def __init__(self) -> None:
        self.model: dict[str, torch.Tensor] = {}
        self.aliases: dict[str, str] = {}
        self.optimizers: dict[str, Any] = {}
        self.schedulers: dict[str, Any] = {}
        self.scaler: Any = None
        self.state: dict[str, Any] = {}
        self.step: int | None = None

    def split(self, out: Collected) -> dict[str, Plain]:
        """The values of a session; tensors go to ``out``."""
        for fqn, tensor in self.model.items():
            out.add(tensor, fqn)
        return {
            "aliases": dict(self.aliases),
            "transient": [],
            "optimizers": {name: self._optimizer(name, o, out) for name, o in self.optimizers.items()},
            "schedulers": {n: split(s, f"scheduler.{n}", out.add) for n, s in self.schedulers.items()},
            "scaler": None if self.scaler is None else split(self.scaler, "scaler", out.add),
            "state": {n: split(value, f"state.{n}", out.add) for n, value in self.state.items()},
        }

    def _optimizer(self, name: str, saved: Mapping[str, Any], out: Collected) -> Plain:
        """As ``OptimizerState.split`` writes it."""
        path = f"optimizer.{name}"
        if not isinstance(saved, dict) or not isinstance(saved.get("param_groups"), list):
            raise UsageError(
                f"optimizer {name!r}: not an optimizer's state_dict",
                hint="without it: save the model's state dict alone, and import that",
            )
        groups = [dict(group) for group in saved["param_groups"]]
        keys = [list(group.pop("params", ())) for group in groups]
        names = self._names(name, groups, keys, saved.get("state", {}))
        state = {names[str(key)]: item for key, item in saved.get("state", {}).items() if item}
        return {
            "groups": split(groups, f"{path}.groups", out.add),
            "members": [[names[str(key)] for key in members] for members in keys],
            "state": {fqn: split(dict(item), f"{path}.{fqn}", out.add) for fqn, item in state.items()},
        }

    def _names(
        self, name: str, groups: list[dict[str, Any]], keys: list[list[Any]], state: Mapping[Any, Any]
    ) -> dict[str, str]:
        """Parameter name by what stands for the parameter in the state dict.

        Raises:
            UsageError: it cannot be told.
        """
        flat = [str(key) for members in keys for key in members]
        if all(isinstance(key, str) and self._fqn(key) for members in keys for key in members):
            return {key: self._fqn(key) for key in flat}
        given = [list(group.get("param_names", ())) for group in groups]
        fqns = [self._fqn(fqn) for fqns in given for fqn in fqns]
        if len(fqns) != len(flat) or not all(fqns):
            fqns = list(self.model)
        shapes = {
            str(key): {tuple(v.shape) for v in item.values() if isinstance(v, torch.Tensor) and v.ndim}
            for key, item in state.items()
        }
        sound = len(fqns) == len(flat) and sorted(flat) == sorted(set(flat))
        for key, fqn in zip(flat, fqns, strict=False):
            sound = sound and shapes.get(key, set()) <= {tuple(self.model[fqn].shape)}
        if not sound:
            raise UsageError(
                f"optimizer {name!r}: its state is by number ({len(flat)} parameters), and which of the "
                f"{len(self.model)} tensors of the model they are cannot be told",
                hint="make the optimizer from model.named_parameters(), or save "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)",
            )
        return dict(zip(flat, fqns, strict=True))

    def _fqn(self, name: str) -> str:
        """The first name of a tensor; empty when the model has none of this name."""
        name = self.aliases.get(name, name)
        return name if name in self.model else ""


def _parts(tree: Mapping[str, Any], source: Path) -> _Parts:
    """Tell the parts of a tree.

    Raises:
        UsageError: there are no weights.
    """
    parts = _Parts()
    rest = dict(tree)

    def take(names: tuple[str, ...]) -> Any:
        return next((rest.pop(name) for name in names if isinstance(rest.get(name), dict)), None)

    model = take(MODEL)
    if model is None:
        model, rest = rest, {}
    aliases = take(("aliases",)) or {}
    _flatten(model, "", parts, {}, source)
    for alias, fqn in aliases.items():
        if fqn in parts.model and parts.model.pop(alias, None) is not None:
            parts.aliases[alias] = fqn
    if not parts.model:
        raise UsageError(
            f"{source} holds no weights; its keys are {', '.join(map(str, list(tree)[:10])) or 'none'}",
            hint="save a module's state dict, or a dict with it under 'model'",
        )
    parts.optimizers = _named(take(OPTIMIZER), "param_groups")
    parts.schedulers = _named(take(SCHEDULER), "last_epoch")
    parts.scaler = take(SCALER)
    step = next((rest.pop(name) for name in STEP if type(rest.get(name)) is int), None)
    if step is not None and step < 0:
        raise CheckpointInvalid(f"{source}: step {step}")
    parts.step = step
    parts.state = {str(name): value for name, value in rest.items() if name != "state"}
    own = rest.get("state")
    parts.state |= own if isinstance(own, dict) else {} if own is None else {"state": own}
    return parts


def _flatten(tree: Any, prefix: str, parts: _Parts, seen: dict[Any, str], source: Path) -> None:
    """The model's tensors by dotted name; one that shares its memory whole with another is its alias."""
    for key, value in tree.items():
        fqn = f"{prefix}{key}"
        if isinstance(value, dict):
            _flatten(value, f"{fqn}.", parts, seen, source)
            continue
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{source}: {fqn} of the model is a {type(value).__name__}, not a tensor",
                hint="put other values beside the model: {'model': ..., 'epoch': ...}",
            )
        place = (value.data_ptr(), value.dtype, tuple(value.shape), value.stride())
        first = seen.setdefault(place, fqn) if value.numel() else fqn
        if first == fqn:
            parts.model[fqn] = value
        else:
            parts.aliases[fqn] = first


def _named(saved: Any, sign: str) -> dict[str, Any]:
    """State dicts by name: one alone is called ``default``."""
    if saved is None:
        return {}
    return {"default": saved} if sign in saved else dict(saved)
