"""Checks of the arguments of public functions: a misspelled argument raises an error that suggests the right name.

The error is a UsageError. After a UsageError the launcher does not restart the workers, as it would after a crash.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from holdfast.errors import UsageError
from holdfast.text import closest

P = ParamSpec("P")
R = TypeVar("R")


def checked(
    name: str, options: Sequence[inspect.Parameter] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator for a public function that refuses a call whose arguments do not fit the signature.

    Args:
        name: the name by which the user calls the function.
        options: the keyword parameters that the function takes as ``**options``.

    Returns:
        A decorator. The decorated function raises UsageError where Python would raise a TypeError. Its signature, as
        ``help`` shows it, includes ``options``.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        if options:
            own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
            signature = signature.replace(parameters=[*own, *options])

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise _refusal(name, signature, list(kwargs), str(error)) from None
            return function(*args, **kwargs)

        call.__signature__ = signature  # type: ignore[attr-defined]  # for ``help``
        return call

    return decorate


def _refusal(name: str, signature: inspect.Signature, given: list[str], why: str) -> UsageError:
    known = [p.name for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    needed = [p.name for p in signature.parameters.values() if p.default is p.empty and p.name in known]
    form = f"{name}({', '.join(f'{each}=...' for each in needed)})"
    wrong = next((each for each in given if each not in known), "")
    if not wrong:
        return UsageError(f"{name}(): {why}", hint=form)
    close = closest(wrong, known)
    meant = f"; did you mean {close}?" if close else ""
    return UsageError(f"{name}() has no argument {wrong!r}{meant}", hint=f"its arguments: {', '.join(known)}")
