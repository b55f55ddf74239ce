"""The treatment of denormal numbers in the thread that calls the graph.

Theory. MindSpore executes a compiled graph in a thread of its pool or in the calling thread. At each run it chooses one
of the two by measured times. The pool's threads flush results below the smallest normal number to zero; the calling
thread does not. An optimizer moment that decays to that size then differs between two ranks that made the same updates.
So the thread of a session computes as the pool does.
"""

from __future__ import annotations

import ctypes
import platform
from typing import NamedTuple

LIBM = "libm.so.6"
ENVIRONMENT_SIZE_BYTES = 64
"""A size that is larger than glibc's ``fenv_t`` on any processor."""


class ControlWord(NamedTuple):
    """The word of C's ``fenv_t`` that has the bit for flushing small results to zero.

    Attributes:
        offset: offset of the word in ``fenv_t``, in bytes.
        flush: the bit, as a mask.
    """

    offset: int
    flush: int


WORDS = {"x86_64": ControlWord(28, 1 << 15)}
"""The control word of each known processor. On other processors nothing is set."""


def flush_denormals(on: bool) -> bool:
    """Set whether results below the smallest normal number become zero in this thread.

    Args:
        on: True makes such results zero.

    Returns:
        The earlier setting; False on an unknown processor.

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
