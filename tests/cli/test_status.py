"""Readers of a run: they need only its files, whichever of its processes still live."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.cli.commands.status import host_lines
from holdfast.cli.screen.run_lookup import find_run
from holdfast.cli.screen.run_summary import again, alike, facts, fault_text, kept, named
from holdfast.cli.screen.run_view import RunView, Watch
from holdfast.core.ids import Generation, MemberId
from holdfast.core.job.log_replay import ReplayedState
from holdfast.core.protocol.messages import Field, LogRecord
from holdfast.core.protocol.status_page import Phase, Word
from holdfast.errors import UsageError
from holdfast.event_log import EventLog, Said, read
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import PAGE, Endpoint, RunDir, log_path, write_private
from holdfast.runtime.node.status_page import Page, committed_step, each_page
from holdfast.text import span
from tests.cli.command import Run
from tests.runtime.runs import until

FAULT: dict[str, Field] = {
    "rank": 1,
    "member_id": 2,
    "kind": "signal",
    "what": "killed by SIGKILL",
    "step": 20,
    "phase": "backward",
    "detected_s": 0.01,
}
TIMES: dict[str, Field] = {
    f"{phase}_s": value
    for phase, value in zip(
        ("detected", "fenced", "quiesced", "planned", "restored", "resumed"),
        (0.01, 0.02, 0.06, 0.07, 1.5, 2.25),
        strict=True,
    )
}


class Made:
    """A run directory as agent and controller write it."""

    def __init__(self, base: Path, run_id: str, workers: int = 2) -> None:
        self.directory = RunDir(base / "runs" / run_id)
        self.directory.create()
        self.settings = RunSettings(run_id=run_id, nproc=workers, created_at=time.time() - 10)
        self.settings.save(self.directory.path)
        self.journal = EventLog.open(self.directory.journal, "controller")
        self.pages: list[Page] = []
        self.agent: subprocess.Popen[bytes] | None = None

    def start(self, attempt: int, first_member: int, n: int = 1) -> None:
        members = [first_member + rank for rank in range(self.settings.nproc)]
        self.journal.append(
            "generation_started",
            {
                "generation": f"1.{n}",
                "attempt": attempt,
                "in_place": False,
                "resume": "",
                "members": members,
                "nodes": ["node0"] * len(members),
                "local_ranks": list(range(len(members))),
            },
        )
        for rank, member in enumerate(members):
            path = self.directory.page_path(MemberId(member))
            page = Page.create(path, generation=Generation(1, n).pack(), member=member, rank=rank)
            page[Word.PID] = os.getpid()
            page.place(21, Phase.FORWARD)
            self.pages.append(page)
            log = log_path(self.directory.path, attempt, rank)
            log.parent.mkdir(exist_ok=True)
            log.write_text(f"attempt {attempt} rank {rank}\n")

    def fault(self) -> None:
        self.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
        self.journal.append("detected", FAULT)
        self.journal.append("fenced", {"generation": "1.2", "reason": "", "dead_ranks": [1]})
        self.journal.append("planned", {"generation": "1.2", "step": 20})
        self.journal.append("verdict", {"action": "restart_last_gasp", "reason": "rank 1 is gone"})

    def recover(self) -> None:
        self.journal.append("restored", {"step": 20, "steps_lost": 0, "generation": "1.2"})
        self.journal.append("resumed", {"step": 20, "generation": "1.2"})
        self.journal.append("recovered", {**FAULT, "steps_lost": 0, "freed_s": 0.03, **TIMES})

    def end(self, code: int, reason: str = "") -> None:
        self.journal.append("run_ended", {"code": code, "cause": "", "reason": reason, "step": 40})
        self.close()
        self.directory.remove_pages()

    def serve(self) -> None:
        """Start a process with the command line of an agent."""
        words = ["sh", "-c", "read line", "holdfast.runtime.agent.agentd", str(self.directory.path)]
        self.agent = subprocess.Popen(words, stdin=subprocess.PIPE)
        shown = Path(f"/proc/{self.agent.pid}/cmdline")
        until("the kernel shows its words", lambda: b"agentd" in shown.read_bytes())
        self._listens(self.agent.pid)

    def reuse(self) -> None:
        """Simulate that the agent was killed and that its pid now belongs to this process."""
        self._listens(os.getpid())

    def _listens(self, pid: int) -> None:
        endpoint = Endpoint("127.0.0.1", 1, pid)
        write_private(self.directory.endpoint_path("agent"), msgspec.json.encode(endpoint))

    def close(self) -> None:
        for page in self.pages:
            page.close()
        self.pages = []
        if self.agent is not None:
            self.agent.communicate()
            self.agent = None


@pytest.fixture
def swept(tmp_path: Path) -> Iterator[None]:
    """Remove the status pages of every run below ``tmp_path`` at the end."""
    yield
    for settings in tmp_path.rglob("run.json"):
        RunDir(settings.parent).remove_pages()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Made]:
    run = Made(tmp_path, "alpha-1")
    yield run
    run.close()
    run.journal.close()
    run.directory.remove_pages()


def as_json(holdfast: Run, *args: str) -> dict[str, object]:
    result = holdfast("status", "--json", *args)
    assert result.returncode == 0, result.stderr
    view = json.loads(result.stdout)
    assert isinstance(view, dict)
    return view


def test_a_process_that_has_entered_nothing_yet_has_no_age(made: Made) -> None:
    made.start(0, 1)
    made.pages[0][Word.ENTERED_NS] = 0
    # An age is shown in milliseconds: a quick test would see none.
    made.pages[1][Word.ENTERED_NS] -= 10_000_000
    first, second = Watch(made.directory, made.settings).poll().ranks
    assert first.age_s == 0.0 < second.age_s < 60.0


def test_a_live_run(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    made.pages[1].place(20, Phase.VOTE)
    view = as_json(holdfast)
    assert (view["run_id"], view["state"], view["step"], view["code"]) == ("alpha-1", "running", 21, None)
    ranks = view["ranks"]
    assert isinstance(ranks, list)
    assert [(r["rank"], r["phase"], r["step"], r["alive"]) for r in ranks] == [
        (0, "forward", 21, True), (1, "vote", 20, True),
    ]  # fmt: skip
    text = holdfast("status").stdout
    assert "alpha-1  running  step 21  2/2 workers" in text
    assert "vote" in text and str(os.getpid()) in text and "holdfast exit alpha-1" in text
    assert "\x1b" not in text


def test_a_script_without_a_session_is_running_and_has_an_age(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    assert made.agent is not None
    for page in made.pages:
        page[Word.PID] = made.agent.pid  # the test process may be older than the longest allowed start
        page.place(0, Phase.STARTING)
    assert "running (no session)" not in holdfast("status").stdout, "it may be on its way to one"
    for page in made.pages:
        page[Word.COLLECTIVES] = 3
    view = Watch(made.directory, made.settings).poll()
    assert all(rank.age_s > 0 for rank in view.ranks)
    text = holdfast("status").stdout
    assert text.count("running (no session)") == 2 and "starting" not in text
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    assert "running (no session)" not in holdfast("status").stdout


def test_no_exit_is_taken_back_that_was_not_asked_for(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    result = holdfast("exit", "--cancel")
    assert result.returncode != 0 and "run alpha-1 was not asked to leave" in result.stderr


def test_a_straggler_and_a_section(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    made.pages[1][Word.BUSY_NS] = 250_000_000
    made.pages[0].announce("eval")
    made.pages[0].place(21, Phase.SECTION)
    made.journal.append("straggler", {"rank": 1, "busy_s": 0.25, "others_s": 0.1, "ratio": 2.5})
    text = holdfast("status").stdout
    assert "250 ms, median 250 ms: 2.5 x slower" in text and "section eval" in text
    made.journal.append("straggler_gone", {"rank": 1})
    assert "slower" not in holdfast("status").stdout


def test_a_fault_while_it_is_answered(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    made.fault()
    view = as_json(holdfast, "alpha-1")
    assert view["state"] == "recovering"
    faults = view["faults"]
    assert isinstance(faults, list)
    (fault,) = faults
    assert (fault["rank"], fault["phase"], fault["action"]) == (1, "backward", "restart_last_gasp")
    assert set(fault["phases"]) == {"detected", "fenced", "planned"}


def test_a_fault_that_is_over(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    made.fault()
    made.start(1, 3, n=2)
    made.recover()
    view = as_json(holdfast)
    assert (view["state"], view["attempt"], view["steps_lost"]) == ("running", 1, 0)
    ranks, faults = view["ranks"], view["faults"]
    assert isinstance(ranks, list) and isinstance(faults, list)
    assert [r["member_id"] for r in ranks] == [3, 4]
    assert faults[0]["phases"]["resumed"] == 2.25
    text = holdfast("status").stdout
    assert "F001" in text and "rank 1: killed by SIGKILL, in backward of step 20" in text and "2.25 s" in text


def test_after_the_end(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    made.journal.append("sealed", {"step": 40, "directory": "step-00000040.it"})
    made.end(75, "asked by Ctrl-C")
    view = as_json(holdfast)
    assert (view["state"], view["code"], view["step"], view["ranks"]) == ("ended", 75, 40, [])
    assert view["reason"] == "asked by Ctrl-C"
    text = holdfast("status", "--watch").stdout
    assert "ended with 75" in text and "next: start the same command: it continues at step 40\n" in text


def test_how_far_a_run_came_that_was_stopped_at_once(holdfast: Run, made: Made) -> None:
    """The controller learns no steps between decisions, so the agent reports those of the status pages at the end."""
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    for page, step in zip(made.pages, (11, 10), strict=True):
        page[Word.COMMITTED] = step
    made.start(1, 3, n=2)
    made.pages[2][Word.COMMITTED] = (
        10  # an older process of this rank had done more steps, which were taken back
    )
    step = committed_step(each_page(made.directory.pages_link, PAGE))
    assert step == 10
    made.journal.append("run_ended", {"code": 130, "cause": "", "reason": "second signal: Ctrl-C", "step": 0})
    made.directory.remove_pages()
    made.journal.append("agent_ended", {"code": 130, "step": step})
    shown = holdfast("status").stdout
    assert "step 10  2 workers" in shown and "why  second signal: Ctrl-C" in shown
    assert "begins again at step 0, there is no checkpoint (10 steps lost)" in shown


def view_of(made: Made, code: int = 130) -> RunView:
    """Return the view of a run that was stopped at step 40."""
    made.end(code)
    return Watch(made.directory, made.settings).poll()


@pytest.mark.parametrize(
    ("code", "sealed", "says"),
    [
        (3, 15, "newest checkpoint: step 15; 25 steps are not kept"),
        (74, 39, "newest checkpoint: step 39; 1 step is not kept"),
        (1, -1, "no checkpoint; 40 steps are not kept"),
        (77, 40, "newest checkpoint: step 40"),
        (0, 40, "0 steps lost"),
        (75, 40, "0 steps lost"),
    ],
)
def test_a_bad_end_says_what_is_kept(made: Made, code: int, sealed: int, says: str) -> None:
    """No step was lost in a recovery, but the end of the run loses the steps after the newest checkpoint."""
    made.start(0, 1)
    made.fault()
    made.recover()
    if sealed >= 0:
        made.journal.append("sealed", {"step": sealed, "directory": f"step-{sealed:08d}.it"})
    found = facts(view_of(made, code))
    assert says in found
    assert ("0 steps lost" in found) == (code in (0, 75))


def test_what_the_same_command_goes_on_with(made: Made) -> None:
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 25, "root": "", "generation": "1.1"})
    assert Watch(made.directory, made.settings).poll().kept_step == 25
    made.journal.append("sealed", {"step": 39, "directory": "step-00000039.it"})
    assert again(view_of(made)) == "start the same command: it continues at step 39, 1 step to do again"
    cut_off = msgspec.structs.replace(view_of(made), cut_off=True)
    assert again(cut_off).endswith("at the newest step that any host has saved (step 39 is saved here)")
    assert kept(cut_off) == "newest checkpoint: step 39", "what another host has saved is not known here"
    (made.directory.path / "checkpoints").mkdir()
    assert again(view_of(made)).startswith(f"HOLDFAST_CHECKPOINT={made.directory.checkpoints} and the same")


@pytest.mark.parametrize(("back_to", "kept_step"), [(25, 25), (0, -1)])
def test_a_checkpoint_that_could_not_be_loaded_is_not_kept(made: Made, back_to: int, kept_step: int) -> None:
    """The controller counts from the step at which the sessions opened again, and so does status."""
    made.start(0, 1)
    made.journal.append("session_opened", {"step": 30, "root": "", "generation": "1.1"})
    made.journal.append("sealed", {"step": 39, "directory": "step-00000039.it", "generation": "1.1"})
    made.start(1, 3, n=2)
    made.journal.append("session_opened", {"step": back_to, "root": "", "generation": "1.2"})
    view = Watch(made.directory, made.settings).poll()
    records = [LogRecord(kind=e.kind, data=e.data) for e in read(made.directory.journal).events]
    assert view.sealed_step == ReplayedState.read(records).sealed_step == back_to
    assert (view.kept_step, view.found_step) == (kept_step, 30)


def test_without_a_session_there_is_nothing_to_save(made: Made) -> None:
    made.start(0, 1)
    view = view_of(made, 76)
    assert "no session was open" in view.meaning and again(view).endswith("where the script itself resumes")
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    assert "no checkpoint could be saved" in Watch(made.directory, made.settings).poll().meaning


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("killed", "rank 1: killed, in backward of step 20"),
        ("made no progress, in backward of step 20, collective 1", None),
        ("ValueError: first\nsecond", "rank 1: ValueError: first, in backward of step 20"),
    ],
)
def test_a_fault_in_one_line(made: Made, what: str, text: str | None) -> None:
    made.start(0, 1)
    made.journal.append("detected", {**FAULT, "what": what})
    (fault,) = Watch(made.directory, made.settings).poll().faults
    assert fault_text(fault) == (text or f"rank 1: {what}")
    fault.phase, fault.what = "starting", "killed"
    assert fault_text(fault) == "rank 1: killed, before any session"


def test_nothing_is_wrapped_into_a_pipe(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.journal.append("detected", {**FAULT, "what": "word " * 80})
    (line,) = [line for line in holdfast("status").stdout.splitlines() if line.startswith("F001")]
    assert line.count("word") == 80


def test_pages_that_go_while_they_are_read(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.start(0, 1)
    watch = Watch(made.directory, made.settings)
    assert watch.poll().ranks
    made.directory.remove_pages()
    monkeypatch.setattr(Path, "is_dir", lambda self: True)  # it existed a moment ago
    assert watch.poll().ranks == []


def test_nobody_left(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    for page in made.pages:
        page[Word.PID] = 2**22 + 1  # no process has this number
    assert as_json(holdfast)["state"] == "lost"
    assert "dead (in forward)" in holdfast("status").stdout


def test_another_process_has_the_number_of_the_agent(made: Made) -> None:
    watch = Watch(made.directory, made.settings)
    made.reuse()
    assert watch.poll().state == "lost"


def test_a_run_that_is_named_by_another_path(made: Made, tmp_path: Path) -> None:
    made.serve()
    (tmp_path / "link").symlink_to(made.directory.path)
    assert Watch(RunDir(tmp_path / "link"), made.settings).poll().state == "running"


def test_damaged_pages_and_log_lines_do_not_hide_the_rest(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.serve()
    made.directory.page_path(MemberId(99)).write_bytes(b"no page")
    with made.directory.journal.open("ab") as file:
        file.write(b'{"v":1,"seq":0,"crc":"wrong"}\n{"torn')
    view = as_json(holdfast)
    assert view["state"] == "running" and len(view["ranks"]) == 2  # type: ignore[arg-type]


def test_which_run(holdfast: Run, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    other = Made(tmp_path, "beta-1")
    other.journal.close()
    os.utime(other.directory.path / "run.json", (0, 0))
    assert find_run(None, "runs")[1].run_id == "alpha-1"
    assert find_run("bet", "runs")[1].run_id == "beta-1"
    assert find_run(str(other.directory.path), "runs")[1].run_id == "beta-1"
    with pytest.raises(UsageError, match="there is no run alpa-1") as caught:
        find_run("alpa-1", "runs")
    assert caught.value.hint == "did you mean alpha-1?"
    again = Made(tmp_path, "beta-2")
    again.journal.close()
    with pytest.raises(UsageError, match=r"bet begins the names of 2 runs: beta-[12], beta-[12]"):
        find_run("bet", "runs")
    write_private(other.directory.path / "run.json", b"{")
    with pytest.raises(UsageError, match="damaged"):
        find_run("beta-1", "runs")
    other.directory.remove_pages()


def test_logs(holdfast: Run, made: Made) -> None:
    made.start(0, 1)
    made.start(1, 3)
    made.end(0)
    everything = "[rank 0] attempt 0 rank 0\n[rank 1] attempt 0 rank 1\n"
    assert holdfast("logs", "--attempt", "0").stdout == everything
    assert holdfast("logs", "--rank", "1").stdout == "attempt 0 rank 1\nattempt 1 rank 1\n"
    assert len(holdfast("logs", "-f").stdout.splitlines()) == 4
    paths = holdfast("logs", "--paths", "--rank", "0").stdout.splitlines()
    assert [Path(p).read_text() for p in paths] == ["attempt 0 rank 0\n", "attempt 1 rank 0\n"]
    Path(paths[0]).write_bytes(b"1%\r2%\nend")
    assert holdfast("logs", "--attempt", "0", "--rank", "0").stdout == "2%\nend\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--rank", "7"], "has ranks 0 to 1, not 7"),
        (["--attempt", "5"], "has no attempt 5 (the last one is 0)"),
        (["--attempt", "0", "-f"], "--attempt shows what is over"),
    ],
)
def test_logs_that_do_not_exist(holdfast: Run, made: Made, args: list[str], says: str) -> None:
    made.start(0, 1)
    result = holdfast("logs", *args)
    assert result.returncode == 2 and says in result.stderr


def test_a_job_that_stands_loses_goodput_and_one_in_its_first_step_has_none(made: Made) -> None:
    made.settings = msgspec.structs.replace(made.settings, created_at=time.time() - 100.0)
    made.start(0, 1)
    opened: dict[str, Field] = {"step": 0, "root": "", "generation": "1.1"}
    made.journal.append("session_opened", opened, said=Said(time.time() - 95.0, 5.0))
    for page, phase in zip(made.pages, (Phase.BACKWARD, Phase.READY), strict=True):
        page.place(0, phase)
        page[Word.ENTERED_NS] = time.monotonic_ns() - 60 * 10**9
    view = Watch(made.directory, made.settings).poll()
    assert (view.goodput, view.still_s) == (None, 0.0), "a first step may take long"
    for page in made.pages:
        page[Word.STATE] += 21 << 8
        page[Word.BUSY_NS] = 10**9
    view = Watch(made.directory, made.settings).poll()
    assert view.goodput is not None and view.goodput < 0.45 and view.still_s > 59
    assert "stands still for 1 min" in " ".join(facts(view))
    made.pages[1].place(21, Phase.SECTION)
    assert Watch(made.directory, made.settings).poll().still_s == 0.0


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0.31, "0.3 s"), (42.4, "42 s"), (59.7, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_span(duration_s: float, text: str) -> None:
    assert span(duration_s) == text


def test_a_signal_has_its_name() -> None:
    assert named("was killed by signal 9") == "was killed by signal 9 (SIGKILL)"
    assert named("was killed by signal 50") == "was killed by signal 50"


def rendered(view: RunView) -> str:
    """Return the facts of the job as they are shown."""
    return "\n".join([*facts(view), *host_lines(view), again(view)])


def later(made: Made, kind: str, data: dict[str, Any], after_s: float) -> None:
    """Append an event at ``after_s`` seconds of a simulated time."""
    made.journal.append(kind, data, said=Said(1000.0 + after_s, after_s))


def test_the_times_of_faults_that_follow_one_another_are_kept_apart(made: Made) -> None:
    """The second fault is found 40 s later, before the job continued. The first had been found in milliseconds."""
    made.start(0, 1)
    first, second = {**FAULT, "detected_s": 0.01}, {**FAULT, "rank": 0, "member_id": 1, "detected_s": 0.5}
    for begins_s, fault in ((1.0, first), (41.0, second)):
        later(made, "detected", fault, begins_s)
        for after_s, kind in enumerate(("fenced", "quiesced", "planned", "restored"), 1):
            later(made, kind, {"step": 20, "steps_lost": 0, "generation": "1.2"}, begins_s + after_s)
    later(made, "resumed", {}, 50.0)
    one, two = Watch(made.directory, made.settings).poll().faults
    assert one.phases == {"detected": 0.01, "fenced": 1.01, "quiesced": 2.01, "planned": 3.01, "restored": 44.01,
                          "resumed": 49.01}  # fmt: skip
    assert two.phases["detected"] == 0.5 and two.phases["fenced"] == 1.5


def test_the_mark_of_a_slow_rank_goes_with_its_process(made: Made) -> None:
    made.start(0, 1)
    for rank in (0, 1):
        made.journal.append("straggler", {"rank": rank, "busy_s": 0.25, "others_s": 0.1, "ratio": 2.5})
    replaced: dict[str, Field] = {
        "generation": "1.2",
        "ranks": [1],
        "members": [7],
        "nodes": ["node0"],
        "local_ranks": [1],
    }
    made.journal.append("members_replaced", replaced)
    assert [r.slow for r in Watch(made.directory, made.settings).poll().ranks] == [2.5, 0.0]


def test_a_host_of_several_says_what_it_knows_of_the_job_and_what_not(made: Made) -> None:
    """Regression: the host showed "begins again at step 0, 341 steps lost" while the other hosts trained."""
    settings = msgspec.structs.replace(made.settings, nnodes=2, nnodes_max=3, node="node1", created_at=1000.0)
    for node in ("node0", "node1", "node2"):
        made.journal.append("agent_joined", {"node": node, "pid": 1, "slots": 2})
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    started: dict[str, Field] = {"generation": "1.1", "attempt": 0, "in_place": False, "resume": "", "members": [1, 2],
               "nodes": ["node0", "node1"], "local_ranks": [0, 0]}  # fmt: skip
    made.journal.append("generation_started", started)
    made.journal.append("planned", {"generation": "1.1", "step": 341})
    view = Watch(made.directory, settings).poll()
    assert view.state == "lost"
    text = rendered(view)
    assert "job  node0: rank 0; node1 (here): rank 1; node2: no rank" in text
    assert "known here until " in text and "newest step that any host has saved" in text
    assert "steps lost" not in text and "begins again at step 0" not in text
    made.journal.append("node_lost", {"node": "node0", "reason": "no heartbeat"})
    replaced: dict[str, Field] = {"generation": "1.2", "ranks": [0], "members": [3], "nodes": ["node2"],
                                  "local_ranks": [0]}  # fmt: skip
    made.journal.append("members_replaced", replaced)
    text = rendered(Watch(made.directory, settings).poll())
    assert "job  node0: lost; node1 (here): rank 1; node2: rank 0" in text


def test_a_lost_run_says_what_is_not_kept(made: Made) -> None:
    """The end must not say "0 steps lost": no process is left that holds the steps."""
    made.journal.append("session_opened", {"step": 0, "root": "", "generation": "1.1"})
    made.journal.append("detected", FAULT)
    made.journal.append("planned", {"generation": "1.1", "step": 425})
    settings = msgspec.structs.replace(made.settings, created_at=1000.0)
    view = Watch(made.directory, settings).poll()
    assert view.state == "lost" and "425 steps are not kept" in rendered(view)


def test_faults_that_are_all_alike_are_said_to_be(made: Made) -> None:
    """Regression: 17 equal faults ended a run with the advice to allow more faults."""
    made.start(0, 1)
    for number in range(17):
        again_and_again = {
            **FAULT,
            "member_id": number,
            "step": 20 + number,
            "kind": "exit",
            "what": "is gone",
        }
        made.journal.append("detected", again_and_again)
        made.journal.append("detected", {**FAULT, "rank": 0, "what": "left for a restart"})
    faults = Watch(made.directory, made.settings).poll().faults
    assert alike(faults) == "17 faults, all alike: rank 1: is gone, in backward of step 36"
    assert alike(faults[:4]) == "" == alike([*faults, msgspec.structs.replace(faults[0], what="is killed")])
