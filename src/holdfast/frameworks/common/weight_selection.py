"""The choice of a checkpoint's model tensors, and the merging of the plain values that its ranks wrote.

This module works for checkpoints of every framework.

Theory. The plain values of a session name every tensor that does not belong to the model
(``frameworks/common/state_tree.py``). With pipeline stages each rank knows only the optimizer state of its own
parameters. So the values of all ranks that wrote the checkpoint, or of those that the loading rank needs, are merged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from holdfast.errors import CheckpointInvalid
from holdfast.frameworks.common.state_tree import Plain, join
from holdfast.store.backends.location import Place
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.read.load import Opened, load_catalogue, load_values_of_all

EXTRA_STATE = "_extra_state"
"""The part of a name that marks extra state of a module (``get_extra_state``), which is no parameter or buffer."""


def joined_values(
    path: Place | Opened, names: Collection[str] | None = None, rank: int = -1
) -> dict[str, Plain]:
    """Return the plain values of a checkpoint, merged from the values of all ranks that wrote it.

    Most values are taken from the first of these ranks. Optimizer state and names, which differ by parameter or module,
    are taken from all these ranks.

    Args:
        names: names of the tensors that ``rank`` loads; None means all. Ranks without values for these tensors are left
            out. The first rank is the one with values for most of these tensors, or ``rank`` itself if no rank has
            more.
        rank: the rank that loads; -1 if no particular rank loads.

    Raises:
        CheckpointInvalid: the checkpoint is damaged.
    """
    first, *others = load_values_of_all(path, names, rank)
    return with_values_of(first, others, f"{path}: its writers' values")


def with_values_of(
    first: Mapping[str, Plain], others: Iterable[Mapping[str, Any]], what: str
) -> dict[str, Plain]:
    """Return the values ``first`` with the optimizer state and the names of ``others`` added.

    Args:
        what: a name for the values in an error.

    Raises:
        CheckpointInvalid: the values contradict each other.
    """
    values = cast(dict[str, Plain], dict(first))
    if not is_sessions(values):
        return values
    try:
        for other in others:
            _add_values(values, other)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointInvalid(f"{what} do not fit each other ({error!r})") from error
    return values


def _add_values(values: dict[str, Any], other: Mapping[str, Any]) -> None:
    values["aliases"] = {**values["aliases"], **other["aliases"]}
    values["transient"] = sorted({*values.get("transient", ()), *other.get("transient", ())})
    values["state"] = {**other["state"], **values["state"]}
    if "modules" in values:
        values["modules"] = {**values["modules"], **other["modules"]}
    values["optimizers"] = {
        name: _joined(mine, other["optimizers"][name]) for name, mine in values["optimizers"].items()
    }


def is_sessions(values: Mapping[str, Plain]) -> bool:
    """Return True if a session wrote these values. Such values name every tensor that does not belong to the model."""
    return all(isinstance(values.get(key), dict) for key in ("aliases", "optimizers", "schedulers", "state"))


def weights(catalogue: Catalogue, values: Mapping[str, Plain]) -> list[str]:
    """Return the names of the model's parameters and persistent buffers, sorted.

    If no session wrote the values, all tensor names are returned. Extra state of modules is left out, because one entry
    may consist of several tensors or none.
    """
    if not is_sessions(values):
        return [t.fqn for t in catalogue.tensors]
    other = beside_the_model(catalogue.by_fqn, values) | set(values.get("transient", ()))
    return [t.fqn for t in catalogue.tensors if t.fqn not in other]


def beside_the_model(names: Collection[str], values: Mapping[str, Plain]) -> set[str]:
    """Return the given tensor names that are neither parameters nor buffers of the model.

    Args:
        names: names of the tensors of a checkpoint.
        values: plain values from some of the ranks that wrote the checkpoint. They may lack optimizer state and
            extra state of another rank's modules, or user state that only another rank has. Tensors of that state
            are recognised by names that no tensor of a model has.
    """
    if "framework" in values:  # not torch: these values name only the user's tensors
        return {name for name in names if name.startswith("optimizer.")} | (tensors_of(values) & set(names))
    found = tensors_of(values)
    starts = tuple(f"optimizer.{name}." for name in values.get("optimizers") or ())
    own = tuple(f"state.{name}." for name in values.get("state") or ())
    for name in names:
        start = next((s for s in starts if name.startswith(s)), "")
        of_another = start and _is_of_another(name.removeprefix(start), names)
        if of_another or EXTRA_STATE in name.split(".") or f"{name}.".startswith(own):
            found.add(name)
    return found


def tensors_of(values: Mapping[str, Plain]) -> set[str]:
    """Return the names of all tensors that the plain values refer to."""
    found: set[str] = set()

    def note(stands_for: Plain) -> Any:
        while isinstance(stands_for, dict):
            stands_for = stands_for["array"]
        found.add(str(stands_for))

    join({key: values.get(key) for key in ("modules", "optimizers", "schedulers", "scaler", "state")}, note)
    return found


def _is_of_another(name: str, names: Collection[str]) -> bool:
    """Return True if ``name`` begins with one of ``names`` and a dot.

    For example, ``fc.weight.exp_avg`` begins with ``fc.weight.``: it belongs to optimizer state of the parameter
    ``fc.weight``.
    """
    parts = name.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts)))


def extra_states(values: Mapping[str, Plain]) -> frozenset[str]:
    """Return the names of the extra states of modules in these values. Old checkpoints have none."""
    return frozenset(values.get("modules") or ())


def weights_of(path: Place | Opened) -> list[str]:
    """Return the names of the model's weights in the checkpoint at ``path``, as :func:`weights` does.

    Raises:
        CheckpointInvalid: the checkpoint is damaged.
    """
    return weights(load_catalogue(path), joined_values(path))


def _joined(mine: dict[str, Plain], other: dict[str, Plain]) -> dict[str, Plain]:
    """Return one optimizer's values, merged from the values of two ranks.

    Both ranks have the same parameter groups. Members and state of a group may belong to different pipeline stages.
    """
    made = {**mine, "state": {**mine["state"], **other["state"]}}
    for key in ("members", "added"):  # names by group
        if key in mine and key in other:
            made[key] = [list(dict.fromkeys([*a, *b])) for a, b in zip(mine[key], other[key], strict=True)]
    return made
