"""The optimizers of a session: their names, the refused kinds, their state as names and tensors, and an undo copy."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from holdfast.errors import CheckpointInvalid, CheckpointMismatch, StateError, UnsupportedError, UsageError
from holdfast.frameworks.common.state_tree import InOrder, Leaf, Plain, join, orders_in, split
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import (
    TORCH_DTYPES,
    global_shape,
    is_padded,
    lies_as,
    memory_order,
    placed,
)
from holdfast.frameworks.torch.state.hand_sharded import HandCut
from holdfast.frameworks.torch.state.optimizer_attributes import (
    Number,
    PlainAttributes,
    plain_attributes,
    set_attributes,
)
from holdfast.frameworks.torch.state.restore_in_place import put_into
from holdfast.store.layouts.layout import Catalogue
from holdfast.text import noun_of

log = logging.getLogger("holdfast")

COMMUNICATING = {
    "ZeroRedundancyOptimizer": "torch's own, with overlap_with_ddp=False; or torch.distributed.fsdp.fully_shard",
    "PostLocalSGDOptimizer": "average the parameters in the block, before optimizer.step()",
    "DistributedOptimizer": "torch.distributed.fsdp.fully_shard shards parameters and optimizer state",
}
"""Optimizers that are refused because their step() communicates, each with an alternative.

If such a step() failed after the vote, the step would be in doubt.
"""

Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]
CODE = (FunctionType, BuiltinFunctionType, type)
"""Types of settings that are code of the script and no state, such as LARS's filters of parameters."""

_BUILD_THE_SAME = (
    "build the optimizer as it was when the checkpoint was written; or start from the beginning on purpose: "
    "resume='never', or another checkpoint directory (holdfast.load(path, model) takes the weights alone)"
)


def by_name(value: Any, kind: str, is_kind: Callable[[Any], bool]) -> dict[str, Any]:
    """Return ``value`` (one object, a list or a dict of objects) as a dict by name; one object is called ``default``.

    Raises:
        UsageError: the value is of another type.
    """
    if value is None:
        return {}
    if is_kind(value):
        return {"default": value}
    if isinstance(value, Mapping):
        named = {str(name): item for name, item in value.items()}
    elif isinstance(value, list | tuple):
        named = {str(index): item for index, item in enumerate(value)}
    else:
        named = {"": value}
    for item in named.values():
        if not is_kind(item):
            raise UsageError(
                f"{kind} got a {type(item).__name__}", hint=f"one {kind}, a list or a dict of them by name"
            )
    return named


def named_optimizers(value: Any) -> dict[str, Optimizer]:
    """Return the session's ``optimizer`` argument as a dict by name.

    Raises:
        UnsupportedError: an optimizer of Megatron, one that communicates inside its step, or one whose attributes
            contain other optimizers, which make the updates and hold the state.
        UsageError: an object is not an optimizer.
    """
    several = value.values() if isinstance(value, Mapping) else value
    for item in several if isinstance(several, Iterable) else (value,):
        _refuse_megatron(item)
    given = by_name(value, "optimizer", lambda o: isinstance(o, Optimizer))
    named = cast(dict[str, Optimizer], {name: _inner(optimizer) for name, optimizer in given.items()})
    for name, optimizer in named.items():
        for base in type(optimizer).__mro__ if local_part(optimizer) is None else ():
            if base.__name__ in COMMUNICATING:
                raise UnsupportedError(
                    f"optimizer {name!r}: {base.__name__} communicates inside step(), where a lost peer would leave "
                    "the ranks with different weights",
                    hint=COMMUNICATING[base.__name__],
                )
        _refuse_container(name, optimizer)
    return named


def _refuse_container(name: str, optimizer: Optimizer) -> None:
    """Raise UnsupportedError for an optimizer whose parameters another one in its attributes updates.

    The inner optimizer has the state (momenta), so no save would contain it.
    """
    ours = {id(parameter) for parameter in parameters_of(optimizer)}
    others = {
        path: inner
        for path, inner in held_by(optimizer).items()
        if inner.state is not optimizer.state
        and any(id(parameter) in ours for parameter in parameters_of(inner))
    }
    if others and local_part(optimizer) is None:
        kind, paths = type(optimizer).__name__, list(others)
        given = f"it.{paths[0]}" if len(paths) == 1 else f"[it.{paths[0]}, it.{paths[1]}, ...]"
        raise UnsupportedError(
            f"optimizer {name!r}: a {kind} leaves its updates to {', '.join(paths)}, whose state it does not have",
            hint=f"session(optimizer={given}), where `it` is the {kind}; its step() may stay in the block",
        )


def held_by(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return the optimizers in the attributes of an optimizer, and in lists and dicts there, by path."""
    found: dict[str, Optimizer] = {}
    for name, value in vars(optimizer).items():
        pairs = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        found |= {f"{name}[{key!r}]": item for key, item in pairs if isinstance(item, Optimizer)}
        if isinstance(value, Optimizer):
            found[name] = value
    return found


def _refuse_megatron(optimizer: Any) -> None:
    """Refuse an optimizer of Megatron: it is not a torch optimizer, and its ``step()`` does more than update.

    Raises:
        UnsupportedError: the error names the optimizer's class.
    """
    bases = {base.__name__ for base in type(optimizer).__mro__}
    if "MegatronOptimizer" not in bases:
        return
    for inner in getattr(optimizer, "chained_optimizers", ()):
        _refuse_megatron(inner)
    kind = type(optimizer).__name__
    if "DistributedOptimizer" in bases:
        raise UnsupportedError(
            f"{kind} of Megatron communicates inside step(), where a lost peer would leave the ranks with different "
            "weights",
            hint="leave --use-distributed-optimizer out; or keep Megatron's loop with the mindio_ttp drop-in, "
            "docs/compat.md",
        )
    raise UnsupportedError(
        f"{kind} of Megatron is no torch optimizer: its step() scales, clips and copies around the update",
        hint="where it updates the weights themselves (FP32Optimizer), give the torch optimizer in it: "
        "session(optimizer=made.optimizer)",
    )


def local_part(optimizer: Optimizer) -> Optimizer | None:
    """Return the local optimizer inside torch's ``ZeroRedundancyOptimizer``, which updates this rank's parameters.

    The result is None for other optimizers, and with ``overlap_with_ddp`` (updates during the backward pass).
    """
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return None
    local = getattr(optimizer, "optim", None)
    return local if isinstance(local, Optimizer) else None


def updating(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that computes the updates: the local one of ``ZeroRedundancyOptimizer``, or this one."""
    return local_part(optimizer) or optimizer


def refuse_searching(optimizers: Mapping[str, Optimizer], world_size: int) -> None:
    """Raise UnsupportedError for L-BFGS on several ranks.

    L-BFGS computes gradients again after it has changed weights. Its first change comes after the vote, and from then
    on no collective may fail.
    """
    for name, optimizer in optimizers.items():
        if world_size > 1 and isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                f"optimizer {name!r}: {type(optimizer).__name__} evaluates its closure several times in one step(), "
                f"and all gradients but the first need the other {noun_of(world_size - 1, 'rank')} after the vote",
                hint="train with one process, or with an optimizer that needs one evaluation per step (AdamW, SGD)",
            )


WRAPPERS = ("AcceleratedOptimizer", "_FabricOptimizer")


def _inner(optimizer: Any) -> Any:
    """Return the optimizer inside accelerate's or Fabric's wrapper; torch calls step hooks on the inner one."""
    while any(base.__name__ in WRAPPERS for base in type(optimizer).__mro__):
        optimizer = optimizer.optimizer
    return optimizer


def refuse_in_backward(parameters: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedError for a model whose parameters are updated during the backward pass, before any vote."""
    for fqn, parameter in parameters.items():
        if private_api.steps_in_backward(parameter):
            raise UnsupportedError(
                f"{fqn}: _apply_optimizer_in_backward updates weights before the step is agreed",
                hint="use an ordinary optimizer and call optimizer.step() in the block",
            )


def parameters_of(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield all parameters of an optimizer, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def trained_by(optimizers: Iterable[Optimizer]) -> set[int]:
    """Return the ids of the parameters that ``optimizers`` train.

    A parameter that requires no gradient is not trained: a momentum encoder may be a member of an optimizer. But an
    optimizer of which no parameter requires a gradient trains them all: a script with several networks may set
    ``requires_grad`` of each network only for the backward pass of this network.
    """
    found: set[int] = set()
    for optimizer in optimizers:
        members = list(parameters_of(optimizer))
        found.update(map(id, [p for p in members if p.requires_grad] or members))
    return found


def hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return shallow copies of the parameter groups without the parameters, and without settings that are functions.

    Each process has the functions from its own script.
    """
    return [
        {key: value for key, value in group.items() if key != "params" and not isinstance(value, CODE)}
        for group in optimizer.param_groups
    ]


def set_hyperparameters(optimizer: Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Write ``groups``, settings of parameter groups, back into ``optimizer``.

    Settings that are tensors (a capturable learning rate) are filled in place.
    """
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if isinstance(group.get(key), torch.Tensor) and isinstance(value, torch.Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


class Undo:
    """Copies of the parameters and state of some optimizers, from which tentative updates are undone.

    Args:
        before: returns the state of an optimizer with the entries that the block has changed before its update.
    """

    def __init__(
        self, before: Callable[[Optimizer, Mapping[Any, Any]], Mapping[Any, Any]] = lambda _, state: state
    ) -> None:
        self._before = before
        self._weights: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._states: dict[int, tuple[Optimizer, dict[Any, Any]]] = {}
        self._attributes: dict[int, tuple[Optimizer, dict[str, Number]]] = {}

    def record(self, optimizer: Optimizer) -> None:
        """Copy the parameters and state that the next update of ``optimizer`` changes.

        Do nothing if they were already copied since the last :meth:`clear`.
        """
        if id(optimizer) in self._states:
            return
        with torch.no_grad():
            for p in parameters_of(optimizer):
                self._weights.setdefault(id(p), (p, p.detach().clone()))
            states = {p: clone(optimizer.state[p]) for p in parameters_of(optimizer) if p in optimizer.state}
            states.update(clone(shared_state(optimizer.state)))
        inner = updating(optimizer)
        self._attributes[id(inner)] = (inner, plain_attributes(inner))
        self._states[id(optimizer)] = (optimizer, states)

    def keep(self, tensor: torch.Tensor) -> None:
        """Copy a tensor that belongs to no optimizer."""
        with torch.no_grad():
            self._weights.setdefault(id(tensor), (tensor, tensor.detach().clone()))

    def restore(self) -> None:
        """Put all copied values back, then drop the copies."""
        with torch.no_grad():
            for parameter, saved in self._weights.values():
                parameter.copy_(saved)
        for optimizer, states in self._states.values():
            state: dict[Any, Any] = optimizer.state
            for key in [*parameters_of(optimizer), *{**shared_state(state), **shared_state(states)}]:
                now = state.pop(key, None)
                if key in states:  # in place, because the check of replicas (digests) refers to these tensors
                    alike = _form(now) == _form(states[key])
                    state[key] = put_into(now, states[key]) if alike else states[key]
        for optimizer, attributes in self._attributes.values():
            set_attributes(optimizer, attributes)
        self.clear()

    def clear(self) -> None:
        """Drop the copies, because the updates are final."""
        self._weights.clear()
        self._states.clear()
        self._attributes.clear()

    def weights(self) -> dict[int, torch.Tensor]:
        """Return the copies of parameters that :meth:`record` made, and of tensors that :meth:`keep` made.

        The key of a copy is the ``id`` of the original tensor.
        """
        held = dict(self._weights)  # one copy: another thread may clear the dict meanwhile
        return {key: saved for key, (_, saved) in held.items()}

    def state(self, optimizer: Optimizer) -> Mapping[torch.Tensor, Any]:
        """Return the state of ``optimizer`` from the start of the block; the present state if no copy was made."""
        recorded = self._states.get(id(optimizer))
        return self._before(optimizer, optimizer.state if recorded is None else recorded[1])

    def attributes(self, optimizer: Optimizer) -> Mapping[str, Number]:
        """Return the plain attributes of ``optimizer`` from before its update; the present ones if none was made."""
        recorded = self._attributes.get(id(optimizer))
        return plain_attributes(optimizer) if recorded is None else recorded[1]


def shared_state(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the entries of an optimizer's state that belong to no single parameter, by the optimizer's own names."""
    return {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}


def clone(value: Any) -> Any:
    """Return a copy of a tree of values. Its tensors share no memory with ``value``, and are detached from autograd."""
    if isinstance(value, torch.Tensor):
        return placed(value.detach().clone(), value)
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, item in value.items():  # a Counter's update() adds
            made[key] = clone(item)
        return made
    if type(value) in (list, tuple):
        return type(value)(clone(item) for item in value)
    return copy.deepcopy(value)


def _beside(parameter: torch.Tensor, leaf: Leaf) -> Leaf:
    """Return a leaf function for the optimizer's state of ``parameter``. It passes each value on to ``leaf``.

    A tensor with the shape of ``parameter`` is first declared to have the same region as ``parameter``. A load makes
    the memory of a tensor by :func:`allocate`. If this function would choose another memory order than the tensor
    has, the memory order is added to the result of ``leaf``.
    """

    def take(value: Any, path: str) -> Plain:
        if not isinstance(value, torch.Tensor):
            return leaf(value, path)
        stands_for = leaf(placed(value, parameter), path)
        if isinstance(value, DTensor) or value.layout is not torch.strided:
            return stands_for
        order = memory_order(value)
        due = memory_order(parameter) if value.shape == parameter.shape else tuple(range(value.ndim))
        return stands_for if order == due else InOrder(stands_for, order)

    return take


def _form(value: Any) -> tuple[Any, ...] | None:
    """Return shape and strides of a tensor, the forms of all items of a container, and None for any other value.

    It runs at each step, so it makes no key paths, as ``arrays_in`` does: they take three times as long.
    """
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride()) if value.layout is torch.strided else (value.shape,)
    if isinstance(value, dict):
        return tuple([(key, _form(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return tuple([_form(item) for item in value])
    return None


def _settings(groups: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the names of the settings of parameter groups."""
    return {key for group in groups for key in group} - {"params", "param_names"}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"


def scheduled_settings(optimizer: Optimizer) -> dict[str, list[float]]:
    """Return learning rates, weight decays, momenta and betas of all parameter groups, by the name of the setting.

    A number in a tensor on a device is left out, because reading it would wait for the device.
    """
    groups = optimizer.param_groups
    found: dict[str, list[Any]] = {
        setting: [group.get(setting) for group in groups] for setting in ("lr", "weight_decay", "momentum")
    }
    found["betas"] = [number for group in groups for number in group.get("betas", ())]
    return {
        setting: [number for each in numbers if (number := _number_on_host(each)) is not None]
        for setting, numbers in found.items()
    }


def _number_on_host(value: object) -> float | None:
    if isinstance(value, torch.Tensor):
        return value.item() if value.device.type == "cpu" and value.numel() == 1 else None
    return value if isinstance(value, float | int) else None


class OptimizerState:
    """The state of one optimizer, stored under the names of the optimizer's parameters."""

    def __init__(self, name: str, optimizer: Optimizer, parameters: Mapping[str, torch.Tensor]) -> None:
        self.name = name
        self._optimizer = optimizer
        self.prefix = f"optimizer.{name}"
        self._parameters = parameters
        self._names = {id(p): fqn for fqn, p in parameters.items()}
        # Number of groups that the script built; further groups may be added during training.
        self._built = len(optimizer.param_groups)
        self._members(self._built)
        self._checked = self._built
        self._own = PlainAttributes(updating(optimizer))

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer as it was given to the session."""
        return self._optimizer

    def kind(self) -> str:
        """Return the name of the optimizer's class for checkpoints."""
        return type(self._optimizer).__name__

    def keeps(self, owner: object, attribute: str) -> bool:
        """Return whether the state contains a plain attribute of ``owner``: False if it is not this optimizer."""
        return owner is updating(self.optimizer) and self._own.keeps(attribute)

    def size(self) -> int:
        """Return a hash that changes with the tensors of the state and with their shapes.

        Tensors in lists and dicts count as well.
        """
        return hash(tuple([_form(of_one) for of_one in self.optimizer.state.values()]))

    def hyperparameters(self) -> list[dict[str, Any]]:
        """Return shallow copies of the parameter groups without the parameters; called at the start of a step.

        Raises:
            StateError: a parameter group that was added during the run holds a parameter that is not in the model.
        """
        count = len(self.optimizer.param_groups)
        if count != self._checked:
            self._members(count)
            self._checked = count
        return hyperparameters(self.optimizer)

    def set_hyperparameters(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Write back ``groups``, the settings of parameter groups. Remove the groups that were added later."""
        del self.optimizer.param_groups[len(groups) :]
        set_hyperparameters(self.optimizer, groups)

    def split(self, leaf: Leaf, groups: Sequence[Mapping[str, Any]], undo: Undo | None) -> Plain:
        """Return group settings, state and plain attributes as plain values. ``leaf`` replaces the tensors.

        Args:
            leaf: takes a tensor and its name; returns the plain value that replaces the tensor.
            groups: settings of all parameter groups, or of those that existed at the start of the step.
            undo: copies of the state from before a tentative update; None: take the present state.
        """
        state, inner = self._state(undo), updating(self.optimizer)
        own = self._own.changed(plain_attributes(inner) if undo is None else undo.attributes(inner))
        members = self._members(len(groups))
        held = [(fqn, self._parameters[fqn]) for fqns in members for fqn in fqns]
        return {
            "class": self.kind(),
            "groups": split([dict(group) for group in groups], f"{self.prefix}.groups", leaf),
            "members": members,
            # For each group that was added during the run (such as an unfrozen layer): the parameters that are trained.
            "added": [
                [fqn for fqn in fqns if self._parameters[fqn].requires_grad]
                for fqns in members[self._built :]
            ],
            "shared": split(shared_state(state), f"{self.prefix}.shared", leaf),
            "state": {
                fqn: split(dict(state[p]), f"{self.prefix}.{fqn}", _beside(p, leaf))
                for fqn, p in held
                if p in state
            },
            **({"attributes": own} if own else {}),
        }

    def _state(self, undo: Undo | None) -> Mapping[Any, Any]:
        return self.optimizer.state if undo is None else undo.state(self.optimizer)

    def _members(self, count: int) -> list[list[str]]:
        """Return the parameter names of each of the first ``count`` groups; an export needs them."""
        return [[self.name_of(p) for p in group["params"]] for group in self.optimizer.param_groups[:count]]

    def name_of(self, parameter: torch.Tensor) -> str:
        """Return the name of one of the optimizer's parameters. Raises: StateError: it is not in the model."""
        fqn = self._names.get(id(parameter))
        if fqn is None:
            raise StateError(
                f"optimizer {self.name!r} updates a parameter of shape {list(parameter.shape)} that is not in the "
                "model, as it was when the session began",
                hint="give all modules: session(model={'net': net, 'loss': loss}, ...)",
            )
        return fqn

    def _refuse_misfit(self, saved: Plain, catalogue: Catalogue) -> None:
        """Raise CheckpointMismatch if another optimizer, or one with other groups or parameters, wrote ``saved``."""
        self._refuse_another(saved)
        self._refuse_other_groups(saved)
        self._refuse_others_parameters(saved, catalogue)

    def _refuse_another(self, saved: Plain) -> None:
        """Raise CheckpointMismatch if an optimizer of another kind wrote ``saved``.

        Otherwise the saved state would be dropped silently. The kinds are compared by class and by settings. Names of
        state values are not compared: an optimizer creates its state at its first update, and none for a parameter
        without a gradient. Old checkpoints do not name the class. Versions of torch also differ in settings. So old
        checkpoints are refused only if each side has settings that the other side lacks.
        """
        here, then = self.kind(), saved.get("class", "")
        if here == then:
            return
        ours, theirs = _settings(self.optimizer.param_groups), _settings(saved["groups"])
        lacks, has = sorted(theirs - ours), sorted(set(self.optimizer.defaults) - theirs)
        if (lacks or has) if then else (lacks and has):
            kept = sorted({key for state in saved["state"].values() for key in state})
            raise CheckpointMismatch(
                f"optimizer {self.name!r} is another one: {then or 'one'} with the settings {_listed(lacks)} wrote the "
                f"checkpoint and kept {_listed(kept)} for each parameter; this run has {here} with {_listed(has)}",
                hint=_BUILD_THE_SAME,
            )
        if then:
            log.warning(
                "holdfast: optimizer %r is %s, the checkpoint was written with %s: it continues with the settings "
                "and the state of the checkpoint",
                self.name,
                here,
                then,
            )

    def _refuse_others_parameters(self, saved: Plain, catalogue: Catalogue) -> None:
        """Raise CheckpointMismatch if the optimizer that wrote ``saved`` updated other parameters of this model.

        Otherwise the state of a parameter that is no longer updated would be dropped silently, and a newly updated
        parameter would begin without state.
        """
        if "members" not in saved:  # an old checkpoint, without members
            return
        then = {
            fqn: at for at, group in enumerate(saved["members"]) for fqn in group if fqn in self._parameters
        }
        # A parameter that is not in the checkpoint is left out here; the search for its tensor reports it.
        members = self._members(self._built)
        built = {fqn: at for at, group in enumerate(members) for fqn in group if fqn in catalogue.by_fqn}
        # Groups that were added during the saved run are added again. The script must not have put their parameters
        # into another group.
        now = {fqn: at for fqn, at in then.items() if at >= self._built} | built
        differences = [
            f"{what} {_listed([*names[:3], *(['...'] if len(names) > 3 else [])])}"
            for what, names in (
                ("it no longer updates", sorted(then.keys() - now.keys())),
                ("it now updates, too,", sorted(now.keys() - then.keys())),
                (
                    "in another group is",
                    sorted(fqn for fqn in then.keys() & now.keys() if then[fqn] != now[fqn]),
                ),
            )
            if names
        ]
        if differences:
            raise CheckpointMismatch(
                f"optimizer {self.name!r} is not the one that wrote the checkpoint: {'; '.join(differences)}",
                hint=_BUILD_THE_SAME,
            )

    def _refuse_other_groups(self, saved: Plain) -> None:
        """Raise CheckpointMismatch if the script builds another number of parameter groups than the saved run had.

        Two numbers are accepted: the number at the start of the saved run, and the number at the time of the save.
        """
        there, added = len(saved["groups"]), len(saved.get("added", ()))
        if self._built not in (there, there - added):
            raise CheckpointMismatch(
                f"optimizer {self.name!r} has {self._built} parameter groups, the checkpoint {there}"
                + (f", of which {added} were added while it trained" if added else ""),
                hint=_BUILD_THE_SAME,
            )

    def prepare(
        self, saved: Plain, catalogue: Catalogue, targets: dict[str, torch.Tensor], cuts: HandCut
    ) -> Callable[[], None]:
        """Find or make memory for the tensors of ``saved`` (from :meth:`split`). Add it to ``targets`` by tensor name.

        Present tensors of the optimizer that have the same shape, dtype and sharding are filled in place.

        Args:
            catalogue: the tensors of the checkpoint.
            cuts: this rank's parts of state that the optimizer itself splits among the ranks.

        Returns: a function that gives the state to the optimizer; call it when the targets are filled.

        Raises:
            CheckpointMismatch: another optimizer, other groups, or state of a tensor that the catalogue lacks.
        """
        self._refuse_misfit(saved, catalogue)
        orders, reused = orders_in(saved["state"]), set[int]()

        def fetch(
            path: str, like: torch.Tensor | None, on_cpu: bool, there: object = None, parameter: str = ""
        ) -> torch.Tensor:
            entry = catalogue.by_fqn.get(path)
            if entry is None:
                raise CheckpointMismatch(f"the checkpoint names {path} but does not hold it")
            made = None if like is None else cuts.allocate(entry, parameter, like, there)
            if made is None:
                dtype, order = TORCH_DTYPES[entry.dtype], orders.get(path)
                made = allocate(entry.shape, dtype, like, on_cpu=on_cpu, there=there, order=order)
            if made is there:
                if id(made) in reused:  # one tensor under two names: the second gets its own memory
                    made = made.clone()
                reused.add(id(made))
            targets[path] = made
            return made

        groups = join(saved["groups"], lambda path: fetch(path, None, True))
        added = [
            {**group, "params": [self._parameters[fqn] for fqn in members if fqn in self._parameters]}
            for group, members in zip(
                groups[self._built :], saved.get("members", ())[self._built :], strict=True
            )
        ]
        states: dict[torch.Tensor, Any] = {}
        for group in [*self.optimizer.param_groups[: self._built], *added]:
            step_on_cpu = not (group.get("capturable") or group.get("fused"))
            for p in group["params"]:
                there = self.optimizer.state.get(p, {})
                fqn = self.name_of(p)
                for key, item in cuts.kept(self.prefix, fqn, saved["state"].get(fqn, {})).items():
                    cpu = key == "step" and step_on_cpu
                    fill = partial(fetch, like=p, on_cpu=cpu, there=there.get(key), parameter=fqn)
                    states.setdefault(p, {})[key] = join(item, fill)
        shared = join(saved.get("shared", {}), lambda path: fetch(path, None, True))
        trained = [fqn for fqns in saved.get("added", ()) for fqn in fqns]

        def finish() -> None:
            state: dict[Any, Any] = self.optimizer.state
            before = {key: state.pop(key) for key in shared_state(state)} if "shared" in saved else {}
            for p in parameters_of(self.optimizer):
                self.optimizer.state.pop(p, None)
            self._add_again(added, trained if added else ())
            set_hyperparameters(self.optimizer, groups)
            self._own.restore(saved.get("attributes", {}))
            self.optimizer.state.update(states)
            for key, value in shared.items():
                state[key] = put_into(before.get(key), value)

        return finish

    def _add_again(self, added: Iterable[dict[str, Any]], trained: Iterable[str]) -> None:
        """Remove the parameter groups that were added in this process, and add those that were added in the saved run.

        Parameters named in ``trained`` are set to require a gradient.
        """
        del self.optimizer.param_groups[self._built :]
        for group in added:
            self.optimizer.add_param_group(group)
        for fqn in trained:
            if fqn in self._parameters:
                self._parameters[fqn].requires_grad_(True)


def allocate(
    shape: Sequence[int],
    dtype: torch.dtype,
    like: torch.Tensor | None,
    *,
    on_cpu: bool = False,
    there: object = None,
    order: tuple[int, ...] | None = None,
) -> torch.Tensor:
    """Return memory for a tensor of global ``shape``: sharded as ``like`` if both have the same shape, otherwise whole.

    Args:
        there: the present tensor. It is returned if it already fits.
        order: the dimensions, from the slowest to the fastest in memory. None means the order of ``like``, or C
            order.

    Raises:
        CheckpointInvalid: ``order`` does not name each dimension once.
    """
    if order is None and like is not None and tuple(shape) == global_shape(like) and not on_cpu:
        if (
            isinstance(there, torch.Tensor)
            and there.dtype is dtype
            and lies_as(there, like)
            and memory_order(there) == memory_order(like)
        ):
            return placed(there, like)
        make = torch.zeros_like if is_padded(like) else torch.empty_like  # a load does not fill the padding
        return placed(make(like, dtype=dtype, requires_grad=False), like)
    local = None if like is None else private_api.local_tensor(like)
    device = torch.device("cpu") if local is None or on_cpu else local.device
    if order is None:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if sorted(order) != list(range(len(shape))):
        raise CheckpointInvalid(f"{order} is no order of {len(shape)} dimensions")
    made = torch.empty([shape[at] for at in order], dtype=dtype, device=device)
    made = made.permute([order.index(at) for at in range(len(shape))])
    return made if like is None else placed(made, like)
