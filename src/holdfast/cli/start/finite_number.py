"""A click type for finite numbers on the command line."""

from __future__ import annotations

import math
from typing import Any

import click


class FiniteNumber(click.FloatRange):
    """A click type for a finite number. ``nan`` would pass every range check, and settings cannot store ``inf``."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that click parses from ``value``. A number that is not finite is an error of click."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number
