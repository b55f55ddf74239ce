"""Retention of one run among others in a root: the run's origin counts, and checkpoints of other runs stay."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from holdfast.errors import CheckpointInvalid
from holdfast.store.manage.checkpoint_root import Root
from holdfast.store.manage.lineage import ANCESTORS_MAX, Lineage, lineage_of
from tests.store.test_checkpoint_root import WORLD, wreck
from tests.store.worlds import save, save_id


def name(step: int, run: str) -> str:
    """Return the name of a save."""
    return save_id(step, run=run).directory()


def held(root: Path, steps: range, run: str, age_s: float = 0.0) -> None:
    """Save checkpoints of a run."""
    for step in steps:
        save(root, WORLD, save_id(step, run=run))
        at = time.time() - age_s
        os.utime(root / name(step, run), (at, at))


def test_an_ancestor_counts_up_to_where_it_was_left() -> None:
    one = Lineage("one")
    assert one.holds(name(7, "one")) and not one.holds(name(7, "two")) and not one.holds("lost+found")
    two = Lineage.of_run("two", {"lineage": one.ancestors}, name(7, "one"))
    assert two == Lineage("two", {"one": 7})
    assert two.holds(name(7, "one")) and not two.holds(name(8, "one")) and two.holds(name(9, "two"))
    three = Lineage.of_run("three", {"lineage": two.ancestors}, name(9, "two"))
    assert list(three.ancestors.items()) == [("two", 9), ("one", 7)]
    # A restart within the run, from its own checkpoint or from memory, changes no lineage.
    for where in (name(12, "three"), "memory@12", "peers"):
        assert Lineage.of_run("three", {"lineage": three.ancestors}, where) == three


@pytest.mark.parametrize("session", [{}, {"lineage": None}, {"lineage": [1]}, {"lineage": {"x": "y"}}])
def test_checkpoints_that_say_nothing_of_it_are_ancestors_all_the_same(session: dict[str, object]) -> None:
    assert Lineage.of_run("new", session, name(5, "old")) == Lineage("new", {"old": 5})


def test_it_does_not_grow_for_ever() -> None:
    found = Lineage("run-0")
    for number in range(1, 3 * ANCESTORS_MAX):
        found = Lineage.of_run(
            f"run-{number}", {"lineage": found.ancestors}, name(number, f"run-{number - 1}")
        )
    assert len(found.ancestors) == ANCESTORS_MAX
    assert next(iter(found.ancestors)) == f"run-{3 * ANCESTORS_MAX - 2}"


def test_of_a_checkpoint_without_a_session(tmp_path: Path) -> None:
    held(tmp_path, range(5, 6), "run")
    assert lineage_of(tmp_path / name(5, "run")) == Lineage("run")
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        lineage_of(tmp_path / name(6, "run"))


def test_pruning_for_a_lineage_leaves_others_alone(tmp_path: Path) -> None:
    """Other runs may be of any age and have any steps."""
    held(tmp_path, range(90, 93), "other", age_s=1e6)
    held(tmp_path, range(1, 4), "base", age_s=1e6)
    held(tmp_path, range(3, 7), "mine")
    root = Root(tmp_path)
    done = root.prune(2, lineage=Lineage("mine", {"base": 2}))
    assert sorted(done.removed) == sorted(
        [name(1, "base"), name(2, "base"), name(3, "mine"), name(4, "mine")]
    )
    assert [v.name for v in root.list()] == [
        *(name(step, "other") for step in (92, 91, 90)), name(6, "mine"), name(5, "mine"), name(3, "base"),
    ]  # fmt: skip
    assert root.prune(1, lineage=Lineage("nobody")).removed == ()
    assert root.newest_valid().require().step == 92


def test_wrecks_of_others_are_swept_when_old_and_damaged_ones_stay(tmp_path: Path) -> None:
    old, young = wreck(tmp_path, 5, age_s=10_000, run="gone"), wreck(tmp_path, 6, run="other")
    held(tmp_path, range(8, 9), "other", age_s=10_000)
    (tmp_path / name(8, "other") / "rank-r00000.json").unlink()
    past = wreck(tmp_path, 9, run="mine")
    held(tmp_path, range(10, 11), "mine")
    assert set(Root(tmp_path).prune(1, lineage=Lineage("mine")).removed) == {old.name, past.name}
    assert young.is_dir() and (tmp_path / name(8, "other")).is_dir()


def test_what_was_written_last_need_not_be_the_newest(tmp_path: Path) -> None:
    held(tmp_path, range(90, 92), "other", age_s=100)
    held(tmp_path, range(1, 4), "mine")
    root = Root(tmp_path)
    assert root.written_last(root.list()).name == name(3, "mine")
