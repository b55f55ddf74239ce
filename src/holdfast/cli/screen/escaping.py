"""Output to the terminal. All output goes through this module, so that no printed text can control the terminal.

A control character in a log, an exception, a name or an event is shown as its Python escape. Only lines of ranks keep
their colours. In these lines, the sequences with which progress bars move the cursor are removed.
"""

from __future__ import annotations

import re

import click

_NEITHER = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
UNSAFE = re.compile(f"[{_NEITHER}]")
"""Control characters (C0 and C1) except newline and tab, Unicode's line separators, and direction marks of text."""
_COLOUR = r"\x1b\[[\d;:]*m"
_BAR = r"\x1b\[\d*[AK]"
_IN_LINES = re.compile(f"({_COLOUR})|({_BAR})|[{_NEITHER}]")
_PLAIN = "\x1b[0m"


def shown(text: str) -> str:
    r"""Return ``text`` with each control character as an escape (``\x1b``, ``\u202e``). Newlines and tabs are kept."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def coloured(line: str) -> str:
    """Return a line of a rank with its control characters escaped, except those for colours.

    Colours are switched off at the end of the line. Movements of the cursor are removed.
    """
    escaped = _IN_LINES.sub(lambda found: found[1] or ("" if found[2] else _escape(found[0])), line)
    return escaped + _PLAIN if "\x1b" in escaped else escaped


def echo(text: str = "", *, lead: str = "", nl: bool = True, err: bool = False) -> None:
    """Print ``text`` with control characters escaped, after the unchanged text ``lead`` (which may have colours).

    ``nl``: print a newline at the end. ``err``: print on stderr.
    """
    click.echo(lead + shown(text), nl=nl, err=err)


def echo_line(line: str, *, raw: bool = False) -> None:
    """Print a line of a rank, with its colours only on a terminal. With ``raw``, print it unchanged."""
    click.echo(line if raw else coloured(line), color=True if raw else None)


def echo_json(data: bytes, *, nl: bool = True) -> None:
    """Print JSON, with those control characters escaped that JSON does not escape itself (DEL, C1, ...)."""
    click.echo(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode()), nl=nl)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
