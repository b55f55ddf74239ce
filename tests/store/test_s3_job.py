"""A real job that saves to a bucket: all killed, resumed, one rank killed, inspected; no secret in any file."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from holdfast.cli.main import cli
from holdfast.store.backends.location import Url
from holdfast.store.backends.s3_client import Bucket
from holdfast.store.manage.checkpoint_root import Root
from tests.cli.command import HOLDFAST
from tests.ranks import statuses
from tests.store.s3server import ACCESS, SECRET, Proxy, long

pytestmark = [pytest.mark.torch, pytest.mark.processes]

REPOSITORY = Path(__file__).parents[2]
JOB = str(REPOSITORY / "tests" / "session" / "job.py")
BOUND_S = 100.0
STEPS = 40
STEPS_FEW = 12


def start(where: Path, mark: str, *flags: str, arguments: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """Start the job with two ranks."""
    where.mkdir(exist_ok=True)
    return subprocess.Popen(
        [HOLDFAST, "run", "--nproc-per-node", "2", *flags, JOB, "--result", str(where / "result"),
         "--steps", str(STEPS), *arguments],
        cwd=where, env={**os.environ, "TEST_MARK": mark}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def digests(where: Path) -> list[str]:
    """Return the final digests of the ranks."""
    return [json.loads(p.read_text())["digest"] for p in sorted((where / "result").glob("rank-*.json"))]


def marked(mark: str) -> list[int]:
    """Return the processes of the job that carries this mark."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TEST_MARK={mark}".encode() in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def kill_all(mark: str) -> None:
    """Kill all processes until none is left, because a living one may start others."""
    while pids := marked(mark):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def holdfast(*arguments: str) -> str:
    """Run a command that succeeds. Return its output."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def disturbed(where: Path, bucket: Url) -> list[str]:
    """Kill a whole run after its first save, then resume and lose a rank. Return the outputs of both runs."""
    mark, every = secrets.token_hex(8), ("--save-every", "4")
    killed = start(where, mark, "--root", str(bucket), arguments=every)
    deadline_s = time.monotonic() + BOUND_S
    while Root(bucket).newest_valid().chosen is None:
        assert time.monotonic() < deadline_s and killed.poll() is None
        time.sleep(0.01)
    kill_all(mark)
    outputs = [killed.communicate()[0]]
    assert not digests(where), "it had finished before it was killed"
    flags = ("--root", str(bucket), "--on-fault", "restart")
    resumed = start(where, mark, *flags, arguments=(*every, "--die", f"1@{STEPS - 2}"))
    outputs.append(resumed.communicate(timeout=BOUND_S)[0])
    assert resumed.returncode == 0, outputs
    found = re.findall(r"resumed at step (\d+) from (s3://\S+)", outputs[-1])
    assert len(found) == 2 and 0 < int(found[0][0]) < int(found[1][0]) == STEPS - 2, outputs[-1]
    assert all(place.startswith(f"{bucket}/step-") for _, place in found)
    assert len(digests(where)) == 2
    return outputs


def test_a_rank_is_lost_in_a_job_in_a_bucket(tmp_path: Path, bucket: Url) -> None:
    """All ranks start again from the last-gasp checkpoint in the bucket, and end with the bits of a bare run."""
    where, flags = tmp_path / "run", ("--root", str(bucket), "--on-fault", "restart")
    job = start(where, secrets.token_hex(8), *flags, arguments=("--die", "1@6", "--steps", str(STEPS_FEW)))
    output, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 0, output
    ((step, place),) = re.findall(r"resumed at step (\d+) from (s3://\S+)", output)
    assert step == "6" and place.startswith(f"{bucket}/step-00000006"), output
    bare = tmp_path / "bare"
    assert statuses(2, JOB, "--steps", str(STEPS_FEW), "--result", str(bare / "result"), "--bare") == [0, 0]
    assert digests(where) == digests(bare) and len(digests(where)) == 2
    newest = Root(bucket).newest_valid().require()
    assert newest.step == STEPS_FEW
    assert "verified" in holdfast("ckpt", "verify", str(newest.path))


@long
def test_a_job_in_a_bucket(tmp_path: Path, bucket: Url) -> None:
    outputs = disturbed(tmp_path / "disturbed", bucket)
    look_at(bucket, tmp_path / "disturbed")
    texts = [p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and not p.is_symlink()]
    texts += [bytes(Bucket(bucket).get(entry.key)) for entry in Bucket(bucket).entries("")]
    assert len(texts) > 10
    for text in (*texts, *(one.encode() for one in outputs)):
        assert SECRET.encode() not in text and ACCESS.encode() not in text


@long
def test_the_result_is_that_of_an_undisturbed_job(tmp_path: Path, bucket: Url) -> None:
    undisturbed = start(tmp_path / "undisturbed", secrets.token_hex(8))
    output, _ = undisturbed.communicate(timeout=BOUND_S)
    assert undisturbed.returncode == 0, output
    disturbed(tmp_path / "disturbed", bucket)
    assert digests(tmp_path / "disturbed") == digests(tmp_path / "undisturbed")


@long
def test_a_server_that_is_away_costs_saves_and_no_step(
    s3_url: str, bucket: Url, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save fails by name, training continues, and a later save succeeds.

    Another session resumes from a named place.
    """
    import torch
    from torch import nn

    import holdfast as hf

    def session(**more: Any) -> Any:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return hf.session(model=model, optimizer=optimizer, checkpoint=str(bucket), **more), model, optimizer

    caplog.set_level("INFO", "holdfast")
    monkeypatch.setenv("HOLDFAST_S3_RETRY_S", "0.5")
    with Proxy(s3_url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        opened, model, optimizer = session(save_every_steps=3)
        signs = iter(("saved step", "was not saved: cannot write s3://", "saved step"))
        sign, seen, deadline_s = next(signs), 0, time.monotonic() + BOUND_S
        with opened as s:
            for step in s.steps(until=100_000):
                with step:
                    model(torch.ones(2, 4)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                time.sleep(0.01)
                assert time.monotonic() < deadline_s, f"no log line has {sign!r}: {caplog.text}"
                if sign in (said := caplog.text[seen:]):
                    seen += said.index(sign) + len(sign)
                    away = sign.startswith("saved")
                    sign = next(signs, "")
                    if not sign:
                        break
                    (proxy.down if away else proxy.up)()
    assert SECRET not in caplog.text
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_url)
    valid = [v.step for v in Root(bucket).list() if v.valid]
    assert len(valid) >= 2
    for resume, at in ((f"{bucket}@{valid[-1]}", valid[-1]), (str(bucket), valid[0]), ("auto", valid[0])):
        with session(resume=resume)[0] as s:
            assert s.step == at
    assert hf.load(f"{bucket}@{valid[-1]}", nn.Linear(4, 4)).step == valid[-1]


def look_at(bucket: Url, where: Path) -> None:
    """Run the commands that inspect checkpoints."""
    listed = json.loads(holdfast("ckpt", "ls", str(bucket), "--json"))
    valid = [one for one in listed if one["valid"]]
    assert valid[0]["step"] == STEPS and len(valid) <= 4
    assert "sealed" in holdfast("ckpt", "ls", str(bucket))
    assert f"step {STEPS}" in holdfast("ckpt", "show", f"{bucket}@{STEPS}")
    assert "verified" in holdfast("ckpt", "verify", valid[0]["path"])
    assert "0-1" in holdfast("ckpt", "holders", str(bucket))
    merged = where / "merged.safetensors"
    holdfast("ckpt", "merge", str(bucket), str(merged))
    assert merged.stat().st_size > 1000
    said = holdfast("ckpt", "prune", str(bucket), "--keep", "1", "--grace-s", "0")
    assert "removed s3://" in said
    left = [one["path"] for one in json.loads(holdfast("ckpt", "ls", str(bucket), "--json"))]
    assert left[0] == valid[0]["path"]
    for path in left[1:]:  # processes that were killed while they wrote it have left leases
        assert f"spared {path}: is being read or written" in said
    assert "with conditional writes" in holdfast("doctor", "--checkpoint", str(bucket))


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_credentials_in_a_url_stop_the_run_unrepeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    url = f"s3://{ACCESS}:{SECRET}@bucket/prefix"
    if how == "variable":
        monkeypatch.setenv("HOLDFAST_CHECKPOINT", url)
    flags = ("--root", url) if how == "flag" else ()
    job = start(tmp_path / "run", "none", *flags)
    output, _ = job.communicate(timeout=BOUND_S)
    assert job.returncode == 2 and "credentials and AWS_ENDPOINT_URL come" in output
    assert SECRET not in output and ACCESS not in output
    assert list((tmp_path / "run").iterdir()) == []
