"""The command that runs a test, read from its marks. A test that CI skips on two cores is not counted as run by CI."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AS_ROOT = ("WHY_NOT", "why_not()", "can()", "geteuid")
"""What conditions of tests hold that need root: network namespaces, files of other users."""

Marks = list[ast.expr]


@cache
def tree_of(path: str) -> ast.Module:
    """Return the syntax tree of a file of the repository."""
    return ast.parse((ROOT / path).read_text())


@cache
def functions_in(path: str) -> dict[str, ast.FunctionDef]:
    """Return the test functions of a file by name."""
    found = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in found if node.name.startswith("test_")}


def run_by(path: str, test: str) -> str:
    """Return ``ci``, ``ci as root``, ``ci smoke``, or the make target that runs a test which CI does not run.

    Raises:
        ValueError: a condition that is not known here.
    """
    marks = [*_expanded(path, _assigned(path).get("pytestmark")), *functions_in(path)[test].decorator_list]
    ways = {way for mark in marks for way in _ways(path, mark)}
    if path.startswith("tests/frameworks/"):
        return "ci smoke" if "ci smoke" in ways else "make frameworks"
    left_out = sorted(way for way in ways if way.startswith("make "))
    needs = sorted(way for way in ways if way.startswith("ci ") and way != "ci smoke")
    return left_out[0] if left_out else needs[0] if needs else "ci"


def _ways(path: str, mark: ast.expr) -> Iterator[str]:
    """Yield what a mark says about the command that runs the test. Irrelevant marks yield nothing."""
    if isinstance(mark, ast.Name):
        for each in _expanded(path, _lookup(path, mark.id)):
            yield from _ways(path, each)
        return
    name = ast.unparse(mark.func if isinstance(mark, ast.Call) else mark)
    if name == "pytest.mark.more":
        yield "make more"
    elif name == "pytest.mark.smoke":
        yield "ci smoke"
    elif name == "pytest.mark.skipif" and isinstance(mark, ast.Call):
        yield _condition(path, mark)
    elif name == "pytest.mark.parametrize" and isinstance(mark, ast.Call):
        yield from _of_cases(path, mark.args[1])


def _condition(path: str, mark: ast.Call) -> str:
    """Return the command that a ``skipif`` stands for."""
    reasons = [ast.literal_eval(k.value) for k in mark.keywords if isinstance(k.value, ast.Constant)]
    switches = [reason for reason in reasons if reason.startswith("make ")]
    if switches:
        return str(switches[0])
    if any(word in ast.unparse(mark.args[0]) for word in AS_ROOT):
        return "ci as root"
    if "MPIRUN" in ast.unparse(mark.args[0]):
        return "ci with mpirun"
    raise ValueError(f"{path}: when is {ast.unparse(mark)} true in CI?")


def _of_cases(path: str, cases: ast.expr) -> Iterator[str]:
    """Yield what parameters say about the command.

    The case with the fewest conditions decides for all cases. ``ci smoke`` of any case is yielded in addition.
    """
    if not isinstance(cases, ast.List | ast.Tuple):
        if "marks=" in ast.unparse(cases):
            raise ValueError(f"{path}: which cases of {ast.unparse(cases)[:80]} have marks?")
        return
    ways = [list(_of_case(path, case)) for case in cases.elts]
    if any("ci smoke" in each for each in ways):
        yield "ci smoke"
    if all(ways):
        yield from min(ways, key=len)


def _of_case(path: str, case: ast.expr) -> Iterator[str]:
    given = [k.value for k in case.keywords if k.arg == "marks"] if isinstance(case, ast.Call) else []
    for marks in given:
        for mark in _expanded(path, marks):
            yield from _ways(path, mark)


def _expanded(path: str, marks: ast.expr | None) -> Marks:
    """Return one mark or several as a list."""
    if marks is None:
        return []
    return list(marks.elts) if isinstance(marks, ast.List | ast.Tuple) else [marks]


@cache
def _assigned(path: str) -> dict[str, ast.expr]:
    """Return the values of a module's names."""
    found: dict[str, ast.expr] = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def _lookup(path: str, name: str) -> ast.expr:
    """Return the value of a name in this module, or in the test module that it is imported from.

    Raises:
        ValueError: the name is not found.
    """
    if name in _assigned(path):
        return _assigned(path)[name]
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _lookup(f"{str(node.module).replace('.', '/')}.py", name)
    raise ValueError(f"{path}: what is {name}?")
