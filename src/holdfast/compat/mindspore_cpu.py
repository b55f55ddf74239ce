"""Patches that let MindSpore 2.10's own fault tolerance and graceful exit run on CPU with Holdfast's ``mindio_ttp``.

These parts are patched, and nothing else:

1. ``context.get_context("device_target")`` returns ``Ascend`` in two modules that refuse any other device.
2. ``_stop_device`` and ``clean_tdt_channel``, which do not exist on CPU, do nothing.
3. The optimizer wrapper sums a flag over the ranks before an update. The flag is float32, because AllReduce on CPU has
   no int32. A Python operator in the graph reports the beginning of an update, because ``TensorReport`` has no CPU
   kernel.
4. ``ExitByRequest`` (``MS_ENABLE_GRACEFUL_EXIT``) sums float32 flags over the ranks, so a request to one rank is
   enough. ``OnRequestExit`` reads the sum on every rank after every step. 2.10 cannot load the checkpoint that
   ``OnRequestExit`` writes, because the file also has a scalar under the name of the optimizer's ``global_step``. The
   patched version loads the file, and ignores the request to exit in it.
5. ``train.TFTRegister``, which 2.10 has renamed, exists again. Releases with that name published a dying checkpoint as
   ``tft_saved_checkpoints-step_N``. A link with that name leads to 2.10's ``ttp_saved_checkpoints-step_N``.
6. In data parallel mode rank 0's weights are broadcast before the first step (MindSpore's ``parameter_broadcast``). All
   ranks load the dying checkpoint that one rank wrote, so all ranks must start with equal weights.
7. ``TrainFaultTolerance`` counts steps from the position that ``dataset.set_init_step`` gave the data. 2.10 counts from
   0 after a resume, so a second dying checkpoint would have the name of a much earlier step.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops, train
from mindspore.common import jit_class
from mindspore.communication.management import get_group_size

from holdfast.compat import framework_ttp as ttp
from holdfast.compat.import_hook import TFT_VARIABLE
from holdfast.errors import UnsupportedError

VERSION = "2.10."
REFUSED = ("UCE:1", "ARF:1", "HCCE:1", "TSP:1")
CALLBACK = "mindspore.train.callback._train_fault_tolerance"
ASKING = (CALLBACK, "mindspore.utils.utils")
PORT_VARIABLE, ADDRESS_VARIABLE = "MS_TFT_PORT", "MS_TFT_IP"
PUBLISHED, PUBLISHED_BEFORE = "ttp_saved_checkpoints-step_", "tft_saved_checkpoints-step_"
"""First part of the name of a dying checkpoint: in 2.10, and in the releases that had ``TFTRegister``."""

EXIT_NAMES, STEP_NAME = ("graceful_exit", "graceful_init"), "global_step"
"""Parameters of a training cell: the request to exit, the answer of all ranks, and the optimizer's step count."""

log = logging.getLogger("holdfast")
_applied = False


def apply() -> None:
    """Patch MindSpore; a repeated call does nothing.

    Raises:
        UnsupportedError: MindSpore is not 2.10, or ``MS_ENABLE_TFT`` has flags that need Ascend.
    """
    global _applied
    if _applied:
        return
    if not ms.__version__.startswith(VERSION):
        raise UnsupportedError(f"MindSpore {ms.__version__}: mindio_ttp on CPU is made for {VERSION}x",
                               hint="pip install 'mindspore==2.10.0'")  # fmt: skip
    asked = [flag for flag in REFUSED if flag in os.environ.get(TFT_VARIABLE, "").replace(" ", "")]
    if asked:
        raise UnsupportedError(
            f"{TFT_VARIABLE} holds {', '.join(asked)}: repair in place needs Ascend's own communication",
            hint=f"{TFT_VARIABLE}='{{TTP:1}}'; in place on CPU: holdfast.mindspore.train",
        )
    _applied = True
    for name in ASKING:
        module: Any = importlib.import_module(name)
        module.context = _Context(module.context)
    callback: Any = importlib.import_module(CALLBACK)
    callback._stop_device = _nothing
    callback.clean_tdt_channel = _nothing
    callback.TrainFaultTolerance.get_optimizer_wrapper = classmethod(_wrapper_of)
    callback.TrainFaultTolerance.on_train_begin = _counted_on(callback.TrainFaultTolerance.on_train_begin)
    callback._rename_save_result = _under_both_names(callback._rename_save_result)
    cell_wrapper: Any = importlib.import_module("mindspore.nn.wrap.cell_wrapper")
    utils: Any = importlib.import_module("mindspore.utils")
    cell_wrapper.ExitByRequest = utils.ExitByRequest = ExitByRequest
    leaving: Any = importlib.import_module("mindspore.train.callback._on_request_exit")
    leaving.load_checkpoint = _load_saved_at_exit
    leaving.OnRequestExit.on_train_step_begin = _look_always(leaving.OnRequestExit.on_train_step_begin)
    nn.OptTFTWrapper = OptTFTWrapper
    train.TFTRegister = TFTRegister


class _Context:
    """A wrapper of ``mindspore.context`` for modules that refuse to run on CPU."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def get_context(self, key: str) -> Any:
        """Return ``Ascend`` for the device, and the real value for any other key."""
        return "Ascend" if key == "device_target" else self._context.get_context(key)


def _look_always(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return ``OnRequestExit.on_train_step_begin``, extended so that all ranks see an exit request to any rank.

    All ranks then read the sum of the exit requests after every step.
    """

    def on_train_step_begin(self: Any, run_context: Any) -> None:
        original(self, run_context)
        if self.use_graceful and self.is_distributed:
            self.need_do_step_end = True

    return on_train_step_begin


def _load_saved_at_exit(file_name: str, net: Any) -> None:
    """Load a checkpoint that ``OnRequestExit`` wrote at an exit.

    This function replaces MindSpore's ``load_checkpoint``.
    """
    values = ms.load_checkpoint(file_name)
    for name in EXIT_NAMES:
        values.pop(name, None)
    for parameter in net.get_parameters():
        if parameter.name == STEP_NAME and STEP_NAME in values:
            step = values[STEP_NAME].asnumpy().reshape(parameter.shape)
            values[STEP_NAME] = Parameter(Tensor(step, parameter.dtype), name=STEP_NAME)
    ms.load_param_into_net(net, values)


def _counted_on(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """Return ``TrainFaultTolerance.on_train_begin``, extended for a training that does not begin at step 0."""

    def on_train_begin(self: Any, run_context: Any) -> None:
        original(self, run_context)
        training = run_context.original_args()
        if not training.cur_step_num and not getattr(self, "initial_step", 0):
            training.cur_step_num = training.train_dataset.get_init_step()

    return on_train_begin


def _under_both_names(original: Callable[[int, Any], None]) -> Callable[[int, Any], None]:
    """Return ``_rename_save_result``, extended: a link with the older name leads to the published directory."""

    def _rename_save_result(step: int, cb_ctx: Any) -> None:
        if cb_ctx.save_cb is None and getattr(cb_ctx, "has_older_name", False):
            link = Path(cb_ctx.ckpt_save_path) / f"{PUBLISHED_BEFORE}{step}"
            try:  # before the directory is published, so that both names exist from the start
                link.symlink_to(f"{PUBLISHED}{step}", target_is_directory=True)
            except OSError as error:
                if not link.is_symlink():
                    log.warning("holdfast: %s: %s; the dying checkpoint is in %s%d beside it",
                                link, error.strerror, PUBLISHED, step)  # fmt: skip
        original(step, cb_ctx)

    return _rename_save_result


def _nothing(*_arguments: Any) -> int:
    return 0


def _same(value: Any) -> Any:
    return value


def _begin(flag: Any) -> Any:
    """Report the beginning of an update. The compiled graph calls this function as an operator."""
    ttp.tft_start_updating_os(-1)
    return flag


def _add_report(cell: Any) -> None:
    """Add operators to the optimizer ``cell`` that delay its update.

    The update begins once all ranks have summed a flag and :func:`tft_start_updating_os` has returned. The sum
    completes only when all ranks have their gradients. Call this function before a ``Model`` is made of the optimizer.
    """
    if ms.get_auto_parallel_context("parallel_mode") == ms.ParallelMode.DATA_PARALLEL:
        ms.set_auto_parallel_context(parameter_broadcast=True)
    cell.tft_depend = ops.Depend()
    cell.tft_sum = ops.AllReduce()
    cell.tft_begin = ops.Custom(_begin, _same, _same, func_type="pyfunc")
    cell.tft_g_one_flag = Parameter(Tensor([1.0], ms.float32), name="tft_g_one_flag")


def _wrapper_of(_cls: Any, origin: Any) -> Any:
    """Return a subclass of the optimizer class ``origin`` that reports the beginning of each update.

    This function replaces ``TrainFaultTolerance.get_optimizer_wrapper``.
    """

    class TFTOptSubCls(origin):  # type: ignore[misc]
        """The optimizer class ``origin``, extended: it reports the beginning of an update before the update."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            _add_report(self)

        def construct(self, gradients: Any, **kwargs: Any) -> Any:
            flag = self.tft_begin(self.tft_sum(self.tft_depend(self.tft_g_one_flag, gradients)))  # type: ignore[has-type]
            self.tft_g_one_flag = flag
            return super().construct(self.tft_depend(gradients, flag), **kwargs)

    return TFTOptSubCls


class OptTFTWrapper(nn.Optimizer):  # type: ignore[misc]
    """``nn.OptTFTWrapper``: a wrapper of an optimizer that reports the beginning of an update before the update."""

    def __init__(self, opt: Any, **kwargs: Any) -> None:
        if not isinstance(opt, nn.Optimizer):
            raise TypeError(f"OptTFTWrapper takes an Optimizer, not a {type(opt).__name__}")
        nn.Cell.__init__(self, auto_prefix=False)
        self.opt = opt
        for name in ("parameters", "global_step", "learning_rate", "dynamic_lr", "is_group", "is_group_lr",
                     "loss_scale"):  # fmt: skip
            if hasattr(opt, name):
                setattr(self, name, getattr(opt, name))
        _add_report(self)

    def construct(self, gradients: Any) -> Any:
        """Report the beginning of the update, then update the weights. MindSpore compiles this method."""
        flag = self.tft_begin(self.tft_sum(self.tft_depend(self.tft_g_one_flag, gradients)))  # type: ignore[has-type]
        self.tft_g_one_flag = flag
        return self.opt(self.tft_depend(gradients, flag))


@jit_class
class ExitByRequest:
    """``mindspore.utils.ExitByRequest``: a sum of exit requests in the graph, so that all ranks exit together."""

    def __init__(self) -> None:
        self.reduce = ops.AllReduce()
        self.cast = ops.Cast()
        self.assign = ops.Assign()
        self.depend = ops.Depend()
        self.total = ops.ReduceSum()
        self.greater = ops.Greater()
        self.half = 0.5
        self.is_distributed = get_group_size() > 1

    def exit_by_request(self, grad: Any, init_value: Any, exit_value: Any) -> Any:
        """Set ``exit_value`` to whether any rank was asked to exit.

        Returns:
            The gradients ``grad``, which now depend on this assignment. Otherwise the graph would leave the assignment
            out.
        """
        if self.is_distributed:
            total = self.total(self.reduce(self.cast(init_value, ms.float32)))
            grad = self.depend(grad, self.assign(exit_value, self.greater(total, self.half)))
        return grad


def TFTRegister(ctrl_rank_id: int, ctrl_ip: str, ctrl_port: int, ckpt_save_path: str) -> Any:
    """Return the callback of the former ``train.TFTRegister``.

    Rank 0 starts the controller, whatever ``ctrl_rank_id`` is.
    """
    os.environ.setdefault(ADDRESS_VARIABLE, ctrl_ip)
    os.environ.setdefault(PORT_VARIABLE, str(ctrl_port))
    callback = train.TrainFaultTolerance(ckpt_save_path)
    callback.has_older_name = True
    return callback
