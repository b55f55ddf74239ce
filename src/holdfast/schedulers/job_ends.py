"""The end of a job, from the codes of its launchers, where no scheduler makes one of them."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.exit_codes import MEANING, Exit
from holdfast.schedulers.manifests import ENDS
from holdfast.schedulers.sbatch import AGAIN


def ending_of(codes: Iterable[int]) -> int:
    """The code of a job whose launchers have ended with these: 0 if one of them has.

    Then come codes that a further start would not change, then those that ask for one. Below 0: the launchers were
    killed by this signal.

    Args:
        codes: at least one.

    Example:
        ``ending_of([75, 75, -9])`` is 75: one launcher was killed, the others have saved.
    """
    seen = set(codes)
    known = next((int(code) for code in (Exit.OK, *ENDS, *AGAIN) if code in seen), None)
    return min(seen) if known is None else known


def meaning_of(code: int) -> str:
    """What the code of a job says, in words."""
    if code < 0:
        return f"its launchers were killed (signal {-code})"
    return MEANING[Exit(code)] if code in list(map(int, Exit)) else "its launchers ended in an unknown way"
