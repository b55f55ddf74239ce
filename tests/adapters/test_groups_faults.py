"""Peers that die, stop or come late: survivors leave their collectives correctly, and no wrong result is accepted."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast.frameworks.torch.comm.comm_state import BURIALS_S, CommState
from tests.adapters import faults
from tests.adapters.worlds import Worlds

pytestmark = [pytest.mark.torch, pytest.mark.processes]


def _survivors(results: list[dict[str, Any]], victim: int) -> list[Any]:
    failed = [r for r in results if "error" in r or "hung" in r]
    assert not failed, "\n".join(str(r.get("error", r)) for r in failed)
    found: list[Any] = [r["value"] for r in results if "value" in r and r["rank"] != victim]
    return found


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("operation", list(faults.OPERATIONS))
def test_survivors_come_out(worlds: Worlds, operation: str, how: str) -> None:
    """The group's own timeout is 300 s. A world that has not left after 40 s fails as hung."""
    for trial, (shield, numel) in enumerate([(True, 1), (False, 1), (True, 50_000)]):
        victim = trial + 1
        results = worlds.run(
            faults.lose_a_peer,
            4,
            push=True,
            operation=operation,
            victim=victim,
            how=how,
            numel=numel,
            shield=shield,
            seed=trial,
        )
        survivors = _survivors(results, victim)
        assert len(survivors) == 3
        # A call that completed just before the flag was set also ends the loop. The next call shows the fault.
        assert {s["end"] for s in survivors} <= ({"poisoned"} if shield else {"poisoned", "PeerLost"})
        assert {s["again"] for s in survivors} == {"completed" if shield else "PeerLost"}


def test_the_first_error_frees_all_without_a_control_plane(worlds: Worlds) -> None:
    """The rank that sees the death closes its own connections, so the fault spreads through the groups themselves."""
    results = worlds.run(
        faults.lose_a_peer, 4, operation="ring", victim=0, how="kill", numel=64, shield=False, seed=1
    )
    assert len(_survivors(results, 0)) == 3


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_is_replaced_and_nobody_can_tell(worlds: Worlds, victim: int) -> None:
    undisturbed = worlds.values(faults.replaced, 4, victim=victim, kill_at=99, steps=8)
    results = worlds.run(faults.replaced, 4, push=True, replace=True, victim=victim, kill_at=4, steps=8)
    assert {"rank": victim, "signal": 9} in results
    values = [r["value"] for r in results if "value" in r]
    assert sum(v["newcomer"] for v in values) == 1
    assert [v["digest"] for v in values] == [v["digest"] for v in undisturbed]


def test_answers_of_a_process_in_every_mode(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds.values(faults.answers_when_poisoned)):
        assert found == {
            "wrong sizes": "RuntimeError",
            "wrong type": "TypeError",
            "vote": "[2, 1]",
            "sound after bugs": "True",
            "loopback vote": "PeerLost",
            "loopback gather": f"[{rank}, {rank}]",
            "loopback broadcast": "['mine']",
            "live again": "[2]",
            "sealed": "StepError",
            "sealed vote": "[2]",
            "outside": "PeerLost",
            "outside objects": "PeerLost",
            "inside": "None",
            "inside objects": f"[{rank}, {rank}]",
            "poisoned vote": "PeerLost",
            "reason": "first",
            "reports of own poison": "[]",
            "same generation": "GroupError",
            "next generation": "None",
            "sound": "[0, 1]",
        }


def test_a_second_fault_ends_a_rebuild_and_the_next_generation_works(worlds: Worlds) -> None:
    first, second = worlds.values(faults.second_fault)
    assert "second fault" in first["stopped"]
    assert first["poisoned"] == "True"
    assert first["sum"] == second["sum"] == "2.0"


@pytest.mark.parametrize("how", ["kill", "stop"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_peer_that_is_lost_while_groups_connect_holds_nobody(worlds: Worlds, victim: int, how: str) -> None:
    """The loss comes inside gloo's connecting, which cannot be interrupted. A world that hangs fails after 40 s."""
    results = worlds.run(faults.lost_while_connecting, 3, victim=victim, how=how)
    survivors = _survivors(results, victim)
    assert len(survivors) == 2
    if how == "stop":  # a kill closes the sockets, which gloo may notice on its own
        assert all(f"rank {victim} is gone" in text for text in survivors)


def test_broken_groups_leave_nothing_behind(worlds: Worlds) -> None:
    """Neither a descriptor nor a thread remains, of Holdfast or of gloo."""
    for found in worlds.values(faults.rebuilt_often, 3, generations=5):
        assert found == [found[0]] * 5


@pytest.mark.parametrize("when", ["block", "between"])
def test_what_a_lost_generation_began_never_counts_as_done(worlds: Worlds, when: str) -> None:
    """Regression: in the next block the wait returned, as if the data had come, and the step was committed."""
    first, second = worlds.values(faults.waited_for_later, 2, when=when)
    assert first["sum"] == second["sum"] == "2.0"
    for name in ("recv", "all_reduce", "again"):
        assert first[name].startswith("StepError: "), first
    assert ("StepError: " if when == "block" else "PeerLost: ") in first["future"], first


def test_nothing_is_received_into_memory_that_a_recovery_has_restored(worlds: Worlds) -> None:
    """Regression: a message that was never waited for counted as settled while gloo still wrote it."""
    assert worlds.values(faults.written_after_quiesce, 2, trials=10)[0] == 0


def test_nobody_waits_for_the_end_of_a_broken_group(worlds: Worlds) -> None:
    assert worlds.values(faults.buried_in_a_wait)[0] == [False, True]


def test_a_script_that_ends_waits_a_while_for_what_is_being_buried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "holdfast.frameworks.torch.comm.comm_state.time", SimpleNamespace(monotonic=lambda: 7.0)
    )
    waited_s: list[float] = []

    def buried(timeout_s: float = 0.0) -> bool:
        waited_s.append(timeout_s)
        return False

    inner: Any = SimpleNamespace(unsevered=tuple, sever=lambda abort: None, bury=lambda: None, buried=buried)
    state = CommState()
    state.bury(inner)
    state.leave()
    assert waited_s == [0.0, BURIALS_S]


def test_quiescing_looks_at_least_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped beyond the limit before its first look still reports the remaining groups."""
    clock = itertools.count(0.0, 30.0)
    monkeypatch.setattr(
        "holdfast.frameworks.torch.comm.comm_state.time", SimpleNamespace(monotonic=lambda: next(clock))
    )
    state = CommState()
    assert state.quiesce()
    never: Any = SimpleNamespace(severed=lambda: False)
    state._vote = never
    assert not state.quiesce()


def test_without_a_control_plane_reconfigure_is_refused(worlds: Worlds, tmp_path: Path) -> None:
    (text,) = worlds.values(faults.no_control_plane, 1, path=str(tmp_path / "store"))
    assert "no control plane" in text and "holdfast run" in text


def test_builtin_hooks_are_refused_by_name(worlds: Worlds) -> None:
    (text,) = worlds.values(faults.builtin_hook, 1)
    assert "ALLREDUCE" in text and "default_hooks.allreduce_hook" in text


def test_buffers_of_a_communicator_are_refused_by_name(worlds: Worlds) -> None:
    (text,) = worlds.values(faults.buffers_of_the_group, 1)
    assert "set_allocate_memory_from_process_group_for_comm" in text and "recovery replaces" in text


def test_only_the_sockets_of_gloo_are_shut(worlds: Worlds) -> None:
    assert worlds.values(faults.foreign_socket, 3) == [{"gloo": 2, "received": 5}] * 3
