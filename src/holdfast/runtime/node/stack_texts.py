"""The stacks of a worker as text: their file, and the frames that name where the worker is."""

from __future__ import annotations

import re
from pathlib import Path

from holdfast.core.ids import MemberId
from holdfast.package import DIRECTORY
from holdfast.runtime.node.rundir import RunDir

WHERE_LENGTH_MAX = 240
FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>.+)$', re.MULTILINE)
MAIN = "Stack (most recent call first):"
INNER = ("/site-packages/", "/dist-packages/", "/lib/python", "<frozen", f"{DIRECTORY}/")


def stacks_path(run: RunDir, member_id: MemberId) -> Path:
    """Return the file for the stacks of a worker.

    It is beside the status pages, in shared memory, so that no slow disk delays the write.
    """
    return run.pages() / f"stacks-{member_id}"


def is_complete(stacks: str) -> bool:
    """Return True if ``stacks`` has at least the beginning of the main thread's stack, up to the end of a line.

    The stack arrives line by line and has no end mark.
    """
    return MAIN in stacks and stacks.endswith("\n") and bool(FRAME.search(_main(stacks)))


def _main(stacks: str) -> str:
    return stacks.partition(MAIN)[2].partition("\n\n")[0]


def where(stacks: str) -> str:
    """Return the innermost frame of the main thread and the innermost one in user code, as text; empty if unknown."""
    frames = [match.groupdict() for match in FRAME.finditer(_main(stacks))]
    if not frames:
        return ""
    text = _frame(frames[0])
    user = next((f for f in frames if not any(inner in f["file"] for inner in INNER)), None)
    if user is not None and user is not frames[0]:
        text = f"{text}, called from {_frame(user)}"
    return whole_words(text, WHERE_LENGTH_MAX)


def whole_words(text: str, length_max: int) -> str:
    """Return ``text`` cut to ``length_max`` characters, after a whole word if possible."""
    if len(text) <= length_max:
        return text
    head = text[: length_max - 3]
    return f"{head.rpartition(' ')[0] or head}..."


def _frame(frame: dict[str, str]) -> str:
    return f"{frame['name']} ({Path(frame['file']).name}:{frame['line']})"
