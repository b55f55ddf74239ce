"""msrun's hook: a failed end restarts all workers, up to a limit; a successful end is final."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.compat import taskd_agent
from holdfast.errors import UsageError


class Msrun:
    """Workers with predefined ends: one list of exit statuses per life."""

    def __init__(self, lives: list[list[int | None]]) -> None:
        self.lives = lives
        self.started = self.killed = self.looks = 0

    def register(self) -> None:
        taskd_agent.register_func("START_ALL_WORKER", self.start)
        taskd_agent.register_func("KILL_WORKER", self.kill)
        taskd_agent.register_func("MONITOR", self.monitor)

    def start(self) -> int:
        self.started += 1
        return 0

    def kill(self, pids: list[int]) -> int:
        assert pids == [-1]
        self.killed += 1
        return 0

    def monitor(self, ranks: list[int]) -> dict[int, Any]:
        self.looks += 1
        life = self.lives[self.started - 1]
        return {rank: {"pid": 1, "status": status, "global_rank": rank} for rank, status in enumerate(life)}


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{RSC:1}")
    monkeypatch.setattr(taskd_agent, "POLL_S", 0.0)


def test_only_a_restart_that_was_asked_for_takes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert taskd_agent.init_taskd_agent({"Framework": "MindSpore"})
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1}")
    assert not taskd_agent.init_taskd_agent({"Framework": "MindSpore"})


def test_all_start_again_until_all_end_well() -> None:
    msrun = Msrun([[None, 300], [1, 0], [0, 0]])
    taskd_agent.init_taskd_agent({})
    msrun.register()
    taskd_agent.start_taskd_agent()
    assert (msrun.started, msrun.killed) == (3, 2)


def test_too_many_restarts_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(taskd_agent.RESTARTS_VARIABLE, "2")
    msrun = Msrun([[9]] * 4)
    taskd_agent.init_taskd_agent({})
    msrun.register()
    with pytest.raises(SystemExit):
        taskd_agent.start_taskd_agent()
    assert (msrun.started, msrun.killed) == (3, 3)


class Writing(Msrun):
    """Workers that still write during the first polls, then exit."""

    looks_at_kill = 0

    def kill(self, pids: list[int]) -> int:
        self.looks_at_kill = self.looks
        return super().kill(pids)

    def monitor(self, ranks: list[int]) -> dict[int, Any]:
        states = super().monitor(ranks)
        for state in states.values():
            if state["status"] is None and self.looks > 20:
                state["status"] = 1
        return states


def test_the_dying_checkpoint_gets_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,RSC:1}")
    msrun = Writing([[None, -9], [0, 0]])
    taskd_agent.init_taskd_agent({})
    msrun.register()
    taskd_agent.start_taskd_agent()
    assert (msrun.killed, msrun.looks_at_kill) == (1, 21), "killed when they have left, not before"


def test_a_dying_checkpoint_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MS_ENABLE_TFT", "{TTP:1,RSC:1}")
    monkeypatch.setattr(taskd_agent, "DUMP_S", 0.05)
    msrun = Msrun([[None, -9], [0, 0]])
    taskd_agent.init_taskd_agent({})
    msrun.register()
    taskd_agent.start_taskd_agent()
    assert (msrun.started, msrun.killed) == (2, 1)


def test_a_limit_that_is_no_number_and_missing_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    taskd_agent.init_taskd_agent({})
    with pytest.raises(UsageError, match="did not register"):
        taskd_agent.start_taskd_agent()
    Msrun([[0]]).register()
    monkeypatch.setenv(taskd_agent.RESTARTS_VARIABLE, "many")
    with pytest.raises(UsageError, match="is no number"):
        taskd_agent.start_taskd_agent()
