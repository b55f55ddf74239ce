"""The transfer of state in a live recovery: survivors serve their state, and a newcomer loads it and joins.

Theory. If only the lost ranks are replaced, every survivor at the decided step serves its state until the job
continues. The served state is that of the last committed step. State that an aborted block has changed is read from the
copies that were made when the block began. A newcomer has built the same model alone. It fills its boxes from identical
boxes of the survivors, and takes plain values from them. Its rank-local values come from the status page of the rank
that it replaces. ``transfer_snapshot.py`` explains which state is given if the script has code before the block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np

from holdfast.core.ids import Generation
from holdfast.core.protocol.messages import Receive, Settle, StateOffered, StateRefused
from holdfast.errors import CheckpointInvalid, CheckpointMismatch, HoldfastError
from holdfast.frameworks.common.adapter import Collected, StateAdapter
from holdfast.frameworks.common.optional_abilities import GivesPieces, LogsUpdates
from holdfast.frameworks.common.weight_selection import tensors_of, with_values_of
from holdfast.runtime.net.addresses import Address
from holdfast.runtime.net.service_names import state_of
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.worker.state_transfer import StateServer, View, Wanted, fetch
from holdfast.runtime.worker.worker_client import WorkerClient
from holdfast.sealing import Secret
from holdfast.session.checkpoints.memory_tier import MemoryTier
from holdfast.session.checkpoints.resume import Resumed, refuse_another_model
from holdfast.session.steps.participant import TEXT_LENGTH_MAX, StepParticipant
from holdfast.store.format.json_values import decode_mapping, encode_values
from holdfast.store.layouts.layout import Box, Catalogue
from holdfast.store.layouts.layout_completion import catalogue_of
from holdfast.store.layouts.value_sources import speakers

log = logging.getLogger("holdfast")

NOWHERE = Address("")
"""The address that a rank reports if each rank loads its own state from the memory tier, so that none is served."""


class MemoryTierQuery(Protocol):
    """The interface of the memory tier that :class:`StateSource` uses."""

    def verify(self, step: int) -> None:
        """Check this rank's state of ``step`` in memory. Raises: CheckpointInvalid: it is missing or damaged."""

    def require_replayable(self, step: int) -> None:
        """Check that only optimizer updates have changed this rank's weights before ``step``. Raises: StateError."""


class StateSource:
    """The server of a survivor's state.

    Args:
        client: the connection over which the controller learns where the state is served.
        collect: returns the state to serve, and the plain values common to all ranks. Its argument is True for the
            state of the start of an aborted block.
        memory: the memory tier of this rank.
        refuse: reports to the controller that a state in the memory tier is damaged.
    """

    def __init__(
        self,
        client: WorkerClient,
        collect: Callable[[bool], tuple[Collected, Mapping[str, object]]],
        memory: MemoryTierQuery,
        refuse: Callable[[Generation, int, str], None],
    ) -> None:
        self._memory = memory
        self._refuse = refuse
        self._client = client
        self._collect = collect
        self._server: StateServer | None = None
        self._given: tuple[Settle, Address] | None = (
            None  # the order that the present server carries out, and the server's address
        )

    def check_kept(self, settle: Settle) -> None:
        """Check this rank's kept state of the step to which all ranks go back (``settle.rewind``). Report the result.

        Runs in the task thread.
        """
        try:
            self._memory.verify(settle.rewind)
        except CheckpointInvalid as error:
            self._refuse(settle.generation, settle.rewind, error.message)
        except HoldfastError as error:
            # No report: the time limit for joining ends the wait of the newcomers.
            log.error("holdfast: this rank cannot go back: %s", error)
        else:
            self._offer(settle.generation, settle.rewind, NOWHERE)

    def give(self, settle: Settle, frozen: bool) -> None:
        """Serve the state of ``settle.step`` to newcomers, and report the address. Runs in the task thread.

        If the order is repeated, the address of the same server is reported again. The first report may have been lost
        with an agent, and newcomers may already be reading. An order that differs only in its request for digests
        (``vouch``) counts as repeated.

        Args:
            settle: the decision that contains the order.
            frozen: serve the state of the start of an aborted block.
        """
        settle = msgspec.structs.replace(settle, vouch=False)
        if self._given is not None and self._given[0] == settle:
            self._offer(settle.generation, settle.step, self._given[1])
            return
        try:
            if settle.replays:
                self._memory.require_replayable(settle.step)
            collected, plain = self._collect(frozen)
            values = encode_values(dict(plain))
            service = state_of(self._client.rank, settle.generation)
            secret = _secret(self._client)
            server = StateServer(_pieces_of(collected), values, secret, service, self._client.moved)
            at = server.start(_own_address(self._client))
        except (HoldfastError, OSError) as error:
            log.error("holdfast: this rank cannot give its state: %s", error)
            self._decline(settle, error)
            return
        self.stop()
        self._server, self._given = server, (settle, at)
        self._offer(settle.generation, settle.step, at)

    def _offer(self, generation: Generation, step: int, at: Address) -> None:
        self._client.send(
            StateOffered(
                member_id=self._client.member_id, generation=generation, step=step, host=at.host, port=at.port
            )
        )

    def _decline(self, settle: Settle, error: Exception) -> None:
        """Report that this rank is alive and its state is intact, but that it cannot give the state.

        A new decision follows.
        """
        self._client.send(
            StateRefused(
                member_id=self._client.member_id,
                generation=settle.generation,
                step=settle.step,
                reason=f"it cannot give its state: {error}"[:TEXT_LENGTH_MAX],
                alone=True,
            )
        )

    def stop(self) -> None:
        """Stop serving the state, because all newcomers have joined or another fault came first."""
        server, self._server, self._given = self._server, None, None
        if server is not None:
            server.close()


def _pieces_of(collected: Collected) -> View:
    """Return a function that returns the requested bytes of one box of ``collected``.

    From a device the function copies only the requested bytes. Data in host memory is not copied.
    """
    if isinstance(collected, GivesPieces):
        return collected.piece
    return lambda fqn, box, start, stop: collected.view(fqn, box)[start:stop]


def take_over(
    rank: StepParticipant, adapter: StateAdapter, client: WorkerClient, tier: MemoryTier, order: Receive
) -> Resumed:
    """Load the state of a newcomer from the survivors, or from the memory tier of the rank that it replaces.

    If the state in memory is invalid, report this, and wait for the order to leave: the function does not return.

    Raises:
        CheckpointMismatch: the model differs. CheckpointInvalid: the received values are malformed. PeerLost: a box
            has no holder.
    """
    if not (order.kept or order.replays):
        return take(adapter, client, order)
    try:
        if order.kept:
            return tier.load(order.step, order.turns)
        return take(adapter, client, order, tier.replay(order.step))
    except CheckpointInvalid as error:
        rank.refuse(order.generation, order.step, error.message)
        rank.await_end()


def take(
    adapter: StateAdapter, client: WorkerClient, order: Receive, again: Collected | None = None
) -> Resumed:
    """Load the state of this newcomer from the survivors.

    Args:
        order: the order of the controller, with the addresses and layouts of the survivors.
        again: a kept state on which logged updates were made again. It gives the boxes that no survivor holds. None
            if there is no such state.

    Raises:
        CheckpointMismatch: this process has built another model than the process it replaces.
        CheckpointInvalid: a survivor sent malformed values.
        PeerLost: a box has no holder left.
    """
    secret = _secret(client)
    sources = {int(rank): Address(*at) for rank, at in order.sources.items()}
    catalogue = catalogue_of(order.layouts.by_rank())
    own = {t.fqn for t in catalogue.tensors if adapter.rank in catalogue.grids[t.grid].ranks}
    asked = dict.fromkeys([*speakers(catalogue, own, sources), *sorted(sources)])
    values = decode_mapping(
        fetch(sources, [], secret, order.generation, tuple(asked)), "values of a survivor"
    )
    if again is not None and not tensors_of(again.values) <= tensors_of(values):
        # In a pipeline, no survivor knows the plain values of the optimizer for the parameters of this stage.
        values = with_values_of(values, [again.values], "the values of a survivor and of this rank in memory")
    restore = adapter.restore(catalogue, values)
    buffers = restore.buffers()
    refuse_another_model(catalogue, (meta for meta, _ in buffers), "in the survivors")
    # An uneven shard may be empty; no other rank declares the same empty box.
    places = [(meta.fqn, meta.box, data) for meta, data in buffers if len(data)]
    holders = _holders(catalogue, {(fqn, box) for fqn, box, _ in places}, adapter.rank, sources)
    wanted = [Wanted(fqn, box, data, holders.get((fqn, box), ())) for fqn, box, data in places]
    lost = [want for want in wanted if not set(want.holders) & set(sources)]
    missing = [f"{want.fqn}{want.box}" for want in lost]
    if missing and again is None:
        raise CheckpointMismatch(
            f"no survivor holds {missing[0]} and {len(missing) - 1} more that this process has built",
            hint="build the same model in every process, whatever its rank",
        )
    for want in lost:
        _put(want, adapter, again)
    fetch(sources, [w for w in wanted if w not in lost], secret, order.generation, moved=client.moved)
    restore.finish()
    local = decode_mapping(order.local, "locals of the rank that is replaced") if order.local else {}
    begun = local.get("begun") == order.step and bool(values["at_block"])
    return Resumed(Path("peers"), order.step, values["session"], local, begun)


def _put(want: Wanted, adapter: StateAdapter, again: Collected | None) -> None:
    """Fill the box ``want``, which no survivor holds, from ``again``. Raises: CheckpointInvalid: ``again`` lacks it."""
    if again is None or not (isinstance(adapter, LogsUpdates) and adapter.updates.rebuilds(want.fqn)):
        raise CheckpointInvalid(f"no survivor holds {want.fqn}{want.box}, and no update makes it")
    made = again.view(want.fqn, want.box)
    np.copyto(np.frombuffer(want.buffer, np.uint8), np.frombuffer(made, np.uint8))


def _holders(
    catalogue: Catalogue, places: Collection[tuple[str, Box]], rank: int, sources: Collection[int]
) -> dict[tuple[str, Box], tuple[int, ...]]:
    """Return the ranks that hold each box in ``places``, by tensor name and box.

    The layout of the lost rank is searched first. Boxes that this layout lacks are searched in the layouts of the
    survivors, because the lost rank may not have published its newest state.

    Args:
        catalogue: the tensors of all ranks.
        places: the boxes to look up, each with its tensor name.
        rank: the rank of this newcomer, and of the lost process.
        sources: the ranks that serve their state.
    """
    found: dict[tuple[str, Box], tuple[int, ...]] = {}
    for asked in (rank, *sorted(sources)):
        if all(place in found for place in places):
            break
        for tensor, box, ranks in catalogue.held_by(asked):
            found.setdefault((tensor.fqn, box), ranks)
    return found


def _own_address(client: WorkerClient) -> Address:
    """Return the address at which this process serves its state: a socket path, or host and port with several hosts."""
    assert client.run_dir is not None
    settings = RunSettings.load(client.run_dir)
    return settings.address_of(RunDir(client.run_dir), f"state-{client.rank}")


def _secret(client: WorkerClient) -> Secret:
    assert client.run_dir is not None
    return RunSettings.load(client.run_dir).secret_of(RunDir(client.run_dir))
