"""The command ``holdfast drain``, which moves the ranks of a node to other nodes while the job trains."""

from __future__ import annotations

from datetime import datetime

import click

from holdfast.cli.screen.error_output import logs_at
from holdfast.cli.screen.escaping import echo
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.run_view import RunView, Watch
from holdfast.cli.start.deadline import seconds_until
from holdfast.core.ids import NodeId
from holdfast.core.protocol.notices import NO_DEADLINE, DrainNode
from holdfast.errors import UsageError, UserError
from holdfast.runtime.node.agent_client import AgentLink
from holdfast.text import span


@click.command(name="drain", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("node")
@run_argument
@click.option(
    "--by", metavar="TIME", help="When the node is gone: 10m, 14:30, 2026-11-24T14:30 (default: no time)."
)
@click.option("--cancel", is_flag=True, help="The node stays.")
def drain(node: str, run: str | None, run_dir: str, by: str | None, cancel: bool) -> int:
    """Move the ranks of NODE (node1, or 1) of RUN (an id, a path, or the newest) to a spare, and let the node leave."""
    directory, settings = find_run(run, run_dir)
    name = name_of(directory.path)
    left_s = NO_DEADLINE if by is None else seconds_until(by, datetime.now().astimezone())
    if cancel and by is not None:
        raise UsageError("--cancel with --by: the node stays", hint="leave out one of the two")
    with logs_at(directory.path):
        view = Watch(directory, settings).poll()
        if view.state in ("ended", "lost"):
            raise UserError(f"run {settings.run_id} is over", hint=f"holdfast status {name}")
        node_id = _known(node, view)
        order = DrainNode(node_id=node_id, left_s=left_s, withdrawn=cancel)
        answer = AgentLink(directory.path).request(order)
        if not answer.ok:
            raise UserError(f"run {settings.run_id} refused: {answer.detail}", hint=f"holdfast status {name}")
    echo(f"{settings.run_id}: {node_id}: {answer.detail}")
    if not cancel:
        when = "as soon as another node has room" if by is None else f"within {span(left_s)}"
        echo(f"its ranks move {when}; then its command ends with code 75")
        echo(f"take it back: holdfast drain --cancel {node_id} {name}")
    return 0


def _known(node: str, view: RunView) -> NodeId:
    """Return the name of the node that ``node``, a name or a number, means.

    Raises:
        UsageError: the run has no such node, or only this node.
    """
    here = [host.name for host in view.hosts if not host.gone]
    if len(here) < 2:
        raise UsageError(
            f"run {view.run_id} has one host: its ranks have nowhere to go",
            hint="holdfast exit saves and leaves",
        )
    found = f"node{node}" if node.isdecimal() else node
    if found not in here:
        raise UsageError(f"run {view.run_id} has no node {node}", hint=f"one of: {', '.join(here)}")
    return NodeId(found)
