"""The variables that a script sets only once, and which of them are set from a collective of the script.

Theory. The first block may set a variable from its data, and later blocks use it. A process that joins or resumes
sets this variable from other data.

A block may set a statistic if the statistic has no value yet, from a sum over the ranks that each block makes::

    dist.all_reduce(mean)
    if self.mean is None:
        self.mean = mean

The check of a block runs the block without peers. So the check sets the variable from the data of this rank alone,
and no later run sets the variable again. All runs then have equal results and equal collectives, so no comparison of
the runs shows the defect.

The search reads the assignments of a block in the order of the source. A variable is *summed* if a collective changes
or returns it, or if it is assigned from a summed variable. An assignment is made *once* if its condition reads a
variable that is assigned under this condition, and that the block assigns nowhere else. A count that each block adds to
(``self.seen += 1``, ``if self.seen % 8 == 0: ...; self.seen = 0``) is no such variable: runs of the block differ in it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from holdfast.runtime.worker.script_frames import owners_of
from holdfast.session.variables.called_functions import (
    CallWithBody,
)
from holdfast.session.variables.data_flow import (
    Assignment,
    assigned_value,
    leaves_turn,
    names_in,
    targets,
    written,
)
from holdfast.session.variables.deciding_variables import Places, block_at, outermost_loop
from holdfast.session.variables.script_trees import chain

_COLLECTIVE = re.compile(r"(all_(reduce|gather|to_all)\w*|reduce_scatter\w*|broadcast(_object_list)?)$")
_OUTPUTS = ("tensor", "tensor_list", "output", "output_tensor", "object_list", "output_tensor_list")
"""Names of the argument that a collective changes, which is also the first one."""


@cache
def set_once(places: Places) -> Mapping[str, bool]:
    """Return the variables that the loop of the outermost stack frame sets once.

    The keys are the names. A value is True if the block sets the variable from a collective.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    found: dict[str, bool] = {}
    for node, inside in ((outermost_loop(places), False), (block_at(places), True)):
        if node is not None:
            search = _OnceSearch(_others(node))
            search.run([node])
            found |= dict.fromkeys(search.sums if inside else search.once - search.others, inside)
    return found


def _others(node: ast.AST) -> set[str]:
    """Return the variables that a loop or block also sets otherwise than under a condition about them."""
    search = _OnceSearch(set())
    search.run([node])
    return search.others


class _OnceSearch:
    """The search for variables that are set once, in one loop or block.

    Args:
        changing: variables that say nothing about what is set already, because the loop or block also sets them
            otherwise.

    Attributes:
        once: variables with an assignment that is made once (see the module).
        others: variables with any other assignment.
        sums: the variables of ``once`` that are set from a collective.
    """

    def __init__(self, changing: set[str]) -> None:
        self._changing = changing
        self.once: set[str] = set()
        self.others: set[str] = set()
        self.sums: set[str] = set()
        self._summed: set[str] = set()
        self._once = False  # the current statement is under a condition about what is assigned under it

    def run(self, statements: Sequence[ast.AST]) -> None:
        """Search ``statements``, one after the other."""
        around = self._once
        for number, node in enumerate(statements, 1):
            self._visit(node)
            if isinstance(node, ast.If) and leaves_turn(node.body):  # the rest runs under the other condition
                self._once = self._once or self._is_about(node.test, statements[number:])
        self._once = around

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.If():
                self._visit(node.test)
                around = self._once
                for branch in (node.body, node.orelse):
                    self._once = around or self._is_about(node.test, branch)
                    self.run(branch)
                self._once = around
            case CallWithBody():
                self.run([*node.args, *(keyword.value for keyword in node.keywords)])
                self.run(node.body)
            case ast.Call():
                self.run(list(ast.iter_child_nodes(node)))
                if is_collective(node):
                    self._summed |= names_in(_output(node))
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
                self.run(list(ast.iter_child_nodes(node)))
                self._assign(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
                return
            case _:
                self.run(list(ast.iter_child_nodes(node)))

    def _assign(self, node: Assignment) -> None:
        value, names = assigned_value(node), written(targets(node))
        if value is None:
            return
        once = self._once or any(self._is_about(test, [node]) for test in _tests_in(value))
        (self.once if once else self.others).update(names)
        if _is_handle(value):
            return
        if any(map(is_collective, ast.walk(value))) or self._is_summed(names_in([value])):
            self._summed |= names
            if once:
                self.sums |= names
        elif not isinstance(node, ast.AugAssign):
            self._summed -= names

    def _is_about(self, test: ast.expr, statements: Iterable[ast.AST]) -> bool:
        """Return whether a condition reads a variable that ``statements`` write, and that is not ``changing``."""
        names = {owner for name in written(statements) for owner in (name, *owners_of(name))}
        return not (names & names_in([test])) <= self._changing

    def _is_summed(self, names: Iterable[str]) -> bool:
        return any(not self._summed.isdisjoint((name, *owners_of(name))) for name in names)


def is_collective(node: ast.AST) -> bool:
    """Return whether ``node`` is a call of a collective. A call of a function of the script is none."""
    match node:
        case CallWithBody():
            return False  # its body has the collective
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return _COLLECTIVE.match(name.partition("@")[0]) is not None
    return False


def _is_handle(value: ast.expr) -> bool:
    """Return whether a call in ``value`` begins a collective with ``async_op``.

    The search ignores such a call, because a ``wait()`` in a later block is refused.
    """
    calls = (node for node in ast.walk(value) if isinstance(node, ast.Call) and is_collective(node))
    return any(
        each.arg == "async_op" and not _is_false(each.value) for call in calls for each in call.keywords
    )


def _is_false(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is False


def _output(call: ast.Call) -> Sequence[ast.expr]:
    """Return the argument that a collective changes."""
    return call.args[:1] or [each.value for each in call.keywords if each.arg in _OUTPUTS]


def _tests_in(value: ast.expr) -> list[ast.expr]:
    """Return the conditions of ``a if b else c`` and of ``a or b``."""
    match value:
        case ast.IfExp(test=test):
            return [test]
        case ast.BoolOp(op=ast.Or(), values=[first, *_]) if chain(first):
            return [first]
    return []
