"""``ReplicatedOptimizer`` for Megatron scripts: Megatron-core's distributed optimizer, with every shard held twice.

The documents of ``mindio_ttp`` for Megatron use this class instead of ``DistributedOptimizer``, so that the optimizer's
state survives the death of a rank. With ``num_distributed_optimizer_instances=2`` Megatron-core cuts the state over
half the data-parallel ranks, and the other half holds the same shards. This class checks that setting. It counts the
updates for ``ttp_end_updating_os(self.current_step)``. Megatron is imported when the first optimizer is built.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import Any

from holdfast.errors import UnsupportedError

COPIES_MIN = 2
_CORE = "megatron.core.optimizer.distrib_optimizer"
_INSTANCES = "num_distributed_optimizer_instances"


class ReplicatedOptimizer:
    """Megatron-core's ``DistributedOptimizer``, refused if a shard of its state would have only one holder.

    The constructor takes the arguments of Megatron-core's class. Each instance is also an instance of that class.

    Raises:
        UnsupportedError: Megatron-core is not installed, or a shard has only one holder.

    Example:
        opt_ty = ReplicatedOptimizer if args.use_distributed_optimizer else Float16OptimizerWithFloat16Params
    """

    current_step: int
    """Number of updates that :meth:`increase_step` counted. A script that loads a checkpoint sets this number."""

    def __new__(cls, *arguments: Any, **more: Any) -> ReplicatedOptimizer:
        made: ReplicatedOptimizer = object.__new__(_over_megatron() if cls is ReplicatedOptimizer else cls)
        return made

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)  # the constructor of Megatron's class
        copies = int(getattr(getattr(self, "ddp_config", None), _INSTANCES, 1))
        if copies < COPIES_MIN:
            raise UnsupportedError(
                f"ReplicatedOptimizer: each shard of the optimizer's state has {copies} holder, where "
                f"{COPIES_MIN} are needed for the death of one",
                hint=f"{_INSTANCES}={COPIES_MIN} for parallel_state.initialize_model_parallel and in the "
                "DistributedDataParallelConfig (Megatron's flag: --num-distributed-optimizer-instances 2)",
            )
        self.current_step = 0

    def increase_step(self) -> None:
        """Count one update. The script calls this method after ``self.optimizer.step()``."""
        self.current_step += 1


@cache
def _over_megatron() -> type[ReplicatedOptimizer]:
    """Return a subclass of the installed Megatron-core's optimizer class.

    Raises:
        UnsupportedError: Megatron-core is not installed, or too old.
    """
    try:
        base = importlib.import_module(_CORE).DistributedOptimizer
    except ImportError as error:
        older = find_spec("megatron") is not None
        raise UnsupportedError(
            "ReplicatedOptimizer needs Megatron-core's DistributedOptimizer, "
            + ("and this Megatron keeps one copy of each shard" if older else "and there is no Megatron")
            + f": {error}",
            hint="pip install megatron-core; or leave --use-distributed-optimizer out: then every rank holds the state",
        ) from error
    return type("ReplicatedOptimizer", (ReplicatedOptimizer, base), {"__doc__": ReplicatedOptimizer.__doc__})
