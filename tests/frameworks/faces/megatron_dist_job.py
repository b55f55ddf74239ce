"""A checkpoint in Megatron-core's distributed format: written by its own ``dist_checkpointing``, or loaded from ours.

``megatron_dist_job.py save FOLDER``: as ``--ckpt-format torch_dist`` writes it, and each rank's weights beside it.
``megatron_dist_job.py load FOLDER CHECKPOINT``: weights from the imported checkpoint, compared with those.

Processes that Megatron spawns for its files import this module: what takes long to import is imported in functions.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

TENSOR_PARALLEL = 2


def weights(model: Any) -> dict[str, Any]:
    """Return the tensors by name. Megatron's extra state is None on a CPU."""
    return {name: value for name, value in model.state_dict().items() if value is not None}


def save(model: Any, folder: Path) -> None:
    """Write the iteration, and the weights of this rank."""
    import torch
    import torch.distributed as dist
    from megatron.core import dist_checkpointing

    cuda: Any = torch.cuda
    cuda.synchronize, cuda.current_device = (lambda *_: None), (lambda: torch.device("cpu"))
    arguments = argparse.Namespace(tensor_model_parallel_size=TENSOR_PARALLEL, transformer_impl="local")
    iteration = folder / "iter_0000007"
    iteration.mkdir(parents=True, exist_ok=True)
    tree = {"args": arguments, "checkpoint_version": 3.0, "iteration": 7, "model": model.sharded_state_dict()}
    dist_checkpointing.save(tree, str(iteration))
    torch.save(weights(model), folder / f"weights-{dist.get_rank()}.pt")


def load(model: Any, folder: Path, checkpoint: str) -> None:
    """Put other values into the model, load the checkpoint, and compare."""
    import torch
    import torch.distributed as dist

    import holdfast
    from holdfast.integrations.megatron import declare

    declare(model)
    for tensor in weights(model).values():
        tensor.zero_()
    holdfast.load(checkpoint, model)
    wanted = torch.load(folder / f"weights-{dist.get_rank()}.pt", weights_only=True)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in weights(model).items())
    print(f"rank {dist.get_rank()}: {len(wanted)} equal", flush=True)


def main() -> None:
    """Entry point."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from tests.frameworks.faces.megatron_job import build

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=TENSOR_PARALLEL)
    model, folder = build(TENSOR_PARALLEL), Path(sys.argv[2])
    if sys.argv[1] == "save":
        save(model, folder)
    else:
        load(model, folder, sys.argv[3])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
