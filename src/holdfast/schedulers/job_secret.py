"""The secret of a job whose nodes share a directory: the first node makes a file with it, the others read the file."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path

from holdfast.errors import AuthError, NotMet, UsageError
from holdfast.runtime.node.rundir import TOKEN_SIZE_BYTES

LOOK_S = 0.2


def job_token(path: Path, *, makes: bool, wait_s: float) -> None:
    """Make sure that the file of the secret exists, is complete, and belongs to this user.

    A file from an earlier start of the same job is kept: it is still secret if no other user could read it. The file
    appears complete under its name (as a link to a finished file), so no reader sees a part of it.

    Args:
        path: the file, in a directory that all nodes share.
        makes: True if this node makes the file. The other nodes wait for it.
        wait_s: time limit of the wait.

    Raises:
        UsageError: the file cannot be made here.
        AuthError: the file belongs to another user, or is not a plain file.
        NotMet: the file did not appear in time.
    """
    deadline_s = time.monotonic() + wait_s
    if makes:
        _make(path)
    while not _is_ours(path):
        if time.monotonic() > deadline_s:
            raise NotMet(
                f"no secret of the job in {path} after {wait_s:g} s: node 0 makes it there",
                hint="see the output of node 0; --run-dir has to be a directory that all hosts share, or give each "
                "host the secret with --token-file",
            )
        time.sleep(LOOK_S)


def _make(path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(fd, "w") as file:
                file.write(secrets.token_hex(TOKEN_SIZE_BYTES) + "\n")
                file.flush()
                os.fsync(file.fileno())
            with contextlib.suppress(FileExistsError):  # an earlier start of the job has made the file
                os.link(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"cannot make the secret of the job {path}: {error.strerror}",
            hint="--run-dir with a directory that all hosts share and this user can write, or --token-file",
        ) from error


def _is_ours(path: Path) -> bool:
    """Return True if the secret exists as a plain file of this user, False if it is missing.

    Raises:
        AuthError: it exists in another form, or the directory cannot be searched.
    """
    try:
        os.listdir(path.parent)  # makes a network file system ask its server again
        found = path.lstat()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise AuthError(f"cannot look for the secret of the job {path}: {error.strerror}",
                        hint="check the path and its permissions") from error  # fmt: skip
    if found.st_uid != os.geteuid() or not path.is_file() or path.is_symlink():
        raise AuthError(
            f"the secret of the job {path} is not a plain file of this user (uid {os.geteuid()}): "
            f"another one may have put it there (uid {found.st_uid})",
            hint="--run-dir with a directory that only you can write, or --token-file",
        )
    return True
