"""The state of a run, read from its event log and status pages alone. It works for live, finished and crashed runs."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from holdfast.cli.screen.host_view import HostHistory, HostView
from holdfast.cli.screen.lost_time import LostTime
from holdfast.core.ids import Generation
from holdfast.core.job.fault import SEEN, UNTIL_WHOLE
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.event_log import Event, Follower
from holdfast.exit_codes import MEANING, Exit
from holdfast.runtime.node.process_info import age_s, alive, stopped
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import PAGE, SPARE_PAGE, RunDir, log_path
from holdfast.runtime.node.spawn import log_root
from holdfast.runtime.node.status_page import Page, each_page
from holdfast.runtime.worker.user_exception import NUMBER

SPEED_WINDOW_S = 10.0
LOST_AFTER_S = 15.0
STEPS_SHOWN = 8
LEFT = "this node has left the job, which goes on on other nodes"

State = Literal["starting", "running", "recovering", "exiting", "ended", "lost"]


class RankView(msgspec.Struct):
    """One rank. ``age_s``: seconds since the rank last entered a phase."""

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
    slow: float = 0.0  # ratio of the time of its steps to that of the others; 0: not a straggler
    usual_s: float = 0.0  # the median of its steps at the time of that finding
    section: str = ""
    trains: bool = False  # it has begun a collective, with a session or without
    stopped: bool = False  # a signal has stopped its process


class SpareView(msgspec.Struct):
    """A process that waits to become a rank. ``where``: empty while it is built; ``age_s``: seconds in this state."""

    pid: int
    where: str
    age_s: float


class FaultView(msgspec.Struct):
    """One fault. ``phases``: seconds from the fault to the end of each phase of its recovery."""

    number: int
    at: float  # Unix time
    rank: int
    member_id: int
    kind: str
    phase: str
    step: int
    attempt: int
    what: str
    node: str = ""
    action: str = ""
    reason: str = ""
    phases: dict[str, float] = {}
    steps_lost: int = 0

    @property
    def name(self) -> str:
        """The name of the fault, such as ``F003``."""
        return f"F{self.number:03d}"

    @property
    def recovered_s(self) -> float | None:
        """Seconds from the fault to the next committed step, None before that step."""
        return self.phases.get("resumed")


def repeated(faults: Sequence[FaultView], fault: FaultView) -> str:
    """Return how often and where this exception came up to this fault; empty for the first time.

    Exceptions that differ only in numbers count as the same.
    """
    words = NUMBER.sub("", fault.what)
    same = [f for f in faults if f.kind == fault.kind == "exception" and NUMBER.sub("", f.what) == words]
    steps = [str(f.step) for f in same if f.number <= fault.number]
    shown = ", ".join(steps if len(steps) <= STEPS_SHOWN else ["...", *steps[-STEPS_SHOWN:]])
    return f"the same exception {len(steps)} times so far, at the steps {shown}" if len(steps) > 1 else ""


INSIDE = frozenset({"forward", "backward", "vote", "update", "commit"})
OUTSIDE = frozenset({"ready", "finished"})  # a standstill, if other ranks are inside
STILL_STEPS, STILL_S = 10, 10.0


class RunView(msgspec.Struct):
    """One run. ``code`` and ``meaning``: after its end. ``goodput``: the share of time that is in none of ``losses``
    (seconds by cause, see ``lost_time.py``), None before the first step. ``still_s``: for how long no rank has made
    progress, 0 if that is no standstill. ``kept_step``: of the newest checkpoint, sealed in this run or found at its
    start; -1: there is none.
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
    root: str = ""  # where its session saves
    spares: list[SpareView] = []
    left: bool = False  # only this node has left; the job continues on the others
    cut_off: bool = False  # cut off, or ended here: other nodes may have continued, or saved more
    hosts: list[HostView] = []  # of a job of several hosts
    here: str = ""  # the name of this host
    heard_at: float = 0.0  # when the newest line of the event log was written, Unix time
    found_step: int = -1  # step of the checkpoint at its start; -1: none
    losses: dict[str, float] = {}


class RunHistory:
    """The history of a run, from the events of its log."""

    def __init__(self) -> None:
        self.attempt = -1
        self.generation = ""
        self.members: dict[int, int] = {}  # member id -> rank, of the newest generation
        self._nodes: dict[int, str] = {}  # by member id
        self.places: dict[
            tuple[int, int], dict[str, int]
        ] = {}  # attempt, rank -> local rank by node, oldest first
        self.session = False
        self.cut_off = False
        self.root = ""
        self.step = 0
        self.steps_lost = 0
        self.sealed_step = -1
        self.found_step = -1  # step of the checkpoint at the start of the run
        self.exiting = ""
        self.agreed_step = -1  # the step at which all ranks leave
        self.cancels: list[bool] = []  # answers to cancellations of an exit
        self.ended: dict[str, Any] | None = None
        self.ended_at = self.heard_at = 0.0
        self.faults: list[FaultView] = []
        self.warnings: list[str] = []
        self.saves: list[str] = []  # one line for each complete checkpoint
        self._save_s = 0.0  # duration of the share that was written last
        self._unsaved_step = -1
        self.slow: dict[
            int, tuple[float, float]
        ] = {}  # stragglers: rank -> ratio, and median of its steps in s
        self.hosts = HostHistory(self.warnings)
        self.log_ends: dict[int, int] = {}  # member id -> size in bytes of its log when it ended
        self.losses = LostTime()
        self._open: list[tuple[FaultView, float]] = []  # with its time, CLOCK_MONOTONIC

    @property
    def left(self) -> bool:
        """True if this node has left a job that continues on other nodes."""
        return self.ended is not None and bool(self.ended.get("left"))

    @property
    def recovering(self) -> bool:
        """True while a fault is being answered."""
        return bool(self._open)

    @property
    def last_fault(self) -> FaultView | None:
        """The newest fault."""
        return self.faults[-1] if self.faults else None

    def take(self, event: Event) -> None:
        """Add one event of any kind; unknown kinds are ignored."""
        self.heard_at = max(self.heard_at, event.t_wall)
        self.losses.take(event)
        self.hosts.take(event)
        fold = getattr(self, f"_on_{event.kind}", None)
        if fold is not None:
            fold(event, event.data)
        if event.kind in SEEN and event.kind != "detected":
            for fault, at_mono_s in self._open:
                if event.kind in UNTIL_WHOLE or event.kind not in fault.phases:
                    fault.phases[event.kind] = round(event.t_mono - at_mono_s, 6)

    def _on_generation_started(self, event: Event, data: dict[str, Any]) -> None:
        self.generation = str(data["generation"])
        if not data.get("in_place"):
            self.attempt = int(data["attempt"])
            self.members = {int(m): rank for rank, m in enumerate(data["members"])}
            self.slow.clear()
        self._seat(range(len(data["members"])), data)

    def _on_members_replaced(self, event: Event, data: dict[str, Any]) -> None:
        self._seat(data["ranks"], data)
        self.members |= dict(zip(data["members"], data["ranks"], strict=True))
        for rank in data["ranks"]:
            self.slow.pop(rank, None)
        for fault, _ in self._open:
            # Lost before its join: no new decision is made.
            if not fault.action and fault.rank in data["ranks"]:
                fault.action = "replace"
                fault.reason = "it was lost before it had joined: the decision stands"

    def _seat(self, ranks: Iterable[int], data: dict[str, Any]) -> None:
        nodes = data.get("nodes", ())  # older versions have written less
        self._nodes.update(zip(data["members"], nodes, strict=False))
        for rank, node, local_rank in zip(ranks, nodes, data.get("local_ranks", ()), strict=False):
            self.places.setdefault((self.attempt, rank), {})[node] = local_rank

    def _on_detected(self, event: Event, data: dict[str, Any]) -> None:
        ago_s = float(data["detected_s"])
        fault = FaultView(
            number=len(self.faults) + 1,
            at=event.t_wall - ago_s,
            rank=int(data["rank"]),
            member_id=int(data["member_id"]),
            kind=str(data["kind"]),
            phase=str(data["phase"]),
            step=int(data["step"]),
            attempt=max(self.attempt, 0),
            what=str(data["what"]),
            node=self._nodes.get(int(data["member_id"]), ""),
            phases={"detected": round(ago_s, 6)},
        )
        self.faults.append(fault)
        self._open.append((fault, event.t_mono - ago_s))

    def _on_member_exited(self, event: Event, data: dict[str, Any]) -> None:
        if "log_size_bytes" in data:
            self.log_ends[int(data["member_id"])] = int(data["log_size_bytes"])

    def _on_straggler(self, event: Event, data: dict[str, Any]) -> None:
        self.slow[int(data["rank"])] = float(data["ratio"]), float(data["busy_s"])

    def ranks_on(self, node: str) -> list[int]:
        """Return the ranks that were last placed on this node, according to this log."""
        newest = {rank: member for member, rank in sorted(self.members.items())}
        return sorted(rank for rank, member in newest.items() if self._nodes.get(member) == node)

    def _on_straggler_gone(self, event: Event, data: dict[str, Any]) -> None:
        self.slow.pop(int(data["rank"]), None)

    def _on_planned(self, event: Event, data: dict[str, Any]) -> None:
        self.step = max(self.step, int(data["step"]))

    def _on_verdict(self, event: Event, data: dict[str, Any]) -> None:
        for fault, _ in self._open:
            fault.action, fault.reason = str(data["action"]), str(data["reason"])

    def _on_restored(self, event: Event, data: dict[str, Any]) -> None:
        self.step = int(data["step"])
        self.steps_lost += int(data["steps_lost"])

    def _on_recovered(self, event: Event, data: dict[str, Any]) -> None:
        for fault, _ in self._open:
            if fault.member_id == data["member_id"]:
                fault.phases = {phase: float(data[f"{phase}_s"]) for phase in SEEN}
                fault.steps_lost = int(data["steps_lost"])
        self._open = [(fault, at) for fault, at in self._open if fault.member_id != data["member_id"]]

    def _on_session_opened(self, event: Event, data: dict[str, Any]) -> None:
        if not self.session:
            self.found_step = int(data.get("step", 0)) or -1
        self.session = True
        self.root = str(data.get("root", ""))
        self.step = max(self.step, int(data.get("step", 0)))

    def _on_saved(self, event: Event, data: dict[str, Any]) -> None:
        self._save_s = float(data["duration_s"])
        if data["error"] and data["step"] != self._unsaved_step:  # the other ranks report the same
            self._unsaved_step = int(data["step"])
            self.warnings.append(f"rank {data['rank']} could not save step {data['step']}: {data['error']}")

    def _on_sealed(self, event: Event, data: dict[str, Any]) -> None:
        self.sealed_step = max(self.sealed_step, int(data["step"]))
        self.saves.append(f"saved step {data['step']} ({data.get('save_kind', '')}) in {self._save_s:.2f} s")

    def _on_exit_requested(self, event: Event, data: dict[str, Any]) -> None:
        self.exiting = str(data["source"])

    def _on_exit_agreed(self, event: Event, data: dict[str, Any]) -> None:
        self.agreed_step = int(data["step"])

    def _on_exit_cancelled(self, event: Event, data: dict[str, Any]) -> None:
        self.cancels.append(bool(data["done"]))
        self.exiting = "" if data["done"] else self.exiting

    def _on_finished(self, event: Event, data: dict[str, Any]) -> None:
        self.step = max(self.step, int(data["step"]))

    def _on_root_not_shared(self, event: Event, data: dict[str, Any]) -> None:
        nodes = ", ".join(data["nodes"])
        self.warnings.append(
            f"{data['root']} is not the same directory on {nodes}: checkpoints of several nodes need shared storage, "
            "without it a lost node costs everything"
        )

    def _on_versions_differ(self, event: Event, data: dict[str, Any]) -> None:
        text = (
            f"{data['what']} is {data['here']} on this host, {data['there']} on {data['node']}: they may compute "
            "differently; install the same on every host"
        )
        if text not in self.warnings:  # a successor of the agent meets the others again
            self.warnings.append(text)

    def _on_no_majority(self, event: Event, data: dict[str, Any]) -> None:
        self.cut_off = True
        self.warnings.append(f"{data['reason']}: sealing what is committed here, then leaving")

    def _on_stood_still(self, event: Event, data: dict[str, Any]) -> None:
        self.warnings.append(
            f"the processes of this host stood still for {data['stood_s']:.0f} s (frozen, suspended, or without a "
            "CPU): the other hosts may have given it up and gone on"
        )

    def _on_zygote_unusable(self, event: Event, data: dict[str, Any]) -> None:
        self.warnings.append(f"every worker starts from scratch, which takes longer: {data['reason']}")

    def _on_spares_given_up(self, event: Event, data: dict[str, Any]) -> None:
        self.warnings.append(
            f"no spare can be built on {data['node']} ({data['why']}): lost workers are replaced without; "
            "see spares/ in the run directory"
        )

    def _on_agent_ended(self, event: Event, data: dict[str, Any]) -> None:
        self.step = max(self.step, int(data.get("step", 0)))
        # An agent that gave up on controllers ends the run alone; otherwise the run has already ended.
        if self.ended is None:
            self.ended, self.ended_at = (
                {"code": data["code"], "reason": "no controller could be kept"},
                event.t_wall,
            )

    def _on_run_ended(self, event: Event, data: dict[str, Any]) -> None:
        self.ended, self.ended_at = data, event.t_wall
        self.step = max(self.step, int(data.get("step", 0)))


class Watch:
    """The state of one run, read repeatedly: each time only new events are read."""

    def __init__(self, directory: RunDir, settings: RunSettings) -> None:
        self.directory = directory
        self.settings = settings
        self.story = RunHistory()
        self._follower = Follower(directory.journal)
        self._speeds: deque[tuple[float, int]] = deque()

    @property
    def over(self) -> bool:
        """True if the run has ended, or no process is left that could continue it."""
        return self.poll().state in ("ended", "lost")

    @property
    def log_dir(self) -> Path:
        """The directory of the ``attempt-NNN/`` directories."""
        return Path(log_root(self.directory, self.settings))

    def read(self) -> RunHistory:
        """Read the new events of the log, and return the history."""
        for event in self._follower.poll():
            self.story.take(event)
        return self.story

    def local_rank(self, attempt: int, rank: int) -> int | None:
        """Return the local rank of this rank on this node in an attempt; None: not on this node, as far as known."""
        return self.story.places.get((attempt, rank), {}).get(self.settings.node)

    def local_ranks(self) -> dict[int, int]:
        """Return the local rank of each rank that was on this node, in its newest attempt here."""
        node, places = self.settings.node, sorted(self.story.places.items())
        return {rank: seats[node] for (_, rank), seats in places if node in seats}

    def poll(self) -> RunView:
        """Read the new events and the status pages, and return the whole state."""
        self.read()
        story, settings = self.story, self.settings
        ranks = self._ranks()
        step = max([story.step, *(r.step for r in ranks)])
        now = story.ended_at or time.time()
        code = None if story.ended is None else int(story.ended["code"])
        state = self._state(ranks)
        still_s = 0.0 if story.ended or story.recovering else _still_s(ranks)
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
            kept_step=max(story.sealed_step, story.found_step),
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
        if self.story.recovering:
            return "recovering"
        return "exiting" if self.story.exiting else "running"

    def _ranks(self) -> list[RankView]:
        found: dict[int, RankView] = {}
        for page in each_page(self.directory.pages_link, PAGE):
            view = _rank_view(page)
            if view.rank not in found or view.member_id >= found[view.rank].member_id:
                found[view.rank] = view
        for rank, (ratio, usual_s) in self.story.slow.items():
            if rank in found:
                found[rank].slow, found[rank].usual_s = ratio, usual_s
        return [found[rank] for rank in sorted(found)]

    def _spares(self) -> list[SpareView]:
        pages = each_page(self.directory.pages_link, SPARE_PAGE)
        return [_spare_view(page) for page in pages if alive(page[Word.PID])]

    def _speed(self, step: int) -> float | None:
        now_s = time.monotonic()
        if not self.story.session:
            self._speeds.clear()  # a resume jumps from 0 to its step at once, which is no speed
        self._speeds.append((now_s, step))
        while len(self._speeds) > 2 and now_s - self._speeds[0][0] > SPEED_WINDOW_S:
            self._speeds.popleft()
        (from_s, from_step), (to_s, to_step) = self._speeds[0], self._speeds[-1]
        return (
            (to_step - from_step) / (to_s - from_s) if to_s - from_s > 1.0 and to_step > from_step else None
        )

    def _losses(self, now: float, step: int, still_s: float) -> dict[str, float] | None:
        """Return the lost seconds by cause; None before the first step, when the start is not over."""
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
    """Return the log of the rank that failed; None: it is on another node."""
    if fault.node not in ("", settings.node):
        return None
    return log_path(log_root(run, settings), fault.attempt, fault.rank)


def meaning(code: Exit, session: bool) -> str:
    """Return what the end of a run means. ``session``: one was opened; without one there is nothing to save."""
    if code is Exit.USAGE:
        return "nothing was started"  # its own arguments are checked before there is a run
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
    """Return for how long no rank in a session has made progress, if that is longer than steps take; otherwise 0."""
    living = [r for r in ranks if r.alive]
    busy_s = max((r.busy_s for r in living), default=0.0)
    inside = any(r.phase in INSIDE for r in living) and all(r.phase in INSIDE | OUTSIDE for r in living)
    if not inside or not busy_s:
        return 0.0
    still_s = min(r.age_s for r in living)
    return still_s if still_s > max(STILL_STEPS * busy_s, STILL_S) else 0.0


def _age_s(page: Page) -> float:
    """Return the seconds since the worker last entered a phase; 0: it has entered none."""
    entered_ns = page[Word.ENTERED_NS]
    return round(max(0.0, time.monotonic() - entered_ns / 1e9), 3) if entered_ns else 0.0
