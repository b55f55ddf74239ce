"""A checkpoint root: the directory that holds the attempts of one or more runs.

Theory. There is no ``latest`` file that could lie: the newest checkpoint is the newest attempt that proves itself
from its files. Attempts are ordered by step, then generation, then attempt; every rank that looks at the same
files comes to the same answer. Removing is a rename first, so that a half-removed attempt is never listed.

Invariants:
1. The newest valid checkpoint is never removed, nor one that is being read or written, nor a young attempt that is
   unfinished or the newest of another run.
2. An attempt is never changed: only made, sealed, repaired from its own copies, or removed.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from holdfast.errors import CheckpointInvalid, NothingToResume, UsageError
from holdfast.store import manifest as form
from holdfast.store.files import Directory, reading, sync_directory, writing
from holdfast.store.validity import Validity, inspect

GRACE_S = 3600.0
_DOOMED_PREFIX = ".removing-"

Policy = Callable[[Sequence[Validity]], set[str]]
"""Given the valid checkpoints, newest first, the paths of those to keep (see ``policy.py``)."""


class Choice(msgspec.Struct, frozen=True):
    """The newest valid checkpoint, if any, and every newer attempt that was rejected (each with its reason)."""

    root: str
    chosen: Validity | None
    rejected: tuple[Validity, ...]

    def require(self) -> Validity:
        """The chosen checkpoint.

        Raises:
            NothingToResume: none is valid; lists what was rejected and why.
        """
        if self.chosen is not None:
            return self.chosen
        reasons = "".join(f"\n  {Path(v.path).name}: {v.reason}" for v in self.rejected)
        raise NothingToResume(
            f"no valid checkpoint in {self.root}"
            + (f"; rejected:{reasons}" if reasons else " (no attempt at all)"),
            hint=f"holdfast ckpt ls {self.root}",
        )


class Pruned(msgspec.Struct, frozen=True):
    """What pruning did: names removed, and names spared although no policy keeps them, with the reason."""

    removed: tuple[str, ...]
    spared: dict[str, str]


class Root:
    """A directory of attempts. Nothing is cached: each call looks at the files."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def names(self, run: str | None = None) -> list[str]:
        """Directory names of all attempts (of one run), newest first; empty when the root does not exist.

        Raises:
            CheckpointInvalid: the root cannot be read.
        """
        with reading(self.path):
            try:
                found = os.listdir(self.path)
            except FileNotFoundError:
                return []
        keyed = sorted(((key, name) for name in found if (key := form.attempt_key(name))), reverse=True)
        return [name for key, name in keyed if run is None or key[4] == run]

    def list(self, *, deep: bool = False, run: str | None = None) -> list[Validity]:
        """Judge every attempt, newest first.

        Raises:
            CheckpointInvalid: the root cannot be read.
        """
        return [inspect(self.path / name, deep) for name in self.names(run)]

    def newest_valid(self, at: int | None = None, *, deep: bool = False, run: str | None = None) -> Choice:
        """The newest valid checkpoint (of step ``at``), and the newer ones with the reason why they are not.

        Raises:
            CheckpointInvalid: the root cannot be read.
        """
        rejected: list[Validity] = []
        for name in self.names(run):
            key = form.attempt_key(name)
            if at is not None and key is not None and key[0] != at:
                continue
            found = inspect(self.path / name, deep)
            if found.valid:
                return Choice(str(self.path), found, tuple(rejected))
            rejected.append(found)
        return Choice(str(self.path), None, tuple(rejected))

    def prune(self, keep: int | Policy, *, grace_s: float = GRACE_S, dry_run: bool = False) -> Pruned:
        """Remove what is not kept: valid checkpoints by the policy (or all but the newest ``keep``), and old wrecks.

        An invalid attempt is removed only when it is older than ``grace_s`` and a valid checkpoint exists.

        Raises:
            UsageError: ``keep`` < 1.
            StoreWriteError: a directory cannot be removed.
        """
        if isinstance(keep, int) and keep < 1:
            raise UsageError(f"keep={keep}: at least the newest valid checkpoint is always kept")
        attempts = self.list()
        valid = [v for v in attempts if v.valid]
        if not valid:
            return Pruned((), {Path(v.path).name: "no valid checkpoint exists" for v in attempts})
        kept = {v.path for v in valid[:keep]} if isinstance(keep, int) else keep(valid)
        kept.add(valid[0].path)
        kept |= {v.path for v in self._newest_of_runs(valid) if self._age_s(Path(v.path).name) < grace_s}
        removed: list[str] = []
        spared: dict[str, str] = {}
        for found in attempts:
            name = Path(found.path).name
            if found.path in kept:
                continue
            if not found.valid and self._age_s(name) < grace_s:
                spared[name] = f"unfinished and younger than {grace_s:g} s"
            elif dry_run or self._remove(name):
                removed.append(name)
            else:
                spared[name] = "is being read or written"
        if not dry_run:
            self._sweep()
        return Pruned(tuple(removed), spared)

    @staticmethod
    def _newest_of_runs(valid: Sequence[Validity]) -> Sequence[Validity]:
        """The newest of each run: another job may be saving into this root, and be at an earlier step."""
        newest: dict[str, Validity] = {}
        for found in valid:
            if found.save_id is not None:
                newest.setdefault(found.save_id.run, found)
        return list(newest.values())

    def _age_s(self, name: str) -> float:
        """Seconds since anything was added to an attempt; infinite when it is gone."""
        try:
            return time.time() - os.stat(self.path / name).st_mtime
        except FileNotFoundError:
            return float("inf")

    def _remove(self, name: str) -> bool:
        """Remove one attempt unless somebody reads it."""
        try:
            directory = Directory.open(self.path / name)
        except CheckpointInvalid:  # another process was faster, or it is no directory: not ours to touch
            return False
        with directory, writing(self.path / name):
            if not directory.lock(shared=False):
                return False
            try:
                os.rename(self.path / name, self.path / f"{_DOOMED_PREFIX}{name}")
            except FileNotFoundError:  # another process was faster
                return False
            sync_directory(self.path)
        # Another process may be sweeping it at the same time; what is left now, the next prune sweeps.
        shutil.rmtree(self.path / f"{_DOOMED_PREFIX}{name}", ignore_errors=True)
        return True

    def _sweep(self) -> None:
        """Finish removals that a crash interrupted."""
        with writing(self.path):
            for name in os.listdir(self.path):
                if name.startswith(_DOOMED_PREFIX) and form.attempt_key(name.removeprefix(_DOOMED_PREFIX)):
                    shutil.rmtree(self.path / name, ignore_errors=True)


def resolve(spec: str) -> Path:
    """The checkpoint directory that ``PATH`` or ``PATH@STEP`` names: an attempt, or the newest valid in a root.

    Raises:
        UsageError: STEP is not a number, or PATH does not exist.
        NothingToResume: no valid checkpoint (of that step) is there; lists what was rejected.
        CheckpointInvalid: PATH cannot be read.
    """
    text, at_sign, step = spec.rpartition("@")
    if at_sign and not step.isdecimal() and not Path(spec).exists():
        raise UsageError(
            f"{spec!r}: what follows @ is not a step number", hint="write PATH@STEP, e.g. ckpts@1200"
        )
    path, at = (Path(text), int(step)) if at_sign and step.isdecimal() else (Path(spec), None)
    if not path.exists():
        raise UsageError(f"{path} does not exist", hint="name a checkpoint directory, its root, or ROOT@STEP")
    if (path / form.CATALOGUE_NAME).exists() or form.attempt_key(path.name):
        return path
    return Path(Root(path).newest_valid(at).require().path)
