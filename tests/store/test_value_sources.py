"""The ranks that are asked for plain values: the fewest that hold everything that the asking rank holds."""

from __future__ import annotations

from holdfast.store.layouts.layout import Box, Catalogue, RankLayout, TensorMeta
from holdfast.store.layouts.value_sources import speakers


def catalogue(*held: str) -> Catalogue:
    """Return a catalogue.

    Each argument lists a rank's tensors: a letter each, with a digit for the half that is held.
    """
    layouts = {}
    for rank, names in enumerate(held):
        metas = []
        for name in names.split():
            box = Box((2 * int(name[1:]),), (2,)) if name[1:] else Box((0,), (4,))
            metas.append(TensorMeta(name[0], "F32", (4,), box))
        layouts[rank] = RankLayout(rank, tuple(metas), len(held))
    return Catalogue.from_layouts(layouts)


def test_a_copy_speaks_for_its_stage() -> None:
    stages = catalogue("a b", "a b", "c", "c")
    assert speakers(stages, {"c"}, range(4)) == (2,)
    assert speakers(stages, {"c"}, (0, 1, 3)) == (3,)
    assert speakers(stages, {"a", "b"}, (1, 2, 3)) == (1,)


def test_a_rank_with_several_stages_asks_one_of_each_the_larger_part_first() -> None:
    assert speakers(catalogue("a", "b c", "b c"), {"a", "b", "c", "new"}, range(3)) == (1, 0)


def test_shards_know_the_names_of_the_whole() -> None:
    assert speakers(catalogue("a0", "a1"), {"a"}, (0, 1)) == (0,)


def test_somebody_speaks_for_a_model_that_nobody_knows() -> None:
    assert speakers(catalogue("a", "a"), {"x"}, (1,)) == (1,)
    assert speakers(catalogue("a"), {"a"}, ()) == ()
