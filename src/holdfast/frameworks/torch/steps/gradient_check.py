"""The check for inf and nan in the gradients that an optimizer is about to use, and the prevention of its update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import writes_of
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.state.update_replay import UpdateReplay


class TorchGradients:
    """The gradients of the model (``frameworks.common.optional_abilities.Gradients``)."""

    def __init__(self, state: TorchState, updates: UpdateReplay) -> None:
        self._state = state
        self._updates = updates

    def may_drop(self) -> None:
        """Switch the gradient log off: the log could hold an update that :meth:`drop` prevents."""
        self._updates.refuse("nonfinite='skip' may leave an update out")

    def begin_check(self, optimizer: str) -> Callable[[], str]:
        """Queue the check for inf and nan on the device. Return a function that waits for it.

        That function returns the name of the first weight whose gradient holds inf or nan, or an empty text. With a
        scaler, which judges each optimizer separately, only the gradients of ``optimizer`` are checked; otherwise the
        gradients of all optimizers.
        """
        with torch.no_grad():
            flags = _nonfinite_flags([g for _, g in self._of(optimizer) if g.numel()])

        def first() -> str:
            if not any(map(bool, flags)):
                return ""
            with torch.no_grad():
                named = self._of(optimizer)
                return next((name for name, g in named if not bool(torch.isfinite(g).all())), "")

        return first

    def weights_alone(self) -> int | None:
        """Return torch's count of writes to all parameters together; None if a parameter has a gradient."""
        parameters = self._state.names.parameters.values()
        if any(parameter.grad is not None for parameter in parameters):
            return None
        return sum(
            writes_of(each)
            for parameter in parameters
            for each in (parameter, private_api.local_tensor(parameter))
        )

    def drop(self) -> None:
        """Drop all gradients, so that the optimizers change nothing: they skip a parameter without a gradient."""
        for parameter in self._state.names.parameters.values():
            parameter.grad = None

    def _of(self, optimizer: str) -> Iterator[tuple[str, torch.Tensor]]:
        held = self._state.optimizers
        judged = [held[optimizer]] if self._state.scaler is not None else list(held.values())
        used = {id(p) for each in judged for group in each.optimizer.param_groups for p in group["params"]}
        for name, parameter in self._state.names.parameters.items():
            if parameter.grad is not None and id(parameter) in used:
                gradient = private_api.local_tensor(parameter.grad)
                yield name, gradient.coalesce().values() if gradient.is_sparse else gradient


def _nonfinite_flags(found: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return flags on the devices of ``found``; all are false if all numbers are finite. A flag may be true in error.

    On other devices than CUDA the sum of each tensor is checked, because inf and nan pass through a sum. But a sum of
    finite numbers may also be inf. On CUDA each sum would be a separate kernel, so another check is used.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in found:
        alike.setdefault((each.device, each.dtype), []).append(each)
    return [
        private_api.nonfinite_flag(group)
        if device.type == "cuda"
        else ~torch.isfinite(torch.stack([each.sum() for each in group])).all()
        for (device, _), group in alike.items()
    ]
