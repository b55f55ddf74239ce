"""A writer of plain values as YAML, for the values that manifests need.

A text is written without quotes only if no YAML parser could read it as another type. Any other text is in double
quotes, with every unprintable character escaped.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

Plain: TypeAlias = "str | int | bool | Sequence[Plain] | Mapping[str, Plain]"

_BARE = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")
_WORDS = frozenset("true false null yes no on off y n".split())  # of YAML 1.1 and 1.2
STEP = 2


def documents(values: Sequence[Plain]) -> str:
    """Return the values as YAML documents, each after a line ``---``.

    Example:
        ``documents([{"kind": "Job"}]) == "---\\nkind: Job\\n"``
    """
    return "".join("---\n" + "\n".join(_lines(value, 0)) + "\n" for value in values)


def _lines(value: Plain, indent: int) -> list[str]:
    pad = " " * indent
    if isinstance(value, Mapping) and value:
        found: list[str] = []
        for key, inner in value.items():
            head = f"{pad}{_text(key)}:"
            found += (
                [head, *_lines(inner, indent + STEP)] if _nested(inner) else [f"{head} {_lines(inner, 0)[0]}"]
            )
        return found
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        found = []
        for inner in value:
            first, *rest = _lines(inner, indent + STEP)
            found += [f"{pad}- {first.lstrip(' ')}", *rest]
        return found
    return [pad + _scalar(value)]


def _nested(value: Plain) -> bool:
    return isinstance(value, Mapping | Sequence) and not isinstance(value, str) and len(value) > 0


def _scalar(value: Plain) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, str):
        return _text(value)
    return "{}" if isinstance(value, Mapping) else "[]"


def _text(text: str) -> str:
    if _BARE.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    return character if character.isprintable() else f"\\U{ord(character):08x}"
