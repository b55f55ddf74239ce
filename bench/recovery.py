"""Time from the death of a worker to the next committed step: Holdfast and torchrun in turn, on the same model.

    python bench/recovery.py [--rounds 20] [--torchrun-rounds 5] [--size 10m] [--spares 1]

Holdfast: ``holdfast run`` on ``holdfast.drill.train``; a random rank is killed at a random moment of a random step.
torchrun: ``bench/plain.py``, the same model and data, a checkpoint every 10 steps, as its own documentation shows. It
    runs with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, because without this variable torchrun 2.13 never restarts a
    gloo job.

Prints markdown: seconds, min / median / max.
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
from itertools import pairwise
from pathlib import Path

from holdfast.drill.fault_spec import MOMENT, InjectedFault
from holdfast.drill.runner import Runner
from holdfast.drill.timeline import fault_reports
from holdfast.drill.trace import read_trace

NPROC = 4
STEPS = 32
KILL_FROM, KILL_TO = 15, 25
SPARE_STEPS = 15  # extra steps, in which a spare is built
MEMORY_EVERY = "8"  # for pure FSDP, where each rank alone holds its shards


def row(name: str, values: Sequence[float]) -> str:
    """Return one line of the table."""
    if not values:
        return f"| {name} | 0 | - | - | - |"
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"| {name} | {len(values)} | {low:.3f} | {middle:.3f} | {high:.3f} |"


def ours(
    base: Path, number: int, size: str, spares: int, draw: random.Random, layout: str = "ddp"
) -> dict[str, float]:
    """Run one job under Holdfast and kill a rank. Return the seconds by name. With spares, the kill waits for them."""
    late = SPARE_STEPS if spares else 0
    fault = InjectedFault("kill", (draw.randrange(NPROC),), draw.randrange(KILL_FROM, KILL_TO) + late, MOMENT)
    trace = base / f"trace-{number:03d}"
    command = [
        "-m",
        "holdfast.drill.train",
        "--layout",
        layout,
        "--size",
        size,
        "--steps",
        str(STEPS + late),
        "--trace",
        str(trace),
    ]
    if spares:
        command = ["--spares", str(spares), *command]
    if layout == "fsdp":
        command = ["--memory-every", MEMORY_EVERY, *command]
    runner = Runner(base, NPROC, command, lambda _name, _step, _done: None)
    outcome = runner.run(f"ours-{number:03d}", (), [fault], seed=number)
    (report,) = fault_reports(outcome.injected, outcome.events)
    if spares:
        assert [e.data["state"] for e in outcome.events if e.kind == "spare_called"] == ["ready"]
    assert outcome.code == 0 and report.resumed_s is not None and report.steps_lost == 0, report
    assert report.detected_s is not None and report.quiesced_s is not None
    found = {"detected": report.detected_s, "quiesced": report.quiesced_s, "resumed": report.resumed_s}
    restored = [float(e.data["restored_s"]) for e in outcome.events if e.kind == "recovered"]
    found["restored"] = restored[0]
    found["usual"] = usual_s(trace)
    found["beyond"] = found["resumed"] - found["usual"]
    if report.freed_s:
        found["freed"] = report.freed_s
    return found


def usual_s(trace: Path) -> float:
    """Return the seconds of a usual step of this run."""
    pairs = [read_trace(path) for path in trace.iterdir()]
    return statistics.median(
        (after[1] - before[1]) / 1e9 for each in pairs for before, after in pairwise(each)
    )


def theirs(base: Path, number: int, size: str, draw: random.Random) -> tuple[float, int] | None:
    """Run one job under torchrun and kill a rank.

    Returns the seconds to the next step and the steps done again; None if the job did not continue.
    """
    place = base / f"torchrun-{number:03d}"
    place.mkdir(parents=True)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NPROC)]
    command = [*launcher,
               "--max-restarts", "3", str(Path(__file__).with_name("plain.py")), "--size", size,
               "--steps", str(STEPS), "--trace", str(place),
               "--save-every", "10", "--checkpoint", str(place)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    victim, step = draw.randrange(NPROC), draw.randrange(KILL_FROM, KILL_TO)
    with (place / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    trace, pid_file = place / f"rank-{victim:05d}.trace", place / f"rank-{victim:05d}.pid"
    try:
        while not (trace.exists() and any(done >= step for done, _ in read_trace(trace))):
            if job.poll() is not None:
                return None
            time.sleep(0.002)
        time.sleep(draw.uniform(0.0, 0.2))
        killed_ns = time.monotonic_ns()
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
        job.wait(120)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    # The first step that began after the kill. A restarted rank writes its trace from the step of the checkpoint.
    pairs = read_trace(place / "rank-00000.trace")
    before = max((done for done, moment in pairs if moment <= killed_ns), default=0)
    after = [(done, moment) for done, moment in pairs if moment > killed_ns]
    restart = next((i for i in range(1, len(pairs)) if pairs[i][0] <= pairs[i - 1][0]), None)
    if restart is None or not after:
        return None
    done, moment = pairs[restart]
    return (moment - killed_ns) / 1e9, max(before, pairs[restart - 1][0]) - (done - 1)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--torchrun-rounds", type=int, default=5)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spares", type=int, default=0)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    found: dict[str, list[float]] = {
        name: [] for name in ("detected", "freed", "quiesced", "restored", "resumed", "usual", "beyond")
    }
    peers: list[tuple[float, int] | None] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        for number in range(given.rounds):
            for name, seconds in ours(Path(directory), number, given.size, given.spares, draw).items():
                found[name].append(seconds)
            if (
                number * given.torchrun_rounds // given.rounds > len(peers) - 1
                and len(peers) < given.torchrun_rounds
            ):
                peers.append(theirs(Path(directory), number, given.size, draw))
            print(
                f"round {number}: {found['resumed'][-1]:.3f} s, torchrun {peers[-1] if peers else '-'}",
                file=sys.stderr,
            )
    back = [peer for peer in peers if peer is not None]
    print("| seconds after kill -9 of a random rank | n | min | median | max |\n|---|---|---|---|---|")
    print(row("control plane knows", found["detected"]))
    if found["freed"]:
        print(row("last survivor out of its collective", found["freed"]))
    print(row("all survivors settled", found["quiesced"]))
    print(row("all ranks hold the state, the step begins again", found["restored"]))
    print(row("next committed step, Holdfast (0 steps lost)", found["resumed"]))
    print(row("the same without one usual step of its run", found["beyond"]))
    print(row("a usual step", found["usual"]))
    lost = [steps for _, steps in back]
    never = len(peers) - len(back)
    what = f"{min(lost)} to {max(lost)} steps lost" if lost else "never"
    name = f"next step, torchrun ({what}; {never} of {len(peers)} never came back)"
    print(row(name, [seconds for seconds, _ in back]))


if __name__ == "__main__":
    main()
