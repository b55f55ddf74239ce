"""Changes of the training that code after a block makes only after a collective: a lost rank would cut them off.

Theory. A step is committed at the end of its block. The code after the block then runs on each rank, and is a part of
this step. If a rank is lost, a collective in this code raises an error on the other ranks, and the rest of the code is
not run again. A schedule that this rest moves (``scheduler.step()`` after the mean of a loss) would miss one change,
and the later updates would be others than those of the undisturbed job. So such a script is refused in its first step.

The code after the block consists of the statements after the ``with`` statement of the step, and of the statements
after the calls that lead to it, up to the end of the loop over steps. They are followed in the order in which they
run, with the functions that they call. What counts as a change is defined in ``update_sources.py``. A variable in
``state=`` on which the updates depend counts as well. Collectives inside of libraries are not found, except for calls
of sharded modules.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from typing import NamedTuple

from holdfast.runtime.worker.script_frames import values_of
from holdfast.session.variables.called_bodies import module_with_bodies
from holdfast.session.variables.called_functions import LOCAL, CallWithBody
from holdfast.session.variables.data_flow import assigned_value, changed_by, targets, value_now, written
from holdfast.session.variables.deciding_variables import Places, described, inside_scope, is_over_steps
from holdfast.session.variables.script_trees import chain
from holdfast.session.variables.set_once import is_collective
from holdfast.session.variables.update_sources import changes_in, dotted

HINT = (
    "make the change before the collective, or call the collective in the block before optimizer.step(), or before the "
    "next block (`if ... and not step.again:`), where it runs again after a fault; session(verify_block=0) leaves out "
    "this check"
)
_OTHERS = (
    "barrier",
    "monitored_barrier",
    "reduce",
    "gather",
    "gather_object",
    "gather_for_metrics",
    "scatter",
)
"""Collectives that have the names of other functions as well: only those of a distributed library count."""
_DISTRIBUTED = ("torch.distributed", "accelerate", "lightning")
_MARK = re.compile(f"{LOCAL}[^.(]*")
_STEPS = "holdfast.session.steps"


class CutChange(NamedTuple):
    """A change that runs after a collective in the code after a block.

    Attributes:
        collective: the called function (``dist.all_reduce()``).
        change: the called function, or the assigned variable.
        block: file and line of the block, or of code in it.
    """

    collective: str
    change: str
    block: str


def cut_change(places: Places, state: Set[str], variables: Set[str]) -> CutChange | None:
    """Return the first change of the training that the code after the block makes after a collective.

    Args:
        places: file and line of the stack frames in the block of a step, the innermost frame first.
        state: names of containers and tensors that are state of the session.
        variables: names of the variables in ``state=`` on which the updates depend.

    Returns:
        The change; None if there is none, or if the block is not found.
    """
    order = _Order()
    for module in _code_after_block(places):
        change = order.change_in(module, partial(_is_change, changes_in(module, state), variables))
        if change is not None and order.collective is not None:
            return CutChange(_shown(order.collective), _shown(change), described(places))
    return None


def _code_after_block(places: Places) -> Iterator[ast.Module]:
    """Yield the statements after the block, for each stack frame from that of the block to that of its loop."""
    in_block = True
    for place in places:
        scope, *inner = inside_scope(*place)
        if in_block:
            blocks = [node for node in inner if isinstance(node, ast.With) and _is_block(node, place)]
            if not blocks:
                continue
            inner, in_block = inner[: inner.index(blocks[0]) + 1], False
        loops = [node for node in inner if isinstance(node, ast.For) and _gives_steps(node, scope, place)]
        after = list(_after(inner[inner.index(loops[-1]) :] if loops else [scope, *inner]))
        if after:
            yield module_with_bodies(place, after, in_present_mode=False)
        if loops:
            return


def _is_block(node: ast.With, place: tuple[str, int]) -> bool:
    return _has_step([chain(item.context_expr) for item in node.items], place)


def _gives_steps(loop: ast.For, scope: ast.AST, place: tuple[str, int]) -> bool:
    """Return whether ``loop`` is a loop over steps. The script may have given it the steps as an argument."""
    return is_over_steps(loop, scope) or _has_step(written([loop.target]), place)


def _has_step(names: Iterable[str], place: tuple[str, int]) -> bool:
    return any(type(value).__module__.startswith(_STEPS) for value in values_of(names, place).values())


def _after(inside: Sequence[ast.AST]) -> Iterator[ast.stmt]:
    """Yield the statements that run after the innermost node of ``inside``, up to the end of the outermost one.

    Args:
        inside: nodes of which each contains the next one.
    """
    for outer, node in reversed(list(itertools.pairwise(inside))):
        lists = [value for _, value in ast.iter_fields(outer) if isinstance(value, list)]
        own = next((each for each in lists if any(part is node for part in each)), [])
        following = own[next((i + 1 for i, part in enumerate(own) if part is node), 0) :]
        yield from (part for part in following if isinstance(part, ast.stmt))
        if isinstance(outer, ast.Try):
            yield from (part for part in outer.finalbody if own is not outer.finalbody)


class _Order:
    """The code after a block in the order in which it runs.

    Attributes:
        collective: the first collective so far; None if there was none.
    """

    def __init__(self) -> None:
        self.collective: ast.AST | None = None
        self._evaluates = False  # the code has called ``eval()``, and not ``train()`` after it

    def change_in(self, node: ast.AST, is_change: Callable[[ast.AST], bool]) -> ast.AST | None:
        """Return the first node that changes the training after a collective, and follow the code in ``node``.

        Args:
            node: a node of a syntax tree, which runs after all nodes so far.
            is_change: returns whether a node changes the training.
        """
        before = self.collective
        # A second turn of a loop comes after the collectives of the first.
        for _ in range(2 if isinstance(node, ast.For | ast.While) else 1):
            for part in self._parts(node):
                if (change := self.change_in(part, is_change)) is not None:
                    return change
            if self.collective is before:
                break
        match node:
            case ast.Call(func=ast.Attribute(attr="eval" | "train" as mode), args=[]):
                self._evaluates = mode == "eval"
        if self.collective is not None and is_change(node):
            return node
        if self.collective is None and _is_collective(node):
            self.collective = node
        return None

    def _parts(self, node: ast.AST) -> list[ast.AST]:
        """Return the parts of ``node`` that run, in their order."""
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return []
            case CallWithBody():
                return [node.func, *node.args, *node.keywords, *node.body]
            case ast.If() if self._evaluates and (value := _in_evaluation(node.test)) is not None:
                return [node.test, *(node.body if value else node.orelse)]
        return list(ast.iter_child_nodes(node))


def _in_evaluation(test: ast.expr) -> bool | None:
    """Return the value of a condition about ``training`` after ``eval()``; None if it depends on more."""
    match test:
        case ast.Attribute(attr="training"):
            return False
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _in_evaluation(operand)
            return None if value is None else not value
        case ast.BoolOp(op=op, values=values):
            decides = isinstance(op, ast.Or)
            return decides if decides in map(_in_evaluation, values) else None
    return None


def _is_collective(node: ast.AST) -> bool:
    if is_collective(node):
        return True
    match node:
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name.partition("@")[0] in _OTHERS:
            return _is_distributed(value_now(chain(node.func)))
        case ast.Call(func=ast.Name() | ast.Attribute() as called) if not isinstance(node, CallWithBody):
            return _is_model(value_now(chain(called)))
    return False


def _is_distributed(function: object) -> bool:
    module = getattr(function, "__module__", None)
    return isinstance(module, str) and module.startswith(_DISTRIBUTED)


def _is_model(value: object) -> bool:
    """Return whether a call of ``value`` gathers the parts of a sharded module.

    A session has taken over the broadcast of buffers from ``DistributedDataParallel``, whose forward pass then has no
    collective.
    """
    modules = [kind.__module__ for kind in type(value).__mro__]
    is_sharded = any(name.startswith("torch.distributed") for name in modules)
    return callable(value) and is_sharded and "torch.nn.parallel.distributed" not in modules


def _is_change(changes: Set[int], variables: Set[str], node: ast.AST) -> bool:
    return id(node) in changes or _writes(node, variables)


def _writes(node: ast.AST, variables: Set[str]) -> bool:
    """Return whether ``node`` writes one of ``variables``: by an assignment, or by a call that changes it."""
    names: Set[str] = set()
    match node:
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr() if assigned_value(node):
            names = written(targets(node))
        case ast.Call() if (change := changed_by(node)) is not None:
            names = {change[0]}
    return not variables.isdisjoint(names)


def _shown(node: ast.AST) -> str:
    match node:
        case ast.Call(func=called):
            text = f"{dotted(called)}()"
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            text = ", ".join(map(ast.unparse, targets(node)))
        case ast.Expr(value=value):
            return _shown(value)
        case _:
            text = type(node).__name__
    return _MARK.sub("", text)
