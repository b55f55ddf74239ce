"""The meters and metrics of libraries, for the search for variables on which updates depend.

Theory. Scripts sum losses in an ``AverageMeter`` of timm or in a metric of torchmetrics. The functions of libraries
are not inlined, so the search does not see what a method of such an object changes. So each call of one of its methods,
and of the metric itself, counts as a change of the object. ``reset()`` leaves nothing of its earlier content. The
content of a metric of torchmetrics is the states of its ``add_state()``. Any other object with a method ``update()`` of
a library is a meter if all of its attributes are numbers, texts, tensors, or containers of these, and if it has no
``state_dict()``, as a gradient scaler has.
"""

from __future__ import annotations

from types import FunctionType

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_attributes import has_dtype, has_static, instance_of, static_of
from holdfast.session.variables.called_functions import of_script

RESET = "reset"
_UPDATE = "update"
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (list, tuple, set, frozenset)
_DEPTH = 3
_ITEMS_MAX = 1000


def meter_states(value: object) -> dict[str, object] | None:
    """Return the content of a meter or metric of a library, by name; None for any other object."""
    attributes = instance_of(value)
    if "_modules" in attributes:
        return _metric_states(attributes, "")
    if not attributes or not _is_of_library(value, _UPDATE) or has_dtype(value):
        return None
    if has_static(value, "state_dict"):  # a gradient scaler: it knows its state itself
        return None
    return dict(attributes) if all(_is_plain(each, _DEPTH) for each in attributes.values()) else None


def meter_text(value: object, source: DescribesUpdates | None) -> str | None:
    """Return a text for the content of a meter or metric of a library; None for any other object."""
    states = meter_states(value)
    digest = None if states is None or source is None else source.digest_of(states)
    return None if digest is None else f"a meter with checksum {digest & 0xFFFFFFFF:08x}"


def changes_meter(value: object, method: str) -> bool:
    """Return whether ``value`` is a meter or metric of a library, and ``method`` one of the methods of its library."""
    return _is_of_library(value, method) and meter_states(value) is not None


def _is_of_library(value: object, method: str) -> bool:
    """Return whether ``value`` has a method of this name that comes from a library."""
    function = static_of(value, method)
    return isinstance(function, FunctionType) and not of_script(function.__code__.co_filename)


def _metric_states(attributes: dict[str, object], path: str) -> dict[str, object] | None:
    """Return the states of the metrics in a module; None if it has weights, or no metrics."""
    names, children, buffers = (attributes.get(name) for name in ("_defaults", "_modules", "_buffers"))
    if attributes.get("_parameters") or not isinstance(children, dict) or not isinstance(buffers, dict):
        return None
    held = {**buffers, **attributes}
    found = {f"{path}{name}": held.get(name) for name in (names if isinstance(names, dict) else ())}
    for key, child in children.items():
        inner = _metric_states(instance_of(child), f"{path}{key}.")
        if inner is None:
            return None
        found |= inner
    return found if found or path else None


def _is_plain(value: object, depth: int) -> bool:
    if isinstance(value, _PLAIN) or (has_dtype(value) and not has_static(value, "parameters")):
        return True
    if not depth or not isinstance(value, (*_CONTAINERS, dict)) or len(value) > _ITEMS_MAX:
        return False
    items = [*value, *value.values()] if isinstance(value, dict) else value
    return all(_is_plain(each, depth - 1) for each in items)
