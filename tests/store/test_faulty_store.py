"""Every write of a save fails once, space runs out, power is lost: a store in memory simulates these faults."""

from __future__ import annotations

import errno
import threading

import pytest

from holdfast.errors import CheckpointInvalid, StoreWriteError, UsageError
from holdfast.store.backends.faulty_store import FaultyStore
from holdfast.store.backends.registry import open_attempt, open_store
from holdfast.store.manage.checkpoint_root import Root, resolve
from tests.store.worlds import newest_of, save, save_id, world_at


def with_one_save(seed: int = 0) -> FaultyStore:
    """Return a store that holds step 1."""
    store = FaultyStore("it", seed=seed)
    save(store.path, world_at(1), save_id(1))
    return store


def writes_of_a_save() -> int:
    """Return how many writes one save takes."""
    store = with_one_save()
    before = store.writes
    save(store.path, world_at(2), save_id(2))
    return store.writes - before


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_every_write_that_fails_is_a_typed_error_and_a_second_try_succeeds(code: int) -> None:
    count = writes_of_a_save()
    assert count > 15
    for number in range(1, count + 1):
        store = with_one_save()
        store.fails = {store.writes + number: code}
        with pytest.raises(StoreWriteError, match="cannot write faulty://it"):
            save(store.path, world_at(2), save_id(2))
        newest_of(store.path, {1, 2})
        save(store.path, world_at(2), save_id(2))
        assert newest_of(store.path, {2}) == 2


def test_power_lost_at_every_write() -> None:
    """Saves that were sealed before stay. The save in progress exists exactly or not at all."""
    ends = {1: 0, 2: 0}
    for number in range(1, writes_of_a_save() + 2):
        for seed in range(3):
            store = with_one_save(seed)
            store.fails = {store.writes + number: errno.EIO}
            sealed = False
            try:
                sealed = save(store.path, world_at(2), save_id(2))[-1].sealed
            except StoreWriteError:
                pass
            store.fails = {}
            store.lose_power()
            ends[newest_of(store.path, {2} if sealed else {1, 2})] += 1
            save(store.path, world_at(3), save_id(3))
            store.lose_power()
            assert newest_of(store.path, {3}) == 3
    assert ends[1] and ends[2]


def test_no_room_no_rights() -> None:
    small = FaultyStore("small", room_size_bytes=3000)
    with pytest.raises(StoreWriteError, match="No space left on device") as full:
        save(small.path, world_at(1), save_id(1))
    assert "free some space" in full.value.hint
    closed = FaultyStore("closed", read_only=True)
    for act in (open_store(closed.path).probe, lambda: save(closed.path, world_at(1), save_id(1))):
        with pytest.raises(StoreWriteError, match="Permission denied"):
            act()
    assert Root(closed.path).names() == []


def test_a_slow_store_never_shows_half_a_save() -> None:
    store = FaultyStore("slow", delay_s=0.001)
    save(store.path, world_at(1), save_id(1))
    writer = threading.Thread(target=save, args=(store.path, world_at(2), save_id(2)))
    writer.start()
    seen = []
    while writer.is_alive():
        seen.append(newest_of(store.path, {1, 2}))
    writer.join()
    assert seen == sorted(seen) and newest_of(store.path, {2}) == 2


def test_what_is_held_is_not_removed() -> None:
    store = with_one_save()
    save(store.path, world_at(2), save_id(2))
    name = save_id(1).directory()
    with open_attempt(store.path / name) as reader:
        assert reader.hold() and reader.hold()
        assert Root(store.path).prune(1, grace_s=0).spared == {name: "is being read or written"}
    assert Root(store.path).prune(1, grace_s=0).removed == (name,)
    with pytest.raises(CheckpointInvalid, match="does not exist"):
        open_attempt(store.path / name)


def test_the_newest_of_a_name_is_found() -> None:
    first, second = with_one_save(), FaultyStore("it")
    assert open_store("faulty://it") is second and Root("faulty://it").names() == []
    save(second.path, world_at(2), save_id(2))
    assert resolve("faulty://it@2").name == save_id(2).directory() and first.names() == [
        save_id(1).directory()
    ]
    for place in ("faulty://other", "faulty://it/deeper"):
        with pytest.raises(UsageError, match="no FaultyStore"):
            open_store(place)
