"""The variables that a loop carries from one iteration to the next, found by the flow of values in its syntax tree.

Theory. A loop carries a variable to its next iteration if the loop reads the variable before writing it. A branch
(``if number % 3 == 0:``) does not run in every iteration. So a write in the branch counts only for reads in the same
branch, or under the same condition. The value of an expression depends on the variables in the expression. It also
depends on the assignments to these variables and on the conditions around the assignments.
"""

from __future__ import annotations

import ast
import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import NamedTuple, TypeVar, cast

from holdfast.runtime.worker.script_attributes import has_dtype, has_static, instance_of, static_of
from holdfast.runtime.worker.script_frames import container_of, owners_of, values_of
from holdfast.session.variables.called_functions import (
    CallWithBody,
    has_script_method,
)
from holdfast.session.variables.library_meters import RESET, changes_meter
from holdfast.session.variables.script_trees import chain

Loop = ast.For | ast.While
Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For
LEAVES = (ast.Continue, ast.Break, ast.Return)
APPENDS = ("append", "appendleft", "extend", "extendleft")
"""Methods that add their argument to a list or a deque."""
_FILLS = (*APPENDS, "popleft")
"""Methods that write a list or a deque."""
_CHANGES = (
    *("update", "setdefault", "clear", "pop", "popitem", "insert", "remove", "add", "discard"),
    *("sort", "reverse", "rotate", "subtract", "move_to_end", "difference_update", "intersection_update"),
)
"""Methods that write a dict, a list, a deque or a set. Other objects also have methods with these names."""
_OF_ARRAYS = ("fill", "sort", "put", "partition", "resize", "itemset")
"""Methods that write an array of NumPy."""
_VIEWS = (
    *("detach", "view", "view_as", "flatten", "squeeze", "unsqueeze"),
    *("select", "narrow", "transpose", "permute", "t"),
)
"""Methods that return a tensor with the memory of their object."""
_CHANGE_ARGUMENT = (
    *("heappush", "heappop", "heapify", "heapreplace", "heappushpop", "shuffle"),
    *("insort", "insort_left", "insort_right", "next", "copyto", "putmask", "fill_diagonal"),
)
"""Functions of Python, its standard library and NumPy that change their first argument."""
_KINDS = ("device", "dtype")
"""Attributes of a batch that are the same in each step."""
_SETS = ("clear", "copy_", "fill_", "zero_", "fill")
"""Methods after which a container or a tensor has nothing of its earlier content."""


class _Branches(NamedTuple):
    """An ``if`` statement in the list of the uses of variables.

    Attributes:
        test: the condition of the ``if``.
        uses: the uses of variables in each of the two branches, in the order of execution.
        leave: for each of the two branches, whether it ends the iteration of the loop.
    """

    test: ast.expr
    uses: tuple[list[_Item], list[_Item]]
    leave: tuple[bool, bool]


class VariableUse(NamedTuple):
    """One read or write of a variable in the source.

    Attributes:
        name: the variable.
        writes: True if the variable is written, False if it is read.
        at: line and column of the use; None if a part of the variable is written, which counts as a read as well.
    """

    name: str
    writes: bool
    at: tuple[int, int] | None


_Item = VariableUse | _Branches


def carried(block: ast.AST, wanted: Iterable[ast.AST]) -> dict[str, bool]:
    """Return the variables that ``block`` reads before writing them, and on which the expressions ``wanted`` depend.

    The keys are the names. A value is True if some steps write the variable first (``PlacedVariable.partly``).
    """
    flow = _followed(block, wanted)
    items = _items_of(block)
    varying = {name for name in flow.written if not _is_own(name)}
    always, first = (_first_uses(items, names, flow.reads) for names in (set[str](), varying))
    # An element may be new in each step, or not there yet, so its container counts as well.
    containers = {owner for name in flow.wanted for owner in owners_of(name) if _is_container(owner)}
    wanted_names = flow.wanted | containers
    needed = {name for name in first if name in wanted_names or not flow.wanted.isdisjoint(_with_dict(name))}
    caches, swept = _caches(block), _swept(block)
    needed = {name for name in needed - swept if caches.isdisjoint((name, *owners_of(name)))}
    read = [name for name, writes in first.items() if not writes and name in needed]
    # A new object has other attributes and elements. Its methods are no variables, so they stand for the object.
    methods = dict(_methods_in(block))
    return {
        name if name in flow.written else methods.get(name, name): always[name]
        for name in read
        if not flow.written.isdisjoint((*owners_of(name), name))
    }


def taken_over(block: ast.AST) -> set[str]:
    """Return the variables that an iteration of the loop ``block`` may take over from the one before, for any use."""
    changed = _written_in(block)
    first = _first_uses(_items_of(block), changed)
    caches = _caches(block)
    return {name for name, writes in first.items() if not writes and name in changed and name not in caches}


def written_first(block: ast.AST) -> set[str]:
    """Return the variables that each iteration of the loop ``block`` writes before reading them or their attributes."""
    return _DataFlow(block).written_first(block)


def inputs(block: ast.AST, wanted: Iterable[ast.AST]) -> list[str]:
    """Return the variables that ``block`` does not write, and on which the expressions ``wanted`` depend.

    An attribute is left out if ``block`` writes its owner. A called attribute (``self.teacher(x)``) may be a method,
    so its object is also returned.
    """
    flow = _followed(block, wanted)
    methods = dict(_methods_in(block))
    read = {name for name in flow.wanted if flow.written.isdisjoint((*owners_of(name), name))}
    return sorted(read | {methods[name] for name in read & methods.keys()})


def _followed(block: ast.AST, wanted: Iterable[ast.AST]) -> _DataFlow:
    """Return the data flow of ``block``. It has all expressions on which the expressions ``wanted`` depend."""
    flow = _DataFlow(block)
    for expression in wanted:
        flow.want(expression)
    left = [(node, tests) for node, tests in assigned(block) if not _fills_cache(node, tests)]
    for call, addition, tests in _appended(block):
        flow.locate(addition, call)
        left.append((addition, tests))
    while found := [(node, tests) for node, tests in left if assigned_value(node) and flow.reaches(node)]:
        left = [each for each in left if each not in found]
        for node, tests in found:
            indices = [target.slice for target in targets(node) if isinstance(target, ast.Subscript)]
            for source in (assigned_value(node), *tests, *indices):
                if source is not None:
                    flow.want(source)
    return flow


def _appended(block: ast.AST) -> Iterator[tuple[ast.Call, Assignment, tuple[ast.expr, ...]]]:
    """Yield each call of a method that adds to a list (``parts.append(x)``), and the assignment ``parts += x``.

    Each comes with the conditions around it, the outermost condition first.
    """
    for node, tests in _conditioned(block):
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=ast.Name(id=name)), args=[value]) if (
                method in APPENDS
            ):
                yield node, ast.AugAssign(ast.Name(name, ast.Store()), ast.Add(), value), tests


def expressions_behind(block: ast.AST, wanted: Iterable[ast.AST]) -> list[ast.AST]:
    """Return the expressions ``wanted``, and all expressions in ``block`` on which their values depend."""
    return _followed(block, wanted).expressions


def _fills_cache(assignment: Assignment, tests: Sequence[ast.expr]) -> bool:
    """Return whether an assignment adds an entry to a cache: ``if key not in cache: cache[key] = ...``.

    The value of an entry does not depend on the time at which it is added, so a cache carries no information between
    steps.
    """
    entries = [target for target in targets(assignment) if isinstance(target, ast.Subscript)]
    match tests[-1:]:
        case [ast.Compare(ops=[ast.NotIn()])]:
            return bool(entries) and not any(isinstance(each.slice, ast.Constant) for each in entries)
    return False


def _methods_in(block: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of each method that ``block`` calls (``past.mean``), and the name of its object (``past``)."""
    for node in ast.walk(block):
        match node:
            case ast.Call(func=ast.Attribute(value=owner) as called) if chain(called):
                yield chain(called), chain(owner)


class _DataFlow:
    """The assignments of a block on which wanted expressions of the block may depend.

    Theory. If each iteration of a loop writes a variable before reading it, the loop does not carry the variable. An
    expression then depends only on assignments of the same iteration that come before it. For example, an evaluation
    after the update may assign to the name of the batch, and the loss does not depend on this. An inner loop around
    the expression may not write the variable first. Then the inner loop may carry the variable, so all assignments in
    the inner loop count.

    Args:
        block: the loop. An expression outside of the loop, or in a function that the loop defines, depends on all
            assignments.

    Attributes:
        expressions: the wanted expressions.
        written: names of the variables that the block writes.
        wanted: names of the variables in the wanted expressions, also of objects of which they read an attribute.
        reads: the uses of variables in the wanted expressions.
    """

    def __init__(self, block: ast.AST) -> None:
        self.expressions: list[ast.AST] = []
        self._number: dict[int, int] = {}  # of each node, in the order of the source
        self._end: dict[int, int] = {}  # the number of the last node in each loop
        self._loops: dict[int, tuple[ast.AST, ...]] = {}  # around each node, the outermost first
        self._first: dict[int, set[str]] = {}  # see written_first
        # The parts of the block in which an assignment to a name reaches a wanted expression.
        self._parts: dict[str, set[tuple[float, float]]] = {}
        self.written = _written_in(block)
        self.wanted: set[str] = set()
        # The variables that the wanted expressions read as a whole, and not one of their attributes.
        self._whole: set[str] = set()
        self.reads: set[VariableUse] = set()
        self._add(block, ())

    def _add(self, node: ast.AST, loops: tuple[ast.AST, ...]) -> None:
        self._number[id(node)] = len(self._number)
        if isinstance(node, Loop) or not loops:
            loops = (*loops, node)
        self._loops[id(node)] = loops
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):  # runs later
                self._add(child, loops)
        self._end[id(node)] = len(self._number)

    def written_first(self, loop: ast.AST) -> set[str]:
        """Return the variables that each iteration of ``loop`` writes before reading them or their attributes."""
        if id(loop) not in self._first:
            uses = _first_uses(_items_of(loop), self.written)
            read = {each for name, writes in uses.items() if not writes for each in owners_of(name)}
            self._first[id(loop)] = {name for name, writes in uses.items() if writes} - read
        return self._first[id(loop)]

    def locate(self, node: ast.AST, there: ast.AST) -> None:
        """Give ``node``, which is not in the block, the position of the node ``there``."""
        if id(there) in self._number:
            self._number[id(node)] = self._number[id(there)]

    def want(self, expression: ast.AST) -> None:
        """Add ``expression`` to the wanted expressions."""
        self.expressions.append(expression)
        reads = set(uses(expression, results=True))
        names = {use.name for use in reads}
        self.reads |= reads
        self.wanted |= names
        self._whole |= names - {owner for name in names for owner in owners_of(name)} - _inlined(expression)
        self._whole |= names & _objects_of_methods(expression)
        # A variable is also wanted if an attribute or element of it is.
        for each in {owner for name in names for owner in (name, *owners_of(name))}:
            self._parts.setdefault(each, set()).add(self._part(each, expression))

    def _part(self, name: str, expression: ast.AST) -> tuple[float, float]:
        """Return the numbers of the first and last node whose assignment to ``name`` may reach ``expression``."""
        loops = self._loops.get(id(expression), ())
        for depth, loop in reversed(list(enumerate(loops))):
            if name in self.written_first(loop):
                carrying = loops[depth + 1] if depth + 1 < len(loops) else expression
                return self._number[id(loop)], self._end[id(carrying)]
        return 0, math.inf

    def reaches(self, assignment: Assignment) -> bool:
        """Return whether the value of a wanted expression may depend on ``assignment``."""
        found = [use for target in targets(assignment) for use in uses(target)]
        names = {use.name for use in found if use.writes or use.name in self._whole}
        names |= {each for name in names for each in _with_dict(name)} & self.wanted
        parts = [part for name in names for part in self._parts.get(name, ())]
        number = self._number.get(id(assignment))
        # An attribute or an element may belong to an object that has another name as well.
        if number is None or not all(_is_of_names(target) for target in targets(assignment)):
            return bool(parts)
        return any(first <= number <= last for first, last in parts)


def _inlined(expression: ast.AST) -> set[str]:
    """Return the names of the functions that are inlined in ``expression``. What they read is in their results."""
    return {chain(node.func) for node in _behind_value(expression) if isinstance(node, CallWithBody)}


def _objects_of_methods(expression: ast.AST) -> set[str]:
    """Return the objects of which ``expression`` calls a method that is not inlined. It may read the whole object."""
    found: set[str] = set()
    for node in _behind_value(expression):
        match node:
            case CallWithBody():
                continue
            case ast.Call(func=ast.Attribute(value=owner, attr=method)) if chain(
                owner
            ) and method not in instance_of(value_now(chain(owner))):
                found.add(chain(owner))
    return found


def _behind_value(expression: ast.AST) -> Iterator[ast.AST]:
    """Yield ``expression`` and the nodes below it on which its value depends."""
    yield expression
    inside = (
        expression.results() if isinstance(expression, CallWithBody) else ast.iter_child_nodes(expression)
    )
    for part in inside:
        yield from _behind_value(part)


def _is_of_names(target: ast.expr) -> bool:
    """Return whether an assignment to ``target`` writes only variables, and no attributes or elements."""
    match target:
        case ast.Name():
            return True
        case ast.Starred(value=inner):
            return _is_of_names(inner)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(_is_of_names, parts))
    return False


def _first_uses(
    items: Iterable[_Item], varying: set[str], reads: Set[VariableUse] | None = None
) -> dict[str, bool]:
    """Return, for each name that every step uses, whether its first use is a write.

    Args:
        items: the uses of variables in the order of execution.
        varying: variables that differ from step to step. If the condition of an ``if`` depends on one of them, steps
            may take different branches. If not, a write in one branch counts as a write in every step.
        reads: the reads that count; None means all reads. Other reads are ignored, such as one for a log line.
    """
    first: dict[str, bool] = {}
    _follow(list(_counting(items, reads)), varying, first, {}, frozenset())
    return first


def _counting(items: Iterable[_Item], reads: Set[VariableUse] | None) -> Iterator[_Item]:
    """Yield ``items`` without the reads that are not in ``reads``; with None, yield all items."""
    for item in items:
        if isinstance(item, _Branches):
            body, other = (list(_counting(uses, reads)) for uses in item.uses)
            yield item._replace(uses=(body, other))
        elif item.writes or item.at is None or reads is None or item in reads:
            yield item


def _follow(
    items: Iterable[_Item],
    varying: set[str],
    first: dict[str, bool],
    known: dict[frozenset[str], set[str]],
    under: frozenset[str],
) -> None:
    """Add to ``first`` whether the first use of each name in ``items`` is a write.

    Args:
        known: names that earlier branches have written, by the set of conditions under which each branch runs.
        under: the conditions under which these items run.
    """
    for item in items:
        if not isinstance(item, _Branches):
            name = item.name
            first.setdefault(name, item.writes or any(first.get(owner, False) for owner in owners_of(name)))
            continue
        condition = _text_of(item.test)
        body, other = under | {condition}, under | {f"not {condition}"}
        before = {name for conditions, names in known.items() if conditions <= body for name in names}
        branches = {**dict.fromkeys(before, True), **first}, dict(first)
        for uses, branch, inside in zip(item.uses, branches, (body, other), strict=True):
            _follow(uses, varying, branch, known, inside)
        known[body] = {name for name, writes in branches[0].items() if writes}
        first |= {name: False for branch in branches for name, writes in branch.items() if not writes}
        tested = {owner for name in names_in([item.test]) for owner in (name, *owners_of(name))}
        if varying.isdisjoint(tested):
            counted = set(branches[0]) | set(branches[1])
        else:
            stay = [set(branch) for branch, leaves in zip(branches, item.leave, strict=True) if not leaves]
            counted = set.intersection(*(stay or map(set, branches)))
        first.update((name, True) for name in counted if name not in first)


def _text_of(test: ast.expr) -> str:
    """Return a text that is equal for equal conditions.

    A condition that calls a function of the script equals no other.
    """
    called = any(isinstance(node, CallWithBody) for node in ast.walk(test))
    return f"{id(test)}" if called else ast.unparse(test)


class _Fill(NamedTuple):
    """The assignment of an entry of a cache.

    Attributes:
        guard: the condition of the assignment.
        behind: the variables behind the value of the entry, besides those in its key.
    """

    guard: ast.expr
    behind: set[str]


def _caches(block: ast.AST) -> set[str]:
    """Return the caches of ``block``: containers whose entries follow from their keys, and values from a comparison.

    A container is filled by ``if n not in masks: masks[n] = make_mask(n)``. Its entries may depend only on their key
    and on what no step changes. Only entries of other such containers may also be under the condition, and no other
    expression may ask which keys there are. A cache carries nothing from step to step: a process that begins with an
    empty one makes the same entries again. See :func:`_made_again` for values.
    """
    found: dict[str, list[_Fill | None]] = {}
    every, stored = assigned(block), _written_in(block)
    for node, tests in every:
        for name in _written_by(node):
            found.setdefault(name, []).append(_fill(name, node, tests, every, stored))
    fills = {name: [each for each in found[name] if each] for name in found if all(found[name])}
    fills = {name: own for name, own in fills.items() if _only_fills_ask(name, block)}
    behind: dict[ast.expr, set[str]] = {}
    for fill in (each for own in fills.values() for each in own):
        behind.setdefault(fill.guard, set(fills)).update(fill.behind)
    caches = {
        name
        for name, own in fills.items()
        if all(_written_under(fill.guard, every) <= behind[fill.guard] for fill in own)
    }
    for each in ast.walk(block):
        if isinstance(each, ast.If):
            caches |= _made_again(each, block, every, stored)
    changed = (changed_by(node) for node in ast.walk(block) if isinstance(node, ast.Call))
    return caches - {name for name, *_ in filter(None, changed)}


def _fill(
    name: str,
    node: Assignment,
    tests: Sequence[ast.expr],
    every: Sequence[tuple[Assignment, Sequence[ast.expr]]],
    stored: Set[str],
) -> _Fill | None:
    """Return an assignment as that of an entry of the cache ``name``; None if its value follows not only from its key.

    Args:
        name, node, tests: the variable, the assignment, and the conditions around it.
        every: all assignments of the block, each with its conditions.
        stored: the variables that the block writes.
    """
    if isinstance(node, ast.For) or node.value is None or not _fills_cache(node, tests):
        return None
    keys = [target.slice for target in targets(node) if isinstance(target, ast.Subscript)]
    given = set.intersection(*(names_in([key]) for key in keys))
    behind = _behind(node.value, given, tests[-1], every, stored)
    return None if behind is None else _Fill(tests[-1], behind)


def _behind(
    value: ast.expr,
    given: Set[str],
    guard: ast.expr,
    every: Sequence[tuple[Assignment, Sequence[ast.expr]]],
    stored: Set[str],
) -> set[str] | None:
    """Return the variables behind ``value`` besides ``given``; None if it depends on what a step may change.

    Args:
        value: the right side of an assignment.
        given: names on which the value may depend.
        guard: the condition of the assignment. Variables that are assigned only under it are followed.
        every, stored: as for :func:`_fill`.
    """
    behind, waiting = set[str](), names_in([value])
    while waiting:
        each = waiting.pop()
        parts = {each, *owners_of(each)}
        if each in behind or not given.isdisjoint(parts) or each.rpartition(".")[2] in _KINDS:
            continue
        behind |= parts
        sources = [other for other in every if not _written_by(other[0]).isdisjoint(parts)]
        if any(guard not in around for _, around in sources) or (not sources and _may_change(parts, stored)):
            return None
        waiting |= names_in(right for other, _ in sources if (right := assigned_value(other)) is not None)
    return behind


def _written_under(guard: ast.expr, every: Sequence[tuple[Assignment, Sequence[ast.expr]]]) -> set[str]:
    return {each for other, around in every if guard in around for each in _written_by(other)}


def _written_by(assignment: Assignment) -> Set[str]:
    """Return the names of the variables that an assignment writes."""
    return _remember("written", assignment, lambda: written(targets(assignment)))


def _made_again(
    guard: ast.If,
    block: ast.AST,
    every: Sequence[tuple[Assignment, Sequence[ast.expr]]],
    stored: Set[str],
) -> set[str]:
    """Return the variables that ``guard`` makes again where they are not those of the step's size or kind.

    Examples are ``if mask is None or len(mask) != n: mask = make_mask(n)``, and ``if n != size: size = n; table =
    make_table(n)``. The new values may depend only on the other names in the condition and on what no step changes,
    and no step may read an old value after the condition, or any value before it. A variable that is compared must get
    the value with which it is compared. The result is empty if one of these rules does not hold.

    A table that only grows (``if n > size``) is no cache: a part of it may depend on the largest size so far.
    """
    if guard.orelse or not _asks_for_another(guard.test):
        return set()
    group, asked = _written_under(guard.test, every), names_in([guard.test])
    given = {name for name in asked if group.isdisjoint((name, *owners_of(name)))}
    if given == asked:
        return set()
    compared = _compared_with(guard.test)
    for node, tests in every:
        if _written_by(node).isdisjoint(group):
            continue
        value = assigned_value(node)
        whole = all(isinstance(target, ast.Name | ast.Attribute) for target in targets(node))
        if guard.test not in tests or not whole or isinstance(node, ast.AugAssign) or value is None:
            return set()
        if _behind(value, given, guard.test, every, stored) is None:
            return set()
        if any(compared[name] != ast.unparse(value) for name in compared.keys() & _written_by(node)):
            return set()
    inside = _first_of(each for statement in guard.body for each in uses(statement))
    own, first = set(uses(guard)), _first_of(_flat(_items_of(block)))
    begins = all(first[name] in own for name in group & first.keys())
    return group if begins and all(inside[name].writes for name in group & inside.keys()) else set()


def _first_of(found: Iterable[VariableUse]) -> dict[str, VariableUse]:
    first: dict[str, VariableUse] = {}
    for use in found:
        first.setdefault(use.name, use)
    return first


def _compared_with(guard: ast.expr) -> dict[str, str]:
    """Return the variables in the comparisons of a condition, each with the text of the other side."""
    found: dict[str, str] = {}
    for part in guard.values if isinstance(guard, ast.BoolOp) else [guard]:
        match part:
            case ast.Compare(left=left, ops=[ast.NotEq()], comparators=[right]):
                found |= {chain(left): ast.unparse(right), chain(right): ast.unparse(left)}
    return found


def _asks_for_another(guard: ast.expr) -> bool:
    """Return whether a condition holds if a value is None, or is not of the size or kind that a step needs."""
    parts = guard.values if isinstance(guard, ast.BoolOp) and isinstance(guard.op, ast.Or) else [guard]
    operators = [part.ops[0] for part in parts if isinstance(part, ast.Compare)]
    differs = [each for each in operators if isinstance(each, ast.NotEq)]
    known = [each for each in operators if isinstance(each, ast.NotEq | ast.Is)]
    return bool(differs) and len(known) == len(parts)


def _may_change(parts: Set[str], stored: Set[str]) -> bool:
    """Return whether a variable without an assignment may be another one in each step.

    The block stores it (``with step as batch``), or it is a tensor or an object with weights.

    Args:
        parts: the variable, and the variables that hold it.
        stored: the variables that the block writes.
    """
    values = [value for each in parts if not isinstance(value := value_now(each), ModuleType | type)]
    has_numbers = any(has_dtype(value) or has_static(value, "parameters") for value in values)
    return has_numbers or not stored.isdisjoint(parts)


def _only_fills_ask(name: str, block: ast.AST) -> bool:
    """Return whether ``block`` asks for the keys of a container only in conditions around its entries."""
    allowed: set[int] = set()
    entries = False
    for node in ast.walk(block):
        match node:
            case ast.Subscript(value=owner) if chain(owner) == name:
                allowed.add(id(owner))
                entries = entries or not isinstance(node.ctx, ast.Load)
            case ast.If(test=ast.Compare(ops=[ast.NotIn()], comparators=[owner])):
                allowed.add(id(owner))
    loads = (node for node in ast.walk(block) if isinstance(node, ast.expr) and chain(node) == name)
    return not entries or all(id(node) in allowed for node in loads)


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the variables on which the values of the expressions ``nodes`` depend."""
    return {use.name for node in nodes for use in uses(node, results=True)}


def written(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the variables that ``nodes`` write."""
    return {use.name for node in nodes for use in uses(node) if use.writes}


def assigned(block: ast.AST) -> Sequence[tuple[Assignment, tuple[ast.expr, ...]]]:
    """Return the assignments in ``block``. Each comes with the conditions around it, the outermost condition first."""
    return _remember(
        "assigned",
        block,
        lambda: tuple((node, tests) for node, tests in _conditioned(block) if isinstance(node, Assignment)),
    )


def resets(block: ast.AST) -> Iterator[tuple[str, tuple[ast.expr, ...]]]:
    """Yield the meters of libraries that ``block`` resets (``meter.reset()``), each with the conditions around it."""
    for node, tests in _conditioned(block):
        if isinstance(node, ast.Call) and (change := _change_of_meter(node.func)) is not None:
            name, whole = change
            if whole:
                yield name, tests


def _conditioned(block: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.expr, ...]]]:
    """Yield the nodes of ``block`` in the order of the source, each with the conditions around it."""
    ahead: list[tuple[ast.AST, tuple[ast.expr, ...]]] = [(block, ())]
    while ahead:
        node, tests = ahead.pop()
        yield node, tests
        for child in reversed(list(ast.iter_child_nodes(node))):
            inside = isinstance(node, ast.If) and child is not node.test
            ahead.append((child, (*tests, node.test) if inside else tests))  # type: ignore[attr-defined]


def assigned_value(node: Assignment) -> ast.expr | None:
    """Return the right side of an assignment, or the iterable of a ``for`` loop; None if there is no value."""
    return node.iter if isinstance(node, ast.For) else node.value


def targets(node: Assignment) -> Iterable[ast.expr]:
    """Return the expressions on the left side of an assignment, or the loop variables of a ``for`` loop."""
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def uses(node: ast.AST, *, results: bool = False) -> Iterator[VariableUse]:
    """Yield the uses of variables in ``node`` in the order of execution, including both branches of each ``if``."""
    return _flat(_items(node, results=results))


def _items_of(block: ast.AST) -> Sequence[_Item]:
    """Return the uses of variables in ``block``, as ``_items`` yields them."""
    return _remember("items", block, lambda: tuple(_items(block)))


def _written_in(block: ast.AST) -> set[str]:
    """Return a new set with the names of the variables that ``block`` writes."""
    return {use.name for use in _flat(_items_of(block)) if use.writes}


def _flat(items: Iterable[_Item]) -> Iterator[VariableUse]:
    for item in items:
        if isinstance(item, _Branches):
            for uses in item.uses:
                yield from _flat(uses)
        else:
            yield item


def _items(node: ast.AST, *, results: bool = False) -> Iterator[_Item]:
    """Yield the uses of variables in ``node``, in the order of execution. Each ``if`` is one item with its branches.

    An attribute counts as a separate variable (``self.tick``), and so does an element whose key is a constant string
    (``seen["x"]``). The use of any other element counts as a use of its container.

    Args:
        results: yield only the uses on which the value of the expression depends. In a called function these are its
            results.
    """
    match node:
        case ast.If(test=ast.BoolOp(op=ast.And(), values=[test, *others]), orelse=[]):
            # The later parts of the condition are used only if the first one holds.
            rest = others[0] if len(others) == 1 else ast.BoolOp(ast.And(), others)
            yield from _items(ast.If(test, [ast.If(rest, node.body, [])], []), results=results)
        case ast.If():
            yield from _items(node.test, results=results)
            body, other = (
                [item for part in branch for item in _items(part)] for branch in (node.body, node.orelse)
            )
            yield _Branches(node.test, (body, other), (leaves_turn(node.body), leaves_turn(node.orelse)))
        case ast.AugAssign():
            yield from (VariableUse(use.name, False, None) for use in uses(node.target))
            yield from _items(node.value)
            yield from _items(node.target)
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            if node.value is not None:
                yield from _items(node.value, results=results)
            for target in targets(node):
                yield from _items(target)
        case ast.For():
            for part in (node.iter, node.target, *node.body, *node.orelse):
                yield from _items(part)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            own = {use.name for each in node.generators for use in uses(each.target)}
            for child in ast.iter_child_nodes(node):
                inside = uses(child, results=results)
                yield from (use for use in inside if own.isdisjoint((use.name, *owners_of(use.name))))
        case ast.Name():
            yield from _with_container(_use(node.id, node))
        case ast.Attribute(attr="data", value=owner, ctx=ast.Store()) if _is_tensor(chain(owner)):
            yield VariableUse(chain(owner), True, None)
        case ast.Attribute(value=ast.Subscript() as item, ctx=ast.Store()):
            yield from _items(item)
            yield VariableUse(_owner(item), True, None)
        case ast.Attribute() if name := chain(node):
            if not isinstance(node.value, ast.Name):
                yield from _items(node.value)
            yield from _with_container(_use(name, node))
        case ast.Subscript(slice=ast.Constant(value=str(key))) if chain(node.value) and not set(key) & set(
            '"[]'
        ):
            if not isinstance(node.ctx, ast.Load):
                yield VariableUse(chain(node.value), False, None)
            yield from _with_container(_use(f'{chain(node.value)}["{key}"]', node))
        case ast.Subscript() if _is_item_of_variable(node):
            yield from _items(node.slice, results=results)
            yield from _item_uses(node)
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            for part in node.body if isinstance(node.body, list) else []:
                yield from _items(part)
        case ast.Call() if not results and (change := changed_by(node)) is not None:
            yield from _change(node, *change)
        case CallWithBody() if results:
            for part in node.results():
                yield from _items(part, results=True)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _items(child, results=results)


def _is_item_of_variable(node: ast.Subscript) -> bool:
    """Return whether ``node`` is an item of a variable, or a written item of such an item (``rows["x"][0] = 1``)."""
    written_item = not isinstance(node.ctx, ast.Load) and bool(_container(node.value))
    return isinstance(node.value, ast.Name | ast.Attribute) or written_item


def _item_uses(node: ast.Subscript) -> Iterator[VariableUse]:
    """Yield the uses of an item of a container. An assignment writes the container, and not the objects around it."""
    container = _container(node.value)
    if not isinstance(node.value, ast.Name | ast.Attribute):
        yield VariableUse(container, False, None)  # the other items stay
    yield from (_use(container, node) if use.name == container else use for use in uses(node.value))


def _container(node: ast.expr) -> str:
    """Return the variable, attribute or element of a dict to which a nested item (``rows["x"][0]``) belongs.

    The result is empty if it is the result of another expression.
    """
    match node:
        case ast.Subscript(slice=ast.Constant(value=str(key)), value=owner) if chain(owner):
            return f'{chain(owner)}["{key}"]'
        case ast.Subscript():
            return _container(node.value)
    return chain(node)


def _swept(block: ast.AST) -> set[str]:
    """Return the containers with nested items that ``block`` writes only at the positions of an inner ``for`` loop.

    Each step then writes all items that it uses: the storage of a rollout (``rows["x"][t] = seen``).
    """
    inner = [node.target for node in ast.walk(block) if isinstance(node, ast.For) and node is not block]
    positions, swept, others = written(inner), set[str](), set[str]()
    for assignment, _ in assigned(block):
        for target in targets(assignment):
            match target:
                case ast.Subscript(value=ast.Subscript() as owner, slice=at):
                    (swept if chain(at) in positions else others).add(_container(owner))
    return swept - others


def _with_dict(name: str) -> tuple[str, ...]:
    """Return ``name``, and for an element of a dict also the dict: an expression may use all of its elements."""
    return (name, owners_of(name)[-1]) if name.endswith("]") else (name,)


def _use(name: str, node: ast.Name | ast.Attribute | ast.Subscript) -> VariableUse:
    at = getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
    # `del seen["x"]` changes the dict, and `del x` changes no value.
    changes = (ast.Store, ast.Del) if isinstance(node, ast.Subscript) else ast.Store
    return VariableUse(name, isinstance(node.ctx, changes), at)


def leaves_turn(branch: Sequence[ast.stmt]) -> bool:
    """Return whether a branch ends with a statement that leaves the iteration of its loop, or its function."""
    return bool(branch) and isinstance(branch[-1], (*LEAVES, ast.Raise))


def _change(call: ast.Call, name: str, whole: bool) -> Iterator[_Item]:
    """Yield the uses of variables in ``call``, which changes the variable ``name`` (``whole``: all of it)."""
    if not whole:
        yield VariableUse(name, False, None)
    for child in (*call.args, *call.keywords) if whole else ast.iter_child_nodes(call):
        yield from _items(child)
    yield from _with_container(VariableUse(name, True, None))


def _with_container(use: VariableUse) -> Iterator[VariableUse]:
    """Yield ``use``, and if it writes an item that has a name, a write of the container of the item."""
    yield use
    if use.writes and (container := container_of(use.name)):
        yield VariableUse(container, False, None)  # the other items stay
        yield VariableUse(container, True, None)


def changed_by(call: ast.Call) -> tuple[str, bool] | None:
    """Return the variable that a call changes, and whether the call leaves nothing of its earlier content.

    The result is None if no variable is known to change.
    """
    match call:
        case ast.Call(func=ast.Attribute(attr=method, value=owner)) if (name := _owner(owner)) and (
            method in _FILLS or _changes(name, method)
        ):
            return name, method in _SETS
        case ast.Call(func=called) if chain(called) and (change := _change_of_meter(called)) is not None:
            return change
        case ast.Call(func=ast.Name(id=function) | ast.Attribute(attr=function), args=[changed, *_]) if (
            function in _CHANGE_ARGUMENT and chain(changed)
        ):
            return chain(changed), False
    given = (each.value for each in call.keywords if each.arg == "out")
    return next(((name, True) for each in given if _is_tensor(name := chain(each))), None)


def _change_of_meter(called: ast.expr) -> tuple[str, bool] | None:
    """Return the meter of a library that a call of ``called`` changes, as :func:`changed_by` does."""
    match called:
        case ast.Name(id=name) if changes_meter(value_now(name), "update"):
            return name, False
        case ast.Attribute(attr=method, value=owner):
            holder = value_now(chain(owner))
            if changes_meter(holder, method):
                return chain(owner), method == RESET
            if changes_meter(static_of(holder, method), "update"):
                return chain(called), False
    return None


def _owner(node: ast.expr) -> str:
    """Return the variable, attribute or element of which a method is called; empty if the owner is none of these."""
    match node:
        case ast.Subscript():
            return next((use.name for use in reversed(list(uses(node)))), "")
        case ast.Attribute(attr="data", value=owner) if _is_tensor(name := _owner(owner)):
            return name
        case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _VIEWS and _is_tensor(
            name := _owner(owner)
        ):
            return name
    return chain(node)


def _changes(name: str, method: str) -> bool:
    """Return whether ``name`` is now a container or tensor that a call of ``method``, of it or of an item, changes.

    The methods of a tensor that end with an underscore change it.
    """
    if _has_objects_with(value_now(name), method):
        return True
    if (method.endswith("_") and not method.endswith("__")) or method in _OF_ARRAYS:
        return _is_tensor(name) or (method in _CHANGES and isinstance(value_now(name), list))
    return method in _CHANGES and isinstance(value_now(name), dict | list | set | deque)


def _has_objects_with(value: object, method: str) -> bool:
    """Return whether a method of this name may change the items of a container: objects of the script.

    The items of an empty container are not known, so they count as such objects.
    """
    items = list(value.values()) if isinstance(value, dict) else value
    if not isinstance(items, list | tuple) or not items:
        return isinstance(items, list) and not hasattr(type(value), method)
    return has_script_method(type(items[0]), method)


def _is_container(name: str) -> bool:
    """Return whether the variable ``name`` is now a dict or a list."""
    return isinstance(value_now(name), dict | list)


def _is_tensor(name: str) -> bool:
    """Return whether the variable ``name`` is now a tensor or an array."""
    value = value_now(name)
    return has_dtype(value) and not has_static(value, "parameters")  # some modules have a dtype


def _is_own(name: str) -> bool:
    """Return whether a variable is ``own`` of the session, which all steps after the first have (``if s.own:``)."""
    owner, _, attribute = name.rpartition(".")
    return attribute == "own" and type(value_now(owner)).__module__.startswith("holdfast.")


_remembered: ContextVar[dict[tuple[str, Hashable], object] | None] = ContextVar("known facts", default=None)
_Made = TypeVar("_Made")


@contextmanager
def remembered_values() -> Iterator[None]:
    """Look up each variable, and walk each loop, only once. No code of the script may run in this context.

    A search asks for the value of one variable at each of its uses, and each look-up copies the variables of all stack
    frames. It asks for the uses in a loop many times, and a loop with bodies has tens of thousands of nodes.
    """
    token = _remembered.set({})
    try:
        yield
    finally:
        _remembered.reset(token)


def _remember(what: str, of: Hashable, made: Callable[[], _Made]) -> _Made:
    """Return the result of ``made``, of the first call with ``what`` and ``of`` in :func:`remembered_values`."""
    known = _remembered.get()
    if known is None:
        return made()
    if (what, of) not in known:
        known[what, of] = made()
    return cast("_Made", known[what, of])


def value_now(name: str) -> object:
    """Return the present value of a variable in the stack frames of the script; None if it has no value."""
    return _remember("value", name, lambda: values_of([name]).get(name))
