"""The expressions of a loop on which its updates depend: losses, learning rates, averages of weights and other state.

Theory. An optimizer changes weights. Its gradients come from the object on which ``backward()`` is called, and its
settings come from assignments or a schedule. The script itself also changes weights and gradients, for example by a
moving average or by noise. Tensors of modules are recognized by the method that returns them (``parameters()``).
Tensors in containers are recognized because they are state of the session. Any other value, such as a sum over an
evaluation, does not count as an update.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Set
from typing import NamedTuple

from holdfast.runtime.worker.script_frames import owners_of
from holdfast.session.variables.called_functions import (
    CallWithBody,
    is_of_library,
)
from holdfast.session.variables.data_flow import assigned, assigned_value, targets, uses, value_now, written
from holdfast.session.variables.script_trees import chain

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
_CLIPS = re.compile(r"(^|[._])clip_grad")
_SETS_RATES = re.compile(r"(^|[._])(lr|learning_rate|scheduler)")
_GIVES_TENSORS = re.compile(r"(^|[._])(parameters|buffers|state_dict|get_parameter|get_buffer)$")
"""Methods of a module."""
_IN_PLACE = ("copy_", "sub_", "add_")


def sources(body: ast.AST, state: Set[str]) -> list[ast.AST]:
    """Return the expressions (nodes of a syntax tree) on which the losses, rates and updates in ``body`` depend.

    Args:
        body: a loop, with the bodies of the functions that it calls.
        state: names from :func:`changed` that are state of the session.
    """
    return _sources(body, _tensors(body, state)) or []


def changes_in(body: ast.AST, state: Set[str]) -> frozenset[int]:
    """Return the ids of the nodes in ``body`` that set a rate, compute gradients, or change weights or state.

    The arguments are those of :func:`sources`.
    """
    tensors = _tensors(body, state)
    return frozenset(id(node) for node in ast.walk(body) if _values(node, tensors) is not None)


def changed(loop: ast.AST) -> set[str]:
    """Return the names of containers, elements, attributes and tensors that a loop changes in place.

    An element whose key is a constant string has a separate name (``past["step"]``).
    """
    found = {_name(target) for assignment, _ in assigned(loop) for target in targets(assignment)}
    return (found | {_name(_tensor(node)) for node in ast.walk(loop)}) - {""}


def dotted(node: ast.expr) -> str:
    """Return a variable and its attributes as text (``self.scheduler.step``). Parts of other kinds are left out."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
    return ""


def _name(target: ast.expr | None) -> str:
    """Return the name of the variable or attribute that an assignment to ``target`` changes in place.

    The result is empty if there is none.
    """
    match target:
        case None | ast.Name(ctx=ast.Store()):
            return ""
        case ast.Subscript(value=container):
            return next((use.name for use in uses(target) if use.writes), chain(container))
    return chain(target)


def _tensor(node: ast.AST) -> ast.expr | None:
    """Return the tensor that a method call changes in place; None if ``node`` is not such a call."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name, value=tensor)) if name in _IN_PLACE:
            return tensor
    return None


class _Tensors(NamedTuple):
    """The names in a loop that stand for tensors of modules or of the state, or for their containers.

    Attributes:
        every: all of these names.
        whole: those that got a tensor or a container as a whole, and not as a new item of another container.
        state: names that are state of the session.
    """

    every: Set[str]
    whole: Set[str]
    state: Set[str]


def _tensors(body: ast.AST, state: Set[str]) -> _Tensors:
    return _Tensors(_names(body, state), _names(body, state, whole=True), state)


def _names(body: ast.AST, state: Set[str], *, whole: bool = False) -> Set[str]:
    """Return the names of :class:`_Tensors`. ``whole``: leave out containers that got a tensor as a new item."""
    assignments = [assignment for assignment, _ in assigned(body)]
    found, size = set(state), -1
    while size != len(found):
        size = len(found)
        for assignment in assignments:
            value = assigned_value(assignment)
            if value is not None and _is_one(value, found, inside=isinstance(assignment, ast.For)):
                found |= written(each for each in targets(assignment) if not (whole and _is_item(each)))
    return found


def _is_item(target: ast.expr) -> bool:
    """Return whether ``target`` is an item of a container without a separate name (``average[name]``)."""
    match target:
        case ast.Subscript(slice=ast.Constant(value=str(key))):
            return not _name(target).endswith(f'["{key}"]')
    return isinstance(target, ast.Subscript)


def _is_one(value: ast.expr, tensors: Set[str], *, inside: bool) -> bool:
    """Return whether ``value`` is one of ``tensors``, or a method returns it.

    With ``inside``, it is enough if this holds for a part of ``value``.
    """
    match value:
        case ast.Call(func=called) if _GIVES_TENSORS.search(dotted(called)):
            return True
        case ast.Name() | ast.Attribute() | ast.Subscript() if _is_of(value, tensors):
            return True
    parts = ast.iter_child_nodes(value) if inside else ()
    return any(isinstance(part, ast.expr) and _is_one(part, tensors, inside=True) for part in parts)


def _is_of(target: ast.expr, tensors: Set[str]) -> bool:
    name = _name(target)
    return not {name, *owners_of(name)}.isdisjoint(tensors)


def _replaces(target: ast.expr, tensors: _Tensors) -> bool:
    """Return whether an assignment to ``target`` puts another value in the place of a tensor, or into its container.

    An element or attribute that got the weights in this loop (``package["state"] = model.state_dict()``) may get
    another value, which changes no weight.
    """
    name = _name(target)
    own = (name,) if _is_item(target) else ()
    return name in tensors.state or not tensors.whole.isdisjoint((*own, *owners_of(name)))


def _sources(node: ast.AST, tensors: _Tensors) -> list[ast.AST] | None:
    """Return the expressions of :func:`sources` in ``node``; None if ``node`` changes nothing."""
    inside = [_sources(part, tensors) for part in ast.iter_child_nodes(node)]
    every = [found for found in (_values(node, tensors), *inside) if found is not None]
    if not every:
        return None
    return [*itertools.chain(*every), *([node.test] if isinstance(node, ast.If) else [])]


def _values(node: ast.AST, tensors: _Tensors) -> list[ast.AST] | None:
    """Return the expressions from which one statement sets a rate, computes gradients, or changes weights or state.

    The result is None if the statement does none of these.

    A rate is a setting of a parameter group that schedules change. An assignment ``group["lr"] = ...`` sets a rate.
    So does a call of a function with ``lr``, ``learning_rate`` or ``scheduler`` at the start of its name, or after a
    dot or an underscore in the name. So does the method ``step`` of a schedule of torch. A product in place (``*=``),
    of anything but a number, counts as an average of weights. Other changes in place count only for the names in
    ``tensors``. The limit of a clipped gradient counts. All statements in the ``step`` of an optimizer of the script
    count. An assigned attribute of a library's module counts as a setting of the loss (``dropout.p``).
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
        case ast.Call(func=called) if _CLIPS.search(dotted(called)):
            return [*node.args, *(keyword.value for keyword in node.keywords)]
        case ast.Call(func=ast.Attribute(attr=name, value=tensor), args=arguments) if name in (
            "mul_",
            "lerp_",
        ) or (name in _IN_PLACE and _is_of(tensor, tensors.every)):
            return [*arguments, *(keyword.value for keyword in node.keywords)]
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target], value=value) if _replaces(
            target, tensors
        ):
            return [value, target.slice] if isinstance(target, ast.Subscript) else [value]
        case ast.AugAssign(target=ast.Attribute() | ast.Subscript() as target, value=value) if _is_of(
            target, tensors.every
        ):
            return [value, target.slice] if isinstance(target, ast.Subscript) else [value]
        case ast.AugAssign(op=ast.Mult(), target=target, value=value) if not _is_number(chain(target)):
            return [value]
        case (
            ast.Assign(targets=[ast.Attribute() as target]) | ast.AugAssign(target=ast.Attribute() as target)
        ) if is_of_library(value_now(chain(target.value))):
            return [target, node.value]
        case ast.Expr(value=ast.Call(func=ast.Name() | ast.Attribute() as called) as call) if (
            _SETS_RATES.search(dotted(called)) or _is_schedule(called)
        ):
            return [*call.args, *(keyword.value for keyword in call.keywords)]
    return None


def _is_schedule(called: ast.expr) -> bool:
    """Return whether ``called`` is the method ``step`` of a schedule of torch. The variable may have any name."""
    match called:
        case ast.Attribute(attr="step", value=owner):
            return type(value_now(chain(owner))).__module__ == "torch.optim.lr_scheduler"
    return False


def _is_number(name: str) -> bool:
    return isinstance(value_now(name), int | float)
