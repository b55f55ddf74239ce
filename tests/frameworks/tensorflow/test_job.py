"""TensorFlow under ``holdfast run``: all workers restart automatically, and the end is that of the undisturbed run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from holdfast.store.manage.checkpoint_root import Root
from tests.frameworks.launched import Launched, until

JOB = str(Path(__file__).with_name("job.py"))
WORLD = 2
RUN = ("--framework", "tensorflow", "--nproc-per-node", str(WORLD))
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


def digests(run: Launched) -> set[str]:
    """Return the digests of all ranks of the last attempt. Fail if one is missing."""
    found = run.said(r"digest (\w+)")
    assert len(found) == WORLD, run.output
    return set(found)


def undisturbed(folder: Path, api: str) -> set[str]:
    """Return the digest of a run without faults, which is equal on all ranks."""
    with Launched(folder / "undisturbed", *RUN, JOB, api, env=LEGACY if api == "fit" else None) as run:
        assert run.wait() == 0, run.output
        found = digests(run)
    assert len(found) == 1
    return found


@pytest.mark.smoke
@pytest.mark.parametrize(("api", "rank"), [("loop", 0), ("fit", 1)])
def test_a_killed_worker_changes_nothing(tmp_path: Path, api: str, rank: int) -> None:
    with Launched(tmp_path, *RUN, JOB, api, env=LEGACY if api == "fit" else None) as run:
        run.wait_log("step 11\n")
        run.kill(rank)
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed(tmp_path, api)
        assert run.events("restored")[-1].data["steps_lost"] == 0
        assert run.events("resumed")[-1].data["step"] >= 11


def test_a_truncated_newest_checkpoint_does_not_stop_the_job(tmp_path: Path) -> None:
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts"), "JOB_SAVE_EVERY": "5"}
    with Launched(tmp_path, *RUN, JOB, "loop", env=env) as run:
        assert run.wait() == 0, run.output
    steps = [found.step for found in Root(tmp_path / "ckpts").list() if found.valid]
    assert len(steps) >= 2
    newest = Path(Root(tmp_path / "ckpts").newest_valid().require().path)
    shard = next(newest.glob("shard-*"))
    os.truncate(shard, shard.stat().st_size // 2)
    with Launched(tmp_path, *RUN, JOB, "loop", env=env, name="u") as run:
        assert run.wait() == 0, run.output
        assert f"rejected checkpoint {newest.name}" in run.logs()
        assert f"resumed at step {sorted(steps)[-2]} " in run.logs()


@pytest.mark.parametrize("api", ["loop", "fit"])
def test_graceful_exit_and_on(tmp_path: Path, api: str) -> None:
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts"), **(LEGACY if api == "fit" else {})}
    with Launched(tmp_path, *RUN, JOB, api, env=env) as run:
        run.wait_log("step 11\n")
        (tmp_path / "graceful_exit.json").write_text(json.dumps({"GracefulExit": 1}))
        assert run.wait() == 75, run.output
        assert len(run.said("Graceful exit is triggered, stop training")) == WORLD
    with Launched(tmp_path, *RUN, JOB, api, env=env, name="u") as run:
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed(tmp_path, api)
        assert "step 11\n" not in run.logs()


def test_a_worker_whose_weights_differ_is_found(tmp_path: Path) -> None:
    """The worker differs at the same step in each attempt.

    The run ends, and no checkpoint holds either of the two weights.
    """
    with Launched(tmp_path, *RUN, "--verify-every", "2", JOB, "loop", env={"JOB_DIFFER": "1@3"}) as run:
        assert run.wait() == 1, run.output
        assert "holds a wrong copy of the state" in run.output
        assert not run.events("sealed")


def test_a_strategy_that_is_not_supported_is_named(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        "import tensorflow as tf, holdfast.tensorflow\n"
        "m = tf.keras.Sequential([tf.keras.layers.Input((2,)), tf.keras.layers.Dense(1)])\n"
        "m.compile('sgd', 'mse')\n"
        "with holdfast.tensorflow.session(m) as s: pass\n"
    )
    with Launched(tmp_path, *RUN, str(script)) as run:
        assert run.wait() == 3, run.output
        assert "supported is MultiWorkerMirroredStrategy" in run.output
        until("the error in a log", lambda: "UnsupportedError" in run.logs())
