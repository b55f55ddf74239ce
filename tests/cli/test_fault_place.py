"""The words for the place of a fault in the script."""

from __future__ import annotations

import pytest

from holdfast.cli.screen.run_summary import fault_text
from holdfast.core.protocol.status_page import Phase
from holdfast.history.run_history import FaultView


def told(phase: Phase) -> str:
    """Return the text about a rank that was killed in ``phase``."""
    return fault_text(
        FaultView(
            number=1, at=0.0, rank=2, member_id=7, kind="exit", phase=phase.name.lower(), step=1205, attempt=0,
            what="killed",
        )
    )  # fmt: skip


@pytest.mark.parametrize(
    ("phase", "text"),
    [
        (Phase.BACKWARD, "rank 2: killed, in backward of step 1,205"),
        (Phase.READY, "rank 2: killed, between two blocks, at step 1,205"),
        (Phase.LOADING, "rank 2: killed, while it drew the batch of step 1,205"),
        (Phase.IN_DOUBT, "rank 2: killed, in the vote of step 1,205, before it knew the result"),
    ],
)
def test_the_place_of_a_fault_is_said_in_words(phase: Phase, text: str) -> None:
    assert told(phase) == text


@pytest.mark.parametrize("phase", list(Phase))
def test_no_name_of_the_code_is_shown(phase: Phase) -> None:
    """Regression: ``in in_doubt of step 5``, ``in ready of step 5``."""
    assert "_" not in told(phase) and "in ready" not in told(phase)
