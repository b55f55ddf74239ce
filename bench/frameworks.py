"""Other frameworks: from the death of a worker to a sealed checkpoint, and to training again.

    .venv-mindspore/bin/python bench/frameworks.py mindspore [--rounds 5] [--on-fault restart]
    .venv-tensorflow/bin/python bench/frameworks.py tensorflow [--rounds 5]
    .venv-faces/bin/python bench/frameworks.py faces [--rounds 5]

Runs the examples under ``holdfast run``, kills a worker from here at a random moment, and reads the event log. Prints
markdown: seconds after the kill, min / median / max.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast import journal
from holdfast.journal import Event

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
    """One line of the table."""
    if not values:
        return f"| {name} | 0 | - | - | - |"
    return f"| {name} | {len(values)} | {min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f} |"


def events(run: Path, kind: str) -> list[Event]:
    """Events of one kind so far."""
    path = run / "events.jsonl"
    return [e for e in journal.read(path).events if e.kind == kind] if path.exists() else []


def wait(run: Path, launched: subprocess.Popen[bytes], kind: str, count: int) -> Event:
    """The ``count``-th event of a kind."""
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
    """One kill; seconds by name."""
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
    # Where the lost worker alone is replaced, nothing is written.
    return {"last-gasp sealed": sealed[0].t_wall - killed_s, **found} if sealed else found


def wait_all(run: Path, launched: subprocess.Popen[bytes], nproc: int) -> list[Event]:
    """The start of every worker."""
    wait(run, launched, "member_started", nproc)
    return events(run, "member_started")


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("framework", choices=sorted(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--on-fault", default="auto", help="as of holdfast run")
    options = parser.parse_args()
    draw = random.Random(1)
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
