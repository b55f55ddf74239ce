"""The documents say what the code says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from holdfast.core.phases import PHASES
from holdfast.core.policy import Action
from holdfast.core.vote import FIELDS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_phases_in_the_document_are_the_phases_in_the_code() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `([\w ]+)` \| `(\w+)` \|$", (DOCS / "protocol.md").read_text(), re.MULTILINE
    )
    assert rows == [(phase, event, target) for (phase, event), target in PHASES.items()]


def test_every_rung_is_explained() -> None:
    text = (DOCS / "protocol.md").read_text()
    assert [action for action in get_args(Action) if f"| `{action}` |" not in text] == []


def test_the_vote_has_the_words_that_the_documents_name() -> None:
    words = ", ".join(name.replace("_squared", "^2") for name in FIELDS)
    for document in ("protocol.md", "design/0001-spine.md"):
        assert f"`[{words}]`" in (DOCS / document).read_text(), document


def test_every_record_kind_is_documented() -> None:
    documented = set(re.findall(r"`(\w+)`", (DOCS / "events.md").read_text()))
    sources = (ROOT / "src" / "holdfast" / "core").glob("*.py")
    recorded = {k for path in sources for k in re.findall(r"record\(\s*\"(\w+)\"", path.read_text())}
    assert len(recorded) > 20
    assert recorded - documented == set()
