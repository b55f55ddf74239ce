"""The fault injector: a separate process that kills, stops and traps workers of a run.

The injector shares only files with the run: it reads the status pages and the event log, and sends SIGKILL or SIGSTOP.
A fault at a named phase is a *trap*: an order on the victim's status page. When the victim reaches the phase, it waits
for the signal of the injector (``hold``), or raises, exits or hangs on its own. A fault at a random moment comes after
a random delay, in any phase of the step.

For each fault that happened the injector writes a JSON line (:class:`Injected`).

``python -m holdfast.drill.inject RUN_DIRECTORY PLAN.json OUT.jsonl``
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from holdfast.core.protocol.status_page import EPOCH_END, Phase, TrapAction, Word, pack_trap
from holdfast.drill.fault_spec import (
    DOUBT,
    FLIPS,
    FROM_OUTSIDE,
    HANGS,
    MOMENT,
    PHASES,
    UNVOTED,
    InjectedFault,
    Kind,
)
from holdfast.drill.observer import GONE, ObservedRun, PageSeen
from holdfast.runtime.node.process_info import alive
from holdfast.runtime.node.rundir import open_log
from holdfast.runtime.node.status_page import Page

POLL_S = 0.0005
HELD_S_MAX = 0.01
FIRST_STEP_S = 0.05
VOTE_S = 0.002
SETTLE_S = 0.01
FENCED_S_MAX = 1.0
DELAY_S = 0.06
SPIN_S = 0.0001
FREED_S_MAX = 2.0
GONE_S_MAX = 1.0
HANG_S_MAX = 100.0  # within this time the run finds a hang and kills the victim
ACTIONS: dict[Kind, TrapAction] = {
    "kill": TrapAction.HOLD,
    "exception": TrapAction.RAISE,
    "exit": TrapAction.EXIT,
    "stop": TrapAction.HOLD,
    "loop": TrapAction.LOOP,
    "gil": TrapAction.GIL,
    "deadlock": TrapAction.DEADLOCK,
    "loader": TrapAction.WAIT,
    "flip": TrapAction.FLIP,
    "flip-optimizer": TrapAction.FLIP_STATE,
}
TRAP_PHASES: dict[str, int] = {
    **{phase: Phase[phase.upper()] for phase in PHASES if phase != "epoch"},
    "epoch": EPOCH_END,
    UNVOTED: Phase.VOTE,
}
SIGNALS: dict[Kind, signal.Signals] = {"stop": signal.SIGSTOP}
"""Signals that the injector sends; SIGKILL for kinds that are not listed."""


class InjectionPlan(msgspec.Struct, frozen=True):
    """The faults to inject, in order. The injector draws its random delays from ``seed``."""

    faults: tuple[InjectedFault, ...]
    seed: int
    world_size: int


class Injected(msgspec.Struct, frozen=True):
    """One fault that happened.

    ``phase`` and ``step`` are the values on the first victim's status page after its death. ``committed_step`` is
    the highest step that any page of the run proved as committed just before the fault. ``moment_ns`` is the time of
    the fault (CLOCK_MONOTONIC).
    """

    number: int
    kind: str
    ranks: tuple[int, ...]
    members: tuple[int, ...]
    asked_phase: str
    phase: str
    step: int
    committed_step: int
    moment_ns: int
    freed_ns: int = 0  # time at which the last survivor left its collectives; 0: not every survivor reported


class FaultInjector:
    """The injector of the faults of a plan, one after the other.

    It injects a fault only after the run has recovered from the previous fault. It does not wait after a flipped bit.

    Args:
        run: the run.
        plan: the faults to inject.
        out: file to which a line is appended for each :class:`Injected` fault.
    """

    def __init__(self, run: ObservedRun, plan: InjectionPlan, out: Path) -> None:
        self.run = run
        self.plan = plan
        self.out = out
        self._draw = random.Random(plan.seed)

    def work(self) -> None:
        """Inject all faults of the plan. Return early if the run ends."""
        for number, fault in enumerate(self.plan.faults):
            injected = self._inject(number, fault)
            if injected is None:
                return
            with os.fdopen(open_log(self.out), "ab", buffering=0) as file:
                file.write(msgspec.json.encode(injected) + b"\n")
            if fault.kind not in FLIPS and not self._wait_recovered(injected.moment_ns / 1e9):
                return  # no wait after a flip, which the run may find only after the next fault

    def _wait_recovered(self, since_s: float) -> bool:
        while not self._resumed(since_s):
            if self.run.ended:
                return False
            time.sleep(0.01)
        return True

    def _resumed(self, since_s: float) -> bool:
        self.run.poll()
        return any(event.t_mono > since_s for event in self.run.all_of("resumed"))

    def _wait_workers(self) -> dict[int, PageSeen] | None:
        """Return all workers of the run once they are alive; None if the run has ended."""
        while True:
            self.run.poll()
            if self.run.ended:
                return None
            workers = self.run.workers()
            if len(workers) == self.plan.world_size:
                return workers
            time.sleep(0.01)

    def _inject(self, number: int, fault: InjectedFault) -> Injected | None:
        while (workers := self._wait_workers()) is not None:
            victims = [workers[rank] for rank in fault.ranks]
            try:
                page = Page.open(victims[0].path)
            except OSError:
                continue
            others = [seen for rank, seen in workers.items() if rank not in fault.ranks]
            with closing(page), ExitStack() as stack:
                try:
                    survivors = [stack.enter_context(closing(Page.open(seen.path))) for seen in others]
                except OSError:
                    continue
                at = self._strike(page, fault, victims, survivors)
                if at is not None:
                    limit_s = HANG_S_MAX if fault.kind in HANGS else FREED_S_MAX
                    pids = [seen.pid for seen in others]
                    freed_ns = 0 if fault.kind in FLIPS else self._freed(survivors, pids, limit_s)
                    return self._report(number, fault, victims, page, *at, freed_ns)
        return None

    def _strike(
        self, page: Page, fault: InjectedFault, victims: list[PageSeen], survivors: list[Page]
    ) -> tuple[int, int] | None:
        """Inject one fault.

        Args:
            page: status page of the first victim.
            fault: the fault.
            victims: the ranks to hit.
            survivors: status pages of the other ranks.

        Returns:
            ``(moment_ns, committed_step)``, or None if the victim was replaced before the fault.
        """
        if fault.phase == MOMENT:
            if not self._wait_step(page, fault.step, victims[0].pid):
                return None
            step_s = page[Word.STEP_NS] / 1e9 or FIRST_STEP_S
            time.sleep(self._draw.uniform(0.0, 1.2 * step_s))
            return None if page.state()[1] in GONE else self._hit(fault.kind, victims)
        if fault.phase == DOUBT:
            return self._strike_in_doubt(page, fault, victims)
        phase = TRAP_PHASES[fault.phase]
        page[Word.TRAP] = pack_trap(ACTIONS[fault.kind], phase, fault.step)
        if not self._wait_sprung(page, victims[0].pid):
            return None
        if fault.phase == UNVOTED:
            while all(each.state() != page.state() for each in survivors):
                if not self._go_on(victims[0].pid):
                    return None
        if fault.kind in FROM_OUTSIDE:
            time.sleep(self._draw.uniform(0.0, HELD_S_MAX))
            return self._hit(fault.kind, victims)
        # The victim wrote the time itself: the injector sees the fault one poll later, or later on a busy machine.
        return page[Word.SPRUNG_NS], self.run.committed_step()

    def _strike_in_doubt(
        self, page: Page, fault: InjectedFault, victims: list[PageSeen]
    ) -> tuple[int, int] | None:
        """Kill a rank that knows that the vote passed, while another rank still waits in the vote.

        A short SIGSTOP at a random moment of the vote delays the other rank, as a busy machine would. If the SIGSTOP
        misses the vote, the step continues and the next step is tried.
        """
        others = [seen for rank, seen in sorted(self.run.workers().items()) if rank != fault.ranks[0]]
        if not others or not self._wait_step(page, fault.step, victims[0].pid):
            return None
        slow = self._draw.choice(others)
        with closing(Page.open(slow.path)) as watched:
            while alive(slow.pid) and alive(victims[0].pid):
                step, phase = watched.state()
                if phase is not Phase.VOTE:
                    time.sleep(SPIN_S)
                    continue
                time.sleep(self._draw.uniform(0.0, VOTE_S))
                os.kill(slow.pid, signal.SIGSTOP)
                try:
                    time.sleep(SETTLE_S)
                    if watched.state() == (step, Phase.VOTE) and page.state() > (step, Phase.VOTE):
                        struck = self._hit("kill", victims)
                        self._wait_fenced(struck)
                        return struck
                finally:
                    os.kill(slow.pid, signal.SIGCONT)
        return None

    def _wait_fenced(self, struck: tuple[int, int] | None) -> None:
        """Wait until the run has fenced the ranks after a fault, so that a stopped rank is found in its vote."""
        deadline_s = time.monotonic() + FENCED_S_MAX
        while struck is not None and time.monotonic() < deadline_s:
            self.run.poll()
            if self.run.ended or any(event.t_mono > struck[0] / 1e9 for event in self.run.all_of("fenced")):
                break
            time.sleep(POLL_S)
        time.sleep(DELAY_S)  # the order to leave the vote reaches the other ranks

    def _wait_step(self, page: Page, step: int, pid: int) -> bool:
        while page.state()[0] < step or page.state()[1] is Phase.STARTING:
            if not self._go_on(pid):
                return False
        return True

    def _wait_sprung(self, page: Page, pid: int) -> bool:
        while page[Word.TRAP]:
            if not self._go_on(pid):
                return not page[Word.TRAP]
        return True

    def _go_on(self, pid: int) -> bool:
        time.sleep(POLL_S)
        return alive(pid)

    def _hit(self, kind: Kind, victims: list[PageSeen]) -> tuple[int, int] | None:
        """Send the signal of ``kind`` to all victims.

        Return the time in ns and the committed step before the signal; None if the first victim was gone.
        """
        committed = self.run.committed_step()
        moment_ns = time.monotonic_ns()
        for victim in victims:
            try:
                os.kill(victim.pid, SIGNALS.get(kind, signal.SIGKILL))
            except ProcessLookupError:
                if victim is victims[0]:
                    return None
        return moment_ns, committed

    def _report(
        self,
        number: int,
        fault: InjectedFault,
        victims: list[PageSeen],
        page: Page,
        moment_ns: int,
        committed: int,
        freed_ns: int,
    ) -> Injected:
        deadline_s = time.monotonic() + (HANG_S_MAX if fault.kind in HANGS else GONE_S_MAX)
        while (
            fault.kind not in ("exception", *FLIPS)
            and alive(victims[0].pid)
            and time.monotonic() < deadline_s
        ):
            if fault.kind in HANGS and self._resumed(moment_ns / 1e9):
                break  # the run has freed the victim without killing it
            time.sleep(POLL_S)
        step, phase = page.state()
        return Injected(
            number=number,
            kind=fault.kind,
            ranks=fault.ranks,
            members=tuple(victim.member for victim in victims),
            asked_phase=fault.phase,
            phase=phase.name.lower() if fault.kind in FROM_OUTSIDE else fault.phase,
            step=step,
            committed_step=committed,
            moment_ns=moment_ns,
            freed_ns=freed_ns,
        )

    def _freed(self, survivors: list[Page], pids: list[int], limit_s: float) -> int:
        """Return the time in ns at which the last survivor left its collective; 0 if a survivor reported no time."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            moments = [page[Word.FREED_NS] for page in survivors]
            if all(moments):
                return max(moments, default=0)
            if not any(alive(pid) for pid in pids):
                return 0
            time.sleep(POLL_S)
        return 0


def read_injected(path: Path) -> list[Injected]:
    """Return the faults that an injector has written to ``path`` so far."""
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    return [msgspec.json.decode(line, type=Injected) for line in lines if line.endswith(b"\n")]


def main(argv: list[str]) -> None:
    """Run the injector. ``argv`` is the run directory, the plan file and the output file."""
    directory, plan, out = (Path(argument) for argument in argv)
    FaultInjector(
        ObservedRun(directory), msgspec.json.decode(plan.read_bytes(), type=InjectionPlan), out
    ).work()


if __name__ == "__main__":
    main(sys.argv[1:])
