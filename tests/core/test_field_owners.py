"""Each fact of the job and of a member is written in one place.

The controller's machines share one ``Job`` and its ``Member`` objects. A field that two modules write has no invariant
that either of them can keep.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from holdfast.core.config import Config
from holdfast.core.job.job_state import Job
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.job.membership import Member, Roster

CORE = Path(__file__).resolve().parents[2] / "src" / "holdfast" / "core"
NAMES = {
    "Job": {"job"},
    "Roster": {"roster"},
    "Member": {"member", "other", "m", "newcomer", "survivor", "before"},
}
"""Variables and attributes that hold an object of these classes."""


def fields(name: str) -> set[str]:
    """Return the fields of a class."""
    job = Job(Config(run_id="run", world_size=2), ReplayedState(), lambda layouts, ranks: "")
    if name == "Member":
        return {field.name for field in msgspec.structs.fields(Member)}
    return {field for field in vars(job if name == "Job" else Roster()) if field[0] != "_"}


def written(tree: ast.AST, owner: str = "") -> Iterator[tuple[str, str, int]]:
    """Return (receiver, field, line) of each assignment to an attribute after the constructor.

    The receiver of ``self`` is its class.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            continue
        inside = node.name if isinstance(node, ast.ClassDef) else owner
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            receiver = node.value
            if isinstance(receiver, ast.Attribute):
                yield receiver.attr.lstrip("_"), node.attr, node.lineno
            elif isinstance(receiver, ast.Name):
                yield inside if receiver.id == "self" else receiver.id, node.attr, node.lineno
        yield from written(node, inside)


@pytest.mark.parametrize("name", list(NAMES))
def test_each_field_is_written_by_one_module(name: str) -> None:
    known, places = fields(name), dict[str, dict[str, int]]()
    for path in sorted(CORE.rglob("*.py")):
        for receiver, field, line in written(ast.parse(path.read_text())):
            if field in known and receiver in {name, *NAMES[name]}:
                places.setdefault(field, {})[str(path.relative_to(CORE))] = line
    assert places
    assert {field: at for field, at in places.items() if len(at) > 1} == {}, "written by several modules"


def test_the_variables_of_the_search_are_those_of_the_code() -> None:
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name):
                found.setdefault(node.annotation.id, set()).add(node.arg)
    assert {name: found[name] - NAMES[name] for name in NAMES} == {name: set() for name in NAMES}
