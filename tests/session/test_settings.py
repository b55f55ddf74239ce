"""Arguments of the wrong type: one clear error in the call, and no thread that dies at the first save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import UsageError
from holdfast.store.manage.checkpoint_root import Root
from tests.session.test_solo import Job

pytestmark = pytest.mark.torch

WRONG: tuple[tuple[str, object, str], ...] = (
    ("keep", None, "not a policy"),
    ("keep", 1.5, "not a policy"),
    ("keep", "3", "not a policy"),
    ("keep", True, "not a policy"),
    ("keep", 0, "at least the newest"),
    ("copies", 2.0, "not a whole number"),
    ("copies", 0, "must be 1 or more"),
    ("save_every_steps", "5", "not a whole number"),
    ("save_every_s", "x", "not a number of seconds"),
    ("save_every_s", 0, "must be above 0"),
    ("save_every_s", float("nan"), "must be above 0"),
    ("grace_s", [1], "not a number of seconds"),
    ("grace_s", -1, "must be 0 or more"),
    ("memory", 0.5, "not a whole number"),
    ("memory", -1, "must be 0 or more"),
    ("seed", "x", "not a whole number"),
    ("checkpoint", 5, "neither text nor a path"),
    ("checkpoint", b"ckpts", "neither text nor a path"),
    ("exit_file", 1, "neither text nor a path"),
    ("state", [1], "not a dict of named objects"),
    ("resume", None, "neither text nor a path"),
)


@pytest.mark.parametrize(("name", "value", "why"), WRONG)
def test_a_wrong_argument_is_named(name: str, value: object, why: str) -> None:
    arguments: dict[str, Any] = {"model": nn.Linear(1, 1), "optimizer": None, name: value}
    with pytest.raises(UsageError) as refused:
        holdfast.session(**arguments)
    assert refused.value.message.startswith(f"session({name}=") and why in refused.value.message
    assert refused.value.hint


def test_numbers_of_any_type_and_paths_are_taken(tmp_path: Path) -> None:
    job = Job()
    with job.session(
        checkpoint=tmp_path, keep=np.int64(1), save_every_s=np.float32(60), memory=0, grace_s=0, resume="auto"
    ) as s:
        job.loop(s, 2)
    assert [v.step for v in Root(tmp_path).list()] == [2]
    assert holdfast.load(tmp_path, Job().net, optional=[]).step == 2


@pytest.mark.parametrize("optional", [[2], None, "head.*", 5, {"a": 1, 2: 3}])
def test_wrong_patterns_are_named(tmp_path: Path, optional: Any) -> None:
    with pytest.raises(UsageError, match="not a list of texts"):
        holdfast.load(tmp_path, nn.Linear(1, 1), optional=optional)


def test_what_is_no_path_cannot_be_loaded() -> None:
    wrong: Any = 5
    with pytest.raises(UsageError, match="5: neither text nor a path"):
        holdfast.load(wrong, nn.Linear(1, 1))


def test_an_error_beside_a_good_save_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("an unforeseen error")

    monkeypatch.setattr(Root, "prune", broken)
    with caplog.at_level(logging.ERROR, "holdfast"):
        job = Job()
        assert job.train(6, checkpoint=tmp_path, save=2) == list(range(6))
    assert "old checkpoints stay" in caplog.text and "an unforeseen error" in caplog.text
    assert Root(tmp_path).newest_valid().require().step == 6
    assert all(torch.isfinite(each).all() for each in job.tensors())
