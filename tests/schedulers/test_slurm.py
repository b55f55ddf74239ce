"""``holdfast submit slurm`` on a real cluster of four slurmd. ``make slurm``."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Iterator

import pytest

from holdfast import event_log
from holdfast.runtime.node.rundir import RunDir
from tests.cli.command import HOLDFAST
from tests.runtime.runs import until
from tests.schedulers.cluster import Cluster, cluster, why_not

WHY_NOT = why_not()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(900),
    pytest.mark.skipif("HOLDFAST_SLURM" not in os.environ, reason="make slurm"),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no Slurm cluster here: {WHY_NOT}"),
]
BOUND_S = 300.0
SCRIPT = textwrap.dedent("""
    import os, sys, time
    import torch, torch.distributed as dist
    import holdfast
    until, pause_s, where = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    where += os.environ.get("SLURM_ARRAY_TASK_ID", "")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
    sampler = torch.utils.data.distributed.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=4, sampler=sampler)
    with holdfast.session(model=model, optimizer=optimizer, checkpoint=where) as s:
        for step in s.steps(loader, until=until):
            with step as (x, y):
                torch.nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(pause_s)
            if step.committed and step.number % 10 == 0:
                print("at step", step.number, flush=True)
    print("done at", s.step, flush=True)
""")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Yield one cluster for all tests. Its nodes n1 to n4 share the files of this machine."""
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        (made.work / "train.py").write_text(SCRIPT)
        yield made


def trains(slurm: Cluster, job: str, step: int = 20) -> None:
    """Wait until the job has passed a step."""

    def reached() -> bool:
        return any(int(number) >= step for number in re.findall(r"at step (\d+)", slurm.output(job)))

    until(f"step {step}", reached, BOUND_S)


def becomes(slurm: Cluster, job: str, state: str) -> None:
    """Wait for a state of the job."""
    until(f"job {job} is {state}", lambda: slurm.state(job).get("JobState") == state, BOUND_S)


def test_a_warning_saves_and_the_job_is_queued_again(slurm: Cluster) -> None:
    job = slurm.submit("--nodes", "2", "--time", "0:30:00", "train.py", "120", "0.1", "warned")
    trains(slurm, job)
    slurm.ask("scancel", "--signal=USR1", job)  # what --signal sends, to the same processes
    becomes(slurm, job, "COMPLETED")
    assert slurm.state(job)["Restarts"] == "1" and slurm.state(job)["ExitCode"] == "0:0"
    (step,) = set(re.findall(r"saved step (\d+) \(exit\)", slurm.output(job)))
    assert f"resumed at step {step} " in slurm.output(job) and "done at 120" in slurm.output(job)
    assert not list((slurm.work / "runs").glob(".done*"))
    token = slurm.work / "runs" / f"slurm-{job}.token"
    assert token.stat().st_mode & 0o777 == 0o600


def test_scancel_saves_and_the_job_stays_cancelled(slurm: Cluster) -> None:
    job = slurm.submit("--nodes", "2", "--time", "0:30:00", "train.py", "100000", "0.1", "cancelled")
    trains(slurm, job)
    slurm.ask("scancel", job)
    becomes(slurm, job, "CANCELLED")
    until("the save", lambda: re.search(r"saved step \d+ \(exit\)", slurm.output(job)), BOUND_S)
    assert slurm.state(job)["Restarts"] == "0"


def saved_steps(slurm: Cluster, job: str) -> set[int]:
    """Return the steps of all graceful saves in the output of the job."""
    return {int(step) for step in re.findall(r"saved step (\d+) \(exit\)", slurm.output(job))}


def test_the_time_limit_is_met_with_a_save_and_the_next_start_goes_on(slurm: Cluster) -> None:
    """The warning comes at 130 s of 210 s, or somewhat earlier. The job is queued again and ends in a later start."""
    flags = ("--nodes", "2", "--time", "0:03:30", "--grace-s", "20")
    job = slurm.submit(*flags, "train.py", "1600", "0.1", "limited")
    until("the second start", lambda: slurm.state(job).get("Restarts", "0") != "0", BOUND_S)
    until("it resumes", lambda: "resumed at step" in slurm.output(job), BOUND_S)
    shown = slurm.output(job)
    resumed = int(re.findall(r"resumed at step (\d+) ", shown)[0])
    assert resumed in saved_steps(slurm, job), "at the step of the save, and at no older one"
    # Slurm may say CANCELLED ... DUE TO JOB REQUEUE, if the batch script still runs when it queues the job again.
    assert not re.search(r"TIME LIMIT|CANCELLED(?! AT \S+ DUE TO JOB REQUEUE)", shown)
    becomes(slurm, job, "COMPLETED")
    assert "done at 1600" in slurm.output(job) and slurm.state(job)["ExitCode"] == "0:0"


def test_a_limit_of_two_minutes_without_a_warning_is_met_with_a_save(slurm: Cluster) -> None:
    """A batch script of the user asks for no signal. The agents know the end from SLURM_JOB_END_TIME."""
    (slurm.work / "runs").mkdir(exist_ok=True)
    script = slurm.work / "minutes.sh"
    run = f"{HOLDFAST} run --nnodes 2 --run-id minutes train.py 100000 0.05 minutes"
    script.write_text(f"#!/bin/bash\nsrun --kill-on-bad-exit=0 --wait=0 {run}\n")
    words = ("--nodes=2", "--ntasks-per-node=1", "--time=2", "--no-requeue", "--output=runs/slurm-%j.out")
    job = slurm.ask("sbatch", "--parsable", *words, str(script)).strip()
    becomes(slurm, job, "FAILED")
    shown = slurm.output(job)
    assert slurm.state(job)["ExitCode"] == "75:0", shown
    assert len(saved_steps(slurm, job)) == 1 and "TIME LIMIT" not in shown


def kill_rank(slurm: Cluster, job: str, rank: int) -> None:
    """Kill the process of a rank, in a job of one node."""
    events = event_log.read(RunDir(slurm.work / "runs" / f"slurm-{job}").journal).events
    pids = [
        event.data["pid"] for event in events if event.kind == "member_started" and event.data["rank"] == rank
    ]
    os.kill(int(pids[-1]), signal.SIGKILL)


def test_a_lost_process_is_replaced_alone_and_slurm_does_not_notice(slurm: Cluster) -> None:
    flags = ("--nodes", "1", "--nproc-per-node", "2", "--time", "0:30:00")
    job = slurm.submit(*flags, "train.py", "100", "0.1", "replaced")
    trains(slurm, job)
    kill_rank(slurm, job, 1)
    becomes(slurm, job, "COMPLETED")
    shown = slurm.output(job)
    assert "done at 100" in shown and "0 steps lost" in shown and "resumed at step" not in shown
    assert slurm.state(job)["Restarts"] == "0" and slurm.state(job)["ExitCode"] == "0:0"


def test_a_job_level_answer_is_queued_again_and_continues_at_the_next_step(slurm: Cluster) -> None:
    flags = ("--nodes", "1", "--nproc-per-node", "2", "--time", "0:30:00", "--on-fault", "job")
    job = slurm.submit(*flags, "train.py", "100", "0.1", "level")
    trains(slurm, job)
    kill_rank(slurm, job, 1)
    becomes(slurm, job, "COMPLETED")
    shown = slurm.output(job)
    (step,) = {int(number) for number in re.findall(r"resumed at step (\d+) ", shown)}
    after = [int(number) for number in re.findall(r"at step (\d+)\n", shown.partition("resumed at step")[2])]
    assert after == list(range(-(-step // 10) * 10, 100, 10)), (
        "it shows each tenth step, from the next one on"
    )
    assert "done at 100" in shown
    assert slurm.state(job)["Restarts"] == "1" and slurm.state(job)["ExitCode"] == "0:0"


def test_the_jobs_of_an_array_are_apart_and_one_is_queued_again(slurm: Cluster) -> None:
    flags = ("--nodes", "1", "--time", "0:30:00", "--array", "0-1")
    array = slurm.submit(*flags, "train.py", "200", "0.1", "array")
    names = [f"{array}_{number}" for number in range(2)]  # the array's number is also that of its last task
    for name in names:
        becomes(slurm, name, "RUNNING")
    jobs = [slurm.state(name)["JobId"] for name in names]
    for job in jobs:
        trains(slurm, job)
    slurm.ask("scancel", "--signal=USR1", names[1])
    for name, job in zip(names, jobs, strict=True):
        becomes(slurm, name, "COMPLETED")
        assert slurm.output(job).count("done at 200") == 1
    assert [slurm.state(name)["Restarts"] for name in names] == ["0", "1"]
    assert not saved_steps(slurm, jobs[0]) and len(saved_steps(slurm, jobs[1])) == 1


def test_the_ranks_of_a_drained_node_move_to_the_spare(slurm: Cluster) -> None:
    job = slurm.submit(
        "--nodes", "2", "--spares", "1", "--time", "0:30:00", "train.py", "900", "0.1", "drained"
    )
    trains(slurm, job)
    slurm.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=maintenance")
    until("n2 has no task", lambda: "this node has left the job" in slurm.output(job), BOUND_S)
    becomes(slurm, job, "COMPLETED")
    shown = slurm.output(job)
    assert "Slurm: drained (maintenance)" in shown and "done at 900" in shown
    assert "moves, node1 leaves the job" in shown and "0 steps lost" in shown
    assert slurm.state(job)["Restarts"] == "0" and slurm.state(job)["ExitCode"] == "0:0"
    slurm.ask("scontrol", "update", "NodeName=n2", "State=RESUME")
    until(
        "four nodes are idle",
        lambda: slurm.ask("sinfo", "-h", "-t", "idle", "-o", "%D").strip() == "4",
        BOUND_S,
    )


def test_a_lost_node_is_replaced_by_the_spare(slurm: Cluster) -> None:
    job = slurm.submit("--nodes", "2", "--spares", "1", "--time", "0:30:00", "train.py", "400", "0.1", "lost")
    trains(slurm, job)
    slurm.lose("n2")
    becomes(slurm, job, "COMPLETED")
    shown = slurm.output(job)
    # Slurm has noticed the failure, and the job continued
    assert "Node failure on n2" in shown and "done at 400" in shown
    assert "went with its node" in shown and "0 steps lost" in shown
    assert slurm.state(job)["Restarts"] == "0" and slurm.state(job)["ExitCode"] == "0:0"
