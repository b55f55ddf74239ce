"""Saves of a session: periodic and requested checkpoints beside the training, last-gasp checkpoints after a fault.

Theory. The layouts of all ranks alone determine which rank writes which boxes, so a save needs no communication. Each
rank writes its share, and a rank that sees all shares seals the checkpoint. A periodic or requested save copies the
share of this rank and returns; the writer process writes the copy. Exit, final and last-gasp saves are written from the
state itself, which cannot change during the write. The last-gasp runs in the task thread. The main thread may run any
code then, but it cannot pass the end of the step. State that an aborted block has changed is read from the copies that
were made when the block began.

Invariants:
1. A save has the same id on all ranks. Its parts (run, generation, step, attempt, kind) come from the vote before the
   save, or from the order of the decision.
2. On every rank, a save that no fence cuts off ends with one ``SaveReported`` message to the controller.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import xxhash

from holdfast.core.ids import Generation, SaveId
from holdfast.core.protocol.health_messages import CopyDigest, StateDigests
from holdfast.core.protocol.layout_messages import Layout, Layouts
from holdfast.core.protocol.messages import SaveReported, Settle
from holdfast.core.protocol.status_page import Phase
from holdfast.core.worker.decision_orders import CarryOut, OrderKind, RefuseOrder, other_weights
from holdfast.core.worker.vote import Ballot
from holdfast.errors import HoldfastError, InternalError, PeerLost, StateError, StoreWriteError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import KnowsWeights, PinsMemory
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.checkpoints.save_schedule import SaveSchedule
from holdfast.session.checkpoints.sole_writer import SoleUse
from holdfast.session.checkpoints.state_transfer import StateSource
from holdfast.session.checkpoints.transfer_snapshot import TransferSnapshot
from holdfast.session.failure_reason import hear_why, tell_why
from holdfast.session.steps.participant import TEXT_LENGTH_MAX, StepParticipant
from holdfast.session.steps.replica_check import Verifier
from holdfast.session.steps.voting import VoteCaster
from holdfast.store.backends.local_store import threads_of_rank
from holdfast.store.backends.location import Place, place_of
from holdfast.store.backends.registry import open_attempt
from holdfast.store.format.json_values import decode_values, encode_values
from holdfast.store.format.manifest import SEAL_NAME
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.save_plan import SavePlan, plan
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.lineage import Lineage
from holdfast.store.manage.retention import KeepPolicy
from holdfast.store.read.validation import inspect
from holdfast.store.write.async_save import BackgroundSaver
from holdfast.store.write.writer import WrittenShare, write_share

log = logging.getLogger("holdfast")

SEAL_TIMEOUT_S = 60.0
SEAL_POLL_S = 0.02
SEAL_POLL_MAX_S = 0.32  # many ranks may ask one server


Values = Callable[[Collected], dict[str, object]]
Locals = Callable[[], dict[str, object]]


class Checkpointer:
    """The maker of all saves of one session.

    Args:
        rank: protocol state of this rank.
        adapter: the framework.
        root: directory or URL of the checkpoints; if None, nothing is saved.
        run: id of the run, the first part of every save id.
        keep: decides which valid checkpoints of this lineage are not removed.
        values: returns the plain values common to all ranks, given the collected state.
        locals_: returns the rank-local values of the last committed step.
        pace: the schedule of saves, which receives the costs of saves.
        votes: casts the votes of this rank.
        verifier: compares the copies of the state before the state is written.
        tier: the memory tier of this rank.
        copies: number of copies of each box in a checkpoint, each written by another holder (not in a last-gasp).
        watched: a launcher reads the event log and prints each save, so this object logs it at a lower level.

    Attributes:
        lineage: this run and the runs that it continues. A session that resumes sets it.
    """

    def __init__(
        self,
        rank: StepParticipant,
        adapter: StateAdapter,
        root: Place | None,
        run: str,
        keep: KeepPolicy,
        values: Values,
        locals_: Locals,
        pace: SaveSchedule,
        votes: VoteCaster,
        verifier: Verifier,
        tier: MemoryTier,
        *,
        copies: int = 1,
        watched: bool = False,
    ) -> None:
        self._level = logging.DEBUG if watched else logging.INFO
        self.root = root
        self._saved: tuple[Generation, int] | None = None
        self._unwritten: tuple[Generation, int] | None = None  # the last save, if it lacks this rank's share
        self._wrecks: list[SaveId] = []  # saves to remove, as this rank's share is missing
        self._rank = rank
        self._adapter = adapter
        self._run = run
        self._keep = keep
        self.lineage = Lineage(run)
        self._values = values
        self._locals = locals_
        self._pace = pace
        self._votes = votes
        self._verifier = verifier
        self._copies = copies
        self._sole = SoleUse()
        self._noting = threading.Lock()  # a small save is written before its cost is known
        self._costs: dict[SaveId, tuple[float, int]] = {}  # seconds of stall, steps of delay
        self._attempts: dict[tuple[Generation, int], int] = {}
        self._planned: tuple[Mapping[int, Layout], Catalogue, SavePlan] | None = None
        self._given = TransferSnapshot(rank, adapter)
        self._giver: StateSource | None = None
        if rank.client is not None:
            self._giver = StateSource(
                rank.client,
                self._to_give,
                tier,
                rank.refuse,
            )
        self._background = BackgroundSaver(
            self._done,
            threads=threads_of_rank(),
            pin=adapter.pin if isinstance(adapter, PinsMemory) else None,
        )

    def start(self) -> None:
        """Start the background saver, which passes this rank's shares to the writer process."""
        if self.root is not None:
            self._background.__enter__()

    @property
    def busy(self) -> bool:
        """True while this rank's share of a save is being written in the background."""
        return self._background.busy

    def claim(self, *, begins: bool) -> None:
        """Lock the checkpoint directory for this run, on rank 0.

        Args:
            begins: the run is new. Then warn if another live run saves in this directory.
        """
        if self._adapter.rank == 0:
            self._sole = SoleUse(self.root, tells=begins)

    def close(self) -> None:
        """Finish the save in progress, stop serving the state, and release the lock of the directory."""
        self.resumed()
        self._background.close()
        self._sole.close()

    def resumed(self) -> None:
        """Stop serving the state to replacements, because the job continues and the state changes."""
        if self._giver is not None:
            self._giver.stop()

    def saved(self, step: int) -> None:
        """Record that all ranks have loaded the state of ``step``, or have begun to save it, in this generation."""
        self._saved = self._rank.machine.generation, step

    @property
    def is_saved(self) -> bool:
        """True if :meth:`saved` was called for the present step in the present generation."""
        return self._saved == (self._rank.machine.generation, self._rank.step)

    def is_written(self) -> bool:
        """Return whether all ranks have written their shares of a save of the present step. A collective call.

        Raises:
            PeerLost: the vote broke.
        """
        if not self.is_saved:
            return False
        self._background.wait()
        return self.all_say(self._unwritten != self._saved)

    def digest(self) -> str:
        """Return a hexadecimal digest of this rank's whole state, including the rank-local values."""
        collected = self._adapter.collect()
        total = xxhash.xxh3_128(encode_values([collected.values, self._locals()]))
        for meta in collected.layout(self._adapter.rank, self._adapter.world_size).tensors:
            total.update(collected.view(meta.fqn, meta.box))
        return total.hexdigest()

    def all_say(self, yes: bool) -> bool:
        """Vote between two steps. Return whether ``yes`` was True on every rank. Raises: PeerLost: the vote broke."""
        ballot = Ballot(step=self._rank.step, between=True, save=not yes)
        tally = self._votes.cast(ballot)
        return tally.passed and not tally.save

    def _collected_to_give(self, frozen: bool) -> tuple[Collected, bool]:
        """Publish the layout of the state for newcomers. Return the result of ``TransferSnapshot.collect``."""
        collected, at_block = self._given.collect(frozen)
        self._votes.tell(collected)
        return collected, at_block

    def _to_give(self, frozen: bool) -> tuple[Collected, dict[str, object]]:
        """Return state and plain values for newcomers; ``frozen``: those of the start of an aborted block."""
        collected, at_block = self._collected_to_give(frozen)
        return collected, {**self._values(collected), "at_block": at_block}

    def _plan(self) -> tuple[Catalogue, SavePlan]:
        """Return the catalogue of all ranks and the plan of a save. Raises: StateError: the layouts do not fit."""
        layouts = self._votes.layouts()
        if self._planned is None or self._planned[0] != layouts:
            catalogue = Catalogue.from_encoded(layouts)
            made = plan(catalogue, frozenset(range(self._adapter.world_size)), self._copies)
            self._planned = (layouts, catalogue, made)
        return self._planned[1:]

    # ------------------------------------------------------------------ saves of a running job

    def save(self, kind: str, *, wait: bool) -> bool:
        """Save the state now, between two steps.

        Args:
            kind: the kind of the save in its id: ``periodic``, ``request``, ``exit`` or ``final``.
            wait: return only after the checkpoint is written. Otherwise it is written in the background.

        Returns:
            True if the checkpoint is sealed; False also if this is not known, because ``wait`` is False.

        Raises:
            HoldfastError: only with ``wait``. The state cannot be read, or cannot be written (StoreWriteError).
        """
        if self.root is None:
            return False
        # The attempt number must not depend on earlier generations, because a newcomer does not know their saves.
        now = self._rank.machine.generation, self._rank.step
        attempt = self._attempts.get(now, 0)
        self._attempts[now] = attempt + 1
        save_id = SaveId(self._run, *now, attempt, kind)
        self._rank.enter(Phase.SAVE)
        try:
            written = self._write(save_id, self.root, wait)
            return written is not None and self._is_whole(save_id, self.root, written)
        except PeerLost:
            self._rank.await_fence()
            return False
        finally:
            if not self._rank.fenced:
                self._rank.enter(Phase.READY)

    def _write(self, save_id: SaveId, root: Place, wait: bool) -> WrittenShare | HoldfastError | None:
        """Write the share of this rank, and report the written share or the error to the controller.

        Returns:
            The written share, or the error of the write. None without ``wait``, and after a fault.

        Raises:
            HoldfastError: the state of this rank cannot be read. All later saves would fail in the same way, and the
                training would be lost at its end. Only with ``wait``: the state of another rank cannot be read.
        """
        started_s = time.perf_counter()
        collected: Collected | None = None
        try:
            collected = self._collected()
            return self._save(save_id, root, collected, started_s, wait=wait)
        except PeerLost:
            raise
        except HoldfastError as error:
            if self._rank.fenced:
                return None  # the other ranks are lost: the decision that follows saves this step
            self._report(save_id, error)
            if wait or collected is None:
                raise
            # The other ranks have handed over their shares, and ask later whether all ranks have written theirs.
            self.saved(save_id.step)
            self._unwritten = self._saved
            return None

    def _is_whole(self, save_id: SaveId, root: Place, share: WrittenShare | HoldfastError) -> bool:
        """Wait until all ranks have written their shares. Return whether the checkpoint is sealed.

        Args:
            save_id: id of the save.
            root: the place of the checkpoints.
            share: the written share of this rank, or the error that prevented it.

        Raises:
            HoldfastError: this rank or another one could not write its share.
        """
        if isinstance(share, HoldfastError):
            tell_why(self._rank.client, _why_key(save_id), self._adapter.rank, share)
            self.all_say(False)  # the other ranks have written theirs, and wait for this vote
            self._abandon(save_id)
            raise share
        if self.all_say(True):
            self.saved(save_id.step)
            return share.sealed or self._await_seal(root / save_id.directory())
        if self._rank.fenced:
            return False
        why, hint = hear_why(self._rank.client, _why_key(save_id))
        error = StoreWriteError(f"step {save_id.step} is not saved: {why}", hint=hint)
        log.error("holdfast: %s", error)
        raise error

    def _save(
        self, save_id: SaveId, root: Place, collected: Collected, started_s: float, *, wait: bool
    ) -> WrittenShare | HoldfastError | None:
        catalogue, made = self._verified(collected)
        rank = self._adapter.rank
        values, own = self._values(collected), {rank: self._locals()}
        if not wait:
            self._background.wait()
            with self._noting:
                self._background.save(root, save_id, catalogue, made, rank, collected, values, own)
                self._rank.staged(save_id.step)
                stall_s = time.perf_counter() - started_s
                self._costs[save_id] = (stall_s, self._pace.take_delay())
            self._pace.measured(stall_s=stall_s)
            self.saved(save_id.step)
            return None
        self._background.wait()
        started_s = time.perf_counter()
        threads = threads_of_rank()
        try:
            written = write_share(
                root, save_id, catalogue, made, rank, collected, values, own, threads=threads
            )
        except HoldfastError as error:
            if self._rank.fenced:
                return None
            self._report(save_id, error)  # before the vote: the others end the run because of it
            return error
        self._costs[save_id] = (time.perf_counter() - started_s, 0)
        self._done(save_id, written)
        return written

    def require_sealed(self, sealed: bool) -> None:
        """Raise StoreWriteError if the final checkpoint is not sealed, unless a recovery has begun."""
        if not sealed and self.root is not None and not self._rank.fenced:
            raise StoreWriteError(
                f"step {self._rank.step} is written, but not whole: some shares did not come to {self.root}",
                hint="do all ranks save in the same directory? holdfast ckpt ls says which shares are there",
            )

    def verify(self) -> bool:
        """Compare all copies of the state between the ranks, once per step and generation.

        Never returns if copies differ: all ranks then restart from a checkpoint whose copies were equal.

        Returns:
            True if no copies differ; False if another rank is lost.
        """
        try:
            if self._verifier.active:
                self._verified(self._collected())
        except PeerLost:
            self._rank.await_fence()
            return False
        return True

    def _collected(self) -> Collected:
        """Return the state of this rank. Raises: HoldfastError: it cannot be read; the other ranks know it."""
        try:
            collected = self._adapter.collect()
            self._votes.tell(collected)
        except HoldfastError:
            with suppress(StateError):  # of that vote
                self._verifier.agree(None)  # the other ranks wait for this rank's vote
            raise
        return collected

    def _verified(self, collected: Collected) -> tuple[Catalogue, SavePlan]:
        """Return the catalogue of all ranks and the plan of a save, after all copies were found equal."""
        if not self._verifier.agree(collected):
            self._rank.await_end()
        return self._plan()

    def _await_seal(self, path: Place) -> bool:
        """Wait until the checkpoint at ``path`` is sealed and valid. Return False after a time limit or a fence."""
        deadline_s, pause_s = time.monotonic() + SEAL_TIMEOUT_S, SEAL_POLL_S
        while time.monotonic() < deadline_s and not self._rank.fenced:
            with open_attempt(path) as attempt:
                sealed = attempt.exists(SEAL_NAME)
            if sealed and inspect(path).valid:
                return True
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, SEAL_POLL_MAX_S)
        return False

    def _done(self, save_id: SaveId, result: WrittenShare | HoldfastError) -> None:
        """Report ``result``, a written share or an error, to the controller. After the seal, remove old checkpoints.

        In a background save, the thread that waits for the writer process calls this method.
        """
        self._report(save_id, result)
        if not isinstance(result, WrittenShare):
            self._unwritten = save_id.generation, save_id.step
            self._abandon(save_id)
            return
        self._pace.measured(durable_s=result.duration_s)
        if result.sealed:
            saved = "holdfast: saved step %d (%s) in %.2f s"
            log.log(self._level, saved, save_id.step, save_id.kind, result.duration_s)
        self._tidy(prune=result.sealed)

    def _abandon(self, save_id: SaveId) -> None:
        """Give up a save because this rank could not write its share. Try to remove the files of that save."""
        self._wrecks.append(save_id)
        self._tidy(prune=False)

    def _tidy(self, *, prune: bool) -> None:
        """Remove failed saves, because they may fill the disk. With ``prune``, also apply the retention policy."""
        if self.root is None or not (prune or self._wrecks):
            return
        root = Root(self.root)
        try:
            self._wrecks = [wreck for wreck in self._wrecks if not root.discard(wreck)]
            if prune:
                root.prune(self._keep, lineage=self.lineage)
        except HoldfastError as error:
            log.warning("holdfast: old checkpoints stay: %s", error.message)
        except Exception:  # the save itself is good, so the training continues
            log.exception("holdfast: old checkpoints stay")

    def _report(self, save_id: SaveId, result: WrittenShare | HoldfastError) -> None:
        written = result if isinstance(result, WrittenShare) else None
        if written is None:
            log.error("holdfast: step %d was not saved: %s", save_id.step, result)
        with self._noting:
            stall_s, delayed_steps = self._costs.pop(save_id, (0.0, 0))
        client = self._rank.client
        if client is None:
            return
        client.send(
            SaveReported(
                member_id=client.member_id,
                generation=self._rank.machine.fenced or self._rank.machine.generation,
                save_id=save_id,
                sealed=written is not None and written.sealed,
                size_bytes=0 if written is None else written.size_bytes,
                duration_s=0.0 if written is None else written.duration_s,
                stall_s=stall_s,
                delayed_steps=delayed_steps,
                error="" if written is not None else str(result)[:TEXT_LENGTH_MAX],
            )
        )

    # ------------------------------------------------------------------ last-gasp

    def carry_out(self, command: CarryOut) -> None:
        """In the task thread, follow an order: send digests, serve the state, check a kept state, or save."""
        client, order = self._rank.client, command.order
        assert client is not None and self._giver is not None
        match order.kind:
            case OrderKind.DIGESTS:
                self._vouch(client, order.settle, command.aborted)
            case OrderKind.GIVE:
                self._giver.give(order.settle, command.aborted)
            case OrderKind.GO_BACK:
                self._giver.check_kept(order.settle)
            case OrderKind.SAVE:
                self._last_gasp(order.settle, command.aborted)

    def refuse(self, command: RefuseOrder) -> None:
        """Report to the controller that this rank cannot carry out an order. Runs in the task thread."""
        client, order = self._rank.client, command.order
        error = StateError(command.reason, hint=command.hint)
        if order.kind is OrderKind.DIGESTS and client is not None:
            self._send_digests(client, order.settle, error)
        elif order.settle.save is not None and order.kind is OrderKind.SAVE:
            self._done(order.settle.save.save_id, error)
        else:  # no report: the time limit for joining ends the wait of the newcomers
            log.error("holdfast: this rank cannot give its state: %s", error)

    def _vouch(self, client: WorkerClient, settle: Settle, frozen: bool) -> None:
        """Publish the layout of the state that will be saved or given, and send its digests.

        Args:
            client: the connection to the agent.
            settle: the decision that asks for the digests.
            frozen: use the state of the start of an aborted block.
        """
        copies: tuple[CopyDigest, ...] = ()
        try:
            self._require_weights()
            collected, _ = self._collected_to_give(frozen)
            if self._verifier.active:
                copies = self._verifier.digests(collected)
        except HoldfastError as error:
            self._send_digests(client, settle, error)
        else:
            self._send_digests(client, settle, copies)

    def _send_digests(
        self, client: WorkerClient, settle: Settle, found: tuple[CopyDigest, ...] | HoldfastError
    ) -> None:
        if isinstance(found, HoldfastError):
            log.warning("holdfast: this rank's copies cannot be compared: %s", found)
        copies = found if isinstance(found, tuple) else ()
        client.send(
            StateDigests(
                member_id=client.member_id, generation=settle.generation, step=settle.step, copies=copies
            )
        )

    def _last_gasp(self, settle: Settle, frozen: bool) -> None:
        order = settle.save
        assert order is not None
        try:
            written = self._gasp(
                place_of(order.root), order.save_id, order.sources, order.layouts, order.dead_locals, frozen
            )
        except HoldfastError as error:
            self._done(order.save_id, error)
        except Exception as error:
            log.exception("holdfast: last-gasp")
            self._done(order.save_id, InternalError(f"the last-gasp failed: {type(error).__name__}: {error}"))
        else:
            self._done(order.save_id, written)

    def holds_weights(self) -> bool:
        """Return whether the model holds the trained weights.

        Outside of the block, a script may put other weights into the model for a while, for example an average that it
        evaluates. Inside the block, all weights that the script sets count as trained weights.
        """
        adapter = self._adapter
        away = self._rank.script.may_hold_other_weights
        return not (away and isinstance(adapter, KnowsWeights) and not adapter.holds_weights())

    def _require_weights(self) -> None:
        """Check that the model holds the trained weights. Raises: StateError: it holds other weights."""
        if not self.holds_weights():
            reason, hint = other_weights(self._rank.step)
            raise StateError(reason, hint=hint)

    def _gasp(
        self,
        root: Place,
        save_id: SaveId,
        sources: tuple[int, ...],
        layouts: Layouts,
        dead_locals: Mapping[str, bytes],
        frozen: bool,
    ) -> WrittenShare:
        rank = self._adapter.rank
        # All ranks restart before the block and run the code there.
        collected = self._adapter.collect(frozen=frozen, before=save_id.step)
        own_layout = collected.layout(rank, self._adapter.world_size).encode()
        catalogue = catalogue_of({**layouts.by_rank(), rank: own_layout})
        made = plan(catalogue, frozenset(sources))
        own: dict[int, Any] = {
            int(r): decode_values(data, f"locals of rank {r}") for r, data in dead_locals.items() if data
        }
        own[rank] = self._locals()
        values = self._values(collected)
        self._require_weights()
        return write_share(
            root, save_id, catalogue, made, rank, collected, values, own,
            progress=self._wrote,
        )  # fmt: skip

    def _wrote(self, size_bytes: int) -> None:
        """Count ``size_bytes`` of a last-gasp save as progress, and check that the model holds the trained weights."""
        if self._rank.client is not None:
            self._rank.client.moved(size_bytes)
        self._require_weights()

    def rescue(self, frozen: bool) -> None:
        """Save the last committed step before an exception ends this process. With an agent, do nothing.

        Args:
            frozen: save the state of the start of an aborted block.
        """
        if self.root is None or self._rank.client is not None:
            return
        self._background.wait()
        if self.is_saved and self._unwritten != self._saved:
            return
        save_id = SaveId(self._run, self._rank.machine.generation, self._rank.step, 1, "last-gasp")
        try:
            alone = Layouts((), {})
            written = self._gasp(self.root, save_id, (self._adapter.rank,), alone, {}, frozen)
        except (StateError, StoreWriteError) as error:
            self._done(save_id, error)
        else:
            self._done(save_id, written)


def _why_key(save_id: SaveId) -> str:
    return f"holdfast/unsaved/{save_id.directory()}"
