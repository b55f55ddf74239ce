"""The command ``holdfast report``, which prints one screen about each fault of a run."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from holdfast import event_log
from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.screen.fault_report import FaultReport, reports_of, text
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.run_summary import first_line
from holdfast.cli.screen.run_view import RunView, Watch
from holdfast.errors import UsageError


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--fault", metavar="F003", help="Only this fault (F003, or 3).")
@click.option("--json", "as_json", is_flag=True, help="A list of JSON objects.")
def report(run: str | None, run_dir: str, fault: str | None, as_json: bool) -> int:
    """Show each fault of RUN (an id, a path, or the newest) on one screen: rank, place, cause, cost, next step.

    The reports are made from the event log alone, so a run that has ended or broken down also has them.
    """
    directory, settings = find_run(run, run_dir)
    watch = Watch(directory, settings)
    events = event_log.read(directory.journal).events
    found = reports_of(directory, settings, events)
    chosen = found if fault is None else [_named(found, fault, directory.path)]
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(chosen), indent=2))
    elif not chosen:
        echo(f"run {settings.run_id} had no fault")
    else:
        echo("\n".join(text(each) for each in chosen), nl=False)
    if not as_json and (ended := _ended(watch.poll())):
        echo(ended)
    return 0


def _ended(view: RunView) -> str:
    """Return a line about how and why the run ended, with or without a fault; empty if it ended without error."""
    return (
        f"ended with {view.code}: {view.meaning}: {first_line(view.reason)}"
        if view.code and view.reason
        else ""
    )


def _named(found: list[FaultReport], fault: str, run: Path) -> FaultReport:
    number = fault.upper().removeprefix("F").lstrip("0") or "0"
    for each in found:
        if each.name.removeprefix("F").lstrip("0") == number:
            return each
    known = f"{found[0].name} to {found[-1].name}" if found[1:] else "one" if found else "none"
    raise UsageError(
        f"run {run.name} has no fault {fault}: it had {known}", hint=f"holdfast report {name_of(run)}"
    )
