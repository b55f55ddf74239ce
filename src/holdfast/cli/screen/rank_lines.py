"""The lines about the ranks in ``holdfast status``. Of many ranks, only those that differ from the others are shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.screen.console import Hanging
from holdfast.cli.screen.run_view import INSIDE, RankView, RunView
from holdfast.core.job.fault import START_S
from holdfast.core.protocol.status_page import Phase
from holdfast.text import span

RANKS_SHOWN = 32


def rank_parts(view: RunView, *, all_ranks: bool = False) -> list[RenderableType]:
    """Return the lines about the ranks of a run.

    With more than ``RANKS_SHOWN`` ranks the lines are a summary and the unusual ranks, unless ``all_ranks``.
    """
    if all_ranks or len(view.ranks) <= RANKS_SHOWN:
        return [_table(view, view.ranks)]
    parts: list[RenderableType] = [Hanging(Text(f"ranks {summary(view)}"))]
    odd = odd_ones(view)
    if odd:
        parts.append(_table(view, odd[:RANKS_SHOWN]))
    if len(odd) > RANKS_SHOWN:
        parts.append(Text(f"and {len(odd) - RANKS_SHOWN:,} more like these", style="dim"))
    parts.append(Text("each rank: holdfast status --all, or --json", style="dim"))
    return parts


def summary(view: RunView) -> str:
    """Return the number of ranks in each activity, most common first: ``1,022 training, 1 loading, 1 stopped``."""
    counts = Counter(_doing(view, one) for one in view.ranks)
    return ", ".join(f"{count:,} {doing}" for doing, count in counts.most_common())


def odd_ones(view: RunView) -> list[RankView]:
    """Return the ranks with an unusual activity, the stragglers, and the ranks that are more than one step behind."""
    ((usual, _),) = Counter(_doing(view, one) for one in view.ranks).most_common(1)
    newest = max(one.step for one in view.ranks)
    return [one for one in view.ranks if _doing(view, one) != usual or one.slow or one.step < newest - 1]


def _doing(view: RunView, one: RankView) -> str:
    if not one.alive:
        return "dead" if one.pid else "not started"
    if one.stopped:
        return "stopped"
    if is_unseen(view, one):
        return "running (no session)"
    return "training" if one.phase in INSIDE else one.phase


def _table(view: RunView, ranks: Sequence[RankView]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("rank", "pid", "step", "age"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("phase")
    busy, again = any(r.busy_s for r in ranks), any(r.repeated for r in ranks)
    if busy:
        table.add_column("busy", justify="right")
    if again:
        table.add_column("repeated", justify="right", no_wrap=True)
    for each in ranks:
        step = "" if is_unseen(view, each) else f"{each.step:,}"
        cells = [str(each.rank), str(each.pid), step, span(each.age_s)]
        row: list[RenderableType] = [*cells, _place(view, each)]
        if busy:
            row.append(_busy(each))
        if again:
            row.append(str(each.repeated))
        table.add_row(*row)
    return table


def _place(view: RunView, one: RankView) -> Text:
    if not one.alive:
        return Text(f"dead (in {one.phase})", style="red") if one.pid else Text("not started", style="dim")
    place = "running (no session)" if is_unseen(view, one) else f"{one.phase} {one.section}".strip()
    return Text(f"{place}, stopped by a signal", style="red") if one.stopped else Text(place)


def is_unseen(view: RunView, one: RankView) -> bool:
    """Return True if the script of a rank probably runs without a session.

    The rank has reported no session, and it has begun a collective or has run for longer than a start takes.
    """
    starting = one.phase == Phase.STARTING.name.lower() and not view.session
    return starting and (one.trains or one.age_s > START_S)


def _busy(one: RankView) -> Text:
    """Return how long the rank worked in its last step, without its waits for peers. Mark a straggler."""
    text = f"{1e3 * one.busy_s:.0f} ms"
    slow = f"{text}, median {1e3 * one.usual_s:.0f} ms: {one.slow:.1f} x slower"
    return Text(slow, style="yellow") if one.slow else Text(text)
