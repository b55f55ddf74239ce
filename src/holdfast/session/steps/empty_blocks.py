"""The check that a training changes its weights at all.

A script that forgets ``optimizer.step()``, or gives another optimizer to the session, would commit all its steps and
end with exit code 0. So the first blocks of a process are counted until one of them changes a weight.
"""

from __future__ import annotations

from holdfast.errors import StepError
from holdfast.text import plural

BLOCKS_MAX = 10
NO_UPDATE = (
    "no optimizer of the session took a step",
    "call loss.backward() and optimizer.step() in the block, with an optimizer of the session, not in a CUDA graph",
)
NO_GRADIENT = (
    "no gradient was there when the optimizer stepped",
    "call loss.backward() before optimizer.step(), and zero_grad() after it",
)


class EmptyBlocks:
    """The blocks in a row, from the first one of this process on, that changed no weight.

    Attributes:
        over: True if no more blocks are counted: one has changed a weight, or an earlier process has passed the check.
    """

    def __init__(self) -> None:
        self.over = False
        self._count = 0
        self._first = 0  # number of the first counted block
        self._stepped = False  # an optimizer stepped in the newest block
        self._place = ""  # line of the script at the end of the newest block

    def add(self, number: int, *, stepped: bool, place: str) -> None:
        """Count the committed block of step ``number``, which changed no weight, at the line ``place`` of the script.

        If the block does not follow the last counted block, because this process began here or went back to an
        earlier step, the count begins again.
        """
        if number != self._first + self._count:
            self._first, self._count = number, 0
        self.over = self._first >= BLOCKS_MAX
        self._count += 1
        self._stepped, self._place = stepped, place

    def require_change(self, *, ended: bool) -> None:
        """Raise an error if too many blocks in a row have changed no weight.

        Args:
            ended: the training ends here. Then one block is too many if the counted blocks began with step 0. In all
                other cases ``BLOCKS_MAX`` blocks are too many.

        Raises:
            StepError: too many blocks were counted.
        """
        most = 1 if ended and self._first == 0 else BLOCKS_MAX
        if self.over or self._count < most:
            return
        missing, call = NO_GRADIENT if self._stepped else NO_UPDATE
        raise StepError(
            f"{plural(self._count, 'block')} from step {self._first} on, and {missing} in "
            f"{'it' if self._count == 1 else 'them'} ({self._place})",
            hint=call,
        )
