"""The command ``holdfast exit``, which asks a run to save at the next step and leave. The request can be cancelled."""

from __future__ import annotations

import time
from collections.abc import Callable

import click

from holdfast.cli.screen.error_output import logs_at
from holdfast.cli.screen.escaping import echo
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.run_summary import again
from holdfast.cli.screen.run_view import Watch
from holdfast.cli.start.finite_number import FiniteNumber
from holdfast.core.protocol.messages import ExitRun
from holdfast.errors import UserError
from holdfast.runtime.node.agent_client import AgentLink

ASKED_S, ANSWER_S = 2.0, 5.0
"""Time limits in seconds until a request, and the answer to it, appear in the event log."""
POLL_S = 0.05


@click.command(name="exit", context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--cancel", is_flag=True, help="Take an earlier request back.")
@click.option(
    "--grace-s",
    "--grace_s",
    type=FiniteNumber(min=0),
    help="Seconds until the workers are killed (default: the run's).",
)
def exit_run(run: str | None, run_dir: str, cancel: bool, grace_s: float | None) -> int:
    """Ask RUN (an id, a path, or the newest) to save at the end of a step and leave with code 75."""
    directory, settings = find_run(run, run_dir)
    name = name_of(directory.path)
    bound_s = settings.grace_s if grace_s is None else grace_s
    with logs_at(directory.path):
        watch = Watch(directory, settings)
        view = watch.poll()
        if view.state in ("ended", "lost"):
            raise UserError(f"run {settings.run_id} is over", hint=f"holdfast status {name}")
        if cancel and not _within(ASKED_S, lambda: bool(watch.read().exiting)):
            raise UserError(f"run {settings.run_id} was not asked to leave", hint=f"holdfast status {name}")
        answers = len(watch.story.cancels)
        order = ExitRun(grace_s=bound_s, source="holdfast exit", cancel=cancel)
        answer = AgentLink(directory.path).request(order)
        if not answer.ok:
            raise UserError(f"run {settings.run_id} refused: {answer.detail}", hint=f"holdfast status {name}")
    if cancel and _within(ANSWER_S, lambda: len(watch.read().cancels) > answers):
        if not watch.story.cancels[-1]:
            raise UserError(
                f"run {settings.run_id} leaves: its ranks have agreed on step {watch.story.agreed_step}",
                hint=f"{again(view)}, when it has left",
            )
        echo(f"{settings.run_id}: it stays")
        return 0
    echo(f"{settings.run_id}: {answer.detail}")
    if not cancel and view.session:
        echo("it saves at the end of a step and leaves with code 75")
        echo(f"take it back: holdfast exit --cancel {name}")
    elif not cancel:
        echo("no session is open: its workers are ended, nothing is saved, and it leaves with code 76")
    return 0


def _within(bound_s: float, holds: Callable[[], bool]) -> bool:
    until_s = time.monotonic() + bound_s
    while not (found := holds()) and time.monotonic() < until_s:
        time.sleep(POLL_S)
    return found
