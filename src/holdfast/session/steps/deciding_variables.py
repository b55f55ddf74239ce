"""The variables of a script that may decide about a collective or an update: a search in its source.

Theory. A loop makes a collective or an update under conditions: an ``if`` around it, or an ``if`` before it that
continues with the next step. An update also depends on the loss and on the learning rate. All this differs between
ranks if it depends on a variable that each step takes over from the step before. In a replacement such a variable
begins again. So the search starts at the names in these expressions and follows the assignments of the loop. It keeps
the names that the loop reads before it writes them.

A call of a function of the script counts with the body of that function (``called_bodies.py``). So attributes of an
object, which its methods read and write, are found by the names ``object.attribute``. A generator that the block draws
from is found as well: what it yields depends on the number of draws.

The result is text for an error. Source that is not there, and conditions in other forms, give no names.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache

from holdfast.runtime.worker.script_frames import LIBRARIES, OURS, frames_outside, owners_of, values_of
from holdfast.session.steps.called_bodies import LOCAL, CallWithBody, chain, of_script, tree_of, with_bodies

Places = tuple[tuple[str, int], ...]

VARIABLES_MAX = 4  # in a message
_Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef
_Loop = ast.For | ast.While
_LEAVES = (ast.Continue, ast.Break, ast.Return)
_IF, _END = "if ", "end "
"""Marks among the names of variables."""
_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
_FILLS = ("append", "appendleft", "extend", "extendleft", "popleft")
"""Methods that write a list or a deque."""
_SETS_RATES = re.compile(r"(^|[._])(lr|learning_rate|scheduler)")


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
    return tuple(dict.fromkeys(name for name, _ in placed_variables(places, update=update)))


@cache
def placed_variables(
    places: Places, *, update: bool = False, branches: bool = True
) -> tuple[tuple[str, tuple[str, int]], ...]:
    """Return the names of :func:`deciding_variables`, each with the place in whose frame it is a variable.

    Args:
        branches: False: leave out variables that some steps write before they read them.
    """
    found = (
        (name, place)
        for depth, place in reversed(list(enumerate(places)))
        for name in _of_place(place, places[:depth], update, branches)
    )
    return tuple(dict.fromkeys((name, place) for name, place in found if LOCAL not in name))


@cache
def lasting_variables(places: Places) -> frozenset[str]:
    """Return the names of variables at the outermost of ``places`` that no epoch sets to a value of their begin.

    The outermost loop, with the bodies of the functions that it calls, only adds to them.
    """
    place = places[-1]
    loops = _loops_around(*place)
    body = with_bodies(place, loops, places[:-1])[:1]
    added: set[str] = set()
    assigned: set[str] = set()
    for node in body and ast.walk(body[0]):
        if isinstance(node, ast.AugAssign):
            added |= {name for name, stores in _uses(node.target) if stores}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr):
            names = {name for target in _targets(node) for name, stores in _uses(target) if stores}
            (added if node.value and names <= _names_in([node.value]) else assigned).update(names)
        elif isinstance(node, ast.For | ast.comprehension):
            assigned |= {name for name, stores in _uses(node.target) if stores}
    return frozenset(name for name in added if assigned.isdisjoint((*owners_of(name), name)))


def _of_place(place: tuple[str, int], inside_it: Places, update: bool, branches: bool) -> Iterator[str]:
    file, line = place
    scope, *inner = _inside_scope(file, line)
    loops = _loops_around(file, line)
    inside = inner[inner.index(loops[0]) :] if loops and update else []
    blocks = [node for node in inside if isinstance(node, ast.With)][:1]
    full = with_bodies(place, [*loops, *blocks], inside_it) if loops else [scope]
    for loop, body in zip(loops or [scope], full, strict=False):
        conditions = [node.test for node in inner if isinstance(node, ast.If | ast.While)]
        conditions += _skips(loop, line)
        wanted = _names_in([*conditions, *(_sources(body) if update else [])])
        carried = _carried(body, wanted, branches)
        # Local variables of a function without a loop do not outlive its call.
        yield from carried if loops else (name for name in carried if owners_of(name))
    for block in full[len(loops) :] if loops else []:
        yield from _drawn(block)


def _drawn(block: ast.AST) -> Iterator[str]:
    """Yield the variables whose next item ``block`` takes by ``next``, and which it does not write."""
    written = {name for name, stores in _uses(block) if stores}
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
    by anything in its ``step``.
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
        case ast.Expr(value=ast.Call(func=ast.Name() | ast.Attribute() as called) as call) if (
            _SETS_RATES.search(_dotted(called))
        ):
            return [*call.args, *(keyword.value for keyword in call.keywords)]
    return []


def _is_number(name: str) -> bool:
    return isinstance(values_of([name]).get(name), int | float)


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


def _carried(block: ast.AST, wanted: set[str], branches: bool) -> list[str]:
    """Return the names on which ``wanted`` depends in ``block``, and which it reads before it writes them.

    With ``branches``, a write in a branch that not every step takes does not count for the code after it.
    """
    for assigned in _assignments(block, wanted):
        wanted |= _names_in([assigned])
    written = {name for name, stores in _uses(block) if stores}
    first = _first_uses(_uses(block, varying=frozenset(written if branches else ())))
    return [name for name, stores in first.items() if not stores and name in wanted & written]


def _first_uses(uses: Iterator[tuple[str, bool]]) -> dict[str, bool]:
    """Return whether the first use of each name is a write. A name is left out if only some branches write it.

    Args:
        uses: uses and branches (:func:`_branches`), to the end of the branch or of ``uses``.
    """
    first: dict[str, bool] = {}
    _follow(uses, first, {})
    return first


def _follow(
    uses: Iterator[tuple[str, bool]], first: dict[str, bool], known: dict[str, dict[str, bool]]
) -> bool:
    """Add the uses of one branch to ``first``. Return whether the branch leaves the turn of the loop.

    Args:
        known: what the branches before have written, by their condition.
    """
    for name, stores in uses:
        if name.startswith(_IF):
            taken, other = {**known.get(name, {}), **first}, dict(first)
            leaves = _follow(uses, taken, known), _follow(uses, other, known)
            known[name] = {each: True for each, written in taken.items() if written}
            after = [branch for branch, left in zip((taken, other), leaves, strict=True) if not left]
            first |= {
                each: False for branch in (taken, other) for each, written in branch.items() if not written
            }
            everywhere = set.intersection(*(set(branch) for branch in after or (taken, other)))
            first.update((each, True) for each in everywhere if each not in first)
        elif name == _END:
            return stores
        else:
            first.setdefault(name, stores or any(first.get(owner, False) for owner in owners_of(name)))
    return False


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


def _assignments(block: ast.AST, wanted: set[str]) -> Iterator[ast.expr]:
    """Yield the values that ``block`` assigns to the names in ``wanted``, which may grow meanwhile.

    The index of an element that is assigned counts as well.
    """
    left = [node for node in ast.walk(block) if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr)]
    while True:
        # A variable is also wanted if an attribute or element of it is.
        held = wanted.union(*map(owners_of, wanted))
        found = [
            n for n in left if n.value and any(name in held for t in _targets(n) for name, _ in _uses(t))
        ]
        if not found:
            return
        left = [node for node in left if node not in found]
        yield from (node.value for node in found if node.value is not None)
        yield from (t.slice for node in found for t in _targets(node) if isinstance(t, ast.Subscript))


def _targets(node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> Iterable[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _branches(node: ast.If, varying: frozenset[str]) -> Iterator[tuple[str, bool]]:
    """Yield the uses in both branches of ``node``: the condition as text, then each branch up to a mark of its end.

    The mark says whether the branch leaves the turn of the loop.
    """
    yield _IF + ast.unparse(node.test), False
    for branch in (node.body, node.orelse):
        for part in branch:
            yield from _uses(part, varying=varying)
        yield _END, bool(branch) and isinstance(branch[-1], _LEAVES)


def _uses(
    node: ast.AST, *, results: bool = False, varying: frozenset[str] = frozenset()
) -> Iterator[tuple[str, bool]]:
    """Yield the variables that ``node`` uses, in the order of execution, and whether it writes them.

    An attribute of a variable is a variable of its own (``self.tick``), and so is an element with a constant text as
    its key (``seen["x"]``). Another element is a part of its container.

    Args:
        results: of the body of a called function, only use what its value depends on.
        varying: variables that differ from step to step: mark the branches that depend on them (:func:`_branches`).
    """
    match node:
        case ast.If() if varying and not varying.isdisjoint(
            owner for name in _names_in([node.test]) for owner in (name, *owners_of(name))
        ):
            yield from _uses(node.test)
            yield from _branches(node, varying)
        case ast.AugAssign():
            yield from ((name, False) for name, _ in _uses(node.target))
            yield from _uses(node.value)
            yield from _uses(node.target)
        case ast.Assign() | ast.AnnAssign() | ast.NamedExpr():
            if node.value is not None:
                yield from _uses(node.value, results=results)
            for target in _targets(node):
                yield from _uses(target)
        case ast.For():
            for part in (node.iter, node.target, *node.body, *node.orelse):
                yield from _uses(part, varying=varying)
        case ast.Name():
            yield node.id, isinstance(node.ctx, ast.Store)
        case ast.Attribute() if name := chain(node):
            if not isinstance(node.value, ast.Name):
                yield from _uses(node.value)
            yield name, isinstance(node.ctx, ast.Store)
        case ast.Subscript(slice=ast.Constant(value=str(key))) if chain(node.value) and not set(key) & set(
            '"[]'
        ):
            stores = not isinstance(node.ctx, ast.Load)
            if stores:
                yield chain(node.value), False
            yield f'{chain(node.value)}["{key}"]', stores
        case ast.Subscript(value=ast.Name() | ast.Attribute()):
            yield from _uses(node.slice, results=results)
            yield from ((name, isinstance(node.ctx, ast.Store)) for name, _ in _uses(node.value))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            for part in node.body if isinstance(node.body, list) else []:
                yield from _uses(part)
        case ast.Call(func=ast.Attribute(attr=attribute, value=owner)) if (
            attribute in _FILLS and not results and chain(owner)
        ):
            for child in ast.iter_child_nodes(node):
                yield from _uses(child)
            yield chain(owner), True
        case CallWithBody() if results:
            for part in node.results():
                yield from _uses(part, results=True)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _uses(child, results=results, varying=varying)
