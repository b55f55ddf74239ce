"""Misspelled arguments: one error that suggests the right name, and one fault of the run."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
from torch import nn

import holdfast
from holdfast import event_log
from holdfast.errors import UsageError
from holdfast.session.api import open_session
from holdfast.session.arguments import checked
from holdfast.session.settings import FACE_OPTIONS, SessionOptions, SessionSettings
from tests.session.launch import run_job

pytestmark = pytest.mark.torch

SCRIPT = """\
import sys, torch, torch.distributed as dist, holdfast
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
key, _, value = sys.argv[1].partition("=")
with holdfast.session(model=model, optimizer=optimizer, **{key: value}) as s:
    pass
"""


def parts() -> dict[str, Any]:
    """Return the arguments that every session needs."""
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"checkpiont": "x"}, "holdfast.session() has no argument 'checkpiont'; did you mean checkpoint?"),
        ({"save_every": 5}, "did you mean save_every_s?"),
        ({"zzz": 5}, "has no argument 'zzz'"),
    ],
)
def test_a_misspelled_argument_is_answered_with_the_right_one(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as caught:
        holdfast.session(**parts(), **wrong)
    assert says in caught.value.message and "model, optimizer, scheduler" in caught.value.hint


class NativeScaler:
    """timm's scaler: an object that holds a ``GradScaler``."""

    def __init__(self) -> None:
        self._scaler = torch.amp.GradScaler("cpu")

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the state."""
        self._scaler.load_state_dict(state)


def test_an_object_around_a_scaler_is_answered_with_the_one_inside() -> None:
    """Regression: a private attribute of GradScaler was missing at the first step, where the run ended."""
    with (
        pytest.raises(UsageError, match="scaler is a NativeScaler, and not a GradScaler") as caught,
        holdfast.session(**parts(), scaler=NativeScaler()),
    ):
        pass
    assert caught.value.hint == "scaler=scaler._scaler, the one inside; anything else goes into state={...}"


def test_arguments_that_are_missing_or_have_no_name() -> None:
    made: Any = holdfast.session
    with pytest.raises(UsageError, match=r"missing a required .*argument: 'optimizer'") as caught:
        made(model=nn.Linear(2, 2))
    assert caught.value.hint == "holdfast.session(model=..., optimizer=...)"
    with pytest.raises(UsageError, match="too many positional arguments"):
        made(*parts().values())
    load: Any = holdfast.load
    with pytest.raises(UsageError, match=r"holdfast.load\(\) has no argument 'strct'; did you mean strict\?"):
        load("x", nn.Linear(2, 2), strct=False)


def test_a_face_of_another_framework_shows_and_checks_the_arguments_of_a_session() -> None:
    @checked("face.session", FACE_OPTIONS)
    def session(model: Any, *, slices: int = 0, **options: Unpack[SessionOptions]) -> SessionSettings:
        return SessionSettings(**options)

    whole = inspect.signature(open_session).parameters
    shown = inspect.signature(session).parameters
    assert list(shown) == ["model", "slices", *SessionOptions.__annotations__]
    for name in SessionOptions.__annotations__:
        assert shown[name].default == whole[name].default, name
        assert re.search(rf"\b{name}\b", open_session.__doc__ or ""), name
    assert session(nn.Linear(2, 2), seed=3).seed == 3
    made: Any = session
    with pytest.raises(
        UsageError, match=r"face.session\(\) has no argument 'checkpiont'; did you mean checkpoint\?"
    ):
        made(nn.Linear(2, 2), checkpiont="x")


def test_a_misspelled_word_for_resume_is_answered_with_the_right_one(tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="resume='atuo': atuo does not exist") as caught,
        holdfast.session(**parts(), checkpoint=tmp_path, resume="atuo"),
    ):
        pass
    assert caught.value.hint.startswith("did you mean resume='auto'? Else name a checkpoint directory")
    with (
        pytest.raises(UsageError, match="resume='somewhere': somewhere does not exist") as caught,
        holdfast.session(**parts(), checkpoint=tmp_path, resume="somewhere"),
    ):
        pass
    assert caught.value.hint.startswith("resume='auto', 'never', or name a checkpoint directory")


@pytest.mark.processes
@pytest.mark.parametrize("words", ["checkpiont=x", pytest.param("resume=atuo", marks=pytest.mark.more)])
def test_a_typing_error_ends_the_run_at_once(tmp_path: Path, words: str) -> None:
    """Regression: a misspelled argument counted as a crash of each rank, and the run was restarted once."""
    (tmp_path / "train.py").write_text(SCRIPT)
    done = run_job(tmp_path, 2, "--run-id", "it", "train.py", words)
    assert done.returncode == 3 and "did you mean" in done.stdout, done.stdout
    frames = re.findall(
        r'^(?:\[rank\d\]: |\[rank \d\] )?  (?:File "(\S+)"|\.\.\. \d frames of Holdfast)', done.stdout, re.M
    )
    assert frames == [str(tmp_path / "train.py"), ""] * (len(frames) // 2) and frames, done.stdout
    assert not re.search(r"\[rank 1\] \[rank1\]", done.stdout), done.stdout
    events = event_log.read(tmp_path / "runs/it/events.jsonl").events
    kinds = [e.kind for e in events]
    assert kinds.count("verdict") == 1 and kinds.count("member_started") == 2
