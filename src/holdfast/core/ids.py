"""Identities.

Theory. Three kinds of number must never be mixed: a *member id* names one process life and is never reused; a *rank* is
a position inside one generation; a *generation* is one membership of the job. They are separate types here, and only
``core/job/membership.py`` relates them.

Invariants:
1. Generations are totally ordered by (term, n); a message of a lower generation than the receiver's is refused.
2. A save id is a pure function of (run, generation, step, attempt): every rank computes the same one.
3. All ranks of a generation count its votes alike, so a version means the same to all of them.
4. The step of a save id is one that the name of its directory can say: an attempt that nobody lists is never made.
"""

from __future__ import annotations

import re
from typing import NewType

import msgspec

MemberId = NewType("MemberId", int)
NodeId = NewType("NodeId", str)

EVERYBODY = MemberId(0)
"""In a message to an agent: every worker of its node."""

STEP_DIGITS_MAX = 15
STEP_MAX = 10**STEP_DIGITS_MAX - 1
RUN_ID_LENGTH_MAX = 64
RUN_ID_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{RUN_ID_LENGTH_MAX - 1}}}"


def is_run_id(name: str) -> bool:
    """``name`` may be that of a run, or of a job: a part of paths, and of the names of checkpoints."""
    return re.fullmatch(RUN_ID_PATTERN, name) is not None


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True):
    """One membership of the job: ``n`` counts memberships, ``term`` counts controllers."""

    term: int
    n: int

    def __str__(self) -> str:
        return f"{self.term}.{self.n}"

    @staticmethod
    def parse(text: str) -> Generation:
        """Inverse of ``str``. Raises: ValueError."""
        term, n = text.split(".")
        return Generation(int(term), int(n))

    def next(self) -> Generation:
        """The generation that follows in the same term."""
        return Generation(self.term, self.n + 1)

    def pack(self) -> int:
        """As one 64-bit integer, for the status page."""
        return (self.term << 32) | self.n

    @staticmethod
    def unpack(word: int) -> Generation:
        """Inverse of :meth:`pack`."""
        return Generation(word >> 32, word & 0xFFFFFFFF)


MEMORY = "memory@"
"""In place of a save's directory: start from what each rank has in memory."""


def memory_name(step: int) -> str:
    """The states of ``step`` in memory, where a save is named to resume from."""
    return f"{MEMORY}{step}"


NO_GENERATION = Generation(0, 0)


class LayoutVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Names what all ranks told after the ``vote``-th vote of ``generation``; 0: what they told at their start."""

    generation: Generation
    vote: int

    def __str__(self) -> str:
        return f"{self.generation}/{self.vote}"


NO_VERSION = LayoutVersion(NO_GENERATION, 0)
"""Of what a rank told on its own."""


class SaveId(msgspec.Struct, frozen=True, order=True):
    """Identity of one attempt to save one step.

    ``step`` is the number of updates done before it; ``kind`` is ``periodic``, ``request``, ``exit``, ``final`` or
    ``last-gasp``.
    """

    run: str
    generation: Generation
    step: int
    attempt: int
    kind: str

    def __post_init__(self) -> None:
        if not 0 <= self.step <= STEP_MAX:
            raise ValueError(f"step {self.step}: 0 to {STEP_MAX} can be saved")

    def __str__(self) -> str:
        return f"{self.run}.g{self.generation}.a{self.attempt}"

    def directory(self) -> str:
        """Directory name below the checkpoint root, e.g. ``step-00001200.<save id>``."""
        return f"step-{self.step:08d}.{self}"
