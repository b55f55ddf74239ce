"""The broadcast that lets the modules of the user's state begin equal on all ranks of a new job.

Theory. When DDP wraps the model, it gives the model the weights of the first rank. Many scripts copy the model into
an average of weights earlier. At that time each rank still has the weights of its own seed. The averages of the ranks
then differ, and the script saves and reports the average of rank 0. A checkpoint and a replacement hold one value per
entry of ``state=``, so a fault would replace one rank's average by another's. So all ranks take these averages from
the first rank, as DDP does for the weights. The result is the average that the script would have saved without
Holdfast. Tensors that ranks hold in parts (DTensor, ``holdfast.torch.declare``) stay unchanged. In a model in parts
without a wrapper, the averages of the ranks are also parts, and nothing is sent. If the modules of the ranks differ
in names, shapes or types (stages of a pipeline), nothing is sent. ``replica_state_check.py`` compares the rest of the
user's state.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from holdfast.frameworks.torch.state.boxes import flat_bytes, overlaps, overwrite, region_of
from holdfast.text import plural

log = logging.getLogger("holdfast")

BUNDLE_SIZE_BYTES = 64 << 20
"""Most bytes of one broadcast. A broadcast needs a copy of its tensors, and a large average has no room for one."""


def begin_equal(
    items: Mapping[str, Any],
    wrappers: list[DistributedDataParallel],
    vote: Callable[[list[int]], list[int]],
) -> None:
    """Give the modules among ``items`` the values of the first rank. All ranks call it.

    Args:
        items: the user's state, by name.
        wrappers: DDP wrappers of the model; the ranks of their process group hold the same part of the model.
        vote: returns the sum of a vector over all ranks.

    Raises:
        PeerLost: a rank is gone.
    """
    modules = {name: item for name, item in sorted(items.items()) if isinstance(item, nn.Module)}
    tensors = {name: list(_whole(module)) for name, module in modules.items()}
    tensors = {name: found for name, found in tensors.items() if found}
    if vote([int(bool(tensors))]) != [dist.get_world_size()]:
        return
    group = _group(wrappers)
    first = next(iter(tensors.values()))[0][1]
    form = _form(tensors).to(first.device)
    if vote([int(not torch.equal(_of_first(group, form), form))]) != [0]:
        return
    changed = vote([int(_take(group, [tensor for _, tensor in found])) for found in tensors.values()])
    if dist.get_rank() == 0:
        for name, ranks in zip(tensors, changed, strict=True):
            if ranks:
                log.info(
                    'holdfast: state "%s" began different on %s: all begin with the values of the first rank, as DDP '
                    "does with the weights",
                    name,
                    plural(ranks, "rank"),
                )


def _whole(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a module that this rank holds whole, each once."""
    seen: set[int] = set()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        whole = not isinstance(tensor, DTensor) and region_of(tensor) is None
        whole = whole and tensor.layout is torch.strided and not tensor.is_meta
        if whole and id(tensor) not in seen and tensor.numel() and not overlaps(tensor):
            seen.add(id(tensor))
            yield name, tensor


def _group(wrappers: list[DistributedDataParallel]) -> Any:
    groups = {tuple(dist.get_process_group_ranks(w.process_group)): w.process_group for w in wrappers}
    return next(iter(groups.values())) if len(groups) == 1 else dist.group.WORLD


def _form(tensors: Mapping[str, list[tuple[str, torch.Tensor]]]) -> torch.Tensor:
    """Return a digest of the names, shapes and dtypes of all ``tensors``: uint8 [8]."""
    words = [
        (name, path, list(tensor.shape), str(tensor.dtype))
        for name, found in tensors.items()
        for path, tensor in found
    ]
    return torch.frombuffer(bytearray(xxhash.xxh3_64_digest(json.dumps(words).encode())), dtype=torch.uint8)


def _of_first(group: Any, values: torch.Tensor) -> torch.Tensor:
    """Return the ``values`` of the group's first rank: uint8 [n], n equal on all ranks."""
    received = values.clone()
    dist.broadcast(received, dist.get_global_rank(group, 0), group=group)
    return received


def _take(group: Any, tensors: list[torch.Tensor]) -> bool:
    """Overwrite ``tensors`` with those of the group's first rank; return True if a byte changed."""
    changed = False
    for bundle in _bundles(tensors):
        mine = torch.cat([flat_bytes(tensor) for tensor in bundle])
        received = _of_first(group, mine)
        if not torch.equal(received, mine):
            changed = True
            overwrite(bundle, received)
    return changed


def _bundles(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield lists of tensors of one device, each list of at most ``BUNDLE_SIZE_BYTES`` or of one larger tensor."""
    bundle: list[torch.Tensor] = []
    size_bytes = 0
    for tensor in tensors:
        full = size_bytes + tensor.nbytes > BUNDLE_SIZE_BYTES
        if bundle and (full or tensor.device != bundle[0].device):
            yield bundle
            bundle, size_bytes = [], 0
        bundle.append(tensor)
        size_bytes += tensor.nbytes
    if bundle:
        yield bundle
