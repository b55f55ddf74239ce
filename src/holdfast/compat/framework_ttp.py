"""``mindio_ttp.framework_ttp``: the functions that MindSpore 2.10 and Megatron scripts call, done by Holdfast.

``tft_*`` are MindSpore's names, ``ttp_*`` the older names of Megatron scripts. Only the dying checkpoint (``TTP:1``) is
supported. It is the checkpoint that sound ranks (ranks with a whole state) write after a fault, before all ranks exit.
Any rank may die, also rank 0. Repair in place (``UCE``, ``ARF``, ``HCCE``) and pauses (``TSP``) need Ascend's own
communication: a request for one of them raises an error that names it. See docs/compat.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, ParamSpec, TypeVar

from holdfast.compat.dying_checkpoint import Rename, SaveParts, ShardGroup, replicas
from holdfast.compat.endpoint import Message
from holdfast.compat.rank_processor import Processor, start_controller
from holdfast.compat.step_state import StepState
from holdfast.errors import UnsupportedError, UsageError
from holdfast.runtime.net.addresses import read_host

P = ParamSpec("P")
R = TypeVar("R")

LOOPBACK = "127.0.0.1"


class ReportState(Enum):
    """Reasons for a call of :func:`tft_report_error`."""

    RS_NORMAL = 0
    RS_UCE = 1
    RS_UNKNOWN = 2
    RS_HCCL_FAILED = 3
    RS_INIT_FINISH = 4
    RS_PREREPAIR_FINISH = 5
    RS_STEP_FINISH = 6


class Action(Enum):
    """Results of :func:`tft_wait_next_action`; only EXIT is ever returned."""

    RETRY = 0
    EXIT = 1


class RepairType(Enum):
    """Kinds of repair of ``mindio_ttp``. Holdfast's controller never orders a repair."""

    RT_SEND = 0
    RT_UCE_HIGHLEVEL = 1
    RT_UCE_LOWLEVEL = 2
    RT_RECV_REPAIR = 3


class _Handler(NamedTuple):
    call: Callable[..., Any]
    context: tuple[Any, ...]


class _State:
    """The state of ``mindio_ttp`` in this process: one rank, one training."""

    def __init__(self) -> None:
        self.controller_world = 0
        self.processor: Processor | None = None
        self.groups: tuple[ShardGroup, ...] = ()
        self.handlers: dict[str, _Handler] = {}
        self.checked: _Handler | None = None  # the save handler whose arguments were checked
        self.standing = StepState(bound=False)

    def start(self, rank: int, world_size: int, bound: bool) -> None:
        """Make the :class:`Processor` of this rank. Keep arguments that the script has set for the save handler.

        Args:
            rank, world_size: rank of this process and number of ranks.
            bound: True if the script sets the arguments of the save handler for each step.
        """
        given, self.standing = self.standing.arguments, StepState(bound)
        if given is not None:
            self.standing.give(given)
        self.processor = Processor(rank, world_size, self.call, self.standing)

    def need(self) -> Processor:
        """Return the :class:`Processor` of this rank. Raises: UsageError: the script has made none."""
        if self.processor is None:
            raise UsageError("no TTP processor in this process",
                             hint="tft_init_processor(...), or ttp_init_processor(...), comes first")  # fmt: skip
        return self.processor

    def call(self, name: str, order: Message) -> None:
        """Call the handler registered under ``name``, if there is one.

        The first arguments of the handler are the values of ``order``, such as step and plan. Its context follows them.
        """
        handler = self.handlers.get(name)
        if handler is None:
            return
        first: tuple[Any, ...] = ()
        if isinstance(order, SaveParts):
            plan = [{"type": kind, "ranks": list(writers)} for kind, writers in order.plan.items()]
            first = (order.step, plan, self.standing.arguments)
        elif isinstance(order, Rename):
            first = (order.step,)
        elif name == "stop":
            first = (self.standing.arguments,)
        handler.call(*first, *handler.context)


_state = _State()


def sharers() -> tuple[int, frozenset[int]]:
    """Return this rank and the set of ranks that hold the same state.

    The result is (-1, empty set) if this rank has no processor, or does not belong to exactly one group.
    """
    if _state.processor is None or len(_state.groups) != 1:
        return -1, frozenset()
    return _state.processor.rank, frozenset(_state.groups[0].ranks)


def checked_by(check: Callable[[Any], None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that attaches ``check`` to a save handler.

    ``check`` is called with the first arguments that the script sets for the handler. It raises an error if these
    arguments cannot be saved.
    """

    def mark(handler: Callable[P, R]) -> Callable[P, R]:
        vars(handler)[_CHECK] = check
        return handler

    return mark


_CHECK = "holdfast_check"


def _check(arguments: Any) -> None:
    """Check the arguments of a new save handler, so that an error comes now and not after the death of a rank."""
    handler = _state.handlers.get("save")
    check = None if handler is None else getattr(handler.call, _CHECK, None)
    if check is not None and handler is not _state.checked:
        check(arguments)
        _state.checked = handler


def _register(name: str, call: Callable[..., Any], context: tuple[Any, ...]) -> None:
    if not callable(call):
        raise UsageError(
            f"the {name} handler is a {type(call).__name__}, not a function",
            hint="register the function itself, without calling it",
        )
    _state.handlers[name] = _Handler(call, context)


# ---------------------------------------------------------------- controller


def tft_init_controller(
    rank: int, world_size: int, enable_local_copy: bool = False, enable_arf: bool = False, **options: Any
) -> int:
    """Prepare the controller of a job with ``world_size`` ranks. Rank 0 calls it.

    Raises:
        UnsupportedError: ``enable_arf`` asks for process-level recovery.
    """
    if enable_arf:
        raise UnsupportedError("process-level recovery (ARF) is not served by this mindio_ttp",
                               hint="MS_ENABLE_TFT='{TTP:1}'; in place: holdfast.mindspore.train")  # fmt: skip
    _state.controller_world = int(world_size)
    return 0


def tft_start_controller(ip: str, port: int, enable_tls: bool = False, tls_key_dir: str = "") -> int:
    """Start the controller as a separate process that outlives this rank. It listens at ``ip:port``.

    Raises:
        UsageError: :func:`tft_init_controller` was not called, or other machines reach ``ip`` and there is no secret.
        UnsupportedError: ``enable_tls`` is set.
    """
    if enable_tls:
        raise UnsupportedError("TLS is not served by this mindio_ttp: its lines are authenticated, not encrypted",
                               hint="leave enable_tls out")  # fmt: skip
    if not _state.controller_world:
        raise UsageError(
            "the TTP controller was not initialized", hint="tft_init_controller(...) comes first"
        )
    start_controller(read_host(ip or LOOPBACK, "ip"), int(port), _state.controller_world)
    return 0


def tft_destroy_controller() -> int:
    """Do nothing: the controller ends on its own after the last rank."""
    return 0


# ---------------------------------------------------------------- processor


def tft_init_processor(
    rank: int, world_size: int, enable_local_copy: bool = False, enable_tls: bool = False, tls_key_dir: str = "",
    **options: Any,
) -> int:  # fmt: skip
    """Prepare this rank for :func:`tft_start_processor`.

    Raises:
        UnsupportedError: ``enable_tls`` is set, or the options ask for process-level recovery (ARF).
    """
    _init_processor(rank, world_size, False, enable_tls, options)
    return 0


def _init_processor(
    rank: int, world_size: int, bound: bool, enable_tls: bool, options: dict[str, Any]
) -> None:
    if enable_tls or options.get("enable_arf"):
        what = "TLS" if enable_tls else "process-level recovery (ARF)"
        raise UnsupportedError(f"{what} is not served by this mindio_ttp", hint="MS_ENABLE_TFT='{TTP:1}'")
    _state.start(int(rank), int(world_size), bound)


def tft_start_processor(ip: str, port: int) -> int:
    """Connect to the controller at ``ip:port``. Raises: GroupError: no controller answers within a minute."""
    processor = _state.need()
    processor.start(read_host(ip or LOOPBACK, "ip"), int(port))
    if _state.groups:
        processor.hold(_state.groups)
    return 0


def tft_destroy_processor() -> int:
    """Report that this rank's training is over, and disconnect from the controller."""
    if _state.processor is not None:
        _state.processor.close()
        _state.processor = None
    return 0


def tft_set_optimizer_replica(rank: int, replica_info: Sequence[dict[str, Any]]) -> int:
    """Declare which ranks hold the same state as this rank.

    ``replica_info`` has one dict per group: each part of the state is held by ``replica_cnt`` of the ranks in
    ``rank_list``.

    Raises:
        UsageError: ``replica_info`` is malformed, or ``replica_cnt`` does not divide the number of ranks.
    """
    try:
        groups = replicas(replica_info)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"tft_set_optimizer_replica({rank}, {replica_info!r}): {type(error).__name__}: {error}",
            hint='a list like [{"type": 0, "rank_list": [0, 1], "replica_cnt": 2}]',
        ) from error
    _state.groups = groups
    _state.need().hold(groups)
    return 0


# ---------------------------------------------------------------- handlers


def tft_register_save_ckpt_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(step, plan, args, *context)``, which writes a checkpoint.

    It is called on the ranks in ``plan``.
    """
    _register("save", func, context)


def tft_register_rename_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(step, *context)``, which publishes. It is called on one rank, after all writers have written."""
    _register("rename", func, context)


def tft_register_exit_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(*context)``, which ends the process."""
    _register("exit", func, context)


def tft_register_stop_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(args, *context)``, called before a save. If it raises, this rank's state is not saved."""
    _register("stop", func, context)


def tft_register_clean_handler(func: Callable[..., Any], *context: Any) -> None:
    """Keep a handler that is never called, because repair in place is not supported."""
    _register("clean", func, context)


def tft_register_repair_handler(func: Callable[..., Any], *context: Any) -> None:
    """Keep a handler that is never called, because repair in place is not supported."""
    _register("repair", func, context)


def tft_register_rebuild_group_handler(func: Callable[..., Any], *context: Any) -> None:
    """Keep a handler that is never called, because repair in place is not supported."""
    _register("rebuild_group", func, context)


def tft_register_stream_sync_handler(func: Callable[..., Any], *context: Any) -> None:
    """Keep a handler that is never called, because pauses are not supported."""
    _register("stream_sync", func, context)


# ---------------------------------------------------------------- each step


def tft_set_step_args(args: Any) -> None:
    """Set ``args`` of the save handler: one live object, or at each step a tuple that begins with the step's number.

    A tuple holds the state of the step that it names. Between the end of an update and the call with its tuple, a rank
    cannot write a dying checkpoint.
    """
    _check(args)
    if _state.processor is None:
        _state.standing.give(args)
    else:
        _state.processor.give(args)


def tft_start_updating_os(step: int) -> None:
    """Announce that the weights are about to change. Never returns once the job is being ended."""
    _state.need().begin_update()


def tft_end_updating_os(step: int) -> None:
    """Report that an update has ended: the weights are now those of ``step``."""
    _state.need().end_update(int(step))


def tft_report_error(state: int) -> None:
    """Report that an exception ended this rank's training, and wait for the exit.

    Returns only if the controller is lost. ``state`` is a value of :class:`ReportState`.
    """
    processor = _state.need()
    processor.fault(f"reported {ReportState(state).name}")
    processor.wait_end()


def tft_wait_next_action() -> int:
    """Wait until the process has to leave. Return the number of ``Action.EXIT``, the only action."""
    _state.need().wait_end()
    return int(Action.EXIT.value)


def tft_is_reboot_node() -> bool:
    """Return False: this process never joins a job that is running already."""
    return False


def tft_get_repair_type() -> str:
    """Return the current kind of repair, which is always ``dump``: a dying checkpoint."""
    return "dump"


def tft_can_do_uce_repair(hbm_error_time: int, start_time: int, end_time: int) -> bool:
    """Return False: a memory error of a device is not repaired in place."""
    return False


def tft_pause_train(step: int) -> None:
    """Refuse to pause the training.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError("pauses (TSP) are not served by this mindio_ttp", hint="MS_ENABLE_TFT='{TTP:1}'")


# ---------------------------------------------------------------- the older names, of Megatron scripts


def ttp_init_controller(rank: int, world_size: int, replica: int, enable_local_copy: bool = False) -> int:
    """Prepare the controller, as :func:`tft_init_controller` does. ``replica`` has no effect here."""
    return tft_init_controller(rank, world_size, enable_local_copy)


def ttp_start_controller(ip: str, port: int) -> int:
    """Start the controller as a separate process: another name of :func:`tft_start_controller`."""
    return tft_start_controller(ip, port)


def ttp_init_processor(
    rank: int, dp_ranks: Sequence[int], dp_count: int, world_size: int, replica: int, enable_local_copy: bool = False
) -> int:  # fmt: skip
    """Prepare this rank for :func:`ttp_start_processor`, and declare which ranks hold the same state.

    The state is cut into ``replica`` parts. Entries i and i + ``replica`` of ``dp_ranks`` hold the same part.

    Raises:
        UsageError: ``replica`` does not divide the number of ranks, or some part has only one holder.
    """
    ranks = tuple(int(each) for each in dp_ranks)
    if len(ranks) != dp_count or replica < 1 or dp_count % replica or dp_count // replica < 2:
        raise UsageError(
            f"ttp_init_processor: {replica} parts over the {dp_count} data-parallel ranks {list(ranks)}: "
            f"two ranks have to hold each part",
            hint="replica = len(dp_ranks) // 2, with an even number of ranks",
        )
    _state.groups = (ShardGroup(0, ranks, replica),)
    _init_processor(rank, world_size, True, False, {})
    return 0


def ttp_start_processor(ip: str, port: int) -> int:
    """Connect to the controller: another name of :func:`tft_start_processor`."""
    return tft_start_processor(ip, port)


def ttp_register_save_ckpt_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(step, plan, args, *context)``, which writes: see :func:`tft_register_save_ckpt_handler`."""
    tft_register_save_ckpt_handler(func, *context)


def ttp_register_rename_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(step, *context)``, which publishes: see :func:`tft_register_rename_handler`."""
    tft_register_rename_handler(func, *context)


def ttp_register_exit_handler(func: Callable[..., Any], *context: Any) -> None:
    """Register ``func(*context)``, which ends the process: see :func:`tft_register_exit_handler`."""
    tft_register_exit_handler(func, *context)


def ttp_set_ckpt_args(args: Any) -> None:
    """Set ``args`` of the save handler after the update of each step: ``(iterations done, model, ...)``.

    A Megatron script calls this function in its loop, after the optimizer has called :func:`ttp_end_updating_os`. The
    state of a step is complete only after both calls. The step's number is the number of iterations done.
    """
    tft_set_step_args(args)


def ttp_start_updating_os(step: int) -> None:
    """Announce that the weights are about to change: another name of :func:`tft_start_updating_os`."""
    tft_start_updating_os(step)


def ttp_end_updating_os(step: int) -> None:
    """Report that an update has ended: another name of :func:`tft_end_updating_os`."""
    tft_end_updating_os(step)


def ttp_to_persist(train: Callable[P, R]) -> Callable[P, R]:
    """Decorate a training function: an exception in it leads to a dying checkpoint, and a return ends the training."""

    @functools.wraps(train)
    def persistent(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            result = train(*args, **kwargs)
        except BaseException as error:
            processor = _state.processor
            if isinstance(error, SystemExit) and not error.code:
                tft_destroy_processor()
            elif processor is not None:
                processor.fault(f"{type(error).__name__}: {error}")
                processor.wait_end()
            raise
        tft_destroy_processor()
        return result

    return persistent
