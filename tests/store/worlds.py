"""Random jobs for the tests: global tensors, the holders of their boxes, and the save of a checkpoint by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import product
from math import prod

import numpy as np
from hypothesis import strategies as st

from holdfast.core.ids import Generation, SaveId
from holdfast.frameworks.common.numpy_state import DTYPE_NAMES, Array, NumpyState, Shard
from holdfast.store.backends.location import Place
from holdfast.store.layouts.layout import (
    Box,
    Catalogue,
    RankLayout,
    Shape,
    TensorMeta,
    cut_box,
    flat_range_boxes,
)
from holdfast.store.layouts.save_plan import plan
from holdfast.store.layouts.shardings import Cuts
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.read.load import load_into
from holdfast.store.write.writer import WrittenShare, write_share

DTYPES = ("bool", "uint8", "int16", "float32", "float64", "complex64")


Part = tuple[Box, Cuts | None]
"""A box, and the regular cut of the tensor that it belongs to, if known."""


@dataclass
class World:
    """Global tensors and the boxes of each rank: ``held[rank]`` is a list of (fqn, box)."""

    size: int
    arrays: dict[str, Array]
    held: list[list[tuple[str, Box]]] = field(default_factory=list)
    cuts: dict[tuple[int, str, Box], Cuts] = field(default_factory=dict)  # what a rank knows of its box

    def state(self, rank: int, *, empty: bool = False) -> NumpyState:
        """Return the arrays of one rank: cut from the global ones, or zeroed as targets of a load."""
        shards = []
        for fqn, box in self.held[rank]:
            whole = self.arrays[fqn]
            piece = np.array(whole[cut(box)], order="C").reshape(box.sizes)
            shards.append(Shard(fqn, whole.shape, box, np.zeros_like(piece) if empty else piece))
        return NumpyState(shards)

    def layouts(self) -> dict[int, RankLayout]:
        """Return what each rank declares."""
        return {
            rank: RankLayout(
                rank,
                tuple(
                    TensorMeta(t.fqn, t.dtype, t.shape, t.box, self.cuts.get((rank, t.fqn, t.box)))
                    for t in self.state(rank).layout(rank, self.size).tensors
                ),
                self.size,
            )
            for rank in range(self.size)
        }

    def catalogue(self) -> Catalogue:
        """Return the catalogue of all ranks."""
        return Catalogue.from_layouts(self.layouts())

    def check(self, state: NumpyState) -> None:
        """Check that every element of ``state`` equals the global tensors, bit for bit."""
        for shard in state.shards:
            expected = np.array(self.arrays[shard.fqn][cut(shard.box)], order="C").reshape(shard.box.sizes)
            assert expected.tobytes() == shard.array.tobytes(), (shard.fqn, shard.box)


def cut(box: Box) -> tuple[slice, ...]:
    """Return a box as an index."""
    return tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))


def random_array(shape: Shape, dtype: str, seed: int) -> Array:
    """Return reproducible content in which no two places are equal by accident."""
    data = np.random.default_rng(seed).bytes(prod(shape) * np.dtype(dtype).itemsize)
    if dtype == "bool":
        return np.array(np.frombuffer(data, np.uint8) % 2 == 0).reshape(shape)
    return np.frombuffer(data, dtype).reshape(shape)


def intervals(length: int, parts: int) -> list[tuple[int, int]]:
    """Return ``length`` cut like torch.chunk, as (offset, size). Parts at the end may be empty."""
    chunk = -(-length // parts) if length else 0
    return [(min(i * chunk, length), max(0, min(chunk, length - i * chunk))) for i in range(parts)]


def grid(shape: Shape, cuts: Mapping[int, int]) -> list[Box]:
    """Return all cells when dimension d is cut into ``cuts[d]`` parts."""
    per_dim = [intervals(n, cuts[d]) if d in cuts else [(0, n)] for d, n in enumerate(shape)]
    return [Box(tuple(o for o, _ in cell), tuple(s for _, s in cell)) for cell in product(*per_dim)]


@st.composite
def on_mesh(draw: st.DrawFn, shape: Shape, size: int, ranks: list[int]) -> list[list[Part]]:
    """Draw the box of each rank on a mesh whose dimensions replicate or cut. Both may cut the same dimension."""
    second = draw(st.sampled_from([n for n in (1, 2, 3) if len(ranks) % n == 0]))
    axes = [draw(st.none() | st.integers(0, len(shape) - 1)) for _ in range(2)]
    boxes: list[list[Part]] = [[] for _ in range(size)]
    for index, rank in enumerate(draw(st.permutations(ranks))):
        place = divmod(index, second)
        cuts = tuple(
            tuple(
                (parts, at)
                for axis, parts, at in zip(axes, (len(ranks) // second, second), place, strict=True)
                if axis == d and parts > 1
            )
            for d in range(len(shape))
        )
        boxes[rank].append((cut_box(shape, cuts), cuts))
    return boxes


@st.composite
def placements(draw: st.DrawFn, shape: Shape, size: int) -> list[list[Part]]:
    """Draw the boxes of one tensor for each rank, with what the rank knows of them. Together they cover the tensor."""
    ranks = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))  # a pipeline stage, or all
    boxes: list[list[Part]] = [[] for _ in range(size)]
    kind = draw(st.sampled_from(["replicated", "sharded", "grid", "strided", "flat", "mesh", "mesh"]))
    if kind == "mesh" and shape and 0 not in shape:
        return draw(on_mesh(shape, size, ranks))
    cells: list[list[Box]]
    if kind == "replicated" or not prod(shape) or not shape:
        cells = [[Box.whole(shape)]]
    elif kind == "sharded":
        cells = [[box] for box in grid(shape, {draw(st.integers(0, len(shape) - 1)): len(ranks)})]
    elif kind == "grid":
        axes = range(min(2, len(shape)))
        cells = [[box] for box in grid(shape, {d: draw(st.integers(1, 2)) for d in axes})]
    elif kind == "strided":
        fine = grid(shape, {0: 2 * len(ranks)})
        cells = [fine[i :: len(ranks)] for i in range(len(ranks))]
    else:
        cells = [flat_range_boxes(shape, o, o + n) for o, n in intervals(prod(shape), len(ranks))]
    # More ranks than cells: replicas; fewer: several cells each
    for index in range(max(len(ranks), len(cells))):
        mine = boxes[ranks[index % len(ranks)]]
        mine += [(box, None) for box in cells[index % len(cells)] if (box, None) not in mine]
    return boxes


@st.composite
def tensors(draw: st.DrawFn, edge_max: int = 7) -> dict[str, Array]:
    """Draw one to five global tensors, also scalars and empty ones."""
    found: dict[str, Array] = {}
    for index in range(draw(st.integers(1, 5))):
        shape = tuple(draw(st.lists(st.integers(0, edge_max), max_size=3)))
        found[f"layer.{index}.weight"] = random_array(shape, draw(st.sampled_from(DTYPES)), index)
    return found


@st.composite
def worlds(
    draw: st.DrawFn, arrays: Mapping[str, Array] | None = None, size_max: int = 5, edge_max: int = 7
) -> World:
    """Draw a job of one to ``size_max`` ranks that hold the tensors in random layouts."""
    size = draw(st.integers(1, size_max))
    world = World(
        size, dict(draw(tensors(edge_max)) if arrays is None else arrays), [[] for _ in range(size)]
    )
    for fqn, array in world.arrays.items():
        for rank, boxes in enumerate(draw(placements(array.shape, size))):
            for box, cuts in boxes:
                world.held[rank].append((fqn, box))
                if cuts is not None:
                    world.cuts[rank, fqn, box] = cuts
    return world


def pipeline(stages: int = 2, replicas: int = 2, edge: int = 64) -> World:
    """Return a job of ``stages`` x ``replicas`` ranks. Stage p holds ``stage{p}.weight``, all ranks hold ``step``."""
    arrays: dict[str, Array] = {
        f"stage{p}.weight": random_array((edge, edge), "float32", p) for p in range(stages)
    }
    arrays["step"] = np.array(7, dtype=np.int64)
    world = World(stages * replicas, arrays)
    for rank in range(world.size):
        fqn = f"stage{rank // replicas}.weight"
        world.held.append([(fqn, Box.whole(arrays[fqn].shape)), ("step", Box((), ()))])
    return world


def replicated(size: int, arrays: Mapping[str, Array]) -> World:
    """Return a job with data parallelism: every rank holds everything."""
    return World(
        size, dict(arrays), [[(f, Box.whole(a.shape)) for f, a in arrays.items()] for _ in range(size)]
    )


def world_at(step: int) -> World:
    """Return a job of two ranks in which every element depends on the step."""
    return replicated(2, {"a": random_array((30, 20), "float32", step), "b": np.full(3, step)})


def newest_of(root: Place, steps: set[int]) -> int:
    """Check that the newest valid state is exactly that of one of ``steps``. Return this step."""
    found = Root(root).newest_valid(deep=True).require()
    assert found.step in steps
    world = world_at(found.step)
    state = world.state(0, empty=True)
    load_into(found.path, state.targets())
    world.check(state)
    return found.step


def save_id(step: int = 12, attempt: int = 0, run: str = "run", n: int = 1) -> SaveId:
    """Return the id of a save."""
    return SaveId(run, Generation(1, n), step, attempt, "periodic")


def save(
    root: Place,
    world: World,
    identity: SaveId,
    *,
    sources: Iterable[int] | None = None,
    copies: int = 1,
    threads: int = 1,
) -> list[WrittenShare]:
    """Let every source write its share, one after the other."""
    catalogue = world.catalogue()
    shares = plan(catalogue, frozenset(range(world.size) if sources is None else sources), copies)
    return [
        write_share(
            root, identity, catalogue, shares, rank, world.state(rank), {"step": identity.step},
            {rank: {"position": rank * 10}}, threads=threads,
        )
        for rank in shares.sources
    ]  # fmt: skip


def dtype_name(array: Array) -> str:
    """Return the name of the array's dtype in the store."""
    return DTYPE_NAMES[array.dtype.name]
