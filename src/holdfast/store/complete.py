"""Layouts of ranks that had no time to publish their second one.

Theory. Optimizer state appears with the first update, so each rank declares it after that update. A rank that died, or
was in doubt, before its second declaration holds (or will hold) the same entries: an entry with the shape of its
parameter lies where the parameter lies, any other is whole. From one complete declaration the others follow, and every
rank that computes this from the same declarations gets the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.store.layout import Box, RankLayout, TensorMeta

PREFIX = "optimizer."


def complete_layouts(layouts: Mapping[int, RankLayout]) -> dict[int, RankLayout]:
    """``layouts`` (by rank) with the optimizer entries that some ranks have not declared yet."""
    known: dict[str, TensorMeta] = {}
    for _, layout in sorted(layouts.items()):
        for meta in layout.tensors:
            if meta.fqn.startswith(PREFIX):
                known.setdefault(meta.fqn, meta)
    return {rank: _completed(layout, known) for rank, layout in layouts.items()}


def _completed(layout: RankLayout, known: Mapping[str, TensorMeta]) -> RankLayout:
    declared = {meta.fqn for meta in layout.tensors}
    missing = [meta for fqn, meta in known.items() if fqn not in declared]
    if not missing:
        return layout
    boxes: dict[str, list[TensorMeta]] = {}
    for meta in layout.tensors:
        boxes.setdefault(meta.fqn, []).append(meta)
    added: list[TensorMeta] = []
    for meta in missing:
        parameter = _parameter(meta.fqn, boxes)
        if parameter is None:
            continue  # a rank of another pipeline stage
        if meta.shape and meta.shape == boxes[parameter][0].shape:
            added += [TensorMeta(meta.fqn, meta.dtype, meta.shape, at.box) for at in boxes[parameter]]
        else:
            added.append(TensorMeta(meta.fqn, meta.dtype, meta.shape, Box.whole(meta.shape)))
    return RankLayout(layout.rank, layout.tensors + tuple(added), layout.world)


def _parameter(fqn: str, boxes: Mapping[str, list[TensorMeta]]) -> str | None:
    """The declared parameter that ``optimizer.<name>.<parameter>.<key>`` belongs to."""
    rest = fqn.removeprefix(PREFIX).partition(".")[2]
    while "." in rest:
        rest = rest.rpartition(".")[0]
        if rest in boxes:
            return rest
    return None
