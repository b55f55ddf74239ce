"""The search for the checkpoint from which a session starts: all ranks agree on one checkpoint, or no rank starts.

Theory. Rank 0 lists the candidates, newest first, and sends the list to the other ranks. Every rank loads and verifies
the first candidate. A *fatal* error is one that no older candidate would avoid: another model, a state that cannot be
restored, an error of the user's own ``load_state_dict``. A sum over the ranks counts the successes and the fatal
errors. If all ranks succeed, they start. If any rank has a fatal error, all ranks stop, each with an error. Otherwise
the ranks try the next older candidate. Each rejected candidate is logged with its reason.

An empty checkpoint directory (the *root*) means a fresh start, which is logged in one line. A root in which no save was
ever finished also means a fresh start, because a host may lose its power during the first save. A root with finished
saves of which none is valid is an error, because the user expects the saved run to continue.

Invariants:
1. No rank leaves the search alone: all ranks know the result of each rank before any rank starts, stops or tries the
   next candidate.
"""

from __future__ import annotations

import json
import logging
import socket
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from holdfast.core.ids import MEMORY
from holdfast.core.worker.vote import all_equal
from holdfast.errors import (
    CheckpointInvalid,
    CheckpointMismatch,
    HoldfastError,
    InternalError,
    NothingToResume,
    PeerLost,
    StoreError,
    UsageError,
)
from holdfast.frameworks.common.adapter import StateAdapter
from holdfast.frameworks.common.imported_checkpoint import import_id
from holdfast.frameworks.common.weight_selection import beside_the_model, extra_states, joined_values
from holdfast.runtime.node.file_owners import planted
from holdfast.runtime.worker.published_values import published
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.failure_reason import hear_why, tell_why
from holdfast.store.backends.location import Place, place_of
from holdfast.store.layouts.layout import Catalogue, TensorMeta
from holdfast.store.manage.checkpoint_root import Found, Root, find
from holdfast.store.manage.lineage import lineage_of
from holdfast.store.read.load import LoadTarget, load_catalogue, load_into, load_locals, opened
from holdfast.store.read.validation import Validity
from holdfast.text import closest, plural

log = logging.getLogger("holdfast")
LIST_TIMEOUT_S = 600.0  # longest wait for the list of rank 0, which may have to read a slow store


class Resumed(NamedTuple):
    """A loaded state: from a checkpoint, from the memory tier or from the survivors.

    Attributes:
        path: the checkpoint, or a name for another source.
        step: number of committed updates in the state.
        session: plain values of the session, equal on all ranks.
        local: rank-local values of this rank.
        begun: the earlier process had begun the block of ``step``, so the state includes the effect of the code
            before that block.
    """

    path: Place
    step: int
    session: Mapping[str, Any]
    local: Mapping[str, Any]
    begun: bool = False

    @property
    def turns(self) -> int:
        """Number of epochs and phases that the whole job had finished in this state."""
        return int(self.session.get("place", {}).get("turns", {}).get("passed", 0))

    @property
    def caveat(self) -> str:
        """A remark for the user on a checkpoint that was imported without a data position.

        The text is empty if there is no remark.
        """
        imported = self.step and self.path.name == import_id(self.step).directory()
        return " (imported without a place in the data: the loader begins at its start)" if imported else ""


class Candidates(NamedTuple):
    """The checkpoints to try, newest first, and for each rejected checkpoint a text with its name and the reason."""

    paths: tuple[Place, ...]
    rejected: tuple[str, ...]


def candidates(
    resume: str, root: Place | None, client: WorkerClient | None, run: str, restarted: bool
) -> Candidates:
    """Return the checkpoints from which this job may start. Called on rank 0.

    Args:
        resume: ``auto``, ``never``, a checkpoint, a directory or URL of checkpoints, or such a place with ``@STEP``.
        root: directory or URL of this session's checkpoints; None if there is none.
        client: the connection to the agent, which names the save to try first after a fault.
        run: id of this run. A restart within the run first tries its own saves, whatever ``resume`` is.
        restarted: this process is a restart within the run.

    Raises:
        UsageError, NothingToResume, StoreUnreachable: ``resume`` names no place, a place without a valid checkpoint, or
            a place that cannot be read.
    """
    own: tuple[Place, ...] = ()
    place = None if root is None else Root(root)
    first = "" if client is None else client.saves.resume
    if first.startswith(MEMORY):
        rest = candidates(resume, root, None, run, restarted)
        return Candidates((place_of(first), *rest.paths), rest.rejected)
    if restarted and place is not None:
        names = [name for name in place.names(run) if name != first]
        own = tuple(place.path / name for name in ([first] if first else []) + names)
    if resume == "never":
        if place is not None and not restarted:
            _warn_of_others(place)
        return Candidates(own, ())
    if resume != "auto":
        meant = _named(resume)
        return Candidates((*own, meant.path), tuple(f"{v.name}: {v.reason}" for v in meant.passed_over))
    if place is None:
        return Candidates((), ())
    found = place.list()
    strange = _of_others(place, found, {first, *(name.name for name in own)})
    found = [v for v in found if v.name not in strange]
    if not restarted:
        _warn_of_another_run(place, [v for v in found if v.valid])
    # An unreadable checkpoint may be the newest: it must end the search, instead of a start from an older one.
    paths = [place_of(v.path) for v in found if v.valid or v.denied]
    if found and not strange and all(v.unfinished for v in found):
        log.warning(
            "holdfast: %s holds only %s, so nothing is lost: training starts from the beginning",
            place.path,
            plural(len(found), "unfinished save"),
        )
        return Candidates((), ())
    rejected = tuple(f"{v.name}: {v.reason}" for v in found if not (v.valid or v.denied))
    rejected += tuple(f"{name}: {why}" for name, why in strange.items())
    if first and place.path / first in paths:
        paths.remove(place.path / first)
        paths.insert(0, place.path / first)
    return Candidates(tuple(paths), rejected)


def _of_others(root: Root, found: Sequence[Validity], own: Collection[str]) -> dict[str, str]:
    """Return the reasons to reject checkpoints in ``found`` that another user may have planted, by checkpoint name.

    Otherwise a planted checkpoint with the highest step would be loaded.

    Args:
        own: names of saves of this run, which are not rejected.
    """
    if not isinstance(root.path, Path):  # a bucket does not name the owner of an object
        return {}
    good = [v for v in found if (v.valid or v.denied) and v.name not in own]
    paths = {v.name: v.path for v in good}
    return {
        name: f"{why}; to take it: resume={paths[name]!r}" for name, why in planted(root.path, paths).items()
    }


def _named(resume: str) -> Found:
    """Return the checkpoint that ``resume`` names. Raises: UsageError, NothingToResume, StoreUnreachable."""
    try:
        return find(resume)
    except UsageError as error:
        close = closest(str(resume), ["auto", "never"])
        meant = f"did you mean resume={close!r}? Else " if close else "resume='auto', 'never', or "
        raise UsageError(f"resume={resume!r}: {error.message}", hint=f"{meant}{error.hint}") from None


def _warn_of_others(root: Root) -> None:
    """At a fresh start, warn if ``root`` has checkpoints of other runs.

    ``resume="auto"`` may later take one of them.
    """
    names = root.names()
    if names:
        log.warning(
            "holdfast: %s holds checkpoints of another run, the newest is %s; a start with resume='auto' continues "
            "from the highest step of any run: give this run a directory of its own",
            root.path,
            names[0],
        )


def _warn_of_another_run(root: Root, valid: Sequence[Validity]) -> None:
    """Warn if an unrelated run has written a checkpoint after the first of ``valid``, which has the highest step."""
    if len({v.save_id.run for v in valid if v.save_id}) < 2:
        return
    chosen = valid[0]
    try:
        last = root.written_last(valid)
        if last.path == chosen.path:
            return
        if lineage_of(chosen.path).holds(last.name) or lineage_of(last.path).holds(chosen.name):
            return
    except StoreError:
        return  # a checkpoint is being removed just now: leave out the warning
    log.warning(
        "holdfast: %s has the highest step, but another run, which did not come from it, saved last: %s; "
        "to continue with that one: resume=%r",
        chosen.name,
        last.name,
        last.path,
    )


class ResumeSearch:
    """One search for a checkpoint.

    Args:
        adapter: the framework.
        client: the connection over which rank 0 sends its list of candidates to all ranks; None in a job of one
            process.
        agree: returns the elementwise sum of a list of ints over all ranks.
        remember: loads this rank's state of a step from the memory tier. Raises CheckpointInvalid if it cannot.
    """

    def __init__(
        self,
        adapter: StateAdapter,
        client: WorkerClient | None,
        agree: Callable[[list[int]], list[int]],
        remember: Callable[[int], Resumed],
    ) -> None:
        self._remember = remember
        self._adapter = adapter
        self._client = client
        self._agree = agree

    def run(self, look: Callable[[], Candidates], root: Place | None) -> Resumed | None:
        """Load the newest checkpoint that all ranks can load, and return it. Return None for a fresh start.

        Args:
            look: returns the candidates; called on rank 0.

        Raises:
            NothingToResume: there were candidates, and none could be loaded by all ranks.
            UsageError: the checkpoint that the user named does not exist.
            CheckpointMismatch: on this or another rank, the newest valid checkpoint is of another model or optimizer.
            StoreUnreachable: the newest checkpoint cannot be read now, so that its validity is not known.
            Exception: an error of the restore on this rank, for instance in the user's ``load_state_dict``.
        """
        found = self._share(look)
        reasons = list(found.rejected)
        for reason in reasons:
            log.warning("holdfast: rejected checkpoint %s", reason)
        built = self._names_of_all() if found.paths else frozenset()
        for path in found.paths:
            loaded, reason, fatal = self._try(path, built)
            if fatal is not None:
                tell_why(self._client, self._why_key(), self._adapter.rank, fatal)
            turns = 0 if loaded is None else loaded.turns
            all_loaded, stopped, total, squares = self._agree(
                [int(loaded is not None), int(fatal is not None), turns, turns**2]
            )
            if all_loaded == self._adapter.world_size:
                if all_equal(all_loaded, total, squares):
                    return loaded
                reason = f"it is of {turns} ended epochs and phases on this rank, of another number on another rank"
            if stopped:
                if fatal is None:
                    why, hint = hear_why(self._client, self._why_key())
                    told = f"{path} cannot be loaded by {plural(stopped, 'rank')}; {why}"
                    log.error("holdfast: %s", told)
                    fatal = CheckpointMismatch(told, hint=hint)
                # No rank leaves before all have logged the reason: the first one that leaves ends the run.
                self._agree([0])
                raise fatal
            reason = reason or "another rank could not load it"
            log.warning("holdfast: rejected checkpoint %s: %s", path.name, reason)
            reasons.append(f"{path.name}: {reason}")
        if reasons:
            listing = "".join(f"\n  {reason}" for reason in reasons)
            raise NothingToResume(
                f"no valid checkpoint in {root or 'the place named by resume='}; rejected:{listing}",
                hint="repair or remove these, or start from the beginning on purpose with resume='never'",
            )
        return None

    def _share(self, look: Callable[[], Candidates]) -> Candidates:
        """Let rank 0 list the candidates, and return the same list on all ranks.

        Raises:
            UsageError: ``look``, which lists the candidates, has failed on rank 0.
            NothingToResume: rank 0 has not sent the list within ``LIST_TIMEOUT_S``.
        """
        if self._adapter.world_size == 1:
            return look()
        if self._client is None:
            raise InternalError("several ranks without a control plane")
        key = f"holdfast/resume/{self._client.generation}"
        if self._adapter.rank == 0:
            try:
                found = look()
                message: dict[str, Any] = {
                    "paths": [str(p) for p in found.paths],
                    "rejected": found.rejected,
                    "host": socket.gethostname(),
                }
            except HoldfastError as error:
                refusal = {"error": error.message, "hint": error.hint, "host": socket.gethostname()}
                self._client.kv("set", (key,), json.dumps(refusal).encode())
                raise
            self._client.kv("set", (key,), json.dumps(message).encode())
            return found
        when = "before rank 0 had sent the checkpoints to resume from"
        said = published(self._client, key, when, wait_s=LIST_TIMEOUT_S)
        if not said:
            raise NothingToResume("rank 0 did not send the checkpoints to resume from (timeout)")
        told = json.loads(said)
        if "error" in told:
            elsewhere = "" if told["host"] == socket.gethostname() else f"rank 0 on {told['host']}: "
            raise UsageError(f"{elsewhere}{told['error']}", hint=told["hint"])
        return Candidates(tuple(place_of(p) for p in told["paths"]), tuple(told["rejected"]))

    def _names_of_all(self) -> frozenset[str]:
        """Return the names of the tensors of all ranks together. Pipeline stages have different tensors."""
        own = sorted(frozenset().union(*_built(self._adapter)))
        client = self._client
        if client is None:
            return frozenset(own)
        data = zlib.compress(json.dumps(own).encode())
        lists = f"holdfast/resume/{client.generation}/names"
        key = f"{lists}/{xxhash.xxh3_128_hexdigest(data)}"
        if not client.kv("check", (key,)).ok:
            client.kv("set", (key,), data)
            client.kv("append", (lists,), f"{key} ".encode())  # at worst it is in the list twice
        self._agree([1])  # after this the list of every rank is there
        when = "while the ranks compared the names of their tensors"
        known = published(client, lists, when).decode().split()
        said = [published(client, each, when) for each in sorted(set(known))]
        return frozenset(name for names in said for name in json.loads(zlib.decompress(names)))

    def _why_key(self) -> str:
        return f"holdfast/resume/{self._client.generation}/why" if self._client is not None else ""

    def _try(self, path: Place, built: Collection[str]) -> tuple[Resumed | None, str, Exception | None]:
        """Load and verify one candidate on this rank.

        Returns:
            The loaded state or None, the reason for a rejection, and a fatal error that ends the search or None.
        """
        try:
            if path.name.startswith(MEMORY):
                return self._remember(int(path.name.removeprefix(MEMORY))), "", None
            return load_state(self._adapter, path, built), "", None
        except CheckpointInvalid as error:
            return None, error.message, None
        except PeerLost:
            raise  # a fault: the control plane informs the other ranks
        except Exception as error:  # raised again when the other ranks know it
            return None, str(error), error


def load_state(adapter: StateAdapter, path: Place, built: Collection[str] = ()) -> Resumed:
    """Load this rank's part of one checkpoint: tensors, plain values and rank-local values.

    Args:
        built: names of the tensors that all ranks of this job have built. The checkpoint must have no other tensors.

    Raises:
        CheckpointInvalid: the checkpoint is damaged. Parameters may now hold a mix of old and loaded values.
        CheckpointMismatch: the checkpoint is of another model or another optimizer.
    """
    ours = _built(adapter)
    with opened(path) as source:
        catalogue = load_catalogue(source)
        values = joined_values(source, ours.tensors, adapter.rank)
        for key in ("session", "optimizers", "schedulers", "state"):
            if not isinstance(values.get(key), dict):
                raise CheckpointMismatch(
                    f"{path} was not written by a session: it has no {key}",
                    hint="holdfast.load(path, model) reads weights alone",
                )
        try:
            restore = adapter.restore(catalogue, values)
        except CheckpointMismatch as error:
            raise CheckpointMismatch(f"{path}: {error.message}", hint=error.hint) from error
        targets = [LoadTarget(m.fqn, m.box, m.dtype, data, m.shape) for m, data in restore.buffers()]
        wanted = {target.fqn for target in targets}
        beside = beside_the_model(catalogue.by_fqn, values)
        if not {t.fqn for t in catalogue.tensors} <= wanted | beside | set(built):
            beside |= beside_the_model(catalogue.by_fqn, joined_values(source))  # state of other ranks only
        # This rank does not need all tensors beside the model: those of the optimizer on other pipeline stages, and
        # those of its parameters without optimizer state yet. ``restore`` has checked that the optimizer is the same.
        known = [
            t.fqn for t in catalogue.tensors if t.fqn not in wanted and (t.fqn in beside or t.fqn in built)
        ]
        strange = sorted(extra_states(values) - ours.extra - set(built))
        report = load_into(source, targets, known=known, unexpected=strange)
        for healed in report.healed:
            log.warning("holdfast: %s (another copy was used)", healed)
        restore.finish()
        session = values["session"]
        assert isinstance(session, dict)
        return Resumed(path, report.step, session, load_locals(source, adapter.rank))


def refuse_another_model(catalogue: Catalogue, built: Iterable[TensorMeta], where: str) -> None:
    """Check that tensors to load have the dtypes and shapes of this process's tensors.

    The bytes alone do not show a difference: bfloat16 would be read as float16.

    Args:
        catalogue: the tensors to load, from the source ``where`` (in words, for the error).
        built: the tensors that this process has built.

    Raises:
        CheckpointMismatch: a tensor has another dtype or shape in this process.
    """
    for meta in built:
        there = catalogue.by_fqn.get(meta.fqn)
        if there is not None and (there.dtype, there.shape) != (meta.dtype, meta.shape):
            raise CheckpointMismatch(
                f"{meta.fqn} is {there.dtype} {list(there.shape)} {where}, and {meta.dtype} {list(meta.shape)} in this "
                "process",
                hint="build the same model in every process, on whatever host it is",
            )


class _Built(NamedTuple):
    """The names of the model's tensors and of the modules' extra states in this process."""

    tensors: frozenset[str]
    extra: frozenset[str]  # including all alternative names of an extra state


def _built(adapter: StateAdapter) -> _Built:
    collected = adapter.collect()
    names = frozenset(meta.fqn for meta in collected.layout(adapter.rank, adapter.world_size).tensors)
    values = collected.values
    extra = extra_states(values)
    aliases = {alias for alias, fqn in values.get("aliases", {}).items() if fqn in extra}
    return _Built(names - beside_the_model(names, values), frozenset(extra | aliases))
