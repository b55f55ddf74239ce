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

A branch that cannot run with the present flags is left out. Flags are options of ``argparse``, the attribute
``training`` of a module, and bools that the loop does not set. Functions of libraries are not inlined, nor are
functions more than ``DEPTH_MAX`` calls deep. At most ``BODIES_MAX`` functions are inlined: those that the loop itself
calls come first, then those that they call. The functions that are running while the update is made do not count for
the depth, and are inlined in any case.
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
from typing import ClassVar, NamedTuple, cast

from holdfast.runtime.worker.script_attributes import instance_of, static_of
from holdfast.runtime.worker.script_frames import (
    LIBRARIES,
    OURS,
    frames_outside,
    has_line,
    name_of_default,
    name_of_self,
    name_outside,
    values_of,
    variable_of,
)
from holdfast.session.variables.hooks import HookSearch, methods_of_function
from holdfast.session.variables.script_trees import parsed

DEPTH_MAX = 3
BODIES_MAX = 50
READS_MAX = 100
LOCAL = "@"
"""Character in the new name of a local variable of a called function. No variable of a script has it."""

_WRAPPED = ("module", "_orig_mod")
"""Names under which wrappers hold their module."""
_PACKAGES = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


class CallWithBody(ast.Call):
    """A node of a syntax tree: a call with the body of the called function.

    The body assigns the arguments to the parameters. An argument that contains such a call is only there, and the call
    has the name of the parameter in its place. Otherwise a nest of n calls would be a tree with 2**n leaves.

    Attributes:
        body: the statements of the function, in which variables have the names of the caller.
        updates: True if the function is the method ``step`` of an optimizer.
    """

    _fields = ("func", "body", "args", "keywords")
    _field_types: ClassVar = {**getattr(ast.Call, "_field_types", {}), "body": list[ast.stmt]}
    """From Python 3.13 on, a node has the type of each field here. Python 3.15 raises an error without it."""

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
    """Return a variable or an attribute of one as text (``self.schedule.step``); empty for any other expression."""
    match node:
        case ast.Name():
            return node.id
        case ast.Attribute():
            owner = chain(node.value)
            return f"{owner}.{node.attr}" if owner else ""
    return ""


def _new_tree_of(file: str) -> ast.Module:
    return parsed("".join(linecache.getlines(file)))


@cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a source file, or an empty tree if the source is not available."""
    return _new_tree_of(file)


def with_bodies(
    place: tuple[str, int], nodes: Sequence[ast.AST], inner: Sequence[tuple[str, int]] = ()
) -> list[ast.AST]:
    """Return copies of ``nodes`` in which the script's functions are inlined into their calls.

    Args:
        place: file and line that a stack frame executes now; the nodes are in the source of that frame.
        nodes: nodes of ``tree_of(file)``. The first node contains the others.
        inner: file and line of each stack frame that was called from the code of the nodes.
    """
    copies = _copies(place[0], nodes)
    if copies:
        _Bodies(place, inner, copies[0]).fill()
    return copies


def module_with_bodies(place: tuple[str, int], nodes: Sequence[ast.AST]) -> ast.Module:
    """Return a syntax tree with copies of ``nodes`` in which the script's functions are inlined into their calls.

    Args:
        place: file and line that a stack frame executes now; the nodes are in the source of that frame.
        nodes: nodes of ``tree_of(file)``. No node contains another one.
    """
    module = ast.Module(cast("list[ast.stmt]", _copies(place[0], nodes)), [])
    _Bodies(place, (), module).fill()
    return module


def loop_of_calls(called: Sequence[ast.expr], place: tuple[str, int]) -> tuple[ast.While, list[ast.expr]]:
    """Return a loop that only makes calls, with the bodies of the called functions, and the calls in it.

    Args:
        called: what is called: variables of the stack frame that executes ``place``, or attributes of them.
        place: file and line.
    """
    calls = (ast.Call(each, [ast.Name(f"batch{LOCAL}", ast.Load())], []) for each in called)
    body = [ast.Assign([ast.Name(f"result{LOCAL}", ast.Store())], call) for call in calls]
    loop = ast.fix_missing_locations(ast.While(ast.Constant(True), [*body], []))
    _Bodies(place, (), loop).fill()
    return loop, [each.value for each in body]


def _copies(file: str, nodes: Sequence[ast.AST]) -> list[ast.AST]:
    """Return copies of ``nodes``, nodes of ``tree_of(file)``, from a new syntax tree of the same file."""
    # A second parse takes a hundredth of the time of a copy.
    tree = _new_tree_of(file)
    wanted = {_place(node): None for node in nodes}
    found = {at: node for node in ast.walk(tree) if (at := _place(node)) in wanted}
    return [found[at] for at in wanted if at in found]


class _Bodies(ast.NodeTransformer):
    """The transformer of a syntax tree that inlines called functions.

    Args:
        place: file and line that the stack frame with the loop executes now. Functions of other files have other
            globals.
        inner: file and line of each stack frame that was called from the code of the loop.
        loop: the syntax tree of the loop.
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
        self._count = 0  # bodies
        self._reads = 0  # reads of properties and the like, which count as calls
        self._hooks = HookSearch()
        self._inside = set[CodeType]()  # functions that libraries call, which have a body already
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
        """Return the value of a condition that consists of flags, which the loop does not change.

        The result is None if the condition has other parts.
        """
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=flag):
                value = self._setting(flag)
                return None if value is None else not value
            case ast.BoolOp(op=op, values=flags):
                values, decides = [self._setting(flag) for flag in flags], isinstance(op, ast.Or)
                return decides if decides in values else None if None in values else not decides
            case ast.Name(id=name) if name not in self._variables:
                found = value_at(name, self._place)
                return found if isinstance(found, bool) else None
            case ast.Attribute(value=owner, attr=name) if chain(owner) and name not in self._assigned:
                arguments = value_at(chain(owner), self._place)
                holder = instance_of(arguments)
                is_flag = isinstance(arguments, argparse.Namespace) or (
                    name == "training" and "_modules" in holder
                )
                found = holder.get(name) if is_flag else None
                return found if isinstance(found, bool) else None
        return None

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
        self.generic_visit(node)
        getter = _getter(node, self._place)
        if getter is None or self._reads >= READS_MAX:
            return node
        found = self._with_body(ast.copy_location(ast.Call(node, [], []), node), getter)
        # Settings may have `__getattr__`: their reads must not take the bodies of calls.
        self._reads += found is not None
        return found or node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        call = _as_method(node)
        called = _called(call.func, self._place)
        if called is None:
            return node
        callee = _callee(called, self._place)
        found: ast.Call = node if callee is None else self._with_body(call, callee) or node
        for hook, before in _inside(called, self._place, self._hooks):
            if hook.function.__code__ not in self._inside:
                self._inside.add(hook.function.__code__)
                name = ast.Name(f"hook{LOCAL}", ast.Load())
                around = ast.copy_location(ast.Call(name, [*before, found], []), node)
                found = self._with_body(around, hook) or found
        return found

    def _with_body(self, node: ast.Call, callee: _Callee) -> CallWithBody | None:
        """Return a call with the body of ``callee``; None if there are too many bodies, or if there is no source."""
        code = callee.function.__code__
        is_of_update = any(has_line(code, *place) for place in self._inner)
        depth, active = self._around
        if not is_of_update:
            depth += 1
            if depth > DEPTH_MAX or self._count - self._reads >= BODIES_MAX:
                return None
        source = None if code in active or not of_script(code.co_filename) else definition(code)
        if source is None:
            return None
        self._count += 1
        names = _Names(source, node, callee, f"{LOCAL}{self._count}", self._place[0])
        statements = [names.visit(statement) for statement in source.body]
        bindings = list(names.bindings())
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


class _Callee(NamedTuple):
    """The Python function that a call in the source would run at this moment.

    Attributes:
        function: the function.
        owner: the expression for the ``self`` of a method; None if the function is not a method.
        updates: True if the function is the method ``step`` of an optimizer (an object with parameter groups).
        given: number of arguments that ``functools.partial`` has already bound.
    """

    function: FunctionType
    owner: ast.expr | None
    updates: bool
    given: int


def _as_method(call: ast.Call) -> ast.Call:
    """Return ``next(batches)`` as a call of the method behind it, and any other call as it is."""
    match call:
        case ast.Call(func=ast.Name(id="next"), args=[source, *_]) if chain(source):
            method = ast.copy_location(ast.Attribute(source, "__next__", ast.Load()), call)
            return ast.copy_location(ast.Call(method, [], []), call)
    return call


def _getter(node: ast.Attribute, place: tuple[str, int]) -> _Callee | None:
    """Return the function that a read of the attribute ``node`` would run now: a property, or ``__getattr__``.

    The result is None if there is no such function.
    """
    if not isinstance(node.ctx, ast.Load) or not chain(node.value):
        return None
    holder = value_at(chain(node.value), place)
    found = static_of(type(holder), node.attr)
    if found is None and holder is not None and node.attr not in instance_of(holder):
        getter = static_of(type(holder), "__getattr__")
    else:
        getter = found.fget if isinstance(found, property) else None
    return _Callee(getter, node.value, updates=False, given=0) if isinstance(getter, FunctionType) else None


class _Called(NamedTuple):
    """The present value of the expression of a call.

    Attributes:
        expression: the expression, a variable or an attribute.
        holder: the object with the attribute; None for a variable.
        value: the value; None if it is not known.
    """

    expression: ast.expr
    holder: object
    value: object

    @property
    def attribute(self) -> str:
        """Name of the attribute; empty for a variable."""
        return self.expression.attr if isinstance(self.expression, ast.Attribute) else ""


def _called(expression: ast.expr, place: tuple[str, int]) -> _Called | None:
    """Return the present value of ``expression``; None if it is neither a variable nor an attribute of one."""
    match expression:
        case ast.Name(id=name):
            return _Called(expression, None, value_at(name, place))
        case ast.Attribute(value=owner, attr=attribute) if chain(owner):
            holder = value_at(chain(owner), place)
            return _Called(expression, holder, static_of(holder, attribute))
    return None


def _callee(called: _Called, place: tuple[str, int]) -> _Callee | None:
    """Return the function that a call of ``called`` would run now; None if it is not a Python function."""
    owner: ast.expr | None = None
    value, updates = called.value, False
    if isinstance(called.expression, ast.Attribute):
        attributes = instance_of(called.holder)
        updates = called.attribute == "step" and "param_groups" in attributes
        if isinstance(value, FunctionType) and called.attribute not in attributes:
            owner = called.expression.value  # a method, and not a function in a module or in an attribute
        elif isinstance(value, staticmethod):
            value = value.__func__
    found = _run_by(value, called.expression, place, owner)
    return None if found is None else found._replace(updates=updates)


def _run_by(
    value: object, name: ast.expr, place: tuple[str, int], owner: ast.expr | None = None
) -> _Callee | None:
    """Return the function that a call of ``value`` runs; None if it is not a Python function.

    Args:
        value: a function, a method, an object that can be called, or a ``functools.partial`` of one of these.
        name: the expression for ``value``.
        owner: the expression for the ``self`` of ``value``, if it is known.
    """
    given = 0
    if isinstance(value, partial):
        given = len(value.args)
        value = value.func
    if isinstance(value, MethodType):
        owner = _object(value.__self__, chain(name), place)
        value = value.__func__
    elif value is not None and not _is_code(value):
        wrapped = unwrapped(value, name, place)
        kind, owner = type(wrapped.module), wrapped.name
        value = static_of(kind, "forward") or static_of(kind, "__call__")
    found = inspect.unwrap(value) if callable(value) else None
    return _Callee(found, owner, False, given) if isinstance(found, FunctionType) else None


def _inside(
    called: _Called, place: tuple[str, int], hooks: HookSearch
) -> Iterator[tuple[_Callee, list[ast.expr]]]:
    """Yield the functions that a library runs in a call of ``called``.

    Each comes with its arguments before the one that stands for the result of the call.
    """
    if called.attribute == "apply":
        found = methods_of_function(called.holder)
    else:
        found = hooks.of(called.holder if called.attribute == "step" else called.value)
    for hook in found:
        name = getattr(hook.function, "__name__", "")
        itself = ast.Name(name, ast.Load()) if name else _object(hook.function, "hook", place)
        function = _run_by(hook.function, itself, place)
        if function is not None:
            before: list[ast.expr] = [ast.Constant(None)] * hook.before
            if hook.module is not None:
                kind = type(hook.module).__name__
                before[:1] = [_object(hook.module, f"{name} of {kind}", place)]
            yield function, before


def _object(value: object, function: str, place: tuple[str, int]) -> ast.expr:
    """Return the variable that holds ``value``, or the name of the object as ``self`` of ``function``."""
    return ast.Name(variable_of(value, place) or name_of_self(function, value), ast.Load())


class NamedModule(NamedTuple):
    """A torch module, and the expression by which the script refers to it."""

    module: object
    name: ast.expr


def unwrapped(value: object, name: ast.expr, place: tuple[str, int]) -> NamedModule:
    """Return the module inside ``value`` if ``value`` is a wrapper of a library, otherwise ``value`` itself."""
    found = NamedModule(value, name)
    while is_of_library(found.module):
        inner = instance_of(found.module).get("_modules")
        if not isinstance(inner, dict):
            break
        key = next((key for key in _WRAPPED if key in inner), None)
        if key is None or len(inner) > 1:
            break
        variable = variable_of(inner[key], place)
        inside = ast.Attribute(found.name, key, ast.Load())
        found = NamedModule(inner[key], ast.Name(variable, ast.Load()) if variable else inside)
    return found


def is_of_library(module: object) -> bool:
    """Return whether ``module`` has a method ``forward`` that comes from a library, and not from the script."""
    forward = static_of(type(module), "forward")
    return isinstance(forward, FunctionType) and not of_script(forward.__code__.co_filename)


def _sees_callers(function: FunctionType) -> bool:
    """Return whether the function that defines ``function`` is on the stack, so that its variables can be read."""
    around = function.__qualname__.rpartition(".<locals>.")[0]
    return any(frame.f_code.co_qualname == around for frame in frames_outside((OURS, *LIBRARIES)))


def _is_code(value: object) -> bool:
    """Return whether ``value`` is a function, class, method or Python module, and not another callable object."""
    return isinstance(value, FunctionType | type | ModuleType) or inspect.isroutine(value)


def value_at(name: str, place: tuple[str, int]) -> object:
    """Return the present value of a variable or its attribute, without running code of the script."""
    first, *attributes = name.split(".")
    value = values_of([first], place).get(first)
    for attribute in attributes:
        value = static_of(value, attribute)
    return value


def definition(code: CodeType) -> ast.FunctionDef | None:
    """Return a new syntax tree of a function; None if the source is not available.

    The source of a lambda is not known if another one with the same parameters begins in the same line.
    """
    if code.co_name == "<lambda>":
        return _definition_of_lambda(code)
    tree = parsed(_text(code))
    return next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)


def _definition_of_lambda(code: CodeType) -> ast.FunctionDef | None:
    names = list(code.co_varnames[: code.co_argcount])
    found = [
        node
        for node in ast.walk(_new_tree_of(code.co_filename))
        if isinstance(node, ast.Lambda)
        and node.lineno == code.co_firstlineno
        and [each.arg for each in (*node.args.posonlyargs, *node.args.args)] == names
    ]
    if len(found) != 1:
        return None
    result = ast.copy_location(ast.Return(found[0].body), found[0])
    return ast.FunctionDef("lambda", found[0].args, [result], [], lineno=code.co_firstlineno)


@cache
def _text(code: CodeType) -> str:
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    # inspect.getsource() takes fifty times as long: it asks all modules for their files.
    try:
        return textwrap.dedent("".join(inspect.getblock(lines))) if lines else ""
    except (SyntaxError, tokenize.TokenError):
        return ""


def parameters_of(definition: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the names of the positional parameters of a function, in their order."""
    return [each.arg for each in (*definition.args.posonlyargs, *definition.args.args)]


def arguments_of(call: ast.Call, parameters: Sequence[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters of a function, each with its argument in ``call``, if the source of the call shows it.

    Args:
        call: the call.
        parameters: the names of the positional parameters of the function.
    """
    for name, value in zip(parameters, call.args, strict=False):
        if isinstance(value, ast.Starred):
            break
        yield name, value
    yield from ((keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg)


class _Names(ast.NodeTransformer):
    """The transformer that replaces the names in an inlined function by the names that its caller uses.

    Args:
        definition: the source of the function.
        call: the call of the function.
        callee: the function.
        mark: the suffix for the local names of this call.
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
        self._same: dict[str, ast.expr] = {
            name: value for name, value in self._given.items() if chain(value) and name not in stored
        }
        for name in arguments - self._given.keys() - stored - {self._self}:
            if kept := name_of_default(function, name):
                self._same[name] = ast.Name(kept, ast.Load())

    def bindings(self) -> Iterator[ast.stmt]:
        """Yield an assignment for each parameter that is not replaced by its argument."""
        for name, value in self._given.items():
            if name not in self._same:
                yield ast.Assign(targets=[ast.Name(f"{name}{self._mark}", ast.Store())], value=value)

    def replace_arguments(self, call: ast.Call) -> None:
        """Put the names of parameters in the place of arguments of ``call`` that contain calls with bodies."""
        bound = {id(value): name for name, value in self._given.items() if name not in self._same}

        def named(value: ast.expr) -> ast.expr:
            if id(value) not in bound or not any(isinstance(part, CallWithBody) for part in ast.walk(value)):
                return value
            return ast.copy_location(ast.Name(f"{bound[id(value)]}{self._mark}", ast.Load()), value)

        call.args = [named(value) for value in call.args]
        call.keywords = [ast.keyword(each.arg, named(each.value)) for each in call.keywords]

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
        """Return whether ``name``, which is not local in the inlined function, means the same variable in the loop."""
        if name in self._function.__code__.co_freevars:
            return self._same_file and _sees_callers(self._function)
        return self._same_file or hasattr(builtins, name)


def _returned(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement of a function returns, and the conditions of these returns."""
    if isinstance(node, ast.Return):
        return [] if node.value is None else [node.value]
    found = [value for child in ast.iter_child_nodes(node) for value in _returned(child)]
    return [*found, node.test] if found and isinstance(node, ast.If) else found


def _place(node: ast.AST) -> tuple[type, int, int]:
    return type(node), getattr(node, "lineno", 0), getattr(node, "col_offset", 0)
