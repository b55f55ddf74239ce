"""Methods of the objects of a Lightning trainer that are replaced while it fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl


class Patches:
    """Replaced methods, to be put back as they were."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, dict[str, Any]]] = []

    def put(self, owner: Any, name: str, method: Any) -> None:
        """Let ``owner`` have ``method`` under this name, and no other object of its class."""
        own = vars(owner)
        self._made.append((owner, name, {name: own[name]} if name in own else {}))
        setattr(owner, name, method)

    def undo(self) -> None:
        """All as before, the last one first."""
        while self._made:
            owner, name, before = self._made.pop()
            delattr(owner, name)
            for each, value in before.items():
                setattr(owner, each, value)


def stand_behind(
    trainer: pl.Trainer,
    setup: Callable[..., Any],
    loader: Callable[..., Any],
    run: Callable[..., Any],
    fit: Callable[..., Any],
) -> Patches:
    """Let Lightning call these in place of methods of its own, which they get: the set-up of the strategy, what it does
    with a loader, the work of one batch, all epochs."""
    patches, strategy = Patches(), trainer.strategy
    patches.put(strategy, "setup", partial(setup, strategy.setup))
    patches.put(strategy, "process_dataloader", partial(loader, trainer, strategy.process_dataloader))
    # A collective before each batch, to ask for SIGTERM: outside of every step, so a newcomer has another number of
    # them, and Lightning drops the error of a lost peer. The vote asks already.
    patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    patches.put(loop, "run", partial(run, trainer, loop, loop.run))
    patches.put(trainer.fit_loop, "run", partial(fit, trainer.fit_loop.run))
    return patches
