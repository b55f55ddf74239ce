"""Identifiers of processes, generations and saves.

Theory. Three kinds of number must never be mixed. A *member id* names one life of a process and is never reused. A
*rank* is the number of a process inside one generation. A *generation* is one membership of the job. A member id and a
generation have types of their own, and only ``core/job/membership.py`` relates member ids and ranks.

Invariants:
1. Generations are totally ordered by (term, n). A receiver refuses a message of a generation lower than its own.
2. A save id is a pure function of (run, generation, step, attempt): every rank computes the same one.
3. All ranks of a generation count its votes alike, so a layout version means the same to all of them.
4. The step of a save id fits into the name of its directory, so every attempt can be listed.
"""

from __future__ import annotations

import re
from typing import NewType

import msgspec

MemberId = NewType("MemberId", int)
NodeId = NewType("NodeId", str)

EVERYBODY = MemberId(0)
"""The ``member_id`` of a message to an agent that is meant for every worker of its node."""

STEP_DIGITS_MAX = 15
STEP_MAX = 10**STEP_DIGITS_MAX - 1
RUN_ID_LENGTH_MAX = 64
RUN_ID_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9_-]{{0,{RUN_ID_LENGTH_MAX - 1}}}"


def is_run_id(name: str) -> bool:
    """Return True if ``name`` can name a run or a job. The name becomes a part of paths and checkpoint names."""
    return re.fullmatch(RUN_ID_PATTERN, name) is not None


class Generation(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The number of one membership of the job. ``term`` counts controllers; ``n`` counts memberships."""

    term: int
    n: int

    def __str__(self) -> str:
        return f"{self.term}.{self.n}"

    @staticmethod
    def parse(text: str) -> Generation:
        """Return the generation that ``str(generation)`` wrote as ``text``.

        Raises:
            ValueError: the text is not ``term.n``.
        """
        term, n = text.split(".")
        return Generation(int(term), int(n))

    def next(self) -> Generation:
        """Return the next generation of the same term."""
        return Generation(self.term, self.n + 1)

    def pack(self) -> int:
        """Return the generation as one 64-bit integer, for the status page."""
        return (self.term << 32) | self.n

    @staticmethod
    def unpack(word: int) -> Generation:
        """Return the generation that :meth:`pack` packed into ``word``."""
        return Generation(word >> 32, word & 0xFFFFFFFF)


MEMORY = "memory@"
"""Prefix of a name in a start order, in place of a checkpoint directory: load the states in memory."""


def memory_name(step: int) -> str:
    """Return the name for the states of ``step`` in memory.

    An order to start workers has this name instead of a save's.
    """
    return f"{MEMORY}{step}"


NO_GENERATION = Generation(0, 0)


class LayoutVersion(msgspec.Struct, frozen=True, order=True, array_like=True):
    """The name of the layouts that all ranks published after vote ``vote`` of ``generation``.

    Vote 0 names the layouts that the ranks published when they started.
    """

    generation: Generation
    vote: int

    def __str__(self) -> str:
        return f"{self.generation}/{self.vote}"


NO_VERSION = LayoutVersion(NO_GENERATION, 0)
"""The version of a layout that a rank published between two votes, without the other ranks."""


class SaveId(msgspec.Struct, frozen=True, order=True):
    """The identity of one attempt to save one step.

    Attributes:
        run: id of the run.
        generation: the generation that saves.
        step: number of updates done before the save.
        attempt: number of the attempt to save this step.
        kind: ``periodic``, ``request``, ``exit``, ``final`` or ``last-gasp``.
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
        """Return the name of the directory of this save below the checkpoint root, e.g. ``step-00001200.<save id>``."""
        return f"step-{self.step:08d}.{self}"
