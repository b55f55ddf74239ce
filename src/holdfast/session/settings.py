"""Checks of the arguments of a session. Without them a wrong value would fail later, in one thread or on one rank."""

from __future__ import annotations

import inspect
import operator
import os
from numbers import Real
from pathlib import Path
from typing import Any, SupportsIndex, TypedDict

from holdfast.errors import UsageError
from holdfast.session.steps.nonfinite import checked_mode
from holdfast.store.backends.location import Place, Url, absolute
from holdfast.store.manage.retention import KeepPolicy, Kept, SaveWhen, retention, save_policies

_TEXTS = {
    "checkpoint": "checkpoint='ckpts/', or None",
    "resume": "resume='auto', 'never', or a checkpoint",
    "exit_file": "exit_file='exit.json', or None",
}


class SessionOptions(TypedDict, total=False):
    """The arguments that the session of every framework accepts; ``holdfast.session`` describes each."""

    checkpoint: str | os.PathLike[str] | None
    resume: str
    seed: int
    save: SaveWhen
    save_every_steps: int | None
    save_every_s: float | None
    keep: Kept
    copies: int
    exit_file: str | os.PathLike[str] | None
    grace_s: float | None


class SessionSettings:
    """The checked arguments of a session that do not depend on the framework. Raises: UsageError: a value is wrong."""

    def __init__(
        self,
        *,
        checkpoint: str | os.PathLike[str] | None = None,
        resume: str = "auto",
        seed: int = 0,
        save: SaveWhen = None,
        save_every_steps: int | None = None,
        save_every_s: float | None = None,
        keep: Kept = 3,
        copies: int = 1,
        exit_file: str | os.PathLike[str] | None = None,
        grace_s: float | None = None,
        memory: int | None = None,
        verify_block: int = 0,
        verify_ranks: int = 0,
        verify_data: bool = True,
        nonfinite: str = "warn",
    ) -> None:
        every_steps = None if save_every_steps is None else _whole("save_every_steps", save_every_steps, 1)
        every_s = None if save_every_s is None else _seconds("save_every_s", save_every_s)
        self.checkpoint: Place | None = (
            None if checkpoint is None else absolute(_text("checkpoint", checkpoint))
        )
        self.resume = _text("resume", resume)
        self.seed = _whole("seed", seed)
        self.policies = save_policies(save, every_steps, every_s)
        self.keep = _kept(keep)
        self.copies = _whole("copies", copies, 1)
        self.exit_file = None if exit_file is None else Path(_text("exit_file", exit_file)).absolute()
        self.grace_s = None if grace_s is None else _seconds("grace_s", grace_s, zero=True)
        self.verify_block = _whole("verify_block", verify_block, 0)
        self.verify_ranks = _whole("verify_ranks", verify_ranks, 0)
        self.verify_data = bool(verify_data)
        self.nonfinite = checked_mode(nonfinite)
        self.memory = None if memory is None else _whole("memory", memory, 0)


FACE_OPTIONS = [
    each
    for each in inspect.signature(SessionSettings).parameters.values()
    if each.name in SessionOptions.__annotations__
]


def extras_of(state: object) -> dict[str, Any]:
    """Return the argument ``state``: the user's dict, or a new dict for None. Raises: UsageError: it is not a dict."""
    if state is None:
        return {}
    if not isinstance(state, dict):
        raise UsageError(
            f"session(state=...) is a {type(state).__name__}, not a dict of named objects",
            hint='give each object a name: state={"ema": ema}',
        )
    return state


def _kept(keep: object) -> KeepPolicy:
    try:
        return retention(keep)
    except UsageError as error:
        what, _, why = error.message.rpartition(": ")  # the first part may have colons
        raise UsageError(f"session({what}): {why}", hint=error.hint) from error


def _whole(name: str, value: object, least: int | None = None) -> int:
    """Return ``value`` as an int. Raises: UsageError: it is a bool, not a whole number, or below ``least``."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise UsageError(
            f"session({name}={value!r}): not a whole number", hint=f"leave {name} out, or give a number"
        )
    number = operator.index(value)
    if least is not None and number < least:
        raise UsageError(
            f"session({name}={number}): must be {least} or more",
            hint=f"leave {name} out, or give {least} or more",
        )
    return number


def _seconds(name: str, value: object, *, zero: bool = False) -> float:
    """Return ``value``, a duration in seconds, as a float. ``zero`` allows 0.

    Raises: UsageError: ``value`` is not positive.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"session({name}={value!r}): not a number of seconds", hint=f"{name}=600")
    seconds = float(value)
    if not (seconds > 0 or (zero and seconds == 0)):  # nan is neither
        raise UsageError(
            f"session({name}={value}): must be {'0 or more' if zero else 'above 0'}", hint=f"{name}=600"
        )
    return seconds


def _text(name: str, value: object) -> str:
    """Return a path, a URL or a string as a string. Raises: UsageError: ``value`` is none of these."""
    text = str(value) if isinstance(value, Url) else value
    text = os.fspath(text) if isinstance(text, os.PathLike) else text
    if not isinstance(text, str):
        raise UsageError(f"session({name}={value!r}): neither text nor a path", hint=_TEXTS[name])
    return text
