"""The orders of a decision to one rank about its state, and the conditions under which each may be carried out.

Theory. A decision (``Settle``) can order a rank to do four things: send digests of its copies, give its state to
replacements, check the state in memory to which all ranks go back, or write its share of a checkpoint. Such an order
arrives while the rank is anywhere in its step, and while the script runs its own code. The state may be read only when
three conditions hold, in this order:

1. the step machine is at the step of the decision, in the state ready, aborted or finished;
2. the script has left the code that belongs to the state (``waits_for``);
3. the model holds the trained weights, and not for example an average that the script evaluates.

So each order is kept as data until its conditions hold. ``OrderBook.advance`` compares the conditions with the step
machine (``step.py``) and the position of the script (``position.py``), and returns commands for the shell. This module
neither blocks nor reads a clock. ``docs/protocol.md`` shows the table of positions and orders, and a test compares it.

Invariants:
1. Orders are carried out one at a time, in the order of their arrival.
2. An order is dropped when a newer fence comes or the job resumes. It is never begun after that.
3. Each order is carried out, refused or dropped, because each wait (for the script, for the weights) has a limit.
4. All orders of one decision share one limit of the wait for the script, and one limit of the wait for the weights.
"""

from __future__ import annotations

from collections import deque
from enum import StrEnum
from typing import Literal, NamedTuple

import msgspec

from holdfast.core.protocol.messages import Command, RankState, SetTimer, Settle
from holdfast.core.worker.position import ScriptEvent, ScriptMachine
from holdfast.core.worker.step import StepMachine

SCRIPT_TIMEOUT_S = 10.0
"""Limit of the wait for the script to leave code that belongs to the state. It is less than the limit for serving the
state (``offer_s`` in ``core/config.py``).
"""
WEIGHTS_TIMEOUT_S = 30.0
"""Limit of the wait, before a save, until the model holds the trained weights again. It is less than the limit of a
last-gasp save (``gasp_s`` in ``core/config.py``).
"""
WEIGHTS_POLL_S = 0.05

COMPLETE: frozenset[RankState] = frozenset({"ready", "aborted", "finished"})
"""States in which a rank that is at the step of the decision has a complete state of that step."""

SCRIPT_TIMER, WEIGHTS_TIMER = "script", "weights"

Wait = Literal["script", "weights"]
Look = Literal["due", "asked", "trained", "other", "paused"]
"""Result or progress of the check whether the model holds the trained weights.

``due``: to be made. ``asked``: the shell makes it now. ``trained``, ``other``: the weights found. ``paused``: a timer
runs until the next check.
"""


class OrderKind(StrEnum):
    """The action on the state of a rank that an order asks for."""

    DIGESTS = "digests"  # publish layout and digests of its copies
    GIVE = "give"  # serve the state to replacements
    GO_BACK = "go_back"  # check the state in memory to which all ranks go back
    SAVE = "save"  # write this rank's share of a checkpoint


class DecisionOrder(msgspec.Struct, frozen=True):
    """One order of the controller's decision to this rank; ``settle`` is the message with that decision."""

    kind: OrderKind
    settle: Settle


class CarryOut(Command, frozen=True):
    """Command to carry out an order now, and to report its end with ``OrderEnded``.

    Attributes:
        order: the order.
        aborted: the block of the step was aborted, so the state is the one from the start of that block.
    """

    order: DecisionOrder
    aborted: bool


class RefuseOrder(Command, frozen=True):
    """Command to report to the controller that an order cannot be carried out, with reason and hint."""

    order: DecisionOrder
    reason: str
    hint: str = ""


class LookAtWeights(Command, frozen=True):
    """Command to check whether the model holds the trained weights, and to report the result with ``WeightsSeen``."""


class WarnOfScript(Command, frozen=True):
    """Command to warn that code after the block of ``step`` has run too long. The rank no longer waits for it."""

    step: int
    waited_s: float


def orders_of(settle: Settle) -> tuple[DecisionOrder, ...]:
    """Return the orders that a decision gives to a rank, in the order in which they are carried out."""
    kinds = [OrderKind.DIGESTS] if settle.vouch else []
    if settle.then == "replace":
        kinds.append(OrderKind.GIVE if settle.rewind < 0 else OrderKind.GO_BACK)
    if settle.save is not None:
        kinds.append(OrderKind.SAVE)
    return tuple(DecisionOrder(kind, settle) for kind in kinds)


def waits_for(settle: Settle, script: ScriptMachine) -> tuple[Wait, ...]:
    """Return the conditions that the orders of a decision wait for, at the present position of the script.

    The code before a block is a part of the state only if the state goes to a replacement. If all ranks go back to a
    state in memory, the weights in the model do not matter.
    """
    waits: tuple[Wait, ...] = ("script",) if script.awaits(replaces=settle.then == "replace") else ()
    return (*waits, "weights") if settle.rewind < 0 and script.may_hold_other_weights else waits


class Standing(NamedTuple):
    """The present time, step and script position of a rank: the facts on which the conditions of an order depend."""

    now_s: float
    steps: StepMachine
    script: ScriptMachine


class OrderBook:
    """The orders that a rank has received and not carried out, with the state of their waits."""

    def __init__(self) -> None:
        self._pending: deque[DecisionOrder] = deque()
        self._running: DecisionOrder | None = None
        self._limits_s: dict[Wait, float] = {}
        self._is_timed = False  # the timer SCRIPT_TIMER runs
        self._look: Look = "due"

    @property
    def waiting(self) -> tuple[DecisionOrder, ...]:
        """The orders that have not begun."""
        return tuple(self._pending)

    @property
    def running(self) -> DecisionOrder | None:
        """The order that the shell carries out now, or None."""
        return self._running

    def add(self, orders: tuple[DecisionOrder, ...]) -> None:
        """Add the orders of a decision, except those that already wait."""
        self._pending.extend(order for order in orders if order not in self._pending)

    def drop(self) -> None:
        """Drop all orders that have not begun, because a newer fence has come or the job has resumed."""
        self._pending.clear()
        self._limits_s.clear()
        self._look = "due"

    def end(self) -> None:
        """Record that the shell has carried out the running order, or has failed to."""
        self._running = None

    def look_again(self, timer: str) -> None:
        """Record that ``timer`` has fired. After the timer for the weights, the next check of the weights is due."""
        if timer == SCRIPT_TIMER:
            self._is_timed = False
        if timer == WEIGHTS_TIMER and self._look == "paused":
            self._look = "due"

    def saw_weights(self, trained: bool) -> None:
        """Record the answer to ``LookAtWeights``. ``trained``: the model holds the trained weights, not averages."""
        if self._look == "asked":
            self._look = "trained" if trained else "other"

    def advance(self, at: Standing) -> list[Command]:
        """Return the commands for the orders whose conditions hold.

        If the script exceeds the limit of a wait, it is recorded as one that does not return to its loop (``strayed``).
        """
        found: list[Command] = []
        while self._running is None and self._pending:
            order = self._pending[0]
            if at.steps.state == "torn":
                where = f"torn at step {at.steps.step}"
                found.append(self._refuse(f"this rank is {where}, not at {order.settle.step}"))
            elif not self._is_at_step(order, at) or self._waits_for_script(order, at, found):
                break
            elif "weights" in waits_for(order.settle, at.script) and self._look != "trained":
                if self._waits_for_weights(order, at, found):
                    break
            else:
                self._running, self._look = self._pending.popleft(), "due"
                found.append(CarryOut(order=order, aborted=at.steps.state == "aborted"))
        return found

    def _refuse(self, reason: str, hint: str = "") -> RefuseOrder:
        return RefuseOrder(order=self._pending.popleft(), reason=reason, hint=hint)

    @staticmethod
    def _is_at_step(order: DecisionOrder, at: Standing) -> bool:
        steps = at.steps
        return not at.script.restoring and steps.state in COMPLETE and steps.step == order.settle.step

    def _waits_for_script(self, order: DecisionOrder, at: Standing, found: list[Command]) -> bool:
        """Return True if the order still waits for the script. After the time limit, return False."""
        if "script" not in waits_for(order.settle, at.script):
            return False
        if "script" not in self._limits_s:
            self._limits_s["script"], self._is_timed = at.now_s + SCRIPT_TIMEOUT_S, False
        if at.now_s < self._limits_s["script"]:
            if not self._is_timed:  # the last timer may have fired early, by the resolution of the clock
                self._is_timed = True
                found.append(SetTimer(name=SCRIPT_TIMER, delay_s=self._limits_s["script"] - at.now_s))
            return True
        if at.script.rules.awaited == "block":
            found.append(WarnOfScript(step=at.steps.step - 1, waited_s=SCRIPT_TIMEOUT_S))
            at.script.handle(ScriptEvent.STRAYED)
        return False

    def _waits_for_weights(self, order: DecisionOrder, at: Standing, found: list[Command]) -> bool:
        """Return True if the order still waits for trained weights. After the time limit the order is refused."""
        if "weights" not in self._limits_s:
            limit_s = SCRIPT_TIMEOUT_S if order.settle.then == "replace" else WEIGHTS_TIMEOUT_S
            self._limits_s["weights"] = at.now_s + limit_s
        if self._look == "due":
            self._look = "asked"
            found.append(LookAtWeights())
        elif self._look == "other" and at.now_s >= self._limits_s["weights"]:
            self._look = "due"
            at.script.handle(ScriptEvent.STRAYED)
            found.append(self._refuse(*other_weights(at.steps.step)))
            return False
        elif self._look == "other":
            self._look = "paused"
            found.append(SetTimer(name=WEIGHTS_TIMER, delay_s=WEIGHTS_POLL_S))
        return True


def other_weights(step: int) -> tuple[str, str]:
    """Return error text and hint for a model that does not hold the trained weights of ``step``."""
    return (
        f"step {step}: the script has changed weights since the block, and is not back at one",
        "evaluate averages of weights in a copy of the model (copy.deepcopy), not in their place",
    )
