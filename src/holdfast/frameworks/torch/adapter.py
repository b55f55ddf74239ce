"""The PyTorch adapter of a session: its implementation of the interface in ``frameworks/common/adapter.py``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import parent_process
from typing import Any, ClassVar, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from holdfast.core.ids import Generation
from holdfast.errors import StepError, UnsupportedError, UsageError
from holdfast.frameworks.common.adapter import Hooks, OnCollective
from holdfast.frameworks.common.random_streams import Streams, compare_generators
from holdfast.frameworks.common.state_tree import Plain
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.comm.comm_hooks import refuse_stateful_hooks
from holdfast.frameworks.torch.comm.comm_state import fabric
from holdfast.frameworks.torch.comm.control_store import control_client
from holdfast.frameworks.torch.comm.reconfigurable_group import ReconfigurableGroup
from holdfast.frameworks.torch.comm.setup_record import end_setup
from holdfast.frameworks.torch.data.batch_digest import digest_of_batch
from holdfast.frameworks.torch.data.position import TorchFeed, make_source
from holdfast.frameworks.torch.data.tensor_marks import duplicate, mark
from holdfast.frameworks.torch.nested_tensors import tensors_in
from holdfast.frameworks.torch.state.bucket_layouts import BucketLayouts
from holdfast.frameworks.torch.state.buffer_sync import BufferSync
from holdfast.frameworks.torch.state.content_digest import digest_of_content
from holdfast.frameworks.torch.state.data_parallel import copies_are_known, copy_of, holds_part, sharded_mesh
from holdfast.frameworks.torch.state.devices import StateDevices, named_errors
from holdfast.frameworks.torch.state.equal_start import begin_equal
from holdfast.frameworks.torch.state.optimizer_state import (
    held_by,
    local_part,
    named_optimizers,
    parameters_of,
    refuse_searching,
    scheduled_settings,
)
from holdfast.frameworks.torch.state.parameter_names import (
    Models,
    data_parallel,
    modules_of,
    passed_through,
)
from holdfast.frameworks.torch.state.rng import RandomNumbers, generator_digests, loader_seed
from holdfast.frameworks.torch.state.snapshot import Snapshot
from holdfast.frameworks.torch.state.state import TorchCollected, TorchRestore, TorchState
from holdfast.frameworks.torch.state.tensor_digest import digest_of
from holdfast.frameworks.torch.state.tensor_memory import content_of, share_memory
from holdfast.frameworks.torch.state.update_replay import UpdateReplay
from holdfast.frameworks.torch.state.weight_swap import WeightSample
from holdfast.frameworks.torch.state.wrapper_reset import (
    Scaling,
    dividing,
    effective_scaler,
    heal,
    heal_pipelines,
    scalers_of,
)
from holdfast.frameworks.torch.state.zero_redundancy import tentative
from holdfast.frameworks.torch.steps.accelerate_accumulation import Accumulating
from holdfast.frameworks.torch.steps.block_proof import Suspicion, computed_in, found_by, trained_in
from holdfast.frameworks.torch.steps.elastic_accumulation import ElasticAccumulation
from holdfast.frameworks.torch.steps.gradient_check import TorchGradients
from holdfast.frameworks.torch.steps.other_ranks_blocks import OtherRanksBlocks
from holdfast.frameworks.torch.steps.output_hook import OutputHook
from holdfast.frameworks.torch.steps.plain_torchscript import PlainTorchScript
from holdfast.frameworks.torch.steps.script_generators import digest_of_generator, generators_in
from holdfast.frameworks.torch.steps.stale_grads import Leftover
from holdfast.frameworks.torch.steps.undeclared_tensors import UndeclaredTensors
from holdfast.runtime.node import deferred_rank
from holdfast.runtime.node.deferred_rank import exempt
from holdfast.runtime.worker.process_place import place_here, seat_here
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Catalogue

log = logging.getLogger("holdfast")

SETTLED = 3  # blocks after which DDP's bucket layout is final, with any setting


class TorchAdapter:
    """The adapter of PyTorch; see :class:`holdfast.frameworks.common.adapter.Adapter`.

    Args:
        model: a module, or modules by name; wrapped (DDP, ``fully_shard``, compile) as for training.
        optimizer, scheduler: one, a list, or a dict by name.
        scaler: a ``GradScaler`` or None.
        extras: the user's own state, by name.
        seed: seed of all random numbers.

    Raises:
        UsageError: wrong arguments, or several processes without process groups.
        StateError: a value that cannot be saved.
        UnsupportedError: FSDP1, an optimizer that communicates in its step, a communication hook with a state, or
            process groups that are not Holdfast's.
    """

    own_groups: ClassVar[bool] = True  # groups with the backends gloo and nccl are Holdfast's

    def __init__(
        self, model: Models, optimizer: Any, scheduler: Any, scaler: Any, extras: dict[str, Any], seed: int
    ) -> None:
        with exempt():
            self.rank, self.world_size = _place(self.own_groups)
        self._model = model
        self._random = RandomNumbers(seed)
        scaler = effective_scaler(scaler)
        self._scaling = Scaling(scaler, extras)
        self.live = self.own_groups and self.world_size > 1
        self.scaled = bool(scalers_of(scaler, extras))
        optimizers = named_optimizers(optimizer)
        refuse_searching(optimizers, self.world_size)
        self.state = TorchState(model, optimizers, scheduler, scaler, extras)
        self._devices = StateDevices(self.state.devices)
        self._snapshot = Snapshot(self.state)
        self.updates = UpdateReplay(self.state, self)
        self.gradients = TorchGradients(self.state, self.updates)
        modules = [module for _, module in modules_of(model)]
        self._leftover = Leftover(
            modules, self.state.updated_parameters, several=len(optimizers) > 1, scaled=self.scaled
        )
        self._fabric = fabric()
        self._ddp = data_parallel(model)
        # True if a launcher can replace this worker alone.
        self._replaceable = self.live and control_client() is not None
        self._refuse_hooks()
        self._sync = BufferSync(self.state.names, self._ddp, sharded_mesh(model), self.world_size)
        with exempt():
            self.copy = copy_of(model, self.rank, self.world_size)
        self._names = {id(o): name for name, o in optimizers.items()}
        self._parts = ElasticAccumulation(self.state.names.parameters)
        self._accumulating = Accumulating()
        self._sample = WeightSample(self.state.names.parameters.values())
        self._ours = {id(p) for p in self.state.names.parameters.values()}
        self._buffers = {slot.fqn for slot in self.state.names.buffers}
        self.tentative = tentative(optimizers, self.rank)
        # Optimizers outside of the session: True for one that updates the model's weights. A local part (ZeRO) steps
        # only inside a known optimizer. A new optimizer may have the ``id()`` of a deleted one.
        self._foreign: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        for inner in map(local_part, optimizers.values()):
            if inner is not None:
                self._foreign[inner] = False
        self._handles: list[Any] = []
        self._hooks: Hooks | None = None
        self._backward_seen: set[int] = set()  # numbers of the modules whose backward pass has begun
        self._dividing = [p for _, module in modules_of(model) for p in dividing(module, self.world_size)]
        self._step = 0
        self._computed = False  # True: an optimizer of the session was about to step in this block
        self._updating = False
        self._feeds: list[TorchFeed] = []  # of the newest loop
        self._suspicion = Suspicion(self.state, model)
        self._proving: Literal["", "first", "sampled"] = ""
        self._passed = 0  # blocks with an update since DDP's buckets were reset
        # Number of collectives before the block; ``trains_alone`` is True while no block had a collective.
        self._counted, self.trains_alone = 0, True
        self._layouts = BucketLayouts(self._ddp, self.world_size)

    def _refuse_hooks(self) -> None:
        if self._replaceable:
            refuse_stateful_hooks(self._ddp)

    def become(self, rank: int) -> None:
        """Take over ``rank`` in this process, which was a spare until now."""
        self.rank = rank
        self.copy = copy_of(self._model, rank, self.world_size)
        self.draw_from(self.streams)

    @property
    def streams(self) -> Streams | None:
        """The streams of random numbers of all copies of the model (``SharesRandomNumbers``)."""
        return self._random.streams

    def draw_from(self, streams: Streams | None) -> None:
        """Draw random numbers from the given streams from now on (``SharesRandomNumbers``)."""
        self._random.streams = streams
        for feed in self._feeds:
            feed.become(self._random.draws(self.copy.number))

    def compare_generators(self) -> Streams:
        """Compare the random generators with those of the other ranks (``SharesRandomNumbers``). Raises: PeerLost."""
        digests = generator_digests(self.state.generators)
        known = copies_are_known(self._model)
        return compare_generators(digests, self.rank, self.world_size, self.vote, copies_known=known)

    # ------------------------------------------------------------------ hooks

    @property
    def poisoned(self) -> bool:
        """True if a collective of this process broke, or :meth:`poison` was called."""
        return self._fabric.poisoned

    @property
    def reason(self) -> str:
        """The reason why this process is poisoned; empty if it is not poisoned."""
        return self._fabric.reason

    def attach(self, hooks: Hooks, on_fault: Callable[[str], None], on_collective: OnCollective) -> None:
        """Install hooks on every optimizer of the process, the model's output and torch's compilers.

        ``on_fault(reason)`` is called at the first broken collective. ``on_collective`` is called at the start of
        each collective.
        """
        self._hooks = hooks
        self._fabric.session_opens()
        self._fabric.on_poison(on_fault)
        self._fabric.on_collective(on_collective, hooks.waited)
        private_api.callback_handler.register_start_callback(self._compile_begins)
        private_api.callback_handler.register_end_callback(self._compile_ends)
        self._handles = [
            PlainTorchScript(),
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
            *(
                passed_through(module).register_forward_hook(OutputHook(partial(self._watch_output, number)))
                for number, (_, module) in enumerate(modules_of(self._model))
            ),
        ]

    def detach(self) -> None:
        """Remove all hooks that :meth:`attach` installed."""
        for handle in self._handles:
            handle.remove()
        if self._hooks is not None:
            private_api.callback_handler.remove_start_callback(self._compile_begins)
            private_api.callback_handler.remove_end_callback(self._compile_ends)
        self._handles = []
        self._hooks = None
        self._fabric.on_collective(None)
        self._sync.close()
        self._parts.close()
        self._accumulating.close()

    def is_fault(self, error: BaseException) -> bool:
        """Return False: a broken collective has already poisoned the process, so ``error`` needs no report."""
        return False

    def _compile_begins(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.compiling(True)

    def _compile_ends(self, *_: object) -> None:
        if self._hooks is not None:
            self._hooks.compiling(False)

    def _watch_output(self, number: int, output: Any) -> None:
        # Inside compiled user code this hook would break the graph and cause recompilations.
        if torch.compiler.is_compiling() or number in self._backward_seen:
            return
        for tensor in tensors_in(output):
            if tensor.requires_grad:
                tensor.register_hook(partial(self._first_gradient, number))  # type: ignore[no-untyped-call]
                return

    def _first_gradient(self, number: int, gradient: torch.Tensor) -> None:
        if number not in self._backward_seen and self._hooks is not None:
            if not self._backward_seen:
                self._hooks.backward()
                # Check here, before a scaler that a run without effect has changed raises a less clear error.
                self._scaling.refuse_others(each.optimizer for each in self.state.optimizers.values())
            self._backward_seen.add(number)
            self._leftover.check(number)
            if any(parameter.grad is not None for parameter in self._dividing):
                self._dividing = []
                log.warning(
                    "holdfast: DDP(gradient_as_bucket_view=True) with zero_grad(set_to_none=False) in %d ranks: "
                    "after a fault the last bits may differ; zero_grad() is exact",
                    self.world_size,
                )

    @private_api.untraced  # the script may compile optimizer.step()
    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Vote before the optimizer steps.

        If the optimizer gets a closure that computes the gradients (Lightning's way), vote after the closure.
        """
        if self.updates.alone:
            return None
        name = self._names.get(id(optimizer))
        if name is None:
            self._refuse_unknown(optimizer)
            return None
        if not self.updates.outermost.begins(optimizer):
            return None
        self._computed = True
        self._devices.note_streams()
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._agree(name)
            return None

        def agreed() -> Any:
            loss = closure()
            self._agree(name)
            return loss

        if len(args) > 1:
            return (args[0], agreed, *args[2:]), kwargs
        return args, {**kwargs, "closure": agreed}

    def _agree(self, name: str) -> None:
        if private_api.in_backward():
            raise UnsupportedError(
                f"optimizer {name!r} updates weights inside backward, before the step is agreed",
                hint="call optimizer.step() after loss.backward()",
            )
        self._scaling.settle(each.optimizer for each in self.state.optimizers.values())
        self._leftover.updates(parameters_of(self.state.optimizers[name].optimizer))
        self._snapshot.early.compare(name)
        self.updates.comes()
        if self._hooks is not None:
            self._hooks.update(name)

    @private_api.untraced
    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        name = self._names.get(id(optimizer))
        if name is not None and self._hooks is not None and not self.updates.alone:
            self.updates.outermost.ends(optimizer)
            self.updates.made()
            self._hooks.updated(name)

    def scheduled_settings(self, optimizer: str) -> dict[str, list[float]]:
        """Return the scheduled numbers of all parameter groups of an optimizer, by the name of the setting."""
        return scheduled_settings(self.state.optimizers[optimizer].optimizer)

    def declares(self, value: object) -> bool:
        """Return whether the state of the session contains ``value``, a tensor or another object of the script."""
        return self.state.declares(value)

    def keeps(self, owner: object, attribute: str) -> bool:
        """Return whether the state of the session contains a plain attribute of ``owner``, an object of the script."""
        return self.state.keeps(owner, attribute)

    def objects(self) -> list[object]:
        """Return the objects in ``state=`` of which the session saves the ``state_dict()``."""
        return self.state.plain_objects()

    def in_user_state(self, value: object) -> bool:
        """Return whether ``value`` is ``state=``, an entry of it, or lies in a container there."""
        return self.state.in_user_state(value)

    def batches_drawn(self, value: object) -> int | None:
        """Return the number of batches that the iterator of a DataLoader has yielded; None for other objects."""
        return private_api.batches_drawn(value)

    def content_of(self, value: object, size_bytes_max: int) -> bytes | None:
        """Return the content of ``value``, a small tensor on the CPU; None if ``value`` is not such a tensor."""
        return content_of(value, size_bytes_max)

    def digest_of(self, value: object) -> int | None:
        """Return a digest of a tensor, array, module, plain value or container. Tensors of the state do not count."""
        return digest_of_content(value, self.state.addresses())

    def changes_of(self, value: object) -> int | None:
        """Return a number that grows with each change in place of a tensor or of its views; None for other objects."""
        if not isinstance(value, torch.Tensor) or value.is_inference():
            return None
        return private_api.write_count(value)

    def _refuse_unknown(self, optimizer: Optimizer) -> None:
        """Raise an error if ``optimizer``, which is not part of the session, would update its weights.

        Raises:
            StepError: it would update the model without a vote.
            UsageError: it would update a module in the user's state, and a new process would begin without its state.
        """
        ours = self._foreign.get(optimizer)
        if ours is None:
            if weight := self.state.updates_unsaved(optimizer):
                raise UsageError(
                    f"a {type(optimizer).__name__} that the session does not know updates {weight}, so a process that "
                    "joins or resumes begins without the state of this optimizer",
                    hint="session(model={'model': model, 'other': network}, optimizer={'model': optimizer, 'other': "
                    "other_optimizer}), and `with step.update('other'): ...` around each update",
                )
            ours = any(id(p) in self._ours for p in parameters_of(optimizer))
            # One that leaves its updates to optimizers of the session changes nothing without their votes.
            ours = ours and not any(id(inner) in self._names for inner in held_by(optimizer).values())
            self._foreign[optimizer] = ours
        # An optimizer of the session that has voted may call this one.
        if ours and not self._updating:
            raise StepError(
                f"a {type(optimizer).__name__} that the session does not know updates the model's parameters",
                hint="holdfast.session(..., optimizer={'name': optimizer, ...})",
            )

    # ------------------------------------------------------------------ state

    def collect(self, *, frozen: bool = False, before: int = -1) -> TorchCollected:
        """Return the state now, or with ``frozen`` the state at the start of the current step.

        Args:
            before: number of a step; -1 if there is no such step. The script's code before the block of that step may
                change some values. If :meth:`between` or :meth:`remember` copied them before that code, the copies
                are returned.
        """
        with named_errors("the state cannot be read"):
            while True:
                self._devices.wait()
                copies = self._snapshot.copies() if frozen else None
                collected = self.state.collect(copies, self._snapshot.before(before))
                if not self._devices.add(collected.devices()):
                    if self._ddp and self.copy.numbers == self.world_size:
                        collected.values["buckets"] = self._layouts.values()
                    return collected  # otherwise part of the state is on a device that was not waited for

    def state_size(self) -> int:
        """Return a number that changes with the layout of optimizer state, user state or modules' extra state."""
        return self.state.size() + self._snapshot.size()

    def compares(self, fqn: str) -> bool:
        """Return True if tensor ``fqn`` must be equal on all ranks that hold it: weights and optimizer state."""
        if fqn.startswith("state."):
            return fqn in self.state.trained_extras()
        return fqn in self.state.names.parameters or (
            fqn.startswith("optimizer.") and fqn not in self._buffers
        )

    def digest(self, collected: TorchCollected, parts: Sequence[Extent]) -> int:
        """Return the 64-bit digest of ``parts``, byte ranges of the collected state (``ComparesCopies``)."""
        with named_errors("the copies of the state cannot be compared"):
            return digest_of(collected, parts)

    def pin(self, memory: memoryview) -> Callable[[], None]:
        """Lock memory pages for copies from a GPU (``PinsMemory``). Without a GPU in use, do nothing.

        Returns:
            A function that unlocks the pages.
        """
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return lambda: None
        pointer = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = int(runtime.cudaHostRegister(pointer, len(memory), 0))
        if code != 0:
            log.warning(
                "holdfast: %d bytes cannot be pinned (CUDA error %d): saves copy more slowly",
                len(memory),
                code,
            )
            return lambda: None
        return lambda: runtime.cudaHostUnregister(pointer)

    def restore(self, catalogue: Catalogue, values: Mapping[str, Plain]) -> TorchRestore:
        """Return an object that loads a checkpoint into this state.

        The caller fills the buffers of that object, then calls ``finish`` of the object. Raises: CheckpointMismatch.
        """
        restore = self.state.restore(catalogue, values, (self.rank, self.world_size))
        restore.then(partial(self._layouts.load, values.get("buckets")))
        return restore

    def mark(self, item: Any) -> object:
        """Return a mark that changes with each write to tensor ``item`` of a batch (``MarksTensors``)."""
        return mark(item)

    def digest_batch(self, batch: Any) -> int:
        """Return the digest of a batch that a loader drew (``frameworks.common.optional_abilities.DigestsBatches``)."""
        return digest_of_batch(batch)

    def duplicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor of a batch."""
        return duplicate(tensor)

    def share_memory(self, item: Any, tensor: torch.Tensor) -> bool:
        """Return True if ``item`` and ``tensor`` share memory."""
        return share_memory(item, tensor)

    def feed(self, loader: Any) -> TorchFeed:
        """Return the feed that draws batches from ``loader``. Raises: UsageError."""
        return self.feeds([loader])[0]

    def feeds(self, loaders: Sequence[Any]) -> list[TorchFeed]:
        """Return a feed for each of the loaders of one loop (``DrawsFromSeveral``). Raises: UsageError."""
        stand_in = deferred_rank.current()
        spare = stand_in is not None and not stand_in.called
        draws = self._random.draws(self.copy.number)
        self._feeds = [
            TorchFeed(make_source(loader, loader_seed(self._random.seed, number), draws, spare=spare))
            for number, loader in enumerate(loaders)
        ]
        return self._feeds

    # ------------------------------------------------------------------ step

    def begin(self, step: int) -> None:
        """Seed the random generators and copy the state that the block of ``step`` may change.

        Raises: UnsupportedError: a DDP communication hook keeps state.
        """
        self._refuse_hooks()  # the script may register a hook after the session was made
        self._backward_seen, self._computed = set(), False
        self.updates.begin()
        self._step = step
        self._counted = self._fabric.collectives
        self._accumulating.begin()
        self._leftover.begin()
        self._devices.order()
        self._snapshot.take()
        self._devices.order()
        end_setup()
        self._reseed(step, self._parts.part, between=False)

    def between(self, step: int, part: int, *, again: bool) -> None:
        """Seed the random generators for the script's code before the block of ``step``.

        Unless ``again``, copy the state that this code may change. With ``again``, the code runs a second time, and the
        copies from before its first run stay. A sample of the weights is recorded in both cases: it later shows if the
        script has exchanged the weights.
        """
        end_setup()
        self._reseed(step, part, between=True)
        if again:
            self._devices.order()
            self._sample.note()
        else:
            self._remember(step)

    def remember(self, step: int, *, whole: bool = False) -> None:
        """Copy the state that the script's code before the block of ``step`` may change.

        That is: buffers, learning rates, schedules and the user's own state. With ``whole``, large objects of the user
        are copied as well, for example averages of the weights.
        """
        self._remember(step, whole=whole)
        self._layouts.begin_loop()

    def _remember(self, step: int, *, whole: bool = False) -> None:
        self._devices.order()
        self._snapshot.take_before(step, whole=whole)
        self._sample.note()

    def holds_weights(self) -> bool:
        """Return True if the model still holds the weights that were recorded last (``KnowsWeights``).

        The result is False if the script has put other weights into the model, for example averages for an
        evaluation.
        """
        return self._sample.is_there()

    def _reseed(self, step: int, part: int, *, between: bool) -> None:
        # Number of the copy of the model that computes this part of the step when all ranks are present.
        worker = self.copy.number + self.copy.numbers * part
        self._random.begin(worker, step, self.state.generators, between=between)

    def expect(self, batches: int | None) -> None:
        """Set the number of batches of the next block (``frameworks.common.optional_abilities.Accumulates``)."""
        self._accumulating.expect(batches)

    def share(self, part: int, parts: int) -> None:
        """Declare that the step runs as ``parts`` blocks, and that the next block has the number ``part``, from 0."""
        if parts > 1:
            self.updates.refuse("a step runs in parts")
        self._parts.begin(part, parts)

    def shield(self) -> None:
        """Make broken collectives complete on local data from now on."""
        self._fabric.shield(True)

    def record(self, name: str) -> None:
        """Copy the state that a tentative update of optimizer ``name`` is about to change, so that it can be undone."""
        self.updates.refuse("an update is made before the vote of its step")
        self._suspicion.updates()
        optimizer = self.state.optimizers[name].optimizer
        self._leftover.updates(parameters_of(optimizer))
        self._snapshot.undo.record(optimizer)

    def prepare_vote(self) -> None:
        """Make the buffers equal on all ranks, then wait for the device, so that all gradients exist at the vote."""
        self._parts.check()
        self._leftover.updates()
        self.trains_alone = self.trains_alone and self._fabric.collectives == self._counted
        self._fabric.note_wait()
        self._devices.order()
        self._snapshot.note_tables()
        self._sync.run()
        self._snapshot.averages.settle()
        self._devices.wait()

    def vote(self, vector: list[int]) -> list[int]:
        """Return the sum of ``vector`` over all ranks. Raises: PeerLost."""
        return vector if self.world_size == 1 else self._fabric.reduce_vote(vector)

    def begin_equal(self) -> None:
        """Copy the modules among the user's state from the first rank to all ranks, in a new job. Raises: PeerLost."""
        if self.world_size > 1 and (copies_are_known(self._model) or not self.partial):
            begin_equal(self.state.extras, self._ddp, self.vote)

    def enter_update(self) -> None:
        """Forbid collectives of user code until :meth:`end`, because the vote has passed."""
        self._updating = True
        self._fabric.shield(False)
        self._fabric.seal_updates(True)

    def end(self) -> None:
        """Make the update final: drop the undo copies and allow collectives again."""
        self.release()
        self._snapshot.undo.clear()
        self._snapshot.early.clear()
        self._devices.order()
        self._sample.note()
        self._passed += self._computed
        if self.live and self._computed:
            if self._passed <= SETTLED:
                self._layouts.build()
            self._layouts.note_built()
        self._leftover.ended(self._step, updated=self._computed)

    def set_aside(self, on: bool) -> None:
        """Make the script's collectives complete on local data if ``on``, otherwise let them communicate again."""
        self._fabric.set_aside(on)

    def release(self) -> None:
        """Leave the block: collectives are allowed again, and broken collectives raise again."""
        self._suspicion.end()
        self._parts.end()
        self._accumulating.end()
        self._updating = False
        self._fabric.seal_updates(False)
        self._fabric.shield(False)

    def abort(self) -> None:
        """Reset wrappers (DDP, FSDP2) and scaler, restore the state that the block changed, and drop gradients."""
        self.release()
        self._fabric.quiesce()
        self._devices.wait()  # an update on another stream must not overtake the restore below
        self._heal()
        if self._proving:
            self._end_proof()
        elif self._fabric.looped:
            if not self._fabric.poisoned:  # otherwise a fence broke the rehearsal off, and it is made again
                self._layouts.rehearsed(computed=self._computed)
        self._scaling.heal()
        self._snapshot.restore()
        self._devices.wait()  # the next block must not start before the restore has ended

    # ------------------------------------------------------------------ groups

    def poison(self, reason: str) -> None:
        """Break all collectives of this process."""
        self._fabric.poison(reason)

    def reconfigure(self, generation: Generation) -> None:
        """Rebuild all groups for ``generation``, and reset the wrappers. Raises: GroupError."""
        self._proving = ""
        self._fabric.reconfigure(generation)
        # All ranks reset, even without an aborted step: a reset reducer runs a collective in its next forward pass.
        self._heal()

    def _heal(self) -> None:
        if not self._fabric.looped:
            self._passed = 0
            self._layouts.reset()
        for _, module in modules_of(self._model):
            heal(module)
        heal_pipelines()

    def rehearse(self) -> bool:
        """Return True if the next step first needs a rehearsal, a run without effect that gives DDP its final buckets.

        DDP rebuilds its buckets after its first backward passes, and the buckets decide in which order gradients are
        summed. ``bucket_layouts.py`` has the sources of the final buckets. In a rehearsal collectives complete on local
        data (*loopback*).
        """
        if not self._layouts.needs_rehearsal(looped=self._fabric.looped or self._fabric.poisoned):
            return False
        self._proving = ""
        self._fabric.loopback()
        return True

    def excuse(self) -> bool:
        """Make no further rehearsal in this loop, if that is possible (``AgreesOnSums``)."""
        return self._layouts.give_up()

    def agree(self) -> None:
        """Make the layouts of DDP's buckets equal on all ranks (``AgreesOnSums``). Raises: PeerLost."""
        if self.live:
            self._layouts.agree(self.rank, partial=self.copy.numbers != self.world_size, vote=self.vote)

    def end_rehearsal(self) -> None:
        """Leave loopback and communicate with the peers again, over the same connections.

        The peers rebuild DDP's buckets after their next backward passes, by a collective. So DDP in this process
        forgets the passes of the rehearsal, and rebuilds its buckets together with the peers.
        """
        self._fabric.reconfigure(self._fabric.generation)
        if self._proving != "sampled":
            self._forget_pass()
        self._proving = ""

    def go_alone(self, *, first: bool, suspected: bool) -> bool:
        """Make the coming block run without peers and without effect, to check it (``ProvesBlocks``).

        Args:
            first: True if this process has not committed a block yet.
            suspected: True if two runs of the block differed; this run then searches for the cause.

        Returns:
            False if such a run is not possible at this step.
        """
        if self._layouts.unready and self._layouts.static:
            return False  # ``static_graph`` counts the first passes, and they differ from later ones
        if self._ddp and ((self.partial and not first) or 0 < self._passed < SETTLED):
            return False  # all ranks must still build their buckets together, and this run would reset them
        self._proving = "sampled" if self._passed else "first"
        if suspected:
            self._suspicion.begin()
        self._fabric.loopback()
        return True

    @property
    def partial(self) -> bool:
        """True if this rank holds only a part of a copy of the model."""
        return holds_part(self._model, self.copy, self.world_size)

    @property
    def others(self) -> OtherRanksBlocks | None:
        """The object that runs other ranks' blocks in this process; None if this rank holds only a part of a copy."""
        if self.partial:
            return None
        return OtherRanksBlocks(self._fabric, self.state, self._random, self.copy)

    def found(self) -> Mapping[str, int]:
        """Return digests of the state from which a block starts, keyed by a description of each value."""
        lost = self._snapshot.averages.lost()
        return {**found_by(self.state), **{f"the weight {name} (no copy)": n for name, n in lost.items()}}

    def trained(self) -> Mapping[str, int]:
        """Return digests of the trained weights, keyed by ``TRAINED`` and the name of the weight."""
        return trained_in(self.state)

    def computed(self) -> Mapping[str, int]:
        """Return digests of the results of the block so far, keyed by a description of each value."""
        # The local data of a job of one process are all data.
        return computed_in(self.state, self._fabric.calls() if self.world_size > 1 else ())

    def cause(self) -> str:
        """Return the likely cause of the difference between the last two runs of the block; empty if none was found."""
        return self._suspicion.cause

    def changed(self) -> Sequence[str]:
        """Return the numbers in attributes of modules that differed between the last two suspected runs."""
        return self._suspicion.changed()

    def generators(self, variables: Mapping[str, object]) -> Mapping[str, object]:
        """Return each random generator that the session neither has nor seeds, by its name in the script."""
        extras = self.state.extras
        return generators_in(variables, {id(extras), *map(id, extras.values())})

    def state_of_generator(self, generator: object) -> int:
        """Return a digest of the present state of a generator of :meth:`generators`."""
        return digest_of_generator(generator)

    def finder(self) -> UndeclaredTensors:
        """Return a new object that finds tensors of the script that change and are not part of the session."""
        return UndeclaredTensors(self.state, self._model)

    def _end_proof(self) -> None:
        """After a run without effect, reset DDP's count of backward passes if DDP had counted no trained step before.

        Such a run must not decide the layout of the buckets.
        """
        if self._proving == "first":
            self._forget_pass()

    def _forget_pass(self) -> None:
        self._passed = 0
        self._layouts.forget()


def _place(own_groups: bool) -> tuple[int, int]:
    """Return rank and world size of the default process group.

    Args:
        own_groups: True if that group must be one of Holdfast's.

    Raises:
        UsageError: the launcher's variables name several processes, but there is no process group; or the variables
            contradict the process group; or the script has started this process.
        UnsupportedError: the process groups were made before Holdfast's were installed.
    """
    if not (dist.is_available() and dist.is_initialized()):
        seat = seat_here()
        if seat.world_size > 1:
            raise UsageError(
                f"{seat.world_size} processes were started ({seat.said}), but torch.distributed is not initialised",
                hint="torch.distributed.init_process_group(...) before holdfast.session(...); its env:// needs RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT: mpirun and srun do not set them, `holdfast run` does",
            )
        return 0, 1
    if own_groups and dist.get_world_size() > 1 and not isinstance(dist.group.WORLD, ReconfigurableGroup):
        if parent_process() is not None:
            raise UsageError(
                f"rank {dist.get_rank()} of {dist.get_world_size()} was started by the script itself "
                "(multiprocessing), not by a launcher, which could not replace it",
                hint=f"holdfast run --nproc-per-node {dist.get_world_size()}, and let the script call the function of "
                "a rank once, with int(os.environ['LOCAL_RANK']) and init_method='env://', instead of spawn()",
            )
        raise UnsupportedError(
            "the process groups were made before Holdfast could put its own behind them",
            hint="`import holdfast.torch` before init_process_group(...), or start with `holdfast run`",
        )
    return place_here((dist.get_rank(), dist.get_world_size()))
