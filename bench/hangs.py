"""Time from the moment a rank hangs to the next committed step, in seconds and in median steps.

    python bench/hangs.py [--rounds 4] [--per-round 5] [--size 10m] [--kind stop --kind loop --kind deadlock]

Runs ``holdfast run`` on ``holdfast.drill.train`` with 4 workers. Each round has one run per kind of hang. Each run has
several hangs of random ranks, one after the recovery from the other. The kinds are SIGSTOP at a random moment, an
endless loop in a random phase, and a wait for a message that is never sent. No step may be lost. The median step is the
one that the hang detector had learned.

Prints markdown: min / median / max.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from holdfast.drill.fault_spec import HANGS, MOMENT, STEP_PHASES, Hang, InjectedFault
from holdfast.drill.runner import Runner
from holdfast.drill.timeline import fault_reports
from holdfast.event_log import Event

NPROC = 4
SPACING = 12
KINDS: tuple[Hang, ...] = ("stop", "loop", "deadlock")


class Found:
    """Times of one hang in seconds, and its median step.

    Each time begins at the hang and ends at the suspicion, the death of the culprit or the next committed step.
    """

    def __init__(self, suspected_s: float, killed_s: float, resumed_s: float, step_s: float) -> None:
        self.suspected_s = suspected_s
        self.killed_s = killed_s
        self.resumed_s = resumed_s
        self.step_s = step_s


def phase_of(kind: Hang, draw: random.Random) -> str:
    """Return the phase of the step at which a fault of this kind is injected."""
    return {"stop": MOMENT, "loop": draw.choice(STEP_PHASES), "deadlock": "forward"}.get(kind, "loading")


def round_of(base: Path, kind: Hang, number: int, count: int, size: str, draw: random.Random) -> list[Found]:
    """Run one job with ``count`` hangs. Raises: AssertionError when a hang was not answered as promised."""
    faults = [
        InjectedFault(kind, (draw.randrange(NPROC),), SPACING * (index + 1), phase_of(kind, draw))
        for index in range(count)
    ]
    command = ["-m", "holdfast.drill.train", "--size", size, "--steps", str(SPACING * (count + 1))]
    runner = Runner(base, NPROC, command, lambda _name, _step, _done: None)
    outcome = runner.run(f"{kind}-{number:03d}", (), faults, seed=number)
    assert outcome.code == 0 and not outcome.stalled, outcome.directory
    reports = fault_reports(outcome.injected, outcome.events)
    assert len(reports) == count and all(report.steps_lost == 0 for report in reports), reports
    moments = [injected.moment_ns / 1e9 for injected in outcome.injected]
    return [
        found(outcome.events, since_s, until_s, report.ranks[0])
        for report, since_s, until_s in zip(reports, moments, [*moments[1:], float("inf")], strict=True)
    ]


def found(events: Sequence[Event], since_s: float, until_s: float, rank: int) -> Found:
    """Return the times of one hang, from the event log. Raises: AssertionError when another rank was blamed."""
    mine = [event for event in events if since_s <= event.t_mono < until_s]
    (hang,) = [event for event in mine if event.kind == "hang" and event.data["answer"] != "wait"]
    assert hang.data["ranks"] == [rank], (rank, hang.data)
    stalled = next(event for event in mine if event.kind == "stalled")
    killed = next(event for event in mine if event.kind == "member_exited" and event.data["rank"] == rank)
    resumed = [event for event in mine if event.kind == "resumed"][-1]
    suspected_s, killed_s, resumed_s = (event.t_mono - since_s for event in (stalled, killed, resumed))
    return Found(suspected_s, killed_s, resumed_s, float(stalled.data["step_s"]))


def row(name: str, values: Sequence[float]) -> str:
    """Return one line of the table."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"| {name} | {len(values)} | {low:.2f} | {middle:.2f} | {high:.2f} |"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--size", default="10m")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=HANGS, action="append")
    given = parser.parse_args()
    draw = random.Random(given.seed)
    kinds: list[Hang] = given.kind or list(KINDS)
    hangs: dict[Hang, list[Found]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        for number in range(given.rounds):
            for kind in kinds:
                some = round_of(Path(directory), kind, number, given.per_round, given.size, draw)
                hangs[kind] += some
                print(f"round {number} {kind}: {[round(f.resumed_s, 2) for f in some]} s", file=sys.stderr)
    print("| after the hang of a random rank | n | min | median | max |\n|---|---|---|---|---|")
    for kind in kinds:
        some = hangs[kind]
        print(row(f"{kind}: median step, s", [f.step_s for f in some]))
        print(row(f"{kind}: suspected, s", [f.suspected_s for f in some]))
        print(row(f"{kind}: named and dead, s", [f.killed_s for f in some]))
        print(row(f"{kind}: named and dead, median steps", [f.killed_s / f.step_s for f in some]))
        print(row(f"{kind}: next committed step at full size, s", [f.resumed_s for f in some]))
        print(row(f"{kind}: of that the recovery itself, s", [f.resumed_s - f.killed_s for f in some]))


if __name__ == "__main__":
    main()
