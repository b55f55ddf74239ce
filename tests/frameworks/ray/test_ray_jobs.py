"""A driver that ``ray job submit`` started, on a real cluster."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.job_submission import JobStatus, JobSubmissionClient

from holdfast.integrations.ray import status
from tests.frameworks.ray.clusters import BOUND_S, DRIVER, RayNodes, SubmittedJob, ray_nodes
from tests.runtime.runs import until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture
def jobs_cluster() -> Iterator[RayNodes]:
    """Yield a cluster that accepts submitted jobs."""
    with ray_nodes(2, dashboard=True) as made:
        yield made


def test_a_ray_job_is_submitted_and_one_that_is_stopped_has_saved(
    jobs_cluster: RayNodes, tmp_path: Path
) -> None:
    client = JobSubmissionClient(f"http://{jobs_cluster.dashboard}")
    work = tmp_path / "work"
    work.mkdir()
    shutil.copy(DRIVER, work / "my_driver.py")  # below the working directory that Ray copies
    job = SubmittedJob(jobs_cluster, tmp_path / "job")
    command = f"{sys.executable} my_driver.py job '{json.dumps(job.settings)}'"
    submitted = client.submit_job(entrypoint=command, runtime_env={"working_dir": str(work)})

    def logs() -> str:
        return str(client.get_job_logs(submitted))

    until("steps", lambda: re.search(r"at step [1-9]", logs()), BOUND_S)  # Ray shows equal lines only once
    assert status("job")["state"] == "running"
    client.stop_job(submitted)
    job.wait_event(0, "run_ended")
    (saved,) = {event.data["step"] for event in job.events(0, "sealed")}
    until("it has stopped", lambda: client.get_job_status(submitted).is_terminal(), BOUND_S)
    until("no process is left", lambda: not any(job.place(number).kept for number in (0, 1)), 60)
    job.hurry.touch()
    submitted = client.submit_job(entrypoint=command, runtime_env={"working_dir": str(work)})
    until("it has ended", lambda: client.get_job_status(submitted).is_terminal(), BOUND_S)
    assert client.get_job_status(submitted) == JobStatus.SUCCEEDED, logs()
    assert {event.data["step"] for event in job.events(0, "session_opened")} == {saved}
    shown = next(line for line in reversed(logs().splitlines()) if line.startswith('{"returned"'))
    assert len({value["digest"] for value in json.loads(shown)["returned"].values()}) == 1
