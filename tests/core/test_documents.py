"""The documents agree with the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import get_args, get_type_hints

from holdfast.core.decide.stop_policy import Action
from holdfast.core.job.liveness import NodeEvent
from holdfast.core.worker.vote import FIELDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_rung_is_explained() -> None:
    text = (DOCS / "protocol.md").read_text()
    assert [action for action in get_args(Action) if f"| `{action}` |" not in text] == []


def test_the_vote_has_the_words_that_the_documents_name() -> None:
    words = ", ".join(name.replace("_squared", "^2") for name in FIELDS)
    for document in ("protocol.md", "design/0001-spine.md"):
        assert f"`[{words}]`" in (DOCS / document).read_text(), document


def recorded() -> set[str]:
    """Return the kinds of ``events.jsonl``.

    The machines write them with ``record("kind", ...)``, the shells with ``append("kind", data)``.
    """
    calls = [
        node
        for ring in ("core", "runtime")
        for path in (ROOT / "src" / "holdfast" / ring).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    ]
    kinds: set[str] = set()
    for call in calls:
        name, first = getattr(call.func, "attr", ""), call.args[0]
        if name not in ("record", "_record") and (name != "append" or len(call.args) != 2):
            continue
        if isinstance(first, ast.Constant):
            kinds.add(str(first.value))
        elif isinstance(first, ast.JoinedStr):
            assert ast.unparse(first) == "f'node_{event.kind}'", "say here which kinds these are"
            kinds |= {f"node_{kind}" for kind in get_args(get_type_hints(NodeEvent)["kind"])}
    return kinds


def test_every_record_kind_is_documented() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (DOCS / "events.md").read_text(), re.MULTILINE)
    documented = {kind for row in rows for kind in re.findall(r"\w+", row)}
    assert len(documented) > 60
    assert recorded() - documented == set(), "recorded, but not in docs/events.md"
    assert documented - recorded() == set(), "in docs/events.md, but never recorded"


def test_every_variable_is_documented() -> None:
    text = (DOCS / "run-flags.md").read_text()
    documented = set(re.findall(r"HOLDFAST_[A-Z0-9_]+", text[text.index("## Environment") :]))
    sources = (ROOT / "src" / "holdfast").rglob("*.py")
    read = {name for path in sources for name in re.findall(r"HOLDFAST_[A-Z0-9_]+[A-Z0-9]", path.read_text())}
    assert len(read) > 10
    assert read == documented
