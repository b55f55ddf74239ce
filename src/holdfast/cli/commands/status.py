"""``holdfast status``: one screen about a run, live or over."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cli.screen.console import Hanging, clock, table_console
from holdfast.cli.screen.escaping import echo_json
from holdfast.cli.screen.rank_lines import RANKS_SHOWN, rank_parts
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.run_view import FaultView, RunView, SpareView, Watch
from holdfast.cli.screen.scrolling import Scroller
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.job.fault import LEFT_FOR_RESTART, SEEN
from holdfast.core.protocol.status_page import Phase
from holdfast.exit_codes import Exit
from holdfast.runtime.worker.user_exception import NUMBER
from holdfast.text import noun_of, plural, ranges, span

WATCH_PERIOD_S = 0.5
ALIKE_LEAST = 3
LOSS_SHOWN_LEAST = 0.01
LOSS_LEAST_S = 0.05
OVER = ("ended", "lost")
STATE_STYLE = {
    "starting": "yellow", "running": "green", "recovering": "yellow", "exiting": "yellow", "lost": "red",
}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option(
    "--watch", is_flag=True, help="Go on until the run is over, or q; arrows and page keys move it."
)
@click.option(
    "--all", "all_ranks", is_flag=True, help=f"A line for each rank, of more than {RANKS_SHOWN}, too."
)
def status(run: str | None, run_dir: str, as_json: bool, watch: bool, all_ranks: bool) -> int:
    """What RUN (an id, a path, or the newest) does: ranks, phases, steps, faults."""
    directory, settings = find_run(run, run_dir)
    looker = Watch(directory, settings)
    if as_json:
        for view in _views(looker, watch):
            echo_json(msgspec.json.encode(view))
        return 0
    console = table_console()
    if watch and console.is_terminal:
        _watch(looker, console, all_ranks=all_ranks)
        return 0
    for view in _views(looker, watch):
        console.print(render(view, all_ranks=all_ranks))
    return 0


def _views(looker: Watch, watch: bool) -> Iterator[RunView]:
    while True:
        view = looker.poll()
        yield view
        if not watch or view.state in OVER:
            return
        time.sleep(WATCH_PERIOD_S)


def _watch(looker: Watch, console: Console, *, all_ranks: bool) -> None:
    """On a terminal, which shows a part of what is longer; all of it is left there at the end."""
    with Scroller(console) as scroller, Live(console=console, auto_refresh=False) as live:
        view = looker.poll()
        while view.state not in OVER and not scroller.quit:
            live.update(scroller.window(render(view, all_ranks=all_ranks)), refresh=True)
            if not scroller.wait(time.monotonic() + WATCH_PERIOD_S):
                view = looker.poll()
        live.update(render(view, all_ranks=all_ranks), refresh=True)


def render(view: RunView, *, all_ranks: bool = False) -> RenderableType:
    """The whole screen. ``all_ranks``: one line for each of them, however many there are."""
    parts: list[RenderableType] = [Hanging(headline(view))]
    if view.code and view.reason:
        parts.append(Hanging(Text(f"why  {first_line(view.reason)}")))
    parts.append(Hanging(Text(f"logs {near(view.logs)}", style="dim")))
    parts += [Hanging(Text(line)) for line in host_lines(view)]
    if view.losses:
        parts.append(Hanging(Text(f"lost {_loss_line(view)}", style="dim")))
    if view.ranks:
        parts += [Text(), *rank_parts(view, all_ranks=all_ranks)]
    parts += [Hanging(_spare_line(spare)) for spare in view.spares]
    if view.faults:
        parts += [Text(), *(Hanging(line) for fault in view.faults for line in _fault_lines(fault))]
    parts += [Text(), Hanging(Text(f"next: {_next(view)}", style="dim"))]
    return Group(*parts)


def near(path: str) -> str:
    """``path`` as it is named from here, where that is below this directory."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def headline(view: RunView) -> Text:
    """One line: what, how far, how fast."""
    style = STATE_STYLE.get(view.state, "green" if view.code == 0 else "yellow" if view.code == 75 else "red")
    text = Text.assemble((view.run_id, "bold"), "  ", (_state(view), style))
    for fact in facts(view):
        text.append(f"  {fact}")
    return text


def _state(view: RunView) -> str:
    return view.state if view.code is None else f"ended with {view.code}: {view.meaning}"


def facts(view: RunView) -> list[str]:
    """Short facts for a headline or a status line, the most important first."""
    found = []
    if view.session or view.step:
        found.append(f"step {view.step:,}")
    if view.steps_per_s is not None:
        found.append(f"{view.steps_per_s:.1f} steps/s")
    living = sum(r.alive for r in view.ranks)
    found.append(f"{living}/{view.workers} workers" if view.code is None else plural(view.workers, "worker"))
    if view.faults:
        found.append(plural(len(view.faults), "fault"))
    if view.session and (view.code not in (None, Exit.OK, Exit.REQUEUE) or view.state == "lost"):
        found.append(kept(view))  # recoveries may have lost nothing, and the end much
    elif view.session and view.faults:
        found.append(f"{plural(view.steps_lost, 'step')} lost")
    if view.still_s:
        found.append(f"stands still for {span(view.still_s)}")
    if view.goodput is not None:
        found.append(f"goodput {100 * view.goodput:.1f} %{largest_loss(view)}")
    found.append(span(view.elapsed_s))
    return found


def largest_loss(view: RunView) -> str:
    """Where most of the time went that was no training, where that is more than a hundredth."""
    cause, lost_s = max(view.losses.items(), key=lambda loss: loss[1], default=("", 0.0))
    return f" ({cause} {span(lost_s)})" if lost_s > LOSS_SHOWN_LEAST * view.elapsed_s else ""


def _loss_line(view: RunView) -> str:
    """Each cause, the largest first."""
    causes = sorted(view.losses.items(), key=lambda loss: -loss[1])
    return ", ".join(f"{cause} {span(lost_s)}" for cause, lost_s in causes if lost_s >= LOSS_LEAST_S)


def host_lines(view: RunView) -> list[str]:
    """The whole job of several hosts, as far as it is known here."""
    if not view.hosts:
        return []
    said = []
    for host in view.hosts:
        doing = f"{noun_of(len(host.ranks), 'rank')} {ranges(host.ranks)}" if host.ranks else "no rank"
        said.append(f"{host.name}{' (here)' if host.name == view.here else ''}: {host.gone or doing}")
    lines = [f"job  {'; '.join(said)}"]
    if view.cut_off or view.left:
        lines.append(
            f"     known here until {clock(view.heard_at)}; "
            "ask holdfast status on another host what has become of the job"
        )
    return lines


def kept(view: RunView) -> str:
    """What is left of a run that did not end well."""
    behind = 0 if view.cut_off else view.step - max(view.kept_step, 0)
    newest = f"newest checkpoint: step {view.kept_step:,}" if view.kept_step >= 0 else "no checkpoint"
    not_kept = "is not kept" if behind == 1 else "are not kept"
    return newest + (f"; {plural(behind, 'step')} {not_kept}" if behind > 0 else "")


def _spare_line(spare: SpareView) -> Text:
    doing = f"waits {spare.where}" if spare.where else "is being built"
    return Text(f"spare  pid {spare.pid}  {doing}, {span(spare.age_s)}", style="dim")


def fault_text(fault: FaultView) -> str:
    """What happened, as ``rank 2: killed by SIGKILL, in backward of step 20``."""
    return f"rank {fault.rank}: {fault_what(fault)}"


def fault_what(fault: FaultView) -> str:
    """The same without the rank."""
    what = first_line(named(fault.what)) or fault.kind
    # A collective that was given up is named with the place it was called from.
    said = fault.phase in ("", NO_PAGE) or f"in {fault.phase} of step {fault.step}" in what
    return what if said else f"{what}, {fault_place(fault)}"


def named(what: str) -> str:
    """With the name of the signal that is told by its number."""

    def name(told: re.Match[str]) -> str:
        try:
            return f"{told[0]} ({signal.Signals(int(told[1])).name})"
        except ValueError:  # not all have one
            return told[0]

    return re.sub(r"\bby signal (\d+)(?=$|,)", name, what)


def alike(faults: Sequence[FaultView]) -> str:
    """What all faults of a run have in common: numbers make them no others. Empty where they differ, or are too few."""
    own = [fault for fault in faults if fault.what != LEFT_FOR_RESTART]
    if len(own) < ALIKE_LEAST or len({NUMBER.sub("", fault_what(fault)) for fault in own}) > 1:
        return ""
    ranks = sorted({fault.rank for fault in own})
    who = f"{noun_of(len(ranks), 'rank')} {ranges(ranks)}"
    return f"{plural(len(own), 'fault')}, all alike: {who}: {fault_what(own[-1])}"


def fault_place(fault: FaultView) -> str:
    """Where it was: of a script that has opened no session, or not yet, nothing is known."""
    if fault.phase == Phase.STARTING.name.lower():
        return "before any session"
    if fault.phase == NO_PAGE:
        return "not known: what it showed went with it"
    if fault.phase == Phase.AFTER.name.lower():
        return f"after the training, at step {fault.step:,}"
    if fault.phase == Phase.LEFT.name.lower():
        return f"after its script had ended, at step {fault.step:,}"
    return f"in {fault.phase} of step {fault.step:,}" if fault.phase else f"at step {fault.step:,}"


def first_line(text: str) -> str:
    """Messages of exceptions have as many lines as they like; the log has all of them."""
    return next(iter(text.splitlines()), "")


def again(view: RunView) -> str:
    """The next command after an end before the last step: where it goes on, and what is lost."""
    if view.left:
        return "start the same command to give the job this node again"
    if not view.session:
        return "start the same command: it begins where the script itself resumes"
    if view.cut_off:
        here = f"step {view.kept_step:,} is saved here" if view.kept_step >= 0 else "nothing is saved here"
        return f"start the same command: it goes on at the newest step that any host has saved ({here})"
    if view.kept_step < 0:
        lost = f" ({plural(view.step, 'step')} lost)" if view.step else ""
        return f"start the same command: it begins again at step 0, there is no checkpoint{lost}"
    own = Path(view.directory) / "checkpoints"
    # The script named no directory, so a new run would look into its own, which is empty.
    start, good = (
        (f"HOLDFAST_CHECKPOINT={shlex.quote(str(own))} and", "; for good: session(checkpoint=...)")
        if own.is_dir() and Path(view.root or own).resolve() == own.resolve()
        else ("start", "")
    )
    behind = view.step - view.kept_step
    redone = f", {plural(behind, 'step')} to do again" if behind > 0 else ""
    return f"{start} the same command: it goes on at step {view.kept_step:,}{redone}{good}"


def _fault_lines(fault: FaultView) -> list[Text]:
    lines = [Text(f"{fault.name}  {clock(fault.at)}  {fault_text(fault)}")]
    if fault.action:
        lines.append(Text(f"      {fault.action.replace('_', ' ')}: {fault.reason}", style="dim"))
    if fault.phases:
        times = [f"{phase} {fault.phases[phase]:.2f} s" for phase in SEEN if phase in fault.phases]
        lines.append(Text("      " + ", ".join(times), style="dim" if fault.recovered_s else "yellow"))
    return lines


def _next(view: RunView) -> str:
    name = name_of(Path(view.directory))
    if view.state == "ended":
        if view.code in (Exit.REQUEUE, Exit.UNSAVED, Exit.INTERRUPTED):
            return again(view)
        return f"holdfast logs {name}" + ("  (codes: docs/exit-codes.md)" if view.code else "")
    if view.state == "lost":
        return f"no process of this run is left; {again(view)}"
    return f"holdfast logs -f {name}   |   holdfast exit {name}"
