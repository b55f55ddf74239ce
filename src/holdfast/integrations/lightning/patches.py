"""Replacements for methods of a Lightning trainer's objects, installed during ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl


class Patches:
    """A list of replaced methods, which can be restored."""

    def __init__(self) -> None:
        self._made: list[tuple[Any, str, dict[str, Any]]] = []

    def put(self, owner: Any, name: str, method: Any) -> None:
        """Replace the method ``name`` of the object ``owner`` alone, not of its class."""
        own = vars(owner)
        self._made.append((owner, name, {name: own[name]} if name in own else {}))
        setattr(owner, name, method)

    def undo(self) -> None:
        """Restore all original methods, the last replaced first."""
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
    """Replace methods of Lightning by these functions. Each function gets the original method as an argument.

    Args:
        setup: replaces the set-up of the strategy.
        loader: replaces the strategy's processing of a data loader.
        run: replaces the work of one batch.
        fit: replaces the loop over all epochs.

    Returns:
        The patches, which can restore the original methods.
    """
    patches, strategy = Patches(), trainer.strategy
    patches.put(strategy, "setup", partial(setup, strategy.setup))
    patches.put(strategy, "process_dataloader", partial(loader, trainer, strategy.process_dataloader))
    # Before each batch Lightning exchanges SIGTERM by a collective outside of every step. A newcomer would make another
    # number of these collectives, and Lightning drops the error of a lost peer. The vote replaces this collective.
    patches.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    patches.put(loop, "run", partial(run, trainer, loop, loop.run))
    patches.put(trainer.fit_loop, "run", partial(fit, trainer.fit_loop.run))
    return patches
