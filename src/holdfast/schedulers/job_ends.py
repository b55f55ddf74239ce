"""The exit code of a whole job, from the codes of its launchers, for a scheduler that does not combine them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.exit_codes import MEANING, Exit
from holdfast.schedulers.manifests import ENDS
from holdfast.schedulers.sbatch import AGAIN


def ending_of(codes: Iterable[int]) -> int:
    """Return the exit code of a job from the codes of its launchers: 0 if one of them is 0.

    Otherwise a code of a permanent failure (another start would fail in the same way) has precedence over a code that
    asks for another start. If no launcher ended with a code of Holdfast, the result is the lowest code: -N if signal N
    killed a launcher.

    Args:
        codes: the exit codes of the launchers, at least one.

    Example:
        ``ending_of([75, 75, -9])`` is 75: one launcher was killed, the others have saved.
    """
    seen = set(codes)
    known = next((int(code) for code in (Exit.OK, *ENDS, *AGAIN) if code in seen), None)
    return min(seen) if known is None else known


def meaning_of(code: int) -> str:
    """Return the meaning of a job's exit code in words."""
    if code < 0:
        return f"its launchers were killed (signal {-code})"
    return MEANING[Exit(code)] if code in list(map(int, Exit)) else "its launchers ended in an unknown way"
