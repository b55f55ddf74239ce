"""A note about flags of ``holdfast run`` that are on the command line after the script, perhaps by mistake."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from holdfast.cli.start.flags import FLAGS

SOURCE_SIZE_BYTES_MAX = 1 << 20
LAUNCHING = frozenset({
    "nproc_per_node", "nnodes", "node_rank", "max_restarts", "rdzv_endpoint", "rdzv_backend", "rdzv_id", "master_addr",
    "master_port", "memory_every", "shrink_to", "hang_factor",
})  # fmt: skip
"""Keys of flags of the launcher that few scripts have as flags of their own."""


def misplaced(script: str, args: Sequence[str]) -> str:
    """Return a note about flags of ``holdfast run`` among the arguments of a script; empty if there are none.

    A flag whose name is in the source text of the script is not noted: it is probably the script's own flag.

    Args:
        script: path of a file or program, or name of a module.
        args: the arguments of the script.
    """
    names = {spelling: flag.name for flag in FLAGS if flag.key in LAUNCHING for spelling in flag.spellings}
    words = [word.partition("=")[0] for word in (args[: args.index("--")] if "--" in args else args)]
    found = list(dict.fromkeys(names[word] for word in words if word in names))
    own = _source(script) if found else ""
    strange = [name for name in found if name[2:].replace("-", "_") not in own.replace("-", "_")]
    if not strange:
        return ""
    verb = "stands" if len(strange) == 1 else "stand"
    return f"{', '.join(strange)} {verb} behind the script, so the script gets it: flags of holdfast run come before it"


def _source(script: str) -> str:
    try:
        with Path(script).open(encoding="utf-8", errors="replace") as file:
            return file.read(SOURCE_SIZE_BYTES_MAX)
    except OSError:  # a module or a program
        return ""
