"""The tables that a script only makes larger, such as the positions of the longest batch so far.

Theory. A module keeps a table and makes a larger one when a batch is longer than the table::

    if self.table is None or n > len(self.table):
        self.table = make(n)
    return x + self.table[:n]

Ranks with batches of different lengths have tables of different sizes, and so has a replacement. That is harmless if
the first part of a table does not depend on its size. The source cannot show this: some models compute each entry from
the largest size (a rotary embedding that is stretched). So the search finds tables of which the script reads only
parts, and the values decide. The text for such a table has digests of its first parts, of 1, 2, 4, ... entries. Two
tables *agree* if the digests of all parts that both have are equal.

A variable that the script only asks for in the condition of such a table (``self.size``) has no effect of its own.

Invariant: a table is compared with another one only by the parts that both have.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_frames import owners_of
from holdfast.session.variables.called_functions import (
    LOCAL,
    CallWithBody,
)
from holdfast.session.variables.data_flow import assigned, names_in, targets, uses, written
from holdfast.session.variables.deciding_variables import Places, outermost_loop
from holdfast.session.variables.script_trees import chain
from holdfast.session.variables.set_once import is_collective
from holdfast.session.variables.update_sources import sources
from holdfast.text import plural

TABLE = "a table "
"""The begin of the text for a table."""
_PART = re.compile(r"(\d+):([0-9a-f]{8})")
_SAME = ("to", "type_as", "detach", "clone", "contiguous", "float", "cpu", "cuda")
"""Methods that return a tensor with the entries of their tensor."""
_STATEMENTS = ("body", "orelse", "finalbody")
"""The attributes of nodes of a syntax tree that are lists of statements."""


class GrowingTables(NamedTuple):
    """The tables that a loop only makes larger.

    Attributes:
        tables: the dimensions in which each table grows, by name. Dimensions are counted from 0.
        sizes: the variables that only decide whether a table is made again.
    """

    tables: Mapping[str, frozenset[int]] = {}
    sizes: frozenset[str] = frozenset()


@cache
def growing_tables(places: Places) -> GrowingTables:
    """Return the tables that the outermost loop only makes larger, as far as the source shows it.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    return growing_in(outermost_loop(places))


def growing_in(loop: ast.AST) -> GrowingTables:
    """Return the tables that ``loop`` only makes larger. The functions that it calls are inlined."""
    read = Counter(use.name for use in uses(loop) if not use.writes)
    names = {name for name in _only_assigned(loop) if LOCAL not in name}
    while True:
        reads, asks = _Reads(names), list(_asks(loop, names))
        reads.visit(loop)
        refused = {
            name for ask in asks if not _only_writes(names, ask.statements, read) for name in ask.names
        }
        if not (left_out := names & (reads.others | refused | _written_elsewhere(loop, asks))):
            break
        names = names - left_out
    tables = {name: frozenset(dimensions) for name, dimensions in reads.parts.items() if name in names}
    asked = {name for ask in asks for name in ask.names}
    return GrowingTables(tables, frozenset(asked - tables.keys())) if tables else GrowingTables()


def _only_assigned(loop: ast.AST) -> set[str]:
    """Return the variables that ``loop`` writes by assignments, and in no other way (``with``, a method)."""
    writes = Counter(use.name for use in uses(loop) if use.writes)
    goals = (target for assignment, _ in assigned(loop) for target in targets(assignment))
    by_assignment = Counter(use.name for target in goals for use in uses(target) if use.writes)
    return {name for name, count in by_assignment.items() if count == writes[name]}


class _Ask(NamedTuple):
    """An ``if`` that asks about some variables, and the statements that run or not by its answer."""

    names: set[str]
    statements: list[ast.stmt]


def _asks(loop: ast.AST, names: set[str]) -> Iterator[_Ask]:
    """Yield each ``if`` in ``loop`` that asks about one of ``names``."""
    fields = (getattr(node, field, None) for node in ast.walk(loop) for field in _STATEMENTS)
    for statements in (each for each in fields if isinstance(each, list)):
        for number, each in enumerate(statements, 1):
            if isinstance(each, ast.If) and (asked := _named([each.test]) & names):
                leaves = any(isinstance(part, ast.Return) for part in _of_function(each))
                yield _Ask(asked, [*each.body, *each.orelse, *(statements[number:] if leaves else [])])


def _named(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the variables on which the values of ``nodes`` depend, and the owners of attributes among them."""
    return {each for name in names_in(nodes) for each in (name, *owners_of(name))}


def _written_elsewhere(loop: ast.AST, asks: Sequence[_Ask]) -> set[str]:
    """Return the variables with an assignment that no condition in ``asks`` decides about."""
    inside = {id(node) for ask in asks for statement in ask.statements for node in ast.walk(statement)}
    return {
        name
        for assignment, _ in assigned(loop)
        if id(assignment) not in inside
        for name in written(targets(assignment))
    }


def _only_writes(names: set[str], statements: Sequence[ast.stmt], read: Mapping[str, int]) -> bool:
    """Return whether ``statements`` have no effect but on ``names``.

    Args:
        names: names of variables.
        statements: the statements under a condition.
        read: how often the whole loop reads each variable.
    """
    for node in (each for statement in statements for each in _of_function(statement)):
        match node:
            case ast.Return(value=ast.expr()) if not _is_none(node.value):
                return False
            case ast.Continue() | ast.Break() | ast.Yield() | ast.YieldFrom():
                return False
    every = (node for statement in statements for node in ast.walk(statement))
    if any(is_collective(node) or _is_step(node) for node in every):
        return False
    if sources(ast.Module(list(statements), []), frozenset()):
        return False
    here = Counter(use.name for each in statements for use in uses(each) if not use.writes)
    return all(here[name] == read.get(name, 0) for name in written(statements) - names)


def _of_function(node: ast.AST) -> Iterator[ast.AST]:
    """Yield ``node`` and the nodes below it, without the bodies of the functions that it calls."""
    yield node
    for child in node.args if isinstance(node, CallWithBody) else ast.iter_child_nodes(node):
        yield from _of_function(child)


def _is_step(node: ast.AST) -> bool:
    """Return whether ``node`` is a call of a method ``step``, as optimizers and schedules have it."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step"


def _is_none(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


class _Reads:
    """The reads of variables in a loop.

    Args:
        names: the variables.

    Attributes:
        parts: the dimensions in which the loop cuts each variable that it reads in parts.
        others: the variables that the loop reads as a whole, outside of conditions, or changes in place.
    """

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self.parts: dict[str, set[int]] = {}
        self.others: set[str] = set()

    def visit(self, node: ast.AST) -> None:
        """Add the reads in ``node``."""
        match node:
            case CallWithBody():  # its body assigns or contains the arguments
                self._visit_all(node.body)
            case ast.If():
                self._visit_all([*node.body, *node.orelse])
            case ast.Assign(targets=[target], value=value) if chain(target) == self._table(value) != "":
                return  # the table in another dtype or on another device
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                self._visit_assignment(node)
            case ast.Assert() | ast.Attribute(attr="dtype" | "device"):
                return
            case ast.Call(func=ast.Attribute(attr=method, value=ast.Subscript(value=value))) if (
                method.endswith("_") and (name := self._table(value))
            ):
                self.others.add(name)  # changed in place
            case ast.Subscript(value=value, slice=index) if name := self._table(value):
                self._add(name, self._dimensions(index))
                self.visit(index)
            case ast.Call(func=ast.Attribute(attr="index_select", value=value)) if name := self._table(value):
                first = node.args[0] if node.args else None
                is_first = isinstance(first, ast.Constant) and first.value == 0
                self._add(name, {0} if is_first else None)
                self._visit_all(node.args)
            case ast.Call(func=called, args=[index, value]) if chain(called).endswith("embedding") and (
                name := self._table(value)
            ):
                self._add(name, {0})
                self.visit(index)
            case ast.Name() | ast.Attribute() if chain(node) in self._names:
                self.others.add(chain(node))
            case _:
                self._visit_all(ast.iter_child_nodes(node))

    def _visit_all(self, nodes: Any) -> None:
        for each in nodes:
            self.visit(each)

    def _visit_assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr) -> None:
        if node.value is not None:
            self.visit(node.value)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(node, ast.AugAssign) or not chain(target):
                self.others |= {name for name in self._names if name in written([target])}
                self._visit_all(ast.iter_child_nodes(target) if isinstance(target, ast.Subscript) else [])

    def _add(self, name: str, dimensions: set[int] | None) -> None:
        if dimensions is None:
            self.others.add(name)
        else:
            self.parts.setdefault(name, set()).update(dimensions)

    def _table(self, value: ast.AST) -> str:
        """Return the name of the variable that ``value`` reads, perhaps in another dtype; empty if it is none."""
        match value:
            case ast.Call(func=ast.Attribute(attr=method, value=inner)) if method in _SAME:
                return self._table(inner)
        name = chain(value)
        return name if name in self._names else ""

    def _dimensions(self, index: ast.expr) -> set[int] | None:
        """Return the dimensions that an index cuts by a slice or by positions; None if the index has another form."""
        parts = index.elts if isinstance(index, ast.Tuple) else [index]
        found: set[int] = set()
        dimension = 0
        for part in parts:
            match part:
                case ast.Constant(value=None):
                    continue
                case ast.Slice(lower=None, upper=None, step=None):
                    pass
                case ast.Slice(step=None):
                    found.add(dimension)
                case ast.Slice() | ast.Constant() | ast.UnaryOp() | ast.Starred():
                    return None
                case _:
                    found.add(dimension)
            if any(
                isinstance(each, ast.UnaryOp) and isinstance(each.op, ast.USub) for each in ast.walk(part)
            ):
                return None  # counted from the end
            dimension += 1
        return found if found and self._names.isdisjoint(_named([index])) else None


def first_parts(value: Any, dimensions: frozenset[int], source: DescribesUpdates) -> str | None:
    """Return the text for a table: digests of its first parts. None if ``value`` is no such table.

    Args:
        value: the present value of the variable, a tensor or an array.
        dimensions: the dimensions in which it grows.
        source: the adapter.
    """
    shape = getattr(value, "shape", None)
    if shape is None or len(shape) <= max(dimensions):
        return None
    size, found = min(shape[each] for each in dimensions), []
    length = 1
    while length <= size:
        cut = tuple(slice(length) if each in dimensions else slice(None) for each in range(len(shape)))
        if (digest := source.digest_of(value[cut])) is None:
            return None
        found.append(f"{length}:{digest & 0xFFFFFFFF:08x}")
        length *= 2
    return f"{TABLE}with first parts {' '.join(found)}"


def in_message(value: object) -> object:
    """Return ``value`` for a message: the text for a table without the digests of its smaller parts."""
    if not isinstance(value, str) or not value.startswith(TABLE) or not (parts := _PART.findall(value)):
        return value
    length, digest = parts[-1]
    return f"{TABLE}with checksum {digest} of the first {plural(int(length), 'row')}"


def agree(one: str, other: str) -> bool:
    """Return whether the first parts that two tables have in common are equal.

    Example:
        >>> agree("a table with first parts 1:00000001 2:00000002", "a table with first parts 1:00000001")
        True
    """
    parts = dict(_PART.findall(other))
    return all(parts.get(length, digest) == digest for length, digest in _PART.findall(one))
