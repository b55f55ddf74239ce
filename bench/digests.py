"""Cost of the comparison of state copies for one rank: the slice of a step, and the whole state before a checkpoint.

    python bench/digests.py [--size 10m] [--ranks 4] [--every 50]

The state is the drill's model with AdamW, held by four ranks of a data-parallel job. Between two slices, as much other
memory is read as a step would read, so that the cache holds nothing of the state. Prints markdown.
"""

from __future__ import annotations

import argparse
import time

import torch

from holdfast.drill.model import SIZES, Gpt
from holdfast.frameworks.torch.state.state import TorchState
from holdfast.frameworks.torch.state.tensor_digest import digest_of
from holdfast.store.layouts.box import Extent
from holdfast.store.layouts.layout import Catalogue
from holdfast.store.layouts.replica_digests import ReplicaCopies


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="10m")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--every", type=int, default=50)
    given = parser.parse_args()
    torch.set_num_threads(1)
    model = Gpt(SIZES[given.size])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = TorchState(model, {"0": optimizer})
    collected = state.collect()
    layouts = {rank: collected.layout(rank, given.ranks) for rank in range(given.ranks)}
    began_s = time.perf_counter()
    copies = ReplicaCopies(Catalogue.from_layouts(layouts), 0, lambda fqn: True, given.every)
    planned_s = time.perf_counter() - began_s
    elsewhere = torch.ones(40_000_000)

    def once(parts: list[tuple[object, list[Extent]]]) -> float:
        elsewhere.sum()
        began_s = time.perf_counter()
        for _, extents in parts:
            digest_of(collected, extents)
        return time.perf_counter() - began_s

    for turn in range(given.every):
        once(list(copies.turn(turn)))
    slices = sorted(once(list(copies.turn(turn))) for turn in range(4 * given.every))
    wholes = sorted(once(list(copies.whole())) for _ in range(15))
    size_mb = sum(group.size_bytes for group in copies.groups) / 1e6
    print(f"{size_mb:.0f} MB of weights and moments, {sum(len(g.extents) for g in copies.groups)} boxes")
    print("| milliseconds | median | p90 |\n|---|---|---|")
    for name, times in (("the slice of a step", slices), ("all of it", wholes)):
        print(f"| {name} | {times[len(times) // 2] * 1e3:.3f} | {times[len(times) * 9 // 10] * 1e3:.3f} |")
    began_s = time.perf_counter()
    state.collect()
    print(
        f"| collecting the state, every {given.every} steps | {(time.perf_counter() - began_s) * 1e3:.3f} | |"
    )
    print(f"| planning, once per layout | {planned_s * 1e3:.3f} | |")


if __name__ == "__main__":
    main()
