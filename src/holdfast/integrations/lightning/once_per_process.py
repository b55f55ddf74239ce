"""Decisions that Lightning's objects make once in a process, and that a replacement process must not make again.

Theory. A logger takes the next free ``version_N`` when it is first asked for its directory. ``CSVLogger`` removes the
metrics that it finds there. ``SaveConfigCallback`` writes the configuration and remembers that it did. All of this
happens before the session opens, so it is in no saved state. The decisions of each rank are therefore written into the
directory of the run, from where a later process with that rank takes them. Decisions of rank 0 have precedence, as in
Lightning.
"""

from __future__ import annotations

import csv
import functools
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import msgspec
from lightning.fabric.loggers import csv_logs
from lightning.fabric.loggers import tensorboard as fabric_tensorboard
from lightning.pytorch.loggers import tensorboard

from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.worker.worker_client import WorkerClient

log = logging.getLogger("holdfast")
CONFIG_SAVED = "config saved"
KNOWN = (csv_logs.CSVLogger, fabric_tensorboard.TensorBoardLogger)


class Decisions:
    """The decisions of one rank in one run. Without a run nothing is kept.

    Args:
        run_dir: directory of the run; None if there is no run.
        rank: rank of this process.
    """

    def __init__(self, run_dir: Path | None, rank: int) -> None:
        self._path = None if run_dir is None else run_dir / f"lightning-{rank}.json"
        self._own = _read(self._path)
        self._before = {**self._own, **(_read(run_dir / "lightning-0.json") if run_dir is not None else {})}
        self._asked: Counter[str] = Counter()

    def known(self, what: str) -> int | None:
        """Return the decision about ``what`` that an earlier process made; None if no process has made one."""
        return self._before.get(what)

    def keep(self, what: str, decided: int) -> None:
        """Keep a decision about ``what`` for later processes with this rank."""
        self._own[what] = decided
        if self._path is not None:
            write_private(self._path, msgspec.json.encode(self._own))

    def version(self, method: Callable[[Any], int], logger: Any) -> int:
        """Return the version number for ``logger``: the earlier process's number, otherwise a new one from ``method``.

        Loggers are matched by class, directory and the order of their calls.
        """
        place = f"{type(logger).__name__} {logger.root_dir}/{logger.name}"
        self._asked[place] += 1
        what = f"{place} {self._asked[place]}"
        before = self.known(what)
        version = method(logger) if before is None else before
        self.keep(what, version)
        return version

    def metrics(self, method: Callable[[Any], None], writer: Any) -> None:
        """Keep the metrics in the log directory if this run has written them. Otherwise let Lightning remove them."""
        what = f"metrics {writer.log_dir}"
        if self.known(what) is None:
            method(writer)
        elif writer._fs.isfile(writer.metrics_file_path):
            with writer._fs.open(writer.metrics_file_path, "r", newline="") as file:
                writer.metrics_keys = next(csv.reader(file), [])
        self.keep(what, 1)

    def save_config(self, method: Callable[..., None], callback: Any, *args: Any, **kwargs: Any) -> None:
        """Save the configuration with ``method``, once in a run.

        A newcomer cannot ask the other ranks whether it was saved.
        """
        if self.known(CONFIG_SAVED) is not None:
            callback.already_saved = True
        self.keep(CONFIG_SAVED, 1)  # before the save: a later process would fail at the existing file
        method(callback, *args, **kwargs)
        callback.already_saved = True


def _read(path: Path | None) -> dict[str, int]:
    try:
        return {} if path is None else msgspec.json.decode(path.read_bytes(), type=dict[str, int])
    except FileNotFoundError:
        return {}


def keep_decisions() -> None:
    """Make Lightning's loggers and callbacks reuse the versions and files that an earlier process chose.

    Repeated calls do nothing.
    """
    client = WorkerClient.current()
    rank = int(os.environ.get("RANK", "0"))
    decisions = Decisions(client.run_dir if client is not None else None, rank)
    for owner in (*KNOWN, tensorboard.TensorBoardLogger):
        _wrap(owner, "_get_next_version", decisions.version)
    _wrap(csv_logs._ExperimentWriter, "_check_log_dir_exists", decisions.metrics)
    cli = sys.modules.get("lightning.pytorch.cli")
    if cli is not None:
        _wrap(cli.SaveConfigCallback, "setup", decisions.save_config)


def warn_of_loggers(trainer: pl.Trainer) -> None:
    """Warn about loggers of the trainer whose decisions are not kept."""
    unknown = sorted({type(each).__name__ for each in trainer.loggers if not isinstance(each, KNOWN)})
    if unknown and trainer.is_global_zero:
        log.warning(
            "holdfast: %s: a process that takes the place of rank 0 may begin another run of it; give it a fixed id",
            ", ".join(unknown),
        )


def _wrap(owner: type, name: str, other: Callable[..., Any]) -> None:
    method = vars(owner).get(name)
    if method is None or hasattr(method, "__wrapped__"):
        return

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return other(method, self, *args, **kwargs)

    setattr(owner, name, call)
