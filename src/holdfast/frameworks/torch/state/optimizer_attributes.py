"""The plain attributes of an optimizer: a part of what its updates change that its ``state_dict()`` lacks.

Theory. Some optimizers keep a number or a flag as an attribute: the count of their updates, or whether their state
exists (DLRM's ``RWSAdagrad.momentum_initialized``). A new process begins with the value of a start, and its next update
is another one, or sets the state to zero, without an error. So the session keeps each attribute that has changed since
its start. An attribute that has not changed is a setting of the script, which may be another one in the next run.

A flag may also say that the updates have made objects of this process (buffers, handles), which a new process has to
make again. So nothing is kept of an optimizer that has put other objects into its attributes since the session began.
Nothing is kept either of the optimizers of torch and bitsandbytes, whose updates depend on no such attribute.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

Number = bool | int | float | str
_KINDS = (bool, int, float, str)
_LIBRARIES = ("torch.", "bitsandbytes.")
_OF_TORCH = frozenset({"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"})
_STATE = frozenset({"state", "param_groups", "defaults"})


def plain_attributes(optimizer: Optimizer) -> dict[str, Number]:
    """Return the attributes of an optimizer that are bools, numbers or texts; of a library's own optimizers none."""
    if type(optimizer).__module__.startswith(_LIBRARIES):
        return {}
    held = vars(optimizer)
    return {name: held[name] for name in held.keys() - _OF_TORCH if type(held[name]) in _KINDS}


def set_attributes(optimizer: Optimizer, values: Mapping[str, Number]) -> None:
    """Give the attributes of an optimizer the values of ``values``, and remove other plain attributes."""
    for name in plain_attributes(optimizer).keys() - values.keys():
        delattr(optimizer, name)
    vars(optimizer).update(values)


class PlainAttributes:
    """The plain attributes of one optimizer, and their values when the session began.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._first = plain_attributes(optimizer)
        self._objects = self._held()

    def keeps(self, name: str) -> bool:
        """Return whether the attribute ``name`` would be kept if it changed."""
        return self._held() == self._objects and name in plain_attributes(self._optimizer)

    def changed(self, now: Mapping[str, Number]) -> dict[str, Number]:
        """Return those of the attributes ``now`` that have changed since the session began, sorted by name."""
        if self._held() != self._objects:
            return {}
        return {name: now[name] for name in sorted(now) if self._first.get(name) != now[name]}

    def restore(self, changed: Mapping[str, Number]) -> None:
        """Set the attributes to the values that they had when :meth:`changed` returned ``changed``."""
        if self._held() == self._objects:
            set_attributes(self._optimizer, {**self._first, **changed})

    def _held(self) -> dict[str, int]:
        """Return the ids of the objects in the attributes, without functions (a schedule replaces ``step``)."""
        return {
            name: id(value)
            for name, value in vars(self._optimizer).items()
            if name not in _STATE and value is not None and type(value) not in _KINDS and not callable(value)
        }
