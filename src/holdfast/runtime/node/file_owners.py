"""Tests of the owner of a file or directory. Holdfast uses no file that another user could have made."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def ours(directory: Path) -> frozenset[int]:
    """Return the user ids that files of this process can have in ``directory``.

    A network file system may map the user id of this process to another one.
    """
    uids = {os.geteuid()}
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            uids.add(os.fstat(probe.fileno()).st_uid)
    except OSError:  # not writable: no file here is of this process
        pass
    return frozenset(uids)


def is_ours(path: Path) -> bool:
    """Return True if ``path`` belongs to this user and is not a symbolic link. Raises: FileNotFoundError."""
    about = path.lstat()
    return not stat.S_ISLNK(about.st_mode) and about.st_uid in ours(path.parent)


def doubt(path: Path) -> str:
    """Return why another user may own or change ``path``; empty if no other user can.

    In a message the text follows the path.

    Raises:
        FileNotFoundError: there is no such path.
    """
    about = path.lstat()
    if stat.S_ISLNK(about.st_mode):
        return "is a link"
    if about.st_uid not in ours(path.parent):
        return f"belongs to {user(about.st_uid)}"
    if about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"can be written by others (mode {stat.S_IMODE(about.st_mode):o})"
    return ""


def planted(root: Path, names: Iterable[str]) -> dict[str, str]:
    """Return the names of entries of directory ``root`` that another user has made, each with the reason to refuse it.

    Only entries with a name in ``names`` are checked. If not every user can write in ``root``, the result is empty.
    """
    try:
        if not root.stat().st_mode & stat.S_IWOTH:
            return {}
    except OSError:  # the files in it cannot be read either
        return {}
    known, found = ours(root) | {0}, {}
    for name in names:
        try:
            uid = (root / name).lstat().st_uid
        except FileNotFoundError:  # removed in the meantime
            continue
        if uid not in known:
            found[name] = f"it belongs to {user(uid)}, and every user can write in {root}"
    return found


def user(uid: int) -> str:
    """Return words that name a user in a message: with the user name, or with the id if there is no name."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user id {uid}"
