"""Texts of scenarios: blocks with an empty line between them, each with input, a line ``----``, and output.

Lines that begin with ``#``, and blocks without ``----``, are comments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

BREAK = "----"


def with_output(text: str, play: Callable[[str], Iterator[str]]) -> str:
    """Return ``text`` with the output that its input gives.

    Args:
        play: yields the output of one line of input. It is called with all input lines of a text, in order.

    Example:
        >>> with_output("loud\\n----\\nold", lambda line: iter([line.upper()]))
        'loud\\n----\\nLOUD\\n'
    """
    blocks = []
    for block in text.strip("\n").split("\n\n"):
        if BREAK not in block:
            blocks.append(block)
            continue
        lines = block[: block.index(BREAK)].splitlines()
        output = [out for line in lines if not line.startswith("#") for out in play(line)]
        blocks.append("\n".join([*lines, BREAK, *output]))
    return "\n\n".join(blocks) + "\n"
