"""One digest of the final state of a whole run, to compare two runs.

The drill's own script writes a file per rank with digests of that rank's memory. For any other script the final
checkpoint is compared. Every tensor in it is read whole, so its division into files has no effect on the digest.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import xxhash

from holdfast.store.layouts.layout import Box
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import LoadTarget, load_catalogue, load_into

COMPARED = ("rank", "world_size", "steps", "parameters", "optimizer", "buffers", "scheduler", "loss")


STATE = COMPARED[:-1]
"""The compared fields without the loss, which a process has only if it trained a step."""


def digest_of_results(directory: Path, world_size: int, compared: Sequence[str] = COMPARED) -> str:
    """Return one digest of the result files of all ranks of the drill's script; empty if a file is missing.

    ``compared`` names the fields of each file that the digest covers.
    """
    total = xxhash.xxh3_128()
    for rank in range(world_size):
        path = directory / f"rank-{rank:05d}.json"
        if not path.exists():
            return ""
        fields = json.loads(path.read_text())
        total.update(json.dumps([fields[key] for key in compared]).encode())
    return total.hexdigest()


def comparable(directory: Path, world_size: int) -> tuple[str, ...]:
    """Return the fields by which a disturbed run can be compared with an undisturbed one.

    A process that replaces a rank after the last step reports no training loss. The loss is then not compared.
    """
    for rank in range(world_size):
        path = directory / f"rank-{rank:05d}.json"
        if path.exists() and json.loads(path.read_text())["loss"] is None:
            return STATE
    return COMPARED


def digest_of_checkpoint(root: Path, run: str | None, step: int) -> str:
    """Return a digest of names, types, shapes and bytes of all tensors in the checkpoint of ``step``.

    Args:
        root: directory of the checkpoints.
        run: name under which the run saved the checkpoint (``RunSettings.saves_as``); None accepts the checkpoint of
            any run.

    Raises:
        NothingToResume: there is no such checkpoint.
        CheckpointInvalid: a byte of the checkpoint is wrong.
    """
    path = Root(root).newest_valid(step, run=run).require().path
    tensors = load_catalogue(path).tensors
    names = [tensor.fqn for tensor in tensors]
    total = xxhash.xxh3_128()
    for tensor in tensors:
        data = bytearray(tensor.size_bytes)
        whole = Box.whole(tensor.shape)
        load_into(
            path, [LoadTarget(tensor.fqn, whole, tensor.dtype, memoryview(data), tensor.shape)], known=names
        )
        total.update(f"{tensor.fqn}|{tensor.dtype}|{tensor.shape}|".encode())
        total.update(data)
    return total.hexdigest()
