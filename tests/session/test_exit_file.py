"""The file that requests a graceful exit: each version of the file is answered once, whenever it was written."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from holdfast.exit_codes import Exit
from holdfast.store.manage.checkpoint_root import Root
from tests.session.test_solo import Job, leaving


def test_exit_file_counts_once_per_version(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, root = tmp_path / "graceful_exit.json", tmp_path / "ckpts"
    ask = json.dumps({"GracefulExit": 1})
    path.write_text(ask)
    with pytest.raises(SystemExit) as left:
        Job().train(20, exit_file=path, checkpoint=root)  # the file existed from the start
    assert left.value.code == Exit.REQUEUE
    assert Root(root).list()[0].step == 1
    with caplog.at_level(logging.INFO, "holdfast"):
        # the earlier run has answered the file
        assert len(Job().train(8, exit_file=path, checkpoint=root)) == 7
        assert caplog.text.count("was there before and has been answered: it is ignored") == 1
    caplog.clear()
    with caplog.at_level(logging.INFO, "holdfast"):  # a later save still records this
        assert len(Job().train(8, exit_file=path, checkpoint=root, resume="never")) == 8
        assert len(Job().train(9, exit_file=path, checkpoint=root)) == 1
        assert caplog.text.count("it is ignored") == 2
    os.utime(path)  # the file is written again between two runs
    with pytest.raises(SystemExit):
        Job().train(20, exit_file=path, checkpoint=root)
    assert Root(root).list()[0].step == 10
    path.unlink()
    leaving(Job(), tmp_path, lambda: path.write_text(ask), exit_file=path)
