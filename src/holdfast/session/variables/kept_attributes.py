"""The attributes of objects in ``state=`` that the session saves, for the search for variables on which updates depend.

Theory. The session saves the result of ``state_dict()`` of each object in ``state=``. An attribute that this method
does not read has its initial value in a new process, although the object is in ``state=``. So the source of the
method is read. Each chain ``self.a.b`` in the source names a kept attribute. If the value of that attribute is an
object, all attributes of the object count as kept. A loop or comprehension over a container (``[p.n for p in
self.phases]``) names kept attributes of its items. Methods of the script that ``state_dict()`` calls are also read.
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
from holdfast.session.variables.aliases import first_items
from holdfast.session.variables.called_bodies import DEPTH_MAX
from holdfast.session.variables.called_functions import (
    definition,
    of_script,
)
from holdfast.session.variables.script_trees import chain

ITEMS_MAX = 1000
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
    items = _items(item, source, own)
    for node in _chains(source):
        first, *names = chain(node).split(".")
        is_target = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        for each in () if is_target else items.get(first, ()):
            yield from _follow(each, names, depth)
        if first == "super" or (first == own and (not names or names[0] in _WHOLE)):
            yield item, ""
        elif first == own:
            yield from _follow(item, names, depth)


def _items(owner: object, source: ast.FunctionDef, own: str) -> dict[str, list[object]]:
    """Return, by the local name of a loop or comprehension, the items of the containers of ``owner`` in it.

    Args:
        owner: the object of the method.
        source: the method.
        own: the name of ``owner`` in the method.
    """
    found: dict[str, list[object]] = {}
    for loop in ast.walk(source):
        if not isinstance(loop, ast.For | ast.comprehension):
            continue
        containers = [
            chain(node).split(".")
            for node in _chains(ast.Expr(loop.iter))
            if chain(node).startswith(f"{own}.")
        ]
        items = [held for _, *names in containers for _, held in first_items(_value(owner, names), ITEMS_MAX)]
        for name in (each.id for each in ast.walk(loop.target) if isinstance(each, ast.Name)):
            found.setdefault(name, []).extend(items)
    return found


def _value(owner: object, names: list[str]) -> object:
    """Return the value of a chain of attributes. A method at its end is left out (``self.parts.values``)."""
    value = owner
    for name in names:
        found = static_of(value, name)
        if inspect.isroutine(found):
            break
        value = found
    return value


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
