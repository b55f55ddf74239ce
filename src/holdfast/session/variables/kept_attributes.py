"""The attributes that objects in ``state=`` keep: a part of the search for variables on which updates depend.

Theory. The session saves what ``state_dict()`` of such an object returns. An attribute that this method does not read
begins again in a new process, although its object is in ``state=``. So the source of the method is read: each chain
``self.a.b`` in it names an attribute that is kept, and if its value is an object, all of that object. A method of the
script that it calls counts with its body. Where the method uses ``self`` itself (``vars(self)``, ``super()``), or is no
code of the script, all attributes of the object are kept.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import NamedTuple

from holdfast.session.variables.called_bodies import (
    DEPTH_MAX,
    chain,
    definition,
    instance_of,
    of_script,
    static_of,
)

_WHOLE = ("__dict__", "__getstate__")


class KeptAttributes(NamedTuple):
    """What the session keeps of objects of the script.

    Attributes:
        attributes: each attribute, with the id of its object.
        objects: ids of the objects of which all attributes are kept.
    """

    attributes: frozenset[tuple[int, str]] = frozenset()
    objects: frozenset[int] = frozenset()


def kept_by(items: Iterable[object]) -> KeptAttributes:
    """Return what ``state_dict()`` of ``items`` keeps, by the source of this method."""
    attributes: set[tuple[int, str]] = set()
    objects: set[int] = set()
    for item in items:
        for owner, name in _read(item, "state_dict", DEPTH_MAX):
            if name:
                attributes.add((id(owner), name))
            else:
                objects.add(id(owner))
    return KeptAttributes(frozenset(attributes), frozenset(objects))


def _read(item: object, method: str, depth: int) -> Iterator[tuple[object, str]]:
    """Yield the attributes that a method of ``item`` reads, each with its object; no name stands for all of them."""
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
    """Yield the longest chains of attributes below ``node``."""
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
