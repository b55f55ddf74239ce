"""Texts about a run and its faults that several commands show."""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.screen.run_view import RunView
from holdfast.core.decide.recovery_phases import NO_PAGE
from holdfast.core.job.fault import LEFT_FOR_RESTART
from holdfast.core.protocol.status_page import Phase
from holdfast.exit_codes import Exit
from holdfast.history.run_history import FaultView
from holdfast.runtime.worker.user_exception import NUMBER
from holdfast.text import noun_of, plural, ranges, span

ALIKE_LEAST = 3
LOSS_SHOWN_LEAST = 0.01


def near(path: str) -> str:
    """Return ``path`` relative to the working directory if the path is below that directory; otherwise unchanged."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative


def facts(view: RunView) -> list[str]:
    """Return short facts about a run for a headline or a status line, the most important first."""
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
        found.append(kept(view))  # the end of the run may have lost steps, even if no recovery did
    elif view.session and view.faults:
        found.append(f"{plural(view.steps_lost, 'step')} lost")
    if view.still_s:
        found.append(f"stands still for {span(view.still_s)}")
    if view.goodput is not None:
        found.append(f"goodput {100 * view.goodput:.1f} %{largest_loss(view)}")
    found.append(span(view.elapsed_s))
    return found


def largest_loss(view: RunView) -> str:
    """Return the largest cause of lost time with its duration; empty if it is at most 1 % of the run's time."""
    cause, lost_s = max(view.losses.items(), key=lambda loss: loss[1], default=("", 0.0))
    return f" ({cause} {span(lost_s)})" if lost_s > LOSS_SHOWN_LEAST * view.elapsed_s else ""


PLACES = {
    phase.name.lower(): text
    for phase, text in (
        (Phase.READY, "between two blocks, at step {step}"),
        (Phase.LOADING, "while it drew the batch of step {step}"),
        (Phase.SECTION, "in a section at step {step}"),
        (Phase.ABORTED, "after a block of step {step} that did not count"),
        (Phase.IN_DOUBT, "in the vote of step {step}, before it knew the result"),
        (Phase.TORN, "in the update of step {step}, which it had left"),
        (Phase.FINISHED, "after its last step, at step {step}"),
        (Phase.SPARE, "as a spare, at step {step}"),
        (Phase.AFTER, "after the training, at step {step}"),
        (Phase.LEFT, "after its script had ended, at step {step}"),
    )
}
"""Texts about the place of a rank in its script, by the name of the phase; other phases are a part of the block."""


def kept(view: RunView) -> str:
    """Return a text about the newest checkpoint of a run, and about the later steps, which are lost."""
    behind = 0 if view.cut_off else view.step - max(view.kept_step, 0)
    newest = f"newest checkpoint: step {view.kept_step:,}" if view.kept_step >= 0 else "no checkpoint"
    not_kept = "is not kept" if behind == 1 else "are not kept"
    return newest + (f"; {plural(behind, 'step')} {not_kept}" if behind > 0 else "")


def fault_text(fault: FaultView) -> str:
    """Return a text about a fault with its rank: ``rank 2: killed by SIGKILL, in backward of step 20``."""
    return f"rank {fault.rank}: {fault_what(fault)}"


def fault_what(fault: FaultView) -> str:
    """Return a text about a fault without its rank: ``killed by SIGKILL, in backward of step 20``."""
    what = first_line(named(fault.what)) or fault.kind
    # The text of a broken collective already contains the place of its call.
    said = fault.phase in ("", NO_PAGE) or f"in {fault.phase} of step {fault.step}" in what
    return what if said else f"{what}, {fault_place(fault)}"


def named(what: str) -> str:
    """Return a text with the name of each signal after its number: ``by signal 9 (SIGKILL)``."""

    def name(told: re.Match[str]) -> str:
        try:
            return f"{told[0]} ({signal.Signals(int(told[1])).name})"
        except ValueError:  # some signal numbers have no name
            return told[0]

    return re.sub(r"\bby signal (\d+)(?=$|,)", name, what)


def alike(faults: Sequence[FaultView]) -> str:
    """Return one text for all faults of a run, if they differ only in numbers.

    The text is empty if the faults also differ in words, or if the run had fewer than ``ALIKE_LEAST`` faults.
    """
    own = [fault for fault in faults if fault.what != LEFT_FOR_RESTART]
    if len(own) < ALIKE_LEAST or len({NUMBER.sub("", fault_what(fault)) for fault in own}) > 1:
        return ""
    ranks = sorted({fault.rank for fault in own})
    who = f"{noun_of(len(ranks), 'rank')} {ranges(ranks)}"
    return f"{plural(len(own), 'fault')}, all alike: {who}: {fault_what(own[-1])}"


def fault_place(fault: FaultView) -> str:
    """Return a text about the place of a fault in the script: phase and step, or that no session was open."""
    if fault.phase == Phase.STARTING.name.lower():
        return "before any session"
    if fault.phase == NO_PAGE:
        return "not known: what it showed went with it"
    if fault.phase in PLACES:
        return PLACES[fault.phase].format(step=f"{fault.step:,}")
    return f"in {fault.phase} of step {fault.step:,}" if fault.phase else f"at step {fault.step:,}"


def first_line(text: str) -> str:
    """Return the first line of a text; empty for an empty text."""
    return next(iter(text.splitlines()), "")


def again(view: RunView) -> str:
    """Return a suggestion after an early end of a run: the next command, the step at which it continues, lost steps."""
    if view.left:
        return "start the same command to give the job this node again"
    if not view.session:
        return "start the same command: it begins where the script itself resumes"
    if view.cut_off:
        here = f"step {view.kept_step:,} is saved here" if view.kept_step >= 0 else "nothing is saved here"
        return f"start the same command: it continues at the newest step that any host has saved ({here})"
    if view.kept_step < 0:
        lost = f" ({plural(view.step, 'step')} lost)" if view.step else ""
        return f"start the same command: it begins again at step 0, there is no checkpoint{lost}"
    own = Path(view.directory) / "checkpoints"
    # The script named no directory for checkpoints, so a new run would look into its own directory, which is empty.
    start, where = (
        (f"HOLDFAST_CHECKPOINT={shlex.quote(str(own))} and", "; for good: session(checkpoint=...)")
        if own.is_dir() and Path(view.root or own).resolve() == own.resolve()
        else ("start", f" from {view.root}" if view.root else "")
    )
    behind = view.step - view.kept_step
    redone = f", {plural(behind, 'step')} to do again" if behind > 0 else ""
    return f"{start} the same command: it continues at step {view.kept_step:,}{redone}{where}"
