"""What other programs save becomes a checkpoint that a session can go on from, or is refused with a next step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.adapters.torch.imports import import_checkpoint
from holdfast.cli.main import answer
from holdfast.core.ids import STEP_MAX
from holdfast.errors import UsageError
from holdfast.store.root import Root

pytestmark = pytest.mark.torch


def test_a_step_that_no_directory_can_be_named_after_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "w.pt")
    target = tmp_path / "root"
    for step in (STEP_MAX + 1, -1):
        with pytest.raises(UsageError, match="cannot be saved"):
            import_checkpoint(tmp_path / "w.pt", target, step=step)
    assert answer(["ckpt", "import", str(tmp_path / "w.pt"), str(target), "--step", str(STEP_MAX + 1)]) == 2
    assert str(STEP_MAX) in capsys.readouterr().err and not target.exists()
    import_checkpoint(tmp_path / "w.pt", target, step=STEP_MAX)
    assert Root(target).newest_valid().require().step == STEP_MAX
