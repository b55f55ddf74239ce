"""Whose a file or directory is: what another user could have put there is not used."""

from __future__ import annotations

import os
import pwd
import stat
import tempfile
from collections.abc import Iterable
from pathlib import Path


def ours(directory: Path) -> frozenset[int]:
    """The user ids that files of this process have in ``directory``: a network file system may give another one."""
    uids = {os.geteuid()}
    try:
        with tempfile.TemporaryFile(dir=directory) as probe:
            uids.add(os.fstat(probe.fileno()).st_uid)
    except OSError:  # it cannot be written: nothing here is of this process
        pass
    return frozenset(uids)


def is_ours(path: Path) -> bool:
    """No link, and made by this user. Raises: FileNotFoundError."""
    about = path.lstat()
    return not stat.S_ISLNK(about.st_mode) and about.st_uid in ours(path.parent)


def doubt(path: Path) -> str:
    """Why ``path`` may be somebody else's, in words that follow its name; empty: it is this user's alone.

    Raises:
        FileNotFoundError: there is none.
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
    """Which of ``names`` in ``root`` another user has made, while every user can make some there: why, by name."""
    try:
        if not root.stat().st_mode & stat.S_IWOTH:
            return {}
    except OSError:  # what lies there cannot be read either
        return {}
    known, found = ours(root) | {0}, {}
    for name in names:
        try:
            uid = (root / name).lstat().st_uid
        except FileNotFoundError:  # removed meanwhile
            continue
        if uid not in known:
            found[name] = f"it belongs to {user(uid)}, and every user can write in {root}"
    return found


def user(uid: int) -> str:
    """The name of a user, or what stands for it."""
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user id {uid}"
