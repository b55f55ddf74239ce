"""Planning at scale: CPU time and memory of one rank of a simulated job.

``python bench/planning.py [--ranks 4096] [--tensors 2000] [--many-shapes]`` prints a markdown table. "plan" is the
whole work of a rank from the bytes of the catalogue to the list of its writes. "join" makes the catalogue from the
declarations of all ranks, once per generation. Each is measured in a new child process: CPU seconds, and the rise of
the resident memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.store.layouts.layout import Box, Catalogue, Declaration, RankLayout, Row, TensorMeta, cut_box
from holdfast.store.layouts.save_plan import SavePlan, plan
from holdfast.store.layouts.shardings import Cuts

HIDDEN = 8192
SHAPES = (
    (HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN,), (HIDDEN // 8, HIDDEN),
    (3 * HIDDEN + 5, HIDDEN),
)  # fmt: skip
"""Weights of a transformer; the last one cannot be cut evenly."""

Steps = dict[int, tuple[tuple[int, int], ...]]


def ddp(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of a layout in which every rank holds everything."""
    return {}


def hsdp(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of shards over 64 ranks, replicated."""
    return {0: ((64, rank % 64),)}


def hsdp_wide(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of shards over half of the ranks; the other half holds them again."""
    return {0: ((ranks // 2, rank % (ranks // 2)),)}


def fsdp(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of shards over all ranks."""
    return {0: ((ranks, rank),)}


def tensor_data(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of tensor parallelism over 8 ranks, by rows and by columns, replicated by data parallelism."""
    return {number % 2: ((8, rank % 8),)}


def two_dimensions(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of tensor parallelism over 8 ranks, with each part sharded over all other ranks.

    The same dimension is cut twice.
    """
    steps: Steps = {number % 2: ((8, rank % 8),)}
    steps[0] = (*steps.get(0, ()), (ranks // 8, rank // 8))
    return steps


def pipeline(rank: int, ranks: int, number: int, tensors: int) -> Steps | None:
    """Return the cuts of 16 pipeline stages, each tensor parallel over 8 ranks and replicated."""
    stage = rank * 16 // ranks
    return {number % 2: ((8, rank % 8),)} if number * 16 // tensors == stage else None


KINDS: dict[str, Callable[[int, int, int, int], Steps | None]] = {
    "ddp": ddp, "hsdp": hsdp, "hsdp_wide": hsdp_wide, "fsdp": fsdp, "tensor_data": tensor_data,
    "two_dimensions": two_dimensions, "pipeline": pipeline,
}  # fmt: skip


def cells_of(
    kind: str, rank: int, ranks: int, number: int, tensors: int, shape: tuple[int, ...]
) -> Cuts | None:
    """Return how the tensor of this number is cut on this rank. None: the rank does not hold it."""
    steps = KINDS[kind](rank, ranks, number, tensors)
    if steps is None:
        return None
    return tuple(tuple(step for step in steps.get(d, ()) if step[0] > 1) for d in range(len(shape)))


def declare(kind: str, rank: int, ranks: int, tensors: int, *, many: bool) -> Declaration:
    """Return the declaration that one rank publishes."""
    metas = [TensorMeta("step", "I64", (), Box((), ()))]
    for number in range(tensors):
        shape = SHAPES[number % len(SHAPES)]
        if many:  # no two tensors have the same shape, so ranks share nothing between tensors
            shape = (shape[0] + number, *shape[1:])
        cuts = cells_of(kind, rank, ranks, number, tensors, shape)
        if cuts is not None:
            metas.append(TensorMeta(f"layers.{number:04d}.weight", "F32", shape, cut_box(shape, cuts), cuts))
    return RankLayout(rank, tuple(metas), ranks).declaration()


def declared(kind: str, ranks: int, tensors: int, *, many: bool) -> dict[int, Declaration]:
    """Return the decoded declarations of all ranks.

    One rank per table is built; the cells of the others follow from it.
    """
    out: dict[int, Declaration] = {}
    rows: tuple[Row, ...] = ()
    for rank in range(ranks):
        if rank % (ranks // 16) == 0:  # at the first rank of each pipeline stage
            first = declare(kind, rank, ranks, tensors, many=many)
            rows = rows if rows == first.tensors else first.tensors
            some = {row.place: row for row in rows}
        cells = []
        for place in range(len(first.cells)):
            row = some[place]
            number = int(row.fqn.split(".")[1]) if row.shape else 0
            cells.append(cells_of(kind, rank, ranks, number, tensors, row.shape) or ())
        out[rank] = Declaration(rank, ranks, tuple(cells), (), rows)
    assert out[ranks - 1] == declare(kind, ranks - 1, ranks, tensors, many=many)
    return out


def memory_bytes(name: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def measured(work: Callable[[], Any]) -> tuple[Any, float, int]:
    """Run ``work``. Return its result, the CPU seconds, and the rise of the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak (VmHWM)
    before, began_s = memory_bytes("VmRSS"), time.process_time()
    result = work()
    return result, time.process_time() - began_s, memory_bytes("VmHWM") - before


def join(file: Path, kind: str, ranks: int, tensors: int, *, many: bool) -> dict[str, Any]:
    """Join the declarations, write the catalogue to ``file``, and return the measurements."""
    given = declared(kind, ranks, tensors, many=many)
    data, cpu_s, memory = measured(lambda: Catalogue.from_declarations(given).to_json())
    file.write_bytes(data)
    return {"join": cpu_s, "join_memory": memory, "catalogue": len(data)}


def share(file: Path, ranks: int, dead: int) -> dict[str, Any]:
    """Compute the share of one rank in the middle from the encoded catalogue, and return the measurements."""
    data = file.read_bytes()
    # loads what numpy imports at its first use, which is no cost of the planner
    np.add.at(np.zeros(1), [0], 1)

    def work() -> tuple[SavePlan, int]:
        found = plan(Catalogue.from_json(data), frozenset(range(dead, ranks)))
        return found, len(found.items(ranks // 2))

    (found, items), cpu_s, memory = measured(work)
    return {"plan": cpu_s, "memory": memory, "items": items, "complete": found.complete}


def main() -> None:
    """Print the table, or (in a child) one measurement."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--tensors", type=int, default=2000)
    parser.add_argument("--dead", type=int, default=1)
    parser.add_argument("--many-shapes", action="store_true", help="each tensor has a shape of its own")
    parser.add_argument("--child", nargs=3, metavar=("PART", "KIND", "FILE"))
    arguments = parser.parse_args()
    if arguments.child:
        part, kind, file = arguments.child
        if part == "join":
            sizes = arguments.ranks, arguments.tensors
            print(json.dumps(join(Path(file), kind, *sizes, many=arguments.many_shapes)))
        else:
            print(json.dumps(share(Path(file), arguments.ranks, arguments.dead)))
        return
    print(f"{arguments.ranks} ranks x {arguments.tensors} tensors, {arguments.dead} dead\n")
    print("| layout | plan, s | MB | join, s | MB | catalogue, MB | parts |\n|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        for kind in KINDS:
            found: dict[str, Any] = {}
            for part in ("join", "share"):
                command = [sys.executable, *sys.argv, "--child", part, kind, f"{place}/catalogue"]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found |= json.loads(done.stdout)
            print(
                f"| {kind} | {found['plan']:.3f} | {found['memory'] / 1e6:.0f} | {found['join']:.3f} "
                f"| {found['join_memory'] / 1e6:.0f} | {found['catalogue'] / 1e6:.2f} | {found['items']} |"
            )


if __name__ == "__main__":
    main()
