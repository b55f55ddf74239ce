"""The inputs of a loop over steps: variables that code before the loop sets, and on which the updates depend.

Theory. The code between the start of the session and the loop runs again in each process that continues the job, and
so does the code at the start of an epoch. In such a process the code finds the weights of the newest step, and not
those from the start of the epoch. So a variable that the code computes from weights (the assignments of a clustering,
a copy of the model) gets another value. If all ranks have started again, the value is wrong on all of them alike.

The search takes the names on which the updates in the loop depend, and which the loop does not write. Such a name may
be set again if the function around the loop assigns it after the start of the session. It may also be set again if it
is a parameter, and a caller passes such a variable or the result of a call. An attribute counts if this code assigns
any attribute of the same name. All other names are settings, which the script sets before the session. A job may
continue with other settings.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import NamedTuple, cast

from holdfast.runtime.worker.script_frames import owners_of
from holdfast.session.variables.called_bodies import (
    module_with_bodies,
    with_bodies,
)
from holdfast.session.variables.called_functions import (
    LOCAL,
    arguments_of,
    parameters_of,
)
from holdfast.session.variables.data_flow import inputs, names_in, written
from holdfast.session.variables.deciding_variables import (
    PlacedVariable,
    Places,
    has_loop_over_steps,
    loops_around,
    loops_to_steps,
    scope_of,
)
from holdfast.session.variables.update_sources import dotted, sources

_SESSION = re.compile(r"(^|\.)session$")


class InputOrigin(Enum):
    """The code that sets an input of a loop."""

    EPOCH = "epoch"  # code inside of the loops around the loop over steps
    SESSION = "session"  # other code after the begin of the session
    SETTING = "setting"  # code before the session


class LoopInput(NamedTuple):
    """An input of a loop over steps: the variable, and the code that sets it."""

    variable: PlacedVariable
    origin: InputOrigin


def loop_inputs(places: Places) -> tuple[LoopInput, ...]:
    """Return the inputs of the loop over steps that the script begins now.

    Args:
        places: the result of ``deciding_variables.all_places``. The innermost place in a loop with updates is the
            start of that loop.
    """
    for depth, place in enumerate(places):
        loops = with_bodies(place, loops_around(*place)[-1:], places[:depth])
        names = _names_of_inputs(loops[0]) if loops else None
        if names is not None:
            inside = _inside_session(places[depth:])
            return tuple(
                LoopInput(PlacedVariable(name, place, partly=False), _origin(name, inside)) for name in names
            )
    return ()


def unwritten_variables(places: Places) -> tuple[PlacedVariable, ...]:
    """Return the variables on which an update depends, and which the loop over steps around it does not write.

    A loop inside of a block (over parts of its batch) does not write what an earlier line of the block does. If no
    frame has a loop over steps, its outermost loop counts, and that of an outer function first.

    Args:
        places: file and line of the stack frames of the update, the innermost frame first.
    """
    depths = range(len(places))
    for depth in [d for d in depths if has_loop_over_steps(places[d])] or reversed(depths):
        place, loops = places[depth], loops_to_steps(places[: depth + 1])
        names = _names_of_inputs(loops[-1]) if loops else None
        if names is not None:
            return tuple(PlacedVariable(name, place, partly=False) for name in names)
    return ()


def is_set_before_session(name: str, place: tuple[str, int], places: Places) -> bool:
    """Return whether only code before the session seems to set a variable of :func:`unwritten_variables`.

    Args:
        name, place: name of the variable, and place of its stack frame.
        places: as given to that function.
    """
    inside = _inside_session(places[places.index(place) :])
    return _origin(name, inside) is InputOrigin.SETTING


def _names_of_inputs(loop: ast.AST) -> list[str] | None:
    """Return the names on which the updates in ``loop`` depend, and which it does not write; None without updates."""
    found = sources(loop, frozenset())
    if not found:
        return None
    if isinstance(loop, ast.For):
        # A job may continue to another end, s.steps(until=N). The loader is compared by its batches.
        loop = ast.For(loop.target, ast.Constant(None), loop.body, loop.orelse)
    return [name for name in inputs(loop, found) if LOCAL not in name]


def _inside_session(places: Places) -> Places:
    """Return ``places`` up to the function that begins the session; all places if no such function is known."""
    begins = (depth for depth, place in enumerate(places) if _begin_of_session(scope_of(*place), place[1]))
    return places[: next(begins, len(places)) + 1]


def _origin(name: str, places: Places) -> InputOrigin:
    """Return which code sets ``name``, a variable of the function that has the loop (the first of ``places``)."""
    if _is_set(name, places, _InputSearch(places[0], turns=True)):
        return InputOrigin.EPOCH
    after = _is_set(name, places, _InputSearch(places[0], turns=False))
    return InputOrigin.SESSION if after else InputOrigin.SETTING


class _InputSearch(NamedTuple):
    """A search for code that runs again in a new process and sets variables.

    Attributes:
        steps: the place of the loop over steps.
        turns: True if only code inside of loops counts.
    """

    steps: tuple[str, int]
    turns: bool


def _is_set(name: str, places: Places, search: _InputSearch) -> bool:
    """Return whether code that runs again may set the variable ``name`` of the function at the first of ``places``.

    Args:
        places: the place of that function, then those of the functions that have called it.
        search: the search.
    """
    owners = owners_of(name)
    attribute = name.rpartition(".")[2]
    if owners and any(attribute in _attributes_set(places[depth:], search) for depth in range(len(places))):
        return True
    parts = (*owners, name)
    for depth, place in enumerate(places):
        parameters = _parameters(place)
        if parts[0] not in parameters | _names_in(place):
            continue  # a variable of the function around this one
        if not _names_set(places[depth:], search).isdisjoint(parts):
            return True
        outside = places[depth + 1 :]
        argument = _argument(place, parts[0], outside[0]) if parts[0] in parameters and outside else None
        if argument is None:
            return False
        return isinstance(argument, ast.Call) or any(
            _is_set(each, outside, search) for each in names_in([argument])
        )
    return False


@cache
def _names_in(place: tuple[str, int]) -> frozenset[str]:
    """Return the names of the variables that the function at ``place`` writes."""
    return frozenset(written([scope_of(*place)]))


@cache
def _names_set(places: Places, search: _InputSearch) -> frozenset[str]:
    """Return the variables that the code of the first of ``places`` writes when it runs again (:func:`_region`)."""
    return frozenset(written(_region(places, search)))


@cache
def _attributes_set(places: Places, search: _InputSearch) -> frozenset[str]:
    """Return the names of attributes that the code of :func:`_region` assigns, also in the functions that it calls."""
    names = written([module_with_bodies(places[0], list(_region(places, search)))])
    return frozenset(name.rpartition(".")[2] for name in names if "." in name)


def _region(places: Places, search: _InputSearch) -> Iterator[ast.AST]:
    """Yield the nodes of the function at the first of ``places`` that run again in a new process.

    The loop over steps is left out.
    """
    place, *outside = places
    scope, loops = scope_of(*place), loops_around(*place)
    loop = loops[-1] if place == search.steps else None
    begin = _begin_of_session(scope, place[1])
    looped = any(loops_around(*each) for each in outside)
    if begin is not None and (looped or not search.turns):
        yield from _after(scope, begin, loop)
    elif looped or (
        not search.turns and any(_begin_of_session(scope_of(*each), each[1]) for each in outside)
    ):
        yield from _after(scope, 0, loop)
    elif loops:
        yield from _after(ast.Module([cast("ast.stmt", loops[0])], []), 0, loop)


def _begin_of_session(scope: ast.AST, line: int) -> int | None:
    """Return the last line up to ``line`` in which ``scope`` begins a session; None if there is none."""
    calls = (node for node in ast.walk(scope) if isinstance(node, ast.Call) and node.lineno <= line)
    return max((node.lineno for node in calls if _SESSION.search(dotted(node.func))), default=None)


def _after(node: ast.AST, begin: int, loop: ast.AST | None) -> Iterator[ast.AST]:
    """Yield the largest subtrees of ``node`` that come after line ``begin`` and do not contain ``loop``."""
    for child in ast.iter_child_nodes(node):
        if child is loop:
            continue
        if getattr(child, "lineno", 0) > begin and all(each is not loop for each in ast.walk(child)):
            yield child
        else:
            yield from _after(child, begin, loop)


def _parameters(place: tuple[str, int]) -> set[str]:
    """Return the names of the parameters of the function at ``place``."""
    match scope_of(*place):
        case ast.FunctionDef(args=arguments) | ast.AsyncFunctionDef(args=arguments):
            return {each.arg for each in ast.walk(arguments) if isinstance(each, ast.arg)}
    return set()


def _argument(place: tuple[str, int], parameter: str, caller: tuple[str, int]) -> ast.expr | None:
    """Return the argument that the call at ``caller`` passes for a parameter of the function at ``place``.

    The result is None if the argument is unknown.
    """
    scope = scope_of(*place)
    if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    for node in ast.walk(scope_of(*caller)):
        match node:
            case ast.Call(func=called) if node.lineno <= caller[1] <= (node.end_lineno or 0) and (
                dotted(called).rpartition(".")[2] == scope.name
            ):
                names = parameters_of(scope)
                is_method = isinstance(called, ast.Attribute) and names[:1] == ["self"]
                return dict(arguments_of(node, names[is_method:])).get(parameter)
    return None
