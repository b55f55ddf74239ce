"""``holdfast exit``: ask a run to save at the next step and leave; acknowledged, and can be taken back."""

from __future__ import annotations

import click

from holdfast.cli.errors import logs_at
from holdfast.cli.escaping import echo
from holdfast.cli.find import find_run, name_of, run_argument
from holdfast.cli.finite import Finite
from holdfast.cli.view import Watch
from holdfast.core.messages import ExitRun
from holdfast.errors import UserError
from holdfast.runtime.launch import AgentLink


@click.command(name="exit", context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--cancel", is_flag=True, help="Take an earlier request back.")
@click.option(
    "--grace-s",
    "--grace_s",
    type=Finite(min=0),
    help="Seconds until the workers are killed (default: the run's).",
)
def exit_run(run: str | None, run_dir: str, cancel: bool, grace_s: float | None) -> int:
    """Ask RUN (an id, a path, or the newest) to save at the end of a step and leave with code 75."""
    directory, settings = find_run(run, run_dir)
    name = name_of(directory.path)
    bound_s = settings.grace_s if grace_s is None else grace_s
    with logs_at(directory.path):
        view = Watch(directory, settings).poll()
        if view.state in ("ended", "lost"):
            raise UserError(f"run {settings.run_id} is over", hint=f"holdfast status {name}")
        order = ExitRun(grace_s=bound_s, source="holdfast exit", cancel=cancel)
        answer = AgentLink(directory.path).request(order)
        if not answer.ok:
            raise UserError(f"run {settings.run_id} refused: {answer.detail}", hint=f"holdfast status {name}")
    echo(f"{settings.run_id}: {answer.detail}")
    if not cancel:
        echo("it saves at the end of a step and leaves with code 75")
        echo(f"take it back: holdfast exit --cancel {name}")
    return 0
