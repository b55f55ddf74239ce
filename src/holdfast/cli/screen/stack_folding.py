"""Python stacks for a reader: the main thread first, and threads and frames of Holdfast replaced by one line."""

from __future__ import annotations

from holdfast.runtime.node.stack_texts import FRAME, INNER, MAIN
from holdfast.runtime.node.traceback_folding import OWN, without_own_frames
from holdfast.text import plural


def folded(stacks: str) -> str:
    """Return the stacks of one process for a reader: main thread first, then threads with frames of the user.

    ``stacks`` is the output of ``faulthandler``. Threads and frames of Holdfast are replaced by one line.
    """
    blocks = [block for block in stacks.strip("\n").split("\n\n") if block.strip()]
    blocks.sort(key=lambda block: (MAIN not in block, not _has_user_frame(block)))
    shown = [block for block in blocks if MAIN in block or not _is_own(block)]
    text = "\n\n".join(without_own_frames(block) for block in shown)
    hidden = len(blocks) - len(shown)
    note = f"({plural(hidden, 'thread')} of Holdfast: --all)" if hidden else ""
    return "\n\n".join(filter(None, (text, note))) + "\n"


def _files(block: str) -> list[str]:
    return [match["file"] for match in FRAME.finditer(block)]


def _has_user_frame(block: str) -> bool:
    return any(not any(inner in file for inner in INNER) for file in _files(block))


def _is_own(block: str) -> bool:
    return not _has_user_frame(block) and any(file.startswith(OWN) for file in _files(block))
