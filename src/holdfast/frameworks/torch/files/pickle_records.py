"""The reading of a pickle as inert records: no name in it is looked up, and no function is called.

Theory. A pickle is a program for a stack machine. The standard library's disassembler lists its instructions and
turns their arguments into numbers and text, and nothing else. The machine in this module knows the two dozen
instructions that plain data and dataclasses need. A class is only a name here. For an instruction that calls a class,
the machine makes a :class:`PickleRecord` with the name and the arguments. For an instruction that sets an object's
state, it stores the state in that record. The result is then checked like any other untrusted data.

Invariants:
1. The result consists of None, bool, int, float, str, bytes, tuple, list, dict and :class:`PickleRecord`. An
   ``OrderedDict`` becomes a dict. A reference to data outside of the pickle becomes a :class:`PickleRecord` called
   :data:`PERSISTENT`.
2. Any other instruction, and any name that is not admitted, is refused.
3. Memory use is proportional to the size of the data.
"""

from __future__ import annotations

import pickletools
from collections.abc import Container
from typing import Any

from holdfast.errors import CheckpointInvalid

PERSISTENT = "persistent"
ORDERED = "collections.OrderedDict"

_MARK = object()
_PLAIN = frozenset({
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
    "BINBYTES", "SHORT_BINBYTES",
})  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(str):
    """The dotted name of a class or function in a pickle, which is never looked up."""

    __slots__ = ()


class PickleRecord:
    """The description of an object in a pickle: the ``name`` of its class, its constructor arguments, and its state."""

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None


def read_records(data: bytes, admitted: Container[str], where: str) -> Any:
    """Return the value that a pickle describes.

    Args:
        data: the pickle.
        admitted: dotted names that may occur.
        where: name of the file, for errors.

    Raises:
        CheckpointInvalid: the pickle is damaged, or has more than plain data.
    """
    machine = _Machine(admitted)
    try:
        for instruction, argument, _ in pickletools.genops(data):
            machine.act(instruction.name, argument)
        (value,) = machine.stack
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointInvalid(f"{where}: damaged, or not plain data: {error}") from error
    return value


class _Machine:
    def __init__(self, admitted: Container[str]) -> None:
        self.stack: list[Any] = []
        self._admitted = admitted
        self._memo: dict[int, Any] = {}

    def act(self, name: str, argument: Any) -> None:
        """Execute one instruction of the pickle."""
        stack = self.stack
        if name in ("PROTO", "FRAME", "STOP"):
            return
        if name in _PLAIN:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "MARK":
            stack.append(_MARK)
        else:
            self._act_on_containers(name, argument)

    def _act_on_containers(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "TUPLE":
            stack.append(tuple(self._pop_to_mark()))
        elif name in ("APPEND", "APPENDS"):
            items = self._pop_to_mark() if name == "APPENDS" else self._pop(1)
            self._top(list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop_to_mark() if name == "SETITEMS" else self._pop(2)
            # To hash a deeply nested tuple as a key would recurse without a limit.
            if any(type(key) not in (str, int, PickleRecord) for key in items[::2]):
                raise ValueError("a key that is neither text nor a number")
            self._top(dict).update(zip(items[::2], items[1::2], strict=True))
        elif name == "GLOBAL":
            self._name(".".join(argument.split(" ")))
        elif name == "STACK_GLOBAL":
            self._name(".".join(self._pop(2)))
        elif name in ("NEWOBJ", "REDUCE"):
            made_of, args = self._pop(2)
            if type(made_of) is not Name or type(args) is not tuple:
                raise ValueError("it calls something that is no class")
            stack.append({} if (made_of, args) == (ORDERED, ()) else PickleRecord(made_of, args))
        elif name == "BUILD":
            (state,) = self._pop(1)
            if type(stack[-1]) is not dict:  # attributes of an OrderedDict are not data
                self._top(PickleRecord).state = state
        elif name == "BINPERSID":
            stack.append(PickleRecord(Name(PERSISTENT), tuple(self._pop(1))))
        else:
            raise ValueError(f"instruction {name} has no place there")

    def _name(self, name: str) -> None:
        if name not in self._admitted:
            raise ValueError(f"it names {name}, which has no place there")
        self.stack.append(Name(name))

    def _top(self, kind: type[Any]) -> Any:
        if type(self.stack[-1]) is not kind:
            raise ValueError(f"a {type(self.stack[-1]).__name__} where a {kind.__name__} belongs")
        return self.stack[-1]

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) < count or any(item is _MARK for item in self.stack[-count:]):
            raise ValueError("it takes more from the stack than there is")
        items = self.stack[-count:]
        del self.stack[-count:]
        return items

    def _pop_to_mark(self) -> list[Any]:
        items: list[Any] = []
        while self.stack:
            item = self.stack.pop()
            if item is _MARK:
                return items[::-1]
            items.append(item)
        raise ValueError("it looks for a mark that is not there")
