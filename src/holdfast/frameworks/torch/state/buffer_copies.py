"""Copies of the model's buffers from two moments: when the script was given a step, and when that step's block began.

Theory. A block that runs again starts from the buffers that it had at its first start. A replacement also runs the
script's code before the block. So it starts with the buffers as they were before that code. A forward pass in that
code, in training mode, changes batch norm's statistics with the data of each rank. So a replacement must make the
pass on its own data. torch does not count batch norm's writes to its small statistics, so small buffers are copied at
each step. Large buffers (masks, position tables) are copied again only when torch has counted a write. Until then
both moments share one copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from holdfast.frameworks.torch import private_api
from holdfast.frameworks.torch.state.boxes import Mark
from holdfast.frameworks.torch.state.parameter_names import BufferSlot

SMALL_NUMEL = 65536
"""Largest buffer, in elements, that is copied at each step."""


class _Kept(NamedTuple):
    """A buffer of the model, its mark when it was copied (None: a small one, copied at each step), and the copy."""

    live: torch.Tensor
    mark: Mark | None
    copy: torch.Tensor


class BufferCopies:
    """Copies of the model's buffers from one moment.

    Args:
        slots: the buffers of the model.
        other: the copies from another moment. The two objects share the copies of large buffers that have not changed.
    """

    def __init__(self, slots: tuple[BufferSlot, ...], other: BufferCopies | None = None) -> None:
        self._slots = slots
        self._tables = tuple(slot for slot in slots if not slot.persistent)
        self._other = other
        self._kept: dict[str, _Kept] = {}
        if other is not None:
            other._other = self

    def take(self) -> None:
        """Copy the buffers as they are now."""
        sources: list[torch.Tensor] = []
        copies: list[torch.Tensor] = []
        with torch.no_grad():
            for slot in self._slots:
                live = slot.get()
                if live is None:
                    continue
                kept = self._kept.get(slot.fqn)
                if kept is not None and kept.live is live and kept.mark is None:
                    sources.append(live)
                    copies.append(kept.copy)
                elif live.numel() <= SMALL_NUMEL:
                    self._kept[slot.fqn] = _Kept(live, None, live.detach().clone())
                elif not _is_of(kept, live):
                    self._kept[slot.fqn] = self._of_large(slot.fqn, live)
            if copies:
                private_api.copy_many(copies, sources)

    def _of_large(self, fqn: str, live: torch.Tensor) -> _Kept:
        """Return a copy of a large buffer that was written since the last copy."""
        kept = self._kept.get(fqn)
        theirs = self._other._kept.get(fqn) if self._other is not None else None
        if theirs is not None and _is_of(theirs, live):
            return theirs
        if kept is None or kept.live is not live or (theirs is not None and theirs.copy is kept.copy):
            return _Kept(live, Mark(live), live.detach().clone())
        kept.copy.copy_(live)
        return kept._replace(mark=Mark(live))

    def stretched(self) -> set[str]:
        """Return the names of tables that have grown since the copy, and whose first part has changed."""
        found: set[str] = set()
        for slot in self._tables:
            kept, live = self._kept.get(slot.fqn), slot.get()
            if kept is not None and live is not None and live.shape != kept.copy.shape:
                parts = slot.cut(kept.copy), slot.cut(live)
                if parts[0].shape != parts[1].shape or not torch.equal(*parts):
                    found.add(slot.fqn)
        return found

    def by_name(self) -> Mapping[str, torch.Tensor]:
        """Return the copies by the names of the buffers."""
        return {fqn: kept.copy for fqn, kept in self._kept.items()}

    def put_back(self) -> None:
        """Put the copied buffers back into the model.

        A buffer that ``state_dict`` leaves out stays if it has another shape now. It is a table that has grown, and its
        module may have kept the new size in a plain attribute.
        """
        with torch.no_grad():
            for slot in self._slots:
                kept = self._kept.get(slot.fqn)
                if kept is not None and not _has_grown(slot, kept):
                    slot.module._buffers[slot.key] = kept.live
                    kept.live.copy_(kept.copy)
                    if kept.mark is not None:
                        self._kept[slot.fqn] = kept._replace(mark=Mark(kept.live))


def _has_grown(slot: BufferSlot, kept: _Kept) -> bool:
    """Return True if ``slot`` is not in the ``state_dict``, and has a tensor of another shape than its copy."""
    live = slot.get()
    return not slot.persistent and live is not None and live.shape != kept.copy.shape


def _is_of(kept: _Kept | None, live: torch.Tensor) -> bool:
    """Return True if ``kept`` is a copy of a large buffer as it is now."""
    return kept is not None and kept.live is live and kept.mark is not None and kept.mark.fits(live)
