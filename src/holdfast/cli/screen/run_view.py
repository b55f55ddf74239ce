"""The state of a live, finished or crashed run, read only from its event log and its status pages."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from holdfast.core.ids import Generation
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.event_log import Follower
from holdfast.exit_codes import MEANING, Exit
from holdfast.history.host_history import HostView
from holdfast.history.run_history import FaultView, RunHistory
from holdfast.runtime.node.process_info import age_s, alive, stopped
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import PAGE, SPARE_PAGE, RunDir, log_path
from holdfast.runtime.node.spawn import log_root
from holdfast.runtime.node.status_page import Page, each_page
from holdfast.runtime.worker.user_exception import NUMBER

SPEED_WINDOW_S = 10.0
LOST_AFTER_S = 15.0
STEPS_SHOWN = 8
LEFT = "this node has left the job, which continues on other nodes"

State = Literal["starting", "running", "recovering", "exiting", "ended", "lost"]


class RankView(msgspec.Struct):
    """One rank of a run.

    ``age_s``: seconds since the rank began its present activity (``phase``, such as ``backward``); during its start,
    the age of its process.
    """

    rank: int
    member_id: int
    pid: int
    alive: bool
    phase: str
    step: int
    age_s: float
    generation: str
    repeated: int
    busy_s: float = 0.0  # time of the last committed step without waiting for peers; 0: unknown
    slow: float = 0.0  # time of the rank's steps / time of the other ranks' steps; 0: not a straggler
    usual_s: float = 0.0  # median time of the rank's steps when it was found to be a straggler
    section: str = ""
    trains: bool = False  # the rank has begun a collective, with a session or without
    stopped: bool = False  # a signal has stopped its process


class SpareView(msgspec.Struct):
    """A spare, a process that waits to become a rank.

    ``where``: the place in the script where it waits; empty if it is still starting. ``age_s``: seconds since it began
    to wait or, before that, since it was started.
    """

    pid: int
    where: str
    age_s: float


def repeated(faults: Sequence[FaultView], fault: FaultView) -> str:
    """Return a text about how often, and at which steps, the exception of ``fault`` has occurred up to this fault.

    The text is empty if the exception has occurred once. Exceptions whose texts differ only in numbers count as the
    same.
    """
    words = NUMBER.sub("", fault.what)
    same = [f for f in faults if f.kind == fault.kind == "exception" and NUMBER.sub("", f.what) == words]
    steps = [str(f.step) for f in same if f.number <= fault.number]
    shown = ", ".join(steps if len(steps) <= STEPS_SHOWN else ["...", *steps[-STEPS_SHOWN:]])
    return f"the same exception {len(steps)} times so far, at the steps {shown}" if len(steps) > 1 else ""


INSIDE = frozenset({"meet", "forward", "backward", "vote", "update", "commit"})
OUTSIDE = frozenset({"ready", "finished"})  # a rank in these phases waits if another rank is inside a step
STILL_STEPS, STILL_S = 10, 10.0


class RunView(msgspec.Struct):
    """One run.

    Attributes:
        code, meaning: exit code and its meaning in words; None and empty before the end of the run.
        losses: lost seconds by cause (see ``lost_time.py``).
        goodput: share of the run's time that is not in ``losses``, from 0 to 1; None before the first step.
        still_s: seconds since any rank made progress, if that is longer than a step may take; otherwise 0.
        kept_step: step of the newest checkpoint, sealed in this run or found at its start; -1 if there is none.
    """

    run_id: str
    directory: str
    logs: str
    state: State
    code: int | None
    meaning: str
    reason: str
    workers: int
    attempt: int
    generation: str
    session: bool
    step: int
    steps_lost: int
    sealed_step: int
    kept_step: int
    steps_per_s: float | None
    goodput: float | None
    still_s: float
    created_at: float
    elapsed_s: float
    ranks: list[RankView]
    faults: list[FaultView]
    command: list[str]
    root: str = ""  # directory or URL where the session saves
    spares: list[SpareView] = []
    left: bool = False  # only this node has left; the job continues on the other nodes
    cut_off: bool = False  # other nodes may have continued without this one, or saved a newer step
    hosts: list[HostView] = []  # empty for a job of one host
    here: str = ""  # the name of this host
    heard_at: float = 0.0  # when the newest line of the event log was written, Unix time
    found_step: int = -1  # step of the checkpoint from which the run started; -1: none
    losses: dict[str, float] = {}


class Watch:
    """A reader of the state of one run. Each call reads only the events that were added since the last one."""

    def __init__(self, directory: RunDir, settings: RunSettings) -> None:
        self.directory = directory
        self.settings = settings
        self.story = RunHistory()
        self._follower = Follower(directory.journal)
        self._speeds: deque[tuple[float, int]] = deque()

    @property
    def over(self) -> bool:
        """True if the run has ended, or if no living process could continue it."""
        return self.poll().state in ("ended", "lost")

    @property
    def log_dir(self) -> Path:
        """The directory that contains the directories ``attempt-NNN/`` with the logs of ranks."""
        return Path(log_root(self.directory, self.settings))

    def read(self) -> RunHistory:
        """Read the new events of the event log, and return the history of the run."""
        for event in self._follower.poll():
            self.story.take(event)
        return self.story

    def local_rank(self, attempt: int, rank: int) -> int | None:
        """Return the local rank of ``rank`` on this node; None if it is unknown, or the rank ran on another node.

        ``attempt`` is the number of the start of all workers.
        """
        return self.story.places.get((attempt, rank), {}).get(self.settings.node)

    def local_ranks(self) -> dict[int, int]:
        """Return the local rank of each rank that ran on this node, by rank. The newest process of a rank counts."""
        node, places = self.settings.node, sorted(self.story.places.items())
        return {rank: seats[node] for (_, rank), seats in places if node in seats}

    def poll(self) -> RunView:
        """Read the new events and the status pages, and return the whole state of the run."""
        self.read()
        story, settings = self.story, self.settings
        ranks = self._ranks()
        step = max([story.step, *(r.step for r in ranks)])
        now = story.ended_at or time.time()
        code = None if story.ended is None else int(story.ended["code"])
        state = self._state(ranks)
        still_s = 0.0 if story.ended or story.unanswered else _still_s(ranks)
        losses = self._losses(now, step, still_s)
        elapsed_s = max(0.0, now - settings.created_at)
        return RunView(
            run_id=settings.run_id,
            directory=str(self.directory.path),
            logs=str(log_path(self.log_dir, max(story.attempt, 0), 0).parent),
            state=state,
            code=code,
            meaning="" if code is None else LEFT if story.left else meaning(Exit(code), story.session),
            reason="" if story.ended is None else str(story.ended["reason"]),
            workers=settings.nproc,
            attempt=story.attempt,
            generation=story.generation,
            session=story.session,
            step=step,
            steps_lost=story.steps_lost,
            sealed_step=story.sealed_step,
            kept_step=story.kept_step,
            steps_per_s=self._speed(step) if story.ended is None else None,
            goodput=None if losses is None else round(max(0.0, 1.0 - sum(losses.values()) / elapsed_s), 5),
            still_s=still_s,
            created_at=settings.created_at,
            elapsed_s=round(elapsed_s, 3),
            ranks=ranks,
            faults=list(story.faults),
            command=list(settings.command),
            root=story.root,
            spares=self._spares(),
            left=story.left,
            cut_off=story.cut_off or (settings.several and state == "lost"),
            hosts=story.hosts.views(story.ranks_on) if settings.several else [],
            here=settings.node,
            heard_at=story.heard_at,
            found_step=story.found_step,
            losses=losses or {},
        )

    def _state(self, ranks: list[RankView]) -> State:
        if self.story.ended is not None:
            return "ended"
        endpoint = self.directory.read_endpoint("agent")
        if endpoint is None and not ranks:
            return "starting" if time.time() - self.settings.created_at < LOST_AFTER_S else "lost"
        if not self.directory.serving("agent"):
            return "running" if any(r.alive for r in ranks) else "lost"
        if self.settings.several and self.story.attempt < 0:
            return "starting"  # the nodes have not met
        if self.story.unanswered:
            return "recovering"
        return "exiting" if self.story.exiting else "running"

    def _ranks(self) -> list[RankView]:
        found: dict[int, RankView] = {}
        for page in each_page(self.directory.pages_link, PAGE):
            view = _rank_view(page)
            if view.rank not in found or view.member_id >= found[view.rank].member_id:
                found[view.rank] = view
        for rank, straggler in self.story.losses.slow.items():
            if rank in found:
                found[rank].slow, found[rank].usual_s = straggler.ratio, straggler.busy_s
        return [found[rank] for rank in sorted(found)]

    def _spares(self) -> list[SpareView]:
        pages = each_page(self.directory.pages_link, SPARE_PAGE)
        return [_spare_view(page) for page in pages if alive(page[Word.PID])]

    def _speed(self, step: int) -> float | None:
        now_s = time.monotonic()
        if not self.story.session:
            self._speeds.clear()  # at a resume the step jumps from 0 to that of the checkpoint, which is no speed
        self._speeds.append((now_s, step))
        while len(self._speeds) > 2 and now_s - self._speeds[0][0] > SPEED_WINDOW_S:
            self._speeds.popleft()
        (from_s, from_step), (to_s, to_step) = self._speeds[0], self._speeds[-1]
        return (
            (to_step - from_step) / (to_s - from_s) if to_s - from_s > 1.0 and to_step > from_step else None
        )

    def _losses(self, now: float, step: int, still_s: float) -> dict[str, float] | None:
        """Return the lost seconds of the run by cause; None before the first committed step."""
        begun, story = self.settings.created_at, self.story
        made = step - max(story.found_step, 0)
        if now <= begun or not story.session or made <= 0:
            return None
        recoveries = [
            (fault.at, now if fault.recovered_s is None else fault.at + fault.recovered_s)
            for fault in story.faults
        ]
        return story.losses.seconds(begun, now, recoveries, still_s, (made, story.steps_lost))


def log_of(fault: FaultView, run: RunDir, settings: RunSettings) -> Path | None:
    """Return the path of the log of the rank that ``fault`` names; None if the log is on another node."""
    if fault.node not in ("", settings.node):
        return None
    return log_path(log_root(run, settings), fault.attempt, fault.rank)


def meaning(code: Exit, session: bool) -> str:
    """Return the meaning of a run's exit code in words.

    ``session`` is True if the script had opened a session. Without a session there was nothing to save.
    """
    if code is Exit.USAGE:
        return "nothing was started"  # the arguments were wrong; they are checked before there is a run
    if code is Exit.UNSAVED and not session:
        return "asked to exit; no session was open, so there was nothing to save"
    return MEANING[code]


def _spare_view(page: Page) -> SpareView:
    where = page.section() if page.state()[1] is Phase.SPARE else ""
    return SpareView(page[Word.PID], where, _age_s(page))


def _rank_view(page: Page) -> RankView:
    step, phase = page.state()
    return RankView(
        rank=page[Word.RANK],
        member_id=page[Word.MEMBER],
        pid=page[Word.PID],
        alive=page[Word.PID] > 0 and alive(page[Word.PID]),
        phase=phase.name.lower(),
        step=step,
        age_s=_age_s(page) if phase is not Phase.STARTING else round(age_s(page[Word.PID]), 3),
        generation=str(Generation.unpack(page[Word.GENERATION])),
        repeated=page[Word.REPEATED],
        busy_s=page[Word.BUSY_NS] / 1e9,
        section=page.section() if phase is Phase.SECTION else "",
        trains=page[Word.COLLECTIVES] > 0,
        stopped=page[Word.PID] > 0 and stopped(page[Word.PID]),
    )


def _still_s(ranks: list[RankView]) -> float:
    """Return the seconds since the last progress of any rank, if no step takes that long; otherwise 0."""
    living = [r for r in ranks if r.alive]
    busy_s = max((r.busy_s for r in living), default=0.0)
    inside = any(r.phase in INSIDE for r in living) and all(r.phase in INSIDE | OUTSIDE for r in living)
    if not inside or not busy_s:
        return 0.0
    still_s = min(r.age_s for r in living)
    return still_s if still_s > max(STILL_STEPS * busy_s, STILL_S) else 0.0


def _age_s(page: Page) -> float:
    """Return the seconds since the worker of a status page began its present activity; 0 if it has begun none."""
    entered_ns = page[Word.ENTERED_NS]
    return round(max(0.0, time.monotonic() - entered_ns / 1e9), 3) if entered_ns else 0.0
