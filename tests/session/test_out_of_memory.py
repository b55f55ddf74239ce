"""A rank that the kernel kills at the same step each time, because its control group has no memory left."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from tests.session.launch import run_job

pytestmark = [pytest.mark.torch, pytest.mark.processes, pytest.mark.executes_zygotes]

JOB = str(Path(__file__).with_name("mistake_job.py"))
GROUPS = (Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup"))
LIMITS = ("memory.limit_in_bytes", "memory.max")
LIMIT_BYTES = 2 << 30


@pytest.fixture
def control_group() -> Iterator[Path]:
    """Yield a control group with a memory limit, if this user may make one."""
    for base in GROUPS:
        group = base / f"holdfast-test-{os.getpid()}"
        with suppress(OSError):
            group.mkdir()
            try:
                limit = next(group / name for name in LIMITS if (group / name).exists())
                limit.write_text(str(LIMIT_BYTES))
            except (OSError, StopIteration):
                group.rmdir()
                continue
            yield group
            group.rmdir()  # fails if a process is left in the group
            return
    pytest.skip("no control group of memory can be made here")


def test_the_kernels_kills_are_one_fault_that_is_named(tmp_path: Path, control_group: Path) -> None:
    """Regression: the job was tried 16 times, and ended with more faults than the budget and no mention of memory."""
    enter = ("sh", "-c", f'echo $$ > {control_group}/cgroup.procs && exec "$@"', "sh")
    done = run_job(tmp_path, 2, "--hang-floor", "60", JOB, "all memory in the block", inside=enter)
    assert done.returncode == Exit.FAILED, done.stdout
    error = done.stdout.partition("error: ")[2]
    assert "oom_kill" in error and "step 5" in error, done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    report = (run / "faults" / "F001.txt").read_text()
    assert "give the job more memory" in report and "dmesg" not in report, report
