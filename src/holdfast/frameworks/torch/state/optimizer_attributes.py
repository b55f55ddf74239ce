"""The plain attributes of an optimizer: a part of what its updates change that its ``state_dict()`` lacks.

Theory. Some optimizers keep a number or a flag as an attribute: the count of their updates, or whether their state
exists (DLRM's ``RWSAdagrad.momentum_initialized``). A new process begins with the value of a start, and its next update
is another one, or sets the state to zero, without an error. So the session keeps each attribute that has changed since
its start. An attribute that has not changed is a setting of the script, which may be another one in the next run.
Attributes of torch's own optimizers are left out: their updates depend on none of them. So are attributes with objects,
tensors and containers.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

Number = bool | int | float | str
_KINDS = (bool, int, float, str)
_OF_TORCH = frozenset({"_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_opt_called"})


def plain_attributes(optimizer: Optimizer) -> dict[str, Number]:
    """Return the attributes of an optimizer that are bools, numbers or texts; of torch's own optimizers none."""
    if type(optimizer).__module__.startswith("torch."):
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
        self._first = plain_attributes(optimizer)

    def changed(self, now: Mapping[str, Number]) -> dict[str, Number]:
        """Return those of the attributes ``now`` that have changed since the session began, sorted by name."""
        return {name: now[name] for name in sorted(now) if self._first.get(name) != now[name]}

    def restore(self, optimizer: Optimizer, changed: Mapping[str, Number]) -> None:
        """Set the attributes to the values that they had when :meth:`changed` returned ``changed``."""
        set_attributes(optimizer, {**self._first, **changed})
