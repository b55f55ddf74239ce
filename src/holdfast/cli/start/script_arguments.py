"""The arguments of the script in a command line of torchrun's form."""

from __future__ import annotations

import click


def without_separator(
    _context: click.Context, _parameter: click.Parameter, args: tuple[str, ...]
) -> tuple[str, ...]:
    """Return the arguments of the script without a first ``--``, which torchrun also removes."""
    return args[1:] if args[:1] == ("--",) else args
