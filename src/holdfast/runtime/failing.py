"""An exception of user code that ends its process: the log, the error file and the controller hear of it.

Theory. It is said as soon as it is known: the session says it while the process still holds the state, and waits for a
word (``stays``), since all ranks may fall over the same thing at once, and then nobody else has it. What no session
sees is said when the script has ended.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import time
import traceback
from pathlib import Path

import msgspec

from holdfast.core.messages import TEXT_SIZE_MAX, WorkerFailed
from holdfast.errors import StoreError, UserError
from holdfast.runtime.client import Client
from holdfast.runtime.rundir import write_private

NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


def show(error: BaseException) -> None:
    """Print the traceback, and write the error file that elastic launchers read."""
    sys.excepthook(type(error), error, error.__traceback__)
    _write_error_file(f"{type(error).__name__}: {_words(error)}", _text(error))


def tell(
    client: Client, error: BaseException, what: str = "", *, stays: bool = False, between: bool = False
) -> bool:
    """Tell the controller that user code ends this process, once. Returns True for an error that the user has to fix.

    Args:
        what: in place of the exception's own text.
        stays: the process waits until it is told to go.
        between: it was raised between two steps.
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
                what=what or _words(error),
                traceback=_text(error),
                digest=digest(error),
                user_error=user_error,
                stays=stays,
                between=between,
            )
        )
    return user_error


def digest(error: BaseException) -> str:
    """Identity of an exception: type, place that raised it, and text without the numbers in it: they are those of a
    rank, a step or an address."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}:{frames[-1].name}" if frames else ""
    text = f"{type(error).__qualname__}|{NUMBER.sub('0', _words(error))}|{place}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _words(error: BaseException) -> str:
    """The text of an exception, also of one whose class cannot say it."""
    try:
        return _sendable(str(error))[:TEXT_SIZE_MAX]
    except Exception as broken:
        return f"(its text cannot be told: {type(broken).__name__})"


def _text(error: BaseException) -> str:
    return _sendable("".join(traceback.format_exception(error)))[-TEXT_SIZE_MAX:]


def _sendable(text: str) -> str:
    """As UTF-8 has it: a name of a file may be of other bytes."""
    return text.encode(errors="backslashreplace").decode()


def _write_error_file(what: str, text: str) -> None:
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or Path(path).exists():  # torch's @record was there first
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    document = msgspec.json.encode({"message": {"message": what, "extraInfo": extra}})
    try:
        write_private(Path(path), document)
    except OSError as error:
        sys.stderr.write(f"holdfast: cannot write the error file {path}: {error.strerror}\n")
