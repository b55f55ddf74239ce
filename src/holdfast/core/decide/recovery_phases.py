"""The phases of a recovery: the table of their transitions, and the table of the rules of each phase.

Theory. ``PHASES`` gives the next phase for a phase and an event. ``RULES`` has one row per phase: the order that a
member receives in this phase, and everything else that depends on the phase. A *source* is a rank that holds the state
of the decided step and saves it or gives it to replacements. The content of an order comes from the plan of the
recovery (``core/job/recovery_plan.py``). To add a rule, add a column to ``RULES``. ``docs/protocol.md`` shows both
tables, and a test compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

Phase = Literal[
    "idle",
    "grace",  # a collective broke, and no death explains it so far
    "fencing",  # the survivors leave the old generation and report
    "retrying",  # all ranks keep their processes; those in doubt make their update
    "preparing",  # replacements start, and the sources compare digests of the state
    "replacing",  # replacements start and receive the state
    "comparing",  # the sources compare digests of the state before they save it
    "saving",  # the sources write a last-gasp checkpoint
    "leaving",  # all processes end, and start again
    "ending",  # all processes end, and the run ends
    "waiting",  # too few nodes are connected
    "starting",  # processes start; it ends when all sessions are open
    "resuming",  # new processes do their first step
    "resuming_in_place",  # survivors, and replacements beside them, do their next step
    "stopped",  # the run was ended from outside: no further decisions
]

RecoveryEvent = Literal[
    "launch",
    "suspect",
    "fault",
    "retry",
    "compare_to_replace",
    "replace",
    "compare_to_save",
    "save",
    "leave",
    "end",
    "agreed",
    "gone",
    "no_nodes",
    "opened",
    "adopted_in_place",
    "reached",
    "stop",
]


class RecoveryMoves(NamedTuple):
    """The transitions of a recovery that one event causes.

    From each phase in ``sources``, ``event`` leads to the phase ``target``.
    """

    event: RecoveryEvent
    sources: tuple[Phase, ...]
    target: Phase


_AFTER_A_START: tuple[Phase, ...] = ("idle", "starting", "resuming", "resuming_in_place")
_AFTER_A_DECISION: tuple[Phase, ...] = ("retrying", "preparing", "replacing", "comparing", "saving")

RECOVERY_MOVES: tuple[RecoveryMoves, ...] = (
    RecoveryMoves("launch", ("idle", "waiting"), "starting"),
    RecoveryMoves("suspect", _AFTER_A_START, "grace"),
    RecoveryMoves("fault", ("grace", "fencing", *_AFTER_A_START, *_AFTER_A_DECISION), "fencing"),
    RecoveryMoves("retry", ("fencing",), "retrying"),
    RecoveryMoves("compare_to_replace", ("fencing",), "preparing"),
    RecoveryMoves("replace", ("fencing", "preparing"), "replacing"),
    RecoveryMoves("compare_to_save", ("fencing",), "comparing"),
    RecoveryMoves("save", ("comparing",), "saving"),
    RecoveryMoves("leave", ("fencing", "saving"), "leaving"),
    RecoveryMoves("end", ("fencing", "saving"), "ending"),
    RecoveryMoves("agreed", ("retrying", "replacing"), "resuming_in_place"),
    RecoveryMoves("gone", ("leaving",), "starting"),
    RecoveryMoves("no_nodes", ("starting",), "waiting"),
    RecoveryMoves("opened", ("starting",), "resuming"),
    RecoveryMoves("adopted_in_place", ("starting",), "resuming_in_place"),
    RecoveryMoves("reached", ("resuming", "resuming_in_place"), "idle"),
    RecoveryMoves("stop", get_args(Phase), "stopped"),
)

PHASES: Mapping[tuple[Phase, RecoveryEvent], Phase] = {
    (source, moves.event): moves.target for moves in RECOVERY_MOVES for source in moves.sources
}
"""(phase, event) -> next phase.

A pair without a row is an error, except that a fault or a suspicion is then ignored.
"""

Then = Literal["", "retry", "replace", "restart"]
Order = Literal["", "fence", "settle", "receive", "resume", "leave"]
Until = Literal["", "answered", "there", "joined", "gone", "started", "reached"]


class PhaseRules(NamedTuple):
    """The rules of one phase of a recovery.

    Attributes:
        order: the message that a living member receives, also when the member connects again; empty if it receives
            none.
        to_replacement: the message for a replacement that has not joined; None means the message of ``order``.
        until: the condition that ends the phase. ``answered``: all living members have answered the fence. ``there``:
            all living members are at the decided step. ``joined``: every seat has a full member, which is at that
            step. ``gone``: no process is left. ``started``: all processes of a script without a session have started.
            ``reached``: all members have committed a step. The text is empty if only an event ends the phase.
        waits: names of the time limits (``core/job/wait_bounds.py``) that run in this phase.
        then: the next action of the sources once they are at the decided step (``Settle.then``); empty if there are no
            sources.
        compares: the sources first send digests. The state is not saved or given before the digests are equal.
        in_place: the survivors continue in their processes. A rank that leaves its loop is a fault, and a stopped
            process (state T) is killed.
        trains: the ranks compute, or are about to. The run can end, and stalls are judged.
    """

    order: Order = ""
    to_replacement: Order | None = None
    until: Until = ""
    waits: tuple[str, ...] = ()
    then: Then = ""
    compares: bool = False
    in_place: bool = False
    trains: bool = False


RULES: Mapping[Phase, PhaseRules] = {
    "idle": PhaseRules(trains=True),
    "grace": PhaseRules(),
    "fencing": PhaseRules("fence", until="answered", waits=("quiesce",)),
    "retrying": PhaseRules("settle", until="there", waits=("retry",), then="retry", in_place=True),
    "preparing": PhaseRules(
        "settle", "", waits=("vouch", "offer", "join"), then="replace", compares=True, in_place=True
    ),
    "replacing": PhaseRules(
        "settle", "receive", until="joined", waits=("offer", "join"), then="replace", in_place=True
    ),
    "comparing": PhaseRules("settle", waits=("vouch",), then="restart", compares=True),
    "saving": PhaseRules("settle", waits=("gasp",), then="restart"),
    "leaving": PhaseRules("leave", until="gone", waits=("leave",)),
    "ending": PhaseRules("leave", until="gone", waits=("leave",)),
    "waiting": PhaseRules(),
    "starting": PhaseRules(until="started", trains=True),
    "resuming": PhaseRules(until="reached", trains=True),
    "resuming_in_place": PhaseRules("resume", until="reached", in_place=True, trains=True),
    "stopped": PhaseRules(),
}
"""One row per phase. If the run ends with the recovery, sources receive ``stop`` in place of ``then="restart"``."""


NO_PAGE = "no page"
"""Value of ``MemberExited.detail`` if no status page of the process is left, so its last position is not known."""
