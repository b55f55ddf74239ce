"""The report of an exception of the script."""

from __future__ import annotations

from holdfast.runtime.worker.user_exception import words_of


def test_an_exception_in_a_loader_worker_is_told_with_its_words() -> None:
    caught = (
        "Caught ValueError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
        '  File "/x/fetch.py", line 5, in fetch\nValueError: bad sample 20\n'
    )
    first, *rest = words_of(ValueError(caught)).splitlines()
    assert first == "Caught ValueError in DataLoader worker process 0: ValueError: bad sample 20"
    assert rest[0].startswith("Original Traceback") and rest[-1] == "ValueError: bad sample 20"
    assert words_of(ValueError("Caught a cold.\nOriginal")) == "Caught a cold.\nOriginal"
