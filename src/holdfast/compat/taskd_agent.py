"""``taskd.api.taskd_agent_api``: the agent that watches msrun's workers if ``MS_ENABLE_TFT`` holds ``RSC:1``.

msrun registers its functions (start all, start some, kill, monitor), and then lets this agent call them. If a worker
fails, the agent starts all workers again under the same msrun and scheduler, because MindSpore's own group cannot take
back one worker. With ``TTP:1`` the other workers first have time to write a dying checkpoint.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from holdfast.compat.import_hook import TFT_VARIABLE
from holdfast.errors import UsageError
from holdfast.session.api import configure_logging
from holdfast.text import plural

log = logging.getLogger("holdfast")

RESTARTS_VARIABLE = "HOLDFAST_TASKD_MAX_RESTARTS"
RESTARTS_MAX = 16
WINDOW_S = 3600.0
POLL_S = 0.1
DUMP_S = 60.0
"""Time limit for the other workers to write a dying checkpoint and leave (with ``TTP:1``)."""
ALL = [-1]
NAMES = ("START_ALL_WORKER", "MONITOR", "KILL_WORKER")

_functions: dict[str, Callable[..., Any]] = {}


def init_taskd_agent(config: Mapping[str, Any] | None = None, cls: Any = None) -> bool:
    """Return True if msrun should let this agent start and watch its workers.

    The result is True only if the user has requested restarts (``RSC:1``). With ``TTP:1`` alone, a fault ends the job.
    """
    configure_logging()
    _functions.clear()
    return "RSC:1" in os.environ.get(TFT_VARIABLE, "")


def register_func(operator: str, func: Callable[..., Any]) -> bool:
    """Register ``func`` of msrun under the name ``operator``. Return True."""
    _functions[operator] = func
    return True


def start_taskd_agent() -> None:
    """Start all workers, and start all of them again whenever one fails. Return when all have ended without an error.

    Raises:
        UsageError: msrun did not register its functions to start, kill and monitor workers (:func:`register_func`).
            Or ``HOLDFAST_TASKD_MAX_RESTARTS`` is not a number.
        SystemExit: a worker failed after the last permitted restart.
    """
    missing = [name for name in NAMES if name not in _functions]
    if missing:
        raise UsageError(
            f"msrun did not register {', '.join(missing)}",
            hint="this module is msrun's: start the script with msrun, or with holdfast run --framework mindspore",
        )
    text = os.environ.get(RESTARTS_VARIABLE, str(RESTARTS_MAX))
    if not text.isdecimal():
        raise UsageError(
            f"{RESTARTS_VARIABLE}={text} is no number", hint=f"for example {RESTARTS_VARIABLE}={RESTARTS_MAX}"
        )
    _Agent(_functions, int(text), "TTP:1" in os.environ.get(TFT_VARIABLE, "")).run()


class _Agent:
    """The loop that watches and restarts msrun's workers."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]], restarts_max: int, dumps: bool) -> None:
        self._functions = functions
        self._restarts_max = restarts_max
        self._dumps = dumps
        self._restarted_s: deque[float] = deque()

    def run(self) -> None:
        self._functions["START_ALL_WORKER"]()
        while True:
            failed, running = self._look()
            if failed:
                self._restart(failed)
            elif not running:
                return
            time.sleep(POLL_S)

    def _look(self) -> tuple[dict[int, Any], list[int]]:
        """Return the failed ranks with their exit status, and the list of ranks that still run."""
        states = self._functions["MONITOR"](ALL).values()
        failed = {int(s["global_rank"]): s["status"] for s in states if s["status"] not in (None, 0)}
        return failed, [int(s["global_rank"]) for s in states if s["status"] is None]

    def _restart(self, failed: dict[int, Any]) -> None:
        began_s = time.monotonic()
        running = [0]
        while self._dumps and running and time.monotonic() - began_s < DUMP_S:
            time.sleep(POLL_S)
            _, running = self._look()
        while self._restarted_s and began_s - self._restarted_s[0] > WINDOW_S:
            self._restarted_s.popleft()
        self._functions["KILL_WORKER"](ALL)
        ranks = ", ".join(f"rank {rank} (status {status})" for rank, status in sorted(failed.items()))
        if len(self._restarted_s) >= self._restarts_max:
            log.error("holdfast: %s ended; the limit of %s within %g s is reached: the job ends", ranks,
                      plural(self._restarts_max, "restart"), WINDOW_S)  # fmt: skip
            raise SystemExit(1)
        self._restarted_s.append(began_s)
        log.error("holdfast: %s ended: all workers start again (%d of %d)", ranks, len(self._restarted_s),
                  self._restarts_max)  # fmt: skip
        self._functions["START_ALL_WORKER"]()
