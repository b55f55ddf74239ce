"""Second and third faults inside every phase of a recovery, and kills that come faster than recoveries end.

``python -m holdfast.drill.storm [--seconds 300] [--every 2] [--seed 1]``

A *cascade* kills a worker, watches the event log for one phase of the recovery, and kills again in it: a survivor, the
newcomer, the controller or the agent; then, for every other cascade, a third time in the recovery from that. The
*storm* kills one worker every few seconds, whatever the job is doing, and looks whether steps go on being committed.
The exit code is 0 only when every cascade was recovered from, the storm was made progress in, and the final weights are
those of the undisturbed run.
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

from holdfast.drill.chaos import POLL_S, Chaos, Tally
from holdfast.drill.digest import STATE, digest_of_results
from holdfast.drill.exercise import Exercise, require_torch
from holdfast.runtime.node.process_info import alive
from holdfast.text import plural

PHASES = ("fenced", "quiesced", "verdict", "members_replaced", "joined", "generation_started", "resumed")
"""Events of the log that stand for the phases of a recovery."""
VICTIMS = ("survivor", "newcomer", "controller", "agent")
PHASE_S_MAX = 10.0  # a recovery that takes another way never shows the phase: then nothing more is killed
STEPS_PER_CASCADE = 60  # steps go on while the next one is chosen
TRAININGS_MAX = 8  # one and a half does for all cascades
STEPS_PER_S = 40
SAVE_EVERY = 20
NPROC = 4
WINDOW_S = 30.0  # the storm must have committed a step in each


def cells() -> list[tuple[str, str, int]]:
    """(phase, victim, faults after the first one) of every cascade. A newcomer exists from its start on."""
    pairs = [
        (phase, victim)
        for phase, victim in product(PHASES, VICTIMS)
        if victim != "newcomer" or phase in ("members_replaced", "joined", "generation_started", "resumed")
    ]
    return [(phase, victim, 1 + number % 2) for number, (phase, victim) in enumerate(pairs)]


class Storm(Chaos):
    """A training that is struck while it recovers."""

    def cascades(self, plan: Sequence[tuple[str, str, int]]) -> list[bool]:
        """Run as many of them as the training has time for; whether each had a kill inside the phase.

        Not every recovery shows a phase twice.
        """
        struck: list[bool] = []
        for phase, victim, more in plan:
            if not self.settle():
                break
            done = self._cascade(phase, victim, more)
            if not done and self._launcher.poll() is not None:
                break  # it was over before the phase came
            struck.append(done > 0)
            print(f"  {phase:18} {victim:10} {done} of {more} more kills", flush=True)
        return struck

    def storm(self, duration_s: float, every_s: float) -> list[int]:
        """Kill a worker every ``every_s``, from the first checkpoint on; steps committed in each window of
        ``WINDOW_S``."""
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
        """Kills that were made after the first one."""
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
        """Number of events up to the next one of ``phase``; 0 when none comes."""
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
    """A training of ``steps`` steps that has begun."""
    place = base / name
    place.mkdir(parents=True)
    exercise = Exercise.builtin(nproc=nproc, size="tiny", layout="ddp", steps=steps, save_every=SAVE_EVERY)
    return Storm(place, exercise, random.Random(seed), tally)


def identical(
    base: Path, struck: Sequence[Storm], name: str, steps: int, tally: Tally, nproc: int = NPROC
) -> bool:
    """Whether the weights of all are those of the same training undisturbed."""
    calm = trained(base, name, steps, 0, tally, nproc)
    calm.close()
    wanted = digest_of_results(calm.results, nproc, STATE)
    return all(digest_of_results(each.results, nproc, STATE) == wanted != "" for each in struck)


def cascaded(
    base: Path, plan: Sequence[tuple[str, str, int]], steps: int, seed: int, tally: Tally, nproc: int = NPROC
) -> list[Storm]:
    """The trainings in which the plan's cascades were struck, one after the other.

    A wait for a phase that does not show costs steps, so a training may be over before the plan is.
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
    """Entry point."""
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
