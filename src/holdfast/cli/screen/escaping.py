"""The one way to the terminal: what others have written (logs, exceptions, names, events) cannot drive it.

A control character is shown as its escape in Python. Only lines of ranks keep their colours; the sequences with which
progress bars move the cursor are left out there.
"""

from __future__ import annotations

import re

import click

_NEITHER = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
UNSAFE = re.compile(f"[{_NEITHER}]")
"""C0 and C1 but newline and tab, the separators of Unicode, and what turns the direction of the text."""
_COLOUR = r"\x1b\[[\d;:]*m"
_BAR = r"\x1b\[\d*[AK]"
_IN_LINES = re.compile(f"({_COLOUR})|({_BAR})|[{_NEITHER}]")
_PLAIN = "\x1b[0m"


def shown(text: str) -> str:
    r"""``text`` with each control character as its escape (``\x1b``, ``\u202e``); newlines and tabs are kept."""
    return UNSAFE.sub(lambda found: _escape(found[0]), text)


def coloured(line: str) -> str:
    """A line of a rank: as :func:`shown`, its colours kept (and ended), the movements of progress bars left out."""
    escaped = _IN_LINES.sub(lambda found: found[1] or ("" if found[2] else _escape(found[0])), line)
    return escaped + _PLAIN if "\x1b" in escaped else escaped


def echo(text: str = "", *, lead: str = "", nl: bool = True, err: bool = False) -> None:
    """Print ``text`` as it may be shown; ``lead`` stands before it as it is, with colours of ours."""
    click.echo(lead + shown(text), nl=nl, err=err)


def echo_line(line: str, *, raw: bool = False) -> None:
    """Print a line of a rank: coloured on a terminal, plain elsewhere; ``raw``: with all that it holds."""
    click.echo(line if raw else coloured(line), color=True if raw else None)


def echo_json(data: bytes, *, nl: bool = True) -> None:
    """Print JSON; what it may leave as it is (DEL, C1, ...) is escaped, too."""
    click.echo(UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", data.decode()), nl=nl)


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
