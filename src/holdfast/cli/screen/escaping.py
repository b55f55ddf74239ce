"""The only way to the terminal: text from elsewhere (logs, exceptions, names, events) cannot drive the terminal.

A control character is shown as its Python escape. Only lines of ranks keep their colours. In these lines, the sequences
with which progress bars move the cursor are removed.
"""

from __future__ import annotations

import re

import click

_NEITHER = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
UNSAFE = re.compile(f"[{_NEITHER}]")
"""C0 and C1 except newline and tab, the separators of Unicode, and characters that change the direction of text."""
_COLOUR = r"\x1b\[[\d;:]*m"
_BAR = r"\x1b\[\d*[AK]"
_IN_LINES = re.compile(f"({_COLOUR})|({_BAR})|[{_NEITHER}]")
_PLAIN = "\x1b[0m"


def shown(text: str) -> str:
    r"""Return ``text`` with each control character as its escape (``\x1b``, ``\u202e``); newlines and tabs are kept."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def coloured(line: str) -> str:
    """Return a rank's line, escaped as in :func:`shown`; colours are kept (and ended), cursor movements are removed."""
    escaped = _IN_LINES.sub(lambda found: found[1] or ("" if found[2] else _escape(found[0])), line)
    return escaped + _PLAIN if "\x1b" in escaped else escaped


def echo(text: str = "", *, lead: str = "", nl: bool = True, err: bool = False) -> None:
    """Print ``text`` escaped; ``lead`` is printed before it unchanged, with Holdfast's own colours."""
    click.echo(lead + shown(text), nl=nl, err=err)


def echo_line(line: str, *, raw: bool = False) -> None:
    """Print a line of a rank: coloured on a terminal, plain elsewhere; ``raw``: unchanged."""
    click.echo(line if raw else coloured(line), color=True if raw else None)


def echo_json(data: bytes, *, nl: bool = True) -> None:
    """Print JSON, with control characters escaped that JSON allows (DEL, C1, ...)."""
    click.echo(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode()), nl=nl)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
