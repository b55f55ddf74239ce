"""The session's forward hook on a module of the script. Copies of the module do not have the hook."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch


class OutputHook:
    """A forward hook that passes each output to ``watch``.

    A copy of the module (``copy.deepcopy``, ``pickle``, ``torch.save``) gets a function of the standard library that
    does nothing instead. So a copy is not part of the session, and its file can be loaded without Holdfast.
    """

    def __init__(self, watch: Callable[[Any], None]) -> None:
        self._watch = watch

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._watch(output)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        return getattr, (contextlib.nullcontext(), "__exit__")
