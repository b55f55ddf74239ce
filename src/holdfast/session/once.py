"""The function ``holdfast.once``, for values that a script makes once per rank and run."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from holdfast.core.job.made_once import NAME_LENGTH_MAX, NAMES_MAX, VALUE_LENGTH_MAX
from holdfast.core.protocol.messages import OnceAsked, OnceTold
from holdfast.errors import UsageError
from holdfast.runtime.worker.worker_client import WorkerClient

ASK_AGAIN_S = 1.0  # the request may have been lost with a controller

Value = TypeVar("Value")

_LOCK = threading.Lock()
_KNOWN: dict[str, str] = {}  # JSON by name; the forked workers of a data loader inherit it


def once(name: str, make: Callable[[], Value]) -> Value:
    """Return the value of this rank under ``name``, which ``make()`` makes at the first call in the run.

    A replacement runs the script from its top. There it must not choose a new value, for example a time in the name of
    a directory, a random identifier or the next free version number. With ``once`` it gets the value that the lost
    process chose. The same holds after a restart of all workers, and on another node. Ranks do not share values. A new
    run begins without values. Without ``holdfast run``, each call returns the result of a new ``make()``.

    Args:
        name: 1 to 100 printable characters. A rank may use up to 100 names.
        make: a function without arguments, called at most once per rank, run and name, unless it raises or the process
            dies during the call. Its result is None, a bool, a finite number, a string, or a list or dict (with strings
            as keys) of these, at most 1000 characters as JSON. The result must hold no password, because it is written
            to the run's event log.

    Returns:
        The value that ``make()`` returned in the first process of this rank.

    Raises:
        UsageError: ``name`` or the result of ``make`` is not allowed.
        UsageError: the caller is a child process of a worker, and the worker has not called ``once(name, ...)``.

    Example:
        >>> import time
        >>> directory = once("directory", lambda: time.strftime("logs/%Y%m%d-%H%M%S"))
        >>> directory == once("directory", lambda: "another one")  # under `holdfast run`: True
        False
    """
    if not name.isprintable() or not 1 <= len(name) <= NAME_LENGTH_MAX:
        raise UsageError(
            f"once({name[:20]!r}): no name that can be kept",
            hint=f"1 to {NAME_LENGTH_MAX} printable characters",
        )
    with _LOCK:
        if name not in _KNOWN:
            client = WorkerClient.current()
            if client is None:
                _refuse_child(name)
                return make()
            if client.stand_in is not None:
                client.stand_in.ask_once()
            kept = _ask(client, name, "")
            _KNOWN[name] = kept or _ask(client, name, encoded(name, make()))
        value: Value = json.loads(_KNOWN[name])
        return value


def _ask(client: WorkerClient, name: str, value: str) -> str:
    """Return the value, as JSON, that the controller keeps under ``name``; empty if it keeps none.

    Args:
        value: JSON that the controller keeps from now on if it has no value yet; if empty, only ask.

    Raises:
        UsageError: this rank has already used the largest number of names.
    """
    told: list[OnceTold] = []
    heard = threading.Event()

    def hear(message: OnceTold) -> None:
        if message.name == name and (message.value or message.full or not value):
            told.append(message)
            heard.set()

    client.on(OnceTold, hear)
    while not heard.is_set():
        if client.orphaned:
            return value  # no controller is left that could replace this process
        client.send(OnceAsked(member_id=client.member_id, name=name, value=value))
        heard.wait(ASK_AGAIN_S)
    if told[-1].full:
        raise UsageError(
            f"once({name!r}): this rank has made {NAMES_MAX} values",
            hint="keep one dict under one name, or what belongs to the training in session(state=...)",
        )
    return told[-1].value


def encoded(name: str, value: object) -> str:
    """Return ``value`` as JSON. Raises: UsageError: JSON would change ``value``, or the JSON is too long."""
    where = _odd(value)
    if where:
        raise UsageError(
            f"once({name!r}): {where} cannot be kept",
            hint="make None, a bool, a finite number, a text, or a list or dict (texts as keys) of these: str(path)",
        )
    text = json.dumps(value)
    if len(text) > VALUE_LENGTH_MAX:
        raise UsageError(
            f"once({name!r}): {len(text)} characters of JSON, more than {VALUE_LENGTH_MAX}",
            hint="keep the name of a file, and the rest in the file",
        )
    return text


def _odd(value: object) -> str:
    """Return a description of the first part of ``value`` that JSON would change; empty if JSON changes nothing."""
    if value is None or type(value) in (bool, int, str):
        return ""
    if type(value) is float:
        return "" if math.isfinite(value) else f"the number {value}"
    if type(value) is list:
        return next(filter(None, map(_odd, value)), "")
    if type(value) is dict:
        key = next((key for key in value if type(key) is not str), None)
        return f"the key {key!r}" if key is not None else next(filter(None, map(_odd, value.values())), "")
    return f"an object of type {type(value).__name__}"


def _refuse_child(name: str) -> None:
    """Refuse ``once(name, ...)`` in a child process, which has no agent and would make a value of its own.

    Raises:
        UsageError: this is a child process of a worker.
    """
    if "HOLDFAST_MEMBER_ID" in os.environ:
        raise UsageError(
            f"once({name!r}): a child process of a worker asks",
            hint="ask in the script before it starts processes, and hand them the value "
            "(with `spawn`: under `if __name__ == '__main__':`)",
        )
