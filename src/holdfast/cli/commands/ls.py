"""The command ``holdfast ls``, which lists the runs of a directory, newest first."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import msgspec

from holdfast.cli.screen.console import print_table
from holdfast.cli.screen.error_output import say
from holdfast.cli.screen.escaping import echo, echo_json
from holdfast.cli.screen.run_lookup import run_dir_option, runs_below
from holdfast.cli.screen.run_view import RunView, Watch
from holdfast.errors import UsageError
from holdfast.runtime.node.run_settings import RunSettings
from holdfast.runtime.node.rundir import RunDir
from holdfast.text import span

_EARLIER = re.compile(r"(?P<run>.+)\.(?P<number>[1-9]\d*)")


class Listed(msgspec.Struct):
    """One run in the list.

    Attributes:
        name: the RUN argument for other commands.
        start: number of this start among all starts with the same run id, from 1.
        newest: ``name`` of the newest start with the same run id.
        from_step: step of the checkpoint from which the run started; -1 if it started without one.
        age_s: seconds since its start.
        ended_s: seconds since its end; None if its event log has no end.
    """

    name: str
    run_id: str
    directory: str
    state: str
    code: int | None
    meaning: str
    step: int
    from_step: int
    start: int
    newest: str
    workers: int
    faults: int
    steps_lost: int
    created_at: float
    age_s: float
    ended_s: float | None


@click.command(name="ls", context_settings={"help_option_names": ["-h", "--help"]})
@run_dir_option
@click.option("--json", "as_json", is_flag=True, help="All runs as one JSON list.")
def list_runs(run_dir: str, as_json: bool) -> int:
    """List the runs of a directory, newest first.

    A line has state, step, age and faults of a run, and the run and step that it continues.
    """
    base = Path(run_dir)
    found = [listed for listed, _ in looked_at(base)]
    if as_json:
        echo_json(msgspec.json.encode(found))
        return 0
    if not found:
        echo(f"there is no run below {base.absolute()}")
        return 0
    rows = [
        (one.name, state_of(one), f"{one.step:,}" if one.step else "", span(one.age_s), str(one.faults or ""),
         _lineage(one))
        for one in found
    ]  # fmt: skip
    print_table(("run", "state", "step", "age", "faults", "continues"), rows)
    return 0


def looked_at(base: Path) -> Iterator[tuple[Listed, RunView]]:
    """Yield each run below ``base`` with its state, newest first. A run that cannot be read is only noted on stderr."""
    paths = runs_below(base)
    names = [path.name for path in paths]
    for path in paths:
        try:
            view = Watch(RunDir(path), RunSettings.load(path)).poll()
        except (UsageError, OSError) as error:
            said = error.message if isinstance(error, UsageError) else str(error)
            say(f"note: {path.name} is left out: {said}")
            continue
        yield _listed(path.name, names, view), view


def _listed(name: str, names: Iterable[str], view: RunView) -> Listed:
    earlier = _EARLIER.fullmatch(name)
    newest = earlier["run"] if earlier else name
    numbers = [
        int(each["number"]) for other in names if (each := _EARLIER.fullmatch(other)) and each["run"] == name
    ]
    now = time.time()
    return Listed(
        name=name,
        run_id=view.run_id,
        directory=view.directory,
        state=view.state,
        code=view.code,
        meaning=view.meaning,
        step=view.step,
        from_step=view.found_step,
        start=int(earlier["number"]) if earlier else max(numbers, default=0) + 1,
        newest=newest,
        workers=view.workers,
        faults=len(view.faults),
        steps_lost=view.steps_lost,
        created_at=view.created_at,
        age_s=round(max(0.0, now - view.created_at), 3),
        ended_s=round(max(0.0, now - view.created_at - view.elapsed_s), 3) if view.code is not None else None,
    )


def state_of(one: Listed) -> str:
    """Return the state of a run, with the exit code after its end: ``running``, ``ended (0)``."""
    return one.state if one.code is None else f"{one.state} ({one.code})"


def _lineage(one: Listed) -> str:
    """Return a text with the number of this start of a run, and the step of the checkpoint from which it started."""
    of = f"start {one.start} of {one.newest}" if one.start > 1 or one.newest != one.name else ""
    step = f"step {one.from_step:,}" if one.from_step > 0 else ""
    return ", ".join(filter(None, (of, step)))
