"""A replacement gets the objects that ranks exchanged before the training, also if its rank has sent them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.session.launch import run_undisturbed_and_killed

JOB = str(Path(__file__).with_name("sent_objects_job.py"))


@pytest.mark.torch
@pytest.mark.processes
@pytest.mark.parametrize("flags", [(), ("--spares", "1")])
def test_the_replacement_of_a_rank_that_sends_objects_uses_those_that_it_sent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Regression: it drew others and used them alone, and the weights differed without a word."""
    run_undisturbed_and_killed(tmp_path, monkeypatch, "0:3,1:5", *flags, JOB)
