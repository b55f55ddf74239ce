"""Which command runs a test, read from its marks: what CI leaves out on two cores is no proof that CI looks at."""

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
    """Syntax tree of a file of the repository."""
    return ast.parse((ROOT / path).read_text())


@cache
def functions_in(path: str) -> dict[str, ast.FunctionDef]:
    """The test functions of a file."""
    found = (node for node in ast.walk(tree_of(path)) if isinstance(node, ast.FunctionDef))
    return {node.name: node for node in found if node.name.startswith("test_")}


def run_by(path: str, test: str) -> str:
    """``ci``, ``ci as root``, ``ci smoke``, or the make target that runs the test where CI does not.

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
    """What a mark says of where the test runs; nothing for one that does not matter."""
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
    """Of a ``skipif``."""
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
    """Of parameters: the case that is left out least speaks for all, and a short one for CI of a framework counts."""
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
    """One mark or several."""
    if marks is None:
        return []
    return list(marks.elts) if isinstance(marks, ast.List | ast.Tuple) else [marks]


@cache
def _assigned(path: str) -> dict[str, ast.expr]:
    """What the names of a module stand for."""
    found: dict[str, ast.expr] = {}
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
    return found


def _lookup(path: str, name: str) -> ast.expr:
    """What a name stands for, here or in the module of the tests that it comes from.

    Raises:
        ValueError: nothing is known of it.
    """
    if name in _assigned(path):
        return _assigned(path)[name]
    for node in tree_of(path).body:
        if isinstance(node, ast.ImportFrom) and any(alias.name == name for alias in node.names):
            return _lookup(f"{str(node.module).replace('.', '/')}.py", name)
    raise ValueError(f"{path}: what is {name}?")
