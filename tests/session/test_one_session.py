"""Things of which a job of several ranks has one: a session, and a directory of checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes]

HEAD = """\
import os
import torch, torch.distributed as dist
import holdfast
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(checkpoint):
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=checkpoint) as s:
        for step in s.steps(until=3):
            with step:
                model(torch.ones(4, 2)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

"""


def run(where: Path, rest: str) -> tuple[int, str]:
    """Run a job of two ranks. Return exit code and output."""
    script = where / "train.py"
    script.write_text(HEAD + rest)
    done = run_job(where, 2, str(script))
    return done.returncode, done.stdout


def test_a_second_session_is_refused_by_name(tmp_path: Path) -> None:
    """A newcomer would join in the first session while the others are in the second."""
    code, said = run(tmp_path, 'train("first")\ntrain("second")\n')
    assert code == Exit.BAD_INPUT, said
    assert "a second session in one process" in said and "holdfast.load(path, model)" in said
    assert [found.step for found in Root(tmp_path / "first").list() if found.valid] == [3]
    assert not (tmp_path / "second").exists()


def test_ranks_that_would_save_in_different_places_are_refused(tmp_path: Path) -> None:
    """Each process has its own directory, which would hold half of a checkpoint that no process can load."""
    elsewhere = 'os.makedirs(f"out{dist.get_rank()}", exist_ok=True)\nos.chdir(f"out{dist.get_rank()}")\n'
    code, said = run(tmp_path, elsewhere + 'train("ckpt")\n')
    assert code == Exit.BAD_INPUT, said
    assert "out1/ckpt, rank 0 in" in said or "out0/ckpt, rank 1 in" in said, said
    assert "an absolute path" in said


def test_links_to_one_place_are_one_place(tmp_path: Path) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "other").symlink_to(tmp_path / "ckpt")
    code, said = run(tmp_path, 'train("other" if dist.get_rank() else "ckpt")\n')
    assert code == 0, said
    assert [found.step for found in Root(tmp_path / "ckpt").list() if found.valid] == [3]
