"""The stack frames of the user's script, and the variables in them."""

from __future__ import annotations

import inspect
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import CellType, CodeType, FrameType, FunctionType, GeneratorType
from typing import Any

from holdfast.package import DIRECTORY
from holdfast.runtime.worker.script_attributes import attribute_of

OURS = str(DIRECTORY) + os.sep
_MISSING = object()
_OUTSIDE: dict[str, CellType | Mapping[str, object]] = {}  # where ``name_outside`` has found variables
_CONTAINERS: dict[str, str] = {}  # by the name of an item
_PARTS = re.compile(r'\["[^"]*"\]|[^.\[]+')
LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")})


def place_in_script() -> str:
    """Return the file and line of the script that this thread executes now, as ``train.py:31``."""
    return place_of(frame_of_script())


def place_of(frame: FrameType) -> str:
    """Return the file and line that a stack frame executes, as ``train.py:31``."""
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def place_of_error(error: BaseException) -> str:
    """Return the innermost file and line of the script in the traceback of ``error``, as ``train.py:31``.

    The result is empty if there is none.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if not each.filename.startswith((OURS, *LIBRARIES, "<"))]
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""


def frame_of_script() -> FrameType:
    """Return the innermost stack frame outside of Holdfast; the caller's frame if there is none."""
    caller = sys._getframe(1)
    return next(frames_outside((OURS,)), caller)


def frames_outside(directories: tuple[str, ...]) -> Iterator[FrameType]:
    """Yield the stack frames of this thread whose files are in none of ``directories``, the innermost first.

    Args:
        directories: paths that end with a separator.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(directories):
            yield frame
        frame = frame.f_back


def variables_of_script() -> dict[str, object]:
    """Return, by name, the variables of all stack frames outside of Holdfast and the globals of the script's modules.

    If several different variables have the same name, only the innermost has the plain name in the result. The other
    variables have names of the form ``FILE:NAME``.
    """
    found: dict[str, object] = {}
    for file, variables in _scopes():
        for name, value in variables.items():
            if not name.startswith("__") and found.setdefault(name, value) is not value:
                found.setdefault(f"{os.path.basename(file)}:{name}", value)
    return found


@cache
def owners_of(name: str) -> tuple[str, ...]:
    """Return the variables and attributes that hold an attribute or element.

    For ``self.seen["x"]`` these are ``self`` and ``self.seen``. An element of a dict has its key in the name, as
    Python writes it with double quotes.
    """
    return tuple(name[: match.end()] for match in list(_PARTS.finditer(name))[:-1])


def name_outside(function: FunctionType, name: str) -> str:
    """Return the name by which :func:`values_of` finds a variable that ``function`` uses and does not define itself.

    The name is ``FUNCTION:NAME`` for a variable of the enclosing function, which may have returned, and
    ``MODULE:NAME`` for a global variable. Empty if there is no such variable now.
    """
    free = function.__code__.co_freevars
    if name in free and function.__closure__ is not None:
        around = function.__qualname__.rpartition(".<locals>.")[0]
        return _outside(around, name, function.__closure__[free.index(name)])
    return _outside(function.__module__, name, function.__globals__) if name in function.__globals__ else ""


def name_of_self(function: str, owner: object) -> str:
    """Return the name by which :func:`values_of` finds the object of a bound method that a variable holds."""
    return _outside(function, "self", {"self": owner})


def name_of_default(function: FunctionType, parameter: str) -> str:
    """Return the name by which :func:`values_of` finds the default of a parameter, if it is an object that can change.

    A list as a default is one object for all calls, so it may carry values from call to call. The name is
    ``FUNCTION:PARAMETER``. Empty if there is no such default.
    """
    names = inspect.signature(function).parameters
    default = names[parameter].default if parameter in names else inspect.Parameter.empty
    constant = default is inspect.Parameter.empty or isinstance(
        default, int | float | str | bytes | tuple | None
    )
    return "" if constant else _outside(function.__qualname__, parameter, {parameter: default})


def name_of_item(container: str, key: str, item: object) -> str:
    """Return the name by which :func:`values_of` finds an item of a dict, list or tuple.

    The name is ``CONTAINER:KEY``, with the last part of the name of the container.
    """
    name = _outside(container, key, {key: item})
    _CONTAINERS[name] = container
    return name


def container_of(name: str) -> str:
    """Return the container of an item, by a name of :func:`name_of_item` or of an attribute of it; else empty."""
    return _CONTAINERS.get(name.partition(".")[0].partition("[")[0], "")


def as_written(name: str) -> str:
    """Return a variable as the script may write it: ``optimizers[0].param_groups`` for ``optimizers:0.param_groups``.

    A variable of a function that is not on the stack is ``NAME of FUNCTION()``, a global one ``MODULE.NAME``.
    """
    owner, *parts = _PARTS.findall(name)
    scope, colon, last = owner.rpartition(":")
    if not colon:
        return name
    attributes = name[len(owner) :] if parts else ""
    if owner in _CONTAINERS:
        key = last if last.isdecimal() else f'"{last}"'
        return f"{as_written(_CONTAINERS[owner])}[{key}]{attributes}"
    home = _OUTSIDE.get(owner, {})
    scope = scope.rstrip("_")
    of_function = isinstance(home, CellType) or len(home) == 1
    return f"{last}{attributes} of {scope}()" if of_function else f"{scope}.{last}{attributes}"


def _outside(scope: str, name: str, home: CellType | Mapping[str, object]) -> str:
    scope = scope.rpartition(".")[2]
    while (found := f"{scope}:{name}") in _OUTSIDE and not _is_same(_OUTSIDE[found], home, name):
        scope += "_"  # another object has a function or container of this name
    _OUTSIDE[found] = home
    return found


def _is_same(
    home: CellType | Mapping[str, object], other: CellType | Mapping[str, object], name: str
) -> bool:
    """Return whether a variable is in the same place, or whether both places were made for the same object."""
    if home is other or isinstance(home, CellType) or isinstance(other, CellType):
        return home is other
    return len(home) == len(other) == 1 and home.get(name) is other.get(name)


def _value_outside(name: str) -> object:
    home = _OUTSIDE.get(name, {})
    if not isinstance(home, CellType):
        return home.get(name.rpartition(":")[2], _MISSING)
    try:
        return home.cell_contents
    except ValueError:  # not assigned yet
        return _MISSING


def values_of(names: Iterable[str], place: tuple[str, int] | None = None) -> dict[str, object]:
    """Return the values of variables, attributes and elements (``self.tick``, ``seen["x"]``) in the stack frames.

    The innermost frame that has a variable counts. A name without a value is left out.

    Args:
        names: the variables, attributes, and elements of dicts. A variable may have a name of :func:`name_outside`.
        place: file and line of the function that uses these variables. Frames of functions that it has called do not
            count: a method of another object has another ``self``.
    """
    found: dict[str, object] = {}
    frames = _frames_from(place)
    for name in filter(None, names):
        owner, *parts = _PARTS.findall(name)
        if ":" in owner:
            value = _value_outside(owner)
        else:
            scopes = (scope for frame in frames for scope in (frame.f_locals, frame.f_globals))
            value = next((scope[owner] for scope in scopes if owner in scope), _MISSING)
        for part in parts:
            if not part.startswith("["):
                value = attribute_of(value, part, _MISSING)
            else:
                value = value.get(part[2:-2], _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is not _MISSING:
            found[name] = value
    return found


def variable_of(value: object, place: tuple[str, int]) -> str:
    """Return the name of a variable of the function at ``place``, or of its module, that has ``value``.

    The result is empty if there is none.
    """
    return next((name for name, each in variables_at(place).items() if each is value), "")


def variables_at(place: tuple[str, int]) -> dict[str, object]:
    """Return the variables of the function at ``place`` and of its module, those of the function first."""
    found: dict[str, object] = {}
    for frame in _frames_from(place)[:1]:
        for scope in (frame.f_locals, frame.f_globals):
            for name, value in scope.items():
                found.setdefault(name, value)
    return found


def _frames_from(place: tuple[str, int] | None) -> list[FrameType]:
    """Return the script's frames from that of the function at ``place`` outward; all if no frame runs that function."""
    frames = list(frames_outside((OURS, *LIBRARIES)))
    outer = [index for index, frame in enumerate(frames) if place and has_line(frame.f_code, *place)]
    return frames[outer[0] if outer else 0 :]


def runs_at(place: tuple[str, int]) -> bool:
    """Return whether the function at file and line ``place`` has a stack frame of this thread."""
    return any(has_line(frame.f_code, *place) for frame in frames_outside((OURS, *LIBRARIES)))


def has_line(code: CodeType, file: str, line: int) -> bool:
    """Return whether a line of a file belongs to a function, and not to a function inside of it."""
    return code.co_filename == file and line in _lines(code)


@cache
def _lines(code: CodeType) -> frozenset[int | None]:
    return frozenset(line for _, _, line in code.co_lines())


def position_of(generator: GeneratorType[Any, Any, Any]) -> str:
    """Return the position of a generator as text: whether it has begun, and the numbers and texts in its variables."""
    state = inspect.getgeneratorstate(generator)
    if state == inspect.GEN_CREATED:
        return "a generator that has not begun"
    variables = [
        f"{name} = {value!r}"
        for name, value in inspect.getgeneratorlocals(generator).items()
        if isinstance(value, bool | int | float | str)
    ]
    return f"a generator with {', '.join(variables) or state}"


def _scopes() -> Iterator[tuple[str, dict[str, object]]]:
    for frame in frames_outside((OURS,)):
        file = frame.f_code.co_filename
        yield file, dict(frame.f_locals)
        if not file.startswith(LIBRARIES):
            yield file, dict(frame.f_globals)
