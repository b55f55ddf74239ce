"""Batches of accelerate in two epochs, and of Holdfast's feed from the same loader; one JSON file per rank."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

from holdfast.frameworks.torch.data.position import TorchFeed, make_source
from holdfast.frameworks.torch.state.rng import Draws

SAMPLES = 46


def main() -> None:
    """Draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seedable", action="store_true")
    given = parser.parse_args()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=given.seedable)
    )
    torch.manual_seed(0)
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(SAMPLES)), 2, shuffle=True))
    torch.manual_seed(accelerator.process_index)  # ranks differ, but their common random choices must not
    stock = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        stock += [batch[0].tolist() for batch in loader]
    feed = TorchFeed(make_source(loader, 5, Draws.same(accelerator.process_index)))
    ours = [feed.draw()[0].tolist() for _ in stock]
    feed = TorchFeed(make_source(loader, 5, Draws.same(accelerator.process_index)))
    feed.seek({"epoch": 1, "batch": 1})
    again = [feed.draw()[0].tolist() for _ in stock[len(stock) // 2 + 1 :]]
    text = json.dumps({"stock": stock, "ours": ours, "again": again})
    Path(f"rank-{accelerator.process_index}.json").write_text(text)
    accelerator.end_training()


if __name__ == "__main__":
    main()
