"""The attributes of objects in ``state=`` that the session saves, for the search for variables on which updates depend.

Theory. The session saves the result of ``state_dict()`` of each object in ``state=``. An attribute that this method
does not read has its initial value in a new process, although the object is in ``state=``. So the source of the
method is read. Each chain ``self.a.b`` in the source names a kept attribute. If the value of that attribute is an
object, all attributes of the object count as kept. Methods of the script that ``state_dict()`` calls are also read.
If the method uses ``self`` itself (``vars(self)``, ``super()``), or belongs to a library, all attributes of the
object count as kept.

A property of the script has no value of its own. The session saves its value if it saves all attributes that the
property reads.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import NamedTuple

from holdfast.runtime.worker.script_attributes import instance_of, static_of
from holdfast.session.variables.called_bodies import DEPTH_MAX
from holdfast.session.variables.called_functions import (
    chain,
    definition,
    of_script,
)

_WHOLE = ("__dict__", "__getstate__")


class KeptAttributes(NamedTuple):
    """The attributes of the script's objects that the session saves.

    Attributes:
        attributes: pairs of the id of an object and the name of a kept attribute.
        objects: ids of the objects of which all attributes are kept.
    """

    attributes: frozenset[tuple[int, str]] = frozenset()
    objects: frozenset[int] = frozenset()


def kept_by(items: Iterable[object], method: str = "state_dict") -> KeptAttributes:
    """Return the attributes that ``method`` of each of ``items`` saves, found in the source of this method."""
    attributes: set[tuple[int, str]] = set()
    objects: set[int] = set()
    for item in items:
        for owner, name in _read(item, method, DEPTH_MAX):
            if name:
                attributes.add((id(owner), name))
            else:
                objects.add(id(owner))
    return KeptAttributes(frozenset(attributes), frozenset(objects))


def read_by_property(owner: object, name: str) -> list[str]:
    """Return the attributes of ``owner`` from which a property of the script computes its value.

    The result is empty if ``name`` is no such property, or if the value may also depend on anything else.
    """
    found = static_of(owner, name)
    function = found.fget if isinstance(found, property) else None
    if not isinstance(function, FunctionType) or not of_script(function.__code__.co_filename):
        return []
    source = definition(function.__code__)
    if source is None or not source.args.args:
        return []
    own = source.args.args[0].arg
    read = [chain(node).split(".") for part in source.body for node in _chains(part)]
    if any(first != own and not hasattr(builtins, first) for first, *_ in read):
        return []
    names = [".".join(names) for first, *names in read if first == own]
    return names if all(names) else []


def _read(item: object, method: str, depth: int) -> Iterator[tuple[object, str]]:
    """Yield the attributes that a method of ``item`` reads, as pairs (object, name).

    An empty name means all attributes.
    """
    function = inspect.unwrap(found) if callable(found := static_of(item, method)) else None
    source = None
    if isinstance(function, FunctionType) and of_script(function.__code__.co_filename):
        source = definition(function.__code__)
    if source is None or not source.args.args or not depth:
        yield item, ""
        return
    own = source.args.args[0].arg
    for node in _chains(source):
        first, *names = chain(node).split(".")
        if first == "super" or (first == own and (not names or names[0] in _WHOLE)):
            yield item, ""
        elif first == own:
            yield from _follow(item, names, depth)


def _chains(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the longest chains of attributes (``self.a.b``) below ``node``."""
    for child in ast.iter_child_nodes(node):
        if chain(child):
            yield child
        else:
            yield from _chains(child)


def _follow(item: object, names: list[str], depth: int) -> Iterator[tuple[object, str]]:
    owner = item
    for name in names:
        value = static_of(owner, name)
        if name not in instance_of(owner) and inspect.isroutine(value):
            yield from _read(owner, name, depth - 1)
            return
        yield owner, name
        owner = value
    if owner is not None:
        yield owner, ""
