"""A search of a script for environment variables that it sets before it imports torch.

Theory. torch and its libraries read some variables when they are loaded. Workers are forked from a process that has
loaded torch, so a variable that the script sets at its top would have no effect. Therefore the source of the script is
parsed before any fork, in the order of its execution, up to the first import of torch. An imported module of the
script's directory is parsed as well. If a variable that torch reads is set there, the workers are not forked. Each
worker then starts a new interpreter, and imports torch when the script does. A false finding costs only the seconds in
which each worker imports torch. So a variable whose name is computed at run time also counts as a finding.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeGuard

PREFIXES = (
    "AOT_", "ATEN_", "C10_", "DNNL_", "GOMP_", "KMP_", "MKL_", "NUMEXPR_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTORCH_",
    "TORCH", "TRITON_", "VECLIB_",
)  # fmt: skip
LATER = ("TORCH_NCCL_", "TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_CUDA_ARCH_LIST", "TORCHELASTIC_")
"""Exceptions from ``PREFIXES``: torch reads variables with these prefixes only at their use, so a later value works."""
COMPUTED = "a variable whose name is computed"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def early_variable(files: list[Path], root: Path, env: Mapping[str, str]) -> str:
    """Return the first variable that is set before the import of torch; empty if there is none.

    The result has the form ``train.py:3: OMP_NUM_THREADS``.

    Args:
        files: the Python files in the order of their execution: the script, or a module after its packages.
        root: the directory from which the script imports its own modules.
        env: the environment of a worker. A variable that is set to its value in ``env`` does not count.
    """
    scan = _Scan(root, env)
    return next((found for file in files for found in scan.file(file)), "")


def sources(kind: str, target: str, cwd: Path) -> tuple[list[Path], Path]:
    """Return the files of a script or module for :func:`early_variable`, and the directory of its own modules."""
    if kind != "module":
        path = Path(target)
        return ([path / "__main__.py"], path) if path.is_dir() else ([path], path.parent)
    place, files = cwd, []
    *packages, last = target.split(".")
    for name in packages:
        place = place / name
        files.append(place / "__init__.py")
    package = place / last
    rest = [package / "__init__.py", package / "__main__.py"] if package.is_dir() else [place / f"{last}.py"]
    return [*files, *rest], cwd


def is_for_typing(node: ast.AST) -> TypeGuard[ast.If]:
    """Return True if a statement is ``if TYPE_CHECKING:``. At run time only its ``else`` is executed."""
    names = ("id", "attr")
    return isinstance(node, ast.If) and any(getattr(node.test, name, "") == "TYPE_CHECKING" for name in names)


class _Scan:
    """A reader of source files in the order of their execution. ``over`` is True after the import of torch."""

    def __init__(self, root: Path, env: Mapping[str, str]) -> None:
        self.over = False
        self._root = root
        self._env = env
        self._seen: set[Path] = set()

    def file(self, path: Path) -> Iterator[str]:
        """Yield the variables that a file sets before the import of torch.

        A missing or unparsable file yields none, because the worker reports the error.
        """
        if path in self._seen:
            return
        self._seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):
            return
        for name, line in self._walk(tree, path):
            yield f"{path.name}:{line}: {name}" if line else name

    def _walk(self, node: ast.AST, path: Path) -> Iterator[tuple[str, int]]:
        """Yield (name, line) of each variable that ``node`` sets.

        With line 0 the name already includes file and line.
        """
        if self.over:
            return
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from self._import(node, path)
            return
        if is_for_typing(node):
            for other in node.orelse:
                yield from self._walk(other, path)
            return
        for child in ast.iter_child_nodes(node):
            yield from self._walk(child, path)
        for name in _set(node, self._env):
            if name == COMPUTED or (name.startswith(PREFIXES) and not name.startswith(LATER)):
                yield name, getattr(node, "lineno", 0)
        if isinstance(node, _FUNCTIONS):
            self.over = False  # the function may be called only after the code that follows it

    def _import(self, node: ast.Import | ast.ImportFrom, path: Path) -> Iterator[tuple[str, int]]:
        place = self._root
        if isinstance(node, ast.ImportFrom):
            if node.level:
                place = path.parents[min(node.level, len(path.parents)) - 1]
            base = f"{node.module}." if node.module else ""
            names = [base + alias.name for alias in node.names]
        else:
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0].startswith("torch") and place == self._root:
                self.over = True
                return
            here = place
            for part in name.split("."):
                here = here / part
                for source in (here / "__init__.py", here.with_name(f"{part}.py")):
                    yield from ((found, 0) for found in self.file(source))


def _set(node: ast.AST, env: Mapping[str, str]) -> Iterator[str]:
    """Yield the names of the environment variables that one statement or call sets to a value other than in ``env``."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _named(target.slice, node.value, env)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield from _several(node.value, env)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        owner, method = node.func.value, node.func.attr
        if method == "putenv" and isinstance(owner, ast.Name) and owner.id == "os" and len(node.args) == 2:
            yield from _named(node.args[0], node.args[1], env)
        elif method == "setdefault" and _is_environ(owner) and len(node.args) == 2:
            yield from (name for name in _named(node.args[0], node.args[1], env) if name not in env)
        elif method == "update" and _is_environ(owner):
            for argument in node.args:
                yield from _several(argument, env)
            for keyword in node.keywords:
                key = ast.Constant(keyword.arg) if keyword.arg else keyword.value
                yield from _named(key, keyword.value, env)


def _several(node: ast.expr, env: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(node, ast.Dict):
        yield COMPUTED
        return
    for key, value in zip(node.keys, node.values, strict=True):
        yield from _named(key if key is not None else value, value, env)


def _named(key: ast.expr, value: ast.expr, env: Mapping[str, str]) -> Iterator[str]:
    if not isinstance(key, ast.Constant) or not isinstance(key.value, str):
        yield COMPUTED
    elif not (isinstance(value, ast.Constant) and value.value == env.get(key.value)):
        yield key.value


def _is_environ(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr == "environ" and isinstance(node.value, ast.Name) and node.value.id == "os"
    return isinstance(node, ast.Name) and node.id == "environ"
