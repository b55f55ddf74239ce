"""The inlining of the script's functions into the source of a loop, for the search for variables.

Theory. A script may keep a value from one step to the next inside an object, such as a schedule that counts its
calls. The source of the loop alone does not show this value. So each call of a function or method of the script gets
the body of that function. In the body, ``self`` becomes the object of the call. If the argument of a parameter is a
variable, and the body does not assign the parameter, the variable replaces the parameter. Other parameters are
assigned from the arguments. Other local names are renamed, because these variables end with the call. The variables
of a function that has returned are also renamed, and so are the global variables of another file. Their new names
contain the name of that function or module. The name of a function is looked up in the running script, so the search
needs the frames of the script on the stack. A library may have wrapped a module of the script
(``DistributedDataParallel``, ``torch.compile``). A call of the wrapper counts as a call of the wrapped module. If a
variable of the script holds the wrapped module, the module gets the name of this variable.

A branch that cannot run with the present flags is left out. Flags are options of ``argparse`` and comparisons of them
with constants, the attribute ``training`` of a module, and bools that the loop does not set. Functions of libraries are
not inlined, nor are functions more than ``DEPTH_MAX`` calls deep. At most ``BODIES_MAX`` functions are inlined: those
that the loop itself calls come first, then those that they call. The functions that are running while the update is
made do not count for the depth, and are inlined in any case.
"""

from __future__ import annotations

import argparse
import ast
import operator
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from types import CodeType
from typing import NamedTuple, TypeVar, cast

from holdfast.runtime.worker.script_attributes import instance_of
from holdfast.runtime.worker.script_frames import has_line
from holdfast.session.variables.aliases import Aliases
from holdfast.session.variables.called_functions import (
    LOCAL,
    CalledValue,
    Callee,
    CallerNames,
    CallWithBody,
    called_by,
    callee_of,
    definition,
    getter_of,
    has_script_method,
    new_tree_of,
    object_named,
    of_script,
    run_by,
    super_method,
    tree_of,
    value_at,
)
from holdfast.session.variables.hooks import HookSearch, methods_of_function
from holdfast.session.variables.script_trees import chain

DEPTH_MAX = 3
BODIES_MAX = 200
READS_MAX = 100
OTHERS_MAX = 30
_COMPARES: Mapping[type[ast.cmpop], Callable[[object, object], object]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda value, values: operator.contains(cast("Sequence[object]", values), value),
    ast.NotIn: lambda value, values: not operator.contains(cast("Sequence[object]", values), value),
}
_Node = TypeVar("_Node", bound=ast.AST)


def with_bodies(
    place: tuple[str, int], nodes: Sequence[ast.AST], inner: Sequence[tuple[str, int]] = ()
) -> list[ast.AST]:
    """Return copies of ``nodes`` in which the script's functions are inlined into their calls.

    Args:
        place: file and line that a stack frame executes now; the nodes are in the source of that frame.
        nodes: nodes of ``tree_of(file)``. The first node contains the others.
        inner: file and line of each stack frame that was called from the code of the nodes.
    """
    return _filled(place, inner, lambda: _copies(place[0], nodes))


def module_with_bodies(
    place: tuple[str, int], nodes: Sequence[ast.AST], *, in_present_mode: bool = True
) -> ast.Module:
    """Return a syntax tree with copies of ``nodes`` in which the script's functions are inlined into their calls.

    Args:
        place: file and line that a stack frame executes now; the nodes are in the source of that frame.
        nodes: nodes of ``tree_of(file)``. No node contains another one.
        in_present_mode: leave out branches by the present values of ``training``. False for code that may call
            ``eval()``.
    """

    def copied() -> list[ast.Module]:
        return [ast.Module(cast("list[ast.stmt]", _copies(place[0], nodes)), [])]

    return _filled(place, (), copied, in_present_mode=in_present_mode)[0]


def loop_of_calls(called: Sequence[ast.expr], place: tuple[str, int]) -> tuple[ast.While, list[ast.expr]]:
    """Return a loop that only makes calls, with the bodies of the called functions, and the calls in it.

    Args:
        called: what is called: variables of the stack frame that executes ``place``, or attributes of them.
        place: file and line.
    """

    def made() -> list[ast.While]:
        calls = (ast.Call(each, [ast.Name(f"batch{LOCAL}", ast.Load())], []) for each in called)
        body = [ast.Assign([ast.Name(f"result{LOCAL}", ast.Store())], call) for call in calls]
        return [ast.fix_missing_locations(ast.While(ast.Constant(True), [*body], []))]

    (loop,) = _filled(place, (), made)
    return loop, [each.value for each in loop.body if isinstance(each, ast.Assign)]


def _filled(
    place: tuple[str, int],
    inner: Sequence[tuple[str, int]],
    made: Callable[[], list[_Node]],
    *,
    in_present_mode: bool = True,
) -> list[_Node]:
    """Return new nodes of ``made`` with bodies in their calls. The first node contains the others."""
    unsafe = frozenset[str]()
    while nodes := made():
        bodies = _Bodies(place, inner, nodes[0], Aliases(place, unsafe), in_present_mode=in_present_mode)
        bodies.fill()
        conflicts = bodies.aliases.conflicts
        if conflicts <= unsafe:
            break
        unsafe |= conflicts
    return nodes


def _copies(file: str, nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return copies of ``nodes``, nodes of ``tree_of(file)``, from a new syntax tree of the same file."""
    # A second parse takes a hundredth of the time of a copy.
    tree = new_tree_of(file)
    wanted = {_place(node): None for node in nodes}
    found = {at: node for node in ast.walk(tree) if (at := _place(node)) in wanted}
    return [found[at] for at in wanted if at in found]


def _is_constant(node: ast.expr) -> bool:
    match node:
        case ast.Constant():
            return True
        case ast.Tuple(elts=values) | ast.List(elts=values) | ast.Set(elts=values):
            return all(isinstance(each, ast.Constant) for each in values)
    return False


class _Bodies(ast.NodeTransformer):
    """The transformer of a syntax tree that inlines called functions.

    Args:
        place: file and line that the stack frame with the loop executes now. Functions of other files have other
            globals.
        inner: file and line of each stack frame that was called from the code of the loop.
        loop: the syntax tree of the loop.
        aliases: the objects behind local names.
        in_present_mode: as in :func:`module_with_bodies`.
    """

    def __init__(
        self,
        place: tuple[str, int],
        inner: Sequence[tuple[str, int]],
        loop: ast.AST,
        aliases: Aliases,
        *,
        in_present_mode: bool,
    ) -> None:
        self.aliases = aliases
        self._in_present_mode = in_present_mode
        self._place = place
        self._inner = inner
        self._loop = loop
        attributes = (node for node in ast.walk(loop) if isinstance(node, ast.Attribute))
        self._assigned = {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
        self._variables = {
            node.id
            for node in ast.walk(loop)
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
        }
        for node in ast.walk(tree_of(place[0])):
            if isinstance(node, ast.Global | ast.Nonlocal):
                self._variables.update(node.names)
        self._count = 0  # bodies
        self._reads = 0  # reads of properties and the like, which count as calls
        self._others = 0  # bodies of calls that may run several functions
        self._hooks = HookSearch()
        self._inside = set[CodeType]()  # functions that libraries call, which have a body already
        self._around = _Around(0, ())
        self._open: deque[_Open] = deque()

    def fill(self) -> None:
        """Give bodies to the calls of the loop, then to the calls in these bodies, and so on.

        A model and its augmentations have more functions than ``BODIES_MAX``. They must not take the bodies of the
        calls that the loop itself makes after them.
        """
        self.aliases.enter_loop(self._loop)
        self.visit(self._loop)
        while self._open:
            call, statements, self._around = self._open.popleft()
            call.body += self._visited(statements)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        setting = self._setting(node.test)
        if setting is None:
            return self.generic_visit(node)
        return list(self._visited(node.body if setting else node.orelse)) or ast.Pass()

    def _visited(self, statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in statements:
            found = self.visit(statement)
            yield from found if isinstance(found, list) else [found]

    def _setting(self, test: ast.expr) -> bool | None:
        """Return the value of a condition that consists of flags, which the loop does not change.

        The result is None if the condition has other parts.
        """
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                value = self._setting(inner)
                return None if value is None else not value
            case ast.BoolOp(op=op, values=parts):
                values, decides = [self._setting(part) for part in parts], isinstance(op, ast.Or)
                return decides if decides in values else None if None in values else not decides
            case ast.Constant(value=bool(flag)):  # an argument
                return flag
            case ast.Name(id=name) if name not in self._variables:
                found = value_at(name, self._place)
                return found if isinstance(found, bool) else None
            case ast.Attribute(attr="training") if not self._in_present_mode or "training" in self._assigned:
                return None
            case ast.Attribute(value=owner, attr="training") if chain(owner):
                holder = instance_of(value_at(chain(owner), self._place))
                found = holder.get("training") if "_modules" in holder else None
                return found if isinstance(found, bool) else None
            case ast.Attribute() if (option := self._option(test)) is not ...:
                return bool(option)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in _COMPARES and _is_constant(right) and (option := self._option(left)) is not ...
            ):
                return bool(_COMPARES[type(op)](option, ast.literal_eval(right)))
            case ast.Compare(
                left=left, ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot() as op], comparators=[right]
            ):
                one, other = self._constant(left), self._constant(right)
                return None if ... in (one, other) else bool(_COMPARES[type(op)](one, other))
        return None

    def _constant(self, node: ast.expr) -> object:
        """Return a constant (an argument of the function), or the member of an ``Enum``; ``...`` for anything else."""
        match node:
            case ast.Constant(value=str() | int() | None as value):
                return value
            case ast.Attribute(value=owner, attr=name) if chain(owner):
                kind = value_at(chain(owner), self._place)
                if isinstance(kind, type) and issubclass(kind, Enum):
                    return kind.__members__.get(name, ...)
        return ...

    def _option(self, test: ast.expr) -> object:
        """Return the value of an option of ``argparse`` that the loop does not change; ``...`` if it is none."""
        match test:
            case ast.Attribute(value=owner, attr=name) if chain(owner) and name not in self._assigned:
                options = value_at(chain(owner), self._place)
                found = instance_of(options).get(name, ...)
                if isinstance(options, argparse.Namespace) and isinstance(found, int | float | str | None):
                    return found
        return ...

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        match node.value:
            case ast.Call(
                func=ast.Attribute(attr="register_buffer", value=owner),
                args=[ast.Constant(value=str(name)), value, *_],
            ):
                return ast.copy_location(
                    ast.Assign(targets=[ast.Attribute(owner, name, ast.Store())], value=value), node
                )
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        owner = ast.Name("self", ast.Load())
        if (inherited := super_method(node, owner, value_at("__class__", self._place))) is not None:
            return inherited
        self.generic_visit(node)
        getter = getter_of(node, self._place)
        if getter is None or self._reads >= READS_MAX:
            return node
        found = self._with_body(ast.copy_location(ast.Call(node, [], []), node), getter)
        # Settings may have `__getattr__`: their reads must not take the bodies of calls.
        self._reads += found is not None
        return found or node

    def visit_With(self, node: ast.With) -> ast.AST:
        self.generic_visit(node)
        for name in (item.context_expr for item in reversed(node.items) if chain(item.context_expr)):
            entered, left = (self._called(name, method, node) for method in ("__enter__", "__exit__"))
            node.body = [*entered, *node.body, *left]
        return node

    def _called(self, name: ast.expr, method: str, node: ast.With) -> list[ast.stmt]:
        """Return the call of a method of the object ``name``, if the script defines the method."""
        if not has_script_method(type(value_at(chain(name), self._place)), method):
            return []
        function = ast.copy_location(ast.Attribute(name, method, ast.Load()), node)
        call = ast.copy_location(ast.Call(function, [], []), node)
        return [ast.copy_location(ast.Expr(cast("ast.expr", self.visit(call))), node)]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        call = _as_method(node)
        functions = self.aliases.functions(call.func)
        if len(functions) == 1 and functions[0] is call.func:
            return self._inlined(node, call)
        found = list[ast.expr]()
        for function in functions:
            if self._others >= OTHERS_MAX:
                break
            one = ast.copy_location(ast.Call(function, list(call.args), list(call.keywords)), node)
            if (inlined := self._inlined(one, one)) is not one:
                self._others += 1
                found.append(inlined)
        if len(functions) < 2 or not found:
            return found[0] if found else node
        # The call may also change another item, so it counts as a change of the container as well.
        found.append(node)
        return ast.copy_location(ast.Call(ast.Name(f"any{LOCAL}", ast.Load()), found, []), node)

    def _inlined(self, node: ast.Call, call: ast.Call) -> ast.Call:
        """Return ``node`` with the body of the function that ``call`` runs, and with those of its hooks."""
        called = called_by(call.func, self._place)
        if called is None:
            return node
        callee = callee_of(called, self._place)
        found: ast.Call = node if callee is None else self._with_body(call, callee) or node
        for hook, before in _inside(called, self._place, self._hooks):
            if hook.function.__code__ not in self._inside:
                self._inside.add(hook.function.__code__)
                name = ast.Name(f"hook{LOCAL}", ast.Load())
                around = ast.copy_location(ast.Call(name, [*before, found], []), node)
                found = self._with_body(around, hook) or found
        return found

    def _with_body(self, node: ast.Call, callee: Callee) -> CallWithBody | None:
        """Return a call with the body of ``callee``; None if there are too many bodies, or if there is no source."""
        code = callee.function.__code__
        is_of_update = any(has_line(code, *place) for place in self._inner)
        depth, active = self._around
        if not is_of_update:
            depth += 1
            if depth > DEPTH_MAX or self._count - self._reads - self._others >= BODIES_MAX:
                return None
        source = None if code in active or not of_script(code.co_filename) else definition(code)
        if source is None:
            return None
        self._count += 1
        names = CallerNames(source, node, callee, f"{LOCAL}{self._count}", self._place[0])
        statements = [names.visit(statement) for statement in source.body]
        bindings = list(names.bindings())
        self.aliases.enter_body(statements, bindings, is_running=is_of_update)
        names.replace_arguments(node)
        call = CallWithBody(node, bindings, updates=callee.updates)
        opened = _Open(call, statements, _Around(depth, (*active, code)))
        if is_of_update:
            self._open.appendleft(opened)
        else:
            self._open.append(opened)
        return call


class _Around(NamedTuple):
    """The calls around a body: their number, without those of the update, and their functions."""

    depth: int
    active: tuple[CodeType, ...]


class _Open(NamedTuple):
    """A call with the statements of its body, in which no call has a body."""

    call: CallWithBody
    statements: list[ast.stmt]
    around: _Around


def _as_method(call: ast.Call) -> ast.Call:
    """Return the call behind ``next(batches)``, ``map(f, rows)`` and ``pool.submit(f, x)``, and others as they are.

    The function of ``map`` and ``filter`` gets the containers in the place of their items.
    """
    match call:
        case ast.Call(func=ast.Name(id="map" | "filter"), args=[function, *given], keywords=[]):
            return ast.copy_location(ast.Call(function, given, []), call)
        case ast.Call(func=ast.Attribute(attr="submit"), args=[function, *given]):
            return ast.copy_location(ast.Call(function, given, call.keywords), call)
        case ast.Call(func=ast.Name(id="next"), args=[source, *_]) if chain(source):
            method = ast.copy_location(ast.Attribute(source, "__next__", ast.Load()), call)
            return ast.copy_location(ast.Call(method, [], []), call)
    return call


def _inside(
    called: CalledValue, place: tuple[str, int], hooks: HookSearch
) -> Iterator[tuple[Callee, list[ast.expr]]]:
    """Yield the functions that a library runs in a call of ``called``.

    Each comes with its arguments before the one that stands for the result of the call.
    """
    if called.attribute == "apply":
        found = methods_of_function(called.holder)
    else:
        found = hooks.of(called.holder if called.attribute == "step" else called.value)
    for hook in found:
        name = getattr(hook.function, "__name__", "")
        itself = ast.Name(name, ast.Load()) if name else object_named(hook.function, "hook", place)
        function = run_by(hook.function, itself, place)
        if function is not None:
            before: list[ast.expr] = [ast.Constant(None)] * hook.before
            if hook.module is not None:
                kind = type(hook.module).__name__
                before[:1] = [object_named(hook.module, f"{name} of {kind}", place)]
            yield function, before


def _place(node: ast.AST) -> tuple[type, int, int]:
    return type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
