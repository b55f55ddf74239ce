"""The objects behind the local names of a loop: ``meter = self.meter`` in each step makes no new meter.

Theory. The search for variables takes a name that each step sets for a value of this step, and ``meter.count`` with it.
The object keeps its count. So a local name, of the loop or of a function that it calls, is replaced by the name of its
object, if all assignments to it denote the same existing object. An expression denotes an object if it is a variable,
an attribute, a property or a call without arguments of a function of the script with one ``return`` of such an
expression (``args = get_args()``), or an item of a dict, list, tuple or module list. The objects are those of the
running script at the time of the search. An item has a name of ``name_of_item``. If a variable has the object, this
is its name.

If a ``for`` loop goes through objects of the script, its body is repeated for each of them. Any other name of several
objects stays, and a call of it counts as a call of each of them.

Invariants:
1. Only objects that can change are replaced. A number, a text or a tuple is the value at the time of the assignment.
2. An attribute or item that the searched source assigns is no name for an object, because the local name keeps the
   earlier object: ``before = self.state`` and ``self.state = after``. These assignments are known when the whole source
   has been entered, so the caller repeats the search without the names in ``conflicts``.
"""

from __future__ import annotations

import ast
import copy
import re
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import partial
from inspect import isroutine
from itertools import islice
from types import FunctionType, MethodType, ModuleType
from typing import NamedTuple

from holdfast.runtime.worker.script_attributes import has_dtype, instance_of
from holdfast.runtime.worker.script_frames import name_of_item, variables_at
from holdfast.session.variables.attribute_writers import AttributeWriters
from holdfast.session.variables.called_functions import (
    EXTRA,
    LOCAL,
    Callee,
    CallerNames,
    SuperMethod,
    called_by,
    callee_of,
    definition,
    getter_of,
    has_script_method,
    of_script,
    value_at,
)
from holdfast.session.variables.script_trees import chain

ITEMS_MAX = 8
_DEPTH_MAX = 6
_PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, range, ModuleType, type(None))
_CONTAINERS = (dict, list, set, deque)
_SEQUENCES = ("enumerate", "zip", "reversed", "list", "tuple", "sorted", "iter")
_VIEWS = ("items", "values", "children")
_CHANGE_ITEMS = ("append", "appendleft", "clear", "extend", "insert", "pop", "popleft", "remove", "update")
_INNER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)


class _Definition(NamedTuple):
    """An assignment to a name. ``is_item``: the name is one of the items of ``value``, and not ``value`` itself."""

    value: ast.expr
    is_item: bool


class Aliases:
    """The local names of a searched source, and the objects that they denote.

    Args:
        place: file and line that the stack frame with the loop executes now.
        unsafe: the attributes and items that are no names of objects, from ``conflicts`` of an earlier search.
    """

    def __init__(self, place: tuple[str, int], unsafe: frozenset[str]) -> None:
        self._place = place
        self._unsafe = unsafe
        self._definitions: dict[str, list[_Definition]] = {}
        self._values: dict[str, object] = {}
        self._names: dict[int, ast.expr] = {}  # by the id of an object
        self._used = set[str]()
        self._stored = set[str]()
        self._writers = AttributeWriters()
        self._variables: dict[int, str] | None = None  # the names of objects that variables of the frame have

    @property
    def conflicts(self) -> frozenset[str]:
        """The attributes and items that names of objects use, and that the source assigns."""
        return frozenset(self._used & self._stored)

    def enter_loop(self, loop: ast.AST) -> None:
        """Replace the local names of a loop by the names of their objects. ``loop`` is changed."""
        line = self._place[1]
        loops = (node for node in ast.walk(loop) if isinstance(node, ast.For))
        self._enter([loop], (), {id(node) for node in loops if node.lineno <= line <= (node.end_lineno or 0)})

    def enter_body(
        self, statements: Sequence[ast.stmt], bindings: Sequence[ast.stmt], *, is_running: bool
    ) -> None:
        """Replace the local names of the body of a called function by the names of their objects.

        Args:
            statements: the statements, in which no call has a body. They are changed.
            bindings: assignments of arguments to the parameters of the function.
            is_running: True if the update is made in a call of this function.
        """
        running = (id(node) for each in statements for node in ast.walk(each) if isinstance(node, ast.For))
        self._enter(statements, bindings, set(running) if is_running else set())

    def _enter(self, statements: Sequence[ast.AST], bindings: Sequence[ast.stmt], running: Set[int]) -> None:
        names = _LocalNames()
        for statement in statements:
            names.visit(statement)
        for binding in bindings:
            if isinstance(binding, ast.Assign):
                names.bind(binding.targets[0], binding.value)
        known = names.known()
        self._definitions.update(known)
        found = {name: each for name in known if (each := self._object_of(name, names)) is not None}
        others = (name for name in known if name not in found)
        several = {name: objects for name in others if (objects := self._several(name))}
        replacement = _Replacement(found, several, self._object_at, running)
        for statement in statements:
            replacement.visit(statement)
            self._stored.update(_stored(statement))

    def functions(self, called: ast.expr) -> list[ast.expr]:
        """Return the names of the functions and objects that a call of ``called`` may run."""
        if isinstance(called, SuperMethod):
            return [called]
        if chain(called) and _first(called) not in self._definitions and self._value(called) is not None:
            return [called]
        found = self._objects(called)
        if len(found) > 1 or not chain(called):
            found = [each for each in found if self._may_carry(each)]
        found = [self._replacing(each) for each in found[:ITEMS_MAX]]
        return found or ([called] if chain(called) else [])

    def _may_carry(self, name: ast.expr) -> bool:
        """Return whether a call of ``name`` may change what a later call finds."""
        holder = self._value(name)
        if isinstance(name, ast.Attribute) and name.attr not in instance_of(owner := self._value(name.value)):
            holder = owner  # a method, which may change its object
        elif isinstance(holder, FunctionType | MethodType | partial):
            return True
        return any(map(self._writers.may_write, (holder, *instance_of(holder).values())))

    def _object_at(self, expression: ast.expr) -> ast.expr | None:
        """Return another name of the one object that an expression denotes; None if there is no such one."""
        found = {id(self._value(one)): one for one in self._objects(expression)}
        if len(found) != 1:
            return None
        (name,) = found.values()
        value = self._value(name)
        if isinstance(expression, ast.Subscript) and isinstance(value, _CONTAINERS):
            return None  # its other uses are items as well
        same = chain(expression) and chain(self._canonical(name)) == chain(expression)
        return None if same or isinstance(value, _PLAIN) else self._replacing(name)

    def _object_of(self, name: str, names: _LocalNames) -> ast.expr | None:
        """Return the name of the one object that all assignments to ``name`` denote; None if there is no such one."""
        found: dict[int, ast.expr] = {}
        for each in self._definitions[name]:
            denoted = self._of_definition(each, 0)
            if not denoted and not _is_none(each.value):
                return None
            found |= {id(self._value(one)): one for one in denoted}
        if len(found) != 1:
            return None
        (one,) = found.values()
        value = self._value(one)
        if isinstance(value, _PLAIN) or (name in names.augmented and not hasattr(type(value), "__iadd__")):
            return None
        present = None if LOCAL in name else value_at(name, self._place)
        return None if present is not None and present is not value else self._replacing(one)

    def _several(self, name: str) -> list[ast.expr]:
        """Return the names of the objects of the script through which a ``for`` loop goes, if these are all of them."""
        if not all(each.is_item for each in self._definitions[name]):
            return []
        found = [one for each in self._definitions[name] for one in self._of_definition(each, 0)]
        whole = 1 < len(found) < ITEMS_MAX and all(is_of_script(type(self._value(one))) for one in found)
        return [self._replacing(one) for one in found] if whole else []

    def _replacing(self, name: ast.expr) -> ast.expr:
        """Return the one name of the object ``name``, which replaces an expression of the source."""
        canonical = self._canonical(name)
        self._used |= _parts(name) | _parts(canonical)
        return canonical

    def _canonical(self, name: ast.expr) -> ast.expr:
        """Return the one name of the object ``name``: a variable of the frame, or the first name of the search."""
        value = self._value(name)
        is_object = not isinstance(value, _PLAIN) and not isroutine(value)
        if is_object and (variable := self._variable_of(value)):
            return ast.Name(variable, ast.Load())
        if isinstance(name, ast.Attribute):
            name = ast.Attribute(self._canonical(name.value), name.attr, ast.Load())
        return self._names.setdefault(id(value), name) if is_object else name

    def _variable_of(self, value: object) -> str:
        """Return the variable of the frame that has ``value``, and that the source does not assign; empty if none."""
        if self._variables is None:
            self._variables = {
                id(held): variable
                for variable, held in reversed(variables_at(self._place).items())
                if variable not in self._definitions
            }
        return self._variables.get(id(value), "")

    # ---------------------------------------------------------------- what expressions denote

    def _objects(self, node: ast.expr, depth: int = 0) -> list[ast.expr]:
        """Return the names of the existing objects that an expression may denote; none if they are not known."""
        deeper = depth + 1
        if depth > _DEPTH_MAX:
            return []
        match node:
            case ast.Name(id=name) if name in self._definitions:
                return [one for each in self._definitions[name] for one in self._of_definition(each, deeper)]
            case ast.Name():
                return [node] if self._value(node) is not None else []
            case ast.Attribute(value=owner, attr=attribute):
                owners = self._objects(owner, deeper)
                return [one for each in owners for one in self._attribute(each, attribute, deeper)]
            case ast.Subscript(value=owner, slice=key) if not isinstance(key, ast.Slice):
                return self._items(owner, deeper, key)
            case ast.IfExp(body=first, orelse=second):
                return [*self._objects(first, deeper), *self._objects(second, deeper)]
            case ast.BoolOp(values=values):
                return [one for each in values for one in self._objects(each, deeper)]
            case ast.NamedExpr(value=value):
                return self._objects(value, deeper)
            case ast.Call(func=ast.Attribute(attr="get", value=owner), args=[key, *_]) if (
                found := self._items(owner, deeper, key)
            ):
                return found
            case ast.Call(args=[], keywords=[]):  # a result of arguments depends on them
                return self._returned(node, deeper)
        return []

    def _of_definition(self, definition: _Definition, depth: int) -> list[ast.expr]:
        value, is_item = definition
        return self._items(value, depth) if is_item else self._objects(value, depth)

    def _attribute(self, owner: ast.expr, attribute: str, depth: int) -> list[ast.expr]:
        name = ast.Attribute(owner, attribute, ast.Load())
        getter = getter_of(name, self._place)
        holder = self._value(owner)
        if isinstance(holder, dict) and attribute in holder and attribute not in instance_of(holder):
            return self._named(owner, [(attribute, holder[attribute])])
        if getter is not None:
            return self._result(getter, ast.Call(name, [], []), depth)
        return [name] if attribute not in self._unsafe and self._value(name) is not None else []

    def _returned(self, call: ast.Call, depth: int) -> list[ast.expr]:
        """Return the names of the objects that a function of the script returns."""
        found = []
        for function in self._objects(call.func, depth):
            called = called_by(function, self._place)
            callee = None if called is None else callee_of(called, self._place)
            if callee is not None:
                found += self._result(callee, ast.Call(function, call.args, call.keywords), depth)
        return found

    def _result(self, callee: Callee, call: ast.Call, depth: int) -> list[ast.expr]:
        """Return the names of the objects in the one ``return`` of a function; none if it has several of them."""
        code = callee.function.__code__
        source = definition(code) if of_script(code.co_filename) else None
        returned = [] if source is None else list(_returns(source))
        if source is None or len(returned) != 1 or returned[0].value is None:
            return []
        names = CallerNames(source, call, callee, f"{LOCAL}r", self._place[0])
        return self._objects(names.visit(returned[0].value), depth)

    def _items(self, node: ast.expr, depth: int, key: ast.expr | None = None) -> list[ast.expr]:
        """Return the names of the items of the containers that ``node`` denotes.

        Args:
            node: the expression for the container.
            depth: number of expressions around it.
            key: the key or number of the item; None for all items.
        """
        wanted: object = None
        match key:
            case ast.Constant(value=value):
                wanted = value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
                wanted = -value
        match node:
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                if isinstance(wanted, int) and -len(elements) <= wanted < len(elements):
                    elements = [elements[wanted]]
                return [one for each in elements for one in self._objects(each, depth + 1)]
            case ast.Dict(keys=keys, values=values):
                pairs = [(getattr(at, "value", None), each) for at, each in zip(keys, values, strict=True)]
                chosen = [each for at, each in pairs if wanted is None or at == wanted]
                return [one for each in chosen for one in self._objects(each, depth + 1)]
            case ast.Call(func=ast.Name(id=function), args=arguments) if function in _SEQUENCES:
                return [one for each in arguments for one in self._items(each, depth + 1)]
            case ast.Call(func=ast.Attribute(attr=method, value=owner), args=[]) if method in _VIEWS:
                return self._items(owner, depth + 1)
            case ast.Name(id=name) if name in self._definitions and depth < _DEPTH_MAX:
                made = [each.value for each in self._definitions[name] if not each.is_item]
                if made and all(isinstance(each, ast.Dict | ast.List | ast.Tuple) for each in made):
                    return [one for each in made for one in self._items(each, depth + 1, key)]
        return [one for each in self._objects(node, depth) for one in self._items_of(each, wanted)]

    def _items_of(self, container: ast.expr, wanted: object) -> list[ast.expr]:
        value = self._value(container)
        children = instance_of(value).get("_modules")
        if isinstance(children, dict):
            keys = list(children)
            if isinstance(wanted, int) and -len(keys) <= wanted < len(keys):
                wanted = keys[wanted]
            # What such a module saves itself continues with the job. Its passes are searched with the model.
            chosen = [
                each
                for each in keys
                if (wanted is None or each == wanted) and not has_script_method(type(children[each]), EXTRA)
            ]
            return [ast.Attribute(container, each, ast.Load()) for each in chosen[:ITEMS_MAX]]
        found: list[tuple[object, object]] = []
        is_sequence = type(value) in (list, tuple)
        if wanted is None:
            found = first_items(value, ITEMS_MAX) if is_sequence or isinstance(value, dict) else []
        elif isinstance(value, dict) and dict.__contains__(value, wanted):
            found = [(wanted, dict.__getitem__(value, wanted))]
        elif is_sequence and isinstance(value, list | tuple) and isinstance(wanted, int):
            found = [(wanted % len(value), value[wanted])] if -len(value) <= wanted < len(value) else []
        return self._named(container, found)

    def _named(self, container: ast.expr, items: Sequence[tuple[object, object]]) -> list[ast.expr]:
        """Return names for items of a container: keys and values."""
        place = f"{chain(container).rpartition('.')[2]}[]"
        if place in self._unsafe:
            return []
        # A loop over tensors changes all of them, as a whole. The container is the variable then.
        return [
            item_named(container, number, key, held)
            for number, (key, held) in enumerate(items)
            if not isinstance(held, _PLAIN) and not has_dtype(held)
        ]

    def _value(self, name: ast.expr) -> object:
        text = chain(name)
        if text not in self._values:
            self._values[text] = value_at(text, self._place) if text and LOCAL not in text else None
        return self._values[text]


def first_items(value: object, number_max: int) -> list[tuple[object, object]]:
    """Return the first items of a dict, list or tuple with their keys or numbers, without running code of the script.

    The result is empty for other objects.
    """
    if isinstance(value, dict):
        return list(islice(dict.items(value), number_max))
    if isinstance(value, list | tuple):
        items = list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)
        return list(enumerate(islice(items, number_max)))
    return []


def item_named(container: ast.expr, number: int, key: object, item: object) -> ast.expr:
    """Return a name for an item of ``container``, with its key, or with its number if the key is no word."""
    word = isinstance(key, int | str) and re.fullmatch(r"\w+", str(key))
    return ast.Name(name_of_item(chain(container), str(key if word else number), item), ast.Load())


class _LocalNames(ast.NodeVisitor):
    """The names that a source assigns, and the expressions that it assigns to them."""

    def __init__(self) -> None:
        self.augmented = set[str]()
        self._definitions: defaultdict[str, list[_Definition]] = defaultdict(list)
        self._others = set[str]()  # names that are also set in another way
        self._bound = set[int]()

    def known(self) -> dict[str, list[_Definition]]:
        """Return the assignments to the names that are set by such assignments only."""
        return {name: each for name, each in self._definitions.items() if name not in self._others}

    def bind(self, target: ast.expr, value: ast.expr, *, is_item: bool = False) -> None:
        """Record the assignment of ``value``, or of an item of it, to ``target``."""
        match target, value:
            case ast.Name(id=name), _:
                self._definitions[name].append(_Definition(value, is_item))
                self._bound.add(id(target))
            case (
                (ast.Tuple(elts=targets) | ast.List(elts=targets)),
                (ast.Tuple(elts=values) | ast.List(elts=values)),
            ) if len(targets) == len(values) and not is_item:
                for each, part in zip(targets, values, strict=True):
                    self.bind(each, part)
            case ((ast.Tuple(elts=targets) | ast.List(elts=targets)), _):
                for each in targets:
                    if isinstance(each, ast.Name):
                        self.bind(each, value, is_item=True)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            self.bind(target, node.value)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.bind(node.target, node.value)
        self.generic_visit(node)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.bind(node.target, node.value)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self._bind_items(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_items(node.target, node.iter)
        self.generic_visit(node)

    def _bind_items(self, target: ast.expr, source: ast.expr) -> None:
        """Record that a loop assigns the items of ``source`` to ``target``."""
        match target, source:
            case ast.Tuple(elts=[_, item]), ast.Call(func=ast.Attribute(attr="items")):
                self.bind(item, source, is_item=True)
            case ast.Tuple(elts=[_, item]), ast.Call(func=ast.Name(id="enumerate"), args=[inner, *_]):
                self._bind_items(item, inner)
            case ast.Tuple(elts=items), ast.Call(func=ast.Name(id="zip"), args=sources) if len(items) == len(
                sources
            ):
                for item, inner in zip(items, sources, strict=True):
                    self._bind_items(item, inner)
            case _:
                self.bind(target, source, is_item=True)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            self.augmented.add(node.target.id)
            self._bound.add(id(node.target))
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load) and id(node) not in self._bound:
            self._others.add(node.id)

    def generic_visit(self, node: ast.AST) -> None:
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                self._others.update(names)
            case (
                ast.FunctionDef(name=str(name))
                | ast.ClassDef(name=str(name))
                | ast.ExceptHandler(name=str(name))
            ):
                self._others.add(name)
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.arg(arg=name):
                self._others.add(name)
            case ast.alias(name=module, asname=name):
                self._others.add(name or module.partition(".")[0])
        super().generic_visit(node)


class _Replacement(ast.NodeTransformer):
    """The replacement of local names by the names of their objects.

    Args:
        found: the names of objects by local name.
        several: the names of the objects through which a ``for`` loop goes, by its local name.
        named: function that returns the name of the object that an expression denotes.
        running: ids of the loops in which the update may be made now. Their bodies are not repeated, because there
            would be several updates.
    """

    def __init__(
        self,
        found: Mapping[str, ast.expr],
        several: Mapping[str, Sequence[ast.expr]],
        named: Callable[[ast.expr], ast.expr | None],
        running: Set[int],
    ) -> None:
        self._found = found
        self._several = several
        self._named = named
        self._running = running

    def visit_For(self, node: ast.For) -> ast.AST:
        """Repeat the body of a loop over objects of the script for each of them."""
        each_object = [] if id(node) in self._running else self._for_each([node.target])
        if not each_object:
            return self.generic_visit(node)
        node.iter = self.visit(node.iter)
        bodies = [node.body, *(copy.deepcopy(node.body) for _ in each_object[1:])]
        repeats = zip(each_object, bodies, strict=True)
        node.body = [one.visit(statement) for one, body in repeats for statement in body]
        node.orelse = [self.visit(statement) for statement in node.orelse]
        return node

    def visit_GeneratorExp(self, node: ast.GeneratorExp) -> ast.AST:
        """Repeat the element of a comprehension over objects of the script for each of them."""
        return self._with_elements(node)

    def visit_ListComp(self, node: ast.ListComp) -> ast.AST:
        """Repeat the element of a comprehension over objects of the script for each of them."""
        return self._with_elements(node)

    def _with_elements(self, node: ast.GeneratorExp | ast.ListComp) -> ast.AST:
        each_object = self._for_each([part.target for part in node.generators])
        if not each_object:
            return self.generic_visit(node)
        elements = [one.visit(copy.deepcopy(node.elt)) for one in each_object]
        node.elt = ast.copy_location(ast.Tuple(elements, ast.Load()), node.elt)
        node.generators = [self.visit(part) for part in node.generators]
        return node

    def _for_each(self, targets: Sequence[ast.expr]) -> list[_Replacement]:
        """Return a replacement for each object of the first name in ``targets`` that has several; none without one."""
        names = (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name))
        repeated = next((name for name in names if name in self._several), "")
        return [
            _Replacement({**self._found, repeated: one}, self._several, self._named, self._running)
            for one in self._several.get(repeated, ())
        ]

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Replace the owner of an attribute if it has another name, or is an item or the result of a call."""
        self.generic_visit(node)
        if (
            isinstance(node.value, ast.Attribute | ast.Subscript | ast.Call)
            and (named := self._named(node.value)) is not None
        ):
            node.value = _copy(named, ast.Load(), node.value)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.target.id in self._found:
            target = _copy(self._found[node.target.id], ast.Store(), node.target)
            assert isinstance(target, ast.Name | ast.Attribute)
            node.target = target
        return node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        found = self._found.get(node.id) if isinstance(node.ctx, ast.Load) else None
        return node if found is None else _copy(found, ast.Load(), node)


def _copy(name: ast.expr, context: ast.expr_context, at: ast.expr) -> ast.expr:
    """Return a new tree for a variable or attribute, at the place of ``at``."""
    match name:
        case ast.Attribute(value=owner, attr=attribute):
            return ast.copy_location(ast.Attribute(_copy(owner, ast.Load(), at), attribute, context), at)
        case ast.Name(id=variable):
            return ast.copy_location(ast.Name(variable, context), at)
    return name


def _parts(name: ast.expr) -> set[str]:
    """Return the attributes and the container in the name of an object, in the form of ``Aliases.conflicts``."""
    first, *attributes = chain(name).split(".")
    container = {f"{first.partition(':')[0].rstrip('_')}[]"} if ":" in first else set()
    return {*attributes, *container}


def _stored(node: ast.AST) -> Iterator[str]:
    """Yield the attributes and the containers of items that the source assigns."""
    for each in ast.walk(node):
        if isinstance(each, ast.AugAssign):
            continue
        match each:
            case ast.Assign(targets=targets):
                yield from (name for target in targets for name in _stored_by(target))
            case ast.AnnAssign(target=target) | ast.For(target=target) | ast.NamedExpr(target=target):
                yield from _stored_by(target)
            case ast.Delete(targets=targets):
                yield from (name for target in targets for name in _stored_by(target))
            case ast.Call(func=ast.Attribute(attr=method, value=owner)) if method in _CHANGE_ITEMS:
                yield f"{chain(owner).rpartition('.')[2]}[]"


def _stored_by(target: ast.expr) -> Iterator[str]:
    match target:
        case ast.Attribute(attr=attribute):
            yield attribute
        case ast.Subscript(value=container):
            yield f"{chain(container).rpartition('.')[2]}[]"
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            yield from (name for each in elements for name in _stored_by(each))


def _returns(function: ast.AST) -> Iterator[ast.Return]:
    """Yield the ``return`` statements of a function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(function):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, _INNER):
            yield from _returns(child)


def is_of_script(kind: type) -> bool:
    """Return whether a class belongs to the script."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return isinstance(file, str) and of_script(file)


def _first(name: ast.expr) -> str:
    return chain(name).partition(".")[0]


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None
