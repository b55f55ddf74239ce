"""Which tensors of a checkpoint are the model's, and the plain values of all its writers, whatever framework wrote it.

Theory. A session's values name every tensor that is not the model's (``frameworks/common/state_tree.py``). With
pipeline stages each writer knows the optimizer state of its own parameters only, so the values of all writers are
joined, or of those that a rank needs.
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
"""The part of a name that says: not a tensor of the module, but what it gives as its extra state."""


def joined_values(
    path: Place | Opened, names: Collection[str] | None = None, rank: int = -1
) -> dict[str, Plain]:
    """The values of the first writer, with what differs by parameter or module (optimizer state, names) of all of them.

    Args:
        names: tensors of the rank that asks: writers that have nothing to say about them are left out, and the one that
            has most is the first, or the rank itself when nobody has more.
        rank: the one that asks.

    Raises:
        CheckpointInvalid: damaged.
    """
    first, *others = load_values_of_all(path, names, rank)
    return with_values_of(first, others, f"{path}: its writers' values")


def with_values_of(
    first: Mapping[str, Plain], others: Iterable[Mapping[str, Any]], what: str
) -> dict[str, Plain]:
    """``first`` with what ``others`` hold by parameter or module: optimizer state, and names.

    Args:
        what: the values, as an error names them.

    Raises:
        CheckpointInvalid: they do not fit each other.
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
    """True when a session wrote these values: then they name every tensor that is not the model's."""
    return all(isinstance(values.get(key), dict) for key in ("aliases", "optimizers", "schedulers", "state"))


def weights(catalogue: Catalogue, values: Mapping[str, Plain]) -> list[str]:
    """Names of the model's parameters and persistent buffers, sorted; all names when no session wrote the values.

    Extra state of modules is not among them: it need not be one tensor.
    """
    if not is_sessions(values):
        return [t.fqn for t in catalogue.tensors]
    other = beside_the_model(catalogue.by_fqn, values) | set(values.get("transient", ()))
    return [t.fqn for t in catalogue.tensors if t.fqn not in other]


def beside_the_model(names: Collection[str], values: Mapping[str, Plain]) -> set[str]:
    """Of the tensors of a checkpoint (a set or a mapping), those that are neither parameters nor buffers.

    Values of some writers say it of a whole checkpoint, too: what they need not name is optimizer state of parameters
    and extra state of modules of others, and what the user's own state has on another rank alone; these have names that
    no tensor of a model has.
    """
    if "framework" in values:  # not torch: values that name no tensors but the user's
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
    """Names of the tensors that values name."""
    found: set[str] = set()

    def note(stands_for: Plain) -> Any:
        while isinstance(stands_for, dict):
            stands_for = stands_for["array"]
        found.add(str(stands_for))

    join({key: values.get(key) for key in ("modules", "optimizers", "schedulers", "scaler", "state")}, note)
    return found


def _is_of_another(name: str, names: Collection[str]) -> bool:
    """True for a name that begins with that of a tensor: state of this parameter."""
    parts = name.split(".")
    return any(".".join(parts[:count]) in names for count in range(1, len(parts)))


def extra_states(values: Mapping[str, Plain]) -> frozenset[str]:
    """Names of the extra state that modules of these values have; none in values of before it was saved."""
    return frozenset(values.get("modules") or ())


def weights_of(path: Place | Opened) -> list[str]:
    """As :func:`weights`, of one checkpoint.

    Raises:
        CheckpointInvalid: damaged.
    """
    return weights(load_catalogue(path), joined_values(path))


def _joined(mine: dict[str, Plain], other: dict[str, Plain]) -> dict[str, Plain]:
    """One optimizer of two writers: the groups are the same, their members and state may be of other stages."""
    made = {**mine, "state": {**mine["state"], **other["state"]}}
    for key in ("members", "added"):  # names by group
        if key in mine and key in other:
            made[key] = [list(dict.fromkeys([*a, *b])) for a, b in zip(mine[key], other[key], strict=True)]
    return made
