"""The exit codes of ``holdfast run`` and of its workers, one per cause.

The table is the documented contract (README, ``docs/exit-codes.md``); tests compare the document with this file.
"""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """The exit code of each cause."""

    OK = 0  # the job ran to its end
    FAILED = 1  # the training script failed (same exception at the same step twice, or at import)
    USAGE = 2  # an unknown flag or a bad argument; nothing was started
    BAD_INPUT = 3  # a typed UserError or StoreError ended the job
    UNMET = 69  # the nodes of the job did not meet in time; nothing was started (EX_UNAVAILABLE)
    INTERNAL = 70  # an invariant of Holdfast is broken
    BUDGET = 74  # more faults than the restart budget allows in its window
    REQUEUE = 75  # graceful exit, checkpoint saved: the next start continues (EX_TEMPFAIL)
    UNSAVED = 76  # asked or forced to leave, and no checkpoint could be saved (before the deadline)
    ORPHANED = 77  # a worker lost launcher and agent, sealed what it could and left
    RESTART = 78  # worker only: it leaves to be restarted; no command ends with this code
    INTERRUPTED = 130  # stopped at once by the user (second Ctrl-C)
    PIPE = 141  # the reader of the output has ended: 128 + SIGPIPE, as for any program that this signal ends


MEANING: dict[Exit, str] = {
    Exit.OK: "the job ran to its end",
    Exit.FAILED: "the training script failed",
    Exit.USAGE: "unknown flag or bad argument; nothing was started",
    Exit.BAD_INPUT: "bad input or unusable checkpoint; the error names it",
    Exit.UNMET: "the nodes of the job did not meet in time; nothing was started",
    Exit.INTERNAL: "an invariant of Holdfast is broken; please report it",
    Exit.BUDGET: "more faults than the restart budget allows",
    Exit.REQUEUE: "graceful exit, checkpoint saved; the same command continues if it saves to the same place",
    Exit.UNSAVED: "asked or forced to leave (nodes are lost for good), and no checkpoint could be saved",
    Exit.ORPHANED: "worker lost its launcher and agent, saved a checkpoint and left",
    Exit.RESTART: "internal: worker leaves to be restarted",
    Exit.INTERRUPTED: "stopped at once by the user",
    Exit.PIPE: "the process that read the output has ended",
}
