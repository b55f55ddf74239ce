"""The memory tier of one session, without other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import CheckpointInvalid, CheckpointMismatch, StateError
from holdfast.frameworks.torch.adapter import TorchAdapter
from holdfast.session.checkpoints.memory_tier import MemoryTier, cost_of_a_loss
from holdfast.session.steps.participant import StepParticipant
from holdfast.session.steps.update_log import UpdateRecord
from holdfast.store.shared_memory.update_log import Gradient, Update, reachable


def test_a_spare_asks_other_nodes_for_the_states_of_the_rank_that_it_became(tmp_path: Path) -> None:
    adapter: Any = SimpleNamespace(rank=0, world_size=4)
    asked: list[tuple[int, int]] = []

    def pull(rank: int, step: int) -> bool:
        asked.append((rank, step))
        return False

    tier = MemoryTier(
        StepParticipant(adapter, None), adapter, tmp_path, 1, lambda state, step: {}, dict, pull
    )
    adapter.rank = 2
    tier.know_rank()
    with pytest.raises(CheckpointInvalid, match="no state of rank 2 at step 7"):
        tier.verify(7)
    assert asked == [(2, 7)]


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "width"), [(torch.float16, 4), (torch.float32, 4), (torch.float32, 2), (torch.bfloat16, 2)]
)
def test_a_state_of_another_model_is_refused_before_anything_changes(
    tmp_path: Path, kind: torch.dtype, width: int
) -> None:
    """The other model may have the same size. Regression: its bytes were read as numbers of another type."""

    def tier_of(net: nn.Module) -> MemoryTier:
        adapter = TorchAdapter(net, torch.optim.SGD(net.parameters()), None, None, {}, seed=0)
        return MemoryTier(
            StepParticipant(adapter, None),
            adapter,
            tmp_path,
            1,
            lambda s, step: {**s.values, "session": {}},
            dict,
        )

    first = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    tier_of(first).start(0)
    again = nn.Linear(4, 3, bias=False).to(torch.bfloat16)
    assert tier_of(again).load(0).step == 0
    assert torch.equal(again.weight, first.weight)
    other = nn.Linear(width, 3, bias=False).to(kind)
    before = other.weight.detach().clone()
    with pytest.raises(CheckpointMismatch, match=r"weight is BF16 \[3, 4\] in memory-00000-0, and"):
        tier_of(other).load(0)
    assert torch.equal(other.weight, before)


class Changed:
    """Updates of an optimizer whose weights the script may have changed."""

    disturbed = False
    settled = 0

    def why_not(self) -> str:
        return ""

    def rebuilds(self, fqn: str) -> bool:
        return fqn == "weight"

    def settle(self) -> None:
        self.disturbed = False
        self.settled += 1

    def rest(self) -> None:
        pass

    def undisturbed(self) -> bool:
        return not self.disturbed

    def take(self, step: int) -> Update:
        return Update(step, b"{}", (Gradient("weight", "F32", (4,), memoryview(bytes(16))),))

    def foretell(self, update: Update) -> None:
        pass

    def as_foretold(self) -> str:
        return ""

    def replay(self, updates: Sequence[Update]) -> None:
        raise AssertionError


def test_changes_are_followed_only_while_some_box_has_one_holder(tmp_path: Path) -> None:
    record, updates = record_in(tmp_path, every=4)
    record.allow(())
    record.kept(1, 0.0)
    record.start(1)
    assert updates.settled == 2, "at the start, and with its state in memory"
    record.allow({"weight"})
    for step in (1, 2):
        record.note(step)
    assert reachable(tmp_path, 0, (1,)) == (), "what the script changed since then is not known"
    record.kept(3, 0.0)
    assert updates.settled == 3
    for step in (3, 4):
        record.note(step)
    assert reachable(tmp_path, 0, (3,)) == (4, 5)


def record_in(where: Path, every: int) -> tuple[UpdateRecord, Changed]:
    """Return a record that has started at step 0, with its state in memory."""
    updates = Changed()
    adapter: Any = SimpleNamespace(rank=0, world_size=4, updates=updates)
    record = UpdateRecord(adapter, every)
    record.know(where, 0)
    record.start(0)
    record.kept(0, 0.0)
    return record, updates


def test_nothing_counts_before_an_update_was_made_again(tmp_path: Path) -> None:
    record, _ = record_in(tmp_path, 4)
    record.note(0)
    assert reachable(tmp_path, 0, (0,)) == ()
    record.note(1)
    assert reachable(tmp_path, 0, (0,)) == (1, 2)
    for step in (2, 3, 4, 5):  # no state is kept, so entries that the state of step 0 needs stay
        record.note(step)
    assert reachable(tmp_path, 0, (0,)) == (1, 2, 3, 4) and record.full(4) and not record.full(3)
    record.kept(6, 0.0)
    record.note(6)
    assert reachable(tmp_path, 0, (6,)) == (7,)


def test_weights_that_the_script_changes_end_the_log(tmp_path: Path) -> None:
    record, updates = record_in(tmp_path, 4)
    for step in (0, 1, 2):
        record.note(step)
    updates.disturbed = True
    with pytest.raises(StateError, match=r"has changed weights .* at step 3"):
        record.require_undisturbed(3)
    record.note(3)
    assert reachable(tmp_path, 0, (0,)) == ()
    assert "changed weights or state of the optimizer itself before step 3" in record.allow({"weight"})


def test_what_a_kept_state_has_of_the_script_no_log_has(tmp_path: Path) -> None:
    """The state kept at step 2 contains the script's change.

    A rank without that state must not be rebuilt from its log.
    """
    record, updates = record_in(tmp_path, 2)
    record.note(0)
    record.note(1)
    updates.disturbed = True
    record.kept(2, 0.0)
    with pytest.raises(StateError, match="has changed weights"):
        record.require_undisturbed(2)
    record.note(2)
    record.require_undisturbed(3)
    assert reachable(tmp_path, 0, (2,)) == (3,)


def test_what_is_done_before_the_first_update_makes_the_state_too_old(tmp_path: Path) -> None:
    record, updates = record_in(tmp_path, 2)
    updates.disturbed = True  # the script has loaded weights after session(), for example
    record.note(0)
    record.note(1)
    assert reachable(tmp_path, 0, (0,)) == ()
    record.kept(2, 0.0)
    for step in (2, 3):
        record.note(step)
    assert reachable(tmp_path, 0, (2,)) == (3, 4)


def test_one_rank_logs_nothing(tmp_path: Path) -> None:
    adapter: Any = SimpleNamespace(rank=0, world_size=1, updates=Changed())
    record = UpdateRecord(adapter, 2)
    record.know(tmp_path, 0)
    record.start(0)
    record.kept(0, 0.0)
    for step in (0, 1):
        record.note(step)
    assert "no other rank" in record.allow({"weight"}) and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("every", "unlogged", "text"),
    [
        (4, "", "every 4 steps, with the gradients since: a lost worker costs no step"),
        (
            100,
            "",
            "of the first 64 steps since: a lost worker costs no step, and later at most 100 steps, done",
        ),
        (
            4,
            "it communicates",
            "a lost worker costs at most 4 steps, done again, as no gradients are logged: it",
        ),
        (
            -1,
            None,
            "costs no step, or, where the log of rank 0 says that no gradients are logged, the steps since",
        ),
        (0, "", "a lost worker costs the steps since the last checkpoint"),
    ],
)
def test_what_a_loss_costs_in_words(every: int, unlogged: str | None, text: str) -> None:
    assert text in cost_of_a_loss(True, 1_000_000, every, unlogged)


@pytest.mark.parametrize(
    ("alone", "why"),
    [({"weight"}, ""), (set(), ""), ({"weight", "state.ema"}, "state.ema is neither a weight nor state of")],
)
def test_a_box_that_no_update_makes_is_named(tmp_path: Path, alone: set[str], why: str) -> None:
    record, _ = record_in(tmp_path, 2)
    for step in (0, 1):
        record.note(step)
    assert record.allow(alone).startswith(why) and bool(record.allow(alone)) == bool(why)
    assert bool(reachable(tmp_path, 0, (0,))) == (alone == {"weight"})
