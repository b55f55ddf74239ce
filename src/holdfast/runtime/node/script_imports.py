"""The imports at the head of a training script, which the zygote executes once for all workers of its node.

Theory. The libraries of a script often take longer to import than torch. A worker that is forked from a process which
has imported them begins at once. This also holds for the replacement of a lost rank. An import in the zygote is safe
only if its result is the same in every worker and does not depend on the time. So only the *head* of the script counts:
the import statements of installed packages before the first statement of another kind. An import may still read an
environment variable in which workers differ. :class:`WatchedEnvironment` detects that. The zygote then starts again,
without this import statement and without all later ones.

Invariants:
1. The statements of a head are the first statements that the script executes, in the same order.
2. After a head was executed, no module holds a value of a variable in which workers differ.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from holdfast.runtime.node.early_variables import is_for_typing, sources

INSTALLED = frozenset({"site-packages", "dist-packages"})
RANK_READERS = frozenset({"lightning", "lightning_fabric", "pytorch_lightning"})
"""Known packages that read ``RANK`` at their import. Others are found by trial, which costs their import once."""
OWN = "holdfast"
TEXT_LENGTH_MAX = 100
UNKNOWN = "known in workers only"


class Origin(Enum):
    """The kinds of packages that a script imports.

    ``QUICK``: a package of Python or Holdfast. ``INSTALLED``: an installed package, the same in every worker.
    ``MISSING``: a package that is not found; a ``try`` handles this, or the worker reports the error. ``OTHER``: a
    module of the script's directory, or a package that reads the rank.
    """

    QUICK = "quick"
    INSTALLED = "installed"
    MISSING = "missing"
    OTHER = "other"


class HeadImport(NamedTuple):
    """One import statement of a script.

    ``optional`` is True in a ``try`` statement, where an ``ImportError`` is not a failure.
    """

    text: str
    node: ast.Import | ast.ImportFrom
    optional: bool

    def make(self) -> str:
        """Execute the statement, and return its error as text; empty if it succeeded.

        The imported modules stay in ``sys.modules``.
        """
        code = compile(ast.Module([self.node], []), "<head>", "exec")
        try:
            exec(code, {"__name__": "holdfast_head"})
        except Exception as error:  # the worker gets it at the same statement
            if not (self.optional and isinstance(error, ImportError)):
                return f"{type(error).__name__}: {error}"[:TEXT_LENGTH_MAX]
        return ""


def head_of(kind: str, target: str, cwd: Path) -> list[HeadImport]:
    """Return the imports of installed packages at the head of a script or module.

    Imports of the standard library and of Holdfast are left out, because they are quick.

    Args:
        kind: ``script`` for a file, ``module`` for the form ``python -m``.
        target: path of the script, or name of the module.
        cwd: the directory in which workers start.
    """
    files, _ = sources(kind, target, cwd)
    found: list[HeadImport] = []
    for file in files:
        try:
            body = ast.parse(file.read_bytes()).body
        except (OSError, SyntaxError, ValueError):
            break  # the worker reports the error
        made, ended = _head(body)
        found += made
        if ended:
            break  # a package of the module does something else before the module begins
    return found


def _head(body: list[ast.stmt]) -> tuple[list[HeadImport], bool]:
    """Return the imports of installed packages at the head of a file, and True if another statement ends the head."""
    found: list[HeadImport] = []
    for node in body:
        if _does_nothing(node):
            continue
        statements = _imports(node)
        if not statements:
            return found, True
        for statement in statements:
            origins = {_origin(package) for package in _packages(statement)}
            if Origin.OTHER in origins:
                return found, True
            if Origin.INSTALLED in origins and Origin.MISSING not in origins:
                text = ast.unparse(statement)[:TEXT_LENGTH_MAX]
                found.append(HeadImport(text, statement, optional=isinstance(node, ast.Try)))
    return found, False


def _does_nothing(node: ast.stmt) -> bool:
    """Return True if a statement cannot change the result of an import, because it does nothing at that time.

    Such statements are texts, constants, function definitions, and imports for typing.
    """
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    if isinstance(node, ast.Assign):
        return isinstance(node.value, ast.Constant) and all(isinstance(t, ast.Name) for t in node.targets)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = (*node.args.defaults, *filter(None, node.args.kw_defaults))
        return not node.decorator_list and all(isinstance(default, ast.Constant) for default in defaults)
    return is_for_typing(node) and not node.orelse


def _imports(node: ast.stmt) -> list[ast.Import | ast.ImportFrom]:
    """Return the import statements in ``node``, which is an import, or a ``try`` that does nothing else.

    The list is empty if ``node`` is a statement of another kind.
    """
    if isinstance(node, ast.Import | ast.ImportFrom):
        return [node]
    if not isinstance(node, ast.Try):
        return []
    imports = [inner for inner in node.body if isinstance(inner, ast.Import | ast.ImportFrom)]
    others = [
        *node.body,
        *node.orelse,
        *node.finalbody,
        *(n for handler in node.handlers for n in handler.body),
    ]
    return imports if all(n in imports or isinstance(n, ast.Pass) or _does_nothing(n) for n in others) else []


def _packages(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield the names of the top-level packages that a statement imports; an empty name for a relative import."""
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    else:
        yield (node.module or "").partition(".")[0] if node.level == 0 else ""


def _origin(package: str) -> Origin:
    if package == OWN or package in sys.stdlib_module_names:
        return Origin.QUICK
    if not package or package in RANK_READERS:
        return Origin.OTHER
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return Origin.OTHER
    if found is None:
        return Origin.MISSING
    places = [found.origin] if found.origin else list(found.submodule_search_locations or ())
    installed = bool(places) and all(INSTALLED & set(Path(place).parts) for place in places)
    return Origin.INSTALLED if installed else Origin.OTHER


class WatchedEnvironment(os._Environ[str]):
    """``os.environ`` during the imports of the zygote: it records the first read of a variable in which workers differ.

    A copy of the whole environment does not count as a read, because libraries copy it for their child processes. In
    such a copy these variables have the value ``UNKNOWN``. A later use of this value as a number raises an error, and
    gives no wrong rank. Only reads by Python code are detected.
    """

    names: Collection[str] = frozenset()
    seen: str = ""
    listed: Sequence[str] = ()  # names of the last iteration: a copy reads their values in this order
    at: int = 0

    def __getitem__(self, key: str) -> str:
        """Return the value of a variable; ``UNKNOWN`` for one in which workers differ.

        Raises: KeyError: it is not set.
        """
        kind = WatchedEnvironment
        copied = key in kind.listed[kind.at : kind.at + 1]
        kind.at = kind.at + 1 if copied else len(kind.listed)
        if key not in kind.names:
            return super().__getitem__(key)
        if not copied:
            kind.seen = kind.seen or key
        return UNKNOWN

    def __iter__(self) -> Iterator[str]:
        """Return an iterator over the names of all variables, including those that only workers have."""
        kind = WatchedEnvironment
        kind.listed, kind.at = [*(set(super().__iter__()) - set(kind.names)), *kind.names], 0
        return iter(kind.listed)


@contextmanager
def watching(names: Collection[str]) -> Iterator[Callable[[], str]]:
    """Watch ``os.environ``. Yield a function that returns the first of ``names`` that was read; empty if none was."""
    plain = os.environ.__class__
    kind = WatchedEnvironment
    kind.names, kind.seen, kind.listed = frozenset(names), "", ()
    os.environ.__class__ = WatchedEnvironment
    try:
        yield lambda: WatchedEnvironment.seen
    finally:
        os.environ.__class__ = plain
