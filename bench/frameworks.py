"""Other frameworks: time from the death of a worker to a sealed checkpoint, and to the next trained step.

    .venv-mindspore/bin/python bench/frameworks.py mindspore [--rounds 5] [--on-fault restart]
    .venv-mindspore/bin/python bench/frameworks.py mindspore --beside-msrun [--rounds 4]
    .venv-tensorflow/bin/python bench/frameworks.py tensorflow [--rounds 5]
    .venv-faces/bin/python bench/frameworks.py faces [--rounds 5]

Runs the examples under ``holdfast run``, kills a worker from this process at a random moment, and reads the event log.
Prints markdown: seconds after the kill, min / median / max. ``--beside-msrun`` measures three ways in turn: the lost
worker is replaced; all workers are restarted; a stock script runs under msrun. The agent hook of that msrun
(`compat/taskd_agent.py`, as in MindX) starts all workers again from the newest ``ModelCheckpoint``, which is saved
every 20 steps.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from holdfast import event_log
from holdfast.compat.packages import remove, site, write
from holdfast.event_log import Event

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
JOBS: dict[str, tuple[int, tuple[tuple[str, ...], ...]]] = {
    "mindspore": (
        4,
        (
            ("mindspore_last_gasp.py", "--epochs", "30", "--width", "256"),
            ("mindspore_last_gasp.py", "--epochs", "4", "--width", "3000"),
        ),
    ),
    "tensorflow": (2, (("tensorflow_resume.py", "--epochs", "12"),)),
    "faces": (4, (("hf_trainer.py", "--steps", "9000"), ("lightning_module.py", "--epochs", "900"))),
}
FLAGS: dict[str, tuple[str, ...]] = {
    "mindspore": ("--framework", "mindspore"),
    "tensorflow": ("--framework", "tensorflow"),
    "faces": ("--preload", "transformers.trainer,transformers.models.gpt2,lightning.pytorch"),
}
BOUND_S = 240.0


def row(name: str, values: Sequence[float]) -> str:
    """Return one line of the table."""
    if not values:
        return f"| {name} | 0 | - | - | - |"
    return f"| {name} | {len(values)} | {min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f} |"


def events(run: Path, kind: str) -> list[Event]:
    """Return the events of one kind that have been logged so far."""
    path = run / "events.jsonl"
    return [e for e in event_log.read(path).events if e.kind == kind] if path.exists() else []


def wait(run: Path, launched: subprocess.Popen[bytes], kind: str, count: int) -> Event:
    """Wait for the ``count``-th event of a kind, and return it."""
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        found = events(run, kind)
        if len(found) >= count:
            return found[count - 1]
        if launched.poll() is not None:
            break
        time.sleep(0.02)
    raise SystemExit(f"{run}: no {kind}; see its logs")


def once(
    framework: str, base: Path, number: int, job: tuple[str, ...], on_fault: str, draw: random.Random
) -> dict[str, float]:
    """Run a job and kill one worker. Return the seconds from the kill to each event, by name."""
    nproc, _ = JOBS[framework]
    folder = base / f"{framework}-{number:03d}"
    folder.mkdir()
    script, *arguments = job
    command = [
        str(Path(sys.executable).parent / "holdfast"), "run", "--run-id", "t", *FLAGS[framework],
        "--on-fault", on_fault, "--nproc-per-node", str(nproc), str(EXAMPLES / script), *arguments,
    ]  # fmt: skip
    with (folder / "out.log").open("wb") as out:
        launched = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    run = folder / "runs" / "t"
    wait(run, launched, "resumed", 1)
    time.sleep(1.0 + draw.random())
    pids = [int(e.data["pid"]) for e in wait_all(run, launched, nproc)]
    killed_s = time.time()
    os.kill(draw.choice(pids), signal.SIGKILL)
    resumed = wait(run, launched, "resumed", 2)
    sealed = [e for e in events(run, "sealed") if e.data["save_kind"] == "last-gasp"]
    restored = events(run, "restored")[1]
    if launched.poll() is None:
        launched.send_signal(signal.SIGINT)
        time.sleep(0.3)
        launched.send_signal(signal.SIGINT)
    launched.wait(BOUND_S)
    assert restored.data["steps_lost"] == 0
    found = {"new step committed by all workers": resumed.t_wall - killed_s}
    # If only the lost worker is replaced, no checkpoint is written.
    return {"last-gasp sealed": sealed[0].t_wall - killed_s, **found} if sealed else found


def stock(base: Path, number: int, draw: random.Random) -> dict[str, float]:
    """Run the stock script under msrun and kill one worker.

    Returns the seconds until every rank has done a step again, and how many steps are done twice.
    """
    folder = base / f"msrun-{number:03d}"
    folder.mkdir()
    bin_dir = Path(sys.executable).parent
    script = str(Path(__file__).with_name("plain_mindspore.py"))
    env = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}", "MS_ENABLE_TFT": "{RSC:1}"}
    command = [
        str(bin_dir / "msrun"), "--worker_num=4", "--local_worker_num=4", "--join=True", f"--log_dir={folder}/log",
        f"--master_port={draw.randrange(20000, 32000)}", "--cluster_time_out=120", script, "--folder", str(folder),
    ]  # fmt: skip
    with (folder / "out.log").open("wb") as out:
        launched = subprocess.Popen(
            command, cwd=folder, stdout=out, stderr=out, env=env, start_new_session=True
        )
    try:
        until(lambda: all(len(steps(folder, rank)) > 25 for rank in range(4)), launched)
        time.sleep(draw.random())
        pids = workers(folder)
        done = min(steps(folder, rank)[-1][0] for rank in range(4))
        killed_s = time.time()
        os.kill(draw.choice(pids), signal.SIGKILL)
        until(lambda: all(found and found[0][1] > killed_s for found in all_steps(folder)), launched)
        first = all_steps(folder)
        lost = done - (first[0][0][0] - 1)
        return {"stock msrun, all restarted from the newest of 1 in 20 steps: a step of all workers":
                max(found[0][1] for found in first) - killed_s, "the same: steps done twice": float(lost)}  # fmt: skip
    finally:
        os.killpg(launched.pid, signal.SIGKILL)
        for pid in workers(folder):
            os.kill(pid, signal.SIGKILL)


def until(ready: Callable[[], bool], launched: subprocess.Popen[bytes]) -> None:
    """Poll until ``ready()`` is true. Raises: SystemExit: the job ended, or took too long."""
    deadline_s = time.monotonic() + BOUND_S
    while not ready():
        if launched.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit("the stock job ended or hangs; see its logs")
        time.sleep(0.02)


def all_steps(folder: Path) -> list[list[tuple[int, float]]]:
    """Return :func:`steps` of each rank."""
    return [steps(folder, rank) for rank in range(4)]


def steps(folder: Path, rank: int) -> list[tuple[int, float]]:
    """Return the steps that the newest process of a rank of the stock script has printed, each with its Unix time."""
    path = folder / "log" / f"worker_{rank}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return [(int(step), float(at)) for step, at in re.findall(r"^step (\d+) ([\d.]+)\n", text, re.M)]


def workers(folder: Path) -> list[int]:
    """Return the process ids of the stock script's workers, without the scheduler."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            mine = str(folder).encode() in (entry / "cmdline").read_bytes()
            if mine and b"MS_ROLE=MS_WORKER" in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # the process has ended
    return found


def beside_msrun(base: Path, rounds: int, draw: random.Random) -> None:
    """Measure the three ways in turn, on the small network."""
    write(site())
    job = JOBS["mindspore"][1][0]
    found: dict[str, list[float]] = {}
    try:
        for number in range(rounds):
            for on_fault, name in (
                ("auto", "the lost worker replaced"),
                ("restart", "all workers restarted"),
            ):
                for what, value in once(
                    "mindspore", base, 2 * number + (on_fault == "auto"), job, on_fault, draw
                ).items():
                    found.setdefault(f"{name}: {what}", []).append(value)
            for what, value in stock(base, number, draw).items():
                found.setdefault(what, []).append(value)
    finally:
        remove(site())
        tell(found)


def tell(found: dict[str, list[float]]) -> None:
    """Print the table."""
    print("\n| seconds after kill -9 of a worker | n | min | median | max |\n|---|---|---|---|---|")
    for what, values in found.items():
        print(row(what, values))


def wait_all(run: Path, launched: subprocess.Popen[bytes], nproc: int) -> list[Event]:
    """Wait until every worker has started, and return the events of these starts."""
    wait(run, launched, "member_started", nproc)
    return events(run, "member_started")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=sorted(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on-fault", default="auto", help="as of holdfast run")
    parser.add_argument("--beside-msrun", action="store_true", help="MindSpore: in turns with stock msrun")
    options = parser.parse_args()
    draw = random.Random(1)
    if options.beside_msrun:
        with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as base:
            beside_msrun(Path(base), options.rounds, draw)
        return
    number = 0
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as base:
        for job in JOBS[options.framework][1]:
            rounds = []
            for _ in range(options.rounds):
                rounds.append(once(options.framework, Path(base), number, job, options.on_fault, draw))
                number += 1
            print(f"\n`{' '.join(job)}`\n")
            print("| seconds after kill -9 of a worker | n | min | median | max |\n|---|---|---|---|---|")
            for name in rounds[0]:
                print(row(name, [found[name] for found in rounds]))


if __name__ == "__main__":
    main()
