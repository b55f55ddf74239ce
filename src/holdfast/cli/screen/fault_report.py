"""One page per fault, made from the event log: rank, place in the script, cause, duration, cost, and a suggestion.

The same log always gives the same report. A newer version of Holdfast can also report on an old run.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.cli.screen.escaping import shown
from holdfast.cli.screen.run_summary import fault_place, named
from holdfast.cli.screen.run_view import log_of, repeated
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.job.fault import LEFT_FOR_RESTART, SEEN
from holdfast.core.protocol.status_page import Phase
from holdfast.event_log import Event
from holdfast.exit_codes import Exit
from holdfast.history.run_history import FaultView, RunHistory
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir, last_lines, write_private
from holdfast.runtime.node.stack_texts import whole_words
from holdfast.text import plural

REPORTS = "faults"
EVIDENCE_MAX = 9
LOG_LINES_MAX = 8
LINE_LENGTH_MAX = 240
LABEL = 10
USUAL_S = {
    "detected": 0.1,
    "fenced": 0.05,
    "quiesced": 0.5,
    "planned": 0.05,
    "restored": 2.0,
    "resumed": 2.0,
}
"""The usual upper limit of the duration of each phase of a recovery, in seconds.

For the detection of a hang the limit is the learned bound of the hang plus 0.5 s.
"""
OFTEN = 3  # number of faults of one rank from which the report suspects its machine


class PhaseTime(msgspec.Struct, frozen=True):
    """One phase of a recovery. ``at_s``: end of the phase, ``took_s``: its duration, ``usual_s``: its usual duration.

    ``at_s`` counts from the fault. All are in seconds.
    """

    phase: str
    at_s: float
    took_s: float
    usual_s: float

    @property
    def late(self) -> bool:
        """True if the phase took longer than usual."""
        return self.took_s > self.usual_s


class FaultReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report on one fault. ``at`` is Unix time; all other times are durations in seconds; paths are absolute."""

    name: str
    run_id: str
    at: float
    rank: int
    member_id: int
    node: str
    kind: str
    what: str
    where: str
    confidence: str
    evidence: list[str]
    stacks: list[str]
    log: str  # empty: the log is on ``node``, not on this host
    log_tail: list[str]
    action: str
    reason: str
    decision: str
    timeline: list[PhaseTime]
    recovered: bool
    session: bool  # without a session it is unknown whether the script trains
    lost_s: float  # time without training; 0: unknown
    steps_lost: int
    in_doubt: int
    saved: str
    ended: str  # how the run ended, if it ended with this fault
    next_steps: list[str]


class _Case:
    """The events that belong to one fault."""

    def __init__(self, fault: FaultView, exits: Mapping[int, dict[str, Any]]) -> None:
        self.fault = fault
        self._exits = exits
        self.hang: dict[str, Any] = {}
        self.corrupted: dict[str, Any] = {}  # data of the event; empty: no copies of the state differed
        self.again: dict[str, int] = {}  # number of corruptions on each suspected node, this fault included
        self.events: list[Event] = []

    def last(self, kind: str) -> dict[str, Any]:
        """Return the data of the fault's newest event of a kind; empty if there is no such event."""
        return next((e.data for e in reversed(self.events) if e.kind == kind), {})

    @property
    def exited(self) -> dict[str, Any]:
        """The data of the event about the exit of the failed process; empty if the process has not exited."""
        return self._exits.get(self.fault.member_id, {})

    @property
    def start_s(self) -> float:
        """Seconds from the start to the join of the slowest replacement; 0 if no replacement joined."""
        began = {e.data["member_id"]: e.t_mono for e in self.events if e.kind == "member_started"}
        joined = (e for e in self.events if e.kind == "joined" and e.data["member_id"] in began)
        return max((e.t_mono - began[e.data["member_id"]] for e in joined), default=0.0)

    @property
    def lost_with_it(self) -> list[dict[str, Any]]:
        """The data of other faults that were detected before this fault was answered.

        Faults that are only broken collectives are left out, because they are consequences.
        """
        others = (e for e in self.all("detected") if e["member_id"] != self.fault.member_id)
        return [e for e in others if e["kind"] != "collective"]

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of all events of a kind that belong to the fault."""
        return [e.data for e in self.events if e.kind == kind]

    def before_the_plan(self, kind: str) -> list[dict[str, Any]]:
        """Return the data of the fault's events of a kind that came before the newest recovery plan."""
        planned = (at for at in reversed(range(len(self.events))) if self.events[at].kind == "planned")
        return [e.data for e in self.events[: next(planned, len(self.events))] if e.kind == kind]


class IncidentLog:
    """A reader of an event log that makes one report per fault. Call ``take`` with the events in their order."""

    def __init__(self, run: RunDir, settings: RunSettings) -> None:
        self._run = run
        self._settings = settings
        self._story = RunHistory()
        self._cases: list[_Case] = []
        self._hang: dict[str, Any] = {}
        self._corrupted: list[dict[str, Any]] = []
        self._bound_s = 0.0

    def take(self, event: Event) -> None:
        """Add the next event of the log."""
        known, unanswered = len(self._story.faults), self._story.unanswered
        self._story.take(event)
        if event.kind == "stalled":
            self._bound_s = float(event.data["bound_s"])
        elif event.kind == "hang" and event.data["answer"] != "wait":
            self._hang = {**event.data, "bound_s": self._bound_s}
        elif event.kind == "corrupted":
            self._corrupted.append(event.data)
        for fault in self._story.faults[known:]:
            case = _Case(fault, self._story.exits)
            if fault.kind == "hang" or (fault.kind == "silent" and fault.what == self._hang.get("reason")):
                case.hang = self._hang
            if fault.kind == "corruption" and self._corrupted:
                case.corrupted = self._corrupted[-1]
                for node in sorted(set(case.corrupted["nodes"])):
                    # Several corruptions at the same step count once: their cause is the script.
                    steps = {data["step"] for data in self._corrupted if node in data["nodes"]}
                    case.again[node] = len(steps)
            self._cases.append(case)
        for fault in [*unanswered, *self._story.faults[known:]]:
            self._cases[fault.number - 1].events.append(event)

    def reports(self) -> list[FaultReport]:
        """Return one report per fault, in the order of detection."""
        return [self._report(case) for case in self._cases]

    def _report(self, case: _Case) -> FaultReport:
        fault = case.fault
        log = log_of(fault, self._run, self._settings)
        verdict, planned, saved = (case.last(kind) for kind in ("verdict", "planned", "sealed"))
        ended = self._story.ended if fault in self._story.unanswered else None
        timeline = _timeline(fault, case.hang if fault.kind == "hang" else {})
        return FaultReport(
            name=fault.name,
            run_id=self._settings.run_id,
            at=round(fault.at, 3),
            rank=fault.rank,
            member_id=fault.member_id,
            node=fault.node,
            kind=fault.kind,
            what=named(fault.what),
            where=fault_place(fault),
            confidence=_confidence(case),
            evidence=_evidence(case),
            stacks=[str(self._run.path / name) for name in case.hang.get("stacks", [])],
            log=str(log) if log else "",
            log_tail=self._log_tail(case, log),
            action=fault.action,
            reason=fault.reason,
            decision=_decision(planned, verdict),
            timeline=timeline,
            recovered=fault.recovered_s is not None,
            session=self._story.session,
            lost_s=timeline[-1].at_s if timeline else 0.0,
            steps_lost=fault.steps_lost,
            in_doubt=int(planned.get("in_doubt", 0)),
            saved=str(saved.get("directory", "")),
            ended=f"{ended['cause']}: {ended['reason']}" if ended else "",
            next_steps=self._next_steps(case),
        )

    def _log_tail(self, case: _Case, log: Path | None) -> list[str]:
        if log is None or case.fault.kind not in ("exception", "device", "exit", "signal"):
            return []
        return last_lines(log, LOG_LINES_MAX, end=case.exited.get("log_size_bytes"))

    def _next_steps(self, case: _Case) -> list[str]:
        fault = case.fault
        which = f"--rank {fault.rank} --attempt {fault.attempt}"
        here = log_of(fault, self._run, self._settings) is not None
        logs = (
            f"holdfast logs {shlex.quote(str(self._run.path))} {which}"
            if here
            else f"on {fault.node}: holdfast logs RUN {which}"
        )
        same = [c for c in self._cases if c.fault.rank == fault.rank and c.fault.number <= fault.number]
        found = _advice(case, logs, self._run.path)
        if case.start_s > USUAL_S["restored"]:
            ready = "" if self._settings.spares else "; --spares 1 keeps a process that has done all of it"
            found.append(
                f"the replacement took {case.start_s:.1f} s from its start to its join (imports and set-up of the "
                f"script): --preload MODULE,... imports modules once per node{ready}"
            )
        if again := repeated([c.fault for c in self._cases], fault):
            found.append(again)
        if len(same) >= OFTEN:
            found.append(
                f"{len(same)} faults of rank {fault.rank} so far: check its machine {fault.node} and its data"
            )
        return found


def _advice(case: _Case, logs: str, run: Path) -> list[str]:
    fault, hang = case.fault, case.hang
    signal = str(case.exited.get("signal") or "")
    if hang:
        stack = next((s for s in hang["stacks"] if s.endswith(f"rank-{fault.rank:05d}.txt")), "")
        found = [f"read where it stood: {shlex.quote(str(run / stack))}"] if stack else []
        if "stopped" in fault.what:
            found.append("find the cause of the stop (kill -STOP, a debugger, a frozen container)")
        elif "uninterruptible" in fault.what:
            found.append("check the storage or device that it waited for: dmesg, df, mount")
        elif fault.phase == "loading":
            found.append("check the data loader: its workers, its storage, DataLoader(timeout=...)")
        elif fault.phase == "ready":
            found.append('announce long work between steps: with s.section("eval"): ...')
        if fault.kind == "silent":
            return [*found, logs]
        return [*found, "was it only slow? --hang-factor and --hang-floor give it more time"]
    if fault.kind == "device":
        return [
            f"check the device of rank {fault.rank} on {fault.node}: dmesg (Xid), nvidia-smi -q -d ECC",
            logs,
        ]
    if fault.kind == "corruption":
        often = [f"{count} times on {node} in this run" for node, count in case.again.items() if count > 1]
        return [
            "does each rank make the same update? Not with a learning rate or scheduler fed by a number of one rank",
            "are gradients kept from one step to the next, or weights changed outside of the optimizer?",
            "was a layer unfrozen after DDP(...) was made?",
            "have two stages of a pipeline the same names? session(model={'stage0': ...}) tells them apart",
            "does each rank hold another part of a larger weight? holdfast.torch.declare(...) tells the parts apart",
            *(f"silent corruption {each}: take it out of service and test its memory" for each in often),
            "look for memory errors that the machine has counted: dmesg, edac-util, nvidia-smi -q -d ECC",
            "are they copies at all? --verify-every 0 stops comparing",
        ]
    if fault.kind == "leave":
        return [
            f"nothing: start the same command on {fault.node or 'that node'} to give the job this node again"
        ]
    if fault.kind == "signal":
        if "oom_kill" in fault.what:
            return [
                "give the job more memory (its container's or scheduler's limit), or fewer ranks per node",
                "does this step need more than those before it: a longer sequence, a cache that grows, losses kept?",
                logs,
            ]
        hints = {
            "6": "its process called abort(): look for a failed assertion or an exception in the output (of gloo: does "
            "each rank call the same collectives, of the same size?)",
            "7": "is /dev/shm full (df /dev/shm), or was a file cut short that it had mapped (data that was replaced)?",
            "9": "was it the memory killer? dmesg | grep -i 'killed process'; in a container: "
            "grep oom_kill /sys/fs/cgroup/memory.events",
            "11": "look for a core file",
            "15": "look in the scheduler's log for the sender of SIGTERM",
        }
        return [*([hints.get(signal, f"signal {signal}: man 7 signal")] if signal else []), logs]
    if fault.phase == Phase.LEFT.name.lower():
        return ["does its script end before the others' (sys.exit, fewer steps)?", logs]
    if fault.kind == "collective":
        lost = [f"rank {lost['rank']} ({lost['what']})" for lost in case.lost_with_it]
        if lost:
            return [f"nothing here: it broke because of {', '.join(lost)}, which has a report of its own"]
        return ["no process died: check the network between the ranks", logs]
    if fault.phase == NO_PAGE and fault.node:
        return [
            f"what became of {fault.node}? Its power, its kernel's and the scheduler's log, its network",
            logs,
        ]
    return [logs]


def _timeline(fault: FaultView, hang: dict[str, Any]) -> list[PhaseTime]:
    found, before_s = [], 0.0
    for phase in SEEN:
        if phase not in fault.phases:
            break
        at_s = max(before_s, fault.phases[phase])
        usual_s = USUAL_S[phase]
        if phase == "detected" and hang:
            usual_s = float(hang.get("bound_s", 0.0)) + 0.5
        found.append(PhaseTime(phase, round(at_s, 3), round(at_s - before_s, 3), round(usual_s, 3)))
        before_s = at_s
    return found


def _confidence(case: _Case) -> str:
    if case.corrupted:
        ranks = ", ".join(map(str, case.corrupted["ranks"]))
        return "certain" if case.corrupted["certain"] else f"one of ranks {ranks}"
    return str(case.hang.get("confidence", "certain"))


def _evidence(case: _Case) -> list[str]:
    found = [str(line) for line in (*case.hang.get("evidence", []), *case.corrupted.get("evidence", []))]
    exited = case.exited
    if exited and not case.hang:
        shown = f"; its status page shows {exited['phase']} of step {exited['step']}"
        found.append(f"its process {_end(exited)}{'' if exited['phase'] == NO_PAGE else shown}")
    states: dict[str, list[str]] = {}
    for settled in case.before_the_plan("settled"):  # newcomers settle as well, but after the plan
        where = f"{settled['state']} at step {settled['step']}"
        if (rank := str(settled["rank"])) not in states.setdefault(where, []):
            states[where].append(rank)
    found += [
        f"rank{'s' * (len(ranks) > 1)} {', '.join(sorted(ranks, key=int))} came to rest: {where}"
        for where, ranks in states.items()
    ]
    found += [str(line) for line in case.last("planned").get("evidence", [])]
    verdict = case.last("verdict")
    found += [str(line) for line in verdict.get("evidence", [])]
    found += [f"not taken: {line}" for line in verdict.get("refused", []) if not line.startswith("grow: ")]
    if len(found) > EVIDENCE_MAX:
        found = [
            *found[:EVIDENCE_MAX],
            f"and {plural(len(found) - EVIDENCE_MAX, 'line')} more: --json, events.jsonl",
        ]
    return found


def _end(exited: dict[str, Any]) -> str:
    if exited.get("signal"):
        return f"ended with signal {exited['signal']}"
    code = exited.get("code")
    if code is None:
        return "is gone"
    return LEFT_FOR_RESTART if code == Exit.RESTART else f"ended with code {code}"


def _decision(planned: dict[str, Any], verdict: dict[str, Any]) -> str:
    if not planned:
        return ""
    turn = {
        "forward": "; ranks that had not received the last vote made its update",
        "back": "; ranks that had not received the last vote ran the step again",
    }
    return f"the job had reached step {planned['step']}{turn.get(str(planned['decision']), '')}"


def text(report: FaultReport) -> str:
    """Return a report as text for one screen of a terminal."""
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report.at))
    node = f", {report.node}" if report.node else ""
    sure = f" ({report.confidence})" if report.kind in ("hang", "corruption") else ""
    rows = [
        (f"fault {report.name}", [f"of run {report.run_id}, {clock}"]),
        (
            "who",
            [f"rank {report.rank} (process number {report.member_id} of the run{node}): {report.kind}{sure}"],
        ),
        ("what", [report.what]),
        ("where", [report.where]),
        ("evidence", report.evidence),
        ("output", report.log_tail),
        ("decision", [part for part in (report.decision, _answer(report)) if part]),
        ("timeline", [_bar(each) for each in report.timeline] or ["it was not answered"]),
        ("cost", [_cost(report)]),
        ("ended", [report.ended] if report.ended else []),
        ("stacks", [str(Path(report.stacks[0]).parent)] if report.stacks else []),
        ("log", [report.log or f"on {report.node}"]),
        ("next", report.next_steps),
    ]
    lines = []
    for label, values in rows:
        pieces = [line.strip() for value in values for line in value.splitlines()]
        for index, piece in enumerate(pieces):
            lines.append(f"{label if index == 0 else '':{LABEL}}  {whole_words(piece, LINE_LENGTH_MAX)}")
    return shown("\n".join(lines)) + "\n"


def _answer(report: FaultReport) -> str:
    return f"{report.action.replace('_', ' ')}: {report.reason}" if report.action else ""


def _bar(each: PhaseTime) -> str:
    mark = "  late" if each.late else ""
    return (
        f"{each.phase:9} {each.at_s:8.3f} s   took {each.took_s:7.3f} s   usual {each.usual_s:6.2f} s{mark}"
    )


def _cost(report: FaultReport) -> str:
    if not report.session:
        if not report.recovered:
            return "not known: the script has no session"
        return (
            f"all workers were started again after {report.lost_s:.2f} s; more is not known without a session"
        )
    steps = f"{plural(report.steps_lost, 'step')} lost"
    end = "" if report.recovered else " until the run ended" if report.ended else " and not over"
    saved = f", saved as {report.saved}" if report.saved else ""
    return f"{steps}, {report.lost_s:.2f} s without training{end}{saved}"


def write(run: RunDir, report: FaultReport) -> Path:
    """Write a report into the run directory, as ``faults/F003.txt`` and ``faults/F003.json``.

    Returns:
        The path of the ``.txt`` file.

    Raises:
        OSError: a file cannot be written.
    """
    directory = run.path / REPORTS
    directory.mkdir(mode=0o700, exist_ok=True)
    document = msgspec.json.format(msgspec.json.encode(report), indent=2)
    write_private(directory / f"{report.name}.json", document)
    path = directory / f"{report.name}.txt"
    write_private(path, text(report).encode())
    return path


def reports_of(run: RunDir, settings: RunSettings, events: Sequence[Event]) -> list[FaultReport]:
    """Return the reports on all faults of a run, in the order of detection. ``events`` is its whole event log."""
    book = IncidentLog(run, settings)
    for event in events:
        book.take(event)
    return book.reports()
