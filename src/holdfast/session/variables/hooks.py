"""The functions of the script that run inside a call of a library: hooks, and the methods of an ``autograd.Function``.

Theory. The source of a loop shows ``model(x)``, but not the function that ``register_forward_hook`` has given to a
layer of the model. What such a function reads decides about the update as much as the loop itself. So the search for
variables (``called_bodies.py``) treats the functions as if they were called with the result of the call. The functions
are found in the attributes of the running objects, and no code of the script runs for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

MODULES_MAX = 20_000
"""Largest number of modules and parameters that one search looks at."""

_OF_MODULES = {
    "_forward_pre_hooks": 1,
    "_forward_hooks": 2,
    "_backward_pre_hooks": 1,
    "_backward_hooks": 1,
}
"""The attributes of a module with its hooks, and the number of arguments before the value that a hook may change."""
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class Hook(NamedTuple):
    """A function that a library calls.

    Attributes:
        function: a function, a method or an instance of ``functools.partial``.
        before: number of its arguments before the value that it gets.
        module: the module that is the first of these arguments; None if there is none.
    """

    function: Callable[..., object]
    before: int
    module: object = None


class HookSearch:
    """The hooks in the objects of one search. Each object is looked at once."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def of(self, value: object) -> Iterator[Hook]:
        """Yield the hooks of a module and of the modules and parameters in it, or of an optimizer."""
        open_ = [value]
        while open_ and len(self._seen) < MODULES_MAX:
            holder = open_.pop()
            attributes = getattr(holder, "__dict__", None)
            if id(holder) in self._seen or not isinstance(attributes, dict):
                continue
            self._seen[id(holder)] = holder
            yield from _own(holder, attributes)
            if "_modules" not in attributes:
                continue
            for parameter in _items(attributes.get("_parameters")):
                if id(parameter) not in self._seen:
                    self._seen[id(parameter)] = parameter
                    yield from _of_tensor(parameter)
            open_ += _items(attributes["_modules"])


def _own(holder: object, attributes: Mapping[str, object]) -> Iterator[Hook]:
    if "_modules" in attributes:
        for name, before in _OF_MODULES.items():
            yield from (Hook(each, before, holder) for each in _functions(attributes.get(name)))
    if "param_groups" in attributes:
        for name in _OF_OPTIMIZERS:
            yield from (Hook(each, 0) for each in _functions(attributes.get(name)))


def _of_tensor(tensor: object) -> Iterator[Hook]:
    for name in _OF_TENSORS:
        yield from (Hook(each, 0) for each in _functions(getattr(tensor, name, None)))


def _functions(hooks: object) -> Iterator[Callable[..., object]]:
    return (each for each in _items(hooks) if callable(each))


def _items(value: object) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else []


def methods_of_function(kind: object) -> Iterator[Hook]:
    """Yield ``forward`` and ``backward`` of a subclass of ``torch.autograd.Function``; nothing for other objects."""
    bases = kind.__mro__ if isinstance(kind, type) else ()
    if not any(base.__module__ == "torch.autograd.function" for base in bases):
        return
    for name in ("forward", "backward"):
        found = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if isinstance(found, staticmethod):
            yield Hook(found.__func__, 1)
