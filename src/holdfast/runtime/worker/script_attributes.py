"""The attributes of the objects of the user's script.

Scripts often keep their settings in a dict whose items are read as attributes (``__getattr__ = dict.__getitem__``, or
``dict.get``). Such an object raises any error for an unknown name, or seems to have each name. So the question whether
an object is a tensor or a generator is answered by its own attributes and those of its class.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, cast


def attribute_of(holder: object, name: str, default: Any = None) -> Any:
    """Return an attribute as the script reads it; ``default`` if there is none, or if the object's own code fails."""
    try:
        return getattr(holder, name)
    except Exception:
        return default


def has_static(holder: object, name: str) -> bool:
    """Return whether an object or its class has an attribute, without running code of the script."""
    return static_of(holder, name) is not None


def has_dtype(value: object) -> bool:
    """Return whether ``value`` has a ``dtype``, as a tensor or an array has, without running code of the script.

    The class of tensors (in ``isinstance(x, torch.Tensor)``) has none of its own.
    """
    return has_static(value, "dtype") and not issubclass(type(value), type)


def static_of(holder: object, attribute: str) -> object:
    """Return an attribute of an object or its class, without running code of the script.

    The result is None if there is no such attribute.
    """
    found = instance_of(holder).get(attribute)
    if found is not None:
        return found
    kind = cast("type", holder) if issubclass(type(holder), type) else type(holder)
    return next((vars(base)[attribute] for base in kind.__mro__ if attribute in vars(base)), None)


def instance_of(holder: object) -> dict[str, object]:
    """Return the attributes of an object, and the modules that a torch module holds, without running its code."""
    attributes: dict[str, object] = {}
    if not issubclass(type(holder), type):  # isinstance would ask the object for its class
        with suppress(AttributeError):  # it has slots only
            attributes = object.__getattribute__(holder, "__dict__")
    modules = attributes.get("_modules")
    return {**modules, **attributes} if isinstance(modules, dict) else attributes
