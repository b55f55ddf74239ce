"""The watch over the progress of one node's workers: stalls are reported, and evidence is collected on request.

The time limits are learned from the durations of past steps. About once a second they are written to a file beside the
status pages. A successor agent reads this file. Without it, the successor would use the long limit for unknown steps
for a worker that stopped while no agent ran.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Collection, Mapping
from math import inf
from pathlib import Path

import msgspec

from holdfast.core.ids import Generation, MemberId, NodeId
from holdfast.core.job.spares import is_spare
from holdfast.core.protocol.health_messages import (
    LAST_LOOK,
    CollectEvidence,
    CollectiveSeen,
    Evidence,
    Late,
    ProgressResumed,
    RankEvidence,
    Stalled,
    StepTime,
    StepTimes,
)
from holdfast.core.protocol.messages import KillMember, made_in
from holdfast.core.protocol.status_page import PageFlag, Phase, Word
from holdfast.core.watch.activity import Activity, WorkerSeen
from holdfast.core.watch.hang_attribution import STOPPED
from holdfast.core.watch.stall_detector import Learned, Limits, PageReading, Progress
from holdfast.errors import ProtocolError
from holdfast.runtime.agent.agent_events import LookedLast, RecordsWanted, WatchEvent, start_task
from holdfast.runtime.agent.worker_processes import WorkerProcess
from holdfast.runtime.node.hang_evidence import ProcessEvidence, find, sample
from holdfast.runtime.node.process_info import age_s, halted, started_with, stopped_children
from holdfast.runtime.node.rundir import RunDir, write_private
from holdfast.runtime.node.spawn import FORKS
from holdfast.runtime.node.stack_texts import where
from holdfast.runtime.node.status_page import Page

REPEAT_S = 1.0  # a stall is reported again, because the controller may be a new one
PACE_S = 5.0
KEEP_S = 1.0
LEARNED = "learned-"
LEARNED_SIZE_BYTES_MAX = 1 << 20
COLLECTIVES_TOLD = 16
FORKED = f"{FORKS}=1".encode()
MARKS = (Word.STATE, Word.ENTERED_NS, Word.COLLECTIVES, Word.REPEATED, Word.FLAGS, Word.PID, Word.DUE)
"""The words of a status page that change when a worker makes progress."""
ON_THE_WAY = frozenset({Phase.READY, Phase.ABORTED, Phase.IN_DOUBT})
"""The phases in which a worker's main thread waits, during a recovery, for the order to continue."""
DRAWING = frozenset({Phase.STARTING, Phase.READY, Phase.LOADING, Phase.SECTION, Phase.FORWARD})
"""The phases in which a script may wait for its own child processes, such as those of a data loader."""


class Watcher:
    """The watch over the workers of one node.

    Args:
        living: the worker processes of this node, by member.
        connected: the members that are connected to the agent. Only these can be asked for the flight records of
            their framework.
        post: receives the messages to the controller, RecordsWanted (the order to ask a worker for these records), and
            LookedLast (all evidence about a worker that is to be killed is posted).
    """

    def __init__(
        self,
        run: RunDir,
        node_id: NodeId,
        limits: Limits,
        living: Mapping[MemberId, WorkerProcess],
        connected: Collection[MemberId],
        post: Callable[[WatchEvent], None],
    ) -> None:
        self._run = run
        self._node_id = node_id
        self._limits = limits
        self._living = living
        self._connected = connected
        self._post = post
        self._progress = Progress(limits)
        self._pages: dict[MemberId, Page] = {}
        self._generation = Generation(0, 0)
        self._told_s = 0.0
        self._late_s = 0.0
        self._children_s = 0.0
        self._children: dict[int, int] = {}  # by pid of a worker: a stopped child that it waits for
        self._paced_s = 0.0
        self._kept_s = 0.0
        self._learned: Path | None = None  # file of the learned limits, for a successor
        self._activity = Activity(node_id, limits.floor_s if limits.factor > 0 else inf)
        self._gathering: asyncio.Task[None] | None = None
        self._lasts: dict[MemberId, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Check the status pages periodically until cancelled.

        If ``Limits.factor`` is 0, do not look for hangs and stopped processes.
        """
        self._learned = self._run.pages() / f"{LEARNED}{self._node_id}"
        self._progress = Progress(self._limits, recall(self._learned))
        try:
            while True:
                await asyncio.sleep(self._limits.look_s)
                self.look(time.monotonic())
        finally:
            for page in self._pages.values():
                page.close()
            self._pages.clear()

    def look(self, now: float) -> None:
        """Check all status pages once, and report changes. ``now`` is the monotonic time in seconds."""
        if self._gathering is not None and self._gathering.done():
            self._gathering.result()
            self._gathering = None
        self._open_pages()
        self._look_for_activity(now)
        if self._limits.factor > 0:
            self._look_for_hangs(now)

    def _look_for_hangs(self, now: float) -> None:
        workers = [page for member_id, page in self._pages.items() if not is_spare(member_id)]
        if not workers:
            return
        self._generation = max(Generation.unpack(page[Word.GENERATION]) for page in workers)
        overdue = self._progress.overdue()
        readings = self._look_at(now, overdue)
        change = self._progress.look(now, readings)
        if change is False:
            self._post(ProgressResumed(node_id=self._node_id, generation=self._generation))
        elif self._progress.stalled and (change or now - self._told_s >= REPEAT_S):
            self._told_s = now
            holding = [s for s in self._progress.stalls() if not s.waits]
            self._post(
                Stalled(
                    node_id=self._node_id,
                    generation=self._generation,
                    idle_s=min(s.idle_s for s in holding),
                    bound_s=max(s.bound_s for s in holding),
                    step_s=self._progress.step_s,
                    waiting=any(r.waits for r in readings if not is_spare(r.member_id)),
                    stopped=any(s.stopped for s in holding),
                )
            )
        if now - self._late_s >= REPEAT_S:
            self._late_s = now
            for late in self._progress.late():
                self._post(Late(late.member_id, self._node_id, round(late.idle_s, 3), late.stopped))
        if now - self._paced_s >= PACE_S:
            self._paced_s = now
            paces = tuple(StepTime(*pace) for pace in self._progress.paces())
            step_s = max(reading.step_s for reading in readings)
            if step_s:
                here, generation = self._node_id, self._generation
                self._post(StepTimes(node_id=here, generation=generation, ranks=paces, step_s=step_s))
        if self._learned is not None and now - self._kept_s >= KEEP_S:
            self._kept_s = now
            # No directory: the run has ended, and there is no successor. No room: there may be room later.
            with contextlib.suppress(OSError):
                write_private(self._learned, msgspec.json.encode(self._progress.learned()))

    def _look_for_activity(self, now: float) -> None:
        """Report to the controller which workers make progress or are stopped, as evidence for a recovery.

        The report is also made if the detection of hangs is off.
        """
        if not self._activity.is_due(now):
            return
        active = self._activity.look(
            now,
            [
                WorkerSeen(
                    member_id,
                    (page[Word.WORK], *(page[word] for word in MARKS)),
                    bool(page[Word.FENCED]) or not page[Word.DONE],
                    halted(self._pid(member_id)),
                )
                for member_id, page in self._pages.items()
                if not is_spare(member_id)
            ],
        )
        if active is not None:
            self._post(active)

    def _pid(self, member_id: MemberId) -> int:
        """Return the pid of a member, from its status page if the page has one, otherwise from the started process."""
        return self._pages[member_id][Word.PID] or self._living[member_id].pid

    def _look_at(self, now: float, overdue: Collection[MemberId]) -> list[PageReading]:
        readings = []
        sleeping = set()
        for member_id, page in self._pages.items():
            reading, pid = read(page), self._pid(member_id)
            is_new = not self._progress.knows(member_id)
            if is_new or (reading.phase is Phase.STARTING and not reading.collectives):
                age = age_s(pid) if is_new else 0.0
                reading = reading._replace(scratch=FORKED not in started_with(pid), age_s=age)
            if member_id in overdue:
                state = sample(pid).process
                if state == "S" and reading.phase in DRAWING and not reading.waits:
                    sleeping.add(pid)
                stopped = state in STOPPED or (pid in sleeping and pid in self._children)
                reading = reading._replace(stopped=stopped)
            readings.append(reading)
        if not sleeping:
            self._children = {}
        elif now - self._children_s >= REPEAT_S:  # not more often: all of /proc is read
            self._children_s, self._children = now, stopped_children(sleeping)
        return readings

    def gather(self, order: CollectEvidence) -> None:
        """Start to collect evidence about all workers in the background, and post it.

        Do nothing if a collection is in progress.
        """
        if self._gathering is None:
            self._gathering = asyncio.get_running_loop().create_task(self._gather(order))

    def look_last(self, order: KillMember) -> None:
        """Collect evidence about a silent worker that is about to be killed, in the background.

        Post the evidence, and then ``LookedLast``. A second order for the same member posts ``LookedLast`` at once.
        """
        looked = LookedLast(order.member_id, order.grace_s)
        if order.member_id in self._lasts:
            self._post(looked)
        else:
            self._lasts[order.member_id] = start_task(self._look_last(looked), self._post)

    async def _look_last(self, looked: LookedLast) -> None:
        member_id = looked.member_id
        # Without a process or a page there is nothing to report.
        with contextlib.suppress(OSError, ProtocolError):
            if member_id in self._living:
                with contextlib.closing(Page.open(self._run.page_path(member_id))) as page:
                    pid = page[Word.PID] or self._living[member_id].pid
                    finding = (await find(self._run, [(member_id, pid, page)], self._ask))[member_id]
                    since_ns = page[Word.ENTERED_NS] or time.monotonic_ns()
                    idle_s = (time.monotonic_ns() - since_ns) / 1e9
                    child = stopped_children({pid}).get(pid, 0)
                    one = self._told(f"M{member_id:03d}", member_id, page, finding, idle_s, 0.0, child)
                    self._post(Evidence(node_id=self._node_id, number=LAST_LOOK, ranks=(one,)))
        self._post(looked)

    def _ask(self, member_id: MemberId) -> bool:
        """Request the flight records of a worker's framework. Return False if the worker is not connected."""
        if member_id not in self._connected:
            return False
        self._post(RecordsWanted(member_id))
        return True

    def _open_pages(self) -> None:
        for member_id in [m for m in self._pages if m not in self._living]:
            self._pages.pop(member_id).close()
        for member_id in self._living:
            if member_id not in self._pages:
                try:
                    self._pages[member_id] = Page.open(self._run.page_path(member_id))
                except (OSError, ProtocolError):
                    continue  # half-made, or removed at the end of the run

    async def _gather(self, order: CollectEvidence) -> None:
        workers = [
            (member_id, self._pid(member_id), page)
            for member_id, page in sorted(self._pages.items())
            if member_id in self._living and not is_spare(member_id)
        ]
        found = await find(self._run, workers, self._ask)
        late = self._progress.late()
        if not self._progress.stalled and not late:
            return  # a worker made progress in the meantime, and the controller has a message about it
        stalls = {stall.member_id: stall for stall in (*self._progress.stalls(), *late)}
        children = stopped_children({pid for _, pid, _ in workers})
        ranks = []
        for member_id, pid, _ in workers:
            page, stall = self._pages.get(member_id), stalls.get(member_id)
            if page is None or stall is None:
                continue
            finding = found[member_id]
            child = children.get(pid, 0) if stall.stopped and finding.process not in STOPPED else 0
            place = f"H{order.number:03d}"
            ranks.append(self._told(place, member_id, page, finding, stall.idle_s, stall.bound_s, child))
        self._post(Evidence(node_id=self._node_id, number=order.number, ranks=tuple(ranks)))

    def _told(
        self,
        place: str,
        member_id: MemberId,
        page: Page,
        finding: ProcessEvidence,
        idle_s: float,
        bound_s: float,
        child: int,
    ) -> RankEvidence:
        """Return the evidence about one worker. Write its files to directory ``place`` of the run's ``evidence/``.

        ``child`` is the pid of a stopped child process that the worker waits for; 0 if there is none.
        """
        seen = read(page)
        return RankEvidence(
            member_id=member_id,
            rank=seen.rank,
            step=seen.step,
            phase="resuming" if seen.due else seen.phase.name.lower(),
            idle_s=round(idle_s, 3),
            bound_s=round(bound_s, 3),
            sequence=page[Word.SEQUENCE],
            usual_sequence=page[Word.USUAL_SEQUENCE],
            process=finding.process,
            cpu=round(finding.cpu, 3),
            wchan=finding.wchan,
            where=where(finding.stacks),
            section=seen.section,
            collectives=self._collectives(place, seen.rank, page),
            devices=finding.records.devices,
            stacks=self._keep(place, seen.rank, finding),
            records=self._keep_records(place, seen.rank, finding),
            child=child,
            left=seen.left,
            meets=seen.meets,
            outside=page.outside(),
        )

    def _collectives(self, place: str, rank: int, page: Page) -> tuple[CollectiveSeen, ...]:
        """Return the last collectives of a worker. Write all entries of its flight recorder into the run directory."""
        found, now_ns = page.flight.read(), time.monotonic_ns()
        if found:
            text = "".join(f"{each}, begun {(now_ns - each.begun_ns) / 1e9:.3f} s ago\n" for each in found)
            self._write(place, f"rank-{rank:05d}.collectives.txt", text)
        return tuple(
            CollectiveSeen(c.group, c.number, c.what, not c.ended_ns, round((now_ns - c.begun_ns) / 1e9, 3))
            for c in found[-COLLECTIVES_TOLD:]
        )

    def _keep(self, place: str, rank: int, finding: ProcessEvidence) -> str:
        """Write a worker's stacks to a file. Return the path relative to the run directory; empty without stacks."""
        if not finding.stacks:
            return ""
        return self._write(place, f"rank-{rank:05d}.txt", finding.stacks)

    def _keep_records(self, place: str, rank: int, finding: ProcessEvidence) -> str:
        """Write the flight records of a worker's framework to a file.

        Return the path relative to the run directory; empty without records.
        """
        if not finding.records.recorders:
            return ""
        return self._write(
            place, f"rank-{rank:05d}.records.json", msgspec.json.encode(finding.records).decode()
        )

    def _write(self, place: str, file: str, text: str) -> str:
        name = Path("evidence") / place / file
        path = self._run.path / name
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, text.encode())
        return os.fspath(name)


def recall(path: Path) -> Learned:
    """Return the learned values that an earlier agent wrote to ``path``; no values if the file is not readable."""
    try:
        with path.open("rb") as file:
            return msgspec.json.decode(file.read(LEARNED_SIZE_BYTES_MAX), type=Learned)
    except (FileNotFoundError, msgspec.MsgspecError):
        return Learned()


def read(page: Page) -> PageReading:
    """Return the values of a status page from which progress is judged."""
    step, phase = page.state()
    flags = page[Word.FLAGS]
    return PageReading(
        member_id=MemberId(page[Word.MEMBER]),
        rank=page[Word.RANK],
        step=step,
        phase=phase,
        mark=tuple(page[word] for word in MARKS),
        step_s=page[Word.STEP_NS] / 1e9,
        busy_s=page[Word.BUSY_NS] / 1e9,
        section=page.section(),
        collectives=page[Word.COLLECTIVES],
        waits=phase is Phase.STARTING and page.flight.waits(),
        joins_in=phase is Phase.READY and page.flight.waits(),
        compiling=bool(flags & PageFlag.COMPILING),
        outside=made_in(Generation.unpack(page[Word.GENERATION]), step, page.outside()),
        due=bool(page[Word.DUE]) and phase in ON_THE_WAY,
        meets=bool(flags & PageFlag.MEETS),
        left=bool(flags & PageFlag.LEFT),
        done=page[Word.DONE],
    )
