"""The bodies of the script's functions, put into the calls that a loop makes: a part of the search in the source.

Theory. A script may keep what a step takes over from the step before in an object, such as a schedule that counts its
calls. The source of the loop alone does not show it. So each call of a function or method of the script gets the body
of that function. In the body, ``self`` becomes the object of the call. A parameter becomes the variable that is its
argument, if the body does not assign it. Other parameters are assigned from the arguments.
Other local names are renamed, because they end with the call. So are the variables of a function that has returned,
and the global variables of another file: they get the name of that function or module. The name of a function is looked
up in the running script, so the search needs the frames of the script on the stack. A call of a module that a library
has wrapped (``DistributedDataParallel``, ``torch.compile``) counts as a call of the module in it, under the variable of
the script that has this module, if there is one.

A branch that flags exclude is left out: those of ``argparse``, and bools that the loop does not set. Functions of
libraries are left out, and so are functions below ``DEPTH_MAX`` calls and after ``BODIES_MAX`` bodies. The calls of the
loop get their bodies first, then the calls in these bodies. The functions in which the update is made now are a part of
the loop: they add nothing to the depth, and they get their bodies in any case.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import inspect
import linecache
import os
import textwrap
import tokenize
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import NamedTuple, cast

from holdfast.runtime.worker.script_frames import (
    LIBRARIES,
    OURS,
    frames_outside,
    has_line,
    name_of_self,
    name_outside,
    values_of,
    variable_of,
)

DEPTH_MAX = 3
BODIES_MAX = 50
LOCAL = "@"
"""Character in the new name of a local variable of a called function. No variable of a script has it."""

_WRAPPED = ("module", "_orig_mod")
"""Names under which wrappers hold their module."""
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class CallWithBody(ast.Call):
    """A call with the body of the called function.

    Attributes:
        body: the statements of the function, with the names of the caller.
        updates: the function is the ``step`` of an optimizer.
    """

    _fields = (*ast.Call._fields, "body")

    def __init__(self, call: ast.Call, body: list[ast.stmt], *, updates: bool) -> None:
        super().__init__(func=call.func, args=call.args, keywords=call.keywords)
        ast.copy_location(self, call)
        self.body = body
        self.updates = updates

    def results(self) -> Iterator[ast.expr]:
        """Yield the expressions on which the value of the call depends."""
        yield from (self.func, *self.args, *(keyword.value for keyword in self.keywords))
        for statement in self.body:
            yield from _returned(statement)


def of_script(file: str) -> bool:
    """Return whether ``file`` belongs to the script, and not to a library, Holdfast or the interpreter."""
    # An environment may take packages from another one, which ``LIBRARIES`` does not have.
    return not file.startswith((OURS, *LIBRARIES, "<")) and not any(part in file for part in _PACKAGES)


def chain(node: ast.AST) -> str:
    """Return a variable with its attributes as text (``self.schedule.step``); empty for any other expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            owner = chain(node.value)
            return f"{owner}.{node.attr}" if owner else ""
    return ""


def _new_tree_of(file: str) -> ast.Module:
    return _parsed("".join(linecache.getlines(file)))


@cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a source file; an empty one if the source is not there."""
    return _new_tree_of(file)


def with_bodies(
    place: tuple[str, int], nodes: Sequence[ast.AST], inner: Sequence[tuple[str, int]] = ()
) -> list[ast.AST]:
    """Return copies of ``nodes``, in which the calls of the script's functions have bodies.

    Args:
        place: file and line that the frame with the nodes executes now.
        nodes: nodes of ``tree_of(file)``. The first one contains the others.
        inner: file and line that the frames inside of the nodes execute now.
    """
    copies = _copies(place[0], nodes)
    if copies:
        _Bodies(place, inner, copies[0]).fill()
    return copies


def module_with_bodies(place: tuple[str, int], nodes: Sequence[ast.AST]) -> ast.Module:
    """Return a module of copies of ``nodes``, in which the calls of the script's functions have bodies.

    Args:
        place: file and line that the frame with the nodes executes now.
        nodes: nodes of ``tree_of(file)``. None contains another one.
    """
    module = ast.Module(cast("list[ast.stmt]", _copies(place[0], nodes)), [])
    _Bodies(place, (), module).fill()
    return module


def _copies(file: str, nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return copies of nodes of ``tree_of(file)``: nodes of another tree of the same source."""
    # A second parse takes a hundredth of the time of a copy.
    tree = _new_tree_of(file)
    wanted = {_place(node): None for node in nodes}
    found = {at: node for node in ast.walk(tree) if (at := _place(node)) in wanted}
    return [found[at] for at in wanted if at in found]


class _Bodies(ast.NodeTransformer):
    """The transformer that gives calls their bodies.

    Args:
        place: file and line that the frame of the loop executes now. Functions of other files have other globals.
        inner: file and line that the frames inside of the loop execute now.
        loop: the loop.
    """

    def __init__(self, place: tuple[str, int], inner: Sequence[tuple[str, int]], loop: ast.AST) -> None:
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
        self._count = 0
        self._around = _Around(0, ())
        self._open: deque[_Open] = deque()

    def fill(self) -> None:
        """Give bodies to the calls of the loop, then to the calls in these bodies, and so on.

        A model and its augmentations have more functions than ``BODIES_MAX``. They must not take the bodies of the
        calls that the loop itself makes after them.
        """
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
        """Return the value of flags, which do not change in the loop; None: the condition has other parts."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=flag):
                value = self._setting(flag)
                return None if value is None else not value
            case ast.BoolOp(op=op, values=flags):
                values, decides = [self._setting(flag) for flag in flags], isinstance(op, ast.Or)
                return decides if decides in values else None if None in values else not decides
            case ast.Name(id=name) if name not in self._variables:
                found = _value(name, self._place)
                return found if isinstance(found, bool) else None
            case ast.Attribute(value=owner, attr=name) if chain(owner) and name not in self._assigned:
                arguments = _value(chain(owner), self._place)
                value = arguments.__dict__.get(name) if isinstance(arguments, argparse.Namespace) else None
                return value if isinstance(value, bool) else None
        return None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        callee = _callee(node.func, self._place)
        if callee is None:
            return node
        code = callee.function.__code__
        is_of_update = any(has_line(code, *place) for place in self._inner)
        depth, active = self._around
        if not is_of_update:
            depth += 1
            if depth > DEPTH_MAX or self._count >= BODIES_MAX:
                return node
        source = None if code in active or not of_script(code.co_filename) else definition(code)
        if source is None:
            return node
        self._count += 1
        names = _Names(source, node, callee, f"{LOCAL}{self._count}", self._place[0])
        statements = [names.visit(statement) for statement in source.body]
        call = CallWithBody(node, list(names.bindings()), updates=callee.updates)
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


class _Callee(NamedTuple):
    """The Python function that a call runs now.

    Attributes:
        function: the function.
        owner: the expression of its ``self``; None: it has none.
        updates: it is the ``step`` of an optimizer, which has parameter groups.
        given: number of its arguments that ``functools.partial`` holds.
    """

    function: FunctionType
    owner: ast.expr | None
    updates: bool
    given: int


def _callee(called: ast.expr, place: tuple[str, int]) -> _Callee | None:
    """Return the function that the expression ``called`` is now; None: it is no Python function."""
    if not chain(called):
        return None
    owner: ast.expr | None = None
    updates = False
    if isinstance(called, ast.Attribute):
        holder = _value(chain(called.value), place)
        value = static_of(holder, called.attr)
        updates = called.attr == "step" and "param_groups" in instance_of(holder)
        if isinstance(value, FunctionType) and called.attr not in instance_of(holder):
            owner = called.value  # a method, and not a function in a module or in an attribute
        elif isinstance(value, staticmethod):
            value = value.__func__
    else:
        value = _value(called.id, place) if isinstance(called, ast.Name) else None
    given = 0
    if isinstance(value, partial):
        given = len(value.args)
        value = value.func
    if isinstance(value, MethodType):
        owner = ast.Name(name_of_self(chain(called), value.__self__), ast.Load())
        value = value.__func__
    elif value is not None and not _is_code(value):
        wrapped = _unwrapped(value, called, place)
        kind, owner = type(wrapped.module), wrapped.name
        value = static_of(kind, "forward") or static_of(kind, "__call__")
    found = inspect.unwrap(value) if callable(value) else None
    return _Callee(found, owner, updates, given) if isinstance(found, FunctionType) else None


class _Module(NamedTuple):
    """A module, and the expression by which the script has it."""

    module: object
    name: ast.expr


def _unwrapped(value: object, name: ast.expr, place: tuple[str, int]) -> _Module:
    """Return the module in the wrappers of libraries around ``value``; ``value`` itself if it is no wrapper."""
    found = _Module(value, name)
    while is_of_library(found.module):
        inner = getattr(found.module, "__dict__", {}).get("_modules", {})
        key = next((key for key in _WRAPPED if key in inner), None)
        if key is None or len(inner) > 1:
            break
        variable = variable_of(inner[key], place)
        inside = ast.Attribute(found.name, key, ast.Load())
        found = _Module(inner[key], ast.Name(variable, ast.Load()) if variable else inside)
    return found


def is_of_library(module: object) -> bool:
    """Return whether ``module`` is a module whose ``forward`` is no code of the script."""
    forward = static_of(type(module), "forward")
    return isinstance(forward, FunctionType) and not of_script(forward.__code__.co_filename)


def _sees_callers(function: FunctionType) -> bool:
    """Return whether the function around another one is on the stack, so that its variables are those of a frame."""
    around = function.__qualname__.rpartition(".<locals>.")[0]
    return any(frame.f_code.co_qualname == around for frame in frames_outside((OURS, *LIBRARIES)))


def _is_code(value: object) -> bool:
    """Return whether ``value`` is code itself, and not an object whose class may define calls of it."""
    return isinstance(value, FunctionType | type | ModuleType) or inspect.isroutine(value)


def _value(name: str, place: tuple[str, int]) -> object:
    """Return the value of a variable or its attribute now, without a call of code of the script."""
    first, *attributes = name.split(".")
    value = values_of([first], place).get(first)
    for attribute in attributes:
        value = static_of(value, attribute)
    return value


def static_of(holder: object, attribute: str) -> object:
    """Return an attribute of an object or its class without a call of code of the script; None: there is none."""
    found = instance_of(holder).get(attribute)
    if found is not None:
        return found
    kind = holder if isinstance(holder, type) else type(holder)
    return next((vars(base)[attribute] for base in kind.__mro__ if attribute in vars(base)), None)


def instance_of(holder: object) -> dict[str, object]:
    """Return the attributes of an object, and the modules that a torch module holds."""
    attributes = {} if isinstance(holder, type) else getattr(holder, "__dict__", {})
    modules = attributes.get("_modules")
    return {**modules, **attributes} if isinstance(modules, dict) else attributes


def definition(code: CodeType) -> ast.FunctionDef | None:
    """Return a new syntax tree of a function; None: its source is not there, or it is a lambda."""
    tree = _parsed(_text(code))
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


@cache
def _text(code: CodeType) -> str:
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    # inspect.getsource() takes fifty times as long: it asks all modules for their files.
    try:
        return textwrap.dedent("".join(inspect.getblock(lines))) if lines else ""
    except (SyntaxError, tokenize.TokenError):
        return ""


def _parsed(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return ast.Module([], [])


def parameters_of(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters of a function that arguments without a name fill, in their order."""
    return [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]


def arguments_of(call: ast.Call, parameters: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield parameters of a function with their arguments in ``call``, as far as the call shows them.

    Args:
        call: the call.
        parameters: the parameters that its arguments without a name fill.
    """
    for name, value in zip(parameters, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield name, value
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


class _Names(ast.NodeTransformer):
    """The transformer that gives the names in a function the meaning that they have for its caller.

    Args:
        definition: the source of the function.
        call: the call of the function.
        callee: the function.
        mark: what is added to the local names of this call.
        file: the file of the loop.
    """

    def __init__(
        self, definition: ast.FunctionDef, call: ast.Call, callee: _Callee, mark: str, file: str
    ) -> None:
        function, self._owner, _, given = callee
        parameters = parameters_of(definition)
        self._self = parameters.pop(0) if self._owner is not None and parameters else ""
        self._mark = mark
        stored = {
            node.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        arguments = {node.arg for node in ast.walk(definition.args) if isinstance(node, ast.arg)}
        declared = {
            name
            for node in ast.walk(definition)
            if isinstance(node, ast.Global | ast.Nonlocal)
            for name in node.names
        }
        self._function = function
        self._same_file = function.__code__.co_filename == file
        self._locals = {*arguments, *stored} - declared
        self._given = dict(arguments_of(call, parameters[given:]))
        self._same = {
            name: value for name, value in self._given.items() if chain(value) and name not in stored
        }

    def bindings(self) -> Iterator[ast.stmt]:
        """Yield assignments of the arguments of the call to the parameters."""
        for name, value in self._given.items():
            if name not in self._same:
                yield ast.Assign(targets=[ast.Name(f"{name}{self._mark}", ast.Store())], value=value)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id == self._self and self._owner is not None:
            return self._owner
        if node.id in self._same:
            return self._same[node.id]
        if node.id in self._locals:
            node.id += self._mark
        elif not self._is_of_loop(node.id):
            node.id = name_outside(self._function, node.id) or f"{node.id}{self._mark}"
        return node

    def _is_of_loop(self, name: str) -> bool:
        """Return whether a variable outside of the function has the same name in the function with the loop."""
        if name in self._function.__code__.co_freevars:
            return self._same_file and _sees_callers(self._function)
        return self._same_file or hasattr(builtins, name)


def _returned(node: ast.AST) -> list[ast.expr]:
    """Return the values that a statement of a function returns, and the conditions of these returns."""
    if isinstance(node, ast.Return):
        return [] if node.value is None else [node.value]
    found = [value for child in ast.iter_child_nodes(node) for value in _returned(child)]
    return [*found, node.test] if found and isinstance(node, ast.If) else found


def _place(node: ast.AST) -> tuple[type, int, int]:
    return type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
