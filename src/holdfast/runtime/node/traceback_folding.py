"""Shorter tracebacks and stacks: consecutive frames of Holdfast become one line.

An exception that was raised in Holdfast and has a type of another package may show a mistake in Holdfast. Its traceback
is not shortened. The error file always has the whole text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from holdfast.errors import HoldfastError
from holdfast.package import DIRECTORY

OWN = f"{DIRECTORY}/"
FOLDED_LEAST = 2  # consecutive frames that are folded into one line
_FRAME = re.compile(r'(?P<margin>(?:\[rank[^\]]*\]: )?[ |]*)File "(?P<file>[^"]*)", line \d+')
_REPEATED = "[Previous line repeated"


def without_own_frames(text: str) -> str:
    """Return ``text`` with one line in place of two or more consecutive frames of Holdfast."""
    lines: list[str] = []
    for own, group in groupby(_parts(text), lambda part: part[0] == OWN):
        parts = list(group)
        if own and len(parts) >= FOLDED_LEAST:
            lines.append(f"{parts[0][1]}... {len(parts)} frames of Holdfast")
        else:
            lines += [line for *_, found in parts for line in found]
    return "\n".join(lines) + ("\n" if text.endswith("\n") else "")


def is_own_mistake(error: BaseException) -> bool:
    """Return True if the exception was raised in Holdfast and has a type of another package."""
    tail, file = error.__traceback__, ""
    while tail is not None:
        file, tail = tail.tb_frame.f_code.co_filename, tail.tb_next
    return file.startswith(OWN) and not isinstance(error, HoldfastError)


def _parts(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield (kind, margin, lines) of each frame in a traceback, and of the text between frames.

    ``kind``: ``OWN`` for a frame of Holdfast, ``other`` for another frame, empty for text. ``margin``: the text before
    the word "File" of a frame.
    """
    kind, margin, lines = "", "", []
    for line in text.splitlines():
        found = _FRAME.match(line)
        if found is None and kind and _belongs(line, margin):
            lines.append(line)
            continue
        if lines:
            yield kind, margin, lines
        lines = [line]
        kind, margin = "", ""
        if found is not None:
            kind, margin = OWN if found["file"].startswith(OWN) else "other", found["margin"]
    if lines:
        yield kind, margin, lines


def _belongs(line: str, margin: str) -> bool:
    """Return True for a line that belongs to a frame: its source, the marks below that, or the count of a recursion."""
    rest = line.removeprefix(margin)
    return rest != line and rest.startswith(("  ", _REPEATED))
