"""The command ``holdfast stacks``, which shows the present Python stacks of every rank of a run."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, closing

import click
import msgspec

from holdfast.cli.screen.completers import ranks
from holdfast.cli.screen.escaping import echo, echo_json, shown
from holdfast.cli.screen.run_lookup import find_run, name_of, run_argument
from holdfast.cli.screen.stack_folding import folded
from holdfast.core.protocol.status_page import Word
from holdfast.errors import ProtocolError, UsageError
from holdfast.runtime.node.hang_evidence import find
from holdfast.runtime.node.process_info import alive
from holdfast.runtime.node.run_processes import recorded_members
from holdfast.runtime.node.rundir import RunDir
from holdfast.runtime.node.stack_texts import where
from holdfast.runtime.node.status_page import Page


class RankStacks(msgspec.Struct, frozen=True):
    """The position and the stacks of one rank.

    ``process``: letter of the process state, ``cpu``: used share of a core, ``wchan``: kernel function in which the
    process waits, ``where``: innermost frames, ``stacks``: Python stacks of all threads, empty if the process gave no
    answer.
    """

    rank: int
    pid: int
    phase: str
    step: int
    process: str
    cpu: float
    wchan: str
    where: str
    stacks: str


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@run_argument
@click.option("--rank", type=int, shell_complete=ranks, help="Only this rank.")
@click.option("--all", "everything", is_flag=True, help="With the threads and frames of Holdfast.")
@click.option("--json", "as_json", is_flag=True, help="A list of JSON objects.")
def stacks(run: str | None, run_dir: str, rank: int | None, everything: bool, as_json: bool) -> int:
    """Show the present Python stacks of every rank of RUN (an id, a path, or the newest) on this machine.

    A rank answers even while C code holds the GIL, but a stopped process cannot answer. The ranks are not
    interrupted.
    """
    directory, settings = find_run(run, run_dir)
    found = [each for each in look(directory) if rank is None or each.rank == rank]
    if not found:
        what = "no living worker here" if rank is None else f"no living worker here with rank {rank}"
        raise UsageError(
            f"run {settings.run_id} has {what}", hint=f"holdfast status {name_of(directory.path)}"
        )
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(found), indent=2))
        return 0
    for each in found:
        kernel = f", kernel {each.wchan}" if each.wchan not in ("", "0") else ""
        line = (f"rank {each.rank}, pid {each.pid}: {each.phase} of step {each.step}, "
                    f"process {each.process or '?'}, cpu {each.cpu:.0%}{kernel}")  # fmt: skip
        echo(lead=click.style(shown(line), bold=True))
        if not each.stacks:
            echo("  it does not answer\n")
        else:
            echo(each.stacks if everything else folded(each.stacks))
    return 0


def look(directory: RunDir) -> list[RankStacks]:
    """Return the position and the stacks of each living worker of a run on this machine, ordered by rank."""
    if not directory.pages_link.is_dir():
        return []
    with ExitStack() as stack:
        workers = []
        for member_id, pid in recorded_members(directory):
            if pid and alive(pid):
                try:
                    page = stack.enter_context(closing(Page.open(directory.page_path(member_id))))
                except (OSError, ProtocolError):
                    continue  # the process has ended in the meantime
                workers.append((member_id, pid, page))
        found = asyncio.run(find(directory, workers))
        ranks = []
        for member_id, pid, page in workers:
            step, phase = page.state()
            seen = found[member_id]
            ranks.append(
                RankStacks(
                    page[Word.RANK], pid, phase.name.lower(), step, seen.process, round(seen.cpu, 3),
                    seen.wchan, where(seen.stacks), seen.stacks,
                )
            )  # fmt: skip
    return sorted(ranks, key=lambda each: each.rank)
