"""The parts of a loop from which its updates follow: gradients, rates, averages of weights and other state.

Theory. Weights change by an optimizer, whose gradients come from what ``backward()`` is called on, and whose settings
are assigned or set by a schedule. They also change by the script itself: a moving average of the weights, noise in the
gradients. The tensors of modules are known by the method that gives them (``parameters()``), and those of containers
because the session has them as its state. A sum over an evaluation is neither, so it is no update.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Set

from holdfast.runtime.worker.script_frames import owners_of
from holdfast.session.variables.called_bodies import CallWithBody, chain, is_of_library
from holdfast.session.variables.data_flow import assigned, assigned_value, targets, uses, value_now, written

_SCHEDULED = ("lr", "weight_decay", "momentum", "betas")
_SETS_RATES = re.compile(r"(^|[._])(lr|learning_rate|scheduler)")
_GIVES_TENSORS = re.compile(r"(^|[._])(parameters|buffers|state_dict|get_parameter|get_buffer)$")
"""Methods of a module."""
_IN_PLACE = ("copy_", "sub_", "add_")


def sources(body: ast.AST, state: Set[str]) -> list[ast.AST]:
    """Return the nodes on which the losses, rates and updates in ``body`` depend.

    Args:
        body: a loop, with the bodies of the functions that it calls.
        state: those of :func:`changed` that are state of the session.
    """
    return _sources(body, _tensors(body, state))


def changed(loop: ast.AST) -> set[str]:
    """Return the names of containers, elements, attributes and tensors that a loop changes in place.

    An element with a constant text as its key has a name of its own (``past["step"]``).
    """
    found = {_name(target) for assignment, _ in assigned(loop) for target in targets(assignment)}
    return (found | {_name(_tensor(node)) for node in ast.walk(loop)}) - {""}


def dotted(node: ast.expr) -> str:
    """Return a variable with its attributes as text: ``self.scheduler.step``. Other parts are left out."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            return f"{dotted(node.value)}.{node.attr}"
    return ""


def _name(target: ast.expr | None) -> str:
    """Return the name of the variable or attribute that a change of ``target`` changes; empty if it has no name."""
    match target:
        case None | ast.Name(ctx=ast.Store()):
            return ""
        case ast.Subscript(value=container):
            return next((use.name for use in uses(target) if use.writes), chain(container))
    return chain(target)


def _tensor(node: ast.AST) -> ast.expr | None:
    """Return the tensor that a call of a method changes in place; None: it is no such call."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name, value=tensor)) if name in _IN_PLACE:
            return tensor
    return None


def _tensors(body: ast.AST, state: Set[str]) -> Set[str]:
    """Return the names in ``body`` for tensors of modules and of the state, and for containers of such tensors."""
    assignments = [assignment for assignment, _ in assigned(body)]
    found, size = set(state), -1
    while size != len(found):
        size = len(found)
        for assignment in assignments:
            value = assigned_value(assignment)
            if value is not None and _is_one(value, found, inside=isinstance(assignment, ast.For)):
                found |= written(targets(assignment))
    return found


def _is_one(value: ast.expr, tensors: Set[str], *, inside: bool) -> bool:
    """Return whether ``value`` is one of ``tensors``, or a method gives it; ``inside``: or whether a part of it is."""
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


def _sources(node: ast.AST, tensors: Set[str]) -> list[ast.AST]:
    parts = ast.iter_child_nodes(node)
    found = [*_values(node, tensors), *(source for part in parts for source in _sources(part, tensors))]
    return [*found, node.test] if found and isinstance(node, ast.If) else found


def _values(node: ast.AST, tensors: Set[str]) -> list[ast.AST]:
    """Return the nodes from which one statement or call sets a rate, computes gradients, or moves weights or state.

    A rate is a setting of a parameter group that schedules change. It is set by ``group["lr"] = ...``, or by a call of
    a function whose name begins with ``lr``, ``learning_rate`` or ``scheduler``, also after a dot or an underscore, or
    of the method ``step`` of a schedule of torch.
    An average of weights is moved by a product in place of what is no number. Other changes in place count for the
    names of ``tensors``. An optimizer of the script moves weights by anything in its ``step``. An attribute of a
    library's module is a setting of the loss (``dropout.p``).
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
        case ast.Call(func=ast.Attribute(attr=name, value=tensor), args=arguments) if name in (
            "mul_",
            "lerp_",
        ) or (name in _IN_PLACE and _is_of(tensor, tensors)):
            return [*arguments, *(keyword.value for keyword in node.keywords)]
        case (
            ast.Assign(targets=[ast.Attribute() | ast.Subscript() as target], value=value)
            | ast.AugAssign(target=ast.Attribute() | ast.Subscript() as target, value=value)
        ) if _is_of(target, tensors):
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
    return []


def _is_schedule(called: ast.expr) -> bool:
    """Return whether a method belongs to a schedule of torch, which may have any name."""
    match called:
        case ast.Attribute(attr="step", value=owner):
            return type(value_now(chain(owner))).__module__ == "torch.optim.lr_scheduler"
    return False


def _is_number(name: str) -> bool:
    return isinstance(value_now(name), int | float)
