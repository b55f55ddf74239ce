"""Singular and plural: a message with the count 1 uses the singular."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import holdfast
from holdfast.core.decide.ladder import judge
from holdfast.core.watch.hang_attribution import blame
from holdfast.text import noun_of, plural
from tests.core.test_hang_attribution import seen
from tests.core.test_stop_policy import CONFIG, situation


@pytest.mark.parametrize(
    ("count", "noun", "said"),
    [(0, "step", "0 steps"), (1, "step", "1 step"), (2, "batch", "2 batches"), (1200, "rank", "1,200 ranks")],
)
def test_counts(count: int, noun: str, said: str) -> None:
    assert plural(count, noun) == said and said.endswith(noun_of(count, noun))


def test_reasons_of_one() -> None:
    back = judge(0.0, situation(uncovered="shard 1 is gone", memory_here=19, memory_step=19), [], CONFIG)
    assert "1 step is done again" in back.reason
    assert "the other got to" in blame([seen(0), seen(1, "forward:20:0")]).reason


INNER = re.compile(r"\b(rungs?|tiers?|sealed|seals|generations?|box|boxes|holders|in doubt|process life)\b")
MEANT = {
    "valid and sealed (whole, and marked so)",
    "holdfast ckpt holders --help",
}  # a phrase that is explained where it is used; a command


def said_by(module: Path) -> Iterator[str]:
    """Yield texts of more than one word that are not documentation."""
    tree = ast.parse(module.read_text())
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            if " " in node.value.strip():
                yield node.value


RINGS = (
    "cli", "session", "integrations", "core/decide/ladder.py", "core/job/shutdown.py", "core/decide/decision.py",
    "core/job/recovery.py", "core/watch/corruption.py", "core/job/last_gasp.py", "exit_codes.py",
)  # fmt: skip


@pytest.mark.parametrize("ring", RINGS)
def test_words_of_the_protocol_are_not_shown_without_their_meaning(ring: str) -> None:
    place = Path(holdfast.__file__).parent / ring
    said = [
        text for module in ([place] if place.is_file() else place.rglob("*.py")) for text in said_by(module)
    ]
    shown = [text for text in said if INNER.search(text) and not any(words in text for words in MEANT)]
    inner = {text for text in shown if text.startswith(("no rung answers step", " is replaced while"))}
    assert set(shown) - inner == set()
