"""The variables of a script that begin again in a new process, and on which no update depends.

A sum of losses, a list of results, the best accuracy: no weight depends on them, so no script is refused for them, and
there is no warning before a fault. A process that joins or continues a job begins with their initial values, and what
it reports from them covers only its own steps. So that process names them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator

from holdfast.runtime.worker.script_frames import as_written, owners_of, values_of
from holdfast.session.variables.called_functions import LOCAL
from holdfast.session.variables.data_flow import assigned, assigned_value, taken_over, targets, written
from holdfast.session.variables.deciding_variables import (
    VARIABLES_MAX,
    PlacedVariable,
    Places,
    loops_to_steps,
)
from holdfast.session.variables.update_sources import dotted


def reported_variables(places: Places) -> tuple[PlacedVariable, ...]:
    """Return the variables that the loops at ``places`` take over from one iteration to the next, for any use.

    Variables that are set from a clock only are left out. A variable without a value counts if it is an attribute of
    which a loop changes a part: the loop makes it when it needs it first, which no step of this process has done.

    Args:
        places: file and line of the stack frames, the innermost frame first.
    """
    found: dict[PlacedVariable, None] = {}
    for depth, place in reversed(list(enumerate(places))):
        # The inner loop over the steps carries the sums of an epoch, which the outermost loop begins again.
        loops = loops_to_steps(places[: depth + 1])
        names = sorted(
            {name for loop in loops for name in taken_over(loop) - _times(loop) if LOCAL not in name}
        )
        present = values_of([*names, *(name.rpartition(".")[0] for name in names)], place)
        parts = {name for loop in loops for name in _changed_in_part(loop)}
        named = (n for n in names if n in present or (n in parts and n.rpartition(".")[0] in present))
        found.update((PlacedVariable(name, place, partly=False), None) for name in named)
    return tuple(found)


def _changed_in_part(loop: ast.AST) -> Iterator[str]:
    """Yield the containers of which ``loop`` writes items, and the variables that it adds to."""
    for node, _ in assigned(loop):
        for target in targets(node):
            item = target
            while isinstance(item, ast.Subscript):
                item = item.value
            if item is not target or isinstance(node, ast.AugAssign):
                yield dotted(item)


def listed(names: Iterable[str]) -> tuple[str, int]:
    """Return a text with the variables of ``names``, and their number. An object stands for several attributes.

    >>> listed(["losses.sum", "losses.count", "self.count", "model.best"])
    ('losses, self.count, model.best', 3)
    """
    owners = {name: next(each for each in (*owners_of(name), name) if each != "self") for name in names}
    count = Counter(owners.values())
    chosen = (name if count[owner] == 1 and "[" not in name else owner for name, owner in owners.items())
    shown = dict.fromkeys(map(as_written, chosen))
    more = len(shown) - VARIABLES_MAX
    text = ", ".join(list(shown)[:VARIABLES_MAX])
    return (f"{text} and {more} more" if more > 0 else text), len(shown)


def _times(loop: ast.AST) -> set[str]:
    """Return the variables that ``loop`` sets only from a clock (``now = time.time()``), or from such a variable."""
    found = [(node, value) for node, _ in assigned(loop) if (value := assigned_value(node)) is not None]
    times, before = {name for node, _ in found for name in written(targets(node))}, set[str]()
    while times != before:
        before = set(times)
        for node, value in found:
            if not (_reads_clock(value) or (isinstance(value, ast.Name) and value.id in times)):
                times -= written(targets(node))
    return times


def _reads_clock(value: ast.expr) -> bool:
    called = (dotted(node.func) for node in ast.walk(value) if isinstance(node, ast.Call))
    return any(name.startswith(("time.", "datetime.")) or name in ("time", "perf_counter") for name in called)
