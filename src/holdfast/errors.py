"""Errors that Holdfast raises on purpose.

Tree::

    HoldfastError
    ├── UserError                   you can fix it: wrong argument, script, path or state
    │   ├── UsageError              a flag or argument that cannot work, named with the reason
    │   ├── ScriptError             the training script is missing or cannot be started
    │   │   └── FrameworkError      an installed framework cannot be loaded (an ImportError, too)
    │   ├── DataError               a loader gives other batches than before
    │   ├── StateError              an object in the state cannot be saved or restored
    │   ├── StepError               the step protocol was misused (two updates without a name, ...)
    │   │   └── ImpureBlockError    a block computes another result when it runs again
    │   ├── NonFiniteError          gradients hold inf or nan, and the session was asked to stop then
    │   ├── EmptyLoaderError        the loader yields no batch
    │   └── UnsupportedError        refused by name: feature, optimizer, framework version
    ├── FaultError                  the job was disturbed
    │   ├── ComputeError            a rank computes another result than others from the same numbers
    │   ├── PeerLost                a collective outside a step lost its peer
    │   ├── GroupError              a process group could not be built
    │   ├── JobError                a job that this process has started ended with another code than 0 (``code``)
    │   │   └── JobSaved            with 75: a checkpoint is saved, and the same call continues
    │   └── NotMet                  the nodes of the job did not meet in time
    ├── ProtocolError               a frame or message that breaks the protocol
    │   └── AuthError               the token handshake failed
    ├── StoreError                  checkpoint files
    │   ├── CheckpointInvalid       torn, flipped, incomplete or foreign files
    │   ├── CheckpointMismatch      valid files of another model: names, shapes, dtypes
    │   ├── NothingToResume         a checkpoint was asked for and none is valid
    │   ├── StoreUnreachable        a store that cannot be asked (network, credentials): nothing is known of its files
    │   │   └── StoreDenied         files that this process may not read (owner, mode)
    │   └── StoreWriteError         the store could not be written (full, read-only, not a directory)
    └── InternalError               an invariant of Holdfast is broken: please report it

Every message says what was wrong, where, and what to do next. ``hint`` holds the next command or change; the command
line prints it on a line of its own, after the log path.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Numbers of an ``OSError`` for a full disk or quota."""
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
"""Hints by number of an ``OSError`` whose cause is the machine or its settings, and no defect of a program."""


class HoldfastError(Exception):
    """Base of every error raised by Holdfast.

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
    """Set ``hint`` on errors of this kind that leave the block without a hint."""
    try:
        yield
    except kind as error:
        error.hint = error.hint or hint
        raise


class UserError(HoldfastError):
    """An error that the user can fix."""


class UsageError(UserError):
    """A flag or argument that cannot work."""


class ScriptError(UserError):
    """The training script is missing or cannot be started."""


class FrameworkError(ScriptError, ImportError):
    """An installed framework cannot be loaded. It is also an ImportError, so that a script may catch it as such."""


class DataError(UserError):
    """A loader gives another batch at the same place than it gave before."""


class StateError(UserError):
    """An object in the training state cannot be saved or restored."""


class NonFiniteError(UserError):
    """Gradients hold inf or nan, with ``session(nonfinite="stop")``."""


class StepError(UserError):
    """The step protocol was misused."""


class ImpureBlockError(StepError):
    """A block computes another result when it runs again on the same state and batch, so no fault could be repaired."""


class EmptyLoaderError(UserError):
    """The loader yields no batch."""


class UnsupportedError(UserError):
    """A feature, optimizer or version is refused by name, with the reason."""


class FaultError(HoldfastError):
    """The job was disturbed."""


class ComputeError(FaultError):
    """This rank computes another result than other ranks from the same numbers; its device may be defective."""


class PeerLost(FaultError):
    """A collective outside a step lost its peer."""


class GroupError(FaultError):
    """A process group could not be built."""


class JobError(FaultError):
    """A job that this process has started on a cluster ended without success.

    Args:
        message: the end of the job, in words.
        code: its exit code (``docs/exit-codes.md``); minus the signal's number if a signal has killed its launchers.
        hint: what to do next.
    """

    def __init__(self, message: str, *, code: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.code = code


class JobSaved(JobError):
    """The job has saved a checkpoint and left (code 75): the same call continues at the next step."""


class NotMet(FaultError):
    """The nodes of the job did not meet in time: nothing was started."""


class ProtocolError(HoldfastError):
    """A frame or message breaks the protocol."""


class AuthError(ProtocolError):
    """The token handshake failed."""


class StoreError(HoldfastError):
    """Something is wrong with checkpoint files."""


class CheckpointInvalid(StoreError):
    """Checkpoint files are torn, flipped, incomplete or foreign."""


class CheckpointMismatch(StoreError):
    """Valid checkpoint files belong to another model."""


class NothingToResume(StoreError):
    """A checkpoint was asked for, and none is valid."""


class StoreUnreachable(StoreError):
    """The store could not be asked, so nothing is known about its files."""


class StoreDenied(StoreUnreachable):
    """This process may not read these files, so nothing is known about them."""


class StoreWriteError(StoreError):
    """The store could not be written."""


class InternalError(HoldfastError):
    """An invariant of Holdfast is broken."""
