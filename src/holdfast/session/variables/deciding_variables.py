"""The variables of a script that may decide about a collective or an update: a search in its source.

Theory. A loop makes a collective or an update under conditions. Such a condition is an ``if`` around it, or an
earlier ``if`` with a ``continue``. An update also depends on the loss, on the learning rate, and on the conditions
under which the script leaves its loops (an early stop). Each of these expressions may depend on a variable that a
step gets from the previous step. In a replacement such a variable has its initial value again, so the expression may
have another value than on the other ranks. The search starts at the names in these expressions and follows the values
in the loop (``data_flow.py``).

Functions of the script are inlined into their calls (``called_bodies.py``). So the attributes that the methods of an
object read and write are found under the names ``object.attribute``. A generator from which the block takes items is
also found, because its items depend on the number of items that it has yielded.

The names are used in messages. No names are found if the source is not available, or if a condition has another form.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from types import EllipsisType
from typing import NamedTuple

from holdfast.runtime.worker.script_frames import LIBRARIES, OURS, frames_outside, owners_of
from holdfast.session.variables.called_bodies import with_bodies
from holdfast.session.variables.called_functions import (
    LOCAL,
    CallWithBody,
    of_script,
    tree_of,
)
from holdfast.session.variables.data_flow import (
    APPENDS,
    LEAVES,
    Assignment,
    Loop,
    assigned,
    assigned_value,
    carried,
    expressions_behind,
    names_in,
    resets,
    targets,
    value_now,
    written,
    written_first,
)
from holdfast.session.variables.script_trees import chain
from holdfast.session.variables.update_sources import changed, dotted, sources

Places = tuple[tuple[str, int], ...]

VARIABLES_MAX = 4  # in a message
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_ADDS = (*APPENDS, "add", "update", "setdefault")
_EMPTIES = ("clear", "pop", "popleft", "popitem", "remove", "discard", "zero_", "fill", "fill_")
_ENDS = ("exit", "quit", "sys.exit", "os._exit")
_MARK = re.compile(f"{LOCAL}[0-9]+")
_SAVES = re.compile(r"(^|[._])(save|copyfile)")


class PlacedVariable(NamedTuple):
    """A variable of the script and its place in the source.

    Attributes:
        name: its name, as in :func:`holdfast.runtime.worker.script_frames.values_of`.
        place: file and line that the stack frame with the variable executes.
        partly: True if some steps write the variable before reading it, so all its values may follow from the number
            of the step.
    """

    name: str
    place: tuple[str, int]
    partly: bool


def all_places() -> Places:
    """Return file and line of all stack frames of the script in this thread, the innermost frame first."""
    frames = frames_outside((OURS, *LIBRARIES, "<"))  # "<frozen runpy>"
    places = ((frame.f_code.co_filename, frame.f_lineno) for frame in frames)
    return tuple(place for place in places if of_script(place[0]))


def places_in_script() -> Places:
    """Return file and line of this thread's stack frames, from the innermost to the outermost frame that is in a loop.

    Frames of libraries are left out.
    """
    found = all_places()
    loops = [index for index, place in enumerate(found) if loops_around(*place)]
    return found[: loops[-1] + 1] if loops else found[:1]


def described(places: Places) -> str:
    """Return the innermost and the outermost of ``places`` as text: ``stats.py:98, from train.py:31``."""
    shown = dict.fromkeys((places[0], places[-1]))
    return ", from ".join(f"{os.path.basename(file)}:{line}" for file, line in shown)


@cache
def deciding_variables(places: Places, *, update: bool = False) -> tuple[str, ...]:
    """Return the names of variables that may decide whether the code at ``places`` runs.

    Args:
        update: the innermost place is an update. Then also return variables on which the loss and the learning rate
            depend.
    """
    return tuple(dict.fromkeys(each.name for each in placed_variables(places, update=update)))


@cache
def placed_variables(
    places: Places, *, update: bool = False, state: frozenset[str] = frozenset()
) -> tuple[PlacedVariable, ...]:
    """Return the variables of :func:`deciding_variables`, each with the place of its stack frame.

    Args:
        places: file and line of the stack frames, the innermost frame first.
        update: as in :func:`deciding_variables`.
        state: names from :func:`stores` that are state of the session. A change of them in a loop counts as an
            update.
    """
    found: dict[tuple[str, tuple[str, int]], bool] = {}
    for depth, place in reversed(list(enumerate(places))):
        in_block = any(map(has_loop_over_steps, places[depth + 1 :]))
        for name, partly in _of_place(place, places[:depth], update, state, in_block=in_block):
            if LOCAL not in name:
                found[name, place] = partly and found.get((name, place), True)
        for at in _summed(places[: depth + 1], state) if update else ():
            found.setdefault(at, False)
    return tuple(PlacedVariable(*at, partly) for at, partly in found.items())


def file_variables(places: Places) -> tuple[PlacedVariable, ...]:
    """Return the variables that may decide whether the loops at ``places`` save a file.

    A call counts as the save of a file if the name of the function, or a part of the name after a dot or an
    underscore, begins with ``save`` or ``copyfile``.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    found: dict[PlacedVariable, None] = {}
    for depth, place in reversed(list(enumerate(places))):
        loop = outermost_loop(places[: depth + 1])
        tests = [node.test for node in ast.walk(loop) if isinstance(node, ast.If) and _has_save(node)]
        names = carried(loop, tests).items()
        found.update((PlacedVariable(name, place, partly), None) for name, partly in names)
    return tuple(each for each in found if LOCAL not in each.name)


@cache
def stores(places: Places) -> tuple[PlacedVariable, ...]:
    """Return the containers, elements, attributes and tensors that the loops at ``places`` change in place.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    found: dict[PlacedVariable, None] = {}
    for depth, place in enumerate(places):
        names = sorted(changed(outermost_loop(places[: depth + 1])))
        found.update((PlacedVariable(name, place, partly=False), None) for name in names)
    return tuple(each for each in found if LOCAL not in each.name)


def _has_save(node: ast.If) -> bool:
    return any(isinstance(each, ast.Call) and _SAVES.search(dotted(each.func)) for each in ast.walk(node))


@cache
def loops_around(file: str, line: int) -> list[ast.AST]:
    """Return the loops around a line within its function (or module), the outermost loop first."""
    return [node for node in inside_scope(file, line) if isinstance(node, Loop)]


def scope_of(file: str, line: int) -> ast.AST:
    """Return the syntax tree of the function that contains a line, or of the module."""
    return inside_scope(file, line)[0]


@cache
def lasting_variables(places: Places) -> frozenset[str]:
    """Return the variables of the outermost stack frame that the script does not reset at the start of an epoch.

    The outermost loop (with the functions that it calls) sets such a variable in two ways only: from its old value,
    or under a condition that does not depend on the position in an epoch.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    loop = outermost_loop(places)
    reset = _names_of_items(loop)
    for assignment, tests in assigned(loop):
        value = assigned_value(assignment)
        if value is None or isinstance(assignment, ast.AugAssign):
            continue
        names = written(targets(assignment))
        if not names <= names_in([value]) and all(map(_is_position, tests[-1:])):
            reset |= names
    for meter, tests in resets(loop):
        if all(map(_is_position, tests[-1:])):
            reset.add(meter)
    return _without(written([loop]), reset)


def renewed_containers(places: Places) -> frozenset[str]:
    """Return the names of containers that the loops at ``places`` replace by new ones, computed from the old ones.

    The loops are those at ``places``, the stack frames from the innermost to the outermost. Only containers of
    objects are returned. An example is ``average = {name: 0.9 * average[name] + 0.1 * weights[name] for name in
    weights}``.
    """
    found: set[str] = set()
    for depth in range(len(places)):
        loop = outermost_loop(places[: depth + 1])
        # One search for all assignments to a container: a function that fills a cache may be inlined many times.
        values: dict[str, list[ast.AST]] = {}
        for assignment, _ in assigned(loop):
            if (value := assigned_value(assignment)) is None:
                continue
            for name in written(targets(assignment)):
                if LOCAL not in name and _holds_objects(value_now(name)):
                    values.setdefault(name, []).append(value)
        found |= {name for name, each in values.items() if name in carried(loop, each)}
    return frozenset(found)


def set_by_each_step(places: Places) -> frozenset[str]:
    """Return the variables and attributes that each step sets before reading them, in the loops at ``places``.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    loops = (outermost_loop(places[: depth + 1]) for depth in range(len(places)))
    return frozenset(name for loop in loops for name in written_first(loop) if LOCAL not in name)


def _holds_objects(value: object) -> bool:
    items = (
        dict.values(value) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    )
    first = next(iter(items), None)
    return not isinstance(first, bool | int | float | str | None)


@cache
def counts(places: Places) -> frozenset[str]:
    """Return the variables of the outermost stack frame that its loop changes only by additions (``seen += 1``).

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    loop = outermost_loop(places)
    others = _names_of_items(loop)
    added: set[str] = set()
    for assignment, _ in assigned(loop):
        names = written(targets(assignment))
        if _is_sum(assignment):
            added |= names
        else:
            others |= names
    return _without(added, others)


@cache
def filled(places: Places) -> frozenset[str]:
    """Return the containers and arrays of the outermost stack frame that its loop fills, and never empties or replaces.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    loop = outermost_loop(places)
    others = _names_of_items(loop)
    found: set[str] = set()
    for assignment, _ in assigned(loop):
        for target in targets(assignment):
            adds = isinstance(assignment, ast.AugAssign) or _is_item(target)
            (found if adds else others).update(written([target]))
    for node in ast.walk(loop):
        match node:
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _ADDS:
                found.add(chain(owner))
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _EMPTIES:
                others.add(chain(owner))
            case ast.Delete():
                others |= written(node.targets)
    return _without(found, others)


def _is_item(target: ast.expr) -> bool:
    """Return whether ``target`` is one item of a container or an array: not all items, and not one with a name."""
    match target:
        case ast.Subscript(slice=ast.Slice() | ast.Constant(value=str() | EllipsisType())):
            return False
    return isinstance(target, ast.Subscript)


@cache
def loops_with_bodies(places: Places) -> tuple[ast.AST, ...]:
    """Return the loops of the outermost stack frame, the outermost loop first, with bodies in their calls.

    All are parts of one tree, which no caller changes.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    return tuple(with_bodies(places[-1], loops_around(*places[-1]), places[:-1]))


def outermost_loop(places: Places) -> ast.AST:
    """Return the first of :func:`loops_with_bodies`; an empty module if there is no loop."""
    return next(iter(loops_with_bodies(places)), ast.Module([], []))


def loops_to_steps(places: Places) -> tuple[ast.AST, ...]:
    """Return those of :func:`loops_with_bodies` down to that over steps; only the first if none is."""
    over_steps = _loops_over_steps(scope_of(*places[-1]))
    around = enumerate(loops_around(*places[-1]), 1)
    numbers = (number for number, loop in around if any(loop is each for each in over_steps))
    return loops_with_bodies(places)[: max(numbers, default=1)]


def block_at(places: Places) -> ast.AST | None:
    """Return the block (``with step``) of the outermost stack frame. The functions that it calls are inlined.

    The result is None if there is no block in a loop.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    loops = loops_around(*places[-1])
    inner = inside_scope(*places[-1])
    blocks = _blocks(inner[inner.index(loops[0]) :]) if loops else []
    return next(iter(with_bodies(places[-1], blocks, places[:-1])), None)


def _blocks(inside: Iterable[ast.AST]) -> list[ast.With]:
    """Return a list with the outermost ``with`` statement in ``inside``; empty if there is none."""
    return [node for node in inside if isinstance(node, ast.With)][:1]


def _names_of_items(loop: ast.AST) -> set[str]:
    """Return the variables that ``for`` loops and ``with`` statements in ``loop`` assign."""
    found: set[str] = set()
    for node in ast.walk(loop):
        match node:
            case (
                ast.For(target=target)
                | ast.comprehension(target=target)
                | ast.withitem(optional_vars=ast.expr() as target)
            ):
                found |= written([target])
    return found


def _is_sum(assignment: Assignment) -> bool:
    """Return whether the assignment adds to its variable: ``n += 1`` or ``n = n + 1``."""
    match assignment:
        case ast.AugAssign(op=ast.Add()):
            return True
        case ast.Assign(targets=[target], value=ast.BinOp(op=ast.Add(), left=left, right=right)):
            return chain(target) in {chain(left), chain(right)} - {""}
    return False


def _without(names: Iterable[str], left_out: set[str]) -> frozenset[str]:
    """Return ``names`` without the variables in ``left_out``, their attributes and their elements."""
    return frozenset(name for name in names if left_out.isdisjoint((*owners_of(name), name)))


def _is_position(test: ast.expr) -> bool:
    """Return whether a condition tests the position in an epoch: ``step.last_in_epoch``, ``i % n``, ``i == 0``."""
    for node in ast.walk(test):
        match node:
            case ast.Attribute(attr="last_in_epoch") | ast.BinOp(op=ast.Mod()):
                return True
            case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
                return True
    return False


def _of_place(
    place: tuple[str, int], inside_it: Places, update: bool, state: frozenset[str], *, in_block: bool
) -> Iterator[tuple[str, bool]]:
    """Yield the variables that the code at one place carries and that decide about it, each with its ``partly``.

    Args:
        place, inside_it, update, state: as in :func:`placed_variables`. ``inside_it``: the places further inside.
        in_block: the block of a step calls the function at ``place``.
    """
    file, line = place
    scope, *inner = inside_scope(file, line)
    loops = loops_around(file, line)
    inside = inner[inner.index(loops[0]) :] if loops and update else []
    blocks = _blocks(inside)
    tests = [node for node in inner if isinstance(node, ast.If)]
    ends = update and in_block and bool(loops) and _ends_with_call(scope)
    nodes = [*([scope] if ends else []), *loops, *blocks, *tests]
    full = with_bodies(place, nodes, inside_it) if loops else [scope, *tests]
    # A block runs as a whole, so its inner loops carry nothing to another step.
    carriers = (
        full[:1] if ends or not loops else full[: _number_to_steps(scope, loops) if update else len(loops)]
    )
    inner_loops = [node for node in full[len(carriers) :] if isinstance(node, Loop)]
    leaving = [test for node in inner_loops for test in _leaving(node)] if update else []
    for loop, body in zip([scope] if ends else loops or [scope], carriers, strict=False):
        conditions = [node.test for node in full if isinstance(node, ast.If | ast.While)]
        conditions += [
            *_skips(loop, line),
            *leaving,
            *(_leaving(body) if update and loops and not ends else []),
        ]
        names = carried(body, [*conditions, *(sources(body, state) if update else [])])
        # Local variables of a function without a loop over steps do not outlive its call.
        lasting = names if loops and not ends else _outside_names(scope)
        yield from ((name, partly) for name, partly in names.items() if name in lasting or owners_of(name))
    for block in full[len(full) - len(tests) - len(blocks) : len(full) - len(tests)] if loops else []:
        yield from ((name, False) for name in _drawn(block))


def _number_to_steps(scope: ast.AST, loops: Sequence[ast.AST]) -> int:
    """Return the number of loops up to the innermost loop over steps; of all loops if there is no loop over steps."""
    over_steps = _loops_over_steps(scope)
    found = (depth for depth, loop in enumerate(loops, 1) if any(loop is each for each in over_steps))
    return max(found, default=len(loops))


def _ends_with_call(scope: ast.AST) -> bool:
    """Return whether ``scope`` is a function that yields no values, so its local variables end with its call."""
    yields = any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(scope))
    return not isinstance(scope, ast.Module) and not yields


def _outside_names(scope: ast.AST) -> set[str]:
    """Return the variables that a function takes from outside by ``global`` or ``nonlocal``."""
    declared = (node for node in ast.walk(scope) if isinstance(node, ast.Global | ast.Nonlocal))
    return {name for node in declared for name in node.names}


def _summed(places: Places, state: frozenset[str]) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield the variables that a loop over steps carries, and that code after the loop uses for an update.

    An example is the loss of an epoch, the argument of ``scheduler.step(loss)``. The loop over epochs does not carry
    the loss, because each epoch resets it before the loop over steps.
    """
    epochs = outermost_loop(places)
    over_steps = [loop for loop in _loops_over_steps(epochs) if loop is not epochs]
    if not over_steps:
        return
    wanted = expressions_behind(epochs, [*_leaving(epochs), *sources(epochs, state)])
    inner = [depth for depth, at in enumerate(places[:-1]) if _loops_over_steps(inside_scope(*at)[0])]
    for name in (name for loop in over_steps for name in carried(loop, wanted)):
        if LOCAL not in name:
            yield name, places[-1]
        elif inner:
            yield _MARK.sub("", name), places[inner[0]]
    calls = [each for node in wanted for each in ast.walk(node) if isinstance(each, CallWithBody)]
    if inner and any(map(_loops_over_steps, calls)):
        yield from _returned_sums(places[: inner[0] + 1])


def _returned_sums(places: Places) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield those variables carried by a loop over steps on which the result of the function around the loop depends.

    In this search, methods of local objects are inlined (``meter.update(loss)``). In a search from the caller of the
    function they are not.
    """
    function = with_bodies(places[-1], inside_scope(*places[-1])[:1], places[:-1])[0]
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return) and node.value]
    wanted = expressions_behind(function, returned)
    for loop in _loops_over_steps(function):
        yield from ((name, places[-1]) for name in carried(loop, wanted) if LOCAL not in name)


def _loops_over_steps(tree: ast.AST) -> list[ast.For]:
    """Return the loops over ``s.steps(...)``, including loops over a variable with a progress bar around it."""
    bars: set[str] = set()
    for assignment, _ in assigned(tree):
        value = assigned_value(assignment)
        if value is not None and not isinstance(assignment, ast.For) and _has_steps(value):
            bars |= written(targets(assignment))
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    return [loop for loop in loops if _has_steps(loop.iter) or not bars.isdisjoint(names_in([loop.iter]))]


@cache
def has_loop_over_steps(place: tuple[str, int]) -> bool:
    """Return whether the code at ``place`` is in a loop over steps of its function."""
    over_steps = _loops_over_steps(scope_of(*place))
    return any(loop is each for loop in loops_around(*place) for each in over_steps)


def is_over_steps(loop: ast.For, scope: ast.AST) -> bool:
    """Return whether ``loop`` is a loop over steps of the function (or module) ``scope``."""
    return any(loop is each for each in _loops_over_steps(scope))


def _has_steps(value: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(value) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr == "steps" for each in calls)


def _drawn(block: ast.AST) -> Iterator[str]:
    """Yield the iterators from which ``block`` takes an item with ``next``, unless ``block`` assigns them."""
    own = {name for assignment, _ in assigned(block) for name in written(targets(assignment))}
    for node in ast.walk(block):
        match node:
            case ast.Call(func=ast.Name(id="next"), args=[source, *_]) if chain(source) not in {"", *own}:
                yield chain(source)


def inside_scope(file: str, line: int) -> list[ast.AST]:
    """Return the function (or module) of a line, then the nodes in it that contain the line, outermost first."""
    tree = tree_of(file)
    around = [tree, *_enclosing(tree, line)]
    return around[max(index for index, node in enumerate(around) if isinstance(node, _Scope)) :]


def _enclosing(node: ast.AST, line: int) -> Iterator[ast.AST]:
    """Yield the nodes below ``node`` that contain ``line``, the outermost node first."""
    for child in ast.iter_child_nodes(node):
        if getattr(child, "lineno", line + 1) <= line <= (getattr(child, "end_lineno", None) or 0):
            yield child
            yield from _enclosing(child, line)
            return


def _skips(block: ast.AST, line: int) -> Iterator[ast.expr]:
    """Yield the conditions of ``if`` statements before ``line`` that may leave ``block`` early (``continue``)."""
    for node in ast.walk(block):
        if (
            isinstance(node, ast.If)
            and node.lineno < line
            and any(isinstance(n, LEAVES) for n in ast.walk(node))
        ):
            yield node.test


def _leaving(loop: ast.AST, *, inner: bool = False) -> Iterator[ast.expr]:
    """Yield the conditions under which the script leaves ``loop``: by ``break``, ``return`` or ``sys.exit()``.

    Args:
        inner: this part is in an inner loop, so a ``break`` leaves only the inner loop.
    """
    parts = [*loop.results()] if isinstance(loop, CallWithBody) else list(ast.iter_child_nodes(loop))
    for node in parts:
        if isinstance(node, _Scope | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and any(map(partial(_ends, inner=inner), (*node.body, *node.orelse))):
            yield node.test
        yield from _leaving(node, inner=inner or isinstance(node, Loop))


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
    return any(_ends(child, inner=inner or isinstance(node, Loop)) for child in parts)
