"""The classes of the script whose methods may write attributes: only their objects can carry values between steps."""

from __future__ import annotations

import dis
from functools import cache
from types import CodeType, FunctionType

from holdfast.session.variables.called_functions import of_script

_WRITES = ("STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR")
_METHODS = ("register_buffer", "append", "extend", "update", "setdefault", "add", "pop", "popleft")
"""Methods that write an attribute, or the container in an attribute."""


class AttributeWriters:
    """The classes of the script with a method that may write an attribute, other than ``__init__``."""

    def __init__(self) -> None:
        self._known: dict[int, bool] = {}  # by the id of the class, because a metaclass may define `__hash__`

    def may_write(self, holder: object) -> bool:
        """Return whether a method of ``holder`` that belongs to the script may write an attribute."""
        kind = type(holder)
        if id(kind) not in self._known:
            methods = (
                value
                for base in kind.__mro__
                for name, value in vars(base).items()
                if name != "__init__" and isinstance(value, FunctionType)
            )
            self._known[id(kind)] = any(
                of_script(method.__code__.co_filename) and _may_write(method.__code__) for method in methods
            )
        return self._known[id(kind)]


@cache
def _may_write(code: CodeType) -> bool:
    if any(name in _METHODS for name in code.co_names):
        return True
    return any(each.opname in _WRITES for each in dis.get_instructions(code))
