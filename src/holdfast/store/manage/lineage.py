"""Which checkpoints of a root belong together: those of a run, and those that it came from.

Theory. Every start of a job is a run of its own, and several jobs may save into one root. So each checkpoint of a
session says where its run came from: for each run before it, the step at which that one was left. What an ancestor
saved later, or goes on saving, is not of this lineage. The run itself is in the save id.

Invariant: what is read here decides about removing and warning, never about what is valid or the newest.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Self

import msgspec

from holdfast.store.backends.location import Place, place_of
from holdfast.store.format import manifest as form
from holdfast.store.read.load import load_values

ANCESTORS_MAX = 64
"""Older ones are forgotten: what they saved was pruned long ago, or is left alone."""


class Lineage(msgspec.Struct, frozen=True):
    """A run, and for each run that it came from the step at which it left that one; the nearest first."""

    run: str
    ancestors: dict[str, int] = {}

    def holds(self, name: str) -> bool:
        """Whether the attempt of this name is of this lineage."""
        key = form.attempt_key(name)
        return key is not None and (key[4] == self.run or key[0] <= self.ancestors.get(key[4], -1))

    @classmethod
    def of_run(cls, run: str, session: Mapping[str, object], name: str) -> Self:
        """The lineage of ``run`` when it goes on from an attempt (or from memory: then from its own).

        Args:
            session: the session's values in that attempt; older ones say nothing of ancestors.
            name: of the attempt.
        """
        said = session.get("lineage")
        ancestors = {r: s for r, s in said.items() if isinstance(s, int)} if isinstance(said, dict) else {}
        key = form.attempt_key(name)
        if key is not None:
            ancestors.pop(key[4], None)
            ancestors = {key[4]: key[0], **ancestors}
        ancestors.pop(run, None)
        return cls(run, dict(islice(ancestors.items(), ANCESTORS_MAX)))


def lineage_of(path: Place | str) -> Lineage:
    """The lineage of the run that saved an attempt.

    Raises:
        CheckpointInvalid: it cannot be read.
    """
    name = place_of(path).name
    key = form.attempt_key(name)
    session = load_values(path).get("session")
    return Lineage.of_run("" if key is None else key[4], session if isinstance(session, dict) else {}, name)
