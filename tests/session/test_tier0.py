"""No changed line: a plain torchrun script under ``holdfast run`` is restarted when a rank dies or all hang."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

LOOKS = str(Path(__file__).with_name("tier0_look.py"))
HANGS = str(Path(__file__).with_name("tier0_hang.py"))
SCRIPT = str(Path(__file__).with_name("tier0.py"))
RANKS = 3


def test_a_plain_script_restarts_and_no_survivor_crashes(tmp_path: Path) -> None:
    done = run_job(tmp_path, RANKS, SCRIPT)
    (run,) = (tmp_path / "runs").iterdir()
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    signals = [e["data"]["signal"] for e in events if e["kind"] == "member_exited"]
    logs = [(run / "attempt-001" / f"rank-{rank:05d}.log").read_text() for rank in range(RANKS)]
    assert done.returncode == 0, done.stdout
    assert signals.count(9) >= 1
    assert 11 not in signals, "a broken bucket crashed DDP's reducer"
    assert all(f"rank {rank} done in life 1 on gloo" in log for rank, log in enumerate(logs)), logs


def test_an_exception_of_one_rank_is_one_fault_and_its_traceback_the_only_one(tmp_path: Path) -> None:
    done = run_job(tmp_path, RANKS, "--run-id", "it", SCRIPT, "raise")
    assert done.returncode == 0, done.stdout
    events = (json.loads(line) for line in (tmp_path / "runs/it/events.jsonl").read_text().splitlines())
    told = [(e["data"]["rank"], e["data"]["what"]) for e in events if e["kind"] == "detected"]
    assert told == [(1, "ValueError: a bad sample")]
    logs = [(tmp_path / f"runs/it/attempt-000/rank-{rank:05d}.log").read_text() for rank in range(RANKS)]
    assert ["Traceback" in log for log in logs] == [False, True, False], logs


def test_a_plain_script_sees_what_torchrun_would_show(tmp_path: Path) -> None:
    (tmp_path / "look.py").symlink_to(LOOKS)
    done = run_job(tmp_path, 2, "--run-id", "it", "look.py", "--lr", "0.1")
    assert done.returncode == 0, done.stdout
    seen = [json.loads((tmp_path / f"look-{rank}.json").read_text()) for rank in range(2)]
    assert seen[0]["seed"] != seen[1]["seed"] and seen[0]["drawn"] != seen[1]["drawn"]
    for rank, one in enumerate(seen):
        assert one["argv"] == ["look.py", "--lr", "0.1"] and one["unhandled"] == [True, True]
        assert (one["title"], one["name"]) == (f"look.py [rank {rank}] --lr 0.1", f"look.py:{rank}")
        assert one["device"] == "ValueError" and one["home"] == os.environ["HOME"]


EARLY = """\
import json, logging, os, pathlib
os.environ["TORCH_LOGS"] = "+dynamo"
os.environ["OMP_NUM_THREADS"] = "2"
import torch, torch.distributed as dist
dist.init_process_group("gloo")
groups = type(dist.distributed_c10d._get_default_group()).__name__
level = logging.getLogger("torch._dynamo").getEffectiveLevel()
pathlib.Path("early-" + os.environ["RANK"]).write_text(json.dumps([level, torch.get_num_threads(), groups]))
"""


def test_variables_that_a_script_sets_before_it_imports_torch_count(tmp_path: Path) -> None:
    (tmp_path / "early.py").write_text(EARLY)
    done = run_job(tmp_path, 2, "--run-id", "it", "early.py")
    assert done.returncode == 0, done.stdout
    threads = min(2, len(os.sched_getaffinity(0)))
    for rank in range(2):
        assert json.loads((tmp_path / f"early-{rank}").read_text()) == [10, threads, "ReconfigurableGroup"]
    assert "early.py:2: TORCH_LOGS is set before torch is imported" in done.stdout


@pytest.mark.more
def test_a_plain_script_that_hangs_is_named_and_restarted(tmp_path: Path) -> None:
    done = run_job(tmp_path, RANKS, "--run-id", "it", "--hang-floor", "0.3", HANGS)
    run = tmp_path / "runs" / "it"
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    hangs = [e["data"] for e in events if e["kind"] == "hang"]
    assert done.returncode == 0, done.stdout
    assert [(h["answer"], h["ranks"]) for h in hangs] == [("kill", [1])], hangs
    assert (
        "it is in all_reduce of 4096 float32, 2 others are in broadcast of 4096 float32" in hangs[0]["reason"]
    )
    recorded = (run / "evidence" / "H001" / "rank-00001.collectives.txt").read_text().splitlines()
    assert "all_reduce of 4096 float32, under way" in recorded[-1] and "done after" in recorded[-2]
    assert hangs[0]["records"] == [f"evidence/H001/rank-{rank:05d}.records.json" for rank in range(RANKS)]
    held = json.loads((run / hangs[0]["records"][1]).read_text())
    assert held["recorders"]["cpu"]["entries"][-1]["profiling_name"] == "gloo:all_reduce"
    assert all(
        f"rank {rank} done in life 1" in (run / "attempt-001" / f"rank-{rank:05d}.log").read_text()
        for rank in range(RANKS)
    )
