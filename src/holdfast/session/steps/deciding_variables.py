"""The variables of a script that may decide about a collective or an update: a search in its source.

Theory. A loop makes a collective or an update under conditions: an ``if`` around it, or an ``if`` before it that
continues with the next step. An update also depends on the loss, on the learning rate, and on the conditions under
which the script leaves its loops (an early stop). All this differs between ranks if it depends on a variable that each
step takes over from the step before. In a replacement such a variable begins again. So the search starts at the names
in these expressions and follows the assignments of the loop, with the conditions around them. It keeps the names that
the loop reads before it writes them. A write in a branch that not every step takes (``if number % 3 == 0:``) counts
only in that branch, and under the same condition.

A call of a function of the script counts with the body of that function (``called_bodies.py``). So attributes of an
object, which its methods read and write, are found by the names ``object.attribute``. A generator that the block draws
from is found as well: what it yields depends on the number of draws.

The result is text for an error. Source that is not there, and conditions in other forms, give no names.
"""

from __future__ import annotations

import ast
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from typing import NamedTuple

from holdfast.runtime.worker.script_frames import LIBRARIES, OURS, frames_outside, owners_of, values_of
from holdfast.session.steps.called_bodies import (
    LOCAL,
    CallWithBody,
    chain,
    is_of_library,
    of_script,
    tree_of,
    with_bodies,
)

Places = tuple[tuple[str, int], ...]

VARIABLES_MAX = 4  # in a message
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.While
_Assignment = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr | ast.For
_LEAVES = (ast.Continue, ast.Break, ast.Return)
_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
_FILLS = ("append", "appendleft", "extend", "extendleft", "popleft")
"""Methods that write a list or a deque."""
_CHANGES = ("update", "setdefault", "clear", "pop", "insert", "remove")
"""Methods that write a dict or a list. Other objects also have methods with these names."""
_ENDS = ("exit", "quit", "sys.exit", "os._exit")
_SAVES = re.compile(r"(^|[._])(save|copyfile)")
_SETS_RATES = re.compile(r"(^|[._])(lr|learning_rate|scheduler)")


class PlacedVariable(NamedTuple):
    """A variable of the script.

    Attributes:
        name: its name, as in :func:`holdfast.runtime.worker.script_frames.values_of`.
        place: file and line of the function whose variable it is.
        partly: some steps write it before they read it, so its values may all follow from the number of the step.
    """

    name: str
    place: tuple[str, int]
    partly: bool


class _Branches(NamedTuple):
    """An ``if`` in a list of uses.

    Attributes:
        test: its condition.
        uses: the uses in both branches, in the order of execution.
        leave: whether each branch leaves the turn of the loop.
    """

    test: ast.expr
    uses: tuple[list[_Item], list[_Item]]
    leave: tuple[bool, bool]


_Use = tuple[str, bool]
"""A variable, and whether it is written."""
_Item = _Use | _Branches


def places_in_script() -> Places:
    """Return file and line of the stack frames of this thread, the innermost first, up to the outermost in a loop.

    Frames of libraries are left out.
    """
    frames = frames_outside((OURS, *LIBRARIES, "<"))  # "<frozen runpy>"
    places = [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]
    found = [place for place in places if of_script(place[0])]
    loops = [index for index, place in enumerate(found) if _loops_around(*place)]
    return tuple(found[: loops[-1] + 1] if loops else found[:1])


def described(places: Places) -> str:
    """Return the innermost and the outermost of ``places`` as text: ``stats.py:98, from train.py:31``."""
    shown = dict.fromkeys((places[0], places[-1]))
    return ", from ".join(f"{os.path.basename(file)}:{line}" for file, line in shown)


@cache
def deciding_variables(places: Places, *, update: bool = False) -> tuple[str, ...]:
    """Return the names of variables that may decide whether the code at ``places`` runs, the outermost place first.

    Args:
        update: the innermost place is an update: also find what may decide about the loss and the learning rate.
    """
    return tuple(dict.fromkeys(each.name for each in placed_variables(places, update=update)))


@cache
def placed_variables(places: Places, *, update: bool = False) -> tuple[PlacedVariable, ...]:
    """Return the variables of :func:`deciding_variables`, each with the place in whose frame it is a variable."""
    found: dict[tuple[str, tuple[str, int]], bool] = {}
    for depth, place in reversed(list(enumerate(places))):
        for name, partly in _of_place(place, places[:depth], update):
            if LOCAL not in name:
                found[name, place] = partly and found.get((name, place), True)
    return tuple(PlacedVariable(*at, partly) for at, partly in found.items())


def file_variables(places: Places) -> tuple[PlacedVariable, ...]:
    """Return the variables that may decide whether the loops at ``places`` save a file.

    A file is saved by a function whose name begins with ``save`` or ``copyfile``, also after a dot or an underscore.
    """
    found: dict[PlacedVariable, None] = {}
    for depth, place in reversed(list(enumerate(places))):
        for loop in with_bodies(place, _loops_around(*place), places[:depth])[:1]:
            tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If) and _has_save(node)]
            carried = _carried(loop, tests).items()
            found.update((PlacedVariable(name, place, partly), None) for name, partly in carried)
    return tuple(each for each in found if LOCAL not in each.name)


def _has_save(node: ast.If) -> bool:
    return any(isinstance(each, ast.Call) and _SAVES.search(_dotted(each.func)) for each in ast.walk(node))


@cache
def lasting_variables(places: Places) -> frozenset[str]:
    """Return the names of variables at the outermost of ``places`` that no epoch sets to a value of their begin.

    The outermost loop, with the bodies of the functions that it calls, writes them only from their own values, or under
    conditions that are not about the position in an epoch.
    """
    loop = _outermost(places)
    reset = _names_of_items(loop)
    for assignment, tests in _assigned(loop):
        value = _value(assignment)
        if value is None or isinstance(assignment, ast.AugAssign):
            continue
        names = _written(_targets(assignment))
        if not names <= _names_in([value]) and all(map(_is_position, tests[-1:])):
            reset |= names
    return _without(_written([loop]), reset)


@cache
def counts(places: Places) -> frozenset[str]:
    """Return the names of variables at the outermost of ``places`` that the loop only adds to (``seen += 1``)."""
    loop = _outermost(places)
    others = _names_of_items(loop)
    added: set[str] = set()
    for assignment, _ in _assigned(loop):
        names = _written(_targets(assignment))
        if _is_sum(assignment):
            added |= names
        else:
            others |= names
    return _without(added, others)


def _outermost(places: Places) -> ast.AST:
    """Return the outermost loop around ``places``, with the bodies of the functions that it calls."""
    loops = with_bodies(places[-1], _loops_around(*places[-1]), places[:-1])
    return loops[0] if loops else ast.Module([], [])


def _names_of_items(loop: ast.AST) -> set[str]:
    """Return the variables that take one item after the other, or the result of a ``with``."""
    found: set[str] = set()
    for node in ast.walk(loop):
        match node:
            case (
                ast.For(target=target)
                | ast.comprehension(target=target)
                | ast.withitem(optional_vars=ast.expr() as target)
            ):
                found |= _written([target])
    return found


def _is_sum(assignment: _Assignment) -> bool:
    """Return whether the assignment adds to its variable: ``n += 1`` or ``n = n + 1``."""
    match assignment:
        case ast.AugAssign(op=ast.Add()):
            return True
        case ast.Assign(targets=[target], value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            return chain(target) in {chain(left), chain(right)} - {""}
    return False


def _written(nodes: Iterable[ast.AST]) -> set[str]:
    return {name for node in nodes for name, writes in _uses(node) if writes}


def _without(names: Iterable[str], left_out: set[str]) -> frozenset[str]:
    """Return the names that are neither in ``left_out`` nor attributes or elements of variables in it."""
    return frozenset(name for name in names if left_out.isdisjoint((*owners_of(name), name)))


def _is_position(test: ast.expr) -> bool:
    """Return whether a condition is about the position in an epoch: ``step.last_in_epoch``, ``i % n``, ``i == 0``."""
    for node in ast.walk(test):
        match node:
            case ast.Attribute(attr="last_in_epoch") | ast.BinOp(op=ast.Mod()):
                return True
            case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
                return True
    return False


def _of_place(place: tuple[str, int], inside_it: Places, update: bool) -> Iterator[tuple[str, bool]]:
    file, line = place
    scope, *inner = _inside_scope(file, line)
    loops = _loops_around(file, line)
    inside = inner[inner.index(loops[0]) :] if loops and update else []
    blocks = [node for node in inside if isinstance(node, ast.With)][:1]
    full = with_bodies(place, [*loops, *blocks], inside_it) if loops else [scope]
    for loop, body in zip(loops or [scope], full, strict=False):
        conditions = [node.test for node in inner if isinstance(node, ast.If | ast.While)]
        conditions += [*_skips(loop, line), *(_leaving(body) if update and loops else [])]
        carried = _carried(body, [*conditions, *(_sources(body) if update else [])])
        # Local variables of a function without a loop do not outlive its call.
        yield from ((name, partly) for name, partly in carried.items() if loops or owners_of(name))
    for block in full[len(loops) :] if loops else []:
        yield from ((name, False) for name in _drawn(block))


def _drawn(block: ast.AST) -> Iterator[str]:
    """Yield the variables whose next item ``block`` takes by ``next``, and which it does not write."""
    written = {name for name, writes in _uses(block) if writes}
    for node in ast.walk(block):
        match node:
            case ast.Call(func=ast.Name(id="next"), args=[source, *_]) if chain(source) not in {"", *written}:
                yield chain(source)


def _sources(node: ast.AST) -> list[ast.AST]:
    """Return the nodes on which the losses, learning rates and updates in ``node`` depend."""
    found = [*_values(node), *(source for child in ast.iter_child_nodes(node) for source in _sources(child))]
    return [*found, node.test] if found and isinstance(node, ast.If) else found


def _values(node: ast.AST) -> list[ast.AST]:
    """Return the nodes from which one statement or call sets a rate, computes gradients or moves weights.

    A rate is a setting of a parameter group that schedules change. It is set by ``group["lr"] = ...``, or by a call of
    a function whose name begins with ``lr``, ``learning_rate`` or ``scheduler``, also after a dot or an underscore.
    An average of weights is moved by a product in place, of what is no number. An optimizer of the script moves weights
    by anything in its ``step``. An attribute of a library's module is a setting of the loss (``dropout.p``).
    """
    match node:
        case CallWithBody(updates=True, body=body):
            return list(body)
        case (
            ast.Assign(targets=[ast.Subscript(slice=ast.Constant(value=name))], value=value)
            | ast.AugAssign(target=ast.Subscript(slice=ast.Constant(value=name)), value=value)
        ) if name in _SCHEDULED:
            return [value]
        case ast.Call(func=ast.Attribute(attr="backward", value=loss), args=arguments):
            return [loss, *arguments]
        case ast.Call(func=ast.Attribute(attr="mul_" | "lerp_"), args=arguments):
            return list(arguments)
        case ast.AugAssign(op=ast.Mult(), target=target, value=value) if not _is_number(chain(target)):
            return [value]
        case (
            ast.Assign(targets=[ast.Attribute() as target]) | ast.AugAssign(target=ast.Attribute() as target)
        ) if is_of_library(_now(chain(target.value))):
            return [target, node.value]
        case ast.Expr(value=ast.Call(func=ast.Name() | ast.Attribute() as called) as call) if (
            _SETS_RATES.search(_dotted(called))
        ):
            return [*call.args, *(keyword.value for keyword in call.keywords)]
    return []


def _is_number(name: str) -> bool:
    return isinstance(_now(name), int | float)


def _changes(name: str, method: str) -> bool:
    """Return whether a call of ``method`` writes the dict or list that the variable is now."""
    return method in _CHANGES and isinstance(_now(name), dict | list)


def _now(name: str) -> object:
    return values_of([name]).get(name)


def _dotted(node: ast.expr) -> str:
    """Return a variable with its attributes as text: ``self.scheduler.step``. Other parts are left out."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the variables on which the values of expressions depend."""
    return {name for node in nodes for name, _ in _uses(node, results=True)}


def _carried(block: ast.AST, wanted: Iterable[ast.AST]) -> dict[str, bool]:
    """Return the names on which expressions depend in ``block``, and which it reads before it writes them.

    The value is True if some steps write the variable first (``PlacedVariable.partly``).
    """
    flow = _DataFlow(block)
    for expression in wanted:
        flow.want(expression)
    left = list(_assigned(block))
    while found := [(node, tests) for node, tests in left if _value(node) and flow.reaches(node)]:
        left = [each for each in left if each not in found]
        for node, tests in found:
            indices = [target.slice for target in _targets(node) if isinstance(target, ast.Subscript)]
            for source in (_value(node), *tests, *indices):
                if source is not None:
                    flow.want(source)
    items = list(_items(block))
    always, first = _first_uses(items, set()), _first_uses(items, flow.written)
    read = [name for name, writes in first.items() if not writes and name in flow.wanted]
    # A new object has other attributes and elements. Its methods are no variables, so they stand for the object.
    methods = dict(_methods_in(block))
    return {
        name if name in flow.written else methods.get(name, name): always[name]
        for name in read
        if not flow.written.isdisjoint((*owners_of(name), name))
    }


def _methods_in(block: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the name of each method that ``block`` calls (``past.mean``), with that of its object."""
    for node in ast.walk(block):
        match node:
            case ast.Call(func=ast.Attribute(value=owner) as called) if chain(called):
                yield chain(called), chain(owner)


class _DataFlow:
    """The assignments of a block that may reach the wanted expressions in it.

    Theory. A variable that each turn of a loop writes before it reads it does not outlive the turn. Then only the
    assignments of the same turn before an expression reach it: what an evaluation after the update assigns to the name
    of the batch or of the prediction has no part in the loss. An inner loop around the expression that does not write
    the variable first may carry it to its next turn, so there all assignments in the inner loop count.

    Args:
        block: the loop. All assignments reach an expression that is not in it, or that is in a function of it.

    Attributes:
        written: the names that the block writes.
        wanted: the names in the wanted expressions.
    """

    def __init__(self, block: ast.AST) -> None:
        self._number: dict[int, int] = {}  # of each node, in the order of the source
        self._end: dict[int, int] = {}  # the number of the last node in each loop
        self._loops: dict[int, tuple[ast.AST, ...]] = {}  # around each node, the outermost first
        self._first: dict[int, set[str]] = {}  # see _written_first
        # The parts of the block in which an assignment to a name reaches a wanted expression.
        self._parts: dict[str, set[tuple[float, float]]] = {}
        self.written = _written([block])
        self.wanted: set[str] = set()
        self._add(block, ())

    def _add(self, node: ast.AST, loops: tuple[ast.AST, ...]) -> None:
        self._number[id(node)] = len(self._number)
        if isinstance(node, _Loop) or not loops:
            loops = (*loops, node)
        self._loops[id(node)] = loops
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):  # runs later
                self._add(child, loops)
        self._end[id(node)] = len(self._number)

    def _written_first(self, loop: ast.AST) -> set[str]:
        """Return the variables that each turn of ``loop`` writes before it reads them or an attribute of them."""
        if id(loop) not in self._first:
            uses = _first_uses(_items(loop), self.written)
            read = {each for name, writes in uses.items() if not writes for each in owners_of(name)}
            self._first[id(loop)] = {name for name, writes in uses.items() if writes} - read
        return self._first[id(loop)]

    def want(self, expression: ast.AST) -> None:
        """Want what the value of ``expression`` depends on."""
        for name in _names_in([expression]):
            self.wanted.add(name)
            # A variable is also wanted if an attribute or element of it is.
            for each in (name, *owners_of(name)):
                self._parts.setdefault(each, set()).add(self._part(each, expression))

    def _part(self, name: str, expression: ast.AST) -> tuple[float, float]:
        """Return the first and last number of nodes whose assignments to ``name`` may reach ``expression``."""
        loops = self._loops.get(id(expression), ())
        for depth, loop in reversed(list(enumerate(loops))):
            if name in self._written_first(loop):
                carrying = loops[depth + 1] if depth + 1 < len(loops) else expression
                return self._number[id(loop)], self._end[id(carrying)]
        return 0, math.inf

    def reaches(self, assignment: _Assignment) -> bool:
        """Return whether an assignment reaches a wanted expression."""
        names = [name for target in _targets(assignment) for name, _ in _uses(target)]
        parts = [part for name in names for part in self._parts.get(name, ())]
        number = self._number.get(id(assignment))
        # An attribute or an element may belong to an object that has another name as well.
        if number is None or not all(_is_of_names(target) for target in _targets(assignment)):
            return bool(parts)
        return any(first <= number <= last for first, last in parts)


def _is_of_names(target: ast.expr) -> bool:
    """Return whether an assignment to ``target`` writes variables alone, and no attributes or elements."""
    match target:
        case ast.Name():
            return True
        case ast.Starred(value=inner):
            return _is_of_names(inner)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(_is_of_names, parts))
    return False


def _first_uses(items: Iterable[_Item], varying: set[str]) -> dict[str, bool]:
    """Return whether the first use of each name is a write. A name is left out if not every step uses it.

    Args:
        varying: variables that differ from step to step. Of an ``if`` that depends on one of them, each step takes
            another branch. What a branch of another ``if`` writes counts as written.
    """
    first: dict[str, bool] = {}
    _follow(items, varying, first, {})
    return first


def _follow(
    items: Iterable[_Item], varying: set[str], first: dict[str, bool], known: dict[str, dict[str, bool]]
) -> None:
    """Add the first uses in ``items`` to ``first``.

    Args:
        known: what the branches before have written, by their condition.
    """
    for item in items:
        if not isinstance(item, _Branches):
            name, writes = item
            first.setdefault(name, writes or any(first.get(owner, False) for owner in owners_of(name)))
            continue
        condition = _text_of(item.test)
        branches = {**known.get(condition, {}), **first}, dict(first)
        for uses, branch in zip(item.uses, branches, strict=True):
            _follow(uses, varying, branch, known)
        known[condition] = {name: True for name, writes in branches[0].items() if writes}
        first |= {name: False for branch in branches for name, writes in branch.items() if not writes}
        tested = {owner for name in _names_in([item.test]) for owner in (name, *owners_of(name))}
        if varying.isdisjoint(tested):
            written = set(branches[0]) | set(branches[1])
        else:
            stay = [set(branch) for branch, leaves in zip(branches, item.leave, strict=True) if not leaves]
            written = set.intersection(*(stay or map(set, branches)))
        first.update((name, True) for name in written if name not in first)


def _text_of(test: ast.expr) -> str:
    """Return a text that is equal for equal conditions. A call of the script may have another value each time."""
    called = any(isinstance(node, CallWithBody) for node in ast.walk(test))
    return f"{id(test)}" if called else ast.unparse(test)


@cache
def _loops_around(file: str, line: int) -> list[ast.AST]:
    return [node for node in _inside_scope(file, line) if isinstance(node, _Loop)]


def _inside_scope(file: str, line: int) -> list[ast.AST]:
    """Return the function (or module) of a line, and in it the nodes that contain the line, the outermost first."""
    tree = tree_of(file)
    around = [tree, *_enclosing(tree, line)]
    return around[max(index for index, node in enumerate(around) if isinstance(node, _Scope)) :]


def _enclosing(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that contain ``line``, the outermost first."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", line + 1) <= line <= (getattr(child, "end_lineno", None) or 0):
            yield child
            yield from _enclosing(child, line)
            return


def _skips(block: ast.AST, line: int) -> Iterator[ast.expr]:
    """Yield the conditions before ``line`` under which the rest of ``block`` does not run."""
    for node in ast.walk(block):
        if (
            isinstance(node, ast.If)
            and node.lineno < line
            and any(isinstance(n, _LEAVES) for n in ast.walk(node))
        ):
            yield node.test


def _leaving(loop: ast.AST, *, inner: bool = False) -> Iterator[ast.expr]:
    """Yield the conditions under which the script leaves ``loop``: by ``break``, ``return`` or ``sys.exit()``.

    Args:
        inner: this is a part of another loop in the loop, which a ``break`` leaves.
    """
    parts = [*loop.results()] if isinstance(loop, CallWithBody) else list(ast.iter_child_nodes(loop))
    for node in parts:
        if isinstance(node, _Scope | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and any(map(partial(_ends, inner=inner), (*node.body, *node.orelse))):
            yield node.test
        yield from _leaving(node, inner=inner or isinstance(node, _Loop))


def _ends(node: ast.AST, *, inner: bool) -> bool:
    match node:
        case ast.Return():
            return True
        case ast.Break():
            return not inner
        case ast.Call(func=called) if chain(called) in _ENDS:
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return False
    parts = node.results() if isinstance(node, CallWithBody) else ast.iter_child_nodes(node)
    return any(_ends(child, inner=inner or isinstance(node, _Loop)) for child in parts)


def _assigned(
    node: ast.AST, tests: tuple[ast.expr, ...] = ()
) -> Iterator[tuple[_Assignment, tuple[ast.expr, ...]]]:
    """Yield the assignments in ``node``, each with the conditions around it, the outermost first."""
    if isinstance(node, _Assignment):
        yield node, tests
    for child in ast.iter_child_nodes(node):
        inside = isinstance(node, ast.If) and child is not node.test
        yield from _assigned(child, (*tests, node.test) if inside else tests)  # type: ignore[attr-defined]


def _value(node: _Assignment) -> ast.expr | None:
    return node.iter if isinstance(node, ast.For) else node.value


def _targets(node: _Assignment) -> Iterable[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _uses(node: ast.AST, *, results: bool = False) -> Iterator[_Use]:
    """Yield the uses of :func:`_items`, one after the other."""
    return _flat(_items(node, results=results))


def _flat(items: Iterable[_Item]) -> Iterator[_Use]:
    for item in items:
        if isinstance(item, _Branches):
            for uses in item.uses:
                yield from _flat(uses)
        else:
            yield item


def _items(node: ast.AST, *, results: bool = False) -> Iterator[_Item]:
    """Yield the variables that ``node`` uses, in the order of execution, and whether it writes them.

    An attribute of a variable is a variable of its own (``self.tick``), and so is an element with a constant text as
    its key (``seen["x"]``). Another element is a part of its container.

    Args:
        results: of the body of a called function, only use what its value depends on.
    """
    match node:
        case ast.If():
            yield from _items(node.test, results=results)
            body, other = (
                [item for part in branch for item in _items(part)] for branch in (node.body, node.orelse)
            )
            yield _Branches(node.test, (body, other), (_leaves_turn(node.body), _leaves_turn(node.orelse)))
        case ast.AugAssign():
            yield from ((name, False) for name, _ in _uses(node.target))
            yield from _items(node.value)
            yield from _items(node.target)
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            if node.value is not None:
                yield from _items(node.value, results=results)
            for target in _targets(node):
                yield from _items(target)
        case ast.For():
            for part in (node.iter, node.target, *node.body, *node.orelse):
                yield from _items(part)
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            own = {name for each in node.generators for name, _ in _uses(each.target)}
            for child in ast.iter_child_nodes(node):
                inside = _uses(child, results=results)
                yield from (use for use in inside if own.isdisjoint((use[0], *owners_of(use[0]))))
        case ast.Name():
            yield node.id, isinstance(node.ctx, ast.Store)
        case ast.Attribute() if name := chain(node):
            if not isinstance(node.value, ast.Name):
                yield from _items(node.value)
            yield name, isinstance(node.ctx, ast.Store)
        case ast.Subscript(slice=ast.Constant(value=str(key))) if chain(node.value) and not set(key) & set(
            '"[]'
        ):
            writes = not isinstance(node.ctx, ast.Load)
            if writes:
                yield chain(node.value), False
            yield f'{chain(node.value)}["{key}"]', writes
        case ast.Subscript(value=ast.Name() | ast.Attribute()):
            yield from _items(node.slice, results=results)
            yield from ((name, isinstance(node.ctx, ast.Store)) for name, _ in _uses(node.value))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            for part in node.body if isinstance(node.body, list) else []:
                yield from _items(part)
        case ast.Call(func=ast.Attribute(attr=attribute, value=owner)) if (
            not results and chain(owner) and (attribute in _FILLS or _changes(chain(owner), attribute))
        ):
            if attribute != "clear":
                yield chain(owner), False
            for child in ast.iter_child_nodes(node):
                yield from _items(child)
            yield chain(owner), True
        case CallWithBody() if results:
            for part in node.results():
                yield from _items(part, results=True)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _items(child, results=results)


def _leaves_turn(branch: Sequence[ast.stmt]) -> bool:
    return bool(branch) and isinstance(branch[-1], (*_LEAVES, ast.Raise))
