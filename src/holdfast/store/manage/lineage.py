"""The lineage of a run: the checkpoints of a root that belong to the run and to the runs that it continues.

Theory. Every start of a job is a separate run, and several jobs may save into one root. So each checkpoint of a session
records the ancestors of its run: for each earlier run, the step at which the next run continued it. Later saves of an
ancestor do not belong to this lineage. The id of the run that saves is part of the save id.

Invariant: a lineage affects only removals and warnings, never which checkpoint is valid or the newest.
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
"""Largest number of recorded ancestors. Checkpoints of older ancestors were pruned long ago, or are never pruned."""


class Lineage(msgspec.Struct, frozen=True):
    """A run, and the runs that it continues (latest first), each with the step at which the next run continued it."""

    run: str
    ancestors: dict[str, int] = {}

    def holds(self, name: str) -> bool:
        """Return True if the attempt with this directory name belongs to this lineage."""
        key = form.attempt_key(name)
        return key is not None and (key[4] == self.run or key[0] <= self.ancestors.get(key[4], -1))

    @classmethod
    def of_run(cls, run: str, session: Mapping[str, object], name: str) -> Self:
        """Return the lineage of ``run``, which continues from the attempt ``name``.

        ``run`` itself is never one of its ancestors, even if the attempt is from the same run.

        Args:
            run: id of the run.
            session: the plain values of the session in the attempt. Attempts of old versions have no ancestors.
            name: directory name of the attempt.
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
    """Return the lineage of the run that saved an attempt.

    Raises:
        CheckpointInvalid: the attempt cannot be read.
    """
    name = place_of(path).name
    key = form.attempt_key(name)
    session = load_values(path).get("session")
    return Lineage.of_run("" if key is None else key[4], session if isinstance(session, dict) else {}, name)
