"""The search for the words that ``docs/writing.md`` bans; ``tests/test_tidy.py`` refuses each of them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# "A user who ..." is English; "who leaves the loop ..." has no noun.
PERSONS = r"(?<!user )(?<!users )(?<!person )(?<!people )(?<!reader )(?<!contributor )"
BANNED = {
    "who": re.compile(PERSONS + r"\b(?:who|whoever)\b", re.IGNORECASE),
    "somebody": re.compile(r"\b(?:some|any|every|no)body\b", re.IGNORECASE),
    "anew": re.compile(r"\banew\b", re.IGNORECASE),
    "all the same": re.compile(r"\ball the same\b", re.IGNORECASE),
    "by itself": re.compile(r"\bby (?:it|them)sel(?:f|ves)\b", re.IGNORECASE),
    "goes on": re.compile(r"\b(?:go|goes|going|gone|went) on\b", re.IGNORECASE),
    "stands at": re.compile(r"\b(?:stand|stands|standing|stood) at\b", re.IGNORECASE),
    "behind the block": re.compile(
        r"\bbehind (?:a|an|the|its|this|that|each) (?:block|loop|step|epoch)\b", re.IGNORECASE
    ),
    "told": re.compile(r"\btold\b", re.IGNORECASE),
}
# The rules themselves, with their examples of what not to write.
EXEMPT = {"docs/writing.md", "tests/prose.py"}
CODE = r"`+[^`]*`+"


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file that a person reads, by number: Markdown without code, docstrings, comments, messages.

    Example:
        >>> any("prose" in text for _, text in prose_of(Path(__file__)))
        True
    """
    text = path.read_text()
    yield from _of_markdown(text) if path.suffix == ".md" else _of_python(text)


def _of_markdown(text: str) -> Iterator[tuple[int, str]]:
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, re.sub(rf"{CODE}|\]\([^)]*\)", "", line)


def _of_python(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        # A string without a space is a key or a word of a protocol, not a sentence.
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            for offset, line in enumerate(node.value.splitlines()):
                yield node.lineno + offset, re.sub(CODE, "", line)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], re.sub(CODE, "", token.string)


def breaches(path: Path) -> list[tuple[int, str]]:
    """Return line and rule of each banned word in a file."""
    text = path.read_text()
    # The tokenizer takes ten milliseconds per file, and few files have such a word anywhere.
    if not any(pattern.search(text) for pattern in BANNED.values()):
        return []
    return [
        (number, rule)
        for number, line in prose_of(path)
        for rule, pattern in BANNED.items()
        for _ in pattern.findall(line)
    ]


def files() -> list[Path]:
    """Return the documents and sources that the rules apply to: all Markdown, and the Python of the project."""
    documents = [
        *ROOT.glob("*.md"),
        *(p for f in ("docs", "bench", ".github") for p in (ROOT / f).rglob("*.md")),
    ]
    sources = [p for f in ("src", "tests", "bench", "scripts") for p in (ROOT / f).rglob("*.py")]
    return sorted(p for p in documents + sources if str(p.relative_to(ROOT)) not in EXEMPT)
