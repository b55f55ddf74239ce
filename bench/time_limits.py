"""Jobs of a real Slurm whose time limit of 60 s comes long before the end of their training (root, slurm-wlm).

    PYTHONPATH=. python bench/time_limits.py [--jobs 20] [--at-once 5] [--minutes M] [--seed 1]

A controller and four slurmd run on this machine, and each job has one node with two ranks. Its batch script is that of
a user: ``--time=1``, no signal, and ``scontrol requeue`` after 75, 76 and 69. So the agent learns the end of the time
from Slurm. The length of a step is drawn for each job. ``--at-once`` jobs are in the queue, and four of them run.

A job has met the limit when all of this is true:

- its first start ended with 75, and its newest checkpoint is valid in every byte and sealed;
- that checkpoint holds the last step that any rank committed;
- the time of its seal is before the end that Slurm had set.

The queue starts the job again. It has continued when the first step of each rank is the one after the checkpoint, and
no rank has made a step twice. Then it is cancelled.

Prints markdown: n, the share that met the limit, and the margin from the seal to the limit. After ``--minutes`` the
jobs without a result are cancelled and do not count; n says how many are left.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rounds import quantile
from step_log import SETUP, Step, logged_steps

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.cli.command import HOLDFAST
from tests.schedulers.cluster import Cluster, cluster, why_not

TRAIN = (
    SETUP
    + """with holdfast.session(model=model, optimizer=optimizer, seed=7, checkpoint=place + "/checkpoints") as s:
    with open(f"{place}/steps-{dist.get_rank()}", "a") as steps:
        for step in s.steps(loader, until=1_000_000):
            with step as batch:
                time.sleep(pause_s)
                ((model(batch[0]) - 1) ** 2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                steps.write(f"{start} {s.step} {time.time()}\\n")
                steps.flush()
"""
)
BATCH = """#!/bin/bash
start="${{SLURM_RESTART_COUNT:-0}}"
scontrol show job --oneliner "$SLURM_JOB_ID" > {place}/job-"$start"
srun --kill-on-bad-exit=0 --wait=0 {holdfast} run --nproc-per-node {ranks} --run-id {name} train.py {pause_s} {place}
code=$?
echo "$code" > {place}/code-"$start"
case "$code" in {again}) scontrol requeue "$SLURM_JOB_ID" ;; esac
exit "$code"
"""
RANKS = 2
AGAIN = "|".join(str(int(code)) for code in (Exit.REQUEUE, Exit.UNSAVED, Exit.UNMET))
LIMIT_S = 60
PAUSES_S = (0.05, 3.0)  # length of a step without its work: a step may be longer than the time of the save
LOOK_S = 1.0
EACH_S = 300.0  # so long after the limit a job without a result has missed


class Result(NamedTuple):
    """The result of one job: why it missed the limit, and why it did not continue; empty: it did."""

    missed: str
    redone: str
    margin_s: float = 0.0
    again_s: float = 0.0  # from the seal to the next step


class Job:
    """One job with its files."""

    def __init__(self, slurm: Cluster, name: str, pause_s: float) -> None:
        self.place = slurm.work / name
        self.place.mkdir()
        script = self.place / "batch.sh"
        script.write_text(
            BATCH.format(
                place=name,
                holdfast=HOLDFAST,
                ranks=RANKS,
                name=name,
                pause_s=pause_s,
                again=AGAIN,
            )
        )
        words = ("--nodes=1", "--ntasks-per-node=1", "--time=1", "--requeue", "--open-mode=append")
        output = f"--output={self.place / 'out'}"
        self.number = slurm.ask(
            "sbatch", "--parsable", f"--job-name={name}", *words, output, str(script)
        ).strip()
        self.name = name
        self.pause_s = pause_s
        self.saved_step, self.margin_s, self.sealed_s = 0, 0.0, 0.0
        self.missed: str | None = None  # not known yet

    def read(self, name: str) -> str:
        """Return the content of a file; empty: it is not there."""
        path = self.place / name
        return path.read_text(errors="replace") if path.exists() else ""

    def steps(self, rank: int) -> list[Step]:
        """Return the steps that a rank has committed so far."""
        return logged_steps(self.place, rank)

    @property
    def limit_s(self) -> float:
        """Return the end of the first start, as Slurm has set it; 0: it has not begun."""
        found = re.search(r"EndTime=(\S+)", self.read("job-0"))
        return datetime.fromisoformat(found[1]).timestamp() if found else 0.0

    def look(self) -> Result | None:
        """Return the result; None: it is not there yet."""
        if self.missed is None and self.read("code-0").strip():
            self.missed = self._first_start()
        late = self.limit_s and time.time() > self.limit_s + EACH_S
        if self.missed is None:
            return Result("no exit code", "") if late else None
        if self.missed:
            return Result(self.missed, "")
        after = [[step for step in self.steps(rank) if step.start > 0] for rank in range(RANKS)]
        if not all(after):
            return Result("", "no step after the restart", self.margin_s) if late else None
        again_s = max(steps[0].at_s for steps in after) - self.sealed_s
        return Result("", self._continued(after), self.margin_s, again_s)

    def _first_start(self) -> str:
        """Judge the first start and keep its figures. Return why it missed the limit; empty: it met it."""
        code = int(self.read("code-0"))
        first = [step.number for rank in range(RANKS) for step in self.steps(rank) if step.start == 0]
        last = max(first, default=0)
        if code == Exit.UNSAVED and not last:
            return f"{code}: the start took so long that no step was made"
        if code != Exit.REQUEUE:
            return f"code {code}"
        found = Root(self.place / "checkpoints").list(deep=True)
        if not found or not found[0].valid or not found[0].sealed:
            return f"no sealed checkpoint: {found[0].reason if found else 'none'}"
        if found[0].step != last:
            return f"the checkpoint is of step {found[0].step}, the last committed one is {last}"
        self.saved_step = last
        self.sealed_s = (Path(found[0].path) / "SEALED").stat().st_mtime
        self.margin_s = self.limit_s - self.sealed_s
        return "" if self.margin_s > 0 else f"sealed {-self.margin_s:.1f} s after the limit"

    def _continued(self, after: Sequence[Sequence[Step]]) -> str:
        """Return why the second start did not continue at the next step; empty: it did."""
        for rank, steps in enumerate(after):
            if steps[0].number != self.saved_step + 1:
                return f"rank {rank} continued at {steps[0].number}, the save was of {self.saved_step}"
            numbers = [step.number for step in self.steps(rank)]
            if len(set(numbers)) != len(numbers):
                return f"rank {rank} made a step twice"
        return ""


def measure(slurm: Cluster, args: argparse.Namespace) -> list[Result]:
    """Run the jobs. Return the result of each one that has a result in time."""
    (slurm.work / "train.py").write_text(TRAIN)
    rng, end_s = random.Random(args.seed), time.monotonic() + args.minutes * 60
    running: list[Job] = []
    found: list[Result] = []
    while len(found) < args.jobs and not (args.minutes and time.monotonic() > end_s):
        submitted = len(found) + len(running)
        if len(running) < args.at_once and submitted < args.jobs:
            running.append(Job(slurm, f"limit{submitted}", round(rng.uniform(*PAUSES_S), 2)))
        time.sleep(LOOK_S)
        for job in tuple(running):
            if (result := job.look()) is None:
                continue
            running.remove(job)
            slurm.ask("scancel", job.number)
            found.append(result)
            print(
                f"{len(found)} of {args.jobs}: {job.name}, a step {job.pause_s} s: step {job.saved_step}, "
                f"{result.margin_s:.1f} s before the limit, next step after {result.again_s:.1f} s "
                f"{result.missed or result.redone}",
                file=sys.stderr,
            )
    return found


def row(name: str, met: str, values: Sequence[float]) -> str:
    """Return one line of the table."""
    ordered = sorted(values)
    if not ordered:
        return f"| {name} | 0 | {met} | | | | |"
    p10, p90 = quantile(ordered, 0.1), quantile(ordered, 0.9)
    return (
        f"| {name} | {len(ordered)} | {met} | {ordered[0]:.1f} | {p10:.1f} | {statistics.median(ordered):.1f} "
        f"| {p90:.1f} |"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument(
        "--at-once", type=int, default=5, help="more than the four nodes: one waits to start again"
    )
    parser.add_argument("--minutes", type=float, default=0.0, help="0: until all of them have a result")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if why := why_not():
        parser.error(f"no Slurm cluster here: {why}")
    directory = Path(tempfile.mkdtemp())
    with cluster(directory) as slurm:
        found = measure(slurm, args)
    met = [result for result in found if not result.missed]
    continued = [result for result in met if not result.redone]
    print(f"{args.jobs} jobs with a limit of {LIMIT_S} s, {len(found)} with a result\n")
    print("| | n | met | min | p10 | median | p90 |\n|---|---|---|---|---|---|---|")
    print(
        row(
            "from the seal to the limit, s",
            f"{len(met)} of {len(found)}",
            [result.margin_s for result in met],
        )
    )
    print(
        row(
            "requeued: step N sealed, step N+1 is next, from the seal to it, s",
            f"{len(continued)} of {len(met)}",
            [result.again_s for result in continued],
        )
    )
    for reason, count in Counter(result.missed or result.redone for result in found).items():
        if reason:
            print(f"\n{count} missed: {reason}")
    if len(continued) < len(found):
        sys.exit(f"files of the jobs that missed: {directory}")
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
