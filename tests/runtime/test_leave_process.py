"""The end of a worker process."""

from __future__ import annotations

import subprocess
import sys

TEXT = """
import sys
from holdfast.runtime.worker.worker_client import leave_process

class Logger:
    def write(self, text): sys.__stdout__.write(text)
    def flush(self): sys.__stdout__.flush()

sys.stdout = Logger()
print("the last line")
leave_process(7)
"""


def test_the_last_lines_of_a_script_with_its_own_stdout_are_flushed() -> None:
    """Regression: an ``AttributeError``, since such an object (StyleGAN's ``Logger``) has no ``closed``."""
    done = subprocess.run([sys.executable, "-c", TEXT], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (7, "the last line\n", "")
