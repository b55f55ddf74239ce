"""A sample of the weights: has the script put others in their place?

Theory. Between two blocks a script may put other weights into the model for a while, most often their averages for an
evaluation (``with ema.average_parameters(): ...``). Who is asked for the state meanwhile would give those. Nobody says
so, and such code writes past torch's count of writes (``parameter.data.copy_``). So it is noted where some of the
weights lie, and the bits of one element of each, whenever the script comes out of a block or is given a step: that
takes microseconds, and a device is not waited for before somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from holdfast.frameworks.torch.state.boxes import local_of

TENSORS_MAX = 16


class _Noted(NamedTuple):
    """Where the tensors lay, the memory of one element of each, and what was there."""

    places: list[int]
    elements: list[torch.Tensor]
    bits: torch.Tensor


class WeightSample:
    """Of these parameters: of those that are trained, on one device."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        held = [p for p in parameters if local_of(p).numel() and not (p.is_conj() or p.is_neg())]
        trained = [p for p in held if p.requires_grad] or held
        near = [p for p in trained if p.device == trained[0].device]
        count = min(len(near), TENSORS_MAX)
        self._tensors = [near[len(near) * n // count] for n in range(count)]
        self._noted: _Noted | None = None

    def note(self) -> None:
        """These are the weights."""
        places, known = self._places(), self._noted
        if not all(places):  # there are none, or a script has taken their memory away for a while
            self._noted = None
            return
        elements = known.elements if known is not None and known.places == places else self._elements()
        self._noted = _Noted(places, elements, _bits(elements))

    def is_there(self) -> bool:
        """What was noted is there now, wherever that lies. From any thread; waits for the device."""
        noted = self._noted  # one look: another thread may note meanwhile
        if noted is None:
            return True
        places = self._places()
        if not all(places):
            return False
        now = _bits(noted.elements if places == noted.places else self._elements())
        return torch.equal(noted.bits.cpu(), now.cpu())

    def _places(self) -> list[int]:
        """Where each lies; 0: nowhere."""
        held = (local_of(tensor) for tensor in self._tensors)
        return [local.data_ptr() if local.numel() else 0 for local in held] or [0]

    def _elements(self) -> list[torch.Tensor]:
        """The bytes of the last element of each, in its memory."""
        held = (local_of(tensor) for tensor in self._tensors)
        return [local[(-1,) * local.ndim].reshape(1).view(torch.uint8) for local in held]


def _bits(elements: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        if len({element.device for element in elements}) > 1:  # some were moved
            elements = [element.cpu() for element in elements]
        return torch.cat(list(elements))
