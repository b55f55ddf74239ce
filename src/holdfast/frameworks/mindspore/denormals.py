"""The treatment of denormal numbers in the thread that calls the graph.

Theory. MindSpore executes a compiled graph in a thread of its pool or in the calling thread, and chooses between
them by measured times, run by run. The threads of its pool flush results below the smallest normal number to zero, the
calling thread does not. A moment that decays to that size then differs between two ranks that made the same updates.
So the thread of a session computes as the pool does.
"""

from __future__ import annotations

import ctypes
import platform
from typing import NamedTuple

LIBM = "libm.so.6"
ENVIRONMENT_SIZE_BYTES = 64
"""More than glibc's ``fenv_t`` has on any processor."""


class ControlWord(NamedTuple):
    """The word of ``fenv_t`` with the bit that makes small results zero.

    Attributes:
        offset: offset of the word, in bytes.
        flush: the bit.
    """

    offset: int
    flush: int


WORDS = {"x86_64": ControlWord(28, 1 << 15)}
"""By processor; others were not measured, and are left as they are."""


def flush_denormals(on: bool) -> bool:
    """Set whether results below the smallest normal number become zero in this thread.

    Args:
        on: True makes such results zero.

    Returns: the earlier setting; False on an unknown processor.

    Example:
        ``before = flush_denormals(True)``, and later ``flush_denormals(before)``.
    """
    word = WORDS.get(platform.machine())
    if word is None:
        return False
    libm = ctypes.CDLL(LIBM)
    environment = (ctypes.c_char * ENVIRONMENT_SIZE_BYTES)()
    libm.fegetenv(environment)
    control = ctypes.c_uint32.from_buffer(environment, word.offset)
    before = bool(control.value & word.flush)
    control.value = control.value | word.flush if on else control.value & ~word.flush
    libm.fesetenv(environment)
    return before
