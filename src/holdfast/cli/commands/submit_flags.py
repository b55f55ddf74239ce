"""Common parts of ``holdfast submit slurm`` and ``k8s``: the flags that they pass on to ``holdfast run`` or Slurm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from holdfast.cli.commands.run import TYPES
from holdfast.cli.start.flags import FLAGS, RunFlag
from holdfast.errors import UsageError
from holdfast.schedulers.sbatch import OPTIONS, OURS, PYXIS, SWITCHES

DECIDED = frozenset({
    "nnodes", "node_rank", "master_addr", "master_port", "rdzv_backend", "rdzv_endpoint", "rank_table", "bind",
    "spares", "run_id", "grace_s", "shutdown_timeout", "explain", "print_completion",
})  # fmt: skip
"""Keys of the flags of ``holdfast run`` that are not passed on.

``holdfast submit`` sets these flags itself, or they differ between hosts, or they have another meaning there.
"""
PASSED = tuple(flag for flag in FLAGS if flag.use == "used" and flag.key not in DECIDED)


def passes_flags(command: click.Command) -> click.Command:
    """Add to a command of ``holdfast submit`` the flags that it passes on to ``holdfast run``. Return the command."""
    for flag in PASSED:
        names = [name for name in flag.spellings if name.startswith("--") or name == "-m"]
        command.params.append(
            click.Option(names, is_flag=True, default=False, help=flag.about, hidden=flag.key != "nproc_per_node")
            if flag.kind == "switch"
            else click.Option(
                names, type=TYPES[flag.kind], default=None, help=flag.about, hidden=flag.key != "nproc_per_node"
            )
        )  # fmt: skip
    return command


def flags_of(
    ctx: click.Context, values: Mapping[str, Any], *, without: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the flags that the user has given for ``holdfast run``, as words of its command line.

    ``values`` has the value of each flag by key, and ``without`` the keys of flags to leave out.
    """
    words: list[str] = []
    for flag in PASSED:
        if flag.key not in without and ctx.get_parameter_source(flag.key) is ParameterSource.COMMANDLINE:
            words += _words(flag, values[flag.key])
    return tuple(words)


def _words(flag: RunFlag, value: object) -> tuple[str, ...]:
    if flag.kind == "switch":
        return (flag.name,) if value else ()
    return flag.name, f"{value:g}" if isinstance(value, float) else str(value)


def passes_options(command: click.Command) -> click.Command:
    """Add to a command the options of ``sbatch`` and of pyxis (``srun``) under their own names. Return the command."""
    for name in sorted({*OPTIONS, *OURS, *PYXIS} - {"nodes"}):
        switch = name in SWITCHES
        command.params.append(
            click.Option([f"--{name}", key_of(name)], is_flag=switch, default=None, hidden=True)
        )
    return command


def key_of(name: str) -> str:
    """Return the key of a Slurm option among click's values. No flag of Holdfast has such a key."""
    return f"slurm_{name.replace('-', '_')}"


def named(values: Mapping[str, Any], names: Iterable[str]) -> dict[str, str | None]:
    """Return the value of each Slurm option in ``names`` that the user has given, by name; None for a switch."""
    given = ((name, values.get(key_of(name))) for name in sorted(set(names)))
    return {
        name: None if value is True else str(value) for name, value in given if value not in (None, False)
    }


def pairs(flag: str, texts: Sequence[str]) -> dict[str, str | None]:
    """Parse texts of the form ``KEY=VALUE``. Return the value of each key; None for a text ``KEY`` alone (a switch).

    Raises:
        UsageError: two texts have the same key. ``flag`` names the flag in the error.
    """
    found: dict[str, str | None] = {}
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        if key in found:
            raise UsageError(f"{flag} {key} is given twice", hint="leave one of them out")
        found[key] = value if equals else None
    return found
