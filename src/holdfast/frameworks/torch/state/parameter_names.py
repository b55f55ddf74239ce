"""Names of parameters, buffers and extra state as in the user's own module, without the prefixes of wrappers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from holdfast.errors import StateError, UnsupportedError, UsageError
from holdfast.frameworks.common.weight_selection import EXTRA_STATE
from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import overlaps

Models = nn.Module | Mapping[str, nn.Module]

FABRIC = "_FabricModule"


class BufferSlot(NamedTuple):
    """The module and attribute name that hold a buffer; user code may assign another tensor at any time.

    ``shape`` is the shape of the tensor at the time when the names were read.
    """

    fqn: str
    module: nn.Module
    key: str
    shape: torch.Size

    def get(self) -> torch.Tensor | None:
        """Return the tensor that the module holds now; None if it holds none."""
        return private_api.buffers_of(self.module).get(self.key)

    def first_part(self) -> torch.Tensor | None:
        """Return the tensor that the module holds now, cut to ``shape`` if it is a table that has grown.

        Such a table is not in the ``state_dict``: a process makes it from its settings and its longest batch.
        """
        live = self.get()
        return None if live is None else self.cut(live)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor``, a value of the buffer, cut to ``shape`` if it is a table that has grown."""
        if self.persistent or isinstance(tensor, DTensor) or tensor.dim() != len(self.shape):
            return tensor
        if any(now < before for now, before in zip(tensor.shape, self.shape, strict=True)):
            return tensor
        return tensor[tuple(slice(length) for length in self.shape)]

    @property
    def persistent(self) -> bool:
        """True if the module's ``state_dict`` contains the buffer."""
        return self.key not in private_api.unlisted_buffers(self.module)


class Names(NamedTuple):
    """The names of all tensors of a model.

    ``aliases`` maps each further name of a shared tensor to its first name. ``extra`` holds the modules that have
    ``get_extra_state``, by the name that torch gives to their extra state. ``stretched`` holds the names of tables that
    have grown, and whose first part has changed at that.
    """

    parameters: dict[str, torch.Tensor]
    buffers: tuple[BufferSlot, ...]
    aliases: dict[str, str]
    extra: dict[str, nn.Module]
    stretched: set[str]

    def state_of(self, slot: BufferSlot, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of ``tensor``, a value of the buffer ``slot``, that belongs to the state.

        Of a table that has grown, the first part belongs to the state: each rank makes the rest from its own batches.
        A stretched table belongs to it as a whole, so it is refused where ranks have different sizes.
        """
        return tensor if slot.fqn in self.stretched else slot.cut(tensor)


def modules_of(model: Models) -> list[tuple[str, nn.Module]]:
    """Return the modules that the user gave as the model, each with the prefix for the names in it.

    Raises:
        UsageError: the model is neither a module nor a dict of modules by name.
    """
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, Mapping) and model and all(isinstance(m, nn.Module) for m in model.values()):
        return [(f"{name}.", module) for name, module in model.items()]
    raise UsageError(
        f"model is a {type(model).__name__}, not a torch.nn.Module",
        hint="session(model=net) or session(model={'generator': g, 'discriminator': d})",
    )


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DDP, ``torch.compile`` and activation checkpointing.

    Raises:
        UnsupportedError: FSDP1, whose flat parameters hide the names of the model's parameters.
    """
    while True:
        if isinstance(module, DistributedDataParallel | DataParallel):
            module = module.module
        elif type(module).__name__ in private_api.WRAPPERS:
            module = getattr(module, private_api.WRAPPERS[type(module).__name__])
        elif type(module).__name__ == "FullyShardedDataParallel":
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) is not supported: its flat parameters hide the model's names",
                hint="torch.distributed.fsdp.fully_shard(module); in Fabric ModelParallelStrategy, which calls it",
            )
        else:
            return module


def passed_through(module: nn.Module) -> nn.Module:
    """Return the module that each forward pass calls: the module inside Fabric's wrapper, or ``module`` itself.

    Forward methods that Fabric marks (``training_step``) run the inner module without calling the wrapper.
    """
    if type(module).__name__ != FABRIC:
        return module
    inner: nn.Module = getattr(module, private_api.WRAPPERS[FABRIC])
    return inner


def names_of(model: Models) -> Names:
    """Return the names of all parameters, buffers and extra state of the model.

    Raises:
        StateError: a parameter or buffer without memory (meta device), with an unsupported layout or with elements
            that share memory; extra state that cannot be put back.
        UnsupportedError: the model is wrapped by FSDP1, see :func:`unwrap`.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: list[BufferSlot] = []
    aliases: dict[str, str] = {}
    extra: dict[str, nn.Module] = {}
    seen: dict[int, str] = {}
    for prefix, top in modules_of(model):
        for path, module in _walk(top, prefix):
            if _has_extra_state(module, path) and _once(module, path + EXTRA_STATE, seen, aliases):
                extra[path + EXTRA_STATE] = module
            for key, parameter in module._parameters.items():
                if parameter is not None and _first(parameter, path + key, seen, aliases):
                    parameters[path + key] = parameter
            for key, buffer in module._buffers.items():
                if buffer is not None and _first(buffer, path + key, seen, aliases):
                    buffers.append(BufferSlot(path + key, module, key, buffer.shape))
    return Names(parameters, tuple(buffers), aliases, extra, set())


def _walk(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    inner = unwrap(module)
    yield prefix, inner
    for name, child in inner._modules.items():
        if child is not None:
            yield from _walk(child, f"{prefix}{name}.")


def _has_extra_state(module: nn.Module, path: str) -> bool:
    reads, writes = (
        getattr(type(module), method) is not getattr(nn.Module, method)
        for method in ("get_extra_state", "set_extra_state")
    )
    if reads and not writes:
        raise StateError(
            f"{path}{EXTRA_STATE}: {type(module).__name__} has get_extra_state() and no set_extra_state(), so that it "
            "could not be put back",
            hint="write set_extra_state(self, state) beside it",
        )
    return reads


def _once(item: object, fqn: str, seen: dict[int, str], aliases: dict[str, str]) -> bool:
    """Return True if ``item`` is seen for the first time; otherwise record ``fqn`` as an alias of its first name."""
    if id(item) in seen:
        aliases[fqn] = seen[id(item)]
        return False
    seen[id(item)] = fqn
    return True


def _first(tensor: torch.Tensor, fqn: str, seen: dict[int, str], aliases: dict[str, str]) -> bool:
    if not _once(tensor, fqn, seen, aliases):
        return False
    if tensor.is_meta or tensor.layout is not torch.strided:
        raise StateError(
            f"{fqn} ({tensor.dtype}, {tensor.layout}, device {tensor.device}) cannot be saved",
            hint="give the model memory (model.to_empty(device=...)) before holdfast.session(...)",
        )
    if overlaps(tensor):
        raise StateError(
            f"{fqn}: elements of this {list(tensor.shape)} share memory (expand()): it could never be loaded",
            hint="give it memory of its own where it is made: .expand(...).contiguous()",
        )
    return True


def data_parallel(model: Models) -> list[DistributedDataParallel]:
    """Return every DDP wrapper in the model."""
    return [
        module
        for _, top in modules_of(model)
        for module in top.modules()
        if isinstance(module, DistributedDataParallel)
    ]
