"""MindSpore under ``holdfast run``: after any kill, the final bits are those of the undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.runtime.node.spawn import free_port
from tests.frameworks.launched import BOUND_S, Launched

JOB = str(Path(__file__).with_name("job.py"))
SLOW_READER = Path(__file__).with_name("slow_reader.c")
EXIT_LINE = "Graceful exit is triggered, stop training"
WORLD = 3
RUN = ("--framework", "mindspore", "--nproc-per-node", str(WORLD))


def digests(run: Launched) -> set[str]:
    """Return the digests of all ranks of the last attempt. Fail if one is missing."""
    found = run.said(r"digest (\w+)")
    assert len(found) == WORLD, run.output
    return set(found)


def replaced_alone(run: Launched) -> None:
    """Check that the other ranks kept their processes, waited in the graph, and summed again with the newcomer."""
    assert [e.data["action"] for e in run.events("verdict")] == ["replace"]
    assert len(run.events("member_started")) == WORLD + 1
    assert run.events("restored")[-1].data["steps_lost"] == 0
    assert run.events("sealed")[0].data["save_kind"] == "final"  # the recovery wrote nothing


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the digest of a run without faults, which is equal on all ranks."""
    with Launched(tmp_path_factory.mktemp("undisturbed"), *RUN, JOB) as run:
        assert run.wait() == 0, run.output
        found = digests(run)
    assert len(found) == 1
    return found


@pytest.mark.smoke
def test_a_killed_rank_changes_nothing(tmp_path: Path, undisturbed: set[str]) -> None:
    with Launched(tmp_path, *RUN, JOB) as run:
        run.wait_log("step 9\n")
        run.kill(1)
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed
        assert run.events("resumed")[-1].data["step"] >= 9
        replaced_alone(run)


@pytest.mark.parametrize(("options", "rank"), [(("pynative",), 0), (("guarded",), 2)])
def test_in_pynative_and_with_a_cell_of_our_own(
    tmp_path: Path, undisturbed: set[str], options: tuple[str, ...], rank: int
) -> None:
    with Launched(tmp_path, *RUN, JOB, *options) as run:
        run.wait_log("step 9\n")
        run.kill(rank)
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed
        replaced_alone(run)


def test_mindspores_own_group_is_never_used_after_a_fault(tmp_path: Path) -> None:
    """If MindSpore's own AllReduce is used, even a fault that kills no process is answered with new processes."""
    with Launched(tmp_path / "calm", *RUN, JOB, "native") as run:
        assert run.wait() == 0, run.output
        calm = digests(run)
    with Launched(tmp_path / "cut", *RUN, JOB, "native", env={"JOB_CUT": "1@9"}) as run:
        assert run.wait() == 0, run.output
        pids = [e.data["pid"] for e in run.events("member_started")]
        assert digests(run) == calm
        assert len(set(pids)) == 2 * WORLD  # no process continued
        assert "gives wrong sums after a fault" in (run.run / "events.jsonl").read_text()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_no_rank_crashes_when_it_leaves_mindspores_own_group(tmp_path: Path) -> None:
    """MindSpore deletes its connection to the scheduler while another of its threads may still read from it."""
    library, script = tmp_path / "slow_reader.so", tmp_path / "script.py"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SLOW_READER, "-ldl"], check=True)
    script.write_text(
        f"import ctypes, runpy\nrunpy.run_path({JOB!r}, run_name='__main__')\n"
        "ctypes.CDLL(None).slow_readers()\n"
    )
    with Launched(tmp_path, *RUN, str(script), "native", env={"LD_PRELOAD": str(library)}) as run:
        assert run.wait() == 0, run.output
        assert len(digests(run)) == 1
        assert [e.data["code"] for e in run.events("member_exited")] == [0] * WORLD


def test_the_dying_save_does_not_wait_for_a_hanging_allreduce(tmp_path: Path) -> None:
    """In PYNATIVE mode, parameters cannot be read while MindSpore waits 30 s for the dead rank.

    The copies can be read.
    """
    with Launched(tmp_path, *RUN, JOB, "native", "pynative") as run:
        run.wait_log("step 9\n")
        run.kill(0)
        assert run.wait() == 0, run.output
        assert len(digests(run)) == 1
        assert run.events("restored")[-1].data["steps_lost"] == 0
        (saved,) = [e for e in run.events("sealed") if e.data["save_kind"] == "last-gasp"]
        left = [e for e in run.events("member_exited") if e.data["code"] == 78]
        assert len(left) == WORLD - 1 and all(saved.t_mono < e.t_mono for e in left)


@pytest.mark.parametrize("how", ["file", "signal", "command"])
def test_graceful_exit_asked_of_one_rank(tmp_path: Path, undisturbed: set[str], how: str) -> None:
    env = {"JOB_CHECKPOINT": str(tmp_path / "ckpts")}
    with Launched(tmp_path, *RUN, JOB, env=env) as run:
        run.wait_log("step 9\n")
        if how == "file":
            (tmp_path / "graceful_exit.json").write_text(json.dumps({"GracefulExit": 1}))
        elif how == "signal":
            os.kill(run.pid(1), signal.SIGTERM)
        else:
            holdfast = Path(sys.executable).parent / "holdfast"
            subprocess.run([holdfast, "exit", str(run.run)], check=True, timeout=BOUND_S)
        assert run.wait() == 75, run.output
        assert len(run.said(EXIT_LINE)) == WORLD
    for rank in range(WORLD):
        for kind in ("ckpt", "mindir"):
            assert (tmp_path / f"rank_{rank}" / f"Net_train.{kind}").stat().st_size > 0
    # The same command continues at the next step. The file that requested the exit does not stop it again.
    with Launched(tmp_path, *RUN, JOB, env=env, name="u") as run:
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed
        assert "step 9\n" not in run.logs()


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': time.sleep(600)\n"
        "from mindspore.communication import init\ninit()\n"
    )
    env = {"HOLDFAST_START_S": "2"}
    with Launched(tmp_path, *RUN, "--max-restarts", "0", str(script), env=env) as run:
        assert run.wait() != 0
        assert "rank 1 of 3 did not come up within 2 s" in run.logs()


def test_msrun_seals_before_its_own_kill(tmp_path: Path) -> None:
    """msrun ends all workers within a second of the first death. The checkpoint exists by then."""
    from holdfast.store.manage.checkpoint_root import Root

    bin_dir = Path(sys.executable).parent
    env = {
        **os.environ,
        "PATH": f"{bin_dir}:{os.environ['PATH']}",
        "JOB_CHECKPOINT": str(tmp_path / "ckpts"),
        "JOB_DIE": "2@9",
    }
    command = [
        str(bin_dir / "msrun"), f"--worker_num={WORLD}", f"--local_worker_num={WORLD}", "--join=True",
        f"--log_dir={tmp_path / 'log'}", "--cluster_time_out=60", f"--master_port={free_port()}", JOB, "native",
    ]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, env=env, check=False, timeout=BOUND_S, capture_output=True)
    newest = Root(tmp_path / "ckpts").newest_valid().require()
    assert newest.step == 9
    with Launched(tmp_path, *RUN, JOB, "native", env={"JOB_CHECKPOINT": str(tmp_path / "ckpts")}) as run:
        assert run.wait() == 0, run.output
        assert len(digests(run)) == 1
        assert "step 9\n" not in run.logs() and "step 10\n" in run.logs()


def test_a_cut_connection_is_answered_inside_the_graph(tmp_path: Path, undisturbed: set[str]) -> None:
    """No process dies or restarts: the same gradients are summed again over new connections."""
    with Launched(tmp_path, *RUN, JOB, env={"JOB_CUT": "1@9"}) as run:
        assert run.wait() == 0, run.output
        assert digests(run) == undisturbed
        assert len(run.events("member_started")) == WORLD
        assert [e.data["action"] for e in run.events("verdict")] == ["retry_in_place"]
