"""The import of other programs' saved state (``import_sources.py``) as verified checkpoints.

Theory. A source is one tree of tensors and plain values. Its parts are found by their usual names: the model under
``model`` (or the whole tree is the model), the optimizers under ``optimizer``, and so on. Other plain values go to the
session's ``state``. A value under another name that looks like an optimizer's state is refused, because no optimizer
would get it from ``state``. Names of tensors are those of the user's own module, as in a session
(``parameter_names.py``). Optimizer state with parameter names is assigned by these names. Optimizer state with
parameter numbers is assigned by position if the shapes of the weights allow one assignment; otherwise it is refused.

Invariants:
1. The checkpoint has the bits of the source, under the names of the user's module.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.errors import UsageError
from holdfast.frameworks.common.imported_checkpoint import Progress, write_imported
from holdfast.frameworks.common.state_tree import Plain, split
from holdfast.frameworks.common.weight_selection import EXTRA_STATE
from holdfast.frameworks.torch.files.import_sources import read_source
from holdfast.frameworks.torch.state.state import TorchCollected
from holdfast.store.backends.location import Place, place_of
from holdfast.text import plural

log = logging.getLogger("holdfast")

# The last name in each tuple is Lightning's.
MODEL = ("model", "model_state_dict", "state_dict")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
SCHEDULER = ("scheduler", "lr_scheduler", "scheduler_state_dict", "lr_scheduler_state_dict", "lr_schedulers")
SCALER = ("scaler", "scaler_state_dict")
STEP = ("step", "global_step")
PARTS = {names[0]: names for names in (MODEL, OPTIMIZER, SCHEDULER, SCALER, STEP)}
WRAPPER = "module."
"""Prefix that ``DistributedDataParallel`` adds to every name."""
_COMPILED = re.compile(r"(?:^|(?<=\.))_orig_mod\.")
"""Prefix that ``torch.compile`` adds to the names in a compiled module; no user gives this name to a module."""


def import_checkpoint(
    source: str | os.PathLike[str],
    root: Place | str | os.PathLike[str],
    *,
    step: int | None = None,
    names: Mapping[str, str] = {},
    progress: Callable[[int], Progress] = lambda size_bytes: int,
    note: Callable[[str], object] = log.info,
) -> Place:
    """Write another program's saved state as a checkpoint below ``root``.

    Args:
        source: a ``torch.save`` file or DCP directory of a module's state dict, or of a dict with ``model``,
            ``optimizer``, ``scheduler``, ``scaler``; or a ``.safetensors`` file of weights, or a directory of them in
            Hugging Face's format; or a directory of Megatron (``iter_NNNNNNN``, or of the run).
        root: directory of checkpoints, as a session's ``checkpoint=``.
        step: number of updates done; the default is the source's ``step`` or ``global_step``, and 0 for weights alone.
        names: unusual keys of the source, each with the usual key of ``PARTS`` that replaces it:
            ``{"opt": "optimizer"}``.
        progress: called with the total size in bytes; the returned function is called with the size of each piece.
        note: called with a line for the user if tensors get other names than in the file.

    Returns:
        The new checkpoint.

    Raises:
        UsageError: the source does not exist, has no weights or no step, or has state that cannot be assigned.
        CheckpointInvalid: the source is damaged, or holds more than tensors and plain values.
        StateError: a checkpoint cannot hold a value; the error names it.
        StoreWriteError: ``root`` cannot be written.
    """
    found, target = Path(source), place_of(root)
    tree = read_source(found, target if isinstance(target, Path) else Path(tempfile.gettempdir()), note)
    parts = _parts(_renamed(tree, names, found), found)
    done = _step(parts, found) if step is None else step
    if parts.renamed:
        old, new = next(iter(parts.renamed.items()))
        note(f"names are taken without the prefix of DDP or torch.compile: {old} is {new}")
    collected = TorchCollected()
    return write_imported(target, done, collected, parts.split(collected), progress)


def _renamed(tree: Mapping[str, Any], names: Mapping[str, str], source: Path) -> Mapping[str, Any]:
    """Return the tree with the keys in the user's ``names`` replaced by the usual keys (``model``, ``optimizer``, ...).

    Raises:
        UsageError: the tree has no key of ``names``, a usual key is unknown, or the tree would have it twice.
    """
    found = dict(tree)
    for key, part in names.items():
        if part not in PARTS:
            raise UsageError(
                f"{key}={part}: there is no part {part}", hint=f"the parts are {', '.join(PARTS)}"
            )
        if key not in tree:
            keys = ", ".join(map(str, list(tree)[:10])) or "none"
            raise UsageError(
                f"{source} has no key {key}; its keys are {keys}", hint="name one of them with --map"
            )
        there = [name for name in PARTS[part] if name in found and name != key]
        if there:
            raise UsageError(
                f"{source} has the part {part} already: {there[0]}", hint=f"leave --map {key}={part} out"
            )
        found[part] = found.pop(key)
    return found


def _step(parts: _Parts, source: Path) -> int:
    """Return the number of updates done, as saved in the source; 0 for weights alone.

    Raises:
        UsageError: the source has no step although it holds more than weights, or its step is not a number of
            updates.
    """
    if parts.strange_step:
        raise UsageError(
            f"{source}: its {parts.strange_step} is no number of updates",
            hint="holdfast ckpt import --step N",
        )
    if parts.step is None and parts.optimizers:
        raise UsageError(f"{source} does not say its step", hint="holdfast ckpt import --step N")
    return parts.step or 0


class _Parts:
    """The content of a source by purpose: tensors of the model by name, state dicts by name, other values."""

    def __init__(self) -> None:
        self.model: dict[str, torch.Tensor] = {}
        self.modules: dict[str, Any] = {}  # extra state
        self.aliases: dict[str, str] = {}
        self.renamed: dict[str, str] = {}  # name in the source -> name in the module, if they differ
        self.optimizers: dict[str, Any] = {}
        self.schedulers: dict[str, Any] = {}
        self.scaler: Any = None
        self.state: dict[str, Any] = {}
        self.step: int | None = None
        self.strange_step = ""  # key of a step that is no number

    def split(self, out: TorchCollected) -> dict[str, Plain]:
        """Return the plain values in the form that a session writes; add the tensors to ``out``."""
        for fqn, tensor in self.model.items():
            out.add(tensor, fqn)
        return {
            "aliases": dict(self.aliases),
            "transient": [],
            "modules": {fqn: split(value, fqn, out.add) for fqn, value in self.modules.items()},
            "optimizers": {name: self._optimizer(name, o, out) for name, o in self.optimizers.items()},
            "schedulers": {n: split(s, f"scheduler.{n}", out.add) for n, s in self.schedulers.items()},
            "scaler": None if self.scaler is None else split(self.scaler, "scaler", out.add),
            "state": {n: split(value, f"state.{n}", out.add) for n, value in self.state.items()},
        }

    def _optimizer(self, name: str, saved: Mapping[str, Any], out: TorchCollected) -> Plain:
        """Return an optimizer's plain values in the form that a session saves, and add its tensors to ``out``."""
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
        """Return the parameter name for each key of an optimizer's state dict; the keys are names or numbers.

        Raises:
            UsageError: the names are ambiguous or unknown.
        """
        flat = [str(key) for members in keys for key in members]
        if all(isinstance(key, str) and self._fqn(key) for members in keys for key in members):
            return {key: self._fqn(key) for key in flat}
        given = [list(group.get("param_names", ())) for group in groups]
        fqns = [self._fqn(fqn) for fqns in given for fqn in fqns]
        shapes = {
            str(key): {tuple(v.shape) for v in item.values() if isinstance(v, torch.Tensor) and v.ndim}
            for key, item in state.items()
        }
        found = self._fitting(flat, fqns, shapes) if len(fqns) == len(flat) and all(fqns) else None
        if found is None:
            trained = [fqn for fqn, tensor in self.model.items() if _may_be_trained(fqn, tensor)]
            found = self._fitting(flat, trained, shapes) or self._dealt(keys, trained, shapes)
        if found is None or len(flat) != len(set(flat)):
            raise UsageError(
                f"optimizer {name!r}: its state is numbered ({plural(len(flat), 'parameter')}), and the numbers "
                f"cannot be matched with the {plural(len(self.model), 'tensor')} of the model",
                hint="make the optimizer from model.named_parameters(), or save "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict(model, optimizer)",
            )
        return found

    def _fitting(
        self, keys: Sequence[str], fqns: Sequence[str], shapes: Mapping[str, set[tuple[int, ...]]]
    ) -> dict[str, str] | None:
        """Return a dict that maps ``keys`` to ``fqns`` in their order; None if counts or shapes do not match."""
        if len(keys) != len(fqns) or any(
            not shapes.get(key, set()) <= {tuple(self.model[fqn].shape)}
            for key, fqn in zip(keys, fqns, strict=True)
        ):
            return None
        return dict(zip(keys, fqns, strict=True))

    def _dealt(
        self, groups: list[list[Any]], fqns: Sequence[str], shapes: Mapping[str, set[tuple[int, ...]]]
    ) -> dict[str, str] | None:
        """Return the parameter name for each key of the optimizer's state; None if the names are not certain.

        The groups (for example with and without weight decay) must each keep the order of the model. The names of the
        model are assigned in order. Each name must fit the shape of the next parameter of exactly one group.
        """
        rest = [[str(key) for key in reversed(members)] for members in groups]
        found: dict[str, str] = {}
        for fqn in fqns:
            fits = [
                keys for keys in rest
                if keys and shapes.get(keys[-1], set()) <= {tuple(self.model[fqn].shape)}
            ]  # fmt: skip
            if len(fits) != 1:
                return None
            found[fits[0].pop()] = fqn
        return None if any(rest) else found

    def _fqn(self, name: str) -> str:
        """Return the model's name for ``name``, found with or without wrapper prefixes; empty if the model has none.

        For a shared tensor this is its first name.
        """
        bare = _COMPILED.sub("", name)
        while bare.startswith(WRAPPER):
            bare = bare.removeprefix(WRAPPER)
        spellings = (self.aliases.get(each, each) for each in (name, self.renamed.get(name, name), bare))
        return next((each for each in spellings if each in self.model), "")


def _parts(tree: Mapping[str, Any], source: Path) -> _Parts:
    """Return the content of a source, sorted by purpose.

    Raises:
        UsageError: there are no weights, or an optimizer's state has an unknown name.
    """
    parts = _Parts()
    rest = dict(tree)

    def take(names: tuple[str, ...], kinds: type | tuple[type, ...] = dict) -> Any:
        return next((rest.pop(name) for name in names if isinstance(rest.get(name), kinds)), None)

    model = take(MODEL)
    if model is None:
        model, rest = rest, {}
    aliases = take(("aliases",)) or {}
    _flatten(model, "", parts, {}, source)
    for alias, fqn in aliases.items():
        for known in (parts.model, parts.modules):
            if fqn in known and known.pop(alias, None) is not None:
                parts.aliases[alias] = fqn
    if not parts.model:
        raise UsageError(
            f"{source} holds no weights; its keys are {', '.join(map(str, list(tree)[:10])) or 'none'}",
            hint="save a module's state dict, or a dict with it under 'model'",
        )
    parts.optimizers = _named(take(OPTIMIZER, (dict, list)), "param_groups")
    parts.schedulers = _named(take(SCHEDULER, (dict, list)), "last_epoch")
    parts.scaler = take(SCALER)
    said = next((name for name in STEP if rest.get(name) is not None), "")
    parts.step = _number(rest.get(said))
    if parts.step is None:
        parts.strange_step = said
    else:
        del rest[said]
    _refuse_optimizers(rest, source)
    parts.state = {str(name): value for name, value in rest.items() if name != "state"}
    own = rest.get("state")
    parts.state |= own if isinstance(own, dict) else {} if own is None else {"state": own}
    return parts


def _flatten(tree: Any, prefix: str, parts: _Parts, seen: dict[Any, str], source: Path) -> None:
    """Add the model's tensors and extra state to ``parts`` by dotted name.

    A tensor that shares all its memory with an earlier tensor becomes an alias.
    """
    for (key, value), name in zip(tree.items(), _own_names(map(str, tree)), strict=True):
        fqn = f"{prefix}{name}"
        if name != str(key):
            parts.renamed[f"{prefix}{key}"] = fqn
        if fqn.rpartition(".")[2] == EXTRA_STATE:
            parts.modules[fqn] = value
            continue
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


def _own_names(keys: Iterable[str]) -> list[str]:
    """Return the names without the prefixes of wrappers, one per key; unchanged if two would become equal."""
    given = list(keys)
    names = [_COMPILED.sub("", key) for key in given]
    while names and all(name.startswith(WRAPPER) for name in names):
        names = [name.removeprefix(WRAPPER) for name in names]
    return names if len(set(names)) == len(given) else given


def _may_be_trained(fqn: str, tensor: torch.Tensor) -> bool:
    """Return False for a tensor that no optimizer trains: integers, and running statistics of normalization layers."""
    counted = fqn.rpartition(".")[2] in ("running_mean", "running_var")
    return not counted and (tensor.is_floating_point() or tensor.is_complex())


def _named(saved: Any, sign: str) -> dict[str, Any]:
    """Return state dicts by name as a session names them: ``default`` for a single one, numbers for a list.

    ``sign`` is a key that identifies a single state dict.
    """
    if isinstance(saved, list):
        return {"default": saved[0]} if len(saved) == 1 else {str(n): each for n, each in enumerate(saved)}
    if saved is None:
        return {}
    return {"default": saved} if sign in saved else dict(saved)


def _number(value: Any) -> int | None:
    """Return a number of updates, which may be saved as a tensor or a float; None for other values."""
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and value >= 0 else None


def _is_optimizers(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("param_groups"), list)


def _refuse_optimizers(rest: Mapping[Any, Any], source: Path) -> None:
    """Raise UsageError if an entry of the file under an unknown name looks like an optimizer's state dict."""
    for name, value in rest.items():
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        if name != "state" and any(_is_optimizers(each) for each in (value, *inner)):
            raise UsageError(
                f"{source}: {name} is an optimizer's state, under a name that is not known",
                hint=f"holdfast ckpt import --map {shlex.quote(f'{name}=optimizer')}; several: save them as "
                "{'optimizer': {'NAME': ..., 'NAME': ...}}",
            )
