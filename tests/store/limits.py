"""What the machine refuses to a test, really."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def no_threads() -> Iterator[None]:
    """No thread can be started: no address space is left for a stack as large as all of it."""
    old = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(old)
