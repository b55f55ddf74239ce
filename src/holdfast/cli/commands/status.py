"""The command ``holdfast status``, which shows one screen about a live or ended run."""

from __future__ import annotations

import time
from collections.abc import Iterator
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
from holdfast.cli.screen.run_summary import again, facts, fault_text, first_line, near
from holdfast.cli.screen.run_view import RunView, SpareView, Watch
from holdfast.cli.screen.scrolling import Scroller
from holdfast.core.job.fault import SEEN
from holdfast.exit_codes import Exit
from holdfast.history.host_history import HostView
from holdfast.history.run_history import FaultView
from holdfast.text import noun_of, ranges, span

WATCH_PERIOD_S = 0.5
LOSS_LEAST_S = 0.05
OVER = ("ended", "lost")
STATE_STYLE = {
    "starting": "yellow", "running": "green", "recovering": "yellow", "exiting": "yellow", "lost": "red",
}  # fmt: skip


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option(
    "--watch", is_flag=True, help="Repeat until the run is over, or q; arrows and page keys scroll."
)
@click.option(
    "--all", "all_ranks", is_flag=True, help=f"A line for each rank, also of more than {RANKS_SHOWN}."
)
def status(run: str | None, run_dir: str, as_json: bool, watch: bool, all_ranks: bool) -> int:
    """Show what RUN (an id, a path, or the newest) does: ranks, phases, steps, faults."""
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
    """Show a run on a terminal until it is over, in a window with keys to scroll. At the end, print the whole text."""
    with Scroller(console) as scroller, Live(console=console, auto_refresh=False) as live:
        view = looker.poll()
        while view.state not in OVER and not scroller.quit:
            live.update(scroller.window(render(view, all_ranks=all_ranks)), refresh=True)
            if not scroller.wait(time.monotonic() + WATCH_PERIOD_S):
                view = looker.poll()
        live.update(render(view, all_ranks=all_ranks), refresh=True)


def render(view: RunView, *, all_ranks: bool = False) -> RenderableType:
    """Return the whole screen about a run. With ``all_ranks`` it has one line per rank, however many there are."""
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


def headline(view: RunView) -> Text:
    """Return one line about a run: its name, state, step, speed and further facts."""
    style = STATE_STYLE.get(view.state, "green" if view.code == 0 else "yellow" if view.code == 75 else "red")
    text = Text.assemble((view.run_id, "bold"), "  ", (_state(view), style))
    for fact in facts(view):
        text.append(f"  {fact}")
    return text


def _state(view: RunView) -> str:
    return view.state if view.code is None else f"ended with {view.code}: {view.meaning}"


def _loss_line(view: RunView) -> str:
    """Return the causes of lost time with their durations, the largest first."""
    causes = sorted(view.losses.items(), key=lambda loss: -loss[1])
    return ", ".join(f"{cause} {span(lost_s)}" for cause, lost_s in causes if lost_s >= LOSS_LEAST_S)


def host_lines(view: RunView) -> list[str]:
    """Return lines about the hosts of a job, as known on this host; empty for a job of one host."""
    if not view.hosts:
        return []
    said = []
    for host in view.hosts:
        doing = f"{noun_of(len(host.ranks), 'rank')} {ranges(host.ranks)}" if host.ranks else "no rank"
        said.append(f"{host.name}{' (here)' if host.name == view.here else ''}: {host.gone or doing}")
    lines = [f"job  {'; '.join(said)}"]
    lines += [f"     {leaving_text(host)}" for host in view.hosts if host.leaves and not host.gone]
    lines += [
        f"     {host.name} is left out after {host.left_out}; holdfast drain --cancel {host.name} takes it back"
        for host in view.hosts
        if host.left_out and not host.gone
    ]
    if view.cut_off or view.left:
        lines.append(
            f"     known here until {clock(view.heard_at)}; "
            "ask holdfast status on another host what has become of the job"
        )
    return lines


def leaving_text(host: HostView) -> str:
    """Return a text about a host that will leave: its name, the time, and the sources that have announced it."""
    when = "" if host.leaves_at is None else f" by {clock(host.leaves_at)}"
    return f"{host.name} leaves{when} ({', '.join(host.leaves)})"


def _spare_line(spare: SpareView) -> Text:
    doing = f"waits {spare.where}" if spare.where else "is being built"
    return Text(f"spare  pid {spare.pid}  {doing}, {span(spare.age_s)}", style="dim")


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
