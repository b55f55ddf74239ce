"""Stacks: the user's frames come first, and Holdfast's frames are folded."""

from __future__ import annotations

from holdfast.cli.screen.stack_folding import folded
from holdfast.runtime.node.traceback_folding import OWN

OWN_THREAD = f"""Thread 0x01 (most recent call first):
  File "/usr/lib/python3.11/selectors.py", line 5 in select
  File "{OWN}runtime/worker/worker_client.py", line 10 in _serve"""
LIBRARY = """Thread 0x02 (most recent call first):
  File "/x/site-packages/torch/loader.py", line 7 in pin"""
USERS = """Thread 0x03 (most recent call first):
  File "/home/u/data.py", line 3 in fetch"""
MAIN_THREAD = f"""Stack (most recent call first):
  File "/home/u/train.py", line 20 in loss
  File "{OWN}session/steps/step.py", line 9 in block
  File "/home/u/train.py", line 30 in <module>
  File "/usr/lib/python3.11/runpy.py", line 1 in run
  File "{OWN}runtime/worker/entry.py", line 4 in main
  File "{OWN}runtime/agent/zygote.py", line 5 in fork"""


def test_the_main_thread_comes_first_and_own_threads_are_counted() -> None:
    text = folded("\n\n".join((OWN_THREAD, OWN_THREAD, LIBRARY, USERS, MAIN_THREAD)) + "\n")
    main, users, library, note = text.rstrip("\n").split("\n\n")
    assert "Stack" in main and users == USERS and library == LIBRARY
    assert note == "(2 threads of Holdfast: --all)"


def test_frames_in_a_row_are_one_line_and_one_alone_stays() -> None:
    lines = folded(MAIN_THREAD).splitlines()
    assert lines[1] == '  File "/home/u/train.py", line 20 in loss'
    assert "session/steps/step.py" in lines[2] and lines[-1] == "  ... 2 frames of Holdfast"


def test_a_main_thread_in_holdfast_alone_is_shown() -> None:
    alone = f'Stack (most recent call first):\n  File "{OWN}session/steps/voting.py", line 2 in cast'
    assert folded(alone) == alone + "\n"
