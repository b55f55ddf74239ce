"""A checkpoint root: the directory or URL that holds the attempts (saves of one step) of one or more runs.

Theory. There is no ``latest`` file that could be wrong: the newest checkpoint is the newest attempt whose files
are valid. Attempts are ordered by step, then generation, then attempt number. Every rank that looks at the same files
gets the same answer.

Invariants:
1. The newest valid checkpoint is never removed. An attempt is not removed while a process reads or writes it. An
   attempt that is younger than ``grace_s`` seconds is not removed in two cases: it is not valid, or it is the newest
   attempt of another run. Pruning for one lineage (a run and the runs that it continues) removes an attempt of other
   runs only if the attempt was never finished.
2. An attempt is never changed. It is only made, sealed, repaired from copies in the same attempt, or removed.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Sequence
from pathlib import Path

import msgspec

from holdfast.core.ids import Generation, SaveId
from holdfast.errors import NothingToResume, StoreDenied, UsageError
from holdfast.store.backends.durable_files import mode_of
from holdfast.store.backends.location import Place, Url, is_path, place_of
from holdfast.store.backends.registry import open_attempt, open_store
from holdfast.store.format import manifest as form
from holdfast.store.manage.lineage import Lineage
from holdfast.store.manage.retention import Kept, retention
from holdfast.store.read.validation import Validity, inspect

GRACE_S = 3600.0
STEPS_NAMED_MAX = 8
LOOKS_MAX = 10

"""Largest number of searches in one call of ``newest_valid``, while other jobs remove checkpoints from the root."""


class Choice(msgspec.Struct, frozen=True):
    """The result of a search in a root: the newest valid checkpoint, and the newer attempts that are not valid.

    Attributes:
        root: the path or URL of the root.
        chosen: the newest valid checkpoint; None if there is none.
        rejected: the newer attempts that are not valid, each with the reason.
        at: the step that was searched for; None means any step.
        steps: steps of all existing attempts, newest first.
    """

    root: str
    chosen: Validity | None
    rejected: tuple[Validity, ...]
    at: int | None = None
    steps: tuple[int, ...] = ()

    @property
    def repairable(self) -> tuple[Validity, ...]:
        """The rejected attempts that were once finished: a repair from copies may make them valid."""
        return tuple(v for v in self.rejected if not v.unfinished)

    def require(self) -> Validity:
        """Return the chosen checkpoint.

        Raises:
            NothingToResume: no checkpoint is valid; the error lists the rejected attempts with their reasons.
        """
        if self.chosen is not None:
            return self.chosen
        look = list_command(self.root)
        if self.repairable:
            look = f"{repair_command(self.repairable[0].path)}  (or look at all: {look})"
        raise NothingToResume(f"no valid checkpoint in {self.root}{self._why()}", hint=look)

    def _why(self) -> str:
        if self.rejected:
            return "; rejected:" + "".join(f"\n  {v.name}: {v.reason}" for v in self.rejected)
        if not self.steps:
            return " (no attempt at all)"
        named = ", ".join(map(str, self.steps[:STEPS_NAMED_MAX]))
        more = f" and {len(self.steps) - STEPS_NAMED_MAX} more" if len(self.steps) > STEPS_NAMED_MAX else ""
        return f": no attempt of step {self.at}; there are {named}{more}"


class Found(msgspec.Struct, frozen=True):
    """The checkpoint that a user named, or the newest valid checkpoint of the root that a user named.

    ``passed_over``: the attempts of that root that are newer, but not valid.
    """

    path: Place
    passed_over: tuple[Validity, ...] = ()

    def notes(self) -> list[str]:
        """Return one line per invalid newer attempt, with the command that may repair it."""
        return [
            f"{v.path} is newer and was passed over: {v.reason}"
            + ("" if v.unfinished else f" (copies may heal it: {repair_command(v.path)})")
            for v in self.passed_over
        ]


class Pruned(msgspec.Struct, frozen=True):
    """The result of pruning: the removed attempts, and the reason for each attempt that is kept without a policy."""

    removed: tuple[str, ...]
    spared: dict[str, str]


class Root:
    """A directory or URL that holds attempts. Nothing is cached: each call looks at the files."""

    def __init__(self, path: Place | str | os.PathLike[str]) -> None:
        self.path = place_of(path)
        self._store = open_store(self.path)

    def names(self, run: str | None = None) -> list[str]:
        """Return the names of all attempts (or only of ``run``), newest first; empty if the root does not exist.

        Raises:
            CheckpointInvalid: the root cannot be read.
        """
        found = self._store.names()
        keyed = sorted(((key, name) for name in found if (key := form.attempt_key(name))), reverse=True)
        return [name for key, name in keyed if run is None or key[4] == run]

    def list(self, *, deep: bool = False) -> list[Validity]:
        """Validate every attempt and return the results, newest first. ``deep``: also check the digests of tensors.

        Attempts that this process may not read are listed as denied.

        Raises:
            CheckpointInvalid, StoreUnreachable: the root cannot be read.
        """
        return [self._judged(name, deep) for name in self.names()]

    def age_s(self, name: str) -> float:
        """Return the seconds since an attempt was written; infinity if it does not exist.

        Raises:
            CheckpointInvalid, StoreUnreachable: the age cannot be read.
        """
        return self._store.age_s(name)

    def _judged(self, name: str, deep: bool) -> Validity:
        path = self.path / name
        try:
            return inspect(path, deep)
        except StoreDenied as error:
            step = (form.attempt_key(name) or (-1,))[0]
            return Validity(
                str(path), False, error.message, step, deep=deep, damage=(error.message,), denied=True
            )

    def newest_valid(self, at: int | None = None, *, deep: bool = False, run: str | None = None) -> Choice:
        """Return the newest valid checkpoint of a run or of all runs, and the newer attempts that are not valid.

        A training job may seal a newer checkpoint during the search, and remove the one before it. Then the search is
        repeated.

        Args:
            at: the step to search for; None means any step.
            deep: also read every tensor and compare its digests.
            run: id of the run whose attempts count; None means all runs.

        Raises:
            CheckpointInvalid, StoreUnreachable: the root or an attempt that may be the newest cannot be read.
        """
        for _ in range(LOOKS_MAX):
            names = self.names(run)
            choice = self._choose(names, at, deep=deep)
            if choice.chosen is not None or set(names) <= set(self.names(run)):
                break
        return choice

    def _choose(self, names: Sequence[str], at: int | None, *, deep: bool) -> Choice:
        rejected: list[Validity] = []
        chosen: Validity | None = None
        steps = {name: (form.attempt_key(name) or (-1,))[0] for name in names}
        for name in (name for name, step in steps.items() if at in (None, step)):
            found = inspect(self.path / name, deep)
            if found.valid:
                chosen = found
                break
            rejected.append(found)
        there = tuple(dict.fromkeys(steps.values()))
        return Choice(str(self.path), chosen, tuple(rejected), at, there)

    def prune(
        self,
        keep: Kept,
        *,
        lineage: Lineage | None = None,
        grace_s: float = GRACE_S,
        dry_run: bool = False,
    ) -> Pruned:
        """Remove the valid checkpoints that the policy does not keep, and old invalid attempts.

        An invalid attempt is removed only when a valid checkpoint exists. It must also be older than ``grace_s``, or
        its run must have sealed a later step since.

        Args:
            keep: the policy, or the number of newest checkpoints to keep.
            lineage: prune only the attempts of this lineage, and attempts of other runs that were never finished and
                are older than ``grace_s``. None prunes the attempts of all runs.
            grace_s: age in seconds below which an invalid attempt is kept.
            dry_run: remove nothing.

        Returns:
            The attempts that were (or would be) removed, and the attempts kept although no policy keeps them.

        Raises:
            UsageError: ``keep`` < 1.
            StoreWriteError: a directory cannot be removed.
        """
        policy = retention(keep)
        attempts = [v for v in self.list() if lineage is None or lineage.holds(v.name) or v.unfinished]
        valid = [v for v in attempts if v.valid]
        if not valid:
            return Pruned((), {v.name: "no valid checkpoint exists" for v in attempts})
        kept = {*policy(valid, self._store.age_s), valid[0].path}
        spared: dict[str, str] = {}
        if lineage is None:
            for found in self._newest_of_runs(valid):
                if found.path not in kept and self._store.age_s(found.name) < grace_s:
                    spared[found.name] = f"the newest of its run, and younger than {grace_s:g} s"
        past = self._past(attempts, valid)
        removed: list[str] = []
        for found in attempts:
            name = found.name
            if found.path in kept or name in spared:
                continue
            if found.denied:
                spared[name] = found.reason
                continue
            if not found.valid and name not in past and self._store.age_s(name) < grace_s:
                what = "unfinished" if found.unfinished else f"damaged ({found.reason})"
                spared[name] = f"{what}, and younger than {grace_s:g} s"
            elif dry_run or self._store.remove(name):
                removed.append(name)
            else:
                spared[name] = "is being read or written"
        if not dry_run:
            self._store.sweep()
        return Pruned(tuple(removed), spared)

    def discard(self, save_id: SaveId) -> bool:
        """Remove an attempt that one rank could not finish. Return False if another process still reads or writes it.

        A valid attempt (of another job with the same run id) is not removed. For a valid or missing attempt the result
        is True.

        Raises:
            CheckpointInvalid: the root cannot be read.
            StoreWriteError: the directory cannot be removed.
        """
        name = save_id.directory()
        if name not in self._store.names() or inspect(self.path / name).valid:
            return True
        return self._store.remove(name)

    @staticmethod
    def _past(attempts: Sequence[Validity], valid: Sequence[Validity]) -> set[str]:
        """Return the names of attempts whose run has sealed a later step since.

        The ranks of a run no longer write to its earlier attempts.
        """
        sealed = [found.save_id for found in valid if found.save_id is not None]
        return {
            found.name
            for found in attempts
            if (key := form.attempt_key(found.name))
            and any(
                key[4] == save_id.run
                and key[0] < save_id.step
                and Generation(key[1], key[2]) <= save_id.generation
                for save_id in sealed
            )
        }

    def written_last(self, valid: Sequence[Validity]) -> Validity:
        """Return the newest checkpoint of the run that wrote last. Another run may have a higher step.

        Raises:
            CheckpointInvalid, StoreUnreachable: the age of a checkpoint cannot be read.
        """
        return min(self._newest_of_runs(valid), key=lambda found: self._store.age_s(found.name))

    @staticmethod
    def _newest_of_runs(valid: Sequence[Validity]) -> Sequence[Validity]:
        """Return the newest checkpoint of each run. (Several jobs, at different steps, may save into one root.)"""
        newest: dict[str, Validity] = {}
        for found in valid:
            if found.save_id is not None:
                newest.setdefault(found.save_id.run, found)
        return list(newest.values())


def repair_command(path: Place | str) -> str:
    """Return the shell command that shows whether a damaged checkpoint can be repaired."""
    return f"holdfast ckpt repair --dry-run {shlex.quote(str(path))}"


def list_command(root: Place | str) -> str:
    """Return the shell command that lists all attempts below a root."""
    return f"holdfast ckpt ls {shlex.quote(str(root))}"


def resolve(spec: Place | str | os.PathLike[str]) -> Place:
    """Return the path or URL of the checkpoint that ``PLACE`` or ``PLACE@STEP`` names.

    Raises:
        UsageError: ``spec`` is not a path, STEP is not a number, or PLACE does not exist.
        NothingToResume: PLACE has no valid checkpoint (of that step).
        CheckpointInvalid, StoreUnreachable: PLACE cannot be read.
    """
    return find(spec).path


def find(spec: Place | str | os.PathLike[str]) -> Found:
    """Return the checkpoint that ``PLACE`` or ``PLACE@STEP`` names: an attempt, or the newest valid one in a root.

    Raises:
        UsageError: ``spec`` is not a path, STEP is not a number, or PLACE does not exist.
        NothingToResume: PLACE has no valid checkpoint (of that step); the error lists the rejected attempts.
        CheckpointInvalid, StoreUnreachable: PLACE cannot be read.
    """
    choice = choose(spec)
    if isinstance(choice, Choice):
        return Found(place_of(choice.require().path), choice.rejected)
    return Found(choice)


def choose(spec: Place | str | os.PathLike[str]) -> Choice | Place:
    """Return the attempt that ``PLACE`` or ``PLACE@STEP`` names; for a root, return the result of the search in it.

    Raises:
        UsageError: ``spec`` is not a path, STEP is not a number, or PLACE does not exist.
        CheckpointInvalid, StoreUnreachable: PLACE cannot be read.
    """
    if not isinstance(spec, str | os.PathLike | Url):
        raise UsageError(
            f"{spec!r}: neither text nor a path", hint="name a checkpoint, or a directory of them"
        )
    place, at = _place_and_step(str(spec) if isinstance(spec, Url) else os.fspath(spec))
    if isinstance(place, Path):
        _check_directory(place)
    return place if is_attempt(place) else Root(place).newest_valid(at)


def _check_directory(place: Path) -> None:
    """Check that a path that a user named is a directory.

    Raises:
        UsageError: the path does not exist, or is a file.
    """
    mode = mode_of(place)
    if mode is None:
        raise UsageError(
            f"{place} does not exist", hint="name a checkpoint directory, its root, or ROOT@STEP"
        )
    if stat.S_ISREG(mode):
        raise UsageError(
            f"{place} is a file, not a checkpoint directory",
            hint=f"name its directory: {place.absolute().parent}"
            if is_attempt(place.absolute().parent)
            else "name a checkpoint directory, its root, or ROOT@STEP; other programs' files: holdfast ckpt import",
        )


def is_attempt(place: Place) -> bool:
    """Return True if a path or URL is an attempt. A renamed attempt is recognized by its catalogue file."""
    if form.attempt_key(place.name):
        return True
    if isinstance(place, Path):  # a root may be a symbolic link
        return os.path.lexists(place / form.CATALOGUE_NAME)
    if place.parent == place:  # a whole bucket
        return False
    with open_attempt(place) as attempt:
        return attempt.exists(form.CATALOGUE_NAME)


def _place_and_step(spec: str) -> tuple[Place, int | None]:
    text, at_sign, step = spec.rpartition("@")
    if at_sign and is_path(spec) and os.path.lexists(spec):
        return Path(spec), None
    if at_sign and step.isdecimal():
        return place_of(text), int(step)
    place = place_of(spec)
    if at_sign and isinstance(place, Path) and mode_of(place) is None:
        raise UsageError(
            f"{spec!r}: what follows @ is not a step number", hint="write PATH@STEP, e.g. ckpts@1200"
        )
    return place, None
