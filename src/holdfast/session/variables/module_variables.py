"""The variables in the modules of a model that their forward passes carry from one block to the next.

Theory. The search that follows the calls of a loop (``called_bodies.py``) ends a few calls below the loop, and at each
module of a library: it does not see the modules in an ``nn.Sequential``, or in a list over which a forward pass runs.
So the forward pass of each module of the script is also searched on its own, as the body of a loop whose result decides
about the update. All modules of one class have one source, so each class is searched once. A module whose methods
assign no attribute carries nothing, and is not searched. The same applies to the objects of the script in its
attributes, such as a schedule that the forward pass moves.

The modules are found in the running objects: in those that the loop calls, in variables of the script, and in
attributes and items of its objects. The trainer of a library has the loop, and the model in an attribute. A script for
several networks often has them in a dict. Only a module that is trained counts. Any other module may be a metric, on
which no update depends.
"""

from __future__ import annotations

import ast
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import FunctionType, ModuleType
from typing import NamedTuple

from holdfast.frameworks.common.optional_abilities import DescribesUpdates
from holdfast.runtime.worker.script_attributes import instance_of, static_of
from holdfast.runtime.worker.script_frames import variables_of_script
from holdfast.session.variables.aliases import first_items, item_named
from holdfast.session.variables.attribute_writers import AttributeWriters
from holdfast.session.variables.called_bodies import loop_of_calls
from holdfast.session.variables.called_functions import (
    EXTRA,
    LOCAL,
    NamedModule,
    counted_as_script,
    has_script_method,
    is_of_library,
    unwrapped,
    value_at,
)
from holdfast.session.variables.data_flow import carried
from holdfast.session.variables.deciding_variables import PlacedVariable, Places, outermost_loop
from holdfast.session.variables.growing_tables import GrowingTables, growing_in
from holdfast.session.variables.kept_attributes import KeptAttributes, kept_by
from holdfast.session.variables.script_trees import chain

MODULES_MAX = 20_000
CLASSES_MAX = 50
VARIABLES_MAX = 200
_STEP = "training_step"
_DEPTH = 2
_ITEMS_MAX = 1000


class ModuleVariables(NamedTuple):
    """The variables in modules.

    Attributes:
        placed: the variables in modules of the script.
        growing: those of them that are tables which only grow.
        of_libraries: the variables in modules of libraries, without such tables. The search of foreign code is less
            certain than that of the script, so they are for a warning only.
    """

    placed: tuple[PlacedVariable, ...]
    growing: GrowingTables
    of_libraries: tuple[PlacedVariable, ...] = ()


NO_MODULES = ModuleVariables((), GrowingTables())


def module_variables(places: Places, source: DescribesUpdates, *, libraries: bool) -> ModuleVariables:
    """Return the variables that the forward passes of the trained modules carry from block to block.

    Args:
        places: file and line of the stack frames, the innermost frame first.
        source: the adapter, which knows the trained weights.
        libraries: also search the modules of libraries other than torch. Only the file of the module's class is read.
    """
    own: list[NamedModule] = []
    foreign: dict[str, list[NamedModule]] = {}
    for each in _modules_in(_trained(places, source)):
        if not is_of_library(each.module) or has_script_method(each.module, _STEP):
            own.append(each)
        elif libraries and (file := _library_file(each.module)):
            foreign.setdefault(file, []).append(each)
    of_libraries: list[PlacedVariable] = []
    for file, modules in foreign.items():
        with counted_as_script(file):
            placed, growing = _of_modules(modules, places[-1])
        grown = growing.tables.keys() | growing.sizes
        of_libraries += [each for each in placed if each.name not in grown]
    return ModuleVariables(*_of_modules(own, places[-1]), tuple(of_libraries))


def _library_file(module: object) -> str:
    """Return the file with the forward pass of a module of a library; empty for a module of torch."""
    forward = static_of(type(module), "forward")
    if not isinstance(forward, FunctionType) or forward.__module__.split(".")[0] == "torch":
        return ""
    return forward.__code__.co_filename


def _of_modules(
    modules: Iterable[NamedModule], place: tuple[str, int]
) -> tuple[tuple[PlacedVariable, ...], GrowingTables]:
    """Return the variables that the passes of ``modules`` carry, and their growing tables."""
    found: dict[str, bool] = {}
    tables: dict[str, frozenset[int]] = {}
    sizes: set[str] = set()
    writers = AttributeWriters()
    classes: dict[type, tuple[str, dict[str, bool], GrowingTables]] = {}
    for module, name in modules:
        kind, path = type(module), chain(name)
        holders = (module, *instance_of(module).values())
        if len(found) >= VARIABLES_MAX or not any(writers.may_write(holder) for holder in holders):
            continue
        if kind not in classes:
            if len(classes) >= CLASSES_MAX:
                continue
            classes[kind] = (path, *_of_module(module, name, place))
        first, names, growing = classes[kind]

        def here(of_first: str, first: str = first, path: str = path) -> str:
            return path + of_first.removeprefix(first)

        found.update((here(each), partly) for each, partly in names.items())
        tables.update((here(each), dimensions) for each, dimensions in growing.tables.items())
        sizes.update(map(here, growing.sizes))
    placed = (PlacedVariable(name, place, partly) for name, partly in found.items())
    return tuple(placed), GrowingTables(tables, frozenset(sizes))


def _of_module(
    module: object, name: ast.expr, place: tuple[str, int]
) -> tuple[dict[str, bool], GrowingTables]:
    """Return the attributes below ``name`` that the passes of this module carry, and its growing tables.

    The keys are names. A value is True if some passes write the attribute first. The method ``training_step`` of
    Lightning counts as a pass. Attributes that ``get_extra_state`` saves are left out.
    """
    steps = [ast.Attribute(name, _STEP, ast.Load())] if has_script_method(module, _STEP) else []
    loop, calls = loop_of_calls([name, *steps], place)
    begin = f"{chain(name)}."

    def first_name(variable: str) -> str:
        return re.split(r"[.\[]", variable.removeprefix(begin), maxsplit=1)[0]

    def is_own(variable: str) -> bool:
        own = variable.startswith(begin) and LOCAL not in variable
        return own and first_name(variable) not in _held(module, "_modules")

    kept = kept_by([module], EXTRA) if has_script_method(module, EXTRA) else KeptAttributes()

    def is_kept(variable: str) -> bool:
        return id(module) in kept.objects or (id(module), first_name(variable)) in kept.attributes

    growing = growing_in(loop)
    tables = {each: dimensions for each, dimensions in growing.tables.items() if is_own(each)}
    names = {each: partly for each, partly in carried(loop, calls).items() if not is_kept(each)}
    return {each: partly for each, partly in names.items() if is_own(each)}, GrowingTables(
        tables, frozenset(filter(is_own, growing.sizes))
    )


def _trained(places: Places, source: DescribesUpdates) -> Iterator[NamedModule]:
    """Yield the trained modules of the script, each with its expression."""
    place = places[-1]
    called = [node.func for node in ast.walk(outermost_loop(places)) if isinstance(node, ast.Call)]
    for name in (each for each in called if chain(each) and LOCAL not in chain(each)):
        yield from _if_trained(unwrapped(value_at(chain(name), place), name, place), place, source)
    for variable, value in variables_of_script().items():
        if ":" not in variable:  # otherwise another variable hides it
            for found in _modules_below(value, ast.Name(variable, ast.Load())):
                yield from _if_trained(unwrapped(*found, place), place, source)


def _modules_below(value: object, name: ast.expr, depth: int = _DEPTH) -> Iterator[NamedModule]:
    """Yield the modules in ``value``: itself, or those in its attributes and items, ``depth`` levels below it."""
    attributes = instance_of(value)
    if "_modules" in attributes:
        yield NamedModule(value, name)
    elif depth and not isinstance(value, ModuleType):
        for attribute, held in list(islice(attributes.items(), _ITEMS_MAX)):
            yield from _modules_below(held, ast.Attribute(name, attribute, ast.Load()), depth - 1)
        for number, (key, held) in enumerate(first_items(value, _ITEMS_MAX)):
            if "_modules" in instance_of(held):
                yield NamedModule(held, item_named(name, number, key, held))


def _if_trained(
    found: NamedModule, place: tuple[str, int], source: DescribesUpdates
) -> Iterator[NamedModule]:
    """Yield ``found`` if its expression has a value at ``place``, and the session has its first weight."""
    parameters = (
        parameter
        for module, _ in _modules_in([found])
        for parameter in _held(module, "_parameters").values()
        if parameter is not None
    )
    first = next(parameters, None)
    if first is not None and value_at(chain(found.name), place) is found.module and source.declares(first):
        yield found


def _modules_in(modules: Iterable[NamedModule]) -> Iterator[NamedModule]:
    """Yield ``modules`` and the modules in them, each once and with its expression."""
    seen: set[int] = set()
    for start in modules:
        ahead = deque([start])
        while ahead and len(seen) < MODULES_MAX:
            found = ahead.popleft()
            if id(found.module) in seen or "_modules" not in instance_of(found.module):
                continue
            seen.add(id(found.module))
            yield found
            ahead += (
                NamedModule(child, ast.Attribute(found.name, key, ast.Load()))
                for key, child in _held(found.module, "_modules").items()
            )


def _held(module: object, attribute: str) -> Mapping[str, object]:
    """Return the parameters or modules that a module holds in ``attribute``; nothing for other objects."""
    found = instance_of(module).get(attribute)
    return found if isinstance(found, dict) else {}
