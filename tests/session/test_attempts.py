"""Attempts of torchrun's own agent (``--max-restarts``), which keeps one store for all of them."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from holdfast.frameworks.torch.comm.control_store import agree_on_start
from tests.session.launch import run_torchrun

pytestmark = [pytest.mark.torch, pytest.mark.processes]

JOB = str(Path(__file__).with_name("attempts_job.py"))


@pytest.mark.more
def test_a_later_attempt_meets_none_of_the_dead(tmp_path: Path) -> None:
    done = run_torchrun(tmp_path, 2, "--max-restarts", "2", JOB)
    assert done.returncode == 0, done.stdout
    assert all(f"rank {rank} of attempt 2: 4" in done.stdout for rank in (0, 1)), done.stdout


def test_a_start_gets_a_name_that_hellos_of_the_dead_do_not_disturb() -> None:
    store, limit = HashStore(), timedelta(seconds=30)
    store.set("hello/1", "of the dead")
    names: dict[tuple[int, int], str] = {}

    def come(life: int, rank: int) -> None:
        names[life, rank] = agree_on_start(store, rank, 3, limit)

    for life in (0, 1):
        ranks = [threading.Thread(target=come, args=(life, rank)) for rank in range(3)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
    assert len(set(names.values())) == 2 and len(names) == 6
    assert all(names[life, rank] == names[life, 0] for life, rank in names)
