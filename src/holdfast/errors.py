"""The errors that Holdfast raises on purpose.

Tree::

    HoldfastError
    ├── UserError                   you can fix it: wrong argument, script, path or state
    │   ├── UsageError              a flag or argument that cannot work, named with the reason
    │   ├── ScriptError             the training script is missing or cannot be started
    │   │   └── FrameworkError      an installed framework cannot be loaded (an ImportError, too)
    │   ├── DataError               a loader gives another batch than before at the same position
    │   ├── StateError              an object in the state cannot be saved or restored
    │   ├── StepError               the step protocol was misused (two unnamed updates in one block, ...)
    │   │   ├── ImpureBlockError    a block computes another result when it runs again
    │   │   └── UnmatchedCollectiveError    a replacement makes other collectives between two steps than the other ranks
    │   ├── NonFiniteError          gradients hold inf or nan, and the session was asked to stop then
    │   ├── EmptyLoaderError        the loader yields no batch
    │   ├── UnequalBatchesError     the ranks have different numbers of batches
    │   └── UnsupportedError        a feature, optimizer or framework version that Holdfast refuses
    ├── FaultError                  the job was disturbed
    │   ├── ComputeError            a rank computes another result than others from the same numbers
    │   ├── PeerLost                a collective outside a step lost its peer
    │   ├── GroupError              a process group could not be built
    │   ├── JobError                a job that this process has started ended with another code than 0 (``code``)
    │   │   └── JobSaved            such a job saved and ended with 75: another call continues it
    │   └── NotMet                  the nodes of the job did not meet in time
    ├── ProtocolError               a frame or message that breaks the protocol
    │   └── AuthError               the token handshake failed
    ├── StoreError                  checkpoint files
    │   ├── CheckpointInvalid       files that are incomplete, or have wrong bytes, or belong to another save
    │   ├── CheckpointMismatch      valid files of another model: names, shapes, dtypes
    │   ├── NothingToResume         a checkpoint was asked for and none is valid
    │   ├── StoreUnreachable        a store that cannot be asked (network, credentials): nothing is known of its files
    │   │   └── StoreDenied         files that this process may not read (owner, mode)
    │   └── StoreWriteError         the store could not be written (full, read-only, not a directory)
    └── InternalError               an invariant of Holdfast is broken: please report it

Every message says what was wrong and where. The attribute ``hint`` has the next command or change; the command line
prints it on its own line, after the log path.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Values of ``OSError.errno`` for a full disk or quota."""
HINTS_OF_THE_MACHINE = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM),
        "run as the user whose file it is, or let this one read it: chown, or chmod",
    ),
    **dict.fromkeys(NO_ROOM, "make room: df -h"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "ulimit -n 4096"),
    **dict.fromkeys((errno.EAGAIN, errno.ENOMEM), "see what is used up: ulimit -a, free -m"),
    **dict.fromkeys(
        (errno.EROFS, errno.EIO, errno.ESTALE), "see what is mounted there, and whether it answers"
    ),
}
"""Hints by ``OSError.errno``, for errors whose cause is the machine or its settings, not a defect of a program."""


class HoldfastError(Exception):
    """The base of all errors that Holdfast raises.

    Args:
        message: what was wrong and where, one or a few lines.
        hint: what to do next (a command or a change), or empty.
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message


@contextlib.contextmanager
def hinted(kind: type[HoldfastError], hint: str) -> Iterator[None]:
    """Set ``hint`` on each error of class ``kind`` that leaves the ``with`` body without a hint."""
    try:
        yield
    except kind as error:
        error.hint = error.hint or hint
        raise


class UserError(HoldfastError):
    """An error that the user can fix."""


class UsageError(UserError):
    """The error for a flag or argument that cannot work."""


class ScriptError(UserError):
    """The error for a training script that is missing or cannot be started."""


class FrameworkError(ScriptError, ImportError):
    """The error for an installed framework that cannot be loaded.

    It is also an ImportError, so a script can catch it with ``except ImportError``.
    """


class DataError(UserError):
    """The error for a loader that gives a different batch than before at the same position."""


class StateError(UserError):
    """The error for an object in the training state that cannot be saved or restored."""


class NonFiniteError(UserError):
    """The error for gradients that hold inf or nan, with ``session(nonfinite="stop")``."""


class StepError(UserError):
    """The error for a misuse of the step protocol, such as two unnamed updates in one block."""


class ImpureBlockError(StepError):
    """The error for a block that computes another result when it runs again on the same state and batch.

    Recovery runs a block again, so no fault in such a block could be repaired.
    """


class UnmatchedCollectiveError(StepError):
    """The error for a script whose collectives between two steps depend on variables that a replacement does not have.

    Each replacement would be lost like the one before it. The controller ends the run with this error.
    """


class EmptyLoaderError(UserError):
    """The error for a loader that yields no batch."""


class UnequalBatchesError(UserError):
    """The error for ranks with different numbers of batches: one loop over steps ends before those of other ranks.

    The controller ends the run with this error.
    """


class UnsupportedError(UserError):
    """The error for a feature, optimizer or version that Holdfast refuses. The message names it and the reason."""


class FaultError(HoldfastError):
    """The base of errors for faults that disturb the job."""


class ComputeError(FaultError):
    """The error for a rank that computes another result than other ranks from the same numbers.

    The device of this rank may be defective.
    """


class PeerLost(FaultError):
    """The error of a collective that lost a peer outside of a step."""


class GroupError(FaultError):
    """The error for a process group that could not be built."""


class JobError(FaultError):
    """The error for a job that this process has started on a cluster and that ended without success.

    Args:
        message: the end of the job, in words.
        code: exit code of the job (``docs/exit-codes.md``); -N if signal N has killed its launchers.
        hint: what to do next.
    """

    def __init__(self, message: str, *, code: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class JobSaved(JobError):
    """The error for a job that has saved a checkpoint and ended (code 75). A second equal call continues the job."""


class NotMet(FaultError):
    """The error for nodes of a job that did not meet in time, so that nothing was started."""


class ProtocolError(HoldfastError):
    """The error for a frame or message that breaks the protocol."""


class AuthError(ProtocolError):
    """The error for a failed token handshake."""


class StoreError(HoldfastError):
    """The base of errors about checkpoint files and their store."""


class CheckpointInvalid(StoreError):
    """The error for checkpoint files that are incomplete, damaged or of another save."""


class CheckpointMismatch(StoreError):
    """The error for valid checkpoint files of another model."""


class NothingToResume(StoreError):
    """The error when a checkpoint is requested and none is valid."""


class StoreUnreachable(StoreError):
    """The error for a store that could not be asked, so that nothing is known about its files."""


class StoreDenied(StoreUnreachable):
    """The error for files that this process may not read, so that nothing is known about them."""


class StoreWriteError(StoreError):
    """The error for a store that could not be written."""


class InternalError(HoldfastError):
    """The error for a broken invariant of Holdfast."""
