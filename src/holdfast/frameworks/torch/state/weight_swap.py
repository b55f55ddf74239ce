"""A sample of the weights that shows if the script has temporarily put other weights into the model.

Theory. Between two blocks a script may exchange the weights for a while, most often for their averages in an evaluation
(``with ema.average_parameters(): ...``). A request for the state at that time would return the wrong weights. The
script does not announce the exchange, and torch does not count such writes (``parameter.data.copy_``). So the addresses
of some weights are recorded, with the bits of one element of each, whenever the script leaves a block or is given a
step. That takes microseconds. Only a comparison waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from holdfast.frameworks.torch.state.boxes import local_of

TENSORS_MAX = 16


class _Noted(NamedTuple):
    """The addresses of the sampled tensors, the memory of one element of each, and the bits found there."""

    places: list[int]
    elements: list[torch.Tensor]
    bits: torch.Tensor


class WeightSample:
    """A sample of the given parameters, which shows if the model holds other weights now.

    Only parameters on one device are sampled. They are trained parameters or, if no parameter is trained, any.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        held = [p for p in parameters if local_of(p).numel() and not (p.is_conj() or p.is_neg())]
        trained = [p for p in held if p.requires_grad] or held
        near = [p for p in trained if p.device == trained[0].device]
        count = min(len(near), TENSORS_MAX)
        self._tensors = [near[len(near) * n // count] for n in range(count)]
        self._noted: _Noted | None = None

    def note(self) -> None:
        """Record the present weights as the trained weights."""
        places, known = self._places(), self._noted
        if not all(places):  # there is no weight, or the script has taken its memory away for a while
            self._noted = None
            return
        elements = known.elements if known is not None and known.places == places else self._elements()
        self._noted = _Noted(places, elements, _bits(elements))

    def is_there(self) -> bool:
        """Return True if the model holds the recorded weights, even at other addresses.

        Callable from any thread; waits for the device.
        """
        noted = self._noted  # read once: another thread may call note() meanwhile
        if noted is None:
            return True
        places = self._places()
        if not all(places):
            return False
        now = _bits(noted.elements if places == noted.places else self._elements())
        return torch.equal(noted.bits.cpu(), now.cpu())

    def _places(self) -> list[int]:
        """Return the address of each sampled tensor; 0 for a tensor without memory."""
        held = (local_of(tensor) for tensor in self._tensors)
        return [local.data_ptr() if local.numel() else 0 for local in held] or [0]

    def _elements(self) -> list[torch.Tensor]:
        """Return the bytes of the last element of each sampled tensor; they share its memory."""
        held = (local_of(tensor) for tensor in self._tensors)
        return [local[(-1,) * local.ndim].reshape(1).view(torch.uint8) for local in held]


def _bits(elements: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        if len({element.device for element in elements}) > 1:  # some tensors were moved
            elements = [element.cpu() for element in elements]
        return torch.cat(list(elements))
