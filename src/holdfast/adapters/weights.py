"""Which tensors of a checkpoint are the model's, and the plain values of all its writers, whatever framework wrote it.

Theory. A session's values name every tensor that is not the model's (``adapters/values.py``). With pipeline stages each
writer knows the optimizer state of its own parameters only, so the values of all writers are joined, or of those that
a rank needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from holdfast.adapters.values import Plain, join
from holdfast.errors import CheckpointInvalid
from holdfast.store.layout import Catalogue
from holdfast.store.place import Place
from holdfast.store.reader import Opened, load_catalogue, load_values_of_all

BESIDE_THE_MODEL = ("optimizer.", "scheduler.", "scaler.", "state.")
"""How names of tensors begin that come and go with the training, whatever the model."""


def joined_values(path: Place | Opened, names: Collection[str] | None = None) -> dict[str, Plain]:
    """The values of the first writer, with optimizer state, aliases and transient names of all of them.

    Args:
        names: tensors of the rank that asks: writers that have nothing to say about them are left out, and the one that
            has most is the first.

    Raises:
        CheckpointInvalid: damaged.
    """
    first, *others = load_values_of_all(path, names)
    values = cast(dict[str, Plain], dict(first))
    if not is_sessions(values):
        return values
    try:
        for other in others:
            values["aliases"] = {**values["aliases"], **other["aliases"]}  # type: ignore[dict-item]
            values["transient"] = sorted({*values.get("transient", ()), *other.get("transient", ())})  # type: ignore[misc]
            values["optimizers"] = {
                name: _joined(mine, other["optimizers"][name])  # type: ignore[index]
                for name, mine in values["optimizers"].items()
            }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointInvalid(f"{path}: its writers' values do not fit each other ({error!r})") from error
    return values


def is_sessions(values: Mapping[str, Plain]) -> bool:
    """True when a session wrote these values: then they name every tensor that is not the model's."""
    return all(isinstance(values.get(key), dict) for key in ("aliases", "optimizers", "schedulers", "state"))


def weights(catalogue: Catalogue, values: Mapping[str, Plain]) -> list[str]:
    """Names of the model's parameters and persistent buffers, sorted; all names when no session wrote the values."""
    if not is_sessions(values):
        return [t.fqn for t in catalogue.tensors]
    other: set[str] = set(values.get("transient", ()))

    def note(stands_for: Plain) -> Any:
        while isinstance(stands_for, dict):
            stands_for = stands_for["array"]
        other.add(str(stands_for))

    join({key: values.get(key) for key in ("optimizers", "schedulers", "scaler", "state")}, note)
    return [t.fqn for t in catalogue.tensors if t.fqn not in other]


def weights_of(path: Place | Opened) -> list[str]:
    """As :func:`weights`, of one checkpoint.

    Raises:
        CheckpointInvalid: damaged.
    """
    return weights(load_catalogue(path), joined_values(path))


def _joined(mine: dict[str, Plain], other: dict[str, Plain]) -> dict[str, Plain]:
    """One optimizer of two writers: the groups are the same, their members and state may be of other stages."""
    made = {**mine, "state": {**mine["state"], **other["state"]}}
    if "members" in mine and "members" in other:
        made["members"] = [
            list(dict.fromkeys([*a, *b])) for a, b in zip(mine["members"], other["members"], strict=True)
        ]
    return made
