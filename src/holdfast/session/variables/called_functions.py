"""The functions that calls in the source of the script run, found by the names in its running stack frames.

Theory. The name of a function is looked up in the running script, so the search needs the frames of the script on the
stack. A library may have wrapped a module of the script (``DistributedDataParallel``, ``torch.compile``). A call of the
wrapper counts as a call of the wrapped module. If a variable of the script holds the wrapped module, the module gets
the name of this variable. A function whose source is put in the place of its call uses names of its own, so these are
replaced by the names that the caller uses.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import linecache
import os
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import ClassVar, NamedTuple

from holdfast.runtime.worker.script_attributes import instance_of, static_of
from holdfast.runtime.worker.script_frames import (
    LIBRARIES,
    OURS,
    frames_outside,
    name_of_default,
    name_of_self,
    name_outside,
    values_of,
    variable_of,
)
from holdfast.session.variables.script_trees import as_attribute, as_constant, chain, parsed

LOCAL = "@"
"""Character in the new name of a local variable of a called function. No variable of a script has it."""

EXTRA = "get_extra_state"
"""The method of a torch module that returns what it saves besides parameters and buffers."""
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


_also: ContextVar[str] = ContextVar("a file that counts as one of the script", default="")


@contextmanager
def counted_as_script(file: str) -> Iterator[None]:
    """Let the functions in ``file``, which is of a library, count as functions of the script in this context."""
    token = _also.set(file)
    try:
        yield
    finally:
        _also.reset(token)


def of_script(file: str) -> bool:
    """Return whether ``file`` belongs to the script, and not to a library, Holdfast or the interpreter."""
    if file == _also.get():
        return bool(file)
    # An environment may take packages from another one, which ``LIBRARIES`` does not have.
    return not file.startswith((OURS, *LIBRARIES, "<")) and not any(part in file for part in _PACKAGES)


def new_tree_of(file: str) -> ast.Module:
    """Return a new syntax tree of a source file, which may be changed; empty if the source is not available."""
    return parsed("".join(linecache.getlines(file)))


@cache
def tree_of(file: str) -> ast.Module:
    """Return the syntax tree of a source file, or an empty tree if the source is not available."""
    return new_tree_of(file)


class Callee(NamedTuple):
    """The Python function that a call in the source would run at this moment.

    Attributes:
        function: the function.
        owner: the expression for the ``self`` of a method; None if the function is not a method.
        updates: True if the function is the method ``step`` of an optimizer (an object with parameter groups).
        given: arguments that ``functools.partial`` has already bound.
    """

    function: FunctionType
    owner: ast.expr | None
    updates: bool
    given: tuple[object, ...]


def getter_of(node: ast.Attribute, place: tuple[str, int]) -> Callee | None:
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
    return Callee(getter, node.value, updates=False, given=()) if isinstance(getter, FunctionType) else None


class SuperMethod(ast.expr):
    """A node of a syntax tree: the method ``super().attr`` in a method of ``owner`` that the class ``of`` defines.

    It has no fields, because the method uses only those attributes of ``owner`` that its body shows.
    """

    _fields = ()
    owner: ast.expr
    attr: str
    of: type

    @classmethod
    def made(cls, owner: ast.expr, attr: str, of: type) -> SuperMethod:
        """Return a new node. A copy of a node is made without arguments."""
        node = cls()
        node.owner, node.attr, node.of = owner, attr, of
        return node


def super_method(node: ast.Attribute, owner: ast.expr, of: object) -> SuperMethod | None:
    """Return ``super().attr`` in a method of ``owner``; None if ``node`` is another expression.

    Args:
        node: the expression.
        owner: the expression for the ``self`` of the method.
        of: the class that defines the method; None if it is not known.
    """
    match node.value:
        case ast.Call(func=ast.Name(id="super"), args=[]) if isinstance(of, type):
            return ast.copy_location(SuperMethod.made(owner, node.attr, of), node)
    return None


def _inherited(holder: object, of: type, attribute: str) -> object:
    """Return the attribute that ``super()`` finds for ``holder`` in a method of the class ``of``; None if none."""
    order = type(holder).__mro__
    after = order[order.index(of) + 1 :] if of in order else ()
    return next((vars(kind)[attribute] for kind in after if attribute in vars(kind)), None)


class CalledValue(NamedTuple):
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


def called_by(expression: ast.expr, place: tuple[str, int]) -> CalledValue | None:
    """Return the present value of ``expression``; None if it is neither a variable nor an attribute of one."""
    match expression:
        case ast.Name(id=name):
            return CalledValue(expression, None, value_at(name, place))
        case ast.Attribute(value=owner, attr=attribute) if chain(owner):
            holder = value_at(chain(owner), place)
            return CalledValue(expression, holder, static_of(holder, attribute))
        case SuperMethod(owner=owner, attr=attribute, of=of) if chain(owner):
            holder = value_at(chain(owner), place)
            return CalledValue(expression, holder, _inherited(holder, of, attribute))
    return None


def callee_of(called: CalledValue, place: tuple[str, int]) -> Callee | None:
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
        elif isinstance(value, classmethod):
            value, holder = value.__func__, called.expression.value
            owner = (
                holder if isinstance(called.holder, type) else ast.Attribute(holder, "__class__", ast.Load())
            )
    elif isinstance(called.expression, SuperMethod):
        owner = called.expression.owner
    found = run_by(value, called.expression, place, owner)
    return None if found is None else found._replace(updates=updates)


def run_by(
    value: object, name: ast.expr, place: tuple[str, int], owner: ast.expr | None = None
) -> Callee | None:
    """Return the function that a call of ``value`` runs; None if it is not a Python function.

    Args:
        value: a function, a method, an object that can be called, or a ``functools.partial`` of one of these.
        name: the expression for ``value``.
        owner: the expression for the ``self`` of ``value``, if it is known.
    """
    given: tuple[object, ...] = ()
    if isinstance(value, partial):
        given, value = value.args, value.func
    if isinstance(value, MethodType):
        owner = object_named(value.__self__, chain(name), place)
        value = value.__func__
    elif value is not None and not _is_code(value):
        wrapped = unwrapped(value, name, place)
        kind, owner = type(wrapped.module), wrapped.name
        value = static_of(kind, "forward") or static_of(kind, "__call__")
    found = inspect.unwrap(value) if callable(value) else None
    return Callee(found, owner, False, given) if isinstance(found, FunctionType) else None


def object_named(value: object, function: str, place: tuple[str, int]) -> ast.expr:
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


def has_script_method(holder: object, method: str) -> bool:
    """Return whether an object or a class has a method of this name that belongs to the script."""
    found = static_of(holder, method)
    return isinstance(found, FunctionType) and of_script(found.__code__.co_filename)


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
        for node in ast.walk(new_tree_of(code.co_filename))
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


class CallerNames(ast.NodeTransformer):
    """The transformer that replaces the names in an inlined function by the names that its caller uses.

    Args:
        definition: the source of the function.
        call: the call of the function.
        callee: the function.
        mark: the suffix for the local names of this call.
        file: the file of the loop.
    """

    def __init__(
        self, definition: ast.FunctionDef, call: ast.Call, callee: Callee, mark: str, file: str
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
        self._given = dict(arguments_of(call, parameters[len(given) :]))
        self._passed_on = _PassedOn(definition.args, mark)
        if not given:
            without_self = self._owner is not None and not self._self
            self._given |= self._passed_on.take(call, len(parameters), self._owner if without_self else None)
        self._same: dict[str, ast.expr] = {
            name: value for name, value in self._given.items() if _is_plain(value) and name not in stored
        }
        for name, value in zip(parameters, given, strict=False):
            if name not in stored and instance_of(value):
                self._same[name] = ast.Name(name_of_self(function.__name__, value), ast.Load())
        for name in arguments - self._given.keys() - self._same.keys() - stored - {self._self}:
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

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        """Return the method of a base class for ``super().method``, and the attribute of a caller's name otherwise."""
        inherited = None
        if self._owner is not None:
            inherited = super_method(node, self._owner, _class_around(self._function))
        if inherited is None:
            self.generic_visit(node)
        return inherited or node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        """Return a formatted text, as a constant if its parts are constants of the caller."""
        self.generic_visit(node)
        return as_constant(node)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        """Return the call. If it passes on ``*args`` and ``**kwargs`` of the function, it gets their items."""
        args, keywords = self._passed_on.taken_from(node)
        self.generic_visit(node)
        node.args += args  # they have the names of the caller already
        node.keywords += keywords
        return as_attribute(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the name or expression that the caller uses for ``node``."""
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


class _PassedOn:
    """The arguments that a function takes as ``*args`` and ``**kwargs``, as the wrapper in a decorator does.

    Args:
        arguments: the parameters of the function.
        mark: the suffix for the local names of this call.
    """

    def __init__(self, arguments: ast.arguments, mark: str) -> None:
        self._args = "" if arguments.vararg is None else arguments.vararg.arg
        self._keywords = "" if arguments.kwarg is None else arguments.kwarg.arg
        self._named = {each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        self._mark = mark
        self._positional: list[ast.expr] = []
        self._by_name: list[ast.keyword] = []

    def take(self, call: ast.Call, count: int, owner: ast.expr | None) -> dict[str, ast.expr]:
        """Take the arguments of ``call`` behind the first ``count``. Return those that need a local name, by this name.

        Args:
            call: the call of the function.
            count: number of positional parameters.
            owner: the expression for the ``self`` of the function, if no parameter of its own takes it.
        """
        named: dict[str, ast.expr] = {}

        def simple(value: ast.expr, name: str) -> ast.expr:
            if _is_plain(value):
                return value
            named[name] = value
            return ast.copy_location(ast.Name(f"{name}{self._mark}", ast.Load()), value)

        if self._args and not any(isinstance(each, ast.Starred) for each in call.args):
            more = [*([owner] if owner is not None else []), *call.args[count:]]
            self._positional = [simple(value, f"{self._args}{at}") for at, value in enumerate(more)]
        if self._keywords:
            self._by_name = [
                ast.keyword(each.arg, simple(each.value, f"{self._keywords}_{each.arg}"))
                for each in call.keywords
                if each.arg and each.arg not in self._named
            ]
        return named

    def taken_from(self, call: ast.Call) -> tuple[list[ast.expr], list[ast.keyword]]:
        """Remove the arguments of ``call`` that pass on all of the taken ones. Return these."""
        args = [each for each in call.args if self._positional and _is_star_of(each, self._args)]
        keywords = [
            each for each in call.keywords if each.arg is None and chain(each.value) == self._keywords != ""
        ]
        call.args = [each for each in call.args if each not in args]
        call.keywords = [each for each in call.keywords if each not in keywords]
        return (self._positional if args else []), (self._by_name if keywords else [])


def _is_plain(argument: ast.expr) -> bool:
    """Return whether an argument may stand in the place of its parameter: a variable, an attribute or a constant."""
    return bool(chain(argument)) or isinstance(argument, ast.Constant)


def _is_star_of(argument: ast.expr, name: str) -> bool:
    return isinstance(argument, ast.Starred) and chain(argument.value) == name


def _class_around(function: FunctionType) -> type | None:
    """Return the class that defines a method with ``super()``; None if it is not known."""
    names = function.__code__.co_freevars
    if "__class__" not in names or function.__closure__ is None:
        return None
    found = function.__closure__[names.index("__class__")].cell_contents
    return found if isinstance(found, type) else None


def _returned(node: ast.AST) -> list[ast.expr]:
    """Return the expressions that a statement of a function returns, and the conditions of these returns."""
    if isinstance(node, ast.Return):
        return [] if node.value is None else [node.value]
    # An expression may have the body of another function, whose returns are not those of this one.
    inside = (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    found = [value for child in inside for value in _returned(child)]
    return [*found, node.test] if found and isinstance(node, ast.If) else found
