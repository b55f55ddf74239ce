"""The step of a rank's state, and the arguments of the save handler that belong to that step.

Theory. A Megatron script reports the end of an update inside its optimizer. The script gives the arguments (iterations
done, model, optimizer, schedule) later, in its loop. Between the two calls the weights belong to the next step, but the
iteration count and the schedule still belong to the last step. So a state is *whole* only when both calls were made
since the update began, in either order. The step of a state is the iteration count with which the arguments begin.
MindSpore gives one live object once, and some scripts give no arguments. In both cases arguments do not belong to
single steps, and a state is whole when its update has ended.

Invariants:
1. ``step`` and ``arguments`` change together, when a state becomes whole.
2. Arguments from before the start of an update are never paired with the state after that update.
"""

from __future__ import annotations

from typing import Any


class StepState:
    """The step of a rank's state, and the arguments for that step; the module docstring has the rules.

    The object has no lock: the caller guards it.

    Args:
        bound: True if the script gives arguments for each step. False changes to True as soon as given arguments begin
            with an iteration count.

    Example:
        state = StepState(bound=True)
        state.begin()
        state.end(1)                          # not whole: the arguments are those of step 0
        state.give((1, model))                # whole, step 1
    """

    def __init__(self, bound: bool) -> None:
        self.step = 0
        """Step of the last whole state; 0 if this process has had none."""
        self.arguments: Any = None
        """Arguments that belong to :attr:`step`; before the first whole state the newest arguments."""
        self.updating = False
        self._bound = bound
        self._ended: int | None = None  # number of an ended update whose arguments are missing
        self._given: Any = None
        self._any = False  # arguments were given at least once
        self._fresh = False  # arguments were given since the last update began
        self._told = False  # missing arguments were reported
        self._wrong = ""  # why the arguments do not belong to the last state; empty: they do

    @property
    def whole(self) -> bool:
        """True if weights, arguments and step number belong to the same step."""
        return not self.why

    @property
    def why(self) -> str:
        """The reason why the state is not whole; empty if the state is whole."""
        if self.updating:
            return "its update was not completed"
        if self._ended is not None:
            return "ttp_set_ckpt_args was not called since its last update"
        return self._wrong

    @property
    def open(self) -> bool:
        """True if an update has ended and the script has not yet given its arguments."""
        return self._ended is not None and not self.updating

    def begin(self) -> bool:
        """Record that the weights are about to change.

        Returns:
            True, at most once per process, if the script gave no arguments for the last update.
        """
        forgotten = self.open and self._any and not self._told
        self._told = self._told or forgotten
        if self.open and not self._any:
            self._bound = False  # the handlers of this script take no arguments
        self.updating, self._fresh, self._ended = True, False, None
        return forgotten

    def end(self, step: int) -> None:
        """Record the end of an update: the weights are now those of ``step``, as the script counts updates."""
        self.updating = False
        if self._bound and not self._fresh:
            self._ended = step
        else:
            self._complete(step, self.step + 1)

    def give(self, arguments: Any) -> None:
        """Set the script's arguments for the save handler."""
        self._given, self._fresh, self._any = arguments, True, True
        self._bound = self._bound or _count(arguments) is not None
        if self.updating:
            return
        if self._ended is not None:
            self._complete(self._ended, self.step + 1)
        elif self.step:  # an iteration without an update: an overflow of the loss scale
            self._complete(self.step, self.step)
        else:
            self.arguments = arguments

    def moves(self, arguments: Any) -> bool:
        """Return True if :meth:`give` would replace the arguments of a whole state with other arguments."""
        return bool(self.step) and self.whole and self._bound and arguments is not self.arguments

    def _complete(self, updates: int, least: int) -> None:
        count, least = _count(self._given) if self._bound else None, max(updates, least)
        if count is not None and count < least:
            self._wrong = f"ttp_set_ckpt_args says {count} iterations after the update of iteration {least}"
        else:
            self.step, self.arguments, self._wrong = count or updates, self._given, ""
        self._ended = None


def _count(arguments: Any) -> int | None:
    """Return the iteration count with which a Megatron script's arguments begin; None if they begin with no number."""
    first = arguments[0] if isinstance(arguments, tuple | list) and arguments else None
    return first if isinstance(first, int) and not isinstance(first, bool) else None
