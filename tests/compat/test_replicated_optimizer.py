"""``ReplicatedOptimizer`` of the Megatron chapter: imported without Megatron, refused by name where it cannot serve."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from holdfast.compat import framework_ttp as ttp
from holdfast.compat import megatron_ttp as mega
from holdfast.compat import replicated_optimizer
from holdfast.compat.megatron_ttp import ReplicatedOptimizer
from holdfast.errors import UnsupportedError


def test_the_chapter_s_import_needs_no_megatron() -> None:
    import holdfast.compat.install  # noqa: F401

    import mindio_ttp.megatron_ttp  # isort: skip  # type: ignore[import-not-found]

    assert mindio_ttp.megatron_ttp.ReplicatedOptimizer is ReplicatedOptimizer


def stand_in(monkeypatch: pytest.MonkeyPatch, base: type | None) -> None:
    """Install a fake ``megatron.core`` with this class, or a fake Megatron without it."""
    replicated_optimizer._over_megatron.cache_clear()
    for name in ("megatron", "megatron.core", "megatron.core.optimizer"):
        module = ModuleType(name)
        module.__path__ = []
        module.__spec__ = SimpleNamespace(name=name)  # type: ignore[assignment]
        monkeypatch.setitem(sys.modules, name, module)
    if base is not None:
        there: Any = ModuleType(replicated_optimizer._CORE)
        there.DistributedOptimizer = base
        monkeypatch.setitem(sys.modules, replicated_optimizer._CORE, there)


class DistributedOptimizer:
    """The attributes of Megatron's class that are read."""

    def __init__(self, copies: int) -> None:
        self.ddp_config = SimpleNamespace(num_distributed_optimizer_instances=copies)


def test_it_is_megatron_s_own_and_counts_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, DistributedOptimizer)
    made: Any = ReplicatedOptimizer(2)
    assert isinstance(made, DistributedOptimizer) and isinstance(made, ReplicatedOptimizer)
    assert hasattr(made, "increase_step") and made.current_step == 0
    made.increase_step()
    assert made.current_step == 1


def test_shards_with_one_holder_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, DistributedOptimizer)
    with pytest.raises(UnsupportedError, match="1 holder, where 2 are needed") as caught:
        ReplicatedOptimizer(1)
    assert "--num-distributed-optimizer-instances 2" in caught.value.hint


def test_a_megatron_without_copies_of_shards_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, None)
    with pytest.raises(UnsupportedError, match="this Megatron keeps one copy of each shard"):
        ReplicatedOptimizer(2)


def test_what_the_chapter_s_handlers_cannot_save_is_told_with_the_first_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in(monkeypatch, DistributedOptimizer)
    monkeypatch.setattr(ttp, "_state", ttp._State())
    ttp.ttp_register_save_ckpt_handler(mega.ttp_save_checkpoint)
    optimizer: Any = ReplicatedOptimizer(2)
    for whose in (optimizer, SimpleNamespace(chained_optimizers=[optimizer])):
        with pytest.raises(UnsupportedError, match="ReplicatedOptimizer keeps a part of it on each rank"):
            ttp.ttp_set_ckpt_args((1, ["model"], whose, None))
    with pytest.raises(UnsupportedError, match="2 model chunks"):
        ttp.ttp_set_ckpt_args((1, ["model", "model"], None, None))
    with pytest.raises(UnsupportedError, match="keeps a part of it on each rank"):
        mega.load_checkpoint(["model"], optimizer)
    ttp.ttp_set_ckpt_args((1, ["model"], None, None))
