"""The report of an exception that user code raised and that ends the process.

The report is written to the log and the error file, and is sent to the controller.

Theory. The exception is reported as soon as it is known. A session that sees the exception reports it while the
process still holds the state. The process then waits for the order to leave, because the same error may hit all ranks
at once, and then no other process has the state. An exception that no session sees is reported when the script has
ended.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import sys
import time
import traceback
from pathlib import Path

import msgspec

from holdfast.core.protocol.messages import TEXT_SIZE_MAX, WorkerFailed
from holdfast.errors import FaultError, StoreError, UserError
from holdfast.exit_codes import Exit
from holdfast.runtime.node.rundir import write_private
from holdfast.runtime.node.traceback_folding import is_own_mistake, without_own_frames
from holdfast.runtime.worker.worker_client import WorkerClient

FENCE_WAIT_S = 5.0
"""Seconds to wait for the fence after a peer was lost. It takes milliseconds, but up to 3 s if a node was lost."""
POLL_S = 0.005
_CAUGHT = re.compile(r"(Caught \S+ in [^\n]*)\.\nOriginal Traceback ")
NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def show(error: BaseException) -> None:
    """Print the traceback, with frames of Holdfast folded, and write the error file that elastic launchers read.

    Of a ``SystemExit`` print what Python prints: its text, if it has one.
    """
    if isinstance(error, SystemExit):
        if not isinstance(error.code, int | None):
            sys.stderr.write(f"{error.code}\n")
        return
    printed = io.StringIO()
    with contextlib.redirect_stderr(
        printed
    ):  # torch's hook adds the rank to each line; a hook of the script may do more
        sys.excepthook(type(error), error, error.__traceback__)
    text = printed.getvalue()
    sys.stderr.write(text if is_own_mistake(error) else without_own_frames(text))
    _write_error_file(f"{type(error).__name__}: {words_of(error)}", _text(error))


def follows(client: WorkerClient, error: BaseException) -> bool:
    """Return True if the exception is only the effect of another rank's loss, and this rank is fenced.

    If the exception may be such an effect, wait for the fence for at most ``FENCE_WAIT_S`` seconds.
    """
    if not lost_peer(error):
        return False
    deadline_s = time.monotonic() + FENCE_WAIT_S
    while not (client.fenced or client.orphaned) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    return client.fenced


def show_following(client: WorkerClient, error: BaseException) -> None:
    """Print one line about an exception that is only the effect of another rank's loss.

    A traceback here would hide the traceback of the failed rank. The error file has the full traceback.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[0].filename}:{frames[0].lineno})" if frames else ""
    sys.stderr.write(f"holdfast: rank {client.rank} follows a fault{place}: {client.fence_reason}\n")
    _write_error_file(f"{type(error).__name__}: {words_of(error)}", _text(error))


def lost_peer(error: BaseException | None) -> bool:
    """Return True if ``error`` or an earlier exception in its chain is a ``FaultError``, or names ``PeerLost``.

    torch turns an error in a callback of autograd into an exception that has only the text of the error.
    """
    while error is not None:
        if isinstance(error, FaultError) or "PeerLost: " in words_of(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def tell(
    client: WorkerClient, error: BaseException, what: str = "", *, stays: bool = False, between: bool = False
) -> bool:
    """Report to the controller, once per exception, that user code ends this process.

    Return True for an error that the user has to fix (``UserError`` or ``StoreError``).

    Args:
        what: the text to report; if empty, the text of the exception is reported.
        stays: True if the process waits until it is ordered to leave.
        between: True if the exception was raised between two steps.
    """
    user_error = isinstance(error, UserError | StoreError)
    if client.failed is not error:
        client.failed = error
        client.send(
            WorkerFailed(
                member_id=client.member_id,
                generation=client.generation,
                step=client.page.state()[0],
                kind=type(error).__name__,
                what=what or words_of(error),
                traceback=_text(error),
                digest=digest(error),
                user_error=user_error,
                stays=stays,
                between=between,
            )
        )
    return user_error


def exit_code(error: SystemExit) -> int:
    """Return the exit code of ``sys.exit()``: 0 without an argument, 1 for a text, as in Python."""
    return (error.code or 0) if isinstance(error.code, int | None) else int(Exit.FAILED)


def words_of_exit(error: SystemExit, where: str) -> str:
    """Return the report of a call of ``sys.exit()``: its exit code, ``where``, and its line in the script."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f", {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"exit code {exit_code(error)} {where}{place}"


def digest(error: BaseException) -> str:
    """Return a digest that identifies an exception: its type, the line that raised it, and its text.

    Numbers in the text are left out, because they may be a rank, a step or an address.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}:{frames[-1].name}" if frames else ""
    text = f"{type(error).__qualname__}|{NUMBER.sub('0', words_of(error))}|{place}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def words_of(error: BaseException) -> str:
    """Return the text of an exception, at most ``TEXT_SIZE_MAX`` characters; a replacement if its ``__str__`` fails."""
    try:
        return _with_cause(_sendable(str(error)))[:TEXT_SIZE_MAX]
    except Exception as broken:
        return f"(its text cannot be read: {type(broken).__name__})"


def _with_cause(text: str) -> str:
    """Return the text of an error, with the name of the original exception in the first line.

    Some errors of torch are about an exception that torch has caught. The first line of such a text has only the place
    where torch caught the exception, and the last line names the exception. So the last line is repeated in the first
    one. Other texts are returned unchanged.
    """
    caught = _CAUGHT.match(text)
    return (
        f"{caught[1]}: {text.rstrip().rpartition(chr(10))[2]}{text[caught.end(1) + 1 :]}" if caught else text
    )


def _text(error: BaseException) -> str:
    return _sendable("".join(traceback.format_exception(error)))[-TEXT_SIZE_MAX:]


def _sendable(text: str) -> str:
    """Return ``text`` as valid UTF-8, with other bytes (for example of a file name) escaped."""
    return text.encode(errors="backslashreplace").decode()


def _write_error_file(what: str, text: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or Path(path).exists():  # torch's @record has written it before
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    document = msgspec.json.encode({"message": {"message": what, "extraInfo": extra}})
    try:
        write_private(Path(path), document)
    except OSError as error:
        sys.stderr.write(f"holdfast: cannot write the error file {path}: {error.strerror}\n")
