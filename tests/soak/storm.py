"""Second and third faults inside every phase of a recovery, and kills that come faster than recoveries end.

``python -m tests.soak.storm [--seconds 300] [--every 2] [--seed 1]``

A *cascade* kills a worker, waits for one phase of the recovery in the event log, and kills again in this phase. The
second victim is a survivor, the newcomer, the controller or the agent. Every second cascade kills a third time, in the
recovery from the second kill. The *storm* kills one worker every few seconds in any phase, and checks that steps are
still committed. The exit code is 0 only if the job recovered from every cascade, made progress in the storm, and ended
with the weights of the undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from holdfast.drill.digest import STATE, digest_of_results
from holdfast.drill.exercise import Exercise, require_torch
from holdfast.runtime.node.process_info import alive
from holdfast.text import plural
from tests.soak.chaos import POLL_S, Chaos, Tally

PHASES = ("fenced", "quiesced", "verdict", "members_replaced", "joined", "generation_started", "resumed")
"""Events of the log that mark the phases of a recovery."""
VICTIMS = ("survivor", "newcomer", "controller", "agent")
PHASE_S_MAX = (
    10.0  # longest wait for a phase: some recoveries have no such phase, and then no further kill follows
)
STEPS_PER_CASCADE = 60  # steps are committed while the next cascade is chosen
TRAININGS_MAX = 8  # usually one and a half are enough for all cascades
STEPS_PER_S = 40
SAVE_EVERY = 20
NPROC = 4
WINDOW_S = 30.0  # the job must commit a step in each such time of the storm


def cells() -> list[tuple[str, str, int]]:
    """Return (phase, victim, number of kills after the first) of every cascade. A newcomer exists after its start."""
    pairs = [
        (phase, victim)
        for phase, victim in product(PHASES, VICTIMS)
        if victim != "newcomer" or phase in ("members_replaced", "joined", "generation_started", "resumed")
    ]
    return [(phase, victim, 1 + number % 2) for number, (phase, victim) in enumerate(pairs)]


class Storm(Chaos):
    """A training that is hit by faults while it recovers."""

    def cascades(self, plan: Sequence[tuple[str, str, int]]) -> list[bool]:
        """Run cascades until the training ends. Return for each whether a kill inside its phase was made.

        Not every recovery has a phase twice.
        """
        struck: list[bool] = []
        for phase, victim, more in plan:
            if not self.settle():
                break
            done = self._cascade(phase, victim, more)
            if not done and self._launcher.poll() is not None:
                break  # the training ended before the phase came
            struck.append(done > 0)
            print(f"  {phase:18} {victim:10} {done} of {more} more kills", flush=True)
        return struck

    def storm(self, duration_s: float, every_s: float) -> list[int]:
        """Kill a worker every ``every_s`` after the first checkpoint. Return the steps committed per ``WINDOW_S``."""
        self.settle(SAVE_EVERY)
        self._await("sealed", 0)
        progress: list[int] = []
        since_s = window_s = time.monotonic()
        step = self._run.committed_step()
        while time.monotonic() < since_s + duration_s and self._launcher.poll() is None:
            self._kill(self._pid_of("worker"))
            time.sleep(every_s)
            self._run.poll()
            if time.monotonic() - window_s >= WINDOW_S:
                reached = max(step, self._run.committed_step())
                progress.append(reached - step)
                print(f"  {progress[-1]} steps in {WINDOW_S:g} s, at step {reached}", flush=True)
                step, window_s = reached, time.monotonic()
        return progress

    def close(self) -> None:
        """Let the training end."""
        self._finish()

    def _cascade(self, phase: str, victim: str, more: int) -> int:
        """Run one cascade. Return the number of kills after the first one."""
        step = self._run.committed_step()
        before = {seen.member for seen in self._run.workers().values()}
        since_s = time.monotonic()
        seen = len(self._run.events)
        self._kill(self._pid_of("worker"))
        done = 0
        for _ in range(more):
            seen = self._await(phase, seen)
            if not seen or not self._kill(self._later_victim(victim, before)):
                break
            done += 1
        if self.settle(step):
            self._tally.times_s[f"{done + 1} kills, {victim}"].append(time.monotonic() - since_s)
        return done

    def _await(self, phase: str, after: int) -> int:
        """Wait for the next event of ``phase``. Return the number of events up to it, or 0 if none comes."""
        until_s = time.monotonic() + PHASE_S_MAX
        while time.monotonic() < until_s and self._launcher.poll() is None:
            self._run.poll()
            for number in range(after, len(self._run.events)):
                if self._run.events[number].kind == phase:
                    return number + 1
            time.sleep(POLL_S / 10)
        return 0

    def _later_victim(self, victim: str, before: set[int]) -> int:
        if victim in ("controller", "agent"):
            return self._pid_of(victim)
        until_s = time.monotonic() + PHASE_S_MAX
        while time.monotonic() < until_s:
            living = [
                s for s in self._run.workers().values() if (s.member in before) == (victim == "survivor")
            ]
            if living:
                return self._draw.choice(sorted(living, key=lambda s: s.rank)).pid
            time.sleep(POLL_S / 10)
        return 0

    def _kill(self, pid: int) -> bool:
        if not pid or not alive(pid):
            return False
        worker = any(seen.pid == pid for seen in self._run.workers().values())
        os.kill(pid, signal.SIGKILL)
        if worker:
            self._struck_s = time.monotonic()
        self._tally.faults += 1
        return True


def trained(base: Path, name: str, steps: int, seed: int, tally: Tally, nproc: int = NPROC) -> Storm:
    """Start a training of ``steps`` steps."""
    place = base / name
    place.mkdir(parents=True)
    exercise = Exercise.builtin(nproc=nproc, size="tiny", layout="ddp", steps=steps, save_every=SAVE_EVERY)
    return Storm(place, exercise, random.Random(seed), tally)


def identical(
    base: Path, struck: Sequence[Storm], name: str, steps: int, tally: Tally, nproc: int = NPROC
) -> bool:
    """Return True if the weights of all trainings are equal to those of the undisturbed training."""
    calm = trained(base, name, steps, 0, tally, nproc)
    calm.close()
    wanted = digest_of_results(calm.results, nproc, STATE)
    return all(digest_of_results(each.results, nproc, STATE) == wanted != "" for each in struck)


def cascaded(
    base: Path, plan: Sequence[tuple[str, str, int]], steps: int, seed: int, tally: Tally, nproc: int = NPROC
) -> list[Storm]:
    """Run the cascades of a plan one after the other. Return the trainings that they ran in.

    A wait for a phase that never comes costs steps. A training may therefore end before the plan does.
    """
    trainings: list[Storm] = []
    struck: list[bool] = []
    while len(struck) < len(plan) and len(trainings) < TRAININGS_MAX:
        number = len(trainings)
        training = trained(base, f"cascades-{number}", steps, seed + number, tally, nproc)
        struck += training.cascades(plan[len(struck) :])
        training.close()
        trainings.append(training)
    print(
        f"cascades: {sum(struck)} of {len(plan)} struck in their phase, in {plural(len(trainings), 'training')}"
    )
    if sum(struck) < len(plan):
        tally.failures.append("not all cascades were struck in their phase")
    return trainings


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(description="kill again while the job recovers")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run-dir", type=Path, default=Path("runs"))
    given = parser.parse_args(argv)
    require_torch()
    base, tally = given.run_dir.absolute() / time.strftime("storm-%Y%m%d-%H%M%S"), Tally()
    plan = cells()
    steps = STEPS_PER_CASCADE * len(plan)
    trainings = cascaded(base, plan, steps, given.seed, tally)
    same = identical(base, trainings, "cascades-undisturbed", steps, tally)
    print("\n".join(tally.rows()))
    print(f"cascades: weights {'identical' if same else 'DIFFERENT'}")
    steps = int(STEPS_PER_S * given.seconds)
    struck = trained(base, "storm", steps, given.seed, tally)
    kills = tally.faults
    progress = struck.storm(given.seconds, given.every)
    kills = tally.faults - kills
    struck.close()
    still = identical(base, [struck], "storm-undisturbed", steps, tally)
    print(
        f"storm: {kills} kills, one every {given.every:g} s; steps per {WINDOW_S:g} s: {progress}; "
        f"weights {'identical' if still else 'DIFFERENT'}; logs in {base}"
    )
    for failure in tally.failures:
        print(f"FAILED: {failure}")
    good = same and still and not tally.failures and progress and min(progress) > 0
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
