"""Identity of a dataset, found without running its code."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from holdfast.frameworks.common.adapter import DataIdentity
from holdfast.frameworks.torch.data.dataset_identity import identity
from holdfast.frameworks.torch.data.position import TorchFeed, make_source
from holdfast.frameworks.torch.state.rng import Draws

pytestmark = pytest.mark.torch


class Code(Dataset[int]):
    """A dataset of the user, whose samples Holdfast must not read."""

    def __init__(self, fingerprint: str = "") -> None:
        if fingerprint:
            self.fingerprint = fingerprint

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> int:
        raise AssertionError("read")


def content(dataset: Any) -> str:
    """Return the digest of a dataset."""
    found = identity(dataset, shared=False)
    assert found is not None
    return found.content


def pairs(change: int = -1) -> list[Any]:
    """Return the same data in every form, with number ``change`` altered."""
    x = torch.arange(40.0).reshape(20, 2)
    if change >= 0:
        x[change] += 1
    whole = TensorDataset(x, torch.zeros(20))
    folder = SimpleNamespace(samples=[(f"/here/{v}.png", 0) for v in x[:, 0].tolist()], __len__=lambda: 20)
    return [
        whole,
        Subset(whole, range(19, 0, -1)),
        ConcatDataset([whole, TensorDataset(x)]),
        [(x.tolist()[i], "label") for i in range(20)],
        [{"x": row.numpy(), "y": None} for row in x],
        np.asarray(x),
        type("Folder", (), {"samples": folder.samples, "__len__": lambda self: 20})(),
    ]


@pytest.mark.parametrize("kind", range(7))
def test_equal_data_is_equal_and_other_data_is_not(kind: int) -> None:
    known = content(pairs()[kind])
    assert known and known == content(pairs()[kind])
    assert known != content(pairs(change=19)[kind])


def test_code_of_the_user_is_not_run() -> None:
    assert identity(Code(), shared=True) == DataIdentity(9, "", True)
    assert content(Subset(Code(), [1])) == "" == content([Code()]) == content(ConcatDataset([Code(), Code()]))


def test_a_dataset_may_say_who_it_is() -> None:
    assert content(Code("a")) == content(Code("a")) != content(Code("b"))
    assert content(Code("a"))


def test_differences_in_words() -> None:
    one = DataIdentity(9, "a", True)
    assert one.differs(one) == "" == one.differs(DataIdentity(9, "", True))
    assert one.differs(DataIdentity(8, "a", True)) == "9 samples, not 8"
    assert "other ones" in one.differs(DataIdentity(9, "b", True))


def test_what_is_dealt_to_ranks_is_shared() -> None:
    def of(loader: Any) -> DataIdentity | None:
        return TorchFeed(make_source(loader, 0, Draws.same(0))).identity()

    data = Code("a")
    dealt = of(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0)))
    alone = of(DataLoader(data, 2, shuffle=True))
    assert dealt is not None and dealt.shared and alone is not None and not alone.shared

    class Stream(IterableDataset[int]):
        """A dataset without a length."""

        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    assert of(DataLoader(Stream(), 2)) is None and of([1, 2]) is None
