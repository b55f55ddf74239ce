"""Flags of ``holdfast run`` from files: ``holdfast.toml``, and ``[tool.holdfast]`` of ``pyproject.toml``.

Rules:
1. The sources of a value, in the order of precedence: command line, environment variable, ``holdfast.toml``,
   ``pyproject.toml``, default. If two flags set the same thing (``RIVALS``), the flag from the later source in this
   order is ignored.
2. Only the files of the working directory are read.
3. A key that is not a flag is an error, and so is a value of another type. No setting is ignored silently.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from holdfast.cli.start.flags import BY_KEY, FLAGS, RunFlag
from holdfast.errors import UsageError
from holdfast.text import closest

FILES = ("holdfast.toml", "pyproject.toml")
COMMAND_LINE, DEFAULT = "command line", "default"
NEVER = frozenset({"explain", "print_completion"})
"""Keys of flags that no file can set, because they concern a single call of the command."""
RIVALS = (
    frozenset({"grace_s", "shutdown_timeout"}),
    frozenset({"rdzv_endpoint", "master_addr"}),
    frozenset({"rdzv_endpoint", "master_port"}),
)
_IN_WORDS = {"text": "a text", "whole": "a whole number", "number": "a number", "switch": "true or false"}


@dataclass
class FlagValues:
    """The values of all flags.

    Attributes:
        values: the value of each flag, by key.
        sources: the source of each value, by key: ``command line``, a variable, a file or ``default``.
        over: by key, the files whose value for the flag is overridden by another source.
    """

    values: dict[str, Any]
    sources: dict[str, str]
    over: dict[str, list[str]] = field(default_factory=dict)

    @property
    def given(self) -> frozenset[str]:
        """Keys of the flags that have a value from another source than the default."""
        return frozenset(key for key, source in self.sources.items() if source != DEFAULT)

    @property
    def notes(self) -> tuple[str, ...]:
        """One line for each file that sets a flag, with the names of these flags."""
        found = []
        for name in FILES:
            used = ", ".join(flag.name for flag in FLAGS if self.sources.get(flag.key) == name)
            if used:
                found.append(f"{name} sets {used}")
        return tuple(found)


def settle(ctx: click.Context, values: Mapping[str, Any], directory: Path) -> FlagValues:
    """Return the value of each flag with its source, from the command line, the environment and the files.

    Args:
        values: the values that click has parsed from command line and environment.
        directory: the directory of the files.

    Raises:
        UsageError: a file cannot be read, or has an unknown key or a value that the flag does not accept.
    """
    sources = {key: _source(ctx, key) for key in values}
    settled = FlagValues(dict(values), sources)
    for name in FILES:
        found = _read(directory / name)
        better = {key for key, source in settled.sources.items() if source != DEFAULT}
        for key, value in found.items():
            if key in better or any(key in rivals and rivals & better for rivals in RIVALS):
                settled.over.setdefault(key, []).append(name)
            else:
                settled.values[key], settled.sources[key] = value, name
    return settled


def explanation(settled: FlagValues) -> list[tuple[str, str, str]]:
    """Return (flag, value, source) as text for each flag that has an effect. Flags that are set come first."""
    flags = [flag for flag in FLAGS if flag.use == "used" and flag.key not in NEVER]
    rows = []
    for flag in sorted(flags, key=lambda flag: settled.sources[flag.key] == DEFAULT):
        over = "".join(f", over {name}" for name in settled.over.get(flag.key, ()))
        value = settled.values[flag.key]
        shown = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        rows.append((flag.name, shown, settled.sources[flag.key] + over))
    return rows


def _source(ctx: click.Context, key: str) -> str:
    source = ctx.get_parameter_source(key)
    if source is ParameterSource.COMMANDLINE:
        return COMMAND_LINE
    return str(BY_KEY[key].variable) if source is ParameterSource.ENVIRONMENT else DEFAULT


def _read(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint=f"chmod u+r {path}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no TOML: {error}", hint="correct that line") from error
    if path.name == "pyproject.toml":
        tools = document.get("tool", {})
        document = tools.get("holdfast", {}) if isinstance(tools, dict) else {}
        if not isinstance(document, dict):
            raise UsageError(
                f"{path}: tool.holdfast is no table", hint="write [tool.holdfast], and flags below it"
            )
    return {flag.key: _checked(path, flag, value) for flag, value in _flags(path, document.items())}


def _flags(path: Path, items: Iterable[tuple[str, Any]]) -> list[tuple[RunFlag, Any]]:
    found: dict[str, tuple[RunFlag, Any]] = {}
    for name, value in items:
        flag = BY_KEY.get(name.replace("-", "_"))
        if flag is None or flag.key in NEVER:
            names = [flag.name[2:] for flag in FLAGS if flag.key not in NEVER]
            close = closest(name.replace("_", "-"), names)
            raise UsageError(
                f"{path}: {name} is no flag that a file can set"
                + (f"; did you mean {close}?" if close else ""),
                hint="holdfast run --help  (keys are the flags without their two dashes)",
            )
        if flag.key in found:
            raise UsageError(
                f"{path}: {flag.name[2:]} stands there in both spellings", hint="leave one of them out"
            )
        found[flag.key] = flag, value
    return list(found.values())


def _checked(path: Path, flag: RunFlag, value: Any) -> Any:
    """Return a value from a file, converted to the type of the flag. Raises: UsageError."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if flag.kind == "text" and (isinstance(value, str) or is_whole):
        return str(value)
    if flag.kind == "switch" and isinstance(value, bool):
        return value
    if flag.kind == "whole" and is_whole:
        return value
    if flag.kind == "number" and (is_whole or (isinstance(value, float) and math.isfinite(value))):
        return float(value)
    raise UsageError(
        f"{path}: {flag.name[2:]} = {value!r} is not {_IN_WORDS[flag.kind]}",
        hint=f"for example {flag.name[2:]} = {_example(flag)}",
    )


def _example(flag: RunFlag) -> str:
    if flag.kind == "switch":
        return "true"
    if flag.kind == "text":
        return f'"{flag.default or "..."}"'
    return str(flag.default or 1)
